//! Distributed locks that a team can trust and reason about.
//!
//! Being built: the stores come first, and nothing is public yet.

#![forbid(unsafe_code)]
// Until the client that uses them is here.
#![allow(dead_code)]

mod clock;
mod store;
