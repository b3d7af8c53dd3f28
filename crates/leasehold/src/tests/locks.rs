//! Kinds of lock over a store with injected faults.

use leasehold_core::{Push, SecretKey};
use leasehold_store::clock::Clock;
use leasehold_store::clock::manual::ManualClock;
use leasehold_testkit::wait_until;

use super::*;
use crate::engine::Session;
use crate::handle::{ClientOptions, Handle};
use crate::telemetry::ClientTelemetry;
use crate::testing::TestStore;
use crate::{MutexSet, UpgradableGuard, WriteGuard};

/// Ignores all pushes.
struct IgnoredInbox;

impl Inbox for IgnoredInbox {
    fn deliver(&self, _push: Push) {}
    fn reconnected(&self, _concerns: &dyn Fn(&Resource) -> bool) {}
}

#[test]
fn timed_out_upgrade_returns_only_a_held_guard() {
    let stage = Stage::of(Kind::ReadWrite);
    let lock = stage.client.rw_lock("a");
    let guard = block_on(lock.upgradable_read()).unwrap();
    stage.other_takes(u32::MAX, 1);
    let mut future = Box::pin(guard.upgrade_timeout(Duration::from_millis(300)));
    assert!(poll_once(future.as_mut()).is_pending());
    // The push does not arrive before the deadline.
    let ignored: Arc<dyn Inbox> = Arc::new(IgnoredInbox);
    stage.store.inner.join(stage.client.handle.session.id, Arc::downgrade(&ignored));
    stage.other_gives_it_back();
    assert_returns_only_a_held_guard(&stage, block_on(future));
}

#[test]
fn refused_upgrade_returns_only_a_held_guard() {
    let stage = Stage::of(Kind::ReadWrite);
    let guard = block_on(stage.client.rw_lock("a").upgradable_read()).unwrap();
    stage.other_takes(u32::MAX, 1);
    // The first command is late, the second one is refused, and then no release arrives.
    stage.script(&[Fate::LateAndLost, Fate::Now]);
    stage.becomes(Fate::CommandLost);
    let mut future = Box::pin(guard.try_upgrade());
    assert!(poll_once(future.as_mut()).is_pending());
    wait_until("the attempt is refused", || stage.store.script.lock().unwrap().is_empty());
    stage.other_gives_it_back();
    stage.store.deliver_delayed();
    stage.answers_again();
    assert_returns_only_a_held_guard(&stage, block_on(future));
}

fn assert_returns_only_a_held_guard(
    stage: &Stage,
    upgraded: Result<Result<WriteGuard, UpgradableGuard>, Error>,
) {
    match upgraded {
        Ok(Err(guard)) => {
            let held = stage.view().holders.len();
            assert!(!guard.is_held() || held == 1, "the guard is held, and the store has {held} holders");
        }
        Ok(Ok(_)) => {}
        Err(error) => assert!(error.is_lost(), "{error}"),
    }
}

/// The driver has not run since the holder's release, as if its thread got no time.
#[test]
fn limit_of_a_wait_that_the_driver_has_not_sent_is_no_failure_of_the_store() {
    let clock = Arc::new(ManualClock::default());
    let local = || Clock::Manual(clock.clone());
    let telemetry = ClientTelemetry::new("memory:");
    let session = Arc::new(Session::new(ClientId::new(7), SecretKey::new(7), local(), telemetry.clone()));
    let memory = Arc::new(Memory::with_clock(local()));
    let handle = Handle::new(session, memory, "memory:".to_owned(), ClientOptions::default(), telemetry);
    let client = Client { handle: Arc::new(handle) };
    let guard = block_on(client.mutex("a").lock()).unwrap();
    guard.set_min_hold(Duration::from_secs(60)).unwrap();
    let mutex = client.mutex("a");
    let mut waits = pin!(mutex.lock_timeout(Duration::from_secs(1)));
    assert!(poll_once(waits.as_mut()).is_pending());
    drop(guard);
    clock.jump(Duration::from_secs(1));
    let ended = poll_once(waits.as_mut());
    assert!(matches!(ended, Poll::Ready(Ok(None))), "{ended:?}");
}

