//! The arguments of `leasehold serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as Arguments;

use crate::duration;

#[derive(Clone, Debug, PartialEq, Eq, Arguments)]
pub(crate) struct ServeArgs {
    /// An address: unix:PATH (mode 0600, without tokens), or HOST:PORT (with tokens). Repeatable
    /// [default: unix:$XDG_RUNTIME_DIR/leasehold.sock]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Vec<leasehold_serve::Listen>,
    /// File with the tokens for TCP: lines `NAME RIGHTS TOKEN [PREFIX...]`. When it changes, it is read again
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
    /// Certificate for TLS over TCP, a PEM file. When it changes, it is read again
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Maximum number of open connections per address, each with at most one request; those without a token have 1024 others
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    pub(crate) max_connections: usize,
    /// Part of the connections, waiting requests and event streams that the tokens of one name can use if there are others, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) token_share: u8,
    /// After TERM: how long the server answers requests that neither acquire nor wait, where callers find no other server meanwhile
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) drain: Duration,
}
