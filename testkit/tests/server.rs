//! Servers: that each kind starts, answers where it says, keeps its place, and ends.

use std::time::Duration;

use leasehold_testkit::{Builder, Flavor, Server, wait_until};
use redis::{Commands as _, ErrorKind, ServerErrorKind};

fn ping(url: &str) -> redis::RedisResult<String> {
    // Bounds the handshake as well, which a frozen server does not answer.
    let mut connection = redis::Client::open(url)?.get_connection_with_timeout(Duration::from_secs(2))?;
    redis::cmd("PING").query(&mut connection)
}

fn version(server: &Server) -> String {
    let info: redis::InfoDict = server.query(&["INFO", "server"]).unwrap();
    let name = |field| info.get::<String>(field);
    name("valkey_version").map_or_else(|| name("redis_version").unwrap(), |found| format!("valkey {found}"))
}

#[test]
fn every_flavor_starts_on_a_port_and_on_a_socket() {
    for flavor in Flavor::ALL {
        for builder in [Server::builder(), Server::builder().on_socket()] {
            let server = builder.flavor(flavor).start();
            assert_eq!(ping(&server.url()).unwrap(), "PONG");
            let version = version(&server);
            match flavor {
                Flavor::Redis62 => assert!(version.starts_with("6.2."), "{version}"),
                Flavor::Valkey9 => assert!(version.starts_with("valkey 9."), "{version}"),
                _ => assert!(version.as_str() >= "7", "{version}"),
            }
        }
    }
}

#[test]
fn a_server_on_a_socket_has_no_port() {
    let server = Server::on_socket();
    assert_eq!(server.url(), format!("redis+unix://{}", server.socket().display()));
    let port: (String, String) = server.query(&["CONFIG", "GET", "port"]).unwrap();
    assert_eq!(port.1, "0");
}

#[test]
fn settings_and_password_reach_the_server_and_its_urls() {
    let server = Server::builder().setting("maxmemory", "12mb").password("s3cret").start();
    assert_eq!(ping(&server.url()).unwrap(), "PONG");
    assert_eq!(ping(&server.socket_url()).unwrap(), "PONG");
    let without = ping(&format!("redis://127.0.0.1:{}", server.port())).unwrap_err();
    assert_eq!(without.code(), Some("NOAUTH"));
    let maxmemory: (String, String) = server.query(&["CONFIG", "GET", "maxmemory"]).unwrap();
    assert_eq!(maxmemory.1, (12 * 1024 * 1024).to_string());
}

#[test]
#[should_panic(expected = "no-such-setting")]
fn an_unknown_setting_panics_with_the_server_s_error() {
    let _server = Server::builder().setting("no-such-setting", "1").start();
}

#[test]
fn a_killed_server_restarts_on_the_same_address_with_its_files() {
    let with_log = |builder: Builder| builder.setting("appendonly", "yes").setting("appendfsync", "always");
    for flavor in Flavor::ALL {
        for builder in [Server::builder(), Server::builder().on_socket()] {
            let mut server = with_log(builder).flavor(flavor).start();
            let url = server.url();
            let _: () = server.admin().set("a", 1).unwrap();
            server.stop();
            assert!(!server.is_running() && ping(&url).is_err());
            server.start();
            assert!(server.is_running() && server.url() == url);
            assert_eq!(server.admin().get::<_, Option<i64>>("a").unwrap(), Some(1));
        }
    }
}

#[test]
fn shut_down_saves_and_stop_does_not() {
    let mut server = Server::builder().setting("save", "3600 1").start();
    let _: () = server.admin().set("saved", 1).unwrap();
    server.shut_down();
    server.start();
    let _: () = server.admin().set("unsaved", 1).unwrap();
    server.stop();
    server.start();
    let found: (Option<i64>, Option<i64>) = server.admin().mget(&["saved", "unsaved"]).unwrap();
    assert_eq!(found, (Some(1), None));
}

#[test]
fn start_loading_returns_while_the_server_loads() {
    // Each key takes it 50 ms, and it hears its clients after each KiB.
    let builder = Server::builder().setting("save", "3600 1").setting("rdbcompression", "no");
    let builder = builder.setting("key-load-delay", "50000");
    let mut server = builder.setting("loading-process-events-interval-bytes", "1024").start();
    let value = "x".repeat(1024);
    let pairs: Vec<(String, &str)> = (0..40).map(|key| (format!("key-{key}"), value.as_str())).collect();
    let _: () = server.admin().mset(&pairs).unwrap();
    server.shut_down();
    server.start_loading();
    let error = server.query::<String>(&["GET", "key-0"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Server(ServerErrorKind::BusyLoading));
    wait_until("it has loaded", || server.query::<String>(&["GET", "key-0"]).is_ok());
}

#[test]
fn a_frozen_server_responds_after_it_is_resumed_and_can_be_stopped() {
    let server = Server::on_port();
    server.signal("STOP");
    assert!(ping(&server.url()).is_err());
    server.signal("CONT");
    wait_until("it answers again", || ping(&server.url()).is_ok());
    server.signal("STOP");
    assert!(server.is_running());
    let url = server.url();
    drop(server);
    wait_until("it is gone", || {
        let error = ping(&url).unwrap_err();
        error.is_connection_refusal()
    });
}

#[test]
fn concurrent_servers_have_distinct_ports_and_folders() {
    let servers: Vec<Server> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..8).map(|_| scope.spawn(Server::on_port)).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    for (mine, server) in servers.iter().enumerate() {
        let _: () = server.admin().set("mine", mine).unwrap();
    }
    for (mine, server) in servers.iter().enumerate() {
        assert_eq!(server.admin().get::<_, usize>("mine").unwrap(), mine);
    }
}
