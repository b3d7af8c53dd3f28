//! The slot map of a cluster, and the endpoints of its nodes.
//!
//! The redis crate's own cluster connection is not used: it hides which node sent a push, cannot batch across slots, and
//! retries commands by itself.

use std::collections::{BTreeSet, HashMap};
use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::panicking;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::try_join;
use futures_util::stream::FuturesUnordered;
use leasehold_core::{Failure, Resource};
use leasehold_redis_protocol::{Channels, slot_of, slot_of_inbox};
use leasehold_store::StoreError;
use leasehold_store::tasks::Tasks;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::connect::{self, Credentials};
use super::connections::Connections;
use super::endpoint::{ClusterNode, Endpoint, EndpointConfig, Target};
use super::error::explain;
use super::error::slot_unassigned;
use super::limits::{MAX_REFRESH_PAUSE, REFRESH_INTERVAL, REFRESH_PAUSE};
use super::pushes::ReconnectHandler;
use super::slot_map::{
    self, Membership, OTHER_CLUSTER, SlotMap, SlotRange, UNCLEAR, Votes, membership, names_as_master,
    same_masters,
};
use crate::url::Host;

/// How long the slot maps of other nodes are waited for, to compare them: as long as a connection and a question take if a round trip takes
/// 250 ms. A command that does not wait has a second for its connection.
const STRAGGLER_GRACE: Duration = Duration::from_millis(750);

/// Until when other nodes are waited for, where the first answer has come now: if all are far, the others come soon after it.
fn straggler_limit(began: Instant) -> Instant {
    began + STRAGGLER_GRACE.max(2 * began.elapsed())
}