#[test]
fn max_hold_counts_through_a_waiting_upgrade() {
    let store = TestStore::new();
    let (client, other) = (store.client().unwrap(), store.client().unwrap());
    let lock = client.rw_lock("a").max_hold(Duration::from_secs(6));
    let guard = block_on(lock.upgradable_read()).unwrap();
    let reader = block_on(other.rw_lock("a").read()).unwrap();
    let mut upgrade = Box::pin(guard.upgrade());
    assert!(poll_once(upgrade.as_mut()).is_pending());
    store.advance(Duration::from_secs(1));
    block_on(reader.release()).unwrap();
    let guard = block_on(upgrade).unwrap();
    store.advance(Duration::from_millis(4_500));
    assert!(guard.is_held(), "the hold ended early, after {:?}", store.elapsed());
    store.advance(Duration::from_millis(600));
    assert!(!guard.is_held(), "held for {:?}", store.elapsed());
}

#[test]
fn upgrade_succeeds_while_the_queue_is_full() {
    let stage = Stage::of(Kind::ReadWrite);
    let lock = stage.client.rw_lock("a").max_waiters(1);
    let guard = block_on(lock.upgradable_read()).unwrap();
    stage.other_takes(u32::MAX, 1);
    let mut writer = Box::pin(lock.write());
    assert!(poll_once(writer.as_mut()).is_pending());
    let mut future = Box::pin(guard.upgrade());
    let ended = poll_once(future.as_mut());
    assert!(ended.is_pending(), "{ended:?}");
}

#[test]
fn latch_count_retried_after_an_error_is_counted() {
    let stage = Stage::of(Kind::Latch);
    let latch = stage.client.latch("a", 2);
    // The store grants without an answer, the caller drops the future, and the release is lost.
    stage.script(&[Fate::NeverAnswered, Fate::NeverDone]);
    let mut future = Box::pin(latch.count_down_as("w"));
    assert!(poll_once(future.as_mut()).is_pending());
    drop(future);
    wait_until("the release is sent", || stage.store.script.lock().unwrap().is_empty());
    let left = block_on(latch.count_down_as("w")).unwrap();
    assert_eq!(left, 1, "the caller learns that it was counted");
    wait_until("the client settles", || stage.client.is_settled());
    assert_eq!(block_on(latch.remaining()).unwrap(), 1, "the count remains");
}

#[test]
fn opened_latch_stays_open() {
    let stage = Stage::of(Kind::Latch);
    let latch = stage.client.latch("a", 1);
    stage.script(&[Fate::NeverAnswered]);
    let mut future = Box::pin(latch.count_down());
    assert!(poll_once(future.as_mut()).is_pending());
    let was_open = block_on(latch.remaining()).unwrap() == 0;
    drop(future);
    wait_until("the client settles", || stage.client.is_settled());
    let is_open = block_on(latch.remaining()).unwrap() == 0;
    assert_eq!(was_open, is_open, "an opened latch was closed again");
}

#[test]
fn incomplete_mutex_set_retains_no_part() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let hour = Duration::from_secs(3_600);
    let set = MutexSet::new(["a", "b"].map(|name| client.mutex(name).min_hold(hour)));
    let guard = block_on(client.mutex("b").lock()).unwrap();
    assert!(block_on(set.try_lock()).unwrap().is_none());
    let view = block_on(client.mutex("a").inspect()).unwrap();
    assert!(view.holders.is_empty(), "{:?}", view.holders);
    // The same with a dropped future.
    let mut future = Box::pin(set.lock());
    assert!(poll_once(future.as_mut()).is_pending());
    drop(future);
    let view = block_on(client.mutex("a").inspect()).unwrap();
    assert!(view.holders.is_empty(), "{:?}", view.holders);
    block_on(guard.release()).unwrap();
}

