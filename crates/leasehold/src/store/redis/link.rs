//! The way to one server: a connection that is there, or that is being made again.
//!
//! A link has a keeper, a task on the client's own thread that connects, tells everybody, waits until the connection is
//! lost, and connects again, with pauses that grow. What came over a connection that was given up is not believed.
//!
//! There are two lanes. The *home* connection belongs to the client's thread. The *express* connection belongs to the runtime
//! that the client was made in, where there is one (`express`). It is a convenience; everything also works without it, so
//! that renewals depend on nobody's runtime.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use leasehold_core::Failure;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ConnectionInfo, ErrorKind, ProtocolVersion, PushInfo, PushKind, RedisError, Value,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use super::durable::DURABLE_LIMIT;
use super::express::Express;
use super::sentinel::Sentinels;
use super::trouble::store_error;
use super::{ANSWER_LIMIT, CONNECT_LIMIT, greeting};
use crate::store::StoreError;

/// The pauses between attempts to connect again.
pub(super) const PAUSES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// How many commands may wait for the connection to write them.
const BUFFER: usize = 1_024;

/// Where a link leads.
pub(super) enum Goal {
    Server(ConnectionInfo),
    Master(Sentinels),
}

/// What to do with a message: of which channel, and what it says.
pub(super) type Hear = Arc<dyn Fn(&[u8], &[u8]) + Send + Sync>;

/// What a link does besides carrying commands.
pub(super) struct Terms {
    /// Subscribed to as soon as a connection is there.
    pub(super) channel: Option<String>,
    /// What to do with a channel's message.
    pub(super) hear: Hear,
    /// The connection is new: what was told meanwhile was missed.
    pub(super) renewed: Arc<dyn Fn() + Send + Sync>,
    /// There is no connection: perhaps the server has been replaced.
    pub(super) missed: Arc<dyn Fn() + Send + Sync>,
    /// What an operator should know about the server.
    pub(super) warn: Arc<dyn Fn(String) + Send + Sync>,
    /// Of the runtime that the client was made in.
    pub(super) caller: Option<Handle>,
    pub(super) is_resp2: bool,
}

pub(super) struct Link {
    state: watch::Receiver<State>,
    doubt: Arc<Notify>,
    keeper: AbortHandle,
}

#[derive(Clone)]
enum State {
    Dialing {
        is_first: bool,
    },
    /// The last attempt failed like this.
    Down(StoreError),
    Up(Arc<Lanes>),
}

impl Link {
    /// Begins to connect. Runs on the client's own runtime.
    pub(super) fn new(goal: Goal, terms: Terms) -> Self {
        let (tell, state) = watch::channel(State::Dialing { is_first: true });
        let doubt = Arc::new(Notify::new());
        let is_resp2 = terms.is_resp2;
        let keeper = Keeper { goal, terms, is_resp2, state: tell, doubt: doubt.clone() };
        Self { state, doubt, keeper: tokio::spawn(keeper.keep()).abort_handle() }
    }

    /// The connections, if they are there now.
    pub(super) fn lanes_now(&self) -> Option<Arc<Lanes>> {
        match &*self.state.borrow() {
            State::Up(lanes) => Some(lanes.clone()),
            State::Dialing { .. } | State::Down(_) => None,
        }
    }

    /// The connections, once they are there. An error says that nothing was sent.
    pub(super) async fn lanes(&self) -> Result<Arc<Lanes>, StoreError> {
        let limit = match &*self.state.borrow() {
            State::Up(lanes) => return Ok(lanes.clone()),
            State::Down(error) => return Err(error.clone()),
            // The first time it may take longer, as connecting may.
            State::Dialing { is_first: true } => CONNECT_LIMIT,
            State::Dialing { is_first: false } => ANSWER_LIMIT,
        };
        let mut state = self.state.clone();
        let decided = state.wait_for(|state| !matches!(state, State::Dialing { .. }));
        match timeout(limit, decided).await.map(|found| found.map(|state| state.clone())) {
            Ok(Ok(State::Up(lanes))) => Ok(lanes),
            Ok(Ok(State::Down(error))) => Err(error),
            _ => Err(not_sent(no_answer(limit))),
        }
    }

    /// One of these lanes' connections was lost: waits until it is known whether the other one is too, and what has become
    /// of the link then; not for long.
    pub(super) async fn settled(&self, lanes: &Arc<Lanes>) {
        if !lanes.is_over() && lanes.answers().await {
            return;
        }
        self.doubt();
        let mut state = self.state.clone();
        let is_settled = |state: &State| match state {
            State::Dialing { .. } => false,
            State::Down(_) => true,
            State::Up(now) => !Arc::ptr_eq(now, lanes),
        };
        let _ = timeout(ANSWER_LIMIT, state.wait_for(is_settled)).await;
    }

    /// The server is not the master any more: another one is looked for.
    pub(super) fn seek(&self) {
        if let Some(lanes) = self.lanes_now() {
            lanes.give_up();
        }
    }

