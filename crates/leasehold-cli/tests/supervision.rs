//! The command under supervision: what it is given, how it ends, and what is left of it.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{Place, Started, as_from_terminal, is_alive, send, until};
use leasehold_testkit::Server;

/// The signals on this line of `/proc/self/status`, as bits.
fn signals(status: &str, line: &str) -> u64 {
    let bits = status.lines().find_map(|text| text.strip_prefix(line)).expect("it is there");
    // The C library keeps the two after these for itself, and leaves them ignored in what it starts.
    u64::from_str_radix(bits.trim(), 16).expect("bits") & 0x7fff_ffff
}

fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

const HUP: u32 = 1;
const STATUS: [&str; 5] = ["run", "a", "--", "cat", "/proc/self/status"];

#[test]
#[cfg(target_os = "linux")]
fn command_starts_with_no_signal_ignored_or_blocked() {
    let status = String::from_utf8(Place::new().output(&STATUS).stdout).unwrap();
    // PIPE among them, which this program ignores.
    assert_eq!((signals(&status, "SigIgn:"), signals(&status, "SigBlk:")), (0, 0));
}

#[test]
#[cfg(target_os = "linux")]
fn signals_ignored_at_start_stay_ignored() {
    let place = Place::new();
    let without_hup = |args: &[&str]| {
        let mut shell = as_from_terminal("sh");
        shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_leasehold")]).args(args);
        shell.env("LEASEHOLD_STORE", place.store()).stdout(std::process::Stdio::piped());
        shell
    };
    let output = without_hup(&STATUS).output().unwrap();
    assert_eq!(signals(&String::from_utf8(output.stdout).unwrap(), "SigIgn:"), bit(HUP));
    let mut running =
        Started(without_hup(&["run", "a", "-c", "echo on; exec sleep 60"]).spawn().expect("a shell"));
    assert_eq!(running.line(), "on");
    running.signal("HUP");
    running.signal("TERM");
    assert_eq!(running.end(), 128 + 15, "and not by HUP, which came first");
}

#[test]
#[cfg(target_os = "linux")]
fn realtime_signal_is_forwarded() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "a", "-c", "kill -40 $$"]), (128 + 40, String::new()));
}

#[test]
fn remaining_processes_end_with_a_lost_lease() {
    let place = Place::new();
    let script = "sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.05; done' & wait";
    let mut running = place.start(&["run", "--grace", "500ms", "a", "-c", script]);
    let left: u32 = running.line().parse().unwrap();
    place.code(&["release", "--force", "a"]);
    // The shell itself ends by TERM at once.
    assert_eq!(running.end(), 124);
    until(|| (!is_alive(left)).then_some(()));
    assert!(running.stderr().contains("the grace is over"));
}

#[test]
fn remaining_processes_end_although_the_lease_is_renewed_after_term() {
    let server = Server::on_socket();
    let place = Place::on(&server.url());
    let script = "trap 'echo asked; exit' TERM; sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.05; done' & \
                  while :; do sleep 0.05; done";
    let mut running = place.start(&["run", "--ttl", "9s", "--grace", "4s", "a", "-c", script]);
    let left: u32 = running.line().parse().unwrap();
    server.signal("STOP");
    assert_eq!(running.line(), "asked");
    server.signal("CONT");
    assert_eq!(running.end(), 124);
    until(|| (!is_alive(left)).then_some(()));
}

#[test]
#[cfg(target_os = "linux")]
fn signals_are_forwarded_to_remaining_processes() {
    let place = Place::new();
    let script = "sh -c 'trap \"\" TERM; trap exit USR1; echo $PPID; while :; do sleep 0.05; done' & wait";
    let mut running = place.start(&["run", "--ttl", "10m", "--grace", "5m", "a", "-c", script]);
    let command: u32 = running.line().parse().unwrap();
    place.code(&["release", "--force", "a"]);
    // It is reaped, and only the other process is left.
    until(|| (!fs::exists(format!("/proc/{command}")).unwrap()).then_some(()));
    running.signal("USR1");
    assert_eq!(running.end(), 124, "long before the grace is over");
}

