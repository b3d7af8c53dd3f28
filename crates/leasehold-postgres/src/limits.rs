//! How long things may take, and how often they are done.

use std::ops::RangeInclusive;
use std::time::Duration;

use leasehold_core::model::TOKEN_RETENTION;
use leasehold_store::{PollIntervals, StoreError};

use super::error;

/// Max time for a command, with all of its round trips.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for a renewal, at least and at most. In between it has a quarter of its ttl: then another one over a new connection is in
/// time. The most is half of the claim window, whose renewal is sent after a third of it.
pub(super) const RENEWAL_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(250)..=Duration::from_millis(1_500);

/// Max time that a command waits for a free connection of its client. With [`ANSWER_TIMEOUT`], less than the time after which an
/// attempt counts as lost. One that waits for the lock asks for a connection again, as long as the others get answers.
pub(super) const QUEUE_TIMEOUT: Duration = Duration::from_secs(8);

/// Max time to connect, unless the address names one.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The same for each of several hosts. A command has the time to try two of them.
pub(super) const HOST_TIMEOUT: Duration = Duration::from_secs(2);

/// When a silent connection is probed, how often, and how many unanswered probes end it.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
pub(super) const KEEPALIVE_RETRIES: u32 = 3;

/// How long the server lets a statement wait for the row lock of a resource. It is held for two round trips.
pub(super) const LOCK_TIMEOUT_MS: u32 = 2_000;

/// How long the server lets a statement run, with its wait.
pub(super) const STATEMENT_TIMEOUT_MS: u32 = 4_000;

/// How long the server keeps the row lock of a client that has stopped between two round trips. Shorter than the wait for a row lock,
/// so that the others' commands succeed.
pub(super) const IDLE_TIMEOUT_MS: u32 = 1_000;

/// Long intervals, because re-checks cost the server work and notifications are seldom lost.
pub(super) const POLL_INTERVALS: PollIntervals =
    PollIntervals::new(Duration::from_secs(10), Duration::from_secs(80));

/// The pause between two looks for pushes after an attempt was queued, and after a push has come. It grows by half each time.
pub(super) const PUSH_READ_PAUSE: Duration = Duration::from_millis(10);

/// Max time to look for pushes. A grant must be claimed within three seconds, so the next look must not be late.
pub(super) const PUSH_READ_TIMEOUT: Duration = Duration::from_millis(1_500);

/// The longest pause of a client with waiters.
pub(super) const PUSH_READ_PAUSE_WAITING: Duration = Duration::from_millis(250);

/// The longest pause of a client that only holds leases, and is notified that others want them.
pub(super) const PUSH_READ_PAUSE_HOLDING: Duration = Duration::from_secs(1);

/// A waiter asks again at least this often: a third of `entry_ttl`, and some time for the answer.
pub(super) const WAITING_FOR: Duration = Duration::from_secs(32);

/// How long a client that listens again goes on looking for pushes: longer than its waiters take to ask again.
pub(super) const PUSH_READS_AFTER_POLLING: Duration = Duration::from_secs(15);

/// A push that its client has not read is removed after this time. A grant has lapsed long before.
pub(super) const PUSH_LIFETIME_MICROS: u64 = 60_000_000;

/// Backoff between failed attempts to listen again.
pub(super) const RECONNECT_BACKOFF: RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// How often the listening connection is tried.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(10);

/// Commands at one resource that share a transaction. Its row is locked for as long as they take.
pub(super) const MAX_TOGETHER: usize = 16;

/// How often a transaction is run again after a deadlock, a failed serialization or a row that another client inserted.
pub(super) const ATTEMPTS: u32 = 10;

/// How often the model may lack rows in one transaction. Each window grows, so this is far more than it needs.
pub(super) const MAX_READS: u32 = 100;

/// Time between two sweeps of one client.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Rows that one transaction of a sweep looks at. It is repeated while there are as many.
pub(super) const SWEEP_ROWS: i64 = 500;

/// Max time of a sweep. The next one goes on with what is left.
pub(super) const SWEEP_TIME: Duration = Duration::from_secs(20);

/// A row is removed this long after its token need not be remembered any more: longer than an acquire lasts that read the clock
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

/// Limits what a client does on a connection before it has any lock. A pooler lets a client in whose server is away, and another
/// transaction may have locked the tables.
pub(super) async fn in_time<T>(work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(ANSWER_TIMEOUT, work)
        .await
        .unwrap_or_else(|_| Err(error::late(ANSWER_TIMEOUT, false)))
}
