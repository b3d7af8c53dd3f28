//! What a session makes of single calls and answers. No driver and no store answer in between.

mod closing;
mod queues;
mod requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Failure, Grant, Kind, LeaseTerms, LocalTime, Loss, Name,
    Outcome, Owner, Push, PushKind, Queued, Release, Reply, Resource, SecretKey, StoreTime, TokenRange,
    WaitFor, WaitPolicy,
};
use leasehold_store::clock::Clock;
use leasehold_store::clock::manual::{Driven, ManualClock};
use leasehold_store::{CallResult, Inbox as _, StoreError};

use super::entry::{MinHold, Transmit};
use super::ids::EntryId;
use super::session::Session;
use super::table::Effects;
use crate::telemetry::ClientTelemetry;

const TTL: Duration = Duration::from_secs(9);

/// Counts how often it is woken: as a driver, or as a task.
#[derive(Default)]
struct Count(AtomicUsize);

impl Count {
    fn take(&self) -> usize {
        self.0.swap(0, Ordering::SeqCst)
    }
}

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Driven for Count {
    fn run_due(&self, _now: LocalTime) -> Option<LocalTime> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Some(LocalTime::NEVER)
    }
}

fn task() -> (Arc<Count>, Waker) {
    let count = Arc::new(Count::default());
    (count.clone(), Waker::from(count))
}

/// A session without a store.
struct Scene {
    clock: Arc<ManualClock>,
    start: LocalTime,
    session: Arc<Session>,
    driver: Arc<Count>,
}

impl Scene {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let telemetry = ClientTelemetry::new("memory:");
        let session =
            Arc::new(Session::new(ClientId::new(1), SECRET_KEY, Clock::Manual(clock.clone()), telemetry));
        let driver = Arc::new(Count::default());
        clock.add(driver.clone());
        driver.take();
        Self { start: clock.now(), clock, session, driver }
    }

    fn after(&self, seconds: u64) -> LocalTime {
        self.start + Duration::from_secs(seconds)
    }

    /// Begins an attempt, and returns its first command.
    fn begin(&self, name: &str, owner: Option<&str>, waits: bool) -> Transmit {
        let command = Acquire {
            owner: owner.map(Owner::new),
            wait: waits.then_some(WAIT),
            ..Acquire::exclusive(self.session.next_acquisition(), TTL)
        };
        let policy = waits.then_some(policy());
        let (resource, terms) = (resource(name), terms());
        let began =
            self.session.begin(resource, terms, MinHold::default(), command, policy, self.session.now());
        began.ok().and_then(|(_, transmit)| transmit).expect("a new attempt sends a command")
    }

    fn answer(&self, transmit: &Transmit, reply: Reply) -> Option<Outcome> {
        self.session.handle_response(transmit, self.session.now(), &answer(reply))
    }

    /// The entry of a new lease.
    fn lease(&self, name: &str) -> EntryId {
        let attempt = self.begin(name, None, false);
        assert!(matches!(self.answer(&attempt, granted(1, 1)), Some(Outcome::Granted { .. })));
        attempt.entry
    }

    /// Ends the use of a lease, and returns the release.
    fn drop_lease(&self, lease: EntryId) -> Transmit {
        let release = self.session.release_dropped(lease, self.session.now()).expect("a lease is released");
        assert!(matches!(release.command, Command::Release(_)));
        release
    }

    /// The push of a grant to an attempt whose first `Acquire` was queued.
    fn push_grant(&self, entry_id: EntryId, grant: Grant) {
        let acquisition = entry_id.acquisition(self.session.id);
        let proof = SECRET_KEY.secret(acquisition, 1).prove(StoreTime::ZERO, &grant);
        self.push(entry_id, PushKind::Granted(grant, proof));
    }

    fn push(&self, entry_id: EntryId, kind: PushKind) {
        let acquisition = entry_id.acquisition(self.session.id);
        self.session.deliver(Push::new(acquisition, StoreTime::ZERO, kind));
    }

    /// What the driver sends at this time: each command with its entry.
    fn due(&self, now: LocalTime) -> Vec<Transmit> {
        self.session.due(now).transmits.into_iter().map(|(_, transmit)| transmit).collect()
    }

    fn sent(&self, now: LocalTime) -> Vec<EntryId> {
        self.due(now).iter().map(|transmit| transmit.entry).collect()
    }
}

const SECRET_KEY: SecretKey = SecretKey::new(0x5EC2E7);
const WAIT: WaitFor = WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 3 };

