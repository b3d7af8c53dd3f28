//! `once_per`: one of many clients starts the work in each period.

use std::time::{Duration, Instant};

use leasehold::{Error, Kind};

use crate::{Place, SOON, Test, pair, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    one_of_many_clients_starts_in_each_period,
    dead_host_costs_the_period_with_at_most_once,
    dead_host_is_replaced_with_at_least_once,
    work_longer_than_its_period_is_not_started_twice,
    invalid_period_is_refused,
    blocking_once_per_starts_once,
];

const KIND: Kind = Kind::Mutex;
const PERIOD: Duration = Duration::from_secs(2);

/// The promised distance of two starts, nine tenths of the period, less the difference of clocks that are read one after the other.
const DISTANCE: Duration = Duration::from_millis(1_800 - 20);

async fn one_of_many_clients_starts_in_each_period(store: Place) {
    let mut last = None;
    let observer = store.client().await;
    for _ in 0..2 {
        let mut tasks = Vec::new();
        for _ in 0..8 {
            let lottery = store.client().await.once_per("a", PERIOD);
            tasks.push(tokio::spawn(async move { lottery.start().await.unwrap() }));
        }
        let mut started = Vec::new();
        for task in tasks {
            started.extend(task.await.unwrap());
        }
        assert_eq!(started.len(), 1, "exactly one starts");
        let guard = started.remove(0);
        // A token is the microsecond of its grant.
        let granted = Duration::from_micros(guard.token().get());
        let since = last.replace(granted).map(|last| granted - last);
        assert!(since.is_none_or(|since| since > DISTANCE), "{since:?}");
        guard.release().await.unwrap();
        // On a slow machine the period may be over by now, and the next one starts.
        if let Some(next) = observer.once_per("a", PERIOD).start().await.unwrap() {
            let started = Duration::from_micros(next.token().get());
            assert!(started - granted > DISTANCE, "started again within its period");
            last = Some(started);
            next.release().await.unwrap();
        }
        until(&observer, KIND, "a", |view| view.holders.is_empty()).await;
    }
}

/// Starts the work, and neither renews nor releases.
async fn start_and_die(lottery: leasehold::OncePer) {
    let guard = lottery.ttl(Duration::from_millis(300)).auto_renew(false).start().await.unwrap();
    std::mem::forget(guard.expect("the lock is free"));
}

async fn dead_host_costs_the_period_with_at_most_once(store: Place) {
    let (one, other) = pair(&store).await;
    let began = Instant::now();
    start_and_die(one.once_per("a", PERIOD)).await;
    let lottery = other.once_per("a", PERIOD);
    while lottery.start().await.unwrap().is_none() {
        assert!(began.elapsed() < SOON, "the next period has begun");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(began.elapsed() > DISTANCE, "another started after {:?}", began.elapsed());
}

async fn dead_host_is_replaced_with_at_least_once(store: Place) {
    let (one, other) = pair(&store).await;
    let period = PERIOD * 60;
    let began = Instant::now();
    start_and_die(one.once_per("a", period).at_least_once()).await;
    let report = other.once_per("a", period).at_least_once();
    let second =
        tokio::time::timeout(SOON, report.start()).await.expect("the waiter is granted").unwrap().unwrap();
    assert!(began.elapsed() < period / 2);
    // A client that waits meanwhile learns that the work was done.
    let third = {
        let report = one.once_per("a", period).at_least_once();
        tokio::spawn(async move { report.start().await.unwrap() })
    };
    until(&other, KIND, "a", |view| view.waiters.len() == 1).await;
    second.release().await.unwrap();
    let third = tokio::time::timeout(SOON, third).await.expect("the wait ends").unwrap();
    assert!(third.is_none());
    until(&other, KIND, "a", |view| view.waiters.is_empty()).await;
    assert!(report.start().await.unwrap().is_none());
}

async fn work_longer_than_its_period_is_not_started_twice(store: Place) {
    let (one, other) = pair(&store).await;
    // So long that a busy machine renews it in time.
    let period = Duration::from_secs(6);
    let began = Instant::now();
    let guard = one.once_per("a", period).ttl(period).start().await.unwrap().unwrap();
    while began.elapsed() < period / 2 * 3 {
        assert!(other.once_per("a", period).start().await.unwrap().is_none());
        assert!(guard.is_held());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    guard.release().await.unwrap();
    assert!(other.once_per("a", period).start().await.unwrap().is_some());
}

async fn invalid_period_is_refused(store: Place) {
    let client = store.client().await;
    for period in [Duration::ZERO, Duration::from_millis(900), Duration::MAX] {
        let error = client.once_per("a", period).start().await.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("a period is"), "{error}");
    }
    assert!(client.once_per("", PERIOD).start().await.unwrap_err().is_invalid());
    assert!(client.list().await.unwrap().is_empty());
}

async fn blocking_once_per_starts_once(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        client.once_per("a", PERIOD * 60).start()?.expect("the lock is free").release()?;
        assert!(client.once_per("a", PERIOD * 60).at_least_once().start()?.is_none());
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
