//! The scripts, one per command. Each implements the rules of `leasehold_core::model` with the same names.
//!
//! A script begins with the few lines that are the whole usual case. The line `--@use rules` stands for the shared part, which
//! costs more than most commands, and which only runs if these lines have not answered: `table.lua`, the shortcut of the command if it
//! has one, `rows.lua` and `model.lua`. The tests of the crate `leasehold` compare all of it with the model.

/// Commands for inboxes on plain channels: single servers, and clusters before Redis 7.
pub(crate) const PLAIN_CHANNELS: &str = "local NUMSUB, PUBLISH = 'NUMSUB', 'PUBLISH'\n";

/// Commands for inboxes on sharded channels, which stay on the nodes of the slot.
pub(crate) const SHARDED_CHANNELS: &str = "local NUMSUB, PUBLISH = 'SHARDNUMSUB', 'SPUBLISH'\n";

/// Before the rules in a cluster.
pub(crate) const SLOT_GUARD: &str = include_str!("scripts/slot_guard.lua");

/// Goes before a script in a test, after a line that sets the local `virtual` to microseconds: the script then has that time
/// instead of the server's, for its clock, its tokens and its expiries. Needs Redis 7.
pub const VIRTUAL_TIME: &str = include_str!("scripts/testing/virtual_time.lua");

/// An id of the clock that was drawn, and is no token yet: see `model.lua`.
const NOT_DRAWN: &str = "local drawn = nil\n";
const NO_FLOOR: &str = "local floor = 0\n";
const FLOOR: &str = include_str!("scripts/floor.lua");
const RESTART_GUARD: &str = include_str!("scripts/restart_guard.lua");
const TABLE: &str = include_str!("scripts/table.lua");
const RULES: &str = concat!(include_str!("scripts/rows.lua"), include_str!("scripts/model.lua"));
const USE_RULES: &str = "--@use rules\n";

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
}

impl Script {
    /// All scripts.
    pub const ALL: [Self; 7] = [
        Self::Acquire,
        Self::Renew,
        Self::Release,
        Self::Inspect,
        Self::ForceRelease,
        Self::AcquireAll,
        Self::RenewAll,
    ];

    /// Builds the text. `inboxes` sets the locals `NUMSUB` and `PUBLISH` ([`PLAIN_CHANNELS`] or [`SHARDED_CHANNELS`]), and
    /// `INBOX` to the inbox name before the client id. A voter has a floor, and its acquire may abstain.
    pub(crate) fn text(self, inboxes: &str, is_voter: bool) -> String {
        match self {
            Self::AcquireAll => {
                // A script as a function, with the keys and arguments of one resource.
                let function = |name, script: Self| {
                    ["local function ", name, "(KEYS, ARGV)\n", &script.step(inboxes, ""), "end\n"].concat()
                };
                let acquire = function("acquire", Self::Acquire);
                let release = function("release", Self::Release);
                [NOT_DRAWN, NO_FLOOR, &acquire, &release, self.source()].concat()
            }
            _ => {
                let guard = if is_voter && self == Self::Acquire { RESTART_GUARD } else { "" };
                let floor = if is_voter { FLOOR } else { NO_FLOOR };
                [NOT_DRAWN, floor, &self.step(inboxes, guard)].concat()
            }
        }
    }

    /// The script for one resource. The rules are a function of their own, because a function with many locals costs a
    /// call even if it returns before them: Lua makes room for all of them.
    fn step(self, inboxes: &str, guard: &str) -> String {
        match self.source().split_once(USE_RULES) {
            Some((first_lines, command)) => {
                // A voter may abstain before anything else.
                let rules = [inboxes, TABLE, guard, self.shortcut(), RULES, command].concat();
                [first_lines, "return (function()\n", &rules, "end)()\n"].concat()
            }
            None => self.source().to_owned(),
        }
    }

    /// What answers contended and shared locks before the rules.
    const fn shortcut(self) -> &'static str {
        match self {
            Self::Acquire => include_str!("scripts/acquire_shortcut.lua"),
            Self::Release => include_str!("scripts/release_shortcut.lua"),
            _ => "",
        }
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
        }
    }
}
