//! The lease of an attempt that was granted, until its release begins.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquire, GrantSecrets, LeaseMachine, LocalTime, Token};

use crate::engine::trust_limit::TrustLimit;

pub(super) struct Lease {
    pub(super) machine: LeaseMachine,
    /// How long a release is to refuse an `Acquire` of the attempt that may still be on its way.
    pub(super) tombstone: Duration,
    /// The same once the `Acquire` in flight is answered.
    pub(super) tombstone_once_answered: Duration,
    /// See [`Release::as_granted`](leasehold_core::Release::as_granted).
    pub(super) as_granted: Option<(Arc<Acquire>, Token)>,
    /// Of an attempt that waited: what the push of another grant proves.
    pub(super) secrets: Option<GrantSecrets>,
    /// The attempt was queued in the store.
    pub(super) has_waited: bool,
    /// The request was granted before, perhaps to another client: its caller may know of the lease.
    pub(super) is_repeat: bool,
    /// The lease belongs to an id and is only renewed here: it ends without a release.
    pub(super) is_borrowed: bool,
    /// Another lease is about to replace this one, which then ends without a loss.
    pub(super) is_replacing: bool,
    /// When to release what a late `Acquire` of the attempt was or may be granted, after the store had ended the lease.
    pub(super) late_release_at: Option<LocalTime>,
    /// Of a lease with a companion.
    pub(super) trust_limit: TrustLimit,
}

impl Lease {
    /// A lease without companion, of which no `Acquire` is on its way.
    pub(super) fn new(machine: LeaseMachine) -> Self {
        Self {
            machine,
            tombstone: Duration::ZERO,
            tombstone_once_answered: Duration::ZERO,
            as_granted: None,
            secrets: None,
            has_waited: false,
            is_repeat: false,
            is_borrowed: false,
            is_replacing: false,
            late_release_at: None,
            trust_limit: TrustLimit::Unlimited,
        }
    }
}
