//! The table of one client's attempts and leases: what a change of one entry means for the other entries, the timers and
//! the driver.
//!
//! The caller holds the session's mutex, so nothing here wakes a task, logs, or calls the store. [`Effects`] collects that
//! for when the mutex is free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::{Context, Waker};

use leasehold_core::{Acquisition, ClientId, HandoffDecision, LocalTime, Outcome, Owner, Resource};
use leasehold_store::StoreError;

use super::entries::Entries;
use super::entry::{BeginError, Entry, Transmit};
use super::ids::{EntryId, Ids, QueueId, TicketNumber, WakerId};
use super::local_queue::{
    AcquireKey, CancelledWait, EnqueueError, LocalQueue, LocalQueues, QueueState, Ticket,
};
use super::log_event::LogEvent;
use super::releasing::ReleaseOutcome;

pub(super) struct Table {
    pub(super) id: ClientId,
    /// The session's.
    pub(super) ids: Ids,
    pub(super) local_queues: LocalQueues,
    /// By their ids.
    pub(super) entries: Entries,
    pub(super) timers: BTreeSet<(LocalTime, EntryId)>,
    pub(super) sleepers: BTreeMap<(LocalTime, WakerId), Waker>,
    /// When the driver wakes by itself.
    pub(super) driver_wakes_at: LocalTime,
    /// How many entries the store may still keep something for.
    pub(super) unsettled: usize,
    /// Companions of leases that have not ended.
    pub(super) companions: usize,
    /// The lock whose companion the store last refused to release, while there are companions.
    pub(super) refused_companion: Option<(Arc<Resource>, StoreError)>,
    /// The store still releases something by itself.
    pub(super) is_settling: bool,
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

/// What the caller must do once the mutex is free.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) wakers: Vec<Waker>,
    pub(super) log_events: Vec<(Arc<Resource>, LogEvent)>,
    pub(super) wake_driver: bool,
}

impl Table {
    pub(super) fn new(id: ClientId, ids: Ids) -> Self {
        Self {
            id,
            ids,
            local_queues: LocalQueues::default(),
            entries: Entries::default(),
            timers: BTreeSet::new(),
            sleepers: BTreeMap::new(),
            driver_wakes_at: LocalTime::NEVER,
            unsettled: 0,
            companions: 0,
            refused_companion: None,
            is_settling: false,
            unconfirmed: 0,
            close_wakers: Vec::new(),
            is_driver_gone: false,
            is_closed: false,
            has_no_handles: false,
        }
    }

    /// In a child of the process whose client this is.
    pub(super) fn forked(id: ClientId, ids: Ids) -> Self {
        Self { is_closed: true, is_driver_gone: true, has_no_handles: true, ..Self::new(id, ids) }
    }

    /// A request begins again. An error if another task makes it, or if what the store had for it is being released.
    pub(super) fn end_suspension(
        &mut self,
        attempt: Acquisition,
        now: LocalTime,
        effects: &mut Effects,
    ) -> Result<(), BeginError> {
        let Some(entry_id) = self.entries.of_attempt(attempt) else { return Ok(()) };
        let Some(entry) = self.entries.get_mut(&entry_id) else { return Ok(()) };
        let (is_referenced, is_settled) = (entry.is_referenced, entry.is_settled());
        let is_conditional = entry.releases_on_condition();
        let was_suspended = entry.end_suspension();
        self.reconcile(entry_id, now, effects);
        match (was_suspended, is_referenced) {
            (true, _) => Ok(()),
            (false, _) if is_settled => Ok(()),
            (false, true) => Err(BeginError::InUse),
            (false, false) if is_conditional => Err(BeginError::Unsettled),
            (false, false) => Err(BeginError::Released),
        }
    }

