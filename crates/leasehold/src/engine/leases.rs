//! What a guard does with its lease's entry.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquisition, LocalTime, Loss, Outcome, Owner, Resource, Token, TokenRange};

use super::entry::{Entry, Transmit};
use super::ids::{EntryId, QueueId};
use super::session::{Closed, Session};

/// How a task's hold of a lease ended.
pub(crate) enum EndedHold {
    /// The local queue keeps the lease for its next task.
    HandedOff,
    /// The lease is released by this request. `loss`: it had been lost before.
    Releasing { transmit: Option<Transmit>, loss: Option<Loss> },
}

/// The grant of a lease that was waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuedGrant {
    /// When the store granted the lease; none after a hand-off within the client.
    pub(crate) granted_at: Option<LocalTime>,
}

/// A lease that its client has forgotten.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetachedLease {
    pub(crate) acquisition: Acquisition,
    pub(crate) ttl: Duration,
    pub(crate) min_hold: Duration,
    /// See `MinHold::ends_at_close`.
    pub(crate) ends_at_close: bool,
    /// How long a release must be remembered, because an `Acquire` may still be in flight.
    pub(crate) tombstone: Duration,
    /// It must last longer than its ttl, so that a renewal must not shorten it.
    pub(crate) outlasts_ttl: bool,
    /// It was granted before to the same request.
    pub(crate) is_repeat: bool,
    /// Without a renewal.
    pub(crate) trusted_until: LocalTime,
}

/// A lease of another client that this client takes over.
#[derive(Clone, Debug)]
pub(crate) struct AttachedLease {
    pub(crate) detached: DetachedLease,
    pub(crate) owner: Option<Owner>,
    /// The first is the one that the store has. Tasks of the former client may have handed the lease on, with later ones.
    pub(crate) tokens: TokenRange,
    pub(crate) replicas: u32,
    /// The lease is only renewed: this client never releases it.
    pub(crate) is_borrowed: bool,
}

impl Session {
    /// Takes a held lease out of the table, without a release. A local queue begins a new attempt for its other tasks.
    pub(crate) fn detach(
        &self,
        entry_id: EntryId,
        queue: Option<QueueId>,
        now: LocalTime,
    ) -> Result<DetachedLease, Loss> {
        self.act(|table, effects| {
            let entry = table.entries.get_mut(&entry_id).ok_or(Loss::Closed)?;
            let detached = entry.detach(now)?;
            if let Some(queue) = queue {
                table.hand_off_held(queue, entry_id, now, effects);
            }
            table.reconcile(entry_id, now, effects);
            Ok(detached)
        })
    }

    /// Adds a lease that the store has. It was valid for this time when the store looked, which was not before `asked_at`.
    pub(crate) fn attach(
        &self,
        resource: Arc<Resource>,
        lease: AttachedLease,
        asked_at: LocalTime,
        valid_for: Duration,
    ) -> Result<EntryId, Closed> {
        let entry_id = self.ids.entry();
        let entry = Box::new(Entry::attached(resource, lease, asked_at, valid_for));
        self.act(|table, effects| {
            if table.is_closed {
                return Err(Closed);
            }
            table.insert(entry_id, entry, self.now(), effects);
            Ok(entry_id)
        })
    }

    /// The store has answered that it does not have this lease of the owner any more.
    pub(crate) fn lose(&self, resource: &Resource, owner: &Owner, acquisition: Acquisition, now: LocalTime) {
        // An attached lease has another id here.
        self.lose_where(resource, owner, now, |entry| entry.is_attempt(acquisition));
    }

    /// How long a release of this lease is to refuse an `Acquire` that may still be on its way: of an attempt not at all, because it
    /// asks again.
    pub(crate) fn tombstone_of(
        &self,
        resource: &Resource,
        owner: &Owner,
        acquisition: Acquisition,
    ) -> Duration {
        let table = self.table();
        let mut theirs = table.entries.of_owner(resource, owner);
        let known = theirs.find(|(_, entry)| entry.is_attempt(acquisition));
        known.map_or(Duration::ZERO, |(_, entry)| entry.tombstone())
    }

    /// The store has granted this token to the owner: it does not have those leases of the owner any more that have a lower one.
    pub(crate) fn lose_before(&self, resource: &Resource, owner: &Owner, granted: Token, now: LocalTime) {
        self.lose_where(resource, owner, now, |entry| {
            let is_earlier =
                matches!(entry.outcome, Some(Outcome::Granted { grant, .. }) if grant.tokens.first < granted);
            is_earlier && entry.is_referenced
        });
    }

