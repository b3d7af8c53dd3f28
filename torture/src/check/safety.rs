//! Two holders, too many permits, starts that are too early, stale writes.

use super::exemptions::{exemption, lost_since, may_tokens_repeat, split};
use super::verdict::{Check, Finding, Terms, Verdict, fault_at, figures};
use crate::history::{History, Ns, Section};
use crate::parts::Share;

/// The clocks of servers and machines count in other units.
const ROUNDED: Ns = 2_000_000;

/// Sections that both held the lock by their own belief, and may not be inside together.
pub(super) fn overlaps(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut sections: Vec<&Section> = history.sections.iter().collect();
    sections.sort_by_key(|section| section.begin);
    let mut open: Vec<&Section> = Vec::new();
    for later in sections {
        open.retain(|earlier| earlier.last_held > later.begin);
        for earlier in open.iter().filter(|earlier| !earlier.share.admits(later.share)) {
            let (from, to) = (later.begin, earlier.last_held.min(later.last_held.max(later.begin + 1)));
            let text = format!(
                "tasks {} and {} both held the lock for {} µs (tokens {}, {})",
                earlier.task,
                later.task,
                (to - from) / 1_000,
                earlier.token,
                later.token
            );
            overlap(history, verdict, (from, to), exemption(history, terms, from, to), text);
        }
        open.push(later);
    }
}

fn overlap(
    history: &History,
    verdict: &mut Verdict,
    (from, to): (Ns, Ns),
    sentence: Option<&'static str>,
    mut text: String,
) {
    let (check, fault, is_exempt) = (Check::Overlap, fault_at(history, from), sentence.is_some());
    let figures = figures(verdict, fault);
    *(if is_exempt { &mut figures.exempt } else { &mut figures.overlaps }) += 1;
    text.extend(sentence.map(|sentence| format!("; exempt: {sentence}")));
    verdict.findings.push(Finding { check, fault, from, to, text, is_exempt });
}

/// Times at which the sections inside had more permits than there are.
pub(super) fn too_many_permits(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut sections: Vec<&Section> = history.sections.iter().collect();
    sections.sort_by_key(|section| section.begin);
    let mut open: Vec<&Section> = Vec::new();
    for later in sections {
        let Share::Permits { of, .. } = later.share else { continue };
        open.retain(|earlier| earlier.last_held > later.begin);
        open.push(later);
        let held: u32 = open.iter().map(|section| section.share.weight()).sum();
        if held <= of {
            continue;
        }
        let (from, to) = (later.begin, excess_ends(&open, held - of).max(later.begin + 1));
        let tasks: Vec<String> = open.iter().map(|section| section.task.to_string()).collect();
        let text = format!("tasks {} held {held} of {of} permits", tasks.join(", "));
        overlap(history, verdict, (from, to), exemption(history, terms, from, to), text);
    }
}

/// When so many permits of these sections were no longer held.
fn excess_ends(open: &[&Section], excess: u32) -> Ns {
    let mut by_end = open.to_vec();
    by_end.sort_by_key(|section| section.last_held);
    let mut gone = 0;
    let mut ends = by_end.into_iter().map(|section| {
        gone += section.share.weight();
        (gone, section.last_held)
    });
    ends.find(|(gone, _)| *gone >= excess).map_or(0, |(_, end)| end)
}

/// Starts of once-per-period work that are too near to each other, also if the one was granted as early and the other as late as can be.
pub(super) fn early_starts(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut starts: Vec<&Section> = history.sections.iter().collect();
    starts.sort_by_key(|start| start.begin);
    let mut before: Option<&Section> = None;
    for start in starts {
        let Share::Start { retained } = start.share else { continue };
        if let Some(before) = before
            && start.begin + ROUNDED < before.asked + retained
        {
            let (from, to) = (start.begin, before.asked + retained);
            let sentence = lost_since(history, terms, before.asked, from);
            let text = format!(
                "task {} started at most {} ms after task {} had",
                start.task,
                start.begin.saturating_sub(before.asked) / 1_000_000,
                before.task
            );
            overlap(history, verdict, (from, to), sentence, text);
        }
        before = before.filter(|before| before.asked > start.asked).or(Some(start));
    }
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

/// Whether the other section is a newer grant that excludes this one. If both believed to hold the lock at once, only tokens tell.
fn is_newer(other: &Section, section: &Section, checked: Ns) -> bool {
    if section.share.admits(other.share) {
        return false;
    }
    if other.begin > checked {
        return true;
    }
    other.begin > section.begin && (section.token == 0 || other.token > section.token)
}
