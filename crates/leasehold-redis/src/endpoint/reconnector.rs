//! The task that keeps an endpoint connected.

use std::hash::{BuildHasher as _, RandomState};
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join;
use leasehold_store::tasks::TaskGroup;
use leasehold_store::{StoreError, gate};
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::config::{EndpointConfig, Target, not_sent};
use crate::caller_conn::CallerConnection;
use crate::connect::Dial;
use crate::connections::{Connections, config};
use crate::error::{AddressState, OWN_REFUSAL, explain, is_resp3_unknown};
use crate::handshake::{self, ServerFacts};
use crate::limits::{CONNECT_TIMEOUT, RECONNECT_BACKOFF};
use crate::place::Place;
use crate::pushes::{ConnectionStatus, Subscription, driver_handler};
use crate::rights;
use crate::shared_keeper::SharedKeeper;
use crate::subscriber::{Opening, Subscriber, SubscriberError};

/// Min time between the starts of two connection attempts. It bounds the load on a server that closes every connection.
const MIN_CONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// Min timeout of a reconnect attempt.
pub(super) const MIN_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A reconnect attempt may take this fraction of the shortest ttl, so that several attempts fit into the remaining time.
const TTL_FRACTION: u32 = 4;

/// A reconnect attempt may take this many times as long as the last successful one.
const SLOWDOWN_FACTOR: u32 = 4;

/// Max time for which a connected server is not used, because the subscriber connection is being opened.
const MAX_WAIT_FOR_SUBSCRIBER: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) enum State {
    Connecting {
        is_first: bool,
    },
    /// The last attempt failed.
    Down(StoreError),
    Up(Arc<Connections>),
}

/// Explains a connection that is closed before its first answer.
fn closed_at_once(address: AddressState) -> String {
    let what = "the server closes new connections: its limit of clients (maxclients) may be reached";
    match address {
        AddressState::Unproven => format!("{what}, or speak TLS only"),
        AddressState::Proven => what.to_owned(),
    }
}

/// The warning about such a user.
pub(crate) const REDIRECTED: &str = "another user of the server has it send the names of changed keys to this client (CLIENT TRACKING ON REDIRECT): \
     commands use RESP2 from now on, which that does not reach. Take the right from that user: ACL SETUSER ... -client|tracking";

/// Between half of the pause and all of it: the clients that a server has lost at the same moment do not all come back at the same moment.
pub(super) fn jittered(pause: Duration) -> Duration {
    let half = pause / 2;
    let most = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX - 1);
    half + Duration::from_nanos(RandomState::new().hash_one(()) % (most + 1))
}

/// Task that keeps an endpoint connected.
pub(super) struct Reconnector {
    pub(super) target: Target,
    pub(super) endpoint_config: EndpointConfig,
    /// Use RESP2: the server has no RESP3, or the address asks for RESP2.
    pub(super) is_resp2: bool,
    /// Another user of the server redirects invalidations to the connections for commands: they use RESP2, where none arrive.
    pub(super) is_redirected: Arc<AtomicBool>,
    pub(super) state: watch::Sender<State>,
    pub(super) health_check: Arc<Notify>,
    pub(super) skip_backoff: Arc<Notify>,
    /// Duration of the last successful connect; none before the first.
    pub(super) last_connect: Option<Duration>,
}

impl Drop for Reconnector {
    /// Dropped with the client's thread. Remaining users of the endpoint must not keep the connections open.
    fn drop(&mut self) {
        self.state.send_replace(State::Down(not_sent("the client was closed".to_owned())));
    }
}

impl Reconnector {
    /// Log subscribers and wakers are code of the program. If one panics, the endpoint is connected again.
    pub(super) async fn keep_on(mut self) {
        while AssertUnwindSafe(self.keep()).catch_unwind().await.is_err() {
            if let State::Up(connections) = self.state.send_replace(State::Connecting { is_first: false }) {
                connections.close();
            }
            sleep(*RECONNECT_BACKOFF.end()).await;
        }
    }

