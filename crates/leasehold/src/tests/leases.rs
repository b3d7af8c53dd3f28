//! Leases without renewal, leases with a minimum hold, and closing the client.

use leasehold_testkit::wait_until;

use super::*;
use crate::MutexSet;
use crate::engine::with_deadline;
use crate::guard::Guard;
use leasehold_core::Loss;

const HOUR: Duration = Duration::from_secs(3_600);

/// Reports reconnects to the client for this long.
fn reconnect_repeatedly(client: &Client, span: Duration) {
    let end = Instant::now() + span;
    while Instant::now() < end {
        client.handle.session.reconnected(&|_| true);
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn reconnects_do_not_extend_a_lease_without_renewal() {
    let stage = Stage::new();
    let ttl = Duration::from_secs(3);
    let mutex = stage.client.mutex("a").ttl(ttl).auto_renew(false);
    let began = Instant::now();
    let guard = block_on(mutex.lock()).unwrap();
    reconnect_repeatedly(&stage.client, ttl * 3 / 2);
    assert!(!guard.is_held(), "it is still held after {:?}", began.elapsed());
    assert!(stage.view().holders.is_empty(), "the store still has it: {:?}", stage.view());
    // Manual renewal extends it.
    let ttl = Duration::from_secs(12);
    let guard = block_on(mutex.ttl(ttl).lock()).unwrap();
    reconnect_repeatedly(&stage.client, ttl / 4);
    block_on(guard.renew()).unwrap();
    assert!(guard.remaining() > ttl / 4 * 3, "after a manual renewal: {:?}", guard.remaining());
}

/// Releases the guard while a task waits in the local queue. Returns whether the task is granted; otherwise the lock is retained.
fn is_handed_on(stage: &Stage, guard: Guard) -> bool {
    let mutex = stage.client.mutex("a");
    let mut next = Box::pin(mutex.lock());
    assert!(poll_once(next.as_mut()).is_pending());
    block_on(guard.release()).unwrap();
    let mut is_handed_on = false;
    wait_until("the lease is handed on or retained", || {
        is_handed_on = poll_once(next.as_mut()).is_ready();
        is_handed_on || stage.view().holders.iter().any(|holder| holder.retained)
    });
    is_handed_on
}

#[test]
fn mutex_set_with_min_hold_is_not_handed_off_within_the_client() {
    for holder in ["none", "another client", "another task"] {
        let stage = Stage::new();
        let set = MutexSet::new(["a", "b"].map(|name| stage.client.mutex(name).min_hold(HOUR)));
        let (client, other) = (stage.client.clone(), stage.other_client());
        let held = match holder {
            "none" => None,
            "another client" => Some(block_on(other.mutex("a").lock()).unwrap()),
            _ => Some(block_on(client.mutex("a").lock()).unwrap()),
        };
        let mut taking = Box::pin(set.lock());
        if let Some(held) = held {
            // The mutexes of the set are then acquired one by one.
            assert!(poll_once(taking.as_mut()).is_pending());
            block_on(held.release()).unwrap();
        }
        let mut guards = block_on(taking).unwrap().into_guards();
        assert!(!is_handed_on(&stage, guards.remove(0)), "held before by: {holder}");
    }
}

#[test]
fn lease_with_min_hold_is_not_handed_off_within_the_client() {
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").lock()).unwrap();
    guard.set_min_hold(HOUR).unwrap();
    assert!(!is_handed_on(&stage, guard));
}

#[test]
fn lease_with_min_hold_reset_to_zero_is_handed_off() {
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").lock()).unwrap();
    guard.set_min_hold(HOUR).unwrap();
    guard.set_min_hold(Duration::ZERO).unwrap();
    assert!(is_handed_on(&stage, guard));
}

#[test]
fn exchanged_lease_keeps_the_min_hold_of_its_guard() {
    let is_taken =
        |client: &Client| !block_on(client.inspect(Kind::ReadWrite, "a")).unwrap().holders.is_empty();
    let stage = Stage::new();
    let client = &stage.client;
    let writer = block_on(client.rw_lock("a").min_hold(HOUR).write()).unwrap();
    writer.set_min_hold(Duration::ZERO).unwrap();
    block_on(async { writer.downgrade().await?.release().await }).unwrap();
    assert!(!is_taken(client));
    let upgradable = block_on(client.rw_lock("a").upgradable_read()).unwrap();
    upgradable.set_min_hold(HOUR).unwrap();
    let writer = block_on(upgradable.try_upgrade()).unwrap().unwrap();
    block_on(async { writer.downgrade().await?.release().await }).unwrap();
    assert!(is_taken(client));
}

#[test]
fn exchange_that_is_given_up_keeps_the_min_hold() {
    let assert_retained = |stage: &Stage, case: &str| {
        let held = || stage.view().holders.iter().any(|holder| !holder.retained);
        wait_until("the lease is released", || !held());
        assert_eq!(stage.view().holders.len(), 1, "{case}: {:?}", stage.view());
    };
    for ends in ["dropped", "closed"] {
        let stage = Stage::of(Kind::ReadWrite);
        let writer = block_on(stage.client.rw_lock("a").min_hold(HOUR).write()).unwrap();
        let mut downgrade = Box::pin(writer.downgrade());
        stage.script(&[Fate::NeverAnswered]);
        assert!(poll_once(downgrade.as_mut()).is_pending());
        match ends {
            "dropped" => drop(downgrade),
            _ => block_on(stage.client.clone().close()).unwrap(),
        }
        assert_retained(&stage, ends);
    }
    let stage = Stage::of(Kind::ReadWrite);
    let upgradable = block_on(stage.client.rw_lock("a").upgradable_read()).unwrap();
    upgradable.set_min_hold(HOUR).unwrap();
    stage.script(&[Fate::NeverAnswered]);
    let error = block_on(upgradable.upgrade_timeout(Duration::from_millis(50))).unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("exchanged it at the limit"), "{error}");
    assert_retained(&stage, "at its limit");
}

#[test]
fn upgrade_that_ends_at_its_limit_returns_the_guard_although_an_answer_was_lost() {
    let stage = Stage::of(Kind::ReadWrite);
    let _reader = block_on(stage.other_client().rw_lock("a").read()).unwrap();
    let upgradable = block_on(stage.client.rw_lock("a").upgradable_read()).unwrap();
    upgradable.set_min_hold(HOUR).unwrap();
    stage.script(&[Fate::Now, Fate::AnswerLost]);
    let upgraded = block_on(upgradable.upgrade_timeout(Duration::from_millis(50))).unwrap();
    assert!(stage.store.script.lock().unwrap().is_empty(), "its place was given back, and the answer lost");
    assert!(upgraded.is_err_and(|guard| guard.is_held()));
}

#[test]
fn exchange_that_is_given_up_without_a_min_hold_leaves_nothing() {
    let stage = Stage::of(Kind::ReadWrite);
    let writer = block_on(stage.client.rw_lock("a").min_hold(HOUR).write()).unwrap();
    writer.set_min_hold(Duration::ZERO).unwrap();
    let mut downgrade = Box::pin(writer.downgrade());
    stage.script(&[Fate::NeverAnswered]);
    assert!(poll_once(downgrade.as_mut()).is_pending());
    drop(downgrade);
    stage.assert_nothing_is_left("a dropped exchange");
}

#[test]
fn release_by_token_ends_all_acquisitions_of_an_owner_and_refuses_a_retained_lock() {
    let stage = Stage::new();
    let client = &stage.client;
    let lock = client.reentrant_mutex("a", "us");
    let (first, _second) = (block_on(lock.lock()).unwrap(), block_on(lock.lock()).unwrap());
    let release = |token| block_on(client.force_release_token(Kind::Mutex, "a", token));
    assert_eq!(release(first.token()).unwrap().unwrap().token, first.token());
    assert!(stage.view().holders.is_empty(), "{:?}", stage.view());
    let guard = block_on(client.mutex("a").min_hold(HOUR).lock()).unwrap();
    let token = guard.token();
    block_on(guard.release()).unwrap();
    let error = release(token).unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("minimum hold"), "{error}");
    assert_eq!(block_on(client.force_release(Kind::Mutex, "a")).unwrap().len(), 1);
}

