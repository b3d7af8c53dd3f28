//! Elections: at most one leader at a time, which any client can observe.

use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use leasehold::{Error, Kind};

use crate::{Place, SOON, Test, pair, queue, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    resigned_leadership_goes_to_the_next_candidate,
    observer_reports_each_leader_with_its_label,
    observer_reports_the_end_of_a_dead_leader,
    observer_stream_ends_with_its_client,
    blocking_election_elects_and_observes,
];

const KIND: Kind = Kind::Election;

/// Poll interval of the observers.
const INTERVAL: Duration = Duration::from_millis(10);

async fn resigned_leadership_goes_to_the_next_candidate(store: Place) {
    let (one, other) = pair(&store).await;
    let first = one.election("a").campaign().await.unwrap();
    assert!(other.election("a").try_campaign().await.unwrap().is_none());
    assert!(other.election("a").campaign_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    until(&one, KIND, "a", |view| view.waiters.is_empty()).await;
    let election = other.election("a");
    let next = queue(&one, KIND, "a", async move { election.campaign().await }).await;
    assert_eq!(other.election("a").leader().await.unwrap().unwrap().token, first.token());
    let token = first.token();
    first.release().await.unwrap();
    let next = next.await.unwrap();
    assert!(next.token() > token);
    assert!(other.election("a").leader().await.unwrap().unwrap().is_own);
    next.release().await.unwrap();
    assert!(one.election("a").leader().await.unwrap().is_none());
    assert!(one.mutex("a").try_lock().await.unwrap().is_some(), "a mutex of that name is another lock");
}

async fn observer_reports_each_leader_with_its_label(store: Place) {
    let (one, other) = pair(&store).await;
    let mut observer = other.election("a").observe().every(INTERVAL);
    assert!(observer.next().await.unwrap().is_none(), "the observer reports at once that there is no leader");
    for address in ["10.0.0.7", "10.0.0.8"] {
        let leadership = one.election("a").label(address).campaign().await.unwrap();
        let reported = tokio::time::timeout(SOON, observer.next())
            .await
            .expect("the observer reports the change")
            .unwrap()
            .unwrap();
        assert_eq!((reported.metadata.label.as_deref(), reported.token), (Some(address), leadership.token()));
        let again = tokio::time::timeout(INTERVAL * 5, observer.next()).await;
        assert!(again.is_err(), "nothing has changed: {again:?}");
        leadership.release().await.unwrap();
        assert!(
            tokio::time::timeout(SOON, observer.next())
                .await
                .expect("the observer reports the change")
                .unwrap()
                .is_none()
        );
    }
}

async fn observer_reports_the_end_of_a_dead_leader(store: Place) {
    let (one, other) = pair(&store).await;
    let mut observer = other.election("a").observe().every(INTERVAL);
    let election = one.election("a").ttl(Duration::from_secs(3)).auto_renew(false);
    let leadership = election.campaign().await.unwrap();
    assert!(observer.next().await.unwrap().is_some());
    assert!(
        tokio::time::timeout(SOON, observer.next())
            .await
            .expect("the observer reports the change")
            .unwrap()
            .is_none()
    );
    assert!(!leadership.is_held());
    until(&one, KIND, "a", |view| view.holders.is_empty()).await;
}

async fn observer_stream_ends_with_its_client(store: Place) {
    let (one, other) = pair(&store).await;
    let leaders = other.election("a").observe().every(INTERVAL);
    let mut notes = leaders.map_ok(|leader| leader.and_then(|leader| leader.metadata.label));
    assert_eq!(
        notes.try_next().await.unwrap(),
        Some(None),
        "the observer reports at once that there is no leader"
    );
    let leadership = one.election("a").label("here").campaign().await.unwrap();
    let reported =
        tokio::time::timeout(SOON, notes.try_next()).await.expect("the observer reports the change");
    assert_eq!(reported.unwrap(), Some(Some("here".to_owned())));
    assert!(tokio::time::timeout(INTERVAL * 5, notes.next()).await.is_err(), "nothing has changed");
    leadership.release().await.unwrap();
    // It continues the poll whose future was dropped.
    let reported =
        tokio::time::timeout(SOON, notes.try_next()).await.expect("the observer reports the change");
    assert_eq!(reported.unwrap(), Some(None));
    other.close().await.unwrap();
    let end = tokio::time::timeout(SOON, notes.next()).await.expect("the stream ends");
    assert!(end.is_some_and(|end| end.is_err_and(|error| error.is_closed())));
    assert!(notes.next().await.is_none());
}

async fn blocking_election_elects_and_observes(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let election = client.election("a").label("here");
        let mut observer = election.observe().every(INTERVAL);
        assert!(observer.next()?.is_none());
        let leadership = election.campaign()?;
        assert!(election.try_campaign()?.is_none());
        assert_eq!(observer.next()?.and_then(|leader| leader.metadata.label).as_deref(), Some("here"));
        leadership.release()?;
        assert!(election.leader()?.is_none());
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