#[test]
fn remaining_processes_continue_after_a_normal_end() {
    let place = Place::new();
    let mut running = place.start(&["run", "a", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]);
    let left: u32 = running.line().parse().unwrap();
    assert_eq!(running.end(), 0);
    assert_eq!(place.locks().as_array().unwrap().len(), 0);
    assert!(is_alive(left));
    send("KILL", left);
}

#[test]
fn on_lost_signal_sends_term_and_no_kill() {
    let place = Place::new();
    let script = "trap 'echo asked' TERM; echo on; until [ -e stop ]; do sleep 0.05; done; exit 3";
    let mut command = place.leasehold(&["run", "--on-lost", "signal", "--grace", "100ms", "a", "-c", script]);
    let mut running = Started(command.current_dir(place.path(".")).spawn().unwrap());
    assert_eq!(running.line(), "on");
    place.code(&["release", "--force", "a"]);
    assert_eq!(running.line(), "asked");
    // The grace is over long before this one has had its turn.
    assert_eq!(place.code(&["run", "a", "--", "sleep", "0.3"]).0, 0);
    assert!(running.0.try_wait().unwrap().is_none(), "it was not killed");
    fs::write(place.path("stop"), "").unwrap();
    assert_eq!(running.end(), 124);
}

#[test]
fn lost_lease_sets_the_exit_code_when_noticed_at_release() {
    let place = Place::new();
    let script = format!("'{}' release --force a", env!("CARGO_BIN_EXE_leasehold"));
    for _ in 0..5 {
        assert_eq!(place.code(&["run", "a", "-c", &script]).0, 124);
    }
}

#[test]
fn closed_stderr_does_not_end_the_supervision() {
    let place = Place::new();
    // A shell tells about its own killed sleeper, and would be ended by that.
    let script = "exec 2>&-; trap 'echo ending; exit 0' TERM; echo on; while :; do sleep 0.05; done";
    let mut running = place.start(&["run", "a", "-c", script]);
    drop(running.0.stderr.take());
    assert_eq!(running.line(), "on");
    place.code(&["release", "--force", "a"]);
    assert_eq!(running.line(), "ending", "TERM and not KILL");
    assert_eq!(running.end(), 124);
}

#[test]
fn store_outage_delays_the_exit_by_seven_seconds_at_most() {
    let server = Server::on_socket();
    let place = Place::on(&server.url());
    let go = place.path("go");
    let script = "until [ -e \"$0\" ]; do sleep 0.05; done";
    let mut running =
        place.start(&["run", "--ttl", "1h", "a", "--", "sh", "-c", script, go.to_str().unwrap()]);
    place.until_held("a");
    server.signal("STOP");
    fs::write(go, "").unwrap();
    let ended = Instant::now();
    assert_eq!(running.end(), 0, "the command's own");
    // Twice as long, for a machine that pauses.
    assert!(ended.elapsed() < Duration::from_secs(14), "{:?}", ended.elapsed());
    assert!(running.stderr().contains("the lease expires by itself"));
}

/// Later clients can't see its lease, so it is lost.
#[test]
fn moving_the_store_file_away_loses_the_lease() {
    let place = Place::new();
    let script = format!("mv '{}' '{}'", place.path("locks.db").display(), place.path("gone").display());
    assert_eq!(place.code(&["run", "--ttl", "1h", "a", "-c", &script]).0, 124);
}

#[test]
fn grace_is_at_most_half_the_ttl() {
    let place = Place::new();
    let run = |grace| place.code(&["run", "--ttl", "10s", "--grace", grace, "a", "--", "true"]);
    assert_eq!(run("5s").0, 0);
    assert_eq!(
        run("5.001"),
        (
            2,
            "leasehold: --grace 5.001s does not fit into --ttl 10s: it is at most half of it, 5s\n"
                .to_owned()
        )
    );
}

