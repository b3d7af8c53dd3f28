//! Clusters: they serve all slots, migrate them step by step, and fail over.

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
fn every_flavor_forms_a_cluster_that_redirects_to_the_owner_of_a_key() {
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
fn a_migrating_slot_replies_ask_for_migrated_keys_and_moved_afterwards() {
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
fn repeated_planned_failovers_promote_the_replica() {
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
fn a_killed_master_is_replaced_and_restarts_as_a_replica() {
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
fn a_frozen_master_is_replaced_and_resumes_as_a_replica() {
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
