//! Which server the address leads to. All connections of a client lead to one server: otherwise it could be granted a lock by each.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_core::Failure;
use leasehold_store::{Inbox, StoreError};
use tokio::sync::watch;

/// When the server was started, in seconds. No two servers have been started at the same microsecond.
pub(super) const STARTED: &str = "SELECT extract(epoch FROM pg_postmaster_start_time())::text";

/// How often the address has led to another server before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch(u64);

#[derive(Default)]
struct Known {
    started: Option<String>,
    epoch: Epoch,
}

/// The server that the newest connection leads to.
pub(super) struct Server {
    known: watch::Sender<Known>,
    inbox: Weak<dyn Inbox>,
    /// This role may not ask when the server was started: every server counts as the same.
    is_hidden: AtomicBool,
}

impl Server {
    pub(super) fn new(inbox: Weak<dyn Inbox>) -> Self {
        Self { known: watch::Sender::new(Known::default()), inbox, is_hidden: AtomicBool::new(false) }
    }

    /// The role may not ask.
    pub(super) fn hide(&self) {
        self.is_hidden.store(true, Ordering::Relaxed);
    }

    /// The question for a connection, if the role may ask it.
    pub(super) fn question(&self) -> Option<&'static str> {
        (!self.is_hidden.load(Ordering::Relaxed)).then_some(STARTED)
    }

    /// Notes which server a new connection leads to. If it is another one than before, the connections to that are of no more use,
    /// waiters ask, and holders renew.
    pub(super) fn note(&self, started: String) -> Epoch {
        let mut epoch = Epoch::default();
        let is_other = self.known.send_if_modified(|known| {
            let is_other = known.started.as_ref().is_some_and(|before| *before != started);
            if is_other {
                known.epoch.0 += 1;
            }
            known.started = Some(started);
            epoch = known.epoch;
            is_other
        });
        if is_other {
            tracing::warn!(
                "PostgreSQL was restarted, or the address leads to another server now: connections to the earlier one are closed"
            );
            if let Some(inbox) = self.inbox.upgrade() {
                inbox.reconnected(&|_| true);
            }
        }
        epoch
    }

    /// Now.
    pub(super) fn epoch(&self) -> Epoch {
        self.known.borrow().epoch
    }

    /// Whether a connection leads to the server that the newest one leads to.
    pub(super) fn is_current(&self, epoch: Epoch) -> bool {
        self.epoch() == epoch
    }

    /// Refuses the answer of another server: what it has done is of no use.
    pub(super) fn check(&self, epoch: Epoch) -> Result<(), StoreError> {
        if self.is_current(epoch) {
            return Ok(());
        }
        Err(StoreError::new(
            Failure::Unknown,
            "the address leads to another server now than the one that has answered",
        ))
    }

    /// Waits until connections of this epoch are of no more use.
    pub(super) async fn until_other(&self, epoch: Epoch) {
        let mut known = self.known.subscribe();
        // The sender lives as long as this.
        let _ = known.wait_for(|known| known.epoch != epoch).await;
    }
}
