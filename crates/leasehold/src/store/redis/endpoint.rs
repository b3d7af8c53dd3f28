//! The way to one server: a connection that is there, or that is being made again.
//!
//! A link has a keeper, a task on the client's own thread that connects, tells everybody, waits until the connection is
//! lost, and connects again; while that fails, with pauses that grow. What came over a connection that was given up is not
//! believed, and pushes over a new one only count once everybody knows that it is new: it may lead to another server, with
//! another clock.
//!
//! There are two lanes. The *home* connection belongs to the client's thread. The *express* connection belongs to the runtime
//! that the client was made in, where there is one (`express`). It is a convenience; everything also works without it, so
//! that renewals depend on nobody's runtime.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Failure, Resource};
use redis::{ConnectionInfo, ErrorKind, ProtocolVersion, RedisError};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::caller_conn::{CallerConnection, CallerRuntime};
use super::connections::{
    ConnectionStatus, Connections, MessageHandler, config, forward_messages, push_handler,
};
use super::error::{AddressState, explain};
use super::sentinel::Sentinels;
use super::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, handshake};
use crate::store::StoreError;

/// The pauses between attempts to connect that fail.
pub(super) const RECONNECT_BACKOFF: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// Attempts to connect begin no closer together than this, however soon a connection is lost and whoever is in a hurry. It
/// bounds what a server has to bear that closes every connection.
const MIN_CONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// The least that an attempt to connect again may take.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// An attempt to connect again may take this part of the shortest ttl at stake, so that several fit into what is left of it.
const TTL_FRACTION: u32 = 4;

/// An attempt to connect again may take this many times what the last one took that succeeded.
const SLOWDOWN_FACTOR: u32 = 4;

/// Where a link leads.
pub(super) enum Target {
    Server(ConnectionInfo),
    /// A server that others have named.
    Node(ConnectionInfo),
    Master(Sentinels),
}

/// Called when what was told about resources, those that this is true of, was missed.
pub(super) type ReconnectHandler = Arc<dyn Fn(&dyn Fn(&Resource) -> bool) + Send + Sync>;

/// What a link does besides carrying commands.
pub(super) struct EndpointConfig {
    /// Subscribed to as soon as a connection is there.
    pub(super) channel: Option<String>,
    /// What to do with a channel's message.
    pub(super) on_message: MessageHandler,
    /// The connection is new, or the server was emptied: what was told meanwhile was missed, or is void.
    pub(super) on_reconnect: ReconnectHandler,
    /// There is no connection: perhaps the server has been replaced.
    pub(super) on_disconnect: Arc<dyn Fn() + Send + Sync>,
    /// The shortest ttl of the leases that are held.
    pub(super) shortest_ttl: Arc<dyn Fn() -> Option<Duration> + Send + Sync>,
    /// What an operator should know about the server.
    pub(super) warn: Arc<dyn Fn(String) + Send + Sync>,
    /// Of the runtime that the client was made in.
    pub(super) caller: Option<Handle>,
    pub(super) is_resp2: bool,
    pub(super) runtime: Arc<CallerRuntime>,
    /// The server votes, so no connection counts that does not tell its run id.
    pub(super) is_voter: bool,
}

pub(super) struct Endpoint {
    state: watch::Receiver<State>,
    health_check: Arc<Notify>,
    skip_backoff: Arc<Notify>,
    keeper: AbortHandle,
}

#[derive(Clone)]
enum State {
    Connecting {
        is_first: bool,
    },
    /// The last attempt failed like this.
    Down(StoreError),
    Up(Arc<Connections>),
}

impl Endpoint {
    /// Begins to connect. Runs on the client's own runtime.
    pub(super) fn new(target: Target, endpoint_config: EndpointConfig) -> Self {
        let (tell, state) = watch::channel(State::Connecting { is_first: true });
        let (health_check, skip_backoff) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let is_resp2 = endpoint_config.is_resp2;
        let keeper = Reconnector {
            target,
            endpoint_config,
            is_resp2,
            state: tell,
            health_check: health_check.clone(),
            skip_backoff: skip_backoff.clone(),
            last_connect: None,
        };
        Self { state, health_check, skip_backoff, keeper: tokio::spawn(keeper.keep()).abort_handle() }
    }

    /// The connections, if they are there now.
    pub(super) fn current(&self) -> Option<Arc<Connections>> {
        match &*self.state.borrow() {
            State::Up(connections) => Some(connections.clone()),
            State::Connecting { .. } | State::Down(_) => None,
        }
    }

    /// The connections, once they are there. An error says that nothing was sent.
    pub(super) async fn connections(&self) -> Result<Arc<Connections>, StoreError> {
        let (limit, address) = match &*self.state.borrow() {
            State::Up(connections) => return Ok(connections.clone()),
            State::Down(error) => return Err(error.clone()),
            // The first time it may take longer, as connecting may.
            State::Connecting { is_first: true } => (CONNECT_TIMEOUT, AddressState::Unproven),
            State::Connecting { is_first: false } => (ANSWER_TIMEOUT, AddressState::Proven),
        };
        let mut state = self.state.clone();
        let decided = state.wait_for(|state| !matches!(state, State::Connecting { .. }));
        match Box::pin(timeout(limit, decided)).await.map(|found| found.map(|state| state.clone())) {
            Ok(Ok(State::Up(connections))) => Ok(connections),
            Ok(Ok(State::Down(error))) => Err(error),
            _ => Err(not_sent(address.no_answer(limit))),
        }
    }

