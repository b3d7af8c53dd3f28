//! The configuration file: what is typed wins, and an invalid file does not affect what needs no defaults.

mod common;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use common::{Place, Started, code};
use leasehold_testkit::Server;
use serde_json::Value;

/// The program with a configuration file.
struct Configured<'a> {
    place: &'a Place,
    text: &'a str,
}

impl Configured<'_> {
    fn command(&self, args: &[&str]) -> std::process::Command {
        let file = self.place.path("config.toml");
        std::fs::write(&file, self.text).expect("the folder is there");
        let mut command = self.place.leasehold(args);
        command.env("LEASEHOLD_CONFIG", file);
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the program starts")
    }

    fn code(&self, args: &[&str]) -> (i32, String) {
        let output = self.output(args);
        (code(output.status), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// What holds the lock "a" while a command with these options runs: its kind, and its mode.
    fn held(&self, options: &[&str]) -> (String, Option<String>) {
        let list = format!("'{}' ls --json", env!("CARGO_BIN_EXE_leasehold"));
        let output = self.output(&[&["run"], options, &["a", "-c", &list]].concat());
        assert!(output.status.success(), "{options:?}: {output:?}");
        let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let lock = &listed["locks"][0];
        let mode = lock["holders"][0]["mode"].as_str().map(str::to_owned);
        (lock["kind"].as_str().expect("a kind").to_owned(), mode)
    }
}

#[test]
fn file_that_never_ends_is_refused() {
    let place = Place::new();
    let output = place.leasehold(&["ls"]).env("LEASEHOLD_CONFIG", "/dev/zero").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("it is no file of options"), "{output:?}");
}

#[test]
fn password_in_a_file_that_others_may_read_is_reported() {
    let place = Place::new();
    let file = place.path("config.toml");
    let said = |text: &str, mode, args: &[&str]| {
        let configured = Configured { place: &place, text };
        let mut command = configured.command(args);
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let secret = "store = \"redis://me:hunter2@127.0.0.1:1\"";
    let bridge = "[run]\nbridge = \"redlock:jobs@redis://me:hunter2@a,redis://b\"";
    for text in [secret, bridge] {
        for args in [&["ls"][..], &["show", "a"], &["run", "a", "b", "--", "true"], &["doctor"]] {
            let said = said(text, 0o644, args);
            assert!(
                said.contains("warning: it has a password") && said.contains("chmod"),
                "{args:?}: {said}"
            );
            assert!(!said.contains("hunter2"), "{said}");
        }
        for mode in [0o600, 0o640] {
            assert!(!said(text, mode, &["ls"]).contains("password"), "{mode:o}");
        }
    }
    let public = "store = \"redis://127.0.0.1:1\"\n[run]\nbridge = \"redsync:jobs\"";
    assert!(!said(public, 0o644, &["ls"]).contains("password"));
}

#[test]
fn file_that_another_user_may_change_runs_no_command_unless_it_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.path("leasehold")).unwrap();
    let file = place.path("leasehold/config.toml");
    std::fs::write(&file, "").unwrap();
    let is_root = rustix::process::geteuid().is_root();
    for (owner, group, mode, says) in [
        (None, None, 0o602, Some("every user of this machine may change ")),
        (None, None, 0o664, None),
        (None, Some(12_346), 0o664, Some("the group 12346 may change ")),
        (None, Some(12_346), 0o640, None),
        (Some(12_345), None, 0o600, Some(" belongs to another user (uid 12345)")),
    ] {
        if (owner, group) != (None, None) && !is_root {
            // Only root can give a file away.
            continue;
        }
        std::os::unix::fs::chown(&file, owner, group).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let said = |variable: &str, value: std::path::PathBuf| {
            let output = place
                .leasehold(&["ls"])
                .env_remove("LEASEHOLD_CONFIG")
                .env(variable, value)
                .output()
                .unwrap();
            (code(output.status), String::from_utf8(output.stderr).unwrap())
        };
        let usual = said("XDG_CONFIG_HOME", place.path(""));
        let named = said("LEASEHOLD_CONFIG", file.clone());
        let Some(says) = says else {
            assert!(usual.0 == 0 && named.0 == 0, "{usual:?} {named:?}");
            assert!(!usual.1.contains("change") && !named.1.contains("change"), "{usual:?} {named:?}");
            continue;
        };
        assert!(usual.0 == 2 && usual.1.contains(says) && usual.1.contains("LEASEHOLD_CONFIG"), "{usual:?}");
        assert!(named.0 == 0 && named.1.contains(says) && named.1.contains("warning"), "{named:?}");
    }
}

