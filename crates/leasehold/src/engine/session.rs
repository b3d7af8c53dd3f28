//! One client's attempts and leases: a table behind one mutex, stepped by the core's machines.
//!
//! A caller (a future, a guard, the driver) takes the mutex, steps a machine, and frees the mutex before it calls the store,
//! because the store may deliver a push to this table. Futures are passive: they register a waker and look at their entry
//! when they are woken, so they run on any executor.
//!
//! There is no queue of releases: a release stays in its own entry until the store has confirmed it, or until the lease has
//! expired in the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, LeaseTerms, LocalTime, Loss, Outcome, Owner,
    Push, Resource, Token, WaitPolicy,
};
use tokio::sync::Notify;

use super::clock;
use super::entry::{Entry, LogEvent, ReleaseOutcome, RenewalError};
use super::table::{DueWork, Effects, Table};
use super::watch::Watch;
use crate::store::{CallResult, Inbox, StoreError};

/// The attempts, leases and releases of one client.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    table: Mutex<Table>,
    pub(super) sequence: Arc<AtomicU64>,
    /// Wakes the driver before its own timer does.
    pub(crate) alarm: Notify,
}

/// A command for the store, its entry, and when it was issued.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) sequence: u64,
    pub(crate) sent_at: LocalTime,
    pub(crate) command: Command,
    /// How many replicas must have the write before its response counts.
    pub(crate) replicas: u32,
}

/// The client was closed.
pub(crate) struct Closed;

/// How an attempt ended, and the store's last error if there was one.
pub(crate) type AttemptEnd = (Outcome, Option<StoreError>);

impl Session {
    pub(crate) fn new(id: ClientId) -> Self {
        let sequence = Arc::new(AtomicU64::new(1));
        let table = Table::new(id, sequence.clone());
        Self { id, table: Mutex::new(table), sequence, alarm: Notify::new() }
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        // A panic in a machine leaves at most one entry half stepped.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_acquisition(&self) -> Acquisition {
        Acquisition { client: self.id, sequence: self.sequence.fetch_add(1, Ordering::Relaxed) }
    }

    /// Steps one entry, reconciles the table, and applies the effects with the mutex free.
    fn step<T>(&self, sequence: u64, now: LocalTime, act: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let (result, effects) = {
            let mut table = self.table();
            let result = act(table.entries.get_mut(&sequence)?);
            let mut effects = Effects::default();
            table.reconcile(sequence, now, &mut effects);
            (result, effects)
        };
        self.apply_effects(effects);
        Some(result)
    }

    pub(super) fn apply_effects(&self, effects: Effects) {
        effects.wakers.into_iter().for_each(Waker::wake);
        if effects.wake_driver {
            self.alarm.notify_one();
        }
        for (resource, event) in effects.log_events {
            match event {
                LogEvent::Lost(loss) => tracing::warn!(%resource, %loss, "lease lost"),
                LogEvent::RenewalFailed(error) => {
                    tracing::warn!(%resource, error, "lease not renewed");
                }
                LogEvent::RenewalRecovered => tracing::info!(%resource, "lease renewed again"),
                LogEvent::ReleaseFailed(error) => {
                    tracing::warn!(%resource, error, "lease not released yet");
                }
                LogEvent::ReleaseRecovered => tracing::info!(%resource, "lease released after retries"),
                LogEvent::ReleaseUnconfirmed => {
                    tracing::warn!(%resource, "release not confirmed; the lease has expired");
                }
            }
        }
    }

    // --- Attempts --------------------------------------------------------------------------------

    /// Adds an attempt and returns its first request. The entry exists before the request is sent, so no push can precede it.
    pub(crate) fn begin(
        &self,
        resource: Arc<Resource>,
        terms: LeaseTerms,
        min_hold: Duration,
        command: Acquire,
        patience: Option<WaitPolicy>,
        now: LocalTime,
    ) -> Result<Option<Request>, Closed> {
        let sequence = command.acquisition.sequence;
        let owner = command.owner.clone();
        let machine = AcquireMachine::new(command, patience, now);
        let mut entry = Box::new(Entry::new(resource, owner, terms, min_hold, machine));
        let mut effects = Effects::default();
        let request = {
            let mut table = self.table();
            if table.is_closed {
                return Err(Closed);
            }
            let request = entry.poll_transmit(sequence, now);
            table.entries.insert(sequence, entry);
            table.unsettled += 1;
            table.reconcile(sequence, now, &mut effects);
            request
        };
        self.apply_effects(effects);
        Ok(request)
    }

