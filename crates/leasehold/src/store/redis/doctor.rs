//! What an operator should know about Redis servers on which locks depend.
//!
//! `look` sees one server, over a connection of its own, and `trial` finds out what its user may do and what a lock costs.
//! `judge` says what was seen means for locks, and `whole` what several servers mean together: both are pure.
//!
//! No setting is changed. The trial takes and releases a lock of a name that nobody else uses, and deletes its key.

mod acl_check;
mod probe;
mod server_rules;
mod topology_rules;

use std::time::Duration;

use leasehold_core::Failure;
use redis::{ConnectionAddr, ConnectionInfo};

use super::cluster::Cluster;
use super::codec::Dialect;
use super::connect::Credentials;
use super::error::AddressState;
use super::sentinel::Sentinels;
use super::{Nodes, Redis};
use crate::diagnostics::{Component, Diagnosis};
use crate::error::Error;
use crate::store::StoreError;
use crate::url::{Place, RedisUrl};
use probe::{Patient, Seen, Succession, Way};

/// Where a store's servers are.
pub(super) enum Address {
    Url(Box<RedisUrl>),
    /// The caller knew how to connect.
    Own(Box<ConnectionInfo>),
}

/// Looks at every server of this store.
pub(super) async fn diagnose(nodes: &Nodes, address: &Address) -> Result<Diagnosis, StoreError> {
    let mut doctor = Doctor { seen: Vec::new(), components: Vec::new() };
    match address {
        Address::Own(info) => {
            doctor.see(patient_at((**info).clone(), Succession::ByHand, false)).await.map_err(failed)?;
        }
        Address::Url(url) => doctor.see_all(nodes, url).await?,
    }
    Ok(doctor.conclude())
}

/// Looks at several servers that vote, and whether they are independent of each other.
pub(crate) async fn examine_voters(voters: &[(&str, &Redis)], abstains_for: Option<Duration>) -> Diagnosis {
    let mut doctor = Doctor { seen: Vec::new(), components: Vec::new() };
    let mut places = Vec::new();
    for (name, voter) in voters {
        let first = doctor.seen.len();
        let Address::Url(url) = &*voter.address else { continue };
        let trouble = doctor.see_all(&voter.nodes, url).await.err();
        if let Some(trouble) = trouble {
            doctor.components.push(topology_rules::unseen((*name).to_owned(), &trouble.message));
        }
        // Of several, the master is seen first.
        places.push((*name, (doctor.seen.len() > first).then_some(first)));
    }
    for seen in &mut doctor.seen {
        seen.abstains = abstains_for.is_some();
        seen.votes = true;
    }
    let seen: Vec<topology_rules::Voter<'_>> =
        places.iter().map(|(name, place)| (*name, place.map(|place| &doctor.seen[place]))).collect();
    let quorum = topology_rules::judge_voters(&seen, abstains_for);
    let mut components = vec![quorum];
    components.extend(doctor.seen.iter().map(server_rules::judge));
    components.append(&mut doctor.components);
    components.extend(topology_rules::judge_clocks(&doctor.seen, true));
    Diagnosis { components }
}

/// Goes from server to server, one after the other, so that no look at one disturbs the measurements at another.
struct Doctor {
    seen: Vec<Seen>,
    /// What is no server, and servers that could not be seen.
    components: Vec<Component>,
}

impl Doctor {
    async fn see_all(&mut self, nodes: &Nodes, url: &RedisUrl) -> Result<(), StoreError> {
        let credentials =
            Credentials::new(&url.login, url.database, url.tls.as_ref()).map_err(|error| not_sent(&error))?;
        let info = match (&url.place, nodes) {
            (Place::Sentinels { hosts, service, login }, _) => {
                let own = Credentials::new(login, 0, url.tls.as_ref()).map_err(|error| not_sent(&error))?;
                let hosts = hosts.iter().map(|host| own.at(host)).collect::<Result<_, _>>();
                let hosts = hosts.map_err(|error| not_sent(&error))?;
                let sentinels = Sentinels { hosts, service: service.clone(), credentials };
                return self.see_sentinels(&sentinels, url.is_resp2).await;
            }
            (Place::Cluster(_), Nodes::Cluster { cluster, dialect, .. }) => {
                return self.see_cluster(cluster, *dialect, &credentials).await;
            }
            (Place::Cluster(_), Nodes::Server { .. }) => return Ok(()),
            (Place::Server(host), _) => credentials.at(host),
            (Place::Socket(path), _) => credentials.login_to(ConnectionAddr::Unix(path.clone())),
        };
        let info = info.map_err(|error| not_sent(&error))?;
        self.see(patient_at(info, Succession::ByHand, url.is_resp2)).await.map_err(failed)
    }

