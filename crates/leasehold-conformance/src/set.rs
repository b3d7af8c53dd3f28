//! Mutex sets: all of the mutexes or none, without deadlock.

use std::time::Duration;

use leasehold::{Client, Error, Kind, Loss, MutexSet};

use crate::{Place, SOON, Test, pair, queue, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    mutex_set_is_acquired_together_with_a_token_each,
    busy_mutex_set_holds_no_part,
    refused_mutex_set_leaves_nothing_and_overtakes_no_waiter,
    mutex_sets_in_different_orders_do_not_deadlock,
    invalid_mutex_set_is_refused,
    losing_one_mutex_of_a_set_ends_the_work,
    loss_during_acquisition_of_a_mutex_set_ends_the_wait,
    dropped_mutex_set_leaves_nothing,
    blocking_mutex_set_is_acquired,
];

const KIND: Kind = Kind::Mutex;

fn set(client: &Client, names: &[&str]) -> MutexSet {
    MutexSet::new(names.iter().map(|name| client.mutex(name)))
}

async fn until_free(client: &Client, names: &[&str]) {
    for name in names {
        until(client, KIND, name, |view| view.holders.is_empty() && view.waiters.is_empty()).await;
    }
}

async fn mutex_set_is_acquired_together_with_a_token_each(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = set(&one, &["b", "c", "a"]).lock().await.unwrap();
    let names: Vec<_> = guard.guards().iter().map(leasehold::Guard::name).collect();
    assert_eq!(names, ["b", "c", "a"], "in the order of the set");
    for name in ["a", "b", "c"] {
        let view = other.inspect(KIND, name).await.unwrap();
        assert_eq!(guard.token(name), Some(view.holders[0].token));
        assert!(other.mutex(name).try_lock().await.unwrap().is_none());
    }
    assert!(guard.token("d").is_none() && guard.is_held());
    assert_eq!(guard.run(async { 7 }).await.unwrap(), 7);
    guard.renew().await.unwrap();
    assert!(guard.remaining() > Duration::from_secs(4));
    guard.release().await.unwrap();
    for guard in set(&other, &["a", "b"]).lock().await.unwrap().into_guards() {
        guard.release().await.unwrap();
    }
}

