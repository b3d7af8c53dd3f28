use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Wake, Waker};

use leasehold_core::{Effect, Loss, REFUSAL_LIMIT};
use pollster::block_on;

use super::*;
use crate::MutexSet;

const TTL: Duration = Duration::from_secs(10);

fn poll<F: Future + ?Sized>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn lease_is_renewed_while_time_passes() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).lock()).unwrap();
    store.advance(100 * TTL);
    assert!(guard.is_held() && guard.remaining() > TTL / 2, "{:?}", guard.remaining());
    assert_eq!(store.elapsed(), 100 * TTL);
    block_on(guard.release()).unwrap();
    block_on(client.close()).unwrap();
}

#[test]
fn unrenewed_lease_expires_and_its_loss_wakes_the_holder() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).auto_renew(false).lock()).unwrap();
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut lost = pin!(guard.lost());
    assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    store.advance(TTL / 2);
    assert!(guard.is_held());
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    store.advance(TTL);
    assert!(!guard.is_held());
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(matches!(poll(lost.as_mut()), Poll::Ready(Loss::Expired)), "the lease has expired");
}

#[test]
fn released_lock_is_granted_to_the_waiter_without_time_passing() {
    let store = TestStore::new();
    let (holder, waiter) = (store.client().unwrap(), store.client().unwrap());
    let guard = block_on(holder.mutex("a").lock()).unwrap();
    let mutex = waiter.mutex("a");
    let mut waiting = pin!(mutex.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    let token = guard.token();
    drop(guard);
    let Poll::Ready(granted) = poll(waiting.as_mut()) else { panic!("not granted") };
    assert!(granted.unwrap().token() > token);
    assert_eq!(store.elapsed(), Duration::ZERO);
}

#[test]
fn crashed_holders_lock_is_granted_when_its_lease_expires() {
    let store = TestStore::new();
    let (holder, waiter) = (store.client().unwrap(), store.client().unwrap());
    let guard = block_on(holder.mutex("a").ttl(TTL).auto_renew(false).lock()).unwrap();
    let mutex = waiter.mutex("a");
    let mut waiting = pin!(mutex.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    store.advance(TTL - Duration::from_millis(1));
    assert!(poll(waiting.as_mut()).is_pending());
    store.advance(Duration::from_secs(5));
    assert!(poll(waiting.as_mut()).is_ready(), "the lease has expired");
    assert!(!guard.is_held());
}

#[test]
fn timed_out_wait_ends_at_its_deadline() {
    let store = TestStore::new();
    let (holder, waiter) = (store.client().unwrap(), store.client().unwrap());
    let _guard = block_on(holder.mutex("a").lock()).unwrap();
    let mutex = waiter.mutex("a");
    let mut waiting = pin!(mutex.lock_timeout(Duration::from_secs(30)));
    assert!(poll(waiting.as_mut()).is_pending());
    store.advance(Duration::from_secs(29));
    assert!(poll(waiting.as_mut()).is_pending());
    store.advance(Duration::from_secs(1));
    assert!(matches!(poll(waiting.as_mut()), Poll::Ready(Ok(None))));
}

#[test]
fn outage_loses_the_lease_and_its_end_lets_clients_go_on() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).lock()).unwrap();
    store.set_reachable(false);
    assert!(block_on(client.mutex("b").try_lock()).unwrap_err().is_unavailable());
    store.advance(TTL);
    assert!(!guard.is_held());
    store.set_reachable(true);
    drop(guard);
    assert!(block_on(client.mutex("a").try_lock()).unwrap().is_some());
}

#[test]
fn outage_shorter_than_the_lease_loses_nothing() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).lock()).unwrap();
    store.advance(Duration::from_secs(2));
    store.set_reachable(false);
    store.advance(Duration::from_secs(4));
    assert!(guard.is_held());
    store.set_reachable(true);
    assert!(guard.remaining() > TTL - Duration::from_secs(1), "renewed at once: {:?}", guard.remaining());
}

