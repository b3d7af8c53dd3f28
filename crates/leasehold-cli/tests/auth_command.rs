//! `--auth-command`: where the password comes from, and where it does not go.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Place, SOON, Started, is_alive};
use leasehold_testkit::{Cluster, Postgres, Sentinels, Server, wait_until};

const PASSWORD: &str = "hunter2-and-more";

/// Makes this the only password of the user, and closes its connections.
fn set_password(server: &Server, password: &str) {
    let set = format!(">{password}");
    server.run(&["ACL", "SETUSER", "locks", "on", "resetpass", &set, "allkeys", "allchannels", "+@all"]);
    server.run(&["CLIENT", "KILL", "USER", "locks"]);
}

fn server() -> (Server, String) {
    let server = Server::on_port();
    set_password(&server, PASSWORD);
    let url = format!("redis://locks@127.0.0.1:{}", server.port());
    (server, url)
}

/// A program in the place's folder.
fn program(place: &Place, script: &str) -> String {
    let path = place.path("token");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path.display().to_string()
}

fn pid_in(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[test]
fn password_comes_from_the_program_and_reaches_neither_the_command_nor_a_message() {
    let (server, url) = server();
    let place = Place::on(&url);
    let program = program(&place, "env > \"$1\"; echo \"secret stderr\" >&2; echo hunter2-and-more");
    let seen = place.path("what it saw");
    let auth = format!("{program} '{}'", seen.display());
    let args =
        ["--auth-command", &auth, "run", "-v", "nightly", "--", "sh", "-c", "env; cat /proc/$PPID/cmdline"];
    let mut run = place.leasehold(&args);
    let output = run.env("PGPASSWORD", "another").env("LEASEHOLD_SERVE_TOKEN", "another").output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(!said.contains(PASSWORD) && !said.contains("secret stderr"), "{said}");
    let seen = fs::read_to_string(seen).unwrap();
    for line in [
        "LEASEHOLD_AUTH_ROLE=redis",
        "LEASEHOLD_AUTH_HOST=127.0.0.1",
        &format!("LEASEHOLD_AUTH_PORT={}", server.port()),
        "LEASEHOLD_AUTH_USER=locks",
    ] {
        assert!(seen.lines().any(|seen| seen == line), "{line}: {seen}");
    }
    for secret in ["LEASEHOLD_STORE=", "PGPASSWORD=", "LEASEHOLD_SERVE_TOKEN="] {
        assert!(!seen.contains(secret), "{secret}: {seen}");
    }
}

#[test]
fn every_store_with_a_login_and_every_command_can_use_it() {
    let (_server, single) = server();
    let (sentinels, cluster) = (Sentinels::start(), Cluster::start());
    sentinels.servers.iter().chain(&sentinels.sentinels).for_each(|server| set_password(server, PASSWORD));
    cluster.nodes.iter().for_each(|node| set_password(node, PASSWORD));
    let postgres = Postgres::builder().password(PASSWORD).start();
    let sentinels =
        format!("{}?sentinel_user=locks", sentinels.url(Sentinels::SERVICE).replace("//", "//locks@"));
    let postgres = postgres.url().replace(&format!(":{PASSWORD}@"), "@");
    for url in [single, sentinels, cluster.url().replace("//", "//locks@"), postgres.clone()] {
        let place = Place::on(&url);
        // The default user of these servers has no password, and needs none.
        let program = program(
            &place,
            r#"echo '{"password": "hunter2-and-more", "expires_at": "2100-01-01T00:00:00Z"}'"#,
        );
        let auth = ["--auth-command", &program];
        if url == postgres {
            let (code, said) = place.code(&[&auth[..], &["migrate"]].concat());
            assert_eq!(code, 0, "{said}");
        }
        for command in [&["run", "a", "--", "true"][..], &["ls"], &["health"], &["doctor"]] {
            let (code, said) = place.code(&[&auth[..], command].concat());
            // A server without persistence is dangerous.
            let is_report = command == ["doctor"] && code == 1 && said.is_empty();
            assert!(code == 0 || is_report, "{url} {command:?}: {code} {said}");
            assert!(!said.contains(PASSWORD), "{said}");
        }
        let wrong = place.path("wrong");
        fs::write(&wrong, "#!/bin/sh\necho another\n").unwrap();
        fs::set_permissions(&wrong, fs::Permissions::from_mode(0o700)).unwrap();
        let (code, said) = place.code(&["--auth-command", &wrong.display().to_string(), "ls"]);
        assert!(code != 0 && !said.contains("another"), "{url}: {said}");
    }
}

#[test]
fn program_that_fails_is_told_by_its_exit_code_only() {
    let (_server, url) = server();
    let place = Place::on(&url);
    for (script, says) in [
        ("echo hunter2; echo hunter2 >&2; exit 3", "exit status: 3"),
        ("echo hunter2; kill -9 $$", "signal: 9"),
        ("true", "is empty"),
        ("echo hunter2; echo hunter2", "several lines"),
        ("echo '{\"hunter2\": 1}'", "other members"),
        ("yes hunter2 | head -c 100000", "more than 64 KiB"),
        ("printf 'hunter2\\377'", "UTF-8"),
    ] {
        let (code, said) = place.code(&["--auth-command", &program(&place, script), "ls"]);
        assert!(code != 0 && said.contains(says) && !said.contains("hunter2"), "{script}: {code} {said}");
    }
    let (code, said) = place.code(&["--auth-command", "/nowhere/token --for hunter2", "ls"]);
    assert!(code != 0 && said.contains("/nowhere/token: it could not be started"), "{said}");
    assert!(!said.contains("hunter2"), "{said}");
    assert_eq!(place.code(&["--auth-command", "'open", "ls"]).0, 2);
    assert_eq!(Place::new().code(&["--auth-command", "true", "ls"]).0, 2, "the store is a file");
    let with_password = Place::on(&url.replace("locks@", "locks:hunter2@"));
    let (code, said) = with_password.code(&["--auth-command", "true", "ls"]);
    assert!(code == 2 && said.contains("not from both") && !said.contains("hunter2"), "{said}");
}

#[test]
fn program_that_hangs_is_killed_with_what_it_has_started() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let (own, child) = (place.path("own"), place.path("child"));
    let script = format!("echo $$ > {}; sleep 600 & echo $! > {}; wait", own.display(), child.display());
    let program = program(&place, &script);
    let began = Instant::now();
    let (code, said) = place.code(&["--auth-command", &program, "ls"]);
    assert!(code != 0 && said.contains("did not end within 9.5s"), "{said}");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    for path in [&own, &child] {
        let pid = pid_in(path).unwrap();
        wait_until("it is killed", || !is_alive(pid));
    }
}

