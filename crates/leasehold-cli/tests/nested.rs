//! `leasehold run` in the command of another `leasehold run`.

mod common;

use std::fs;

use common::{Place, until};

/// One run in the command of another, which ends with the inner one's code.
fn nested(place: &Place, outer: &[&str], inner: &str) -> (i32, String) {
    let script = format!("'{}' run {inner} -- true", env!("CARGO_BIN_EXE_leasehold"));
    place.code(&[&["run"], outer, &["a", "-c", &script]].concat())
}

#[test]
fn nested_run_for_the_same_lock_reports_the_deadlock_at_once() {
    let place = Place::new();
    let deeper = format!("b -- '{}' run a", env!("CARGO_BIN_EXE_leasehold"));
    for (outer, inner) in [
        (&[][..], "a"),
        (&[], "-w 60 a"),
        (&[], &*deeper),
        (&[], "--owner me a"),
        (&["--owner", "me"], "--owner you a"),
        (&["-s"], "-x a"),
        (&["-x"], "-s a"),
        (&["--semaphore", "1"], "--semaphore 1 a"),
        (&[], "--once-per 1h --at-least-once a"),
    ] {
        let (code, said) = nested(&place, outer, inner);
        assert_eq!(code, 2, "{outer:?} {inner} said {said}");
        assert!(said.contains("\"a\" is held by the leasehold that this command runs under"), "{said}");
    }
    assert_eq!(nested(&place, &[], "-n a"), (1, String::new()), "who does not wait is told as always");
}

#[test]
fn nested_run_with_another_lock_succeeds() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let other = format!("--store '{}' a", elsewhere.store());
    for (outer, inner) in [
        (&[][..], "b"),
        (&[], &*other),
        (&[], "--semaphore 1 a"),
        (&["-s"], "-s a"),
        (&["--semaphore", "2"], "--semaphore 2 a"),
        (&["--owner", "me"], "--owner me a"),
    ] {
        assert_eq!(nested(&place, outer, inner), (0, String::new()), "{outer:?} {inner}");
    }
    // A process that the command leaves behind gets the lock when the command has ended.
    let done = place.path("done");
    let script = format!(
        "(until [ -e {0}.go ]; do sleep 0.05; done; exec '{1}' run a -c ': >{0}') >/dev/null 2>&1 & ",
        done.display(),
        env!("CARGO_BIN_EXE_leasehold")
    );
    assert_eq!(place.code(&["run", "a", "-c", &script]), (0, String::new()));
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    fs::write(place.path("done.go"), "").unwrap();
    place.until_waiting("a", 1);
    holder.signal("TERM");
    until(|| done.exists().then_some(()));
}

#[test]
fn reader_behind_a_writer_that_waits_for_its_ancestor_reports_the_deadlock() {
    let place = Place::new();
    let (go, leasehold) = (place.path("go"), env!("CARGO_BIN_EXE_leasehold"));
    let script = format!(
        "echo on; until [ -e {} ]; do sleep 0.05; done; '{leasehold}' run -s a -- true",
        go.display()
    );
    let mut outer = place.start(&["run", "-s", "a", "-c", &script]);
    assert_eq!(outer.line(), "on");
    let mut writer = place.start(&["run", "-x", "a", "--", "true"]);
    until(|| {
        let output = place.output(&["show", "--kind", "rw", "--json", "a"]);
        let view: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        (view["waiters"].as_array()?.len() == 1).then_some(())
    });
    fs::write(&go, "").unwrap();
    assert_eq!(outer.end(), 2);
    assert!(outer.stderr().contains("would wait for itself"));
    assert_eq!(writer.end(), 0);
}

#[test]
fn nested_run_for_several_locks_reports_the_deadlock_behind_a_stranger() {
    let place = Place::new();
    let mut stranger = place.start(&["run", "b", "-c", "echo on; exec sleep 60"]);
    assert_eq!(stranger.line(), "on");
    // What the inner run waits for first is the stranger's.
    for inner in ["-w 20 a b", "-w 20 b a", "-w 20 b c a"] {
        let (code, said) = nested(&place, &[], inner);
        assert_eq!(code, 2, "{inner} said {said}");
        assert!(said.contains("\"a\" is held by the leasehold that this command runs under"), "{said}");
    }
    let (code, said) = nested(&place, &[], "-w 0.5 b c");
    assert_eq!(code, 1, "only the stranger's lock is waited for: {said}");
    // A stranger waits for the same lock, in front.
    let go = place.path("go");
    let leasehold = env!("CARGO_BIN_EXE_leasehold");
    let wait = format!("echo on; until [ -e {} ]; do sleep 0.05; done", go.display());
    let script = format!("{wait}; '{leasehold}' run -w 20 c a -- true");
    let mut outer = place.start(&["run", "a", "-c", &script]);
    assert_eq!(outer.line(), "on");
    let mut waiting = place.start(&["run", "a", "--", "true"]);
    place.until_waiting("a", 1);
    fs::write(&go, "").unwrap();
    assert_eq!(outer.end(), 2);
    assert_eq!(waiting.end(), 0);
}
