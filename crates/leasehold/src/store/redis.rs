//! Redis: one server, the master that Sentinels name, or a cluster.
//!
//! A command is one script (`leasehold_core::lua`), so an uncontended lock is one round trip, and so is a release. Waiters
//! hear of their grant through a channel, which on a server of its own is one per client, and in a cluster one per client
//! and hash slot.
//!
//! Commands go out from the caller's own task where the client was made in its runtime (`link`), and otherwise from the
//! client's thread; a caller's future then only waits for the answer, on whatever executor it runs. After a
//! connection was lost and made again, all waiters look again and all leases are renewed, since pushes may have been missed.

mod caller_conn;
mod cluster;
mod codec;
mod connect;
mod connections;
mod dispatch;
mod doctor;
mod endpoint;
mod error;
mod exec;
mod handshake;
mod keys;
mod replicas;
mod sentinel;
pub(crate) mod steps;

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{Acquire, ClientId, Command, Failure, Resource, Token};
use redis::ConnectionAddr;
use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;

use super::{Answered, Inbox, Pending, Rhythm, Store, StoreError};
use crate::diagnostics::Diagnosis;
use crate::error::{Error, ErrorKind};
use crate::url::{Place, RedisUrl};
use caller_conn::CallersRuntime;
use cluster::Cluster;
use codec::{Channels, Dialect};
use connect::Credentials;
use doctor::Address;
pub(crate) use doctor::examine_voters;
use endpoint::{Goal, Link, Terms};
pub(crate) use keys::slot_of;
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
    /// Notices when that runtime ends.
    watch: Option<tokio::task::AbortHandle>,
    warnings: Arc<Mutex<BTreeSet<String>>>,
    /// Learns a cluster's slots anew.
    refresher: Option<tokio::task::AbortHandle>,
}

/// The runtime that the client was made in.
#[derive(Clone)]
struct Caller {
    id: Id,
    runtime: Arc<CallersRuntime>,
}

impl Caller {
    /// Whether this is a task of that runtime, from which commands may go out.
    fn is_here(&self) -> bool {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        here == Some(self.id) && self.runtime.is_usable()
    }
}

/// What one of several servers that vote does besides what all do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Voting {
    /// It abstains for this long, the longest ttl there is, after it may have forgotten what it granted.
    pub(crate) abstains_for: Option<Duration>,
}

/// Where commands go.
enum Nodes {
    Server {
        link: Link,
        /// Where several vote, and this is one of them.
        voting: Option<Voting>,
    },
    Cluster {
        cluster: Arc<Cluster>,
        dialect: Dialect,
        client: ClientId,
        runtime: Handle,
    },
}

impl Redis {
    /// Connects for this client, and listens to its channel. Runs on the client's own runtime.
    pub(crate) async fn open(
        url: &RedisUrl,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let opening = Opening::new(inbox, caller, url.is_resp2);
        let credentials = Credentials::new(&url.login, url.database, url.tls.as_ref())?;
        let unavailable = |error| unavailable(url, &error);
        let nodes = match &url.place {
            Place::Cluster(seeds) => {
                let terms = opening.terms();
                let cluster = Cluster::open(credentials, seeds.clone(), Box::new(move || terms(None)));
                let cluster = Arc::new(cluster.await.map_err(unavailable)?);
                let channels = cluster.channels().await.map_err(unavailable)?;
                let dialect = Dialect { channels, is_cluster: true, is_voting: false };
                Nodes::Cluster { cluster, dialect, client, runtime: Handle::current() }
            }
            _ => {
                let link = opening.link(goal(url, credentials)?, client);
                link.lanes().await.map_err(unavailable)?;
                Nodes::Server { link, voting: None }
            }
        };
        Ok(opening.finish(nodes, Address::Url(Box::new(url.clone()))))
    }

