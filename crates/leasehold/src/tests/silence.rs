//! A store that does not answer: an attempt ends with an error, and with `None` only if the store says so.

use super::*;
use crate::MutexSet;

/// Wait limit of the attempts.
const LIMIT: Duration = Duration::from_millis(300);

type Attempt = Pin<Box<dyn Future<Output = Result<bool, Error>> + Send>>;

/// Attempts of every kind at the same name, each with this limit. Each returns whether it was granted.
fn attempts(client: &Client, limit: Duration) -> Vec<(&'static str, Attempt)> {
    fn attempt<T: Send + 'static>(
        taken: impl Future<Output = Result<Option<T>, Error>> + Send + 'static,
    ) -> Attempt {
        Box::pin(async move { Ok(taken.await?.is_some()) })
    }
    macro_rules! all {
        ($($what:literal: $lock:expr, $taking:ident($($arg:expr),*);)*) => {
            vec![$(($what, {
                let lock = $lock;
                attempt(async move { lock.$taking($($arg,)* limit).await })
            })),*]
        };
    }
    all! {
        "mutex": client.mutex("a"), lock_timeout();
        "global-FIFO mutex": client.mutex("a").global_fifo(), lock_timeout();
        "reentrant": client.reentrant_mutex("a", "me"), lock_timeout();
        "semaphore": client.semaphore("a", 1), acquire_timeout(1);
        "read": client.rw_lock("a"), read_timeout();
        "write": client.rw_lock("a"), write_timeout();
        "upgradable read": client.rw_lock("a"), upgradable_read_timeout();
        "election": client.election("a"), campaign_timeout();
        "set": MutexSet::new(["a", "b"].map(|name| client.mutex(name))), lock_timeout();
        "set of one": MutexSet::new([client.mutex("a").replicas(0)]), lock_timeout();
    }
}

fn assert_unavailable(case: &str, ended: &Result<bool, Error>) {
    let is_unavailable = ended.as_ref().is_err_and(Error::is_unavailable);
    assert!(is_unavailable, "{case}: {ended:?}");
}

/// Asserts that an attempt ends soon after its limit.
fn assert_in_time(case: &str, began: Instant, limit: Duration) {
    let late = began.elapsed().saturating_sub(limit);
    // 2 s, and a pause of the machine. A command without an answer is given up after 15 s.
    assert!(late < Duration::from_secs(10), "{case}: ended {late:?} after its limit");
}

#[test]
fn attempt_on_an_unresponsive_store_is_unavailable() {
    for fate in [Fate::NeverDone, Fate::NeverAnswered, Fate::CommandLost, Fate::NotSent, Fate::Busy] {
        let stage = Stage::new();
        stage.becomes(fate);
        let began = Instant::now();
        thread::scope(|scope| {
            for (what, attempt) in attempts(&stage.client, LIMIT) {
                scope.spawn(move || {
                    let case = format!("{what} over a store that is {fate:?}");
                    assert_unavailable(&case, &block_on(attempt));
                    assert_in_time(&case, began, LIMIT);
                });
            }
        });
    }
}

#[test]
fn try_lock_on_a_failing_store_is_unavailable() {
    for fate in [Fate::CommandLost, Fate::NotSent, Fate::Busy] {
        let stage = Stage::new();
        stage.becomes(fate);
        for (what, attempt) in attempts(&stage.client, Duration::ZERO) {
            assert_unavailable(&format!("{what} over a store that is {fate:?}"), &block_on(attempt));
        }
        let once = stage.client.once_per("a", Duration::from_secs(60));
        let started = block_on(once.start()).map(|started| started.is_some());
        assert_unavailable(&format!("once per period over a store that is {fate:?}"), &started);
    }
}

/// The store is well, and was only asked too late.
#[test]
fn pause_of_the_program_fails_no_attempt() {
    let kinds = attempts(&Stage::new().client, LIMIT).len();
    for pauses in [1, 2, 5] {
        for index in 0..kinds {
            let stage = Stage::new();
            let (what, attempt) = attempts(&stage.client, Duration::from_secs(60)).swap_remove(index);
            stage.script(&[Fate::Paused].repeat(pauses));
            assert!(block_on(attempt).unwrap(), "{what}, {pauses} pauses");
        }
        let stage = Stage::new();
        stage.script(&[Fate::Paused].repeat(pauses));
        assert!(block_on(stage.client.mutex("a").try_lock()).unwrap().is_some(), "{pauses} pauses");
        stage.other_takes_it();
        stage.script(&[Fate::Paused].repeat(pauses));
        assert!(block_on(stage.mutex().try_lock()).unwrap().is_none(), "{pauses} pauses");
    }
}

#[test]
fn pause_of_the_first_task_fails_none_behind_it() {
    let stage = Stage::new();
    let mutex = stage.mutex();
    stage.script(&[Fate::Paused]);
    let tasks: Vec<_> = (0..4).map(|_| async { mutex.lock().await?.release().await }).collect();
    for released in block_on(futures_util::future::join_all(tasks)) {
        released.unwrap();
    }
}