#[test]
fn slow_program_has_its_time_although_the_lock_is_not_waited_for() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let program = program(&place, &format!("sleep 2; echo {PASSWORD}"));
    let (code, said) = place.code(&["--auth-command", &program, "run", "-n", "nightly", "--", "true"]);
    assert_eq!(code, 0, "{said}");
}

/// The file is the user's own, as that of `--run-on-lost` is.
#[test]
fn configuration_file_may_name_it() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let (file, asked) = (place.path("config.toml"), place.path("asked"));
    let program = program(&place, &format!("echo >> {}; echo {PASSWORD}", asked.display()));
    fs::write(&file, format!("auth-command = \"{program}\"\n")).unwrap();
    let output = place.leasehold(&["ls"]).env("LEASEHOLD_CONFIG", &file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(asked.exists());
}

#[test]
fn program_ends_with_leasehold() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let own = place.path("own");
    let program = program(&place, &format!("echo $$ > {}; exec sleep 600", own.display()));
    let mut killed = place.start(&["--auth-command", &program, "ls"]);
    wait_until("the program runs", || pid_in(&own).is_some());
    killed.0.kill().unwrap();
    killed.0.wait().unwrap();
    let pid = pid_in(&own).unwrap();
    wait_until("it is killed, too", || !is_alive(pid));
}

