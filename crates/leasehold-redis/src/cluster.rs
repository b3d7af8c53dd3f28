//! The slot map of a cluster, and the endpoints of its nodes.
//!
//! What the nodes say about the slots is judged in [`survey`]. The redis crate's own cluster connection is not used: it hides which node sent a push, cannot batch across slots, and
//! retries commands by itself.

mod survey;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::panicking;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use leasehold_core::{Failure, Resource};
use leasehold_redis_protocol::{Channels, LAYOUT, layout_slot, slot_of, slot_of_inbox};
use leasehold_store::StoreError;
use leasehold_store::tasks::Tasks;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::connect::{self, Credentials};
use super::endpoint::{ClusterNode, Endpoint, EndpointConfig, Target};
use super::error::{AddressState, slot_unassigned};
use super::handshake;
use super::limits::{ANSWER_TIMEOUT, MAX_REFRESH_PAUSE, REFRESH_INTERVAL, REFRESH_PAUSE};
use super::pushes::ReconnectHandler;
use super::slot_map::{SlotMap, SlotRange};
use crate::url::Host;

/// Pause before the next master is asked, too, while one does not answer.
const NEXT_MASTER: Duration = Duration::from_millis(100);

/// The nodes of a cluster.
pub(super) struct Cluster {
    credentials: Credentials,
    seeds: Vec<Host>,
    slots: Arc<RwLock<SlotMap>>,
    endpoints: Mutex<HashMap<Host, Arc<Endpoint>>>,
    endpoint_config: Box<dyn Fn() -> EndpointConfig + Send + Sync>,
    /// Called when slots have moved: waiters may have to queue at another node.
    on_reconnect: ReconnectHandler,
    /// Signals that the slot map may be outdated.
    refresh_needed: Arc<Notify>,
    /// Number of queries to connected nodes; rotates among them.
    asked: AtomicUsize,
    /// Since when only another cluster has answered.
    gone_since: Mutex<Option<Instant>>,
    /// Nodes whose word does not count at the next refresh.
    doubted: Mutex<BTreeSet<Host>>,
    /// When all nodes were last asked for the slot map.
    surveyed: Mutex<Option<Instant>>,
}

impl Cluster {
    /// Fetches the slot map from the seeds, and asks a master for the kind of channels.
    pub(super) async fn open(
        credentials: Credentials,
        seeds: Vec<Host>,
        endpoint_config: Box<dyn Fn() -> EndpointConfig + Send + Sync>,
    ) -> Result<(Self, Channels), StoreError> {
        let on_reconnect = endpoint_config().on_reconnect;
        let cluster = Self {
            credentials,
            seeds,
            slots: Arc::default(),
            endpoints: Mutex::default(),
            endpoint_config,
            on_reconnect,
            refresh_needed: Arc::default(),
            asked: AtomicUsize::new(0),
            gone_since: Mutex::default(),
            doubted: Mutex::default(),
            surveyed: Mutex::default(),
        };
        let channels = cluster.ask_seeds().await?;
        cluster.check_layout().await?;
        Ok((cluster, channels))
    }

    /// Fails if clients with another key layout use the cluster. One node knows that, though no lock of this client may be there: it is asked
    /// over a connection for this only. If it does not answer, locks of other nodes do not wait for it.
    async fn check_layout(&self) -> Result<(), StoreError> {
        let Some(host) = self.master_of(layout_slot()) else { return Ok(()) };
        let Ok(dial) = self.credentials.at(&host) else { return Ok(()) };
        let ask = async {
            let mut connection = dial.open(true, &connect::config()).await?;
            handshake::check_layout(&mut connection, LAYOUT).await
        };
        match timeout(ANSWER_TIMEOUT, ask).await {
            Ok(Err(error)) if handshake::is_of_other_layout(&error) => {
                Err(AddressState::Proven.store_error(&error))
            }
            _ => Ok(()),
        }
    }

    fn slots(&self) -> std::sync::RwLockReadGuard<'_, SlotMap> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots_mut(&self) -> RwLockWriteGuard<'_, SlotMap> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The known master of this slot.
    pub(super) fn master_of(&self, slot: u16) -> Option<Host> {
        self.slots().master_of(slot).cloned()
    }

