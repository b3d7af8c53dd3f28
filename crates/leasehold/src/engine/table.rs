//! The table of one client's attempts and leases: what a change of one entry means for the other entries, the timers and
//! the driver.
//!
//! The caller holds the session's mutex, so nothing here wakes a task, logs, or calls the store. [`Effects`] collects that
//! for when the mutex is free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Waker};
use std::time::Duration;

use leasehold_core::{ClientId, Command, LocalTime, Owner, Resource};

use super::entry::{Entry, LogEvent, ReleaseOutcome};
use super::local_queue::LocalQueues;
use super::session::Request;

/// The largest number of commands in one batch.
const MAX_BATCH: usize = 512;

/// A renewal that is due within this fraction of its ttl is sent together with one that is due now.
const EARLY_RENEWAL_PART: u32 = 20;

/// No renewal is sent earlier than this before it is due, however long its ttl is.
const EARLY_RENEWAL_MAX: Duration = Duration::from_millis(500);

pub(super) struct Table {
    pub(super) id: ClientId,
    /// The session's counter.
    pub(super) sequence: Arc<AtomicU64>,
    pub(super) local_queues: LocalQueues,
    /// By sequence number. Most clients have few entries, and a small tree costs less than hashing.
    pub(super) entries: BTreeMap<u64, Box<Entry>>,
    pub(super) timers: BTreeSet<(LocalTime, u64)>,
    pub(super) sleepers: BTreeMap<(LocalTime, u64), Waker>,
    /// When the driver wakes by itself.
    pub(super) driver_wakes_at: LocalTime,
    /// How many entries the store may still keep something for.
    pub(super) unsettled: usize,
    /// How many releases the store has not confirmed, since the client was closed.
    pub(super) unconfirmed: u64,
    /// Tasks that wait for `unsettled` to become zero, or for the driver to end.
    pub(super) close_wakers: Vec<Waker>,
    /// The driver has dropped the store.
    pub(super) is_driver_gone: bool,
    /// No attempt may begin.
    pub(super) is_closed: bool,
    /// All handles are dropped, so no attempt can begin.
    pub(super) has_no_handles: bool,
}

/// What the driver must do.
pub(crate) struct DueWork {
    pub(crate) requests: Vec<(Arc<Resource>, Request)>,
    /// When to ask again.
    pub(crate) next: LocalTime,
    /// The client has ended and nothing is left to release.
    pub(crate) is_over: bool,
}

/// What the caller must do once the mutex is free.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) wakers: Vec<Waker>,
    pub(super) log_events: Vec<(Arc<Resource>, LogEvent)>,
    pub(super) wake_driver: bool,
}

impl Table {
    pub(super) fn new(id: ClientId, sequence: Arc<AtomicU64>) -> Self {
        Self {
            id,
            sequence,
            local_queues: LocalQueues::default(),
            entries: BTreeMap::new(),
            timers: BTreeSet::new(),
            sleepers: BTreeMap::new(),
            driver_wakes_at: LocalTime::NEVER,
            unsettled: 0,
            unconfirmed: 0,
            close_wakers: Vec::new(),
            is_driver_gone: false,
            is_closed: false,
            has_no_handles: false,
        }
    }

