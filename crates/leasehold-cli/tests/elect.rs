//! `leasehold elect`: one of many hosts runs the command.

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;

use common::{Place, until};
use leasehold_testkit::{Certificates, Server};

fn holders(place: &Place) -> usize {
    let output = place.output(&["show", "--json", "--kind", "election", "a"]);
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    view["holders"].as_array().map_or(0, Vec::len)
}

#[test]
fn another_host_takes_over_when_the_leader_ends_or_dies() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let args = ["elect", "--ttl", "8s", "--backoff", "20s", "a", "-c", &script];
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut first = place.start(&args);
    until(|| (starts() == 1).then_some(()));
    let mut second = place.start(&args);
    place.until_waiting("a", 1);
    assert_eq!(starts(), 1, "one is elected");
    // The command dies, and it runs elsewhere at once, long before the first host's pause is over.
    let command = fs::read_to_string(&log).unwrap();
    common::send("KILL", command.trim().parse().unwrap());
    until(|| (starts() == 2).then_some(()));
    let mut third = place.start(&args);
    place.until_waiting("a", 1);
    // The host dies, and its lease ends.
    second.signal("KILL");
    until(|| (starts() == 3).then_some(()));
    first.signal("TERM");
    assert_eq!(first.end(), 128 + 15);
    assert!(first.stderr().contains("the command ended: by signal 9; campaigning again in 20s"));
    third.signal("TERM");
    assert_eq!(third.end(), 128 + 15, "the command got it, and it is not started again");
    until(|| (holders(&place) == 0).then_some(()));
    second.end();
}

#[test]
fn alert_of_a_running_elect_leaves_no_zombie() {
    let place = Place::new();
    let (log, alerts) = (place.path("log"), place.path("alerts"));
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let alert = format!("echo $$ >> {}", alerts.display());
    let mut elect = place.start(&["elect", "--backoff", "10ms", "--run-on-lost", &alert, "a", "-c", &script]);
    let lines = |path: &std::path::Path| -> Vec<String> {
        fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
    };
    for round in 1..=2 {
        until(|| (lines(&log).len() == round).then_some(()));
        assert_eq!(place.code(&["release", "--force", "a"]).0, 0);
        let alert = until(|| lines(&alerts).get(round - 1).cloned());
        // A zombie is listed until its parent has read its exit status.
        until(|| (!std::path::Path::new("/proc").join(&alert).exists()).then_some(()));
        assert!(elect.0.try_wait().unwrap().is_none(), "it still runs");
    }
    // A signal before that ends it with the code of the lost lock.
    until(|| (lines(&log).len() == 3).then_some(()));
    elect.signal("TERM");
    assert_eq!(elect.end(), 128 + 15);
}

/// A client that had the file open uses no other one, so a new client is made.
#[test]
fn elect_goes_on_after_its_file_was_removed() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut elected = place.start(&["elect", "--ttl", "2s", "a", "-c", &script]);
    until(|| (starts() == 1).then_some(()));
    for entry in fs::read_dir(place.path("")).unwrap().flatten() {
        let is_of_the_file = entry.file_name().to_string_lossy().contains(".db");
        if is_of_the_file && entry.path().is_file() {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    until(|| (starts() == 2).then_some(()));
    until(|| (holders(&place) == 1).then_some(()));
    elected.signal("TERM");
    assert_eq!(elected.end(), 128 + 15);
}

/// The store is opened anew after an outage. A file that its address names may just be being replaced: the client goes on that has read it.
#[test]
fn elect_outlasts_an_outage_with_its_certificate_away() {
    let files = Certificates::new();
    let mut server = Server::builder().tls(&files.server, &files.authority).start();
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("ca.pem");
    fs::copy(&files.authority, &authority).unwrap();
    let place = Place::on(&format!("{}?ca={}", server.url(), authority.display()));
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut elected = place.start(&["elect", "--ttl", "2s", "a", "-c", &script]);
    until(|| (starts() == 1).then_some(()));
    server.stop();
    fs::remove_file(&authority).unwrap();
    // It opens the store anew after a long outage, and goes on although it can't.
    let said = BufReader::new(elected.0.stderr.take().unwrap());
    let mut retries = said
        .lines()
        .map(Result::unwrap)
        .filter(|line| line.contains("ca.pem can't be read") && line.contains("campaigning"));
    assert!(retries.next().is_some_and(|line| line.contains("campaigning again")));
    assert!(retries.next().is_some());
    server.start();
    until(|| (starts() == 2).then_some(()));
    elected.signal("TERM");
    assert_eq!(elected.end(), 128 + 15);
}

#[test]
fn elect_restarts_the_command_on_the_only_host() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!("echo $LEASEHOLD_TOKEN >> {}; exit 3", log.display());
    let mut elected = place.start(&["elect", "--backoff", "0", "a", "-c", &script]);
    let tokens = until(|| {
        let text = fs::read_to_string(&log).ok()?;
        let tokens: Vec<u64> = text.lines().map(|line| line.parse().expect("a token")).collect();
        (tokens.len() >= 4).then_some(tokens)
    });
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    elected.signal("INT");
    let code = elected.end();
    assert!([3, 128 + 2].contains(&code), "{code}");
    let said = elected.stderr();
    assert!(
        said.contains("exit code 3; campaigning again in 100 ms") && said.contains("in 200 ms"),
        "{said}"
    );
}

