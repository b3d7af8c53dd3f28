//! The core of leasehold: the lock rules and the client state machines, independent of any store.
//!
//! - [`model`]: the rules of every lock kind, one weighted FIFO lease table per resource. The in-memory store
//!   and the SQLite store run it. Every other store is tested against it.
//! - [`AcquireMachine`]: one acquire attempt.
//! - [`LeaseMachine`]: one held lease. It determines when to renew the lease, and until when to trust it.
//! - [`Round`]: one vote of several nodes.
//!
//! The inputs of a state machine are methods `handle_*`, its outputs are methods `poll_*`, and the time is an
//! argument.
//!
//! Commands, replies, votes and outcomes are exhaustive enums: a store or a checker that does not handle a new one is wrong,
//! and should not compile.
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
mod secret;
mod time;
mod token;
pub mod weight;

pub use client::attempt::{
    AcquireMachine, Effect, Failure, Outcome, REFUSAL_LIMIT, TOMBSTONE_TTL, WaitPolicy,
};
pub use client::handoff::{HandoffBudget, HandoffDecision, HandoffLimits};
pub use client::lease::{LeaseMachine, LeaseState, LeaseTerms, Loss};
pub use client::quorum::{NodeReplies, NodeReply, Round, Tally, Verdict, Vote, quorum_of};
pub use client::secrets::GrantSecrets;
pub use command::{
    Acquire, Answer, Command, Grant, HeadHint, Holder, Push, PushKind, QueueEntry, Queued, Refusal, Release,
    ReleaseIf, Renew, Reply, View, WaitFor,
};
pub use id::{Acquisition, ClientId, FIRST_REQUESTED, FIRST_UNCOUNTED, Owner};
pub use name::{Kind, MAX_NAME_BYTES, Name, NameError, Resource};
pub use now::Now;
pub use secret::{GrantProof, GrantSecret, SecretKey};
pub use time::{LocalTime, MAX_TTL, MIN_TTL, StoreTime, drift_margin};
pub use token::{MAX_TOKEN, Token, TokenRange};
