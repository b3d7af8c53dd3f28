//! A lease across several commands: `acquire`, `renew`, `status`, `release`.

mod common;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::{Command, Stdio};

use common::{Place, code, until};
use leasehold_testkit::Server;
use serde_json::Value;

/// A script as a user writes it, with a store that every command of it reaches.
fn lease_lives_across_commands(place: &Place, ttl: &str) {
    let script = r#"
        set -eu
        id=$("$LEASEHOLD" acquire --ttl "$TTL" --label "ci job 7" deploy)
        export LEASEHOLD_ID="$id"
        "$LEASEHOLD" status | grep -q "ci job 7"
        if "$LEASEHOLD" acquire -n deploy; then echo "acquired twice"; exit 9; fi
        if "$LEASEHOLD" ls --json | grep -q "${id##*.}"; then echo "ls shows the id"; exit 9; fi
        if "$LEASEHOLD" show deploy --json | grep -q "${id##*.}"; then echo "show shows the id"; exit 9; fi
        "$LEASEHOLD" renew
        "$LEASEHOLD" release
        for command in renew status release; do
            code=0; echo "$id" | "$LEASEHOLD" $command - || code=$?
            if [ $code != 1 ]; then echo "$command of an ended lease: $code"; exit 9; fi
        done
        "$LEASEHOLD" run -n deploy -- echo free
    "#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("TTL", ttl).env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"));
    let output = shell.env("LEASEHOLD_STORE", place.store()).output().unwrap();
    assert!(output.status.success() && output.stdout.ends_with(b"free\n"), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        said.matches("no such lease: it was released, it has expired, or the id is wrong").count(),
        3,
        "{said}"
    );
}

#[test]
fn lease_lives_across_commands_on_a_file() {
    lease_lives_across_commands(&Place::new(), "5m");
}

#[test]
fn lease_lives_across_commands_on_a_server() {
    let server = Server::on_socket();
    lease_lives_across_commands(&Place::on(&server.url()), "5m");
}

#[test]
fn lease_lives_across_commands_on_a_quorum() {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_socket()).collect();
    let nodes: Vec<String> = servers.iter().map(Server::url).collect();
    lease_lives_across_commands(
        &Place::on(&format!("redlock:{} ?node_timeout_ms=5000", nodes.join(" "))),
        "1m",
    );
}

/// Runs a command of a lease with this `LEASEHOLD_ID` and this stdin.
fn with_id(place: &Place, args: &[&str], variable: Option<&str>, stdin: &str) -> (i32, String) {
    let mut command = place.leasehold(args);
    command.stdin(Stdio::piped()).env_remove("LEASEHOLD_ID").envs(variable.map(|id| ("LEASEHOLD_ID", id)));
    let mut child = command.spawn().unwrap();
    // A program that does not read it may have ended.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    (code(output.status), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn id_of_a_lease_comes_from_the_environment_or_stdin() {
    let place = Place::new();
    let lease = |name| acquire(&place, &[name])["id"].as_str().unwrap().to_owned();
    let (a, b) = (lease("a"), lease("b"));
    for command in ["status", "renew"] {
        assert_eq!(with_id(&place, &[command], Some(&a), ""), (0, String::new()), "{command}");
        assert_eq!(
            with_id(&place, &[command, "-"], None, &format!("{a}\n")),
            (0, String::new()),
            "{command}"
        );
    }
    for command in ["status", "renew", "release"] {
        let (code, said) = with_id(&place, &[command], None, "");
        assert!(code == 2 && said.contains("LEASEHOLD_ID") && said.contains("stdin"), "{command}: {said}");
        let (code, said) = with_id(&place, &[command], Some(""), "");
        assert!(code == 2 && said.contains("LEASEHOLD_ID is empty"), "{command}: {said}");
        let (code, said) = with_id(&place, &[command, "-"], Some(&a), "\n");
        assert!(code == 2 && said.contains("stdin is empty"), "{command}: {said}");
        let (code, said) = with_id(&place, &[command, "-"], None, "lease1.secret");
        assert!(code == 2 && said.contains("stdin: ") && !said.contains("secret"), "{command}: {said}");
    }
    let (code, said) = with_id(&place, &["release", "--force"], Some(&a), "");
    assert!(code == 2 && said.contains("ID|NAME"), "a lock's name is typed: {said}");
    // What is typed wins.
    assert_eq!(with_id(&place, &["release", &b], Some(&a), "").0, 0);
    assert_eq!(with_id(&place, &["release", "-"], Some(&b), &a).0, 0);
    assert_eq!(place.locks().as_array().map(Vec::len), Some(0));
}

