//! Several servers that vote: what holds while any minority of them fails, and what is said when more do.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, Redlock};
use leasehold_servers::{Server, until};

/// Servers that know nothing of each other.
struct Nodes(Vec<Server>);

impl Nodes {
    fn start(count: usize) -> Self {
        Self((0..count).map(|_| Server::on_port()).collect())
    }

    fn url(&self) -> String {
        let hosts: Vec<String> = self.0.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redlock://{}", hosts.join(","))
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url()).await.unwrap()
    }

    /// How many of the servers that run have granted this lock to somebody.
    async fn holding(&self, name: &str) -> usize {
        let mut count = 0;
        for server in &self.0 {
            let client = Client::connect(&server.url()).await.unwrap();
            count += usize::from(!client.mutex(name).inspect().await.unwrap().holders.is_empty());
        }
        count
    }
}

#[tokio::test]
async fn a_lock_is_taken_at_all_nodes_and_given_back_at_all() {
    let nodes = Nodes::start(5);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let guard = one.mutex("a").lock().await.unwrap();
    until(async || nodes.holding("a").await == 5).await;
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    let token = guard.token();
    guard.release().await.unwrap();
    until(async || nodes.holding("a").await == 0).await;
    let guard = other.mutex("a").try_lock().await.unwrap().unwrap();
    assert!(guard.token() > token);
}

#[tokio::test]
async fn whoever_waits_gets_it_when_it_is_given_back() {
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let guard = one.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn(async move { other.mutex("a").lock().await.map(|guard| guard.token()) });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiter.is_finished());
    let token = guard.token();
    let began = Instant::now();
    guard.release().await.unwrap();
    assert!(waiter.await.unwrap().unwrap() > token);
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn kinds_that_do_not_compose_with_a_quorum_are_refused() {
    let nodes = Nodes::start(1);
    let client = nodes.client().await;
    let is_refused = |error: Error| error.is_unsupported() && error.to_string().contains("quorum");
    assert!(is_refused(client.semaphore("a", 2).acquire(1).await.unwrap_err()));
    assert!(is_refused(client.rw_lock("a").read().await.unwrap_err()));
    assert!(is_refused(client.latch("a", 1).wait().await.unwrap_err()));
    assert!(is_refused(client.reentrant("a", "me").lock().await.unwrap_err()));
    client.election("a").campaign().await.unwrap().release().await.unwrap();
    let redlock = Redlock::builder().node(nodes.0[0].url()).connect().await.unwrap();
    redlock.mutex("a").lock().await.unwrap().release().await.unwrap();
}
