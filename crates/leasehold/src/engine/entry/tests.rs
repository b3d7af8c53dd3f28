//! What an entry makes of responses, pushes and failures, one at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Failure, Grant, GrantProof, HandoffDecision, Kind, LocalTime,
    Name, ReleaseIf, Renew, SecretKey, StoreTime, TOMBSTONE_TTL, TokenRange, WaitFor, WaitPolicy,
};

use super::*;

const TTL: Duration = Duration::from_secs(9);
const REPLICAS: u32 = 2;
const SECRET_KEY: SecretKey = SecretKey::new(0x5EC2E7);

fn at(seconds: u64) -> LocalTime {
    LocalTime::ZERO + Duration::from_secs(seconds)
}

fn entry(waits: bool) -> Entry {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    let wait = waits.then_some(WaitFor { entry_ttl: TTL, max_queue: 9 });
    let policy = WaitPolicy {
        deadline: LocalTime::NEVER,
        repoll_interval: Duration::from_secs(2),
        confirms_pushes: false,
        secret_key: SECRET_KEY,
    };
    let command = Acquire { wait, ..Acquire::exclusive(acquisition, TTL) };
    let machine = AcquireMachine::new(command, waits.then_some(policy), at(0));
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let terms = LeaseTerms {
        ttl: TTL,
        renews: true,
        max_hold: None,
        min_lifetime: Duration::ZERO,
        replicas: REPLICAS,
    };
    Entry::new(Arc::new(resource), None, terms, MinHold::default(), machine)
}

fn sent(entry: &mut Entry, now: LocalTime) -> Transmit {
    entry.poll_transmit(1.into(), now).expect("a command is due")
}

fn grant(is_plain: bool) -> Grant {
    Grant { tokens: TokenRange::next(0, 0, StoreTime::ZERO), valid_for: TTL, is_plain }
}

fn answer(reply: Reply) -> CallResult {
    Ok(Answer { at: StoreTime::ZERO, reply })
}

fn failure() -> CallResult {
    Err(StoreError::new(Failure::Unknown, "the connection was closed"))
}

/// A lease that the first lines of a script granted.
fn held() -> Entry {
    let mut entry = entry(false);
    let transmit = sent(&mut entry, at(0));
    entry.handle_response(&transmit, at(0), &answer(Reply::Granted(grant(true))));
    assert!(matches!(entry.outcome(at(0)), Some(Outcome::Granted { .. })));
    entry
}

/// The release that follows, and how it was sent.
fn release_of(entry: &mut Entry, now: LocalTime) -> (Release, Transmit) {
    entry.abandon(now);
    let transmit = sent(entry, now);
    match &transmit.command {
        Command::Release(release) => (release.clone(), transmit),
        other => panic!("{other:?}"),
    }
}

fn renew(entry: &mut Entry, now: LocalTime, answered: &CallResult) -> Transmit {
    entry.renew_now(now);
    let transmit = sent(entry, now);
    assert!(matches!(transmit.command, Command::Renew(_)), "{transmit:?}");
    entry.handle_response(&transmit, now, answered);
    transmit
}

fn renewed(contended: bool, tokens: Option<TokenRange>) -> CallResult {
    answer(Reply::Renewed { valid_for: TTL, tokens, contended })
}

/// A grant that proves the secret of the first `Acquire`.
fn proven(grant: Grant) -> PushKind {
    proven_at(StoreTime::ZERO, grant)
}

fn proven_at(at: StoreTime, grant: Grant) -> PushKind {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    PushKind::Granted(grant, SECRET_KEY.secret(acquisition, 1).prove(at, &grant))
}

fn push(entry: &mut Entry, kind: PushKind) {
    push_at(entry, at(1), StoreTime::ZERO, kind);
}

fn push_at(entry: &mut Entry, now: LocalTime, at: StoreTime, kind: PushKind) {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    entry.handle_push(now, &Push::new(acquisition, at, kind));
}

