//! Barriers: parties wait until all have arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::{Error, Kind};

use crate::{Place, SOON, Test, pair, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    barrier_opens_only_when_all_parties_arrived_in_every_round,
    party_that_leaves_or_dies_does_not_count,
    early_party_waits_for_the_next_round,
    force_released_party_gets_an_error,
    invalid_barrier_is_refused,
    blocking_barrier_waits_for_all_parties,
];

const KIND: Kind = Kind::Barrier;

async fn barrier_opens_only_when_all_parties_arrived_in_every_round(store: Place) {
    const PARTIES: u32 = 4;
    const ROUNDS: u32 = 5;
    let arrived = Arc::new(AtomicU32::new(0));
    let leaders = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for _ in 0..PARTIES {
        let barrier = store.client().await.barrier("a", PARTIES);
        let (arrived, leaders) = (arrived.clone(), leaders.clone());
        tasks.push(tokio::spawn(async move {
            for round in 1..=ROUNDS {
                arrived.fetch_add(1, Ordering::SeqCst);
                let is_leader = barrier.wait().await.unwrap();
                let count = arrived.load(Ordering::SeqCst);
                assert!(count >= round * PARTIES, "{count} arrivals by the end of round {round}");
                leaders.fetch_add(u32::from(is_leader), Ordering::SeqCst);
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(SOON * 3, task).await.expect("all pass").unwrap();
    }
    assert_eq!(leaders.load(Ordering::SeqCst), ROUNDS, "each round has one leader");
}

async fn party_that_leaves_or_dies_does_not_count(store: Place) {
    let (one, other) = pair(&store).await;
    let gave_up = one.barrier("a", 2).wait_timeout(Duration::from_millis(50)).await.unwrap();
    assert!(gave_up.is_none());
    assert!(one.barrier("a", 2).wait_timeout(Duration::ZERO).await.unwrap().is_none());
    let dies = one.barrier("a", 2).ttl(Duration::from_secs(3)).auto_renew(false);
    let waiting = tokio::spawn(async move { dies.wait().await });
    until(&other, KIND, "a", |view| view.holders.len() == 1).await;
    until(&other, KIND, "a", |view| view.holders.is_empty()).await;
    let ended = tokio::time::timeout(SOON, waiting).await.expect("the loss is noticed").unwrap();
    assert!(ended.unwrap_err().is_lost());
    assert!(other.barrier("a", 2).wait_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    let dropped = {
        let barrier = one.barrier("a", 2);
        tokio::spawn(async move { barrier.wait().await })
    };
    until(&other, KIND, "a", |view| view.holders.len() == 1).await;
    dropped.abort();
    until(&other, KIND, "a", |view| view.holders.is_empty()).await;
}

async fn early_party_waits_for_the_next_round(store: Place) {
    let (one, other) = pair(&store).await;
    let mut parties = Vec::new();
    for _ in 0..3 {
        let barrier = one.barrier("a", 2);
        parties.push(tokio::spawn(async move { barrier.wait().await.unwrap() }));
    }
    let give_up = std::time::Instant::now() + SOON;
    while parties.iter().filter(|party| party.is_finished()).count() < 2 {
        assert!(std::time::Instant::now() < give_up, "two of them pass");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The third party has arrived, and waits for a fourth.
    let view = until(&other, KIND, "a", |view| view.waiters.is_empty() && view.holders.len() == 1).await;
    assert_eq!((view.capacity, view.in_use, view.rounds, view.holders[0].weight), (2, 1, 1, 1));
    assert_eq!(parties.iter().filter(|party| party.is_finished()).count(), 2);
    tokio::time::timeout(SOON, other.barrier("a", 2).wait()).await.expect("the fourth party passes").unwrap();
    for party in parties {
        tokio::time::timeout(SOON, party).await.expect("all pass").unwrap();
    }
}

async fn force_released_party_gets_an_error(store: Place) {
    let (one, other) = pair(&store).await;
    let barrier = one.barrier("a", 2);
    let waiting = tokio::spawn(async move { barrier.wait().await });
    until(&other, KIND, "a", |view| view.holders.len() == 1).await;
    assert_eq!(other.barrier("a", 2).force_release().await.unwrap().len(), 1);
    let ended = tokio::time::timeout(SOON, waiting).await.expect("the loss is noticed").unwrap();
    assert!(ended.unwrap_err().is_lost());
}

async fn invalid_barrier_is_refused(store: Place) {
    let (one, other) = pair(&store).await;
    for parties in [0, 1 << 16, u32::MAX] {
        let error = one.barrier("a", parties).wait().await.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("parties"), "{error}");
    }
    assert!(one.barrier("", 2).wait().await.unwrap_err().is_invalid());
    assert!(one.list().await.unwrap().is_empty());
    let barrier = one.barrier("a", 2);
    let waiting = tokio::spawn(async move { barrier.wait().await });
    until(&other, KIND, "a", |view| view.holders.len() == 1).await;
    let error = other.barrier("a", 3).wait().await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("in use with 2 parties"), "{error}");
    waiting.abort();
}

async fn blocking_barrier_waits_for_all_parties(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let barrier = client.barrier("a", 2).ttl(Duration::from_secs(5));
        assert!(barrier.wait_timeout(Duration::from_millis(10))?.is_none());
        let there = std::thread::spawn({
            let barrier = barrier.clone();
            move || barrier.wait()
        });
        let here = barrier.wait()?;
        assert!(here != there.join().unwrap()?, "one of them leads");
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