#[test]
fn suspended_process_loses_its_lease_to_the_waiter() {
    let store = TestStore::new();
    let (holder, waiter) = (store.client().unwrap(), store.client().unwrap());
    let guard = block_on(holder.mutex("a").ttl(TTL).lock()).unwrap();
    let mutex = waiter.mutex("a");
    let mut waiting = pin!(mutex.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    store.suspend(TTL + Duration::from_secs(5));
    assert!(!guard.is_held());
    store.advance(Duration::from_secs(5));
    assert!(poll(waiting.as_mut()).is_ready());
}

#[test]
fn tasks_of_one_client_hand_the_lease_off() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let mutex = client.mutex("a");
    let first = block_on(mutex.lock()).unwrap();
    let mut second = pin!(mutex.lock());
    assert!(poll(second.as_mut()).is_pending());
    let token = first.token();
    block_on(first.release()).unwrap();
    store.advance(Duration::from_secs(1));
    let Poll::Ready(second) = poll(second.as_mut()) else { panic!("not handed off") };
    assert!(second.unwrap().token() > token);
}

#[test]
fn mutex_set_is_acquired_and_given_back() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let set = MutexSet::new([client.mutex("a"), client.mutex("b")]);
    let guards = block_on(set.lock()).unwrap();
    store.advance(Duration::from_secs(60));
    block_on(guards.release()).unwrap();
    assert!(block_on(client.list()).unwrap().is_empty());
}

#[test]
fn histories_repeat_exactly() {
    let run = || {
        let store = TestStore::new();
        let clients = [store.client().unwrap(), store.client().unwrap()];
        let mut history = Vec::new();
        for round in 0..20_u32 {
            let mutex = clients[round as usize % 2].mutex("a").ttl(TTL).auto_renew(round % 3 != 0);
            let guard = block_on(mutex.lock_timeout(Duration::ZERO)).unwrap();
            history.push(guard.as_ref().map(|guard| (guard.token().get(), guard.remaining())));
            store.advance(Duration::from_millis(u64::from(round) * 700));
            history.push(guard.map(|guard| (guard.token().get(), guard.remaining())));
        }
        history
    };
    assert_eq!(run(), run());
}

#[test]
fn dropped_client_leaves_nothing_on_the_clock() {
    let store = TestStore::new();
    let guard = block_on(store.client().unwrap().mutex("a").lock()).unwrap();
    assert_eq!(store.clock.driver_count(), 1);
    drop(guard);
    assert_eq!(store.clock.driver_count(), 0, "its driver has ended");
    assert!(store.network.links.lock().unwrap().iter().all(|link| link.strong_count() == 0));
}

#[test]
fn release_that_the_driver_retried_leaves_no_entry() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).lock()).unwrap();
    store.set_reachable(false);
    let mut releasing = pin!(guard.release_timeout(TTL));
    assert!(poll(releasing.as_mut()).is_pending());
    store.set_reachable(true);
    assert!(matches!(poll(releasing.as_mut()), Poll::Ready(Ok(()))));
    assert_eq!(client.handle.session.len(), 0);
}

#[test]
fn time_moves_by_any_duration() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let store = TestStore::new();
        let client = store.client().unwrap();
        store.advance(Duration::MAX);
        store.suspend(Duration::MAX);
        sender.send(block_on(client.mutex("a").try_lock()).is_ok())
    });
    receiver.recv_timeout(Duration::from_secs(20)).expect("the clock stops at its end");
}

#[test]
fn several_threads_move_one_clock() {
    let store = TestStore::new();
    let guard = block_on(store.client().unwrap().mutex("a").ttl(TTL).lock()).unwrap();
    let other = store.client().unwrap();
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| (0..200).for_each(|_| store.advance(Duration::from_secs(60))));
        }
        threads.spawn(|| {
            for _ in 0..2_000 {
                assert!(block_on(other.mutex("a").try_lock()).unwrap().is_none());
                drop(block_on(other.mutex("b").lock()).unwrap());
            }
        });
    });
    assert!(guard.is_held(), "a renewal was late");
    assert_eq!(store.elapsed(), Duration::from_secs(400 * 60));
}

#[cfg(feature = "blocking")]
#[test]
fn blocked_thread_continues_when_another_moves_the_clock() {
    let store = TestStore::new();
    let holder = store.blocking_client().unwrap();
    let guard = holder.mutex("a").ttl(TTL).auto_renew(false).lock().unwrap();
    let waiting = store.blocking_client().unwrap();
    let waiter = std::thread::spawn(move || waiting.mutex("a").lock().map(|guard| guard.token()));
    let is_queued = || holder.mutex("a").inspect().unwrap().waiters.len() == 1;
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while !is_queued() {
        assert!(std::time::Instant::now() < until, "the waiter is not in the queue");
        std::thread::yield_now();
    }
    store.advance(TTL * 2);
    assert!(waiter.join().unwrap().unwrap() > guard.token());
    assert!(!guard.is_held());
}

