//! Local hand-off: the tasks of one client pass its lease on among themselves.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::{Error, Guard, Kind, Loss, Mutex};

use crate::{Place, SOON, Test, pair, queue, until};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    local_queue_is_fifo_with_rising_tokens,
    local_handoff_is_unlimited_while_no_other_client_waits,
    contended_local_handoff_ends_after_max_handoffs,
    contended_local_handoff_ends_after_max_duration,
    cancelled_task_in_the_local_queue_is_skipped,
    unpolled_task_does_not_block_the_local_queue,
    local_queue_acquires_again_after_a_lost_lease,
    try_lock_does_not_overtake_the_local_queue,
    different_options_use_separate_local_queues,
    full_local_queue_refuses_tasks,
    closing_the_client_ends_its_local_queue,
    tokens_rise_across_local_queues_of_several_clients,
];

type Attempt = Pin<Box<dyn Future<Output = Result<Guard, Error>> + Send>>;

/// An attempt that has joined the local queue.
async fn join_queue(mutex: &Mutex) -> Attempt {
    let mutex = mutex.clone();
    let mut attempt: Attempt = Box::pin(async move { mutex.lock().await });
    poll_fn(|context| {
        assert!(attempt.as_mut().poll(context).is_pending(), "another task holds it");
        Poll::Ready(())
    })
    .await;
    attempt
}

async fn local_queue_is_fifo_with_rising_tokens(store: Place) {
    let (one, other) = pair(&store).await;
    let mut held = one.mutex("a").lock().await.unwrap();
    let mut queue = Vec::new();
    for _ in 0..100 {
        queue.push(join_queue(&one.mutex("a")).await);
    }
    for next in queue {
        let last = held.token();
        held.release().await.unwrap();
        held = next.await.unwrap();
        assert!(held.is_held() && held.token() > last);
    }
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    let last = held.token();
    held.release().await.unwrap();
    assert!(other.mutex("a").lock().await.unwrap().token() > last);
}

async fn local_handoff_is_unlimited_while_no_other_client_waits(store: Place) {
    let client = store.client().await;
    let mutex = client.mutex("a").local_handoff(1, Duration::from_millis(1));
    let mut held = mutex.lock().await.unwrap();
    let first = held.token();
    for _ in 0..20 {
        let next = join_queue(&mutex).await;
        held.release().await.unwrap();
        held = next.await.unwrap();
        let view = mutex.inspect().await.unwrap();
        assert_eq!(view.holders[0].token, first, "the store does not see the hand-off");
        assert!(view.last_token >= Some(held.token()), "the token was reserved");
    }
}

/// Tasks of one client acquire and release the lock until `end`. Returns the number of their grants so far.
fn contend(mutex: &Mutex, end: &Arc<AtomicBool>) -> (Arc<AtomicU32>, Vec<tokio::task::JoinHandle<()>>) {
    let count = Arc::new(AtomicU32::new(0));
    let take = |_| {
        let (mutex, end, count) = (mutex.clone(), end.clone(), count.clone());
        tokio::spawn(async move {
            while !end.load(Ordering::Relaxed) {
                let guard = mutex.lock().await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                // The work: short enough for many grants, long enough for a push to arrive meanwhile.
                tokio::time::sleep(Duration::from_millis(2)).await;
                guard.release().await.unwrap();
            }
        })
    };
    let tasks = (0..8).map(take).collect();
    (count, tasks)
}

/// Number of local grants between another client's enqueue and its grant.
///
/// The budget starts when the push `Contended` arrives, so each round counts the grants before that too. A slow push may be the
/// machine's: the fewest grants of several rounds count.
async fn grants_before_another_client(store: &Place, max_handoffs: u32, max_duration: Duration) -> u32 {
    let mut fewest = u32::MAX;
    for _ in 0..5 {
        fewest = fewest.min(one_contended_round(store, max_handoffs, max_duration).await);
    }
    fewest
}

async fn one_contended_round(store: &Place, max_handoffs: u32, max_duration: Duration) -> u32 {
    let (one, other) = pair(store).await;
    let end = Arc::new(AtomicBool::new(false));
    let (count, tasks) = contend(&one.mutex("a").local_handoff(max_handoffs, max_duration), &end);
    until(&one, Kind::Mutex, "a", |view| !view.holders.is_empty()).await;
    let mutex = other.mutex("a");
    let waiting = queue(&other, Kind::Mutex, "a", async move { mutex.lock().await }).await;
    let before = count.load(Ordering::Relaxed);
    let guard = tokio::time::timeout(SOON, waiting).await.expect("the other client is granted").unwrap();
    let grants = count.load(Ordering::Relaxed) - before;
    end.store(true, Ordering::Relaxed);
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    grants
}

async fn contended_local_handoff_ends_after_max_handoffs(store: Place) {
    let grants = grants_before_another_client(&store, 20, Duration::MAX).await;
    let most = 21 + grants_until_pushed(&store);
    assert!(grants <= most, "the other client waited for {grants} grants");
}

/// Grants of 2 ms until a holder knows that another client waits, where no push says so.
fn grants_until_pushed(store: &Place) -> u32 {
    u32::try_from(store.push_delay.as_millis() / 2).expect("few")
}

async fn contended_local_handoff_ends_after_max_duration(store: Place) {
    let grants = grants_before_another_client(&store, u32::MAX, Duration::from_millis(40)).await;
    let most = 21 + grants_until_pushed(&store);
    assert!(grants <= most, "the other client waited for {grants} grants of 2 ms");
}

