//! Names of servers: they lead elsewhere while a program is connected, or to several addresses, or to one of IPv6.

#![cfg(target_os = "linux")]
#![allow(missing_docs, reason = "a test")]

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{Place, Started, until};
use leasehold_testkit::{Cluster, Sentinels, Server};

/// Names of a test, which the program resolves through a library that is loaded into it.
struct Names {
    library: PathBuf,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Names {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (library, file) = (folder.path().join("names.so"), folder.path().join("names"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/names.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
        assert!(compiler.status().expect("a C compiler").success());
        let names = Self { library, file, _folder: folder };
        names.lead_to("127.0.0.1");
        names
    }

    /// From now on `locks.test` has these addresses.
    fn lead_to(&self, addresses: &str) {
        let new = self.file.with_extension("new");
        fs::write(&new, format!("locks.test {addresses}\n")).unwrap();
        fs::rename(new, &self.file).unwrap();
    }

    fn leasehold(&self, place: &Place, args: &[&str]) -> Command {
        let mut command = place.leasehold(args);
        command.env("LD_PRELOAD", &self.library).env("NAMES_OF_THE_TEST", &self.file);
        command
    }

    fn start(&self, place: &Place, args: &[&str]) -> Started {
        Started(self.leasehold(place, args).spawn().expect("the program starts"))
    }

    fn code(&self, place: &Place, args: &[&str]) -> (Option<i32>, String) {
        let output = self.leasehold(place, args).output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Closes the connections of all clients.
fn cut(server: &Server) {
    for kind in ["normal", "pubsub"] {
        let _ = server.query::<i64>(&["CLIENT", "KILL", "TYPE", kind]);
    }
}

/// Whether a client is connected to the second address.
fn is_used_at_the_second_address(server: &Server) -> bool {
    server.query::<String>(&["CLIENT", "LIST"]).is_ok_and(|list| list.contains("laddr=127.0.0.2:"))
}

/// A holder and a waiter stay what they are while the name of these servers leads to another address. `leave` ends the first address.
fn name_is_followed(url: &str, servers: &[&Server], leave: impl Fn(&Server)) {
    let names = Names::new();
    let place = Place::on(url);
    let gone = place.path("gone");
    let script = format!("echo held; until [ -e {} ]; do sleep 0.05; done", gone.display());
    let mut holder = names.start(&place, &["run", "--ttl", "5s", "a", "--", "sh", "-c", &script]);
    assert_eq!(holder.line(), "held");
    let mut waiter = names.start(&place, &["run", "a", "--", "echo", "granted"]);
    // It looks by the same name.
    until(|| {
        let shown = names.leasehold(&place, &["show", "a", "--json"]).output().expect("the program starts");
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).ok()?;
        (shown["waiters"].as_array()?.len() == 1).then_some(())
    });
    names.lead_to("127.0.0.2");
    for server in servers {
        leave(server);
        cut(server);
    }
    until(|| servers.iter().any(|server| is_used_at_the_second_address(server)).then_some(()));
    // It is renewed there.
    let time_left = || {
        let shown = names.leasehold(&place, &["show", "a", "--json"]).output().expect("the program starts");
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).ok()?;
        shown["holders"][0]["expires_in_ms"].as_u64()
    };
    let before = until(time_left);
    until(|| (time_left()? > before).then_some(()));
    fs::write(&gone, "").unwrap();
    assert_eq!(waiter.line(), "granted");
    assert_eq!((holder.end(), waiter.end()), (0, 0), "{}", holder.stderr());
}

/// The server listens at the second address only.
fn leave_first_address(server: &Server) {
    server.run(&["CONFIG", "SET", "bind", "127.0.0.2"]);
}

#[test]
fn name_of_a_server_that_leads_elsewhere_is_followed() {
    let server = Server::builder().setting("bind", "127.0.0.1 127.0.0.2").start();
    name_is_followed(&format!("redis://locks.test:{}", server.port()), &[&server], leave_first_address);
}

#[test]
fn name_of_a_cluster_s_node_that_leads_elsewhere_is_followed() {
    let node = Server::builder()
        .setting("bind", "127.0.0.1 127.0.0.2")
        .setting("cluster-announce-hostname", "locks.test")
        .setting("cluster-preferred-endpoint-type", "hostname");
    let cluster = Cluster::with_masters(&node, 1, false);
    let url = format!("redis-cluster://locks.test:{}", cluster.nodes[0].port());
    name_is_followed(&url, &[&cluster.nodes[0]], leave_first_address);
}

#[test]
fn name_of_sentinels_that_leads_elsewhere_is_followed() {
    let sentinel = Server::builder().setting("bind", "127.0.0.1 127.0.0.2");
    let sentinels = Sentinels::of(&Server::builder(), &sentinel);
    let url = sentinels.url(Sentinels::SERVICE).replace("127.0.0.1", "locks.test");
    let all: Vec<&Server> = sentinels.sentinels.iter().collect();
    // A sentinel listens where it did.
    name_is_followed(&url, &all, |_| ());
}

#[test]
fn each_address_of_a_name_is_tried() {
    let server = Server::on_port();
    let place = Place::on(&format!("redis://locks.test:{}", server.port()));
    let names = Names::new();
    // Nothing listens at the others.
    for addresses in ["127.0.0.3 127.0.0.1", "::1 127.0.0.1", "127.0.0.1 127.0.0.3"] {
        names.lead_to(addresses);
        let (code, said) = names.code(&place, &["run", "a", "--", "true"]);
        assert_eq!(code, Some(0), "{addresses}: {said}");
    }
    names.lead_to("127.0.0.3");
    let (code, said) = names.code(&place, &["run", "-n", "a", "--", "true"]);
    assert!(code != Some(0) && said.contains("refused"), "{said}");
}

#[test]
fn servers_with_addresses_of_ipv6_are_used() {
    let place = |url: String| Place::on(&url);
    let server = Server::builder().setting("bind", "127.0.0.1 ::1").start();
    let at = |scheme: &str, port: u16, rest: &str| format!("{scheme}://[::1]:{port}{rest}");
    let plain = place(at("redis", server.port(), "/3"));
    let announced = Server::builder().setting("bind", "127.0.0.1 ::1").setting("cluster-announce-ip", "::1");
    let cluster = Cluster::with_masters(&announced, 1, false);
    let of_cluster = place(at("redis-cluster", cluster.nodes[0].port(), ""));
    for place in [plain, of_cluster] {
        assert_eq!(place.code(&["run", "a", "--", "true"]), (0, String::new()));
        let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
        place.until_held("a");
        assert_eq!(place.code(&["run", "-n", "a", "--", "true"]).0, 1);
        holder.signal("TERM");
        holder.end();
    }
}
