//! The keys of other libraries' locks, for bridges: commands on them, and word of their changes.
//!
//! They have a connection of their own on the client's runtime, because the server tracks keys per connection: on the others an
//! invalidation means that the server was flushed. Without RESP3, or without the right to `CLIENT TRACKING`, no change is
//! reported, and those who wait for one poll.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use leasehold_core::Failure;
use leasehold_store::tasks::{TaskGroup, Tasks};
use leasehold_store::{
    BoxFuture, ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome,
    KeyWatch, MAX_DELAY, OpenError, StoreError, Watchers,
};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ConnectionAddr, PushInfo, PushKind, RedisError, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::connect::{Credentials, Dial};
use super::connections::{Connections, config, is_resp3};
use super::endpoint::{Endpoint, REDIRECTED};
use super::error::{CallError, store_error};
use super::handshake::run_id;
use super::nodes::Nodes;
use super::pushes::ConnectionStatus;
use super::send::script::{Exchange, Request};
use super::wire::Wire;
use crate::url::{Place, RedisUrl};

/// The keys of one server.
#[derive(Clone)]
pub(super) struct ServerKeys {
    pub(super) shared: Arc<Shared>,
    tasks: Tasks,
}

/// The server.
enum Source {
    /// The one that the store is connected to.
    Store(Arc<Nodes>),
    /// Another one.
    Other { dial: Box<Dial>, is_resp2: bool },
}

pub(super) struct Shared {
    source: Source,
    connection: Arc<Slot>,
    /// Whether the server reports changes of keys over that connection.
    is_tracking: AtomicBool,
    /// Another user of the other server redirects invalidations to that connection.
    is_redirected: Arc<AtomicBool>,
    /// There was a connection before.
    has_opened: AtomicBool,
    watchers: Arc<Watchers>,
}

type Slot = tokio::sync::Mutex<Option<Open>>;

/// The connection, and what it was opened beside.
struct Open {
    connection: MultiplexedConnection,
    /// The connections of the store; none at another server.
    beside: Option<Weak<Connections>>,
    status: Arc<Status>,
    /// Closes it when it is lost, and when the client ends, though a clone of the client may be kept.
    _end: TaskGroup,
}

/// Shared with the connection's push handler.
#[derive(Default)]
struct Status {
    /// The run id of a server of several that vote, unless the user may not ask for it.
    run_id: OnceLock<String>,
    is_lost: AtomicBool,
    lost: Notify,
    asked: Asked,
}

impl Status {
    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    /// Returns whether it was not lost before.
    fn lose(&self) -> bool {
        self.lost.notify_one();
        !self.is_lost.swap(true, Ordering::SeqCst)
    }
}

/// The most bytes of names that a server may still report.
const MAX_ASKED: u64 = 4 << 20;

/// How many bytes of names of keys the server may report over a connection, because it was asked to. What exceeds this was redirected
/// there by another user: in any amount, so that answers may come too late.
#[derive(Default)]
struct Asked(AtomicU64);

impl Asked {
    /// Notes the commands whose keys the server is asked to report.
    fn note(&self, calls: &[ForeignCall]) {
        let bytes = |words: &[String]| words.iter().map(|word| word.len() as u64).sum::<u64>();
        let tracked = calls.windows(2).map(|pair| match pair {
            [ForeignCall::Track, ForeignCall::Command(words)] => bytes(words),
            [ForeignCall::Track, ForeignCall::Script { keys, .. }] => bytes(keys),
            _ => 0,
        });
        let more = tracked.sum::<u64>();
        let add = |asked: u64| Some(asked.saturating_add(more).min(MAX_ASKED));
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add);
    }

    /// Takes account of reported names. Returns whether the server was asked for so many.
    fn covers(&self, names: &[Value]) -> bool {
        let bytes = |name: &Value| if let Value::BulkString(name) = name { name.len() as u64 } else { 0 };
        let reported = names.iter().map(bytes).sum::<u64>();
        let take = |asked: u64| asked.checked_sub(reported);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }
}

/// Is dropped with the tasks of the client.
struct CloseAtEnd {
    slot: Weak<Slot>,
    status: Arc<Status>,
}

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        let Some(slot) = self.slot.upgrade() else { return };
        // If it is in use, a task of the client is about to replace it, and ends too.
        if let Ok(mut slot) = slot.try_lock()
            && slot.as_ref().is_some_and(|open| Arc::ptr_eq(&open.status, &self.status))
        {
            *slot = None;
        }
    }
}

