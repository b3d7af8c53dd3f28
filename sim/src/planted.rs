//! Bugs that the checks must find: without them, a check that finds nothing says nothing.

use std::fmt;

use crate::checks::{Promise, Violation};
use crate::plan::{Case, Plan};

/// A bug in the simulated server, network or machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The server confirms renewals and does not extend the lease.
    RenewalsForgotten,
    /// A client's clock is 4 % slow, which the run does not declare.
    SlowClient,
    /// A client believes a pushed grant without a proof.
    ForgedGrantBelieved,
    /// A push that was delayed claims to have been sent just now.
    RestampedPush,
    /// Some grants carry the token of the grant before.
    TokenRepeated,
    /// The resource accepts any token.
    Unfenced,
    /// The server takes the first waiter for unreachable.
    HeadSkipped,
    /// The driver's timer fires late.
    LateTimer,
    /// The server confirms some releases and keeps the lease.
    ReleaseForgotten,
    /// The server tells waiters to ask again at once.
    EagerRecheck,
    /// The driver's timer fires at once.
    TimerStorm,
    /// The server confirms some waiters and does not queue them.
    WaiterForgotten,
    /// The server keeps no tombstones.
    NoTombstones,
    /// The server fails some attempts although it is healthy.
    SpuriousError,
    /// The clock that ends a timed wait is the late timer of the driver.
    LateTimeout,
    /// The server refuses some renewals of leases that it knows.
    RenewalRefused,
    /// The server fails some attempts that do not wait.
    ErrorForTries,
    /// The server says of a refusal that stays that it may pass.
    DenialMayPass,
    /// Some attempts that do not wait and were granted are told that the lock is busy.
    BusyWhileFree,
    /// A call without an answer fails 10 s late.
    LateFailure,
    /// A named owner gets the token of the section before.
    OwnerKeepsToken,
    /// An upgrade gets the token of its reader.
    UpgradeKeepsToken,
    /// As `HeadSkipped`, for locks with named owners.
    OwnerSkipped,
    /// A client asks for no tombstones.
    TombstonesUnasked,
    /// A task that is handed a lease by another task of its client gets the same token.
    HandoffTokenRepeated,
    /// After the faults, grants that are pushed get lost.
    PushLost,
    /// The same in runs in which a replica that was behind, or beside its master for a while, has taken over.
    PushLostAtNewMaster,
    /// After the faults, the server confirms releases of short leases and keeps the leases.
    ShortReleaseForgotten,
    /// Some guards of the end are neither released nor dropped.
    GuardKept,
    /// The server keeps tombstones for ten hours.
    TombstonesKept,
    /// Clients are slow to close.
    SlowClose,
    /// Users set no limits of local hand-offs, which the run does not declare.
    EndlessHandoff,
    /// The server ends some minimum holds with the release.
    RetentionForgotten,
    /// Tasks start work after half of its period, which the run does not declare.
    PeriodShort,
    /// Tasks want one count less at a latch, which the run does not declare.
    LatchShort,
    /// Tasks want one party less at a barrier, which the run does not declare.
    BarrierShort,
    /// Some parties that have passed say that they have left.
    PassDenied,
    /// Parties that have passed say that they have left, if another master has taken over since they began to wait.
    PassDeniedAtNewMaster,
    /// No party of a round leads.
    LeaderDenied,
    /// Calls soon after a pause are refused.
    RefusedAfterPause,
    /// The server confirms grants and renewals that no replica has.
    ReplicasUnasked,
    /// The server confirms renewals of the other library's lock by bridges, and does not extend it.
    KeyRenewalForgotten,
    /// The other library's lock expires long before the time that a bridge has asked for.
    KeyExpiresEarly,
    /// The server confirms releases of the other library's lock by bridges, and keeps it.
    KeyReleaseForgotten,
    /// At times the server tells bridges that the other library's lock is held, although it is free.
    KeyTakeRefused,
    /// As `LateTimer`, for bridged locks that a program with another library takes.
    LateTimerOfKeys,
    /// The server reports no change of keys.
    KeyNewsLost,
    /// Bridges trust the other library's lock from the answer on, not from when the command was sent.
    KeyTrustFromAnswer,
    /// Bridges take the other library's lock with the same value again after a command without an answer.
    KeyTakeReused,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 49] = [
        Self::RenewalsForgotten,
        Self::SlowClient,
        Self::ForgedGrantBelieved,
        Self::RestampedPush,
        Self::TokenRepeated,
        Self::Unfenced,
        Self::HeadSkipped,
        Self::LateTimer,
        Self::ReleaseForgotten,
        Self::EagerRecheck,
        Self::TimerStorm,
        Self::WaiterForgotten,
        Self::NoTombstones,
        Self::SpuriousError,
        Self::LateTimeout,
        Self::RenewalRefused,
        Self::ErrorForTries,
        Self::DenialMayPass,
        Self::BusyWhileFree,
        Self::LateFailure,
        Self::OwnerKeepsToken,
        Self::UpgradeKeepsToken,
        Self::OwnerSkipped,
        Self::TombstonesUnasked,
        Self::HandoffTokenRepeated,
        Self::PushLost,
        Self::PushLostAtNewMaster,
        Self::ShortReleaseForgotten,
        Self::GuardKept,
        Self::TombstonesKept,
        Self::SlowClose,
        Self::EndlessHandoff,
        Self::RetentionForgotten,
        Self::PeriodShort,
        Self::LatchShort,
        Self::BarrierShort,
        Self::PassDenied,
        Self::PassDeniedAtNewMaster,
        Self::LeaderDenied,
        Self::RefusedAfterPause,
        Self::ReplicasUnasked,
        Self::KeyRenewalForgotten,
        Self::KeyExpiresEarly,
        Self::KeyReleaseForgotten,
        Self::KeyTakeRefused,
        Self::LateTimerOfKeys,
        Self::KeyNewsLost,
        Self::KeyTrustFromAnswer,
        Self::KeyTakeReused,
    ];

    /// Whether this violation is the one that the bug must cause.
    #[must_use]
    pub fn explains(self, violation: &Violation) -> bool {
        violation.promise == self.breaks() && violation.what.contains(self.says())
    }

    /// The case of a seed that may show it.
    #[must_use]
    pub fn case(self, seed: u64) -> Case {
        let case = Case::fresh(seed);
        match self {
            // Other faults may fail a lock, too.
            Self::RefusedAfterPause => Plan::case_with_pauses(seed),
            // These runs have more failovers.
            Self::PassDeniedAtNewMaster => Case { gathers: true, replicates: true, ..case },
            Self::PushLostAtNewMaster => Case { replicates: true, ..case },
            // Only these runs have barriers.
            _ if self.breaks() == Promise::Gathered => Case { gathers: true, ..case },
            // Only these runs have bridges.
            _ if self.is_of_keys() => Case { bridges: true, ..case },
            _ => case,
        }
    }

    /// Whether it shows with bridges only.
    const fn is_of_keys(self) -> bool {
        matches!(
            self,
            Self::KeyRenewalForgotten
                | Self::KeyExpiresEarly
                | Self::KeyReleaseForgotten
                | Self::KeyTakeRefused
                | Self::LateTimerOfKeys
                | Self::KeyNewsLost
                | Self::KeyTrustFromAnswer
                | Self::KeyTakeReused
        )
    }

    /// What the violation says, for a promise that has several checks.
    const fn says(self) -> &'static str {
        match self {
            Self::HandoffTokenRepeated => "a guard has token",
            Self::ForgedGrantBelieved => "which was never granted",
            Self::ReleaseForgotten | Self::ShortReleaseForgotten => "the lease",
            Self::GuardKept => "entries left",
            Self::TombstonesKept => "kept for ever",
            Self::PushLost | Self::PushLostAtNewMaster => "was free",
            Self::LateTimeout => "a wait with a limit",
            Self::LateFailure => "an attempt that does not wait",
            Self::SlowClose => "not closed",
            Self::EndlessHandoff => "hand-off",
            Self::LatchShort => "the latch",
            Self::BarrierShort | Self::PassDenied | Self::PassDeniedAtNewMaster => "beside",
            Self::LeaderDenied => "leaders",
            Self::RefusedAfterPause => "after a pause",
            Self::ReplicasUnasked => "with replicas",
            Self::KeyRenewalForgotten | Self::KeyExpiresEarly | Self::KeyTrustFromAnswer => {
                "beside the program"
            }
            Self::KeyReleaseForgotten => "after its release",
            Self::KeyTakeRefused => "was free",
            Self::LateTimerOfKeys => "with another library",
            Self::KeyNewsLost => "deleted by hand",
            Self::KeyTakeReused => "had ended",
            _ => "",
        }
    }

    /// The check that must find it.
    #[must_use]
    pub const fn breaks(self) -> Promise {
        match self {
            Self::RenewalsForgotten
            | Self::SlowClient
            | Self::RestampedPush
            | Self::ReplicasUnasked
            | Self::KeyRenewalForgotten
            | Self::KeyExpiresEarly
            | Self::KeyTrustFromAnswer => Promise::OneHolder,
            Self::ForgedGrantBelieved
            | Self::TokenRepeated
            | Self::OwnerKeepsToken
            | Self::UpgradeKeepsToken
            | Self::HandoffTokenRepeated => Promise::TokensRise,
            Self::Unfenced => Promise::Fenced,
            Self::HeadSkipped | Self::OwnerSkipped | Self::EndlessHandoff => Promise::Fifo,
            Self::LateTimer | Self::LateTimerOfKeys | Self::KeyNewsLost | Self::KeyTakeReused => {
                Promise::LossReported
            }
            Self::ReleaseForgotten
            | Self::ShortReleaseForgotten
            | Self::GuardKept
            | Self::TombstonesKept
            | Self::KeyReleaseForgotten => Promise::NothingLeft,
            Self::EagerRecheck => Promise::FewCommands,
            Self::TimerStorm => Promise::NoTimerStorm,
            Self::WaiterForgotten | Self::PushLost | Self::PushLostAtNewMaster | Self::KeyTakeRefused => {
                Promise::Liveness
            }
            Self::NoTombstones | Self::TombstonesUnasked => Promise::NoGhost,
            Self::SpuriousError | Self::ErrorForTries | Self::RefusedAfterPause => Promise::NoError,
            Self::LateTimeout | Self::LateFailure | Self::SlowClose => Promise::InTime,
            Self::RenewalRefused => Promise::Kept,
            Self::DenialMayPass => Promise::DenialEnds,
            Self::BusyWhileFree => Promise::Refused,
            Self::RetentionForgotten => Promise::Retained,
            Self::PeriodShort => Promise::OncePer,
            Self::LatchShort
            | Self::BarrierShort
            | Self::PassDenied
            | Self::PassDeniedAtNewMaster
            | Self::LeaderDenied => Promise::Gathered,
        }
    }
}

impl fmt::Display for Planted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
