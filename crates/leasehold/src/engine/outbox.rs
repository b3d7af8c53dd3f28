//! The commands that are due but not yet sent, by shard.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use leasehold_core::Resource;
use leasehold_store::Store;

use super::due::MAX_BATCH;
use super::entry::Transmit;

/// How many batches may be in flight to one shard. After a reconnect all leases are renewed; a server with more requests than
/// it can answer in time would look like a lost connection.
const MAX_IN_FLIGHT: usize = 16;

pub(super) type Outgoing = (Arc<Resource>, Transmit);
pub(super) type Transmits = Vec<Outgoing>;

/// What is due. While a shard has [`MAX_IN_FLIGHT`] batches, its commands wait here, and the oldest ones are the next batch.
#[derive(Default)]
pub(super) struct Outbox {
    /// By shard and replica count, in the order of the deadlines. None is empty.
    due: BTreeMap<(u64, u32), VecDeque<Outgoing>>,
    /// The number of batches in flight. A cluster's nodes come and go, but they are few.
    in_flight: BTreeMap<u64, usize>,
}

impl Outbox {
    pub(super) fn add(&mut self, store: &dyn Store, transmits: Transmits) {
        for (resource, transmit) in transmits {
            let shard = store.shard(&resource, &transmit.command);
            self.due.entry((shard, transmit.replicas)).or_default().push_back((resource, transmit));
        }
    }

    /// The next batch to send, with its shard and replica count. It is in flight until [`Self::handle_response`].
    pub(super) fn next_batch(&mut self) -> Option<(u64, u32, Transmits)> {
        let in_flight = &self.in_flight;
        let has_room = |shard| in_flight.get(shard).is_none_or(|count| *count < MAX_IN_FLIGHT);
        // The oldest first: commands with one replica count must not keep those with another one waiting.
        let ready = self.due.iter().filter(|((shard, _), _)| has_room(shard));
        let oldest =
            |waiting: &VecDeque<(_, Transmit)>| waiting.front().map(|(_, transmit)| transmit.sent_at);
        let key = *ready.min_by_key(|(_, waiting)| oldest(waiting))?.0;
        let waiting = self.due.get_mut(&key)?;
        let batch = waiting.drain(..waiting.len().min(MAX_BATCH)).collect();
        if waiting.is_empty() {
            self.due.remove(&key);
        }
        let (shard, replicas) = key;
        *self.in_flight.entry(shard).or_default() += 1;
        Some((shard, replicas, batch))
    }

    /// A batch to this shard was answered, or has failed.
    pub(super) fn handle_response(&mut self, shard: u64) {
        if let Some(count) = self.in_flight.get_mut(&shard) {
            *count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquisition, ClientId, Command, Kind, LocalTime, Name, Release};

    use super::*;

    impl Outbox {
        /// Adds a release. The sequence number is also its age.
        fn add_release(&mut self, shard: u64, replicas: u32, sequence: u64) {
            let acquisition = Acquisition { client: ClientId::new(1), sequence };
            let command = Command::Release(Release::now(acquisition));
            let sent_at = LocalTime::from_micros(sequence);
            let transmit = Transmit { entry: sequence.into(), sent_at, command, replicas };
            let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
            self.due.entry((shard, replicas)).or_default().push_back((resource, transmit));
        }

        fn sent(&mut self) -> Vec<(u64, Vec<u64>)> {
            let batches = std::iter::from_fn(|| self.next_batch());
            let numbers =
                |batch: Transmits| batch.iter().map(|(_, transmit)| transmit.entry.sequence()).collect();
            batches.map(|(shard, _, batch)| (shard, numbers(batch))).collect()
        }

        /// As many batches in flight as may be.
        fn full(shard: u64) -> Self {
            Self { in_flight: BTreeMap::from([(shard, MAX_IN_FLIGHT)]), ..Self::default() }
        }
    }

    #[test]
    fn commands_that_wait_for_a_response_are_sent_together() {
        let mut outbox = Outbox::default();
        for sequence in 0..MAX_IN_FLIGHT as u64 {
            outbox.add_release(1, 0, sequence);
            assert_eq!(outbox.sent(), [(1, vec![sequence])]);
        }
        for sequence in 100..103 {
            outbox.add_release(1, 0, sequence);
            assert_eq!(outbox.sent(), []);
        }
        outbox.add_release(2, 0, 200);
        assert_eq!(outbox.sent(), [(2, vec![200])], "another shard does not wait");
        outbox.handle_response(2);
        assert_eq!(outbox.sent(), []);
        outbox.handle_response(1);
        assert_eq!(outbox.sent(), [(1, vec![100, 101, 102])]);
        outbox.add_release(1, 0, 103);
        assert_eq!(outbox.sent(), [], "one response, one batch");
    }

    #[test]
    fn no_replica_count_keeps_another_one_waiting() {
        let mut outbox = Outbox::full(1);
        outbox.add_release(1, 0, 1);
        outbox.add_release(1, 2, 2);
        for (response, next) in [vec![1], vec![2], vec![10, 11]].into_iter().enumerate() {
            outbox.handle_response(1);
            assert_eq!(outbox.sent(), [(1, next)]);
            outbox.add_release(1, 0, 10 + response as u64);
        }
    }

    #[test]
    fn batch_is_bounded() {
        let mut outbox = Outbox::default();
        for sequence in 0..MAX_BATCH as u64 + 1 {
            outbox.add_release(1, 0, sequence);
        }
        let sizes: Vec<_> = outbox.sent().into_iter().map(|(_, batch)| batch.len()).collect();
        assert_eq!(sizes, [MAX_BATCH, 1]);
    }
}
