//! Redis: one server, the master that Sentinels name, or a cluster.
//!
//! A command is one script (`leasehold_core::lua`), so an uncontended lock is one round trip, and so is a release. Waiters
//! hear of their grant through a channel, which on a server of its own is one per client, and in a cluster one per client
//! and hash slot.
//!
//! Commands go out from the caller's own task where the client was made in its runtime (`link`), and otherwise from the
//! client's thread; a caller's future then only waits for the answer, on whatever executor it runs. After a
//! connection was lost and made again, all waiters look again and all leases are renewed, since pushes may have been missed.

mod address;
mod calls;
mod cluster;
mod doctor;
mod durable;
mod express;
mod greeting;
mod keys;
mod lanes;
mod link;
mod route;
mod script;
mod sentinel;
pub(crate) mod steps;
mod trouble;

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{ClientId, Command, Failure, Resource};
use redis::ConnectionAddr;
use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;

use super::{Answered, Inbox, Pending, Rhythm, Store, StoreError};
use crate::error::{Error, ErrorKind};
use crate::examination::Examination;
use crate::url::{Place, RedisUrl};
use address::Credentials;
use cluster::Cluster;
use doctor::Address;
use express::CallersRuntime;
use link::{Goal, Link, Terms};
use script::{Channels, Dialect};
use sentinel::Sentinels;

/// How long an answer may take. Whether a command that is not answered took effect is unknown.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// How long connecting may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// How long a cluster is left to itself before its slots are asked for again.
const REFRESH_PAUSE: Duration = Duration::from_millis(200);

/// The same while nobody answers.
const REFRESH_SELDOM: Duration = Duration::from_secs(2);

/// How often they are asked for without a reason, where nodes don't tell whoever waits that they have lost a slot.
const REFRESH_ANYHOW: Duration = Duration::from_secs(10);

/// Looking again costs a server something, and pushes are seldom lost.
const RHYTHM: Rhythm = Rhythm { look_again: Duration::from_secs(25), entry_ttl: Duration::from_secs(80) };

pub(crate) struct Redis {
    nodes: Arc<Nodes>,
    /// For those who look at the servers on ways of their own.
    address: Arc<Address>,
    /// The client's own.
    runtime: Handle,
    caller: Option<Caller>,
    warnings: Arc<Mutex<BTreeSet<String>>>,
    /// Learns a cluster's slots anew.
    refresher: Option<tokio::task::AbortHandle>,
}

/// The runtime that the client was made in.
struct Caller {
    id: Id,
    runtime: Arc<CallersRuntime>,
    watch: tokio::task::AbortHandle,
}

impl Caller {
    fn new(handle: &Handle, runtime: Arc<CallersRuntime>) -> Self {
        let watch = runtime.watch(handle);
        Self { id: handle.id(), runtime, watch }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Where commands go.
enum Nodes {
    Server { link: Link },
    Cluster { cluster: Arc<Cluster>, dialect: Dialect, client: ClientId, runtime: Handle },
}

impl Redis {
    /// Connects for this client, and listens to its channel. Runs on the client's own runtime.
    pub(crate) async fn open(
        url: &RedisUrl,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let (warnings, callers) =
            (Arc::<Mutex<BTreeSet<String>>>::default(), Arc::<CallersRuntime>::default());
        let credentials = Credentials::new(&url.login, url.database, url.tls.as_ref())?;
        let terms = {
            let (warnings, caller, is_resp2) = (warnings.clone(), caller.clone(), url.is_resp2);
            let callers = callers.clone();
            move |channel| Terms {
                caller: caller.clone(),
                is_resp2,
                runtime: callers.clone(),
                ..terms(&inbox, channel, &warnings)
            }
        };
        let unavailable = |error| unavailable(url, &error);
        let server = async |goal| {
            let link = Link::new(goal, terms(Some(keys::inbox_of(client, None))));
            link.lanes().await.map_err(unavailable)?;
            Ok::<_, Error>(Nodes::Server { link })
        };
        let nodes = match &url.place {
            Place::Server(host) => server(Goal::Server(credentials.at(host)?)).await?,
            Place::Socket(path) => {
                let info = credentials.login_to(ConnectionAddr::Unix(path.clone()))?;
                server(Goal::Server(info)).await?
            }
            Place::Sentinels { hosts, service, login } => {
                let sentinels = Credentials::new(login, 0, url.tls.as_ref())?;
                let hosts = hosts.iter().map(|host| sentinels.at(host)).collect::<Result<_, _>>()?;
                let goal = Sentinels { hosts, service: service.clone(), credentials };
                server(Goal::Master(goal)).await?
            }
            Place::Cluster(seeds) => {
                let cluster = Cluster::open(credentials, seeds.clone(), Box::new(move || terms(None)));
                let cluster = Arc::new(cluster.await.map_err(unavailable)?);
                let channels = cluster.channels().await.map_err(unavailable)?;
                let dialect = Dialect { channels, is_cluster: true };
                Nodes::Cluster { cluster, dialect, client, runtime: Handle::current() }
            }
        };
        let refresher = match &nodes {
            Nodes::Server { .. } => None,
            Nodes::Cluster { cluster, dialect, .. } => {
                let (cluster, channels) = (cluster.clone(), dialect.channels);
                let at_the_latest = if channels == Channels::Plain { REFRESH_ANYHOW } else { Duration::MAX };
                Some(tokio::spawn(async move { cluster.keep_fresh(at_the_latest).await }).abort_handle())
            }
        };
        let (runtime, caller) = (Handle::current(), caller.map(|caller| Caller::new(&caller, callers)));
        let address = Arc::new(Address::Url(Box::new(url.clone())));
        Ok(Arc::new(Self { nodes: Arc::new(nodes), address, runtime, caller, warnings, refresher }))
    }

    /// As `open`, where the caller knows how to connect.
    pub(crate) async fn open_own(
        server: &redis::Client,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let (warnings, callers) =
            (Arc::<Mutex<BTreeSet<String>>>::default(), Arc::<CallersRuntime>::default());
        let info = server.get_connection_info().clone();
        let address = Arc::new(Address::Own(Box::new(info.clone())));
        let shown = info.addr().to_string();
        let terms = terms(&inbox, Some(keys::inbox_of(client, None)), &warnings);
        let terms = Terms { caller: caller.clone(), runtime: callers.clone(), ..terms };
        let link = Link::new(Goal::Server(info), terms);
        link.lanes().await.map_err(|error| unavailable(&shown, &error))?;
        let (nodes, runtime) = (Arc::new(Nodes::Server { link }), Handle::current());
        let caller = caller.map(|caller| Caller::new(&caller, callers));
        Ok(Arc::new(Self { nodes, address, runtime, caller, warnings, refresher: None }))
    }

    /// Does this where timers and sockets work: in the caller's own task, or else on the client's thread. The answer is
    /// waited for on any executor.
    fn perform<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        otherwise: impl Fn() -> T + Send + 'static,
    ) -> Pending<T> {
        let caller = self.caller.as_ref().map(|caller| (caller.id, caller.runtime.clone()));
        let is_there = move || {
            let here = Handle::try_current().ok().map(|handle| handle.id());
            caller.as_ref().is_some_and(|(id, runtime)| here == Some(*id) && runtime.is_usable())
        };
        if is_there() {
            let mut work = Box::pin(work);
            // A future may be moved to another executor half way, or its runtime be shut down: it would panic.
            return Box::pin(poll_fn(move |context| {
                if is_there() { work.as_mut().poll(context) } else { Poll::Ready(otherwise()) }
            }));
        }
        let (tell, told) = oneshot::channel();
        self.runtime.spawn(async move {
            // Nobody listens any more if the caller's future was dropped.
            let _ = tell.send(work.await);
        });
        Box::pin(async move { told.await.unwrap_or_else(|_| otherwise()) })
    }
}

fn unavailable(store: &impl std::fmt::Display, error: &StoreError) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{store}: {}", error.message))
}

