//! The pure heart of leasehold: what a lock *is*, without saying where it is kept.
//!
//! - [`model`]: the server's side of every lock kind, one weighted FIFO lease table per resource.
//!   It is the in-memory store, the transition function of the embedded store, and the oracle that
//!   every other store is compared with.
//! - [`AcquireMachine`]: the client's side of one attempt to lock.
//! - [`LeaseMachine`]: the client's side of one held lease: when to renew it, and when to stop
//!   believing in it.
//! - [`Round`]: several stores that vote, and what their answers come to.
//!
//! Inputs of a machine are `handle_*`, its outputs are `poll_*`, and the time is an argument.
//!
//! What is deliberately absent: clocks, sockets, tasks, threads, random numbers and any kind of IO.
//! Nothing here can block, fail on its own or behave differently twice.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod client;
mod command;
mod id;
pub mod lua;
pub mod model;
mod name;
mod time;
mod token;

pub use client::attempt::{AcquireMachine, Failure, Outcome, WaitPolicy};
pub use client::handoff::{HandoffBudget, HandoffDecision, HandoffLimits};
pub use client::lease::{LeaseMachine, LeaseState, LeaseTerms, Loss};
pub use client::quorum::{NodeReplies, NodeReply, Round, Tally, Verdict, Vote, quorum_of};
pub use command::{
    Acquire, Answer, Command, Grant, HeadHint, Holder, Push, PushKind, QueueEntry, Queued, Refusal, Release,
    Renew, Reply, View, WaitFor,
};
pub use id::{Acquisition, ClientId, Owner};
pub use name::{Kind, MAX_NAME_BYTES, Name, NameError, Resource};
pub use time::{LocalTime, Now, StoreTime, drift_margin};
pub use token::{MAX_TOKEN, Token, TokenRange};
