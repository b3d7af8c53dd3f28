//! Reentrant mutexes: a named owner may acquire the mutex again.

use std::time::{Duration, Instant};

use leasehold::{Error, Kind, Loss};

use crate::{Place, SOON, Test, pair, queue, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    owner_reenters_and_others_wait_for_all_its_releases,
    holding_owner_reenters_before_waiters,
    granted_owner_admits_its_waiting_tasks_at_once,
    dead_acquisition_keeps_the_others_of_its_owner,
    owner_releases_only_its_own_acquisitions,
    release_all_releases_every_acquisition_of_the_owner,
    lost_guard_blocks_reentry_until_dropped,
    max_hold_ends_each_acquisition_of_an_owner,
    invalid_owner_is_refused,
    inspect_reports_owners,
    blocking_reentrant_mutex_reenters,
];

const KIND: Kind = Kind::Mutex;

async fn owner_reenters_and_others_wait_for_all_its_releases(store: Place) {
    let (one, other) = pair(&store).await;
    let (here, there) = (one.reentrant_mutex("a", "us"), other.reentrant_mutex("a", "us"));
    let first = here.lock().await.unwrap();
    let second = there.try_lock().await.unwrap().expect("the owner is the same");
    let third = tokio::spawn(async move { here.lock_timeout(SOON).await }).await.unwrap().unwrap().unwrap();
    assert!(first.token() == second.token() && second.token() == third.token());
    assert_eq!(there.hold_count().await.unwrap(), 3);
    let them = other.reentrant_mutex("a", "them");
    let waiting = queue(&one, KIND, "a", async move { them.lock().await }).await;
    for guard in [first, third] {
        guard.release().await.unwrap();
        assert!(one.mutex("a").try_lock().await.unwrap().is_none());
    }
    assert_eq!(there.hold_count().await.unwrap(), 1);
    let token = second.token();
    second.release().await.unwrap();
    assert!(waiting.await.unwrap().token() > token);
}

async fn holding_owner_reenters_before_waiters(store: Place) {
    let (one, other) = pair(&store).await;
    let outer = one.reentrant_mutex("a", "us").lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = queue(&one, KIND, "a", async move { mutex.lock().await }).await;
    let inner =
        tokio::time::timeout(SOON, one.reentrant_mutex("a", "us").lock()).await.expect("at once").unwrap();
    drop((outer, inner));
    drop(waiting.await.unwrap());
}

async fn granted_owner_admits_its_waiting_tasks_at_once(store: Place) {
    let (one, other) = pair(&store).await;
    let ours = one.reentrant_mutex("a", "us");
    let task = |ours: leasehold::ReentrantMutex| async move { ours.lock().await };
    // A waiter re-polls after 2 s at the earliest, so only the client itself can be this fast. A slow round may be the machine's.
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let held = other.mutex("a").lock().await.unwrap();
        let first = queue(&one, KIND, "a", task(ours.clone())).await;
        let them = other.reentrant_mutex("a", "them");
        let between = queue(&one, KIND, "a", async move { them.lock().await }).await;
        let second = queue(&one, KIND, "a", task(ours.clone())).await;
        let began = Instant::now();
        held.release().await.unwrap();
        let both = async { (first.await.unwrap(), second.await.unwrap()) };
        let (first, second) = tokio::time::timeout(SOON, both).await.expect("both tasks hold it");
        fastest = fastest.min(began.elapsed());
        assert_eq!(first.token(), second.token());
        drop((first, second));
        drop(between.await.unwrap());
    }
    assert!(fastest < Duration::from_secs(1), "the fastest round took {fastest:?}");
}

async fn dead_acquisition_keeps_the_others_of_its_owner(store: Place) {
    let (one, other) = pair(&store).await;
    let living = one.reentrant_mutex("a", "us").lock().await.unwrap();
    let dying = other.reentrant_mutex("a", "us").ttl(Duration::from_secs(1)).auto_renew(false);
    let dying = dying.lock().await.unwrap();
    assert_eq!(dying.lost().await, Loss::Expired);
    until(&one, KIND, "a", |view| view.holders.len() == 1).await;
    assert!(living.is_held() && other.mutex("a").try_lock().await.unwrap().is_none());
}

async fn owner_releases_only_its_own_acquisitions(store: Place) {
    let (one, other) = pair(&store).await;
    let them = other.reentrant_mutex("a", "them");
    let error = them.release_all().await.unwrap_err();
    assert!(error.is_not_owner() && error.to_string().contains("no owner"), "{error}");
    let ours = one.reentrant_mutex("a", "us").lock().await.unwrap();
    // A client writes its process once, beside its first lock.
    until(&one, KIND, "a", |view| view.holders.iter().any(|holder| holder.metadata.pid.is_some())).await;
    let error = them.release_all().await.unwrap_err();
    assert!(error.is_not_owner(), "{error}");
    let (message, pid) = (error.to_string(), std::process::id().to_string());
    assert!(
        message.contains("owner \"us\"") && message.contains(&pid),
        "the error names the holder: {message}"
    );
    assert!(ours.renew().await.is_ok(), "nothing was changed");
    ours.release().await.unwrap();
    let plain = one.mutex("a").lock().await.unwrap();
    assert!(them.release_all().await.unwrap_err().is_not_owner());
    plain.release().await.unwrap();
}

