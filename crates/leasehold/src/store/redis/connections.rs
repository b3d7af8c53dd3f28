//! The connections of one link, and what is heard over them.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::endpoint::Renewed;
use super::replicas::DURABLE_LIMIT;
use super::{ANSWER_LIMIT, CONNECT_LIMIT, handshake};

/// How many commands may wait for the connection to write them.
const BUFFER: usize = 1_024;

/// What to do with a message: of which channel, and what it says.
pub(super) type Hear = Arc<dyn Fn(&[u8], &[u8]) + Send + Sync>;

/// What becomes of one connection: shared with whoever hears from it.
pub(super) struct Fate {
    /// Everybody knows that the connection is new, so its pushes count.
    is_heard: AtomicBool,
    is_over: AtomicBool,
    doubt: Arc<Notify>,
}

impl Fate {
    pub(super) fn new(doubt: Arc<Notify>) -> Self {
        Self { is_heard: AtomicBool::new(false), is_over: AtomicBool::new(false), doubt }
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.doubt.notify_one();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Whether pushes over this connection count: neither before it is published, nor after it was given up.
    fn hears(&self) -> bool {
        self.is_heard.load(Ordering::SeqCst) && !self.is_over()
    }
}

/// The connections to one server.
pub(super) struct Lanes {
    home: MultiplexedConnection,
    fate: Arc<Fate>,
    express: Mutex<Option<MultiplexedConnection>>,
    caller: Option<Id>,
    /// For what has to be waited for until replicas have it; made when it is first needed.
    durable: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    client: redis::Client,
    /// Which server this is, and which of its lives; empty where that may not be asked.
    life: Arc<str>,
    /// The hash slots of a cluster whose inboxes are heard here, by the server's word.
    slots: Mutex<HashSet<u16>>,
    /// Ends with the lanes: the connection for pushes where they can't come with answers, and making the express lane.
    tasks: Mutex<JoinSet<()>>,
}

impl Lanes {
    pub(super) fn new(
        home: MultiplexedConnection,
        fate: Arc<Fate>,
        caller: Option<Id>,
        client: redis::Client,
        life: String,
    ) -> Self {
        Self {
            home,
            fate,
            express: Mutex::new(None),
            caller,
            durable: tokio::sync::Mutex::new(None),
            client,
            life: life.into(),
            slots: Mutex::new(HashSet::new()),
            tasks: Mutex::new(JoinSet::new()),
        }
    }

    /// These tasks end with the lanes.
    pub(super) fn own(&self, tasks: JoinSet<()>) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    pub(super) fn life(&self) -> &Arc<str> {
        &self.life
    }

    pub(super) fn home(&self) -> MultiplexedConnection {
        self.home.clone()
    }

    /// The caller's own connection where there is one, and this is its runtime: from anywhere else it is no shorter way, and
    /// that runtime may be doing nothing.
    pub(super) fn express(&self) -> Option<MultiplexedConnection> {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        if here.is_some() && here == self.caller { self.express_slot().clone() } else { None }
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

    /// The connection on which replicas are waited for. None where it leads to another server than the others, which are
    /// given up then: what one address leads to has changed in between.
    pub(super) async fn durable(&self) -> Result<Option<MultiplexedConnection>, RedisError> {
        let mut durable = self.durable.lock().await;
        if let Some(connection) = &*durable {
            return Ok(Some(connection.clone()));
        }
        let (client, config) = (self.client.clone(), config().set_response_timeout(Some(DURABLE_LIMIT)));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        if handshake::run_id(&mut connection).await?.unwrap_or_default() != *self.life {
            self.give_up();
            return Ok(None);
        }
        *durable = Some(connection.clone());
        Ok(Some(connection))
    }

    pub(super) async fn drop_durable(&self) {
        *self.durable.lock().await = None;
    }

    fn slots(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server has confirmed that this slot's inbox is heard.
    pub(super) fn is_subscribed(&self, slot: u16) -> bool {
        self.slots().contains(&slot)
    }

    pub(super) fn confirm_subscription(&self, slot: u16) {
        self.slots().insert(slot);
    }

    /// Whether the home connection is any good.
    pub(super) async fn answers(&self) -> bool {
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

    /// Pushes count from now on.
    pub(super) fn begin_to_hear(&self) {
        self.fate.is_heard.store(true, Ordering::SeqCst);
    }

    /// The connections are given up after this.
    pub(super) fn end_after(&self, event: impl Future<Output = ()> + Send + 'static) {
        let fate = self.fate.clone();
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(async move {
            event.await;
            fate.end();
        });
    }
}

pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_LIMIT))
        .set_response_timeout(Some(ANSWER_LIMIT))
        .set_pipeline_buffer_size(BUFFER)
}

/// What comes unasked over the home connection.
pub(super) fn ear(
    hear: Hear,
    emptied: Renewed,
    fate: Arc<Fate>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            // A server that loses a slot ends the subscriptions in it. The client library takes this for an answer, and so
            // each later answer for that of another command: nothing that comes after it may be believed.
            PushKind::SUnsubscribe | PushKind::Disconnection => fate.end(),
            // No key is ever tracked, so this is what a server sends when it was emptied.
            PushKind::Invalidate if fate.hears() => emptied(&|_| true),
            _ => hear_push(&info, &hear, &fate),
        }
        Ok(())
    }
}

/// Hands on what was published, unless it came over a connection that was given up.
pub(super) fn hear_push(info: &PushInfo, hear: &Hear, fate: &Fate) {
    if let PushKind::Message | PushKind::SMessage = info.kind
        && let [Value::BulkString(channel), Value::BulkString(message)] = info.data.as_slice()
        && fate.hears()
    {
        hear(channel, message);
    }
}

/// Hears what is published, where it can't come with answers.
pub(super) async fn listen(inbox: redis::aio::PubSub, hear: Hear, fate: Arc<Fate>) {
    let mut messages = inbox.into_on_message();
    while let Some(message) = messages.next().await {
        if fate.hears() {
            hear(message.get_channel_name().as_bytes(), message.get_payload_bytes());
        }
    }
    fate.end();
}
