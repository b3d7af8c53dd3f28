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

/// The read-write lock of the same name is on a node that hangs: a run of the mutex looks there, and goes on.
#[test]
fn run_warns_if_the_other_kind_of_its_lock_cannot_be_looked_up() {
    let cluster = Cluster::of(&Server::builder().setting("cluster-require-full-coverage", "no"));
    let nodes_of = |name: &str| ["mutex", "rw"].map(|kind| cluster.node_of(&format!("{{{kind}:{name}}}")));
    let is_apart = |name: &String| nodes_of(name)[0] != nodes_of(name)[1];
    let name = (0..).map(|number: u32| number.to_string()).find(is_apart).expect("there are many names");
    let [used, hung] = nodes_of(&name);
    for node in [hung, cluster.replica_of(hung)] {
        cluster.nodes[node].signal("STOP");
    }
    let place = Place::on(&format!("redis-cluster://127.0.0.1:{}", cluster.nodes[used].port()));
    let (code, stderr) = place.code(&["run", &name, "--", "true"]);
    assert_eq!(code, 0, "{stderr}");
    let what = format!("whether \"{name}\" is also in use as a ");
    assert!(stderr.contains(&what) && stderr.contains(" is not known: "), "{stderr}");
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
    // A new connection tries rights with the scratch key.
    server.run(&["ACL", "SETUSER", "default", "-pexpire", "(+pexpire ~leasehold:4:scratch)"]);
    for (name, options) in [("a", &["--min-hold", "1h"][..]), ("b", &["--once-per", "1h", "--at-least-once"])]
    {
        let lease = ["run", "--ttl", "20s", "--grace", "10s"];
        let (code, said) = place.code(&[&lease, options, &[name, "--", "true"]].concat());
        assert!(code == 125 && said.contains("the user lacks rights"), "{code}: {said}");
        assert_eq!(place.locks(), serde_json::json!([]), "{name}");
    }
    server.run(&["ACL", "SETUSER", "default", "clearselectors", "+pexpire"]);
    let output = place.output(&["run", "--once-per", "1h", "--at-least-once", "b", "--", "echo", "runs"]);
    assert_eq!(output.stdout, b"runs\n", "{output:?}");
}

#[test]
fn refused_release_is_told_in_the_servers_words_and_is_a_failure() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let gone = place.path("gone");
    let script = format!("until [ -e {} ]; do sleep 0.05; done; exit $0", gone.display());
    for (code, expected) in [("0", 125), ("3", 3)] {
        let mut run = place.start(&["run", "a", "--", "sh", "-c", &script, code]);
        place.until_held("a");
        server.run(&["ACL", "SETUSER", "default", "-del", "-evalsha", "-eval"]);
        std::fs::write(&gone, "").expect("the folder is there");
        let mut said = String::new();
        BufReader::new(run.0.stderr.take().expect("it is piped")).read_line(&mut said).expect("text");
        assert!(said.contains("the user lacks rights") && said.contains("was not released"), "{said}");
        assert_eq!(run.end(), expected);
        server.run(&["ACL", "SETUSER", "default", "+@all"]);
        std::fs::remove_file(&gone).expect("it is there");
        assert_eq!(place.code(&["release", "--force", "a"]).0, 0);
    }
}

#[test]
fn lost_lease_is_told_with_the_reason_that_it_was_not_renewed() {
    let server = Server::builder().password("s3cret").start();
    let place = Place::on(&server.url());
    let report = place.path("told");
    let tell = format!("printf '%s %s' \"$LEASEHOLD_LOSS\" \"$LEASEHOLD_STORE\" > {}", report.display());
    let mut run =
        place.start(&["run", "--ttl", "3s", "--run-on-lost", &tell, "a", "--", "sh", "-c", "sleep 600"]);
    place.until_held("a");
    server.run(&["ACL", "SETUSER", "default", "-evalsha"]);
    let mut said = String::new();
    BufReader::new(run.0.stderr.take().expect("it is piped")).read_line(&mut said).expect("text");
    assert!(said.contains("the user lacks rights"), "{said}");
    assert_eq!(run.end(), 124);
    let loss = || std::fs::read_to_string(&report).unwrap_or_default();
    wait_until("the command of --run-on-lost has been told", || loss().contains("the user lacks rights"));
    assert!(loss().contains(" redis://") && !loss().contains("s3cret"), "{}", loss());
}

#[test]
fn waiting_program_says_once_that_the_server_refuses_it() {
    let server = Server::on_port();
    server.run(&["ACL", "SETUSER", "locks", "on", ">first", "~*", "&*", "+@all"]);
    let place = Place::on(&server.url());
    let mut holder = place.start(&["run", "a", "--", "sleep", "600"]);
    place.until_held("a");
    let address = server.url().replace("//", "//locks:first@");
    let mut run = place.start(&["run", "--store", &address, "a", "--", "true"]);
    place.until_waiting("a", 1);
    server.run(&["ACL", "SETUSER", "locks", "resetpass", ">second"]);
    server.run(&["CLIENT", "KILL", "USER", "locks"]);
    let mut stderr = BufReader::new(run.0.stderr.take().expect("it is piped"));
    let mut said = String::new();
    stderr.read_line(&mut said).expect("text");
    assert!(said.contains("does not accept this user") && said.contains("retrying"), "{said}");
    assert!(!said.contains("first"), "{said}");
    server.run(&["ACL", "SETUSER", "locks", "resetpass", ">first"]);
    holder.signal("TERM");
    assert_eq!((holder.end(), run.end()), (143, 0));
    said.clear();
    stderr.read_line(&mut said).expect("text");
    assert_eq!(said, "", "it is told once");
}

#[test]
fn program_that_starts_while_the_server_takes_no_writes_waits_as_it_was_told() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    server.run(&["CLIENT", "PAUSE", "4000", "WRITE"]);
    let (code, said) = place.code(&["run", "-w", "60s", "a", "--", "true"]);
    assert!(code == 0 && said.contains("takes no writes at present"), "{code}: {said}");
    server.run(&["CLIENT", "PAUSE", "600000", "WRITE"]);
    let output = place.leasehold(&["run", "-w", "2s", "a", "--", "true"]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(125) && said.contains("no connection within 2s"), "{said}");
}

/// Each program asks the sentinels anew, and waits 3 s for those that hang.
#[test]
fn program_that_does_not_wait_gets_a_lock_although_two_sentinels_hang() {
    let sentinels = Sentinels::start();
    let place = Place::on(&sentinels.url(Sentinels::SERVICE));
    sentinels.sentinels[1..].iter().for_each(|sentinel| sentinel.signal("STOP"));
    for limit in [&["-n"][..], &["-w", "2s"]] {
        let (code, said) = place.code(&[&["run"], limit, &["a", "--", "true"]].concat());
        assert_eq!(code, 0, "{limit:?}: {said}");
    }
    sentinels.sentinels[1..].iter().for_each(|sentinel| sentinel.signal("CONT"));
}

#[test]
fn list_and_detached_leases_outlast_a_failover() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let id = place.output(&["acquire", "--ttl", "60s", "a"]).stdout;
    let id = String::from_utf8(id).unwrap();
    for command in [&["ls"][..], &["show", "a"], &["status", id.trim()], &["renew", id.trim()]] {
        server.run(&["CLIENT", "PAUSE", "3000", "WRITE"]);
        let (code, said) = place.code(command);
        assert!(code == 0 && said.contains("takes no writes at present"), "{command:?}: {code}: {said}");
    }
}