    /// One of several servers that vote, which need not be there yet. Runs on the client's own runtime.
    pub(crate) fn open_voter(
        url: &RedisUrl,
        voting: Voting,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let opening = Opening::new(inbox, caller, url.is_resp2);
        let credentials = Credentials::new(&url.login, url.database, url.tls.as_ref())?;
        let opening = Opening { is_voter: true, ..opening };
        let link = opening.link(goal(url, credentials)?, client);
        let nodes = Nodes::Server { link, voting: Some(voting) };
        Ok(opening.finish(nodes, Address::Url(Box::new(url.clone()))))
    }

    /// As `open`, where the caller knows how to connect.
    pub(crate) async fn open_own(
        server: &redis::Client,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let opening = Opening::new(inbox, caller, false);
        let info = server.get_connection_info().clone();
        let shown = info.addr().to_string();
        let link = opening.link(Goal::Server(info.clone()), client);
        link.lanes().await.map_err(|error| unavailable(&shown, &error))?;
        Ok(opening.finish(Nodes::Server { link, voting: None }, Address::Own(Box::new(info))))
    }

    /// Waits until it is known whether the server is there.
    pub(crate) async fn is_there(&self) -> Result<(), StoreError> {
        match &*self.nodes {
            Nodes::Server { link, .. } => link.lanes().await.map(drop),
            Nodes::Cluster { .. } => Ok(()),
        }
    }

    /// Whether it is there now.
    pub(crate) fn is_up(&self) -> bool {
        match &*self.nodes {
            Nodes::Server { link, .. } => link.lanes_now().is_some(),
            Nodes::Cluster { .. } => true,
        }
    }

    /// Which server this is, and which of its lives, if it is there and that may be asked.
    pub(crate) fn life(&self) -> Option<Arc<str>> {
        match &*self.nodes {
            Nodes::Server { link, .. } => {
                link.lanes_now().map(|lanes| lanes.life().clone()).filter(|life| !life.is_empty())
            }
            Nodes::Cluster { .. } => None,
        }
    }

    /// Whether commands of the caller's own task would go out from there.
    pub(crate) fn is_callers(&self) -> bool {
        self.caller.as_ref().is_some_and(Caller::is_here)
    }

    /// As `call`, of one of several servers that vote: no token below `floor` is given. It is for work that is performed
    /// already.
    pub(crate) async fn vote(
        &self,
        batch: &[(Arc<Resource>, Command)],
        floor: Option<Token>,
    ) -> Vec<Answered> {
        self.nodes.run(batch, 0, floor).await
    }

    /// Does this where timers and sockets work: in the caller's own task, or else on the client's thread. The answer is
    /// waited for on any executor.
    pub(crate) fn perform<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        otherwise: impl Fn() -> T + Send + 'static,
    ) -> Pending<T> {
        let caller = self.caller.clone();
        let is_there = move || caller.as_ref().is_some_and(Caller::is_here);
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

/// Where a server is that is one of its own, or the master of some.
fn goal(url: &RedisUrl, credentials: Credentials) -> Result<Goal, Error> {
    Ok(match &url.place {
        Place::Server(host) => Goal::Server(credentials.at(host)?),
        Place::Socket(path) => Goal::Server(credentials.login_to(ConnectionAddr::Unix(path.clone()))?),
        Place::Sentinels { hosts, service, login } => {
            let sentinels = Credentials::new(login, 0, url.tls.as_ref())?;
            let hosts = hosts.iter().map(|host| sentinels.at(host)).collect::<Result<_, _>>()?;
            Goal::Master(Sentinels { hosts, service: service.clone(), credentials })
        }
        Place::Cluster(_) => return Err(Error::new(ErrorKind::Invalid, "a cluster is not one server")),
    })
}

fn unavailable(store: &impl std::fmt::Display, error: &StoreError) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{store}: {}", error.message))
}

/// What every way to open a store begins and ends with.
struct Opening {
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
    callers: Arc<CallersRuntime>,
    is_resp2: bool,
    /// It is one of several servers that vote.
    is_voter: bool,
    warnings: Arc<Mutex<BTreeSet<String>>>,
}

impl Opening {
    fn new(inbox: Weak<dyn Inbox>, caller: Option<Handle>, is_resp2: bool) -> Self {
        let callers = Arc::default();
        Self { inbox, caller, callers, is_resp2, is_voter: false, warnings: Arc::default() }
    }