/// A search among all leases, or attempts, would take a hundred times as long.
#[test]
fn owners_lock_costs_the_same_however_many_leases_the_client_has() {
    let stage = Stage::new();
    let shortest = || {
        let lock = stage.client.reentrant_mutex("a", "us");
        let time = || {
            let began = Instant::now();
            for _ in 0..10 {
                block_on(async { lock.lock().await?.release().await }).unwrap();
            }
            began.elapsed()
        };
        (0..20).map(|_| time()).min().unwrap()
    };
    let with_one_lease = shortest();
    let held: Vec<Guard> = (0..5_000)
        .map(|number| {
            let lock = stage.client.reentrant_mutex(format!("b{number}"), "us").ttl(HOUR);
            block_on(lock.lock()).unwrap()
        })
        .collect();
    let among_many = shortest();
    assert!(
        among_many < 10 * with_one_lease,
        "{with_one_lease:?} alone, {among_many:?} beside {} leases",
        held.len()
    );
}

#[test]
fn min_hold_above_the_limit_is_refused_and_changes_nothing() {
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").lock()).unwrap();
    let error = guard.set_min_hold(Duration::from_secs(31 * 24 * 3_600)).unwrap_err();
    assert!(error.is_invalid(), "{error}");
    block_on(guard.release()).unwrap();
    assert!(stage.view().holders.is_empty(), "{:?}", stage.view());
}