    /// The endpoint of a node, created at its first use. It runs as one of `tasks`.
    pub(super) fn endpoint(&self, host: &Host, tasks: &Tasks) -> Result<Arc<Endpoint>, StoreError> {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(endpoint) = endpoints.get(host) {
            return Ok(endpoint.clone());
        }
        let dial = self
            .credentials
            .at(host)
            .map_err(|error| StoreError::new(Failure::NotSent, format!("{error:#}")))?;
        let slots = self.slots.clone();
        let membership = move |found: &[SlotRange]| {
            slots.read().unwrap_or_else(PoisonError::into_inner).membership_of(found)
        };
        let node = ClusterNode::new(dial, host.clone(), Arc::new(membership));
        let endpoint = tasks.enter(|| Arc::new(Endpoint::new(Target::Node(node), self.config_for(host))));
        endpoints.insert(host.clone(), endpoint.clone());
        Ok(endpoint)
    }

    /// Configuration of a node's endpoint. Pushes about a slot that has moved to another node are dropped.
    fn config_for(&self, host: &Host) -> EndpointConfig {
        let endpoint_config = (self.endpoint_config)();
        let (on_message, slots, host, node) =
            (endpoint_config.on_message, self.slots.clone(), host.clone(), host.clone());
        let on_message = move |channel: &[u8], message: &[u8]| {
            let slot = slot_of_inbox(channel);
            let slots = slots.read().unwrap_or_else(PoisonError::into_inner);
            if slot.and_then(|slot| slots.master_of(slot)) != Some(&host) {
                return;
            }
            let is_held = slots.hold(|| {
                let (on_message, channel, message) = (on_message.clone(), channel.to_vec(), message.to_vec());
                Box::new(move || on_message(&channel, &message))
            });
            drop(slots);
            if !is_held {
                on_message(channel, message);
            }
        };
        let (on_reconnect, slots, refresh_needed) =
            (endpoint_config.on_reconnect, self.slots.clone(), self.refresh_needed.clone());
        let on_reconnect: ReconnectHandler = Arc::new(move |_| {
            let mine = |resource: &Resource| {
                let slots = slots.read().unwrap_or_else(PoisonError::into_inner);
                slots.master_of(slot_of(resource)) == Some(&node)
            };
            on_reconnect(&mine);
        });
        EndpointConfig {
            on_message: Arc::new(on_message),
            on_reconnect,
            on_disconnect: Arc::new(move || refresh_needed.notify_one()),
            ..endpoint_config
        }
    }

    /// The masters, each once.
    pub(super) fn masters(&self) -> Vec<Host> {
        self.slots().masters()
    }

    /// The channels of the first master that is connected. One that does not answer soon is not waited for, but the others are asked, too.
    async fn channels(&self) -> Result<Channels, StoreError> {
        let (mut masters, mut asked) = (self.masters().into_iter(), FuturesUnordered::new());
        let mut last_error = slot_unassigned();
        loop {
            asked.extend(masters.next().map(|master| self.channels_of(master)));
            let answer = match masters.len() {
                0 => asked.next().await,
                _ => match timeout(NEXT_MASTER, asked.next()).await {
                    Ok(answer) => answer,
                    Err(_) => continue,
                },
            };
            match answer {
                Some(Ok(channels)) => return Ok(channels),
                Some(Err(error)) => last_error = error,
                None => return Err(last_error),
            }
        }
    }

    async fn channels_of(&self, host: Host) -> Result<Channels, StoreError> {
        let connections = self.endpoint(&host, &Tasks::current())?.connections().await?;
        Ok(connections.channels().unwrap_or(Channels::Sharded))
    }

    /// Handles the MOVED redirects of a batch. The waiters of these slots re-check, so that they do not measure the new nodes' pushes by
    /// the old nodes' clocks.
    pub(super) fn moved(&self, redirects: impl IntoIterator<Item = (u16, Host)>) {
        let changed = self.slots_mut().redirect(redirects);
        self.announce(&changed);
        self.refresh_needed.notify_one();
    }

