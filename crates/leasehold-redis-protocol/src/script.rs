//! The scripts, one per command. Each implements the rules of `leasehold_core::model` with the same names.
//!
//! A script begins with the few lines that are the whole usual case. The line `--@use rules` stands for the shared part
//! (`table.lua`, `model.lua`), which costs more than most commands, and which only runs if these lines have not answered. The
//! tests of the crate `leasehold` compare both with the model.

use std::sync::LazyLock;

use leasehold_core::model::{CLAIM_WINDOW, FIRST_WAITER_PLACE, REPOLL_JITTER_MICROS, REPOLL_SPACING};

/// Before the rules in a cluster.
pub(crate) const SLOT_GUARD: &str = include_str!("scripts/slot_guard.lua");

/// Goes before a script in a test, after a line that sets the local `virtual` to microseconds: the script then has that time
/// instead of the server's, for its clock, its tokens and its expiries.
pub const VIRTUAL_TIME: &str = include_str!("scripts/testing/virtual_time.lua");

/// Goes before a script in a test, after a line that sets the local `failing` to a number or to a command's name: the script fails
/// at that write and at every later one, or at every call of that command.
pub const FAILING_WRITES: &str = include_str!("scripts/testing/failing_writes.lua");

/// An id of the clock that was drawn, and is no token yet: see `model.lua`.
pub(crate) const NOT_DRAWN: &str = "local drawn = nil\n";
const NO_FLOOR: &str = "local floor = 0\n";
const FLOOR: &str = include_str!("scripts/floor.lua");
const ACQUIRE_VOTER: &str = include_str!("scripts/acquire_voter.lua");
const RESTART_GUARD: &str = include_str!("scripts/restart_guard.lua");
const MARKED: &str = include_str!("scripts/marked.lua");
const CLOCK: &str = include_str!("scripts/clock.lua");
const TOKENS: &str = include_str!("scripts/tokens.lua");
const USE_RULES: &str = "--@use rules\n";
const USE_SHORTCUT: &str = "--@use shortcut\n";
const USE_SHARED: &str = "--@use shared\n";
const USE_TOKENS: &str = "--@use tokens\n";
const USE_CONSTANTS: &str = "--@use constants\n";
const LAYER: &str = "--@layer\n";

/// A command as a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Script {
    /// `Acquire`.
    Acquire,
    /// `Renew`.
    Renew,
    /// `Release`.
    Release,
    /// `Inspect`.
    Inspect,
    /// `ForceRelease`.
    ForceRelease,
    /// `Acquire` of several resources: all are granted, or none is.
    AcquireAll,
    /// `Renew` of several plain leases.
    RenewAll,
    /// `Acquire` of several resources, each for itself.
    AcquireEach,
    /// `Release` of several leases, each for itself.
    ReleaseEach,
}

impl Script {
    /// All scripts.
    pub const ALL: [Self; 9] = [
        Self::Acquire,
        Self::Renew,
        Self::Release,
        Self::Inspect,
        Self::ForceRelease,
        Self::AcquireAll,
        Self::RenewAll,
        Self::AcquireEach,
        Self::ReleaseEach,
    ];

    /// Builds the text, without the words of a variant. `inboxes` sets the local `INBOX` to the inbox name before the client id. A voter has
    /// a floor, and its acquire may abstain.
    pub(crate) fn text(self, inboxes: &str, is_voter: bool) -> String {
        // A script as a function, with the keys and arguments of one resource.
        let function = |name, script: Self| {
            ["local function ", name, "(KEYS, ARGV)\n", &script.step(inboxes, false), "end\n"].concat()
        };
        let acquire = || function("acquire", Self::Acquire);
        let release = || function("release", Self::Release);
        match self {
            Self::AcquireAll => [NOT_DRAWN, NO_FLOOR, MARKED, &acquire(), &release(), self.source()].concat(),
            Self::AcquireEach => [NOT_DRAWN, NO_FLOOR, &acquire(), self.source()].concat(),
            Self::ReleaseEach => [NOT_DRAWN, NO_FLOOR, MARKED, &release(), self.source()].concat(),
            _ => {
                let floor = if is_voter { FLOOR } else { NO_FLOOR };
                let is_marked = matches!(self, Self::Renew | Self::RenewAll | Self::Release);
                [NOT_DRAWN, floor, if is_marked { MARKED } else { "" }, &self.step(inboxes, is_voter)]
                    .concat()
            }
        }
    }

    /// The script for one resource. The rules are a function of their own, because a function with many locals costs a
    /// call even if it returns before them: Lua makes room for all of them.
    fn step(self, inboxes: &str, is_voter: bool) -> String {
        let Some((first_lines, command)) = self.source().split_once(USE_RULES) else {
            return self.source().to_owned();
        };
        if self == Self::Acquire && is_voter {
            // It has no shortcuts, because they ignore the floor.
            let rules = layered(&[inboxes, &rules("", ""), command].concat());
            return [CLOCK, TOKENS, RESTART_GUARD, ACQUIRE_VOTER, &rules].concat();
        }
        let (shortcut, shared) = match self {
            Self::Acquire => {
                (include_str!("scripts/enqueue.lua"), include_str!("scripts/acquire_shared.lua"))
            }
            Self::Release => {
                (include_str!("scripts/handoff.lua"), include_str!("scripts/release_shared.lua"))
            }
            Self::Renew => (include_str!("scripts/renew_table.lua"), ""),
            _ => ("", ""),
        };
        [first_lines, &layered(&[CLOCK, inboxes, &rules(shortcut, shared), command].concat())].concat()
    }