    /// Steps an entry with the response to its request. Returns the attempt's outcome, which saves the caller a second look.
    pub(crate) fn handle_response(
        &self,
        request: &Request,
        now: LocalTime,
        answered: &CallResult,
    ) -> Option<Outcome> {
        self.step(request.sequence, now, |entry| {
            entry.handle_response(request, now, answered);
            entry.outcome(now)
        })?
    }

    /// Steps an entry with the response to its release. Returns the outcome if the release is complete.
    pub(crate) fn handle_release_response(
        &self,
        request: &Request,
        answered: &CallResult,
    ) -> Option<ReleaseOutcome> {
        // Only a failed release uses the time.
        let now = if answered.is_ok() { request.sent_at } else { clock::local() };
        self.step(request.sequence, now, |entry| {
            entry.handle_response(request, now, answered);
            entry.is_referenced = entry.release_outcome().is_none();
            entry.release_outcome()
        })?
    }

    /// Lets a future wait for changes of this entry.
    pub(crate) fn watch(&self, sequence: u64) -> Watch<'_> {
        Watch { session: self, sequence, key: None, retired: Vec::new() }
    }

    /// Ready once the attempt has ended.
    pub(crate) fn poll_ended(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<AttemptEnd> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.sequence) else {
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

    // --- Leases ----------------------------------------------------------------------------------

    /// How much longer a held lease may be trusted, or why it was lost.
    pub(crate) fn remaining(&self, sequence: u64, now: LocalTime) -> Result<Duration, Loss> {
        self.table().entries.get(&sequence).map_or(Err(Loss::Closed), |entry| entry.remaining(now))
    }

    /// The loss of a lease of this owner that still has a guard. `granted`: a token of a later grant, which implies a loss.
    pub(crate) fn loss_of_owner(
        &self,
        resource: &Resource,
        owner: &Owner,
        granted: Option<Token>,
        now: LocalTime,
    ) -> Option<Loss> {
        // A scan of the table, which is only as long as one client's attempts and leases.
        let table = self.table();
        let mut theirs = table.entries.values().filter(|entry| {
            entry.is_referenced && entry.owner.as_ref() == Some(owner) && *entry.resource == *resource
        });
        theirs.find_map(|entry| entry.loss(now, granted))
    }

    pub(crate) fn poll_lost(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<Loss> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.sequence) else { return Poll::Ready(Loss::Closed) };
        match entry.remaining(clock::local()) {
            Err(loss) => Poll::Ready(loss),
            Ok(_) => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Begins a renewal, unless one is in flight.
    pub(crate) fn begin_renewal(&self, sequence: u64, now: LocalTime) -> Option<Request> {
        self.step(sequence, now, |entry| {
            entry.renew_now(now);
            entry.poll_transmit(sequence, now)
        })?
    }

    /// The future that awaited the renewal's response was dropped.
    pub(crate) fn abandon_renewal(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| entry.abandon_renewal(now));
    }

    /// Ready once no renewal is in flight, with the last renewal's error if it failed.
    pub(crate) fn poll_renewed(
        &self,
        watch: &mut Watch<'_>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), RenewalError>> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.sequence) else {
            return Poll::Ready(Err(RenewalError::Lost(Loss::Closed)));
        };
        match entry.renewal_result(clock::local()) {
            Some(renewed) => Poll::Ready(renewed),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Begins to release a lease. Returns the request, and the loss if the lease had been lost before.
    pub(crate) fn begin_release(&self, sequence: u64, now: LocalTime) -> (Option<Request>, Option<Loss>) {
        let began = self.step(sequence, now, |entry| {
            let loss = entry.remaining(now).err();
            entry.abandon(now);
            (entry.poll_transmit(sequence, now), loss)
        });
        began.unwrap_or((None, Some(Loss::Closed)))
    }

    /// When the maximum hold of this lease ends; `NEVER` without one.
    pub(crate) fn ends_at(&self, sequence: u64) -> LocalTime {
        self.table().entries.get(&sequence).map_or(LocalTime::NEVER, |entry| entry.ends_at())
    }

    /// Sets the end of the hold. An exchanged lease continues the hold of the lease before it.
    pub(crate) fn limit_hold(&self, sequence: u64, ends_at: LocalTime, now: LocalTime) {
        self.step(sequence, now, |entry| entry.limit_hold(ends_at));
    }

    /// Replaces the minimum hold, counted from the grant.
    pub(crate) fn set_min_hold(&self, sequence: u64, min_hold: Duration, now: LocalTime) {
        self.step(sequence, now, |entry| entry.min_hold = min_hold);
    }

    /// Another lease is to take the place of this one, or is not after all. Meanwhile its end is not logged as a loss.
    pub(crate) fn set_replacing(&self, sequence: u64, is_replacing: bool, now: LocalTime) {
        self.step(sequence, now, |entry| entry.is_replacing = is_replacing);
    }

    /// Another lease has replaced this one, and no guard refers to it.
    pub(crate) fn mark_replaced(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| {
            entry.is_referenced = false;
            entry.mark_replaced(now);
        });
    }

    /// No future or guard refers to this entry: cancels the attempt or releases the lease, and removes the entry after that.
    pub(crate) fn release_dropped(&self, sequence: u64, now: LocalTime) -> Option<Request> {
        self.step(sequence, now, |entry| {
            entry.is_referenced = false;
            entry.abandon(now);
            entry.poll_transmit(sequence, now)
        })?
    }

    /// Lets the driver send this release.
    pub(crate) fn defer_release(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| entry.retry_release(now));
    }

    /// Ready once the store has confirmed the release, or the lease has expired in the store.
    pub(crate) fn poll_released(
        &self,
        watch: &mut Watch<'_>,
        context: &mut Context<'_>,
    ) -> Poll<ReleaseOutcome> {
        watch.retired.clear();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&watch.sequence) else {
            return Poll::Ready(ReleaseOutcome::Released);
        };
        match entry.release_outcome() {
            Some(given) => Poll::Ready(given),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    // --- The whole -------------------------------------------------------------------------------

    /// Refuses new attempts, and begins to release everything.
    pub(crate) fn close(&self, now: LocalTime) {
        let mut effects = Effects::default();
        {
            let mut table = self.table();
            if !std::mem::replace(&mut table.is_closed, true) {
                // Releases that failed before the close are not its result.
                table.unconfirmed = 0;
            }
            effects.wake_driver = true;
            let sequences: Vec<u64> = table.entries.keys().copied().collect();
            for sequence in sequences {
                if let Some(entry) = table.entries.get_mut(&sequence) {
                    entry.close(now);
                }
                table.reconcile(sequence, now, &mut effects);
            }
        }
        self.apply_effects(effects);
    }

    /// Ready once the store keeps nothing for this client: how many releases it has not confirmed.
    pub(crate) fn poll_closed(&self, context: &mut Context<'_>) -> Poll<u64> {
        let mut table = self.table();
        if table.unsettled == 0 {
            return Poll::Ready(table.unconfirmed);
        }
        table.register_close_waker(context);
        Poll::Pending
    }

    /// Ready once the driver has dropped the store, which it does when the client is closed and everything is released.
    pub(crate) fn poll_driver_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut table = self.table();
        if table.is_driver_gone {
            return Poll::Ready(());
        }
        table.register_close_waker(context);
        Poll::Pending
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.table().is_closed
    }

    pub(crate) fn driver_gone(&self) {
        let (close_wakers, sleepers) = {
            let mut table = self.table();
            table.is_driver_gone = true;
            (std::mem::take(&mut table.close_wakers), std::mem::take(&mut table.sleepers))
        };
        // No driver is left to wake them at their time.
        close_wakers.into_iter().chain(sleepers.into_values()).for_each(Waker::wake);
    }

    /// The last handle was dropped: the driver ends once everything is released.
    pub(crate) fn on_handles_dropped(&self) {
        self.table().has_no_handles = true;
        self.alarm.notify_one();
    }

    /// What the driver must send now, and when it must ask again.
    pub(crate) fn due(&self, now: LocalTime) -> DueWork {
        let mut effects = Effects::default();
        let due = self.table().due(now, &mut effects);
        // The caller is the driver, which is awake.
        effects.wake_driver = false;
        self.apply_effects(effects);
        due
    }
}

impl Inbox for Session {
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let now = clock::local();
        let entries: Vec<(u64, Arc<Resource>)> = self
            .table()
            .entries
            .iter()
            .map(|(sequence, entry)| (*sequence, entry.resource.clone()))
            .collect();
        let sequences =
            entries.into_iter().filter(|(_, resource)| concerns(resource)).map(|(sequence, _)| sequence);
        for sequence in sequences {
            self.step(sequence, now, |entry| entry.handle_reconnected(now));
        }
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        let now = clock::local();
        self.table().entries.values().filter_map(|entry| entry.ttl_at_stake(now)).min()
    }

    fn deliver(&self, push: Push) {
        let now = clock::local();
        self.step(push.acquisition.sequence, now, |entry| entry.handle_push(now, &push));
    }
}
