//! The connections of one endpoint.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_redis_protocol::{Channels, ScriptVariant};
use leasehold_store::StoreError;
use leasehold_store::tasks::TaskGroup;
use redis::{AsyncConnectionConfig, RedisError};
use tokio::runtime::{Handle, Id};

use super::answer_times::{AnswerTimes, ShortestTtl};
use super::connect;
use super::connect::Dial;
use super::contended::Contended;
use super::deletes::Deletes;
use super::error::{Answered, CallError};
use super::handshake::ServerFacts;
use super::limits::{POLL_BEHIND_A_PROXY, POLLS_WITHOUT_PUSHES, REPLICA_TIMEOUT};
use super::own_connection::OwnConnection;
use super::pushes::{ConnectionStatus, Subscription, further_handler, responds};
use super::send::pipeline::{CallOptions, Mode, Role};
use super::send::{Coalescer, ReplicaQueue};
use super::wire::{Timed, Wire};

/// Max number of commands that wait to be written.
const BUFFER: usize = 1_024;

/// The commands of one runtime that wait to be sent together. They do not depend on another runtime, which may be blocked, or not run.
#[derive(Default)]
struct Batches {
    coalescer: Coalescer,
    /// Those that wait for replicas, and their connection, which is opened on first use.
    replica_queue: ReplicaQueue,
    replica_conn: tokio::sync::Mutex<Option<OwnConnection>>,
}

/// The connections to one server.
pub(super) struct Connections {
    driver_conn: OwnConnection,
    status: Arc<ConnectionStatus>,
    answer_times: Arc<AnswerTimes>,
    caller_conn: Mutex<Option<Wire>>,
    caller: Option<Id>,
    /// For further connections to the same server.
    dial: (Dial, bool),
    /// The server's run id; empty if the user may not ask.
    run_id: Arc<str>,
    deletes: Deletes,
    contended: Contended,
    /// Of the caller's runtime.
    by_caller: Batches,
    /// Of all others, whose commands the client's thread sends.
    by_driver: Batches,
    is_cluster_node: bool,
    /// Something restricts what scripts may do.
    is_restricted: bool,
    /// What was published has not arrived.
    are_pushes_lost: AtomicBool,
    channels: Option<Channels>,
    /// None while the subscriber connection is being opened.
    subscription: Mutex<Option<Arc<Subscription>>>,
    /// Aborted with the connections: those that keep the subscriber and the caller connection open.
    tasks: Mutex<TaskGroup>,
    /// Why they were closed, if the server is no master.
    refusal: OnceLock<StoreError>,
}