impl ServerKeys {
    pub(super) fn new(nodes: Arc<Nodes>, tasks: Tasks) -> Self {
        Self::of(Source::Store(nodes), tasks, Arc::default())
    }

    /// The keys of another server. Those who wait for its changes are among these.
    pub(super) fn at(url: &RedisUrl, tasks: Tasks, watchers: Arc<Watchers>) -> Result<Self, OpenError> {
        let credentials = Credentials::new(&url.login, url.database, url.tls.as_ref())?;
        let dial = match &url.place {
            Place::Server(host) => credentials.at(host)?,
            Place::Socket(path) => credentials.at_addr(ConnectionAddr::Unix(path.clone()))?,
            Place::Sentinels { .. } | Place::Cluster(_) => {
                return Err(OpenError::invalid(format!("{url} is not the address of one server")));
            }
        };
        let source = Source::Other { dial: Box::new(dial), is_resp2: url.is_resp2 };
        Ok(Self::of(source, tasks, watchers))
    }

    fn of(source: Source, tasks: Tasks, watchers: Arc<Watchers>) -> Self {
        let shared = Shared {
            source,
            connection: Arc::default(),
            is_tracking: AtomicBool::default(),
            is_redirected: Arc::default(),
            has_opened: AtomicBool::default(),
            watchers,
        };
        let shared = Arc::new(shared);
        Self { shared, tasks }
    }
}

impl ForeignKeys for ServerKeys {
    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn run(&self, calls: Vec<ForeignCall>) -> BoxFuture<Result<ForeignOutcome, StoreError>> {
        let (shared, until) = (self.shared.clone(), Instant::now() + MAX_DELAY);
        let running = async move {
            let Sent { answers, .. } = shared.send(&calls, until).await?;
            Ok(ForeignOutcome { is_complete: answers.iter().all(Result::is_ok), answers })
        };
        if self.tasks.is_current() {
            return Box::pin(running);
        }
        let task = self.tasks.start(running);
        Box::pin(async move { task.await.unwrap_or_else(|_| Err(StoreError::runtime_ended())) })
    }

    fn is_tracking(&self) -> bool {
        self.shared.is_tracking.load(Ordering::SeqCst)
    }

    fn watch(&self, keys: &[String]) -> KeyWatch {
        KeyWatch::new(&self.shared.watchers, keys)
    }
}

/// What a server has answered.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) answers: ForeignAnswers,
    /// Of a server of several that vote.
    pub(super) run_id: Option<String>,
}

