//! Whether a client looks for mail, and how often.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::{Command, Reply};
use tokio::sync::Notify;

use super::limits::{HOLDING_FOR, MAIL_PAUSE_HOLDING, MAIL_PAUSE_WAITING, WAITING_FOR};

/// Whether the client looks for mail, and how often.
#[derive(Default)]
pub(super) struct Mailbox {
    /// The client gets no notifications. Its queue entries say so.
    polls: AtomicBool,
    expected: Mutex<Expected>,
    /// There may be more to look for than before.
    pub(super) more: Notify,
}

/// What mail is expected for.
#[derive(Default)]
struct Expected {
    /// The highest sequence number of an attempt that was queued.
    newest: u64,
    /// When the store last said that an attempt is queued: each one asks at least once in [`WAITING_FOR`].
    queued: Option<Instant>,
    /// When the store last granted or renewed a lease.
    held: Option<Instant>,
}

impl Mailbox {
    pub(super) fn new(polls: bool) -> Arc<Self> {
        Arc::new(Self { polls: AtomicBool::new(polls), ..Self::default() })
    }

    pub(super) fn polls(&self) -> bool {
        self.polls.load(Ordering::Relaxed)
    }

    pub(super) fn set_polls(&self, polls: bool) {
        self.polls.store(polls, Ordering::Relaxed);
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
                let is_new = acquire.acquisition.sequence > expected.newest;
                expected.newest = expected.newest.max(acquire.acquisition.sequence);
                // After a disturbance a waiter may be the first to ask again.
                if is_new || !is_recent(before, WAITING_FOR) {
                    self.more.notify_one();
                }
            }
            (_, Reply::Granted(_) | Reply::Renewed { .. }) => {
                let before = self.expected().held.replace(now);
                if !is_recent(before, HOLDING_FOR) {
                    self.more.notify_one();
                }
            }
            _ => {}
        }
    }

    /// The longest pause between two looks; `None` while no mail is expected.
    pub(super) fn longest_pause(&self) -> Option<Duration> {
        if !self.polls() {
            return None;
        }
        let expected = self.expected();
        if is_recent(expected.queued, WAITING_FOR) {
            return Some(MAIL_PAUSE_WAITING);
        }
        is_recent(expected.held, HOLDING_FOR).then_some(MAIL_PAUSE_HOLDING)
    }
}

fn is_recent(at: Option<Instant>, within: Duration) -> bool {
    at.is_some_and(|at| at.elapsed() < within)
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Acquisition, ClientId, Queued, StoreTime};

    use super::*;

    #[tokio::test]
    async fn waiter_that_asks_again_after_a_disturbance_makes_the_client_look_for_mail() {
        let mailbox = Mailbox::new(true);
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let acquire = Command::Acquire(Acquire::exclusive(acquisition, Duration::from_secs(9)).into());
        let queued = Reply::Queued(Queued { is_head: false, repoll_at: StoreTime::NEVER });
        mailbox.note(&acquire, &queued);
        mailbox.more.notified().await;
        assert_eq!(mailbox.longest_pause(), Some(MAIL_PAUSE_WAITING));
        // The store has not answered for a while.
        mailbox.expected().queued = None;
        assert_eq!(mailbox.longest_pause(), None);
        mailbox.note(&acquire, &queued);
        let notified = tokio::time::timeout(Duration::from_secs(5), mailbox.more.notified());
        notified.await.expect("nothing looks for mail");
        assert_eq!(mailbox.longest_pause(), Some(MAIL_PAUSE_WAITING));
    }
}
