//! `leasehold serve` as a program: its clients, what is left when one of them is killed, and its dashboard in a browser.
#![cfg(feature = "serve")]

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Place, SOON, Started, as_from_terminal, until};
use leasehold_testkit::Certificates;
use serde_json::{Value, json};

const WRITE: &str = "write-0123456789abcdef";
const READ: &str = "read-0123456789abcdef";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A running server, on a Unix socket and on TCP.
struct Server {
    place: Place,
    program: Started,
    url: String,
}

impl Server {
    fn start() -> Self {
        let place = Place::new();
        let tokens = place.path("tokens");
        fs::write(&tokens, format!("read {READ}\nwrite,force {WRITE}\n")).unwrap();
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o600)).unwrap();
        let socket = format!("unix:{}", place.path("socket").display());
        let (tokens, tcp) = (tokens.display().to_string(), "127.0.0.1:0");
        let mut program = place
            .start(&["serve", "--listen", &socket, "--listen", tcp, "--tokens", &tokens, "--drain", "1s"]);
        assert_eq!(program.line(), format!("listening on {socket}"));
        let url = program.line();
        let url = url.strip_prefix("listening on ").unwrap_or_else(|| panic!("{url}")).to_owned();
        Self { place, program, url }
    }

    /// A request through the socket: the status and the body.
    fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = UnixStream::connect(self.place.path("socket")).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        );
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_default())
    }

    /// Releases a lease: the outcome.
    fn release(&self, grant: &Value) -> Value {
        let (status, body) = self.call("POST", "/v1/leases/release", &json!({ "leases": [grant["lease"]] }));
        assert_eq!(status, 200, "{body}");
        body["leases"][0]["outcome"].clone()
    }

    fn is_free(&self, name: &str) -> bool {
        self.call("GET", &format!("/v1/locks/mutex/{name}"), &Value::Null).1["holders"] == json!([])
    }

    /// A program with the address and the token in its environment.
    fn client(&self, program: &str, args: &[&str]) -> Command {
        let mut command = as_from_terminal(program);
        command.args(args).env("LEASEHOLD_URL", &self.url).env("LEASEHOLD_HTTP_TOKEN", WRITE);
        // As under `leasehold run`.
        command.env("LEASEHOLD_TOKEN", "1763830000000001");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

#[test]
fn ten_line_clients_wait_and_release() {
    let server = Server::start();
    let folder = root().join("examples/http-clients");
    // Go compiles its library at the first build, which may take minutes.
    let compiled = server.place.path("lock").display().to_string();
    let mut build =
        server.client("go", &["build", "-o", &compiled, &folder.join("lock.go").display().to_string()]);
    build
        .env("GOFLAGS", "-mod=mod")
        .env("GO111MODULE", "off")
        .env("GOTMPDIR", server.place.path("").display().to_string());
    if std::env::var_os("HOME").is_none() {
        build.env("GOCACHE", server.place.path("go").display().to_string());
    }
    let built = build.output().expect("go runs: scripts/test install installs it");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let script = |file: &str| folder.join(file).display().to_string();
    for (program, args) in [
        ("python3", vec![script("lock.py")]),
        ("node", vec![script("lock.mjs")]),
        ("sh", vec!["-e".to_owned(), script("lock.sh")]),
        (&compiled, vec![]),
    ] {
        let (_, held) =
            server.call("POST", "/v1/locks/mutex/nightly-report/acquire", &json!({ "ttl_ms": 600_000 }));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let client = server
            .client(program, &args)
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}: scripts/test install installs it"));
        let mut client = Started(client);
        until(|| {
            // It waits; a client that ends instead has failed.
            let ended = client.0.try_wait().unwrap();
            assert!(ended.is_none(), "{program}: {}", client.stderr());
            let state = server.call("GET", "/v1/locks/mutex/nightly-report", &Value::Null).1;
            (state["waiters"].as_array().unwrap().len() == 1).then_some(())
        });
        assert_eq!(server.release(&held), "released");
        let line = client.line();
        let token: u64 = line
            .strip_prefix("token ")
            .and_then(|token| token.parse().ok())
            .unwrap_or_else(|| panic!("{program}: {line}"));
        assert!(token > held["token"].as_u64().unwrap(), "{program}");
        assert_eq!(client.end(), 0, "{program}: {}", client.stderr());
        assert!(server.is_free("nightly-report"), "{program} has released it");
    }
}

#[test]
fn metrics_include_those_of_the_library() {
    let server = Server::start();
    assert_eq!(server.call("POST", "/v1/locks/mutex/a/acquire", &json!({})).0, 200);
    let mut stream = UnixStream::connect(server.place.path("socket")).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    for name in [
        "leasehold_acquisitions_total{",
        "leasehold_leases_held{",
        "leasehold_serve_acquires_total{",
        "leasehold_store_up 1",
    ] {
        assert!(page.contains(name), "{name}: {page}");
    }
}

