//! The model as Redis runs it: one script per command, the same rules in the same order under the same names.
//!
//! A script reads the clock and the resource's state, tries the command's usual case, if it has one, and otherwise runs
//! the rules that all share (`model.lua`) and the command. Reading the rules costs more than most commands do, which is
//! why the usual cases come before them; that they do the same is tested with everything else.

use alloc::string::String;

/// Reads the server's clock, which is the only one that decides.
pub const CLOCK: &str = "local time = redis.call('TIME')\nlocal now = time[1] * 1000000 + time[2]\n";

/// Inboxes that any server of the store reaches: a server of its own, and a cluster before Redis 7.
pub const PLAIN_CHANNELS: &str = "local NUMSUB, PUBLISH = 'NUMSUB', 'PUBLISH'\n";

/// Inboxes that stay with the nodes that have their hash slot.
pub const SHARDED_CHANNELS: &str = "local NUMSUB, PUBLISH = 'SHARDNUMSUB', 'SPUBLISH'\n";

const STATE: &str = "local raw = redis.call('GET', KEYS[1])\n";
const MODEL: &str = include_str!("model.lua");

/// A command as a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Script {
    usual: &'static str,
    command: &'static str,
}

impl Script {
    /// All scripts.
    pub const ALL: [Self; 5] = [ACQUIRE, RENEW, RELEASE, INSPECT, FORCE_RELEASE];

    /// The whole text, with the channels, and with [`CLOCK`] or what a test has instead of it: something that sets the local
    /// `now` to microseconds.
    #[must_use]
    pub fn text(&self, channels: &str, clock: &str) -> String {
        [channels, clock, STATE, self.usual, MODEL, self.command].concat()
    }
}

/// `Acquire`.
pub const ACQUIRE: Script =
    Script { usual: include_str!("acquire_fast.lua"), command: include_str!("acquire.lua") };
/// `Renew`.
pub const RENEW: Script = Script { usual: "", command: include_str!("renew.lua") };
/// `Release`.
pub const RELEASE: Script =
    Script { usual: include_str!("release_fast.lua"), command: include_str!("release.lua") };
/// `Inspect`.
pub const INSPECT: Script = Script { usual: "", command: include_str!("inspect.lua") };
/// `ForceRelease`.
pub const FORCE_RELEASE: Script = Script { usual: "", command: include_str!("force_release.lua") };