#[test]
fn verbose_conflict_names_the_holder() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]), (1, String::new()));
    let (code, said) = place.code(&["run", "-n", "-v", "a", "--", "true"]);
    assert!(code == 1 && said.contains("held by") && said.contains("exec sleep 60"), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn signals_blocked_at_start_are_handled_and_blocked_in_the_command() {
    let place = Place::new();
    // As a program that reads its signals from a descriptor starts others.
    let blocked = |args: &[&str]| {
        let mut env = as_from_terminal("env");
        env.args(["--block-signal=CHLD", "--block-signal=TERM", env!("CARGO_BIN_EXE_leasehold")]).args(args);
        env.env("LEASEHOLD_STORE", place.store()).stdout(std::process::Stdio::piped());
        Started(env.spawn().expect("env is there"))
    };
    let mut running = blocked(&["run", "a", "--", "sleep", "0.3"]);
    assert_eq!(running.end(), 0, "its end is noticed");
    let mut running = blocked(&["run", "a", "--", "grep", "SigBlk:", "/proc/self/status"]);
    assert_eq!(signals(&running.line(), "SigBlk:"), bit(15) | bit(17), "the command's own mask");
    assert_eq!(running.end(), 0);
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let mut waiter = blocked(&["run", "a", "--", "true"]);
    place.until_waiting("a", 1);
    waiter.signal("TERM");
    assert_eq!(waiter.end(), 128 + 15);
}

#[test]
#[cfg(feature = "serve")]
fn server_handles_a_signal_that_was_blocked_at_its_start() {
    let place = Place::new();
    let mut env = as_from_terminal("env");
    let socket = format!("unix:{}", place.path("socket").display());
    env.args(["--block-signal=TERM", env!("CARGO_BIN_EXE_leasehold"), "serve", "--listen", &socket]);
    env.env("LEASEHOLD_STORE", place.store()).stdout(std::process::Stdio::piped());
    let mut server = Started(env.spawn().expect("env is there"));
    assert!(server.line().starts_with("listening on"));
    server.signal("TERM");
    assert_eq!(server.end(), 0);
}

/// A shell that is marked as having rights of its own. Its group is the user's, so that any user can create it.
#[cfg(target_os = "linux")]
fn privileged_shell(place: &Place) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let shell = place.path("shell");
    fs::copy("/bin/sh", &shell).unwrap();
    fs::set_permissions(&shell, fs::Permissions::from_mode(0o2755)).unwrap();
    shell.to_str().unwrap().to_owned()
}

#[test]
#[cfg(target_os = "linux")]
fn killing_leasehold_kills_the_group_of_a_privileged_command() {
    let place = Place::new();
    let shell = privileged_shell(&place);
    // The child of the shell gets no signal from the kernel, as a privileged command itself does not.
    let script = "sleep 60 >/dev/null 2>&1 & echo $!; wait";
    let mut running = place.start(&["run", "a", "--", &shell, "-c", script]);
    let left: u32 = running.line().parse().unwrap();
    assert!(is_alive(left));
    running.signal("KILL");
    assert_eq!(running.end(), -9);
    until(|| (!is_alive(left)).then_some(()));
}

#[test]
#[cfg(target_os = "linux")]
fn watchdog_spares_processes_left_by_a_privileged_command() {
    let place = Place::new();
    let shell = privileged_shell(&place);
    let mut running =
        place.start(&["run", "a", "--", &shell, "-c", "sleep 60 >/dev/null 2>&1 & echo $!; exit 7"]);
    let left: u32 = running.line().parse().unwrap();
    assert_eq!(running.end(), 7);
    assert!(is_alive(left));
    send("KILL", left);
    assert_eq!(place.code(&["run", "a", "--", &shell, "-c", "kill -9 $$"]).0, 128 + 9);
    assert_eq!(place.code(&["run", "a", "--", "/bin/sh", "-c", "exit 3"]).0, 3);
}

/// As a pager that waits for a key, or a terminal after Ctrl-S.
#[test]
#[cfg(target_os = "linux")]
fn blocked_stderr_does_not_delay_the_end_of_the_command() {
    let place = Place::new();
    // As much as a pipe holds.
    let fill = "head -c 65536 /dev/zero >&2; touch \"$0\"; exec sleep 60";
    let full = place.path("full");
    let args = ["run", "--grace", "1s", "a", "--", "sh", "-c", fill, full.to_str().unwrap()];
    let mut holder = place.start(&args);
    until(|| full.exists().then_some(()));
    assert_eq!(place.code(&["release", "--force", "a"]).0, 0);
    assert_eq!(holder.end(), 124);
}

