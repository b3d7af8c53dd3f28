//! The arguments of the commands for a lease with an id.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args as Arguments;
use leasehold::Kind;

use super::{KindArgs, kinds};
use crate::duration;

#[derive(Debug, Arguments)]
pub(crate) struct AcquireArgs {
    /// Don't wait: exit with 1 if the lock is held. Connecting to the store may take up to 1 s
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// Wait at most this long, then exit with 1. This includes the time to connect, which may take up to 1 s in any case
    #[arg(short, long, value_name = "SECS", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) wait: Option<Duration>,
    /// Exit code if the lock was not acquired
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub(crate) conflict_exit_code: u8,
    /// Lifetime of the lease, from now and from each `leasehold renew`
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) ttl: Duration,
    #[command(flatten)]
    pub(crate) kind: KindArgs,
    /// Text that is published with the lease
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Print JSON: the id, the token, and the time left in milliseconds
    #[arg(long)]
    pub(crate) json: bool,
    /// Report progress, even if stderr is not a terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// The lock's name
    pub(crate) name: OsString,
}

#[derive(Debug, Arguments)]
pub(crate) struct RenewArgs {
    /// Print JSON, as `leasehold status --json` does
    #[arg(long)]
    pub(crate) json: bool,
    /// The id that `leasehold acquire` printed; - reads it from stdin [default: LEASEHOLD_ID]. Process lists show an id that is
    /// typed here
    pub(crate) id: Option<OsString>,
}

#[derive(Debug, Arguments)]
pub(crate) struct LeaseArgs {
    /// Print JSON; times are in milliseconds
    #[arg(long)]
    pub(crate) json: bool,
    /// The id that `leasehold acquire` printed; - reads it from stdin [default: LEASEHOLD_ID]. Process lists show an id that is
    /// typed here
    pub(crate) id: Option<OsString>,
}

#[derive(Debug, Arguments)]
pub(crate) struct ReleaseArgs {
    /// Release the lock of this name without a lease id. The holder may still be working, and only tokens distinguish it from
    /// the next holder
    #[arg(long)]
    pub(crate) force: bool,
    /// With --force: release only the holder that show prints with this token. It detects that at its next renewal
    #[arg(long, value_name = "TOKEN", requires = "force")]
    pub(crate) token: Option<u64>,
    /// Print JSON: {"released": [...]}
    #[arg(long)]
    pub(crate) json: bool,
    /// With --force: the kind of lock, if several locks have this name
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    pub(crate) kind: Option<Kind>,
    /// The id that `leasehold acquire` printed; - reads it from stdin [default: LEASEHOLD_ID]. With --force the lock's name
    #[arg(value_name = "ID|NAME", required_if_eq("force", "true"))]
    pub(crate) name: Option<OsString>,
}