async fn cancelled_task_in_the_local_queue_is_skipped(store: Place) {
    let client = store.client().await;
    let mutex = client.mutex("a");
    let guard = mutex.lock().await.unwrap();
    let (gone, stays, assigned) =
        (join_queue(&mutex).await, join_queue(&mutex).await, join_queue(&mutex).await);
    let last = join_queue(&mutex).await;
    drop(gone);
    assert!(mutex.lock_timeout(Duration::from_millis(20)).await.unwrap().is_none());
    guard.release().await.unwrap();
    let guard = stays.await.unwrap();
    guard.release().await.unwrap();
    // The lease is assigned to this task, which has not been polled since.
    drop(assigned);
    let guard = last.await.unwrap();
    drop(guard);
    until(&client, Kind::Mutex, "a", |view| view.holders.is_empty() && view.waiters.is_empty()).await;
}

async fn unpolled_task_does_not_block_the_local_queue(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = other.mutex("a").lock().await.unwrap();
    let asks = join_queue(&one.mutex("a")).await;
    let waits = join_queue(&one.mutex("a")).await;
    let gives_up = one.mutex("a").lock_timeout(Duration::from_millis(20)).await;
    assert!(gives_up.unwrap().is_none());
    drop(asks);
    until(&other, Kind::Mutex, "a", |view| view.waiters.len() == 1).await;
    guard.release().await.unwrap();
    let guard =
        tokio::time::timeout(SOON, waits).await.expect("the local queue acquires for all tasks").unwrap();
    guard.release().await.unwrap();
}

async fn local_queue_acquires_again_after_a_lost_lease(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    let next = join_queue(&one.mutex("a")).await;
    other.mutex("a").force_release().await.unwrap();
    assert_eq!(tokio::time::timeout(SOON, guard.lost()).await.expect("the loss is noticed"), Loss::Gone);
    let next = tokio::time::timeout(SOON, next)
        .await
        .expect("the next task does not wait for the lost guard")
        .unwrap();
    assert!(next.is_held() && next.token() > guard.token());
    assert!(guard.release().await.unwrap_err().is_lost());
    assert!(next.is_held());
    next.release().await.unwrap();
    until(&other, Kind::Mutex, "a", |view| view.holders.is_empty()).await;
}

async fn try_lock_does_not_overtake_the_local_queue(store: Place) {
    let client = store.client().await;
    let mutex = client.mutex("a");
    let guard = mutex.lock().await.unwrap();
    let next = join_queue(&mutex).await;
    guard.release().await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());
    assert!(mutex.lock_timeout(Duration::ZERO).await.unwrap().is_none());
    next.await.unwrap().release().await.unwrap();
    mutex.try_lock().await.unwrap().expect("the lock is free").release().await.unwrap();
}

async fn different_options_use_separate_local_queues(store: Place) {
    let client = store.client().await;
    let guard = client.mutex("a").lock().await.unwrap();
    let wants = [
        client.mutex("a").global_fifo(),
        client.mutex("a").label("other"),
        client.mutex("a").ttl(Duration::from_secs(9)),
        client.mutex("a").max_hold(SOON),
        client.mutex("a").auto_renew(false),
    ];
    let mut tasks = Vec::new();
    for mutex in wants {
        tasks.push(queue(&client, Kind::Mutex, "a", async move { mutex.lock().await }).await);
    }
    let mut last = guard.token();
    guard.release().await.unwrap();
    for task in tasks {
        let guard = task.await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        guard.release().await.unwrap();
    }
}

async fn full_local_queue_refuses_tasks(store: Place) {
    let client = store.client().await;
    let mutex = client.mutex("a").max_waiters(1);
    let guard = mutex.lock().await.unwrap();
    let next = join_queue(&mutex).await;
    assert!(mutex.lock().await.unwrap_err().is_queue_full());
    guard.release().await.unwrap();
    drop(next.await.unwrap());
}

async fn closing_the_client_ends_its_local_queue(store: Place) {
    let (one, other) = pair(&store).await;
    let guard = one.mutex("a").lock().await.unwrap();
    let queue = [join_queue(&one.mutex("a")).await, join_queue(&one.mutex("a")).await];
    one.close().await.unwrap();
    for attempt in queue {
        assert!(attempt.await.unwrap_err().is_closed());
    }
    assert_eq!(guard.lost().await, Loss::Closed);
    assert!(other.mutex("a").try_lock().await.unwrap().is_some());
}

async fn tokens_rise_across_local_queues_of_several_clients(store: Place) {
    let began = Instant::now();
    let tokens = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = store.client().await;
        for _ in 0..10 {
            let (mutex, tokens) =
                (client.mutex("a").local_handoff(7, Duration::from_millis(5)), tokens.clone());
            tasks.push(tokio::spawn(async move {
                // On a busy machine an attempt takes seconds, and fewer are granted in time: later ones wait for longer.
                let is_enough = |attempt| attempt >= 50 && tokens.lock().unwrap().len() > 50;
                for attempt in (0..).take_while(|attempt| !is_enough(*attempt)) {
                    assert!(
                        began.elapsed() < crate::LIMIT * 3 / 4,
                        "fifty attempts are granted in time, not {}",
                        tokens.lock().unwrap().len()
                    );
                    let limit = Duration::from_millis(attempt % 50) + began.elapsed() / 20;
                    let guard = match mutex.lock_timeout(limit).await {
                        Ok(Some(guard)) => guard,
                        // The store has 2 s for its answer, which is not always enough on a busy machine.
                        Err(error) if !error.is_unavailable() => panic!("{error}"),
                        Ok(None) | Err(_) => continue,
                    };
                    tokens.lock().unwrap().push(guard.token());
                    if attempt % 2 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let tokens = tokens.lock().unwrap();
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens rise in the order of the critical sections");
}