#[test]
fn start_with_a_limit_sees_the_work_done_and_its_host_dead() {
    let store = TestStore::new();
    let hosts = [store.client().unwrap(), store.client().unwrap()];
    let [here, there] = hosts.each_ref().map(|host| {
        host.once_per("backup", Duration::from_secs(3_600)).at_least_once().ttl(TTL).auto_renew(false)
    });
    let working = block_on(here.start()).unwrap().expect("nothing was started");
    {
        let mut late = pin!(there.start_timeout(TTL / 2));
        assert!(poll(late.as_mut()).is_pending());
        store.advance(TTL / 2);
        let Poll::Ready(Err(error)) = poll(late.as_mut()) else { panic!("the limit has passed") };
        assert!(error.is_timeout(), "{error}");
    }
    {
        let mut heir = pin!(there.start_timeout(TTL * 2));
        assert!(poll(heir.as_mut()).is_pending());
        store.advance(TTL);
        let Poll::Ready(Ok(Some(guard))) = poll(heir.as_mut()) else {
            panic!("the host's lease has expired")
        };
        assert!(guard.token() > working.token());
        block_on(guard.release()).unwrap();
    }
    assert!(block_on(here.start_timeout(TTL)).unwrap().is_none(), "the work is done");
}

#[test]
fn start_timeout_sees_at_its_limit_that_the_work_is_done() {
    let store = TestStore::new();
    let (here, there) = (store.client().unwrap(), store.client().unwrap());
    let work = |client: &Client| client.once_per("w", Duration::from_secs(3_600)).at_least_once();
    let working = block_on(work(&there).start()).unwrap().unwrap();
    let work = work(&here);
    let mut start = pin!(work.start_timeout(Duration::from_millis(500)));
    assert!(poll(start.as_mut()).is_pending());
    store.advance(Duration::from_millis(200));
    block_on(working.release()).unwrap();
    store.advance(Duration::from_millis(300));
    let started = poll(start.as_mut());
    assert!(matches!(started, Poll::Ready(Ok(None))), "{started:?}");
    let started = block_on(work.start_timeout(Duration::ZERO));
    assert!(matches!(started, Ok(None)), "{started:?}");
}

#[test]
fn waits_that_need_a_lease_say_that_the_client_was_closed() {
    let store = TestStore::new();
    let (client, other) = (store.client().unwrap(), store.client().unwrap());
    let _held = block_on(other.mutex("b").lock()).unwrap();
    let set = MutexSet::new(["a", "b"].map(|name| client.mutex(name)));
    let mut all = pin!(set.lock());
    assert!(poll(all.as_mut()).is_pending());
    let barrier = client.barrier("g", 2);
    let mut party = pin!(barrier.wait());
    assert!(poll(party.as_mut()).is_pending());
    block_on(client.close()).unwrap();
    for error in [block_on(all).unwrap_err(), block_on(party).unwrap_err()] {
        assert!(error.is_closed(), "{error}");
    }
}

const PASSING: Failure = Failure::Transient(Effect::None);
const FOR_GOOD: Failure = Failure::Permanent(Effect::Possible);

#[test]
fn waiters_end_with_the_stores_word_if_it_refuses_them_for_good() {
    let store = TestStore::new();
    let (holder, client) = (store.client().unwrap(), store.client().unwrap());
    let _held = block_on(holder.mutex("a").lock()).unwrap();
    let mutex = client.mutex("a");
    let mut waiting = [pin!(mutex.lock()), pin!(mutex.lock())];
    assert!(waiting.iter_mut().all(|waiter| poll(waiter.as_mut()).is_pending()));
    store.refuse(FOR_GOOD);
    // A waiter asks again within a third of the lifetime of its queue entry.
    store.advance(Duration::from_secs(30));
    for waiter in &mut waiting {
        let Poll::Ready(Err(error)) = poll(waiter.as_mut()) else { panic!("it waits on") };
        assert!(error.is_refused() && error.to_string().contains("own word"), "{error}");
    }
}

