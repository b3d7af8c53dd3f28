//! Leases that outlive their client, over a quorum.

use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::{Proxy, until};

use crate::nodes::{Nodes, url};

#[tokio::test]
async fn attach_trusts_only_a_lease_that_a_quorum_confirms() {
    let nodes = Nodes::start(3);
    let owner = nodes.client().await;
    let id = owner.mutex("a").ttl(Duration::from_secs(300)).lock().await.unwrap().detach().await.unwrap();
    until(async || nodes.holding("a").await == 3).await;
    // The release does not reach the last node, which keeps the lease.
    let (remote, proxies) = nodes.client_through_proxies(2, "").await;
    proxies[0].refuse(true);
    proxies[0].cut();
    remote.attach(&id).await.unwrap().release().await.unwrap();
    let _ = remote.close_timeout(Duration::from_millis(100)).await;
    let other = nodes.client().await;
    let guard =
        other.mutex("a").lock_timeout(Duration::from_secs(30)).await.unwrap().expect("two nodes are free");
    // A client that does not reach the first node sees the old lease at one node, and the other one at another node.
    let proxy = Proxy::before(&nodes.0[0]);
    let mut urls = nodes.urls();
    urls[0] = proxy.url();
    let stale = Client::connect(&url(&urls, "")).await.unwrap();
    proxy.refuse(true);
    proxy.cut();
    let error = stale.attach(&id).await.unwrap_err();
    assert!(error.is_lost() || error.is_unavailable(), "{error}");
    assert!(stale.renew_lease(&id).await.is_err());
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn lease_that_is_longer_than_the_longest_of_the_quorum_is_not_attached() {
    let nodes = Nodes::start(3);
    let before = nodes.client().await;
    let id = before.mutex("a").ttl(Duration::from_secs(300)).lock().await.unwrap().detach().await.unwrap();
    let limited = nodes.client_with("max_ttl_ms=30000").await;
    assert!(limited.attach(&id).await.unwrap_err().is_invalid());
    assert!(limited.renew_lease(&id).await.unwrap_err().is_invalid());
    before.attach(&id).await.unwrap().release().await.unwrap();
}