fn acquire(place: &Place, args: &[&str]) -> Value {
    let output = place.output(&[&["acquire", "--json"], args].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn unrenewed_lease_expires_and_renewed_lease_lasts() {
    let place = Place::new();
    let lease = acquire(&place, &["--ttl", "14s", "kept"]);
    let id = lease["id"].as_str().unwrap();
    assert_eq!((lease["name"].as_str(), lease["kind"].as_str()), (Some("kept"), Some("mutex")));
    let left = || {
        let output = place.output(&["status", "--json", id]);
        let status =
            output.status.success().then(|| serde_json::from_slice::<Value>(&output.stdout).unwrap())?;
        assert_eq!(status["token"], lease["token"]);
        status["expires_in_ms"].as_u64()
    };
    // On a busy machine each command may take seconds.
    let half = until(|| left().filter(|left| *left < 7_000));
    assert_eq!(place.code(&["renew", id]).0, 0);
    assert!(left().unwrap() > half, "it was renewed");
    until(|| left().is_none().then_some(()));
    let next = acquire(&place, &["-n", "kept"]);
    assert!(next["token"].as_u64() > lease["token"].as_u64());
}

#[test]
fn detached_lease_is_handed_to_a_waiter_that_detaches_it_in_turn() {
    let place = Place::new();
    let first = acquire(&place, &["--ttl", "1m", "a"]);
    let mut waiter = place.start(&["acquire", "--ttl", "1m", "-w", "50", "a"]);
    place.until_waiting("a", 1);
    assert_eq!(place.code(&["release", first["id"].as_str().unwrap()]).0, 0);
    let id = waiter.line();
    assert_eq!(waiter.end(), 0);
    let output = place.output(&["status", "--json", &id]);
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(status["expires_in_ms"].as_u64() > Some(50_000), "a granted waiter has the full ttl: {status}");
}

#[test]
fn semaphore_and_shared_leases_are_released_one_by_one() {
    let place = Place::new();
    let ids: Vec<Value> = (0..2).map(|_| acquire(&place, &["--semaphore", "2", "s"])["id"].clone()).collect();
    assert_eq!(place.code(&["acquire", "-n", "--semaphore", "2", "s"]).0, 1);
    assert_eq!(place.code(&["release", ids[0].as_str().unwrap()]).0, 0);
    assert_eq!(place.code(&["status", ids[1].as_str().unwrap()]).0, 0);
    assert_eq!(place.code(&["acquire", "-n", "--semaphore", "2", "s"]).0, 0);
    let reader = acquire(&place, &["-s", "r"]);
    acquire(&place, &["-s", "-n", "r"]);
    assert_eq!(place.code(&["release", reader["id"].as_str().unwrap()]).0, 0);
}

#[test]
fn wrong_id_is_refused_and_not_repeated() {
    let place = Place::new();
    let id = acquire(&place, &["a"])["id"].as_str().unwrap().to_owned();
    // One digit of the secret is another one.
    let last = if id.ends_with('0') { '1' } else { '0' };
    let guessed = format!("{}{last}", &id[..id.len() - 1]);
    for command in ["renew", "status", "release"] {
        let (code, said) = place.code(&[command, &guessed]);
        assert!(
            code == 1 && said.contains("the id is wrong") && !said.contains(&guessed),
            "{command}: {said}"
        );
        let (code, said) = place.code(&[command, "lease1.nonsense"]);
        assert!(code == 2 && said.contains("id of a lease"), "{command}: {said}");
    }
    assert_eq!(place.code(&["status", &id]).0, 0, "the lease is untouched");
    let (code, said) = place.code(&["--store", "memory:", "acquire", "a"]);
    assert!(code == 2 && said.contains("name another store"), "{said}");
}

/// `acquire` with this stdout, and what it says. Its lease must not be left.
fn acquire_to(place: &Place, stdout: Stdio, args: &[&str]) -> String {
    let output = place.leasehold(&[&["acquire", "a"], args].concat()).stdout(stdout).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(code(output.status), 125, "{said}");
    assert_eq!(place.locks().as_array().map(Vec::len), Some(0), "{said}");
    said
}

#[test]
fn lease_whose_id_cannot_be_written_is_released() {
    let server = Server::on_socket();
    for place in [Place::new(), Place::on(&server.url())] {
        for args in [&[][..], &["--json"], &["--semaphore", "2"]] {
            let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
            let said = acquire_to(&place, full.into(), args);
            assert!(said.contains("No space left") && said.contains("the lease was released"), "{said}");
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let said = acquire_to(&place, writer.into(), args);
            assert!(said.contains("Broken pipe") && said.contains("the lease was released"), "{said}");
        }
    }
}

#[test]
fn id_is_discarded_by_dev_null_and_by_a_closed_stdout() {
    let place = Place::new();
    // `subprocess.DEVNULL` of Python and 'ignore' of Node.js are open for reading, too.
    for (name, is_read) in [("written", false), ("read", true)] {
        let null = OpenOptions::new().read(is_read).write(true).open("/dev/null").unwrap();
        let mut command = place.leasehold(&["acquire", name]);
        assert!(command.stdout(null).status().unwrap().success(), "{name}");
    }
    let script = r#"exec "$LEASEHOLD" acquire closed >&-"#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"));
    let output = shell.env("LEASEHOLD_STORE", place.store()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(place.locks().as_array().map(Vec::len), Some(3));
}

/// The id then ends with the attempt as the store knows it (48 digits), and not with a digest by which the holder is looked for (32).
#[test]
fn id_of_a_lease_names_its_attempt_to_the_store() {
    let place = Place::new();
    for args in [&["a"][..], &["--owner", "me", "b"], &["--semaphore", "2", "c"], &["-s", "d"], &["-x", "e"]]
    {
        let lease = acquire(&place, args);
        let attempt = lease["id"].as_str().unwrap().rsplit('.').next().unwrap();
        assert_eq!(attempt.len(), 48, "{args:?}");
        assert!(lease["expires_in_ms"].as_u64() > Some(0));
    }
}