async fn release_all_releases_every_acquisition_of_the_owner(store: Place) {
    let (one, other) = pair(&store).await;
    let (here, there) = (one.reentrant_mutex("a", "us"), other.reentrant_mutex("a", "us"));
    let guards = (here.lock().await.unwrap(), there.lock().await.unwrap());
    assert_eq!(there.release_all().await.unwrap(), 2);
    assert!(!guards.1.is_held(), "the same client knows it at once");
    assert!(one.mutex("a").try_lock().await.unwrap().is_some());
    let loss = tokio::time::timeout(SOON, guards.1.lost()).await.expect("the same client notices it at once");
    assert_eq!(loss, Loss::Gone);
    assert!(guards.0.renew().await.unwrap_err().is_lost());
    assert_eq!(here.hold_count().await.unwrap(), 0);
}

async fn lost_guard_blocks_reentry_until_dropped(store: Place) {
    let (one, other) = pair(&store).await;
    let lock = one.reentrant_mutex("a", "us").ttl(Duration::from_secs(1)).auto_renew(false);
    let outer = lock.lock().await.unwrap();
    assert_eq!(outer.lost().await, Loss::Expired);
    for error in [
        lock.lock().await.unwrap_err(),
        lock.try_lock().await.unwrap_err(),
        lock.lock_timeout(SOON).await.unwrap_err(),
    ] {
        assert!(error.is_lost(), "{error}");
    }
    // Nothing was acquired: once the old lease has expired in the store too, the lock is free.
    until(&one, KIND, "a", |view| view.holders.is_empty()).await;
    assert!(one.reentrant_mutex("a", "them").try_lock().await.unwrap().is_some(), "another owner may");
    drop(outer);
    let outer = one.reentrant_mutex("a", "us").lock().await.unwrap();
    // Only the store knows of this loss, since no push reports it.
    other.reentrant_mutex("a", "us").release_all().await.unwrap();
    // The new grant is given back, and no minimum hold retains it: nothing ran under it.
    let again = one.reentrant_mutex("a", "us").min_hold(Duration::from_secs(3_600));
    let error = again.lock().await.unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert!(!outer.is_held(), "the client knows of the loss now");
    drop(outer);
    until(&one, KIND, "a", |view| view.holders.is_empty()).await;
}

async fn max_hold_ends_each_acquisition_of_an_owner(store: Place) {
    let (one, other) = pair(&store).await;
    let hold = Duration::from_secs(8);
    let began = Instant::now();
    let lock = one.reentrant_mutex("a", "us").ttl(Duration::from_secs(6)).max_hold(hold);
    let outer = lock.lock().await.unwrap();
    let waiting = queue(&other, KIND, "a", {
        let mutex = other.mutex("a");
        async move { mutex.lock().await }
    })
    .await;
    assert_eq!(outer.lost().await, Loss::MaxHold);
    assert!(waiting.await.unwrap().is_held());
    assert!(
        began.elapsed() >= hold - Duration::from_millis(50),
        "the lease ended after {:?}",
        began.elapsed()
    );
}

async fn invalid_owner_is_refused(store: Place) {
    let client = store.client().await;
    for owner in ["", "a\nb", &"x".repeat(513)] {
        let lock = client.reentrant_mutex("a", owner);
        let error = lock.lock().await.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("an owner is"), "{error}");
        assert!(lock.hold_count().await.unwrap_err().is_invalid());
        assert!(lock.release_all().await.unwrap_err().is_invalid());
    }
    assert!(client.list().await.unwrap().is_empty());
    assert!(client.reentrant_mutex("a", "x".repeat(512)).try_lock().await.unwrap().is_some());
}

async fn inspect_reports_owners(store: Place) {
    let client = store.client().await;
    let _guards = (
        client.reentrant_mutex("a", "ä us").lock().await.unwrap(),
        client.reentrant_mutex("a", "ä us").lock().await.unwrap(),
    );
    let view = client.inspect(KIND, "a").await.unwrap();
    assert_eq!((view.holders.len(), view.in_use), (2, 1));
    assert!(view.holders.iter().all(|holder| holder.owner.as_deref() == Some("ä us")));
}

async fn blocking_reentrant_mutex_reenters(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let lock = client.reentrant_mutex("a", "us").ttl(Duration::from_secs(5));
        let (outer, inner) = (lock.lock()?, lock.try_lock()?);
        assert!(inner.is_some() && lock.lock_timeout(SOON)?.is_some());
        assert!(client.reentrant_mutex("a", "them").release_all().unwrap_err().is_not_owner());
        until_count(&lock, 2)?;
        assert_eq!(lock.release_all()?, 2);
        assert_eq!(outer.lost_within(SOON), Some(Loss::Gone));
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}

/// The client's thread releases dropped guards.
fn until_count(lock: &leasehold::blocking::ReentrantMutex, count: usize) -> Result<(), Error> {
    let give_up = Instant::now() + SOON;
    while lock.hold_count()? != count {
        assert!(Instant::now() < give_up, "the count is {}", lock.hold_count()?);
        std::thread::yield_now();
    }
    Ok(())
}
