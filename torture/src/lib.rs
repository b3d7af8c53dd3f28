//! Torture for lock libraries: real servers, real worker processes, faults, and a resource that records who believed to hold the lock.
//!
//! It knows no lock library but through the peer protocol of the comparison (`bench/peers/README.md`), so every peer can be the
//! target. `kinds` is the peer that takes leasehold's other kinds of lock. What it does not do: simulate. That is `sim/`, which repeats a seed exactly; here a seed repeats the faults and the workers'
//! lengths, and the machine does the rest.

pub mod check;
pub mod faults;
pub mod history;
pub mod kinds;
pub mod options;
pub mod page;
pub mod parts;
pub mod pauses;
pub mod report;
pub mod resource;
pub mod rng;
pub mod run;
pub mod serve;
pub mod specimens;
pub mod stores;
pub mod targets;
pub mod timeline;
pub mod workers;
