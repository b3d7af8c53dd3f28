//! `run` with several locks, its messages for programs, and its defaults.

mod common;

use std::os::unix::net::UnixDatagram;

use common::{Place, SOON, until};
use leasehold_testkit::Server;
use serde_json::Value;

#[test]
fn several_locks_are_held_together_or_not_at_all() {
    let place = Place::new();
    let script = "echo \"$LEASEHOLD_NAME/$LEASEHOLD_TOKEN\" | tr '\\n' ' '; echo; exec sleep 60";
    let mut holder = place.start(&["run", "b", "a", "-c", script]);
    let said = holder.line();
    let (names, tokens) = said.trim().split_once('/').expect("both");
    assert_eq!(names, "b a", "in the order of the arguments");
    let held = |name: &str| place.show(name)["holders"][0]["token"].to_string();
    assert_eq!(tokens, format!("{} {}", held("b"), held("a")));
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]).0, 1);
    // One of two is free, and stays so.
    let (code, said) = place.code(&["run", "-n", "-v", "c", "b", "--", "true"]);
    assert!(code == 1 && said.contains("\"b\" not acquired"), "{said}");
    assert_eq!(place.code(&["run", "-n", "c", "--", "true"]).0, 0);
    holder.signal("TERM");
    holder.end();
    place.until_unused();
}

#[test]
fn loss_of_one_of_several_locks_ends_the_command() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "b", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    assert_eq!(place.code(&["release", "--force", "b"]).0, 0);
    assert_eq!(holder.end(), 124);
    place.until_unused();
}

#[test]
fn waiter_for_several_locks_gets_them_when_the_last_is_free() {
    let place = Place::new();
    let mut holder = place.start(&["run", "b", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let mut waiter = place.start(&["run", "a", "b", "--", "echo", "both"]);
    place.until_waiting("b", 1);
    holder.signal("TERM");
    assert_eq!((waiter.line().as_str(), waiter.end()), ("both", 0));
}

#[test]
fn several_names_are_mutexes_only_and_a_nested_one_is_refused() {
    let place = Place::new();
    for kind in [&["-s"][..], &["-x"], &["--semaphore", "2"], &["--owner", "me"], &["--once-per", "1h"]] {
        let (code, said) = place.code(&[&["run"], kind, &["a", "b", "--", "true"]].concat());
        assert!(code == 2 && said.contains("several names"), "{said}");
    }
    let (code, said) = place.code(&["run", "a", "a", "--", "true"]);
    assert!(code == 2, "{said}");
    let nested = [env!("CARGO_BIN_EXE_leasehold"), "run", "c", "b", "--", "true"];
    let (code, said) = place.code(&[&["run", "a", "b", "--"], &nested[..]].concat());
    assert!(
        code == 2 && said.contains("\"b\" is held by the leasehold that this command runs under"),
        "{said}"
    );
}

#[test]
fn alert_command_is_started_once_when_the_lease_is_lost() {
    let place = Place::new();
    let file = place.path("alert");
    let alert = format!("echo \"$LEASEHOLD_NAME $LEASEHOLD_LOSS\" >> {}", file.display());
    let mut holder = place.start(&[
        "run",
        "--run-on-lost",
        &alert,
        "a",
        "-c",
        "trap '' TERM; echo on; sleep 60 & wait; sleep 60",
    ]);
    assert_eq!(holder.line(), "on");
    assert_eq!(place.code(&["release", "--force", "a"]).0, 0);
    assert_eq!(holder.end(), 124);
    let text = until(|| std::fs::read_to_string(&file).ok().filter(|text| text.ends_with('\n')));
    assert!(text.starts_with("a the lease was lost: ") && text.lines().count() == 1, "{text}");
}

#[test]
fn alert_command_is_started_if_only_the_release_finds_the_loss() {
    let server = Server::on_socket();
    let place = Place::on(&server.url());
    let (file, go) = (place.path("alert"), place.path("go"));
    let alert = format!("echo \"$LEASEHOLD_NAME $LEASEHOLD_TOKEN $LEASEHOLD_LOSS\" >> {}", file.display());
    let script = format!("echo $LEASEHOLD_TOKEN; until [ -e {} ]; do sleep 0.05; done", go.display());
    let mut holder = place.start(&["run", "--ttl", "10m", "--run-on-lost", &alert, "a", "-c", &script]);
    let token = holder.line();
    // The server forgets the lease without a notification. The next renewal is minutes away.
    server.run(&["EVAL", "for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('DEL', key) end", "0"]);
    std::fs::write(&go, "").unwrap();
    assert_eq!(holder.end(), 124);
    let text = until(|| std::fs::read_to_string(&file).ok().filter(|text| text.ends_with('\n')));
    assert_eq!(text, format!("a {token} the lease was lost: its release found it ended\n"));
    // No loss, no alert.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(place.code(&["run", "--run-on-lost", &alert, "a", "--", "true"]).0, 0);
    assert!(!file.exists());
}

#[test]
fn messages_are_json_lines_on_request() {
    let place = Place::new();
    let (code, said) = place.code(&["--log", "json", "run", "-v", "a", "--", "true"]);
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    assert!(code == 0 && lines.len() >= 2, "{said}");
    assert!(lines[0]["message"].as_str().is_some_and(|text| text.contains("acquired \"a\"")), "{said}");
    for (line, event) in lines.iter().zip(["acquired", "released"]) {
        assert_eq!((&line["level"], &line["event"]), (&"info".into(), &event.into()), "{said}");
        assert_eq!((&line["lock"], &line["kind"]), (&"a".into(), &"mutex".into()), "{said}");
        assert!(line["token"].as_u64() > Some(0) && line["token"] == lines[0]["token"], "{said}");
    }
    // Each of several locks has an object.
    let (code, said) = place.code(&["--log", "json", "run", "-v", "b", "c", "--", "true"]);
    assert_eq!(code, 0, "{said}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found: Vec<_> =
        lines.iter().map(|line| (line["event"].as_str().unwrap(), line["lock"].as_str().unwrap())).collect();
    assert_eq!(found, [("acquired", "b"), ("acquired", "c"), ("released", "b"), ("released", "c")]);
    assert_ne!(lines[0]["token"], lines[1]["token"]);
    assert!(lines[0]["time_ms"].as_u64() > Some(1_700_000_000_000) && lines[0]["pid"].is_u64());
    let mut failed = place.leasehold(&["run", "a", "--", "/no/such/program"]);
    let output = failed.env("LEASEHOLD_LOG", "json").output().unwrap();
    let line: Value = serde_json::from_slice(&output.stderr).expect("an object");
    assert!(line["message"].as_str().is_some_and(|text| text.contains("was not found")), "{line}");
    // Also what is wrong with the arguments, and with the configuration file.
    let file = place.path("config.toml");
    std::fs::write(&file, "stor = 1").unwrap();
    for (args, config) in
        [(&["run", "--ttl", "bad", "a", "--", "true"][..], None), (&["run", "a", "--", "true"], Some(&file))]
    {
        let mut refused = place.leasehold(args);
        refused.env("LEASEHOLD_LOG", "json").envs(config.map(|file| ("LEASEHOLD_CONFIG", file)));
        let output = refused.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let line: Value = serde_json::from_slice(&output.stderr).expect("an object");
        assert!(line["message"].is_string(), "{line}");
    }
}

/// As one that hangs, or that has read the first message and keeps the socket.
#[test]
fn service_manager_that_reads_nothing_delays_nothing() {
    let place = Place::new();
    let path = place.path("notify");
    let _socket = UnixDatagram::bind(&path).unwrap();
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send_to(b"full", &path).is_ok() {}
    let mut running = place.leasehold(&["run", "a", "--", "true"]);
    let mut running = common::Started(running.env("NOTIFY_SOCKET", &path).spawn().unwrap());
    assert_eq!(running.end(), 0);
    assert!(running.stderr().contains("could not be notified"));
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]).0, 0, "the lock is free");
}