fn policy() -> WaitPolicy {
    WaitPolicy {
        deadline: LocalTime::NEVER,
        repoll_interval: Duration::from_secs(5),
        confirms_pushes: false,
        secret_key: SECRET_KEY,
    }
}

fn terms() -> LeaseTerms {
    LeaseTerms { ttl: TTL, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas: 0 }
}

fn resource(name: &str) -> Arc<Resource> {
    Arc::new(Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() })
}

fn grant(first: u64, last: u64) -> Grant {
    Grant { tokens: TokenRange::new(first, last).unwrap(), valid_for: TTL, is_plain: false }
}

fn granted(first: u64, last: u64) -> Reply {
    Reply::Granted(grant(first, last))
}

const QUEUED: Reply = Reply::Queued(Queued { is_head: false, repoll_at: StoreTime::NEVER });

fn answer(reply: Reply) -> CallResult {
    Ok(Answer { at: StoreTime::ZERO, reply })
}

fn failure() -> CallResult {
    Err(StoreError::new(Failure::Unknown, "the connection was closed"))
}

#[test]
fn granted_owners_other_attempts_ask_again() {
    let scene = Scene::new();
    let first = scene.begin("a", Some("this"), true);
    let same = scene.begin("a", Some("this"), true);
    let others = [("a", Some("other")), ("b", Some("this")), ("a", None)];
    let others = others.map(|(name, owner)| scene.begin(name, owner, true));
    for attempt in [&first, &same].into_iter().chain(&others) {
        scene.answer(attempt, QUEUED);
    }
    assert!(scene.sent(scene.start).is_empty());
    scene.push_grant(first.entry, grant(1, 1));
    assert_eq!(scene.sent(scene.start), [same.entry]);
    // Once per grant.
    scene.answer(&same, QUEUED);
    scene.session.limit_hold(first.entry, LocalTime::NEVER, scene.start);
    assert!(scene.sent(scene.start).is_empty());
}

#[test]
fn driver_is_woken_only_for_what_is_due_before_it_wakes_by_itself() {
    let scene = Scene::new();
    let first = scene.begin("a", None, false);
    assert_eq!(scene.driver.take(), 1);
    scene.begin("b", None, false);
    assert_eq!(scene.driver.take(), 0, "it is due at the same time");
    scene.answer(&first, granted(1, 1));
    assert_eq!(scene.driver.take(), 1, "the renewal is due before the answers");
    // What the driver has looked at does not wake it.
    scene.due(scene.after(3));
    assert_eq!(scene.driver.take(), 0);
}

#[test]
fn timer_is_moved_only_to_an_earlier_time() {
    let scene = Scene::new();
    let timers = || scene.session.table().timers.iter().map(|(time, _)| *time).collect::<Vec<_>>();
    let attempt = scene.begin("a", None, false);
    assert_eq!(timers(), [scene.after(15)], "an attempt without an answer");
    scene.answer(&attempt, granted(1, 1));
    assert_eq!(timers(), [scene.after(3)], "the renewal");
    let renewal = scene.session.begin_renewal(attempt.entry, scene.after(1)).unwrap();
    assert_eq!(timers(), [scene.after(3)], "the loss is later");
    assert!(scene.due(scene.after(3)).is_empty());
    // Half of the time from its sending to the end of the lease.
    let unanswered = (Duration::from_secs(1) + TTL - leasehold_core::drift_margin(TTL)) / 2;
    assert_eq!(timers(), [scene.start + unanswered], "the renewal without an answer");
    scene.session.handle_response(&renewal, scene.after(4), &answer(Reply::NotHeld));
    scene.session.due(scene.after(20));
    assert!(timers().is_empty(), "a lost lease needs none");
}

#[test]
fn entry_stays_while_it_is_referenced() {
    let scene = Scene::new();
    let attempt = scene.begin("a", None, false);
    assert_eq!(scene.answer(&attempt, Reply::Busy), Some(Outcome::NotGranted));
    assert_eq!(scene.session.len(), 1, "its future has not seen the outcome");
    assert!(scene.session.release_dropped(attempt.entry, scene.start).is_none());
    assert_eq!(scene.session.len(), 0);
    // A lease stays until the store has released it.
    let release = scene.drop_lease(scene.lease("a"));
    assert_eq!(scene.session.len(), 1);
    scene.answer(&release, Reply::Released);
    assert_eq!(scene.session.len(), 0);
}

