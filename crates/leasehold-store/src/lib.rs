//! What the client of leasehold asks of a store, and what the stores have in common.
//!
//! A store keeps one lease table per lock and runs the commands of `leasehold-core` on it. [`Store`] is the whole contract; what only
//! some stores offer are facets: [`ClientRecords`], [`VotedAttempts`], [`ForeignKeys`], [`Diagnose`] and, for a store that is one of
//! several which vote, [`QuorumNode`]. The other modules are what the stores of this repository share.

#![forbid(unsafe_code)]

#[cfg(unix)]
pub mod access_list;
pub mod address;
pub mod certificates;
pub mod clock;
mod contract;
pub mod credentials;
mod diagnostics;
pub mod digest;
pub mod event_text;
pub mod gate;
#[cfg(any(test, feature = "testing"))]
pub mod histories;
#[cfg(unix)]
pub mod identity;
#[cfg(unix)]
pub mod links;
pub mod login;
pub mod memory;
mod metadata;
mod open_error;
pub mod password;
pub mod process;
pub mod reread;
pub mod sql;
pub mod tasks;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod trial;
pub mod wakes;

pub use contract::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Cause, ClientRecords, Diagnose,
    EMBEDDED_POLL_INTERVALS, ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys,
    ForeignOutcome, ForeignScript, Inbox, KeyWatch, ListResult, MAX_DELAY, MAX_VOTED_TOKEN_LEAD,
    PollIntervals, QuorumNode, SharedBatch, Store, StoreError, StoreFactory, VotedAttempts, Watchers,
    admission_queue_of, diagnose, inspect_all, missing_response, only, redisson_counter, redisson_tag,
};
pub use diagnostics::{Check, Component, Diagnosis, FINDING_IDS, Fact, Finding, Severity};
pub use metadata::{HolderMetadata, MAX_LABEL_BYTES};
pub use open_error::{OpenError, OpenErrorKind};
