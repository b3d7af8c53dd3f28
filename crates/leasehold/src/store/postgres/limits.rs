//! How long things may take, and how often they are done.

use std::ops::RangeInclusive;
use std::time::Duration;

use leasehold_core::model::TOKEN_RETENTION;

use crate::store::PollIntervals;

/// Max time for a command, with all of its flights and the wait for a connection.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Max time to connect, unless the address names one.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the server lets a statement wait for the row lock of a resource. It is held for two flights.
pub(super) const LOCK_TIMEOUT_MS: u32 = 2_000;

/// How long the server lets a statement run, with its wait.
pub(super) const STATEMENT_TIMEOUT_MS: u32 = 4_000;

/// How long the server keeps the row lock of a client that has stopped between two flights. Shorter than the wait for a row lock,
/// so that the others' commands succeed.
pub(super) const IDLE_TIMEOUT_MS: u32 = 1_000;

/// Long intervals, because re-checks cost the server work and notifications are seldom lost.
pub(super) const POLL_INTERVALS: PollIntervals =
    PollIntervals { repoll_interval: Duration::from_secs(10), entry_ttl: Duration::from_secs(80) };

/// Without notifications each waiter looks again this often: the head after `repoll_interval`, the others after a third of
/// `entry_ttl`. So a grant is seen within its claim window.
pub(super) const POLLING_INTERVALS: PollIntervals =
    PollIntervals { repoll_interval: Duration::from_millis(250), entry_ttl: Duration::from_secs(6) };

/// Backoff between failed attempts to listen again.
pub(super) const RECONNECT_BACKOFF: RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// How often the listening connection is tried.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(10);

/// How often a transaction is run again after a deadlock, a failed serialization or a row that another client inserted.
pub(super) const ATTEMPTS: u32 = 10;

/// How often the model may lack rows in one transaction. Each window grows, so this is far more than it needs.
pub(super) const MAX_READS: u32 = 100;

/// Time between two sweeps of one client.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Rows that one transaction of a sweep looks at.
pub(super) const SWEEP_ROWS: i64 = 500;

/// A row is removed this long after the sweep could have first looked at it: longer than an acquire lasts that read the clock
/// before, and inserts the row again.
pub(super) const SWEEP_MARGIN_MICROS: u64 = 60_000_000;

/// How long a lock is taken for contended by a client that met another one there.
pub(super) const CONTENDED_FOR: Duration = Duration::from_secs(60);

/// Locks that a client remembers as contended.
pub(super) const MAX_CONTENDED: usize = 1_000;

/// [`TOKEN_RETENTION`].
#[allow(clippy::cast_possible_truncation, reason = "an hour")]
pub(super) const RETENTION_MICROS: u64 = TOKEN_RETENTION.as_micros() as u64;

/// The highest wall time that a token follows, as in the core.
pub(super) const MAX_WALL: u64 = leasehold_core::MAX_TOKEN - (1 << 40);
