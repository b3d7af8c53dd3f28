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
    let text = |args: &[&str]| {
        let output = place.output(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for args in [&["--help"][..], &["help"], &["help", "exit-codes"]] {
        for word in ["124", "125", "126", "127", "128+N", "-E"] {
            assert!(text(args).contains(word), "{args:?} lacks {word}");
        }
    }
    assert_eq!(text(&["help", "run"]), text(&["run", "--help"]));
    let help = text(&["run", "--help"]);
    assert!(
        help.contains("help exit-codes") && help.contains("help stores") && !help.contains("128+N"),
        "{help}"
    );
    assert!(help.contains("Examples:\n  leasehold run "), "{help}");
    assert_eq!(
        place.code(&["help", "redis://:hunter2@h"]),
        (2, "leasehold: there is no such command or topic: see leasehold --help\n".to_owned())
    );
    for args in [&["man"][..], &["man", "run"]] {
        let page = text(args);
        assert!(page.contains(".TH") && page.contains("128+N"), "{args:?}");
        assert!(
            page.contains(".nf\n.in 0\n  0..125   the exit code of the command\n  1        the lock"),
            "{args:?}: {page}"
        );
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
        assert!(
            !said.is_empty() && !said.contains(['\u{202e}', '\u{2069}', '\u{200b}', '\u{200f}']),
            "{args:?}: {said:?}"
        );
    }
    let said = place.code(&["wait", "-w", "0", name]).1;
    assert!(said.contains(shown), "{said}");
    let mut watch = place.start(&["watch", "--plain", "--interval", "0.05"]);
    assert!(watch.line().contains(shown));
}

#[test]
fn ls_lists_locks_by_name_kind_and_whether_they_are_waited_for() {
    let place = Place::new();
    for args in [&["deploy-a"][..], &["deploy-b"], &["--semaphore", "2", "deploy-c"], &["-s", "report"]] {
        assert_eq!(place.code(&[&["acquire"][..], args].concat()).0, 0);
    }
    let _waiter = place.start(&["run", "deploy-b", "--", "true"]);
    place.until_waiting("deploy-b", 1);
    let names = |args: &[&str]| -> Vec<String> {
        let output = place.output(&[&["ls", "--json"], args].concat());
        assert!(output.status.success(), "{output:?}");
        let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let all = listed["locks"].as_array().unwrap().iter();
        all.map(|lock| lock["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&[]).len(), 4);
    assert_eq!(names(&["deploy-*"]), ["deploy-a", "deploy-b", "deploy-c"]);
    assert_eq!(names(&["deploy-[ac]", "rep?rt"]), ["deploy-a", "deploy-c", "report"]);
    assert_eq!(names(&["deploy"]), [""; 0], "a name without wildcards is the whole name");
    assert_eq!(names(&["--kind", "semaphore"]), ["deploy-c"]);
    assert_eq!(names(&["--kind", "mutex", "*-a"]), ["deploy-a"]);
    assert_eq!(names(&["--waiting"]), ["deploy-b"]);
    let output = place.output(&["ls", "x*"]);
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no such lock is in use on sqlite:") && said.contains("of 4 in use"), "{said}");
    let (code, said) = place.code(&["ls", "deploy-[a"]);
    assert!(code == 2 && said.contains("is no pattern"), "{said}");
}

/// A monitor that reads JSON gets an object also if there is no answer.
#[test]
fn failure_is_an_object_where_json_is_asked_for() {
    let place = Place::on("redis://:hunter2@127.0.0.1:1");
    let id = "lease1.mutex.61.300000.0.1000.1764000000000000.0123456789abcdef0123456789abcdef";
    let cases: [&[&str]; 7] = [
        &["doctor"],
        &["health"],
        &["ls"],
        &["show", "a"],
        &["release", "--force", "a"],
        &["acquire", "-n", "a"],
        &["watch"],
    ];
    for (args, expected) in cases.iter().zip([125, 1, 125, 125, 125, 125, 125]) {
        let output = place.output(&[args, &["--json"][..]].concat());
        assert_eq!(output.status.code(), Some(expected), "{args:?}: {output:?}");
        let failure: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(failure["exit_code"], expected, "{args:?}");
        assert_eq!(failure["store"], "redis://127.0.0.1:1", "{args:?}");
        let error = failure["error"].as_str().unwrap();
        assert!(error.contains("127.0.0.1:1") && !error.contains("hunter2"), "{args:?}: {error}");
        assert!(String::from_utf8(output.stderr).unwrap().contains(error), "{args:?}");
        assert!(place.output(args).stdout.is_empty(), "{args:?} without --json");
    }
    for url in [
        "redis://me:hunter2/x@127.0.0.1",
        "redis://me:hunter2?x@127.0.0.1",
        "redis://127.0.0.1?passw=hunter2",
        "redis-sentinel://a/service?sentinel_passwrd=hunter2",
        "redlock:redis://:hunter2@a:x redis://:hunter2@b redis://:hunter2@c",
        "me:hunter2@127.0.0.1",
        "host=127.0.0.1 password=hunter2",
    ] {
        let place = Place::on(url);
        for args in cases {
            let output = place.output(&[args, &["--json"][..]].concat());
            let text = format!("{output:?}");
            assert!(output.status.code() == Some(2) && !text.contains("hunter2"), "{url} {args:?}: {text}");
            let failure: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(failure["store"].is_null() && failure["error"].is_string(), "{url} {args:?}: {text}");
        }
    }
    let output = Place::new().output(&["status", "--json", id]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().count() == 1 && text.contains("\"error\""), "{text}");
}

/// The program without root's right to pass every directory.
fn unprivileged(place: &Place, args: &[&str]) -> std::process::Output {
    let mut command = place.leasehold(args);
    if rustix::process::geteuid().is_root() {
        command = std::process::Command::new("setpriv");
        command
            .args(["--bounding-set", "-dac_override,-dac_read_search", env!("CARGO_BIN_EXE_leasehold")])
            .args(args);
    }
    command.output().expect("the program starts")
}

#[test]
#[cfg(target_os = "linux")]
fn directory_that_lets_nobody_in_is_named_and_not_called_missing() {
    use std::os::unix::fs::PermissionsExt as _;

    let place = Place::new();
    let closed = place.path("closed");
    std::fs::create_dir_all(closed.join("below/it")).unwrap();
    let set_mode = |mode| std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o000);
    let store = |path: &str| format!("sqlite:{}", closed.join(path).display());
    let said = |path: &str| {
        let output = unprivileged(&place, &["ls", "--store", &store(path)]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (direct, below) = (said("locks.db"), said("below/it/locks.db"));
    set_mode(0o755);
    let expected = format!("permission denied: the directory {} does not let you in", closed.display());
    // Root looks at the way before it opens the file.
    let is_root = rustix::process::geteuid().is_root();
    let said_directly = if is_root { &expected } else { "no permission: it and its directory, " };
    assert!(direct.0 == Some(125) && direct.1.contains(said_directly), "{direct:?}");
    assert!(below.0 == Some(125) && below.1.contains(&expected), "{below:?}");
    let missing = said("none/locks.db");
    assert!(missing.1.contains("does not exist: create it"), "{missing:?}");
    std::fs::write(closed.join("file"), "").unwrap();
    let file = said("file/locks.db");
    assert!(file.1.contains("is no directory: name a file in one"), "{file:?}");
}
