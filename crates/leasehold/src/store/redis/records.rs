//! Writes the client's record, and reads those of the clients that an answer shows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{Answer, ClientId, Reply};
use leasehold_redis_protocol::{client_key, slot_of_client};
use redis::Value;
use tokio::time::timeout;

use super::connections::Connections;
use super::error::CallError;
use super::limits::{CONNECT_TIMEOUT, RECORD_REFRESH, RECORD_RETRY, RECORD_TIMEOUT};
use super::nodes::Nodes;
use super::{slot_unassigned, wire};
use crate::metadata::HolderMetadata;
use crate::store::StoreError;
use crate::url::Host;

/// Number of records that one pipeline reads.
const PAGE: usize = 1_000;

/// How often a redirect is followed.
const MAX_ROUNDS: usize = 2;

impl Nodes {
    /// Writes the client's record. Returns whether it is there, or need not be.
    pub(super) async fn write_record(&self) -> bool {
        let Some(command) = self.record().command() else { return true };
        let commands = [(self.record().slot(), command)];
        let is_written = self.run_plain(&commands, CONNECT_TIMEOUT).await.iter().all(Option::is_some);
        if !is_written {
            tracing::debug!("the client's metadata could not be stored yet");
        }
        is_written
    }

    /// Keeps the record while the client lives. Never ends.
    pub(super) async fn keep_record(&self) {
        let mut pause = RECORD_REFRESH;
        loop {
            let _ = timeout(pause, self.record().until_requested()).await;
            pause = if self.write_record().await { RECORD_REFRESH } else { RECORD_RETRY };
            if pause == RECORD_RETRY {
                // A server that refuses it is not asked more often.
                tokio::time::sleep(RECORD_RETRY).await;
            }
        }
    }

    /// Adds to each holder and waiter what its client has published, if that is known.
    pub(super) async fn add_clients<'a>(&self, answers: impl Iterator<Item = &'a mut Answer>) {
        let mut shown: Vec<(ClientId, &mut Arc<str>)> = answers.flat_map(metadata_of).collect();
        let clients: BTreeSet<ClientId> = shown.iter().map(|(client, _)| *client).collect();
        let clients: Vec<ClientId> = clients.into_iter().collect();
        let mut records = BTreeMap::new();
        for page in clients.chunks(PAGE) {
            let read = |client: &ClientId| {
                let mut get = redis::cmd("GET");
                get.arg(client_key(*client));
                (slot_of_client(*client), get)
            };
            let commands: Vec<_> = page.iter().map(read).collect();
            for (client, value) in page.iter().zip(self.run_plain(&commands, RECORD_TIMEOUT).await) {
                if let Some(record) = value.and_then(|value| redis::from_redis_value::<String>(value).ok()) {
                    records.insert(*client, record);
                }
            }
        }
        for (client, metadata) in &mut shown {
            if let Some(record) = records.get(client) {
                **metadata = HolderMetadata::add_client(metadata, record);
            }
        }
    }

    /// Runs commands about keys in these slots, one pipeline per node, each within this time. `None` for a command that failed.
    async fn run_plain(&self, commands: &[(u16, redis::Cmd)], limit: Duration) -> Vec<Option<Value>> {
        let mut answers: Vec<Option<Value>> = vec![None; commands.len()];
        let mut pending: Vec<usize> = (0..commands.len()).collect();
        for _ in 0..MAX_ROUNDS {
            let mut groups = BTreeMap::<_, Vec<usize>>::new();
            for at in pending.drain(..) {
                groups.entry(self.master_of(commands[at].0)).or_default().push(at);
            }
            let run = async |group: Vec<usize>| {
                let send = async {
                    let connections = self.connections_of(commands[group[0]].0).await.ok()?;
                    let group_commands = group.iter().map(|at| commands[*at].1.clone()).collect();
                    Some(wire::pipeline(&mut connections.driver_conn(), group_commands, false).await)
                };
                let values = timeout(limit, send).await.ok().flatten().unwrap_or_default();
                (group, values)
            };
            for (group, values) in join_all(groups.into_values().map(run)).await {
                for (at, value) in group.into_iter().zip(values) {
                    match value.and_then(Value::extract_error) {
                        Ok(value) => answers[at] = Some(value),
                        Err(error) => {
                            if let (Self::Cluster { cluster, .. }, CallError::Moved(to)) =
                                (self, CallError::from(&error))
                            {
                                cluster.moved(commands[at].0, to);
                                pending.push(at);
                            }
                        }
                    }
                }
            }
        }
        answers
    }

    fn master_of(&self, slot: u16) -> Option<Host> {
        match self {
            Self::Server { .. } => None,
            Self::Cluster { cluster, .. } => cluster.master_of(slot),
        }
    }

    async fn connections_of(&self, slot: u16) -> Result<Arc<Connections>, StoreError> {
        match self {
            Self::Server { endpoint, .. } => endpoint.connections().await,
            Self::Cluster { cluster, runtime, .. } => {
                let host = cluster.master_of(slot).ok_or_else(slot_unassigned)?;
                cluster.endpoint(&host, runtime)?.connections().await
            }
        }
    }
}

/// The clients that an answer shows, each with what is stored about its holder or waiter.
fn metadata_of(answer: &mut Answer) -> Vec<(ClientId, &mut Arc<str>)> {
    let (holders, waiters) = match &mut answer.reply {
        Reply::View(view) => (&mut view.holders, Some(&mut view.waiters)),
        Reply::Forced(holders) => (holders, None),
        _ => return Vec::new(),
    };
    let holders = holders.iter_mut().map(|holder| (holder.acquisition.client, &mut holder.metadata));
    let waiters =
        waiters.into_iter().flatten().map(|waiter| (waiter.acquisition.client, &mut waiter.metadata));
    holders.chain(waiters).collect()
}
