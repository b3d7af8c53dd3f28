//! The model as Redis runs it: one script per command, the same rules in the same order under the same names.
//!
//! A script reads the clock and the resource's state, tries the command's usual cases, if it has any, and otherwise runs
//! what all share (`rows.lua`, `model.lua`) and the command. To read the shared part costs more than most commands do,
//! which is why the usual cases come before it; that they do the same is tested with everything else.

use alloc::string::String;

/// Reads the server's clock, which is the only one that decides.
pub const CLOCK: &str = "local time = redis.call('TIME')\nlocal now = time[1] * 1000000 + time[2]\n";

/// Inboxes that any server of the store reaches: a server of its own, and a cluster before Redis 7.
pub const PLAIN_CHANNELS: &str = "local NUMSUB, PUBLISH = 'NUMSUB', 'PUBLISH'\n";

/// Inboxes that stay with the nodes that have their hash slot.
pub const SHARDED_CHANNELS: &str = "local NUMSUB, PUBLISH = 'SHARDNUMSUB', 'SPUBLISH'\n";

/// What comes before every command of a store that decides alone: it is told of no token that others gave.
pub const NO_FLOOR: &str = "local floor = 0\n";

const STATE: &str = "local raw = redis.call('GET', KEYS[1])\n";
const ROWS: &str = include_str!("lua/rows.lua");
const MODEL: &str = include_str!("lua/model.lua");

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
    /// `Acquire` of several resources: all of them, or none.
    AcquireAll,
    /// `Renew` of several resources, where that is all that is to be done.
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

    /// The whole text. `clock` is [`CLOCK`] or what a test has instead of it: something that sets the local `now` to
    /// microseconds. `channels` says how inboxes are reached: [`PLAIN_CHANNELS`] or [`SHARDED_CHANNELS`], and something that
    /// sets the local `INBOX` to what comes before a client's id in the name of its inbox. `quorum` is [`NO_FLOOR`], or what
    /// one of several stores that vote is told besides: [`Self::voting`].
    #[must_use]
    pub fn text(self, clock: &str, channels: &str, quorum: &str) -> String {
        // What is for one resource, as a function of what it is called with.
        let function = |name, step: &str| ["local function ", name, "(KEYS, ARGV)\n", step, "end\n"].concat();
        match self {
            Self::AcquireAll => {
                let acquire = function("acquire", &Self::Acquire.step(channels, quorum));
                let release = function("release", &Self::Release.step(channels, quorum));
                [clock, &acquire, &release, include_str!("lua/acquire_all.lua")].concat()
            }
            Self::RenewAll => {
                let renew = concat!(
                    "local function renew(state, id, ttl)\n",
                    "local raw, reserve = redis.call('GET', state), 0\n",
                    include_str!("lua/renew_fast.lua"),
                    "end\n",
                );
                [clock, quorum, renew, include_str!("lua/renew_all.lua")].concat()
            }
            _ => [clock, &self.step(channels, quorum)].concat(),
        }
    }

    /// What comes after the clock.
    fn step(self, channels: &str, quorum: &str) -> String {
        let (usual, command) = match self {
            Self::Acquire => (include_str!("lua/acquire_fast.lua"), include_str!("lua/acquire.lua")),
            Self::Renew => {
                let usual = concat!(include_str!("lua/renew_args.lua"), include_str!("lua/renew_fast.lua"));
                (usual, include_str!("lua/renew.lua"))
            }
            Self::Release => (include_str!("lua/release_fast.lua"), include_str!("lua/release.lua")),
            Self::Inspect => ("", include_str!("lua/inspect.lua")),
            Self::ForceRelease => ("", include_str!("lua/force_release.lua")),
            Self::AcquireAll | Self::RenewAll => ("", ""),
        };
        [STATE, channels, quorum, usual, ROWS, MODEL, command].concat()
    }

    /// What comes before this command where several stores vote. (There, attempts are made one by one.)
    #[must_use]
    pub const fn voting(self) -> &'static str {
        match self {
            Self::Acquire => concat!(include_str!("lua/floor.lua"), include_str!("lua/restart_guard.lua")),
            Self::AcquireAll => NO_FLOOR,
            _ => include_str!("lua/floor.lua"),
        }
    }
}
