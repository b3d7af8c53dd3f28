//! `run --bridge` and `elect --bridge`: the lock of another library is held with the command's own.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::time::{Duration, Instant};

use common::{Place, Started, code, is_alive, until};
use leasehold_testkit::Server;

const BRIDGES: [&str; 2] = ["set-nx-px:jobs", "redisson:jobs"];

/// One for each protocol, with the key.
const PROTOCOLS: [(&str, &str); 6] = [
    ("set-nx-px:jobs", "jobs"),
    ("redisson:jobs", "jobs"),
    ("redisson-fenced:jobs", "jobs"),
    ("spring:registry:jobs", "registry:jobs"),
    ("python-redis-lock:jobs", "lock:jobs"),
    ("rueidislock:jobs", "rueidislock:0:jobs"),
];

fn exists(server: &Server) -> bool {
    server.query::<i64>(&["EXISTS", "jobs"]).unwrap() == 1
}

/// Outlasts a pause of the machine.
const LONG: &str = "15s";

fn hold(place: &Place, bridge: &str, ttl: &str) -> Started {
    let mut held = place.start(&[
        "run",
        "--ttl",
        ttl,
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
        let mut held = hold(&place, bridge, LONG);
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
    for (bridge, key) in PROTOCOLS {
        let held = hold(&place, bridge, "3s");
        held.signal("KILL");
        let left: i64 = server.query(&["PTTL", key]).unwrap();
        // After a pause of the machine it is gone already, which is -2. Without an expiry it would be -1.
        assert!(left <= 3_000 && left != -1, "{left}");
        let next = place.code(&["run", "--bridge", bridge, "own", "--", "true"]);
        assert_eq!(next.0, 0, "{next:?}");
        assert_eq!(server.query::<i64>(&["EXISTS", key]).unwrap(), 0, "{bridge}");
    }
}

#[test]
fn stopped_program_does_not_take_the_lock_of_its_successor() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    for (bridge, key) in PROTOCOLS {
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
        let command: u32 = held.line().parse().expect("the command runs");
        held.signal("STOP");
        until(|| (server.query::<i64>(&["EXISTS", key]).unwrap() == 0).then_some(()));
        if bridge.starts_with("redisson") {
            server.run(&["HSET", key, "other:1", "1"]);
        } else {
            let taken: Option<String> = server.query(&["SET", key, "other", "NX", "PX", "600000"]).unwrap();
            assert!(taken.is_some());
        }
        held.signal("CONT");
        assert_eq!(held.end(), 124, "{bridge}");
        until(|| (!is_alive(command)).then_some(()));
        let is_kept = match bridge.starts_with("redisson") {
            true => server.query::<i64>(&["HEXISTS", key, "other:1"]).unwrap() == 1,
            false => server.query::<String>(&["GET", key]).unwrap() == "other",
        };
        assert!(is_kept, "{bridge}");
        server.run(&["DEL", key]);
        place.until_unused();
    }
}

/// A program that took the lock, and was stopped for longer than it lasts, finds it with leasehold when it goes on.
#[test]
fn lock_of_a_stopped_program_is_taken_when_it_expires() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    server.run(&["SET", "jobs", "stopped", "NX", "PX", "1500"]);
    let mut held = hold(&place, "set-nx-px:jobs", LONG);
    // The release of the library: compare and delete.
    let release =
        "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0";
    assert_eq!(server.query::<i64>(&["EVAL", release, "1", "jobs", "stopped"]).unwrap(), 0);
    assert!(exists(&server));
    held.signal("TERM");
    held.end();
    assert!(!exists(&server));
}

#[test]
fn command_runs_while_a_majority_of_servers_has_its_lock() {
    let servers = [Server::on_port(), Server::on_port(), Server::on_port()];
    let own = Server::on_port();
    let place = Place::on(&own.url());
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let mut held = hold(&place, &format!("redlock:jobs@{}", urls.join(",")), LONG);
    until(|| servers.iter().all(exists).then_some(()));
    servers[0].run(&["DEL", "jobs"]);
    servers[2].run(&["DEL", "jobs"]);
    assert_eq!(held.end(), 124);
    assert!(held.stderr().contains("other library"));
    until(|| (!servers.iter().any(exists)).then_some(()));
    place.until_unused();
}

