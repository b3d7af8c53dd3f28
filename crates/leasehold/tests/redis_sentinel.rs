//! A master that is replaced while locks are held and waited for.

use std::time::Duration;

use leasehold::{Client, Kind};
use leasehold_servers::{Sentinels, until};
use tokio::time::timeout;

/// What a failover may take, until the clients have followed it.
const SOON: Duration = Duration::from_secs(30);

/// Waits until the replicas have what the master has.
async fn until_followed(sentinels: &Sentinels) {
    until(async || sentinels.master().query::<i64>(&["WAIT", "2", "100"]).is_ok_and(|count| count == 2))
        .await;
}

#[tokio::test]
async fn whoever_holds_and_whoever_waits_follow_a_planned_failover() {
    let sentinels = Sentinels::start();
    let url = sentinels.url(Sentinels::SERVICE);
    let (one, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
    let guard = one.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || one.inspect(Kind::Mutex, "a").await.unwrap().waiters.len() == 1).await;
    until_followed(&sentinels).await;
    let old = sentinels.master_number();
    let new = sentinels.fail_over();
    // Much sooner than the old master learns that it is none any more.
    let new = &sentinels.servers[new];
    let heard = |server: &leasehold_servers::Server| {
        let channels: Vec<String> = server.query(&["PUBSUB", "CHANNELS", "leasehold:*"]).unwrap();
        channels.len()
    };
    until(async || heard(new) == 2).await;
    // Whatever the old master tells from now on is not believed: nobody listens there.
    until(async || heard(&sentinels.servers[old]) == 0).await;
    guard.renew().await.unwrap();
    let token = guard.token();
    guard.release_within(SOON).await.unwrap();
    let next = timeout(SOON, waiting).await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release_within(SOON).await.unwrap();
}

#[tokio::test]
async fn a_killed_master_is_replaced_and_tokens_go_on_rising() {
    let mut sentinels = Sentinels::start();
    let client = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    let mut last = guard.token();
    until_followed(&sentinels).await;
    sentinels.kill_master();
    // What the replica knows of goes on.
    until(async || guard.renew().await.is_ok()).await;
    assert!(guard.is_held());
    guard.release_within(SOON).await.unwrap();
    for _ in 0..3 {
        let guard = client.mutex("a").lock().await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn sentinels_that_know_no_such_service_or_are_none_are_named() {
    let sentinels = Sentinels::start();
    let error = Client::connect(&sentinels.url("nothing")).await.unwrap_err();
    assert!(error.to_string().contains("knows no service \"nothing\""), "{error}");
    let port = sentinels.master().port();
    let error = Client::connect(&format!("redis-sentinel://127.0.0.1:{port}/locks")).await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("is no sentinel"), "{error}");
}
