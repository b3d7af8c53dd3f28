//! Writes the client's record, and the key layout with it, and reads the records of the clients that an answer shows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{Answer, ClientId};
use leasehold_redis_protocol::{LAYOUT, RESTRICTED_LAYOUT, client_key, layout_slot, slot_of_client};
use leasehold_store::HolderMetadata;
use redis::{RedisError, Value};
use tokio::time::timeout;

use super::endpoint::Endpoint;
use super::error::CallError;
use super::handshake;
use super::limits::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, RECORD_REFRESH, RECORD_RETRY, RECORD_TIMEOUT};
use super::nodes::Nodes;
use super::wire;
use crate::url::Host;

/// Number of records that one pipeline reads.
const PAGE: usize = 1_000;

/// How often a command is sent: to the master of its slot, and after a redirect to the new master and to the importing node.
const MAX_ROUNDS: usize = 3;

impl Nodes {
    /// Writes the client's record. Returns whether it is there, or need not be.
    pub(super) async fn write_record(&self) -> bool {
        let write = self.record().begin_write();
        let Some(command) = self.record().command() else { return true };
        let commands = [(self.record().slot(), command)];
        let is_written = self.run_plain(&commands, CONNECT_TIMEOUT).await.iter().all(Option::is_some);
        if is_written {
            self.record().set_written(write);
            return true;
        }
        tracing::debug!("the client's metadata could not be stored yet");
        false
    }

    /// Publishes the key layout again, which a flush or its expiry may have removed, so that a client with another one is refused. Warns if
    /// one was not.
    async fn keep_layout(&self) {
        let own = if self.is_restricted() { RESTRICTED_LAYOUT } else { LAYOUT };
        let commands = handshake::layout_commands(own).map(|command| (layout_slot(), command));
        if let [_, Some(found)] = &self.run_plain(&commands, CONNECT_TIMEOUT).await[..]
            && let Err(other) = handshake::compare_layout(found, own)
        {
            tracing::warn!("{other}");
        }
    }

    /// Waits until the record is there, at most this long, and at most as long as for an answer.
    pub(super) async fn await_record(&self, limit: Duration) {
        if !self.record().is_written() {
            // Its keeper may be writing it: twice is as good as once.
            let _ = timeout(limit.min(ANSWER_TIMEOUT), self.write_record()).await;
        }
    }

    /// Lets the records of other clients last for at least this long. Returns whether they do, or are not there.
    pub(super) async fn keep_others(&self, others: &[(ClientId, Duration)], limit: Duration) -> bool {
        let command = |name: &str, client: ClientId| {
            let mut command = redis::cmd(name);
            command.arg(client_key(client));
            (slot_of_client(client), command)
        };
        let reads: Vec<_> = others.iter().map(|(client, _)| command("PTTL", *client)).collect();
        let left = self.run_plain(&reads, limit).await;
        let mut moves = Vec::new();
        for ((client, span), left) in others.iter().zip(left) {
            let Some(Value::Int(left)) = left else { return false };
            let wanted = i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
            // Negative: there is no record, or it has no expiry.
            if (0..wanted).contains(&left) {
                let (slot, mut expire) = command("PEXPIRE", *client);
                expire.arg(wanted);
                moves.push((slot, expire));
            }
        }
        self.run_plain(&moves, limit).await.iter().all(Option::is_some)
    }

    /// Keeps the record while the client lives. Never ends.
    pub(super) async fn keep_record(&self) {
        let mut pause = RECORD_REFRESH;
        loop {
            let _ = timeout(pause, self.record().until_requested()).await;
            pause = if self.write_record().await { RECORD_REFRESH } else { RECORD_RETRY };
            // A client that only looks has neither.
            if self.record().covered() > 0 {
                self.keep_layout().await;
            }
            if pause == RECORD_RETRY {
                // A server that refuses it is not asked more often.
                tokio::time::sleep(RECORD_RETRY).await;
            }
        }
    }

    /// Adds to each holder and waiter what its client has published, if that is known.
    pub(super) async fn add_clients<'a>(&self, answers: impl Iterator<Item = &'a mut Answer>) {
        let mut shown: Vec<_> = answers.flat_map(|answer| answer.reply.metadata_mut()).collect();
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
        // Each with the importing node, after an ASK redirect.
        let mut pending: Vec<(usize, Option<Host>)> = (0..commands.len()).map(|at| (at, None)).collect();
        for _ in 0..MAX_ROUNDS {
            let mut groups = BTreeMap::<(Option<Host>, bool), Vec<usize>>::new();
            for (at, asked) in pending.drain(..) {
                let is_asking = asked.is_some();
                let to = asked.or_else(|| self.master_of(commands[at].0));
                groups.entry((to, is_asking)).or_default().push(at);
            }
            let run = async |((to, is_asking), group): ((Option<Host>, bool), Vec<usize>)| {
                let sent = group.iter().map(|at| commands[*at].1.clone()).collect();
                (group, self.run_at(to, sent, is_asking, limit).await)
            };
            for (group, values) in join_all(groups.into_iter().map(run)).await {
                for (at, value) in group.into_iter().zip(values) {
                    match value.and_then(Value::extract_error) {
                        Ok(value) => answers[at] = Some(value),
                        Err(error) => {
                            let redirected = self.redirected(commands[at].0, &error);
                            pending.extend(redirected.map(|asked| (at, asked)));
                        }
                    }
                }
            }
        }
        answers
    }

    /// Runs commands on a node. The list is empty if it cannot be reached.
    async fn run_at(
        &self,
        to: Option<Host>,
        commands: Vec<redis::Cmd>,
        is_asking: bool,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        match (self, to) {
            (Self::Server { endpoint, .. }, _) => run_on(endpoint, commands, is_asking, limit).await,
            (Self::Cluster { cluster, tasks, .. }, Some(host)) => match cluster.endpoint(&host, tasks) {
                Ok(endpoint) => run_on(&endpoint, commands, is_asking, limit).await,
                Err(_) => Vec::new(),
            },
            (Self::Cluster { .. }, None) => Vec::new(),
        }
    }

    fn master_of(&self, slot: u16) -> Option<Host> {
        match self {
            Self::Server { .. } => None,
            Self::Cluster { cluster, .. } => cluster.master_of(slot),
        }
    }

    /// Whether a command with this error is sent again, and then the node that imports its slot, if there is one.
    fn redirected(&self, slot: u16, error: &RedisError) -> Option<Option<Host>> {
        let Self::Cluster { cluster, .. } = self else { return None };
        match CallError::from(error) {
            CallError::Moved(to) => {
                cluster.moved([(slot, to)]);
                Some(None)
            }
            CallError::Ask(to) => Some(Some(to)),
            _ => None,
        }
    }
}

async fn run_on(
    endpoint: &Endpoint,
    commands: Vec<redis::Cmd>,
    is_asking: bool,
    limit: Duration,
) -> Vec<Result<Value, RedisError>> {
    let run = async {
        let connections = endpoint.connections().await.ok()?;
        Some(wire::pipeline(&mut connections.driver_conn(), commands, is_asking).await)
    };
    let Ok(values) = timeout(limit, run).await else {
        endpoint.request_health_check();
        return Vec::new();
    };
    values.unwrap_or_default()
}