    fn lose_where(
        &self,
        resource: &Resource,
        owner: &Owner,
        now: LocalTime,
        is_lost: impl Fn(&Entry) -> bool,
    ) {
        let entry_ids: Vec<EntryId> = {
            let table = self.table();
            let theirs = table.entries.of_owner(resource, owner);
            theirs.filter(|(_, entry)| is_lost(entry)).map(|(entry_id, _)| entry_id).collect()
        };
        for entry_id in entry_ids {
            self.step(entry_id, now, |entry| entry.lose(now));
        }
    }

    /// The token by which the store knows the lease.
    pub(crate) fn lease_token(&self, entry_id: EntryId) -> Option<Token> {
        match self.table().entries.get(&entry_id)?.outcome? {
            Outcome::Granted { grant, .. } => Some(grant.tokens.first),
            _ => None,
        }
    }

    /// How long the store keeps the lock after a release; `None` once the lease is gone.
    pub(crate) fn min_hold(&self, entry_id: EntryId) -> Option<Duration> {
        self.table().entries.get(&entry_id).map(|entry| entry.min_hold.length)
    }

    /// The attempt that the store knows as the holder of this lease.
    #[cfg(feature = "_simulation")]
    pub(crate) fn acquisition(&self, entry_id: EntryId) -> Option<Acquisition> {
        self.table().entries.get(&entry_id)?.acquisition()
    }

    /// The grant that gave a lease this token; none if the lease was granted without a wait.
    pub(crate) fn queued_grant(&self, entry_id: EntryId, token: Token) -> Option<QueuedGrant> {
        let table = self.table();
        let entry = table.entries.get(&entry_id)?;
        match entry.outcome {
            Some(Outcome::Granted { grant, since, .. }) if grant.tokens.first == token => {
                entry.has_waited().then_some(QueuedGrant { granted_at: Some(since) })
            }
            _ => Some(QueuedGrant { granted_at: None }),
        }
    }

    /// How much longer a held lease may be trusted, or why it was lost.
    pub(crate) fn remaining(&self, entry_id: EntryId, now: LocalTime) -> Result<Duration, Loss> {
        self.table().entries.get(&entry_id).map_or(Err(Loss::Closed), |entry| entry.remaining(now))
    }

    /// The loss of a lease of this owner that still has a guard. `granted`: a token of a later grant, which implies a loss.
    pub(crate) fn loss_of_owner(
        &self,
        resource: &Resource,
        owner: &Owner,
        granted: Option<Token>,
        now: LocalTime,
    ) -> Option<Loss> {
        let table = self.table();
        let mut theirs = table.entries.of_owner(resource, owner).filter(|(_, entry)| entry.is_referenced);
        theirs.find_map(|(_, entry)| entry.loss(now, granted))
    }

    /// Whether less than a tenth of a lease's ttl has passed.
    pub(crate) fn is_fresh(&self, entry_id: EntryId, now: LocalTime) -> bool {
        self.table().entries.get(&entry_id).is_some_and(|entry| entry.is_fresh(now))
    }

    /// See [`Entry::needs_release`].
    pub(crate) fn needs_release(&self, entry_id: EntryId) -> bool {
        self.table().entries.get(&entry_id).is_some_and(|entry| entry.needs_release())
    }

    /// Begins a renewal, unless one is in flight.
    pub(crate) fn begin_renewal(&self, entry_id: EntryId, now: LocalTime) -> Option<Transmit> {
        self.step(entry_id, now, |entry| entry.begin_renewal(entry_id, now))?
    }

