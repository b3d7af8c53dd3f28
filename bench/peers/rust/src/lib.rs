//! What the benchmark's peers in Rust share: the protocol, the log of acquisitions, and the loop that acquires.
//!
//! It knows no lock library. Peers in other languages do the same in their own words; `bench/peers/README.md` says what.

pub mod acquisition;
pub mod clock;
mod contend;
pub mod counter;
pub mod library;
pub mod protocol;
pub mod serve;

pub use library::{Failure, Library, Lock};
pub use serve::serve;
