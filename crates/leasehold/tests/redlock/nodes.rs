//! Servers that know nothing of each other, and what each of them has.

use leasehold::Client;
use leasehold_testkit::{Proxy, Server};

/// Nobody is to fail because the machine stood still, and nobody waits for this long where the outcome is certain.
const PATIENT: &str = "node_timeout_ms=5000";

/// Servers that know nothing of each other.
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

    /// A client that reaches the nodes from this one on by way of proxies.
    pub(crate) async fn client_through_proxies(&self, from: usize, parameters: &str) -> (Client, Vec<Proxy>) {
        let proxies: Vec<Proxy> = self.0[from..].iter().map(Proxy::before).collect();
        let mut urls = self.urls();
        urls.truncate(from);
        urls.extend(proxies.iter().map(Proxy::url));
        (Client::connect(&url(&urls, parameters)).await.unwrap(), proxies)
    }

    /// How many of the servers have granted this lock to somebody. All of them run.
    pub(crate) async fn holding(&self, name: &str) -> usize {
        let mut count = 0;
        for server in &self.0 {
            count += usize::from(holds(server, name).await);
        }
        count
    }

    /// Who has been granted this lock, by server. All of them run.
    pub(crate) async fn holders(&self, name: &str) -> Vec<String> {
        let mut holders = Vec::new();
        for server in &self.0 {
            let client = Client::connect(&server.url()).await.unwrap();
            let view = client.mutex(name).inspect().await.unwrap();
            holders.extend(view.holders.into_iter().map(|holder| holder.client));
        }
        holders
    }

    /// How many servers have a queue for a turn to take this lock.
    pub(crate) fn in_turn(&self, name: &str) -> usize {
        self.0.iter().filter(|server| has_queue(server, name)).count()
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

/// Whether this server has granted the lock to somebody.
pub(crate) async fn holds(server: &Server, name: &str) -> bool {
    let client = Client::connect(&server.url()).await.unwrap();
    !client.mutex(name).inspect().await.unwrap().holders.is_empty()
}

/// Whether this server has ever granted the lock to anybody, as far as it remembers.
pub(crate) async fn has_granted(server: &Server, name: &str) -> bool {
    let client = Client::connect(&server.url()).await.unwrap();
    client.mutex(name).inspect().await.unwrap().last_token.is_some()
}

/// Whether somebody has the turn to take this lock, or waits for it, at this server.
pub(crate) fn has_queue(server: &Server, name: &str) -> bool {
    let key = format!("leasehold:2:{{queue:mutex:{name}}}:state");
    let state: Option<Vec<u8>> = server.query(&["GET", &key]).unwrap();
    // As `acquire_fast.lua` writes it: nobody's, one holder's, or with how many hold and wait, behind five other numbers.
    state.is_some_and(|state| match state[0] {
        0 => false,
        1 => true,
        _ => state[41..57].iter().any(|byte| *byte != 0),
    })
}