/// What a link is to do with what it hears, and whom to tell.
fn terms(inbox: &Weak<dyn Inbox>, channel: Option<String>, warnings: &Arc<Mutex<BTreeSet<String>>>) -> Terms {
    let (hearing, renewing, warnings) = (inbox.clone(), inbox.clone(), warnings.clone());
    Terms {
        channel,
        hear: Arc::new(move |_, message| {
            let Some(inbox) = hearing.upgrade() else { return };
            match script::push(message) {
                Some(push) => inbox.deliver(push),
                None => tracing::warn!("something unknown arrived"),
            }
        }),
        renewed: Arc::new(move |concerns| {
            if let Some(inbox) = renewing.upgrade() {
                inbox.reconnected(concerns);
            }
        }),
        missed: Arc::new(|| ()),
        warn: Arc::new(move |warning| {
            let is_new = warnings.lock().unwrap_or_else(PoisonError::into_inner).insert(warning.clone());
            if is_new {
                tracing::warn!("{warning}");
            }
        }),
        caller: None,
        is_resp2: false,
        runtime: Arc::default(),
    }
}

impl Store for Redis {
    fn call_now(&self, _resource: &Resource, _command: &Command) -> Option<Answered> {
        None
    }

    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> Pending<Vec<Answered>> {
        self.call_durably(batch, 0)
    }

    fn call_durably(&self, batch: Vec<(Arc<Resource>, Command)>, replicas: u32) -> Pending<Vec<Answered>> {
        let (nodes, count) = (self.nodes.clone(), batch.len());
        let work = async move { nodes.run(&batch, replicas).await };
        self.perform(work, move || (0..count).map(|_| Err(ended())).collect())
    }

    fn has_replicas(&self) -> bool {
        true
    }

    fn list(&self) -> Pending<Result<Vec<Resource>, StoreError>> {
        let nodes = self.nodes.clone();
        self.perform(async move { nodes.list().await }, || Err(ended()))
    }

    fn rhythm(&self) -> Rhythm {
        RHYTHM
    }

    fn shard(&self, resource: &Resource) -> u64 {
        let Nodes::Cluster { cluster, .. } = &*self.nodes else { return 0 };
        let mut hasher = DefaultHasher::new();
        cluster.master_of(keys::slot_of(resource)).hash(&mut hasher);
        hasher.finish()
    }

    fn examine(&self) -> Pending<Result<Examination, StoreError>> {
        let (nodes, address) = (self.nodes.clone(), self.address.clone());
        self.perform(async move { doctor::examine(&nodes, &address).await }, || Err(ended()))
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Some(refresher) = &self.refresher {
            refresher.abort();
        }
    }
}

fn ended() -> StoreError {
    StoreError {
        failure: Failure::Unknown,
        message: "the runtime that the command was sent from has ended".to_owned(),
    }
}

fn uncovered() -> StoreError {
    StoreError {
        failure: Failure::NotSent,
        message: "no node has the lock's hash slot: the cluster is down, or not all of it is there yet"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests;
