//! What the holder of a lease asks of its entry.

use leasehold_core::{HandoffDecision, LocalTime, Loss, Outcome};

use super::{Entry, EntryId, Lease, Stage, Transmit};

impl Entry {
    /// Begins to release the lease, because its holder is done. Returns the loss if it was lost before.
    pub(in crate::engine) fn release_lease(&mut self, now: LocalTime) -> Option<Loss> {
        // A loss that nothing has noticed yet is logged.
        self.is_changed |= self.advance(now);
        let loss = self.remaining(now).err();
        self.abandon(now);
        loss
    }

    pub(in crate::engine) fn outcome(&mut self, now: LocalTime) -> Option<Outcome> {
        self.end_attempt(now);
        self.outcome
    }

    pub(in crate::engine) fn limit_hold(&mut self, ends_at: LocalTime) {
        if let Stage::Lease(Lease { machine, .. }) = &mut self.stage {
            machine.end_by(ends_at);
        }
    }

    /// Another lease is about to replace this one, or is not after all.
    pub(in crate::engine) fn set_replacing(&mut self, is_replacing: bool) {
        if let Stage::Lease(lease) = &mut self.stage {
            lease.is_replacing = is_replacing;
        }
    }

    /// Counts a renewal whose future was dropped as failed, so that the driver retries it.
    pub(in crate::engine) fn abandon_renewal(&mut self, now: LocalTime) {
        if let Stage::Lease(Lease { machine, .. }) = &mut self.stage
            && machine.is_renewing()
        {
            machine.handle_failure(now);
        }
    }

    /// Decides whether the lease goes to the next task of the local queue.
    pub(in crate::engine) fn hand_off(&mut self, now: LocalTime) -> HandoffDecision {
        match &mut self.stage {
            // A lease with a minimum hold is released to the store, which retains it.
            Stage::Lease(lease) if self.min_hold.length.is_zero() => lease.machine.hand_off(now),
            _ => HandoffDecision::Release,
        }
    }

    pub(in crate::engine) fn renew_now(&mut self, now: LocalTime) {
        if let Stage::Lease(Lease { machine, .. }) = &mut self.stage {
            machine.handle_hint(now);
        }
    }

    /// The renewal that a task sends now; none while one is in flight. A late release is the driver's.
    pub(in crate::engine) fn begin_renewal(&mut self, entry_id: EntryId, now: LocalTime) -> Option<Transmit> {
        self.renew_now(now);
        // Only an error from now on is the result.
        self.last_error = None;
        let is_late = matches!(&self.stage, Stage::Lease(lease) if lease.late_release_at.is_some());
        let transmit = if is_late { None } else { self.poll_transmit(entry_id, now) };
        if let Stage::Lease(Lease { machine, .. }) = &mut self.stage
            && transmit.is_some()
        {
            machine.limit_answer(now);
        }
        transmit
    }
}