// --- Closing -------------------------------------------------------------------------------------

/// Closes a client with a lease of this ttl, two local waiters and a queued waiter, over a store with this fault.
fn close_over(
    fate: Fate,
    ttl: Duration,
    close: impl FnOnce(Client) -> Result<(), Error> + Send,
) -> (Result<(), Error>, Duration) {
    let stage = Stage::new();
    stage.other_takes_it();
    let client = stage.client.clone();
    let guard = block_on(client.mutex("b").ttl(ttl).lock()).unwrap();
    let (mutex, global_fifo) = (client.mutex("a").ttl(ttl), client.mutex("a").ttl(ttl).global_fifo());
    let mut waiting = [Box::pin(mutex.lock()), Box::pin(mutex.lock()), Box::pin(global_fifo.lock())];
    for waiting in &mut waiting {
        assert!(poll_once(waiting.as_mut()).is_pending());
    }
    let limit = Duration::from_secs(1);
    let mut overdue = Box::pin(global_fifo.lock_timeout(limit));
    assert!(poll_once(overdue.as_mut()).is_pending());
    stage.becomes(fate);
    // From then on that attempt waits for the store's answer.
    thread::sleep(limit);
    let began = Instant::now();
    let closed = thread::scope(|scope| {
        let closed = scope.spawn(|| close(client));
        wait_until("the client is closed", || stage.client.handle.session.is_closed());
        let closing = Instant::now();
        for waiting in waiting {
            assert!(block_on(waiting).unwrap_err().is_closed());
        }
        let error = block_on(overdue).unwrap_err();
        // After a pause of the machine, the time for that answer is over.
        assert!(error.is_closed() || error.is_unavailable() && began.elapsed() > limit, "{error}");
        assert!(!guard.is_held());
        assert!(closing.elapsed() < CLOSES_WITHIN, "the waits ended after {:?}", closing.elapsed());
        closed.join().unwrap()
    });
    (closed, began.elapsed())
}

/// Sooner than a command without an answer is given up, which takes 15 s, and with time for a pause of the machine.
const CLOSES_WITHIN: Duration = Duration::from_secs(10);

