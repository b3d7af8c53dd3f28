//! `leasehold elect`: one of many hosts runs the command.

mod common;

use std::fs;

use common::{Place, until};

fn holders(place: &Place) -> usize {
    let output = place.output(&["show", "--json", "--kind", "election", "a"]);
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    view["holders"].as_array().map_or(0, Vec::len)
}

#[test]
fn one_runs_the_command_and_another_takes_over_when_it_ends_or_its_host_dies() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let args = ["elect", "--ttl", "1s", "--backoff", "20s", "a", "-c", &script];
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
    assert!(first.stderr().contains("the command ended: by signal 9; standing for election again in 20s"));
    third.signal("TERM");
    assert_eq!(third.end(), 128 + 15, "the command got it, and it is not started again");
    until(|| (holders(&place) == 0).then_some(()));
    second.end();
}

#[test]
fn a_command_that_ends_is_started_again_here_if_nobody_else_does() {
    let place = Place::new();
    let log = place.path("log");
    let script = format!("echo $LEASEHOLD_TOKEN >> {}; exit 3", log.display());
    let mut elected = place.start(&["elect", "--backoff", "20ms", "a", "-c", &script]);
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
        said.contains("exit code 3; standing for election again in 20 ms") && said.contains("in 40 ms"),
        "{said}"
    );
}

#[test]
fn a_store_that_is_gone_ends_the_command_and_is_waited_for() {
    let mut server = leasehold_servers::Server::on_port();
    let place = Place::on(&server.url());
    let log = place.path("log");
    let script = format!("echo $$ >> {}; exec sleep 60", log.display());
    let starts = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut elected = place.start(&["elect", "--ttl", "1s", "--backoff", "100ms", "a", "-c", &script]);
    until(|| (starts() == 1).then_some(()));
    let command = fs::read_to_string(&log).unwrap().trim().parse().unwrap();
    server.stop();
    until(|| (!common::is_alive(command)).then_some(()));
    server.start();
    until(|| (starts() == 2).then_some(()));
    elected.signal("TERM");
    assert_eq!(elected.end(), 128 + 15);
    let said = elected.stderr();
    assert!(said.contains("the lease was lost; standing for election again"), "{said}");
}

#[test]
fn what_can_t_be_is_refused_at_once() {
    let place = Place::new();
    assert_eq!(place.code(&["elect", "a", "--", "no-such-command"]).0, 127);
    assert_eq!(place.code(&["elect", "", "--", "true"]).0, 2);
    assert_eq!(place.code(&["elect", "--ttl", "1ms", "a", "--", "true"]).0, 2);
    assert_eq!(place.code(&["elect", "a"]).0, 2);
}
