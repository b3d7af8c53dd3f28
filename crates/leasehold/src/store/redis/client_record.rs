//! What a client publishes about itself: its host, process and program, once per server or cluster.
//!
//! Leases and waiters have the id of their client and their own label. The client's record is a key of its own, which `Inspect`
//! reads. It has an expiry that the client's thread moves. It outlasts the longest lease that the client has asked for, so
//! that the holder of an abandoned lease is shown until that lease ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_core::{ClientId, Command, Resource};
use leasehold_redis_protocol::{client_key, slot_of_client};
use tokio::sync::Notify;

use super::limits::RECORD_REFRESH;

/// Min span of leases that a record covers: no shorter ttl moves its expiry.
const MIN_COVERED: Duration = Duration::from_secs(240);

/// The record of this client.
pub(super) struct ClientRecord {
    client: ClientId,
    metadata: OnceLock<Arc<str>>,
    /// The longest span in seconds for which the store keeps something after the client's end. Zero before the first attempt:
    /// a client that only looks has no record.
    covered: AtomicU64,
    /// The record has to be written again.
    changed: Notify,
}

impl ClientRecord {
    pub(super) fn new(client: ClientId) -> Self {
        Self { client, metadata: OnceLock::new(), covered: AtomicU64::new(0), changed: Notify::new() }
    }

    /// Sets what the record says. Empty text leaves no record.
    pub(super) fn publish(&self, metadata: Arc<str>) {
        // The client is made once.
        let _ = self.metadata.set(metadata);
    }

    /// The server may have lost the record.
    pub(super) fn request_write(&self) {
        self.changed.notify_one();
    }

    /// Whether the record must be written, because these commands store something for longer than before. Returns true once per
    /// such extension.
    pub(super) fn must_cover(&self, batch: &[(Arc<Resource>, Command)]) -> bool {
        if self.covers(batch) {
            return false;
        }
        let seconds = longest(batch).max(MIN_COVERED).as_secs() + 1;
        self.covered.fetch_max(seconds, Ordering::Relaxed) < seconds
    }

    /// Whether the record outlasts what these commands store.
    pub(super) fn covers(&self, batch: &[(Arc<Resource>, Command)]) -> bool {
        let longest = longest(batch);
        longest.is_zero() || longest.as_secs() < self.covered.load(Ordering::Relaxed)
    }

    /// Waits until the record has to be written again.
    pub(super) async fn until_requested(&self) {
        self.changed.notified().await;
    }

    /// The hash slot of the record.
    pub(super) fn slot(&self) -> u16 {
        slot_of_client(self.client)
    }

    /// The command that writes the record, if there is one.
    pub(super) fn command(&self) -> Option<redis::Cmd> {
        let metadata = self.metadata.get().filter(|metadata| !metadata.is_empty())?;
        let covered = self.covered.load(Ordering::Relaxed);
        if covered == 0 {
            return None;
        }
        let mut set = redis::cmd("SET");
        let ttl = covered + 2 * RECORD_REFRESH.as_secs();
        set.arg(client_key(self.client)).arg(&**metadata).arg("EX").arg(ttl);
        Some(set)
    }
}

/// The longest time for which one of these commands stores something.
fn longest(batch: &[(Arc<Resource>, Command)]) -> Duration {
    let span = |command: &Command| match command {
        Command::Acquire(acquire) => acquire.ttl,
        Command::Renew(renew) => renew.ttl,
        Command::Release(release) => release.min_hold,
        Command::Inspect | Command::ForceRelease => Duration::ZERO,
    };
    batch.iter().map(|(_, command)| span(command)).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Acquisition, Kind, Name};

    use super::*;

    #[test]
    fn record_is_written_for_the_first_attempt_and_for_longer_ones() {
        let record = ClientRecord::new(ClientId::new(1));
        record.publish(Arc::from("{}"));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let must_cover = |command: Command| record.must_cover(&[(resource.clone(), command)]);
        let acquire = |seconds| {
            let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
            Command::from(Acquire::exclusive(acquisition, Duration::from_secs(seconds)))
        };
        assert!(!must_cover(Command::Inspect) && record.command().is_none());
        assert!(must_cover(acquire(10)));
        assert!(!must_cover(acquire(10)) && !must_cover(acquire(240)) && !must_cover(Command::Inspect));
        let expiry = || {
            let packed = String::from_utf8(record.command().unwrap().get_packed_command()).unwrap();
            packed.split("\r\n").filter_map(|word| word.parse::<u64>().ok()).last().unwrap()
        };
        assert_eq!(expiry(), 601);
        assert!(must_cover(acquire(3_600)));
        assert_eq!(expiry(), 3_961);
    }
}