/// How long no node of the known cluster may have answered, until another one counts that answers at its addresses: it was made anew.
const MADE_ANEW_AFTER: Duration = Duration::from_secs(60);

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
        Ok((cluster, channels))
    }

    /// Adopts the slot map on which most of the seeds that answer agree: one may be cut off from the others. Refuses addresses of several
    /// clusters. The seeds are compared until all have answered or failed, or until [`straggler_limit`]; meanwhile the first master of the
    /// first map is connected.
    async fn ask_seeds(&self) -> Result<Channels, StoreError> {
        let began = Instant::now();
        let mut asked: FuturesUnordered<_> = self.seeds.iter().cloned().map(|seed| self.ask(seed)).collect();
        let mut failure = slot_unassigned();
        let (seed, first) = loop {
            match asked.next().await {
                Some((seed, Ok(ranges))) => break (seed, ranges),
                Some((_, Err(message))) => failure = not_sent(message),
                None => return Err(failure),
            }
        };
        let until = straggler_limit(began);
        self.adopt(first.clone());
        let compare = async {
            let mut votes = Votes::new(self.seeds.clone(), BTreeSet::new());
            votes.add(seed, first.clone());
            while let Ok(Some((seed, answer))) = timeout_at(until, asked.next()).await {
                let Ok(other) = answer else { continue };
                if membership(&first, &other) == Membership::Stranger {
                    let what = "the addresses are of nodes of different clusters: name nodes of one";
                    return Err(not_sent(what.to_owned()));
                }
                votes.add(seed, other);
            }
            Ok(votes.best().cloned())
        };
        let (channels, best) = try_join(self.channels(), compare).await?;
        if let Some(ranges) = best {
            self.adopt(ranges);
        }
        Ok(channels)
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

    /// Handles a MOVED redirect. The slot's waiters re-check, so that they do not measure the new node's pushes by the old
    /// node's clock.
    pub(super) fn moved(&self, slot: u16, to: Host) {
        let is_new = self.slots_mut().redirect(slot, to);
        if is_new {
            self.announce(&|resource| slot_of(resource) == slot);
        }
        self.refresh_needed.notify_one();
    }

    /// Has the waiters of slots that have moved re-check, before pushes of the new nodes count. With the map's lock free: wakers and log
    /// subscribers are code of the program, which may use this cluster.
    fn announce(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let announcement = Announcement(&self.slots);
        (self.on_reconnect)(concerns);
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

    async fn refresh(&self) -> Result<(), StoreError> {
        let doubted = take(&mut *self.doubted.lock().unwrap_or_else(PoisonError::into_inner));
        let found = self.query_connected_nodes(&doubted).await;
        let ranges = match found.filter(|ranges| !names_as_master(ranges, &doubted) || !self.must_survey()) {
            Some(ranges) => ranges,
            None => self.survey(doubted).await?,
        };
        self.adopt(ranges);
        Ok(())
    }

    /// Whether all nodes are asked for a node that is doubted, although connected ones name it as a master, too: these may be cut off
    /// together with it, unless they are most of the masters. Not always, since that costs connections to all nodes.
    fn must_survey(&self) -> bool {
        let (masters, connected) = (self.masters().len(), self.connected(&BTreeSet::new()).len());
        let surveyed = self.surveyed.lock().unwrap_or_else(PoisonError::into_inner);
        connected <= masters / 2 && surveyed.is_none_or(|surveyed| surveyed.elapsed() >= MAX_REFRESH_PAUSE)
    }

    /// The slot map, from new connections to all known nodes and the seeds: the one on which most of the known masters agree. If these do
    /// not answer, others count, too. A map with few of the known shards counts only if most of the known nodes that answer agree on it.
    /// A seed may be one of them by another name, so that seeds count only while no known node answers.
    async fn survey(&self, doubted: BTreeSet<Host>) -> Result<Vec<SlotRange>, StoreError> {
        let began = Instant::now();
        *self.surveyed.lock().unwrap_or_else(PoisonError::into_inner) = Some(began);
        let known = self.slots().nodes();
        let seeds = self.seeds.iter().filter(|seed| !known.contains(seed));
        let mut asked: FuturesUnordered<_> =
            known.iter().chain(seeds).cloned().map(|host| self.ask(host)).collect();
        let mut votes = Votes::new(self.masters(), doubted);
        let (mut maps, mut maps_of_seeds, mut failure) = (Vec::new(), Vec::new(), slot_unassigned());
        let mut strangers = Vec::new();
        let mut until = None;
        loop {
            let next = asked.next();
            let answer = match until {
                None => next.await,
                Some(until) => timeout_at(until, next).await.unwrap_or(None),
            };
            let Some((host, answer)) = answer else { break };
            if answer.is_ok() {
                until.get_or_insert_with(|| straggler_limit(began));
            }
            match answer.map(|ranges| (self.slots().membership_of(&ranges), ranges)) {
                Ok((Membership::Member, ranges)) => votes.add(host, ranges),
                Ok((Membership::Unclear, ranges)) if known.contains(&host) => maps.push(ranges),
                Ok((Membership::Unclear, ranges)) => maps_of_seeds.push(ranges),
                Ok((Membership::Stranger, ranges)) => {
                    failure = not_sent(OTHER_CLUSTER.to_owned());
                    strangers.push((host, ranges));
                }
                Err(message) => failure = not_sent(message),
            }
            if let Some(ranges) = votes.agreed().or_else(|| slot_map::agreed(&maps, known.len())) {
                return Ok(ranges.clone());
            }
        }
        if let Some(ranges) = votes.best() {
            return Ok(ranges.clone());
        }
        if maps.is_empty() && maps_of_seeds.is_empty() {
            return self.made_anew(&strangers).ok_or(failure);
        }
        let counted = if maps.is_empty() { maps_of_seeds } else { maps };
        let agreed = slot_map::agreed(&counted, counted.len()).cloned();
        agreed.ok_or_else(|| not_sent(UNCLEAR.to_owned()))
    }

    /// The map of another cluster that has taken the place of this one, as one does whose nodes have no disks: none of the known nodes has
    /// answered for a while, and at least half of the addresses with which the client was opened lead to that other one. A single node is
    /// replaced at once, as a single server is.
    fn made_anew(&self, strangers: &[(Host, Vec<SlotRange>)]) -> Option<Vec<SlotRange>> {
        let is_single = self.masters().len() == 1;
        let maps: Vec<_> = strangers.iter().map(|(_, map)| map.clone()).collect();
        let agreed = slot_map::agreed(&maps, maps.len())?;
        let led = self.seeds.iter().filter(|seed| strangers.iter().any(|(host, _)| host == *seed)).count();
        let mut gone_since = self.gone_since.lock().unwrap_or_else(PoisonError::into_inner);
        let since = gone_since.get_or_insert_with(|| {
            if !is_single {
                tracing::warn!("{OTHER_CLUSTER}; it counts as the same once no known node has answered for {MADE_ANEW_AFTER:?}");
            }
            Instant::now()
        });
        let is_over = is_single || since.elapsed() >= MADE_ANEW_AFTER;
        (is_over && 2 * led >= self.seeds.len()).then(|| agreed.clone())
    }

    fn adopt(&self, ranges: Vec<SlotRange>) {
        *self.gone_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let is_other = self.slots_mut().replace(ranges);
        if is_other {
            self.announce(&|_| true);
            let masters = self.masters();
            let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            endpoints.retain(|host, _| masters.contains(host));
        }
    }

    /// The slot map of connected nodes that are surely of the cluster: of one, if that knows of no change, or else of two that agree. Begins
    /// with a different one each time, because one may be wrong.
    async fn query_connected_nodes(&self, doubted: &BTreeSet<Host>) -> Option<Vec<SlotRange>> {
        let mut friends = self.connected(doubted);
        friends.sort_by(|(a, _), (b, _)| a.cmp(b));
        let first = self.asked.fetch_add(1, Ordering::Relaxed) % friends.len().max(1);
        friends.rotate_left(first);
        let mut changed = None;
        for (host, connections) in friends {
            let ranges = slot_map::query(&mut connections.driver_conn(), &host).await.ok();
            let is_member =
                |ranges: &Vec<SlotRange>| self.slots().membership_of(ranges) == Membership::Member;
            let Some(ranges) = ranges.filter(is_member) else { continue };
            match changed {
                None if self.slots().has_masters_of(&ranges) => return Some(ranges),
                None => changed = Some(ranges),
                Some(changed) => return same_masters(&changed, &ranges).then_some(ranges),
            }
        }
        None
    }

    /// The nodes that are connected, but for these.
    fn connected(&self, doubted: &BTreeSet<Host>) -> Vec<(Host, Arc<Connections>)> {
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let others = endpoints.iter().filter(|(host, _)| !doubted.contains(host));
        others.filter_map(|(host, endpoint)| Some((host.clone(), endpoint.current()?))).collect()
    }

    /// The same as [`Self::map_of`], and the host.
    async fn ask(&self, host: Host) -> (Host, Result<Vec<SlotRange>, String>) {
        let answer = self.map_of(host.clone()).await;
        (host, answer)
    }

    /// The slot map of a node, over a new connection.
    async fn map_of(&self, host: Host) -> Result<Vec<SlotRange>, String> {
        let say = |what: String| format!("the node {}:{}: {what}", host.name, host.port);
        let dial = self.credentials.at(&host).map_err(|error| format!("{error:#}"))?;
        let connection = dial.open(true, &connect::config()).await;
        let mut connection = connection.map_err(|error| say(explain(&error)))?;
        slot_map::query(&mut connection, &host).await.map_err(say)
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

    use leasehold_core::ClientId;
    use leasehold_redis_protocol::inbox_of;

    use super::super::pushes::MessageHandler;
    use super::*;
    use crate::url::Login;

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
            credentials: Credentials::new(&Login::default(), 0, None).unwrap(),
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
            cluster.moved(SLOT, host(2));
        }
        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"granted");
        assert_eq!(events.try_iter().collect::<Vec<_>>(), ["the waiters", "a push", "a push"]);
    }
}
