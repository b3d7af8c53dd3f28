//! The commands that are due but not yet sent, by shard. Renewals and releases do not wait behind attempts: after a reconnect all waiters
//! ask again, and leases would expire behind thousands of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use leasehold_core::{Command, Resource};
use leasehold_store::Store;

use super::due::MAX_BATCH;
use super::entry::Transmit;

/// How many batches of attempts, and how many of renewals and releases, may be in flight to one shard. After a reconnect all leases are
/// renewed; a server with more requests than it can answer in time would look like a lost connection.
const MAX_IN_FLIGHT: usize = 8;

pub(super) type Outgoing = (Arc<Resource>, Transmit);
pub(super) type Transmits = Vec<Outgoing>;

/// Where a batch goes, and whether it is of attempts: each such pair has its own number of batches in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route {
    pub(super) shard: u64,
    is_of_attempts: bool,
}

impl Route {
    fn new(shard: u64, command: &Command) -> Self {
        Self { shard, is_of_attempts: matches!(command, Command::Acquire(_)) }
    }
}

/// What is due. While a route has [`MAX_IN_FLIGHT`] batches, its commands wait here, and the oldest ones are the next batch.
#[derive(Default)]
pub(super) struct Outbox {
    /// By route and replica count, in the order of the deadlines. None is empty.
    due: BTreeMap<(Route, u32), VecDeque<Outgoing>>,
    /// The number of batches in flight. A cluster's nodes come and go, but they are few.
    in_flight: BTreeMap<Route, usize>,
}

impl Outbox {
    pub(super) fn add(&mut self, store: &dyn Store, transmits: Transmits) {
        for (resource, transmit) in transmits {
            let route = Route::new(store.shard(&resource, &transmit.command), &transmit.command);
            self.due.entry((route, transmit.replicas)).or_default().push_back((resource, transmit));
        }
    }

    /// The next batch to send, with its route and replica count. It is in flight until [`Self::handle_response`].
    pub(super) fn next_batch(&mut self) -> Option<(Route, u32, Transmits)> {
        let in_flight = &self.in_flight;
        let has_room = |route| in_flight.get(route).is_none_or(|count| *count < MAX_IN_FLIGHT);
        // The oldest first: commands with one replica count must not keep those with another one waiting.
        let ready = self.due.iter().filter(|((route, _), _)| has_room(route));
        let oldest =
            |waiting: &VecDeque<(_, Transmit)>| waiting.front().map(|(_, transmit)| transmit.sent_at);
        let key = *ready.min_by_key(|(_, waiting)| oldest(waiting))?.0;
        let waiting = self.due.get_mut(&key)?;
        let batch = waiting.drain(..waiting.len().min(MAX_BATCH)).collect();
        if waiting.is_empty() {
            self.due.remove(&key);
        }
        let (route, replicas) = key;
        *self.in_flight.entry(route).or_default() += 1;
        Some((route, replicas, batch))
    }

    /// A batch of this route was answered, or has failed.
    pub(super) fn handle_response(&mut self, route: Route) {
        if let Some(count) = self.in_flight.get_mut(&route) {
            *count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, ClientId, Kind, LocalTime, Name, Release};

    use super::*;

    const fn of_holders(shard: u64) -> Route {
        Route { shard, is_of_attempts: false }
    }

    fn acquisition(sequence: u64) -> Acquisition {
        Acquisition { client: ClientId::new(1), sequence }
    }

    impl Outbox {
        /// The sequence number is also its age.
        fn add_command(&mut self, shard: u64, replicas: u32, sequence: u64, command: Command) {
            let sent_at = LocalTime::from_micros(sequence);
            let route = Route::new(shard, &command);
            let transmit = Transmit { entry: sequence.into(), sent_at, command, replicas };
            let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
            self.due.entry((route, replicas)).or_default().push_back((resource, transmit));
        }

        fn add_release(&mut self, shard: u64, replicas: u32, sequence: u64) {
            let release = Command::Release(Release::now(acquisition(sequence)));
            self.add_command(shard, replicas, sequence, release);
        }

        fn add_attempt(&mut self, shard: u64, replicas: u32, sequence: u64) {
            let acquire = Acquire::exclusive(acquisition(sequence), Duration::from_secs(1));
            self.add_command(shard, replicas, sequence, Command::from(acquire));
        }

        fn sent(&mut self) -> Vec<(u64, Vec<u64>)> {
            let batches = std::iter::from_fn(|| self.next_batch());
            let numbers =
                |batch: Transmits| batch.iter().map(|(_, transmit)| transmit.entry.sequence()).collect();
            batches.map(|(route, _, batch)| (route.shard, numbers(batch))).collect()
        }

        /// As many batches in flight as may be.
        fn full(shard: u64) -> Self {
            Self { in_flight: BTreeMap::from([(of_holders(shard), MAX_IN_FLIGHT)]), ..Self::default() }
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
        outbox.handle_response(of_holders(2));
        assert_eq!(outbox.sent(), []);
        outbox.handle_response(of_holders(1));
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
            outbox.handle_response(of_holders(1));
            assert_eq!(outbox.sent(), [(1, next)]);
            outbox.add_release(1, 0, 10 + response as u64);
        }
    }

    /// However many attempts are older, and however many are in flight.
    #[test]
    fn release_does_not_wait_behind_attempts() {
        let mut outbox = Outbox::default();
        let most = MAX_IN_FLIGHT * MAX_BATCH;
        for sequence in 0..most as u64 + 1 {
            outbox.add_attempt(1, 1, sequence);
        }
        assert_eq!(outbox.sent().len(), MAX_IN_FLIGHT);
        outbox.add_release(1, 1, most as u64 + 1);
        outbox.add_attempt(1, 1, most as u64 + 2);
        assert_eq!(outbox.sent(), [(1, vec![most as u64 + 1])]);
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
