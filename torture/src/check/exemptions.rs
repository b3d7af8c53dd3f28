//! What the guarantees allow after a fault.

use super::verdict::{Terms, nanos};
use crate::faults::{CLOCK_STEP, Exemption, Fault};
use crate::history::{History, Ns};

/// The sentence of the guarantees that allows two holders for all of this time.
pub(super) fn exemption(history: &History, terms: &Terms, from: Ns, to: Ns) -> Option<&'static str> {
    exemptions(history, terms, from, to).next().map(|exemption| exemption.sentence)
}

fn exemptions<'a>(
    history: &'a History,
    terms: &'a Terms,
    from: Ns,
    to: Ns,
) -> impl Iterator<Item = Exemption> + 'a {
    history.faults.iter().filter_map(move |injected| {
        let exemption = injected.fault.rule(terms.store)?.exemption?;
        let end = injected.healed + nanos((exemption.window)(terms.ttl));
        (injected.start <= from && to <= end).then_some(exemption)
    })
}

/// The sentence of the guarantees by which the store may have forgotten within this time what it had granted.
pub(super) fn lost_since(history: &History, terms: &Terms, from: Ns, to: Ns) -> Option<&'static str> {
    history.faults.iter().filter(|injected| injected.start <= to).find_map(|injected| {
        let exemption = injected.fault.rule(terms.store)?.exemption?;
        (from <= injected.healed + nanos((exemption.window)(terms.ttl))).then_some(exemption.sentence)
    })
}

/// The sentence of the guarantees by which two servers may have granted the lock within this time, each with tokens of its own clock.
pub(super) fn split(history: &History, terms: &Terms, from: Ns, to: Ns) -> Option<&'static str> {
    exemptions(history, terms, from, to)
        .find(|exemption| exemption.is_split)
        .map(|exemption| exemption.sentence)
}

/// Whether a server has lost its data while its clock had not passed the last token again. Two steps may follow each other.
pub(super) fn may_tokens_repeat(history: &History, at: Ns) -> bool {
    let faults = || history.faults.iter().filter(|injected| injected.start <= at);
    faults().filter(|injected| injected.fault == Fault::ClockBack).any(|back| {
        at <= back.healed + 2 * nanos(CLOCK_STEP)
            && faults().any(|lost| lost.fault.loses_data() && lost.start > back.start)
    })
}