    /// Something suggests that the connection may not be any good: it is looked at.
    pub(super) fn doubt(&self) {
        self.doubt.notify_one();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

const CLOSED_AT_ONCE: &str = "the server closes new connections: it may have as many clients as it may (maxclients), or \
                              speak TLS only";

fn no_answer(limit: Duration) -> String {
    format!("no answer within {limit:?}: check the host and the port, and whether it is one for TLS")
}

fn not_sent(message: String) -> StoreError {
    StoreError { failure: Failure::NotSent, message }
}

/// What becomes of one connection: shared with whoever hears from it.
pub(super) struct Fate {
    is_over: AtomicBool,
    doubt: Arc<Notify>,
}

impl Fate {
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.doubt.notify_one();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

/// The connections to one server.
pub(super) struct Lanes {
    home: MultiplexedConnection,
    fate: Arc<Fate>,
    express: Mutex<Option<MultiplexedConnection>>,
    /// For what has to be waited for until replicas have it; made when it is first needed.
    durable: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    client: redis::Client,
    /// The inboxes of a cluster's hash slots that are subscribed to, and whether that was confirmed.
    slots: Mutex<HashMap<u16, bool>>,
    /// Ends with the lanes: the connection for pushes where they can't come with answers, and making the express lane.
    tasks: Mutex<JoinSet<()>>,
}

impl Lanes {
    pub(super) fn home(&self) -> MultiplexedConnection {
        self.home.clone()
    }

    /// The caller's own connection where there is one.
    pub(super) fn express(&self) -> Option<MultiplexedConnection> {
        self.express_slot().clone()
    }

    pub(super) fn nearest(&self) -> MultiplexedConnection {
        self.express().unwrap_or_else(|| self.home.clone())
    }

    pub(super) fn put_express(&self, connection: MultiplexedConnection) {
        *self.express_slot() = Some(connection);
    }

    /// It turned out to be gone. The home connection does until there is another one.
    pub(super) fn drop_express(&self) {
        *self.express_slot() = None;
    }

    fn express_slot(&self) -> MutexGuard<'_, Option<MultiplexedConnection>> {
        self.express.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection on which replicas are waited for.
    pub(super) async fn durable(&self) -> Result<MultiplexedConnection, RedisError> {
        let mut durable = self.durable.lock().await;
        if let Some(connection) = &*durable {
            return Ok(connection.clone());
        }
        let (client, config) = (self.client.clone(), config().set_response_timeout(Some(DURABLE_LIMIT)));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        *durable = Some(connection.clone());
        Ok(connection)
    }

    pub(super) async fn drop_durable(&self) {
        *self.durable.lock().await = None;
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<u16, bool>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server has confirmed that this slot's inbox is heard.
    pub(super) fn is_subscribed(&self, slot: u16) -> bool {
        self.slots().get(&slot) == Some(&true)
    }

    /// Whether this slot's inbox is yet to be subscribed to; from now on somebody is about to.
    pub(super) fn begin_subscription(&self, slot: u16) -> bool {
        let mut slots = self.slots();
        let is_first = !slots.contains_key(&slot);
        slots.entry(slot).or_insert(false);
        is_first
    }

    pub(super) fn end_subscription(&self, slot: u16, is_confirmed: bool) {
        if is_confirmed {
            self.slots().insert(slot, true);
        } else {
            self.slots().remove(&slot);
        }
    }

    /// Whether the home connection is any good.
    async fn answers(&self) -> bool {
        let answer = self.home().send_packed_command(&redis::cmd("PING")).await;
        // What refuses to answer is there.
        !answer.is_err_and(|error| error.code().is_none())
    }

    /// Nothing that comes over these connections is believed any more.
    pub(super) fn is_over(&self) -> bool {
        self.fate.is_over()
    }

    pub(super) fn give_up(&self) {
        self.fate.end();
    }
}

/// What keeps a link connected.
struct Keeper {
    goal: Goal,
    terms: Terms,
    /// The server has nothing newer, or the caller wants nothing newer.
    is_resp2: bool,
    state: watch::Sender<State>,
    doubt: Arc<Notify>,
}

impl Keeper {
    async fn keep(mut self) {
        let mut pause = *PAUSES.start();
        loop {
            let dialed = match timeout(CONNECT_LIMIT, self.dial()).await {
                Ok(dialed) => dialed,
                Err(_) => {
                    Err(not_sent(format!("no answer within {CONNECT_LIMIT:?}: check the host and the port")))
                }
            };
            match dialed {
                Ok(lanes) => {
                    pause = *PAUSES.start();
                    self.state.send_replace(State::Up(lanes.clone()));
                    (self.terms.renewed)();
                    self.until_lost(&lanes).await;
                    tracing::warn!("the connection was lost");
                    lanes.give_up();
                    self.state.send_replace(State::Dialing { is_first: false });
                    (self.terms.missed)();
                }
                Err(error) => {
                    tracing::debug!(error.message, "not connected yet");
                    self.state.send_replace(State::Down(error));
                    (self.terms.missed)();
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(*PAUSES.end());
                }
            }
        }
    }

    /// Waits until the connection is lost, or does not answer when there is doubt about it.
    async fn until_lost(&self, lanes: &Lanes) {
        loop {
            self.doubt.notified().await;
            if lanes.is_over() {
                return;
            }
            let mut home = lanes.home();
            if home.send_packed_command(&redis::cmd("PING")).await.is_err_and(|error| error.code().is_none())
            {
                return;
            }
        }
    }

    async fn dial(&mut self) -> Result<Arc<Lanes>, StoreError> {
        let fate = Arc::new(Fate { is_over: AtomicBool::new(false), doubt: self.doubt.clone() });
        let mut tasks = JoinSet::new();
        let info = match &self.goal {
            Goal::Server(info) => info.clone(),
            Goal::Master(sentinels) => {
                let (master, info) = sentinels.find_master().await?;
                let (sentinels, fate) = (sentinels.clone(), fate.clone());
                tasks.spawn(async move {
                    sentinels.until_switched(master).await;
                    fate.end();
                });
                info
            }
        };
        loop {
            match self.dial_server(&info, &fate, &mut tasks).await {
                Ok(lanes) => {
                    *lanes.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
                    return Ok(lanes);
                }
                Err(error) if error.kind() == ErrorKind::RESP3NotSupported && !self.is_resp2 => {
                    self.is_resp2 = true;
                }
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    return Err(not_sent(CLOSED_AT_ONCE.to_owned()));
                }
                Err(error) => return Err(store_error(&error)),
            }
        }
    }

    async fn dial_server(
        &self,
        info: &ConnectionInfo,
        fate: &Arc<Fate>,
        tasks: &mut JoinSet<()>,
    ) -> Result<Arc<Lanes>, RedisError> {
        let client = redis::Client::open(with_protocol(info, self.is_resp2))?;
        let config = config();
        let hear = self.terms.hear.clone();
        let config =
            if self.is_resp2 { config } else { config.set_push_sender(ear(hear.clone(), fate.clone())) };
        let mut home = client.get_multiplexed_async_connection_with_config(&config).await?;
        if let Some(channel) = &self.terms.channel {
            if self.is_resp2 {
                let mut inbox = client.get_async_pubsub().await?;
                inbox.subscribe(channel).await?;
                tasks.spawn(listen(inbox, hear.clone(), fate.clone()));
            } else {
                home.subscribe(channel).await?;
            }
        }
        greeting::greet(&mut home, &*self.terms.warn).await?;
        let lanes = Arc::new(Lanes {
            home,
            fate: fate.clone(),
            express: Mutex::new(None),
            durable: tokio::sync::Mutex::new(None),
            client: client.clone(),
            slots: Mutex::new(HashMap::new()),
            tasks: Mutex::new(JoinSet::new()),
        });
        if let Some(caller) = &self.terms.caller {
            let express = Express {
                client,
                caller: caller.clone(),
                lanes: Arc::downgrade(&lanes),
                fate: fate.clone(),
                hear,
                renewed: self.terms.renewed.clone(),
                channel: self.terms.channel.clone().filter(|_| !self.is_resp2),
                is_resp2: self.is_resp2,
            };
            tasks.spawn(express.keep());
        }
        Ok(lanes)
    }
}

pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_LIMIT))
        .set_response_timeout(Some(ANSWER_LIMIT))
        .set_pipeline_buffer_size(BUFFER)
}