    pub(super) fn register_close_waker(&mut self, context: &mut Context<'_>) {
        if !self.close_wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.close_wakers.push(context.waker().clone());
        }
    }

    /// Completes a step of one entry: advances it, updates its local queue and its timer, and removes it once it is done.
    pub(super) fn reconcile(&mut self, sequence: u64, now: LocalTime, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        if entry.advance(now) {
            effects.wakers.extend(entry.wakers.drain(..).map(|(_, waker)| waker));
            let resource = &entry.resource;
            effects.log_events.extend(entry.log_events.drain(..).map(|event| (resource.clone(), event)));
        }
        let granted = entry.take_granted_owner();
        if let Some((queue, _)) = entry.local_queue {
            self.on_entry_changed(queue, sequence, now, effects);
        }
        if let Some((resource, owner)) = granted {
            self.wake_owner_attempts(&resource, &owner, now, effects);
        }
        self.update_timer(sequence, effects);
        self.remove_if_settled(sequence, effects);
    }

    /// Moves the entry's timer only if it is due earlier. A timer that fires too early costs one look at the entry, which is
    /// cheaper than moving it each time.
    fn update_timer(&mut self, sequence: u64, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        let due = entry.poll_timeout();
        if due.is_some() && entry.timer.is_some_and(|set| due >= Some(set)) {
            return;
        }
        if let Some(set) = entry.timer.take() {
            self.timers.remove(&(set, sequence));
        }
        if let Some(due) = due {
            self.timers.insert((due, sequence));
            entry.timer = Some(due);
            self.wake_driver_by(due, effects);
        }
    }

    fn remove_if_settled(&mut self, sequence: u64, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        if !entry.is_settled() {
            return;
        }
        let released = entry.release_outcome();
        let was_unsettled = std::mem::take(&mut entry.is_unsettled);
        if !entry.is_referenced {
            self.entries.remove(&sequence);
        }
        if was_unsettled {
            self.on_settled(released, effects);
        }
    }

    /// An owner that holds the lock may enter again before all waiters, but the store notifies only the first waiter. So
    /// after a grant the owner's other attempts ask again.
    fn wake_owner_attempts(
        &mut self,
        resource: &Resource,
        owner: &Owner,
        now: LocalTime,
        effects: &mut Effects,
    ) {
        let is_of_owner = |entry: &Entry| entry.owner.as_ref() == Some(owner) && *entry.resource == *resource;
        let attempts = self.entries.iter().filter(|(_, entry)| entry.outcome.is_none() && is_of_owner(entry));
        let attempts: Vec<u64> = attempts.map(|(sequence, _)| *sequence).collect();
        for sequence in attempts {
            if let Some(entry) = self.entries.get_mut(&sequence) {
                entry.recheck(now);
            }
            self.reconcile(sequence, now, effects);
        }
    }

    /// Counts one entry less that the store may keep something for.
    fn on_settled(&mut self, released: Option<ReleaseOutcome>, effects: &mut Effects) {
        self.unsettled -= 1;
        self.unconfirmed += u64::from(released == Some(ReleaseOutcome::Unconfirmed));
        if self.unsettled == 0 {
            effects.wakers.append(&mut self.close_wakers);
            // The driver may have nothing left to do.
            effects.wake_driver |= self.is_closed || self.has_no_handles;
        }
    }

    /// One wake-up is enough: the driver looks at everything that is due.
    pub(super) fn wake_driver_by(&mut self, time: LocalTime, effects: &mut Effects) {
        if time < self.driver_wakes_at {
            self.driver_wakes_at = time;
            effects.wake_driver = true;
        }
    }

    pub(super) fn due(&mut self, now: LocalTime, effects: &mut Effects) -> DueWork {
        while let Some(sleeper) = self.sleepers.first_entry()
            && sleeper.key().0 <= now
        {
            effects.wakers.push(sleeper.remove());
        }
        let mut requests = Vec::new();
        while requests.len() < MAX_BATCH
            && let Some(&(time, sequence)) = self.timers.first()
            && time <= now
        {
            requests.extend(self.fire(sequence, now, effects));
        }
        if requests.iter().any(|(_, request)| matches!(request.command, Command::Renew(_))) {
            self.renew_early(now, &mut requests, effects);
        }
        let timer = self.timers.first().map_or(LocalTime::NEVER, |(time, _)| *time);
        let sleeper = self.sleepers.first_key_value().map_or(LocalTime::NEVER, |((time, _), _)| *time);
        self.driver_wakes_at = timer.min(sleeper);
        let is_over = self.unsettled == 0 && (self.is_closed || self.has_no_handles);
        DueWork { requests, next: self.driver_wakes_at, is_over }
    }

    fn fire(
        &mut self,
        sequence: u64,
        now: LocalTime,
        effects: &mut Effects,
    ) -> Option<(Arc<Resource>, Request)> {
        let entry = self.entries.get_mut(&sequence)?;
        if let Some(set) = entry.timer.take() {
            self.timers.remove(&(set, sequence));
        }
        let request = entry.poll_transmit(sequence, now).map(|request| (entry.resource.clone(), request));
        self.reconcile(sequence, now, effects);
        request
    }

    /// Sends renewals that are due soon together with those that are due now. Leases with equal ttls therefore come to be
    /// renewed in one batch, whenever they were granted.
    fn renew_early(
        &mut self,
        now: LocalTime,
        requests: &mut Vec<(Arc<Resource>, Request)>,
        effects: &mut Effects,
    ) {
        let soon = self.timers.range(..=(now + EARLY_RENEWAL_MAX, u64::MAX));
        let early: Vec<u64> = soon
            .map(|(_, sequence)| *sequence)
            .filter(|sequence| {
                self.entries.get(sequence).is_some_and(|entry| entry.renews_within(now, EARLY_RENEWAL_PART))
            })
            .take(MAX_BATCH.saturating_sub(requests.len()))
            .collect();
        for sequence in early {
            if let Some(entry) = self.entries.get_mut(&sequence) {
                entry.renew_now(now);
            }
            requests.extend(self.fire(sequence, now, effects));
        }
    }
}