/// Names of the events, which are logged once.
fn logged(entry: &mut Entry) -> Vec<&'static str> {
    let name = |event| match event {
        LogEvent::Lost(..) => "lost",
        LogEvent::AttemptRefused(_) => "attempt refused",
        LogEvent::AttemptRecovered => "attempt recovered",
        LogEvent::RenewalFailed(_) => "renewal failed",
        LogEvent::RenewalRecovered => "renewal recovered",
        LogEvent::ReleaseFailed(_) => "release failed",
        LogEvent::ReleaseRecovered => "release recovered",
        LogEvent::ReleaseUnconfirmed => "release unconfirmed",
    };
    entry.log_events.drain(..).map(name).collect()
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn each_task_has_one_waker() {
    let mut entry = entry(false);
    let wakers = [(); 3].map(|()| Waker::from(Arc::new(Woken::default())));
    let mut register = |key, waker: &Waker| {
        let replaced = entry.register(key, &mut Context::from_waker(waker));
        let keys: Vec<_> = entry.wakers.iter().map(|(key, _)| *key).collect();
        (replaced, keys)
    };
    assert!(matches!(register(1.into(), &wakers[0]), (None, keys) if keys == [1]));
    assert!(matches!(register(2.into(), &wakers[1]), (None, keys) if keys == [1, 2]));
    assert!(
        matches!(register(1.into(), &wakers[0]), (None, keys) if keys == [1, 2]),
        "the same task polls again"
    );
    let (replaced, keys) = register(1.into(), &wakers[2]);
    assert!(replaced.is_some_and(|waker| waker.will_wake(&wakers[0])) && keys == [1, 2]);
    assert!(entry.unregister(2.into()).is_some_and(|waker| waker.will_wake(&wakers[1])));
    assert!(entry.unregister(2.into()).is_none());
    assert!(entry.unregister(1.into()).is_some_and(|waker| waker.will_wake(&wakers[2])));
    assert!(entry.wakers.is_empty());
}

#[test]
fn what_keeps_others_out_waits_for_replicas_and_other_releases_do_not() {
    let mut entry = entry(false);
    let acquire = sent(&mut entry, at(0));
    entry.handle_response(&acquire, at(0), &answer(Reply::Granted(grant(true))));
    entry.advance(at(0));
    let renewal = renew(&mut entry, at(1), &renewed(false, None));
    let (_, release) = release_of(&mut entry, at(2));
    assert_eq!([acquire.replicas, renewal.replicas, release.replicas], [REPLICAS, REPLICAS, 0]);
    let mut entry = held();
    entry.min_hold.length = TTL * 2;
    assert_eq!(release_of(&mut entry, at(2)).1.replicas, REPLICAS);
}

/// Only then may its key be deleted by its value.
#[test]
fn release_names_the_granted_value_while_the_store_has_it() {
    let names_value = |entry: &mut Entry| release_of(entry, at(2)).0.as_granted.is_some();
    assert!(names_value(&mut held()));
    for (reply, expected) in [
        (renewed(false, None), true),
        (renewed(true, None), false),
        (renewed(false, Some(TokenRange::next(0, 0, StoreTime::ZERO))), false),
        (failure(), true),
    ] {
        let mut entry = held();
        renew(&mut entry, at(1), &reply);
        assert_eq!(names_value(&mut entry), expected, "{reply:?}");
    }
    let mut entry = held();
    push(&mut entry, PushKind::Contended);
    assert!(entry.poll_transmit(1.into(), at(1)).is_none(), "it needs no renewal");
    assert!(!names_value(&mut entry));
}

/// What anybody may send to a holder, and how often it asks the store for it.
#[test]
fn forged_push_ends_no_lease() {
    let later = Grant { tokens: TokenRange::new(7, 7).unwrap(), ..grant(false) };
    for kind in [PushKind::Granted(later, GrantProof::NONE), PushKind::Revoked, PushKind::Contended] {
        for mut entry in [held(), granted_by_push().0] {
            let mut asked = 0;
            for _ in 0..100 {
                push(&mut entry, kind);
                if let Some(renewal) = entry.poll_transmit(1.into(), at(5)) {
                    assert!(matches!(renewal.command, Command::Renew(_)), "{renewal:?}");
                    entry.handle_response(&renewal, at(5), &renewed(false, None));
                    asked += 1;
                }
                assert!(entry.remaining(at(5)).is_ok(), "{kind:?}");
            }
            assert!(asked <= 2, "{kind:?}: {asked}");
            assert!(logged(&mut entry).is_empty());
        }
    }
}

#[test]
fn revoked_lease_is_renewed_at_once() {
    let mut entry = held();
    push(&mut entry, PushKind::Revoked);
    let renewal = sent(&mut entry, at(1));
    assert!(matches!(renewal.command, Command::Renew(_)), "{renewal:?}");
    entry.handle_response(&renewal, at(1), &answer(Reply::NotHeld));
    assert!(entry.advance(at(1)));
    assert_eq!(logged(&mut entry), ["lost"]);
}

