//! `wait`, `health`, and the release of one holder.

mod common;

use std::io::{BufRead as _, BufReader};
use std::time::{Duration, Instant};

use common::Place;
use leasehold::Kind;
use leasehold_testkit::{Server, wait_until};

#[test]
fn wait_ends_when_the_lock_is_free() {
    let place = Place::new();
    assert_eq!(place.code(&["wait", "a"]).0, 0, "it is free");
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let (code, said) = place.code(&["wait", "-w", "0.1", "a"]);
    assert!(code == 1 && said.contains("still in use"), "{said}");
    assert_eq!(place.code(&["wait", "--kind", "rw", "a"]).0, 0, "another kind is free");
    let mut waiting = place.start(&["wait", "a"]);
    assert!(waiting.0.try_wait().unwrap().is_none());
    holder.signal("TERM");
    assert_eq!(waiting.end(), 0);
}

/// How many scripts the server has run.
fn scripts(server: &Server) -> usize {
    let text: String = server.query(&["INFO", "commandstats"]).unwrap();
    let calls = |line: &str| {
        line.strip_prefix("cmdstat_eval")?.split_once("calls=")?.1.split(',').next()?.parse().ok()
    };
    text.lines().filter_map(|line| calls(line).map(|calls: usize| calls)).sum()
}

#[test]
fn wait_outlasts_a_restart_of_the_store_and_ends_in_time_without_an_answer() {
    let mut server = Server::on_socket();
    let place = Place::on(&server.url());
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    server.signal("STOP");
    let began = Instant::now();
    let (code, said) = place.code(&["wait", "-w", "0.1", "a"]);
    server.signal("CONT");
    assert!(code == 125 && said.contains("did not answer"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let before = scripts(&server);
    let mut waiting = place.start(&["wait", "a"]);
    // Each look asks for all kinds of locks, and this is more than one look.
    wait_until("it has looked", || scripts(&server) > before + 2 * Kind::ALL.len());
    server.stop();
    let mut said = BufReader::new(waiting.0.stderr.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().contains("waiting on")));
    assert!(waiting.0.try_wait().unwrap().is_none());
    // It has forgotten the lease.
    holder.signal("KILL");
    server.start();
    assert_eq!(waiting.end(), 0);
}

#[test]
fn health_is_zero_only_if_the_store_grants() {
    let server = Server::on_socket();
    let place = Place::on(&server.url());
    let output = place.output(&["health", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let health: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(health["lock_ms"].as_f64() > Some(0.0));
    place.until_unused();
    server.signal("STOP");
    let (code, said) = place.code(&["health", "--timeout", "1s"]);
    server.signal("CONT");
    assert!(code == 1 && !said.is_empty(), "{said}");
    // A server that holds no room for writes grants nothing.
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(place.code(&["health"]).0, 1);
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(place.code(&["health"]).0, 0);
}

#[test]
fn release_by_token_frees_that_holder_only() {
    let server = Server::on_socket();
    for place in [Place::new(), Place::on(&server.url())] {
        let run = ["run", "--ttl", "15s", "--semaphore", "2", "a", "--", "sh", "-c"];
        let mut holders: Vec<_> = (0..2)
            .map(|_| place.start(&[&run[..], &["echo $LEASEHOLD_TOKEN; exec sleep 60"]].concat()))
            .collect();
        let tokens: Vec<String> = holders.iter_mut().map(common::Started::line).collect();
        let (code, said) = place.code(&["release", "--force", "--token", "1", "a"]);
        assert!(
            code == 1 && said.contains("no holder of a on ") && said.contains(" has the token 1"),
            "{said}"
        );
        assert_eq!(place.code(&["release", "--force", "--token", &tokens[0], "a"]).0, 0);
        assert_eq!(holders[0].end(), 124, "it notices the loss");
        let left = place.show("a")["holders"].clone();
        assert_eq!(left.as_array().unwrap().len(), 1);
        assert_eq!(left[0]["token"].to_string(), tokens[1]);
        assert!(holders[1].0.try_wait().unwrap().is_none());
    }
}

#[test]
fn health_of_two_processes_with_one_id_uses_two_locks() {
    // Two hosts, or two containers, have a process with the same id. Here a shell takes the lock of its id, and becomes the probe.
    let place = Place::new();
    let script = r#"
        "$LEASEHOLD" run "leasehold health $$" -c 'echo on; exec sleep 60' > "$OUT" 2>&1 &
        echo $! > "$OUT.pid"
        until [ -s "$OUT" ]; do sleep 0.05; done
        exec "$LEASEHOLD" health --timeout 10s
    "#;
    let mut shell = common::as_from_terminal("sh");
    shell.args(["-c", script]).env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"));
    shell.env("LEASEHOLD_STORE", place.store()).env("OUT", place.path("out"));
    let output = shell.output().unwrap();
    let holder = std::fs::read_to_string(place.path("out.pid")).unwrap();
    common::send("TERM", holder.trim().parse().unwrap());
    assert!(output.status.success(), "{output:?}");
}
