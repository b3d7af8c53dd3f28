//! Locks of other kinds than a mutex.

mod common;

use std::io::{BufRead as _, BufReader};
use std::sync::mpsc;
use std::thread;

use common::{Place, SOON, until};

#[test]
fn shared_commands_overlap_and_an_exclusive_one_runs_alone() {
    let place = Place::new();
    let readers = [0, 1].map(|_| place.start(&["run", "-s", "a", "--", "sleep", "60"]));
    until(|| (place.show("a")["holders"].as_array()?.len() == 2).then_some(()));
    assert_eq!(place.code(&["run", "-x", "-n", "a", "--", "true"]), (1, String::new()));
    let mut writer = place.start(&["run", "-x", "a", "--", "echo", "alone"]);
    place.until_waiting("a", 1);
    assert_eq!(place.code(&["run", "-s", "-n", "a", "--", "true"]).0, 1, "it would overtake the writer");
    let view = place.show("a");
    assert_eq!((&view["kind"], &view["holders"][0]["mode"]), (&"rw".into(), &"read".into()));
    assert_eq!(view["waiters"][0]["mode"], "write");
    let text = String::from_utf8(place.output(&["show", "a"]).stdout).unwrap();
    assert!(text.contains("held to read by") && text.contains("waits to write for"), "{text}");
    for mut reader in readers {
        reader.signal("TERM");
        assert_eq!(reader.end(), 128 + 15);
    }
    assert_eq!((writer.line(), writer.end()), ("alone".to_owned(), 0));
}

#[test]
fn semaphore_limits_concurrent_commands() {
    let place = Place::new();
    let holders = [0, 1].map(|_| place.start(&["run", "--semaphore", "2", "a", "--", "sleep", "60"]));
    until(|| (place.show("a")["holders"].as_array()?.len() == 2).then_some(()));
    assert_eq!(place.code(&["run", "--semaphore", "2", "-n", "a", "--", "true"]).0, 1);
    let (code, said) = place.code(&["run", "--semaphore", "3", "-n", "a", "--", "true"]);
    assert!(code == 2 && said.contains("in use with 2 permits"), "{code} {said}");
    let view = place.show("a");
    assert_eq!((&view["capacity"], &view["in_use"]), (&2.into(), &2.into()));
    let text = String::from_utf8(place.output(&["show", "a"]).stdout).unwrap();
    assert!(text.contains("\nsemaphore a\n2 of 2 permits are in use\n"), "{text}");
    holders.into_iter().for_each(drop);
    let (code, said) = place.code(&["run", "--semaphore", "0", "b", "--", "true"]);
    assert!(code == 2 && said.contains("--semaphore") && said.contains("0 is not in 1.."), "{code} {said}");
}

#[test]
fn owner_reenters_within_its_own_command() {
    let place = Place::new();
    let script =
        "\"$0\" run -n --owner job-7 a -- \"$0\" show a --json; \"$0\" run -n --owner other a -- true";
    let output = place.output(&["run", "--owner", "job-7", "a", "-c", &with_program(script)]);
    assert_eq!(output.status.code(), Some(1), "another owner has to wait: {output:?}");
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let holders = view["holders"].as_array().unwrap();
    assert!(holders.len() == 2 && holders.iter().all(|holder| holder["owner"] == "job-7"), "{view}");
    assert_eq!(holders[0]["token"], holders[1]["token"]);
    let (code, said) = place.code(&["run", "--owner", "", "a", "--", "true"]);
    assert!(code == 2 && said.contains("an owner is"), "{said}");
}

/// A script whose `$0` is the program.
fn with_program(script: &str) -> String {
    script.replace("$0", env!("CARGO_BIN_EXE_leasehold"))
}

#[test]
fn mutex_is_refused_while_a_rw_lock_of_that_name_is_in_use() {
    let place = Place::new();
    let reader = place.start(&["run", "-s", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let (code, said) = place.code(&["run", "-n", "a", "--", "true"]);
    assert!(code == 2 && said.contains("in use with -s or -x: pass -x"), "{said}");
    let holder = place.start(&["run", "b", "--", "sleep", "60"]);
    place.until_held("b");
    for option in ["-s", "-x"] {
        let (code, said) = place.code(&["run", option, "-n", "b", "--", "true"]);
        assert!(code == 2 && said.contains("in use without -s and -x"), "{said}");
    }
    drop((reader, holder));
}

#[test]
fn locks_with_the_same_name_are_distinguished_by_kind() {
    let place = Place::new();
    let mut holders = [
        place.start(&["run", "a", "--", "sleep", "60"]),
        place.start(&["run", "--semaphore", "3", "a", "--", "sleep", "60"]),
    ];
    until(|| (place.locks().as_array()?.len() == 2).then_some(()));
    let text = String::from_utf8(place.output(&["ls"]).stdout).unwrap();
    assert!(text.contains("a     mutex") && text.contains("a     semaphore"), "{text}");
    let text = String::from_utf8(place.output(&["show", "a"]).stdout).unwrap();
    assert!(text.contains("mutex a\n") && text.contains("\nsemaphore a\n"), "{text}");
    for args in [&["show", "a", "--json"][..], &["release", "--force", "a"]] {
        let (code, said) = place.code(args);
        assert!(code == 2 && said.contains("--kind mutex or --kind semaphore"), "{said}");
    }
    let output = place.output(&["show", "a", "--json", "--kind", "semaphore"]);
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&view["kind"], &view["capacity"]), (&"semaphore".into(), &3.into()));
    assert_eq!(place.code(&["release", "--force", "--kind", "semaphore", "a"]).0, 0);
    assert_eq!(holders[1].end(), 124);
    assert!(holders[0].0.try_wait().unwrap().is_none(), "the mutex is held on");
}

