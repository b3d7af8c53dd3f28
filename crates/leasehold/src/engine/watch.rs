//! Waiting for an entry to change: a future registers its waker there, and checks the entry when it is woken.

use std::task::{Context, Poll, Waker};

use leasehold_core::{Loss, Outcome};

use super::entry::{AttemptEnd, Entry, RenewalError};
use super::ids::{EntryId, WakerId};
use super::releasing::ReleaseOutcome;
use super::session::Session;

/// A future's registration at an entry. Dropping it removes the future's waker.
pub(crate) struct Watch<'a> {
    pub(super) session: &'a Session,
    pub(super) entry: EntryId,
    /// None before the first registration.
    pub(super) key: Option<WakerId>,
    /// Replaced wakers. Dropping a waker may drop its task, and with it a guard that takes the mutex: they are dropped with
    /// the mutex free.
    pub(super) retired: Vec<Waker>,
}

impl Session {
    /// Lets a future wait for changes of this entry.
    pub(crate) fn watch(&self, entry: EntryId) -> Watch<'_> {
        Watch { session: self, entry, key: None, retired: Vec::new() }
    }

    /// Ready once the attempt has ended.
    pub(crate) fn poll_ended(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<AttemptEnd> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.entry) else {
            return Poll::Ready((Outcome::Cancelled, None));
        };
        match entry.outcome {
            Some(outcome) => Poll::Ready((outcome, entry.last_error.take())),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    pub(crate) fn poll_lost(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<Loss> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.entry) else { return Poll::Ready(Loss::Closed) };
        match entry.remaining(self.now()) {
            Err(loss) => Poll::Ready(loss),
            Ok(_) => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Ready once no renewal is in flight, with the last renewal's error if it failed.
    pub(crate) fn poll_renewed(
        &self,
        watch: &mut Watch<'_>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), RenewalError>> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.entry) else {
            return Poll::Ready(Err(RenewalError::Lost(Loss::Closed)));
        };
        match entry.renewal_result(self.now()) {
            Some(renewed) => Poll::Ready(renewed),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Ready once the store has confirmed the release, or the lease has expired in the store.
    pub(crate) fn poll_released(
        &self,
        watch: &mut Watch<'_>,
        context: &mut Context<'_>,
    ) -> Poll<ReleaseOutcome> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.entry) else {
            return Poll::Ready(ReleaseOutcome::Released);
        };
        match entry.release_outcome() {
            Some(given) => {
                // The future gets the outcome, and nothing else refers to the entry. Wakers are dropped with the mutex free.
                let ended = table.entries.remove(watch.entry);
                drop(table);
                drop(ended);
                Poll::Ready(given)
            }
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }
}

impl Watch<'_> {
    pub(super) fn register(&mut self, entry: &mut Entry, context: &mut Context<'_>) {
        let key = *self.key.get_or_insert_with(|| self.session.ids.waker());
        self.retired.extend(entry.register(key, context));
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let mut table = self.session.table();
            let waker = table.entries.get_mut(&self.entry).and_then(|entry| entry.unregister(key));
            drop(table);
            drop(waker);
        }
    }
}
