//! The spans, with their targets and fields: a stable interface, which `docs/operations.md` lists.
//!
//! All spans have the level `debug`. What an operator must know is an event with the level `warn`.

use leasehold_core::{Resource, Token};
use tracing::Span;
use tracing::field::{Empty, display};

use super::AttemptOutcome;

/// From the call to the grant, or to the end of the attempt.
pub(crate) fn acquire(resource: &Resource, store: &str) -> Span {
    let (lock, kind) = (resource.name.as_str(), resource.kind.as_str());
    tracing::debug_span!(
        target: "leasehold::acquire",
        "acquire",
        lock,
        kind,
        store,
        token = Empty,
        waited = Empty,
        outcome = Empty
    )
}

/// From the grant to the release or the loss of the guard.
pub(crate) fn hold(resource: &Resource, store: &str, token: Token, acquire: &Span) -> Span {
    let (lock, kind) = (resource.name.as_str(), resource.kind.as_str());
    let span = tracing::debug_span!(
        target: "leasehold::hold",
        "hold",
        lock,
        kind,
        store,
        %token,
        outcome = Empty
    );
    span.follows_from(acquire);
    span
}

/// From the call to the store's confirmation.
pub(crate) fn release(resource: &Resource, store: &str, token: Token) -> Span {
    let (lock, kind) = (resource.name.as_str(), resource.kind.as_str());
    tracing::debug_span!(target: "leasehold::release", "release", lock, kind, store, %token, outcome = Empty)
}

/// From sending a batch of renewals to its answers.
pub(crate) fn renew(leases: usize) -> Span {
    tracing::debug_span!(target: "leasehold::renew", "renew", leases)
}

/// One lease of a batch of renewals.
pub(crate) fn renewed(resource: &Resource, outcome: &str) {
    let (lock, kind) = (resource.name.as_str(), resource.kind.as_str());
    tracing::debug!(target: "leasehold::renew", lock, kind, outcome, "renewal answered");
}

pub(crate) fn record_outcome(span: &Span, outcome: AttemptOutcome) {
    span.record("outcome", outcome.as_str());
}

pub(crate) fn record_grant(span: &Span, token: Token, waited: std::time::Duration) {
    span.record("token", display(token)).record("waited", tracing::field::debug(waited));
}
