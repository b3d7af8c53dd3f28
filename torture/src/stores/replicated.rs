//! Faults of servers that have replicas: by Sentinel, and in a cluster.

use std::collections::{BTreeMap, HashMap};
use std::thread::sleep;
use std::time::Duration;

use leasehold_testkit::{Cluster, Sentinels, Server, wait_until};
use redis::RedisResult;

use super::injection::{Done, Injection, command, kill_clients};
use super::stranger;
use crate::faults::Fault;

/// Pause between the steps of a slot migration.
const STEP: Duration = Duration::from_millis(100);

pub(super) fn inject_sentinels(sentinels: &mut Sentinels, injection: &mut Injection<'_>) -> Done {
    let old = sentinels.master_number();
    let new = match injection.fault {
        Fault::Failover => sentinels.fail_over(),
        Fault::MasterKill => {
            let new = sentinels.kill_master();
            sentinels.servers[old].start();
            new
        }
        Fault::MasterFreeze => {
            let new = sentinels.freeze_master();
            sentinels.servers[old].signal("CONT");
            new
        }
        _ => return disturb(&sentinels.servers[old], injection),
    };
    wait_until("the servers follow the new master, and all sentinels know", || {
        let servers = sentinels.servers.iter().enumerate();
        servers.filter(|(number, _)| *number != new).all(|(_, server)| is_replica(server))
            && sentinels.sentinels.iter().all(sees_all_replicas)
    });
    Ok(format!("server {old} to {new}"))
}

/// Whether a sentinel could promote any of the replicas: otherwise it aborts the next failover.
fn sees_all_replicas(sentinel: &Server) -> bool {
    let seen: RedisResult<Vec<HashMap<String, String>>> =
        sentinel.query(&["SENTINEL", "REPLICAS", Sentinels::SERVICE]);
    seen.is_ok_and(|replicas| {
        let is_up =
            |replica: &HashMap<String, String>| replica.get("flags").is_some_and(|flags| flags == "slave");
        replicas.len() == 2 && replicas.iter().all(is_up)
    })
}

pub(super) fn inject_cluster(cluster: &mut Cluster, injection: &mut Injection<'_>) -> Done {
    let slot = slot_of_keys(cluster);
    let old = cluster.owner_of(slot);
    let new = match injection.fault {
        Fault::Failover => cluster.fail_over(old),
        Fault::MasterKill => {
            let new = cluster.kill(old);
            cluster.nodes[old].start();
            new
        }
        Fault::MasterFreeze => {
            let new = cluster.freeze(old);
            cluster.nodes[old].signal("CONT");
            new
        }
        Fault::SlotMigration => return Ok(migrate(cluster, slot, old)),
        Fault::Stranger => return stranger::publish([&cluster.nodes[old]], &stranger::SHARDED, injection),
        _ => return disturb(&cluster.nodes[old], injection),
    };
    wait_until("the old master follows the new one", || is_replica(&cluster.nodes[old]));
    Ok(format!("node {old} to {new}"))
}

fn disturb(master: &Server, injection: &Injection<'_>) -> Done {
    let done = match injection.fault {
        Fault::ClientKill => kill_clients(master),
        _ => command(master, &["SCRIPT", "FLUSH"]),
    };
    done.map(|()| String::new())
}

/// Whether it is a replica in sync.
fn is_replica(server: &Server) -> bool {
    let info: RedisResult<String> = server.query(&["INFO", "replication"]);
    info.is_ok_and(|info| info.contains("role:slave") && info.contains("master_link_status:up"))
}

/// The hash slot of the lock: the one with the most keys, since nothing else uses the cluster.
fn slot_of_keys(cluster: &Cluster) -> u16 {
    let mut slot = None;
    wait_until("a node has a key", || {
        let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
        for node in cluster.nodes.iter().filter(|node| node.is_running()) {
            let keys: Vec<String> = node.query(&["KEYS", "*"]).unwrap_or_default();
            for slot in keys.iter().filter_map(|key| node.query(&["CLUSTER", "KEYSLOT", key]).ok()) {
                *counts.entry(slot).or_default() += 1;
            }
        }
        slot = counts.into_iter().max_by_key(|(_, count)| *count).map(|(slot, _)| slot);
        slot.is_some()
    });
    slot.unwrap_or_default()
}

fn migrate(cluster: &Cluster, slot: u16, from: usize) -> String {
    let master = |number: usize| {
        let info: RedisResult<String> = cluster.nodes[number].query(&["INFO", "replication"]);
        info.is_ok_and(|info| info.contains("role:master"))
    };
    let to = (0..cluster.nodes.len()).find(|number| *number != from && master(*number));
    let to = to.expect("a cluster has several masters");
    cluster.migrate_begin(slot, to);
    sleep(STEP);
    cluster.migrate_keys(slot, to);
    sleep(STEP);
    cluster.migrate_keys(slot, to);
    cluster.migrate_end(slot, to);
    format!("slot {slot} from node {from} to {to}")
}