/// Polls the acquisition of a set this often and drops it, while another client holds one of its mutexes, releases it, or never held
/// it.
fn drop_set(scene: Scene, taken: &str, fates: [Fate; 2], polls: u32) {
    let mut stage = Stage::new();
    stage.resource.name = Name::new(taken).unwrap();
    if !matches!(scene, Scene::Free) {
        stage.other_takes_it();
    }
    let set = MutexSet::new(["b", "a"].map(|name| stage.client.mutex(name).ttl(Duration::from_secs(2))));
    stage.script(&fates);
    {
        let mut future = pin!(async {
            match scene {
                Scene::Busy => set.try_lock().await,
                _ => set.lock().await.map(Some),
            }
        });
        for poll in 0..polls {
            if poll == 2 && matches!(scene, Scene::HandedOver) {
                stage.other_gives_it_back();
            }
            if poll_once(future.as_mut()).is_ready() {
                // A guard is dropped here too.
                break;
            }
        }
    }
    let case = format!("{scene:?} at {taken}, {fates:?}, dropped after {polls} polls");
    stage.assert_nothing_is_left(&case);
    for name in ["a", "b"] {
        stage.resource.name = Name::new(name).unwrap();
        assert!(stage.is_clean(), "{case}: {:?} was left of {name}", stage.view());
    }
}

#[test]
fn mutex_set_dropped_at_any_await_point_leaves_nothing() {
    let scenes = [Scene::Free, Scene::Busy, Scene::Held, Scene::HandedOver];
    let mut cases = Vec::new();
    for (scene, taken) in scenes.into_iter().flat_map(|scene| ["a", "b"].map(|taken| (scene, taken))) {
        cases.extend(every_pair().flat_map(|fates| (0..5).map(move |polls| (scene, taken, fates, polls))));
    }
    run_together(&cases, |(scene, taken, fates, polls)| drop_set(scene, taken, fates, polls));
}

#[test]
fn mutex_set_release_dropped_at_any_await_point_leaves_nothing() {
    let cases: Vec<_> = every_pair().flat_map(|fates| (0..4).map(move |polls| (fates, polls))).collect();
    run_together(&cases, |(fates, polls)| {
        let mut stage = Stage::new();
        let set = MutexSet::new(["b", "a"].map(|name| stage.client.mutex(name).ttl(Duration::from_secs(2))));
        let guard = block_on(set.lock()).unwrap();
        stage.script(&fates);
        {
            let mut future = pin!(guard.release());
            for _ in 0..polls {
                if poll_once(future.as_mut()).is_ready() {
                    break;
                }
            }
        }
        for name in ["a", "b"] {
            stage.resource.name = Name::new(name).unwrap();
            stage.assert_nothing_is_left(&format!("release with {fates:?}, dropped after {polls} polls"));
        }
    });
}

#[test]
fn retried_mutex_set_that_finds_a_part_taken_holds_nothing() {
    let stage = Stage::new();
    let set = MutexSet::new(["a", "b"].map(|name| stage.client.mutex(name)));
    // The command is lost, so each mutex is retried alone; meanwhile another client acquires one.
    stage.script(&[Fate::CommandLost]);
    stage.other_takes_it();
    assert!(block_on(set.try_lock()).unwrap().is_none());
    wait_until("the client settles", || stage.client.is_settled());
    assert!(block_on(stage.client.mutex("b").inspect()).unwrap().holders.is_empty());
    stage.assert_nothing_is_left("a part of a set");
}

#[test]
fn once_per_is_at_most_once_with_max_hold() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let hold = Duration::from_millis(200);
    let lottery = client.once_per("a", Duration::from_secs(3_600)).max_hold(hold);
    let guard = block_on(lottery.start()).unwrap().unwrap();
    // The host dies.
    std::mem::forget(guard);
    thread::sleep(hold * 2);
    assert!(block_on(lottery.start()).unwrap().is_none(), "started twice in one period");
}

#[test]
fn barrier_is_reusable() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let barrier = client.barrier("a", 1);
    for round in 0..4_200 {
        let began = Instant::now();
        let passed = block_on(barrier.wait_timeout(Duration::from_secs(20)));
        assert!(matches!(passed, Ok(Some(true))), "round {round}: {passed:?} after {:?}", began.elapsed());
    }
}

