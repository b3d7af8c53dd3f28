//! What a client publishes about itself: its host, process and program, once per server or cluster.
//!
//! Leases and waiters have the id of their client and their own label. The client's record is a key of its own, which `Inspect`
//! reads. It has an expiry that the client's thread moves. It outlasts the longest lease that the client has asked for, so
//! that the holder of an abandoned lease is shown until that lease ends. A client that renews the lease of another one, which
//! was detached, keeps the record of that client too.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::{ClientId, Command, FIRST_UNCOUNTED, Renew};
use leasehold_redis_protocol::{client_key, slot_of_client};
use leasehold_store::Call;
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
    /// What is known of the record at the server.
    written: Mutex<Written>,
    /// The record has to be written again.
    changed: Notify,
    /// When the records of other clients, whose leases this client renews, were kept, and for how long.
    kept: Mutex<BTreeMap<ClientId, (Instant, Duration)>>,
}

/// What the record at the server covers, as far as this client knows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    /// A span in seconds.
    covered: u64,
    /// How often the server may have lost the record.
    losses: u64,
}

impl ClientRecord {
    pub(super) fn new(client: ClientId) -> Self {
        Self {
            client,
            metadata: OnceLock::new(),
            covered: AtomicU64::new(0),
            written: Mutex::default(),
            changed: Notify::new(),
            kept: Mutex::default(),
        }
    }

    /// Sets what the record says. Empty text leaves no record.
    pub(super) fn publish(&self, metadata: Arc<str>) {
        // The client is made once.
        let _ = self.metadata.set(metadata);
    }

    pub(super) fn request_write(&self) {
        self.changed.notify_one();
    }

    /// The server may have lost the record, after a reconnect for example.
    pub(super) fn mark_lost(&self) {
        let mut written = self.written();
        *written = Written { covered: 0, losses: written.losses + 1 };
        drop(written);
        self.request_write();
    }

    /// Whether the record must be written, because these commands store something for longer than before. Returns true once per
    /// such extension.
    pub(super) fn must_cover(&self, batch: &[Call]) -> bool {
        if self.covers_own(batch) {
            return false;
        }
        let seconds = self.longest(batch).max(MIN_COVERED).as_secs() + 1;
        self.covered.fetch_max(seconds, Ordering::Relaxed) < seconds
    }

    /// Whether the records outlast what these commands store.
    pub(super) fn covers(&self, batch: &[Call]) -> bool {
        self.covers_own(batch)
            && batch.iter().all(|Call { command, .. }| self.lease_of_other(command).is_none())
    }

    fn covers_own(&self, batch: &[Call]) -> bool {
        let longest = self.longest(batch);
        longest.is_zero() || longest.as_secs() < self.covered.load(Ordering::Relaxed)
    }

    /// The other clients whose records must be kept, because these commands renew their leases, each with the span that the
    /// record must last. A record is kept for so long that it need not be kept again with each renewal.
    pub(super) fn take_others(&self, batch: &[Call]) -> Vec<(ClientId, Duration)> {
        let mut others = BTreeMap::<ClientId, Duration>::new();
        for (client, span) in batch.iter().filter_map(|Call { command, .. }| self.lease_of_other(command)) {
            let longest = others.entry(client).or_default();
            *longest = span.max(*longest);
        }
        if others.is_empty() {
            return Vec::new();
        }
        let (now, mut kept) = (Instant::now(), self.kept());
        kept.retain(|_, (at, _)| now.duration_since(*at) < RECORD_REFRESH);
        others.retain(|client, span| kept.get(client).is_none_or(|(_, longest)| longest < span));
        kept.extend(others.iter().map(|(client, span)| (*client, (now, *span))));
        others.into_iter().collect()
    }

    /// The record of this client could not be kept: the next renewal tries again.
    pub(super) fn retry_other(&self, client: ClientId) {
        self.kept().remove(&client);
    }