/// The file may be replaced through a link, or in its folder.
#[test]
fn file_that_another_user_may_replace_is_refused() {
    if !rustix::process::geteuid().is_root() {
        // Only root can give files away.
        return;
    }
    let place = Place::new();
    let folder = place.path("home/.config/leasehold");
    let file = folder.join("config.toml");
    std::fs::create_dir_all(&folder).unwrap();
    let said = || {
        let mut command = place.leasehold(&["ls"]);
        command.env("HOME", place.path("home")).env_remove("XDG_CONFIG_HOME").env_remove("LEASEHOLD_CONFIG");
        let output = command.output().unwrap();
        (code(output.status), String::from_utf8(output.stderr).unwrap())
    };
    let give = |path: &std::path::Path, user| std::os::unix::fs::lchown(path, Some(user), None).unwrap();
    std::fs::write(&file, "").unwrap();
    assert_eq!(said().0, 0);
    for name in ["home", "home/.config", "home/.config/leasehold"] {
        give(&place.path(name), 12_345);
        let (code, stderr) = said();
        assert!(code == 2 && stderr.contains("belongs to another user (uid 12345)"), "{name}: {stderr}");
        give(&place.path(name), 0);
    }
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/proc/self/cmdline", &file).unwrap();
    give(&file, 12_345);
    let (code, stderr) = said();
    assert!(code == 2 && stderr.contains("belongs to another user (uid 12345)"), "{stderr}");
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    let (code, stderr) = said();
    assert!(code == 2 && stderr.contains("this is no file"), "{stderr}");
}

#[test]
fn relative_home_has_no_file() {
    let place = Place::new();
    std::fs::create_dir_all(place.path(".config/leasehold")).unwrap();
    std::fs::write(place.path(".config/leasehold/config.toml"), "no option").unwrap();
    let mut command = place.leasehold(&["ls"]);
    command.current_dir(place.path("")).env_remove("XDG_CONFIG_HOME").env_remove("LEASEHOLD_CONFIG");
    assert_eq!(
        code(command.env("HOME", place.path("")).output().unwrap().status),
        2,
        "the file is not used at all"
    );
    assert_eq!(code(command.env("HOME", ".").output().unwrap().status), 0);
}

#[test]
fn typed_option_wins_over_an_option_of_the_file_that_it_excludes() {
    let place = Place::new();
    let with = |text| Configured { place: &place, text };
    let rw = |mode: &str| ("rw".to_owned(), Some(mode.to_owned()));
    assert_eq!(with("[run]\nshared = true").held(&[]), rw("read"), "the default");
    assert_eq!(with("[run]\nshared = true").held(&["-x"]), rw("write"));
    assert_eq!(with("[run]\nexclusive = true").held(&["--shared"]), rw("read"));
    assert_eq!(with("[run]\nshared = true").held(&["--semaphore", "2"]), ("semaphore".to_owned(), None));
    assert_eq!(with("[run]\nsemaphore = 2").held(&["--owner", "me"]), ("mutex".to_owned(), None));
    // The period would be used up by the first of them, and a reader has none.
    for _ in 0..2 {
        assert_eq!(with("[run]\nonce-per = \"1h\"").code(&["run", "-n", "b", "--", "true"]).0, 0);
        assert_eq!(with("[run]\nonce-per = \"1h\"").code(&["run", "-s", "c", "--", "true"]).0, 0);
    }
    let once = with("[run]\nno-wait = true\nshared = true\nmin-hold = \"1h\"");
    assert_eq!(once.code(&["run", "--once-per", "1h", "d", "--", "true"]).0, 0);
    assert_eq!(once.code(&["run", "--once-per", "1h", "d", "--", "true"]).0, 1, "the period is used up");
    let acquired = with("[acquire]\nshared = true").code(&["acquire", "-x", "e"]);
    assert_eq!((acquired.0, &*place.show("e")["holders"][0]["mode"].to_string()), (0, "\"write\""));
}

#[test]
fn typed_wait_wins_over_the_wait_of_the_file() {
    let place = Place::new();
    let with = |text| Configured { place: &place, text };
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    assert_eq!(with("[run]\nno-wait = true").code(&["run", "a", "--", "true"]).0, 1, "the default");
    assert_eq!(with("[run]\nwait = \"1h\"").code(&["run", "-n", "a", "--", "true"]).0, 1);
    assert_eq!(with("[acquire]\nwait = \"1h\"").code(&["acquire", "-n", "a"]).0, 1);
    let waiting = with("[run]\nno-wait = true").command(&["run", "-w", "3600", "a", "--", "true"]);
    let mut waiting = Started({ waiting }.spawn().unwrap());
    place.until_waiting("a", 1);
    holder.signal("TERM");
    assert_eq!(waiting.end(), 0);
}