#[test]
fn marks_do_not_fill_a_barrier() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let ttl = Duration::from_secs(1);
    let barrier = client.barrier("a", 2).ttl(ttl);
    let (mut passed, mut lost) = (0, 0);
    while passed < 110 {
        // The second party completes the round at once; the first notices at its next poll.
        let began = Instant::now();
        let mut first = Box::pin(barrier.wait_timeout(Duration::from_secs(10)));
        assert!(poll_once(first.as_mut()).is_pending());
        let second = block_on(barrier.wait_timeout(Duration::ZERO));
        let round = (block_on(first), second);
        if matches!(round, (Ok(Some(true)), Ok(Some(false)))) {
            passed += 1;
        } else {
            // A pause of the machine that is longer than two thirds of the ttl costs a party its lease.
            let took = began.elapsed();
            lost += 1;
            assert!(took > ttl / 2 && lost < 20, "after {passed} rounds: {round:?}, which took {took:?}");
        }
    }
    let view = block_on(client.inspect(Kind::Barrier, "a")).unwrap();
    assert!(view.rounds < 110, "old rounds are removed: {}", view.rounds);
}

#[test]
fn lease_that_a_dropped_future_never_returned_is_not_retained() {
    let stage = Stage::new();
    stage.other_takes_it();
    let mutex = stage.mutex().min_hold(Duration::from_secs(3_600));
    let mut future = Box::pin(mutex.lock());
    assert!(poll_once(future.as_mut()).is_pending());
    stage.other_gives_it_back();
    drop(future);
    stage.assert_nothing_is_left("granted to a dropped future");
}

/// A party that gives up while the others pass must not learn that the round was incomplete.
#[test]
fn party_that_departs_too_late_has_passed() {
    let stage = Stage::of(Kind::Barrier);
    let late = stage.client.barrier("a", 2);
    let other = stage.other_client().barrier("a", 2);
    let mut future = Box::pin(late.wait_timeout(Duration::from_millis(50)));
    assert!(poll_once(future.as_mut()).is_pending());
    // The answer to its last poll is in flight while the other party arrives.
    stage.script(&[Fate::Later]);
    wait_until("the party polls", || {
        assert!(poll_once(future.as_mut()).is_pending());
        stage.store.script.lock().unwrap().is_empty()
    });
    let passed = block_on(other.wait_timeout(Duration::from_secs(20))).unwrap();
    let left = block_on(future).unwrap();
    assert_eq!(passed.is_some(), left.is_some(), "both parties pass, or none");
}

/// What the store had granted to an attempt, and the client has released since, is no grant when its answer comes.
#[test]
fn release_of_all_ends_an_attempt_that_has_not_heard_of_its_grant() {
    let stage = Stage::new();
    let lock = stage.client.reentrant_mutex("a", "x").auto_renew(false);
    stage.script(&[Fate::Later]);
    let mut attempt = Box::pin(lock.lock_timeout(Duration::from_millis(300)));
    assert!(poll_once(attempt.as_mut()).is_pending());
    assert_eq!(block_on(lock.release_all()).unwrap(), 1);
    let other = block_on(stage.other_client().reentrant_mutex("a", "y").try_lock()).unwrap();
    assert!(other.is_some());
    assert!(block_on(attempt).unwrap().is_none());
    // Nothing else has it: the attempt asks again.
    drop(other);
    stage.script(&[Fate::Later]);
    let mut attempt = Box::pin(lock.lock());
    assert!(poll_once(attempt.as_mut()).is_pending());
    assert_eq!(block_on(lock.release_all()).unwrap(), 1);
    let guard = block_on(attempt).unwrap();
    assert_eq!(stage.view().holders.len(), 1);
    block_on(guard.release()).unwrap();
    stage.assert_nothing_is_left("an attempt that was released");
}

/// A party that gives up before it knows of its lease has not passed, and no other party passes with it.
#[test]
fn party_whose_arrival_is_not_answered_is_not_counted() {
    let stage = Stage::of(Kind::Barrier);
    let (late, other) = (stage.client.barrier("a", 2), stage.other_client().barrier("a", 2));
    stage.script(&[Fate::NeverAnswered]);
    let mut future = Box::pin(late.wait_timeout(Duration::from_millis(400)));
    assert!(poll_once(future.as_mut()).is_pending());
    let passed = thread::spawn(move || block_on(other.wait_timeout(Duration::from_secs(1))).unwrap());
    assert_eq!(block_on(future).unwrap(), None);
    assert_eq!(passed.join().unwrap(), None, "both parties pass, or none");
    stage.assert_nothing_is_left("two parties that have left");
}

