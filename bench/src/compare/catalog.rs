//! The catalog: every row of the tables and its features.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The features of a row. The verdict compares rows with the same features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promises {
    /// The lease is renewed automatically while its holder lives.
    pub renews: bool,
    /// A waiter is notified and does not poll.
    pub has_push: bool,
    /// FIFO order under contention.
    pub is_fifo: bool,
    /// Every grant has a fencing token.
    pub is_fenced: bool,
}

/// A row of the tables.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// The peer program, as `bench/setup` names it.
    pub program: &'static str,
    /// The kind of lock, as the peer names it.
    pub lock: &'static str,
    /// Whether it has tuned settings.
    pub is_tuned: bool,
    /// Its features.
    pub promises: Promises,
    /// Its settings, for the page.
    pub note: &'static str,
}

const ALL: Promises = Promises { renews: true, has_push: true, is_fifo: true, is_fenced: true };
const PUSH: Promises = Promises { renews: true, has_push: true, is_fifo: false, is_fenced: false };
const POLLS: Promises = Promises { renews: false, has_push: false, is_fifo: false, is_fenced: false };
const EXTENDS: Promises = Promises { renews: true, ..POLLS };

const fn row(
    name: &'static str,
    program: &'static str,
    lock: &'static str,
    promises: Promises,
    note: &'static str,
) -> Row {
    Row { name, program, lock, is_tuned: false, promises, note }
}

const fn tuned(name: &'static str, program: &'static str, promises: Promises) -> Row {
    let note = "retries after about 5 ms";
    Row { name, program, lock: "mutex", is_tuned: true, promises, note }
}

/// leasehold's programs, and the lower bounds': all are this one.
pub const OWN: [&str; 5] = ["leasehold", "leasehold-blocking", "leasehold-postgres", "bounds", "chain"];

/// leasehold's mutex.
pub const LEASEHOLD: Row = row("leasehold", "leasehold", "mutex", ALL, "default settings");

/// The same mutex from Python.
pub const PYTHON: Row = row("leasehold (Python)", "leasehold-python", "mutex", ALL, "default settings");

/// The same mutex from Node.js.
pub const NODE: Row = row("leasehold (Node.js)", "leasehold-node", "mutex", ALL, "default settings");

/// The mutexes of the others, as they come.
pub const MUTEXES: [Row; 8] = [
    row("Redisson RLock", "redisson", "mutex", PUSH, "default settings"),
    row("Redisson RFairLock", "redisson", "fair", Promises { is_fifo: true, ..PUSH }, "default settings"),
    row(
        "Redisson RFencedLock",
        "redisson",
        "fenced",
        Promises { is_fenced: true, ..PUSH },
        "default settings",
    ),
    row("redsync", "redsync", "mutex", POLLS, "retries after 50 to 250 ms, without a limit"),
    row("rueidislock", "rueidislock", "mutex", PUSH, "one key, no loop tracking, as its README shows"),
    row("redlock", "redlock", "mutex", EXTENDS, "retries after 100 to 300 ms, without a limit on one server"),
    row("redis-py", "redis-py", "mutex", POLLS, "retries after 100 ms"),
    row("rslock", "rslock", "mutex", EXTENDS, "retries after up to 200 ms"),
];

/// The same, set to ask again sooner.
pub const TUNED: [Row; 4] = [
    tuned("redsync, tuned", "redsync", POLLS),
    tuned("redlock, tuned", "redlock", EXTENDS),
    tuned("redis-py, tuned", "redis-py", POLLS),
    tuned("rslock, tuned", "rslock", EXTENDS),
];

/// The lower bounds.
pub const PINGS: Row = row("two PINGs", "bounds", "ping", POLLS, "no lock at all");
/// The lower bound of an uncontended lock.
pub const SET: Row =
    row("SET NX PX, compare and delete", "bounds", "set", POLLS, "the commands of a lock, without a library");
/// The lower bound of a hand-off.
pub const PUBLISH: Row =
    row("PUBLISH to the next", "bounds", "publish", POLLS, "a ring of connections that pass a message on");
/// What a lock within a process takes at least.
pub const LOCAL: Row = row("tokio Mutex", "bounds", "local", POLLS, "within the process, no server");

/// Readers and writers.
pub const READ_WRITE: [Row; 2] = [
    row("leasehold RwLock", "leasehold", "read-write", ALL, "default settings"),
    row("Redisson RReadWriteLock", "redisson", "read-write", PUSH, "default settings"),
];

/// Semaphores.
pub const SEMAPHORES: [Row; 2] = [
    row("leasehold Semaphore", "leasehold", "semaphore", ALL, "default settings"),
    row(
        "Redisson RSemaphore",
        "redisson",
        "semaphore",
        Promises { has_push: true, ..POLLS },
        "its permits have no lease: those of a dead holder are gone",
    ),
];

/// Over a quorum of independent servers.
pub const QUORUM: [Row; 5] = [
    row("leasehold redlock:", "leasehold", "mutex", Promises { is_fifo: false, ..ALL }, "default settings"),
    row("Redisson RedLock", "redisson", "mutex", EXTENDS, "deprecated by its authors, and still there"),
    row("redsync", "redsync", "mutex", POLLS, "default settings"),
    row("redlock", "redlock", "mutex", EXTENDS, "default settings"),
    row("rslock", "rslock", "mutex", EXTENDS, "default settings"),
];

/// Locks on stores of other kinds, a class of their own.
pub const OTHER_STORES: [Row; 4] = [
    row(
        "leasehold postgres:",
        "leasehold-postgres",
        "mutex",
        ALL,
        "PostgreSQL; every lock and release is committed and synced",
    ),
    row(
        "etcd concurrency.Mutex",
        "etcd",
        "mutex",
        ALL,
        "etcd, one node; every lock is written to its log and synced",
    ),
    row(
        "Curator InterProcessMutex",
        "curator",
        "mutex",
        Promises { is_fenced: false, ..ALL },
        "ZooKeeper, one node; every lock is written to its log and synced",
    ),
    row(
        "PostgreSQL advisory lock",
        "postgres",
        "mutex",
        Promises { is_fenced: false, ..ALL },
        "in PostgreSQL's memory; the connection holds it",
    ),
];

/// Those that renew by themselves.
pub const RENEWING: [Row; 4] = [LEASEHOLD, MUTEXES[0], MUTEXES[4], MUTEXES[5]];

/// Every mutex with default settings, leasehold's first.
#[must_use]
pub fn plain() -> Vec<Row> {
    [LEASEHOLD, PYTHON, NODE].into_iter().chain(MUTEXES).collect()
}

/// Every mutex, also tuned.
#[must_use]
pub fn contended() -> Vec<Row> {
    plain().into_iter().chain(TUNED).collect()
}

/// Lower bounds first, then these.
#[must_use]
pub fn with(bounds: &[Row], rows: Vec<Row>) -> Vec<Row> {
    bounds.iter().copied().chain(rows).collect()
}

/// Every program that there is.
#[must_use]
pub fn programs() -> BTreeSet<&'static str> {
    all().into_iter().map(|row| row.program).collect()
}

/// Every row that there is, each once.
#[must_use]
pub fn all() -> Vec<Row> {
    [PINGS, SET, PUBLISH, LOCAL]
        .into_iter()
        .chain(contended())
        .chain(READ_WRITE)
        .chain(SEMAPHORES)
        .chain(QUORUM.into_iter().take(2))
        .chain(OTHER_STORES)
        .collect()
}