    /// The script's own file.
    const fn source(self) -> &'static str {
        match self {
            Self::Acquire => include_str!("scripts/acquire.lua"),
            Self::Renew => include_str!("scripts/renew.lua"),
            Self::Release => include_str!("scripts/release.lua"),
            Self::Inspect => include_str!("scripts/inspect.lua"),
            Self::ForceRelease => include_str!("scripts/force_release.lua"),
            Self::AcquireAll => include_str!("scripts/acquire_all.lua"),
            Self::RenewAll => include_str!("scripts/renew_all.lua"),
            Self::AcquireEach => include_str!("scripts/acquire_each.lua"),
            Self::ReleaseEach => include_str!("scripts/release_each.lua"),
        }
    }
}

/// The rules, with the model's constants.
static RULES: LazyLock<String> = LazyLock::new(|| {
    let rules = concat!(include_str!("scripts/table.lua"), include_str!("scripts/model.lua"));
    let constants = [
        ("CLAIM_WINDOW", CLAIM_WINDOW.as_micros()),
        ("REPOLL_JITTER", REPOLL_JITTER_MICROS.into()),
        ("REPOLL_SPACING", REPOLL_SPACING.as_micros()),
        ("FIRST_WAITER_PLACE", FIRST_WAITER_PLACE.into()),
    ];
    rules.replace(USE_CONSTANTS, &constants.map(|(name, value)| format!("local {name} = {value}\n")).concat())
});

/// The rules, with the shortcuts of a command.
fn rules(shortcut: &str, shared: &str) -> String {
    RULES.replace(USE_SHORTCUT, shortcut).replace(USE_SHARED, shared).replace(USE_TOKENS, TOKENS)
}

/// The text as a function that is called at once, with one more inside it for each [`LAYER`] line. When Lua creates a function, it
/// searches the captured locals of the running function. Each layer is a tail call, which closes them, so the list is short again.
/// A layer may use up to 60 locals of the layers around it.
fn layered(text: &str) -> String {
    const BEGIN: &str = "return (function()\n";
    let layers = 1 + text.matches(LAYER).count();
    [BEGIN, &text.replace(LAYER, BEGIN), &"end)()\n".repeat(layers)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{PLAIN_MARK, TOKENS_PER_MS};
    use crate::variant::ScriptVariant;

    #[test]
    fn scripts_have_the_mark_of_plain_values_and_the_unit_of_tokens_of_this_crate() {
        let (name, mark) = (PLAIN_MARK.trim_start(), PLAIN_MARK);
        let (mut marks, mut units) = (0, 0);
        for text in Script::ALL.into_iter().flat_map(|s| ScriptVariant::ALL.map(|v| v.text(s))) {
            assert_eq!(text.matches(name).count(), text.matches(mark).count());
            marks += text.matches(&format!("'{mark}'")).count();
            let unit = "local TOKENS_PER_MS = ";
            assert_eq!(text.matches(unit).count(), text.matches(&format!("{unit}{TOKENS_PER_MS}\n")).count());
            units += text.matches(unit).count();
        }
        assert!(marks > Script::ALL.len() && units > Script::ALL.len(), "{marks} marks, {units} units");
    }

    #[test]
    fn script_has_the_parts_that_its_variant_needs() {
        let (enqueue, handoff) = (include_str!("scripts/enqueue.lua"), include_str!("scripts/handoff.lua"));
        let acquire_shared = include_str!("scripts/acquire_shared.lua");
        let release_shared = include_str!("scripts/release_shared.lua");
        for (script, variant) in Script::ALL.into_iter().flat_map(|s| ScriptVariant::ALL.map(|v| (s, v))) {
            let text = variant.text(script);
            // They contain the scripts of an acquire, of a release or of both.
            let acquires = matches!(script, Script::AcquireAll | Script::AcquireEach);
            let releases = matches!(script, Script::AcquireAll | Script::ReleaseEach);
            let is_batch = acquires || releases;
            let is_voter = variant.is_voter();
            // A voter's acquire has first lines of its own, and no shortcuts.
            let is_vote = is_voter && script == Script::Acquire;
            let may_join = acquires || script == Script::Acquire && !is_voter;
            let may_hand_off = releases || script == Script::Release;
            for (part, is_needed) in [
                (NOT_DRAWN, true),
                (FLOOR, is_voter && !is_batch),
                (NO_FLOOR, !is_voter || is_batch),
                (CLOCK, script != Script::RenewAll),
                (RESTART_GUARD, is_vote),
                (ACQUIRE_VOTER, is_vote),
                (SLOT_GUARD, variant.names_inbox() && script != Script::RenewAll),
                (enqueue, may_join),
                (acquire_shared, may_join),
                (handoff, may_hand_off),
                (release_shared, may_hand_off),
            ] {
                let part = variant.in_words(part);
                assert_eq!(text.contains(&part), is_needed, "{script:?} of {variant:?}: {part}");
            }
            let own = script.source().split(USE_RULES).skip(usize::from(is_vote));
            let mut own = own.into_iter().map(|part| variant.in_words(part));
            assert!(own.all(|part| text.contains(&part)), "{script:?} of {variant:?}");
            assert!(!text.contains("--@"), "{script:?} of {variant:?}");
            let (begun, ended) = (text.matches("(function()\n").count(), text.matches("end)()\n").count());
            assert_eq!(begun, ended, "{script:?} of {variant:?}");
        }
    }
}
