//! `watch`: changes as lines, and the live view on a terminal, which `script` provides.

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread;

use common::{Place, Started, as_from_terminal, until};
use serde_json::Value;

/// The lines that a program prints, as they come.
fn lines(watch: &mut Started) -> Arc<Mutex<Vec<String>>> {
    let output = BufReader::new(watch.0.stdout.take().expect("piped"));
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = lines.clone();
    thread::spawn(move || {
        output.lines().map_while(Result::ok).for_each(|line| seen.lock().unwrap().push(line));
    });
    lines
}

#[test]
fn changes_are_printed_as_lines_and_as_objects() {
    let place = Place::new();
    let mut plain = place.start(&["watch", "--plain", "--interval", "0.05"]);
    let mut json = place.start(&["watch", "--json", "--interval", "0.05", "deploy"]);
    let (plain_lines, json_lines) = (lines(&mut plain), lines(&mut json));
    let mut other = place.start(&["run", "other", "-c", "echo on; exec sleep 60"]);
    let mut holder = place.start(&["run", "--label", "ci", "deploy", "-c", "echo on; exec sleep 60"]);
    assert_eq!((other.line(), holder.line()), ("on".to_owned(), "on".to_owned()));
    let mut waiter = place.start(&["run", "deploy", "--", "true"]);
    let printed = |text: &str| plain_lines.lock().unwrap().iter().any(|line| line.contains(text));
    let events = || -> Vec<Value> {
        json_lines.lock().unwrap().iter().map(|line| serde_json::from_str(line).expect("an object")).collect()
    };
    let has = |event: &str| events().iter().any(|value| value["event"] == event);
    // Both have seen the holder and the waiter, before these end.
    until(|| (printed("mutex deploy: granted to ") && printed("mutex deploy: 1 waiting")).then_some(()));
    until(|| (has("granted") && has("waiting")).then_some(()));
    assert!(printed("(ci), token ") && printed("mutex other: granted"));
    holder.signal("TERM");
    assert_eq!(waiter.end(), 0);
    until(|| (printed("mutex deploy: ended after ") && printed("mutex deploy: 0 waiting")).then_some(()));
    until(|| has("ended").then_some(()));
    assert!(events().iter().all(|value| value["name"] == "deploy"), "{:?}", events());
    let granted = events().into_iter().find(|value| value["event"] == "granted").unwrap();
    assert_eq!(granted["holder"]["metadata"]["label"], "ci");
}

#[test]
fn lines_end_with_their_reader_though_nothing_changes() {
    let place = Place::new();
    let _holder = place.code(&["acquire", "a"]);
    for form in ["--plain", "--json"] {
        let mut watch = place.start(&["watch", form, "--interval", "1h"]);
        assert!(watch.line().contains("granted"), "{form}");
        drop(watch.0.stdout.take());
        assert_eq!(watch.end(), 0, "{form}");
    }
}

#[test]
fn live_view_shows_a_lock_and_releases_its_holder_after_a_question() {
    let place = Place::new();
    let mut script = as_from_terminal("script");
    script.args(["-qec", "stty rows 24 cols 120; exec \"$LEASEHOLD\" watch --interval 0.05", "/dev/null"]);
    script
        .env("LEASEHOLD_STORE", place.store())
        .env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"))
        .env("TERM", "xterm");
    let mut screen =
        Started(script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script runs"));
    let (mut keys, mut output) = (screen.0.stdin.take().unwrap(), screen.0.stdout.take().unwrap());
    let seen = Arc::new(Mutex::new(String::new()));
    let shown = seen.clone();
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut bytes) {
            shown.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    });
    // The view draws only what has changed, so a text is searched in all that was drawn.
    let until_drawn = |text: &str| until(|| seen.lock().unwrap().contains(text).then_some(()));
    until_drawn("0 locks");
    let mut holder =
        place.start(&["run", "--ttl", "15s", "--label", "ci", "deploy", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    until_drawn("deploy");
    let mut press = |text: &str| {
        keys.write_all(text.as_bytes()).unwrap();
        keys.flush().unwrap();
    };
    press("r");
    // A word of the question: parts of it may equal the lines before, and are not drawn again.
    until_drawn("other keys");
    press("y");
    assert_eq!(holder.end(), 124);
    press("q");
    assert_eq!(screen.end(), 0);
}