#[test]
fn command_runs_on_while_the_password_is_replaced() {
    let (server, url) = server();
    let place = Place::on(&url);
    let file = place.path("password");
    fs::write(&file, PASSWORD).unwrap();
    let auth = format!("cat {}", file.display());
    let gone = place.path("gone");
    let script = format!("echo begun; until [ -e {} ]; do sleep 0.05; done", gone.display());
    let mut run =
        place.start(&["--auth-command", &auth, "run", "--ttl", "20s", "nightly", "--", "sh", "-c", &script]);
    assert_eq!(run.line(), "begun");
    let is_logged_in = || server.query::<String>(&["CLIENT", "LIST"]).unwrap().contains("user=locks");
    assert!(is_logged_in());
    for number in 0..3 {
        let password = format!("password-{number}");
        fs::write(&file, &password).unwrap();
        set_password(&server, &password);
        wait_until("it has logged in with the new password", is_logged_in);
    }
    let show = place.output(&["--auth-command", &auth, "show", "nightly"]);
    assert!(String::from_utf8_lossy(&show.stdout).contains("held"), "{show:?}");
    fs::write(&gone, "").unwrap();
    assert_eq!(run.end(), 0);
}

#[cfg(feature = "serve")]
#[test]
fn hup_has_a_server_ask_again() {
    let (server, url) = server();
    let place = Place::on(&url);
    let calls = place.path("calls");
    let program = program(&place, &format!("echo >> {}; echo {PASSWORD}", calls.display()));
    let count = || fs::read_to_string(&calls).map_or(0, |calls| calls.lines().count());
    let socket = format!("unix:{}", place.path("socket").display());
    let serving = place.start(&["--auth-command", &program, "serve", "--listen", &socket]);
    wait_until("it listens", || place.path("socket").exists());
    assert_eq!(count(), 1);
    for number in 2..4 {
        serving.signal("HUP");
        wait_until("it has asked again", || count() == number);
    }
    let list = server.query::<String>(&["CLIENT", "LIST"]).unwrap();
    assert!(list.contains("user=locks"), "{list}");
}

/// The store of a running server is not changed.
#[cfg(feature = "serve")]
#[test]
fn hup_names_another_program_which_takes_effect_at_the_next_start() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let program = program(&place, &format!("echo {PASSWORD}"));
    let (file, log) = (place.path("config.toml"), place.path("log"));
    let configure =
        |arguments: &str| fs::write(&file, format!("auth-command = \"{program}{arguments}\"\n")).unwrap();
    configure("");
    let socket = format!("unix:{}", place.path("socket").display());
    let mut serve = place.leasehold(&["serve", "--listen", &socket]);
    serve.env("LEASEHOLD_CONFIG", &file).stderr(fs::File::create(&log).unwrap());
    let serving = Started(serve.spawn().unwrap());
    wait_until("it listens", || place.path("socket").exists());
    let said = || fs::read_to_string(&log).unwrap();
    for (arguments, reloads, changes) in [("", 1, 0), (" other", 2, 1)] {
        configure(arguments);
        serving.signal("HUP");
        wait_until("it was read again", || said().matches("the tokens were read again").count() == reloads);
        let changed = "HUP: --auth-command has changed, which takes effect at the next start";
        wait_until("it is named", || said().matches(changed).count() == changes);
    }
    assert!(!said().contains("--store"), "{}", said());
}

/// A program in the background may not use the terminal.
#[test]
fn program_that_was_stopped_is_named() {
    let (_server, url) = server();
    let place = Place::on(&url);
    let program = program(&place, "kill -STOP $$; echo hunter2");
    let (code, said) = place.code(&["--auth-command", &program, "run", "a", "--", "true"]);
    assert!(code == 125 && said.contains("it was stopped, and is killed"), "{code} {said}");
}

