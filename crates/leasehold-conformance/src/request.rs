//! Attempts that their callers name, and leases whose ids are all that renewals and releases need.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, Guard, LeaseId, Mutex};

use crate::mutex::{queue, until};
use crate::{Place, SOON, Test, pair, until_true};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    leases_are_renewed_and_released_by_their_ids_alone,
    id_of_a_detachable_lease_opens_nothing_else,
    waited_for_detachable_lease_has_its_full_ttl,
    request_is_refused_over_a_quorum,
    repeated_request_gets_the_same_lease_at_any_client,
    request_keeps_its_place_and_is_granted_to_the_client_that_repeats_it,
    request_that_waits_and_then_tries_leaves_the_queue,
    request_with_other_terms_is_another_one,
    request_that_is_not_repeated_leaves_the_queue,
    grant_that_nobody_hears_of_is_released,
    request_that_moved_is_not_released_by_its_former_client,
    released_request_has_ended_at_every_client,
    id_of_a_lease_opens_no_later_one_of_its_request,
    returned_lease_is_released_unless_its_request_is_repeated,
    dropped_guard_of_a_request_leaves_time_to_repeat_it,
    dropped_guard_of_a_request_keeps_its_minimum_hold,
    closed_client_releases_no_lease_of_which_another_has_told,
    task_that_repeats_a_request_beside_another_is_refused,
    holder_of_a_request_is_the_one_that_is_named,
];

const TTL: Duration = Duration::from_secs(20);

/// Longer than a caller may take to repeat its request.
const AWAY: Duration = Duration::from_millis(3_500);

/// Long enough for the first answer on a busy machine.
const SLICE: Duration = Duration::from_secs(1);

/// Each test has ids of its own: where they share a store, what a client of an earlier test releases 2.5 s later ends no request of a later one.
fn request(client: &Client, id: u8) -> Mutex {
    request_of(client, "a", id)
}

fn request_of(client: &Client, name: &str, id: u8) -> Mutex {
    client.mutex(name).ttl(TTL).request([id; 16])
}

/// A quorum has no requests.
fn is_skipped(store: &Place) -> bool {
    store.is_quorum
}

