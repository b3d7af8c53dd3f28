//! A release in progress: it is sent again until the store confirms it, or until what it releases has expired in the store.

use std::time::Duration;

use leasehold_core::{
    ClientId, Command, Failure, LocalTime, Release, ReleaseIf, Reply, TOMBSTONE_TTL, drift_margin,
};

/// The first pause before a failed release is retried. It doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// How long a closed client retries a release at least, if there is no lease or the lease ends sooner.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// How a release ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseOutcome {
    /// The store has released the lease, or removed the waiter.
    Released,
    /// The store had no such lease.
    NotHeld,
    /// The store never confirmed the release. The lease has expired there by now.
    Unconfirmed,
}

/// What a release is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseOf {
    /// A lease that its holder was told of.
    Lease,
    /// An attempt: the store may have a lease, a queue entry or nothing.
    Attempt,
}

pub(super) struct Releasing {
    release: Release,
    of: ReleaseOf,
    retry_at: LocalTime,
    pause: Duration,
    /// How often the release was sent, without the failures that tell that it never reached the store.
    sent: u32,
    /// By then the lease, or the place in the queue, has expired in the store.
    until: LocalTime,
    /// When an unreleased lease expires by this client's clock.
    held_until: LocalTime,
    /// The store has confirmed it, and another one that was sent before may still arrive.
    lingers: bool,
}

impl Releasing {
    /// `lasts`: how long the store keeps what is to be released. `remaining`: how long the lease could have been trusted.
    pub(super) fn new(
        of: ReleaseOf,
        release: Release,
        lasts: Duration,
        remaining: Duration,
        now: LocalTime,
    ) -> Self {
        let until = now + lasts + drift_margin(lasts);
        Self {
            release,
            of,
            retry_at: now,
            pause: RETRY_MIN,
            sent: 0,
            until,
            held_until: now + remaining,
            lingers: false,
        }
    }

    /// The store is to release only what this client speaks for.
    pub(super) fn release_if(&mut self, inbox: ClientId) {
        self.release = Release { only_if: Some(ReleaseIf::SpeaksFor(inbox)), ..self.release.clone() };
    }

    /// The store releases only what this client speaks for, so that its caller may repeat the request elsewhere meanwhile.
    pub(super) const fn is_conditional(&self) -> bool {
        matches!(self.release.only_if, Some(ReleaseIf::SpeaksFor(_)))
    }

    /// The store has nothing to release. If a conditional release that was sent before has had no answer, it may still arrive, and would end what is
    /// granted to the attempt at this client by then: nothing may begin here until that is over. Returns whether this is so.
    pub(super) fn lingers_after(&mut self, reply: &Reply, now: LocalTime) -> bool {
        self.lingers = self.is_conditional() && self.sent > 1 && *reply == Reply::NotHeld;
        if self.lingers {
            (self.retry_at, self.until) = (LocalTime::NEVER, now + TOMBSTONE_TTL);
        }
        self.lingers
    }

    /// How it has ended when its time is over.
    pub(super) const fn last_outcome(&self) -> ReleaseOutcome {
        if self.lingers { ReleaseOutcome::Released } else { ReleaseOutcome::Unconfirmed }
    }

    /// The command.
    pub(super) fn release(&self) -> &Release {
        &self.release
    }

    pub(super) fn poll_transmit(&mut self, now: LocalTime, ttl: Duration) -> Option<Command> {
        if now < self.retry_at || self.has_expired(now) {
            return None;
        }
        self.sent += 1;
        // If no response comes, the driver sends it again, whichever task sent it now.
        self.retry_at = now + (ttl / 2).max(RETRY_MIN);
        Some(Command::Release(self.release.clone()))
    }

    pub(super) fn poll_timeout(&self) -> LocalTime {
        self.retry_at.min(self.until)
    }

    pub(super) fn has_expired(&self, now: LocalTime) -> bool {
        now >= self.until
    }

