//! `leasehold run`, as a person uses it.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::{NO_CONNECTION, Place, code, until};
use leasehold_testkit::Server;

#[test]
fn exit_code_of_the_command_is_passed_on() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "a", "--", "true"]), (0, String::new()));
    assert_eq!(place.code(&["run", "a", "--", "sh", "-c", "exit 7"]).0, 7);
    assert_eq!(place.code(&["run", "a", "--", "sh", "-c", "kill -9 $$"]).0, 128 + 9);
    assert_eq!(place.code(&["run", "a", "--", "sh", "-c", "kill -TERM $$"]).0, 128 + 15);
    assert_eq!(place.locks().as_array().unwrap().len(), 0);
}

#[test]
fn stdout_and_arguments_belong_to_the_command() {
    let place = Place::new();
    let output = place.output(&["run", "a", "--", "printf", "%s|", "a b", "-n", "--help", "$HOME"]);
    assert_eq!(output.stdout, b"a b|-n|--help|$HOME|");
    let output = place.output(&["run", "a", "-c", "echo one | tr o 0; exit 3"]);
    assert_eq!((output.stdout.as_slice(), output.status.code()), (b"0ne\n".as_slice(), Some(3)));
}

#[test]
fn command_gets_the_lock_in_its_environment() {
    let place = Place::new();
    let script = "echo \"$LEASEHOLD_NAME $LEASEHOLD_TOKEN $LEASEHOLD_DEADLINE\"";
    let output = place.output(&["run", "a name", "--ttl", "30s", "-c", script]);
    let text = String::from_utf8(output.stdout).unwrap();
    let words: Vec<&str> = text.trim().rsplitn(3, ' ').collect();
    let [deadline, token, name] = words[..] else { panic!("{text}") };
    assert_eq!(name, "a name");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let token = Duration::from_micros(token.parse().unwrap());
    assert!(now.abs_diff(token) < Duration::from_secs(60), "{text}");
    let deadline: f64 = deadline.parse().unwrap();
    assert!((deadline - now.as_secs_f64() - 30.0).abs() < 10.0, "{text}");
}

#[test]
fn held_lock_is_a_conflict() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]), (1, String::new()));
    let began = Instant::now();
    assert_eq!(place.code(&["run", "-w", "0.25", "a", "--", "true"]).0, 1);
    assert!(began.elapsed() >= Duration::from_millis(250));
    assert_eq!(place.code(&["run", "-n", "-E", "42", "a", "--", "true"]).0, 42);
    assert_eq!(place.code(&["run", "-w", "0", "-E", "0", "a", "--", "false"]).0, 0);
    assert_eq!(place.code(&["run", "-n", "b", "--", "true"]).0, 0, "a different name is a different lock");
    place.until_waiting("a", 0);
    holder.signal("TERM");
    assert_eq!(holder.end(), 128 + 15);
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]).0, 0);
}

#[test]
fn waiter_is_granted_when_the_holder_ends() {
    let place = Place::new();
    let holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let mut waiter = place.start(&["run", "a", "-v", "--", "echo", "my turn"]);
    place.until_waiting("a", 1);
    holder.signal("TERM");
    assert_eq!(waiter.line(), "my turn");
    assert_eq!(waiter.end(), 0);
}

