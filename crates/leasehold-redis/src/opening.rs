//! Opens the store: over an address, as a quorum node, or with connections of the program.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use leasehold_core::ClientId;
use leasehold_redis_protocol::{ScriptVariant, decode_push, inbox_of};
use leasehold_store::credentials::CredentialCache;
use leasehold_store::reread::first_read;
use leasehold_store::tasks::{self, Tasks};
use leasehold_store::{Inbox, OpenError, StoreError};
use redis::ConnectionAddr;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::Redis;
use super::call_pool::CallPool;
use super::caller_conn::{Caller, CallerRuntime};
use super::client_record::ClientRecord;
use super::cluster::Cluster;
use super::connect::{Credentials, Dial};
use super::connections::Connections;
use super::doctor::Address;
use super::endpoint::{Endpoint, EndpointConfig, Target};
use super::foreign::ServerKeys;
use super::limits::ANSWER_TIMEOUT;
use super::nodes::{Nodes, Voting};
use super::sentinel::Sentinels;
use super::wire::{self, SharedConnection, Wire};
use crate::restriction::Restriction;
use crate::url::{Host, Place, RedisUrl};

/// The log target of what `Client::warnings` has, too.
const CLIENT_WARNING: &str = "leasehold::warning";

impl Redis {
    /// Connects for this client and subscribes to its inbox. Runs on the runtime of the client's thread.
    ///
    /// # Errors
    ///
    /// The server is not reached, or refuses.
    pub async fn open(
        url: &RedisUrl,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, OpenError> {
        let opening = Opening::at(url, client, inbox, caller);
        let (credentials, target) = Self::read_files(url).await?;
        let unavailable = |error| unavailable(url, &error);
        let nodes = match &url.place {
            Place::Cluster(seeds) => {
                opening.cluster(credentials, seeds.clone(), client).await.map_err(unavailable)?
            }
            place => {
                let endpoint = opening.endpoint(target?, client);
                let connections = endpoint.connections().await.map_err(unavailable)?;
                match place {
                    // The server decides whether it is a cluster, and not the address.
                    Place::Server(host)
                        if connections.is_cluster_node() && !url.is_resp2 && !connections.is_restricted() =>
                    {
                        let seeds = vec![host.clone()];
                        opening.cluster(credentials.of_cluster(), seeds, client).await.map_err(unavailable)?
                    }
                    _ => opening.server(endpoint, &connections),
                }
            }
        };
        Ok(opening.finish(nodes, Address::Url(Box::new(url.clone())), url.credentials().cloned()))
    }

    /// Credentials and target. Files are read, and certificates checked, which may take long.
    async fn read_files(url: &RedisUrl) -> Result<(Credentials, Result<Target, OpenError>), OpenError> {
        let read = |url: &RedisUrl| {
            let credentials = Credentials::of_servers(url)?;
            Ok((credentials.clone(), target(url, credentials)))
        };
        if !url.has_files() {
            return read(url);
        }
        let url = url.clone();
        first_read(move || read(&url)).await
    }

    /// The target of a quorum node.
    ///
    /// # Errors
    ///
    /// Its certificates are not usable.
    pub async fn voter_target(url: &RedisUrl) -> Result<VoterTarget, OpenError> {
        let (_, target) = Self::read_files(url).await?;
        Ok(VoterTarget(target?))
    }

    /// Opens a quorum node, which need not be reachable yet. Runs on the runtime of the client's thread.
    pub fn open_voter(
        url: &RedisUrl,
        target: VoterTarget,
        voting: Voting,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Arc<Self> {
        let opening = Opening { is_voter: true, ..Opening::at(url, client, inbox, caller) };
        let endpoint = opening.endpoint(target.0, client);
        let record = opening.record.clone();
        let nodes = Nodes::Server { endpoint, voting: Some(voting), is_restricted: false, record };
        opening.finish(nodes, Address::Url(Box::new(url.clone())), url.credentials().cloned())
    }

    /// As `open`, with the caller's `redis::Client`.
    ///
    /// # Errors
    ///
    /// The server is not reached, or refuses, or the shared connection leads elsewhere.
    pub async fn open_own(
        server: &redis::Client,
        shared: Option<SharedConnection>,
        credentials: Option<CredentialCache>,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, OpenError> {
        let shared = shared.map(SharedConnection::for_client);
        let tasks = caller.clone();
        let opening = Opening { shared: shared.clone(), ..Opening::new(client, inbox, caller, false) };
        let dial = Dial::from(server.get_connection_info().clone());
        let dial = match credentials.clone() {
            Some(cache) => dial.with_credentials(cache),
            None => dial,
        };
        let shown = dial.addr().to_string();
        let endpoint = opening.endpoint(Target::Server(dial.clone()), client);
        let connections = endpoint.connections().await.map_err(|error| unavailable(&shown, &error))?;
        if let Some((shared, tasks)) = shared.zip(tasks) {
            let mut own = connections.driver_conn();
            let Ok(verified) = timeout(2 * ANSWER_TIMEOUT, shared.verify(&mut own, &tasks)).await else {
                let what = "the tokio runtime that `connect` was called in does not run";
                return Err(OpenError::unavailable(format!("{shown}: {what}")));
            };
            let wire = verified.map_err(|error| wire::refused(&shown, &error))?;
            connections.set_caller_wire(Wire::Shared(wire));
            opening.callers.set_usable();
        }
        let nodes = opening.server(endpoint, &connections);
        Ok(opening.finish(nodes, Address::Own(Box::new(dial)), credentials))
    }
}

/// What a quorum node connects to.
pub struct VoterTarget(Target);

/// The target of a single server, or of the master behind sentinels.
fn target(url: &RedisUrl, credentials: Credentials) -> Result<Target, OpenError> {
    Ok(match &url.place {
        Place::Server(host) => Target::Server(credentials.at(host)?),
        Place::Socket(path) => Target::Server(credentials.at_addr(ConnectionAddr::Unix(path.clone()))?),
        Place::Sentinels { hosts, service, login } => {
            let sentinels = Credentials::of_sentinels(login, url)?;
            let hosts = hosts.iter().map(|host| sentinels.at(host)).collect::<Result<_, _>>()?;
            Target::Master(Sentinels::new(hosts, service.clone(), credentials))
        }
        Place::Cluster(_) => return Err(OpenError::invalid("a cluster is not one server")),
    })
}

fn unavailable(store: &impl std::fmt::Display, error: &StoreError) -> OpenError {
    OpenError::from_store(store, error)
}

/// The common part of all ways to open a store.
struct Opening {
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
    callers: Arc<CallerRuntime>,
    is_resp2: bool,
    /// The server is a quorum node.
    is_voter: bool,
    /// What scripts may do.
    restriction: Arc<Restriction>,
    /// A connection of the program's for commands of its tasks.
    shared: Option<SharedConnection>,
    warnings: Arc<Mutex<BTreeSet<String>>>,
    record: Arc<ClientRecord>,
}

impl Opening {
    /// As the address says.
    fn at(url: &RedisUrl, client: ClientId, inbox: Weak<dyn Inbox>, caller: Option<Handle>) -> Self {
        let restriction = Arc::new(Restriction::of_address(url.is_proxy));
        Self { restriction, ..Self::new(client, inbox, caller, url.is_resp2) }
    }

    fn new(client: ClientId, inbox: Weak<dyn Inbox>, caller: Option<Handle>, is_resp2: bool) -> Self {
        Self {
            inbox,
            caller,
            callers: Arc::default(),
            is_resp2,
            is_voter: false,
            restriction: Arc::default(),
            shared: None,
            warnings: Arc::default(),
            record: Arc::new(ClientRecord::new(client)),
        }
    }

    /// Opens the cluster that one of these nodes knows.
    async fn cluster(
        &self,
        credentials: Credentials,
        seeds: Vec<Host>,
        client: ClientId,
    ) -> Result<Nodes, StoreError> {
        let endpoint_config = self.endpoint_config(client);
        let cluster = Cluster::open(credentials, seeds, Box::new(move || endpoint_config(None)));
        let (cluster, channels) = cluster.await?;
        let (cluster, variant) = (Arc::new(cluster), ScriptVariant::Cluster(channels));
        let record = self.record.clone();
        Ok(Nodes::Cluster { cluster, variant, client, tasks: Tasks::current(), record })
    }

    /// One server, which is no quorum node.
    fn server(&self, endpoint: Endpoint, connections: &Connections) -> Nodes {
        let (is_restricted, record) = (connections.is_restricted(), self.record.clone());
        Nodes::Server { endpoint, voting: None, is_restricted, record }
    }

    fn endpoint(&self, target: Target, client: ClientId) -> Endpoint {
        Endpoint::new(target, (self.endpoint_config(client))(Some(inbox_of(client, None))))
    }

    /// Makes the configuration of an endpoint, by the channel that it subscribes to.
    fn endpoint_config(
        &self,
        client: ClientId,
    ) -> impl Fn(Option<String>) -> EndpointConfig + Send + Sync + 'static {
        let (inbox, caller, callers) = (self.inbox.clone(), self.caller.clone(), self.callers.clone());
        let (warnings, is_resp2, is_voter) = (self.warnings.clone(), self.is_resp2, self.is_voter);
        let (shared, record, restriction) =
            (self.shared.clone(), self.record.clone(), self.restriction.clone());
        // Any user of the server can send messages: they do not fill the log.
        let has_warned = Arc::new(AtomicBool::new(false));
        move |channel| {
            let has_warned = has_warned.clone();
            let (hearing, renewing, warnings) = (inbox.clone(), inbox.clone(), warnings.clone());
            let (holding, resting) = (inbox.clone(), inbox.clone());
            let (shared, record) = (shared.clone(), record.clone());
            EndpointConfig {
                channel,
                on_message: Arc::new(move |_, message| {
                    let Some(inbox) = hearing.upgrade() else { return };
                    match decode_push(client, message) {
                        Ok(push) => inbox.deliver(push),
                        Err(error) if has_warned.swap(true, Ordering::Relaxed) => tracing::debug!("{error}"),
                        Err(error) => tracing::warn!("{error}"),
                    }
                }),
                on_reconnect: Arc::new(move |concerns| {
                    record.mark_lost();
                    if let Some(inbox) = renewing.upgrade() {
                        inbox.reconnected(concerns);
                    }
                }),
                on_disconnect: Arc::new(|| ()),
                is_idle: Arc::new(move || resting.upgrade().is_none_or(|inbox| inbox.is_idle())),
                shortest_ttl: Arc::new(move || holding.upgrade().and_then(|inbox| inbox.shortest_ttl())),
                warn: Arc::new(move |warning| {
                    let is_new =
                        warnings.lock().unwrap_or_else(PoisonError::into_inner).insert(warning.clone());
                    if is_new {
                        tracing::warn!(target: CLIENT_WARNING, "{warning}");
                    }
                }),
                caller: caller.clone(),
                is_resp2,
                restriction: restriction.clone(),
                runtime: callers.clone(),
                is_voter,
                shared,
            }
        }
    }

    fn finish(self, nodes: Nodes, address: Address, credentials: Option<CredentialCache>) -> Arc<Redis> {
        let refresher = match &nodes {
            Nodes::Server { .. } => None,
            Nodes::Cluster { cluster, .. } => {
                let cluster = cluster.clone();
                Some(tasks::spawn(async move { cluster.refresh_loop().await }))
            }
        };
        let watch = self.caller.as_ref().map(|caller| self.callers.watch(caller));
        let caller = self.caller.map(|caller| Caller { id: caller.id(), runtime: self.callers });
        let nodes = Arc::new(nodes);
        let kept = nodes.clone();
        let record_keeper = tasks::spawn(async move { kept.keep_record().await });
        Arc::new(Redis {
            calls: Arc::new(CallPool::new(nodes.clone())),
            foreign: ServerKeys::new(nodes.clone(), Tasks::current()),
            nodes,
            address: Arc::new(address),
            credentials,
            tasks: Tasks::current(),
            caller,
            watch,
            warnings: self.warnings,
            refresher,
            record_keeper,
        })
    }
}