#[test]
fn close_during_an_outage_takes_at_most_the_longest_lease() {
    for fate in [Fate::NeverDone, Fate::CommandLost, Fate::NotSent] {
        let ttl = Duration::from_secs(3);
        let (closed, took) = close_over(fate, ttl, |client| block_on(client.close()));
        assert!(closed.unwrap_err().is_unavailable());
        assert!(took < CLOSES_WITHIN, "{fate:?}: closing took {took:?}");
    }
}

#[test]
fn close_timeout_returns_in_time() {
    let limit = Duration::from_millis(100);
    let ttl = 2 * CLOSES_WITHIN;
    let (closed, took) = close_over(Fate::NeverDone, ttl, |client| block_on(client.close_timeout(limit)));
    assert!(closed.unwrap_err().is_timeout());
    assert!(took >= limit && took < CLOSES_WITHIN, "closing took {took:?}");
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").lock()).unwrap();
    block_on(stage.client.clone().close_timeout(Duration::from_secs(20))).unwrap();
    assert!(!guard.is_held() && stage.is_clean());
}

#[test]
fn close_timeout_of_zero_is_no_error_for_an_idle_client() {
    for _ in 0..50 {
        block_on(Stage::new().client.close_timeout(Duration::ZERO)).unwrap();
    }
}

#[test]
fn limit_that_the_end_of_the_driver_cuts_short_drops_no_result() {
    let stage = Stage::new();
    let session = stage.client.handle.session.clone();
    let mut polls = 0;
    // The driver ends after the first poll of the work, and ends the work.
    let work = poll_fn(|_| {
        polls += 1;
        if polls > 1 {
            return Poll::Ready(());
        }
        session.driver_gone();
        Poll::Pending
    });
    let until = session.now() + Duration::from_secs(20);
    assert_eq!(block_on(with_deadline(&session, Some(until), work)), Some(()));
}

/// The renewal panics on the client's thread.
fn ends_by_a_panic(stage: &Stage, guard: Guard) {
    stage.becomes(Fate::Panics);
    let (sender, receiver) = std::sync::mpsc::channel();
    let client = stage.client.clone();
    thread::spawn(move || sender.send((block_on(guard.lost()), block_on(client.close()))));
    let (lost, closed) = receiver.recv_timeout(Duration::from_secs(20)).expect("every wait ends");
    assert_eq!(lost, Loss::Closed);
    assert!(closed.unwrap_err().is_unavailable());
}

#[test]
fn panic_on_the_clients_thread_ends_its_leases_and_its_close() {
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").ttl(Duration::from_secs(9)).lock()).unwrap();
    ends_by_a_panic(&stage, guard);
}

/// As wakers do whose executor has ended.
#[test]
fn wakers_that_panic_keep_nobody_from_being_woken() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker");
        }
    }
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("b").ttl(Duration::from_secs(9)).lock()).unwrap();
    stage.other_takes_it();
    let mutexes = [(); 3].map(|()| stage.client.mutex("a").global_fifo());
    let mut waiting = mutexes.each_ref().map(|mutex| Box::pin(mutex.lock()));
    let waker = Waker::from(Arc::new(Panics));
    for waiting in &mut waiting {
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    // Then the end of the client wakes the waiting tasks.
    ends_by_a_panic(&stage, guard);
}

