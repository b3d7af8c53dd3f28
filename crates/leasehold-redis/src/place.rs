//! Where a further connection leads to: its address may lead to another server by now, and all connections of a client must lead to one.

use std::collections::BTreeMap;
use std::io;

use leasehold_redis_protocol::probe_key_of;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, RedisResult, Value};

use super::connections::Connections;
use super::pushes::Subscription;
use super::wire::{PROBE_TTL_SECONDS, random};
use super::{handshake, slot_map, wire};
use crate::url::Host;

/// Where a further connection leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// To the server of the other connections.
    Here,
    Elsewhere,
    /// The user lacks the rights to find out.
    Unknown,
}

/// A key with a random name, if need be in a slot, and the command that sets it.
fn probe(slot: Option<u16>) -> RedisResult<(String, Cmd)> {
    let key = probe_key_of(random()?, slot);
    let mut set = redis::cmd("SET");
    set.arg(&key).arg("").arg("EX").arg(PROBE_TTL_SECONDS);
    Ok((key, set))
}

impl Connections {
    /// Whether a new connection leads to the same server as these. An error if that is not known.
    pub(super) async fn lead_to_server_of(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<bool, RedisError> {
        match self.place_of(connection).await? {
            Place::Here => Ok(true),
            Place::Elsewhere => Ok(false),
            Place::Unknown => Err(handshake::unknown_place(self.user().as_deref())),
        }
    }

    /// Where a new connection leads to.
    pub(super) async fn place_of(&self, connection: &mut MultiplexedConnection) -> Result<Place, RedisError> {
        let run_id = handshake::run_id(connection).await?;
        self.place_at(run_id.as_deref(), connection).await
    }

    /// Where a new connection to the server of this run id leads to. Without run ids, a key tells that is set here and deleted there.
    pub(super) async fn place_at(
        &self,
        run_id: Option<&str>,
        connection: &mut MultiplexedConnection,
    ) -> Result<Place, RedisError> {
        if self.is_restricted() {
            return Ok(Place::Here);
        }
        if !self.run_id().is_empty() || run_id.is_some() {
            return Ok(if run_id == Some(&**self.run_id()) { Place::Here } else { Place::Elsewhere });
        }
        let Some(key) = self.set_probe().await? else { return Ok(Place::Unknown) };
        // Not read: a replica has the key, too.
        match redis::cmd("DEL").arg(&key).query_async::<u64>(connection).await {
            Ok(1) => Ok(Place::Here),
            Err(error) if !matches!(error.code(), Some("MOVED" | "READONLY")) => Err(error),
            Ok(_) | Err(_) => Ok(Place::Elsewhere),
        }
    }

    /// Sets a key with a random name that the server has. None if it has none, or takes no writes now.
    async fn set_probe(&self) -> Result<Option<String>, RedisError> {
        let (key, set) = probe(None)?;
        let moved = match set.exec_async(&mut self.driver_conn()).await {
            Ok(()) => return Ok(Some(key)),
            Err(error) => error,
        };
        match moved.code() {
            Some("MOVED") => {}
            Some(_) => return Ok(None),
            None => return Err(moved),
        }
        // One key for each node of the cluster: this one has one of them.
        let asked = Host { name: String::new(), port: 0 };
        let Ok(ranges) = slot_map::query(&mut self.driver_conn(), &asked).await else { return Ok(None) };
        let masters: BTreeMap<_, _> = ranges.iter().map(|range| (&range.master, range.first)).collect();
        let probes = masters.into_values().map(|slot| probe(Some(slot)));
        let (keys, sets): (Vec<_>, Vec<_>) = probes.collect::<RedisResult<Vec<_>>>()?.into_iter().unzip();
        let set = wire::pipeline(&mut self.driver_conn(), sets, false).await;
        let mut set =
            keys.into_iter().zip(set.into_iter().map(|answer| answer.and_then(Value::extract_error)));
        Ok(set.find_map(|(key, answer)| answer.is_ok().then_some(key)))
    }

    /// Where a subscriber connection leads to. An error if it was lost.
    pub(super) async fn place_of_subscriber(&self, subscription: &Subscription) -> Result<Place, RedisError> {
        if let Some(mut connection) = subscription.connection() {
            return self.place_at(subscription.run_id(), &mut connection).await;
        }
        let private = subscription.private_channel().filter(|_| !self.is_restricted());
        let Some(private) = private else { return Ok(Place::Unknown) };
        let mut question = redis::cmd("PUBSUB");
        question.arg("NUMSUB").arg(private);
        let (_, listeners): (String, u64) = question.query_async(&mut self.driver_conn()).await?;
        if listeners > 0 {
            Ok(Place::Here)
        } else if subscription.responds(self.answer_limit()).await {
            // It still listens, and did when the server was asked.
            Ok(Place::Elsewhere)
        } else {
            Err(io::Error::from(io::ErrorKind::ConnectionReset).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leasehold_testkit::{Cluster, Server, until};
    use redis::IntoConnectionInfo as _;

    use super::super::connect::Dial;
    use super::super::connections::config;
    use super::super::handshake::ServerFacts;
    use super::super::pushes::ConnectionStatus;
    use super::*;

    fn dial(url: &str) -> Dial {
        url.into_connection_info().unwrap().into()
    }

    /// To this server, as if its user may not ask for the run id.
    async fn connections_to(url: &str) -> Connections {
        let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
        let own = dial(url).open(false, &config()).await.unwrap();
        Connections::new(own, status, None, (dial(url), false), ServerFacts::default())
    }

    async fn place(connections: &Connections, url: &str) -> Place {
        let mut further = dial(url).open(false, &config()).await.unwrap();
        connections.place_at(None, &mut further).await.unwrap()
    }

    #[tokio::test]
    async fn place_of_a_further_connection_is_known_without_run_ids() {
        let (one, other) = (Server::on_port(), Server::on_port());
        let connections = connections_to(&one.url()).await;
        assert_eq!(place(&connections, &one.url()).await, Place::Here);
        assert_eq!(one.query(&["DBSIZE"]), Ok(0), "no key stays");
        assert_eq!(place(&connections, &other.url()).await, Place::Elsewhere);
        let replica = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", one.port())).start();
        until(async || one.query::<i64>(&["WAIT", "1", "100"]) == Ok(1)).await;
        assert_eq!(place(&connections, &replica.url()).await, Place::Elsewhere);
        let cluster = Cluster::start();
        let nodes: Vec<_> = cluster.nodes.iter().map(Server::url).collect();
        let master = cluster.owner_of(0);
        let connections = connections_to(&nodes[master]).await;
        for (node, url) in nodes.iter().enumerate() {
            let expected = if node == master { Place::Here } else { Place::Elsewhere };
            assert_eq!(place(&connections, url).await, expected, "node {node}");
        }
        // It has no slots.
        let replica = connections_to(&nodes[cluster.replica_of(master)]).await;
        assert_eq!(place(&replica, &nodes[master]).await, Place::Unknown);
    }

    #[tokio::test]
    async fn place_is_unknown_while_the_server_takes_no_writes() {
        let server = Server::on_port();
        let connections = connections_to(&server.url()).await;
        server.run(&["CONFIG", "SET", "maxmemory", "1"]);
        assert_eq!(place(&connections, &server.url()).await, Place::Unknown);
    }
}