    async fn keep(&mut self) {
        let mut pause = *RECONNECT_BACKOFF.start();
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            let limit = connect_timeout(self.last_connect, (self.endpoint_config.shortest_ttl)());
            match self.connect(limit).await {
                Ok((connections, took)) => {
                    let is_first = self.last_connect.replace(took).is_none();
                    failures = 0;
                    self.publish(&connections, is_first);
                    let was_redirected = self.is_redirected.load(Ordering::SeqCst);
                    self.until_lost(&connections).await;
                    if !was_redirected && self.is_redirected.load(Ordering::SeqCst) {
                        (self.endpoint_config.warn)(REDIRECTED.to_owned());
                    } else {
                        tracing::info!("the connection was lost");
                    }
                    connections.close();
                    // A server that votes is one of several: no vote waits until it is a master again.
                    let refusal = connections.refusal().filter(|_| self.endpoint_config.is_voter).cloned();
                    let is_refused = refusal.is_some();
                    self.state
                        .send_replace(refusal.map_or(State::Connecting { is_first: false }, State::Down));
                    (self.endpoint_config.on_disconnect)();
                    if is_refused {
                        self.back_off(began, &mut pause).await;
                    } else {
                        // The server had answered, so the backoff restarts.
                        pause = *RECONNECT_BACKOFF.start();
                        sleep_until(began + MIN_CONNECT_INTERVAL).await;
                    }
                }
                Err(error) => {
                    tracing::debug!(error.message, "not connected yet");
                    failures = failures.saturating_add(1);
                    // One failed attempt after a disconnect does not fail commands yet.
                    if failures > 1 || self.last_connect.is_none() {
                        self.state.send_replace(State::Down(error));
                    }
                    (self.endpoint_config.on_disconnect)();
                    self.back_off(began, &mut pause).await;
                }
            }
        }
    }

    /// The pause after a failed attempt that began then, unless a renewal is due. The next one is twice as long.
    async fn back_off(&self, began: Instant, pause: &mut Duration) {
        let skipped = async {
            self.skip_backoff.notified().await;
            sleep_until(began + MIN_CONNECT_INTERVAL).await;
        };
        tokio::select! {
            () = sleep(jittered(*pause)) => {}
            () = skipped => {}
        }
        *pause = (*pause * 2).min(*RECONNECT_BACKOFF.end());
    }

    /// Publishes new connections. No await point: no push or answer can arrive in between.
    ///
    /// Waiters measured time by the previous server's clock. They learn of the reconnect before any push counts, and re-check,
    /// so that no earlier push is missed.
    fn publish(&self, connections: &Arc<Connections>, is_first: bool) {
        if !is_first {
            (self.endpoint_config.on_reconnect)(&|_| true);
        }
        connections.accept_pushes();
        self.state.send_replace(State::Up(connections.clone()));
    }

    fn address(&self) -> AddressState {
        let is_proven = self.last_connect.is_some() || matches!(self.target, Target::Node(_));
        if is_proven { AddressState::Proven } else { AddressState::Unproven }
    }

    /// Waits until the connection is lost, or fails a requested health check.
    async fn until_lost(&self, connections: &Connections) {
        loop {
            self.health_check.notified().await;
            if connections.is_closed() {
                return;
            }
            let subscription = connections.subscription();
            let check = async {
                if let Some(subscription) = &subscription {
                    subscription.check(connections.answer_limit()).await;
                }
            };
            if !join(connections.responds(), check).await.0 {
                return;
            }
        }
    }

    /// Connects, and says how long that took, without the question which server is the master.
    async fn connect(&mut self, limit: Duration) -> Result<(Arc<Connections>, Duration), StoreError> {
        let address = self.address();
        let sentinels = match &self.target {
            Target::Server(dial) => {
                let dial = dial.clone();
                dial.prepare().await?;
                return within(limit, address, self.connect_any_protocol(&dial, address)).await;
            }
            Target::Node(node) => {
                let node = node.clone();
                node.dial.prepare().await?;
                let connected = async {
                    let connections = self.connect_any_protocol(&node.dial, address).await?;
                    node.confirm(&connections).await.map(|()| connections)
                };
                return within(limit, address, connected).await;
            }
            Target::Master(sentinels) => sentinels.clone(),
        };
        sentinels.prepare().await;
        loop {
            // That has limits of its own: sentinels that hang are waited for longer than the attempt may take after that.
            let (master, dial) = sentinels.find_master(address, limit).await?;
            dial.prepare().await?;
            let mut switched = Box::pin(sentinels.clone().until_switched(master.clone()));
            let connected = async {
                // The sentinels name this address, so it is proven.
                let connected = self.connect_any_protocol(&dial, AddressState::Proven).await;
                let connections =
                    connected.map_err(|error| error.of(format_args!("the master {}", dial.addr())))?;
                sentinels.confirm(&master, &mut connections.driver_conn()).await.map(|()| connections)
            };
            tokio::select! {
                connected = within(limit, address, connected) => {
                    match &connected {
                        Ok((connections, _)) => connections.close_after(switched),
                        Err(_) => sentinels.forget_master(),
                    }
                    return connected;
                }
                // The replaced master may be frozen: do not wait for it.
                () = &mut switched => {}
            }
        }
    }

    /// Connects with the newest protocol that the server supports.
    async fn connect_any_protocol(
        &mut self,
        dial: &Dial,
        address: AddressState,
    ) -> Result<Arc<Connections>, StoreError> {
        loop {
            match self.connect_server(dial).await {
                Ok(connections) => return Ok(connections),
                Err(error) if is_resp3_unknown(&error) && !self.is_resp2 => {
                    self.is_resp2 = true;
                }
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    return Err(not_sent(closed_at_once(address)).caused_by(error));
                }
                Err(error) => return Err(address.store_error(&error)),
            }
        }
    }

    async fn connect_server(&self, dial: &Dial) -> Result<Arc<Connections>, RedisError> {
        let status = Arc::new(ConnectionStatus::new(self.health_check.clone(), self.is_redirected.clone()));
        let mut tasks = TaskGroup::default();
        // The attempt as a whole has a limit. How long the server takes is learned by its first answer.
        let mut config = config().set_response_timeout(Some(CONNECT_TIMEOUT));
        let are_commands_resp2 = self.is_resp2 || self.is_redirected.load(Ordering::SeqCst);
        if !are_commands_resp2 {
            let on_reconnect = self.endpoint_config.on_reconnect.clone();
            config = config.set_push_sender(driver_handler(on_reconnect, status.clone()));
        }
        let mut driver_conn = dial.open(are_commands_resp2, &config).await?;
        let user = dial.user();
        let user = user.as_deref();
        let subscriber = Arc::new(Subscriber {
            dial: dial.clone(),
            is_resp2: self.is_resp2,
            channel: self.endpoint_config.channel.clone(),
            status: status.clone(),
            on_message: self.endpoint_config.on_message.clone(),
            on_reconnect: self.endpoint_config.on_reconnect.clone(),
            on_disconnect: self.endpoint_config.on_disconnect.clone(),
            is_idle: self.endpoint_config.is_idle.clone(),
            warn: self.endpoint_config.warn.clone(),
        });
        let mut opening = subscriber.open();
        let (facts, opened) =
            beside(&mut opening, self.check_server(&mut driver_conn, are_commands_resp2, user)).await;
        if let Some(Err(SubscriberError::Refused(error))) = opened {
            return Err(error);
        }
        let facts = facts?;
        let caller = self.endpoint_config.caller.as_ref().map(Handle::id);
        let connections =
            Arc::new(Connections::new(driver_conn, status, caller, (dial.clone(), self.is_resp2), facts));
        connections.set_shortest_ttl(self.endpoint_config.shortest_ttl.clone());
        let still_opening = opened.is_none().then_some(opening);
        if let Some(Ok(subscription)) = opened
            && let Ok(Place::Here | Place::Unknown) = connections.place_of_subscriber(&subscription).await
        {
            subscriber.try_pushes(&connections, &subscription).await;
            connections.set_subscription(Some(Arc::new(subscription)));
        }
        tasks.spawn(gate::throttled(subscriber.keep(Arc::downgrade(&connections), still_opening)));
        let shared = self.endpoint_config.shared.clone();
        if let Some((connection, caller)) = shared.zip(self.endpoint_config.caller.clone()) {
            let (runtime, connections) = (self.endpoint_config.runtime.clone(), Arc::downgrade(&connections));
            tasks.spawn(SharedKeeper { connection, connections, caller, runtime }.keep());
        } else if let Some(caller) = &self.endpoint_config.caller
            // RESP2 does not report the loss of this connection.
            && !are_commands_resp2
            && self.endpoint_config.runtime.may_be_tried()
        {
            let caller_conn = CallerConnection {
                dial: dial.clone(),
                caller: caller.clone(),
                connections: Arc::downgrade(&connections),
                status: connections.status().clone(),
                runtime: self.endpoint_config.runtime.clone(),
            };
            tasks.spawn(caller_conn.keep());
        }
        connections.own(tasks);
        Ok(connections)
    }

    /// What the server is, and what its user may do.
    async fn check_server(
        &self,
        driver_conn: &mut MultiplexedConnection,
        is_resp2: bool,
        user: Option<&str>,
    ) -> Result<ServerFacts, RedisError> {
        let warn = &*self.endpoint_config.warn;
        let has_slots = self.endpoint_config.channel.is_none();
        let check_scripts = async |connection: &mut MultiplexedConnection| {
            self.check_scripts(connection, has_slots, user).await
        };
        let facts = handshake::handshake(
            driver_conn,
            is_resp2,
            has_slots,
            self.last_connect.is_some(),
            check_scripts,
            warn,
        )
        .await?;
        if self.endpoint_config.is_voter && facts.run_id.is_none() {
            let error = handshake::missing_run_id(user);
            warn(explain(&error));
            return Err(error);
        }
        Ok(facts)
    }

    /// Whether scripts are restricted. An error if the user lacks a right, or the store needs other scripts.
    async fn check_scripts(
        &self,
        connection: &mut MultiplexedConnection,
        has_slots: bool,
        user: Option<&str>,
    ) -> Result<bool, RedisError> {
        let restriction = &self.endpoint_config.restriction;
        let place = if has_slots { rights::Place::ClusterNode } else { rights::Place::Server };
        let known = restriction.known();
        let found = known == Some(true) || rights::check(connection, place, user, known).await?;
        let refuse = |what: &str| Err((ErrorKind::Client, OWN_REFUSAL, what.to_owned()).into());
        match (found, restriction.note(found)) {
            (false, _) => return Ok(restriction.is_restricted()),
            (true, true) => {}
            (true, false) => {
                return refuse(
                    "what scripts may do is restricted here, as behind a proxy: write proxy=yes instead of proxy=no, and \
                     if that is not in the address, restart this program",
                );
            }
        }
        if has_slots {
            return refuse(
                "what scripts may do is restricted here, as behind a proxy, which is one server and no cluster: write \
                 redis://HOST:PORT instead of redis-cluster://…",
            );
        }
        if self.endpoint_config.is_voter {
            return refuse(
                "what scripts may do is restricted here, as behind a proxy: such a server can't be a node of a quorum",
            );
        }
        rights::check_restricted(connection, user, self.last_connect.is_some()).await.map(|()| true)
    }
}

