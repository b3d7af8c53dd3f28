//! What the checkers find.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::faults::{Fault, StoreKind};
use crate::history::{History, Injected, Ns};

/// What a target promises, which decides what counts as a violation.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The store.
    pub store: StoreKind,
    /// The ttl of the leases.
    pub ttl: Duration,
    /// Whether leasehold's promises of liveness are this target's own: the bound of a takeover, the order of waiters, and that no lock is lost
    /// and no call fails without a cause.
    pub has_bound: bool,
}

/// The figures of one fault: from its beginning to the beginning of the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// How often it was injected.
    pub injected: u64,
    /// Sections that began.
    pub sections: u64,
    /// Pairs of sections that both held the lock by their own belief, not exempt.
    pub overlaps: u64,
    /// The same, exempt by the guarantees.
    pub exempt: u64,
    /// Stale writes that a register without a fence accepted.
    pub stale_unfenced: u64,
    /// Stale writes that the fenced register accepted. Without tokens it accepts all of them.
    pub stale_fenced: u64,
    /// Grants whose token was not higher than that of an earlier one, not exempt.
    pub token_falls: u64,
    /// The same and the stale writes that followed from it, exempt by the guarantees.
    pub exempt_tokens: u64,
    /// The longest time that the lock was free and a live task waited, after healing, in milliseconds.
    pub stall_ms: u64,
    /// The documented bound of that time.
    pub bound_ms: u64,
}

/// Something that a checker found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which checker.
    pub check: Check,
    /// The fault that it is attributed to.
    pub fault: Fault,
    /// When it began.
    pub from: Ns,
    /// When it ended.
    pub to: Ns,
    /// For people.
    pub text: String,
    /// The documentation allows it, or it is no promise of this target.
    pub is_exempt: bool,
}

/// A checker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Two sections, each of which believed to hold the lock.
    Overlap,
    /// Two grants whose tokens do not rise.
    TokenOrder,
    /// A stale write that the fenced register accepted.
    StaleFenced,
    /// A stale write that the other register accepted. No lock prevents it.
    StaleUnfenced,
    /// A free lock with live waiters, for longer than the bound.
    Stall,
    /// A task that waits at the end of the run, though the lock is free, or one whose release has not returned.
    LostWaiter,
    /// A task that waits while more sections of others begin than the order of waiters allows.
    Starved,
    /// A lock that was lost, though no fault explains it.
    Loss,
    /// An attempt or a release that failed, or a release that took longer than 5 s, though no fault explains it.
    Failure,
    /// Holders and waiters in the store after all tasks have ended.
    Left,
    /// File descriptors that a worker did not close.
    Descriptors,
}

/// All findings and figures of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// By fault.
    pub figures: BTreeMap<Fault, Figures>,
    /// In the order of the checks.
    pub findings: Vec<Finding>,
}

impl Verdict {
    /// Whether something was found that nothing exempts.
    #[must_use]
    pub fn is_violated(&self) -> bool {
        self.findings.iter().any(|finding| !finding.is_exempt)
    }

    /// Number of findings of a check.
    #[must_use]
    pub fn count(&self, check: Check) -> usize {
        self.findings.iter().filter(|finding| finding.check == check).count()
    }
}

pub(super) fn figures(verdict: &mut Verdict, fault: Fault) -> &mut Figures {
    verdict.figures.entry(fault).or_default()
}

/// The last fault that began before.
fn injected_at(history: &History, at: Ns) -> Option<&Injected> {
    history.faults.iter().rev().find(|injected| injected.start <= at)
}

pub(super) fn fault_at(history: &History, at: Ns) -> Fault {
    injected_at(history, at).map_or(Fault::None, |injected| injected.fault)
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn nanos(duration: Duration) -> Ns {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