    /// What the store's reply means. An earlier release may have succeeded, and its response may have been lost. If the lease may
    /// have expired instead, nothing says whether the store retains it for its minimum hold.
    pub(super) fn outcome(&self, reply: &Reply, now: LocalTime) -> ReleaseOutcome {
        let was_repeated = self.sent > 1;
        match reply {
            Reply::Released => ReleaseOutcome::Released,
            // A holder that the store knows as a waiter has no lease.
            Reply::Dequeued if self.of == ReleaseOf::Attempt => ReleaseOutcome::Released,
            _ if was_repeated && !self.release.min_hold.is_zero() && now >= self.held_until => {
                ReleaseOutcome::Unconfirmed
            }
            _ if was_repeated => ReleaseOutcome::Released,
            _ => ReleaseOutcome::NotHeld,
        }
    }

    pub(super) fn handle_failure(&mut self, failure: Failure, now: LocalTime) {
        if !failure.may_have_effect() {
            self.sent = self.sent.saturating_sub(1);
        }
        self.retry_at = now + self.pause;
        self.pause = (self.pause * 2).min(RETRY_MAX);
    }

    /// It was not sent after all.
    pub(super) fn defer(&mut self, now: LocalTime) {
        self.sent = self.sent.saturating_sub(1);
        self.retry_now(now);
    }

    /// Sends it again at once, because the task that sent it may be gone, or the connection is another one.
    pub(super) fn retry_now(&mut self, now: LocalTime) {
        if !self.lingers {
            self.retry_at = now.min(self.retry_at);
        }
    }

    /// The client is closed: retries end with the lease, or after [`CLOSE_GRACE`] without one. A waiter that stays in the queue
    /// delays no other once its client is gone.
    pub(super) fn close(&mut self, now: LocalTime, ttl: Duration) {
        self.until = self.held_until.min(now + ttl).max(now + CLOSE_GRACE).min(self.until);
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::Acquisition;

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_millis(ms)
    }

    fn releasing(speaker: Option<ClientId>) -> Releasing {
        let attempt = Acquisition { client: ClientId::new(1), sequence: 1 };
        let release = Release { only_if: speaker.map(ReleaseIf::SpeaksFor), ..Release::now(attempt) };
        Releasing::new(ReleaseOf::Attempt, release, TTL, Duration::ZERO, at(0))
    }

    /// The first copy may arrive after the answer to the second one.
    #[test]
    fn conditional_release_whose_first_copy_may_be_late_lingers() {
        let mut own = releasing(Some(ClientId::new(2)));
        assert!(own.poll_transmit(at(0), TTL).is_some());
        own.handle_failure(Failure::Unknown, at(1_000));
        assert!(own.poll_transmit(at(1_100), TTL).is_some());
        assert!(own.lingers_after(&Reply::NotHeld, at(1_200)));
        own.retry_now(at(1_300));
        assert!(own.poll_transmit(at(1_300), TTL).is_none());
        assert!(!own.has_expired(at(61_199)) && own.has_expired(at(61_200)));
        assert_eq!(own.last_outcome(), ReleaseOutcome::Released);
    }

    #[test]
    fn release_lingers_only_if_another_copy_may_end_something() {
        let twice = |mut own: Releasing| {
            own.poll_transmit(at(0), TTL);
            own.handle_failure(Failure::Unknown, at(1_000));
            own.poll_transmit(at(1_100), TTL);
            own
        };
        assert!(!twice(releasing(None)).lingers_after(&Reply::NotHeld, at(1_200)), "it has a tombstone");
        let conditional = || releasing(Some(ClientId::new(2)));
        assert!(!twice(conditional()).lingers_after(&Reply::Dequeued, at(1_200)), "it has left a tombstone");
        let mut once = conditional();
        assert!(once.poll_transmit(at(0), TTL).is_some());
        assert!(!once.lingers_after(&Reply::NotHeld, at(100)));
    }
}