fn with_protocol(info: &ConnectionInfo, is_resp2: bool) -> ConnectionInfo {
    let protocol = if is_resp2 { ProtocolVersion::RESP2 } else { ProtocolVersion::RESP3 };
    let settings = info.redis_settings().clone().set_protocol(protocol);
    info.clone().set_redis_settings(settings)
}

/// What comes unasked over the home connection.
fn ear(
    hear: Hear,
    fate: Arc<Fate>,
) -> impl Fn(PushInfo) -> Result<(), std::convert::Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            // A server that loses a slot ends the subscriptions in it. The client library takes this for an answer, and so
            // each later answer for that of another command: nothing that comes after it may be believed.
            PushKind::SUnsubscribe | PushKind::Disconnection => fate.end(),
            _ => hear_push(&info, &hear, &fate),
        }
        Ok(())
    }
}

/// Hands on what was published, unless it came over a connection that was given up.
pub(super) fn hear_push(info: &PushInfo, hear: &Hear, fate: &Fate) {
    if let PushKind::Message | PushKind::SMessage = info.kind
        && let [Value::BulkString(channel), Value::BulkString(message)] = info.data.as_slice()
        && !fate.is_over()
    {
        hear(channel, message);
    }
}

/// Hears what is published, where it can't come with answers.
async fn listen(inbox: redis::aio::PubSub, hear: Hear, fate: Arc<Fate>) {
    let mut messages = inbox.into_on_message();
    while let Some(message) = messages.next().await {
        if !fate.is_over() {
            hear(message.get_channel_name().as_bytes(), message.get_payload_bytes());
        }
    }
    fate.end();
}
