//! Semaphores: holders share permits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::{Kind, Semaphore};

use crate::{Place, SOON, Test, pair, queue, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    permits_are_granted_up_to_the_limit,
    large_semaphore_request_is_not_overtaken_by_a_small_one,
    release_of_permits_grants_all_waiters_that_fit,
    permits_of_dead_holders_expire_separately,
    invalid_permit_counts_are_refused,
    different_semaphore_limits_are_an_error,
    granted_permits_never_exceed_the_limit,
    inspect_reports_permits,
    release_by_token_or_id_frees_one_of_two_leases,
    blocking_semaphore_acquires_permits,
];

const KIND: Kind = Kind::Semaphore;

async fn permits_are_granted_up_to_the_limit(store: Place) {
    let (one, other) = pair(&store).await;
    let (mine, theirs) = (one.semaphore("a", 3), other.semaphore("a", 3));
    let two = mine.acquire(2).await.unwrap();
    let third = theirs.acquire(1).await.unwrap();
    assert!(two.token() < third.token());
    assert!(theirs.try_acquire(1).await.unwrap().is_none());
    assert!(theirs.acquire_timeout(1, Duration::from_millis(50)).await.unwrap().is_none());
    two.release().await.unwrap();
    assert!(theirs.try_acquire(3).await.unwrap().is_none());
    assert!(theirs.try_acquire(2).await.unwrap().is_some());
    assert!(one.mutex("a").try_lock().await.unwrap().is_some(), "a mutex of that name is another lock");
}

async fn large_semaphore_request_is_not_overtaken_by_a_small_one(store: Place) {
    let (one, other) = pair(&store).await;
    let semaphore = one.semaphore("a", 2);
    let held = semaphore.acquire(1).await.unwrap();
    let both = other.semaphore("a", 2);
    let waiting = queue(&one, KIND, "a", async move { both.acquire(2).await }).await;
    assert!(semaphore.try_acquire(1).await.unwrap().is_none(), "one permit is free, but the waiter is first");
    held.release().await.unwrap();
    let both = waiting.await.unwrap();
    assert!(semaphore.try_acquire(1).await.unwrap().is_none());
    both.release().await.unwrap();
    assert!(semaphore.try_acquire(1).await.unwrap().is_some());
}

async fn release_of_permits_grants_all_waiters_that_fit(store: Place) {
    let (one, other) = pair(&store).await;
    let all = one.semaphore("a", 3).acquire(3).await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let semaphore = other.semaphore("a", 3);
        waiting.push(queue(&one, KIND, "a", async move { semaphore.acquire(1).await }).await);
    }
    all.release().await.unwrap();
    let view = until(&one, KIND, "a", |view| view.holders.len() == 3).await;
    assert_eq!((view.in_use, view.waiters.len()), (3, 1));
    let fourth = waiting.pop().unwrap();
    let mut guards = Vec::new();
    for waiting in waiting {
        guards.push(waiting.await.unwrap());
    }
    drop(guards.pop());
    drop(fourth.await.unwrap());
}

async fn permits_of_dead_holders_expire_separately(store: Place) {
    let (one, other) = pair(&store).await;
    let long = one.semaphore("a", 2).acquire(1).await.unwrap();
    let short = one.semaphore("a", 2).ttl(Duration::from_secs(1)).auto_renew(false);
    let short = short.acquire(1).await.unwrap();
    let next = tokio::time::timeout(SOON, other.semaphore("a", 2).acquire(1)).await.unwrap().unwrap();
    assert!(!short.is_held() && long.is_held() && next.is_held());
}

async fn invalid_permit_counts_are_refused(store: Place) {
    let client = store.client().await;
    let refused = async |semaphore: Semaphore, permits| {
        for error in [
            semaphore.acquire(permits).await.unwrap_err(),
            semaphore.try_acquire(permits).await.unwrap_err(),
            semaphore.acquire_timeout(permits, SOON).await.unwrap_err(),
        ] {
            assert!(error.is_invalid() && error.to_string().contains("semaphore \"a\" on "), "{error}");
            assert!(error.to_string().contains("permits"), "{error}");
        }
    };
    refused(client.semaphore("a", 3), 0).await;
    refused(client.semaphore("a", 3), 4).await;
    refused(client.semaphore("a", 0), 0).await;
    refused(client.semaphore("a", 0), 1).await;
    assert!(client.list().await.unwrap().is_empty());
}

