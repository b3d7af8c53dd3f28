//! Checks the Redis servers that locks depend on.
//!
//! `probe` takes a snapshot of one server, over a connection of its own. `acl_check` finds out the user's rights and the cost
//! of a lock. `server_rules` judges one snapshot, and `topology_rules` several together: both are pure.
//!
//! No setting is changed. The check acquires and releases a lock with a unique name, and deletes its key.

mod acl_check;
mod foreign_locks;
mod probe;
mod query;
mod restricted;
mod server_rules;
mod time_rules;
mod topology_rules;

use std::time::Duration;

use leasehold_core::Failure;
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::{Component, Diagnosis, OpenError, StoreError};
use redis::ConnectionAddr;

use super::cluster::Cluster;
use super::connect::{Credentials, Dial};
use super::error::AddressState;
use super::limits::CONNECT_TIMEOUT;
use super::nodes::Nodes;
use super::sentinel::Sentinels;
use crate::url::{Place, RedisUrl};
use probe::{FailoverMode, ProbeTarget, Snapshot, Transport};

/// The address of a store.
pub(super) enum Address {
    Url(Box<RedisUrl>),
    /// From the caller's `redis::Client`.
    Own(Box<Dial>),
}

/// Checks every server of a store.
pub(super) async fn diagnose(nodes: &Nodes, address: &Address) -> Result<Diagnosis, StoreError> {
    if let Nodes::Server { endpoint, is_restricted: true, .. } = nodes {
        let connections = endpoint.connections().await?;
        let component = restricted::check(&connections, &connections.address()).await?;
        return Ok(Diagnosis::new(vec![component]));
    }
    let mut doctor = Doctor { seen: Vec::new(), components: Vec::new() };
    match address {
        Address::Own(dial) => {
            doctor.see(target_for((**dial).clone(), FailoverMode::ByHand, false)).await.map_err(failed)?;
        }
        Address::Url(url) => doctor.probe_all(nodes, url).await?,
    }
    Ok(doctor.conclude())
}

/// Checks the nodes of a quorum, and whether they are independent of each other.
pub(super) async fn diagnose_voters(
    voters: &[(&str, &Address, &Nodes)],
    abstains_for: Option<Duration>,
) -> Diagnosis {
    let mut doctor = Doctor { seen: Vec::new(), components: Vec::new() };
    let mut places = Vec::new();
    for (name, address, nodes) in voters {
        let first = doctor.seen.len();
        let Address::Url(url) = address else { continue };
        let error = doctor.probe_all(nodes, url).await.err();
        if let Some(error) = error {
            doctor.components.push(topology_rules::unreachable((*name).to_owned(), &error.message));
        }
        // The master comes first, before its replicas.
        places.push((*name, (doctor.seen.len() > first).then_some(first)));
    }
    for seen in &mut doctor.seen {
        seen.abstains = abstains_for.is_some();
        seen.votes = true;
    }
    let seen: Vec<topology_rules::Voter<'_>> =
        places.iter().map(|(name, place)| (*name, place.map(|place| &doctor.seen[place]))).collect();
    let quorum = topology_rules::check_voters(&seen, abstains_for);
    let mut components = vec![quorum];
    components.extend(doctor.seen.iter().map(server_rules::check_server));
    components.append(&mut doctor.components);
    components.extend(topology_rules::check_clocks(&doctor.seen, true));
    Diagnosis::new(components)
}

/// Probes one server after the other, so that no probe disturbs the measurements of another.
struct Doctor {
    seen: Vec<Snapshot>,
    /// Components other than servers, and unreachable servers.
    components: Vec<Component>,
}

impl Doctor {
    async fn probe_all(&mut self, nodes: &Nodes, url: &RedisUrl) -> Result<(), StoreError> {
        let credentials = Credentials::of_servers(url).map_err(|error| not_sent(&error))?;
        let dial = match (&url.place, nodes) {
            (Place::Sentinels { hosts, service, login }, _) => {
                let own = Credentials::of_sentinels(login, url).map_err(|error| not_sent(&error))?;
                let hosts = hosts.iter().map(|host| own.at(host)).collect::<Result<_, _>>();
                let hosts = hosts.map_err(|error| not_sent(&error))?;
                let sentinels = Sentinels::new(hosts, service.clone(), credentials);
                return self.probe_sentinels(&sentinels, url.is_resp2).await;
            }
            (_, Nodes::Cluster { cluster, variant, .. }) => {
                return self.probe_cluster(cluster, *variant, &credentials.of_cluster()).await;
            }
            (Place::Cluster(_), Nodes::Server { .. }) => return Ok(()),
            (Place::Server(host), _) => credentials.at(host),
            (Place::Socket(path), _) => credentials.at_addr(ConnectionAddr::Unix(path.clone())),
        };
        let dial = dial.map_err(|error| not_sent(&error))?;
        self.see(target_for(dial, FailoverMode::ByHand, url.is_resp2)).await.map_err(failed)
    }