#[test]
fn once_per_starts_the_command_once_in_a_period() {
    let place = Place::new();
    let once = ["run", "--once-per", "1h", "a", "--", "echo", "done"];
    assert_eq!(place.output(&once).stdout, b"done\n");
    let output = place.output(&once);
    assert_eq!((output.stdout.as_slice(), output.status.code()), (&b""[..], Some(1)));
    assert_eq!(place.code(&["run", "-E", "0", "--once-per", "1h", "a", "--", "false"]).0, 0);
    let (code, said) = place.code(&["run", "-v", "--once-per", "1h", "a", "--", "true"]);
    assert!(code == 1 && said.contains("retained for 53m"), "{said}");
    for args in [&["-n"][..], &["--min-hold", "1s"], &["-s"]] {
        assert_eq!(place.code(&[&["run", "--once-per", "1h"], args, &["a", "--", "true"]].concat()).0, 2);
    }
    let (code, said) = place.code(&["run", "--once-per", "40d", "a", "--", "true"]);
    assert!(code == 2 && said.contains("a period is"), "{said}");
    assert_eq!(place.code(&["run", "--at-least-once", "a", "--", "true"]).0, 2);
}

#[test]
fn killed_host_loses_the_period_or_is_followed_by_another() {
    let place = Place::new();
    let dies = |options: &[&str], name: &str| {
        let args =
            [&["run", "--ttl", "12s", "--once-per", "1h"], options, &[name, "--", "sleep", "60"]].concat();
        let mut host = place.start(&args);
        place.until_held(name);
        host.signal("KILL");
        host.end();
    };
    dies(&[], "a");
    dies(&["--at-least-once"], "b");
    let mut next = place.start(&["run", "--once-per", "1h", "--at-least-once", "b", "--", "sleep", "60"]);
    until(|| {
        let view = place.show("b");
        (view["holders"][0]["metadata"]["pid"].as_u64() == Some(next.0.id().into())).then_some(())
    });
    // Others wait for its end, and do not start then.
    let mut third = place.start(&["run", "--once-per", "1h", "--at-least-once", "b", "--", "echo", "no"]);
    place.until_waiting("b", 1);
    next.signal("TERM");
    assert_eq!((next.end(), third.end()), (128 + 15, 1));
    assert_eq!(
        place.code(&["run", "--once-per", "1h", "a", "--", "true"]).0,
        1,
        "the lease of the dead has ended"
    );
}

#[test]
fn run_accepts_only_one_kind() {
    let place = Place::new();
    for args in [&["-s", "-x"][..], &["-s", "--semaphore", "2"], &["-x", "--owner", "me"]] {
        let (code, said) = place.code(&[&["run"], args, &["a", "--", "true"]].concat());
        assert!(code == 2 && said.contains("cannot be used with"), "{said}");
    }
    let (code, said) = place.code(&["show", "--kind", "spin", "a"]);
    assert!(code == 2 && said.contains("mutex, semaphore, rw"), "{said}");
}

/// A period is retained for nine tenths of it. Nothing else says why the second one waits.
#[test]
fn waiter_of_a_used_period_says_until_when_the_lock_is_retained_also_without_a_terminal() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "--once-per", "1h", "a", "--", "true"]).0, 0);
    let mut waiter = place.start(&["run", "a", "--", "true"]);
    let said = BufReader::new(waiter.0.stderr.take().unwrap()).lines();
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || said.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    let line = lines.recv_timeout(SOON).expect("it says why it waits");
    assert!(line.starts_with("leasehold: waiting for \"a\"") && line.contains("retained for 53m"), "{line}");
    assert!(line.contains(", until 2") && line.contains("--once-per"), "{line}");
    // A lock that is held is waited for in silence.
    let mut holder = place.start(&["run", "b", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let mut silent = place.start(&["run", "b", "--", "true"]);
    place.until_waiting("b", 1);
    holder.signal("TERM");
    assert_eq!((silent.end(), silent.stderr()), (0, String::new()));
    waiter.signal("TERM");
    waiter.end();
}
