//! The stores.

#[cfg(any(feature = "postgres", feature = "redis"))]
mod certificates;
mod contract;
#[cfg(test)]
mod histories;
mod lazy;
pub(crate) mod memory;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "redlock")]
pub(crate) mod redlock;
#[cfg(any(feature = "postgres", all(feature = "sqlite", unix)))]
mod sql;
#[cfg(all(feature = "sqlite", unix))]
pub(crate) mod sqlite;
mod trial;

// Some are for stores that are features.
#[cfg_attr(
    not(all(unix, feature = "postgres", feature = "redlock", feature = "sqlite")),
    allow(unused_imports)
)]
pub(crate) use self::contract::{
    Batch, BoxFuture, CallResult, Capabilities, Cause, ClientRecords, Diagnose, EMBEDDED_POLL_INTERVALS,
    Inbox, ListResult, PollIntervals, Store, StoreError, VotedAttempts, admission_queue_of, diagnose,
    inspect_all, missing_response, only,
};
#[cfg(feature = "redis")]
pub(crate) use self::contract::{
    ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome, ForeignScript,
    KeyWatch, MAX_DELAY, Watchers, redisson_counter, redisson_tag,
};
#[cfg(feature = "redlock")]
pub(crate) use self::contract::{QuorumNode, SharedBatch};
pub(crate) use self::lazy::Lazy;
#[cfg(feature = "redis")]
pub(crate) use self::redis::SharedConnection;
#[cfg(all(feature = "_fuzzing", feature = "redlock"))]
pub(crate) use self::redis::{fuzz_cluster_slots, fuzz_connection_info};
#[cfg(all(feature = "_fuzzing", feature = "sqlite", unix))]
pub(crate) use self::sqlite::fuzz_pipe_record;