/// While the last credentials last nothing else fails, so it is said.
#[test]
fn what_is_wrong_with_a_login_is_told_while_nothing_else_fails() {
    let (server, url) = server();
    let file = Place::new();
    let path = file.path("password");
    fs::write(&path, PASSWORD).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let place = Place::on(&format!("{url}?password_file={}", path.display()));
    let log = place.path("log");
    let mut run = place.leasehold(&["run", "--ttl", "3s", "a", "--", "sleep", "60"]);
    let _run = Started(run.stderr(fs::File::create(&log).unwrap()).spawn().unwrap());
    place.until_held("a");
    let said = || fs::read_to_string(&log).unwrap();
    assert_eq!(said(), "");
    fs::remove_file(&path).unwrap();
    let gone = "leasehold: warning: the last password is used";
    for _ in 0..3 {
        server.run(&["CLIENT", "KILL", "USER", "locks"]);
        wait_until("it is told", || said().contains(gone));
    }
    assert_eq!(said().matches(gone).count(), 1, "{}", said());
}

/// It may start an agent, which keeps its output open.
#[test]
fn answer_of_a_program_that_leaves_another_one_behind_is_used() {
    let server = Server::builder().password("hunter2").start();
    let place = Place::on(&format!("redis://127.0.0.1:{}", server.port()));
    let program = program(&place, "sleep 30 & echo hunter2");
    let began = Instant::now();
    assert_eq!(place.code(&["--auth-command", &program, "run", "a", "--", "true"]), (0, String::new()));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

/// What it gives has expired: it is not called again and again at once.
#[test]
fn credentials_that_have_expired_are_an_error_that_names_the_clock() {
    let server = Server::builder().password("hunter2").start();
    let place = Place::on(&format!("redis://127.0.0.1:{}", server.port()));
    let count = place.path("count");
    let script =
        format!("echo x >> {}; echo '{{\"password\": \"hunter2\", \"expires_at\": 5}}'", count.display());
    let program = program(&place, &script);
    let (code, said) = place.code(&["--auth-command", &program, "ls"]);
    assert!(code != 0 && said.contains("has expired already") && said.contains("clock"), "{said}");
    let calls = fs::read_to_string(&count).unwrap().lines().count();
    assert!(calls < 20, "{calls}");
}

/// A program that has given credentials fails: they last, and it is told once.
#[test]
fn failure_after_credentials_is_told_once() {
    let server = Server::builder().password("hunter2").start();
    let place = Place::on(&format!("redis://127.0.0.1:{}", server.port()));
    let broken = place.path("broken");
    let script = format!(
        "[ -e {} ] && exit 3; touch {0}; printf '{{\"password\": \"hunter2\", \"expires_at\": %s}}' $(($(date +%s) + 20))",
        broken.display()
    );
    let program = program(&place, &script);
    let (code, said) = place.code(&["--auth-command", &program, "run", "a", "--", "sleep", "16"]);
    assert_eq!(code, 0, "{said}");
    assert_eq!(said.matches("the last credentials are used").count(), 1, "{said}");
}

/// The file is for other stores than the one that is named.
#[test]
fn command_of_the_configuration_file_does_not_concern_stores_that_need_none() {
    let place = Place::new();
    let file = place.path("config.toml");
    fs::write(&file, "auth-command = \"/nowhere/token\"\n").unwrap();
    let run = |store: &str, more: &[&str]| {
        let mut command = place.leasehold(&[more, &["run", "a", "--", "true"]].concat());
        let output = command.env("LEASEHOLD_STORE", store).env("LEASEHOLD_CONFIG", &file).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let server = Server::builder().password("hunter2").start();
    let with_password = server.url();
    for store in [&*place.store(), &with_password] {
        let (code, said) = run(store, &[]);
        assert_eq!(code, Some(0), "{store}: {said}");
    }
    let plain = Server::on_port();
    let (code, said) = run(&plain.url(), &["--auth-command", ""]);
    assert_eq!(code, Some(0), "{said}");
    assert_ne!(run(&plain.url(), &[]).0, Some(0), "it is started there");
}