impl Shared {
    /// Runs commands in order, on the runtime of the client's thread. A pipeline in which the server did not know a script is sent again as a whole.
    /// Nothing is sent after `until`: the caller may have given up, and counts on what it has sent to have expired by a certain time.
    pub(super) async fn send(
        self: &Arc<Self>,
        calls: &[ForeignCall],
        until: Instant,
    ) -> Result<Sent, StoreError> {
        // A connection that takes longer is there for the commands after these.
        let shared = self.clone();
        let connecting = Tasks::current().start(async move { shared.connection(until).await });
        let connected = timeout_at(until, connecting).await.map_err(|_| too_slow())?;
        let (connection, status) = connected.unwrap_or_else(|_| Err(StoreError::runtime_ended()))?;
        if Instant::now() > until {
            return Err(too_slow());
        }
        let mut wire = Wire::Limited(connection);
        let mut exchange = Exchange::default();
        // A command that asks for a report of keys goes before the one that reads them.
        calls.iter().for_each(|call| exchange.push(0, request(call)));
        status.asked.note(calls);
        exchange.send(&mut wire, false).await;
        if exchange.is_pending() {
            if Instant::now() > until {
                return Err(StoreError::new(Failure::Unknown, "the server's answer took too long"));
            }
            status.asked.note(calls);
            exchange.send(&mut wire, false).await;
        }
        let mut answers: Vec<_> =
            exchange.into_replies().into_iter().map(|reply| reply.and_then(Value::extract_error)).collect();
        for (call, answer) in calls.iter().zip(&mut answers) {
            if matches!((call, &*answer), (ForeignCall::Track, Err(error)) if !error.is_unrecoverable_error())
            {
                *answer = Ok(Value::Nil);
            }
        }
        for error in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            match CallError::from(error) {
                failed @ (CallError::ConnectionLost(_) | CallError::Timeout(_)) => {
                    self.drop_connection(&status);
                    return Err(failed.into());
                }
                failed @ CallError::ReadOnly(_) => {
                    if let Some(endpoint) = self.endpoint() {
                        endpoint.invalidate();
                    }
                    return Err(failed.into());
                }
                failed @ (CallError::Moved(_) | CallError::Ask(_) | CallError::TryAgain(_)) => {
                    return Err(failed.into());
                }
                _ => {}
            }
        }
        let outcome =
            |answer: Result<Value, RedisError>| answer.map(answer_of).map_err(|error| error_of(&error));
        let (answers, run_id) = (answers.into_iter().map(outcome).collect(), status.run_id.get().cloned());
        Ok(Sent { answers, run_id })
    }

    /// Notes that this connection is to be replaced. Another task may be connecting, which is not waited for.
    fn drop_connection(&self, status: &Status) {
        if status.lose() {
            self.watchers.notify_all();
        }
    }

    /// The endpoint of the store.
    fn endpoint(&self) -> Option<&Endpoint> {
        match &self.source {
            Source::Store(nodes) => match &**nodes {
                Nodes::Server { endpoint, .. } => Some(endpoint),
                Nodes::Cluster { .. } => None,
            },
            Source::Other { .. } => None,
        }
    }

    /// The connection to the server that the store is connected to now, or to the other one, and its status.
    async fn connection(&self, until: Instant) -> Result<(MultiplexedConnection, Arc<Status>), StoreError> {
        let mut slot = self.connection.lock().await;
        if Instant::now() > until {
            // Those that have waited for another one to connect do not connect one after the other.
            return Err(too_slow());
        }
        let beside = match (self.endpoint(), &self.source) {
            (Some(endpoint), _) => Some(endpoint.connections().await?),
            (None, Source::Store(_)) => return Err(no_cluster()),
            (None, Source::Other { .. }) => None,
        };
        let is_beside = |open: &Open| match (&open.beside, &beside) {
            (Some(known), Some(beside)) => known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, beside)),
            (known, beside) => known.is_none() && beside.is_none(),
        };
        if let Some(open) = &*slot
            && !open.status.is_lost()
            && is_beside(open)
        {
            return Ok((open.connection.clone(), open.status.clone()));
        }
        let opened = match &beside {
            Some(beside) => match beside.client().await {
                Ok(client) => self.open(&client, Some(Arc::downgrade(beside))).await,
                Err(error) => Err(error),
            },
            None => self.open_other().await,
        };
        let opened = opened.map_err(|error| StoreError::from(CallError::from(&error)));
        let open = opened.map_err(|error| {
            let failure = error.failure.before_sending();
            error.known_as(failure)
        })?;
        let found = (open.connection.clone(), open.status.clone());
        *slot = Some(open);
        if self.has_opened.swap(true, Ordering::SeqCst) {
            // Changes between the two connections were missed.
            self.watchers.notify_all();
        }
        Ok(found)
    }

    async fn open_other(&self) -> Result<Open, RedisError> {
        let Source::Other { dial, is_resp2 } = &self.source else {
            return Err((redis::ErrorKind::Client, "the store has its own connection").into());
        };
        let client = dial.client(*is_resp2 || self.is_redirected.load(Ordering::SeqCst)).await?;
        self.open(&client, None).await
    }

    async fn open(
        &self,
        client: &redis::Client,
        beside: Option<Weak<Connections>>,
    ) -> Result<Open, RedisError> {
        let status = Arc::<Status>::default();
        let has_pushes = is_resp3(client);
        let mut settings = config();
        if has_pushes {
            let pushes = Pushes {
                watchers: self.watchers.clone(),
                status: status.clone(),
                is_redirected: self.is_redirected.clone(),
                beside: beside.as_ref().and_then(Weak::upgrade).map(|beside| beside.status().clone()),
            };
            settings = settings.set_push_sender(move |info| pushes.handle(&info));
        }
        let mut connection = client.get_multiplexed_async_connection_with_config(&settings).await?;
        if let Some(beside) = beside.as_ref().and_then(Weak::upgrade)
            && !beside.lead_to_server_of(&mut connection).await?
        {
            // The address leads to another server now.
            beside.close();
            return Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
        }
        if matches!(self.source, Source::Other { .. })
            && let Some(run_id) = run_id(&mut connection).await?
        {
            let _ = status.run_id.set(run_id);
        }
        let mut is_tracking = false;
        if has_pushes {
            let mut track = redis::cmd("CLIENT");
            track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
            is_tracking = match track.query_async::<Value>(&mut connection).await {
                Ok(_) => true,
                Err(error) if error.code().is_some() => false,
                Err(error) => return Err(error),
            };
        }
        self.is_tracking.store(is_tracking, Ordering::SeqCst);
        let mut end = TaskGroup::default();
        let close = CloseAtEnd { slot: Arc::downgrade(&self.connection), status: status.clone() };
        end.spawn(async move { close.status.lost.notified().await });
        Ok(Open { connection, beside, status, _end: end })
    }
}

