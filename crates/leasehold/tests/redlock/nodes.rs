//! Independent servers, and their state.

use std::collections::HashMap;
use std::time::Duration;

use leasehold::{Client, Guard, LockInfo};
use leasehold_testkit::{Proxy, Server, until};
use tokio::task::JoinHandle;

/// Generous, so that a pause of the machine fails no test. An attempt with a certain outcome does not wait for it.
const PATIENT: &str = "node_timeout_ms=5000";

/// Independent servers.
pub(crate) struct Nodes(pub(crate) Vec<Server>);

impl Nodes {
    pub(crate) fn start(count: usize) -> Self {
        Self((0..count).map(|_| Server::on_port()).collect())
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.0.iter().map(Server::url).collect()
    }

    pub(crate) fn url(&self) -> String {
        url(&self.urls(), "")
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with("").await
    }

    pub(crate) async fn client_with(&self, parameters: &str) -> Client {
        Client::connect(&url(&self.urls(), parameters)).await.unwrap()
    }

    /// A client that reaches the nodes from this one on through proxies.
    pub(crate) async fn client_through_proxies(&self, from: usize, parameters: &str) -> (Client, Vec<Proxy>) {
        let proxies: Vec<Proxy> = self.0[from..].iter().map(Proxy::before).collect();
        let mut urls = self.urls();
        urls.truncate(from);
        urls.extend(proxies.iter().map(Proxy::url));
        (Client::connect(&url(&urls, parameters)).await.unwrap(), proxies)
    }

    /// Number of servers at which the lock has a holder. All servers must run.
    pub(crate) async fn holding(&self, name: &str) -> usize {
        let mut count = 0;
        for server in &self.0 {
            count += usize::from(holds(server, name).await);
        }
        count
    }

    /// The holders of the lock, by server. All servers must run.
    pub(crate) async fn holders(&self, name: &str) -> Vec<String> {
        let mut holders = Vec::new();
        for server in &self.0 {
            holders.extend(look(server, name).await.holders.into_iter().map(|holder| holder.client));
        }
        holders
    }

    /// Number of places in the queue of the lock itself, at these servers together.
    pub(crate) async fn waiting(&self, name: &str, servers: &[usize]) -> usize {
        let mut count = 0;
        for server in servers {
            count += look(&self.0[*server], name).await.waiters.len();
        }
        count
    }

    /// Number of servers with an admission queue for this lock.
    pub(crate) fn admitting(&self, name: &str) -> usize {
        self.0.iter().filter(|server| has_queue(server, name)).count()
    }

    /// The node whose admission queue this waiter for "a" is in; ends the wait.
    pub(crate) async fn admission_node(&self, waiter: JoinHandle<()>) -> usize {
        let mut node = None;
        // On a busy machine it may move to another node.
        until(async || {
            node = self.0.iter().position(|server| has_queue(server, "a"));
            node.is_some() && self.admitting("a") == 1
        })
        .await;
        let node = node.expect("it was waited for");
        waiter.abort();
        until(async || self.admitting("a") == 0).await;
        node
    }

    pub(crate) fn stop(&mut self, which: impl IntoIterator<Item = usize>) {
        which.into_iter().for_each(|node| self.0[node].stop());
    }

    pub(crate) fn start_again(&mut self, which: impl IntoIterator<Item = usize>) {
        which.into_iter().for_each(|node| self.0[node].start());
    }
}

/// The address of a quorum of these nodes.
pub(crate) fn url(nodes: &[String], parameters: &str) -> String {
    format!("redlock:{} ?{PATIENT}&{parameters}", nodes.join(" "))
}

/// The lock at this server, as soon as it answers.
async fn look(server: &Server, name: &str) -> LockInfo {
    let mut seen = None;
    until(async || {
        if let Ok(client) = Client::connect(&server.url()).await {
            seen = client.mutex(name).inspect().await.ok();
        }
        seen.is_some()
    })
    .await;
    seen.expect("it was waited for")
}

/// Whether the lock has a holder at this server.
pub(crate) async fn holds(server: &Server, name: &str) -> bool {
    !look(server, name).await.holders.is_empty()
}

/// Number of tokens that this server has given. A released lock leaves no other trace.
pub(crate) fn tokens_given(server: &Server) -> u64 {
    const CLOCK: &str = "leasehold:4:clock";
    if server.query::<i64>(&["EXISTS", CLOCK]).unwrap() == 0 {
        return 0;
    }
    let clock: HashMap<String, redis::Value> = server.query(&["XINFO", "STREAM", CLOCK]).unwrap();
    redis::from_redis_value(clock["entries-added"].clone()).unwrap()
}

/// Whether the admission queue of the lock has a holder or waiter at this server.
pub(crate) fn has_queue(server: &Server, name: &str) -> bool {
    in_queue(server, name) > 0
}

/// How many clients the admission queue of the lock has at this server, with its holder.
pub(crate) fn in_queue(server: &Server, name: &str) -> usize {
    let key = format!("leasehold:4:{{queue:mutex:{name}}}");
    if server.query::<String>(&["TYPE", &key]).unwrap() == "string" {
        return 1;
    }
    let header = server.query::<Option<Vec<u8>>>(&["HGET", &key, "h"]);
    // Its form may have changed since.
    let header = match header {
        Err(error) if error.code() == Some("WRONGTYPE") => return 1,
        header => header.unwrap(),
    };
    // The header of `table.lua` has the number of leases at 24, and that of waiters at 96.
    let count = |header: &[u8], at: usize| f64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    let counts = header.map(|header| count(&header, 24) + count(&header, 96));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a test has few clients")]
    counts.map_or(0, |clients| clients as usize)
}

/// Acquires a lock at one server alone.
pub(crate) async fn hold_at(server: &Server, name: &str) -> Guard {
    let client = Client::connect(&server.url()).await.unwrap();
    client.mutex(name).ttl(Duration::from_secs(600)).lock().await.unwrap()
}