/// The clients share threads, and wake tasks whose time has come.
#[test]
fn waker_that_blocks_delays_no_client() {
    use std::sync::mpsc::{Receiver, Sender, channel};
    struct Blocks(Sender<()>, Mutex<Receiver<()>>);
    impl std::task::Wake for Blocks {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
            let _ = self.1.lock().unwrap().recv();
        }
    }
    // The wakers of a blocking call are known from the first one on, and those of `block_on` are the same.
    #[cfg(feature = "blocking")]
    crate::blocking::block_on(async {});
    let limit = Duration::from_millis(1);
    // More than there are threads.
    let stages: Vec<_> = (0..6).map(|_| Stage::new()).collect();
    stages.iter().for_each(Stage::other_takes_it);
    let (begins, begun) = channel();
    let (let_go, until) = channel();
    let waker = Waker::from(Arc::new(Blocks(begins, Mutex::new(until))));
    let mutex = stages[0].mutex();
    let mut waiting = Box::pin(mutex.lock_timeout(limit));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    begun.recv_timeout(Duration::from_secs(20)).expect("its time has come");
    let (ends, ended) = channel();
    thread::scope(|scope| {
        for stage in &stages {
            let ends = ends.clone();
            scope.spawn(move || {
                ends.send(block_on(stage.mutex().lock_timeout(limit)).unwrap().is_none()).unwrap();
            });
        }
        for _ in &stages {
            let is_timed_out = ended.recv_timeout(Duration::from_secs(20));
            if is_timed_out.is_err() {
                // The threads of this test end, too.
                let _ = let_go.send(());
            }
            assert_eq!(is_timed_out, Ok(true));
        }
        drop(let_go);
    });
}

#[test]
fn reads_of_a_closed_client_say_that_it_is_closed() {
    let stage = Stage::new();
    let mutex = stage.client.mutex("a");
    let client = stage.client.clone();
    block_on(stage.client.clone().close()).unwrap();
    assert!(block_on(mutex.inspect()).unwrap_err().is_closed());
    assert!(block_on(mutex.force_release()).unwrap_err().is_closed());
    assert!(block_on(client.list()).unwrap_err().is_closed());
    assert!(block_on(client.list_names()).unwrap_err().is_closed());
    assert!(block_on(client.diagnose()).unwrap_err().is_closed());
}

#[test]
fn once_per_ends_if_its_client_closes_during_a_poll() {
    let stage = Stage::new();
    stage.other_takes_it();
    let work = stage.client.once_per("a", Duration::from_secs(60)).at_least_once();
    let client = stage.client.clone();
    *stage.store.before_inspect.lock().unwrap() =
        Some(Box::new(move || thread::spawn(move || block_on(client.close())).join().unwrap().unwrap()));
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::spawn(move || sender.send(block_on(work.start()).map(|started| started.is_some())));
    assert!(receiver.recv_timeout(Duration::from_secs(20)).expect("it ends").unwrap_err().is_closed());
}

/// Another client starts it. Work that is to start at most once is not started again.
#[test]
fn work_that_a_close_interrupts_does_not_count_as_done() {
    let stage = Stage::new();
    let at_most_once = |client: &Client| client.once_per("a", HOUR);
    let at_least_once = |client: &Client| client.once_per("b", HOUR).at_least_once();
    let first = block_on(at_most_once(&stage.client).start()).unwrap().unwrap();
    let second = block_on(at_least_once(&stage.client).start()).unwrap().unwrap();
    block_on(stage.client.clone().close()).unwrap();
    assert!(!first.is_held() && !second.is_held());
    let other = stage.other_client();
    assert!(block_on(at_most_once(&other).start()).unwrap().is_none());
    let started = block_on(at_least_once(&other).start_timeout(HOUR / 3_600)).unwrap().unwrap();
    // The id says it too.
    let id = block_on(started.detach()).unwrap();
    let third = stage.other_client();
    let attached = block_on(third.attach(&id.to_string().parse().unwrap())).unwrap();
    block_on(third.clone().close()).unwrap();
    assert!(!attached.is_held());
    assert!(block_on(at_least_once(&other).start_timeout(HOUR / 3_600)).unwrap().is_some());
}

#[test]
fn close_ignores_releases_that_failed_before_it() {
    let stage = Stage::new();
    let guard = block_on(stage.client.mutex("a").ttl(Duration::from_millis(100)).lock()).unwrap();
    stage.becomes(Fate::NeverDone);
    drop(guard);
    wait_until("the release was given up", || stage.client.is_settled());
    stage.answers_again();
    let guard = block_on(stage.client.mutex("a").lock()).unwrap();
    block_on(stage.client.clone().close()).unwrap();
    assert!(!guard.is_held() && stage.is_clean());
}