/// The condition holds for longer than a caller may take to repeat its request.
async fn stays(mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < AWAY {
        assert!(is_so().await, "it has ended after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Since when a caller has not asked.
#[derive(Clone, Copy)]
struct Away(Instant);

/// The machine was too busy to repeat a request in time.
struct Late;

impl Away {
    fn begin() -> Self {
        Self(Instant::now())
    }

    /// The outcome of the repeated request, unless it came so late that the request may have ended.
    fn outcome<T>(self, repeated: Result<T, Error>) -> Result<T, Late> {
        match repeated {
            Err(error) if error.is_lost() && self.0.elapsed() > Duration::from_secs(2) => Err(Late),
            repeated => Ok(repeated.unwrap()),
        }
    }
}

/// The test passes under one of five names. Under the others the machine was too busy.
async fn in_time(mut test: impl AsyncFnMut(&str) -> Result<(), Late>) {
    for name in ["a", "b", "c", "d", "e"] {
        if test(name).await.is_ok() {
            return;
        }
    }
    panic!("each of five requests ended before it was repeated");
}

/// Repeats a request, as a caller does, until it is granted.
async fn repeat(mutex: &Mutex, mut away: Away) -> Result<Guard, Late> {
    loop {
        if let Some(guard) = away.outcome(mutex.lock_timeout(Duration::from_secs(5)).await)? {
            return Ok(guard);
        }
        away = Away::begin();
    }
}

async fn leases_are_renewed_and_released_by_their_ids_alone(store: Place) {
    let (one, other) = pair(&store).await;
    let mut ids: Vec<LeaseId> = Vec::new();
    for name in ["a", "b", "c"] {
        ids.push(one.mutex(name).ttl(TTL).detachable().lock().await.unwrap().detach().await.unwrap());
    }
    // One whose lock was not detachable, one that has ended, and one of another kind.
    ids.push(one.mutex("d").ttl(TTL).lock().await.unwrap().detach().await.unwrap());
    let ended = one.mutex("e").ttl(TTL).detachable().lock().await.unwrap().detach().await.unwrap();
    assert_eq!(
        one.release_leases([&ended]).await.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
        [true]
    );
    ids.insert(1, ended);
    one.close().await.unwrap();
    let ids: Vec<LeaseId> = ids.iter().map(|id| id.to_string().parse().unwrap()).collect();
    let renewed = other.renew_leases(&ids).await;
    for (at, renewed) in renewed.into_iter().enumerate() {
        match renewed {
            Ok(left) => assert!(at != 1 && left > TTL / 2 && left <= TTL, "{at}: {left:?}"),
            Err(error) => assert!(at == 1 && error.is_lost(), "{at}: {error}"),
        }
    }
    for name in ["a", "b", "c", "d"] {
        assert!(other.mutex(name).try_lock().await.unwrap().is_none(), "{name} is held");
    }
    let released = other.release_leases(&ids).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(released, [true, false, true, true, true]);
    let again = other.release_leases(&ids).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(again, [false; 5]);
    for name in ["a", "b", "c", "d"] {
        assert!(other.mutex(name).lock_timeout(SOON).await.unwrap().is_some(), "{name} is free");
    }
}

async fn id_of_a_detachable_lease_opens_nothing_else(store: Place) {
    let (one, other) = pair(&store).await;
    let take = async |name: &str| {
        one.mutex(name).ttl(TTL).detachable().lock().await.unwrap().detach().await.unwrap()
    };
    let (id, sibling) = (take("a").await, take("b").await);
    let text = id.to_string();
    let (terms, secret) = text.rsplit_once('.').unwrap();
    let shown = format!("{:?} {:?}", other.list().await.unwrap(), other.mutex("a").inspect().await.unwrap());
    assert!(!shown.contains(secret) && !format!("{id:?}").contains(secret), "{shown}");
    let of_sibling = sibling.to_string();
    let guess: LeaseId = format!("{terms}.{}", of_sibling.rsplit_once('.').unwrap().1).parse().unwrap();
    assert!(other.renew_leases([&guess]).await.remove(0).unwrap_err().is_lost());
    assert!(!other.release_leases([&guess]).await.remove(0).unwrap());
    assert!(other.mutex("a").try_lock().await.unwrap().is_none(), "it is held");
    let guard = other.attach(&id).await.unwrap();
    assert_eq!(guard.token(), id.token());
    guard.release().await.unwrap();
}

async fn waited_for_detachable_lease_has_its_full_ttl(store: Place) {
    let (one, other) = pair(&store).await;
    let held = one.mutex("a").lock().await.unwrap();
    let waiting = queue(&other.mutex("a").ttl(TTL).detachable()).await;
    held.release().await.unwrap();
    let id = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().detach().await.unwrap();
    let left = one.inspect_lease(&id).await.unwrap().expect("it is held").expires_in;
    assert!(left > TTL / 2, "{left:?}");
    assert!(one.release_leases([&id]).await.remove(0).unwrap());
}

async fn request_is_refused_over_a_quorum(store: Place) {
    let client = store.client().await;
    match request(&client, 41).try_lock().await {
        Err(error) => assert!(store.is_quorum && error.is_unsupported(), "{error}"),
        Ok(granted) => assert!(!store.is_quorum && granted.is_some()),
    }
}

async fn repeated_request_gets_the_same_lease_at_any_client(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let first = request(&one, 51).lock().await.unwrap().detach().await.unwrap();
    for client in [&one, &other, &one] {
        for mutex in [request(client, 51), request(client, 51)] {
            let again =
                mutex.try_lock().await.unwrap().expect("it is the same lease").detach().await.unwrap();
            assert_eq!(again, first);
        }
    }
    assert!(request(&other, 52).try_lock().await.unwrap().is_none(), "another request");
    assert!(one.mutex("b").ttl(TTL).request([51; 16]).try_lock().await.unwrap().is_some(), "another lock");
    assert!(other.release_leases([&first]).await.remove(0).unwrap());
    until(&one.mutex("a"), |view| view.holders.is_empty() && view.waiters.is_empty()).await;
}

async fn request_keeps_its_place_and_is_granted_to_the_client_that_repeats_it(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let third = store.client().await;
    in_time(async |name| {
        let held = one.mutex(name).ttl(TTL).lock().await.unwrap();
        assert!(request_of(&one, name, 61).lock_timeout(SLICE).await.unwrap().is_none());
        let away = Away::begin();
        let behind = queue(&third.mutex(name).ttl(TTL)).await;
        // The caller's next server.
        let mutex = request_of(&other, name, 61);
        let repeated = tokio::spawn(async move { repeat(&mutex, away).await });
        let mut order = Vec::new();
        // It is there once, and before the one that came after it. Its former client does not end it.
        stays(async || {
            let waiters = one.mutex(name).inspect().await.unwrap().waiters;
            order = waiters.iter().map(|waiter| waiter.waiting_for).collect();
            repeated.is_finished() || order.len() == 2
        })
        .await;
        if repeated.is_finished() {
            behind.abort();
            return Err(repeated.await.unwrap().expect_err("the lock is held"));
        }
        assert!(order[0] >= order[1]);
        held.release().await.unwrap();
        let guard = tokio::time::timeout(SOON, repeated).await.expect("the new client is told").unwrap()?;
        assert!(!behind.is_finished());
        guard.release().await.unwrap();
        drop(tokio::time::timeout(SOON, behind).await.unwrap().unwrap());
        Ok(())
    })
    .await;
}

/// As a caller does whose time is over.
async fn request_that_waits_and_then_tries_leaves_the_queue(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    in_time(async |name| {
        let held = one.mutex(name).ttl(TTL).lock().await.unwrap();
        assert!(request_of(&one, name, 71).lock_timeout(SLICE).await.unwrap().is_none());
        let away = Away::begin();
        for client in [&other, &one] {
            let tried = tokio::time::timeout(SOON, request_of(client, name, 71).try_lock()).await;
            assert!(away.outcome(tried.expect("it does not wait"))?.is_none());
        }
        until(&other.mutex(name), |view| view.waiters.is_empty()).await;
        held.release().await.unwrap();
        Ok(())
    })
    .await;
}

/// What was granted to a request is not given for more than that.
async fn request_with_other_terms_is_another_one(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let uploads = |client: &Client| client.semaphore("a", 5).ttl(TTL).request([81; 16]);
    let held = uploads(&one).try_acquire(1).await.unwrap().expect("it is free");
    assert!(uploads(&other).try_acquire(5).await.unwrap().is_none());
    let same = uploads(&other).try_acquire(1).await.unwrap().expect("it is the same lease");
    assert_eq!(same.token(), held.token());
    let report = |client: &Client| client.rw_lock("a").ttl(TTL).request([81; 16]);
    let reading = report(&one).try_read().await.unwrap().expect("it is free");
    assert!(report(&other).try_write().await.unwrap().is_none(), "there is a reader");
    let owned = |client: &Client, owner: &str| client.reentrant_mutex("a", owner).ttl(TTL).request([81; 16]);
    let first = owned(&one, "job 7").try_lock().await.unwrap().expect("it is free");
    assert!(owned(&other, "job 8").try_lock().await.unwrap().is_none(), "another owner");
    drop((same, reading, first));
}

async fn request_that_is_not_repeated_leaves_the_queue(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let held = one.mutex("a").ttl(TTL).lock().await.unwrap();
    assert!(request(&one, 91).lock_timeout(SLICE).await.unwrap().is_none());
    until(&other.mutex("a"), |view| view.waiters.len() == 1).await;
    // So does one whose future is dropped.
    let mutex = request(&one, 92);
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until(&other.mutex("a"), |view| view.waiters.len() == 2).await;
    waiting.abort();
    until(&other.mutex("a"), |view| view.waiters.is_empty()).await;
    // Its caller was away for too long.
    for client in [&one, &other] {
        assert!(request(client, 91).lock_timeout(SOON).await.unwrap_err().is_lost());
    }
    held.release().await.unwrap();
}

async fn grant_that_nobody_hears_of_is_released(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let held = one.mutex("a").ttl(TTL).lock().await.unwrap();
    assert!(request(&one, 101).lock_timeout(SLICE).await.unwrap().is_none());
    let behind = queue(&other.mutex("a").ttl(TTL)).await;
    held.release().await.unwrap();
    // It was granted to the request of which no task knows, and goes on.
    let granted = tokio::time::timeout(SOON, behind).await.expect("it is released").unwrap();
    assert!(request(&other, 101).try_lock().await.unwrap_err().is_lost());
    granted.release().await.unwrap();
}

async fn request_that_moved_is_not_released_by_its_former_client(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    in_time(async |name| {
        let held = one.mutex(name).ttl(TTL).lock().await.unwrap();
        assert!(request_of(&one, name, 111).lock_timeout(SLICE).await.unwrap().is_none());
        let away = Away::begin();
        held.release().await.unwrap();
        // Granted to the first client, which does not know whether the caller asks elsewhere.
        let id = repeat(&request_of(&other, name, 111), away).await?.detach().await.unwrap();
        stays(async || one.inspect_lease(&id).await.unwrap().is_some()).await;
        let left = one.inspect_lease(&id).await.unwrap().expect("it is still held").expires_in;
        assert!(left > TTL / 2, "{left:?}");
        assert!(one.release_leases([&id]).await.remove(0).unwrap());
        Ok(())
    })
    .await;
}

async fn released_request_has_ended_at_every_client(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let id = request(&one, 121).lock().await.unwrap().detach().await.unwrap();
    assert!(other.release_leases([&id]).await.remove(0).unwrap());
    for client in [&one, &other] {
        let error = request(client, 121).try_lock().await.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("new id"), "{error}");
        assert!(request(client, 121).lock_timeout(SOON).await.unwrap_err().is_lost());
    }
    assert!(request(&one, 122).try_lock().await.unwrap().is_some(), "the lock is free");
}

/// A late repeat is granted anew after the lease was ended by force. The caller must not take that for its first lease.
async fn id_of_a_lease_opens_no_later_one_of_its_request(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let first = request(&one, 125).lock().await.unwrap().detach().await.unwrap();
    let guard = one.attach(&first).await.unwrap();
    assert_eq!(one.mutex("a").force_release().await.unwrap().len(), 1);
    let second = request(&other, 125).lock().await.unwrap().detach().await.unwrap();
    assert!(second.token() > first.token());
    let renewed = one.renew_leases([&first, &second]).await;
    assert!(renewed[0].as_ref().unwrap_err().is_lost(), "{renewed:?}");
    assert!(renewed[1].is_ok(), "{renewed:?}");
    assert!(guard.renew().await.unwrap_err().is_lost());
    assert!(one.inspect_lease(&first).await.unwrap().is_none());
    assert!(one.attach(&first).await.unwrap_err().is_lost());
    assert!(!one.release_leases([&first]).await.remove(0).unwrap());
    assert!(one.inspect_lease(&second).await.unwrap().is_some());
    assert!(one.release_leases([&second]).await.remove(0).unwrap());
}

async fn returned_lease_is_released_unless_its_request_is_repeated(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    in_time(async |name| {
        let again = async |client: &Client, away: Away| {
            let granted = away.outcome(request_of(client, name, 131).try_lock().await)?;
            Ok(granted.expect("it is the same lease").detach().await.unwrap())
        };
        let id = request_of(&one, name, 131).lock().await.unwrap().detach().await.unwrap();
        assert!(one.return_lease(&id));
        // The caller repeats its request here, and another time elsewhere.
        assert_eq!(again(&one, Away::begin()).await?, id);
        assert!(one.return_lease(&id));
        let repeated = again(&other, Away::begin()).await?;
        assert_eq!(repeated, id);
        // A late repeat whose answer is lost does not end the lease that the caller has.
        assert!(other.return_lease(&repeated));
        stays(async || one.inspect_lease(&id).await.unwrap().is_some()).await;
        assert!(one.release_leases([&id]).await.remove(0).unwrap());
        Ok(())
    })
    .await;
    let id = request(&one, 132).lock().await.unwrap().detach().await.unwrap();
    assert!(one.return_lease(&id));
    until(&one.mutex("a"), |view| view.holders.is_empty()).await;
    assert!(request(&one, 132).try_lock().await.unwrap_err().is_lost());
    // A lease that was only detachable is released at once.
    let id = one.mutex("a").ttl(TTL).detachable().lock().await.unwrap().detach().await.unwrap();
    assert!(one.return_lease(&id));
    until_true(async || one.inspect_lease(&id).await.unwrap().is_none()).await;
}

async fn dropped_guard_of_a_request_leaves_time_to_repeat_it(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    in_time(async |name| {
        let guard = request_of(&one, name, 141).lock().await.unwrap();
        let token = guard.token();
        let away = Away::begin();
        drop(guard);
        let again = away.outcome(request_of(&other, name, 141).try_lock().await)?;
        let again = again.expect("it is the same lease");
        assert_eq!(again.token(), token);
        // The caller may know of it by another answer.
        drop(again);
        stays(async || one.mutex(name).inspect().await.unwrap().holders.len() == 1).await;
        let again =
            request_of(&one, name, 141).try_lock().await.unwrap().expect("it is still the same lease");
        again.release().await.unwrap();
        Ok(())
    })
    .await;
    drop(request(&one, 142).lock().await.unwrap());
    until(&one.mutex("a"), |view| view.holders.is_empty()).await;
    assert!(request(&one, 142).try_lock().await.unwrap_err().is_lost());
}

async fn dropped_guard_of_a_request_keeps_its_minimum_hold(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let report = |client: &Client, id: u8| client.once_per("a", Duration::from_secs(3_600)).request([id; 16]);
    drop(report(&one, 151).start().await.unwrap().expect("it is the first start of the period"));
    until(&other.mutex("a"), |view| view.holders.iter().any(|holder| holder.retained)).await;
    assert!(report(&other, 152).start().await.unwrap().is_none());
    // A caller that was not told of its start has not done the work.
    let again = |client: &Client| client.once_per("b", Duration::from_secs(3_600)).request([153; 16]);
    let id = again(&one).start().await.unwrap().expect("it is the first start").detach().await.unwrap();
    assert!(one.return_lease(&id));
    until(&other.mutex("b"), |view| view.holders.is_empty()).await;
}

async fn closed_client_releases_no_lease_of_which_another_has_told(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let (one, other) = pair(&store).await;
    let guard = request(&one, 161).lock().await.unwrap();
    let lone = request_of(&one, "b", 161).lock().await.unwrap();
    let continued = request(&other, 161).try_lock().await.unwrap().expect("it is the same lease");
    one.close().await.unwrap();
    assert!(!guard.is_held() && !lone.is_held());
    until(&other.mutex("b"), |view| view.holders.is_empty()).await;
    continued.renew().await.unwrap();
    continued.release().await.unwrap();
}

async fn task_that_repeats_a_request_beside_another_is_refused(store: Place) {
    if is_skipped(&store) {
        return;
    }
    let client = store.client().await;
    let held = client.mutex("a").ttl(TTL).lock().await.unwrap();
    let waiting = queue(&request(&client, 171)).await;
    let error = request(&client, 171).lock_timeout(SLICE).await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("another task"), "{error}");
    held.release().await.unwrap();
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap();
    guard.release().await.unwrap();
}

async fn holder_of_a_request_is_the_one_that_is_named(store: Place) {
    let (one, other) = pair(&store).await;
    let mutex = one.mutex("a").label("job 7").detachable().holder("billing", "10.0.0.7");
    let guard = mutex.lock().await.unwrap();
    let waiting = queue(&other.mutex("a").detachable()).await;
    let view = other.mutex("a").inspect().await.unwrap();
    let shown = &view.holders[0].metadata;
    assert_eq!((shown.program.as_deref(), shown.host.as_deref()), (Some("billing"), Some("10.0.0.7")));
    assert_eq!((shown.pid, shown.label.as_deref()), (None, Some("job 7")));
    assert_eq!(view.waiters[0].metadata.pid, Some(std::process::id()));
    guard.release().await.unwrap();
    drop(waiting.await.unwrap());
}