fn too_slow() -> StoreError {
    StoreError::new(Failure::NotSent, "connecting took too long")
}

fn request(call: &ForeignCall) -> Request<'_> {
    match call {
        ForeignCall::Command(words) => {
            let mut command = Cmd::new();
            command.arg(words);
            Request::Command(command)
        }
        ForeignCall::Track => Request::Command(redis::cmd("CLIENT").arg("CACHING").arg("YES").to_owned()),
        ForeignCall::Script { script, keys, arguments } => Request::Foreign { script, keys, arguments },
    }
}

fn answer_of(value: Value) -> ForeignAnswer {
    match value {
        Value::Nil => ForeignAnswer::Nil,
        Value::Okay => ForeignAnswer::Okay,
        Value::SimpleString(status) if status == "OK" => ForeignAnswer::Okay,
        Value::Int(number) => ForeignAnswer::Int(number),
        Value::BulkString(bytes) => ForeignAnswer::Bytes(bytes),
        Value::Array(parts) => ForeignAnswer::List(parts.into_iter().map(answer_of).collect()),
        Value::Map(pairs) => {
            let parts = pairs.into_iter().flat_map(|(key, value)| [key, value]);
            ForeignAnswer::List(parts.map(answer_of).collect())
        }
        _ => ForeignAnswer::Other,
    }
}

fn error_of(error: &RedisError) -> ForeignError {
    let is_other_type = error.code() == Some("WRONGTYPE") || error.to_string().contains("WRONGTYPE");
    if is_other_type {
        ForeignError::OtherType(store_error(error))
    } else {
        ForeignError::Failed(store_error(error))
    }
}

/// The error for a cluster.
pub(super) fn no_cluster() -> StoreError {
    StoreError::new(
        Failure::NotSent,
        "a lock on a cluster can't be bridged: use the server that has the other library's keys",
    )
}

/// Handles what arrives over the connection unasked.
struct Pushes {
    watchers: Arc<Watchers>,
    status: Arc<Status>,
    is_redirected: Arc<AtomicBool>,
    /// Of the connections of the store; none at another server.
    beside: Option<Arc<ConnectionStatus>>,
}

impl Pushes {
    fn handle(&self, info: &PushInfo) -> Result<(), Infallible> {
        match (&info.kind, info.data.first()) {
            (PushKind::Invalidate, Some(Value::Array(keys))) if self.status.asked.covers(keys) => {
                let keys = keys.iter().filter_map(|key| redis::from_redis_value_ref::<String>(key).ok());
                keys.for_each(|key| self.watchers.notify(&key));
            }
            // FLUSHALL or FLUSHDB.
            (PushKind::Invalidate, Some(Value::Nil)) => self.watchers.notify_all(),
            (PushKind::Invalidate, _) => {
                match &self.beside {
                    Some(beside) => beside.redirect(),
                    None if self.is_redirected.swap(true, Ordering::SeqCst) => {}
                    None => tracing::warn!("{REDIRECTED}"),
                }
                self.lose();
            }
            (PushKind::Disconnection, _) => self.lose(),
            _ => {}
        }
        Ok(())
    }

    fn lose(&self) {
        self.status.lose();
        self.watchers.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn call(words: &[&str]) -> ForeignCall {
        ForeignCall::Command(words.iter().map(|word| (*word).to_owned()).collect())
    }

    #[tokio::test]
    async fn command_is_not_sent_after_the_attempt_may_have_ended() {
        let server = leasehold_testkit::Server::on_socket();
        let url = RedisUrl::of_node(&server.url()).unwrap();
        let keys = ServerKeys::at(&url, Tasks::current(), Arc::default()).unwrap();
        let (now, take) = (Instant::now(), [call(&["SET", "jobs", "holder"])]);
        let late = keys.shared.send(&take, now - Duration::from_millis(1)).await.unwrap_err();
        assert_eq!(late.failure, Failure::NotSent);
        let count = async || {
            keys.shared.send(&[call(&["EXISTS", "jobs"])], now + MAX_DELAY).await.unwrap().answers.remove(0)
        };
        assert_eq!(count().await.unwrap(), ForeignAnswer::Int(0));
        keys.shared.send(&take, Instant::now() + MAX_DELAY).await.unwrap();
        assert_eq!(count().await.unwrap(), ForeignAnswer::Int(1));
    }
}
