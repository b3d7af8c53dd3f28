//! How long the answers of one server take, and so how long one is waited for: a server to which a thousand clients connect at once answers
//! each of them late, and is no server that hangs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::RedisResult;
use tokio::time::Instant;

use super::error::NoAnswer;
use super::limits::{ANSWER_TIMEOUT, MAX_ANSWER_TIMEOUT};

/// A late answer is waited for this many times as long as the slowest of the last ones took.
const FACTOR: u32 = 2;

/// With each answer, what the slowest one took counts for so much less: after twenty, for a fourteenth.
const DECAY: u64 = 8;

/// A late answer is waited for no longer than this fraction of the shortest ttl that the client holds: the connection may hang, and a renewal
/// over another one must come in time.
const TTL_FRACTION: u32 = 4;

/// The shortest ttl that the client holds, if it holds a lease.
pub(super) type ShortestTtl = Arc<dyn Fn() -> Option<Duration> + Send + Sync>;

/// The answers of one server, over all of a client's connections to it.
#[derive(Default)]
pub(super) struct AnswerTimes {
    /// In microseconds.
    slowest: AtomicU64,
    shortest_ttl: OnceLock<ShortestTtl>,
}

impl AnswerTimes {
    /// The first answer took this long.
    pub(super) fn new(first: Duration) -> Self {
        Self { slowest: AtomicU64::new(micros(first)), shortest_ttl: OnceLock::new() }
    }

    /// Waits for no answer so long that a lease would expire meanwhile.
    pub(super) fn set_shortest_ttl(&self, shortest_ttl: ShortestTtl) {
        // The first one is that of the client.
        let _ = self.shortest_ttl.set(shortest_ttl);
    }

    /// How long an answer is waited for.
    pub(super) fn limit(&self) -> Duration {
        let limit = limit_after(Duration::from_micros(self.slowest.load(Ordering::Relaxed)));
        if limit == ANSWER_TIMEOUT {
            return limit;
        }
        let shortest_ttl = self.shortest_ttl.get().and_then(|shortest_ttl| shortest_ttl());
        shortest_ttl.map_or(limit, |ttl| limit.min((ttl / TTL_FRACTION).max(ANSWER_TIMEOUT)))
    }

    /// Counts an answer to what was sent then, and says after a timeout how long it was waited for.
    pub(super) fn note<T>(&self, sent: Instant, limit: Duration, answered: RedisResult<T>) -> RedisResult<T> {
        match answered {
            Err(error) if error.is_timeout() && limit > ANSWER_TIMEOUT => Err(NoAnswer(limit).into()),
            Err(error) if error.code().is_none() => Err(error),
            answered => {
                self.count(sent.elapsed());
                answered
            }
        }
    }

    fn count(&self, took: Duration) {
        let before = self.slowest.load(Ordering::Relaxed);
        let now = micros(took).max(before - before / DECAY);
        if now != before {
            self.slowest.store(now, Ordering::Relaxed);
        }
    }
}

/// How long an answer is waited for, if the last one took so long.
pub(super) fn limit_after(took: Duration) -> Duration {
    took.saturating_mul(FACTOR).clamp(ANSWER_TIMEOUT, MAX_ANSWER_TIMEOUT)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io;

    use redis::RedisError;

    use super::*;

    #[test]
    fn limit_follows_the_slowest_of_the_last_answers() {
        let times = AnswerTimes::new(Duration::from_millis(1_500));
        assert_eq!(times.limit(), Duration::from_secs(3));
        times.count(Duration::from_millis(1_800));
        assert_eq!(times.limit(), Duration::from_millis(3_600));
        for _ in 0..20 {
            times.count(Duration::from_millis(1));
        }
        assert_eq!(times.limit(), ANSWER_TIMEOUT);
        for _ in 0..100 {
            times.count(Duration::from_millis(1));
        }
        assert!(times.slowest.load(Ordering::Relaxed) < 1_010);
        times.count(Duration::from_secs(60));
        assert_eq!(times.limit(), MAX_ANSWER_TIMEOUT);
    }

    #[test]
    fn limit_is_a_quarter_of_the_shortest_ttl_at_most() {
        for (ttl, expected_ms) in [(None, 4_000), (Some(20), 4_000), (Some(6), 1_500), (Some(2), 1_000)] {
            let times = AnswerTimes::new(Duration::from_secs(60));
            times.set_shortest_ttl(Arc::new(move || ttl.map(Duration::from_secs)));
            assert_eq!(times.limit(), Duration::from_millis(expected_ms), "{ttl:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn timeout_is_no_answer_and_says_how_long_it_was() {
        let times = AnswerTimes::default();
        let sent = Instant::now();
        tokio::time::advance(Duration::from_secs(2)).await;
        let timeout = || RedisError::from(io::Error::from(io::ErrorKind::TimedOut));
        times.note::<()>(sent, ANSWER_TIMEOUT, Err(timeout())).unwrap_err();
        assert_eq!(times.limit(), ANSWER_TIMEOUT);
        let error = times.note::<()>(sent, Duration::from_secs(2), Err(timeout())).unwrap_err();
        assert!(error.is_timeout());
        assert_eq!(super::super::error::explain(&error), "no answer within 2.0s");
        times.note(sent, Duration::from_secs(2), Ok(())).unwrap();
        assert_eq!(times.limit(), MAX_ANSWER_TIMEOUT);
    }
}
