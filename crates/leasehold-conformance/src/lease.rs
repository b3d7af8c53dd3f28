//! The lease of a mutex: its renewal, its loss, and its release.

use std::time::{Duration, Instant};

use leasehold::Loss;

use crate::mutex::{queue, until, until_free};
use crate::{Place, SOON, Test, pair};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    short_lease_is_renewed_while_its_guard_lives,
    pushed_lease_outlives_its_claim_window,
    unrenewed_lease_is_lost_at_its_ttl,
    manual_renewal_extends_the_lease,
    max_hold_ends_a_renewed_lease,
    force_released_lock_is_lost_and_granted_to_first_waiter,
    min_hold_retains_the_lock_after_release,
    loss_cancels_the_work_of_run,
    work_that_outlives_its_lease_is_an_error,
    closing_the_client_releases_everything,
    last_dropped_handle_releases,
    release_timeout_waits_for_the_store,
    wait_until_expiring_returns_at_the_given_remaining_time,
];

async fn short_lease_is_renewed_while_its_guard_lives(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
    // Longer than the lease.
    assert!(other.mutex("a").lock_timeout(Duration::from_secs(7)).await.unwrap().is_none());
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

async fn pushed_lease_outlives_its_claim_window(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    let waiting = queue(&other.mutex("a").auto_renew(false)).await;
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap();
    assert!(one.mutex("a").lock_timeout(Duration::from_millis(3_500)).await.unwrap().is_none());
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

async fn unrenewed_lease_is_lost_at_its_ttl(store: Place) {
    let (one, other) = pair(&store).await;
    let ttl = Duration::from_secs(1);
    let began = Instant::now();
    let guard = one.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    assert_eq!(guard.lost().await, Loss::Expired);
    assert!(began.elapsed() < ttl + SOON && !guard.is_held() && guard.remaining().is_zero());
    let next = other.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
    let error = guard.release().await.unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert!(next.is_held());
    assert_eq!(one.mutex("a").inspect().await.unwrap().holders.len(), 1, "the new holder keeps it");
}

async fn manual_renewal_extends_the_lease(store: Place) {
    let (one, other) = pair(&store).await;
    let ttl = Duration::from_secs(8);
    let guard = one.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    for _ in 0..2 {
        guard.wait_until_expiring(ttl / 2).await;
        guard.renew().await.unwrap();
        assert!(guard.remaining() > ttl / 2);
    }
    // Its connection may have been closed while it was idle, which this call may find out.
    if let Err(error) = other.mutex("a").force_release().await {
        assert!(error.is_unavailable(), "{error}");
        other.mutex("a").force_release().await.unwrap();
    }
    assert!(guard.renew().await.unwrap_err().is_lost());
    let first = one.mutex("b").lock().await.unwrap();
    let waiting = queue(&other.mutex("b")).await;
    first.release().await.unwrap();
    let guard = waiting.await.unwrap();
    guard.renew().await.unwrap();
    assert!(guard.remaining() > Duration::from_secs(4), "a pushed lease is renewed to its full ttl");
}

async fn max_hold_ends_a_renewed_lease(store: Place) {
    let (one, other) = pair(&store).await;
    let mutex = one.mutex("a").ttl(Duration::from_secs(6)).max_hold(Duration::from_secs(8));
    let guard = mutex.lock().await.unwrap();
    let waiting = queue(&other.mutex("a")).await;
    assert_eq!(guard.lost().await, Loss::MaxHold);
    assert!(waiting.await.unwrap().is_held());
}

async fn force_released_lock_is_lost_and_granted_to_first_waiter(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    let waiting = queue(&other.mutex("a")).await;
    let taken = other.mutex("a").force_release().await.unwrap();
    assert!(matches!(&taken[..], [holder] if holder.token == guard.token() && !holder.is_own));
    let next = waiting.await.unwrap();
    assert!(next.token() > guard.token());
    let loss = tokio::time::timeout(SOON, guard.lost()).await.expect("the holder notices the loss");
    assert_eq!(loss, Loss::Gone);
    assert!(guard.release().await.unwrap_err().is_lost());
    assert!(next.is_held());
    next.release().await.unwrap();
    assert!(other.mutex("a").force_release().await.unwrap().is_empty());
}

async fn min_hold_retains_the_lock_after_release(store: Place) {
    let (one, other) = pair(&store).await;
    let min_hold = Duration::from_secs(6);
    let began = Instant::now();
    let guard = one.mutex("a").min_hold(min_hold).lock().await.unwrap();
    guard.release().await.unwrap();
    let view = other.mutex("a").inspect().await.unwrap();
    assert!(view.holders.len() == 1 && view.holders[0].retained, "{view:?}");
    assert!(one.mutex("a").try_lock().await.unwrap().is_none(), "retained against the same client too");
    let guard = other.mutex("a").lock().await.unwrap();
    assert!(began.elapsed() >= min_hold - Duration::from_millis(20), "granted after {:?}", began.elapsed());
    guard.release().await.unwrap();
    drop(other.mutex("a").min_hold(min_hold).lock().await.unwrap());
    until(&one.mutex("a"), |view| view.holders.iter().all(|holder| holder.retained)).await;
    assert!(one.mutex("a").try_lock().await.unwrap().is_none(), "a drop retains it too");
}

async fn loss_cancels_the_work_of_run(store: Place) {
    let client = store.client().await;
    let guard = client.mutex("a").lock().await.unwrap();
    assert_eq!(guard.run(async { 7 }).await.unwrap(), 7);
    let other = store.client().await;
    let (ended, _) = tokio::join!(guard.run(std::future::pending::<()>()), async {
        other.mutex("a").force_release().await.unwrap();
    });
    let error = ended.unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("mutex \"a\" on "), "{error}");
}

async fn work_that_outlives_its_lease_is_an_error(store: Place) {
    let client = store.client().await;
    let guard = client.mutex("a").ttl(Duration::from_secs(1)).auto_renew(false).lock().await.unwrap();
    // It blocks its thread, as no work should, so that the loss is noticed only when it returns.
    let blocks = async {
        while !guard.remaining().is_zero() {
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let ended = guard.run(blocks).await;
    assert!(ended.unwrap_err().is_lost());
}

async fn closing_the_client_releases_everything(store: Place) {
    let (one, other) = pair(&store).await;
    let mine = one.mutex("a").lock().await.unwrap();
    let theirs = other.mutex("b").lock().await.unwrap();
    let mutex = one.mutex("b");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until(&other.mutex("b"), |view| view.waiters.len() == 1).await;
    let late = one.mutex("c");
    one.close().await.unwrap();
    assert!(other.list().await.unwrap().iter().all(|view| view.name == "b" && view.waiters.is_empty()));
    assert!(waiting.await.unwrap().unwrap_err().is_closed());
    assert!(late.lock().await.unwrap_err().is_closed());
    assert_eq!(mine.lost().await, Loss::Closed);
    assert!(!mine.is_held() && theirs.is_held());
}

async fn last_dropped_handle_releases(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    drop(one);
    assert!(guard.is_held(), "a guard is a handle too");
    drop(guard);
    until_free(&other.mutex("a")).await;
}

async fn release_timeout_waits_for_the_store(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    guard.release_timeout(SOON).await.unwrap();
    store.eventually(async || other.mutex("a").try_lock().await.unwrap().is_some()).await;
}

async fn wait_until_expiring_returns_at_the_given_remaining_time(store: Place) {
    let client = store.client().await;
    let ttl = Duration::from_secs(1);
    let guard = client.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    let left = Duration::from_millis(200);
    tokio::time::timeout(SOON, guard.wait_until_expiring(left)).await.expect("little time remains");
    assert!(guard.remaining() <= left);
    guard.wait_until_expiring(ttl).await;
    // Two renewals happen meanwhile, each with six seconds remaining.
    let renewed = client.mutex("b").ttl(Duration::from_secs(9)).lock().await.unwrap();
    let early = tokio::time::timeout(Duration::from_secs(7), renewed.wait_until_expiring(left)).await;
    assert!(early.is_err(), "a lease that is renewed in time never comes close to its expiry");
}
