//! One row of the dashboard per lock, and what changed between two polls.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold::{HolderMetadata, Kind, LockInfo};
use serde::Serialize;

use crate::time::millis;

pub(crate) type Key = (Kind, String);

/// Times of the same holder or waiter in two polls differ by the duration of the polls; a smaller difference is no change.
const SAME_MS: u64 = 2_000;

/// How many holders of a lock are compared between two polls.
const MAX_COMPARED: usize = 1000;

/// The token and the identity of a holder.
type Holder = (u64, String);

/// What the list of locks shows of one of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    kind: &'static str,
    name: String,
    /// The first holder.
    holder: Option<String>,
    holders: usize,
    token: Option<u64>,
    /// When the first holder got it, in milliseconds since 1970.
    since_ms: Option<u64>,
    waiters: usize,
    /// When the first waiter came.
    oldest_wait_since_ms: Option<u64>,
    in_use: u32,
    capacity: u32,
    /// Released, and retained by the store.
    retained: bool,
    /// Held by a program that does not use leasehold.
    foreign: bool,
    /// All holders, for the timeline.
    #[serde(skip)]
    held_by: Vec<Holder>,
}

/// Something that happened to a lock between two polls.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    at_ms: u64,
    #[serde(skip)]
    key: Key,
    /// `acquired`, `ended` or `queue`.
    pub(super) what: &'static str,
    /// The holder; empty for a queue.
    who: String,
    token: Option<u64>,
    waiters: usize,
}

impl Event {
    pub(super) fn is_of(&self, kind: Kind, name: &str) -> bool {
        self.key.0 == kind && self.key.1 == name
    }
}

impl Row {
    /// The row of a lock; that of the poll before if nothing changed.
    pub(super) fn new(lock: &LockInfo, before: Option<&Arc<Self>>, at_ms: u64) -> Arc<Self> {
        let first = lock.holders.first();
        let oldest = lock.waiters.iter().map(|waiter| waiter.waiting_for).max();
        let mut row = Self {
            kind: lock.kind.as_str(),
            name: lock.name.clone(),
            holder: first.map(|holder| identity(&holder.metadata, &holder.client)),
            holders: lock.holders.len(),
            token: first.map(|holder| holder.token.get()),
            since_ms: first.map(|holder| at_ms.saturating_sub(millis(holder.held_for))),
            waiters: lock.waiters.len(),
            oldest_wait_since_ms: oldest.map(|wait| at_ms.saturating_sub(millis(wait))),
            in_use: lock.in_use,
            capacity: lock.capacity,
            retained: first.is_some_and(|holder| holder.retained),
            foreign: lock.foreign.is_some(),
            held_by: lock
                .holders
                .iter()
                .take(MAX_COMPARED)
                .map(|holder| (holder.token.get(), identity(&holder.metadata, &holder.client)))
                .collect(),
        };
        if let Some(before) = before {
            steady(&mut row.since_ms, before.since_ms);
            steady(&mut row.oldest_wait_since_ms, before.oldest_wait_since_ms);
            if row == **before {
                return before.clone();
            }
        }
        Arc::new(row)
    }
}

/// Keeps the earlier reading of a time.
fn steady(time: &mut Option<u64>, before: Option<u64>) {
    if let (Some(now), Some(then)) = (*time, before)
        && now.abs_diff(then) < SAME_MS
    {
        *time = before;
    }
}

/// Names a holder by host, process and label or program.
fn identity(metadata: &HolderMetadata, client: &str) -> String {
    let process = match (&metadata.host, metadata.pid) {
        (Some(host), Some(pid)) => format!("{host} pid {pid}"),
        (Some(host), None) => host.clone(),
        _ => client.to_owned(),
    };
    match metadata.label.as_ref().or(metadata.program.as_ref()) {
        Some(what) => format!("{process} ({what})"),
        None => process,
    }
}

/// The grants and ends between two polls.
pub(super) fn events(
    before: &BTreeMap<Key, Arc<Row>>,
    after: &BTreeMap<Key, Arc<Row>>,
    at_ms: u64,
) -> Vec<Event> {
    let mut events = Vec::new();
    for (key, row) in after {
        let old = before.get(key);
        if !old.is_some_and(|old| Arc::ptr_eq(old, row)) {
            changes(key, old.map(|old| &**old), Some(row), at_ms, &mut events);
        }
    }
    for (key, old) in before {
        if !after.contains_key(key) {
            changes(key, Some(old), None, at_ms, &mut events);
        }
    }
    events
}

/// The holders that the other poll does not have. All leases of an owner have one token, and may have one identity.
fn missing<'a>(holders: &'a [Holder], other: &[Holder]) -> impl Iterator<Item = &'a Holder> {
    let mut there: Vec<&Holder> = other.iter().collect();
    holders.iter().filter(move |holder| {
        let same = there.iter().position(|other| other == holder);
        same.map(|at| there.swap_remove(at)).is_none()
    })
}

fn changes(key: &Key, before: Option<&Row>, after: Option<&Row>, at_ms: u64, events: &mut Vec<Event>) {
    let holders = |row: Option<&Row>| row.map(|row| row.held_by.clone()).unwrap_or_default();
    let (old, new) = (holders(before), holders(after));
    let waiters = after.map_or(0, |row| row.waiters);
    let mut add = |what, who: &str, token| {
        events.push(Event { at_ms, key: key.clone(), what, who: who.to_owned(), token, waiters });
    };
    for (token, who) in missing(&old, &new) {
        add("ended", who, Some(*token));
    }
    for (token, who) in missing(&new, &old) {
        add("acquired", who, Some(*token));
    }
    if before.map_or(0, |row| row.waiters) != waiters {
        add("queue", "", None);
    }
}
