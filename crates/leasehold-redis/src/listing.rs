//! Lists what is stored on all nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use leasehold_core::{Answer, Command, Resource};
use leasehold_redis_protocol::{RESOURCE_PATTERN, resource_of};
use leasehold_store::{Call, StoreError};
use redis::{RedisError, Value};

use super::Nodes;
use super::connections::Connections;
use super::endpoint::Endpoint;
use super::error::{Answered, store_error};
use super::rights;
use super::send::pipeline::{self, CallOptions, Mode, Role};
use super::send::script::{Exchange, Request};
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
            Self::Server { endpoint, .. } => inspect_node(endpoint, self.role()).await?,
            Self::Cluster { cluster, tasks, .. } => {
                let node = async |host| inspect_node(&*cluster.endpoint(&host, tasks)?, self.role()).await;
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
            let retried = self.send(page, Mode::Each).await;
            for (Call { resource, .. }, answer) in page.iter().zip(retried) {
                listed.insert((resource.name.clone(), resource.kind), answer?);
            }
        }
        self.add_clients(listed.values_mut()).await;
        Ok(listed.into_iter().map(|((name, kind), answer)| (Resource { kind, name }, answer)).collect())
    }
}

async fn inspect_node(endpoint: &Endpoint, role: Role) -> Result<Vec<(Resource, Answered)>, StoreError> {
    let connections = endpoint.connections().await?;
    let options = connections.options(role, Mode::Each);
    read(&connections, |wire| inspect_on(wire, options)).await
}

/// The resources that are stored on a server, as `inspect_node`.
async fn list_node(endpoint: &Endpoint) -> Result<Vec<Resource>, StoreError> {
    let connections = endpoint.connections().await?;
    read(&connections, list_on).await
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
    read(connections.driver_wire()).await
}

/// Every resource stored on this server, with the reply to its `Inspect`, in the order of the keys. A resource may appear twice.
///
/// Each round trip has the `Inspect`s of a page of keys, or of a part of it. The last one has the SCAN for the next page, too.
async fn inspect_on(
    mut connection: Wire,
    options: CallOptions<'_>,
) -> Result<Vec<(Resource, Answered)>, StoreError> {
    let mut found = Vec::new();
    let first = connection.send(&scan(0)).await;
    let (mut cursor, mut page) = read_page(first)?;
    loop {
        let later = page.split_off(page.len().min(MAX_INSPECTS));
        let has_scan = later.is_empty() && cursor != 0;
        let inspects: Vec<Request<'_>> = page
            .iter()
            .map(|resource| Request::Script(options.encode(resource, &Command::Inspect)))
            .collect();
        let scan = has_scan.then(|| Request::Command(scan(cursor)));
        let exchange = Exchange::of(inspects.into_iter().chain(scan));
        let mut replies = exchange.run(&mut connection, options.role.is_asking).await;
        let next = if has_scan { replies.pop() } else { None };
        let answers = replies.into_iter().map(|reply| pipeline::read(&Command::Inspect, reply));
        found.extend(page.into_iter().zip(answers));
        (cursor, page) = match next {
            Some(next) => read_page(next)?,
            None if later.is_empty() => return Ok(found),
            None => (cursor, later),
        };
    }
}

/// Every resource stored on this server. One may appear twice.
async fn list_on(mut connection: Wire) -> Result<Vec<Resource>, StoreError> {
    let mut resources = Vec::new();
    let mut cursor = 0;
    loop {
        let (next, page) = read_page(connection.send(&scan(cursor)).await)?;
        resources.extend(page);
        if next == 0 {
            return Ok(resources);
        }
        cursor = next;
    }
}

/// Number of keys that one SCAN call visits.
const PAGE: usize = 1_000;

/// Max number of `Inspect`s in one pipeline. The server must answer them within the time limit of an answer, also when it gets little
/// CPU time.
const MAX_INSPECTS: usize = 200;

fn scan(cursor: u64) -> redis::Cmd {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(RESOURCE_PATTERN).arg("COUNT").arg(PAGE);
    scan
}

fn read_page(value: Result<Value, RedisError>) -> Result<(u64, Vec<Resource>), StoreError> {
    let read = |value| redis::from_redis_value::<(u64, Vec<Vec<u8>>)>(value).map_err(RedisError::from);
    let page = value.and_then(Value::extract_error).and_then(read);
    let (next, keys) = page.map_err(|error| store_error(&rights::of_command(error, "+scan", None)))?;
    Ok((next, keys.iter().filter_map(|key| resource_of(key)).collect()))
}