impl Connections {
    pub(super) fn new(
        driver_conn: OwnConnection,
        status: Arc<ConnectionStatus>,
        caller: Option<Id>,
        dial: (Dial, bool),
        facts: ServerFacts,
    ) -> Self {
        Self {
            driver_conn,
            status,
            answer_times: Arc::new(AnswerTimes::new(facts.answered_in)),
            caller_conn: Mutex::new(None),
            caller,
            dial,
            run_id: facts.run_id.unwrap_or_default().into(),
            deletes: Deletes::new(facts.delete),
            contended: Contended::default(),
            by_caller: Batches::default(),
            by_driver: Batches::default(),
            is_cluster_node: facts.is_cluster_node,
            is_restricted: facts.is_restricted,
            are_pushes_lost: AtomicBool::new(false),
            channels: facts.channels,
            subscription: Mutex::default(),
            tasks: Mutex::default(),
            refusal: OnceLock::new(),
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

    /// Whether something restricts what scripts may do: a proxy, of which each connection may lead to another server.
    pub(super) fn is_restricted(&self) -> bool {
        self.is_restricted
    }

    pub(super) fn are_pushes_lost(&self) -> bool {
        self.are_pushes_lost.load(Ordering::Relaxed) || self.subscription().is_none()
    }

    /// Notes whether what is published arrives. Returns what was noted before.
    pub(super) fn set_pushes_lost(&self, are_lost: bool) -> bool {
        self.are_pushes_lost.swap(are_lost, Ordering::Relaxed)
    }

    /// How long a waiter may wait at most before it looks again, where a push may be lost: the head of the queue, and another one.
    pub(super) fn longest_waits(&self) -> Option<[Duration; 2]> {
        self.is_restricted
            .then(|| if self.are_pushes_lost() { POLLS_WITHOUT_PUSHES } else { [POLL_BEHIND_A_PROXY; 2] })
    }

    /// The channels of the inboxes of hash slots at this node of a cluster; none at another server.
    pub(super) fn channels(&self) -> Option<Channels> {
        self.channels
    }

    /// How calls are encoded for this server.
    pub(super) fn options(&self, role: Role, mode: Mode) -> CallOptions<'_> {
        let variant = match (role.variant, self.channels) {
            // The node may have another version than the one that was asked when the client was opened.
            (ScriptVariant::Cluster(_), Some(channels)) => ScriptVariant::Cluster(channels),
            (ScriptVariant::Server, _) if self.is_restricted => ScriptVariant::Restricted,
            (variant, _) => variant,
        };
        // A voter's scripts have other first lines.
        let contended = (!variant.is_voter()).then_some(&self.contended);
        let role = Role { variant, ..role };
        CallOptions { role, mode, run_id: &self.run_id, deletes: &self.deletes, contended }
    }

    /// Those of this runtime.
    fn batches(&self) -> &Batches {
        if self.is_callers_runtime() { &self.by_caller } else { &self.by_driver }
    }

    pub(super) fn coalescer(&self) -> &Coalescer {
        &self.batches().coalescer
    }

    pub(super) fn replica_queue(&self) -> &ReplicaQueue {
        &self.batches().replica_queue
    }

    fn is_callers_runtime(&self) -> bool {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        here.is_some() && here == self.caller
    }

    /// For a further connection to the same server, and whether it uses RESP2.
    pub(super) fn dial(&self) -> (&Dial, bool) {
        let (dial, is_resp2) = &self.dial;
        (dial, *is_resp2 || self.status.is_redirected())
    }

    /// The user that logs in.
    pub(super) fn user(&self) -> Option<String> {
        self.dial.0.user()
    }

    /// Where they lead to.
    pub(super) fn address(&self) -> String {
        self.dial.0.addr().to_string()
    }

    pub(super) fn driver_conn(&self) -> OwnConnection {
        self.driver_conn.clone()
    }

    /// No reply is waited for so long that a lease of the client would expire meanwhile.
    pub(super) fn set_shortest_ttl(&self, shortest_ttl: ShortestTtl) {
        self.answer_times.set_shortest_ttl(shortest_ttl);
    }

    /// How long a reply is waited for.
    pub(super) fn answer_limit(&self) -> Duration {
        self.answer_times.limit()
    }

    /// The driver connection, for commands.
    pub(super) fn driver_wire(&self) -> Wire {
        Wire::Own(self.timed(self.driver_conn()))
    }

    /// This connection of ours to the server.
    pub(super) fn timed(&self, connection: OwnConnection) -> Timed {
        Timed::new(connection, self.answer_times.clone())
    }

    /// The caller connection, if this runs on its runtime. From elsewhere it saves nothing, and that runtime may be idle.
    pub(super) fn caller_conn(&self) -> Option<Wire> {
        if self.is_callers_runtime() { self.caller_slot().clone() } else { None }
    }

    /// The caller connection if this runs on its runtime, otherwise the driver connection.
    pub(super) fn preferred_conn(&self) -> Wire {
        self.caller_conn().unwrap_or_else(|| self.driver_wire())
    }

    /// Drops the caller connection if this runs on its runtime, and one of these answers shows that it was lost or does not answer.
    pub(super) fn drop_if_suspect(&self, answers: &[Answered]) {
        if answers.iter().any(CallError::is_of_connection) && self.is_callers_runtime() {
            self.drop_caller_conn();
        }
    }

    pub(super) fn set_caller_conn(&self, connection: OwnConnection) {
        self.set_caller_wire(Wire::Own(self.timed(connection)));
    }

    /// The same with a connection of the program's.
    pub(super) fn set_caller_wire(&self, connection: Wire) {
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
    pub(super) async fn open_replica_conn(&self) -> Result<Option<OwnConnection>, RedisError> {
        let mut replica_conn = self.batches().replica_conn.lock().await;
        if let Some(connection) = &*replica_conn {
            return Ok(Some(connection.clone()));
        }
        let (dial, is_resp2) = self.dial();
        let mut config = config().set_response_timeout(Some(REPLICA_TIMEOUT + self.answer_limit()));
        if !is_resp2 {
            config = config.set_push_sender(further_handler(self.status.clone(), || ()));
        }
        let mut connection = dial.open(is_resp2, &config).await?;
        if !self.lead_to_server_of(&mut connection).await? {
            self.close();
            return Ok(None);
        }
        *replica_conn = Some(connection.clone());
        Ok(Some(connection))
    }

    pub(super) async fn drop_replica_conn(&self) {
        *self.batches().replica_conn.lock().await = None;
    }

    /// The open subscriber connection. Without it waiters ask, and no push arrives.
    pub(super) fn subscription(&self) -> Option<Arc<Subscription>> {
        self.subscription.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_subscription(&self, subscription: Option<Arc<Subscription>>) {
        *self.subscription.lock().unwrap_or_else(PoisonError::into_inner) = subscription;
    }

    /// Whether the driver connection answers.
    pub(super) async fn responds(&self) -> bool {
        responds(&mut self.driver_wire()).await
    }

    /// Whether the connections are closed: nothing that arrives over them counts.
    pub(super) fn is_closed(&self) -> bool {
        self.status.is_closed()
    }

    pub(super) fn close(&self) {
        self.status.close();
    }

    /// Closes them because the server is no master.
    pub(super) fn close_refused(&self, error: StoreError) {
        let _ = self.refusal.set(error);
        self.close();
    }

    pub(super) fn refusal(&self) -> Option<&StoreError> {
        self.refusal.get()
    }

    /// Status, for the handlers of pushes of further connections.
    pub(super) fn status(&self) -> &Arc<ConnectionStatus> {
        &self.status
    }

    /// Starts accepting pushes.
    pub(super) fn accept_pushes(&self) {
        self.status.accept_pushes();
        if let Some(subscription) = self.subscription() {
            subscription.accept_pushes();
        }
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
            let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
            let own = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
            let caller = Some(Handle::current().id());
            let dial = (client.get_connection_info().clone().into(), true);
            Connections::new(own.into(), status, caller, dial, ServerFacts::default())
        });
        let coalescer =
            |runtime: &Runtime| runtime.block_on(async { std::ptr::from_ref(connections.coalescer()) });
        assert_eq!(coalescer(&caller), coalescer(&caller));
        assert_ne!(coalescer(&caller), coalescer(&driver));
        assert_eq!(coalescer(&driver), coalescer(&runtime()));
    }
}