/// All servers have answered, so no command can come late, and the program need not wait for one.
#[test]
fn conflict_on_several_servers_is_reported_at_once() {
    let servers = [Server::on_port(), Server::on_port(), Server::on_port()];
    let own = Server::on_port();
    let place = Place::on(&own.url());
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let bridge = format!("redlock:jobs@{}", urls.join(","));
    for server in &servers[1..] {
        server.run(&["SET", "jobs", "other"]);
    }
    // On a busy machine the answer of a server may be late.
    until(|| {
        let (code, said) = place.code(&["run", "-n", "--bridge", &bridge, "own", "--", "true"]);
        assert_eq!(code, 1, "{said}");
        said.is_empty().then_some(())
    });
    assert!(!exists(&servers[0]), "the vote was taken back");
    place.until_unused();
}

#[test]
fn readers_and_writers_share_the_read_write_lock_of_redisson() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let java = "7a79a1d0-961b-4a34-8777-c1a19aba6efa:28";
    server.run(&["HSET", "jobs", "mode", "read", java, "1"]);
    server.run(&["SET", &format!("{{jobs}}:{java}:rwlock_timeout:1"), "1", "PX", "600000"]);
    server.run(&["PEXPIRE", "jobs", "600000"]);
    let run =
        |side, wait| place.code(&["run", side, wait, "--bridge", "redisson-rw:jobs", "own", "--", "true"]).0;
    assert_eq!((run("-s", "-n"), run("-x", "-n")), (0, 1), "a reader in Java has it");
    server.run(&["DEL", "jobs"]);
    let reading = ["run", "--ttl", "15s", "-s", "--bridge", "redisson-rw:jobs", "own", "--", "sh", "-c"];
    let mut held = place.start(&[&reading[..], &["echo $$; exec sleep 600"]].concat());
    let command: u32 = held.line().parse().expect("the command runs");
    assert_eq!((run("-s", "-n"), run("-x", "-n")), (0, 1));
    // A writer in Java that took it from a reader that was stopped for too long.
    held.signal("STOP");
    until(|| (!exists(&server)).then_some(()));
    server.run(&["HSET", "jobs", "mode", "write", &format!("{java}:write"), "1"]);
    held.signal("CONT");
    assert_eq!(held.end(), 124);
    until(|| (!is_alive(command)).then_some(()));
    assert_eq!(server.query::<i64>(&["HLEN", "jobs"]).unwrap(), 2);
    server.run(&["DEL", "jobs"]);
    assert_eq!((run("-x", "-w10s"), run("-s", "-w10s")), (0, 0));
    assert!(!exists(&server));
    place.until_unused();
}

/// Its lease lasts 30 s at most, whatever the ttl, so a longer grace begins at once.
#[test]
fn reader_with_a_grace_that_does_not_fit_is_refused_and_not_ended() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let run = |side, grace| {
        let lease = ["run", side, "--ttl", "2m", "--grace", grace, "--bridge", "redisson-rw:jobs", "own"];
        place.code(&[&lease[..], &["--", "sleep", "0.3"]].concat())
    };
    for grace in ["45s", "16s"] {
        let (code, said) = run("-s", grace);
        assert!(code == 2 && said.contains("30s at a time") && said.contains("15s"), "{code}: {said}");
    }
    assert_eq!(run("-s", "10s"), (0, String::new()));
    assert_eq!(run("-x", "45s"), (0, String::new()), "a writer's lease has the whole ttl");
}

#[test]
fn command_gets_the_token_of_redisson_s_fenced_lock() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    let ahead = (1_u64 << 52).to_string();
    server.run(&["SET", "redisson_lock_token:{jobs}", &ahead]);
    let script = "echo $LEASEHOLD_TOKEN";
    let args = ["run", "--bridge", "redisson-fenced:jobs", "own", "--", "sh", "-c", script];
    let output = place.output(&args);
    let token: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    assert_eq!(token, (1 << 52) + 1);
    assert_eq!(server.query::<u64>(&["GET", "redisson_lock_token:{jobs}"]).unwrap(), token);
}

