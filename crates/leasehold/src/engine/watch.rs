//! Being woken when an entry changes.

use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use super::entry::Entry;
use super::session::Session;

/// A future's way to be woken when an entry changes. Its waker goes with it.
pub(crate) struct Watch<'a> {
    pub(super) session: &'a Session,
    pub(super) sequence: u64,
    /// None before it has registered.
    pub(super) key: Option<u64>,
    /// A waker that goes may drop its task, and with it a guard of this very session: never with the mutex held.
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
