//! A request that no task makes at present.

use std::time::Duration;

use leasehold_core::{LocalTime, Release};

/// How long the caller of a request has to repeat it. Then the client releases what the store may have for it, if no other client speaks for
/// the attempt by then: if the store's grant lapsed, the other waiters of this client would be skipped.
pub(crate) const REPEAT_WINDOW: Duration = Duration::from_millis(2_500);

/// An attempt that no task makes.
#[derive(Clone)]
pub(super) struct Suspended {
    pub(super) release: Release,
    /// How long the store keeps what the release ends.
    pub(super) lasts: Duration,
    pub(super) until: LocalTime,
}

/// Why an attempt can't begin.
pub(crate) enum BeginError {
    Closed,
    /// Another task of this client makes this request.
    InUse,
    /// Its release has begun: its caller was away for too long.
    Released,
    /// As `Released`, but it is not known whether the release ends anything: the caller may have repeated the request elsewhere.
    Unsettled,
}
