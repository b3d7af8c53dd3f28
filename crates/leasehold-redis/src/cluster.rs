//! The slot map of a cluster, and the endpoints of its nodes.
//!
//! The redis crate's own cluster connection is not used: it hides which node sent a push, cannot batch across slots, and
//! retries commands by itself.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::panicking;
use std::time::Duration;

use futures_util::future::select_ok;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use leasehold_core::{Failure, Resource};
use leasehold_redis_protocol::{Channels, slot_of, slot_of_inbox};
use leasehold_store::StoreError;
use leasehold_store::tasks::Tasks;
use redis::Value;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::connect::{self, Credentials};
use super::connections::Connections;
use super::endpoint::{ClusterNode, Endpoint, EndpointConfig, Target};
use super::error::{explain, store_error};
use super::pushes::ReconnectHandler;
use super::slot_map::{self, SlotMap, SlotRange};
use super::{MAX_REFRESH_PAUSE, REFRESH_PAUSE, slot_unassigned};
use crate::url::Host;

/// How long the slot maps of other seeds are waited for, to compare them.
const STRAGGLER_GRACE: Duration = Duration::from_millis(250);

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
}

impl Cluster {
    /// Fetches the slot map from the seeds.
    pub(super) async fn open(
        credentials: Credentials,
        seeds: Vec<Host>,
        endpoint_config: Box<dyn Fn() -> EndpointConfig + Send + Sync>,
    ) -> Result<Self, StoreError> {
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
        };
        cluster.adopt(cluster.ask_seeds().await?);
        Ok(cluster)
    }

    /// The slot map of the first seed that answers. Refuses addresses of several clusters; seeds that do not answer soon after the first
    /// one are not compared.
    async fn ask_seeds(&self) -> Result<Vec<SlotRange>, StoreError> {
        let mut asked: FuturesUnordered<_> = self.seeds.iter().cloned().map(|seed| self.ask(seed)).collect();
        let (mut found, mut failure) = (None, slot_unassigned());
        while let Some(answer) = match &found {
            None => asked.next().await,
            Some((_, until)) => timeout_at(*until, asked.next()).await.unwrap_or_default(),
        } {
            match (answer, &found) {
                (Err(message), _) => failure = StoreError::new(Failure::NotSent, message),
                (Ok(ranges), None) => found = Some((ranges, Instant::now() + STRAGGLER_GRACE)),
                (Ok(ranges), Some((first, _))) if slot_map::are_of_one_cluster(first, &ranges) => {}
                (Ok(_), Some(_)) => {
                    let what = "the addresses are of nodes of different clusters: name nodes of one";
                    return Err(StoreError::new(Failure::NotSent, what));
                }
            }
        }
        found.map(|(ranges, _)| ranges).ok_or(failure)
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
        let is_of_cluster = move |found: &[SlotRange]| {
            slots.read().unwrap_or_else(PoisonError::into_inner).is_of_this_cluster(found)
        };
        let node =
            Target::Node(ClusterNode { dial, host: host.clone(), is_of_cluster: Arc::new(is_of_cluster) });
        let endpoint = tasks.enter(|| Arc::new(Endpoint::new(node, self.config_for(host))));
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

    /// Whether the nodes support sharded channels (since Redis 7.0).
    pub(super) async fn channels(&self) -> Result<Channels, StoreError> {
        let mut last_error = slot_unassigned();
        for host in self.masters() {
            match self.endpoint(&host, &Tasks::current())?.connections().await {
                Ok(connections) => {
                    let mut question = redis::cmd("PUBSUB");
                    let answer =
                        connections.driver_conn().send_packed_command(question.arg("SHARDNUMSUB")).await;
                    match answer.and_then(Value::extract_error) {
                        Ok(_) => return Ok(Channels::Sharded),
                        // NOPERM means that the command exists.
                        Err(error) if error.code() == Some("NOPERM") => return Ok(Channels::Sharded),
                        Err(error) if error.to_string().to_lowercase().contains("unknown") => {
                            return Ok(Channels::Plain);
                        }
                        Err(error) => last_error = store_error(&error),
                    }
                }
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
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

    /// Requests a refresh of the slot map.
    pub(super) fn request_refresh(&self) {
        self.refresh_needed.notify_one();
    }

    /// Refreshes the slot map on request.
    pub(super) async fn refresh_loop(&self, at_the_latest: Duration) {
        let mut pause = REFRESH_PAUSE;
        loop {
            let _ = timeout(at_the_latest, self.refresh_needed.notified()).await;
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
        let ranges = match self.query_connected_node().await {
            Some(ranges) => ranges,
            None => {
                let known = self.masters();
                let seeds = self.seeds.iter().filter(|seed| !known.contains(seed));
                let asked =
                    select_ok(known.iter().chain(seeds).cloned().map(|host| self.ask(host).boxed())).await;
                asked.map_err(|message| StoreError::new(Failure::NotSent, message))?.0
            }
        };
        self.adopt(ranges);
        Ok(())
    }

    fn adopt(&self, ranges: Vec<SlotRange>) {
        let is_other = self.slots_mut().replace(ranges);
        if is_other {
            self.announce(&|_| true);
            let masters = self.masters();
            let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            endpoints.retain(|host, _| masters.contains(host));
        }
    }

    /// Queries a connected node; a different one each time, because one may be wrong.
    async fn query_connected_node(&self) -> Option<Vec<SlotRange>> {
        let mut friends: Vec<(Host, Arc<Connections>)> = {
            let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            endpoints
                .iter()
                .filter_map(|(host, endpoint)| Some((host.clone(), endpoint.current()?)))
                .collect()
        };
        friends.sort_by(|(a, _), (b, _)| a.cmp(b));
        let first = self.asked.fetch_add(1, Ordering::Relaxed) % friends.len().max(1);
        friends.rotate_left(first);
        for (host, connections) in friends {
            let ranges = slot_map::query(&mut connections.driver_conn(), &host).await;
            if let Some(ranges) = ranges.ok().filter(|ranges| self.slots().is_of_this_cluster(ranges)) {
                return Some(ranges);
            }
        }
        None
    }

    async fn ask(&self, host: Host) -> Result<Vec<SlotRange>, String> {
        let say = |what: String| format!("the node {}:{}: {what}", host.name, host.port);
        let dial = self.credentials.at(&host).map_err(|error| format!("{error:#}"))?;
        let connection = dial.open(true, &connect::config()).await;
        let mut connection = connection.map_err(|error| say(explain(&error)))?;
        let ranges = slot_map::query(&mut connection, &host).await.map_err(&say)?;
        if self.slots().is_of_this_cluster(&ranges) {
            Ok(ranges)
        } else {
            Err(say(slot_map::OTHER_CLUSTER.to_owned()))
        }
    }
}

/// A change of the slot map that the waiters are being told of, since [`SlotMap::redirect`] or [`SlotMap::replace`] has returned true.
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

    /// As if each thread that is told ran the program's own code, which uses the cluster.
    #[test]
    fn waiters_of_a_moved_slot_are_told_before_its_pushes_and_with_the_map_free() {
        let slots = Arc::<RwLock<SlotMap>>::default();
        let (tell, told) = channel();
        let (push_of_new_node, map) = (Arc::<OnceLock<MessageHandler>>::default(), slots.clone());
        let (pushed, pushes) = (tell.clone(), push_of_new_node.clone());
        let endpoint_config = move || {
            let (told, pushed) = (tell.clone(), pushed.clone());
            let (map, pushes) = (map.clone(), pushes.clone());
            EndpointConfig {
                channel: None,
                on_message: Arc::new(move |_, _| pushed.send("a push").unwrap()),
                on_reconnect: Arc::new(move |_| {
                    if let Some(push) = pushes.get() {
                        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"granted");
                    }
                    assert!(map.try_write().is_ok(), "the map is free");
                    told.send("the waiters").unwrap();
                }),
                on_disconnect: Arc::new(|| ()),
                is_idle: Arc::new(|| false),
                shortest_ttl: Arc::new(|| None),
                warn: Arc::new(|_| ()),
                caller: None,
                is_voter: false,
                shared: None,
                is_resp2: false,
                runtime: Arc::default(),
            }
        };
        let on_reconnect = endpoint_config().on_reconnect;
        let cluster = Cluster {
            credentials: Credentials::new(&Login::default(), 0, None).unwrap(),
            seeds: Vec::new(),
            slots,
            endpoints: Mutex::default(),
            endpoint_config: Box::new(endpoint_config),
            on_reconnect,
            refresh_needed: Arc::default(),
            asked: AtomicUsize::new(0),
        };
        let push = cluster.config_for(&host(2)).on_message;
        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"from a node without the slot");
        assert!(push_of_new_node.set(push.clone()).is_ok());
        for _ in 0..2 {
            cluster.moved(SLOT, host(2));
        }
        push(inbox_of(ClientId::new(1), Some(SLOT)).as_bytes(), b"granted");
        assert_eq!(told.try_iter().collect::<Vec<_>>(), ["the waiters", "a push", "a push"]);
    }
}
