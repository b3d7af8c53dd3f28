//! Pushes to an attempt, and until when a pushed grant may be trusted.
//!
//! Anybody who may publish on the server can send a push, and repeat one. So only a grant that proves a secret of the attempt counts.
//! All other pushes are hints: they let the attempt ask the store sooner than the last answer said, at most once a second, and
//! never later.

use super::{AcquireMachine, Phase, PushedGrant};
use crate::command::{Grant, HeadHint, Push, PushKind};
use crate::model::CLAIM_WINDOW;
use crate::secret::GrantProof;
use crate::time::{LocalTime, StoreTime, drift_margin};

/// Local send time of an answered `Acquire`, and the store's time in the answer.
type Anchor = (LocalTime, StoreTime);

impl AcquireMachine {
    /// Handles a push. A finished attempt ignores it, because its release was sent or its lease is known.
    pub fn handle_push(&mut self, now: LocalTime, push: &Push) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        match push.kind {
            PushKind::Granted(grant, proof) => match self.proven(push.at, &grant, proof) {
                Some(number) => self.handle_granted(now, grant, push.at, number),
                None => self.handle_pushed_hint(now),
            },
            PushKind::Next(head) => self.handle_early_next(now, head, push.at),
            // A contended push is for a holder: the answer with the grant is in flight.
            PushKind::Revoked | PushKind::Contended => self.handle_pushed_hint(now),
        }
    }

    /// A push that anybody may have sent: it never delays a re-check.
    fn handle_pushed_hint(&mut self, now: LocalTime) {
        let due = self.hints.due(now);
        self.recheck_by(due);
    }

    fn proven(&self, at: StoreTime, grant: &Grant, proof: GrantProof) -> Option<u32> {
        self.secrets.as_ref()?.proven(at, grant, proof)
    }

    /// The last answer to measure a push from, unless another server may have sent the push.
    fn valid_anchor(&self) -> Option<Anchor> {
        self.anchor.filter(|_| self.anchor_stale_since.is_none())
    }

    /// Handles a grant that proves this secret.
    fn handle_granted(&mut self, now: LocalTime, grant: Grant, at: StoreTime, secret: u32) {
        let longest = self.command.ttl.min(CLAIM_WINDOW);
        let grant = Grant { valid_for: grant.valid_for.min(longest), ..grant };
        let pushed = PushedGrant { grant, at, received_at: now, secret };
        if let Some(anchor) = self.valid_anchor() {
            self.handle_pushed(now, pushed, anchor);
        } else if self.anchor_stale_since.is_some() {
            // The answer in flight may be older than the push.
            self.recheck_unusable(now, secret);
        } else if self.early_push.is_none_or(|early_push| early_push.at < at) {
            // The newest grant counts, of that its first push: an older grant may have lapsed unclaimed.
            self.early_push = Some(pushed);
        }
    }

    fn handle_early_next(&mut self, now: LocalTime, head: HeadHint, at: StoreTime) {
        match (self.valid_anchor(), &self.phase) {
            (Some(anchor), Phase::Queued { .. }) => self.handle_next(now, head, anchor),
            // The answer in flight may be older than the push.
            (Some(_), Phase::InFlight { .. }) => self.early_next = Some((head, at)),
            (Some(_), Phase::SendAt { .. } | Phase::Done(_)) => {}
            (None, _) if self.anchor_stale_since.is_none() => self.early_next = Some((head, at)),
            (None, _) => self.handle_pushed_hint(now),
        }
    }

    /// The store says that this attempt is the first in the queue: it re-checks when the lease ends, if that is sooner than the last
    /// answer said.
    pub(super) fn handle_next(&mut self, now: LocalTime, head: HeadHint, (sent_at, answered_at): Anchor) {
        let Phase::Queued { repoll_at } = self.phase else { return };
        let due = self.next_repoll(now, sent_at, answered_at, head.into());
        if due < repoll_at {
            let due = self.hints.due(due);
            self.recheck_by(due);
        }
    }

    /// A grant that the attempt can't use: the store's answer says what is left of it. A repetition of the push has no effect.
    fn recheck_unusable(&mut self, now: LocalTime, secret: u32) {
        if let Some(secrets) = &mut self.secrets {
            secrets.handle_used(secret);
        }
        self.handle_hint(now);
    }

    /// Computes the trust period of a pushed grant relative to the anchor.
    pub(super) fn handle_pushed(
        &mut self,
        now: LocalTime,
        PushedGrant { grant, at, received_at, secret }: PushedGrant,
        (sent_at, answered_at): Anchor,
    ) {
        // Older than the answer, which no longer showed it: its age is unknown.
        let is_older = at < answered_at;
        if is_older || self.policy.is_some_and(|policy| policy.confirms_pushes) {
            self.recheck_unusable(now, secret);
            return;
        }
        // The store's clock advanced by `elapsed` since the anchoring answer. A delayed push therefore cannot extend trust.
        let elapsed = at.since(answered_at);
        // More than has passed here: the store's clock was set forward, and the age of the push is unknown.
        if elapsed > received_at.since(sent_at) + drift_margin(elapsed) {
            self.recheck_unusable(now, secret);
            return;
        }
        let since = received_at.min(sent_at + elapsed);
        let margin = drift_margin(elapsed + grant.valid_for);
        let trusted_until = since + grant.valid_for.saturating_sub(margin);
        // The request that the push is measured from may have been delayed for seconds, if many were sent at once. The lease
        // is new, but the trusted rest may be too short for its renewal. A re-check measures it again.
        if trusted_until < now + grant.valid_for / 2 {
            self.recheck_unusable(now, secret);
        } else {
            self.finish_granted(now, grant, since, trusted_until);
        }
    }
}