#[test]
fn store_outage_ends_the_command_and_elect_waits_for_the_store() {
    let mut server = Server::on_port();
    let place = Place::on(&server.url());
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut elected = place.start(&["elect", "--ttl", "8s", "--backoff", "100ms", "a", "-c", &script]);
    until(|| (starts() == 1).then_some(()));
    let command = fs::read_to_string(&log).unwrap().trim().parse().unwrap();
    server.stop();
    until(|| (!common::is_alive(command)).then_some(()));
    server.start();
    until(|| (starts() == 2).then_some(()));
    elected.signal("TERM");
    assert_eq!(elected.end(), 128 + 15);
    let said = elected.stderr();
    assert!(said.contains("the lease was lost; campaigning again"), "{said}");
}

#[test]
fn signal_for_the_command_does_not_end_the_election() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!(
        "trap 'echo reloaded >> {0}' HUP; echo started >> {0}; while :; do sleep 0.02; done",
        log.display()
    );
    let lines =
        || fs::read_to_string(&log).unwrap_or_default().lines().map(str::to_owned).collect::<Vec<_>>();
    let args = ["elect", "--backoff", "20ms", "a", "-c", &script];
    let mut leader = place.start(&args);
    until(|| (lines() == ["started"]).then_some(()));
    let mut other = place.start(&args);
    place.until_waiting("a", 1);
    // A waiting host has no command that could get the signal.
    for signal in ["HUP", "QUIT"] {
        other.signal(signal);
    }
    leader.signal("HUP");
    until(|| (lines() == ["started", "reloaded"]).then_some(()));
    // This one ends the command, and the next one starts it.
    leader.signal("QUIT");
    until(|| (lines() == ["started", "reloaded", "started"]).then_some(()));
    place.until_waiting("a", 1);
    for elected in [&mut leader, &mut other] {
        elected.signal("TERM");
        assert_eq!(elected.end(), 128 + 15);
    }
    assert!(leader.stderr().contains("the command ended: by signal 3; campaigning again"));
}

#[test]
fn elect_retries_a_command_that_can_no_longer_be_started() {
    let place = Place::new();
    let (program, away) = (place.path("program"), place.path("away"));
    let log = place.path("log");
    fs::write(&program, format!("#!/bin/sh\necho started >> {}\nsleep 0.05\n", log.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut elected = place.start(&["elect", "--backoff", "20ms", "a", "--", program.to_str().unwrap()]);
    until(|| (starts() > 0).then_some(()));
    fs::rename(&program, &away).unwrap();
    let mut said = elected.0.stderr.take().map(BufReader::new).unwrap().lines().map_while(Result::ok);
    let message = said.find(|line| line.contains("can't be executed")).expect("it says so");
    assert!(message.contains("campaigning again in"), "{message}");
    let before = starts();
    fs::rename(&away, &program).unwrap();
    until(|| (starts() > before).then_some(()));
    elected.signal("TERM");
    assert!([0, 128 + 15].contains(&elected.end()));
}

#[test]
fn store_outage_pauses_the_election_only_briefly() {
    let mut server = Server::on_port();
    let place = Place::on(&server.url());
    let args =
        ["elect", "--ttl", "8s", "--backoff", "60s", "--backoff-max", "600s", "a", "--", "sleep", "60"];
    let mut elected = place.start(&args);
    place.until_held("a");
    server.stop();
    let mut said = elected.0.stderr.take().map(BufReader::new).unwrap().lines().map_while(Result::ok);
    for _ in 0..2 {
        let message = said.find(|line| line.contains("campaigning again")).expect("it says so");
        assert!(message.contains("again in 2s"), "{message}");
    }
    server.start();
    place.until_held("a");
    elected.signal("TERM");
    assert_eq!(elected.end(), 128 + 15);
}

#[test]
fn invalid_lock_is_refused_at_once() {
    let place = Place::new();
    assert_eq!(place.code(&["elect", "a", "--", "no-such-command"]).0, 127);
    assert_eq!(place.code(&["elect", "", "--", "true"]).0, 2);
    assert_eq!(place.code(&["elect", "--ttl", "1ms", "a", "--", "true"]).0, 2);
    assert_eq!(place.code(&["elect", "a"]).0, 2);
}