/// One attempt of each kind waits behind a holder when the store stops responding.
#[test]
fn waiter_is_unavailable_at_its_deadline_when_the_store_stops_responding() {
    for fate in [Fate::NeverDone, Fate::CommandLost, Fate::NotSent, Fate::Busy] {
        let kinds = attempts(&Stage::new().client, LIMIT).len();
        thread::scope(|scope| {
            for index in 0..kinds {
                scope.spawn(move || {
                    let stage = Stage::new();
                    // The holder keeps its locks.
                    let holder = stage.other_client();
                    let _held = [
                        block_on(holder.mutex("a").lock()).unwrap(),
                        block_on(holder.semaphore("a", 1).acquire(1)).unwrap(),
                        block_on(holder.rw_lock("a").write()).map(Guard::from).unwrap(),
                        block_on(holder.election("a").campaign()).unwrap(),
                    ];
                    let began = Instant::now();
                    let (what, mut attempt) = attempts(&stage.client, LIMIT).swap_remove(index);
                    let case = format!("{what} over a store that becomes {fate:?}");
                    assert!(poll_once(attempt.as_mut()).is_pending(), "{case}");
                    stage.becomes(fate);
                    assert_unavailable(&case, &block_on(attempt));
                    assert_in_time(&case, began, LIMIT);
                });
            }
        });
    }
}

#[test]
fn every_task_of_a_local_queue_gets_unavailable_from_an_unresponsive_store() {
    for fate in [Fate::NeverDone, Fate::CommandLost] {
        let stage = Stage::new();
        stage.other_takes_it();
        let mutex = stage.mutex();
        let mut queue: Vec<_> = (0..4).map(|_| Box::pin(mutex.lock_timeout(LIMIT))).collect();
        for task in &mut queue {
            assert!(poll_once(task.as_mut()).is_pending());
        }
        // It keeps waiting behind them.
        let mut last = Box::pin(mutex.lock());
        assert!(poll_once(last.as_mut()).is_pending());
        stage.becomes(fate);
        let began = Instant::now();
        let mut tasks = futures_util::future::join_all(queue);
        let ended = block_on(poll_fn(|context| {
            assert!(last.as_mut().poll(context).is_pending());
            Pin::new(&mut tasks).poll(context)
        }));
        for ended in ended {
            let ended = ended.map(|guard| guard.is_some());
            assert_unavailable(
                &format!("a task of a local queue over a store that becomes {fate:?}"),
                &ended,
            );
        }
        assert_in_time("a local queue", began, LIMIT);
        stage.answers_again();
        stage.other_gives_it_back();
        drop(block_on(last).expect("the local queue continues"));
        stage.assert_nothing_is_left("a local queue over a store that was silent for a time");
    }
}

#[test]
fn task_whose_turn_comes_while_the_store_is_silent_gets_unavailable() {
    let stage = Stage::new();
    // The lease, and with it a release without an answer, ends before the attempt gives up.
    let mutex = stage.client.mutex("a").ttl(Duration::from_millis(500));
    let held = block_on(mutex.lock()).unwrap();
    let mut waits = Box::pin(mutex.lock_timeout(LIMIT));
    assert!(poll_once(waits.as_mut()).is_pending());
    stage.becomes(Fate::NeverDone);
    // The task needs a token, for which the lease is renewed.
    drop(held);
    let began = Instant::now();
    let ended = block_on(waits).map(|guard| guard.is_some());
    assert_unavailable("a task whose turn has come", &ended);
    assert_in_time("a task whose turn has come", began, LIMIT);
    stage.answers_again();
    stage.assert_nothing_is_left("a task whose turn came while the store was silent");
}

#[test]
fn try_lock_beside_a_local_waiter_is_unavailable_on_an_unresponsive_store() {
    let stage = Stage::new();
    stage.other_takes_it();
    let mutex = stage.mutex();
    let mut waits = Box::pin(mutex.lock());
    assert!(poll_once(waits.as_mut()).is_pending());
    assert!(block_on(mutex.try_lock()).unwrap().is_none(), "the store reports a holder");
    stage.becomes(Fate::CommandLost);
    assert_unavailable("a task that tries", &block_on(mutex.try_lock()).map(|guard| guard.is_some()));
    let set = MutexSet::new(["a", "b"].map(|name| stage.client.mutex(name).ttl(Duration::from_secs(2))));
    assert_unavailable("a set that is tried", &block_on(set.try_lock()).map(|guard| guard.is_some()));
}

#[test]
fn timed_out_tasks_get_none_and_leave_the_queue() {
    let stage = Stage::new();
    stage.other_takes_it();
    let mutex = stage.mutex();
    let queue: Vec<_> = (0..4).map(|_| Box::pin(mutex.lock_timeout(LIMIT))).collect();
    for ended in block_on(futures_util::future::join_all(queue)) {
        assert!(ended.unwrap().is_none());
    }
    assert!(stage.is_clean(), "{:?} was left", stage.view());
    stage.assert_nothing_is_left("a local queue whose tasks timed out");
}

#[test]
fn task_behind_a_local_holder_times_out_without_asking_an_unresponsive_store() {
    let stage = Stage::new();
    let mutex = stage.client.mutex("a");
    let guard = block_on(mutex.lock()).unwrap();
    stage.becomes(Fate::CommandLost);
    assert!(block_on(mutex.lock_timeout(LIMIT)).unwrap().is_none(), "the client itself holds it");
    assert!(block_on(mutex.try_lock()).unwrap().is_none());
    assert!(guard.is_held());
}

#[test]
fn shortest_wait_still_asks_the_store() {
    let stage = Stage::new();
    for limit in [Duration::from_nanos(1), Duration::from_micros(1)] {
        stage.other_takes_it();
        assert!(block_on(stage.mutex().global_fifo().lock_timeout(limit)).unwrap().is_none());
        stage.becomes(Fate::CommandLost);
        let ended = block_on(stage.mutex().global_fifo().lock_timeout(limit)).map(|guard| guard.is_some());
        assert_unavailable("the shortest limit", &ended);
        stage.answers_again();
        stage.other_gives_it_back();
    }
}
