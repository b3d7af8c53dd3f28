//! Locks while their Redis server, or the network to it, fails.

mod connections;
mod deletes;
mod errors;
mod keys;
mod refusals;
mod responses;
mod runtimes;
mod servers;
mod shared_calls;
mod subscribers;

use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::{Server, until};

const SOON: Duration = Duration::from_secs(20);

async fn client_of(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

async fn until_waiting(client: &Client, count: usize) {
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == count)).await;
}

/// How often clients sent this command.
fn calls(server: &Server, command: &str) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

fn reset(server: &Server) {
    server.run(&["CONFIG", "RESETSTAT"]);
}

/// The clients' connections, without the test's own.
fn connections(server: &Server) -> Vec<String> {
    connections_of(server, &[])
}

/// As [`connections`], with the arguments of CLIENT LIST.
fn connections_of(server: &Server, which: &[&str]) -> Vec<String> {
    let list: String = server.query(&[&["CLIENT", "LIST"], which].concat()).unwrap();
    let field = |line: &str, name: &str| {
        line.split(' ').find_map(|part| part.strip_prefix(name)).unwrap_or_default().to_owned()
    };
    list.lines().filter(|line| !line.contains("cmd=client")).map(|line| field(line, "id=")).collect()
}
