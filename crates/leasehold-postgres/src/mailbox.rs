//! Whether a client polls the table of pushes, and how often.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::{Command, Reply};
use tokio::sync::Notify;

use super::limits::{
    PUSH_READ_PAUSE_HOLDING, PUSH_READ_PAUSE_WAITING, PUSH_READS_AFTER_POLLING, WAITING_FOR,
};

/// Whether the client polls the table of pushes, and how often.
#[derive(Default)]
pub(super) struct Mailbox {
    /// The client gets no notifications. Its queue entries say so.
    polls: AtomicBool,
    expected: Mutex<Expected>,
    /// There may be more to look for than before.
    pub(super) more: Notify,
}

/// What pushes are expected for.
#[derive(Default)]
struct Expected {
    /// The highest sequence number of an attempt that was queued.
    newest: u64,
    /// When the store last said that an attempt is queued: each one asks at least once in [`WAITING_FOR`].
    queued: Option<Instant>,
    /// Until when a lease that the store has granted or renewed may last.
    held_until: Option<Instant>,
    /// When the client began to listen again.
    listens_since: Option<Instant>,
    /// When the server that the pushes come from was started.
    server: Option<String>,
}

impl Mailbox {
    pub(super) fn new(polls: bool) -> Arc<Self> {
        Arc::new(Self { polls: AtomicBool::new(polls), ..Self::default() })
    }

    pub(super) fn polls(&self) -> bool {
        self.polls.load(Ordering::Relaxed)
    }

    /// A client that listens again goes on looking for a while: queue entries say that it does not listen until it has asked again for
    /// each, and a push to a holder may have been left before.
    pub(super) fn set_polls(&self, polls: bool) {
        self.polls.store(polls, Ordering::Relaxed);
        self.expected().listens_since = (!polls).then(Instant::now);
        self.more.notify_one();
    }

    fn expected(&self) -> MutexGuard<'_, Expected> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what an answer makes the client expect.
    pub(super) fn note(&self, command: &Command, reply: &Reply) {
        let now = Instant::now();
        match (command, reply) {
            (Command::Acquire(acquire), Reply::Queued(_)) => {
                let mut expected = self.expected();
                let before = expected.queued.replace(now);
                // The numbers of attempts with an inbox are not this client's, and have no order.
                let is_new = acquire.inbox.is_none() && acquire.acquisition.sequence > expected.newest;
                if is_new {
                    expected.newest = acquire.acquisition.sequence;
                }
                // After a disturbance a waiter may be the first to ask again.
                if is_new || !is_recent(before, WAITING_FOR, now) {
                    self.more.notify_one();
                }
            }
            (Command::Acquire(acquire), Reply::Granted(_)) => self.note_lease(now, acquire.ttl),
            (Command::Renew(renew), Reply::Renewed { .. }) => self.note_lease(now, renew.ttl),
            _ => {}
        }
    }

    /// A lease is looked after as long as it may last, however seldom it is renewed.
    fn note_lease(&self, now: Instant, ttl: Duration) {
        let until = now.checked_add(ttl).unwrap_or(now);
        let mut expected = self.expected();
        let before = expected.held_until;
        expected.held_until = before.max(Some(until));
        if before.is_none_or(|before| before <= now) {
            self.more.notify_one();
        }
    }

    /// Notes the server that the pushes come from. Returns whether it is another one than before, so that its clock is another one too.
    pub(super) fn note_server(&self, server: &str) -> bool {
        let mut expected = self.expected();
        if expected.server.as_deref() == Some(server) {
            return false;
        }
        expected.server.replace(server.to_owned()).is_some()
    }

    /// The longest pause between two looks; `None` while no push is expected.
    pub(super) fn longest_pause(&self) -> Option<Duration> {
        self.longest_pause_at(Instant::now())
    }

    fn longest_pause_at(&self, now: Instant) -> Option<Duration> {
        let expected = self.expected();
        if !self.polls() && !is_recent(expected.listens_since, PUSH_READS_AFTER_POLLING, now) {
            return None;
        }
        if is_recent(expected.queued, WAITING_FOR, now) {
            return Some(PUSH_READ_PAUSE_WAITING);
        }
        expected.held_until.is_some_and(|until| now < until).then_some(PUSH_READ_PAUSE_HOLDING)
    }
}

