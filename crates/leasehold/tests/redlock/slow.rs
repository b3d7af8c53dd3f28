//! A minority of the nodes hangs or is slow: neither the rate of a contended lock nor a single attempt may depend on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::{Proxy, retry_if_paused, until};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::nodes::{Nodes, hold_at};

/// For how long a rate is measured.
const WINDOW: Duration = Duration::from_secs(2);

/// Each way: ten times longer than a node may take that is asked for more than a vote.
const SLOW: Duration = Duration::from_millis(200);

static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Threads that never sleep, as many as the machine has cores.
struct BusyLoops(Arc<AtomicBool>);

impl BusyLoops {
    fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(is_over)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Clients that acquire one lock in turn, all the time.
struct Contention {
    count: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

impl Contention {
    fn start(clients: &[Client]) -> Self {
        let count = Arc::new(AtomicU64::new(0));
        let contend = |client: &Client| {
            let (mutex, count) = (client.mutex("a"), count.clone());
            tokio::spawn(async move {
                loop {
                    let Ok(guard) = mutex.lock().await else { continue };
                    count.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let _ = guard.release().await;
                }
            })
        };
        Self { tasks: clients.iter().map(contend).collect(), count }
    }

    /// How often the lock is acquired in the next [`WINDOW`].
    async fn rate(&self) -> u64 {
        let before = self.count.load(Ordering::Relaxed);
        tokio::time::sleep(WINDOW).await;
        self.count.load(Ordering::Relaxed) - before
    }
}

impl Drop for Contention {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// The node of the admission queue of the lock `a`, and another one.
async fn admission_node_and_another(nodes: &Nodes, clients: &[Client]) -> [usize; 2] {
    let guard = clients[0].mutex("a").lock().await.unwrap();
    let other = clients[1].clone();
    let waiter = tokio::spawn(async move { drop(other.mutex("a").lock().await) });
    let node = nodes.admission_node(waiter).await;
    guard.release().await.unwrap();
    [node, (node + 1) % nodes.0.len()]
}

/// The share of the rate that is left beside busy loops. The simulation, whose time is its own, asks for a half; before the mends that
/// this asserts a thirtieth was left.
const LEFT: u64 = 8;

/// The rate beside busy loops, from the second second after `fail` on, is at least an eighth of the rate before.
async fn assert_rate_is_kept(
    nodes: &Nodes,
    clients: &[Client],
    what: &str,
    fail: impl Fn() + Send + Sync,
    heal: impl Fn() + Send + Sync,
) {
    // The other test's busy loops would come on top.
    let _exclusive = ONE_AT_A_TIME.lock().await;
    let _busy = BusyLoops::start();
    retry_if_paused(Duration::from_millis(300), async || {
        let contention = Contention::start(clients);
        tokio::time::sleep(WINDOW / 2).await;
        let healthy = contention.rate().await;
        fail();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let rate = contention.rate().await;
        heal();
        drop(contention);
        // What the node grants late is released. Until then it and another node that fails would be a majority.
        until(async || nodes.holding("a").await + nodes.admitting("a") == 0).await;
        if healthy > 10 && LEFT * rate >= healthy {
            return Ok(());
        }
        Err(format!("{what}: {rate} locks in {WINDOW:?}, {healthy} while all nodes were healthy"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_lock_goes_on_while_a_node_hangs() {
    let nodes = Nodes::start(3);
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(nodes.client().await);
    }
    for node in admission_node_and_another(&nodes, &clients).await {
        let signal = |name| nodes.0[node].signal(name);
        let what = format!("node {node} hangs");
        assert_rate_is_kept(&nodes, &clients, &what, || signal("STOP"), || signal("CONT")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_lock_goes_on_while_a_node_is_slow() {
    let nodes = Nodes::start(3);
    let proxies: Vec<Proxy> = nodes.0.iter().map(Proxy::before).collect();
    let urls: Vec<String> = proxies.iter().map(Proxy::url).collect();
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(Client::connect(&crate::nodes::url(&urls, "")).await.unwrap());
    }
    for node in admission_node_and_another(&nodes, &clients).await {
        let delay = |by| {
            proxies[node].delay_requests(by);
            proxies[node].delay_replies(by);
        };
        let what = format!("node {node} is slow");
        assert_rate_is_kept(&nodes, &clients, &what, || delay(SLOW), || delay(Duration::ZERO)).await;
    }
}

/// As after a failover of this node alone, or by an operator's slip. It votes at once that it does not: what asks all nodes does not wait
/// until it is connected anew.
#[tokio::test]
async fn lease_is_detached_and_released_without_waiting_for_a_read_only_node() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    nodes.0[2].run(&["REPLICAOF", "127.0.0.1", "1"]);
    // Each wait for a connection took 200 ms.
    retry_if_paused(Duration::from_millis(20), async || {
        let mut spans = Vec::new();
        for _ in 0..20 {
            let began = Instant::now();
            let guard = client.mutex("a").detachable().try_lock().await.unwrap().unwrap();
            let lease = guard.detach().await.unwrap();
            assert!(client.release_leases([&lease]).await[0].as_ref().is_ok_and(|released| *released));
            spans.push(began.elapsed());
        }
        spans.sort_unstable();
        if spans[10] < Duration::from_millis(150) { Ok(()) } else { Err(format!("{spans:?}")) }
    })
    .await;
    nodes.0[2].run(&["REPLICAOF", "NO", "ONE"]);
    nodes.0[0].signal("STOP");
    // Its vote counts again.
    until(async || client.mutex("b").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
    nodes.0[0].signal("CONT");
}

/// One node grants it, one refuses it, and one is silent. Neither a grant nor `None` would be true.
#[tokio::test]
async fn attempt_that_a_silent_node_would_decide_is_unavailable_soon() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    let healthy = Instant::now();
    client.mutex("b").try_lock().await.unwrap().unwrap().release().await.unwrap();
    let healthy = healthy.elapsed();
    let _held = hold_at(&nodes.0[0], "a").await;
    nodes.0[2].signal("STOP");
    retry_if_paused(Duration::from_millis(100), async || {
        let began = Instant::now();
        let tried = client.mutex("a").try_lock().await;
        let took = began.elapsed();
        let error = tried.expect_err("the silent node would decide");
        let said = error.to_string();
        assert!(
            error.is_unavailable() && said.contains("1 of 3 nodes granted it and 1 refused it"),
            "{said}"
        );
        // The simulation checks the promised time itself. A busy machine is late with each of the timers.
        let limit = Duration::from_millis(60 + 200) + 4 * healthy;
        if took > limit {
            return Err(format!("it took {took:?}, not {limit:?}"));
        }
        Ok(())
    })
    .await;
    nodes.0[2].signal("CONT");
}

/// Its node hangs while a waiter is queued for admission, and sends nothing by itself.
#[tokio::test]
async fn waiter_leaves_the_admission_queue_of_a_node_that_hangs() {
    let nodes = Nodes::start(3);
    let clients = [nodes.client().await, nodes.client().await, nodes.client().await];
    let [node, _] = admission_node_and_another(&nodes, &clients).await;
    let holder = clients[0].mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
    let wait = |client: &Client| {
        let mutex = client.mutex("a");
        tokio::spawn(async move { mutex.lock().await.unwrap() })
    };
    // The first waiter is admitted, and the second one is queued behind it.
    let waiters = [wait(&clients[1]), wait(&clients[2])];
    until(async || clients[0].mutex("a").inspect().await.is_ok_and(|lock| lock.waiters.len() == 2)).await;
    nodes.0[node].signal("STOP");
    retry_if_paused(Duration::from_millis(500), async || {
        let began = Instant::now();
        let others = (0..3).filter(|other| *other != node);
        until(async || others.clone().any(|other| crate::nodes::has_queue(&nodes.0[other], "a"))).await;
        let took = began.elapsed();
        if took > Duration::from_secs(3) {
            return Err(format!("it left the queue after {took:?}"));
        }
        Ok(())
    })
    .await;
    holder.release().await.unwrap();
    let [first, second] = waiters;
    // Either may be the first one now.
    for waiter in [first, second] {
        let guard = waiter.await.unwrap();
        guard.release().await.unwrap();
    }
    nodes.0[node].signal("CONT");
}