#[test]
fn usual_configuration_file_in_a_home_that_is_none_is_absent() {
    let place = Place::new();
    let mut homeless = place.leasehold(&["run", "a", "--", "true"]);
    homeless.env_remove("XDG_CONFIG_HOME").env_remove("LEASEHOLD_CONFIG").env("HOME", "/dev/null");
    let output = homeless.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn service_is_ready_once_its_lock_is_held() {
    let place = Place::new();
    let path = place.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let mut service = place.leasehold(&["run", "a", "-c", "exec sleep 60"]);
    let mut service = common::Started(service.env("NOTIFY_SOCKET", &path).spawn().unwrap());
    place.until_waiting("a", 1);
    socket.set_nonblocking(true).unwrap();
    let mut text = [0; 64];
    assert!(socket.recv(&mut text).is_err(), "it still waits");
    socket.set_nonblocking(false).unwrap();
    holder.signal("TERM");
    let length = socket.recv(&mut text).expect("it is told");
    assert_eq!(&text[..length], b"READY=1");
    service.signal("TERM");
    service.end();
}

#[test]
fn defaults_come_from_the_environment_and_then_from_the_file() {
    let place = Place::new();
    let file = place.path("config.toml");
    std::fs::write(
        &file,
        format!("store = {:?}\nlog = \"json\"\n[run]\nttl = \"200s\"\nverbose = true\n", place.store()),
    )
    .unwrap();
    let run = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = place.leasehold(arguments);
        command.env_remove("LEASEHOLD_STORE").env("LEASEHOLD_CONFIG", &file).envs(variables.iter().copied());
        command.output().unwrap()
    };
    let left = |arguments: &[&str], variables: &[(&str, &str)]| {
        let show = format!("{} show a --json", env!("CARGO_BIN_EXE_leasehold"));
        let output = run(&[&["run"], arguments, &["a", "-c", &show]].concat(), variables);
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("\"message\":\"acquired"), "{output:?}");
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        shown["holders"][0]["expires_in_ms"].as_u64().unwrap()
    };
    assert!((150_001..=200_000).contains(&left(&[], &[])), "the file");
    assert!((250_001..=300_000).contains(&left(&[], &[("LEASEHOLD_TTL", "300s")])), "the environment");
    assert!(
        (350_001..=400_000).contains(&left(&["--ttl", "400s"], &[("LEASEHOLD_TTL", "300s")])),
        "the argument"
    );
    for (text, says) in [
        ("stor = \"memory:\"", "there is no option --stor"),
        ("[runs]\nttl = 1", "there is no command \"runs\""),
        ("[run]\ntll = 1", "run: there is no option --tll"),
        ("ttl", "config.toml: "),
    ] {
        std::fs::write(&file, text).unwrap();
        let output = run(&["run", "a", "--", "true"], &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(2) && said.contains(says) && said.lines().count() == 1,
            "{said}"
        );
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(run(&["ls"], &[]).status.code(), Some(2), "a file that is named must be there");
}
