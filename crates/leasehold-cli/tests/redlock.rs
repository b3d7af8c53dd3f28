//! The program on servers that vote: run, wait, look, take away, lead; and what is said about servers that are not there.

#![allow(missing_docs, reason = "a test")]

mod common;

use common::{Place, until};
use leasehold_testkit::Server;

/// Servers that vote, and the program that uses them.
struct Nodes {
    servers: Vec<Server>,
    place: Place,
}

impl Nodes {
    fn start() -> Self {
        let servers: Vec<Server> =
            (0..3).map(|number| Server::builder().password(&format!("s3cret{number}")).start()).collect();
        let nodes: Vec<String> = servers.iter().map(Server::url).collect();
        let place = Place::on(&format!("redlock:{} ?node_timeout_ms=5000", nodes.join(" ")));
        Self { servers, place }
    }
}

#[test]
fn show_names_the_holder_while_another_waits() {
    let nodes = Nodes::start();
    let place = &nodes.place;
    let gone = place.path("gone");
    let script = format!("echo $LEASEHOLD_TOKEN; until [ -e {} ]; do sleep 0.05; done", gone.display());
    let mut holder = place.start(&["run", "nightly", "--", "sh", "-c", &script]);
    let first: u64 = holder.line().parse().expect("a token");
    assert_eq!(place.code(&["run", "-n", "nightly", "--", "true"]).0, 1, "it is held");
    assert_eq!(place.code(&["run", "-w", "0.1", "nightly", "--", "true"]).0, 1, "it is held");
    let mut waiter = place.start(&["run", "nightly", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"]);
    let has_queue = |server: &Server| {
        let keys: i64 = server.query(&["EXISTS", "leasehold:4:{queue:mutex:nightly}"]).expect("it runs");
        keys == 1
    };
    until(|| nodes.servers.iter().any(has_queue).then_some(()));
    let view = place.until_held("nightly");
    // A node that granted it after the quorum may have given it a higher one.
    assert!(view["holders"][0]["token"].as_u64() >= Some(first));
    assert_eq!(place.locks().as_array().map(Vec::len), Some(1), "queues are no locks");
    std::fs::write(&gone, "").expect("the folder is there");
    let second: u64 = waiter.line().parse().expect("a token");
    assert!(holder.end() == 0 && waiter.end() == 0 && first < second);
}

#[test]
fn force_released_leader_loses_and_one_leads_at_a_time() {
    let mut nodes = Nodes::start();
    // Any minority may be away.
    nodes.servers[1].stop();
    let place = &nodes.place;
    let mut stuck = place.start(&["run", "nightly", "--", "sleep", "600"]);
    place.until_held("nightly");
    assert_eq!(place.code(&["release", "--force", "nightly"]).0, 0);
    assert_eq!(stuck.end(), 124, "its command is stopped when the lease is taken away");
    let mut leader = place.start(&["elect", "scheduler", "--", "sh", "-c", "echo leads; exec sleep 600"]);
    assert_eq!(leader.line(), "leads");
    let mut next = place.start(&["elect", "scheduler", "--", "sh", "-c", "echo leads; exec sleep 600"]);
    leader.signal("TERM");
    assert_eq!(next.line(), "leads");
    next.signal("TERM");
    leader.end();
    next.end();
}

#[test]
fn shared_kinds_are_refused_on_a_quorum() {
    let nodes = Nodes::start();
    for options in [&["-s"][..], &["--semaphore", "2"]] {
        let words = [&["run"], options, &["nightly", "--", "true"]].concat();
        let (code, said) = nodes.place.code(&words);
        assert!(code != 0 && said.contains("a quorum supports only mutexes and elections"), "{said}");
    }
}

#[test]
fn missing_quorum_error_names_each_node_and_no_password() {
    let mut nodes = Nodes::start();
    nodes.servers[0].stop();
    nodes.servers[2].stop();
    let commands = [
        &["run", "nightly", "--", "true"][..],
        &["show", "nightly"],
        &["ls"],
        &["release", "--force", "nightly"],
    ];
    for words in commands {
        let (code, said) = nodes.place.code(words);
        assert!(code != 0 && said.contains("1 of 3 nodes are connected, 2 are needed"), "{words:?}: {said}");
        for node in [0, 2] {
            assert!(said.contains(&nodes.servers[node].port().to_string()), "{words:?}: {said}");
        }
        assert!(!said.contains("s3cret"), "{words:?}: {said}");
    }
}