    /// One of these lanes' connections was lost: waits until it is known whether the other one is too, and what has become
    /// of the link then; not for long.
    pub(super) async fn await_stable(&self, connections: &Arc<Connections>) {
        if !connections.is_closed() && connections.responds().await {
            return;
        }
        self.request_health_check();
        let mut state = self.state.clone();
        let is_settled = |state: &State| match state {
            State::Connecting { .. } => false,
            State::Down(_) => true,
            State::Up(now) => !Arc::ptr_eq(now, connections),
        };
        let _ = timeout(ANSWER_TIMEOUT, state.wait_for(is_settled)).await;
    }

    /// The server is not the master any more: another one is looked for.
    pub(super) fn invalidate(&self) {
        if let Some(connections) = self.current() {
            connections.close();
        }
    }

    /// Something suggests that the connection may not be any good: it is looked at.
    pub(super) fn request_health_check(&self) {
        self.health_check.notify_one();
    }

    /// A lease is to be renewed and there is no connection: the next attempt to connect does not wait for its pause.
    pub(super) fn skip_backoff(&self) {
        self.skip_backoff.notify_one();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// What a connection that is closed before its first answer may mean.
fn closed_at_once(address: AddressState) -> String {
    let what = "the server closes new connections: it may have as many clients as it may (maxclients)";
    match address {
        AddressState::Unproven => format!("{what}, or speak TLS only"),
        AddressState::Proven => what.to_owned(),
    }
}

fn not_sent(message: String) -> StoreError {
    StoreError { failure: Failure::NotSent, message }
}

/// What keeps a link connected.
struct Reconnector {
    target: Target,
    endpoint_config: EndpointConfig,
    /// The server has nothing newer, or the caller wants nothing newer.
    is_resp2: bool,
    state: watch::Sender<State>,
    health_check: Arc<Notify>,
    skip_backoff: Arc<Notify>,
    /// How long it took to connect the last time; none before the first time.
    last_connect: Option<Duration>,
}

impl Drop for Reconnector {
    /// With the client's thread. Whoever still has the link is not to keep the connections with it.
    fn drop(&mut self) {
        self.state.send_replace(State::Down(not_sent("the client was closed".to_owned())));
    }
}

impl Reconnector {
    async fn keep(mut self) {
        let mut pause = *RECONNECT_BACKOFF.start();
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            let limit = connect_timeout(self.last_connect, (self.endpoint_config.shortest_ttl)());
            let connected = match timeout(limit, self.connect()).await {
                Ok(connected) => connected,
                Err(_) => Err(not_sent(self.address().no_answer(limit))),
            };
            match connected {
                Ok(connections) => {
                    let is_first = self.last_connect.replace(began.elapsed()).is_none();
                    failures = 0;
                    self.publish(&connections, is_first);
                    self.until_lost(&connections).await;
                    tracing::warn!("the connection was lost");
                    connections.close();
                    self.state.send_replace(State::Connecting { is_first: false });
                    (self.endpoint_config.on_disconnect)();
                    // The server has answered, so this is no reason to wait for long.
                    pause = *RECONNECT_BACKOFF.start();
                    sleep_until(began + MIN_CONNECT_INTERVAL).await;
                }
                Err(error) => {
                    tracing::debug!(error.message, "not connected yet");
                    failures = failures.saturating_add(1);
                    // Whatever cut a connection may have cut the next one too: that alone fails no command.
                    if failures > 1 || self.last_connect.is_none() {
                        self.state.send_replace(State::Down(error));
                    }
                    (self.endpoint_config.on_disconnect)();
                    let skipped = async {
                        self.skip_backoff.notified().await;
                        sleep_until(began + MIN_CONNECT_INTERVAL).await;
                    };
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = skipped => {}
                    }
                    pause = (pause * 2).min(*RECONNECT_BACKOFF.end());
                }
            }
        }
    }

    /// Without a pause for anything else on this thread: nothing can be heard, asked or answered in between.
    ///
    /// What waits has measured time by the last server that it heard from, which may have been another one. So that it does
    /// not measure a push from this one by that, it is told of the new connection before any push counts; and it asks again,
    /// so what was pushed before that is not missed.
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

    /// Waits until the connection is lost, or does not answer when there is doubt about it.
    async fn until_lost(&self, connections: &Connections) {
        loop {
            self.health_check.notified().await;
            if connections.is_closed() {
                return;
            }
            let mut driver_conn = connections.driver_conn();
            if driver_conn
                .send_packed_command(&redis::cmd("PING"))
                .await
                .is_err_and(|error| error.code().is_none())
            {
                return;
            }
        }
    }

