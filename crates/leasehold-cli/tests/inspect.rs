//! `ls`, `show`, `release`, and what the program says about itself.

mod common;

use common::{Place, until};

#[test]
fn ls_lists_holders_and_waiters() {
    let place = Place::new();
    let output = place.output(&["ls"]);
    assert!(
        output.stdout.is_empty() && String::from_utf8_lossy(&output.stderr).contains("no lock is in use")
    );
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let mut waiter = place.start(&["run", "--label", "the \x1b[31m second", "a", "--", "true"]);
    place.until_waiting("a", 1);

    let text = String::from_utf8(place.output(&["ls"]).stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 3 && lines[1].starts_with("NAME") && lines[2].contains("(sleep 60)"), "{text}");

    let text = String::from_utf8(place.output(&["show", "a"]).stdout).unwrap();
    assert!(text.contains("mutex a") && text.contains("held by") && text.contains("1. "), "{text}");
    assert!(
        text.contains("second") && !text.contains('\x1b'),
        "what others write does not steer the terminal"
    );

    let view = place.show("a");
    assert_eq!(view["kind"], "mutex");
    assert_eq!(view["holders"][0]["metadata"]["pid"], holder.0.id());
    assert_eq!(view["holders"][0]["token"], view["last_token"]);
    assert!(view["holders"][0]["expires_in_ms"].as_u64().unwrap() <= 10_000);
    assert_eq!(view["waiters"][0]["position"], 1);
    assert_eq!(view["waiters"][0]["metadata"]["pid"], waiter.0.id());
    let listed = place.locks()[0].clone();
    let keys = |value: &serde_json::Value| {
        let keys = value.as_object().unwrap().keys().filter(|key| *key != "store");
        keys.cloned().collect::<Vec<_>>()
    };
    assert_eq!(keys(&listed), keys(&view), "ls --json lists what show --json shows");
    assert_eq!(listed["last_token"], view["last_token"]);

    let output = place.output(&["release", "--force", "a", "--json"]);
    let released: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(released["released"][0]["metadata"]["pid"], holder.0.id());
    assert_eq!(waiter.end(), 0, "it is its turn");
    assert_eq!(holder.end(), 124);
    let output = place.output(&["release", "--force", "a", "--json"]);
    assert_eq!(
        (output.stdout.as_slice(), output.status.code()),
        (b"{\"released\":[]}\n".as_slice(), Some(1))
    );
}

#[test]
fn barrier_is_shown_with_parties_and_rounds() {
    let place = Place::new();
    let barrier = leasehold::blocking::Client::connect(&place.store()).unwrap().barrier("a", 2);
    let wait = || {
        let barrier = barrier.clone();
        std::thread::spawn(move || barrier.wait().unwrap())
    };
    let show = || String::from_utf8(place.output(&["show", "--kind", "barrier", "a"]).stdout).unwrap();
    let first = wait();
    until(|| show().contains("1 of 2 parties have arrived\n").then_some(()));
    let text = show();
    assert!(text.contains("\nhere is ") && !text.contains("permits") && !text.contains("passed"), "{text}");
    for party in [first, wait()] {
        party.join().unwrap();
    }
    let text = show();
    assert!(text.contains("1 round has passed recently\n") && text.contains("\nfree\n"), "{text}");
    let output = place.output(&["show", "--json", "--kind", "barrier", "a"]);
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&view["rounds"], &view["holders"]), (&1.into(), &serde_json::json!([])));
}

#[test]
fn unused_lock_is_free() {
    let place = Place::new();
    let output = place.output(&["show", "a"]);
    let text = format!("store {}\nmutex a\nfree\n", place.store());
    assert_eq!((String::from_utf8(output.stdout).unwrap(), output.status.code()), (text, Some(0)));
}

#[test]
fn diagnosed_store_is_named_without_its_password() {
    let server = leasehold_testkit::Server::builder().password("s3cret").start();
    let shown = format!("redis://127.0.0.1:{}", server.port());
    let place = Place::on(&server.url());
    let said = |args: &[&str]| {
        let output = place.output(args);
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(&shown) && !said.contains("s3cret"), "{args:?} said {said}");
        said
    };
    assert_eq!(said(&["ls"]), format!("leasehold: no lock is in use on {shown}\n"));
    said(&["release", "--force", "a"]);
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let first_line = format!("store {shown}\n");
    for args in [&["ls"][..], &["show", "a"], &["doctor"]] {
        assert!(said(args).starts_with(&first_line), "{args:?}");
    }
    for args in [&["ls", "--json"][..], &["show", "--json", "a"], &["doctor", "--json"]] {
        let value: serde_json::Value = serde_json::from_str(&said(args)).unwrap();
        assert_eq!(value["store"], shown, "{args:?}");
    }
}

#[test]
fn closed_stdout_is_no_failure() {
    let place = Place::new();
    for args in [&["completions", "bash"][..], &["man"], &["ls", "--json"], &["--help"]] {
        let mut started = place.start(args);
        drop(started.0.stdout.take());
        assert_eq!(started.end(), 0, "{args:?}");
        assert_eq!(started.stderr(), "", "{args:?}");
    }
}

#[test]
fn help_names_every_exit_code() {
    let place = Place::new();
    for args in [&["--help"][..], &["run", "--help"]] {
        let text = String::from_utf8(place.output(args).stdout).unwrap();
        for word in ["124", "125", "126", "127", "128+N", "-E", "LEASEHOLD_STORE"] {
            assert!(text.contains(word), "{args:?} lacks {word}");
        }
    }
    for args in [&["man"][..], &["man", "run"]] {
        let text = String::from_utf8(place.output(args).stdout).unwrap();
        assert!(text.contains(".TH") && text.contains("128+N"), "{args:?}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let text = String::from_utf8(place.output(&["completions", shell]).stdout).unwrap();
        assert!(text.contains("min-hold"), "{shell}");
    }
    assert!(place.output(&["--version"]).stdout.starts_with(b"leasehold "));
}

#[test]
fn name_with_invisible_characters_cannot_disguise_itself() {
    let place = Place::new();
    let name = "dep\u{202e}yol\u{2069}\u{200b}";
    let shown = "dep\\u{202e}yol\\u{2069}\\u{200b}";
    let mut holder = place.start(&["run", "--label", "a\u{200f}b", name, "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    for args in [&["ls"][..], &["show", name]] {
        let text = String::from_utf8(place.output(args).stdout).unwrap();
        assert!(text.contains(shown) && text.contains("(a\\u{200f}b)"), "{args:?}: {text}");
        assert!(!text.contains(['\u{202e}', '\u{2069}', '\u{200b}', '\u{200f}']), "{args:?}: {text:?}");
    }
    // Also those of the library's errors.
    for args in [
        &["wait", "-w", "0", name][..],
        &["run", "-n", "-s", "--verbose", name, "--", "true"],
        &["run", "--semaphore", "0", name, "--", "true"],
        &["release", "--force", "--token", "1", name],
        &["release", name],
        &["acquire", "--ttl", "1ms", name],
        &["run", "-n", "--verbose", name, "--", "true"],
        &["completions", name],
    ] {
        let said = place.code(args).1;
        assert!(!said.is_empty() && !said.contains(['\u{202e}', '\u{2069}', '\u{200b}', '\u{200f}']), "{args:?}: {said:?}");
    }
    let said = place.code(&["wait", "-w", "0", name]).1;
    assert!(said.contains(shown), "{said}");
    let mut watch = place.start(&["watch", "--plain", "--interval", "0.05"]);
    assert!(watch.line().contains(shown));
}
