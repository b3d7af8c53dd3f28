//! The peers that are part of this program: leasehold itself, and the lower bounds.

mod bounds;
mod leasehold;

use clap::ValueEnum;
use leasehold_bench_peer::serve;

/// The peer that this process runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// leasehold, as its documentation recommends.
    Leasehold,
    /// The same, with clients that are opened outside of the runtime, as those of its blocking API: two connections instead of three.
    LeaseholdBlocking,
    /// The same in PostgreSQL.
    LeaseholdPostgres,
    /// The same work without a lock library.
    Bounds,
    /// The bare chain, one of these.
    Chain,
}

/// Executes orders until standard input ends.
pub fn run(peer: Peer) {
    match peer {
        Peer::Leasehold | Peer::LeaseholdPostgres => serve(leasehold::Leasehold::default()),
        Peer::LeaseholdBlocking => serve(leasehold::Leasehold::outside_of_the_runtime()),
        Peer::Bounds => serve(bounds::Bounds::default()),
        Peer::Chain => serve(bounds::Bounds::with_scripts()),
    }
}
