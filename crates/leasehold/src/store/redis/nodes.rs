//! Where commands go: one server, or the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::ClientId;
use leasehold_redis_protocol::ScriptVariant;
use tokio::runtime::Handle;

use super::cluster::Cluster;
use super::endpoint::Endpoint;

/// What one of several servers that vote does besides what all do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Voting {
    /// It abstains for this long, the longest ttl there is, after it may have forgotten what it granted.
    pub(crate) abstains_for: Option<Duration>,
}

/// Where commands go.
pub(super) enum Nodes {
    Server {
        endpoint: Endpoint,
        /// Where several vote, and this is one of them.
        voting: Option<Voting>,
    },
    Cluster {
        cluster: Arc<Cluster>,
        variant: ScriptVariant,
        client: ClientId,
        runtime: Handle,
    },
}
