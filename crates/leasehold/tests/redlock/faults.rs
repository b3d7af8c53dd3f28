//! Stopped, frozen or slow nodes: a minority, and a majority.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::{PauseDetector, retry_if_paused, unless_paused, until};

use crate::nodes::{Nodes, has_queue, hold_at, holds, tokens_given};

/// An attempt that waits for a failing node takes longer: a slow node answers after 10 s, and a silent one times out after 5 s.
const SOON: Duration = Duration::from_secs(4);

/// Asserts that locks are acquired and released without waiting for failing nodes.
async fn assert_not_delayed(client: &Client) {
    retry_if_paused(SOON / 4, async || {
        for number in 0..5 {
            let began = Instant::now();
            let tried = client.mutex(format!("a{number}")).try_lock().await;
            let guard = tried.map_err(|error| error.to_string())?.ok_or("the lock is free")?;
            let took = began.elapsed();
            guard.release().await.map_err(|error| error.to_string())?;
            if began.elapsed() > SOON {
                return Err(format!("acquired after {took:?}, released after {:?}", began.elapsed()));
            }
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn lease_survives_two_of_five_nodes_restarting_empty() {
    let mut nodes = Nodes::start(5);
    let client = nodes.client().await;
    assert_not_delayed(&client).await;
    nodes.stop([1, 3]);
    assert_not_delayed(&client).await;
    assert_not_delayed(&nodes.client().await).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
    let others = client.mutex("b").lock().await.unwrap();
    nodes.start_again([1, 3]);
    until(async || {
        let _ = guard.renew().await;
        nodes.holding("a").await == 5
    })
    .await;
    assert!(guard.is_held() && others.is_held());
    // A node that gets the lease later knows its token.
    for server in &nodes.0 {
        let single = Client::connect(&server.url()).await.unwrap();
        assert!(single.mutex("a").inspect().await.unwrap().last_token.unwrap() >= guard.token());
    }
    guard.release().await.unwrap();
    others.release().await.unwrap();
    until(async || nodes.holding("a").await + nodes.holding("b").await == 0).await;
}

#[tokio::test]
async fn two_frozen_nodes_delay_nothing_and_get_missed_releases() {
    let nodes = Nodes::start(5);
    let client = nodes.client().await;
    let before = client.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
    until(async || nodes.holding("a").await == 5).await;
    for node in [0, 4] {
        nodes.0[node].signal("STOP");
    }
    assert_not_delayed(&client).await;
    assert_not_delayed(&nodes.client().await).await;
    before.release().await.unwrap();
    let after = client.mutex("b").ttl(Duration::from_secs(600)).lock().await.unwrap();
    for node in [0, 4] {
        nodes.0[node].signal("CONT");
    }
    until(async || nodes.holding("a").await == 0).await;
    until(async || {
        let _ = after.renew().await;
        nodes.holding("b").await == 5
    })
    .await;
    after.release().await.unwrap();
    until(async || nodes.holding("b").await == 0).await;
}

#[tokio::test]
async fn two_slow_nodes_delay_nothing() {
    let nodes = Nodes::start(5);
    let (client, proxies) = nodes.client_through_proxies(3, "").await;
    assert_not_delayed(&client).await;
    for proxy in &proxies {
        proxy.delay_replies(Duration::from_secs(10));
    }
    assert_not_delayed(&client).await;
    for proxy in &proxies {
        proxy.delay_requests(Duration::from_secs(10));
        proxy.delay_replies(Duration::ZERO);
    }
    assert_not_delayed(&client).await;
    for proxy in &proxies {
        proxy.delay_requests(Duration::ZERO);
        proxy.cut();
    }
    let guard = client.mutex("a").lock().await.unwrap();
    until(async || {
        let _ = guard.renew().await;
        nodes.holding("a").await == 5
    })
    .await;
    guard.release().await.unwrap();
    for number in 0..5 {
        until(async || nodes.holding(&format!("a{number}")).await == 0).await;
    }
}

#[tokio::test]
async fn missing_quorum_reports_each_node_and_leaves_no_lease() {
    let mut nodes = Nodes::start(5);
    let client = nodes.client().await;
    let held = client.mutex("h").ttl(Duration::from_secs(600)).lock().await.unwrap();
    nodes.stop([0, 1]);
    nodes.0[2].signal("STOP");
    let began = Instant::now();
    let pauses = PauseDetector::watch();
    for attempt in 0..4 {
        let mutex = client.mutex("a").ttl(Duration::from_secs(600));
        let error = match attempt % 2 {
            0 => mutex.try_lock().await.unwrap_err(),
            _ => mutex.lock().await.unwrap_err(),
        };
        let message = error.to_string();
        assert!(error.is_unavailable() && message.contains("no quorum: 2 of 5 nodes answered"), "{message}");
        for server in &nodes.0 {
            assert!(
                message.contains(&server.port().to_string()),
                "{message} does not name {}",
                server.port()
            );
        }
    }
    // Each attempt ends within the response timeout of a node.
    assert!(began.elapsed() < Duration::from_secs(20) + 8 * pauses.longest(), "{:?}", began.elapsed());
    for node in [3, 4] {
        until(async || !holds(&nodes.0[node], "a").await).await;
    }
    // The loss is not certain, so the lease is not released.
    let error = held.renew().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("2 of 5 nodes renewed it"), "{error}");
    assert!(held.is_held() && holds(&nodes.0[3], "h").await);
    nodes.0[2].signal("CONT");
    until(async || held.renew().await.is_ok()).await;
    until(async || !holds(&nodes.0[2], "a").await).await;
    nodes.start_again([0, 1]);
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

#[tokio::test]
async fn try_lock_is_busy_only_if_no_quorum_remains() {
    for count in [3, 4] {
        let mut nodes = Nodes::start(count);
        let client = nodes.client().await;
        client.mutex("a").lock().await.unwrap().release().await.unwrap();
        until(async || nodes.holding("a").await == 0).await;
        nodes.stop([count - 1]);
        let mut guards = vec![hold_at(&nodes.0[0], "a").await];
        // One node refuses and one is stopped: with the stopped one, the others would be a quorum.
        let error = client.mutex("a").try_lock().await.unwrap_err();
        let message = error.to_string();
        assert!(error.is_unavailable() && message.contains("granted it and 1 refused it"), "{message}");
        assert!(client.election("e").try_campaign().await.unwrap().is_some());
        guards.push(hold_at(&nodes.0[1], "a").await);
        assert!(client.mutex("a").try_lock().await.unwrap().is_none());
        assert!(client.once_per("a", Duration::from_secs(600)).start().await.unwrap().is_none());
    }
}

#[tokio::test]
async fn lock_waits_while_the_vote_is_split() {
    let mut nodes = Nodes::start(3);
    let client = nodes.client().await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    until(async || nodes.holding("a").await == 0).await;
    nodes.stop([2]);
    let guard = hold_at(&nodes.0[0], "a").await;
    assert!(client.mutex("a").try_lock().await.unwrap_err().is_unavailable());
    let mutex = client.mutex("a");
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() });
    until(async || nodes.0[..2].iter().any(|server| has_queue(server, "a"))).await;
    guard.release().await.unwrap();
    waiter.await.unwrap();
}

#[tokio::test]
async fn waiter_that_times_out_while_a_majority_is_silent_gets_unavailable() {
    // Both wait long before it ends, on a busy machine too.
    const LIMIT: Duration = Duration::from_secs(12);
    let nodes = Nodes::start(3);
    let (holder, client) = (nodes.client().await, nodes.client_with("node_timeout_ms=500").await);
    let guard = holder.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
    until(async || nodes.holding("a").await == 3).await;
    let wait = || {
        let client = client.clone();
        tokio::spawn(async move { client.mutex("a").lock_timeout(LIMIT).await })
    };
    // One waits at all nodes then, and the other in the admission queue.
    let waiting = [wait(), wait()];
    let seen = async || holder.mutex("a").inspect().await.map_or(usize::MAX, |view| view.waiters.len());
    until(async || seen().await == 2).await;
    // The node with the admission queue keeps answering.
    let queue = nodes.0.iter().position(|server| has_queue(server, "a")).unwrap();
    for node in (0..3).filter(|node| *node != queue) {
        nodes.0[node].signal("STOP");
    }
    for waiter in waiting {
        let error = waiter.await.unwrap().expect_err("the lock may be free at the silent nodes");
        assert!(error.is_unavailable(), "{error}");
    }
    let once = client.once_per("p", Duration::from_secs(600));
    assert!(once.start().await.unwrap_err().is_unavailable());
    assert!(client.election("e").campaign_timeout(LIMIT / 4).await.unwrap_err().is_unavailable());
    for node in (0..3).filter(|node| *node != queue) {
        nodes.0[node].signal("CONT");
    }
    // All nodes answer again: the lock is held.
    until(async || match client.mutex("a").lock_timeout(Duration::from_millis(300)).await {
        Ok(guard) => {
            assert!(guard.is_none(), "two holders");
            true
        }
        Err(_) => false,
    })
    .await;
    guard.release().await.unwrap();
    until(async || nodes.holding("a").await + nodes.admitting("a") == 0).await;
}

/// Its first votes are split: one node is free, one is held, and one is silent.
#[tokio::test]
async fn attempt_that_is_over_after_a_split_vote_does_not_vote_again() {
    // Three tries, each of which waits for the silent node.
    const VOTE: Duration = Duration::from_secs(3);
    unless_paused(Duration::from_millis(500), async || {
        let nodes = Nodes::start(3);
        let client = nodes.client_with("node_timeout_ms=1000").await;
        let other = Client::connect(&nodes.0[1].url()).await.unwrap();
        let _held = other.mutex("a").lock().await.unwrap();
        nodes.0[2].signal("STOP");
        let began = Instant::now();
        let error = client.mutex("a").lock_timeout(Duration::from_millis(10)).await.unwrap_err();
        let took = began.elapsed();
        assert!(error.is_unavailable(), "{error}");
        assert!(took < VOTE * 3 / 2, "it took {took:?}");
    })
    .await;
}

#[tokio::test]
async fn lease_without_a_quorum_is_lost_at_its_deadline() {
    let mut nodes = Nodes::start(3);
    let client = nodes.client().await;
    let guard = client.mutex("a").ttl(Duration::from_secs(1)).lock().await.unwrap();
    nodes.stop([0, 1]);
    let began = Instant::now();
    assert_eq!(guard.lost().await, leasehold::Loss::Expired);
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(guard.release().await.is_err());
}

#[tokio::test]
async fn admission_is_released_at_the_node_that_granted_it() {
    let mut nodes = Nodes::start(3);
    let (holder, client) = (nodes.client().await, nodes.client().await);
    let guard = holder.mutex("a").lock().await.unwrap();
    // With a bare quorum, the restarted node would end the lease.
    until(async || nodes.holding("a").await == 3).await;
    let wait = || {
        let client = client.clone();
        tokio::spawn(async move { client.mutex("a").lock().await.unwrap().release().await.unwrap() })
    };
    let first = nodes.admission_node(wait()).await;
    nodes.stop([first]);
    until(async || client.mutex("b").try_lock().await.is_ok_and(|taken| taken.is_some())).await;
    let waiter = wait();
    until(async || (0..3).any(|node| node != first && has_queue(&nodes.0[node], "a"))).await;
    nodes.start_again([first]);
    until(async || {
        let _ = client.mutex("c").try_lock().await;
        tokens_given(&nodes.0[first]) > 0
    })
    .await;
    guard.release().await.unwrap();
    waiter.await.unwrap();
    until(async || nodes.admitting("a") == 0).await;
}

/// Waiters that their admission node leaves without an answer ask the next one, also after an outage of all nodes: each of them is
/// admitted, or joins the queue.
#[tokio::test]
async fn waiter_without_admission_asks_for_it_again() {
    let nodes = Nodes::start(3);
    let (holder, client) = (nodes.client().await, nodes.client().await);
    let guard = holder.mutex("a").ttl(Duration::from_secs(120)).lock().await.unwrap();
    until(async || nodes.holding("a").await == 3).await;
    let wait = || {
        let client = client.clone();
        tokio::spawn(async move {
            client.mutex("a").global_fifo().lock().await.unwrap().release().await.unwrap();
        })
    };
    let first = nodes.admission_node(wait()).await;
    let others: Vec<_> = (0..3).filter(|node| *node != first).collect();
    nodes.0[first].signal("STOP");
    let waiters = [wait(), wait()];
    until(async || nodes.waiting("a", &others).await >= 2).await;
    // They ask for admission during an outage, which a waiter survives. It is long enough for an attempt to fail.
    others.iter().for_each(|node| nodes.0[*node].signal("STOP"));
    assert!(client.mutex("b").try_lock().await.unwrap_err().is_unavailable());
    others.iter().for_each(|node| nodes.0[*node].signal("CONT"));
    // Only admitted waiters stay at the nodes. That is one, or one for each of the other nodes if they asked different ones.
    let mut since = None;
    until(async || {
        let admitted = others.iter().filter(|node| has_queue(&nodes.0[**node], "a")).count();
        if admitted == 0 || nodes.waiting("a", &others).await != 2 * admitted {
            since = None;
            return false;
        }
        since.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(1)
    })
    .await;
    nodes.0[first].signal("CONT");
    guard.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    until(async || nodes.holding("a").await + nodes.admitting("a") == 0).await;
}

#[tokio::test]
async fn tokens_rise_while_nodes_restart_empty_one_by_one() {
    let mut nodes = Nodes::start(3);
    let client = nodes.client().await;
    let mut last = None;
    for round in 0..9 {
        let mut taken = None;
        until(async || {
            taken = client.mutex("a").try_lock().await.ok().flatten();
            taken.is_some()
        })
        .await;
        let guard = taken.unwrap();
        assert!(Some(guard.token()) > last, "{} is not above {last:?}", guard.token());
        last = Some(guard.token());
        drop(guard);
        nodes.stop([round % 3]);
        nodes.start_again([round % 3]);
    }
}

/// The quorum's leases are released where they are, whatever else is on the other nodes.
#[tokio::test]
async fn forced_release_succeeds_though_two_of_three_nodes_have_foreign_values() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    let _guard = client.mutex("a").lock().await.unwrap();
    until(async || nodes.holding("a").await == 3).await;
    for server in &nodes.0[..2] {
        server.run(&["SET", "leasehold:4:{mutex:a}", "mine"]);
    }
    client.mutex("a").force_release().await.unwrap();
    assert!(!holds(&nodes.0[2], "a").await);
}