/// Holds a lock, and renews its lease until that has ended.
const HOLDER: &str = r#"
import json, os, sys, time, urllib.error, urllib.request
def call(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["LEASEHOLD_HTTP_TOKEN"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LEASEHOLD_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())
lease = call("/v1/locks/mutex/a/acquire", ttl_ms=8_000)["lease"]
print("held", flush=True)
while True:
    try:
        outcome = call("/v1/leases/renew", leases=[lease])["leases"][0]["outcome"]
    except urllib.error.HTTPError:
        raise
    except (urllib.error.URLError, ConnectionError):
        continue  # Frozen between the head and the body of a request, which the server has given up.
    if outcome != "renewed":
        print(outcome, flush=True)
        sys.exit(3)
    time.sleep(0.2)
"#;

#[test]
fn killed_client_frees_its_lock_within_its_ttl() {
    let server = Server::start();
    let mut client = Started(server.client("python3", &["-c", HOLDER]).spawn().unwrap());
    assert_eq!(client.line(), "held");
    client.signal("KILL");
    until(|| server.is_free("a").then_some(()));
    // Its waiters need not know it.
    assert_eq!(server.call("POST", "/v1/locks/mutex/a/acquire", &json!({})).0, 200);
}

#[test]
fn frozen_client_loses_its_lock_and_is_told() {
    let server = Server::start();
    let mut client = Started(server.client("python3", &["-c", HOLDER]).spawn().unwrap());
    assert_eq!(client.line(), "held");
    client.signal("STOP");
    until(|| server.is_free("a").then_some(()));
    let (status, next) = server.call("POST", "/v1/locks/mutex/a/acquire", &json!({}));
    assert_eq!(status, 200, "{next}");
    client.signal("CONT");
    assert_eq!(client.line(), "ended");
    assert_eq!(client.end(), 3);
}

#[test]
fn lease_of_a_killed_server_is_renewed_at_the_next_one_and_ends_with_its_ttl() {
    let server = Server::start();
    let (status, grant) = server.call("POST", "/v1/locks/mutex/a/acquire", &json!({ "ttl_ms": 15_000 }));
    assert_eq!(status, 200, "{grant}");
    server.program.signal("KILL");
    // The next server takes the socket over.
    let socket = format!("unix:{}", server.place.path("socket").display());
    let mut next = server.place.start(&["serve", "--listen", &socket]);
    assert_eq!(next.line(), format!("listening on {socket}"));
    let (status, renewed) = server.call("POST", "/v1/leases/renew", &json!({ "leases": [grant["lease"]] }));
    assert_eq!((status, &renewed["leases"][0]["outcome"]), (200, &json!("renewed")), "{renewed}");
    assert_eq!(renewed["leases"][0]["token"], grant["token"]);
    next.signal("KILL");
    until(|| server.place.show("a")["holders"].as_array()?.is_empty().then_some(()));
}

#[test]
fn terminated_server_keeps_the_leases_and_exits_with_0() {
    let mut server = Server::start();
    assert_eq!(server.call("POST", "/v1/locks/mutex/a/acquire", &json!({ "ttl_ms": 600_000 })).0, 200);
    server.program.signal("TERM");
    assert_eq!(server.program.end(), 0);
    let stderr = server.program.stderr();
    assert!(stderr.contains("leases stay; other requests are answered for another 1s"), "{stderr}");
    assert!(!server.place.path("socket").exists());
    assert_eq!(
        server.place.show("a")["holders"].as_array().unwrap().len(),
        1,
        "its caller may still be working"
    );
}

#[test]
fn second_signal_ends_a_draining_server_and_releases_nothing() {
    for (second, code) in [("TERM", 128 + 15), ("INT", 128 + 2)] {
        let place = Place::new();
        let socket = format!("unix:{}", place.path("socket").display());
        let program = place.start(&["serve", "--listen", &socket, "--drain", "1h"]);
        let mut server = Server { place, program, url: String::new() };
        assert_eq!(server.program.line(), format!("listening on {socket}"));
        assert_eq!(server.call("POST", "/v1/locks/mutex/a/acquire", &json!({ "ttl_ms": 600_000 })).0, 200);
        // Two signals at once are one request to stop: `timeout` signals the process and its group. One process sends both.
        let pid = server.program.0.id();
        let both = format!("kill -TERM {pid}; kill -TERM {pid}");
        assert!(Command::new("sh").args(["-c", &both]).status().expect("a shell").success());
        until(|| (server.call("GET", "/healthz", &Value::Null).0 == 503).then_some(()));
        let draining = Instant::now();
        until(|| (draining.elapsed() > Duration::from_millis(1100)).then_some(()));
        server.program.signal(second);
        assert_eq!(server.program.end(), code);
        let stderr = server.program.stderr();
        assert!(stderr.contains("for another 1h") && stderr.contains("a second signal"), "{stderr}");
        assert_eq!(server.place.show("a")["holders"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn wrong_settings_are_refused_with_the_fix() {
    let place = Place::new();
    let open = place.path("open");
    fs::write(&open, format!("write {WRITE}\n")).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    let short = place.path("short");
    fs::write(&short, "write secret\n").unwrap();
    fs::set_permissions(&short, fs::Permissions::from_mode(0o600)).unwrap();
    let (open, short, missing) =
        (open.display().to_string(), short.display().to_string(), place.path("no").display().to_string());
    let tcp = ["serve", "--listen", "127.0.0.1:0"];
    for (args, says) in [
        (&tcp[..], "openssl rand -hex 16"),
        (&[&tcp[..], &["--tokens", &open]].concat(), "chmod 600"),
        (&[&tcp[..], &["--tokens", &short]].concat(), "line 1: a token has 16 to 1024"),
        (&[&tcp[..], &["--tokens", &missing]].concat(), "can't be read"),
        (&["serve", "--listen", "8430"], "write unix:PATH or HOST:PORT"),
        (&["serve", "--listen", "redis://:secret@host/1"], "write unix:PATH or HOST:PORT"),
        (&["serve", "--listen", "redis://:secret@host:6379"], "write unix:PATH or HOST:PORT"),
        (&["man", "redis://:secret@host"], "no such command"),
        (&["serve", "--tls-cert", "a.pem"], "--tls-key"),
        (&["serve", "--max-connections", "0"], "1.."),
    ] {
        let (code, stderr) = place.code(args);
        assert_eq!(
            (code, stderr.contains(says), stderr.contains("secret")),
            (2, true, false),
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn risky_settings_are_reported_when_the_server_starts() {
    let place = Place::new();
    let start = |read: &str| {
        let mut server = place.leasehold(&["serve", "--listen", "127.0.0.1:0", "--drain", "0s"]);
        server.env("LEASEHOLD_SERVE_TOKEN", WRITE).env("LEASEHOLD_SERVE_READ_TOKEN", read);
        Started(server.spawn().unwrap())
    };
    let mut server = start(READ);
    assert!(server.line().starts_with("listening on http://127.0.0.1:"));
    server.signal("TERM");
    assert_eq!(server.end(), 0);
    let stderr = server.stderr();
    assert!(!stderr.contains("other hosts") && !stderr.contains(WRITE), "{stderr}");
    let mut server = start(WRITE);
    assert_eq!(server.end(), 2);
    let stderr = server.stderr();
    assert!(stderr.contains("LEASEHOLD_SERVE_READ_TOKEN: the token is also that of"), "{stderr}");
    assert!(!stderr.contains(WRITE), "{stderr}");
    let key = place.path("key.pem");
    fs::write(&key, "no key").unwrap();
    for (mode, is_reported) in [(0o644, true), (0o602, true), (0o640, false)] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let shown = key.display().to_string();
        let mut server =
            place.leasehold(&["serve", "--listen", "127.0.0.1:0", "--tls-cert", &shown, "--tls-key", &shown]);
        let output = server.env("LEASEHOLD_SERVE_TOKEN", WRITE).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.contains("every user of this machine may read or change"), is_reported, "{stderr}");
    }
}

#[test]
fn server_on_memory_warns_that_its_locks_end_with_it() {
    for (place, is_reported) in [(Place::on("memory:"), true), (Place::new(), false)] {
        let socket = format!("unix:{}", place.path("socket").display());
        let mut server = place.start(&["serve", "--listen", &socket, "--drain", "0s"]);
        assert_eq!(server.line(), format!("listening on {socket}"));
        server.signal("TERM");
        assert_eq!(server.end(), 0);
        let stderr = server.stderr();
        assert_eq!(stderr.contains("warning: memory: "), is_reported, "{stderr}");
    }
}

#[test]
fn strangers_leave_descriptors_to_those_with_a_token_when_there_are_few() {
    let place = Place::new();
    let program = env!("CARGO_BIN_EXE_leasehold");
    let mut server = as_from_terminal("sh");
    server.args(["-c", "ulimit -n 200 && exec \"$@\"", "sh", program, "serve", "--listen", "127.0.0.1:0"]);
    server.args(["--drain", "0s", "--store", &place.store()]).env("LEASEHOLD_SERVE_TOKEN", WRITE);
    let mut server = Started(server.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let line = server.line();
    let address = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}"));
    let mut strangers: Vec<TcpStream> = Vec::new();
    for _ in 0..300 {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(b"GET /healthz HTTP/1.1\r\n").unwrap();
        stranger.set_nonblocking(true).unwrap();
        strangers.push(stranger);
    }
    let is_open = |mut stranger: &TcpStream| {
        let read = stranger.read(&mut [0; 4096]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    until(|| {
        strangers.retain(is_open);
        (strangers.len() <= 30).then_some(())
    });
    let mut kept = Vec::new();
    for number in 0..60 {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        write!(
            stream,
            "GET /v1/locks/mutex/{number} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {WRITE}\r\n\r\n"
        )
        .unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!(status, *b"HTTP/1.1 200", "{number}");
        kept.push(stream);
    }
    server.signal("TERM");
    assert_eq!(server.end(), 0);
    let stderr = server.stderr();
    assert!(stderr.contains("may open 200 files") && stderr.contains("it is lowered to "), "{stderr}");
}

#[test]
fn hup_reads_tokens_certificate_and_configuration_again() {
    let place = Place::new();
    let write = |name: &str, text: &str| {
        let path = place.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let configure = |tokens: &str, drain: &str| {
        write("config.toml", &format!("[serve]\ntokens = {tokens:?}\ndrain = \"{drain}\"\n"));
    };
    let tokens = write("tokens", &format!("read {READ}\n"));
    configure(&tokens, "0s");
    let socket = format!("unix:{}", place.path("socket").display());
    let mut server = place.leasehold(&["serve", "--listen", &socket, "--listen", "127.0.0.1:0"]);
    server.env("LEASEHOLD_CONFIG", place.path("config.toml"));
    server.stderr(fs::File::create(place.path("stderr")).unwrap());
    let mut server = Started(server.spawn().unwrap());
    server.line();
    let address = server.line().replace("listening on http://", "");
    let status = |token: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        write!(
            stream,
            "GET /v1/access HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let hang_up = |server: &Started, token: &str, expected: u16| {
        server.signal("HUP");
        until(|| (status(token) == expected).then_some(()));
    };
    assert_eq!((status(READ), status(WRITE)), (200, 401));
    write("tokens", &format!("write {WRITE}\n"));
    hang_up(&server, WRITE, 200);
    assert_eq!(status(READ), 401);
    // Another file, and a setting that is for the next start.
    configure(&write("others", &format!("read {READ}\n")), "1h");
    hang_up(&server, READ, 200);
    assert_eq!(status(WRITE), 401);
    // What is wrong changes nothing. The next message says that it was looked at.
    write("others", "read short\n");
    server.signal("HUP");
    let seen = |text: &str| {
        until(|| fs::read_to_string(place.path("stderr")).unwrap().contains(text).then_some(()));
    };
    seen("HUP: --drain has changed, which takes effect at the next start");
    seen("line 1: a token has 16");
    write("config.toml", "[serve");
    server.signal("HUP");
    seen("config.toml: line 1");
    assert_eq!((status(READ), status(WRITE)), (200, 401));
    server.signal("TERM");
    assert_eq!(server.end(), 0, "with the drain of the start");
}

/// A server over TCP with a token file, whose messages are in a file.
struct Reloaded {
    place: Place,
    program: Started,
    address: String,
}

impl Reloaded {
    fn start(tokens: &str) -> Self {
        let place = Place::new();
        let file = write_tokens(&place, "tokens", tokens);
        let mut server =
            place.leasehold(&["serve", "--listen", "127.0.0.1:0", "--tokens", &file, "--drain", "0s"]);
        server.stderr(fs::File::create(place.path("stderr")).unwrap());
        let mut program = Started(server.spawn().unwrap());
        let address = program.line().replace("listening on http://", "");
        Self { place, program, address }
    }

    /// The status of a request with this token.
    fn status(&self, token: &str) -> u16 {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let head = "GET /v1/access HTTP/1.1\r\nHost: a\r\nConnection: close\r\n";
        write!(stream, "{head}Authorization: Bearer {token}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
    }

    /// How often the server has said this.
    fn said(&self, text: &str) -> usize {
        fs::read_to_string(self.place.path("stderr")).unwrap().matches(text).count()
    }

    fn until_said(&self, text: &str) {
        until(|| (self.said(text) > 0).then_some(()));
    }
}

/// Replaces a token file at once, as programs that deploy secrets do.
fn write_tokens(place: &Place, name: &str, text: &str) -> String {
    let new = place.path("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, place.path(name)).unwrap();
    place.path(name).display().to_string()
}

#[test]
fn changed_token_file_is_read_without_a_signal() {
    let server = Reloaded::start(&format!("ci read {READ}\n"));
    assert_eq!((server.status(READ), server.status(WRITE)), (200, 401));
    write_tokens(&server.place, "tokens", &format!("ci read {WRITE}\n"));
    until(|| (server.status(WRITE) == 200).then_some(()));
    assert_eq!(server.status(READ), 401);
    // In place, as an editor may write it.
    fs::write(server.place.path("tokens"), format!("ci read {READ}\n")).unwrap();
    until(|| (server.status(READ) == 200).then_some(()));
    assert_eq!(server.status(WRITE), 401);
    // By a link, as Kubernetes mounts a secret.
    write_tokens(&server.place, "other", &format!("ci read {WRITE}\n"));
    std::os::unix::fs::symlink(server.place.path("other"), server.place.path("link")).unwrap();
    fs::rename(server.place.path("link"), server.place.path("tokens")).unwrap();
    until(|| (server.status(WRITE) == 200).then_some(()));
    assert_eq!(server.status(READ), 401);
}

#[test]
fn token_file_that_cannot_be_used_changes_nothing_and_is_reported_once() {
    let mut server = Reloaded::start(&format!("ci read {READ}\n"));
    let tokens = server.place.path("tokens");
    let remove = || drop(fs::remove_file(&tokens).or_else(|_| fs::remove_dir(&tokens)));
    let write = |text: &str| drop(write_tokens(&server.place, "tokens", text));
    let mut reported: Vec<&str> = Vec::new();
    let mut refused = |change: &dyn Fn(), says: &'static str| {
        change();
        // Each further message follows two more looks at the file, so that one that is repeated is there twice.
        server.until_said(says);
        assert_eq!((server.status(READ), server.status(WRITE)), (200, 401), "{says}");
        for before in &reported {
            assert_eq!(server.said(before), 1, "{before}");
        }
        reported.push(says);
    };
    refused(&|| write(&format!("ci read {WRITE}\nops write secret\n")), "line 2: a token has 16");
    refused(&|| write(&format!("ci read {WRITE}\nops admin {READ}\n")), "line 2: write NAME RIGHTS TOKEN");
    refused(
        &|| {
            remove();
            fs::create_dir(&tokens).unwrap();
            fs::set_permissions(&tokens, fs::Permissions::from_mode(0o700)).unwrap();
        },
        "Is a directory",
    );
    refused(&remove, "No such file");
    refused(&|| write("# none\n"), "connections over TCP need a token");
    refused(
        &|| {
            write(&format!("ci read {WRITE}\n"));
            fs::set_permissions(&tokens, fs::Permissions::from_mode(0o604)).unwrap();
        },
        "other users can read or change",
    );
    // Only root can give a file away.
    let given = server.place.path("given");
    fs::write(&given, format!("ci read {WRITE}\n")).unwrap();
    fs::set_permissions(&given, fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(&given, Some(12_345), None).is_ok() {
        refused(&|| fs::rename(&given, &tokens).unwrap(), "another user (uid 12345) owns it");
    }
    write(&format!("ci read {WRITE}\n"));
    until(|| (server.status(WRITE) == 200).then_some(()));
    for before in &reported {
        assert_eq!(server.said(before), 1, "{before}");
    }
    assert_eq!((server.said(READ), server.said(WRITE), server.said("secret")), (0, 0, 0));
    server.program.signal("TERM");
    assert_eq!(server.program.end(), 0);
}

#[test]
fn hup_never_ends_a_server_with_a_socket_only() {
    let place = Place::new();
    let socket = format!("unix:{}", place.path("socket").display());
    let mut command = place.leasehold(&["serve", "--listen", &socket, "--drain", "1h"]);
    command.stderr(fs::File::create(place.path("stderr")).unwrap());
    let program = Started(command.spawn().unwrap());
    let mut server = Server { place, program, url: String::new() };
    assert_eq!(server.program.line(), format!("listening on {socket}"));
    let storm = format!("for i in $(seq 500); do kill -HUP {}; done", server.program.0.id());
    assert!(Command::new("sh").args(["-c", &storm]).status().unwrap().success());
    until(|| {
        let said = fs::read_to_string(server.place.path("stderr")).unwrap();
        said.contains("HUP: the tokens were read again").then_some(())
    });
    let (status, grant) = server.call("POST", "/v1/locks/mutex/a/acquire", &json!({ "ttl_ms": 600_000 }));
    assert_eq!(status, 200);
    // Nor while it stops.
    server.program.signal("TERM");
    until(|| (server.call("GET", "/healthz", &Value::Null).0 == 503).then_some(()));
    assert!(Command::new("sh").args(["-c", &storm]).status().unwrap().success());
    assert_eq!(server.release(&grant), "released");
    assert!(server.program.0.try_wait().unwrap().is_none());
}

#[test]
fn hup_while_the_start_reads_its_tokens_does_not_end_the_server() {
    let place = Place::new();
    let pipe = place.path("tokens");
    assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&pipe).status().unwrap().success());
    let pipe = pipe.display().to_string();
    let mut command =
        place.leasehold(&["serve", "--listen", "127.0.0.1:0", "--tokens", &pipe, "--drain", "0s"]);
    let mut server =
        Started(command.stderr(fs::File::create(place.path("stderr")).unwrap()).spawn().unwrap());
    // It is open once the server reads it.
    let mut tokens = fs::OpenOptions::new().write(true).open(&pipe).unwrap();
    for _ in 0..20 {
        server.signal("HUP");
    }
    tokens.write_all(format!("ci read {READ}\n").as_bytes()).unwrap();
    drop(tokens);
    let address = server.line().replace("listening on http://", "");
    let server = Reloaded { place, program: server, address };
    server.until_said("a pipe is not read again");
    assert_eq!(server.status(READ), 200);
}

#[test]
fn hup_during_the_start_does_not_end_the_server() {
    // A store that accepts a connection and then says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Place::on(&format!("redis://{}", silent.local_addr().unwrap()));
    let socket = format!("unix:{}", place.path("socket").display());
    let mut server = place.start(&["serve", "--listen", &socket]);
    let (store, _) = silent.accept().unwrap();
    for _ in 0..20 {
        server.signal("HUP");
    }
    // The store is gone, and the start fails for this reason.
    drop((store, silent));
    let stderr = server.stderr();
    assert_eq!(server.end(), 125, "{stderr}");
    assert!(stderr.contains("redis://"), "{stderr}");
}

#[test]
fn terminated_server_answers_long_polls_at_once() {
    let place = Place::new();
    let socket = format!("unix:{}", place.path("socket").display());
    let program = place.start(&["serve", "--listen", &socket, "--drain", "1h"]);
    let mut server = Server { place, program, url: String::new() };
    assert_eq!(server.program.line(), format!("listening on {socket}"));
    let (_, grant) = server.call("POST", "/v1/locks/mutex/a/acquire", &json!({ "ttl_ms": 600_000 }));
    let wait = json!({ "wait_ms": 50_000, "ttl_ms": 600_000 });
    let poll = || server.call("POST", "/v1/locks/mutex/a/acquire", &wait);
    std::thread::scope(|scope| {
        let polls: Vec<_> = (0..8).map(|_| scope.spawn(poll)).collect();
        server.place.until_waiting("a", 8);
        server.program.signal("TERM");
        for poll in polls {
            let (status, problem) = poll.join().unwrap();
            assert_eq!(
                (status, &problem["code"], &problem["try_another"]),
                (503, &json!("stopping"), &json!(true))
            );
        }
    });
    // It still answers what does not wait.
    assert_eq!(server.release(&grant), "released");
}

/// It would wait for who writes, and the server would hear no further signal.
#[test]
fn hup_reads_no_pipe_in_the_place_of_tokens_or_certificate() {
    let place = Place::new();
    let made = Certificates::new();
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let files = [
        ("tokens", format!("read {READ}\n")),
        ("cert", text(&made.server.certificate)),
        ("key", text(&made.server.key)),
    ];
    let write = |name: &str, text: &str| {
        let path = place.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    };
    files.iter().for_each(|(name, text)| write(name, text));
    let [tokens, cert, key] = ["tokens", "cert", "key"].map(|name| place.path(name).display().to_string());
    let tls = ["--tls-cert", &cert, "--tls-key", &key];
    let mut server = place.leasehold(&["serve", "--listen", "127.0.0.1:0", "--tokens", &tokens]);
    server.args(tls).stderr(fs::File::create(place.path("stderr")).unwrap());
    let mut server = Started(server.spawn().unwrap());
    server.line();
    let count = |text: &str| fs::read_to_string(place.path("stderr")).unwrap().matches(text).count();
    for (name, text) in &files {
        let before = (count("this is a pipe"), count("a pipe is not read again"));
        fs::remove_file(place.path(name)).unwrap();
        assert!(Command::new("mkfifo").arg(place.path(name)).status().unwrap().success());
        server.signal("HUP");
        let now = || (count("this is a pipe"), count("a pipe is not read again"));
        until(|| (now() != before).then_some(()));
        fs::remove_file(place.path(name)).unwrap();
        write(name, text);
    }
    let before = count("HUP: the certificate was read again");
    server.signal("HUP");
    until(|| (count("HUP: the certificate was read again") > before).then_some(()));
    server.signal("TERM");
    assert_eq!(server.end(), 0);
}

#[test]
fn first_commands_of_the_page_work_when_they_are_pasted() {
    let place = Place::new();
    let page = fs::read_to_string(root().join("docs/http-api.md")).unwrap();
    let block = page.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(block.contains("leasehold serve") && block.contains("/v1/leases/release"), "{block}");
    let block = block.replace("locks.sock", &place.path("socket").display().to_string());
    let folder = Path::new(env!("CARGO_BIN_EXE_leasehold")).parent().unwrap().display().to_string();
    let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
    let mut shell = as_from_terminal("sh");
    shell.args(["-ec", &block]).env("PATH", path).env("LEASEHOLD_STORE", place.store()).stdin(Stdio::null());
    let output = shell.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("\"name\":\"report\",\"token\":1") && !stdout.contains("\"code\""), "{stdout}");
    assert!(stdout.contains("\"outcome\":\"released\""), "{stdout}");
    place.until_unused();
}

#[test]
fn dashboard_shows_a_lock_of_a_real_program_its_queue_and_its_release() {
    let server = Server::start();
    let script = root().join("crates/leasehold-serve/tests/browser.py").display().to_string();
    let output = server
        .client("python3", &[&script, "real", &server.url, READ, WRITE])
        .env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"))
        .env("LEASEHOLD_STORE", server.place.store())
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

// --- Examples for operators ----------------------------------------------------------------------

fn words(list: &serde_yaml_ng::Value) -> Vec<String> {
    let words = list.as_sequence().unwrap_or_else(|| panic!("no list: {list:?}"));
    words.iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
}

#[test]
fn compose_example_runs_without_containers() {
    let text = fs::read_to_string(root().join("examples/serve/compose.yaml")).unwrap();
    let mut compose: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
    compose.apply_merge().unwrap();
    let services = &compose["services"];
    let redis = leasehold_testkit::Server::on_port();
    for setting in words(&services["redis"]["command"])[1..].chunks(2) {
        // The server of the test has a port of its own.
        let name = setting[0].trim_start_matches("--");
        if name != "port" {
            redis.run(&["CONFIG", "SET", name, &setting[1]]);
        }
    }
    let serve = &services["serve"];
    assert!(
        serve["environment"]["LEASEHOLD_SERVE_TOKEN"]
            .as_str()
            .unwrap()
            .starts_with("${LEASEHOLD_SERVE_TOKEN:?")
    );
    let store = serve["environment"]["LEASEHOLD_STORE"].as_str().unwrap();
    let place = Place::on(&store.replace("redis:6379", &format!("127.0.0.1:{}", redis.port())));
    let command: Vec<String> =
        words(&serve["command"]).iter().map(|word| word.replace("0.0.0.0:8430", "127.0.0.1:0")).collect();
    assert!(command.contains(&"127.0.0.1:0".to_owned()), "{command:?}");
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let mut server = Started(place.leasehold(&command).env("LEASEHOLD_SERVE_TOKEN", WRITE).spawn().unwrap());
    let url = server.line().replace("listening on ", "");
    let mut workers = Vec::new();
    for (name, seconds) in [("worker-1", "0.05"), ("worker-2", "0.05"), ("worker-1", "60")] {
        let worker = &services[name];
        assert_eq!(worker["environment"]["LEASEHOLD_URL"], "http://serve:8430");
        let command = words(&worker["command"]);
        let script = root().join("examples/serve").join(command[1].strip_prefix("/worker/").unwrap());
        let mut command = as_from_terminal(&command[0]);
        assert!(worker["environment"]["LEASEHOLD_HTTP_TOKEN"].is_string());
        command.arg(script).env("LEASEHOLD_URL", &url).env("LEASEHOLD_HTTP_TOKEN", WRITE);
        command.env("LEASEHOLD_TOKEN", "1763830000000001");
        command.env("ROUNDS", "5").env("WORK_SECONDS", seconds).stdout(Stdio::piped()).stderr(Stdio::piped());
        workers.push(command);
    }
    let mut last = workers.pop().expect("three");
    let mut workers: Vec<Started> =
        workers.iter_mut().map(|command| Started(command.spawn().unwrap())).collect();
    let mut tokens = Vec::new();
    for worker in &mut workers {
        let mut before = 0;
        for _ in 0..5 {
            let line = worker.line();
            let token: u64 =
                line.strip_prefix("working with token ").unwrap_or_else(|| panic!("{line}")).parse().unwrap();
            assert!(token > before);
            before = token;
            tokens.push(token);
        }
        assert_eq!(worker.end(), 0);
    }
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 10, "no token is granted twice");
    // A worker whose lock is taken away does not go on for the minute that its work takes.
    let began = Instant::now();
    let mut worker = Started(last.spawn().unwrap());
    assert!(worker.line().starts_with("working with token "));
    assert!(place.leasehold(&["release", "--force", "report"]).status().unwrap().success());
    assert!(worker.line().starts_with("the work stops: the lease has ended"));
    assert_eq!(worker.end(), 1);
    assert!(began.elapsed() < Duration::from_secs(50));
    server.signal("TERM");
    assert_eq!(server.end(), 0);
}

#[test]
fn unit_container_and_manifests_start_the_server() {
    let read = |name: &str| fs::read_to_string(root().join("examples/serve").join(name)).unwrap();
    let (unit, container) = (read("leasehold-serve.service"), read("Containerfile"));
    let start =
        unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/leasehold ")).unwrap();
    let entry = container.lines().find_map(|line| line.strip_prefix("ENTRYPOINT ")).unwrap();
    assert_eq!(serde_json::from_str::<Vec<String>>(entry).unwrap(), ["leasehold"]);
    let command = container.lines().find_map(|line| line.strip_prefix("CMD ")).unwrap();
    let command: Vec<String> = serde_json::from_str(command).unwrap();
    let shared = manifest("shared.yaml")["spec"]["template"]["spec"]["containers"][0].clone();
    let sidecar = manifest("sidecar.yaml")["spec"]["template"]["spec"]["initContainers"][0].clone();
    let start_of_unit = start.split(' ').map(str::to_owned).collect();
    for args in [start_of_unit, command, words(&shared["args"]), words(&sidecar["args"])] {
        let place = Place::new();
        let tokens = place.path("tokens");
        fs::write(&tokens, format!("read {READ}\n")).unwrap();
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o600)).unwrap();
        let here = |word: &String| {
            word.replace("${CREDENTIALS_DIRECTORY}/tokens", &tokens.display().to_string())
                .replace("/etc/leasehold/tokens", &tokens.display().to_string())
                .replace("/run/leasehold/serve.sock", &place.path("socket").display().to_string())
                .replace("127.0.0.1:8430", "127.0.0.1:0")
                .replace("0.0.0.0:8430", "127.0.0.1:0")
        };
        let args: Vec<String> = args.iter().map(here).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        // The service manager of the unit, which waits for the message.
        let manager = UnixDatagram::bind(place.path("notify")).unwrap();
        manager.set_read_timeout(Some(SOON)).unwrap();
        let mut command = place.leasehold(&args);
        command.env("LEASEHOLD_SERVE_TOKEN", WRITE).env("NOTIFY_SOCKET", place.path("notify"));
        let mut server = Started(command.spawn().unwrap());
        assert!(server.line().starts_with("listening on "), "{args:?}");
        let mut text = [0; 64];
        let length = manager.recv(&mut text).expect("the server is ready");
        assert_eq!(&text[..length], b"READY=1");
        server.signal("TERM");
        assert_eq!(server.end(), 0);
    }
    assert!(unit.contains("\nType=notify\n"));
    assert!(unit.contains("\n[Service]\n") && unit.contains("\n[Install]\n"));
    // Longer than the drain.
    assert!(!start.contains("--drain") && unit.contains("TimeoutStopSec=10s"));
}

/// The first object of a file for Kubernetes.
fn manifest(name: &str) -> serde_yaml_ng::Value {
    let text = fs::read_to_string(root().join("examples/serve/kubernetes").join(name)).unwrap();
    serde_yaml_ng::from_str(text.split("\n---\n").next().unwrap()).unwrap()
}

#[test]
fn program_of_the_sidecar_takes_its_lock_again_and_again() {
    let pod = manifest("sidecar.yaml")["spec"]["template"]["spec"].clone();
    let place = Place::new();
    let socket = place.path("socket").display().to_string();
    let args: Vec<String> = words(&pod["initContainers"][0]["args"])
        .iter()
        .map(|word| word.replace("/run/leasehold/serve.sock", &socket))
        .collect();
    let mut server = place.start(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(server.line(), format!("listening on unix:{socket}"));
    // What the probe looks for.
    let probe = words(&pod["initContainers"][0]["startupProbe"]["exec"]["command"]);
    assert_eq!(probe[..2], ["test", "-S"]);
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    let program = &pod["containers"][0];
    let shell = words(&program["command"]);
    let script = words(&program["args"]).remove(0).replace("/run/leasehold/serve.sock", &socket);
    let mut command = as_from_terminal(&shell[0]);
    command.args([&shell[1], &script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = Started(command.spawn().unwrap());
    for _ in 0..2 {
        assert!(program.line().ends_with(" writes the report"));
    }
    drop(program);
    server.signal("TERM");
    assert_eq!(server.end(), 0);
}

/// As a script's job in the background, which the script's Ctrl-C does not end.
#[test]
fn server_ignores_an_interrupt_that_was_ignored_when_it_started() {
    let place = Place::new();
    let socket = format!("unix:{}", place.path("socket").display());
    let mut shell = as_from_terminal("sh");
    shell.args([
        "-c",
        "trap '' INT; exec \"$0\" serve --listen \"$1\"",
        env!("CARGO_BIN_EXE_leasehold"),
        &socket,
    ]);
    shell
        .env("LEASEHOLD_STORE", place.store())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut server = Started(shell.spawn().unwrap());
    assert_eq!(server.line(), format!("listening on {socket}"));
    // A handler would be in place by now.
    let status = fs::read_to_string(format!("/proc/{}/status", server.0.id())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_ne!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (2 - 1), 0, "{status}");
    server.signal("TERM");
    assert_eq!(server.end(), 0);
}