    async fn see(&mut self, patient: Patient) -> Result<(), String> {
        self.seen.push(probe::at(patient).await?);
        Ok(())
    }

    /// One server of several: that it can't be seen is a finding.
    async fn see_if_possible(&mut self, patient: Result<Patient, Error>) {
        let (name, trouble) = match patient {
            Ok(patient) => (patient.name.clone(), self.see(patient).await.err()),
            Err(error) => ("a server".to_owned(), Some(error.to_string())),
        };
        if let Some(trouble) = trouble {
            self.components.push(topology_rules::unseen(name, &trouble));
        }
    }

    async fn see_sentinels(&mut self, sentinels: &Sentinels, is_resp2: bool) -> Result<(), StoreError> {
        let (_, info) = sentinels.find_master(AddressState::Unproven).await?;
        let patient = |info| patient_at(info, Succession::Sentinels, is_resp2);
        let master = probe::at(patient(info)).await.map_err(failed)?;
        let replicas = topology_rules::replicas_of(&master.info);
        self.seen.push(master);
        for replica in replicas {
            self.see_if_possible(sentinels.credentials.at(&replica).map(patient)).await;
        }
        let mut opinions = Vec::new();
        for sentinel in &sentinels.hosts {
            let opinion = probe::at_sentinel(sentinel, &sentinels.service).await;
            opinions.push((sentinel.addr().to_string(), opinion));
        }
        self.components.push(topology_rules::judge_sentinels(&sentinels.service, &opinions));
        Ok(())
    }

    async fn see_cluster(
        &mut self,
        cluster: &Cluster,
        dialect: Dialect,
        credentials: &Credentials,
    ) -> Result<(), StoreError> {
        let mut trouble = super::uncovered();
        for host in cluster.masters() {
            let info = credentials.at(&host).map_err(|error| not_sent(&error))?;
            match probe::slots_by(&info).await {
                Err(what) => trouble = failed(what),
                Ok(slots) => {
                    let nodes = topology_rules::nodes_of(&slots, &host);
                    for node in &nodes {
                        let patient = credentials.at(&node.host).map(|info| Patient {
                            slots: node.slots.clone(),
                            dialect,
                            ..patient_at(info, Succession::Cluster, false)
                        });
                        self.see_if_possible(patient).await;
                    }
                    self.components.push(topology_rules::judge_cluster(&nodes, &self.seen));
                    return Ok(());
                }
            }
        }
        Err(trouble)
    }

    fn conclude(mut self) -> Diagnosis {
        let mut components: Vec<Component> = self.seen.iter().map(server_rules::judge).collect();
        components.append(&mut self.components);
        components.extend(topology_rules::judge_clocks(&self.seen, false));
        Diagnosis { components }
    }
}

fn patient_at(info: ConnectionInfo, succession: Succession, is_resp2: bool) -> Patient {
    let settings = info.redis_settings();
    let (way, is_local) = match info.addr() {
        ConnectionAddr::TcpTls { host, .. } => (Way::Encrypted, is_loopback(host)),
        ConnectionAddr::Tcp(host, _) if settings.password().is_some() => {
            (Way::PlainWithPassword, is_loopback(host))
        }
        ConnectionAddr::Tcp(host, _) => (Way::Plain, is_loopback(host)),
        _ => (Way::Plain, true),
    };
    Patient {
        name: format!("server {}", info.addr()),
        user: settings.username().unwrap_or("default").to_owned(),
        is_local,
        way,
        succession,
        slots: Vec::new(),
        dialect: Dialect::SERVER,
        is_resp2,
        info,
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn not_sent(error: &Error) -> StoreError {
    failed(error.to_string())
}

fn failed(message: String) -> StoreError {
    StoreError { failure: Failure::NotSent, message }
}