    async fn see(&mut self, target: ProbeTarget) -> Result<(), String> {
        self.seen.push(probe::at(target).await?);
        Ok(())
    }

    /// Probes one server of several. If it is unreachable, that is a finding.
    async fn try_probe(&mut self, target: Result<ProbeTarget, OpenError>) {
        let (name, error) = match target {
            Ok(target) => (target.name.clone(), self.see(target).await.err()),
            Err(error) => ("a server".to_owned(), Some(error.to_string())),
        };
        if let Some(error) = error {
            self.components.push(topology_rules::unreachable(name, &error));
        }
    }

    async fn probe_sentinels(&mut self, sentinels: &Sentinels, is_resp2: bool) -> Result<(), StoreError> {
        let (_, dial) = sentinels.find_master(AddressState::Unproven, CONNECT_TIMEOUT).await?;
        let target = |dial| target_for(dial, FailoverMode::Sentinels, is_resp2);
        let master = probe::at(target(dial)).await.map_err(failed)?;
        let replicas = topology_rules::replicas_of(&master.info);
        self.seen.push(master);
        for replica in replicas {
            self.try_probe(sentinels.credentials.at(&replica).map(target)).await;
        }
        let mut opinions = Vec::new();
        for sentinel in &sentinels.hosts {
            let opinion = probe::at_sentinel(sentinel, &sentinels.service).await;
            opinions.push((sentinel.addr().to_string(), opinion));
        }
        self.components.push(topology_rules::check_sentinels(&sentinels.service, &opinions));
        Ok(())
    }

    async fn probe_cluster(
        &mut self,
        cluster: &Cluster,
        variant: ScriptVariant,
        credentials: &Credentials,
    ) -> Result<(), StoreError> {
        let mut error = super::error::slot_unassigned();
        for host in cluster.masters() {
            let dial = credentials.at(&host).map_err(|error| not_sent(&error))?;
            match probe::query_slots(&dial, &host).await {
                Err(what) => error = failed(what),
                Ok(slots) => {
                    let nodes = topology_rules::nodes_of(&slots);
                    for node in &nodes {
                        let target = credentials.at(&node.host).map(|dial| ProbeTarget {
                            slots: node.slots.clone(),
                            variant,
                            ..target_for(dial, FailoverMode::Cluster, false)
                        });
                        self.try_probe(target).await;
                    }
                    self.components.push(topology_rules::check_cluster(&nodes, &self.seen));
                    return Ok(());
                }
            }
        }
        Err(error)
    }

    fn conclude(mut self) -> Diagnosis {
        let mut components: Vec<Component> = self.seen.iter().map(server_rules::check_server).collect();
        components.append(&mut self.components);
        components.extend(topology_rules::check_clocks(&self.seen, false));
        Diagnosis::new(components)
    }
}

fn target_for(dial: Dial, failover: FailoverMode, is_resp2: bool) -> ProbeTarget {
    let (transport, is_local) = match dial.addr() {
        ConnectionAddr::TcpTls { host, .. } => (Transport::Encrypted, is_loopback(host)),
        ConnectionAddr::Tcp(host, _) if dial.has_password() => {
            (Transport::PlainWithPassword, is_loopback(host))
        }
        ConnectionAddr::Tcp(host, _) => (Transport::Plain, is_loopback(host)),
        _ => (Transport::Plain, true),
    };
    ProbeTarget {
        name: format!("server {}", dial.addr()),
        user: dial.user().unwrap_or_else(|| "default".to_owned()),
        is_local,
        transport,
        failover,
        slots: Vec::new(),
        variant: ScriptVariant::Server,
        is_resp2,
        dial,
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn not_sent(error: &OpenError) -> StoreError {
    failed(format!("{error:#}"))
}

fn failed(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}
