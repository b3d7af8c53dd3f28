//! Leases without a guard, which any client takes over by their id.

use std::time::Duration;

use leasehold::LeaseId;

use crate::mutex::{queue, until};
use crate::{Place, SOON, Test, pair};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    detached_lease_outlives_its_client_and_is_released_by_another,
    attached_lease_is_renewed_until_it_is_detached_again,
    release_of_a_detached_lease_grants_the_first_waiter,
    tasks_behind_a_detached_lease_wait_in_the_store,
    wrong_and_ended_ids_are_refused_and_no_secret_is_shown,
    renewal_by_id_extends_the_lease_and_leaves_it_detached,
    attached_lease_of_a_period_keeps_the_period,
    blocking_lease_is_detached_and_attached,
    lease_is_attached_and_renewed_by_one_client_at_once,
];

const TTL: Duration = Duration::from_secs(20);

async fn detached_lease_outlives_its_client_and_is_released_by_another(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").ttl(TTL).label("job 7").lock().await.unwrap();
    let token = guard.token();
    let id = guard.detach().await.unwrap();
    one.close().await.unwrap();
    assert!(other.mutex("a").try_lock().await.unwrap().is_none(), "it is still held");
    let holder = other.inspect_lease(&id).await.unwrap().expect("it is shown");
    assert_eq!((holder.token, holder.metadata.label.as_deref()), (token, Some("job 7")));
    let id: LeaseId = id.to_string().parse().unwrap();
    let guard = other.attach(&id).await.unwrap();
    assert!(guard.token() == token && guard.name() == "a" && guard.is_held());
    guard.release().await.unwrap();
    assert!(other.mutex("a").lock().await.unwrap().token() > token);
}

async fn attached_lease_is_renewed_until_it_is_detached_again(store: Place) {
    let (one, other) = pair(&store).await;
    let ttl = Duration::from_secs(6);
    let id = one.mutex("a").ttl(ttl).lock().await.unwrap().detach().await.unwrap();
    let guard = other.attach(&id).await.unwrap();
    // Longer than the lease.
    assert!(one.mutex("a").lock_timeout(Duration::from_secs(7)).await.unwrap().is_none());
    assert!(guard.is_held());
    let again = guard.detach().await.unwrap();
    assert_eq!(again, id);
    let next = one.mutex("a").lock_timeout(SOON).await.unwrap();
    assert!(next.is_some(), "it expired");
    assert!(other.inspect_lease(&id).await.unwrap().is_none());
    assert!(other.attach(&id).await.unwrap_err().is_lost());
}

async fn release_of_a_detached_lease_grants_the_first_waiter(store: Place) {
    let (one, other) = pair(&store).await;
    let id = one.mutex("a").ttl(TTL).lock().await.unwrap().detach().await.unwrap();
    let waiting = queue(&other.mutex("a")).await;
    one.attach(&id).await.unwrap().release().await.unwrap();
    let granted = tokio::time::timeout(SOON, waiting).await.expect("it is granted").unwrap();
    // A lease that was granted after a wait has its full ttl once it is detached.
    let id = granted.detach().await.unwrap();
    let left = one.inspect_lease(&id).await.unwrap().expect("it is held").expires_in;
    assert!(left > Duration::from_secs(5), "{left:?}");
    one.attach(&id).await.unwrap().release().await.unwrap();
}

async fn tasks_behind_a_detached_lease_wait_in_the_store(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").ttl(TTL).lock().await.unwrap();
    let lock = one.mutex("a").ttl(TTL);
    let behind = tokio::spawn(async move { lock.lock().await });
    let id = guard.detach().await.unwrap();
    until(&other.mutex("a"), |view| view.waiters.len() == 1).await;
    assert!(!behind.is_finished());
    other.attach(&id).await.unwrap().release().await.unwrap();
    let granted = tokio::time::timeout(SOON, behind).await.expect("it is granted").unwrap().unwrap();
    granted.release().await.unwrap();
}

