//! The connections of one endpoint, and the pushes over them.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt as _;
use leasehold_core::Resource;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;

use super::connect;
use super::connect::Dial;
use super::deletes::Deletes;
use super::gather::Gatherings;
use super::handshake::{self, ServerFacts};
use super::limits::REPLICA_RESPONSE_TIMEOUT;
use super::wire::Wire;
use crate::tasks::TaskGroup;

/// Called after a reconnect for the matching resources: pushes may have been missed.
pub(super) type ReconnectHandler = Arc<dyn Fn(&dyn Fn(&Resource) -> bool) + Send + Sync>;

/// Max number of commands that wait to be written.
const BUFFER: usize = 1_024;

/// Handles a published message: channel, payload.
pub(super) type MessageHandler = Arc<dyn Fn(&[u8], &[u8]) + Send + Sync>;

/// Status of the connections, shared with the push handlers.
pub(super) struct ConnectionStatus {
    /// `on_reconnect` has run, so pushes count.
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

    /// Whether pushes count: only between publication and closing.
    fn accepts_pushes(&self) -> bool {
        self.is_accepting.load(Ordering::SeqCst) && !self.is_closed()
    }
}

/// The connections to one server.
pub(super) struct Connections {
    driver_conn: MultiplexedConnection,
    status: Arc<ConnectionStatus>,
    caller_conn: Mutex<Option<Wire>>,
    caller: Option<Id>,
    /// For commands that wait for replicas; opened on first use.
    replica_conn: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    /// For further connections to the same server.
    dial: (Dial, bool),
    /// The server's run id; empty if the user may not ask.
    run_id: Arc<str>,
    deletes: Deletes,
    /// Of the caller's runtime, and of all others, whose commands the client's thread sends.
    caller_gatherings: Gatherings,
    driver_gatherings: Gatherings,
    is_cluster_node: bool,
    /// Hash slots whose inbox subscription the server confirmed.
    slots: Mutex<HashSet<u16>>,
    /// Aborted with the connections: the RESP2 push connection, and the task that opens the caller connection.
    tasks: Mutex<TaskGroup>,
}

impl Connections {
    pub(super) fn new(
        driver_conn: MultiplexedConnection,
        status: Arc<ConnectionStatus>,
        caller: Option<Id>,
        dial: (Dial, bool),
        facts: ServerFacts,
    ) -> Self {
        Self {
            driver_conn,
            status,
            caller_conn: Mutex::new(None),
            caller,
            replica_conn: tokio::sync::Mutex::new(None),
            dial,
            run_id: facts.run_id.unwrap_or_default().into(),
            deletes: Deletes::new(facts.delete),
            caller_gatherings: Gatherings::default(),
            driver_gatherings: Gatherings::default(),
            is_cluster_node: facts.is_cluster_node,
            slots: Mutex::new(HashSet::new()),
            tasks: Mutex::default(),
        }
    }

    /// Takes ownership of tasks that end with the connections.
    pub(super) fn own(&self, tasks: TaskGroup) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    pub(super) fn run_id(&self) -> &Arc<str> {
        &self.run_id
    }

    /// Whether the server is a node of a cluster. Unknown if the user may not ask.
    pub(super) fn is_cluster_node(&self) -> bool {
        self.is_cluster_node
    }

    /// How this server releases a plain lease without a script.
    pub(super) fn deletes(&self) -> &Deletes {
        &self.deletes
    }

    /// The commands of this runtime that wait to be sent together. Those of one runtime do not depend on another one, which may be
    /// blocked, or not run.
    pub(super) fn gatherings(&self) -> &Gatherings {
        if self.is_callers_runtime() { &self.caller_gatherings } else { &self.driver_gatherings }
    }

    fn is_callers_runtime(&self) -> bool {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        here.is_some() && here == self.caller
    }

    /// A client for a further connection to the same server.
    pub(super) async fn client(&self) -> Result<redis::Client, RedisError> {
        let (dial, is_resp2) = &self.dial;
        dial.client(*is_resp2).await
    }

    pub(super) fn driver_conn(&self) -> MultiplexedConnection {
        self.driver_conn.clone()
    }

    /// The caller connection, if this runs on its runtime. From elsewhere it saves nothing, and that runtime may be idle.
    pub(super) fn caller_conn(&self) -> Option<Wire> {
        if self.is_callers_runtime() { self.caller_slot().clone() } else { None }
    }

