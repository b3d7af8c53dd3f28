//! Mail: the pushes to a client that cannot listen, because a pooler is in between or its connection was lost.
//!
//! A transaction leaves them in a table, and the client looks for them. One statement finds those of all of its waiters, so its
//! cost does not depend on their number. A client looks often just after an attempt was queued, and less often the longer it waits;
//! a client that only holds looks once a second, and an idle one not at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use leasehold_core::{Command, Reply};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::exec::Executor;
use super::limits::{
    HOLDING_FOR, MAIL_PAUSE, MAIL_PAUSE_HOLDING, MAIL_PAUSE_WAITING, MAIL_TIMEOUT, WAITING_FOR,
};
use super::params::Reader;
use super::pool::Class;
use super::push;
use super::transaction::Progress;
use crate::store::StoreError;

/// Whether the client looks for mail, and how often.
#[derive(Default)]
pub(super) struct Mailbox {
    /// The client gets no notifications. Its queue entries say so.
    polls: AtomicBool,
    expected: Mutex<Expected>,
    /// There may be more to look for than before.
    more: Notify,
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
                expected.queued = Some(now);
                if acquire.acquisition.sequence > expected.newest {
                    expected.newest = acquire.acquisition.sequence;
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
    fn longest_pause(&self) -> Option<Duration> {
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

impl Executor {
    /// Delivers the mail of this client. Returns how much there was.
    pub(super) async fn read_mail(&self) -> Result<usize, StoreError> {
        let client = self.session.client;
        let read = async |progress: &Progress| {
            self.alone(progress, &self.sql().read_mail, vec![client.into()]).await
        };
        let rows = self.within(Class::Service, MAIL_TIMEOUT, read).await?.unwrap_or_default();
        let mut mail = rows
            .iter()
            .map(|row| {
                let mut reader = Reader::new(row);
                Ok((reader.id()?, push::decode(reader.text()?, client)))
            })
            .collect::<Result<Vec<_>, StoreError>>()?;
        mail.sort_by_key(|(id, _)| *id);
        self.deliver(mail.into_iter().filter_map(|(_, push)| push).collect());
        Ok(rows.len())
    }
}

/// Looks for mail until the client is gone.
pub(super) fn keep(executor: Weak<Executor>, mailbox: Arc<Mailbox>) -> AbortHandle {
    let keep = async move {
        let mut pause = MAIL_PAUSE;
        loop {
            let Some(longest) = mailbox.longest_pause() else {
                mailbox.more.notified().await;
                pause = MAIL_PAUSE;
                continue;
            };
            if timeout(pause.min(longest), mailbox.more.notified()).await.is_ok() {
                pause = MAIL_PAUSE;
                // Attempts that are queued together do not make it look for each of them.
                sleep(pause).await;
            }
            let Some(executor) = executor.upgrade() else { return };
            pause = match executor.read_mail().await {
                Ok(0) => (pause * 3 / 2).min(longest),
                Ok(_) => MAIL_PAUSE,
                Err(error) => {
                    tracing::debug!(error = error.message, "no mail from PostgreSQL");
                    longest
                }
            };
        }
    };
    tokio::spawn(keep).abort_handle()
}