/// A shared memory store whose commands and answers are each in flight for one poll.
struct Distant(Arc<Memory>, Replicas);

/// What becomes of the question whether replicas have what was read.
#[derive(Clone, Copy)]
enum Replicas {
    /// They have what their own client has written, and nothing of the others.
    Lag,
    /// One has become the master: it confirms, and has nothing of what was read at the old one.
    TakeOver,
}

impl Store for Distant {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS).with_replicas()
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        let answers = self.call_batch(vec![call], replicas);
        Box::pin(async { only(answers.await) })
    }

    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let (memory, of) = (self.0.clone(), self.1);
        let asks =
            |command: &Command| matches!(command, Command::Release(release) if !release.min_hold.is_zero());
        let asking: Vec<_> =
            batch.iter().map(|call| asks(&call.command).then(|| call.resource.clone())).collect();
        Box::pin(async move {
            yield_once().await;
            let mut answers = memory.call_batch(batch, replicas).await;
            for (answered, asked_of) in answers.iter_mut().zip(asking) {
                let is_not_held = answered.as_ref().is_ok_and(|answer| answer.reply == Reply::NotHeld);
                let Some(resource) = asked_of.filter(|_| replicas > 0 && is_not_held) else { continue };
                match of {
                    Replicas::Lag => {
                        *answered = Err(StoreError::new(Failure::NotDurable, "no replica has it"));
                    }
                    Replicas::TakeOver => drop(memory.call_inline(&resource, &Command::ForceRelease)),
                }
            }
            yield_once().await;
            answers
        })
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        self.0.list()
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        self.0.doctor()
    }
}

/// A xorshift generator, so that a seed identifies a schedule.
fn next_random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Polls parties in a random order; each gives up after one poll of the barrier. With `drops`, drops one party after that many polls
/// and leaves it out of the result.
fn run_round(barriers: &[crate::Barrier], seed: &mut u64, mut drops: Option<u64>) -> Vec<Option<bool>> {
    let wait = |barrier: &crate::Barrier| {
        let barrier = barrier.clone();
        Box::pin(async move { barrier.wait_timeout(Duration::ZERO).await.unwrap() })
    };
    let mut parties: Vec<_> = barriers.iter().map(|barrier| Some(wait(barrier))).collect();
    let mut ended = vec![None; parties.len()];
    let give_up = Instant::now() + Duration::from_secs(20);
    while parties.iter().any(Option::is_some) {
        assert!(Instant::now() < give_up, "the round does not end");
        let at = usize::try_from(next_random(seed) % parties.len() as u64).unwrap();
        // A burst polls one party several times in sequence.
        for _ in 0..1 + next_random(seed) % 6 {
            let Some(party) = &mut parties[at] else { break };
            if let Poll::Ready(passed) = poll_once(party.as_mut()) {
                ended[at] = passed;
                parties[at] = None;
            }
        }
        drops = drops.and_then(|left| left.checked_sub(1));
        if drops == Some(0) && parties[at].is_some() {
            drop(parties.remove(at));
            ended.remove(at);
        }
    }
    ended
}

#[test]
fn all_parties_of_a_round_pass_or_none_in_every_schedule() {
    let mut seed = 0x9E37_79B9_7F4A_7C15;
    let (mut passed, mut failed) = (0, 0);
    for (parties, comers) in [(2, 2), (2, 3), (3, 3), (3, 4), (4, 4)] {
        let memory = Memory::open("");
        let clients: Vec<_> = (0..comers).map(|_| distant_client(&memory)).collect();
        for round in 0..400 {
            // A new name, since commands of the last round may still arrive.
            let name = format!("{parties}-{round}");
            let barriers: Vec<_> = clients.iter().map(|client| client.barrier(&name, parties)).collect();
            let first = seed;
            let drops = next_random(&mut seed).is_multiple_of(3).then(|| next_random(&mut seed) % 40);
            let ended = run_round(&barriers, &mut seed, drops);
            let through = u32::try_from(ended.iter().flatten().count()).unwrap();
            let leaders = ended.iter().filter(|passed| **passed == Some(true)).count();
            // The dropped party may have passed, and may have been the leader.
            let missing = u32::from(ended.len() < barriers.len());
            let is_whole = through <= parties && through + missing >= parties;
            let is_led = leaders == 1 || (leaders == 0 && missing == 1);
            let case = format!("schedule {first:#x}, {parties} of {comers} parties: {ended:?}");
            assert!(through == 0 || (is_whole && is_led), "{case}");
            *(if through == 0 { &mut failed } else { &mut passed }) += 1;
        }
    }
    // Both outcomes must occur.
    assert!(passed > 100 && failed > 100, "{passed} rounds passed, {failed} did not");
}

