//! The holder and the first waiter die together: the next waiter is granted within a bounded time, on every store that processes
//! share.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::Place;
use leasehold_testkit::{Cluster, Flavor, Sentinels, Server, unless_paused_blocking};

/// So long that a busy machine renews the lease in time.
const TTL: Duration = Duration::from_secs(6);

/// Promised delay for each frozen process before the first live one, and once more.
const STEP: Duration = Duration::from_secs(5);

/// Tolerance for starting a command on a busy machine.
const NOISE: Duration = Duration::from_secs(3);

/// A pause of the machine after which the holder, which is still being set up, has its lease.
const PAUSE: Duration = Duration::from_millis(500);

/// Sends this signal to the holder and the first waiter. Returns how long the second waiter then waits.
fn after(signal: &str, place: &Place, kind: &[&str]) -> Duration {
    // Each attempt has a lock of its own.
    static ATTEMPTS: AtomicU32 = AtomicU32::new(0);
    let name = format!("nightly{}{signal}{}", kind.concat(), ATTEMPTS.fetch_add(1, Ordering::Relaxed));
    let start = |command: &str| {
        let run = ["run", "--ttl", "6s"];
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

/// Both are killed.
fn assert_bounded_if_killed(place: &Place, kind: &[&str]) {
    unless_paused_blocking(PAUSE, || {
        let took = after("KILL", place, kind);
        let store = place.store();
        assert!(took < TTL + STEP + NOISE, "{kind:?} on {store}, both killed: granted after {took:?}");
    });
}

fn assert_bounded(place: &Place) {
    assert_bounded_if_killed(place, &[]);
    unless_paused_blocking(PAUSE, || {
        let took = after("STOP", place, &[]);
        assert!(took < TTL + 2 * STEP + NOISE, "both stopped: granted after {took:?}");
    });
}

#[test]
fn takeover_is_bounded_in_a_file() {
    assert_bounded(&Place::new());
}

#[test]
fn takeover_is_bounded_on_a_server() {
    let server = Server::on_port();
    assert_bounded(&Place::on(&server.url()));
}

#[test]
fn takeover_is_bounded_for_other_kinds() {
    let server = Server::on_socket();
    for kind in [&["-x"][..], &["--semaphore", "1"]] {
        assert_bounded_if_killed(&Place::on(&server.socket_url()), kind);
    }
}

#[test]
fn takeover_is_bounded_on_other_servers() {
    for flavor in [Flavor::Redis62, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).start();
        assert_bounded_if_killed(&Place::on(&server.url()), &[]);
    }
}

#[test]
fn takeover_is_bounded_with_sentinels() {
    let sentinels = Sentinels::start();
    assert_bounded_if_killed(&Place::on(&sentinels.url(Sentinels::SERVICE)), &[]);
}

#[test]
fn takeover_is_bounded_in_a_cluster() {
    let cluster = Cluster::start();
    assert_bounded_if_killed(&Place::on(&cluster.url()), &[]);
}
