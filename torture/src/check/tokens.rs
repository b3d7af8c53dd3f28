//! Tokens that do not rise.

use super::exemptions::{exemption, may_tokens_repeat, split};
use super::verdict::{Check, Finding, Terms, Verdict, fault_at, figures};
use crate::faults::TOKENS_REPEAT;
use crate::history::{History, Ns, Section};
use crate::parts::Share;

/// A grant that follows another one has a higher token: it was asked for after the other one had begun, or the two exclude each other and it began
/// after the other one had ended. Others have no order: who is granted a lock together with another one may see it later. A re-entry of an owner
/// keeps the token.
pub(super) fn order(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let sections: Vec<&Section> = history.sections.iter().filter(|section| section.token > 0).collect();
    let after_end =
        predecessors(&sections, |before| before.last_held, |section| section.begin, Share::admits);
    let after_begin = predecessors(&sections, |before| before.begin, |section| section.asked, |_, _| false);
    for (section, befores) in sections.into_iter().zip(after_end.into_iter().zip(after_begin)) {
        let before = befores.0.into_iter().chain(befores.1).max_by_key(|before| before.token);
        let Some(before) = before.filter(|before| !may_follow(before, section)) else { continue };
        let text = format!(
            "task {} got token {} after task {} had {}",
            section.task, section.token, before.task, before.token
        );
        let at = section.begin;
        let sentence = split(history, terms, before.begin, at)
            .or_else(|| may_tokens_repeat(history, at).then_some(TOKENS_REPEAT));
        fall(history, verdict, at, sentence, text);
    }
}

fn may_follow(before: &Section, section: &Section) -> bool {
    let is_re_entry = matches!(section.share, Share::Owner(_)) && before.share == section.share;
    before.token < section.token || is_re_entry && before.token == section.token
}

/// For each section, the one with the highest token that came before it: what is known of that one is earlier than what is known of this one. Those
/// that are together with it do not count.
fn predecessors<'a>(
    sections: &[&'a Section],
    known: impl Fn(&Section) -> Ns,
    against: impl Fn(&Section) -> Ns,
    are_together: impl Fn(Share, Share) -> bool,
) -> Vec<Option<&'a Section>> {
    let mut befores = sections.to_vec();
    befores.sort_by_key(|before| known(before));
    let mut befores = befores.into_iter().peekable();
    let mut by_time: Vec<usize> = (0..sections.len()).collect();
    by_time.sort_by_key(|index| against(sections[*index]));
    // One for each share.
    let mut highest: Vec<&Section> = Vec::new();
    let mut found = vec![None; sections.len()];
    for index in by_time {
        while let Some(before) = befores.next_if(|before| known(before) < against(sections[index])) {
            match highest.iter_mut().find(|other| other.share == before.share) {
                Some(other) if other.token < before.token => *other = before,
                Some(_) => {}
                None => highest.push(before),
            }
        }
        let others = highest.iter().filter(|before| !are_together(before.share, sections[index].share));
        found[index] = others.copied().max_by_key(|before| before.token);
    }
    found
}

/// An owner that acquires a lock that it has gets the token that it has.
pub(super) fn re_entries(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let mut sections: Vec<&Section> =
        history.sections.iter().filter(|section| matches!(section.share, Share::Owner(_))).collect();
    sections.sort_by_key(|section| section.begin);
    let mut open: Vec<&Section> = Vec::new();
    for section in sections {
        open.retain(|outer| outer.last_held > section.begin);
        let outer = open.iter().find(|outer| outer.share == section.share && outer.begin < section.asked);
        if let Some(outer) = outer.filter(|outer| outer.token != section.token) {
            let text = format!(
                "task {} got token {} while task {} of the same owner had {}",
                section.task, section.token, outer.task, outer.token
            );
            let at = section.begin;
            fall(history, verdict, at, exemption(history, terms, at, at), text);
        }
        open.push(section);
    }
}

fn fall(history: &History, verdict: &mut Verdict, at: Ns, sentence: Option<&'static str>, mut text: String) {
    let (check, fault, is_exempt) = (Check::TokenOrder, fault_at(history, at), sentence.is_some());
    let figures = figures(verdict, fault);
    *(if is_exempt { &mut figures.exempt_tokens } else { &mut figures.token_falls }) += 1;
    text.extend(sentence.map(|sentence| format!("; exempt: {sentence}")));
    verdict.findings.push(Finding { check, fault, from: at, to: at, text, is_exempt });
}
