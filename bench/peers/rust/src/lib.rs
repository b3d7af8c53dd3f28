//! What the benchmark's peers in Rust share: the protocol, what a turn leaves behind, and the loop that takes turns.
//!
//! It knows no lock library. Peers in other languages do the same in their own words; `bench/peers/README.md` says what.

pub mod clock;
pub mod counter;
pub mod protocol;
pub mod serve;
pub mod turn;

pub use serve::{Failure, Library, Lock, serve};