#[test]
fn reconnect_asks_again_for_the_resources_that_it_concerns() {
    let scene = Scene::new();
    let [first, other, second] = ["a", "b", "a"].map(|name| scene.begin(name, None, true));
    for attempt in [&first, &other, &second] {
        scene.answer(attempt, QUEUED);
    }
    scene.session.reconnected(&|resource| resource.name.as_str() == "a");
    assert_eq!(scene.sent(scene.start), [first.entry, second.entry]);
}

#[test]
fn shortest_ttl_is_that_of_leases_that_are_held_and_renewed() {
    let scene = Scene::new();
    assert_eq!(scene.session.shortest_ttl(), None);
    scene.begin("a", None, false);
    assert_eq!(scene.session.shortest_ttl(), None, "an attempt");
    let lease = scene.lease("b");
    assert_eq!(scene.session.shortest_ttl(), Some(TTL));
    scene.drop_lease(lease);
    assert_eq!(scene.session.shortest_ttl(), None);
}

#[test]
fn push_reaches_its_own_attempt() {
    let scene = Scene::new();
    let [one, other] = [(); 2].map(|()| scene.begin("a", None, true));
    for attempt in [&one, &other] {
        scene.answer(attempt, QUEUED);
    }
    scene.push_grant(one.entry, grant(7, 7));
    assert!(scene.session.remaining(one.entry, scene.start).is_ok());
    assert_eq!(scene.session.remaining(other.entry, scene.start), Err(Loss::Closed));
    assert_eq!(scene.session.remaining(99.into(), scene.start), Err(Loss::Closed));
}

#[test]
fn owner_lost_a_lease_only_of_the_same_lock_while_a_guard_refers_to_it() {
    let scene = Scene::new();
    let (this, other) = (Owner::new("this"), Owner::new("other"));
    let attempt = scene.begin("a", Some("this"), false);
    scene.answer(&attempt, granted(1, 1));
    let late = scene.after(20);
    let loss =
        |name: &str, owner: &Owner, now| scene.session.loss_of_owner(&resource(name), owner, None, now);
    assert_eq!(loss("a", &this, scene.start), None);
    assert_eq!(loss("a", &this, late), Some(Loss::Expired));
    assert_eq!(loss("b", &this, late), None);
    assert_eq!(loss("a", &other, late), None);
    // Its guard is gone, and the release is not confirmed.
    scene.session.table().entries.get_mut(&attempt.entry).unwrap().is_referenced = false;
    assert_eq!(loss("a", &this, late), None);
}

#[test]
fn later_grant_to_the_owner_ends_its_leases_with_a_lower_token() {
    let scene = Scene::new();
    let this = Owner::new("this");
    let lease = |name: &str, owner: &str, token| {
        let attempt = scene.begin(name, Some(owner), false);
        scene.answer(&attempt, granted(token, token));
        attempt.entry
    };
    let earlier = lease("a", "this", 3);
    let others =
        [lease("a", "this", 7), lease("a", "this", 9), lease("a", "other", 3), lease("b", "this", 3)];
    scene.session.lose_before(&resource("a"), &this, grant(7, 7).tokens.first, scene.start);
    assert_eq!(scene.session.remaining(earlier, scene.start), Err(Loss::Gone));
    for other in others {
        assert!(scene.session.remaining(other, scene.start).is_ok());
    }
}

#[test]
fn waited_grant_tells_when_it_was_granted() {
    let scene = Scene::new();
    let token = grant(5, 6).tokens;
    let at_once = scene.lease("a");
    let own = scene.session.queued_grant(at_once, grant(1, 1).tokens.first);
    assert!(own.is_none(), "{own:?}");
    let waited = scene.begin("b", None, true);
    scene.answer(&waited, QUEUED);
    scene.push_grant(waited.entry, grant(5, 6));
    let own = scene.session.queued_grant(waited.entry, token.first);
    assert!(own.is_some_and(|grant| grant.granted_at.is_some()), "{own:?}");
    let handed_off = scene.session.queued_grant(waited.entry, token.last);
    assert!(handed_off.is_some_and(|grant| grant.granted_at.is_none()), "{handed_off:?}");
}

