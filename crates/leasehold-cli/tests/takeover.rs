//! A holder and the first waiter gone at the same time: the next one has the lock within a bounded time, on every store that
//! processes share.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::time::{Duration, Instant};

use common::Place;
use leasehold_testkit::{Cluster, Flavor, Sentinels, Server};

const TTL: Duration = Duration::from_secs(2);

/// What is promised for each frozen process before the first live one, and once more.
const STEP: Duration = Duration::from_secs(5);

/// Starting a command on a busy machine.
const NOISE: Duration = Duration::from_secs(3);

/// The holder and the first waiter get this signal. How long the second waiter then waits.
fn after(signal: &str, place: &Place, kind: &[&str]) -> Duration {
    let name = format!("nightly{}{signal}", kind.concat());
    let start = |command: &str| {
        let run = ["run", "--ttl", "2s"];
        let what = [name.as_str(), "--", "sh", "-c", command];
        place.start(&[&run[..], kind, &what[..]].concat())
    };
    let mut holder = start("echo held; sleep 600");
    assert_eq!(holder.line(), "held");
    let first = start("echo held; sleep 600");
    place.until_waiting(&name, 1);
    let mut second = start("echo held");
    place.until_waiting(&name, 2);
    first.signal(signal);
    holder.signal(signal);
    let began = Instant::now();
    assert_eq!(second.line(), "held");
    let took = began.elapsed();
    assert_eq!(second.end(), 0);
    took
}

fn is_bounded(place: &Place, kind: &[&str]) {
    let took = after("KILL", place, kind);
    assert!(took < TTL + STEP + NOISE, "both were killed, and it took {took:?}");
    let took = after("STOP", place, kind);
    assert!(took < TTL + 2 * STEP + NOISE, "both were stopped, and it took {took:?}");
}

#[test]
fn in_a_file() {
    is_bounded(&Place::new(), &[]);
}

#[test]
fn on_a_server() {
    let server = Server::on_port();
    is_bounded(&Place::on(&server.url()), &[]);
}

#[test]
fn on_a_server_for_other_kinds() {
    let server = Server::on_socket();
    for kind in [&["-x"][..], &["--semaphore", "1"]] {
        let took = after("KILL", &Place::on(&server.socket_url()), kind);
        assert!(took < TTL + STEP + NOISE, "{kind:?}: it took {took:?}");
    }
}

#[test]
fn on_servers_of_other_versions() {
    for flavor in [Flavor::Redis62, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).start();
        let took = after("KILL", &Place::on(&server.url()), &[]);
        assert!(took < TTL + STEP + NOISE, "{flavor:?}: it took {took:?}");
    }
}

#[test]
fn behind_sentinels() {
    let sentinels = Sentinels::start();
    let took = after("KILL", &Place::on(&sentinels.url(Sentinels::SERVICE)), &[]);
    assert!(took < TTL + STEP + NOISE, "it took {took:?}");
}

#[test]
fn in_a_cluster() {
    let cluster = Cluster::start();
    let took = after("KILL", &Place::on(&cluster.url()), &[]);
    assert!(took < TTL + STEP + NOISE, "it took {took:?}");
}
