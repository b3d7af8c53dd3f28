//! Connections for messages that a stranger has the server close, or that hang. Nothing else notices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard};
use leasehold_testkit::{Proxy, Server, retry_if_paused, until};
use tokio::time::timeout;

use super::{SOON, calls, client_of, connections, connections_of, until_waiting};

/// Longer than a test, so that no waiter looks again because the present lease would have expired.
const LONG: Duration = Duration::from_secs(600);

/// Sooner than a waiter looks again without a push.
const PUSHED: Duration = Duration::from_secs(15);

const PROTOCOLS: [&str; 2] = ["3", "2"];

async fn client_through(proxy: &Proxy, protocol: &str) -> Client {
    Client::connect(&format!("{}?protocol={protocol}", proxy.url())).await.unwrap()
}

fn wait(client: &Client) -> tokio::task::JoinHandle<Guard> {
    let mutex = client.mutex("a").ttl(LONG);
    tokio::spawn(async move { mutex.lock().await.unwrap() })
}

async fn granted(waiting: tokio::task::JoinHandle<Guard>, limit: Duration) {
    let guard = timeout(limit, waiting).await.expect("it is granted").unwrap();
    guard.release_timeout(SOON).await.unwrap();
}

/// Publishes messages to every inbox that exceed the output buffer of a subscriber.
struct Stranger {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<i64>,
}

impl Stranger {
    fn start(server: &Server) -> Self {
        server.run(&["CONFIG", "SET", "client-output-buffer-limit", "pubsub 64kb 0 0"]);
        let is_over = Arc::new(AtomicBool::new(false));
        let (ends, mut admin) = (is_over.clone(), server.admin());
        let thread = thread::spawn(move || {
            let (message, mut deliveries) = (vec![b'x'; 256 << 10], 0);
            while !ends.load(Ordering::SeqCst) {
                let mut question = redis::cmd("PUBSUB");
                let inboxes: Vec<String> =
                    question.arg("CHANNELS").arg("leasehold:*").query(&mut admin).unwrap();
                for inbox in inboxes {
                    let mut publish = redis::cmd("PUBLISH");
                    deliveries += publish.arg(inbox).arg(&message).query::<i64>(&mut admin).unwrap();
                }
                thread::sleep(Duration::from_millis(1));
            }
            deliveries
        });
        Self { is_over, thread }
    }

