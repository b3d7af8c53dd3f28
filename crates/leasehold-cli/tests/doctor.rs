//! `doctor`, and the warnings that the other commands print.

mod common;

use common::{Place, code};
use leasehold_testkit::Server;
use serde_json::Value;

fn doctor(place: &Place, url: &str, args: &[&str]) -> (i32, String, String) {
    let mut all = vec!["doctor", "--store", url];
    all.extend(args);
    let output = place.output(&all);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (code(output.status), text(output.stdout), text(output.stderr))
}

#[test]
fn store_without_dangers_exits_with_0() {
    let place = Place::new();
    let (code, said, complaints) = doctor(&place, &place.store(), &[]);
    assert_eq!((code, complaints.as_str()), (0, ""));
    assert!(said.contains("fine    the file is whole (file "), "{said}");
    assert!(said.contains("\n  synchronous  "), "{said}");
    assert!(!said.contains("CONFIG SET"), "{said}");
}

#[test]
fn dangers_come_first_with_what_to_set_and_exit_code_1() {
    let place = Place::new();
    let server =
        Server::builder().setting("maxmemory-policy", "allkeys-lru").setting("timeout", "60").start();
    let (code, said, complaints) = doctor(&place, &server.url(), &[]);
    assert_eq!((code, complaints.as_str()), (1, ""));
    let name = format!("(server 127.0.0.1:{})", server.port());
    let begin = format!(
        "store {}\ndanger  maxmemory-policy is allkeys-lru {name} [eviction]\n        ",
        server.url()
    );
    assert!(said.starts_with(&begin), "{said}");
    assert!(said.contains("\n        > CONFIG SET maxmemory-policy noeviction\n"), "{said}");
    let order = ["danger  ", "advice  ", "fine    ", "\nserver 127", "CONFIG REWRITE"];
    let places: Vec<usize> = order.iter().map(|word| said.rfind(word).expect(word)).collect();
    assert!(places.is_sorted(), "{said}");

    let (code, said, _) = doctor(&place, &server.url(), &["--json"]);
    let value: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &value["dangerous"]), (1, &Value::Bool(true)));
    let findings = value["components"][0]["findings"].as_array().unwrap();
    let policy =
        findings.iter().find(|finding| finding["remedy"] == "CONFIG SET maxmemory-policy noeviction");
    assert_eq!(policy.unwrap()["severity"], "danger");
    assert_eq!(value["components"][0]["facts"]["maxmemory-policy"], "allkeys-lru");
}

#[test]
fn replica_is_reported_before_what_its_settings_lack() {
    let place = Place::new();
    let master = Server::on_port();
    let replica = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", master.port())).start();
    let (code, said, _) = doctor(&place, &replica.url(), &[]);
    assert_eq!(code, 1);
    let place_of = |text: &str| said.find(text).unwrap_or_else(|| panic!("{text}: {said}"));
    assert!(
        place_of("danger  this server is a replica") < place_of("danger  nothing is written to disk"),
        "{said}"
    );
}

#[test]
fn accepted_danger_is_printed_last_and_exits_with_0() {
    let place = Place::new();
    let server = Server::builder().setting("maxmemory-policy", "allkeys-lru").start();
    let accept = ["--accept", "eviction", "--accept", "persistence"];
    assert_eq!(doctor(&place, &server.url(), &[]).0, 1);
    assert_eq!(doctor(&place, &server.url(), &accept[..2]).0, 1, "another danger is left");
    let (code, said, complaints) = doctor(&place, &server.url(), &accept);
    assert_eq!((code, complaints.as_str()), (0, ""), "{said}");
    assert!(
        !said.contains("danger  ") && said.contains("\naccepted eviction: maxmemory-policy is allkeys-lru ("),
        "{said}"
    );
    let (code, said, _) = doctor(&place, &server.url(), &[&accept[..], &["--json"]].concat());
    let value: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &value["dangerous"]), (0, &Value::Bool(false)));
    let findings = value["components"][0]["findings"].as_array().unwrap();
    let eviction = findings.iter().find(|finding| finding["id"] == "eviction").unwrap();
    assert_eq!((&eviction["severity"], &eviction["accepted"]), (&"danger".into(), &true.into()));

    let (code, _, complaints) = doctor(&place, &server.url(), &["--accept", "evictoin"]);
    assert!(code == 2 && complaints.contains("eviction"), "{complaints}");
}

