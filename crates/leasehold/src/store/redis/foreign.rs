//! The keys of other libraries' locks, for bridges: commands on them, and word of their changes.
//!
//! They have a connection of their own on the client's runtime, because the server tracks keys per connection: on the others an
//! invalidation means that the server was flushed. Without RESP3, or without the right to `CLIENT TRACKING`, no change is
//! reported, and those who wait for one poll.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use leasehold_core::Failure;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::connections::{Connections, config};
use super::error::{CallError, runtime_ended};
use super::nodes::Nodes;
use super::wire;
use crate::store::{BoxFuture, StoreError};

/// A script on one key of another library.
pub(crate) struct ForeignScript {
    text: &'static str,
    hash: OnceLock<String>,
}

impl ForeignScript {
    pub(crate) const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    fn hash(&self) -> &str {
        self.hash.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

/// One command.
pub(crate) enum ForeignCall {
    Command(Cmd),
    Script { script: &'static ForeignScript, key: String, arguments: Vec<String> },
}

impl ForeignCall {
    /// Asks the server to report the next change of the keys that the next command reads.
    pub(crate) fn track() -> Self {
        let mut command = redis::cmd("CLIENT");
        command.arg("CACHING").arg("YES");
        Self::Command(command)
    }

    /// `with_text`: the server does not know the script yet.
    fn encode(&self, with_text: bool) -> Cmd {
        match self {
            Self::Command(command) => command.clone(),
            Self::Script { script, key, arguments } => {
                let mut command = match with_text {
                    false => redis::cmd("EVALSHA").arg(script.hash()).to_owned(),
                    true => redis::cmd("EVAL").arg(script.text).to_owned(),
                };
                command.arg(1).arg(key).arg(arguments);
                command
            }
        }
    }
}

/// One result per command.
pub(crate) type ForeignAnswers = Vec<Result<Value, RedisError>>;

pub(crate) struct ForeignKeys {
    nodes: Arc<Nodes>,
    runtime: Handle,
    connection: tokio::sync::Mutex<Option<Open>>,
    watchers: Arc<Watchers>,
}

/// The connection, and what it was opened beside.
struct Open {
    connection: MultiplexedConnection,
    beside: Weak<Connections>,
    is_lost: Arc<AtomicBool>,
    is_tracking: bool,
}

/// Numbered registrations by key.
type Watching = BTreeMap<String, Vec<(u64, Arc<Notify>)>>;

/// The tasks that wait for a change of a key.
#[derive(Default)]
struct Watchers {
    by_key: Mutex<Watching>,
    next: AtomicU64,
}

impl ForeignKeys {
    pub(super) fn new(nodes: Arc<Nodes>, runtime: Handle) -> Self {
        Self { nodes, runtime, connection: tokio::sync::Mutex::default(), watchers: Arc::default() }
    }

    /// The runtime of the client's thread.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs commands in order, on the client's runtime. May be awaited on any executor. A pipeline in which the server did not
    /// know a script is sent again as a whole.
    pub(crate) fn run(
        self: &Arc<Self>,
        calls: Vec<ForeignCall>,
    ) -> BoxFuture<Result<ForeignAnswers, StoreError>> {
        if Handle::try_current().is_ok_and(|current| current.id() == self.runtime.id()) {
            let keys = self.clone();
            return Box::pin(async move { keys.send(&calls).await });
        }
        let (sender, receiver) = oneshot::channel();
        let keys = self.clone();
        self.runtime.spawn(async move {
            // The receiver is gone if the caller's future was dropped.
            let _ = sender.send(keys.send(&calls).await);
        });
        Box::pin(async move { receiver.await.unwrap_or_else(|_| Err(runtime_ended())) })
    }

    async fn send(&self, calls: &[ForeignCall]) -> Result<ForeignAnswers, StoreError> {
        let mut connection = self.connection().await?;
        let mut answers = pipeline(&mut connection, calls, false).await;
        if answers.iter().any(|answer| matches!(answer, Err(error) if is_noscript(error))) {
            answers = pipeline(&mut connection, calls, true).await;
        }
        for error in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            match CallError::from(error) {
                failed @ (CallError::ConnectionLost(_) | CallError::Timeout(_)) => {
                    self.drop_connection().await;
                    return Err(failed.into());
                }
                failed @ CallError::ReadOnly(_) => {
                    if let Nodes::Server { endpoint, .. } = &*self.nodes {
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
        Ok(answers)
    }

    /// Whether the server reports changes of keys.
    pub(crate) async fn is_tracking(&self) -> bool {
        self.connection.lock().await.as_ref().is_some_and(|open| open.is_tracking)
    }

    async fn drop_connection(&self) {
        *self.connection.lock().await = None;
        self.watchers.notify_all();
    }

    /// The connection to the server that the store is connected to now.
    async fn connection(&self) -> Result<MultiplexedConnection, StoreError> {
        let Nodes::Server { endpoint, .. } = &*self.nodes else { return Err(no_cluster()) };
        let mut slot = self.connection.lock().await;
        let beside = endpoint.connections().await?;
        if let Some(open) = &*slot
            && !open.is_lost.load(Ordering::SeqCst)
            && open.beside.upgrade().is_some_and(|known| Arc::ptr_eq(&known, &beside))
        {
            return Ok(open.connection.clone());
        }
        let opened = self.open(&beside).await.map_err(|error| StoreError::from(CallError::from(&error)));
        let open = opened.map_err(|error| StoreError { failure: Failure::NotSent, ..error })?;
        let connection = open.connection.clone();
        *slot = Some(open);
        Ok(connection)
    }

    async fn open(&self, beside: &Arc<Connections>) -> Result<Open, RedisError> {
        let is_lost = Arc::new(AtomicBool::new(false));
        let client = beside.client();
        let has_pushes =
            client.get_connection_info().redis_settings().protocol() == redis::ProtocolVersion::RESP3;
        let mut settings = config();
        if has_pushes {
            settings = settings.set_push_sender(push_handler(self.watchers.clone(), is_lost.clone()));
        }
        let mut connection = client.get_multiplexed_async_connection_with_config(&settings).await?;
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
        // Changes before this connection were missed.
        self.watchers.notify_all();
        Ok(Open { connection, beside: Arc::downgrade(beside), is_lost, is_tracking })
    }

    /// Lets a task wait for changes of a key.
    pub(crate) fn watch(&self, key: &str) -> KeyWatch {
        let (notify, number) = (Arc::new(Notify::new()), self.watchers.next.fetch_add(1, Ordering::Relaxed));
        self.watchers.by_key().entry(key.to_owned()).or_default().push((number, notify.clone()));
        KeyWatch { watchers: self.watchers.clone(), key: key.to_owned(), number, notify }
    }
}

async fn pipeline(
    connection: &mut MultiplexedConnection,
    calls: &[ForeignCall],
    with_text: bool,
) -> ForeignAnswers {
    let commands = calls.iter().map(|call| call.encode(with_text)).collect();
    let answers = wire::pipeline(connection, commands, false).await;
    answers.into_iter().map(|answer| answer.and_then(Value::extract_error)).collect()
}

fn is_noscript(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// The error for a cluster.
pub(super) fn no_cluster() -> StoreError {
    StoreError::new(
        Failure::NotSent,
        "a lock on a cluster can't be bridged: use the server that has the other library's keys",
    )
}

fn push_handler(
    watchers: Arc<Watchers>,
    is_lost: Arc<AtomicBool>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            PushKind::Invalidate => match info.data.first() {
                Some(Value::Array(keys)) => keys.iter().for_each(|key| watchers.notify(key)),
                // FLUSHALL or FLUSHDB.
                _ => watchers.notify_all(),
            },
            PushKind::Disconnection => {
                is_lost.store(true, Ordering::SeqCst);
                watchers.notify_all();
            }
            _ => {}
        }
        Ok(())
    }
}

impl Watchers {
    fn by_key(&self) -> MutexGuard<'_, Watching> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, key: &Value) {
        let Value::BulkString(key) = key else { return };
        let Ok(key) = std::str::from_utf8(key) else { return };
        let watching = self.by_key().get(key).cloned().unwrap_or_default();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }

    fn notify_all(&self) {
        let watching: Vec<_> = self.by_key().values().flatten().cloned().collect();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }
}

/// A task's registration for changes of a key. A change between two waits ends the next wait.
pub(crate) struct KeyWatch {
    watchers: Arc<Watchers>,
    key: String,
    number: u64,
    notify: Arc<Notify>,
}

impl KeyWatch {
    /// Waits until the key may have changed. Cancel safe.
    pub(crate) async fn changed(&self) {
        self.notify.notified().await;
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        let mut by_key = self.watchers.by_key();
        if let Some(watching) = by_key.get_mut(&self.key) {
            watching.retain(|(number, _)| *number != self.number);
            if watching.is_empty() {
                by_key.remove(&self.key);
            }
        }
    }
}
