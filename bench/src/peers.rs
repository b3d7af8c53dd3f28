//! The peers that are part of this program: leasehold itself, and what no lock can be faster than.

mod bounds;
mod leasehold;

use clap::ValueEnum;
use leasehold_bench_peer::serve;

/// Which of them this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// leasehold, as its documentation advises.
    Leasehold,
    /// The same work without a lock library.
    Bounds,
}

/// Carries out orders until there are no more.
pub fn run(peer: Peer) {
    match peer {
        Peer::Leasehold => serve(leasehold::Leasehold::default()),
        Peer::Bounds => serve(bounds::Bounds::default()),
    }
}
