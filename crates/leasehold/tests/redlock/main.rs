//! A quorum of servers: what holds while a minority fails, and the errors when more fail.

mod detached;
mod faults;
mod late;
mod nodes;
mod restarts;
mod slow;
mod ways;

use std::time::{Duration, Instant};

use leasehold::{Client, Error, Loss, MutexSet, Redlock, blocking};
use leasehold_testkit::{retry_if_paused, unless_paused, until, until_some, wait_until};
use nodes::{Nodes, holds};
use tokio::time::timeout;

#[tokio::test]
async fn lock_is_acquired_and_released_at_all_nodes() {
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
async fn released_lock_is_granted_to_the_waiter() {
    unless_paused(Duration::from_secs(1), async || {
        let nodes = Nodes::start(3);
        let (one, other) = (nodes.client().await, nodes.client().await);
        let guard = one.mutex("a").lock().await.unwrap();
        let waiter = tokio::spawn(async move { other.mutex("a").lock().await.map(|guard| guard.token()) });
        until(async || one.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        let token = guard.token();
        guard.release().await.unwrap();
        // Without a push the waiter re-polls every five seconds.
        let next = timeout(Duration::from_secs(4), waiter).await.expect("the waiter is granted");
        assert!(next.unwrap().unwrap() > token);
    })
    .await;
}

#[tokio::test]
async fn waiter_is_granted_when_a_dead_holders_lease_expires() {
    const TTL: Duration = Duration::from_secs(1);
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    retry_if_paused(TTL / 2, async || {
        // Like a dead client, it neither renews nor releases.
        let guard = one.mutex("a").ttl(TTL).auto_renew(false).lock().await.unwrap();
        let began = Instant::now();
        let next = other.mutex("a").lock().await.unwrap();
        let took = began.elapsed();
        next.release().await.unwrap();
        drop(guard);
        until(async || nodes.holding("a").await == 0).await;
        // Its regular re-poll is due after five seconds.
        if took < 4 * TTL { Ok(()) } else { Err(format!("granted after {took:?}")) }
    })
    .await;
}

#[tokio::test]
async fn attempt_that_may_not_wait_is_refused_at_once() {
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let mutex = other.mutex("a").max_waiters(0);
    mutex.lock().await.unwrap().release().await.unwrap();
    let _guard = one.mutex("a").lock().await.unwrap();
    for _ in 0..2 {
        let error =
            timeout(Duration::from_secs(20), mutex.lock()).await.expect("it does not wait").unwrap_err();
        assert!(error.is_queue_full(), "{error}");
    }
}

#[tokio::test]
async fn full_queue_is_reported_as_that_of_the_lock() {
    let nodes = Nodes::start(3);
    let (one, other, third) = (nodes.client().await, nodes.client().await, nodes.client().await);
    for name in ["a".to_owned(), "n".repeat(512)] {
        let guard = one.mutex(&name).lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = other.mutex(&name).max_waiters(1);
            async move { mutex.lock().await }
        });
        until(async || one.mutex(&name).inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        let attempt = third.mutex(&name).max_waiters(1);
        let ended = timeout(Duration::from_secs(20), attempt.lock()).await.expect("it does not wait");
        let error = ended.unwrap_err();
        let message = error.to_string();
        assert!(error.is_queue_full() && message.contains("(1 waiters)"), "{message}");
        assert!(message.contains(&format!("mutex \"{name}\"")), "{message}");
        waiter.abort();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn value_of_another_program_at_a_majority_is_shown() {
    const KEY: &str = "leasehold:4:{mutex:a}";
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    for server in &nodes.0[..2] {
        server.run(&["SET", KEY, "mine", "PX", "600000"]);
    }
    let mutex = client.mutex("a");
    // A node that answers late is not counted.
    let left = until_some(async || mutex.inspect().await.ok()?.foreign?.expires_in).await;
    assert!(left <= Duration::from_secs(600) && !left.is_zero(), "{left:?}");
    let listed = async || client.list().await.unwrap_or_default();
    until(async || listed().await.iter().any(|info| info.name == "a" && info.foreign.is_some())).await;
    let taken = until_some(async || mutex.try_lock().await.ok()).await;
    assert!(taken.is_none());
    until(async || mutex.force_release().await.is_err_and(|error| error.is_invalid())).await;
    nodes.0[0].run(&["DEL", KEY]);
    let info = until_some(async || mutex.inspect().await.ok()).await;
    assert!(info.foreign.is_none() && info.holders.is_empty(), "{info:?}");
    mutex.lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn queued_waiter_is_not_overtaken_by_new_attempts() {
    let nodes = Nodes::start(3);
    let (one, other, newcomer) = (nodes.client().await, nodes.client().await, nodes.client().await);
    // A late release at one node may cost the waiter its position.
    retry_if_paused(Duration::from_millis(20), async || {
        let guard = one.mutex("a").lock().await.unwrap();
        let mutex = other.mutex("a");
        let waiter = tokio::spawn(async move {
            let guard = mutex.lock().await.unwrap();
            let token = guard.token();
            guard.release().await.unwrap();
            token
        });
        for server in &nodes.0 {
            let single = Client::connect(&server.url()).await.unwrap();
            until(async || single.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        }
        let trying = async {
            loop {
                if let Some(guard) = newcomer.mutex("a").try_lock().await.unwrap() {
                    let token = guard.token();
                    guard.release().await.unwrap();
                    return token;
                }
            }
        };
        let (released, first) = tokio::join!(guard.release(), trying);
        released.unwrap();
        let second = waiter.await.unwrap();
        until(async || nodes.holding("a").await + nodes.admitting("a") == 0).await;
        if second < first { Ok(()) } else { Err(format!("{first} was granted before {second}")) }
    })
    .await;
}

#[tokio::test]
async fn unsupported_kinds_are_refused() {
    let nodes = Nodes::start(2);
    let client = nodes.client().await;
    let is_refused = |error: Error| error.is_unsupported() && error.to_string().contains("quorum");
    assert!(is_refused(client.semaphore("a", 2).acquire(1).await.unwrap_err()));
    assert!(is_refused(client.rw_lock("a").read().await.unwrap_err()));
    assert!(is_refused(client.latch("a", 1).wait().await.unwrap_err()));
    assert!(is_refused(client.reentrant_mutex("a", "me").lock().await.unwrap_err()));
    client.election("a").campaign().await.unwrap().release().await.unwrap();
    let redlock = Redlock::builder().node(nodes.0[0].url()).node(nodes.0[1].url()).connect().await.unwrap();
    redlock.mutex("a").lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn node_order_does_not_matter_for_exclusion_and_queueing() {
    let nodes = Nodes::start(3);
    let mut reversed: Vec<String> = nodes.urls();
    reversed.reverse();
    let one = nodes.client().await;
    let other = Client::connect(&format!("redlock:{}", reversed.join(" "))).await.unwrap();
    let mut with_one_queue = 0;
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        let guard = one.mutex(name).lock().await.unwrap();
        assert!(other.mutex(name).try_lock().await.unwrap().is_none());
        let waiting = [one.clone(), other.clone()].map(|client| {
            tokio::spawn(async move { client.mutex(name).lock().await.unwrap().release().await })
        });
        let mut queues = [0; 3];
        until(async || {
            queues = std::array::from_fn(|node| nodes::in_queue(&nodes.0[node], name));
            queues.iter().sum::<usize>() == 2
        })
        .await;
        with_one_queue += usize::from(queues.contains(&2));
        guard.release().await.unwrap();
        for waiter in waiting {
            waiter.await.unwrap().unwrap();
        }
    }
    // A client passes over a node that was slow, and the other one may not have seen that.
    assert!(with_one_queue > 0, "each client had a queue of its own for each name");
}

#[tokio::test]
async fn waiters_are_admitted_with_a_short_max_ttl() {
    unless_paused(Duration::from_millis(500), async || {
        let nodes = Nodes::start(3);
        let client = nodes.client_with("max_ttl_ms=2000").await;
        let mutex = client.mutex("a").ttl(Duration::from_secs(2));
        let guard = mutex.lock().await.unwrap();
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() });
        until(async || nodes.admitting("a") == 1).await;
        guard.release().await.unwrap();
        waiting.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn nested_locks_sets_elections_and_once_per_work() {
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let tasks = [one.clone(), other.clone()].map(|client| {
        tokio::spawn(async move {
            for _ in 0..5 {
                let outer = client.mutex("a").lock().await.unwrap();
                // The name of an admission queue, which is not reserved for it.
                let inner = client.mutex("mutex:a").lock().await.unwrap();
                let set = MutexSet::new([client.mutex("c"), client.mutex("b")]).lock().await.unwrap();
                set.release().await.unwrap();
                inner.release().await.unwrap();
                outer.release().await.unwrap();
            }
        })
    });
    for task in tasks {
        task.await.unwrap();
    }
    let leader = one.election("a").campaign().await.unwrap();
    assert!(other.election("a").try_campaign().await.unwrap().is_none());
    // A node that granted it after the quorum may have given it a higher one.
    assert_eq!(other.election("a").leader().await.unwrap().unwrap().token, leader.token());
    let period = Duration::from_secs(600);
    one.once_per("p", period).start().await.unwrap().unwrap().release().await.unwrap();
    assert!(other.once_per("p", period).start().await.unwrap().is_none());
}

#[test]
fn redlock_works_without_a_caller_runtime_and_after_one_ended() {
    let nodes = Nodes::start(3);
    let client = blocking::Client::connect(&nodes.url()).unwrap();
    client.mutex("a").lock().unwrap().release().unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let own = runtime();
    let (client, guard) = own.block_on(async {
        let client = nodes.client().await;
        let guard = client.mutex("b").ttl(Duration::from_secs(12)).lock().await.unwrap();
        (client, guard)
    });
    drop(own);
    // The client's own thread renews it.
    let mut before = guard.remaining();
    wait_until("the lease is renewed", || {
        let now = guard.remaining();
        now > std::mem::replace(&mut before, now)
    });
    runtime().block_on(async {
        guard.release().await.unwrap();
        client.mutex("b").lock().await.unwrap().release().await.unwrap();
        until(async || nodes.holding("b").await == 0).await;
    });
}

#[tokio::test]
async fn closing_cancels_waiters_and_leaves_nothing() {
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let guard = one.mutex("a").lock().await.unwrap();
    let held = other.mutex("b").lock().await.unwrap();
    let waiter = {
        let other = other.clone();
        tokio::spawn(async move { other.mutex("a").lock().await.map(drop) })
    };
    until(async || nodes.admitting("a") == 1).await;
    other.close().await.unwrap();
    assert!(waiter.await.unwrap().is_err());
    assert_eq!(held.lost().await, Loss::Closed);
    guard.release().await.unwrap();
    until(async || nodes.holding("a").await + nodes.holding("b").await + nodes.admitting("a") == 0).await;
}

#[tokio::test]
async fn force_released_lease_is_lost_and_released_at_all_nodes() {
    let nodes = Nodes::start(3);
    let (one, other) = (nodes.client().await, nodes.client().await);
    let guard = one.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
    until(async || nodes.holding("a").await == 3).await;
    nodes.0[2].signal("STOP");
    assert_eq!(other.mutex("a").force_release().await.unwrap().len(), 1);
    assert_eq!(guard.lost().await, Loss::Gone);
    assert!(other.mutex("a").inspect().await.unwrap().holders.is_empty(), "the lease has no quorum");
    nodes.0[2].signal("CONT");
    assert!(holds(&nodes.0[2], "a").await);
    drop(guard);
    until(async || !holds(&nodes.0[2], "a").await).await;
    let guard = one.mutex("a").lock().await.unwrap();
    assert_eq!(other.mutex("a").force_release().await.unwrap().len(), 1);
    assert_eq!(guard.lost().await, Loss::Gone);
}