/// Does this while the subscriber connection is opened, and then waits for that for as long again: nothing but a waiter needs it, and
/// something in between may let it hang.
async fn beside<T>(
    opening: &mut Opening,
    work: impl Future<Output = T>,
) -> (T, Option<Result<Subscription, SubscriberError>>) {
    let (began, mut work, mut opened) = (Instant::now(), pin!(work), None);
    let done = loop {
        tokio::select! {
            biased;
            result = &mut *opening, if opened.is_none() => opened = Some(result),
            done = &mut work => break done,
        }
    };
    if opened.is_none() {
        opened = timeout(began.elapsed().min(MAX_WAIT_FOR_SUBSCRIBER), opening).await.ok();
    }
    (done, opened)
}

/// Fails if that takes longer. Says how long it took.
async fn within<T>(
    limit: Duration,
    address: AddressState,
    connecting: impl Future<Output = Result<T, StoreError>>,
) -> Result<(T, Duration), StoreError> {
    let began = Instant::now();
    let connected = timeout(limit, connecting).await;
    let connected = connected.unwrap_or_else(|_| Err(not_sent(address.no_answer(limit))));
    connected.map(|connections| (connections, began.elapsed()))
}

/// How long an attempt to connect may take, where the last one took `last_connect`. An attempt that began during an outage may not
/// succeed after it, so a long attempt costs leases.
pub(super) fn connect_timeout(last_connect: Option<Duration>, shortest_ttl: Option<Duration>) -> Duration {
    let Some(last_connect) = last_connect else { return CONNECT_TIMEOUT };
    let shortest_ttl = shortest_ttl.map_or(CONNECT_TIMEOUT, |ttl| ttl / TTL_FRACTION);
    shortest_ttl.max(last_connect.saturating_mul(SLOWDOWN_FACTOR)).clamp(MIN_CONNECT_TIMEOUT, CONNECT_TIMEOUT)
}