    /// Returns how often it was heard.
    fn end(self) -> i64 {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// The server closes the connections for messages as soon as they listen: its limit is for connections that subscribe.
#[tokio::test]
async fn large_messages_of_a_stranger_end_no_lease_and_no_wait() {
    // With a delay, the connection is closed before the client has asked the server about it.
    for (protocol, delay) in [("3", Duration::ZERO), ("2", Duration::ZERO), ("2", Duration::from_millis(100))]
    {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        proxy.delay_replies(delay);
        let (one, other) = (client_through(&proxy, protocol).await, client_through(&proxy, protocol).await);
        let open = if protocol == "3" { 6 } else { 4 };
        until(async || connections(&server).len() == open).await;
        let commands = connections(&server).remove(0);
        let stranger = Stranger::start(&server);
        let guard = one.mutex("a").ttl(Duration::from_secs(2)).lock().await.unwrap();
        let waiting = wait(&other);
        until_waiting(&one, 1).await;
        // Several renewals are due meanwhile.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(5) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(guard.is_held(), "{:?}", guard.lost().await);
            other.mutex("free").lock().await.unwrap().release().await.unwrap();
            let subscribers = connections_of(&server, &["TYPE", "pubsub"]);
            assert!(!subscribers.contains(&commands), "the connection for commands is never at risk");
        }
        guard.release_timeout(SOON).await.unwrap();
        // It asks with each new connection.
        granted(waiting, PUSHED).await;
        let deliveries = stranger.end();
        assert!(deliveries >= 8, "the stranger was heard {deliveries} times");
        // Afterwards pushes arrive again.
        until(async || connections(&server).len() == open).await;
        let guard = one.mutex("a").ttl(LONG).lock().await.unwrap();
        let waiting = wait(&other);
        until_waiting(&one, 1).await;
        guard.release_timeout(SOON).await.unwrap();
        granted(waiting, PUSHED).await;
    }
}

/// A user with CLIENT TRACKING can redirect invalidations to any RESP3 connection of the server.
#[tokio::test]
async fn invalidations_of_a_stranger_are_evaded_and_have_no_client_ask() {
    let server = Server::on_port();
    let (one, other) = (client_of(&server).await, client_of(&server).await);
    until(async || connections(&server).len() == 6).await;
    let guard = one.mutex("a").ttl(LONG).lock().await.unwrap();
    let waiting = wait(&other);
    until_waiting(&one, 1).await;
    let mut strangers: Vec<_> = connections(&server).iter().map(|id| (server.admin(), id.clone())).collect();
    for (stranger, id) in &mut strangers {
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON").arg("REDIRECT").arg(&*id).arg("BCAST").exec(stranger).unwrap();
    }
    let before = calls(&server, "evalsha");
    let write = || {
        for number in 0..100 {
            server.run(&["SET", &format!("other:{number}"), "x"]);
        }
    };
    write();
    // The connections for commands can't be reached any more: a flood would delay renewals.
    until(async || {
        let list: String = server.query(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap();
        connections(&server).len() == 4 && !list.contains("resp=3")
    })
    .await;
    write();
    let asked = calls(&server, "evalsha") - before;
    assert!(asked < 20, "{asked} scripts for 200 keys of a stranger");
    guard.release_timeout(SOON).await.unwrap();
    granted(waiting, PUSHED).await;
}

/// The server sees a client that listens, and grants to it, but nothing arrives there.
#[tokio::test]
async fn waiter_whose_connection_for_messages_hangs_gets_its_turn() {
    for protocol in PROTOCOLS {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let (deaf, one, other) =
            (client_through(&proxy, protocol).await, client_of(&server).await, client_of(&server).await);
        let guard = one.mutex("a").ttl(LONG).lock().await.unwrap();
        let waiting = wait(&deaf);
        until_waiting(&one, 1).await;
        proxy.hang_subscribers(true);
        // Others hand the lock to each other.
        let is_over = Arc::new(AtomicBool::new(false));
        let rivals = [one, other].map(|client| {
            let is_over = is_over.clone();
            tokio::spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    let guard = client.mutex("a").lock().await.unwrap();
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    guard.release_timeout(SOON).await.unwrap();
                }
            })
        });
        guard.release_timeout(SOON).await.unwrap();
        // It asks within a minute at the latest anyway, but then its turn is over.
        granted(waiting, Duration::from_secs(40)).await;
        is_over.store(true, Ordering::SeqCst);
        for rival in rivals {
            rival.await.unwrap();
        }
    }
}

#[tokio::test]
async fn lease_outlasts_connections_for_messages_that_hang_while_they_are_opened() {
    for protocol in PROTOCOLS {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let client = client_through(&proxy, protocol).await;
        retry_if_paused(Duration::from_millis(300), async || {
            proxy.hang_subscribers(false);
            let guard = client.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
            proxy.hang_subscribers(true);
            proxy.cut();
            tokio::time::sleep(Duration::from_secs(5)).await;
            // A new client needs no messages, either.
            let began = Instant::now();
            let other = client_through(&proxy, protocol).await;
            let took = began.elapsed();
            let busy = other.mutex("a").try_lock().await;
            if !busy.as_ref().is_ok_and(Option::is_none) || took > Duration::from_secs(1) {
                return Err(format!("{busy:?} after {took:?}"));
            }
            guard.release_timeout(SOON).await.map_err(|error| error.to_string())
        })
        .await;
    }
}
