//! The secrets of one attempt, and which of them a push may prove.

use crate::command::Grant;
use crate::id::Acquisition;
use crate::secret::{GrantProof, GrantSecret, SecretKey};
use crate::time::StoreTime;

/// How many of its last secrets a client remembers to recognise the grant of a delayed `Acquire`.
const REMEMBERED: u32 = 8;

/// The secrets of the `Acquire`s of one attempt. They have numbers, from 1.
#[derive(Clone, Copy, Debug)]
pub struct GrantSecrets {
    key: SecretKey,
    acquisition: Acquisition,
    /// The last one that was sent. The store may have granted the attempt since that `Acquire` arrived.
    sent: u32,
    /// The last one that was answered: the store may have granted the attempt before the `Acquire` in flight arrived.
    answered: u32,
    /// A push has proven it, but the grant could not be used. Neither it nor an earlier one counts any more.
    used: u32,
}

impl GrantSecrets {
    pub(super) const fn new(key: SecretKey, acquisition: Acquisition) -> Self {
        Self { key, acquisition, sent: 0, answered: 0, used: 0 }
    }

    /// The secret of the `Acquire` that is sent now.
    pub(super) fn draw(&mut self) -> GrantSecret {
        self.sent += 1;
        self.secret(self.sent)
    }

    /// The last `Acquire` is answered: the store has replaced the secrets of earlier ones.
    pub(super) const fn handle_answered(&mut self) {
        self.answered = self.sent;
    }

    /// Which secret that counts now this push proves, if any.
    pub(super) fn proven(&self, at: StoreTime, grant: &Grant, proof: GrantProof) -> Option<u32> {
        let counts = [self.sent, self.answered].into_iter().filter(|number| *number > self.used);
        self.first_proven(counts, at, grant, proof)
    }

    /// The grant of this secret was pushed, and could not be used.
    pub(super) fn handle_used(&mut self, number: u32) {
        self.used = self.used.max(number);
    }

    /// Whether the store has pushed this grant to the attempt at any time.
    #[must_use]
    pub fn is_genuine(&self, at: StoreTime, grant: &Grant, proof: GrantProof) -> bool {
        let oldest = self.sent.saturating_sub(REMEMBERED) + 1;
        self.first_proven((oldest..=self.sent).rev(), at, grant, proof).is_some()
    }

    fn first_proven(
        &self,
        mut numbers: impl Iterator<Item = u32>,
        at: StoreTime,
        grant: &Grant,
        proof: GrantProof,
    ) -> Option<u32> {
        numbers.find(|number| self.secret(*number).prove(at, grant) == proof)
    }

    fn secret(&self, number: u32) -> GrantSecret {
        self.key.secret(self.acquisition, number)
    }
}
