//! The core of leasehold: the lock rules and the client state machines, independent of any store.
//!
//! - [`model`]: the server's side of every lock kind, one weighted FIFO lease table per resource.
//!   It is the in-memory store, the transition function of the embedded store, and the reference that
//!   every other store is tested against.
//! - [`AcquireMachine`]: one attempt to lock.
//! - [`LeaseMachine`]: one held lease: when to renew it, and until when to trust it.
//! - [`Round`]: one quorum vote of several nodes.
//!
//! Inputs of a machine are `handle_*`, its outputs are `poll_*`, and the time is an argument.
//!
//! The crate has no clocks, sockets, tasks, threads, random numbers or IO: it never blocks and is deterministic.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod client;
mod command;
mod id;
pub mod model;
mod name;
mod now;
mod time;
mod token;
pub mod weight;

pub use client::attempt::{AcquireMachine, Failure, Outcome, TOMBSTONE_TTL, WaitPolicy};
pub use client::handoff::{HandoffBudget, HandoffDecision, HandoffLimits};
pub use client::lease::{LeaseMachine, LeaseState, LeaseTerms, Loss};
pub use client::quorum::{NodeReplies, NodeReply, Round, Tally, Verdict, Vote, quorum_of};
pub use command::{
    Acquire, Answer, Command, Grant, HeadHint, Holder, Push, PushKind, QueueEntry, Queued, Refusal, Release,
    Renew, Reply, View, WaitFor,
};
pub use id::{Acquisition, ClientId, Owner};
pub use name::{Kind, MAX_NAME_BYTES, Name, NameError, Resource};
pub use now::Now;
pub use time::{LocalTime, StoreTime, drift_margin};
pub use token::{MAX_TOKEN, Token, TokenRange};