    /// The client whose lease this command renews, if it is another one, and how long its record must last. The id of an attempt that no client
    /// has counted is no client's.
    fn lease_of_other(&self, command: &Command) -> Option<(ClientId, Duration)> {
        match command {
            Command::Renew(Renew { acquisition, .. }) if acquisition.sequence >= FIRST_UNCOUNTED => None,
            Command::Renew(renew) if renew.acquisition.client != self.client => {
                Some((renew.acquisition.client, lifetime(renew.ttl.max(MIN_COVERED).as_secs() + 1)))
            }
            _ => None,
        }
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<ClientId, (Instant, Duration)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest time for which one of these commands stores something of this client.
    fn longest(&self, batch: &[Call]) -> Duration {
        let span = |command: &Command| match command {
            Command::Acquire(acquire) => acquire.ttl,
            Command::Renew(renew) if renew.acquisition.client == self.client => renew.ttl,
            Command::Release(release) => release.min_hold,
            Command::Renew(_) | Command::Inspect | Command::ForceRelease => Duration::ZERO,
        };
        batch.iter().map(|Call { command, .. }| span(command)).max().unwrap_or_default()
    }

    /// The span in seconds that the record must cover.
    pub(super) fn covered(&self) -> u64 {
        self.covered.load(Ordering::Relaxed)
    }

    /// What a write that begins now makes of the record.
    pub(super) fn begin_write(&self) -> Written {
        Written { covered: self.covered(), losses: self.written().losses }
    }

    /// The write has succeeded. It does not count if the server may have lost the record since it began.
    pub(super) fn set_written(&self, write: Written) {
        let mut written = self.written();
        if write.losses == written.losses {
            written.covered = written.covered.max(write.covered);
        }
    }

    /// Whether the record was written for the span that it must cover. A server may have lost it without this client's knowledge.
    pub(super) fn is_written(&self) -> bool {
        self.written().covered >= self.covered()
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
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
        let ttl = lifetime(covered).as_secs();
        set.arg(client_key(self.client)).arg(&**metadata).arg("EX").arg(ttl);
        Some(set)
    }
}

/// How long a record lasts that covers this many seconds: writing it may fail for a while.
fn lifetime(covered: u64) -> Duration {
    Duration::from_secs(covered) + 2 * RECORD_REFRESH
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Acquisition, Kind, Name, Release, Resource};

    use super::*;

    #[test]
    fn record_covers_the_minimum_hold_of_a_release() {
        let record = ClientRecord::new(ClientId::new(1));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let release = |seconds| {
            let release = Release { min_hold: Duration::from_secs(seconds), ..Release::now(acquisition) };
            [Call::new(resource.clone(), Command::Release(release))]
        };
        assert!(!record.must_cover(&release(0)));
        assert!(record.must_cover(&release(3_600)) && record.covers(&release(3_600)));
        assert!(!record.covers(&release(7_200)));
    }

    /// An expiry that is moved too late ends the record of a live client: a refresh may fail once.
    #[test]
    fn record_is_refreshed_before_it_expires() {
        assert!(RECORD_REFRESH < MIN_COVERED && RECORD_REFRESH <= Duration::from_secs(300));
    }

    #[test]
    fn renewal_of_a_lease_by_its_id_alone_keeps_no_record() {
        let record = ClientRecord::new(ClientId::new(1));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        for (sequence, is_kept) in [(7, true), (FIRST_UNCOUNTED, false), (FIRST_UNCOUNTED + 9, false)] {
            let acquisition = Acquisition { client: ClientId::new(2), sequence };
            let renew = Renew::to(acquisition, Duration::from_secs(30));
            let batch = [Call::new(resource.clone(), Command::Renew(renew))];
            assert_eq!(record.take_others(&batch).len(), usize::from(is_kept), "{sequence}");
        }
    }

    #[test]
    fn record_is_written_for_the_first_attempt_and_for_longer_ones() {
        let record = ClientRecord::new(ClientId::new(1));
        record.publish(Arc::from("{}"));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let must_cover = |command: Command| record.must_cover(&[Call::new(resource.clone(), command)]);
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

    #[test]
    fn record_that_may_be_lost_is_not_written_until_a_later_write() {
        let record = ClientRecord::new(ClientId::new(1));
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let acquire = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(10)));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        assert!(record.must_cover(&[Call::new(resource, acquire)]) && !record.is_written());
        record.set_written(record.begin_write());
        assert!(record.is_written());
        let before = record.begin_write();
        record.mark_lost();
        assert!(!record.is_written(), "a detach waits for the record again");
        record.set_written(before);
        assert!(!record.is_written(), "this write may have come before the loss");
        record.set_written(record.begin_write());
        assert!(record.is_written());
    }

    #[test]
    fn record_of_another_client_is_kept_once_and_again_after_a_failure() {
        let record = ClientRecord::new(ClientId::new(1));
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let renew = |client| {
            let acquisition = Acquisition { client: ClientId::new(client), sequence: 1 };
            let renew = Renew::to(acquisition, Duration::from_secs(3_600));
            [Call::new(resource.clone(), Command::Renew(renew))]
        };
        assert!(record.take_others(&renew(1)).is_empty());
        let other = (ClientId::new(2), Duration::from_secs(3_961));
        assert!(!record.covers(&renew(2)) && !record.must_cover(&renew(2)));
        assert_eq!(record.take_others(&renew(2)), [other]);
        assert!(record.take_others(&renew(2)).is_empty());
        record.retry_other(other.0);
        assert_eq!(record.take_others(&renew(2)), [other]);
        // A longer lease of the same client needs its record for longer.
        let [mut long] = renew(2);
        let Command::Renew(renewal) = &mut long.command else { unreachable!() };
        renewal.ttl = Duration::from_secs(7_200);
        let both = [renew(2)[0].clone(), long.clone()];
        assert_eq!(record.take_others(&both), [(other.0, Duration::from_secs(7_561))]);
        assert!(record.take_others(&both).is_empty());
    }
}