    /// The future that awaited the renewal's response was dropped.
    pub(crate) fn abandon_renewal(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.abandon_renewal(now));
    }

    /// As `abandon_renewal`, for the `Acquire` of a local queue.
    pub(crate) fn abandon_acquire(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.abandon_acquire(now));
    }

    /// Ends a task's hold of a lease: hands the lease off to the next task of its local queue, or begins to release it.
    pub(crate) fn release_or_hand_off(
        &self,
        queue: Option<QueueId>,
        lease: EntryId,
        now: LocalTime,
    ) -> EndedHold {
        self.act(|table, effects| {
            if queue.is_some_and(|queue| table.hand_off_held(queue, lease, now, effects)) {
                table.reconcile(lease, now, effects);
                return EndedHold::HandedOff;
            }
            let began = table.step(lease, now, effects, |entry| {
                let loss = entry.release_lease(now);
                EndedHold::Releasing { transmit: entry.poll_transmit(lease, now), loss }
            });
            began.unwrap_or(EndedHold::Releasing { transmit: None, loss: Some(Loss::Closed) })
        })
    }

    /// When the maximum hold of this lease ends; `NEVER` without one.
    pub(crate) fn ends_at(&self, entry_id: EntryId) -> LocalTime {
        self.table().entries.get(&entry_id).map_or(LocalTime::NEVER, |entry| entry.ends_at())
    }

    /// Sets the end of the hold. An exchanged lease continues the hold of the lease before it.
    pub(crate) fn limit_hold(&self, entry_id: EntryId, ends_at: LocalTime, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.limit_hold(ends_at));
    }

    /// Replaces the minimum hold, counted from the grant. A lease that the store does not have any more keeps none.
    pub(crate) fn set_min_hold(&self, entry_id: EntryId, min_hold: Duration, now: LocalTime) {
        self.step(entry_id, now, |entry| {
            if entry.remaining(now) != Err(Loss::Gone) {
                entry.min_hold.length = min_hold;
            }
        });
    }

    /// The lease of an attempt was never used, so its minimum hold does not apply.
    pub(crate) fn end_unused_min_hold(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| {
            if !entry.min_hold.is_continued {
                entry.min_hold.length = Duration::ZERO;
            }
        });
    }

    /// Another lease is to take the place of this one, or is not after all. Meanwhile its end is not logged as a loss.
    pub(crate) fn set_replacing(&self, entry_id: EntryId, is_replacing: bool, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.set_replacing(is_replacing));
    }

    /// The guard of an attached lease releases it from now on.
    pub(crate) fn own(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, Entry::own);
    }

    /// Another lease has replaced this one, and no guard refers to it.
    pub(crate) fn mark_replaced(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| {
            entry.is_referenced = false;
            entry.mark_replaced(now);
        });
    }

    /// Cancels the attempt or releases the lease. The driver sends the release.
    pub(crate) fn cancel(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.abandon(now));
    }

    /// No future or guard refers to this entry: cancels the attempt or releases the lease, and removes the entry after that.
    pub(crate) fn release_dropped(&self, entry_id: EntryId, now: LocalTime) -> Option<Transmit> {
        self.step(entry_id, now, |entry| {
            entry.is_referenced = false;
            entry.abandon(now);
            entry.poll_transmit(entry_id, now)
        })?
    }

    /// The task that made a request is gone, or could not tell its caller of the grant: the caller may repeat the request for a while.
    pub(crate) fn suspend(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| {
            entry.is_referenced = false;
            entry.suspend(now);
        });
    }

    /// As [`Self::suspend`], if the lease is that of a request. Returns whether it is.
    pub(crate) fn suspend_request(&self, entry_id: EntryId, now: LocalTime) -> bool {
        let is_request =
            self.table().entries.get(&entry_id).is_some_and(|entry| entry.requested_by.is_some());
        if is_request {
            self.suspend(entry_id, now);
        }
        is_request
    }

    /// The entry that releases this attempt unless another client speaks for it.
    pub(crate) fn conditional_release(&self, attempt: Acquisition) -> Option<EntryId> {
        let table = self.table();
        let entry_id = table.entries.of_attempt(attempt)?;
        table.entries.get(&entry_id)?.releases_on_condition().then_some(entry_id)
    }

    /// The holder of this lease was not told of it. That of a request is suspended; any other one is released.
    pub(crate) fn return_lease(&self, resource: Arc<Resource>, lease: DetachedLease, token: Token) {
        let (entry_id, now) = (self.ids.entry(), self.now());
        let mut entry = Box::new(Entry::returned(resource, lease, token, self.id, now));
        self.act(|table, effects| {
            // A caller that repeats its request makes another entry of it. A closed client leaves the lease to expire.
            if !table.is_closed && table.end_suspension(lease.acquisition, now, effects).is_ok() {
                entry.suspend_lease(lease.acquisition, now);
                table.insert(entry_id, entry, now, effects);
            }
        });
    }

    /// Lets the driver send this release.
    pub(crate) fn defer_release(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry| entry.defer_release(now));
    }
}
