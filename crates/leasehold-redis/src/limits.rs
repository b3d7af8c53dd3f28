//! How long things may take, and how often they are done.

use std::ops::RangeInclusive;
use std::time::Duration;

use leasehold_store::PollIntervals;

/// Max time for a reply of a server that has answered in time so far. Whether an unanswered command took effect is unknown.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The same if its last replies were late.
pub(super) const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// Max time for which an attempt may wait in a batch that is about to be sent. Usually it is that of one round of the runtime's tasks. It is well
/// below the lifetime of a tombstone.
pub(super) const MAX_COALESCE_DELAY: Duration = Duration::from_secs(10);

/// Max time to connect.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Min time between two refreshes of a cluster's slot map.
pub(super) const REFRESH_PAUSE: Duration = Duration::from_millis(200);

/// The same while no node answers.
pub(super) const MAX_REFRESH_PAUSE: Duration = Duration::from_secs(2);

/// Refresh interval without a reason.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which the sentinels are asked for the master without a reason, besides the subscription to their messages.
pub(super) const SENTINEL_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Long intervals, because re-checks cost the server work and pushes are seldom lost.
pub(super) const POLL_INTERVALS: PollIntervals =
    PollIntervals::new(Duration::from_secs(25), Duration::from_secs(80));

/// A waiter looks again at least this often where the client that releases sends the push: it may end before. A grant must be claimed within
/// three seconds.
pub(super) const POLL_BEHIND_A_PROXY: Duration = Duration::from_millis(1_500);

/// The same where no push arrives: the head of the queue, and another waiter.
pub(super) const POLLS_WITHOUT_PUSHES: [Duration; 2] =
    [Duration::from_millis(50), Duration::from_millis(250)];

/// Max time for which a message that a client sends to itself is waited for.
pub(super) const PUSH_TRIAL: Duration = Duration::from_millis(500);

/// Interval at which a client moves the expiry of its record.
pub(super) const RECORD_REFRESH: Duration = Duration::from_secs(180);

/// Pause after the record could not be written.
pub(super) const RECORD_RETRY: Duration = Duration::from_secs(2);

/// Max time for which a look-up waits for the records of a node.
pub(super) const RECORD_TIMEOUT: Duration = Duration::from_millis(200);

/// Backoff between failed connection attempts.
pub(super) const RECONNECT_BACKOFF: RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// Max time for the replicas to acknowledge.
pub(super) const REPLICA_TIMEOUT: Duration = Duration::from_millis(500);
