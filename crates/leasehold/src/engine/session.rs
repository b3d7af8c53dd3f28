//! One client's attempts and leases: a table behind one mutex, stepped by the core's machines.
//!
//! A caller (a future, a guard, the driver) takes the mutex, steps a machine, and frees the mutex before it calls the store,
//! because the store may deliver a push to this table. Futures are passive: they register a waker and look at their entry
//! when they are woken, so they run on any executor.
//!
//! There is no queue of releases: a release stays in its own entry until the store has confirmed it, or until the lease has
//! expired in the store.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
#[cfg(not(shuttle))]
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(shuttle)]
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

// The test of threads in `sim/` decides which thread runs next.
use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, Answer, ClientId, LeaseTerms, LocalTime, Loss, Outcome, Push,
    Reply, Resource, SecretKey, WaitPolicy,
};
use leasehold_store::clock::Clock;
use leasehold_store::process::PerProcess;
use leasehold_store::{CallResult, Inbox, StoreError, wakes};
#[cfg(shuttle)]
use shuttle::sync::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::due::DueWork;
use super::entry::{BeginError, Entry, MinHold, Transmit};
use super::ids::{EntryId, Ids, QueueId, UncountedId};
use super::local_queue::{
    AcquireKey, CancelledWait, EnqueueError, LocalQueue, QueueState, Ticket, WaitOutcome,
};
use super::log_event::LogEvent;
use super::releasing::ReleaseOutcome;
use super::table::{Effects, Table};
use crate::telemetry::ClientTelemetry;

/// The attempts, leases and releases of one client.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    /// From which the secrets of the client's attempts are derived.
    pub(crate) secret_key: SecretKey,
    table: PerProcess<Mutex<Table>>,
    pub(super) ids: Ids,
    clock: Clock,
    telemetry: ClientTelemetry,
    /// Wakes the driver's thread before its own timer does.
    pub(super) alarm: Notify,
}

/// The client was closed.
pub(crate) struct Closed;

impl Session {
    pub(crate) fn new(id: ClientId, secret_key: SecretKey, clock: Clock, telemetry: ClientTelemetry) -> Self {
        let ids = Ids::new();
        let table = Table::new(id, ids.clone());
        Self {
            id,
            secret_key,
            table: PerProcess::new(Mutex::new(table)),
            ids,
            clock,
            telemetry,
            alarm: Notify::new(),
        }
    }

    /// The time by this client's clock.
    pub(crate) fn now(&self) -> LocalTime {
        self.clock.local()
    }

    /// This process is a child of the one whose client this is. It sees the table of a client that was closed.
    pub(crate) fn is_forked(&self) -> bool {
        !self.table.is_current()
    }

