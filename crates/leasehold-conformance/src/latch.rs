//! Latches: clients wait until an event has been counted a number of times.

use std::time::Duration;

use leasehold::{Error, Kind};

use crate::{Place, SOON, Test, pair, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    latch_opens_at_its_count,
    named_count_counts_once,
    latch_counts_outlive_their_client_and_expire,
    invalid_latch_is_refused,
    blocking_latch_counts_down,
];

const KIND: Kind = Kind::Latch;

async fn latch_opens_at_its_count(store: Place) {
    let (one, other) = pair(&store).await;
    let (here, there) = (one.latch("a", 2), other.latch("a", 2));
    assert_eq!(here.remaining().await.unwrap(), 2);
    assert!(!here.wait_timeout(Duration::ZERO).await.unwrap());
    let waiting = {
        let latch = here.clone();
        tokio::spawn(async move { latch.wait().await })
    };
    assert_eq!(there.count_down().await.unwrap(), 1);
    assert!(!there.wait_timeout(Duration::from_millis(50)).await.unwrap() && !waiting.is_finished());
    assert_eq!(there.count_down().await.unwrap(), 0);
    tokio::time::timeout(SOON, waiting).await.expect("the latch opens").unwrap().unwrap();
    assert_eq!(here.count_down().await.unwrap(), 0, "further counts change nothing");
    assert!(here.wait_timeout(SOON).await.unwrap());
    assert_eq!(here.force_release().await.unwrap().len(), 2);
    assert_eq!(there.remaining().await.unwrap(), 2, "the latch starts again");
}

async fn named_count_counts_once(store: Place) {
    let (one, other) = pair(&store).await;
    for client in [&one, &other, &one] {
        assert_eq!(client.latch("a", 2).count_down_as("worker-1").await.unwrap(), 1);
    }
    assert_eq!(one.latch("a", 2).count_down_as("worker-2").await.unwrap(), 0);
    assert_eq!(one.latch("a", 2).count_down_as("worker-1").await.unwrap(), 0);
}

async fn latch_counts_outlive_their_client_and_expire(store: Place) {
    let (one, other) = pair(&store).await;
    assert_eq!(one.latch("a", 2).retention(Duration::from_secs(2)).count_down().await.unwrap(), 1);
    assert_eq!(one.latch("b", 2).count_down().await.unwrap(), 1);
    one.close().await.unwrap();
    assert_eq!(other.latch("b", 2).remaining().await.unwrap(), 1);
    until(&other, KIND, "a", |view| view.holders.is_empty()).await;
    assert_eq!(other.latch("b", 2).count_down().await.unwrap(), 0);
}

async fn invalid_latch_is_refused(store: Place) {
    let client = store.client().await;
    let latch = client.latch("a", 3);
    for error in [
        client.latch("a", 0).count_down().await.unwrap_err(),
        client.latch("a", 0).wait().await.unwrap_err(),
        client.latch("", 1).remaining().await.unwrap_err(),
        latch.count_down_as("").await.unwrap_err(),
        latch.clone().retention(Duration::MAX).count_down().await.unwrap_err(),
        latch.clone().retention(Duration::ZERO).count_down().await.unwrap_err(),
        tokio::time::timeout(SOON, latch.clone().retention(Duration::ZERO).count_down_as("w"))
            .await
            .expect("an invalid count ends")
            .unwrap_err(),
    ] {
        assert!(error.is_invalid(), "{error}");
    }
    assert!(client.list().await.unwrap().is_empty());
    latch.count_down().await.unwrap();
    for error in [
        client.latch("a", 4).count_down().await.unwrap_err(),
        client.latch("a", 4).remaining().await.unwrap_err(),
        client.latch("a", 4).wait().await.unwrap_err(),
    ] {
        assert!(error.is_invalid() && error.to_string().contains("in use with"), "{error}");
    }
    assert_eq!(latch.remaining().await.unwrap(), 2);
}

async fn blocking_latch_counts_down(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let latch = client.latch("a", 2).retention(Duration::from_secs(60));
        assert_eq!((latch.count_down()?, latch.remaining()?), (1, 1));
        assert!(!latch.wait_timeout(Duration::from_millis(10))?);
        assert_eq!(latch.count_down_as("me")?, 0);
        latch.wait()?;
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
