//! How long a quorum's nodes are waited for, and how often they are asked.

use std::time::Duration;

use leasehold_store::PollIntervals;

/// Min time that a node gets to answer.
pub(super) const MIN_NODE_TIMEOUT: Duration = Duration::from_millis(100);

/// Max time, unless the nodes' round trips are known to be longer.
pub(super) const MAX_NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// A node that takes this many of its usual round trips is slow.
pub(super) const SLOW_ROUND_TRIPS: u32 = 8;

/// Min time that a command waits for a minority after a majority has answered.
pub(super) const MIN_PATIENCE: Duration = Duration::from_millis(20);

/// An attempt that does not wait ends within this time and 4 round trips of the fastest majority, if a majority answers.
pub(super) const TRY_LIMIT: Duration = Duration::from_millis(60);

/// How often a client that waits in an admission queue checks that the queue's node answers.
pub(super) const ADMISSION_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How long after the first node's grant push to wait for the others'.
pub(super) const GATHER_WINDOW: Duration = Duration::from_millis(20);

/// Extra time for stragglers: longer than the gap between two answers on one connection.
pub(super) const STRAGGLER_GRACE: Duration = Duration::from_millis(10);

/// Interval between retries of unanswered releases.
pub(super) const RELEASE_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// How long a client that ends repeats releases which keep a lock from others, and how often it looks.
pub(super) const SETTLE_LIMIT: Duration = Duration::from_secs(2);
pub(super) const SETTLE_INTERVAL: Duration = Duration::from_millis(50);

/// Number of batches over which attempts at different locks are spread.
pub(super) const SHARDS: u64 = 64;

/// For the admission queue. The head re-checks at this interval, the other waiters when the node requests it.
pub(super) const POLL_INTERVALS: PollIntervals =
    PollIntervals::new(Duration::from_secs(5), Duration::from_secs(80));
