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

use super::endpoint::ReconnectHandler;
use super::replicas::REPLICA_RESPONSE_TIMEOUT;
use super::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, handshake};

/// How many commands may wait for the connection to write them.
const BUFFER: usize = 1_024;

/// What to do with a message: of which channel, and what it says.
pub(super) type MessageHandler = Arc<dyn Fn(&[u8], &[u8]) + Send + Sync>;

/// What becomes of one connection: shared with whoever hears from it.
pub(super) struct ConnectionStatus {
    /// Everybody knows that the connection is new, so its pushes count.
    is_accepting: AtomicBool,
    is_closed: AtomicBool,
    health_check: Arc<Notify>,
}

impl ConnectionStatus {
    pub(super) fn new(health_check: Arc<Notify>) -> Self {
        Self { is_accepting: AtomicBool::new(false), is_closed: AtomicBool::new(false), health_check }
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.health_check.notify_one();
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Whether pushes over this connection count: neither before it is published, nor after it was given up.
    fn accepts_pushes(&self) -> bool {
        self.is_accepting.load(Ordering::SeqCst) && !self.is_closed()
    }
}

/// The connections to one server.
pub(super) struct Connections {
    driver_conn: MultiplexedConnection,
    status: Arc<ConnectionStatus>,
    caller_conn: Mutex<Option<MultiplexedConnection>>,
    caller: Option<Id>,
    /// For what has to be waited for until replicas have it; made when it is first needed.
    replica_conn: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    client: redis::Client,
    /// Which server this is, and which of its lives; empty where that may not be asked.
    run_id: Arc<str>,
    /// The hash slots of a cluster whose inboxes are heard here, by the server's word.
    slots: Mutex<HashSet<u16>>,
    /// Ends with the lanes: the connection for pushes where they can't come with answers, and making the express lane.
    tasks: Mutex<JoinSet<()>>,
}

impl Connections {
    pub(super) fn new(
        driver_conn: MultiplexedConnection,
        status: Arc<ConnectionStatus>,
        caller: Option<Id>,
        client: redis::Client,
        run_id: String,
    ) -> Self {
        Self {
            driver_conn,
            status,
            caller_conn: Mutex::new(None),
            caller,
            replica_conn: tokio::sync::Mutex::new(None),
            client,
            run_id: run_id.into(),
            slots: Mutex::new(HashSet::new()),
            tasks: Mutex::new(JoinSet::new()),
        }
    }

    /// These tasks end with the lanes.
    pub(super) fn own(&self, tasks: JoinSet<()>) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    pub(super) fn run_id(&self) -> &Arc<str> {
        &self.run_id
    }

    pub(super) fn driver_conn(&self) -> MultiplexedConnection {
        self.driver_conn.clone()
    }

    /// The caller's own connection where there is one, and this is its runtime: from anywhere else it is no shorter way, and
    /// that runtime may be doing nothing.
    pub(super) fn caller_conn(&self) -> Option<MultiplexedConnection> {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        if here.is_some() && here == self.caller { self.caller_slot().clone() } else { None }
    }

    pub(super) fn preferred(&self) -> MultiplexedConnection {
        self.caller_conn().unwrap_or_else(|| self.driver_conn.clone())
    }

    pub(super) fn set_caller_conn(&self, connection: MultiplexedConnection) {
        *self.caller_slot() = Some(connection);
    }

    /// It turned out to be gone. The home connection does until there is another one.
    pub(super) fn drop_caller_conn(&self) {
        *self.caller_slot() = None;
    }

    fn caller_slot(&self) -> MutexGuard<'_, Option<MultiplexedConnection>> {
        self.caller_conn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection on which replicas are waited for. None where it leads to another server than the others, which are
    /// given up then: what one address leads to has changed in between.
    pub(super) async fn replica_conn(&self) -> Result<Option<MultiplexedConnection>, RedisError> {
        let mut replica_conn = self.replica_conn.lock().await;
        if let Some(connection) = &*replica_conn {
            return Ok(Some(connection.clone()));
        }
        let (client, config) =
            (self.client.clone(), config().set_response_timeout(Some(REPLICA_RESPONSE_TIMEOUT)));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        if handshake::run_id(&mut connection).await?.unwrap_or_default() != *self.run_id {
            self.close();
            return Ok(None);
        }
        *replica_conn = Some(connection.clone());
        Ok(Some(connection))
    }

    pub(super) async fn drop_replica_conn(&self) {
        *self.replica_conn.lock().await = None;
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
    pub(super) async fn responds(&self) -> bool {
        let answer = self.driver_conn().send_packed_command(&redis::cmd("PING")).await;
        // What refuses to answer is there.
        !answer.is_err_and(|error| error.code().is_none())
    }

    /// Nothing that comes over these connections is believed any more.
    pub(super) fn is_closed(&self) -> bool {
        self.status.is_closed()
    }

    pub(super) fn close(&self) {
        self.status.close();
    }

    /// Pushes count from now on.
    pub(super) fn accept_pushes(&self) {
        self.status.is_accepting.store(true, Ordering::SeqCst);
    }

    /// The connections are given up after this.
    pub(super) fn close_after(&self, event: impl Future<Output = ()> + Send + 'static) {
        let status = self.status.clone();
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(async move {
            event.await;
            status.close();
        });
    }
}

pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(Some(ANSWER_TIMEOUT))
        .set_pipeline_buffer_size(BUFFER)
}

/// What comes unasked over the home connection.
pub(super) fn push_handler(
    on_message: MessageHandler,
    emptied: ReconnectHandler,
    status: Arc<ConnectionStatus>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            // A server that loses a slot ends the subscriptions in it. The client library takes this for an answer, and so
            // each later answer for that of another command: nothing that comes after it may be believed.
            PushKind::SUnsubscribe | PushKind::Disconnection => status.close(),
            // No key is ever tracked, so this is what a server sends when it was emptied.
            PushKind::Invalidate if status.accepts_pushes() => emptied(&|_| true),
            _ => handle_push(&info, &on_message, &status),
        }
        Ok(())
    }
}

/// Hands on what was published, unless it came over a connection that was given up.
pub(super) fn handle_push(info: &PushInfo, on_message: &MessageHandler, status: &ConnectionStatus) {
    if let PushKind::Message | PushKind::SMessage = info.kind
        && let [Value::BulkString(channel), Value::BulkString(message)] = info.data.as_slice()
        && status.accepts_pushes()
    {
        on_message(channel, message);
    }
}

/// Hears what is published, where it can't come with answers.
pub(super) async fn forward_messages(
    inbox: redis::aio::PubSub,
    on_message: MessageHandler,
    status: Arc<ConnectionStatus>,
) {
    let mut messages = inbox.into_on_message();
    while let Some(message) = messages.next().await {
        if status.accepts_pushes() {
            on_message(message.get_channel_name().as_bytes(), message.get_payload_bytes());
        }
    }
    status.close();
}
