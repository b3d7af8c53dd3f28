//! Responses after the outcome is certain, and callers that do not wait for it.

use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::{Server, retry_if_paused, until};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::nodes::{Nodes, holds, tokens_given};

/// Later than the other nodes, within the node timeout.
const LATE: Duration = Duration::from_millis(300);

#[tokio::test]
async fn late_node_joins_the_lease_is_renewed_and_released() {
    let nodes = Nodes::start(3);
    let (client, proxies) = nodes.client_through_proxies(2, "").await;
    until_connected(&client, &nodes.0[2]).await;
    proxies[0].delay_requests(LATE);
    let single = Client::connect(&nodes.0[2].url()).await.unwrap();
    retry_if_paused(Duration::from_secs(1), async || {
        let guard = client.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
        until(async || holds(&nodes.0[2], "a").await || !guard.is_held()).await;
        // Longer than the ttl.
        until(async || {
            single.mutex("a").inspect().await.is_ok_and(|view| {
                view.holders.is_empty() || view.holders[0].held_for > Duration::from_secs(4)
            })
        })
        .await;
        if !guard.is_held() || !holds(&nodes.0[2], "a").await {
            return Err("the lease is not renewed".to_owned());
        }
        guard.release().await.map_err(|error| error.to_string())?;
        until(async || nodes.holding("a").await == 0).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn late_grant_of_a_failed_attempt_is_released() {
    let nodes = Nodes::start(3);
    let (client, proxies) = nodes.client_through_proxies(2, "").await;
    until_connected(&client, &nodes.0[2]).await;
    let mut singles = Vec::new();
    for (name, server) in [("a", 0), ("a", 1), ("b", 0), ("b", 1)] {
        let single = Client::connect(&nodes.0[server].url()).await.unwrap();
        singles.push(single.mutex(name).lock().await.unwrap());
    }
    let is_left = async |name: &str| {
        // Does not expire during the test.
        let mutex = client.mutex(name).ttl(Duration::from_secs(600));
        let before = tokens_given(&nodes.0[2]);
        // On a busy machine the outcome may be certain before the node is asked.
        until(async || {
            assert!(mutex.try_lock().await.unwrap().is_none());
            tokens_given(&nodes.0[2]) > before
        })
        .await;
        until(async || !holds(&nodes.0[2], name).await).await;
    };
    proxies[0].delay_replies(LATE);
    is_left("a").await;
    proxies[0].delay_replies(Duration::ZERO);
    proxies[0].delay_requests(LATE);
    is_left("b").await;
}

#[test]
fn late_grant_is_released_after_the_caller_runtime_ended() {
    let nodes = Nodes::start(3);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (own, other) = (runtime(), runtime());
    let (client, proxies, singles) = own.block_on(async {
        let (client, proxies) = nodes.client_through_proxies(2, "").await;
        until_connected(&client, &nodes.0[2]).await;
        proxies[0].delay_replies(LATE);
        let one = Client::connect(&nodes.0[0].url()).await.unwrap();
        let other = Client::connect(&nodes.0[1].url()).await.unwrap();
        (client, proxies, [one, other])
    });
    let mut held = Vec::new();
    let mut is_granted_late = |name: &str| {
        let before = tokens_given(&nodes.0[2]);
        own.block_on(async {
            for single in &singles {
                held.push(single.mutex(name).lock().await.unwrap());
            }
            let mutex = client.mutex(name).ttl(Duration::from_secs(600));
            assert!(mutex.try_lock().await.unwrap().is_none());
        });
        // The caller's runtime does not run meanwhile. On a busy machine the outcome may be certain before the node is asked.
        let granted = until(async || tokens_given(&nodes.0[2]) > before);
        other.block_on(async { timeout(Duration::from_secs(2), granted).await.is_ok() })
    };
    let names: Vec<String> = (0..10).map(|number| format!("a{number}")).collect();
    let name = names.iter().find(|name| is_granted_late(name)).expect("a late grant");
    drop(own);
    other.block_on(async { until(async || !holds(&nodes.0[2], name).await).await });
    drop(proxies);
}

/// An attempt skips a node that is not connected yet.
async fn until_connected(client: &Client, node: &Server) {
    let before = tokens_given(node);
    until(async || {
        client.mutex("connected").lock().await.unwrap().release().await.unwrap();
        tokens_given(node) > before
    })
    .await;
}

#[tokio::test]
async fn dropped_futures_leave_nothing_at_any_node() {
    const NAMES: [&str; 2] = ["a", "b"];
    let nodes = Nodes::start(5);
    let (one, proxies) = nodes.client_through_proxies(3, "").await;
    let other = nodes.client().await;
    proxies[0].delay_requests(Duration::from_millis(7));
    proxies[1].delay_replies(Duration::from_millis(25));
    let mut tasks = JoinSet::new();
    for number in 0..120_u64 {
        let client = if number % 2 == 0 { one.clone() } else { other.clone() };
        tasks.spawn(async move {
            // Does not expire during the test.
            let name = NAMES[usize::try_from(number / 2 % 2).unwrap()];
            let mutex = client.mutex(name).ttl(Duration::from_secs(600));
            let limit = Duration::from_micros(number * 397 % 40_000);
            let _ = timeout(limit, async {
                let guard =
                    if number % 3 == 0 { mutex.try_lock().await } else { mutex.lock().await.map(Some) };
                if let Ok(Some(guard)) = guard {
                    let _ = guard.release().await;
                }
            })
            .await;
        });
        if number % 8 == 7 {
            while tasks.join_next().await.is_some() {}
        }
    }
    while tasks.join_next().await.is_some() {}
    for name in NAMES {
        until(async || nodes.holding(name).await + nodes.admitting(name) == 0).await;
        other.mutex(name).lock().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn node_that_is_always_late_gets_back_a_lease_that_it_has_lost() {
    let nodes = Nodes::start(3);
    let (client, proxies) = nodes.client_through_proxies(2, "").await;
    until_connected(&client, &nodes.0[2]).await;
    proxies[0].delay_requests(LATE);
    let guard = client.mutex("a").ttl(Duration::from_secs(9)).lock().await.unwrap();
    until(async || holds(&nodes.0[2], "a").await).await;
    nodes.0[2].run(&["DEL", "leasehold:4:{mutex:a}"]);
    until(async || holds(&nodes.0[2], "a").await).await;
    guard.release().await.unwrap();
    until(async || nodes.holding("a").await == 0).await;
}

/// Two of three nodes answer neither the attempt nor its release, until the client is being closed, or for longer.
#[tokio::test]
async fn close_waits_for_the_releases_of_a_failed_attempt() {
    for answers in [true, false] {
        retry_if_paused(Duration::from_millis(500), async || {
            let nodes = Nodes::start(3);
            let url = format!("redlock:{} ?node_timeout_ms=200", nodes.urls().join(" "));
            let client = Client::connect(&url).await.unwrap();
            nodes.0[..2].iter().for_each(|server| server.signal("STOP"));
            let failed = client.mutex("a").ttl(Duration::from_secs(600)).try_lock().await;
            let mut closing = std::pin::pin!(client.close());
            // The first poll closes the client.
            assert!(timeout(Duration::ZERO, closing.as_mut()).await.is_err(), "two nodes have not answered");
            if answers {
                nodes.0[..2].iter().for_each(|server| server.signal("CONT"));
            }
            let closed = closing.await;
            nodes.0[..2].iter().for_each(|server| server.signal("CONT"));
            assert!(failed.unwrap_err().is_unavailable());
            match closed {
                // One node may still have it: the others are a majority.
                Ok(()) if answers && nodes.holding("a").await <= 1 => Ok(()),
                Err(error) if !answers && error.is_unavailable() => Ok(()),
                other => Err(format!("the nodes answer: {answers}; {other:?}")),
            }
        })
        .await;
    }
}
