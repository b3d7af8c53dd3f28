//! What the help promises is what is there.

mod common;

use common::Place;
use serde_json::Value;

fn keys<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.keys().map(String::as_str));
            map.values().for_each(|value| keys(value, found));
        }
        Value::Array(all) => all.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

#[test]
fn every_json_key_of_show_is_in_its_help() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let _waiter = place.start(&["run", "a", "--", "true"]);
    place.until_waiting("a", 1);
    let (view, help) = (place.show("a"), place.output(&["show", "--help"]).stdout);
    let help = String::from_utf8(help).unwrap();
    let mut found = Vec::new();
    keys(&view, &mut found);
    assert!(found.contains(&"skipped") && found.contains(&"expires_in_ms"));
    for key in found {
        assert!(help.contains(key), "{key} is not documented");
    }
}

#[test]
fn every_scheme_of_a_store_and_the_shared_file_are_in_the_help() {
    let place = Place::new();
    let of = |args: &[&str]| String::from_utf8(place.output(args).stdout).unwrap();
    let (help, stores) = (of(&["--help"]), of(&["help", "stores"]));
    for scheme in leasehold::SCHEMES {
        let line = format!("  {scheme}:");
        assert!(help.contains(&line) && stores.contains(&line), "{scheme}: {help}");
    }
    assert!(help.contains("root's cron") && help.contains("install -d -m 2770"), "{help}");
}

#[test]
fn argument_error_is_one_line_and_refers_to_help() {
    let place = Place::new();
    for (args, says) in [
        (&["run", "a", "ls"][..], "the command comes after --"),
        (&["run", "a"], "the command comes after --"),
        (&["run", "--", "true"], "<NAME>"),
        (&["run", "-n", "-w", "1", "a", "--", "true"], "'--no-wait' cannot be used with '--wait"),
        (&["run", "-w", "-1", "a", "--", "true"], "zero or more"),
        (&["run", "-w", "1e12", "a", "--", "true"], "more than 100 years"),
        (&["run", "--ttl", "soon", "a", "--", "true"], "write 10s"),
        (&["run", "--on-lost", "cry\n\x1b[31m", "a", "--", "true"], "kill, signal, ignore"),
        (&["acquire", "-x1"], "unexpected argument '-1' found; a name that begins with a dash comes last"),
        (
            &["show", "-oops"],
            "; a name that begins with a dash comes last: the options, then --, then the name",
        ),
        (&["wait", "--", "-x1", "-w", "1"], "a name that begins with a dash comes last"),
        (&["renew", "-oops"], "a name that begins with a dash comes last"),
        (&["run", "-oops", "--", "true"], "is passed by --name=NAME"),
        (&["health", "-x"], "unexpected argument '-x' found; see"),
        (&["rum"], "similar subcommand exists: 'run'"),
    ] {
        let (code, said) = place.code(args);
        assert_eq!(code, 2, "{args:?}");
        assert!(said.starts_with("leasehold: ") && said.contains(says), "{args:?} said {said}");
        assert!(said.ends_with("; see leasehold --help\n") && said.lines().count() == 1, "{said}");
        assert!(!said.contains('\x1b'), "{said:?}");
    }
}

#[test]
fn name_that_begins_with_a_dash_comes_after_the_options() {
    let place = Place::new();
    assert_eq!(place.code(&["acquire", "-n", "--", "-x1"]).0, 0);
    assert_eq!(place.code(&["acquire", "-n", "--", "-x1"]).0, 1);
    assert_eq!(place.code(&["wait", "-w", "0", "--", "-x1"]).0, 1);
    assert_eq!(place.code(&["show", "--", "-x1"]).0, 0);
    assert_eq!(place.code(&["release", "--force", "--", "-x1"]).0, 0);
}

#[test]
fn program_without_a_command_prints_its_help_also_if_the_environment_names_a_store() {
    let place = Place::new();
    let (code, said) = place.code(&[]);
    assert!(code == 2 && said.contains("Usage:") && said.contains("  elect"), "{code}: {said}");
    assert!(!said.contains("watchdog"), "{said}");
}