async fn different_semaphore_limits_are_an_error(store: Place) {
    let (one, other) = pair(&store).await;
    let held = one.semaphore("a", 3).acquire(1).await.unwrap();
    let error = other.semaphore("a", 4).acquire(1).await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("in use with 3 permits"), "{error}");
    let view = other.inspect(KIND, "a").await.unwrap();
    assert_eq!((view.capacity, view.holders.len(), view.waiters.len()), (3, 1, 0));
    held.release().await.unwrap();
    assert!(other.semaphore("a", 4).try_acquire(4).await.unwrap().is_some(), "the semaphore is unused");
}

async fn granted_permits_never_exceed_the_limit(store: Place) {
    const PERMITS: u32 = 5;
    let out = Arc::new(AtomicU32::new(0));
    let most = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for number in 0..3_u32 {
        let client = store.client().await;
        for task in 0..4_u32 {
            let (semaphore, out, most) = (client.semaphore("a", PERMITS), out.clone(), most.clone());
            tasks.push(tokio::spawn(async move {
                for round in 0..15 {
                    let permits = (number + task + round) % PERMITS + 1;
                    let guard = semaphore.acquire(permits).await.unwrap();
                    let now = out.fetch_add(permits, Ordering::SeqCst) + permits;
                    most.fetch_max(now, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    out.fetch_sub(permits, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), PERMITS, "all permits were granted at once, and never more");
}

async fn inspect_reports_permits(store: Place) {
    let (one, other) = pair(&store).await;
    let _two = one.semaphore("a", 3).acquire(2).await.unwrap();
    let semaphore = other.semaphore("a", 3);
    let _waiting = queue(&one, KIND, "a", async move { semaphore.acquire(3).await }).await;
    let views = one.list().await.unwrap();
    let [view] = &views[..] else { panic!("{views:?}") };
    assert_eq!((view.kind, view.capacity, view.in_use), (KIND, 3, 2));
    assert_eq!((view.holders[0].weight, view.waiters[0].weight), (2, 3));
    assert!(view.holders[0].owner.is_none());
    let taken = other.semaphore("a", 3).force_release().await.unwrap();
    assert_eq!(taken.len(), 1);
}

async fn release_by_token_or_id_frees_one_of_two_leases(store: Place) {
    let (one, other) = pair(&store).await;
    let semaphore = one.semaphore("a", 2).ttl(Duration::from_secs(20));
    let (first, second) = (semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap());
    let held = async || other.semaphore("a", 2).inspect().await.unwrap().holders;
    let taken = other.force_release_token(KIND, "a", first.token()).await.unwrap().expect("it is held");
    assert_eq!(taken.token, first.token());
    assert_eq!(held().await.iter().map(|holder| holder.token).collect::<Vec<_>>(), [second.token()]);
    assert!(first.renew().await.unwrap_err().is_lost());
    second.renew().await.unwrap();
    assert!(other.force_release_token(KIND, "a", first.token()).await.unwrap().is_none(), "it has ended");
    let third = semaphore.try_acquire(1).await.unwrap().expect("its permit is free");
    let (second, third) = (second.detach().await.unwrap(), third.detach().await.unwrap());
    let kept = other.inspect_lease(&third).await.unwrap().expect("it is held").token;
    other.attach(&second).await.unwrap().release().await.unwrap();
    assert_eq!(held().await.iter().map(|holder| holder.token).collect::<Vec<_>>(), [kept]);
    other.attach(&third).await.unwrap().release().await.unwrap();
}

async fn blocking_semaphore_acquires_permits(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let semaphore = client.semaphore("a", 2).ttl(Duration::from_secs(5));
        let both = semaphore.acquire(2)?;
        assert!(semaphore.try_acquire(1)?.is_none());
        assert!(semaphore.acquire_timeout(1, Duration::from_millis(10))?.is_none());
        both.release()?;
        assert!(semaphore.try_acquire(1)?.is_some());
        client.close()
    };
    let worked: Result<(), leasehold::Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