#[test]
fn killing_leasehold_kills_its_command_and_the_lease_expires() {
    let place = Place::new();
    let mut holder = place.start(&["run", "--ttl", "8s", "a", "--", "sh", "-c", "echo $$; exec sleep 60"]);
    let command: u32 = holder.line().parse().unwrap();
    assert!(is_alive(command));
    holder.signal("KILL");
    assert_eq!(holder.end(), -9);
    until(|| (!is_alive(command)).then_some(()));
    assert_eq!(place.code(&["run", "-w", "60", "a", "--", "true"]).0, 0);
}

#[test]
fn force_release_sends_term_and_then_kill() {
    let place = Place::new();
    let mut gentle = place.start(&[
        "run",
        "a",
        "--",
        "sh",
        "-c",
        "trap 'echo ending; exit 5' TERM; echo on; while :; do sleep 0.05; done",
    ]);
    assert_eq!(gentle.line(), "on");
    let (code, _) = place.code(&["release", "--force", "a"]);
    assert_eq!(code, 0);
    assert_eq!(gentle.line(), "ending");
    assert_eq!(gentle.end(), 124, "whatever the command ends with");
    assert!(gentle.stderr().contains("the lease was lost"));

    let mut stubborn = place.start(&[
        "run",
        "--grace",
        "300ms",
        "a",
        "--",
        "sh",
        "-c",
        "trap '' TERM; echo on; while :; do sleep 0.05; done",
    ]);
    assert_eq!(stubborn.line(), "on");
    place.code(&["release", "--force", "a"]);
    assert_eq!(stubborn.end(), 124);
    assert!(stubborn.stderr().contains("gets KILL"));

    let mut ignored =
        place.start(&["run", "--on-lost", "ignore", "a", "--", "sh", "-c", "echo $$; exec sleep 60"]);
    let command: u32 = ignored.line().parse().unwrap();
    place.code(&["release", "--force", "a"]);
    let mut next = place.start(&["run", "a", "--", "true"]);
    assert_eq!(next.end(), 0);
    assert!(is_alive(command), "it goes on, as was asked");
    send("TERM", command);
    assert_eq!(ignored.end(), 124);
    assert_eq!(place.code(&["release", "--force", "a"]).0, 1, "the lock is free");
}

#[test]
fn command_ends_before_its_unrenewed_lease_expires() {
    let server = Server::on_socket();
    let place = Place::on(&server.url());
    let script = "trap 'date +%s%N; exit' TERM; echo $LEASEHOLD_DEADLINE; while :; do sleep 0.02; done";
    // The first renewal is due after 7 s, and TERM comes 7 s before the end.
    let mut running = place.start(&["run", "--ttl", "21s", "--grace", "7s", "a", "-c", script]);
    let deadline: f64 = running.line().parse().unwrap();
    // No renewal succeeds any more: the deadline is that of the first lease.
    server.signal("STOP");
    let ended: f64 = running.line().parse().unwrap();
    let early = deadline - ended / 1e9;
    assert!(early > 1.5 && early < 7.5, "TERM came {early} s before the end");
    assert_eq!(running.end(), 124);
    let said = running.stderr();
    assert!(said.contains("can't be renewed"), "{said}");
}

#[test]
fn leasehold_stopped_past_its_lease_kills_its_command() {
    let place = Place::new();
    let mut holder = place.start(&[
        "run",
        "--ttl",
        "1s",
        "a",
        "--",
        "sh",
        "-c",
        "trap '' TERM; echo $$; while :; do sleep 0.05; done",
    ]);
    let command: u32 = holder.line().parse().unwrap();
    holder.signal("STOP");
    // Another client acquires the lock meanwhile. The token distinguishes the command, which continues.
    assert_eq!(place.code(&["run", "-w", "60", "a", "--", "true"]).0, 0);
    holder.signal("CONT");
    assert_eq!(holder.end(), 124);
    until(|| (!is_alive(command)).then_some(()));
}

#[test]
fn lost_exit_code_is_configurable() {
    let place = Place::new();
    let script = format!("'{}' release --force a", env!("CARGO_BIN_EXE_leasehold"));
    assert_eq!(place.code(&["run", "a", "-c", &script]).0, 124);
    assert_eq!(place.code(&["run", "--lost-exit-code", "77", "a", "-c", &script]).0, 77);
    let mut running = place.start(&["run", "--lost-exit-code", "77", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(running.line(), "on");
    assert_eq!(place.code(&["release", "--force", "a"]).0, 0);
    assert_eq!(running.end(), 77);
}
