//! The pure heart of leasehold: what a lock *is*, without saying where it is kept.
//!
//! - [`model`]: the server's side of every lock kind, one weighted FIFO lease table per resource.
//!   It is the in-memory store, the transition function of the embedded store, and the oracle that
//!   every other store is compared with.
//!
//! What is deliberately absent: clocks, sockets, tasks, threads, random numbers and any kind of IO.
//! Nothing here can block, fail on its own or behave differently twice.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod command;
mod id;
mod lease;
pub mod model;
mod name;
mod time;
mod token;

pub use command::{
    Acquire, Answer, Command, Grant, Head, Holder, Push, PushKind, Queued, Refusal, Release, Renew, Reply,
    View, WaitFor, Waiting,
};
pub use id::{Acquisition, ClientId, Owner};
pub use lease::{LeaseMachine, LeaseState, LeaseTerms, Loss};
pub use name::{Kind, MAX_NAME_BYTES, Name, NameError, Resource};
pub use time::{LocalTime, Now, StoreTime, drift_margin};
pub use token::{MAX_TOKEN, Token, TokenRange};