/// A party that passes because of another one's mark has not written it, and a failover may forget it.
#[test]
fn party_passes_by_a_mark_of_another_one_once_the_replicas_have_it() {
    for replicas in [0, 1] {
        let memory = Memory::open("");
        let clients = [distant_client(&memory), distant_client(&memory)];
        let (first, second) = (clients[0].barrier("a", 2), clients[1].barrier("a", 2).replicas(replicas));
        let (mut first, mut second) = (Box::pin(first.wait()), Box::pin(second.wait()));
        let arrived = || memory.call_inline(&resource_of_barrier(), &Command::Inspect).unwrap().reply;
        let is_there = |holder: &leasehold_core::Holder| holder.weight == crate::barrier_rounds::ARRIVAL;
        let holders = || matches!(arrived(), Reply::View(view) if view.holders.iter().filter(|holder| is_there(holder)).count() == 2);
        assert!(poll_once(first.as_mut()).is_pending());
        wait_until("both have arrived", || {
            poll_once(first.as_mut()).is_pending() && poll_once(second.as_mut()).is_pending() && holders()
        });
        let mut passed = None;
        wait_until("the first passes", || {
            if let Poll::Ready(is_leader) = poll_once(first.as_mut()) {
                passed = Some(is_leader.unwrap());
            }
            passed.is_some()
        });
        assert_eq!(passed, Some(true));
        let follows = block_on(second);
        match replicas {
            0 => assert!(!follows.unwrap()),
            _ => assert!(follows.unwrap_err().to_string().contains("no replica has it")),
        }
    }
}

#[test]
fn single_party_needs_no_mark_and_no_replica_that_has_it() {
    let client = distant_client(&Memory::open(""));
    assert!(block_on(client.barrier("a", 1).replicas(1).wait()).unwrap());
}

#[test]
fn count_that_a_failover_has_lost_opens_no_latch_although_the_new_master_confirms() {
    let memory = Memory::open("");
    let other = distant_client(&memory);
    let client = client_of(&memory, Replicas::TakeOver);
    for (replicas, is_open) in [(0, true), (1, false)] {
        assert_eq!(block_on(other.latch("a", 1).count_down_as("host")).unwrap(), 0);
        let latch = client.latch("a", 1).replicas(replicas);
        assert_eq!(block_on(latch.wait_timeout(Duration::from_millis(300))).unwrap(), is_open);
    }
}

fn resource_of_barrier() -> Resource {
    Resource { kind: Kind::Barrier, name: Name::new("a").unwrap() }
}

fn distant_client(memory: &Arc<Memory>) -> Client {
    client_of(memory, Replicas::Lag)
}

fn client_of(memory: &Arc<Memory>, replicas: Replicas) -> Client {
    let store = Arc::new(Distant(memory.clone(), replicas));
    let open = |id: ClientId, inbox: Weak<dyn Inbox>| async move {
        store.0.join(id, inbox);
        Ok::<_, Error>(store as Arc<dyn Store>)
    };
    block_on(Client::with_store("memory:".to_owned(), open)).unwrap()
}

#[test]
fn round_marked_by_several_parties_counts_once() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let lock = |label: String| {
        let mut lock = crate::locks::lock::Lock::new(client.handle.clone(), Kind::Barrier, "a", 3 << 16);
        lock.min_hold = Duration::from_secs(60);
        lock.set_label(label);
        lock
    };
    for (first, last) in [(10, 12), (10, 12), (11, 13), (20, 22)] {
        let mark = block_on(lock(format!("passed {first} {last}")).try_lock(1)).unwrap().unwrap();
        block_on(mark.release()).unwrap();
    }
    assert_eq!(block_on(client.inspect(Kind::Barrier, "a")).unwrap().rounds, 2);
}
