//! The connection for the keys of other libraries: the server tracks keys per connection, and on the others an invalidation means that the
//! server was flushed. Without RESP3, or without the right to `CLIENT TRACKING`, no change is reported.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use leasehold_core::Failure;
use leasehold_store::tasks::TaskGroup;
use leasehold_store::{ForeignCall, StoreError, Watchers};
use redis::{PushInfo, PushKind, RedisError, Value};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::connect::Dial;
use crate::connections::{Connections, config};
use crate::endpoint::{Endpoint, REDIRECTED};
use crate::error::CallError;
use crate::handshake::run_id;
use crate::nodes::Nodes;
use crate::own_connection::OwnConnection;
use crate::pushes::ConnectionStatus;

/// The server.
pub(super) enum Source {
    /// The one that the store is connected to.
    Store(Arc<Nodes>),
    /// Another one.
    Other { dial: Box<Dial>, is_resp2: bool },
}

pub(crate) struct Shared {
    source: Source,
    connection: Arc<Slot>,
    /// Whether the server reports changes of keys over that connection.
    pub(super) is_tracking: AtomicBool,
    /// Another user of the other server redirects invalidations to that connection.
    is_redirected: Arc<AtomicBool>,
    /// There was a connection before.
    has_opened: AtomicBool,
    pub(super) watchers: Arc<Watchers>,
}

type Slot = tokio::sync::Mutex<Option<Open>>;

/// The connection, and what it was opened beside.
struct Open {
    connection: OwnConnection,
    /// The connections of the store; none at another server.
    beside: Option<Weak<Connections>>,
    status: Arc<Status>,
    /// Closes it when it is lost, and when the client ends, though a clone of the client may be kept.
    _end: TaskGroup,
}

/// Shared with the connection's push handler.
#[derive(Default)]
pub(super) struct Status {
    /// The run id of a server of several that vote, unless the user may not ask for it.
    pub(super) run_id: OnceLock<String>,
    is_lost: AtomicBool,
    lost: Notify,
    pub(super) asked: Asked,
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
pub(super) struct Asked(AtomicU64);

impl Asked {
    /// Notes the commands whose keys the server is asked to report.
    pub(super) fn note(&self, calls: &[ForeignCall]) {
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

impl Shared {
    pub(super) fn new(source: Source, watchers: Arc<Watchers>) -> Self {
        Self {
            source,
            connection: Arc::default(),
            is_tracking: AtomicBool::default(),
            is_redirected: Arc::default(),
            has_opened: AtomicBool::default(),
            watchers,
        }
    }

    /// Notes that this connection is to be replaced. Another task may be connecting, which is not waited for.
    pub(super) fn drop_connection(&self, status: &Status) {
        if status.lose() {
            self.watchers.notify_all();
        }
    }

    /// The endpoint of the store.
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.source {
            Source::Store(nodes) => match &**nodes {
                Nodes::Server { endpoint, .. } => Some(endpoint),
                Nodes::Cluster { .. } => None,
            },
            Source::Other { .. } => None,
        }
    }

    /// The connection to the server that the store is connected to now, or to the other one, and its status.
    pub(super) async fn connection(
        &self,
        until: Instant,
    ) -> Result<(OwnConnection, Arc<Status>), StoreError> {
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
            Some(beside) => {
                let (dial, is_resp2) = beside.dial();
                self.open(dial, is_resp2, Some(Arc::downgrade(beside))).await
            }
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
        self.open(dial, *is_resp2 || self.is_redirected.load(Ordering::SeqCst), None).await
    }

    async fn open(
        &self,
        dial: &Dial,
        is_resp2: bool,
        beside: Option<Weak<Connections>>,
    ) -> Result<Open, RedisError> {
        let status = Arc::<Status>::default();
        let mut settings = config();
        if !is_resp2 {
            let pushes = Pushes {
                watchers: self.watchers.clone(),
                status: status.clone(),
                is_redirected: self.is_redirected.clone(),
                beside: beside.as_ref().and_then(Weak::upgrade).map(|beside| beside.status().clone()),
            };
            settings = settings.set_push_sender(move |info| pushes.handle(&info));
        }
        let mut connection = dial.open(is_resp2, &settings).await?;
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
        if !is_resp2 {
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

pub(super) fn too_slow() -> StoreError {
    StoreError::new(Failure::NotSent, "connecting took too long")
}

/// The error for a cluster.
pub(crate) fn no_cluster() -> StoreError {
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