#[test]
fn outage_is_logged_at_its_begin_and_at_its_end() {
    let mut entry = held();
    renew(&mut entry, at(1), &renewed(false, None));
    assert!(logged(&mut entry).is_empty());
    renew(&mut entry, at(2), &failure());
    renew(&mut entry, at(3), &failure());
    assert_eq!(logged(&mut entry), ["renewal failed"]);
    renew(&mut entry, at(4), &renewed(false, None));
    renew(&mut entry, at(4), &renewed(false, None));
    assert_eq!(logged(&mut entry), ["renewal recovered"]);
    let (_, release) = release_of(&mut entry, at(5));
    entry.handle_response(&release, at(5), &failure());
    assert_eq!(entry.poll_timeout(), Some(at(5) + Duration::from_millis(100)), "the first pause");
    let again = sent(&mut entry, at(6));
    entry.handle_response(&again, at(6), &failure());
    assert_eq!(logged(&mut entry), ["release failed"]);
    let again = sent(&mut entry, at(7));
    entry.handle_response(&again, at(7), &answer(Reply::Released));
    assert_eq!(logged(&mut entry), ["release recovered"]);
    assert_eq!(entry.poll_timeout(), None);
}

#[test]
fn loss_is_the_last_that_is_logged_of_a_lease() {
    let mut entry = held();
    entry.renew_now(at(1));
    let renewal = sent(&mut entry, at(1));
    assert!(entry.advance(at(20)));
    entry.handle_response(&renewal, at(20), &failure());
    entry.advance(at(30));
    assert_eq!(logged(&mut entry), ["lost"]);
}

/// A lease that was pushed while the attempt was sent again, and that second command.
fn granted_by_push() -> (Entry, Transmit) {
    let mut entry = entry(true);
    let first = sent(&mut entry, at(0));
    let queued = leasehold_core::Queued { is_head: false, repoll_at: StoreTime::NEVER };
    entry.handle_response(&first, at(0), &answer(Reply::Queued(queued)));
    let repeated = sent(&mut entry, at(5));
    // A pushed grant lasts for a claim window.
    let granted_at = StoreTime::from_micros(5_000_000);
    push_at(&mut entry, at(5), granted_at, proven_at(granted_at, grant(false)));
    entry.advance(at(5));
    assert!(entry.remaining(at(5)).is_ok());
    (entry, repeated)
}

/// An attempt that was sent again may arrive after the release, unless it is answered before.
#[test]
fn answered_attempt_leaves_no_tombstone() {
    let tombstone = |reply: Option<Reply>| {
        let (mut entry, repeated) = granted_by_push();
        if let Some(reply) = reply {
            entry.handle_response(&repeated, at(5), &answer(reply));
        }
        release_of(&mut entry, at(5)).0.tombstone
    };
    assert!(!tombstone(None).is_zero());
    assert!(tombstone(Some(Reply::Granted(grant(false)))).is_zero());
    assert!(!tombstone(Some(Reply::Busy)).is_zero());
}

/// `release_all` ends the lease before the release of a dropped guard does, and before a repeated `Acquire` arrives.
#[test]
fn release_of_all_leaves_the_tombstone_of_a_release_in_progress() {
    let (mut entry, _) = granted_by_push();
    let acquisition = entry.acquisition().unwrap();
    assert!(entry.is_attempt(acquisition) && entry.tombstone() == TOMBSTONE_TTL);
    entry.abandon(at(5));
    assert!(entry.is_attempt(acquisition) && entry.tombstone() == TOMBSTONE_TTL);
    let (release, _) = release_of(&mut entry, at(5));
    assert_eq!(release.tombstone, TOMBSTONE_TTL);
}

/// A repeated `Acquire` arrived after the store had ended the lease.
#[test]
fn later_grant_to_an_attempt_ends_its_lease_and_is_released() {
    let later = Grant { tokens: TokenRange::new(7, 7).unwrap(), ..grant(false) };
    // Another client may have told the caller of a request of the later grant.
    for (is_pushed, speaker) in [(true, None), (false, None), (false, Some(ClientId::new(7)))] {
        let (mut entry, repeated) = granted_by_push();
        entry.requested_by = speaker;
        entry.min_hold.length = TTL;
        let acquisition = entry.acquisition().unwrap();
        // The same grant, seen twice.
        let Some(Outcome::Granted { grant: own, .. }) = entry.outcome else { panic!("it is granted") };
        push(&mut entry, proven(own));
        assert!(entry.remaining(at(1)).is_ok());
        if is_pushed {
            push(&mut entry, proven(later));
        } else {
            entry.handle_response(&repeated, at(1), &answer(Reply::Granted(later)));
        }
        assert_eq!(entry.remaining(at(1)), Err(Loss::Gone));
        assert!(entry.poll_timeout().is_some_and(|due| due <= at(1)));
        let release = sent(&mut entry, at(1));
        let late = Release {
            tombstone: TOMBSTONE_TTL,
            only_if: speaker.map(ReleaseIf::SpeaksFor),
            ..Release::now(acquisition)
        };
        assert_eq!(release.command, Command::Release(late));
        assert!(entry.poll_transmit(1.into(), at(1)).is_none(), "once");
        entry.handle_response(&release, at(1), &failure());
        assert!(entry.poll_transmit(1.into(), at(1)).is_none());
        let release = sent(&mut entry, at(2));
        entry.handle_response(&release, at(2), &answer(Reply::Released));
        assert!(entry.poll_transmit(1.into(), at(9)).is_none());
        // The guard is dropped later, or the lease was replaced meanwhile.
        if is_pushed {
            entry.abandon(at(9));
        } else {
            entry.mark_replaced(at(9));
        }
        // Its holder has ordered it.
        let ordered = Release { tombstone: TOMBSTONE_TTL, ..Release::now(acquisition) };
        assert_eq!(sent(&mut entry, at(9)).command, Command::Release(ordered));
    }
}

