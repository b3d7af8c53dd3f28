//! Wakes a future when an entry changes.

use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use super::entry::Entry;
use super::session::Session;

/// A future's registration at an entry. Dropping it removes the future's waker.
pub(crate) struct Watch<'a> {
    pub(super) session: &'a Session,
    pub(super) sequence: u64,
    /// None before the first registration.
    pub(super) key: Option<u64>,
    /// Replaced wakers. Dropping a waker may drop its task, and with it a guard that takes the mutex: they are dropped with
    /// the mutex free.
    pub(super) retired: Vec<Waker>,
}

impl Watch<'_> {
    pub(super) fn register(&mut self, entry: &mut Entry, context: &mut Context<'_>) {
        let key = *self.key.get_or_insert_with(|| self.session.sequence.fetch_add(1, Ordering::Relaxed));
        self.retired.extend(entry.register(key, context));
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let mut table = self.session.table();
            let waker = table.entries.get_mut(&self.sequence).and_then(|entry| entry.unregister(key));
            drop(table);
            drop(waker);
        }
    }
}
