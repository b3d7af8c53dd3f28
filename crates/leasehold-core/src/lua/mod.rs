//! The model as Redis runs it: one script per command, the same rules in the same order under the same names.
//!
//! A script is a line that reads the server's clock, the rules that all share (`model.lua`), and the command.

/// Reads the server's clock, which is the only one that decides.
pub const CLOCK: &str = "local time = redis.call('TIME')\nlocal now = time[1] * 1000000 + time[2]\n";

/// The rules that all commands share, and what the keys are.
pub const MODEL: &str = include_str!("model.lua");

/// `Acquire`.
pub const ACQUIRE: &str = include_str!("acquire.lua");
/// `Renew`.
pub const RENEW: &str = include_str!("renew.lua");
/// `Release`.
pub const RELEASE: &str = include_str!("release.lua");
/// `Inspect`.
pub const INSPECT: &str = include_str!("inspect.lua");
/// `ForceRelease`.
pub const FORCE_RELEASE: &str = include_str!("force_release.lua");