/// An `Acquire` may still be on its way then.
#[test]
fn lease_that_the_store_has_ended_leaves_a_tombstone_at_once_if_its_attempt_may_still_arrive() {
    for (answered_before, by_renewal) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut entry, repeated) = granted_by_push();
        if answered_before {
            entry.handle_response(&repeated, at(5), &answer(Reply::Granted(grant(false))));
        }
        entry.min_hold.length = TTL;
        if by_renewal {
            renew(&mut entry, at(5), &answer(Reply::NotHeld));
        } else {
            entry.lose(at(5));
        }
        assert_eq!(entry.remaining(at(5)), Err(Loss::Gone));
        assert_eq!(entry.poll_timeout(), (!answered_before).then_some(at(5)));
        let due = entry.poll_transmit(1.into(), at(5)).map(|transmit| transmit.command);
        let tombstone = if answered_before { Duration::ZERO } else { TOMBSTONE_TTL };
        let late = Release { tombstone, ..Release::now(entry.acquisition().unwrap()) };
        assert_eq!(due, (!answered_before).then_some(Command::Release(late.clone())));
        // What a late `Acquire` is granted has no minimum hold.
        entry.abandon(at(6));
        assert_eq!(sent(&mut entry, at(6)).command, Command::Release(late));
    }
}