    /// Has the waiters of slots that have moved re-check, before pushes of the new nodes count. With the map's lock free: wakers and log
    /// subscribers are code of the program, which may use this cluster. It costs a look at each lock of the client, so that the slots of a
    /// batch or a refresh go together; and it does not concern the other locks, or thousands of leases would be renewed each time.
    fn announce(&self, changed: &HashSet<u16>) {
        if changed.is_empty() {
            return;
        }
        let announcement = Announcement(&self.slots);
        (self.on_reconnect)(&|resource| changed.contains(&slot_of(resource)));
        drop(announcement);
    }

    /// Requests a refresh of the slot map, by other nodes than this one.
    pub(super) fn doubt(&self, host: Host) {
        self.doubted.lock().unwrap_or_else(PoisonError::into_inner).insert(host);
        self.refresh_needed.notify_one();
    }

    /// Requests a refresh of the slot map.
    pub(super) fn request_refresh(&self) {
        self.refresh_needed.notify_one();
    }

    /// Refreshes the slot map on request, and from time to time: the older it is, the less of it is left by which to know the cluster.
    pub(super) async fn refresh_loop(&self) {
        let mut pause = REFRESH_PAUSE;
        loop {
            let _ = timeout(REFRESH_INTERVAL, self.refresh_needed.notified()).await;
            match self.refresh().await {
                // Redirects come in bursts: pause between refreshes.
                Ok(()) => pause = REFRESH_PAUSE,
                Err(error) => {
                    tracing::debug!(error.message, "the cluster's slots are not known yet");
                    self.refresh_needed.notify_one();
                    pause = (pause * 2).min(MAX_REFRESH_PAUSE);
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    fn adopt(&self, ranges: Vec<SlotRange>) {
        *self.gone_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let changed = self.slots_mut().replace(ranges);
        self.announce(&changed);
        let masters = self.masters();
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|host, _| masters.contains(host));
    }
}

fn not_sent(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

/// A change of the slot map that the waiters are being notified of, since [`SlotMap::redirect`] or [`SlotMap::replace`] has returned true.
struct Announcement<'a>(&'a RwLock<SlotMap>);

impl Drop for Announcement<'_> {
    /// Also if a waker panics.
    fn drop(&mut self) {
        let held = self.0.write().unwrap_or_else(PoisonError::into_inner).end_announcement();
        let deliver = || held.into_iter().for_each(|deliver| deliver());
        if let Err(panic) = catch_unwind(AssertUnwindSafe(deliver))
            && !panicking()
        {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::mpsc::channel;

    use leasehold_core::{ClientId, Kind, Name};
    use leasehold_redis_protocol::{SLOTS, inbox_of};

    use super::super::pushes::MessageHandler;
    use super::survey::MADE_ANEW_AFTER;
    use super::*;
    use crate::url::RedisUrl;

    const SLOT: u16 = 5;

    fn host(port: u16) -> Host {
        Host { name: "h".to_owned(), port }
    }

    fn cluster_of(
        slots: Arc<RwLock<SlotMap>>,
        seeds: Vec<Host>,
        endpoint_config: impl Fn() -> EndpointConfig + Send + Sync + 'static,
    ) -> Cluster {
        let on_reconnect = endpoint_config().on_reconnect;
        Cluster {
            credentials: Credentials::of_servers(&RedisUrl::of_node("redis://a").unwrap()).unwrap(),
            seeds,
            slots,
            endpoints: Mutex::default(),
            endpoint_config: Box::new(endpoint_config),
            on_reconnect,
            refresh_needed: Arc::default(),
            asked: AtomicUsize::new(0),
            gone_since: Mutex::default(),
            doubted: Mutex::default(),
            surveyed: Mutex::default(),
        }
    }

    /// A shard for each id, at the ports from this one on.
    fn map(first: u16, ids: &str) -> Vec<SlotRange> {
        let range = |(number, id): (u16, char)| SlotRange {
            first: number,
            last: number,
            master: host(first + number),
            replicas: Vec::new(),
            ids: vec![id.to_string()],
        };
        (0..).zip(ids.chars()).map(range).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn cluster_that_was_made_anew_counts_after_a_while() {
        let seeds = vec![host(1), host(2), host(3)];
        let of = |ids| {
            let cluster = cluster_of(Arc::default(), seeds.clone(), EndpointConfig::quiet);
            cluster.adopt(map(1, ids));
            cluster
        };
        let anew =
            |ports: &[u16], ids| ports.iter().map(|port| (host(*port), map(1, ids))).collect::<Vec<_>>();
        let all = anew(&[1, 2, 3], "xyz");
        let cluster = of("abc");
        assert_eq!(cluster.made_anew(&all), None);
        tokio::time::sleep(MADE_ANEW_AFTER - Duration::from_millis(1)).await;
        assert_eq!(cluster.made_anew(&all), None);
        // A known node has answered meanwhile.
        cluster.adopt(map(1, "abc"));
        assert_eq!(cluster.made_anew(&all), None);
        tokio::time::sleep(MADE_ANEW_AFTER).await;
        assert_eq!(cluster.made_anew(&anew(&[1], "xyz")), None, "one address of three");
        let apart = [anew(&[1], "xyz"), anew(&[2], "uvw")].concat();
        assert_eq!(cluster.made_anew(&apart), None, "two clusters");
        assert_eq!(cluster.made_anew(&[]), None);
        assert_eq!(cluster.made_anew(&all), Some(map(1, "xyz")));
        assert_eq!(of("a").made_anew(&all), Some(map(1, "xyz")), "a single node is replaced at once");
    }

    /// Each notice costs a look at every lock of the client, and each lock that it concerns a command.
    #[test]
    fn slots_that_have_moved_together_are_one_notice_for_the_locks_in_them() {
        let lock =
            |number: u16| Resource { kind: Kind::Mutex, name: Name::new(&number.to_string()).unwrap() };
        let locks: [Resource; 4] = std::array::from_fn(|number| lock(u16::try_from(number).unwrap()));
        let slots = locks.each_ref().map(slot_of);
        let (record, notices) = channel();
        let endpoint_config = move || {
            let (record, locks) = (record.clone(), locks.clone());
            let on_reconnect = move |concerns: &dyn Fn(&Resource) -> bool| {
                record.send(locks.each_ref().map(concerns)).unwrap();
            };
            EndpointConfig { on_reconnect: Arc::new(on_reconnect), ..EndpointConfig::quiet() }
        };
        let cluster = cluster_of(Arc::default(), Vec::new(), endpoint_config);
        let all = |master| vec![SlotRange { first: 0, last: SLOTS - 1, ..map(master, "a").remove(0) }];
        cluster.adopt(all(1));
        cluster.moved([(slots[0], host(2)), (slots[1], host(3)), (slots[2], host(1))]);
        cluster.moved([(slots[0], host(2))]);
        // The node that was asked does not know of the redirects yet.
        cluster.adopt(all(1));
        cluster.adopt(all(1));
        let moved = [true, true, false, false];
        assert_eq!(notices.try_iter().collect::<Vec<_>>(), [[true; 4], moved, moved]);
    }

    /// As if each thread that is notified ran the program's own code, which uses the cluster.
    #[test]
    fn waiters_of_a_moved_slot_are_told_before_its_pushes_and_with_the_map_free() {
        let slots = Arc::<RwLock<SlotMap>>::default();
        let (record, events) = channel();
        let (push_of_new_node, map) = (Arc::<OnceLock<MessageHandler>>::default(), slots.clone());
        let (pushed, pushes) = (record.clone(), push_of_new_node.clone());
        let endpoint_config = move || {
            let (notified, pushed) = (record.clone(), pushed.clone());
            let (map, pushes) = (map.clone(), pushes.clone());
            EndpointConfig {
                on_message: Arc::new(move |_, _| pushed.send("a push").unwrap()),
                on_reconnect: Arc::new(move |_| {
                    if let Some(push) = pushes.get() {
                        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"granted");
                    }
                    assert!(map.try_write().is_ok(), "the map is free");
                    notified.send("the waiters").unwrap();
                }),
                ..EndpointConfig::quiet()
            }
        };
        let cluster = cluster_of(slots, Vec::new(), endpoint_config);
        let push = cluster.config_for(&host(2)).on_message;
        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"from a node without the slot");
        assert!(push_of_new_node.set(push.clone()).is_ok());
        for _ in 0..2 {
            cluster.moved([(SLOT, host(2))]);
        }
        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"granted");
        assert_eq!(events.try_iter().collect::<Vec<_>>(), ["the waiters", "a push", "a push"]);
    }
}
