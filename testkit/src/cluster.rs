//! A cluster: usually three masters with a replica each, formed by the commands of `redis-cli --cluster create`.
//!
//! A node is identified by its index in [`Cluster::nodes`]. Slots migrate step by step, so that a test can run in the middle of a
//! migration.

mod view;

use std::time::{Duration, Instant};

use redis::{RedisResult, Value};

use crate::builder::Builder;
use crate::sentinels::{is_followed, replicable};
use crate::server::Server;
use crate::wait::{wait_for, wait_or_explain};

use view::{View, view};

const MASTERS: usize = 3;
const SLOTS: usize = 16_384;

/// After this time without a response a node counts as down. A process of a busy machine may be stopped for a second or two.
const NODE_TIMEOUT_MS: &str = "4000";

/// Interval at which CLUSTER MEET is repeated.
const MEET_AGAIN: Duration = Duration::from_secs(2);

/// Interval at which CLUSTER FAILOVER is repeated.
const MANUAL_FAILOVER: Duration = Duration::from_secs(5);

/// Number of keys per MIGRATE.
const BATCH: &str = "100";

/// A cluster, killed when this value is dropped.
pub struct Cluster {
    /// The nodes: at first the masters, then a replica of each in the same order.
    pub nodes: Vec<Server>,
    /// Their node ids, in the same order.
    ids: Vec<String>,
    /// Number of masters at first.
    masters: usize,
}

impl Cluster {
    /// Starts a cluster with the default program and settings.
    #[must_use]
    pub fn start() -> Self {
        Self::of(&Server::builder())
    }

    /// Starts a cluster of servers with these options, and waits until all nodes agree on it.
    #[must_use]
    pub fn of(node: &Builder) -> Self {
        Self::with_masters(node, MASTERS, true)
    }

    /// Starts a cluster with this number of masters, each with a replica or none.
    #[must_use]
    pub fn with_masters(node: &Builder, masters: usize, has_replicas: bool) -> Self {
        let node = replicable(node)
            .setting("cluster-enabled", "yes")
            .setting("cluster-node-timeout", NODE_TIMEOUT_MS)
            // A replica is eligible however long it has been disconnected from its master.
            .setting("cluster-replica-validity-factor", "0");
        let node = if node.has_tls { node.setting("tls-cluster", "yes") } else { node };
        let count = if has_replicas { 2 * masters } else { masters };
        let nodes: Vec<Server> = (0..count).map(|_| node.clone().start()).collect();
        let ids = nodes.iter().map(|node| node.query(&["CLUSTER", "MYID"]).expect("it answers"));
        let cluster = Self { ids: ids.collect(), nodes, masters };
        cluster.assign_slots();
        cluster.connect_nodes();
        cluster.attach_replicas();
        cluster
    }

    fn assign_slots(&self) {
        for (epoch, node) in (1..).zip(&self.nodes) {
            // Distinct epochs from the start: otherwise the nodes would first have to resolve the conflict.
            node.run(&["CLUSTER", "SET-CONFIG-EPOCH", &format!("{epoch}")]);
        }
        for (number, master) in self.nodes[..self.masters].iter().enumerate() {
            let slots = number * SLOTS / self.masters..(number + 1) * SLOTS / self.masters;
            let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
            // One by one, since Redis 6.2 has no ADDSLOTSRANGE.
            let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
            master.run(&words.collect::<Vec<_>>());
        }
    }

    fn connect_nodes(&self) {
        let mut met: Option<Instant> = None;
        self.wait_until("every node knows every other", || {
            // On a busy machine a handshake may time out, and the node is forgotten.
            if met.is_none_or(|met| met.elapsed() > MEET_AGAIN) {
                self.meet();
                met = Some(Instant::now());
            }
            self.all_see(|view| view.nodes.len() == self.nodes.len() && view.is_settled())
        });
    }

