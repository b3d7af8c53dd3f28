//! The scripts, one per command. Each implements the rules of `leasehold_core::model` with the same names.
//!
//! A script reads the clock and the resource's state. If the command has a fast path, the script tries it. Otherwise it
//! runs the shared part (`rows.lua`, `model.lua`) and the command. The fast path comes first because the shared part costs
//! more than most commands. The tests of the crate `leasehold` compare both with the model.

/// Reads the server's clock. No other clock affects a script.
pub const CLOCK: &str = "local time = redis.call('TIME')\nlocal now = time[1] * 1000000 + time[2]\n";

/// Commands for inboxes on plain channels: single servers, and clusters before Redis 7.
pub const PLAIN_CHANNELS: &str = "local NUMSUB, PUBLISH = 'NUMSUB', 'PUBLISH'\n";

/// Commands for inboxes on sharded channels, which stay on the nodes of the slot.
pub const SHARDED_CHANNELS: &str = "local NUMSUB, PUBLISH = 'SHARDNUMSUB', 'SPUBLISH'\n";

const STATE: &str = "local raw = redis.call('GET', KEYS[1])\n";
const ROWS: &str = include_str!("scripts/rows.lua");
const MODEL: &str = include_str!("scripts/model.lua");

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
    /// `Renew` of several leases. It has only a fast path.
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

    /// The prelude of a single server: there are no tokens of other nodes.
    pub const NO_FLOOR: &str = "local floor = 0\n";

    /// Builds the text from its parts. [`ScriptVariant::text`](crate::ScriptVariant::text) chooses the parts; a test may use
    /// others.
    ///
    /// - `clock` sets the local `now` to microseconds: [`CLOCK`].
    /// - `channels` sets the locals `NUMSUB` and `PUBLISH` ([`PLAIN_CHANNELS`] or [`SHARDED_CHANNELS`]), and `INBOX` to the inbox
    ///   name before the client id.
    /// - `floor` sets the local `floor`: [`Script::NO_FLOOR`] or [`Script::voter_prelude`].
    #[must_use]
    pub fn text(self, clock: &str, channels: &str, floor: &str) -> String {
        // The script for one resource, as a function with the keys and arguments of that resource.
        let function = |name, step: &str| ["local function ", name, "(KEYS, ARGV)\n", step, "end\n"].concat();
        match self {
            Self::AcquireAll => {
                let acquire = function("acquire", &Self::Acquire.step(channels, floor));
                let release = function("release", &Self::Release.step(channels, floor));
                [clock, &acquire, &release, include_str!("scripts/acquire_all.lua")].concat()
            }
            Self::RenewAll => {
                let renew = concat!(
                    "local function renew(state, id, ttl)\n",
                    "local raw, reserve = redis.call('GET', state), 0\n",
                    include_str!("scripts/renew_fast.lua"),
                    "end\n",
                );
                [clock, floor, renew, include_str!("scripts/renew_all.lua")].concat()
            }
            _ => [clock, &self.step(channels, floor)].concat(),
        }
    }

    /// Everything after the clock.
    fn step(self, channels: &str, floor: &str) -> String {
        let (fast_path, command) = match self {
            Self::Acquire => (include_str!("scripts/acquire_fast.lua"), include_str!("scripts/acquire.lua")),
            Self::Renew => {
                let fast_path =
                    concat!(include_str!("scripts/renew_args.lua"), include_str!("scripts/renew_fast.lua"));
                (fast_path, include_str!("scripts/renew.lua"))
            }
            Self::Release => (include_str!("scripts/release_fast.lua"), include_str!("scripts/release.lua")),
            Self::Inspect => ("", include_str!("scripts/inspect.lua")),
            Self::ForceRelease => ("", include_str!("scripts/force_release.lua")),
            Self::AcquireAll | Self::RenewAll => ("", ""),
        };
        [STATE, channels, floor, fast_path, ROWS, MODEL, command].concat()
    }

    /// The prelude of a quorum node: reads the floor and, before an acquire, may abstain. `AcquireAll` is not used over a quorum.
    #[must_use]
    pub const fn voter_prelude(self) -> &'static str {
        match self {
            Self::Acquire => {
                concat!(include_str!("scripts/floor.lua"), include_str!("scripts/restart_guard.lua"))
            }
            Self::AcquireAll => Self::NO_FLOOR,
            _ => include_str!("scripts/floor.lua"),
        }
    }
}