#[test]
fn bad_input_is_a_one_line_error_and_creates_nothing() {
    let place = Place::new();
    let long = "x".repeat(513);
    for (args, says) in [
        (&["run", "", "--", "true"][..], "can't be empty"),
        (&["run", &long, "--", "true"], "at most 512 bytes"),
        (&["run", "a\nb", "--", "true"], "no control characters"),
        (&["run", "--ttl", "0", "a", "--", "true"], "--ttl is between"),
        (&["run", "--ttl", "1ms", "a", "--", "true"], "--ttl is between"),
        (&["run", "--ttl", "1000d", "a", "--", "true"], "--ttl is between"),
        (&["run", "--min-hold", "1000d", "a", "--", "true"], "at most 30 days"),
        (&["run", "--ttl", "3s", "--grace", "2s", "a", "--", "true"], "does not fit"),
        (&["run", "--store", "pigeon:coop", "a", "--", "true"], "no store has the scheme pigeon:"),
        (
            &["run", "--store", "redlock://:hunter2@h?max_ttl_ms=1s", "a", "--", "true"],
            "a number of milliseconds",
        ),
        (&["run", "--label", &"x".repeat(1025), "a", "--", "true"], "at most 1024 bytes"),
        (&["run", "a", "--", ""], "no command"),
        (&["release", "a"], "--force"),
        (&["show", ""], "can't be empty"),
        (&["man", "nothing"], "no such command"),
    ] {
        let (code, said) = place.code(args);
        assert_eq!(code, 2, "{args:?} said {said}");
        assert!(said.starts_with("leasehold: ") && said.contains(says), "{args:?} said {said}");
        assert!(said.trim_end().lines().count() == 1 && !said.contains("hunter2"), "{args:?} said {said}");
    }
    for args in [
        &["run", "a"][..],
        &["run", "--", "true"],
        &["run", "-n", "-w", "1", "a", "--", "true"],
        &["run", "-w", "-1", "a", "--", "true"],
        &["run", "-w", "NaN", "a", "--", "true"],
        &["run", "--ttl", "soon", "a", "--", "true"],
        &["run", "-E", "256", "a", "--", "true"],
        &["run", "--on-lost", "cry", "a", "--", "true"],
        &["fly"],
        &[],
    ] {
        let (code, said) = place.code(args);
        assert!(code == 2 && !said.is_empty(), "{args:?} ended with {code} and said {said}");
    }
    let mut command = place.leasehold(&["run"]);
    let output = command.arg(OsStr::from_bytes(b"caf\xe9")).args(["--", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("UTF-8"), "{said}");
    assert_eq!(place.locks().as_array().unwrap().len(), 0);
}

#[test]
fn command_that_is_not_executable_acquires_no_lock() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    // Although the lock is held, this is known at once.
    let (code, said) = place.code(&["run", "a", "--", "no-such-command"]);
    assert!(
        code == 127 && said == "leasehold: no-such-command was not found: check the command and PATH\n",
        "{said}"
    );
    let (code, said) = place.code(&["run", "a", "--", "/etc/passwd"]);
    assert!(code == 126 && said.contains("can't be executed"), "{said}");
    let script = place.path("no-interpreter");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (code, _) = place.code(&["run", "b", "--", script.to_str().unwrap()]);
    assert_eq!(code, 127, "as a shell has it");
    assert_eq!(place.show("b")["holders"].as_array().unwrap().len(), 0);
    holder.signal("KILL");
    holder.end();
}

#[test]
fn unopenable_store_is_named() {
    let place = Place::new();
    let missing = format!("sqlite:{}", place.path("no/such/locks.db").display());
    let (code, said) = place.code(&["run", "--store", &missing, "a", "--", "true"]);
    assert!(code == 125 && said.contains("does not exist") && said.contains("/no/such"), "{said}");
    let foreign = place.path("foreign");
    fs::write(&foreign, "this is no database, and never was one\n".repeat(100)).unwrap();
    let (code, said) = place.code(&["ls", "--store", &format!("sqlite:{}", foreign.display())]);
    assert!(code == 125 && said.contains("damaged or no database") && said.contains("/foreign"), "{said}");
}

#[test]
fn default_store_is_created_on_first_use_with_mode_0700() {
    let place = Place::new();
    let mut command = place.leasehold(&["run", "a", "--", "true"]);
    let state = place.path("state/of/mine");
    let output = command.env_remove("LEASEHOLD_STORE").env("XDG_STATE_HOME", &state).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let folder = fs::metadata(state.join("leasehold")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&folder.permissions()) & 0o777, 0o700);
    assert!(state.join("leasehold/locks.db").exists());
}

