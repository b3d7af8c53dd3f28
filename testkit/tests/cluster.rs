//! Clusters: that they serve all slots, move them step by step, and replace their masters.

use leasehold_testkit::{Cluster, Flavor, Server, wait_until};
use redis::{ErrorKind, RedisResult, ServerErrorKind};

fn get(cluster: &Cluster, node: usize, key: &str) -> RedisResult<Option<String>> {
    cluster.nodes[node].query(&["GET", key])
}

fn kind(answer: RedisResult<Option<String>>) -> ErrorKind {
    answer.unwrap_err().kind()
}

const MOVED: ErrorKind = ErrorKind::Server(ServerErrorKind::Moved);
const ASK: ErrorKind = ErrorKind::Server(ServerErrorKind::Ask);

#[test]
fn every_flavor_forms_a_cluster_that_knows_where_a_key_belongs() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        for key in ["a", "b", "c", "{a}b"] {
            let owner = cluster.node_of(key);
            cluster.nodes[owner].run(&["SET", key, "1"]);
            for other in (0..3).filter(|node| *node != owner) {
                assert_eq!(kind(get(&cluster, other, key)), MOVED);
            }
        }
        let ports: Vec<String> =
            cluster.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        assert_eq!(cluster.url(), format!("redis-cluster://{}", ports.join(",")));
    }
}

#[test]
fn a_slot_that_is_being_moved_asks_for_the_keys_that_are_gone_and_then_belongs_elsewhere() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::of(&Server::builder().flavor(flavor).password("s3cret"));
        let (slot, from) = (cluster.slot_of("{a}"), cluster.node_of("{a}"));
        let to = (from + 1) % 3;
        for number in 0..250 {
            cluster.nodes[from].run(&["SET", &format!("{{a}}{number}"), "1"]);
        }
        cluster.migrate_begin(slot, to);
        assert_eq!(cluster.node_of("{a}"), from);
        assert_eq!(get(&cluster, from, "{a}7").unwrap().as_deref(), Some("1"));
        assert_eq!(kind(get(&cluster, from, "{a}new")), ASK);
        cluster.migrate_keys(slot, to);
        assert_eq!(kind(get(&cluster, from, "{a}7")), ASK);
        assert_eq!(kind(get(&cluster, to, "{a}7")), MOVED);
        cluster.migrate_end(slot, to);
        assert_eq!(cluster.node_of("{a}"), to);
        assert_eq!(get(&cluster, to, "{a}249").unwrap().as_deref(), Some("1"));
        assert_eq!(kind(get(&cluster, from, "{a}7")), MOVED);
    }
}

#[test]
fn a_planned_failover_makes_the_replica_the_master_however_often() {
    let cluster = Cluster::start();
    let master = cluster.node_of("a");
    cluster.nodes[master].run(&["SET", "a", "1"]);
    let replica = cluster.fail_over(master);
    assert_ne!(replica, master);
    assert_eq!(cluster.node_of("a"), replica);
    assert_eq!(get(&cluster, replica, "a").unwrap().as_deref(), Some("1"));
    assert_eq!(cluster.fail_over(replica), master);
    assert_eq!(cluster.fail_over(master), replica);
    assert_eq!(cluster.fail_over(replica), master);
    assert_eq!(cluster.node_of("a"), master);
}

#[test]
fn a_killed_master_is_replaced_by_its_replica_and_comes_back_as_its_replica() {
    for flavor in Flavor::ALL {
        let mut cluster = Cluster::of(&Server::builder().flavor(flavor).password("s3cret"));
        let master = cluster.node_of("a");
        let replica = cluster.kill(master);
        assert_ne!(replica, master);
        assert_eq!(cluster.node_of("a"), replica);
        cluster.nodes[replica].run(&["SET", "a", "1"]);
        cluster.nodes[master].start();
        assert_eq!(cluster.replica_of(replica), master);
        wait_until("it sends clients to the new master", || {
            get(&cluster, master, "a").is_err_and(|error| error.kind() == MOVED)
        });
    }
}

#[test]
fn a_frozen_master_is_replaced_by_its_replica_and_follows_it_when_it_goes_on() {
    let cluster = Cluster::start();
    let master = cluster.node_of("a");
    let replica = cluster.freeze(master);
    assert_ne!(replica, master);
    assert_eq!(cluster.node_of("a"), replica);
    cluster.nodes[master].signal("CONT");
    wait_until("it sends clients to the new master", || {
        get(&cluster, master, "a").is_err_and(|error| error.kind() == MOVED)
    });
}