#[test]
fn option_of_the_file_is_checked_as_a_typed_one() {
    let place = Place::new();
    let with = |text| Configured { place: &place, text };
    for (text, says) in [
        ("[run]\nshared = true\nexclusive = true", "cannot be used with"),
        ("[run]\nttl = \"soon\"", "write 10s"),
        ("[run]\nshared = \"yes\"", "run: shared is true or false"),
        ("[run]\nttl = [1]", "run: ttl is a text, a number"),
        ("[doctor]\naccept = [[1]]", "doctor: accept is a text, a number, true or false, or a list of them"),
        ("[release]\nforce = true", "release: --force can't be a default"),
        ("[run]\nname = \"a\"", "run: --name can't be a default"),
        ("log = \"loud\"", "text, json"),
    ] {
        let (code, said) = with(text).code(&["run", "a", "--", "true"]);
        assert_eq!(code, 2, "{text} said {said}");
        assert!(said.contains("config.toml: ") && said.contains(says), "{text} said {said}");
        assert_eq!(said.lines().count(), 1, "{text} said {said}");
    }
    let file = with("[run]\nttl = \"soon\"");
    assert_eq!(file.code(&["run", "--ttl", "5s", "a", "--", "true"]), (0, String::new()), "it is not used");
    let said = file.code(&["run", "--grace", "soon", "a", "--", "true"]).1;
    assert!(said.contains("--grace") && !said.contains("config.toml"), "what was typed comes first: {said}");
    // An option that needs another one finds it in the file; a flag that is off is none.
    let file = with("[run]\nonce-per = \"1h\"\nverbose = false");
    assert_eq!(file.code(&["run", "--at-least-once", "b", "--", "true"]), (0, String::new()));
    assert_eq!(file.code(&["run", "b", "--", "true"]).0, 1);
    assert_eq!(with("[run]\nttl = \"20s\"").code(&["--log", "text", "run", "c", "--", "true"]).0, 0);
}

#[test]
fn option_of_the_file_that_cannot_apply_to_what_is_typed_is_ignored() {
    let place = Place::new();
    let with = |text| Configured { place: &place, text };
    // Several names are mutexes.
    for line in [
        "shared = true",
        "exclusive = true",
        "semaphore = 2",
        "owner = \"me\"",
        "once-per = \"1h\"\nat-least-once = true",
    ] {
        let text = format!("[run]\n{line}");
        for _ in 0..2 {
            let file = Configured { place: &place, text: &text };
            assert_eq!(file.code(&["run", "-n", "a", "b", "--", "true"]), (0, String::new()), "{line}");
            assert_eq!(file.code(&["run", "-n", "--name=a", "b", "--", "true"]).0, 0, "{line}");
        }
    }
    assert_eq!(with("[run]\nshared = true").code(&["run", "-s", "a", "b", "--", "true"]).0, 2, "it is typed");
    // A grace is at most half of the ttl.
    let grace = with("[run]\ngrace = \"4s\"");
    assert_eq!(grace.code(&["run", "--ttl", "5s", "a", "--", "true"]), (0, String::new()));
    assert_eq!(grace.code(&["run", "--ttl", "8s", "a", "--", "true"]), (0, String::new()));
    let ttl = with("[run]\nttl = \"5s\"");
    for grace in ["4s", "6s"] {
        let (code, said) = ttl.code(&["run", "--grace", grace, "a", "--", "true"]);
        assert_eq!(code, 2, "the ttl of the file is used: {said}");
        assert!(said.contains(&format!("--grace {grace}")) && said.contains("--ttl 5s"), "{said}");
    }
    let both = with("[run]\nttl = \"5s\"\ngrace = \"4s\"").code(&["run", "a", "--", "true"]);
    assert!(both.0 == 2 && both.1.contains("at most half of it, 2.5s"), "{}", both.1);
    // A bridged lock is a mutex, or Redisson's read-write lock.
    let bridge = with("[run]\nbridge = \"redisson:jobs\"");
    for typed in [&["--semaphore", "2"][..], &["--owner", "me"], &["--min-hold", "1ms"], &["-s"], &["-x"]] {
        let all = [&["run"], typed, &["bridged", "--", "true"]].concat();
        let (code, said) = bridge.code(&all);
        assert!(
            code == 0 && said.contains("its bridge is not used") && said.lines().count() == 1,
            "{typed:?}: {said}"
        );
    }
    // A minimum hold of zero sets that of the file aside, and the lock has the bridge.
    let (code, said) = bridge.code(&["run", "--min-hold", "0s", "bridged", "--", "true"]);
    assert!(code != 0 && said.contains("a bridge needs a store on the Redis server"), "{said}");
    // A bridge that is typed is not that of the file.
    let typed =
        bridge.code(&["run", "--min-hold", "1ms", "--bridge", "redisson:own", "bridged", "--", "true"]);
    assert!(typed.0 != 0 && !typed.1.contains("its bridge is not used"), "{}", typed.1);
    let json = with("log = \"json\"\n[run]\nbridge = \"redisson:jobs\"");
    for typed in [&["a", "b"][..], &["--owner", "me", "a"]] {
        let (code, said) = json.code(&[&["run"], typed, &["--", "true"]].concat());
        let line: Value = serde_json::from_str(said.trim()).expect("one line of JSON");
        assert!(code == 0 && line.to_string().contains("its bridge is not used"), "{said}");
    }
    let of_redisson = |line: &str, kind: &str| {
        let text = format!("[run]\n{line}");
        let file = Configured { place: &place, text: &text };
        let (code, said) = file.code(&["run", "--bridge", &format!("{kind}:jobs"), "a", "--", "true"]);
        assert!(code != 0, "{said}");
        said
    };
    for (line, kind) in [
        ("semaphore = 2", "redisson"),
        ("owner = \"me\"", "redisson"),
        ("once-per = \"1h\"", "redisson"),
        ("min-hold = \"5s\"", "redisson"),
        ("shared = true", "redisson"),
        ("exclusive = true", "redisson-rw"),
    ] {
        let said = of_redisson(line, kind);
        assert!(said.contains("a bridge needs a store on the Redis server"), "{line}: {said}");
    }
    // It needs --once-per.
    let once = with("[run]\nat-least-once = true");
    assert_eq!(once.code(&["run", "a", "--", "true"]), (0, String::new()));
    assert_eq!(once.code(&["run", "--once-per", "1h", "b", "--", "true"]).0, 0);
    assert_eq!(once.code(&["run", "--once-per", "1h", "b", "--", "true"]).0, 1);
    assert_eq!(with("").code(&["run", "--at-least-once", "a", "--", "true"]).0, 2, "it is typed");
}