/// As with `sudo -E`. The user's programs could not use a `~/.local` of root's.
#[test]
#[cfg(target_os = "linux")]
fn root_makes_the_default_store_in_another_user_s_home_as_that_user() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};

    const ALICE: u32 = 12_345;
    let place = Place::new();
    let home = place.path("alice");
    fs::create_dir(&home).unwrap();
    if chown(&home, Some(ALICE), Some(ALICE)).is_err() {
        // Only root has another user's home.
        return;
    }
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = place.leasehold(&["run", "a", "--", "id", "-u"]);
    command.env_remove("LEASEHOLD_STORE").env_remove("XDG_STATE_HOME").env("HOME", &home);
    let output = command.output().unwrap();
    assert_eq!((output.status.success(), output.stdout.as_slice()), (true, b"0\n".as_slice()), "{output:?}");
    for made in [".local", ".local/state/leasehold", ".local/state/leasehold/locks.db"] {
        assert_eq!(fs::metadata(home.join(made)).unwrap().uid(), ALICE, "{made}");
    }
}

#[test]
fn concurrent_first_uses_create_one_store() {
    for _ in 0..5 {
        let place = Place::new();
        let mut all: Vec<_> = (0..8).map(|_| place.start(&["run", "a", "--", "true"])).collect();
        for one in &mut all {
            assert_eq!(one.end(), 0, "{}", one.stderr());
        }
        let left: Vec<_> = fs::read_dir(place.path("locks.db-inbox")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn min_hold_retains_the_lock_after_the_program_has_ended() {
    let place = Place::new();
    let began = Instant::now();
    assert_eq!(place.code(&["run", "--min-hold", "15", "a", "--", "true"]).0, 0);
    assert!(began.elapsed() < Duration::from_secs(12), "the program ends before the minimum hold");
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]).0, 1);
    assert_eq!(place.show("a")["holders"][0]["retained"], true);
    assert_eq!(place.code(&["run", "a", "--", "true"]).0, 0);
    assert!(began.elapsed() >= Duration::from_millis(14_980), "the next program waits for the minimum hold");
}

#[test]
fn signal_cancels_the_wait() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1), ("QUIT", 3)] {
        let mut waiter = place.start(&["run", "a", "--", "true"]);
        place.until_waiting("a", 1);
        waiter.signal(signal);
        assert_eq!(waiter.end(), 128 + number, "{signal}");
        assert_eq!(place.show("a")["waiters"].as_array().unwrap().len(), 0, "it is gone with the program");
    }
    holder.signal("TERM");
    holder.end();
}

#[test]
fn signals_reach_the_whole_group_of_the_command() {
    let place = Place::new();
    let script = "trap 'echo got USR1' USR1; echo ready; while :; do sleep 0.05; done";
    let mut running = place.start(&["run", "a", "-c", script]);
    assert_eq!(running.line(), "ready");
    running.signal("USR1");
    assert_eq!(running.line(), "got USR1");
    running.signal("TERM");
    assert_eq!(running.end(), 128 + 15);
    // The shell's own child is in the group too, so nothing is left that holds the output open.
    let end = running.line();
    assert!(end.starts_with("ended with "), "{end}");
}