    /// Wakes the driver to process what is due.
    fn wake_driver(&self) {
        if self.is_forked() {
            return;
        }
        match &self.clock {
            Clock::System => self.alarm.notify_one(),
            Clock::Manual(clock) => clock.run_drivers(),
        }
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        let table = self.table.get(|| Mutex::new(Table::forked(self.id, self.ids.clone())));
        // A panic in a machine leaves at most one entry half stepped.
        table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of entries.
    #[cfg(any(test, feature = "_simulation"))]
    pub(crate) fn len(&self) -> usize {
        self.table().entries.len()
    }

    pub(crate) fn next_acquisition(&self) -> Acquisition {
        self.ids.entry().acquisition(self.id)
    }

    /// Changes the table, and applies the effects with the mutex free.
    pub(super) fn act<T>(&self, change: impl FnOnce(&mut Table, &mut Effects) -> T) -> T {
        let mut effects = Effects::default();
        let result = change(&mut self.table(), &mut effects);
        self.apply_effects(effects);
        result
    }

    /// Steps one entry, and reconciles the table.
    pub(super) fn step<T>(
        &self,
        entry_id: EntryId,
        now: LocalTime,
        act: impl FnOnce(&mut Entry) -> T,
    ) -> Option<T> {
        self.act(|table, effects| table.step(entry_id, now, effects, act))
    }

    /// As [`Self::step`], for the entry of this attempt.
    fn step_attempt(&self, attempt: Acquisition, now: LocalTime, act: impl FnOnce(&mut Entry)) {
        self.act(|table, effects| {
            let entry_id = table.entries.of_attempt(attempt)?;
            table.step(entry_id, now, effects, act)
        });
    }

    fn apply_effects(&self, effects: Effects) {
        // First: wakers and log subscribers are code of the program, and may panic.
        if effects.wake_driver {
            self.wake_driver();
        }
        wake_all(effects.wakers);
        for (resource, event) in effects.log_events {
            if let LogEvent::Lost(loss, _) = event {
                self.telemetry.lost(resource.kind, loss);
            }
            event.log(&resource);
        }
    }

    // --- Attempts --------------------------------------------------------------------------------

    /// Adds an attempt and returns its first request. The entry exists before the request is sent, so no push can precede it.
    pub(crate) fn begin(
        &self,
        resource: Arc<Resource>,
        terms: LeaseTerms,
        min_hold: MinHold,
        command: Acquire,
        wait_policy: Option<WaitPolicy>,
        now: LocalTime,
    ) -> Result<(EntryId, Option<Transmit>), BeginError> {
        let (acquisition, owner) = (command.acquisition, command.owner.clone());
        let uncounted = UncountedId::of(acquisition);
        let entry_id = uncounted.map_or_else(|| acquisition.into(), |_| self.ids.entry());
        let machine = AcquireMachine::new(command, wait_policy, now);
        let mut entry = Box::new(Entry::new(resource, owner, terms, min_hold, machine));
        entry.name_attempt(acquisition, self.id);
        self.act(|table, effects| {
            if table.is_closed {
                return Err(BeginError::Closed);
            }
            if uncounted.is_some() {
                table.end_suspension(acquisition, now, effects)?;
            }
            let transmit = entry.poll_transmit(entry_id, now);
            table.entries.insert(entry_id, entry);
            table.unsettled += 1;
            table.reconcile(entry_id, now, effects);
            Ok((entry_id, transmit))
        })
    }

    /// Steps an entry with the response to its request. Returns the attempt's outcome, which saves the caller a second look.
    pub(crate) fn handle_response(
        &self,
        transmit: &Transmit,
        now: LocalTime,
        answered: &CallResult,
    ) -> Option<Outcome> {
        self.handle_polled_response(None, transmit, now, answered)
    }

    /// As [`Self::handle_response`]. `polled_by`: the task of a local queue that has received the response. It looks at its wait right
    /// after, so it is not woken.
    pub(crate) fn handle_polled_response(
        &self,
        polled_by: Option<Ticket>,
        transmit: &Transmit,
        now: LocalTime,
        answered: &CallResult,
    ) -> Option<Outcome> {
        self.telemetry.answered(&transmit.command, now.since(transmit.sent_at), answered);
        let (outcome, waker) = self.act(|table, effects| {
            let waker = polled_by.and_then(|ticket| table.local_queues.take_waker(ticket));
            let outcome = table.step(transmit.entry, now, effects, |entry| {
                entry.handle_response(transmit, now, answered);
                entry.outcome(now)
            });
            (outcome, waker)
        });
        drop(waker);
        outcome?
    }

    /// Steps an entry with the response to its release. Returns the outcome if the release is complete.
    pub(crate) fn handle_release_response(
        &self,
        transmit: &Transmit,
        answered: &CallResult,
    ) -> Option<ReleaseOutcome> {
        // Only a release that failed, or found no lease, uses the time.
        let is_released = matches!(answered, Ok(Answer { reply: Reply::Released, .. }));
        let now = if is_released { transmit.sent_at } else { self.now() };
        self.step(transmit.entry, now, |entry| {
            entry.handle_response(transmit, now, answered);
            // A dropped guard does not refer to it any more.
            entry.is_referenced &= entry.release_outcome().is_none();
            entry.release_outcome()
        })?
    }

    /// Why the last renewal of this entry's lease failed, or of its companion; none if it succeeded.
    pub(crate) fn renewal_error(&self, entry_id: EntryId) -> Option<StoreError> {
        let table = self.table();
        let entry = table.entries.get(&entry_id)?;
        entry.renewal_error.as_ref().or(entry.companion_error.as_ref()).cloned()
    }

    /// Why the lease of this entry was not renewed before this loss; none if that is not its cause.
    pub(crate) fn loss_reason(&self, entry_id: EntryId, loss: Loss) -> Option<StoreError> {
        self.table().entries.get(&entry_id)?.loss_reason(loss).cloned()
    }

    /// Why the release of this entry is not confirmed yet, after its first failure.
    pub(crate) fn release_error(&self, entry_id: EntryId) -> Option<StoreError> {
        self.table().entries.get(&entry_id)?.release_error().cloned()
    }

    /// The oldest attempt, lease or release whose commands the store refuses at present, and the error.
    pub(crate) fn refusal(&self) -> Option<(Arc<Resource>, StoreError)> {
        let table = self.table();
        let refused =
            table.entries.iter().filter_map(|(entry_id, entry)| Some((*entry_id, entry, entry.refusal()?)));
        let oldest = refused.min_by_key(|(entry_id, ..)| *entry_id);
        let oldest = oldest.map(|(_, entry, error)| (entry.resource.clone(), error.clone()));
        oldest.or_else(|| table.refused_companion.clone())
    }

    // --- A task's wait in a local queue -----------------------------------------------------------

    /// Joins the end of a local queue. The first task also gets the command to send.
    pub(crate) fn enqueue(
        &self,
        key: AcquireKey,
        now: LocalTime,
    ) -> Result<(Ticket, Option<Transmit>), EnqueueError> {
        let number = self.ids.ticket();
        self.act(|table, effects| table.enqueue(key, number, now, effects))
    }

    /// Whether a task of this client has the lease, or is about to get it, so that an attempt without waiting need not ask the store.
    pub(crate) fn holds_lease(&self, key: &AcquireKey, now: LocalTime) -> bool {
        let table = self.table();
        let queue = table.local_queues.find(key).and_then(|id| table.local_queues.by_id.get(&id));
        let lease = queue
            .filter(|queue| !matches!(queue.state, QueueState::Acquiring(_)))
            .and_then(LocalQueue::entry);
        lease.and_then(|lease| table.entries.get(&lease)).is_some_and(|entry| entry.remaining(now).is_ok())
    }

    pub(crate) fn poll_wait(&self, ticket: Ticket, context: &mut Context<'_>) -> Poll<WaitOutcome> {
        let replaced;
        {
            let mut table = self.table();
            let Some(queue) = table.local_queues.by_id.get_mut(&ticket.queue) else {
                return Poll::Ready(WaitOutcome::Ended((Outcome::Cancelled, None)));
            };
            if let QueueState::Assigned { lease, number, token } = queue.state
                && number == ticket.number
            {
                queue.state = QueueState::Held(lease);
                replaced = queue.waiting.remove(number);
                drop(table);
                drop(replaced);
                return Poll::Ready(WaitOutcome::Granted(lease, token));
            }
            if let Some(ended) = queue.ended.remove(&ticket.number) {
                table.local_queues.remove_if_empty(ticket.queue);
                return Poll::Ready(WaitOutcome::Ended(ended));
            }
            replaced = match queue.waiting.get_mut(ticket.number) {
                Some(Some(waker)) if waker.will_wake(context.waker()) => None,
                Some(slot) => slot.replace(context.waker().clone()),
                None => None,
            };
        }
        // Dropping a waker may drop its task, and with it a guard of this session, which takes the mutex.
        drop(replaced);
        Poll::Pending
    }

    /// Takes a task out of its local queue.
    pub(crate) fn cancel_wait(&self, ticket: Ticket, now: LocalTime) -> CancelledWait {
        let (cancelled, waker) = self.act(|table, effects| {
            let queue = table.local_queues.by_id.get_mut(&ticket.queue);
            let waker = queue.and_then(|queue| queue.waiting.remove(ticket.number));
            (table.cancel_wait(ticket, now, effects), waker)
        });
        drop(waker);
        cancelled
    }

    /// Ends a task's hold of this lease. Returns whether the queue keeps the lease for its next task.
    pub(crate) fn hand_off(&self, queue: QueueId, lease: EntryId, now: LocalTime) -> bool {
        self.act(|table, effects| {
            let is_handed_off = table.hand_off_held(queue, lease, now, effects);
            table.reconcile(lease, now, effects);
            is_handed_off
        })
    }

    // --- Closing ---------------------------------------------------------------------------------

    /// Refuses new attempts, and begins to release everything.
    pub(crate) fn close(&self, now: LocalTime) {
        self.act(|table, effects| {
            if !std::mem::replace(&mut table.is_closed, true) {
                // Releases that failed before the close are not its result.
                table.unconfirmed = 0;
            }
            effects.wake_driver = true;
            for entry_id in table.entries.sorted_numbers(|_| true) {
                if let Some(entry) = table.entries.get_mut(&entry_id) {
                    entry.close(now);
                }
                table.reconcile(entry_id, now, effects);
            }
        });
    }

    /// Ready once the store keeps nothing for this client: how many releases it has not confirmed.
    pub(crate) fn poll_closed(&self, context: &mut Context<'_>) -> Poll<u64> {
        let mut table = self.table();
        if table.is_settled() {
            return Poll::Ready(table.unconfirmed);
        }
        if table.is_driver_gone {
            // It panicked. What it has not released expires by itself.
            return Poll::Ready(table.unconfirmed + (table.unsettled + table.companions) as u64);
        }
        table.register_close_waker(context);
        Poll::Pending
    }

    /// The client ends once the store has settled.
    pub(crate) fn begin_settling(&self) {
        self.table().is_settling = true;
    }

    /// The store has settled, or something keeps a lock from others that no entry of the table has reported.
    pub(crate) fn end_settling(&self, is_settled: bool) {
        let mut table = self.table();
        table.is_settling = false;
        if !is_settled {
            table.unconfirmed = table.unconfirmed.max(1);
        }
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
        wake_all(close_wakers.into_iter().chain(sleepers.into_values()));
    }

    /// The last handle was dropped: the driver ends once everything is released.
    pub(crate) fn on_handles_dropped(&self) {
        self.table().has_no_handles = true;
        self.wake_driver();
    }

    /// What the driver must send now, and when it must ask again.
    pub(crate) fn due(&self, now: LocalTime) -> DueWork {
        self.act(|table, effects| {
            let due = table.due(now, effects);
            // The caller is the driver, which is awake.
            effects.wake_driver = false;
            due
        })
    }
}

impl Inbox for Session {
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        self.telemetry.reconnected();
        let now = self.now();
        let mut entries: Vec<(EntryId, Arc<Resource>)> = self
            .table()
            .entries
            .iter()
            .map(|(entry_id, entry)| (*entry_id, entry.resource.clone()))
            .collect();
        entries.sort_unstable_by_key(|(entry_id, _)| *entry_id);
        let entry_ids =
            entries.into_iter().filter(|(_, resource)| concerns(resource)).map(|(entry_id, _)| entry_id);
        for entry_id in entry_ids {
            self.step(entry_id, now, |entry| entry.handle_reconnected(now));
        }
    }

    fn is_idle(&self) -> bool {
        self.table().entries.is_empty()
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        let now = self.now();
        self.table().entries.values().filter_map(|entry| entry.ttl_at_stake(now)).min()
    }

    fn deliver(&self, push: Push) {
        let now = self.now();
        self.step_attempt(push.acquisition, now, |entry| entry.handle_push(now, &push));
    }

    fn recheck(&self, attempt: Acquisition) {
        let now = self.now();
        self.step_attempt(attempt, now, |entry| entry.recheck(now));
    }
}

/// Wakes all of them. If a waker panics, the others are woken first.
fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    let wake = |waker: Waker| catch_unwind(AssertUnwindSafe(|| wakes::wake(waker))).err();
    let panics: Vec<_> = wakers.into_iter().filter_map(wake).collect();
    if let Some(first) = panics.into_iter().next() {
        resume_unwind(first);
    }
}