    async fn connect(&mut self) -> Result<Arc<Connections>, StoreError> {
        let sentinels = match &self.target {
            Target::Server(info) | Target::Node(info) => {
                let info = info.clone();
                return self.connect_any_protocol(&info, self.address()).await;
            }
            Target::Master(sentinels) => sentinels.clone(),
        };
        loop {
            let (master, info) = sentinels.find_master(self.address()).await?;
            let mut switched = Box::pin(sentinels.clone().until_switched(master.clone()));
            let connected = async {
                // The sentinels know this address, whether it has ever answered or not.
                let connections =
                    self.connect_any_protocol(&info, AddressState::Proven).await.map_err(|error| {
                        StoreError {
                            message: format!("the master {}: {}", info.addr(), error.message),
                            ..error
                        }
                    })?;
                sentinels.confirm(&master, &mut connections.driver_conn()).await.map(|()| connections)
            };
            tokio::select! {
                connections = connected => {
                    let connections = connections?;
                    connections.close_after(switched);
                    return Ok(connections);
                }
                // It may be frozen, which is no reason to wait for it.
                () = &mut switched => {}
            }
        }
    }

    /// By the newest protocol that the server has.
    async fn connect_any_protocol(
        &mut self,
        info: &ConnectionInfo,
        address: AddressState,
    ) -> Result<Arc<Connections>, StoreError> {
        loop {
            match self.connect_server(info).await {
                Ok(connections) => return Ok(connections),
                Err(error) if is_resp3_unknown(&error) && !self.is_resp2 => {
                    self.is_resp2 = true;
                }
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    return Err(not_sent(closed_at_once(address)));
                }
                Err(error) => return Err(address.store_error(&error)),
            }
        }
    }

    async fn connect_server(&self, info: &ConnectionInfo) -> Result<Arc<Connections>, RedisError> {
        let status = Arc::new(ConnectionStatus::new(self.health_check.clone()));
        let mut tasks = JoinSet::new();
        let client = redis::Client::open(with_protocol(info, self.is_resp2))?;
        let config = config();
        let on_message = self.endpoint_config.on_message.clone();
        let config = if self.is_resp2 {
            config
        } else {
            config.set_push_sender(push_handler(
                on_message.clone(),
                self.endpoint_config.on_reconnect.clone(),
                status.clone(),
            ))
        };
        let mut driver_conn = client.get_multiplexed_async_connection_with_config(&config).await?;
        if let Some(channel) = &self.endpoint_config.channel {
            if self.is_resp2 {
                let mut inbox = client.get_async_pubsub().await?;
                inbox.subscribe(channel).await?;
                tasks.spawn(forward_messages(inbox, on_message.clone(), status.clone()));
            } else {
                driver_conn.subscribe(channel).await?;
            }
        }
        let server =
            handshake::handshake(&mut driver_conn, self.is_resp2, &*self.endpoint_config.warn).await?;
        if self.endpoint_config.is_voter && server.is_none() {
            let error = handshake::missing_run_id(info.redis_settings().username());
            (self.endpoint_config.warn)(explain(&error));
            return Err(error);
        }
        let caller = self.endpoint_config.caller.as_ref().map(Handle::id);
        let connections = Arc::new(Connections::new(
            driver_conn,
            status.clone(),
            caller,
            client.clone(),
            server.clone().unwrap_or_default(),
        ));
        // With the older protocol nobody would notice that it is lost.
        if let Some(caller) = self.endpoint_config.caller.as_ref().filter(|_| !self.is_resp2) {
            let caller_conn = CallerConnection {
                client,
                caller: caller.clone(),
                connections: Arc::downgrade(&connections),
                status: status.clone(),
                on_message,
                channel: self.endpoint_config.channel.clone(),
                server,
                runtime: self.endpoint_config.runtime.clone(),
            };
            tasks.spawn(caller_conn.keep());
        }
        connections.own(tasks);
        Ok(connections)
    }
}

/// How long an attempt to connect may take, where the last one took `last_connect`. An attempt that began while nothing reached the
/// server stays lost when that is over, so a long one costs leases.
fn connect_timeout(last_connect: Option<Duration>, shortest_ttl: Option<Duration>) -> Duration {
    let Some(last_connect) = last_connect else { return CONNECT_TIMEOUT };
    let shortest_ttl = shortest_ttl.map_or(CONNECT_TIMEOUT, |ttl| ttl / TTL_FRACTION);
    shortest_ttl.max(last_connect.saturating_mul(SLOWDOWN_FACTOR)).clamp(MIN_CONNECT_TIMEOUT, CONNECT_TIMEOUT)
}

/// The server is older than the protocol. What it says then repeats what it was told, the password included.
fn is_resp3_unknown(error: &RedisError) -> bool {
    let text = error.to_string().to_lowercase();
    error.kind() == ErrorKind::RESP3NotSupported || text.contains("unknown command") && text.contains("hello")
}

fn with_protocol(info: &ConnectionInfo, is_resp2: bool) -> ConnectionInfo {
    let protocol = if is_resp2 { ProtocolVersion::RESP2 } else { ProtocolVersion::RESP3 };
    let settings = info.redis_settings().clone().set_protocol(protocol);
    info.clone().set_redis_settings(settings)
}

#[cfg(test)]
mod tests;
