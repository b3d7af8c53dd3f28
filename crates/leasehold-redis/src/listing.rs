//! Lists what is stored on all nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use leasehold_core::{Answer, Command, Resource};
use leasehold_redis_protocol::{ScriptVariant, VoteArgs};
use leasehold_store::{Call, StoreError};

use super::Nodes;
use super::connections::Connections;
use super::endpoint::Endpoint;
use super::error::CallError;
use super::exec::{self, CallOptions, MAX_INSPECTS};
use super::wire::Wire;

impl Nodes {
    /// Every stored resource, in any order. `Inspect` shows which are in use.
    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        match self {
            Self::Server { endpoint, .. } => list_node(endpoint).await,
            Self::Cluster { .. } => {
                Ok(self.inspect_all().await?.into_iter().map(|(resource, _)| resource).collect())
            }
        }
    }

    /// Every stored resource with its state, ordered by name. Some of them may not be in use.
    pub(super) async fn inspect_all(&self) -> Result<Vec<(Resource, Answer)>, StoreError> {
        let found = match self {
            Self::Server { endpoint, voting, .. } => {
                let variant = if voting.is_some() { ScriptVariant::Voter } else { ScriptVariant::Server };
                inspect_node(endpoint, variant).await?
            }
            Self::Cluster { cluster, tasks, variant, .. } => {
                let node = async |host| inspect_node(&*cluster.endpoint(&host, tasks)?, *variant).await;
                let found = join_all(cluster.masters().into_iter().map(node)).await;
                found.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect()
            }
        };
        let mut listed = BTreeMap::new();
        let mut failed = Vec::new();
        for (resource, answer) in found {
            match answer {
                // SCAN may return a key twice, and a slot may have moved meanwhile.
                Ok(answer) => drop(listed.insert((resource.name.clone(), resource.kind), answer)),
                Err(_) => failed.push(Call::new(Arc::new(resource), Command::Inspect)),
            }
        }
        // A redirect, or a lost connection: the usual path follows the one and repeats after the other.
        for page in failed.chunks(MAX_INSPECTS) {
            let retried = self.run_batch(page, 0, None).await;
            for (Call { resource, .. }, answer) in page.iter().zip(retried) {
                listed.insert((resource.name.clone(), resource.kind), answer?);
            }
        }
        self.add_clients(listed.values_mut()).await;
        Ok(listed.into_iter().map(|((name, kind), answer)| (Resource { kind, name }, answer)).collect())
    }
}

async fn inspect_node(
    endpoint: &Endpoint,
    variant: ScriptVariant,
) -> Result<Vec<(Resource, Result<Answer, CallError>)>, StoreError> {
    let connections = endpoint.connections().await?;
    let vote_args = VoteArgs { run_id: connections.run_id(), ..VoteArgs::default() };
    let options = CallOptions { vote_args, ..CallOptions::of(variant) };
    read(&connections, |wire| exec::inspect_all(wire, options)).await
}

/// The resources that are stored on a server, as `inspect_node`.
async fn list_node(endpoint: &Endpoint) -> Result<Vec<Resource>, StoreError> {
    let connections = endpoint.connections().await?;
    read(&connections, exec::list).await
}

/// Reads over the caller connection. If that fails, reads again over the driver connection, which does not depend on the program.
async fn read<T, F>(connections: &Connections, read: impl Fn(Wire) -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    if let Some(caller_conn) = connections.caller_conn()
        && let Ok(found) = read(caller_conn).await
    {
        return Ok(found);
    }
    read(connections.driver_conn().into()).await
}
