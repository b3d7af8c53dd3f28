//! Where commands go: one server, or the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::ClientId;
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::tasks::Tasks;

use super::client_record::ClientRecord;
use super::cluster::Cluster;
use super::endpoint::Endpoint;
use super::send::pipeline::Role;

/// Settings of a quorum node.
#[derive(Clone, Copy, Debug)]
pub struct Voting {
    /// How long the node abstains after it may have lost leases: the maximum ttl in use.
    pub abstains_for: Option<Duration>,
}

/// Where commands go.
pub(super) enum Nodes {
    Server {
        endpoint: Endpoint,
        /// Where several vote, and this is one of them.
        voting: Option<Voting>,
        /// A proxy, or a managed server, restricts what scripts may do.
        is_restricted: bool,
        record: Arc<ClientRecord>,
    },
    Cluster {
        cluster: Arc<Cluster>,
        variant: ScriptVariant,
        client: ClientId,
        tasks: Tasks,
        record: Arc<ClientRecord>,
    },
}

impl Nodes {
    /// What the client publishes about itself.
    pub(super) fn record(&self) -> &ClientRecord {
        match self {
            Self::Server { record, .. } | Self::Cluster { record, .. } => record,
        }
    }

    /// Whether something restricts what scripts may do.
    pub(super) fn is_restricted(&self) -> bool {
        matches!(self, Self::Server { is_restricted: true, .. })
    }

    /// What each server is for the client's calls.
    pub(super) fn role(&self) -> Role {
        match self {
            Self::Server { voting: None, .. } => Role::of(ScriptVariant::Server),
            Self::Server { voting: Some(Voting { abstains_for }), .. } => {
                Role { abstains_for: *abstains_for, ..Role::of(ScriptVariant::Voter) }
            }
            Self::Cluster { variant, .. } => Role::of(*variant),
        }
    }
}