    /// Sends CLUSTER MEET to every node for each node that it does not know.
    fn meet(&self) {
        for node in &self.nodes {
            let Some(view) = view(node) else { continue };
            for (other, id) in self.nodes.iter().zip(&self.ids) {
                if view.of(id).is_none() {
                    node.run(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]);
                }
            }
        }
    }

    fn attach_replicas(&self) {
        let replicas = self.masters..self.nodes.len();
        let count = replicas.len();
        for (master, replica) in (0..self.masters).zip(replicas) {
            self.nodes[replica].run(&["CLUSTER", "REPLICATE", &self.ids[master]]);
        }
        self.wait_until("every master has its replica and every node knows of it", || {
            self.nodes[..count].iter().all(|master| is_followed(master, 1))
                && self
                    .all_see(|view| view.nodes.iter().filter(|node| node.master.is_some()).count() == count)
        });
        self.wait_until("the cluster serves all slots", || self.is_ok());
    }

    /// The URL for clients, with password and TLS: `redis-cluster://host:port,host:port,…`.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        let tls = if self.nodes[0].has_tls() { "?tls=true" } else { "" };
        format!("redis-cluster://{}{}{tls}", self.nodes[0].login(), hosts.join(","))
    }

    /// The slot of a key.
    #[must_use]
    pub fn slot_of(&self, key: &str) -> u16 {
        self.any().query(&["CLUSTER", "KEYSLOT", key]).expect("a node answers")
    }

    /// The master of a key's slot.
    #[must_use]
    pub fn node_of(&self, key: &str) -> usize {
        self.owner_of(self.slot_of(key))
    }

    /// The master of a slot. Waits until the nodes agree on it.
    #[must_use]
    pub fn owner_of(&self, slot: u16) -> usize {
        wait_for(|| self.agreed_owner(slot)).expect("the nodes do not agree on a slot's master")
    }

    /// A replica of a master that has one.
    #[must_use]
    pub fn replica_of(&self, master: usize) -> usize {
        let id = &self.ids[master];
        let found = wait_for(|| {
            let view = view(self.any())?;
            let replica =
                view.nodes.iter().find(|node| node.master.as_ref() == Some(id) && !node.has_failed)?;
            self.number_of(&replica.id)
        });
        found.expect("the master has no replica")
    }

    /// Begins to migrate a slot to another master. Its present master then replies ASK for keys that it lacks, and the other one
    /// accepts these after ASKING.
    pub fn migrate_begin(&self, slot: u16, to: usize) {
        let from = self.owner_of(slot);
        let slot = slot.to_string();
        self.nodes[to].run(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]]);
        self.nodes[from].run(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]]);
    }

    /// Migrates all present keys of the slot.
    pub fn migrate_keys(&self, slot: u16, to: usize) {
        let from = &self.nodes[self.owner_of(slot)];
        let port = self.nodes[to].port().to_string();
        loop {
            let keys: Vec<String> = from
                .query(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), BATCH])
                .expect("a master knows its keys");
            if keys.is_empty() {
                return;
            }
            let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000"];
            if let Some(password) = from.password() {
                words.extend(["AUTH", password]);
            }
            words.push("KEYS");
            words.extend(keys.iter().map(String::as_str));
            from.run(&words);
        }
    }

    /// Completes the migration: the slot belongs to the other master, and every node knows it.
    pub fn migrate_end(&self, slot: u16, to: usize) {
        let from = self.owner_of(slot);
        let id = &self.ids[to];
        // The new owner first: in the other order the slot would have no owner for a moment.
        for node in [to, from] {
            self.nodes[node].run(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", id]);
        }
        self.wait_until("every node knows the slot's new master", || self.agreed_owner(slot) == Some(to));
    }

    /// Migrates these slots of one master, one after the other, over a connection to each of the two. The other nodes learn of it by
    /// gossip.
    pub fn move_slots(&self, slots: &[u16], to: usize) {
        let Some(first) = slots.first() else { return };
        let from = self.owner_of(*first);
        let mut both = [from, to].map(|node| self.nodes[node].admin());
        let port = self.nodes[to].port().to_string();
        for slot in slots.iter().map(u16::to_string) {
            let mut run = |node: usize, words: &[&str]| -> Value {
                let sent = redis::cmd(words[0]).arg(&words[1..]).query(&mut both[node]);
                sent.unwrap_or_else(|error| panic!("{words:?}: {error}"))
            };
            run(1, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]]);
            run(0, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]]);
            loop {
                let keys = run(0, &["CLUSTER", "GETKEYSINSLOT", &slot, BATCH]);
                let keys: Vec<String> = redis::from_redis_value(keys).expect("a master knows its keys");
                if keys.is_empty() {
                    break;
                }
                let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
                run(0, &words.into_iter().chain(keys.iter().map(String::as_str)).collect::<Vec<_>>());
            }
            for node in [1, 0] {
                run(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &self.ids[to]]);
            }
        }
    }

    /// Starts a planned failover, waits until every node knows the new master, and returns its index.
    pub fn fail_over(&self, of: usize) -> usize {
        let replica = self.ready_replica_of(of);
        let mut asked: Option<Instant> = None;
        self.wait_until("the replica becomes a master and every node knows", || {
            // Masters refuse a second vote within a short time, and the replica then gives up without an error.
            if asked.is_none_or(|asked| asked.elapsed() > MANUAL_FAILOVER) {
                let _: RedisResult<()> = self.nodes[replica].query(&["CLUSTER", "FAILOVER"]);
                asked = Some(Instant::now());
            }
            self.is_known_as_master(replica)
        });
        replica
    }

    /// Kills a master, waits until its replica has taken over and all slots are served, and returns its index.
    pub fn kill(&mut self, master: usize) -> usize {
        let replica = self.ready_replica_of(master);
        self.nodes[master].stop();
        self.wait_for_master(replica);
        replica
    }

    /// Freezes a master, waits until its replica has taken over and all slots are served, and returns its index.
    pub fn freeze(&self, master: usize) -> usize {
        let replica = self.ready_replica_of(master);
        self.nodes[master].signal("STOP");
        self.wait_for_master(replica);
        replica
    }

    fn wait_for_master(&self, replica: usize) {
        self.wait_until("the replica becomes a master and every node knows", || {
            self.is_known_as_master(replica)
        });
    }

    /// A replica that can take over: in sync, and known to every node.
    fn ready_replica_of(&self, master: usize) -> usize {
        let replica = self.replica_of(master);
        let (master_id, id) = (&self.ids[master], &self.ids[replica]);
        self.wait_until("the replica has caught up and every node knows of it", || {
            is_followed(&self.nodes[master], 1)
                && self
                    .all_see(|view| view.of(id).is_some_and(|node| node.master.as_ref() == Some(master_id)))
        });
        replica
    }

    fn is_known_as_master(&self, number: usize) -> bool {
        let id = &self.ids[number];
        self.all_see(|view| view.of(id).is_some_and(|node| node.master.is_none() && node.has_slots()))
            && self.is_ok()
    }

    fn wait_until(&self, what: &str, is_so: impl FnMut() -> bool) {
        wait_or_explain(what, is_so, || {
            let seen = self.running().map(|node| {
                let text: RedisResult<String> = node.query(&["CLUSTER", "NODES"]);
                format!("seen by {}:\n{}", node.port(), text.unwrap_or_else(|error| error.to_string()))
            });
            seen.collect()
        });
    }

    fn agreed_owner(&self, slot: u16) -> Option<usize> {
        let mut owners = self.running().map(|node| view(node)?.owner_of(slot));
        let first = owners.next()?;
        let do_agree = owners.all(|owner| owner == first);
        self.number_of(&first?).filter(|_| do_agree)
    }

    fn all_see(&self, is_so: impl Fn(&View) -> bool) -> bool {
        self.running().all(|node| view(node).is_some_and(|view| is_so(&view)))
    }

    fn is_ok(&self) -> bool {
        self.running().all(|node| {
            let info: RedisResult<String> = node.query(&["CLUSTER", "INFO"]);
            info.is_ok_and(|info| info.contains("cluster_state:ok"))
        })
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_up())
    }

    fn any(&self) -> &Server {
        self.running().next().expect("a node runs")
    }

    fn number_of(&self, id: &str) -> Option<usize> {
        self.ids.iter().position(|known| known == id)
    }
}