async fn busy_mutex_set_holds_no_part(store: Place) {
    let (one, other) = pair(&store).await;
    let held = one.mutex("b").lock().await.unwrap();
    let both = set(&other, &["b", "a", "c"]);
    assert!(both.try_lock().await.unwrap().is_none());
    assert!(both.lock_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    assert!(one.inspect(KIND, "a").await.unwrap().holders.is_empty(), "released before the answer");
    assert!(one.inspect(KIND, "c").await.unwrap().holders.is_empty());
    until(&one, KIND, "b", |view| view.waiters.is_empty()).await;
    held.release().await.unwrap();
    assert!(both.lock_timeout(SOON).await.unwrap().is_some());
}

async fn refused_mutex_set_leaves_nothing_and_overtakes_no_waiter(store: Place) {
    let (one, other) = pair(&store).await;
    for taken in ["a", "b", "c"] {
        let held = one.mutex(taken).lock().await.unwrap();
        let mutex = one.mutex(taken).global_fifo();
        let next = queue(&one, KIND, taken, async move { mutex.lock().await }).await;
        assert!(set(&other, &["b", "a", "c"]).try_lock().await.unwrap().is_none());
        let in_use: Vec<_> = one.list().await.unwrap().into_iter().map(|lock| lock.name).collect();
        assert_eq!(in_use, [taken], "the others are released");
        let view = one.inspect(KIND, taken).await.unwrap();
        assert_eq!((view.holders.len(), view.waiters.len()), (1, 1));
        held.release().await.unwrap();
        let next = next.await.unwrap();
        assert!(set(&other, &["b", "a", "c"]).try_lock().await.unwrap().is_none());
        next.release().await.unwrap();
    }
    let all = set(&other, &["b", "a", "c"]);
    store.eventually(async || all.try_lock().await.unwrap().is_some()).await;
}

async fn mutex_sets_in_different_orders_do_not_deadlock(store: Place) {
    let orders = [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"], ["c", "a", "b"]];
    let mut tasks = Vec::new();
    for order in orders {
        let client = store.client().await;
        tasks.push(tokio::spawn(async move {
            for _ in 0..25 {
                let guard = set(&client, &order).lock().await.unwrap();
                tokio::task::yield_now().await;
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    until_free(&store.client().await, &["a", "b", "c"]).await;
}

async fn invalid_mutex_set_is_refused(store: Place) {
    let (one, other) = pair(&store).await;
    let mixed = MutexSet::new([one.mutex("a"), other.mutex("b")]);
    for (set, says) in [
        (set(&one, &["a", "b", "a"]), "mutex \"a\" on "),
        (set(&one, &["a", "b", "a"]), "twice"),
        (set(&one, &[]), "no mutex"),
        (set(&one, &["a", ""]), "can't be empty"),
        (mixed, "its client is not that"),
        (MutexSet::new([one.mutex("a"), one.mutex("b").ttl(Duration::ZERO)]), "ttl"),
    ] {
        for error in [set.lock().await.unwrap_err(), set.try_lock().await.unwrap_err()] {
            assert!(error.is_invalid() && error.to_string().contains(says), "{error}");
        }
    }
    assert!(one.list().await.unwrap().is_empty(), "nothing was acquired");
}

async fn losing_one_mutex_of_a_set_ends_the_work(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = set(&one, &["a", "b"]).lock().await.unwrap();
    let (ended, _) = tokio::join!(guard.run(std::future::pending::<()>()), async {
        other.mutex("b").force_release().await.unwrap();
    });
    let error = ended.unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("mutex \"b\""), "{error}");
    let (lost, loss) = guard.lost().await;
    assert_eq!((lost.name(), loss), ("b", Loss::Gone));
    assert!(!guard.is_held() && guard.release().await.unwrap_err().is_lost());
    until_free(&one, &["a", "b"]).await;
}

async fn loss_during_acquisition_of_a_mutex_set_ends_the_wait(store: Place) {
    let (one, other) = pair(&store).await;
    let _held = other.mutex("b").lock().await.unwrap();
    let both = set(&one, &["a", "b"]);
    let waiting = tokio::spawn(async move { both.lock().await });
    until(&one, KIND, "b", |view| view.waiters.len() == 1).await;
    other.mutex("a").force_release().await.unwrap();
    let ended = tokio::time::timeout(SOON, waiting).await.expect("the wait ends").unwrap();
    assert!(ended.unwrap_err().is_lost());
    until(&one, KIND, "b", |view| view.waiters.is_empty()).await;
}

async fn dropped_mutex_set_leaves_nothing(store: Place) {
    let (one, other) = pair(&store).await;
    drop(set(&one, &["a", "b"]).lock().await.unwrap());
    until_free(&one, &["a", "b"]).await;
    let held = other.mutex("b").lock().await.unwrap();
    let both = set(&one, &["a", "b"]);
    let waiting = queue(&one, KIND, "b", async move { both.lock().await }).await;
    assert_eq!(one.inspect(KIND, "a").await.unwrap().holders.len(), 1);
    waiting.abort();
    // A poll may be in progress, which must not see the release.
    assert!(waiting.await.is_err(), "the task was waiting");
    held.release().await.unwrap();
    until_free(&one, &["a", "b"]).await;
}

async fn blocking_mutex_set_is_acquired(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let both = leasehold::blocking::MutexSet::new(["b", "a"].map(|name| client.mutex(name)));
        let guard = both.lock()?;
        assert!(guard.is_held() && guard.token("a") == Some(guard.guards()[1].token()));
        assert!(both.try_lock()?.is_none());
        assert!(both.lock_timeout(Duration::from_millis(10))?.is_none());
        guard.release()?;
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