#[test]
fn refusal_that_passes_ends_no_waiter_and_is_shown_meanwhile() {
    let store = TestStore::new();
    let (holder, client) = (store.client().unwrap(), store.client().unwrap());
    let held = block_on(holder.mutex("a").ttl(2 * REFUSAL_LIMIT).lock()).unwrap();
    let mutex = client.mutex("a");
    let mut waiting = [pin!(mutex.lock()), pin!(mutex.lock())];
    assert!(waiting.iter_mut().all(|waiter| poll(waiter.as_mut()).is_pending()));
    assert!(client.refusal().is_none());
    store.refuse(PASSING);
    store.advance(REFUSAL_LIMIT - Duration::from_secs(1));
    let refusal = client.refusal().expect("it is refused").to_string();
    assert!(refusal.contains("mutex \"a\"") && refusal.contains("own word"), "{refusal}");
    assert!(waiting.iter_mut().all(|waiter| poll(waiter.as_mut()).is_pending()));
    store.refuse(None);
    store.advance(Duration::from_secs(2));
    assert!(client.refusal().is_none());
    block_on(held.release()).unwrap();
    assert!(matches!(poll(waiting[0].as_mut()), Poll::Ready(Ok(_))));
}

#[test]
fn refusal_that_never_passes_ends_waiters_after_its_limit() {
    let store = TestStore::new();
    let (holder, client) = (store.client().unwrap(), store.client().unwrap());
    let _held = block_on(holder.mutex("a").ttl(3 * REFUSAL_LIMIT).lock()).unwrap();
    let mutex = client.mutex("a");
    let mut waiting = pin!(mutex.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    store.refuse(PASSING);
    store.advance(REFUSAL_LIMIT - Duration::from_secs(1));
    assert!(poll(waiting.as_mut()).is_pending());
    // The first refusal comes with a re-check, the last one at most a second after the limit.
    store.advance(Duration::from_secs(30));
    let Poll::Ready(Err(error)) = poll(waiting.as_mut()) else { panic!("it waits on") };
    assert!(error.is_refused(), "{error}");
}

#[test]
fn refused_release_is_told_at_once_and_succeeds_later() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    for (name, limit) in [("without a limit", None), ("within a limit", Some(Duration::from_secs(60)))] {
        for refusal in [PASSING, FOR_GOOD] {
            let guard = block_on(client.mutex(name).lock()).unwrap();
            store.refuse(refusal);
            let mut released = match limit {
                None => Box::pin(guard.release()) as BoxFuture<_>,
                Some(limit) => Box::pin(guard.release_timeout(limit)),
            };
            let Poll::Ready(Err(error)) = poll(released.as_mut()) else { panic!("it is not told at once") };
            assert!(error.is_refused() && error.to_string().contains("own word"), "{name}: {error}");
            assert!(client.refusal().is_some());
            drop(released);
            store.refuse(None);
            store.advance(Duration::from_secs(1));
            assert!(block_on(client.mutex(name).try_lock()).unwrap().is_some(), "it was not retried");
        }
    }
}

#[test]
fn release_that_is_not_confirmed_in_time_says_why() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").lock()).unwrap();
    store.set_reachable(false);
    let mut released = pin!(guard.release_timeout(Duration::from_secs(2)));
    assert!(poll(released.as_mut()).is_pending());
    store.advance(Duration::from_secs(2));
    let Poll::Ready(Err(error)) = poll(released.as_mut()) else { panic!("the limit has passed") };
    assert!(error.is_timeout() && error.to_string().contains("made the store unreachable"), "{error}");
}