    /// The caller connection if this runs on its runtime, otherwise the driver connection.
    pub(super) fn preferred_conn(&self) -> Wire {
        self.caller_conn().unwrap_or_else(|| self.driver_conn().into())
    }

    /// Drops the caller connection if this runs on its runtime, because it was lost or does not answer.
    pub(super) fn drop_preferred_conn(&self) {
        if self.caller_conn().is_some() {
            self.drop_caller_conn();
        }
    }

    pub(super) fn set_caller_conn(&self, connection: Wire) {
        *self.caller_slot() = Some(connection);
    }

    /// Drops a lost caller connection. The driver connection serves until there is a new one.
    pub(super) fn drop_caller_conn(&self) {
        *self.caller_slot() = None;
    }

    fn caller_slot(&self) -> MutexGuard<'_, Option<Wire>> {
        self.caller_conn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection for waiting on replicas. None if it leads to another server than the others; they are closed then.
    pub(super) async fn replica_conn(&self) -> Result<Option<MultiplexedConnection>, RedisError> {
        let mut replica_conn = self.replica_conn.lock().await;
        if let Some(connection) = &*replica_conn {
            return Ok(Some(connection.clone()));
        }
        let client = self.client().await?;
        let config = config().set_response_timeout(Some(REPLICA_RESPONSE_TIMEOUT));
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

    /// Whether the server confirmed the subscription to this slot's inbox.
    pub(super) fn is_subscribed(&self, slot: u16) -> bool {
        self.slots().contains(&slot)
    }

    pub(super) fn confirm_subscription(&self, slot: u16) {
        self.slots().insert(slot);
    }

    /// Whether the driver connection answers a PING.
    pub(super) async fn responds(&self) -> bool {
        let answer = self.driver_conn().send_packed_command(&redis::cmd("PING")).await;
        // An error reply is a response too.
        !answer.is_err_and(|error| error.code().is_none())
    }

    /// Whether the connections are closed: nothing that arrives over them counts.
    pub(super) fn is_closed(&self) -> bool {
        self.status.is_closed()
    }

    pub(super) fn close(&self) {
        self.status.close();
    }

    /// Starts accepting pushes.
    pub(super) fn accept_pushes(&self) {
        self.status.is_accepting.store(true, Ordering::SeqCst);
    }

    /// Closes the connections after `event`.
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
    connect::config().set_pipeline_buffer_size(BUFFER)
}

/// Handles unsolicited messages over the driver connection.
pub(super) fn push_handler(
    on_message: MessageHandler,
    emptied: ReconnectHandler,
    status: Arc<ConnectionStatus>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            // A server that loses a slot unsubscribes its channels. The redis crate takes this for a reply and then assigns
            // every later reply to the wrong command, so the connection must be closed.
            PushKind::SUnsubscribe | PushKind::Disconnection => status.close(),
            // No key is ever tracked, so this means FLUSHALL or FLUSHDB.
            PushKind::Invalidate if status.accepts_pushes() => emptied(&|_| true),
            PushKind::Message | PushKind::SMessage if status.accepts_pushes() => {
                if let [Value::BulkString(channel), Value::BulkString(message)] = info.data.as_slice() {
                    on_message(channel, message);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Delivers published messages over a RESP2 subscriber connection.
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

#[cfg(test)]
mod tests {
    use leasehold_testkit::Server;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    /// A command that a task of the caller's runtime takes along would wait for that runtime.
    #[test]
    fn commands_of_the_callers_runtime_are_gathered_by_themselves() {
        let server = Server::on_port();
        let client = redis::Client::open(server.url()).unwrap();
        let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
        let (caller, driver) = (runtime(), runtime());
        let connections = caller.block_on(async {
            let status = Arc::new(ConnectionStatus::new(Arc::new(Notify::new())));
            let own = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
            let caller = Some(Handle::current().id());
            let dial = (client.get_connection_info().clone().into(), true);
            Connections::new(own, status, caller, dial, ServerFacts::default())
        });
        let gatherings =
            |runtime: &Runtime| runtime.block_on(async { std::ptr::from_ref(connections.gatherings()) });
        assert_eq!(gatherings(&caller), gatherings(&caller));
        assert_ne!(gatherings(&caller), gatherings(&driver));
        assert_eq!(gatherings(&driver), gatherings(&runtime()));
    }
}