#[test]
fn renewal_by_a_task_leaves_a_late_release_to_the_driver() {
    let (mut entry, _) = granted_by_push();
    renew(&mut entry, at(5), &answer(Reply::NotHeld));
    assert!(entry.begin_renewal(1.into(), at(5)).is_none());
    assert!(matches!(sent(&mut entry, at(5)).command, Command::Release(_)));
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn release_of_a_lease_that_the_store_knows_as_a_waiter_is_a_loss() {
    for (reply, expected) in [
        (Reply::Released, ReleaseOutcome::Released),
        (Reply::Dequeued, ReleaseOutcome::NotHeld),
        (Reply::NotHeld, ReleaseOutcome::NotHeld),
    ] {
        let mut lease = held();
        let (_, release) = release_of(&mut lease, at(1));
        lease.handle_response(&release, at(1), &answer(reply));
        assert_eq!(lease.release_outcome(), Some(expected));
    }
    // A waiter that gives up has nothing else to release.
    let mut attempt = entry(true);
    sent(&mut attempt, at(0));
    let (_, release) = release_of(&mut attempt, at(1));
    attempt.handle_response(&release, at(1), &answer(Reply::Dequeued));
    assert_eq!(attempt.release_outcome(), Some(ReleaseOutcome::Released));
}

#[test]
fn release_is_sent_again_until_it_is_answered_or_has_expired() {
    let mut entry = held();
    assert!(entry.may_be_in_store() && !entry.is_settled() && entry.release_outcome().is_none());
    let (_, first) = release_of(&mut entry, at(1));
    assert!(entry.may_be_in_store() && !entry.is_settled());
    // Without a response after half of the ttl.
    assert_eq!(entry.poll_timeout(), Some(at(1) + TTL / 2));
    assert!(entry.poll_transmit(1.into(), at(1)).is_none());
    entry.handle_response(&first, at(2), &failure());
    // After failures, with pauses that double.
    let mut now = at(2);
    for pause in [100, 200, 400, 800] {
        let retry = now + millis(pause);
        assert_eq!(entry.poll_timeout(), Some(retry));
        assert!(entry.poll_transmit(1.into(), retry.saturating_sub(millis(1))).is_none());
        let again = sent(&mut entry, retry);
        entry.handle_response(&again, retry, &failure());
        now = retry;
    }
    // At once, if the connection or the task is another one.
    entry.defer_release(now);
    sent(&mut entry, now);
    entry.handle_reconnected(now);
    sent(&mut entry, now);
    // The lease has expired in the store after its ttl and a margin.
    let until = at(1) + TTL + leasehold_core::drift_margin(TTL);
    entry.advance(until.saturating_sub(millis(1)));
    assert!(!entry.is_settled());
    assert!(entry.advance(until));
    assert_eq!(entry.release_outcome(), Some(ReleaseOutcome::Unconfirmed));
    assert!(entry.is_settled() && !entry.may_be_in_store());
    assert_eq!(logged(&mut entry), ["release failed", "release unconfirmed"]);
}

/// The store keeps it that long, even if nothing renews it.
#[test]
fn release_is_retried_until_the_minimum_lifetime_is_over() {
    let mut entry = held();
    entry.terms.min_lifetime = 10 * TTL;
    let (_, first) = release_of(&mut entry, at(1));
    entry.handle_response(&first, at(2), &failure());
    let until = at(1) + 10 * TTL + leasehold_core::drift_margin(10 * TTL);
    entry.advance(until.saturating_sub(millis(1)));
    assert!(!entry.is_settled());
    assert!(entry.advance(until));
    assert_eq!(entry.release_outcome(), Some(ReleaseOutcome::Unconfirmed));
}

#[test]
fn response_to_a_release_that_was_sent_twice_says_nothing_of_the_lease() {
    for (times, expected) in [(1, ReleaseOutcome::NotHeld), (2, ReleaseOutcome::Released)] {
        let mut entry = held();
        let (_, mut release) = release_of(&mut entry, at(1));
        for _ in 1..times {
            entry.abandon(at(1));
            release = sent(&mut entry, at(1));
        }
        entry.handle_response(&release, at(1), &answer(Reply::NotHeld));
        assert_eq!(entry.release_outcome(), Some(expected));
        assert!(entry.advance(at(1)), "who waits for the release is woken");
        assert!(logged(&mut entry).is_empty());
    }
}

/// Another client may have the lock by then.
#[test]
fn release_that_finds_nothing_is_a_loss_unless_an_earlier_one_may_have_arrived() {
    for failure in [Failure::NotSent, Failure::Busy, Failure::Gone, Failure::Unknown, Failure::Paused] {
        let expected =
            if failure.may_have_effect() { ReleaseOutcome::Released } else { ReleaseOutcome::NotHeld };
        let mut entry = held();
        let (_, mut release) = release_of(&mut entry, at(1));
        for second in 2..5 {
            entry.handle_response(&release, at(second), &Err(StoreError::new(failure, "no connection")));
            release = sent(&mut entry, at(second) + millis(500));
        }
        entry.handle_response(&release, at(5), &answer(Reply::NotHeld));
        assert_eq!(entry.release_outcome(), Some(expected), "{failure:?}");
    }
}

#[test]
fn release_that_was_sent_twice_and_failed_once_may_have_arrived() {
    let mut entry = held();
    let (_, first) = release_of(&mut entry, at(1));
    // No answer to the first one.
    entry.abandon(at(1));
    let second = sent(&mut entry, at(1));
    entry.handle_response(&second, at(2), &Err(StoreError::new(Failure::NotSent, "no connection")));
    entry.handle_response(&first, at(2), &answer(Reply::NotHeld));
    assert_eq!(entry.release_outcome(), Some(ReleaseOutcome::NotHeld));
    // Of three sends one is known not to have arrived.
    let mut entry = held();
    release_of(&mut entry, at(1));
    entry.abandon(at(1));
    let second = sent(&mut entry, at(1));
    entry.handle_response(&second, at(2), &Err(StoreError::new(Failure::NotSent, "no connection")));
    let third = sent(&mut entry, at(3));
    entry.handle_response(&third, at(3), &answer(Reply::NotHeld));
    assert_eq!(entry.release_outcome(), Some(ReleaseOutcome::Released));
}

/// Otherwise the count of a latch, or the end of the work of a period, could be lost without a word.
#[test]
fn release_that_found_no_lease_is_unconfirmed_if_the_lease_may_have_expired_before() {
    for (min_hold, answered_at, expected) in [
        (Duration::ZERO, 9, ReleaseOutcome::Released),
        (TTL, 2, ReleaseOutcome::Released),
        (TTL, 9, ReleaseOutcome::Unconfirmed),
    ] {
        let mut entry = held();
        entry.min_hold.length = min_hold;
        release_of(&mut entry, at(1));
        entry.abandon(at(1));
        let again = sent(&mut entry, at(1));
        entry.handle_response(&again, at(answered_at), &answer(Reply::NotHeld));
        assert_eq!(entry.release_outcome(), Some(expected), "{min_hold:?}, {answered_at}");
    }
}

#[test]
fn closed_client_retries_a_release_until_the_lease_has_ended() {
    let closed = |now: u64| {
        let mut entry = held();
        entry.close(at(now));
        assert!(entry.advance(at(now)));
        let release = sent(&mut entry, at(now));
        entry.handle_response(&release, at(now), &failure());
        let is_over = |ms: &u64| {
            entry.advance(at(now) + millis(*ms));
            entry.is_settled()
        };
        (0..10_000).step_by(100).find(is_over)
    };
    // The lease is trusted for 9 s without the margin; two seconds are for a lease that ends sooner.
    assert_eq!(closed(0), Some(9_000));
    assert_eq!(closed(4), Some(5_000));
    assert_eq!(closed(8), Some(2_000));
}

#[test]
fn replaced_lease_is_released_only_if_its_attempt_may_still_arrive() {
    let mut answered = held();
    answered.set_replacing(true);
    answered.mark_replaced(at(1));
    assert_eq!(answered.release_outcome(), Some(ReleaseOutcome::Released));
    let mut asked_again = granted_by_push().0;
    asked_again.mark_replaced(at(5));
    assert!(matches!(sent(&mut asked_again, at(5)).command, Command::Release(_)));
}

#[test]
fn lease_that_is_being_replaced_is_not_reported_as_lost() {
    let mut entry = held();
    entry.set_replacing(true);
    entry.advance(at(20));
    assert!(logged(&mut entry).is_empty());
    assert!(matches!(entry.remaining(at(20)), Err(Loss::Expired)), "{:?}", entry.remaining(at(20)));
}

#[test]
fn lease_with_a_bridge_lasts_as_long_as_both_locks() {
    let mut entry = held();
    let unlimited = entry.remaining(at(1)).unwrap();
    let wakes_at = entry.poll_timeout().unwrap();
    entry.limit_trust(at(2), at(1));
    assert!(entry.advance(at(1)), "who waits for the bridge is woken");
    assert_eq!(entry.remaining(at(1)), Ok(Duration::from_secs(1)));
    assert_eq!(entry.poll_timeout(), Some(at(2)));
    // Renewed, then released.
    entry.limit_trust(at(20), at(1));
    assert_eq!(entry.remaining(at(1)), Ok(unlimited));
    entry.lift_trust_limit(at(1));
    assert_eq!((entry.remaining(at(1)), entry.poll_timeout()), (Ok(unlimited), Some(wakes_at)));
    // Expired: what comes then is too late.
    entry.limit_trust(at(2), at(1));
    assert!(entry.advance(at(1)));
    assert!(entry.advance(at(2)));
    assert_eq!(logged(&mut entry), ["lost"]);
    entry.limit_trust(at(5), at(2));
    entry.lift_trust_limit(at(2));
    assert_eq!(entry.remaining(at(2)), Err(Loss::Bridge));
    // A confirmation that overtakes the timer is too late, too.
    let mut late = held();
    late.limit_trust(at(2), at(1));
    late.limit_trust(at(5), at(3));
    assert_eq!(late.remaining(at(3)), Err(Loss::Bridge));
    let mut lost = held();
    lost.lose_companion();
    assert!(lost.advance(at(1)));
    assert_eq!(lost.remaining(at(1)), Err(Loss::Bridge));
}

#[test]
fn end_of_a_hold_tells_the_loss_and_wakes_others() {
    let mut entry = held();
    entry.advance(at(0));
    assert_eq!(entry.release_lease(at(1)), None);
    assert!(entry.advance(at(1)));
    let mut entry = held();
    entry.advance(at(0));
    assert_eq!(entry.release_lease(at(20)), Some(Loss::Expired));
    assert!(entry.advance(at(20)));
    assert_eq!(logged(&mut entry), ["lost"]);
    // The client was closed, and the release has expired since the last look.
    let mut entry = held();
    entry.close(at(1));
    entry.advance(at(1));
    assert_eq!(entry.release_lease(at(60)), Some(Loss::Closed));
    assert!(entry.advance(at(60)));
}

#[test]
fn renewals_are_due_and_end_as_the_terms_say() {
    let mut entry = held();
    assert_eq!(entry.first_renewal(at(1)), Some(at(1) + TTL / 3));
    assert_eq!(entry.ttl_at_stake(at(1)), Some(TTL));
    assert_eq!(entry.ttl_at_stake(at(20)), None, "it is lost");
    assert_eq!(entry.poll_timeout(), Some(at(0) + TTL / 3));
    assert!(!entry.renews_within(at(2), 10) && entry.renews_within(at(2) + millis(100), 10));
    assert!(matches!(entry.renewal_result(at(1)), Some(Ok(()))));
    entry.renew_now(at(1));
    let renewal = sent(&mut entry, at(1));
    assert!(entry.renewal_result(at(1)).is_none(), "it is under way");
    entry.handle_response(&renewal, at(1), &failure());
    assert!(matches!(entry.renewal_result(at(1)), Some(Err(RenewalError::Failed(_)))));
    // The future of a renewal was dropped: the driver sends it again.
    let renewal = sent(&mut entry, at(5));
    assert!(entry.renewal_result(at(5)).is_none());
    entry.abandon_renewal(at(5));
    assert!(entry.renewal_result(at(5)).is_some());
    entry.handle_response(&renewal, at(5), &renewed(false, None));
    assert!(matches!(entry.renewal_result(at(5)), Some(Ok(()))));
    entry.limit_hold(at(7));
    assert_eq!(entry.ends_at(), at(7));
    assert!(matches!(entry.renewal_result(at(8)), Some(Err(RenewalError::Lost(_)))));
    let mut fixed = held();
    fixed.terms.renews = false;
    assert_eq!((fixed.ttl_at_stake(at(1)), fixed.first_renewal(at(1))), (None, None));
}

#[test]
fn later_token_of_the_owner_is_a_loss() {
    let entry = held();
    let own = grant(true).tokens.first;
    let other = TokenRange::next(own.get(), 0, StoreTime::ZERO).first;
    assert_eq!(entry.loss(at(1), None), None);
    assert_eq!(entry.loss(at(1), Some(own)), None);
    assert_eq!(entry.loss(at(1), Some(other)), Some(Loss::Gone));
    assert_eq!(entry.loss(at(20), Some(own)), Some(Loss::Expired));
}

/// The push may tell that the lease was revoked, or may be newer than the grant.
#[test]
fn hint_during_the_attempt_has_the_lease_confirmed() {
    let mut entry = entry(true);
    let transmit = sent(&mut entry, at(0));
    entry.recheck(at(1));
    entry.handle_response(&transmit, at(1), &answer(Reply::Granted(grant(true))));
    assert!(matches!(entry.outcome(at(1)), Some(Outcome::Granted { .. })));
    let renewal = sent(&mut entry, at(1));
    assert!(matches!(renewal.command, Command::Renew(_)), "{renewal:?}");
    entry.handle_response(&renewal, at(1), &answer(Reply::NotHeld));
    assert_eq!(entry.remaining(at(1)), Err(Loss::Gone));
}

#[test]
fn hint_asks_the_store_again() {
    let mut entry = entry(true);
    let first = sent(&mut entry, at(0));
    let queued = leasehold_core::Queued { is_head: false, repoll_at: StoreTime::NEVER };
    entry.handle_response(&first, at(0), &answer(Reply::Queued(queued)));
    assert!(entry.poll_transmit(1.into(), at(1)).is_none());
    entry.recheck(at(1));
    let again = sent(&mut entry, at(1));
    assert!(matches!(again.command, Command::Acquire(_)));
    entry.handle_response(&again, at(1), &answer(Reply::Queued(queued)));
    assert!(entry.poll_transmit(1.into(), at(1)).is_none());
    entry.handle_reconnected(at(1));
    assert!(matches!(sent(&mut entry, at(1)).command, Command::Acquire(_)));
    assert!(entry.may_be_in_store());
}

#[test]
fn lease_is_claimed_only_if_its_attempt_may_have_waited() {
    // The rest of a lease, or a lease that the repeat itself was granted after a wait.
    for (waits, valid_for) in [(true, 1_950), (false, 1_950), (true, 2_000), (false, 2_000)] {
        let mut entry = entry(waits);
        entry.terms = LeaseTerms { ttl: millis(2_000), renews: false, ..entry.terms };
        let first = sent(&mut entry, at(0));
        entry.handle_response(&first, at(0), &failure());
        let again = sent(&mut entry, at(0));
        let left = Grant { valid_for: millis(valid_for), ..grant(false) };
        entry.handle_response(&again, at(0), &answer(Reply::Granted(left)));
        assert!(matches!(entry.outcome(at(0)), Some(Outcome::Granted { .. })));
        let Stage::Lease(Lease { machine, .. }) = &entry.stage else { panic!("it is granted") };
        assert_eq!(machine.poll_renewal().is_some(), waits, "{valid_for} ms");
    }
}

#[test]
fn attempt_whose_answer_was_lost_hands_off_as_one_that_has_waited() {
    let limits = HandoffLimits { max_handoffs: 64, max_duration: Duration::from_secs(1) };
    for is_lost in [true, false] {
        let mut entry = entry(true);
        entry.local_queue = Some((1.into(), limits));
        if is_lost {
            let first = sent(&mut entry, at(0));
            entry.handle_response(&first, at(0), &failure());
        }
        let last = sent(&mut entry, at(0));
        let tokens = TokenRange::next(0, 9, StoreTime::ZERO);
        let reply = Reply::Granted(Grant { tokens, ..grant(false) });
        entry.handle_response(&last, at(0), &answer(reply));
        assert!(matches!(entry.outcome(at(0)), Some(Outcome::Granted { .. })));
        assert!(matches!(entry.hand_off(at(0)), HandoffDecision::Next(_)));
        assert_eq!(entry.hand_off(at(2)) == HandoffDecision::Release, is_lost);
    }
}

#[test]
fn renewal_is_confirmed_by_an_answer_to_one_sent_after_the_call() {
    let mut entry = held();
    entry.renew_now(at(1));
    let older = sent(&mut entry, at(1));
    assert!(entry.begin_renewal(1.into(), at(2)).is_none(), "one is in flight");
    entry.handle_response(&older, at(2), &renewed(false, None));
    assert!(entry.renewal_result(at(2)).is_none(), "it was sent before");
    let newer = sent(&mut entry, at(2));
    assert!(entry.renewal_result(at(2)).is_none());
    entry.handle_response(&newer, at(2), &renewed(false, None));
    assert!(matches!(entry.renewal_result(at(2)), Some(Ok(()))));
    // The older one fails: the newer one decides.
    entry.renew_now(at(3));
    let older = sent(&mut entry, at(3));
    assert!(entry.begin_renewal(1.into(), at(3)).is_none());
    entry.handle_response(&older, at(3), &failure());
    assert!(entry.renewal_result(at(3)).is_none());
    let newer = sent(&mut entry, at(3));
    entry.handle_response(&newer, at(3), &renewed(false, None));
    assert!(matches!(entry.renewal_result(at(3)), Some(Ok(()))));
}

#[test]
fn attached_lease_is_trusted_for_no_longer_than_it_was_asked_for() {
    use crate::engine::leases::{AttachedLease, DetachedLease};
    let hour = Duration::from_secs(3_600);
    for (min_hold, trusted_for) in [(Duration::ZERO, TTL), (hour, hour)] {
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let (ends_at_close, tombstone) = (false, Duration::ZERO);
        let detached = DetachedLease {
            acquisition,
            ttl: TTL,
            min_hold,
            ends_at_close,
            tombstone,
            outlasts_ttl: false,
            is_repeat: false,
            trusted_until: LocalTime::NEVER,
        };
        let tokens = grant(false).tokens;
        let lease = AttachedLease { detached, owner: None, tokens, replicas: 0, is_borrowed: false };
        let resource = held().resource;
        // The store's clock was set back by two hours since the grant.
        let mut entry = Entry::attached(resource, lease, at(0), 2 * hour + TTL);
        let remaining = entry.remaining(at(0)).unwrap();
        assert!(remaining < trusted_for && remaining > trusted_for / 10 * 9, "{remaining:?}");
        let renewal = entry.poll_timeout().unwrap();
        assert_eq!(renewal, at(0) + trusted_for / 3);
        // A renewal shortens nothing: another client may know of a longer lease.
        let transmit = sent(&mut entry, renewal);
        let Command::Renew(Renew { ttl, .. }) = transmit.command else { panic!("it is renewed") };
        assert!(ttl > hour, "{ttl:?}");
        let renewed = Reply::Renewed { valid_for: ttl, tokens: None, contended: false };
        entry.handle_response(&transmit, renewal, &answer(renewed));
        let remaining = entry.remaining(renewal).unwrap();
        assert!(remaining < trusted_for && remaining > trusted_for / 10 * 9, "{remaining:?}");
        assert_eq!(entry.poll_timeout(), Some(renewal + trusted_for / 3));
    }
}

#[test]
fn release_of_a_lease_without_time_is_not_sent_over_and_over() {
    let mut entry = held();
    entry.terms.ttl = Duration::ZERO;
    release_of(&mut entry, at(1));
    assert!(entry.poll_transmit(1.into(), at(1)).is_none());
}
