//! How long things may take, and how often they are done.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::store::PollIntervals;

/// How long an answer may take. Whether a command that is not answered took effect is unknown.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long connecting may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a cluster is left to itself before its slots are asked for again.
pub(super) const REFRESH_PAUSE: Duration = Duration::from_millis(200);

/// The same while nobody answers.
pub(super) const MAX_REFRESH_PAUSE: Duration = Duration::from_secs(2);

/// How often they are asked for without a reason, where nodes don't tell whoever waits that they have lost a slot.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// Looking again costs a server something, and pushes are seldom lost.
pub(super) const POLL_INTERVALS: PollIntervals =
    PollIntervals { repoll_interval: Duration::from_secs(25), entry_ttl: Duration::from_secs(80) };

/// Backoff between failed connection attempts.
pub(super) const RECONNECT_BACKOFF: RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// How long the replicas have.
pub(super) const REPLICA_TIMEOUT: Duration = Duration::from_millis(500);

/// What the durable connection's answers may take.
pub(super) const REPLICA_RESPONSE_TIMEOUT: Duration = REPLICA_TIMEOUT.saturating_add(ANSWER_TIMEOUT);