#[test]
fn lease_keeps_what_its_guard_sets() {
    let scene = Scene::new();
    let (session, start) = (&scene.session, scene.start);
    let lease = scene.lease("a");
    assert_eq!(session.ends_at(lease), LocalTime::NEVER);
    session.limit_hold(lease, scene.after(7), start);
    assert_eq!(session.ends_at(lease), scene.after(7));
    session.set_min_hold(lease, Duration::from_secs(3), start);
    let release = scene.drop_lease(lease);
    let Command::Release(Release { min_hold, .. }) = release.command else { panic!("{release:?}") };
    assert_eq!(min_hold, Duration::from_secs(3));
    // A lost lease has none.
    let lost = scene.begin("a", Some("this"), false);
    scene.answer(&lost, granted(1, 1));
    session.lose_before(&resource("a"), &Owner::new("this"), grant(7, 7).tokens.first, start);
    session.set_min_hold(lost.entry, Duration::from_secs(3), start);
    let release = scene.drop_lease(lost.entry);
    let Command::Release(Release { min_hold, .. }) = release.command else { panic!("{release:?}") };
    assert_eq!(min_hold, Duration::ZERO);
}

#[test]
fn replaced_lease_ends_without_a_loss() {
    let scene = Scene::new();
    let (session, start) = (&scene.session, scene.start);
    for (is_replacing, losses) in [(true, 0), (false, 1)] {
        let lease = scene.lease("a");
        session.set_replacing(lease, is_replacing, start);
        let mut effects = Effects::default();
        session.table().reconcile(lease, scene.after(20), &mut effects);
        assert_eq!(effects.log_events.len(), losses);
    }
    let replaced = scene.lease("b");
    session.set_replacing(replaced, true, start);
    session.mark_replaced(replaced, start);
    assert!(session.table().entries.get(&replaced).is_none(), "nothing is left to release");
}

#[test]
fn attached_lease_is_released_only_by_its_owner() {
    use super::leases::{AttachedLease, DetachedLease};
    let scene = Scene::new();
    let attach = || {
        let acquisition = Acquisition { client: ClientId::new(2), sequence: 7 };
        let (ttl, zero) = (TTL, Duration::ZERO);
        let detached = DetachedLease {
            acquisition,
            ttl,
            min_hold: zero,
            ends_at_close: false,
            tombstone: zero,
            outlasts_ttl: false,
            is_repeat: false,
            trusted_until: LocalTime::NEVER,
        };
        let tokens = grant(1, 1).tokens;
        let lease = AttachedLease { detached, owner: None, tokens, replicas: 0, is_borrowed: true };
        scene.session.attach(resource("a"), lease, scene.start, TTL)
    };
    let borrowed = attach().ok().unwrap();
    assert!(scene.session.remaining(borrowed, scene.after(8)).is_ok());
    assert!(scene.session.release_dropped(borrowed, scene.start).is_none());
    assert_eq!(scene.session.len(), 0);
    let owned = attach().ok().unwrap();
    assert_ne!(owned, borrowed);
    scene.session.own(owned, scene.start);
    scene.drop_lease(owned);
    scene.session.close(scene.start);
    assert!(attach().is_err());
}

#[test]
fn renewal_is_sent_once_at_a_time() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    let renewal = scene.session.begin_renewal(lease, scene.start).unwrap();
    assert!(matches!(renewal.command, Command::Renew(_)));
    assert!(scene.session.begin_renewal(lease, scene.start).is_none(), "one is in flight");
    // The future of the renewal was dropped.
    scene.session.abandon_renewal(lease, scene.start);
    assert!(scene.session.begin_renewal(lease, scene.start).is_some());
}

#[test]
fn deferred_release_is_sent_by_the_driver() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    scene.drop_lease(lease);
    assert!(scene.sent(scene.start).is_empty(), "it is in flight");
    scene.session.defer_release(lease, scene.start);
    assert_eq!(scene.sent(scene.start), [lease]);
}

#[test]
fn failed_release_is_retried_after_the_time_of_its_failure() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    let release = scene.drop_lease(lease);
    scene.clock.jump(Duration::from_secs(2));
    assert_eq!(scene.session.handle_release_response(&release, &failure()), None);
    assert!(scene.sent(scene.after(2)).is_empty());
    let again = scene.due(scene.after(2) + Duration::from_millis(100)).pop().expect("the retry");
    let released = scene.session.handle_release_response(&again, &answer(Reply::Released));
    assert_eq!(released, Some(super::ReleaseOutcome::Released));
    assert_eq!(scene.session.len(), 0);
}

fn poll_with<T>(waker: &Waker, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    poll(&mut Context::from_waker(waker))
}
