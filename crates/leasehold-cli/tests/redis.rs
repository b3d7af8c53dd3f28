//! The program on every way to reach Redis: run, wait, look, take away.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::io::{BufRead as _, BufReader};

use common::Place;
use leasehold_testkit::{Certificates, Cluster, Proxy, Sentinels, Server, wait_until};

/// One process runs a command under the lock, and another waits. `show` prints both, and a forced release ends the lease.
fn is_used_as_any_other(url: &str) {
    let place = Place::on(url);
    let gone = place.path("gone");
    let script = format!("echo $LEASEHOLD_TOKEN; until [ -e {} ]; do sleep 0.05; done", gone.display());
    let mut holder = place.start(&["run", "nightly", "--", "sh", "-c", &script]);
    let first: u64 = holder.line().parse().expect("a token");
    assert_eq!(place.code(&["run", "-n", "nightly", "--", "true"]).0, 1, "it is held");
    let mut waiter = place.start(&["run", "nightly", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"]);
    place.until_waiting("nightly", 1);
    assert_eq!(place.locks().as_array().map(Vec::len), Some(1));
    std::fs::write(&gone, "").expect("the folder is there");
    let second: u64 = waiter.line().parse().expect("a token");
    assert!(holder.end() == 0 && waiter.end() == 0 && first < second);

    let mut stuck = place.start(&["run", "nightly", "--", "sleep", "600"]);
    place.until_held("nightly");
    assert_eq!(place.code(&["release", "--force", "nightly"]).0, 0);
    assert_eq!(stuck.end(), 124, "its command is stopped when the lease is taken away");
}

#[test]
fn server_is_diagnosed_by_port_socket_and_tls() {
    let server = Server::on_port();
    is_used_as_any_other(&server.url());
    is_used_as_any_other(&server.socket_url());
    let files = Certificates::new();
    let encrypted = Server::builder().tls(&files.server, &files.authority).password("s3cret").start();
    is_used_as_any_other(&format!("{}?ca={}", encrypted.url(), files.authority.display()));
}

#[test]
fn sentinel_address_is_diagnosed() {
    let sentinels = Sentinels::start();
    is_used_as_any_other(&sentinels.url(Sentinels::SERVICE));
}

#[test]
fn cluster_is_diagnosed() {
    let cluster = Cluster::start();
    is_used_as_any_other(&cluster.url());
}

#[test]
fn candidate_campaigns_at_a_store_that_starts_later() {
    let mut server = Server::on_port();
    server.stop();
    let place = Place::on(&server.url());
    let mut elect = place.start(&["elect", "--backoff", "100ms", "a", "-c", "echo on; exec sleep 60"]);
    let mut said = String::new();
    BufReader::new(elect.0.stderr.take().expect("it is piped")).read_line(&mut said).expect("text");
    assert!(said.contains("campaigning again in 100 ms"), "{said}");
    server.start();
    assert_eq!(elect.line(), "on");
    elect.signal("TERM");
    assert_eq!(elect.end(), 128 + 15);
}

#[test]
fn lock_is_not_retained_after_a_signal_between_its_grant_and_the_start() {
    let server = Server::on_port();
    let (place, proxy) = (Place::on(&server.url()), Proxy::before(&server));
    let mut holder = place.start(&["run", "a", "--", "sleep", "600"]);
    place.until_held("a");
    let address = proxy.url();
    let mut run = place.start(&["run", "--store", &address, "--min-hold", "1h", "a", "--", "sleep", "600"]);
    place.until_waiting("a", 1);
    proxy.hold_replies(true);
    holder.signal("TERM");
    assert_eq!(holder.end(), 143);
    place.until_held("a");
    proxy.release_held();
    wait_until("it has the grant, and waits for the inspection of the other kind", || proxy.held() > 0);
    run.signal("TERM");
    wait_until("the lock is free", || place.locks() == serde_json::json!([]));
    proxy.hold_replies(false);
    proxy.release_held();
    assert_eq!(run.end(), 143);
}

#[test]
fn lock_is_not_retained_after_a_command_that_was_not_started() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    // The renewal before the start of a command whose grace is half of the ttl.
    server.run(&["ACL", "SETUSER", "default", "-pexpire"]);
    for (name, options) in [("a", &["--min-hold", "1h"][..]), ("b", &["--once-per", "1h", "--at-least-once"])]
    {
        let lease = ["run", "--ttl", "20s", "--grace", "10s"];
        let (code, said) = place.code(&[&lease, options, &[name, "--", "true"]].concat());
        assert!(code == 125 && said.contains("can't run this command"), "{code}: {said}");
        assert_eq!(place.locks(), serde_json::json!([]), "{name}");
    }
    server.run(&["ACL", "SETUSER", "default", "+pexpire"]);
    let output = place.output(&["run", "--once-per", "1h", "--at-least-once", "b", "--", "echo", "runs"]);
    assert_eq!(output.stdout, b"runs\n", "{output:?}");
}