#[test]
fn lost_lease_says_why_it_was_not_renewed() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let guard = block_on(client.mutex("a").ttl(TTL).lock()).unwrap();
    store.refuse(FOR_GOOD);
    store.advance(TTL / 2);
    assert!(guard.is_held());
    let early = guard.renewal_error().expect("a renewal has failed");
    assert!(early.is_refused() && early.to_string() == "the store's own word", "{early}");
    store.advance(TTL);
    assert_eq!(block_on(guard.lost()), Loss::Expired);
    // The store's later word that it has no such lease does not hide the reason.
    store.refuse(None);
    store.advance(TTL);
    assert!(guard.renewal_error().is_some());
    let run = block_on(guard.run(std::future::pending::<()>())).unwrap_err();
    for error in [run, block_on(guard.renew()).unwrap_err(), block_on(guard.release()).unwrap_err()] {
        assert!(error.is_lost() && error.to_string().ends_with(": the store's own word"), "{error}");
    }
    let renewed = block_on(client.mutex("b").ttl(TTL).lock()).unwrap();
    store.refuse(PASSING);
    store.advance(TTL / 2);
    store.refuse(None);
    store.advance(TTL / 2);
    assert!(renewed.is_held() && renewed.renewal_error().is_none());
    block_on(client.mutex("b").force_release()).unwrap();
    store.advance(TTL);
    let error = block_on(renewed.release()).unwrap_err().to_string();
    assert!(error.ends_with("revoked or expired there"), "{error}");
}

/// The window in which the caller of a request may repeat it: documented as 2.5 s.
const WINDOW: Duration = Duration::from_millis(2_500);

#[test]
fn request_that_nobody_makes_stays_for_the_documented_time() {
    let store = TestStore::new();
    let (holder, one) = (store.client().unwrap(), store.client().unwrap());
    let held = block_on(holder.mutex("a").lock()).unwrap();
    let waiters = || block_on(holder.mutex("a").inspect()).unwrap().waiters.len();
    let mutex = one.mutex("a").request([1; 16]);
    // A place in the queue.
    let mut waiting = Box::pin(mutex.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    drop(waiting);
    store.advance(WINDOW - Duration::from_millis(1));
    assert_eq!(waiters(), 1);
    store.advance(Duration::from_millis(1));
    assert_eq!(waiters(), 0);
    block_on(held.release()).unwrap();
    // A lease.
    let holders = || block_on(holder.mutex("a").inspect()).unwrap().holders.len();
    drop(block_on(one.mutex("a").request([2; 16]).lock()).unwrap());
    store.advance(WINDOW - Duration::from_millis(1));
    assert_eq!(holders(), 1);
    store.advance(Duration::from_millis(1));
    assert_eq!(holders(), 0);
}

/// Its caller may repeat it at another client.
#[test]
fn closed_client_releases_nothing_that_a_caller_may_still_repeat() {
    let store = TestStore::new();
    let (one, other) = (store.client().unwrap(), store.client().unwrap());
    let request = |client: &Client, id: u8| client.mutex("a").ttl(TTL).request([id; 16]);
    let dropped = block_on(request(&one, 1).lock()).unwrap();
    let token = dropped.token();
    drop(dropped);
    let waits = request(&one, 2);
    let mut waiting = Box::pin(waits.lock());
    assert!(poll(waiting.as_mut()).is_pending());
    block_on(one.close()).unwrap();
    drop(waiting);
    let view = block_on(other.mutex("a").inspect()).unwrap();
    assert_eq!((view.holders.len(), view.waiters.len()), (1, 1));
    let again = block_on(request(&other, 1).try_lock()).unwrap().expect("it is the same lease");
    assert_eq!(again.token(), token);
    let repeated = request(&other, 2);
    let mut repeating = pin!(repeated.lock());
    assert!(poll(repeating.as_mut()).is_pending());
    block_on(again.release()).unwrap();
    let Poll::Ready(granted) = poll(repeating.as_mut()) else { panic!("not granted") };
    block_on(granted.unwrap().release()).unwrap();
}

/// The answer with the first lease could not be written, and the caller has been granted another one meanwhile.
#[test]
fn returned_lease_that_has_expired_ends_no_later_one_of_its_request() {
    let store = TestStore::new();
    let client = store.client().unwrap();
    let take = || {
        let mutex = client.mutex("a").ttl(TTL).auto_renew(false).request([1; 16]);
        block_on(async { mutex.try_lock().await.unwrap().expect("it is free").detach().await.unwrap() })
    };
    let first = take();
    store.advance(TTL + Duration::from_millis(1));
    let second = take();
    assert!(second.token() > first.token());
    assert!(client.return_lease(&first));
    store.advance(WINDOW);
    assert!(block_on(client.inspect_lease(&second)).unwrap().is_some());
    // The second one is returned as any other.
    assert!(client.return_lease(&second));
    store.advance(WINDOW);
    assert!(block_on(client.inspect_lease(&second)).unwrap().is_none());
}