fn is_recent(at: Option<Instant>, within: Duration, now: Instant) -> bool {
    at.is_some_and(|at| now.saturating_duration_since(at) < within)
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Acquisition, ClientId, Queued, Renew, StoreTime};

    use super::*;

    const CLIENT: ClientId = ClientId::new(1);

    fn acquire() -> Command {
        let acquisition = Acquisition { client: CLIENT, sequence: 1 };
        Command::Acquire(Acquire::exclusive(acquisition, Duration::from_secs(9)).into())
    }

    fn queued() -> Reply {
        Reply::Queued(Queued { is_head: false, repoll_at: StoreTime::NEVER })
    }

    #[test]
    fn holder_of_a_long_lease_looks_for_mail_as_long_as_it_lasts() {
        let mailbox = Mailbox::new(true);
        let ttl = Duration::from_secs(3600);
        let acquisition = Acquisition { client: CLIENT, sequence: 1 };
        let renew = Command::Renew(Renew::to(acquisition, ttl));
        mailbox.note(&renew, &Reply::Renewed { valid_for: ttl, tokens: None, contended: false });
        let after = |seconds| mailbox.longest_pause_at(Instant::now() + Duration::from_secs(seconds));
        // It is renewed every 20 minutes.
        assert_eq!([after(0), after(62), after(1_300)], [Some(PUSH_READ_PAUSE_HOLDING); 3]);
        assert_eq!(after(3_601), None);
    }

    #[test]
    fn client_that_listens_again_looks_for_the_mail_that_was_left_before() {
        let mailbox = Mailbox::new(false);
        mailbox.note(&acquire(), &queued());
        assert_eq!(mailbox.longest_pause(), None);
        mailbox.set_polls(true);
        mailbox.set_polls(false);
        assert_eq!(mailbox.longest_pause(), Some(PUSH_READ_PAUSE_WAITING));
        let later = Instant::now() + PUSH_READS_AFTER_POLLING;
        assert_eq!(mailbox.longest_pause_at(later), None);
    }

    #[test]
    fn another_server_behind_the_same_pooler_is_noticed() {
        let mailbox = Mailbox::new(true);
        assert_eq!(
            ["1", "1", "2", "2"].map(|server| mailbox.note_server(server)),
            [false, false, true, false]
        );
    }

    #[tokio::test]
    async fn waiter_that_asks_again_after_a_disturbance_makes_the_client_look_for_mail() {
        let mailbox = Mailbox::new(true);
        mailbox.note(&acquire(), &queued());
        mailbox.more.notified().await;
        assert_eq!(mailbox.longest_pause(), Some(PUSH_READ_PAUSE_WAITING));
        // The store has not answered for a while.
        mailbox.expected().queued = None;
        assert_eq!(mailbox.longest_pause(), None);
        mailbox.note(&acquire(), &queued());
        let notified = tokio::time::timeout(Duration::from_secs(5), mailbox.more.notified());
        notified.await.expect("nothing looks for mail");
        assert_eq!(mailbox.longest_pause(), Some(PUSH_READ_PAUSE_WAITING));
    }

    /// The number of such an attempt may be any, however high.
    #[tokio::test]
    async fn attempt_with_an_inbox_does_not_hide_that_a_later_one_is_new() {
        let mailbox = Mailbox::new(true);
        let of_another = Acquisition { client: ClientId::new(2), sequence: u64::MAX };
        let acquire_from =
            Acquire { inbox: Some(CLIENT), ..Acquire::exclusive(of_another, Duration::from_secs(9)) };
        mailbox.note(&Command::from(acquire_from), &queued());
        mailbox.more.notified().await;
        mailbox.note(&acquire(), &queued());
        let notified = tokio::time::timeout(Duration::from_secs(5), mailbox.more.notified());
        notified.await.expect("nothing looks for mail");
    }
}