    pub(super) fn register_close_waker(&mut self, context: &mut Context<'_>) {
        if !self.close_wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.close_wakers.push(context.waker().clone());
        }
    }

    /// Steps one entry, and completes the step.
    pub(super) fn step<T>(
        &mut self,
        entry_id: EntryId,
        now: LocalTime,
        effects: &mut Effects,
        act: impl FnOnce(&mut Entry) -> T,
    ) -> Option<T> {
        let result = act(self.entries.get_mut(&entry_id)?);
        self.reconcile(entry_id, now, effects);
        Some(result)
    }

    /// Completes a step of one entry: advances it, updates its local queue and its timer, and removes it once it is done.
    pub(super) fn reconcile(&mut self, entry_id: EntryId, now: LocalTime, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&entry_id) else { return };
        if entry.advance(now) {
            effects.wakers.extend(entry.wakers.drain(..).map(|(_, waker)| waker));
            let resource = &entry.resource;
            effects.log_events.extend(entry.log_events.drain(..).map(|event| (resource.clone(), event)));
        }
        let granted = entry.take_granted_owner();
        if let Some((queue, _)) = entry.local_queue {
            self.on_entry_changed(queue, entry_id, now, effects);
        }
        if let Some((resource, owner)) = granted {
            self.wake_owner_attempts(&resource, &owner, now, effects);
        }
        self.update_timer(entry_id, effects);
        self.remove_if_settled(entry_id, effects);
    }

    /// Moves the entry's timer only if it is due earlier. A timer that fires too early costs one look at the entry, which is
    /// cheaper than moving it each time.
    fn update_timer(&mut self, entry_id: EntryId, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&entry_id) else { return };
        let due = entry.poll_timeout();
        if due.is_some() && entry.timer.is_some_and(|set| due >= Some(set)) {
            return;
        }
        if let Some(set) = entry.timer.take() {
            self.timers.remove(&(set, entry_id));
        }
        if let Some(due) = due {
            self.timers.insert((due, entry_id));
            entry.timer = Some(due);
            self.wake_driver_by(due, effects);
        }
    }

    fn remove_if_settled(&mut self, entry_id: EntryId, effects: &mut Effects) {
        let Some(entry) = self.entries.get_mut(&entry_id) else { return };
        if !entry.is_settled() {
            return;
        }
        let released = entry.release_outcome();
        let was_unsettled = std::mem::take(&mut entry.is_unsettled);
        if !entry.is_referenced {
            self.entries.remove(entry_id);
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
        let theirs = self.entries.of_owner(resource, owner);
        let undecided: Vec<EntryId> =
            theirs.filter(|(_, entry)| entry.outcome.is_none()).map(|(entry_id, _)| entry_id).collect();
        for entry_id in undecided {
            if let Some(entry) = self.entries.get_mut(&entry_id) {
                entry.recheck(now);
            }
            self.reconcile(entry_id, now, effects);
        }
    }

    /// The store keeps nothing for one more entry: counts it as settled.
    fn on_settled(&mut self, released: Option<ReleaseOutcome>, effects: &mut Effects) {
        self.unsettled -= 1;
        self.unconfirmed += u64::from(released == Some(ReleaseOutcome::Unconfirmed));
        self.check_settled(effects);
    }

    /// Whether the store keeps nothing for this client.
    pub(super) fn is_settled(&self) -> bool {
        self.unsettled == 0 && self.companions == 0 && !self.is_settling
    }

    pub(super) fn check_settled(&mut self, effects: &mut Effects) {
        if self.is_settled() {
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

    // --- Local queues ----------------------------------------------------------------------------

    pub(super) fn enqueue(
        &mut self,
        key: AcquireKey,
        number: TicketNumber,
        now: LocalTime,
        effects: &mut Effects,
    ) -> Result<(Ticket, Option<Transmit>), EnqueueError> {
        if self.is_closed {
            return Err(EnqueueError::Closed);
        }
        let id = self.local_queues.find(&key).unwrap_or_else(|| {
            let id = number.new_queue();
            self.local_queues.add(id, key);
            id
        });
        let ticket = Ticket { queue: id, number };
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return Err(EnqueueError::Closed) };
        let is_first = queue.entry().is_none();
        if !is_first && queue.waiting.len() >= queue.key.wait.max_queue as usize {
            return Err(EnqueueError::QueueFull);
        }
        queue.waiting.insert(number);
        if !is_first {
            return Ok((ticket, None));
        }
        let entry_id = self.ids.entry();
        let acquisition = entry_id.acquisition(self.id);
        let mut entry = queue.start_attempt(id, acquisition, queue.key.wait.max_queue, now);
        let transmit = entry.poll_transmit(entry_id, now);
        self.insert(entry_id, entry, now, effects);
        Ok((ticket, transmit))
    }

    pub(super) fn cancel_wait(
        &mut self,
        ticket: Ticket,
        now: LocalTime,
        effects: &mut Effects,
    ) -> CancelledWait {
        let Some(queue) = self.local_queues.by_id.get_mut(&ticket.queue) else {
            return CancelledWait::AttemptContinues;
        };
        queue.ended.remove(&ticket.number);
        let cancelled = match queue.state {
            QueueState::Assigned { lease, number, .. } if number == ticket.number => {
                let is_handed_off = self.hand_off(ticket.queue, lease, now, effects);
                self.reconcile(lease, now, effects);
                if is_handed_off {
                    CancelledWait::LeaseInUse
                } else {
                    CancelledWait::LastWaiter { entry: lease, may_be_in_store: true }
                }
            }
            QueueState::Assigned { lease, .. } | QueueState::Held(lease)
                if self.entries.get(&lease).is_some_and(|entry| entry.remaining(now).is_ok()) =>
            {
                CancelledWait::LeaseInUse
            }
            // The lease is lost, which the driver has not seen yet.
            QueueState::Assigned { .. } | QueueState::Held(_) => CancelledWait::AttemptContinues,
            QueueState::Acquiring(entry_id) | QueueState::AwaitingTokens(entry_id)
                if queue.waiting.is_empty() =>
            {
                queue.state = QueueState::Idle;
                let may_be_in_store =
                    self.entries.get(&entry_id).is_some_and(|entry| entry.may_be_in_store());
                CancelledWait::LastWaiter { entry: entry_id, may_be_in_store }
            }
            QueueState::Idle | QueueState::Acquiring(_) | QueueState::AwaitingTokens(_) => {
                CancelledWait::AttemptContinues
            }
        };
        self.local_queues.remove_if_empty(ticket.queue);
        cancelled
    }

    pub(super) fn insert(
        &mut self,
        entry_id: EntryId,
        mut entry: Box<Entry>,
        now: LocalTime,
        effects: &mut Effects,
    ) {
        if let Some(renewal) = entry.first_renewal(now) {
            // If the attempt is granted at once, the timer is already where the lease needs it.
            self.timers.insert((renewal, entry_id));
            entry.timer = Some(renewal);
            self.wake_driver_by(renewal, effects);
        }
        self.entries.insert(entry_id, entry);
        self.unsettled += 1;
        self.reconcile(entry_id, now, effects);
    }

    /// As `hand_off`, for a lease that a task holds. False if the queue has another lease or attempt by now.
    pub(super) fn hand_off_held(
        &mut self,
        id: QueueId,
        lease: EntryId,
        now: LocalTime,
        effects: &mut Effects,
    ) -> bool {
        let has_lease = |queue: &LocalQueue| matches!(queue.state, QueueState::Held(held) if held == lease);
        self.local_queues.by_id.get(&id).is_some_and(has_lease) && self.hand_off(id, lease, now, effects)
    }

    /// Gives a lease that its task no longer uses to the next task. Returns false if the lease must be released; if tasks
    /// wait then, the queue has begun a new attempt for them.
    pub(super) fn hand_off(
        &mut self,
        id: QueueId,
        lease: EntryId,
        now: LocalTime,
        effects: &mut Effects,
    ) -> bool {
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return false };
        if queue.waiting.is_empty() {
            queue.state = QueueState::Idle;
            self.local_queues.remove_if_empty(id);
            return false;
        }
        match self.entries.get_mut(&lease).map_or(HandoffDecision::Release, |entry| entry.hand_off(now)) {
            HandoffDecision::Next(token) => queue.assign(lease, token, &mut effects.wakers),
            HandoffDecision::AwaitTokens => queue.state = QueueState::AwaitingTokens(lease),
            HandoffDecision::Release if self.is_closed => {
                queue.end_waits(Outcome::Cancelled, None, &mut effects.wakers);
                return false;
            }
            HandoffDecision::Release => {
                let entry_id = self.ids.entry();
                // Its tasks wait already, so that no limit refuses them now.
                let acquisition = entry_id.acquisition(self.id);
                let entry = queue.start_attempt(id, acquisition, u32::MAX, now);
                // The driver sends it.
                self.insert(entry_id, entry, now, effects);
                return false;
            }
        }
        true
    }

    /// Updates a queue after its entry, the attempt or the lease, has changed.
    fn on_entry_changed(&mut self, id: QueueId, entry_id: EntryId, now: LocalTime, effects: &mut Effects) {
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return };
        let Some(entry) = self.entries.get_mut(&entry_id) else { return };
        if queue.entry() != Some(entry_id) {
            return;
        }
        if let QueueState::Acquiring(_) = queue.state {
            match entry.outcome {
                None => {}
                Some(Outcome::Granted { grant, .. }) => {
                    queue.assign(entry_id, grant.tokens.first, &mut effects.wakers);
                }
                Some(outcome) => {
                    entry.is_referenced = false;
                    queue.end_waits(outcome, entry.last_error.as_ref(), &mut effects.wakers);
                }
            }
            return;
        }
        let is_held = matches!(queue.state, QueueState::Held(_));
        let is_free = matches!(queue.state, QueueState::AwaitingTokens(_)) || entry.remaining(now).is_err();
        if is_free && !self.hand_off(id, entry_id, now, effects) && !is_held {
            self.abandon(entry_id, now);
        }
    }

    /// Releases a lease that no guard refers to. A guard would release it itself.
    fn abandon(&mut self, entry_id: EntryId, now: LocalTime) {
        if let Some(entry) = self.entries.get_mut(&entry_id) {
            entry.is_referenced = false;
            entry.abandon(now);
        }
    }
}