#[test]
#[cfg(target_os = "linux")]
fn wait_limit_includes_the_connection() {
    let place = Place::new();
    let server = Server::on_port();
    server.signal("STOP");
    for limit in [&["-n"][..], &["-w", "1"], &["-w", "0.1"]] {
        let began = Instant::now();
        let url = server.url();
        let args = [&["run", "--store", &url], limit, &["a", "--", "true"]].concat();
        let output = place.leasehold(&args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{limit:?} said {said}");
        assert!(said.contains(&url) && said.contains(NO_CONNECTION), "{said}");
        assert!(began.elapsed() < Duration::from_secs(10), "{limit:?} took {:?}", began.elapsed());
    }
    let mut waiting = place.start(&["run", "--store", &server.url(), "a", "--", "true"]);
    // Until it handles the signal, the default action would end it.
    until(|| catches(waiting.0.id(), 15).then_some(()));
    let began = Instant::now();
    waiting.signal("TERM");
    assert_eq!(waiting.end(), 128 + 15);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    server.signal("CONT");
    assert_eq!(place.code(&["run", "--store", &server.url(), "-n", "a", "--", "true"]).0, 0);
}

/// Whether a process has a handler for this signal.
#[cfg(target_os = "linux")]
fn catches(pid: u32, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(caught.trim(), 16).unwrap() & (1 << (signal - 1)) != 0
}

#[test]
fn verbose_run_reports_queue_grant_and_release() {
    let place = Place::new();
    let (code, said) = place.code(&["run", "-v", "a", "--", "true"]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!((code, lines.len()), (0, 2), "{said}");
    assert!(
        lines[0].starts_with("leasehold: acquired \"a\" after ") && lines[0].contains(", token "),
        "{said}"
    );
    assert_eq!(lines[1], "leasehold: released \"a\"");

    let hold = ["run", "a", "-c", "echo on; exec sleep 60"];
    let mut holder = place.start(&hold);
    assert_eq!(holder.line(), "on");
    let mut next = place.start(&hold);
    place.until_waiting("a", 1);
    let mut waiter = place.start(&[
        "run",
        "-v",
        "a",
        "-c",
        &format!("'{}' release --force a", env!("CARGO_BIN_EXE_leasehold")),
    ]);
    let mut said = BufReader::new(waiter.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut until_said =
        |text: &str| said.find(|line| line.contains(text)).unwrap_or_else(|| panic!("{text}"));
    until_said("waiting for \"a\": 2nd in the queue; held by");
    holder.signal("TERM");
    assert_eq!(next.line(), "on");
    until_said("waiting for \"a\": 1st in the queue; held by");
    next.signal("TERM");
    until_said("acquired \"a\" after ");
    until_said("the lease was lost");
    assert_eq!(waiter.end(), 124);
}

#[test]
fn empty_store_is_named_by_where_it_was_given() {
    let place = Place::new();
    let output = place.leasehold(&["ls"]).env("LEASEHOLD_STORE", "").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("leasehold: LEASEHOLD_STORE is empty: "));
    let (code, said) = place.code(&["ls", "--store", ""]);
    assert!(code == 2 && said.starts_with("leasehold: --store is empty: "), "{said}");
}

#[test]
fn command_gets_the_store_s_address_without_its_password() {
    let print = "echo $LEASEHOLD_STORE";
    let server = Server::builder().password("s3cret").start();
    let place = Place::on(&server.url());
    assert!(place.store().contains("s3cret"));
    let environment = String::from_utf8(place.output(&["run", "a", "-c", "env"]).stdout).unwrap();
    let address = format!("LEASEHOLD_STORE=redis://127.0.0.1:{}\n", server.port());
    assert!(environment.contains(&address) && !environment.contains("s3cret"), "{environment}");

    // Also one that was named by an argument, and with its whole path.
    let place = Place::new();
    let mut command = place.leasehold(&["run", "--store", "sqlite:other.db", "a", "-c", print]);
    let output = command.current_dir(place.path(".")).output().unwrap();
    let environment = String::from_utf8(output.stdout).unwrap();
    assert!(environment.starts_with("sqlite:/") && environment.ends_with("/other.db\n"), "{environment}");
}

#[test]
fn command_in_a_folder_of_any_name_gets_an_address_of_the_same_store() {
    let place = Place::new();
    let nested = format!("'{}' show a", env!("CARGO_BIN_EXE_leasehold"));
    let run = |folder: &std::path::Path, store: &str| {
        let mut command = place.leasehold(&["run", "--store", store, "a", "-c", &nested]);
        let output = command.current_dir(folder).output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (code(output.status), said.concat())
    };
    let folder = place.path("a?x=y");
    fs::create_dir(&folder).unwrap();
    let below_root = place.path("locks.db").display().to_string();
    let below_root = format!("sqlite:{}", below_root.trim_start_matches('/'));
    for (folder, store) in [(folder.as_path(), "sqlite:other.db"), (std::path::Path::new("/"), &below_root)] {
        let (code, said) = run(folder, store);
        assert!(code == 0 && said.contains("token"), "{store}: {code} {said}");
    }
    // macOS has no such names.
    let folder = place.path("").join(OsStr::from_bytes(b"\xff"));
    if fs::create_dir(&folder).is_ok() {
        let (code, said) = run(&folder, "sqlite:other.db");
        assert!(code == 2 && said.contains("is not UTF-8") && said.contains("absolute"), "{code} {said}");
    }
}

#[test]
fn memory_store_warns_that_it_excludes_no_other_process() {
    let place = Place::on("memory:");
    for args in [&["run", "a", "--", "true"][..], &["run", "-n", "a", "--", "true"]] {
        let (code, said) = place.code(args);
        assert!(
            code == 0
                && said.starts_with("leasehold: warning: memory: ")
                && said.contains("so it excludes none")
        );
    }
    assert_eq!(place.code(&["show", "a"]), (0, String::new()));
}

#[test]
fn name_that_begins_with_a_dash_is_passed_by_an_option() {
    let place = Place::new();
    let print = ["--", "sh", "-c", "echo $LEASEHOLD_NAME"];
    for (names, printed) in [
        (&["--name=-x"][..], "-x"),
        (&["--name", "--force"], "--force"),
        (&["--name=--"], "--"),
        (&["b", "--name=-5"], "-5 b"),
        (&["--name", "-a", "--name=-b", "c", "d"], "-a -b c d"),
    ] {
        let output = place.output(&[&["run"], names, &print].concat());
        assert!(output.status.success(), "{names:?}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), printed, "{names:?}");
    }
    for args in [
        &["run", "-5", "--", "true"][..],
        &["run", "--nightly", "--", "true"],
        &["elect", "-5", "--", "true"],
    ] {
        let (code, said) = place.code(args);
        assert!(
            code == 2 && said.contains("is passed by --name=NAME") && !said.contains("-- -5"),
            "{args:?}: {said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(place.code(&["elect", "--name=-x", "b", "--", "true"]).0, 2, "an election has one name");
    assert_eq!(place.code(&["elect", "--", "true"]).0, 2);
    // The other commands end their options with two dashes.
    assert_eq!(place.code(&["acquire", "--", "-x"]).0, 0);
    assert_eq!(place.code(&["release", "--force", "--", "-x"]).0, 0);
}

/// The kernel ends a program whose file reaches the limit, unless it says otherwise; the command has the usual rule.
#[test]
fn limit_of_file_sizes_is_an_error_of_the_store() {
    let place = Place::new();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 0; exec \"$0\" run a -- true", env!("CARGO_BIN_EXE_leasehold")]);
    let refused = shell.env("LEASEHOLD_STORE", place.store()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(code(refused.status), 125, "{said}");
    assert!(said.contains("locks.db"), "{said}");
    let script = "ulimit -f 1000; exec \"$0\" run a -- sh -c 'ulimit -f 0; exec 2>/dev/null; echo much >\"$1\"' sh \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_leasehold")]).arg(place.path("big"));
    let ended = shell.env("LEASEHOLD_STORE", place.store()).output().unwrap();
    // SIGXFSZ.
    assert_eq!(code(ended.status), 128 + 25, "{ended:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn signal_that_was_ignored_stays_ignored_in_the_command() {
    let place = Place::new();
    let script = format!(
        "trap '' XFSZ TERM; exec {} run a -- grep SigIgn /proc/self/status",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let output =
        Command::new("sh").args(["-c", &script]).env("LEASEHOLD_STORE", place.store()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let ignored = u64::from_str_radix(text.trim().trim_start_matches("SigIgn:").trim(), 16).unwrap();
    for signal in [15, 25] {
        assert_ne!(ignored & 1 << (signal - 1), 0, "{signal}: {text}");
    }
}