#[test]
fn nested_run_under_a_fenced_lock_whose_counter_is_ahead_reports_the_deadlock() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    server.run(&["SET", "redisson_lock_token:{jobs}", &(1_u64 << 52).to_string()]);
    let run = ["run", "--bridge", "redisson-fenced:jobs", "own"];
    let leasehold = env!("CARGO_BIN_EXE_leasehold");
    let script = format!("'{leasehold}' {} -w 60 -- true", run.join(" "));
    let (code, said) = place.code(&[&run[..], &["-c", &script]].concat());
    assert!(code == 2 && said.contains("would wait for itself"), "{code}: {said}");
    // The last of these tokens is that of the lease.
    let script = format!("'{leasehold}' release --force --token ${{LEASEHOLD_TOKENS##* }} own; sleep 60");
    assert_eq!(place.code(&[&run[..], &["-c", &script]].concat()).0, 124);
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
        (&["--bridge", "dapr:jobs", "own"], "dapr:APP:NAME"),
        (&["--bridge", "redlock:jobs", "own"], "KEY@redis://HOST"),
        (&["-s", "--bridge", "redisson:jobs", "own"], "redisson-rw:NAME"),
        (&["--bridge", "redisson-rw:jobs", "own"], "-s or -x"),
        (&["--semaphore", "2", "--bridge", "redisson:jobs", "own"], "leave out --semaphore"),
        (&["--bridge", "redisson-semaphore:jobs", "own"], "no lease"),
        (&["--bridge", "redisson:jobs", "a", "b"], "one name"),
    ] {
        let all = [&["run"], args, &["--", "true"]].concat();
        let (code, error) = place.code(&all);
        assert!(code == 2 && error.contains(why), "{code}: {error}");
    }
    let (code, error) = Place::new().code(&["run", "--bridge", "redisson:jobs", "own", "--", "true"]);
    assert!(code != 0 && error.contains("needs a store on the Redis server"), "{code}: {error}");
}

#[test]
fn invalid_address_of_a_bridge_is_explained_without_its_password() {
    let place = Place::new();
    for (address, why) in [
        ("redis://:hunter2@a,redis://:hunter2@a", "votes twice"),
        ("redis://:hunter2@a:port", "a host is"),
        ("redis://:hunter2@a?colour=red", "unknown parameter"),
        ("redis://:two hunter2@a?colour=red", "unknown parameter"),
        ("redis-cluster://:hunter2@a", "address of each server"),
    ] {
        let bridge = format!("redlock:jobs@{address}");
        let typed = place.code(&["run", "--bridge", &bridge, "own", "--", "true"]);
        let file = place.path("config.toml");
        fs::write(&file, format!("[run]\nbridge = {bridge:?}")).unwrap();
        let mut command = place.leasehold(&["run", "own", "--", "true"]);
        let output = command.env("LEASEHOLD_CONFIG", &file).output().unwrap();
        let configured = (code(output.status), String::from_utf8(output.stderr).unwrap());
        for (code, said) in [typed, configured] {
            assert!(code == 2 && said.contains(why) && said.contains("--bridge"), "{code}: {said}");
            assert!(!said.contains("hunter2"), "{said}");
        }
    }
    // An address in the wrong place.
    for args in [
        &["redis://:hunter2@a", "ls"][..],
        &["ls", "redis://:hunter2@a"],
        &["--log", "redis://:hunter2@a", "ls"],
        &["redis+unix:///run/a?pass=hunter2", "ls"],
        &["ls", "postgres://db/app?user=me&password=hunter2"],
    ] {
        let (code, said) = place.code(args);
        assert!(code == 2 && !said.contains("hunter2"), "{code}: {said}");
    }
}

#[test]
fn program_that_waits_for_the_other_library_does_not_name_itself() {
    let server = Server::on_port();
    let place = Place::on(&server.url());
    server.run(&["SET", "jobs", "other"]);
    let bridged = ["--bridge", "set-nx-px:jobs", "own", "--", "true"];
    let (code, said) = place.code(&[&["run", "-v", "-n"][..], &bridged].concat());
    assert!(
        code == 1 && said.contains("not acquired: another program held set-nx-px:jobs"),
        "{code}: {said}"
    );
    let mut waiter = place.start(&[&["run", "-v"][..], &bridged].concat());
    let mut said = BufReader::new(waiter.0.stderr.take().unwrap()).lines();
    let line =
        said.find_map(|line| Some(line.unwrap()).filter(|line| line.contains("set-nx-px:jobs"))).unwrap();
    assert!(line.contains("waiting for \"own\"; another program holds set-nx-px:jobs"), "{line}");
    assert!(!line.contains("held by"), "{line}");
    server.run(&["DEL", "jobs"]);
    assert_eq!(waiter.end(), 0);
}
