//! What an endpoint connects to, and the handlers that it calls.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::Failure;
use leasehold_store::StoreError;
use leasehold_store::credentials::PROVIDER_TIMEOUT;
use tokio::runtime::Handle;

use crate::answer_times::ShortestTtl;
use crate::caller_conn::CallerRuntime;
use crate::connect::Dial;
use crate::connections::Connections;
use crate::limits::CONNECT_TIMEOUT;
use crate::pushes::{MessageHandler, ReconnectHandler};
use crate::restriction::Restriction;
use crate::rights;
use crate::sentinel::Sentinels;
use crate::slot_map::{self, Membership, OTHER_CLUSTER, SlotRange, UNCLEAR};
use crate::url::Host;
use crate::wire::SharedConnection;

/// What an endpoint connects to.
pub(crate) enum Target {
    Server(Dial),
    Node(ClusterNode),
    Master(Sentinels),
}

/// Whether a node with this map is one of the cluster: another server may have got its address.
pub(crate) type ClusterCheck = Arc<dyn Fn(&[SlotRange]) -> Membership + Send + Sync>;

/// A cluster node named by other nodes.
#[derive(Clone)]
pub(crate) struct ClusterNode {
    pub(super) dial: Dial,
    host: Host,
    membership: ClusterCheck,
    /// The run id of the server that was last known to be the node by its map.
    confirmed: Arc<Mutex<Arc<str>>>,
}

impl Target {
    /// Max time to connect for the first time. A provider of credentials may take its time before.
    pub(super) fn connect_timeout(&self) -> Duration {
        let is_provided = match self {
            Self::Server(dial) => dial.has_provider(),
            Self::Node(node) => node.dial.has_provider(),
            Self::Master(sentinels) => sentinels.has_provider(),
        };
        if is_provided { CONNECT_TIMEOUT + PROVIDER_TIMEOUT } else { CONNECT_TIMEOUT }
    }
}

impl ClusterNode {
    pub(crate) fn new(dial: Dial, host: Host, membership: ClusterCheck) -> Self {
        Self { dial, host, membership, confirmed: Arc::new(Mutex::new("".into())) }
    }

    pub(super) async fn confirm(&self, connections: &Connections) -> Result<(), StoreError> {
        let ranges = slot_map::query_if_allowed(&mut connections.driver_conn(), &self.host).await;
        let ranges = ranges.map_err(not_sent)?;
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        let run_id = connections.run_id();
        let Some(ranges) = ranges else {
            // The right may have been withdrawn since. Without the map nothing tells another server from the node, but that it has not
            // been started since the node was known by its map.
            let is_known = connections.is_cluster_node() && !run_id.is_empty() && *confirmed == *run_id;
            return if is_known { Ok(()) } else { Err(not_sent(map_denied(connections.user().as_deref()))) };
        };
        match (self.membership)(&ranges) {
            Membership::Member => {
                *confirmed = run_id.clone();
                Ok(())
            }
            Membership::Unclear => Err(not_sent(UNCLEAR.to_owned())),
            Membership::Stranger => Err(not_sent(OTHER_CLUSTER.to_owned())),
        }
    }
}

/// What is wrong with a node that does not tell this user its map.
fn map_denied(user: Option<&str>) -> String {
    let lack = rights::grant(user.unwrap_or("default"), "+cluster|slots");
    format!("it does not show whether it is of the cluster: {lack}")
}

/// Configuration and callbacks of an endpoint.
pub(crate) struct EndpointConfig {
    /// Subscribed to at once. None at a node of a cluster, where each hash slot has a channel.
    pub(crate) channel: Option<String>,
    /// Handles a published message.
    pub(crate) on_message: MessageHandler,
    /// Called when the connection is new or the server was flushed: pushes were missed or are void.
    pub(crate) on_reconnect: ReconnectHandler,
    /// Called when there is no connection: the server may have been replaced.
    pub(crate) on_disconnect: Arc<dyn Fn() + Send + Sync>,
    /// The client has neither attempts nor leases.
    pub(crate) is_idle: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Shortest ttl of the held leases.
    pub(crate) shortest_ttl: ShortestTtl,
    /// Reports a warning about the server.
    pub(crate) warn: Arc<dyn Fn(String) + Send + Sync>,
    /// The runtime in which the client was created.
    pub(crate) caller: Option<Handle>,
    pub(crate) is_resp2: bool,
    pub(crate) restriction: Arc<Restriction>,
    pub(crate) runtime: Arc<CallerRuntime>,
    /// The server is a quorum node: a connection without a run id is refused.
    pub(crate) is_voter: bool,
    /// A connection of the program's, which serves as caller connection.
    pub(crate) shared: Option<SharedConnection>,
}

#[cfg(test)]
impl EndpointConfig {
    /// Subscribes to nothing, and its callbacks do nothing.
    pub(crate) fn quiet() -> Self {
        Self {
            channel: None,
            on_message: Arc::new(|_, _| ()),
            on_reconnect: Arc::new(|_| ()),
            on_disconnect: Arc::new(|| ()),
            is_idle: Arc::new(|| false),
            shortest_ttl: Arc::new(|| None),
            warn: Arc::new(|_| ()),
            caller: None,
            is_voter: false,
            shared: None,
            is_resp2: false,
            restriction: Arc::default(),
            runtime: Arc::default(),
        }
    }
}

pub(super) fn not_sent(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}