#[test]
fn repeatable_option_is_a_list_in_the_file() {
    let place = Place::new();
    let sockets = ["one", "two", "three"].map(|name| format!("unix:{}", place.path(name).display()));
    let text = format!("[serve]\nlisten = [{:?}, {:?}]\n[doctor]\naccept = []", sockets[0], sockets[1]);
    let file = Configured { place: &place, text: &text };
    assert_eq!(file.code(&["ls"]).0, 0, "a list stops no other command");
    if cfg!(feature = "serve") {
        let mut server = Started(file.command(&["serve"]).spawn().unwrap());
        assert_eq!(server.line(), format!("listening on {}", sockets[0]));
        assert_eq!(server.line(), format!("listening on {}", sockets[1]));
        drop(server);
        let mut server = Started(file.command(&["serve", "--listen", &sockets[2]]).spawn().unwrap());
        assert_eq!(server.line(), format!("listening on {}", sockets[2]));
    }
}

#[test]
fn password_of_the_file_reaches_a_nested_run_and_is_not_in_its_environment() {
    let server = Server::builder().password("s3cret").start();
    assert!(server.url().contains("s3cret"));
    let place = Place::new();
    let text = format!("store = {:?}", server.url());
    let file = Configured { place: &place, text: &text };
    let inner = format!("env | grep -c s3cret; '{}' run inner -- echo done", env!("CARGO_BIN_EXE_leasehold"));
    let mut command = file.command(&["run", "outer", "-c", &inner]);
    let output = command.env_remove("LEASEHOLD_STORE").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\ndone\n", "{output:?}");
    // An address in the environment wins if it is another store.
    let mut other = file.command(&["ls", "--json"]);
    let listed: Value = serde_json::from_slice(&other.output().unwrap().stdout).unwrap();
    assert_eq!(listed["store"], place.store());
}

#[test]
fn invalid_file_breaks_neither_help_nor_version_nor_completions() {
    let place = Place::new();
    for text in ["[run", "[run]\nnonsense = 1", "[runs]\nttl = 1"] {
        let file = Configured { place: &place, text };
        for args in [
            &["--help"][..],
            &["-h"],
            &["--version"],
            &["help", "run"],
            &["run", "--help"],
            &["run", "-h"],
            &["completions", "bash"],
            &["man"],
            &["man", "run"],
        ] {
            let output = file.output(args);
            assert!(output.status.success() && output.stderr.is_empty(), "{text} {args:?}: {output:?}");
            assert!(!output.stdout.is_empty(), "{text} {args:?}");
        }
        assert_eq!(file.code(&["ls"]).0, 2, "{text}");
        assert_eq!(file.code(&["run", "a", "--", "true"]).0, 2, "{text}");
    }
}

#[test]
fn error_of_the_file_does_not_contain_the_password() {
    let place = Place::new();
    let file = Configured { place: &place, text: "verbose = true\nstore = \"redis://:s3cret@localhost\n" };
    let (code, said) = file.code(&["ls"]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("line 2") && !said.contains("s3cret"), "{said}");
}