    fn link(&self, goal: Goal, client: ClientId) -> Link {
        Link::new(goal, (self.terms())(Some(keys::inbox_of(client, None))))
    }

    /// What a link is to do with what it hears, and whom to tell: by the channel that it subscribes to.
    fn terms(&self) -> impl Fn(Option<String>) -> Terms + Send + Sync + 'static {
        let (inbox, caller, callers) = (self.inbox.clone(), self.caller.clone(), self.callers.clone());
        let (warnings, is_resp2, is_voter) = (self.warnings.clone(), self.is_resp2, self.is_voter);
        move |channel| {
            let (hearing, renewing, warnings) = (inbox.clone(), inbox.clone(), warnings.clone());
            let holding = inbox.clone();
            Terms {
                channel,
                hear: Arc::new(move |_, message| {
                    let Some(inbox) = hearing.upgrade() else { return };
                    match codec::push(message) {
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
                at_stake: Arc::new(move || holding.upgrade().and_then(|inbox| inbox.shortest_ttl())),
                warn: Arc::new(move |warning| {
                    let is_new =
                        warnings.lock().unwrap_or_else(PoisonError::into_inner).insert(warning.clone());
                    if is_new {
                        tracing::warn!("{warning}");
                    }
                }),
                caller: caller.clone(),
                is_resp2,
                runtime: callers.clone(),
                is_voter,
            }
        }
    }

    fn finish(self, nodes: Nodes, address: Address) -> Arc<Redis> {
        let refresher = match &nodes {
            Nodes::Server { .. } => None,
            Nodes::Cluster { cluster, dialect, .. } => {
                let (cluster, channels) = (cluster.clone(), dialect.channels);
                let at_the_latest = if channels == Channels::Plain { REFRESH_ANYHOW } else { Duration::MAX };
                Some(tokio::spawn(async move { cluster.keep_fresh(at_the_latest).await }).abort_handle())
            }
        };
        let watch = self.caller.as_ref().map(|caller| self.callers.watch(caller));
        let caller = self.caller.map(|caller| Caller { id: caller.id(), runtime: self.callers });
        Arc::new(Redis {
            nodes: Arc::new(nodes),
            address: Arc::new(address),
            runtime: Handle::current(),
            caller,
            watch,
            warnings: self.warnings,
            refresher,
        })
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
        let work = async move { nodes.run(&batch, replicas, None).await };
        self.perform(work, move || (0..count).map(|_| Err(ended())).collect())
    }

    fn call_together(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<Pending<Vec<Answered>>> {
        if let Nodes::Cluster { .. } = &*self.nodes {
            let mut slots = attempts.iter().map(|(resource, _)| slot_of(resource));
            let first = slots.next();
            if slots.any(|slot| Some(slot) != first) {
                return None;
            }
        }
        let said = |(resource, acquire): &(Arc<Resource>, Arc<Acquire>)| {
            (resource.clone(), Command::Acquire(acquire.clone()))
        };
        let batch: Vec<_> = attempts.iter().map(said).collect();
        let (nodes, count) = (self.nodes.clone(), batch.len());
        let work = async move { nodes.run_together(&batch).await };
        Some(self.perform(work, move || (0..count).map(|_| Err(ended())).collect()))
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

    fn shard(&self, resource: &Resource, _command: &Command) -> u64 {
        let Nodes::Cluster { cluster, .. } = &*self.nodes else { return 0 };
        let mut hasher = DefaultHasher::new();
        cluster.master_of(slot_of(resource)).hash(&mut hasher);
        hasher.finish()
    }

    fn diagnose(&self) -> Pending<Result<Diagnosis, StoreError>> {
        let (nodes, address) = (self.nodes.clone(), self.address.clone());
        self.perform(async move { doctor::diagnose(&nodes, &address).await }, || Err(ended()))
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        for task in [&self.refresher, &self.watch].into_iter().flatten() {
            task.abort();
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