async fn wrong_and_ended_ids_are_refused_and_no_secret_is_shown(store: Place) {
    let (one, other) = pair(&store).await;
    let id = one.mutex("a").ttl(TTL).lock().await.unwrap().detach().await.unwrap();
    let sibling = one.mutex("b").ttl(TTL).lock().await.unwrap().detach().await.unwrap();
    let text = id.to_string();
    let (terms, secret) = text.rsplit_once('.').unwrap();
    let of_sibling = sibling.to_string();
    let shown = format!("{:?} {:?}", other.list().await.unwrap(), other.mutex("a").inspect().await.unwrap());
    assert!(!shown.contains(secret), "{shown}");
    // What inspection shows, and the id of another lease of the same client, open nothing.
    let client = other.mutex("a").inspect().await.unwrap().holders[0].client.clone();
    for guess in [client.as_str(), of_sibling.rsplit_once('.').unwrap().1, "00000000000000000000000000000000"]
    {
        let guess: LeaseId = format!("{terms}.{guess}").parse().unwrap();
        assert!(other.attach(&guess).await.unwrap_err().is_lost());
        assert!(other.inspect_lease(&guess).await.unwrap().is_none());
    }
    for id in [id, sibling] {
        other.attach(&id).await.unwrap().release().await.unwrap();
        let error = other.attach(&id).await.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("the id is wrong"), "{error}");
        assert!(!error.to_string().contains(secret));
    }
}

async fn renewal_by_id_extends_the_lease_and_leaves_it_detached(store: Place) {
    let (one, other) = pair(&store).await;
    let id = one.mutex("a").ttl(TTL).lock().await.unwrap().detach().await.unwrap();
    let left = async || one.inspect_lease(&id).await.unwrap().expect("it is held").expires_in;
    let before = left().await;
    crate::until_true(async || left().await + Duration::from_secs(3) < before).await;
    let before = left().await;
    other.renew_lease(&id).await.unwrap();
    assert!(left().await > before, "it was renewed");
    // The client that renewed it does not release it.
    other.close().await.unwrap();
    assert!(one.mutex("a").try_lock().await.unwrap().is_none());
    one.attach(&id).await.unwrap().release().await.unwrap();
    assert!(one.renew_lease(&id).await.unwrap_err().is_lost());
}

async fn attached_lease_of_a_period_keeps_the_period(store: Place) {
    let period = Duration::from_secs(3_600);
    let (one, other) = pair(&store).await;
    let guard = one.once_per("a", period).start().await.unwrap().expect("the first start");
    let id = guard.detach().await.unwrap();
    let left = async || other.mutex("a").inspect().await.unwrap().holders[0].expires_in;
    assert!(left().await > period / 2, "{:?}", left().await);
    other.renew_lease(&id).await.unwrap();
    assert!(left().await > period / 2, "{:?}", left().await);
    let guard = other.attach(&id).await.unwrap();
    guard.renew().await.unwrap();
    assert!(left().await > period / 2, "{:?}", left().await);
    guard.release().await.unwrap();
    assert!(left().await > period / 2, "{:?}", left().await);
    assert!(one.once_per("a", period).start().await.unwrap().is_none(), "the period is used up");
}

async fn blocking_lease_is_detached_and_attached(store: Place) {
    let connect = store.blocking();
    let attempt = move || -> Result<(), leasehold::Error> {
        let client = connect()?;
        let id = client.mutex("a").ttl(TTL).lock()?.detach()?;
        assert!(client.inspect_lease(&id)?.is_some());
        client.attach(&id)?.release()?;
        assert!(client.inspect_lease(&id)?.is_none());
        client.close()
    };
    tokio::task::spawn_blocking(attempt).await.unwrap().unwrap();
}

async fn lease_is_attached_and_renewed_by_one_client_at_once(store: Place) {
    let (one, other) = pair(&store).await;
    let id = one.mutex("a").ttl(TTL).lock().await.unwrap().detach().await.unwrap();
    let guard = other.attach(&id).await.unwrap();
    other.renew_lease(&id).await.unwrap();
    guard.renew().await.unwrap();
    let again = other.attach(&id).await.unwrap().detach().await.unwrap();
    assert_eq!(again, id);
    guard.renew().await.unwrap();
    assert!(one.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(one.mutex("a").try_lock().await.unwrap().is_some());
}
