//! `run --bridge` and `elect --bridge`: the lock of another library is held with the command's own.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{Place, Started, is_alive, until};
use leasehold_testkit::Server;

const BRIDGES: [&str; 2] = ["set-nx-px:jobs", "redisson:jobs"];

fn exists(server: &Server) -> bool {
    server.query::<i64>(&["EXISTS", "jobs"]).unwrap() == 1
}

fn until_exists(server: &Server, expected: bool) {
    until(|| (exists(server) == expected).then_some(()));
}

fn hold(place: &Place, bridge: &str) -> Started {
    let mut held = place.start(&[
        "run",
        "--ttl",
        "3s",
        "--bridge",
        bridge,
        "own",
        "--",
        "sh",
        "-c",
        "echo $$; exec sleep 600",
    ]);
    let _: u32 = held.line().parse().expect("the command runs");
    held
}

#[test]
fn command_runs_while_both_locks_are_held() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for bridge in BRIDGES {
        let gone = place.path("gone");
        let script = format!("echo runs; until [ -e {} ]; do sleep 0.05; done", gone.display());
        let mut held = place.start(&["run", "--bridge", bridge, "own", "--", "sh", "-c", &script]);
        assert_eq!(held.line(), "runs");
        assert!(exists(&server), "{bridge}");
        fs::write(&gone, "").unwrap();
        assert_eq!(held.end(), 0);
        assert!(!exists(&server), "{bridge}");
        fs::remove_file(&gone).unwrap();
        // Another program has the lock.
        server.run(&["SET", "jobs", "other"]);
        if bridge.starts_with("redisson") {
            server.run(&["DEL", "jobs"]);
            server.run(&["HSET", "jobs", "other:1", "1"]);
        }
        assert_eq!(place.code(&["run", "-n", "--bridge", bridge, "own", "--", "true"]).0, 1, "{bridge}");
        server.run(&["DEL", "jobs"]);
        place.until_unused();
    }
}

#[test]
fn command_is_stopped_when_the_foreign_lock_is_lost() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for bridge in BRIDGES {
        let mut held = hold(&place, bridge);
        server.run(&["DEL", "jobs"]);
        assert_eq!(held.end(), 124, "{bridge}");
        assert!(held.stderr().contains("other library"));
        place.until_unused();
    }
}

/// Another program may have the lock at once, so the command gets no grace.
#[test]
fn command_that_ignores_term_is_killed_when_the_foreign_lock_is_lost() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for bridge in BRIDGES {
        let script = "trap '' TERM; echo $$; while :; do sleep 0.1; done";
        let limits = ["run", "--ttl", "40s", "--grace", "20s", "--bridge", bridge];
        let mut held = place.start(&[&limits[..], &["own", "--", "sh", "-c", script]].concat());
        let command: u32 = held.line().parse().expect("the command runs");
        server.run(&["DEL", "jobs"]);
        let deleted = Instant::now();
        until(|| (!is_alive(command)).then_some(()));
        assert!(deleted.elapsed() < Duration::from_secs(10), "{bridge}: {:?}", deleted.elapsed());
        assert_eq!(held.end(), 124, "{bridge}");
        place.until_unused();
    }
}

#[test]
fn killed_program_leaves_the_foreign_lock_for_its_ttl_only() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for bridge in BRIDGES {
        let held = hold(&place, bridge);
        held.signal("KILL");
        let left: i64 = server.query(&["PTTL", "jobs"]).unwrap();
        assert!((1..=3_000).contains(&left), "{left}");
        let next = place.code(&["run", "--bridge", bridge, "own", "--", "true"]);
        assert_eq!(next.0, 0, "{next:?}");
        assert!(!exists(&server));
    }
}

#[test]
fn stopped_program_does_not_take_the_lock_of_its_successor() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let mut held = place.start(&[
        "run",
        "--ttl",
        "3s",
        "--bridge",
        "set-nx-px:jobs",
        "own",
        "--",
        "sh",
        "-c",
        "echo $$; exec sleep 600",
    ]);
    let command: u32 = held.line().parse().expect("the command runs");
    held.signal("STOP");
    until_exists(&server, false);
    let taken: Option<String> = server.query(&["SET", "jobs", "other", "NX", "PX", "600000"]).unwrap();
    assert!(taken.is_some());
    held.signal("CONT");
    assert_eq!(held.end(), 124);
    until(|| (!is_alive(command)).then_some(()));
    assert_eq!(server.query::<String>(&["GET", "jobs"]).unwrap(), "other");
}

#[test]
fn leader_of_a_bridged_election_holds_the_foreign_lock() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let mut leader = place.start(&[
        "elect",
        "--bridge",
        "redis-py:jobs",
        "own",
        "--",
        "sh",
        "-c",
        "echo leads; exec sleep 600",
    ]);
    assert_eq!(leader.line(), "leads");
    assert!(exists(&server));
    leader.signal("TERM");
    leader.end();
    assert!(!exists(&server));
}

#[test]
fn bridge_that_cannot_work_is_explained() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for (args, why) in [
        (&["--bridge", "redisson-fair:jobs", "own"][..], "clocks of its clients"),
        (&["--bridge", "jobs", "own"], "redisson:NAME"),
        (&["--bridge", "redisson:", "own"], "has a name"),
        (&["-s", "--bridge", "redisson:jobs", "own"], "leave out -s"),
        (&["--bridge", "redisson:jobs", "a", "b"], "one name"),
    ] {
        let all = [&["run"], args, &["--", "true"]].concat();
        let (code, error) = place.code(&all);
        assert!(code == 2 && error.contains(why), "{code}: {error}");
    }
    let (code, error) = Place::new().code(&["run", "--bridge", "redisson:jobs", "own", "--", "true"]);
    assert!(code != 0 && error.contains("needs a store on the Redis server"), "{code}: {error}");
}
