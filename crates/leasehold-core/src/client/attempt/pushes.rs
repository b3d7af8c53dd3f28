//! Pushes of the store to an attempt, and until when a pushed grant may be trusted.

use super::{AcquireMachine, Phase, PushedGrant};
use crate::command::{Push, PushKind};
use crate::time::{LocalTime, StoreTime, drift_margin};

impl AcquireMachine {
    /// Handles a push. A finished attempt ignores it, because its release was sent or its lease is known.
    pub fn handle_push(&mut self, now: LocalTime, push: &Push) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        let Some((sent_at, answered_at)) = self.anchor.filter(|_| self.anchor_stale_since.is_none()) else {
            match push.kind {
                PushKind::Granted(grant) if self.anchor_stale_since.is_none() => {
                    // The newest grant counts, of that its first push: an older grant may have lapsed unclaimed.
                    if self.early_push.is_none_or(|early_push| early_push.at < push.at) {
                        self.early_push = Some(PushedGrant { grant, at: push.at, received_at: now });
                    }
                }
                PushKind::Next(head) if self.anchor_stale_since.is_none() => {
                    self.early_next = Some((head, push.at));
                }
                // No anchor, and the answer in flight may be older than the push.
                _ => self.recheck_pending = true,
            }
            return;
        };
        match push.kind {
            PushKind::Granted(grant) => {
                let pushed = PushedGrant { grant, at: push.at, received_at: now };
                self.handle_pushed(now, pushed, (sent_at, answered_at));
            }
            PushKind::Next(head) => match self.phase {
                Phase::Queued { .. } => {
                    let repoll_at = self.next_repoll(now, sent_at, answered_at, head.into());
                    self.phase = Phase::Queued { repoll_at };
                }
                // The answer in flight may be older than the push.
                Phase::InFlight { .. } => self.early_next = Some((head, push.at)),
                Phase::SendAt { .. } | Phase::Done(_) => {}
            },
            PushKind::Revoked => self.handle_hint(now),
            // Sent to holders only, so the grant is in flight.
            PushKind::Contended => self.handle_hint(now),
        }
    }

    /// Computes the trust period of a pushed grant relative to the anchor.
    pub(super) fn handle_pushed(
        &mut self,
        now: LocalTime,
        PushedGrant { grant, at, received_at }: PushedGrant,
        (sent_at, answered_at): (LocalTime, StoreTime),
    ) {
        // Older than the answer, which no longer showed it: its age is unknown.
        let is_older = at < answered_at;
        if is_older || self.policy.is_some_and(|policy| policy.confirms_pushes) {
            self.handle_hint(now);
            return;
        }
        // The store's clock advanced by `elapsed` since the anchoring answer. A delayed push therefore cannot extend trust.
        let elapsed = at.since(answered_at);
        // More than has passed here: the store's clock was set forward, and the age of the push is unknown.
        if elapsed > received_at.since(sent_at) + drift_margin(elapsed) {
            self.handle_hint(now);
            return;
        }
        let since = received_at.min(sent_at + elapsed);
        let margin = drift_margin(elapsed + grant.valid_for);
        let trusted_until = since + grant.valid_for.saturating_sub(margin);
        // The request that the push is measured from may have been delayed for seconds, if many were sent at once. The lease
        // is new, but the trusted rest may be too short for its renewal. A re-check measures it again.
        if trusted_until < now + grant.valid_for / 2 {
            self.handle_hint(now);
        } else {
            self.finish_granted(now, grant, since, trusted_until);
        }
    }
}