#[test]
fn every_finding_id_is_documented() {
    let page = include_str!("../../../docs/operations.md");
    for id in leasehold::FINDING_IDS {
        assert!(page.contains(&format!("`{id}`")), "{id} is not documented");
    }
}

#[test]
fn every_json_key_of_doctor_is_in_its_help() {
    let place = Place::new();
    let (_, said, _) = doctor(&place, &place.store(), &["--json"]);
    let help = String::from_utf8(place.output(&["doctor", "--help"]).stdout).unwrap();
    let value: Value = serde_json::from_str(&said).unwrap();
    let component = &value["components"][0];
    let keys = [&value, component, &component["findings"][0]].map(|value| value.as_object().unwrap().keys());
    let keys: Vec<&String> = keys.into_iter().flatten().collect();
    assert_eq!(keys.len(), 12, "{keys:?}");
    for key in keys {
        assert!(help.contains(key), "{key} is not documented");
    }
    let page = String::from_utf8(place.output(&["man", "doctor"]).stdout).unwrap();
    assert!(page.contains("doctor: something is dangerous"), "{page}");
}

/// As other commands.
#[test]
fn server_without_hello_is_examined() {
    let place = Place::new();
    let server = Server::builder().setting("rename-command", "HELLO \"\"").start();
    assert_eq!(place.code(&["--store", &server.url(), "run", "a", "--", "true"]), (0, String::new()));
    let (code, said, complaints) = doctor(&place, &server.url(), &[]);
    assert_eq!((code, complaints.as_str()), (1, ""));
    assert!(said.contains("[persistence]"), "{said}");
}

#[test]
fn unreachable_store_is_a_failure_and_no_finding() {
    let place = Place::new();
    let (code, said, complaints) = doctor(&place, "redis+unix:///no/such/socket", &[]);
    assert_eq!((code, said.as_str()), (125, ""));
    assert!(complaints.starts_with("leasehold: redis+unix:///no/such/socket: "), "{complaints}");
}

#[test]
fn each_command_prints_the_store_s_warnings_once_on_stderr() {
    let place = Place::new();
    let server = Server::builder().setting("maxmemory-policy", "allkeys-lru").start();
    let url = server.url();
    for args in [&["run", "a", "--", "true"][..], &["ls"], &["show", "a"], &["release", "--force", "a"]] {
        let mut all = vec!["--store", &url];
        all.extend(args);
        let (_, said) = place.code(&all);
        assert_eq!(said.matches("leasehold: warning: maxmemory-policy is allkeys-lru").count(), 1, "{said}");
        assert!(said.contains("; see leasehold doctor\n"), "{said}");
    }
    server.run(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    assert_eq!(place.code(&["--store", &url, "run", "a", "--", "true"]), (0, String::new()));
}

/// What is left in the shared memory speaks of the removed log, so that the file can't be opened.
#[test]
#[cfg(target_os = "linux")]
fn removed_wal_error_names_the_processes_that_use_it() {
    let place = Place::new();
    let user = place.start(&["run", "--on-lost", "ignore", "a", "--", "sleep", "60"]);
    place.until_held("a");
    std::fs::remove_file(place.path("locks.db-wal")).unwrap();
    let advice = format!("have to end first: kill {}", user.0.id());
    for args in [&["run", "-w", "60", "b", "--", "true"][..], &["doctor"], &["ls"]] {
        let (code, said) = place.code(args);
        assert!(code == 125 && said.contains(&advice), "{args:?}: {said}");
    }
}
