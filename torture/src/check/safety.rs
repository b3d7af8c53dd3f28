//! Two holders, tokens that do not rise, stale writes.

use super::verdict::{Check, Finding, Terms, Verdict, fault_at, figures, nanos};
use crate::faults::{CLOCK_STEP, Exemption, Fault, TOKENS_REPEAT};
use crate::history::{History, Ns, Section};

/// Sections that both held the lock by their own belief.
pub(super) fn overlaps(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut sections: Vec<&Section> = history.sections.iter().collect();
    sections.sort_by_key(|section| section.begin);
    let mut open: Vec<&Section> = Vec::new();
    for later in sections {
        open.retain(|earlier| earlier.last_held > later.begin);
        for earlier in &open {
            let (from, to) = (later.begin, earlier.last_held.min(later.last_held.max(later.begin + 1)));
            let sentence = exemption(history, terms, from, to);
            let fault = fault_at(history, from);
            let figures = figures(verdict, fault);
            *(if sentence.is_some() { &mut figures.exempt } else { &mut figures.overlaps }) += 1;
            let text = format!(
                "tasks {} and {} both held the lock for {} µs (tokens {}, {}){}",
                earlier.task,
                later.task,
                (to - from) / 1_000,
                earlier.token,
                later.token,
                sentence.map_or(String::new(), |sentence| format!("; exempt: {sentence}"))
            );
            let is_exempt = sentence.is_some();
            verdict.findings.push(Finding { check: Check::Overlap, fault, from, to, text, is_exempt });
        }
        open.push(later);
    }
}

/// The sentence of the guarantees that allows two holders for all of this time.
fn exemption(history: &History, terms: &Terms, from: Ns, to: Ns) -> Option<&'static str> {
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

/// A grant that follows another one has a higher token. Sections that overlap have no order.
pub(super) fn token_order(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut by_begin: Vec<&Section> = history.sections.iter().filter(|section| section.token > 0).collect();
    let mut by_end = by_begin.clone();
    by_begin.sort_by_key(|section| section.begin);
    by_end.sort_by_key(|section| section.last_held);
    let mut ended = by_end.into_iter().peekable();
    let mut highest: Option<&Section> = None;
    for section in by_begin {
        while let Some(before) = ended.next_if(|before| before.last_held < section.begin) {
            highest = Some(highest.filter(|highest| highest.token >= before.token).unwrap_or(before));
        }
        let Some(before) = highest.filter(|before| before.token >= section.token) else { continue };
        let text = format!(
            "task {} got token {} after task {} had {}",
            section.task, section.token, before.task, before.token
        );
        let fault = fault_at(history, section.begin);
        let (from, to) = (section.begin, section.begin);
        let sentence = split(history, terms, before.begin, from);
        let sentence = sentence.or_else(|| may_tokens_repeat(history, from).then_some(TOKENS_REPEAT));
        let is_exempt = sentence.is_some();
        let figures = figures(verdict, fault);
        *(if is_exempt { &mut figures.exempt_tokens } else { &mut figures.token_falls }) += 1;
        let text = sentence.map_or(text.clone(), |sentence| format!("{text}; exempt: {sentence}"));
        verdict.findings.push(Finding { check: Check::TokenOrder, fault, from, to, text, is_exempt });
    }
}

/// The sentence of the guarantees by which two servers may have granted the lock within this time, each with tokens of its own clock.
fn split(history: &History, terms: &Terms, from: Ns, to: Ns) -> Option<&'static str> {
    exemptions(history, terms, from, to)
        .find(|exemption| exemption.is_split)
        .map(|exemption| exemption.sentence)
}

/// Whether a server has lost its data while its clock had not passed the last token again. Two steps may follow each other.
fn may_tokens_repeat(history: &History, at: Ns) -> bool {
    let faults = || history.faults.iter().filter(|injected| injected.start <= at);
    faults().filter(|injected| injected.fault == Fault::ClockBack).any(|back| {
        at <= back.healed + 2 * nanos(CLOCK_STEP)
            && faults().any(|lost| lost.fault.loses_data() && lost.start > back.start)
    })
}

/// Writes that arrive after a newer holder has begun. No fence refuses one whose token is the higher of the two: that is a fault of the
/// tokens, and allowed where their fall is.
pub(super) fn stale_writes(history: &History, terms: &Terms, verdict: &mut Verdict) {
    for (index, section) in history.sections.iter().enumerate() {
        let Some(write) = section.write else { continue };
        let later = history.sections[index + 1..].iter();
        let newer = later
            .take_while(|other| other.begin_order < write.order)
            .find(|other| is_newer(other, section, write.checked));
        let Some(newer) = newer else { continue };
        let fault = fault_at(history, write.arrived);
        let figures = figures(verdict, fault);
        figures.stale_unfenced += 1;
        let is_fall =
            || newer.token < section.token && split(history, terms, section.begin, newer.begin).is_some();
        let is_allowed = section.token > 0 && (may_tokens_repeat(history, newer.begin) || is_fall());
        figures.stale_fenced += u64::from(write.is_accepted && !is_allowed);
        figures.exempt_tokens += u64::from(write.is_accepted && is_allowed);
        let check = if write.is_accepted { Check::StaleFenced } else { Check::StaleUnfenced };
        let text = format!(
            "task {} (token {}) wrote {} ms after task {} (token {}) had begun",
            section.task,
            section.token,
            write.arrived.saturating_sub(newer.begin) / 1_000_000,
            newer.task,
            newer.token
        );
        // Without tokens there is no fence, and no lock prevents the write.
        let is_exempt = !write.is_accepted || section.token == 0 || is_allowed;
        let (from, to) = (newer.begin, write.arrived);
        verdict.findings.push(Finding { check, fault, from, to, text, is_exempt });
    }
}

/// Whether the other section is a newer grant. If both believed to hold the lock at once, only tokens tell.
fn is_newer(other: &Section, section: &Section, checked: Ns) -> bool {
    if other.begin > checked {
        return true;
    }
    other.begin > section.begin && (section.token == 0 || other.token > section.token)
}
