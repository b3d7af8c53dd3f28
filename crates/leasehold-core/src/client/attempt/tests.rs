//! One attempt to lock, step by step.

use super::*;
use crate::command::{Push, PushKind, Refusal};
use crate::command::{Queued, WaitFor};
use crate::id::ClientId;
use crate::secret::SecretKey;
use crate::token::TokenRange;

mod hostile;

const TTL: Duration = Duration::from_secs(10);

const SECRET_KEY: SecretKey = SecretKey::new(0x5EC2E7);

fn at(ms: u64) -> LocalTime {
    LocalTime::ZERO + Duration::from_millis(ms)
}

fn store(ms: u64) -> StoreTime {
    StoreTime::from_micros(1_000_000_000) + Duration::from_millis(ms)
}

fn attempt(policy: Option<WaitPolicy>) -> AcquireMachine {
    let wait = policy.map(|_| WaitFor { entry_ttl: TTL, max_queue: 9 });
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    let command = Acquire { wait, ..Acquire::exclusive(acquisition, TTL) };
    AcquireMachine::new(command, policy, at(0))
}

fn patient() -> Option<WaitPolicy> {
    Some(WaitPolicy {
        deadline: at(60_000),
        repoll_interval: Duration::from_secs(20),
        confirms_pushes: false,
        secret_key: SECRET_KEY,
    })
}

fn grant(valid_for: Duration) -> Grant {
    Grant { tokens: TokenRange::next(0, 0, StoreTime::ZERO), valid_for, is_plain: false }
}

fn answer(ms: u64, reply: Reply) -> Answer {
    Answer { at: store(ms), reply }
}

fn queued(head: Option<u64>) -> Reply {
    let repoll_at = head.map_or(StoreTime::NEVER, store);
    Reply::Queued(Queued { is_head: head.is_some(), repoll_at })
}

fn tombstone_sent(attempt: &mut AcquireMachine) -> Option<Duration> {
    match attempt.poll_transmit(at(99_000)) {
        Some(Command::Release(release)) => Some(release.tombstone),
        other => {
            assert_eq!(other, None);
            None
        }
    }
}

fn acquiring(policy: Option<WaitPolicy>) -> AcquireMachine {
    let mut attempt = attempt(policy);
    assert!(matches!(attempt.poll_transmit(at(0)), Some(Command::Acquire(_))));
    assert_eq!(attempt.poll_transmit(at(0)), None, "one is under way");
    attempt
}

#[test]
fn answered_grant_counts_from_the_send_time() {
    let mut attempt = acquiring(None);
    attempt.handle_answer(at(0), at(400), &answer(0, Reply::Granted(grant(TTL))));
    let Some(Outcome::Granted { trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
    assert_eq!(trusted_until, at(10_000 - 102));
    assert_eq!(tombstone_sent(&mut attempt), None);
}

#[test]
fn push_after_a_reconnect_is_confirmed_first() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    attempt.handle_reconnected(at(5));
    assert!(matches!(attempt.poll_transmit(at(5)), Some(Command::Acquire(_))));
    // By a server whose clock is far ahead of the one that queued it: the age of the push is unknown.
    attempt.handle_push(at(6), &pushed_grant(1, 90_000, TTL));
    assert_eq!(attempt.poll_outcome(), None);
    attempt.handle_answer(at(5), at(7), &answer(90_001, Reply::Granted(grant(TTL))));
    let Some(Outcome::Granted { since, .. }) = attempt.poll_outcome() else { panic!() };
    assert_eq!(since, at(5));
}

#[test]
fn response_requested_before_a_reconnect_anchors_no_later_push() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    attempt.handle_hint(at(3));
    assert!(matches!(attempt.poll_transmit(at(3)), Some(Command::Acquire(_))));
    attempt.handle_reconnected(at(5));
    // The old server's answer, taken up late.
    attempt.handle_answer(at(3), at(6), &answer(3, queued(None)));
    attempt.handle_push(at(7), &pushed_grant(2, 90_000, TTL));
    assert_eq!(attempt.poll_outcome(), None);
    assert!(matches!(attempt.poll_transmit(at(7)), Some(Command::Acquire(_))), "it asks the new one");
    attempt.handle_answer(at(7), at(8), &answer(90_001, queued(None)));
    attempt.handle_push(at(9), &pushed_grant(3, 90_002, TTL));
    assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
}

#[test]
fn reconnect_skips_the_retry_backoff() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    let mut now = 1;
    // Enough unknown outcomes to make the pause as long as it gets.
    for _ in 0..12 {
        attempt.handle_hint(at(now));
        assert!(attempt.poll_transmit(at(now)).is_some());
        attempt.handle_failure(at(now), Failure::Unknown);
        assert_eq!(attempt.poll_transmit(at(now)), None);
        now += 1;
        attempt.handle_reconnected(at(now));
    }
    assert!(matches!(attempt.poll_transmit(at(now)), Some(Command::Acquire(_))));
}

#[test]
fn unconfirmed_push_only_triggers_a_recheck() {
    let mut attempt = acquiring(patient().map(|policy| WaitPolicy { confirms_pushes: true, ..policy }));
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    attempt.handle_push(at(6), &pushed_grant(1, 5, TTL));
    assert_eq!(attempt.poll_outcome(), None);
    assert!(matches!(attempt.poll_transmit(at(6)), Some(Command::Acquire(_))));
    attempt.handle_failure(at(8), Failure::NotDurable);
    assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(
        tombstone_sent(&mut attempt),
        Some(Duration::ZERO),
        "it was granted, and all answers were seen"
    );
}

#[test]
fn grant_received_after_its_expiry_is_released() {
    let mut attempt = acquiring(None);
    attempt.handle_answer(at(0), at(9_900), &answer(0, Reply::Granted(grant(TTL))));
    assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut attempt), Some(Duration::ZERO));
}

#[test]
fn waiter_rechecks_after_a_late_grant() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(12_000), &answer(11_990, Reply::Granted(grant(TTL))));
    assert_eq!(attempt.poll_outcome(), None);
    assert!(matches!(attempt.poll_transmit(at(12_000)), Some(Command::Acquire(_))));
    let left = Duration::from_millis(9_980);
    attempt.handle_answer(at(12_000), at(12_010), &answer(12_010, Reply::Granted(grant(left))));
    let Some(Outcome::Granted { trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
    assert!(trusted_until > at(21_000) && trusted_until < at(21_990));
}

#[test]
fn rechecks_of_a_grant_that_is_about_to_expire_do_not_follow_each_other_at_once() {
    let mut attempt = acquiring(patient());
    let nearly_over = Reply::Granted(grant(Duration::from_micros(1)));
    attempt.handle_answer(at(0), at(0), &answer(0, nearly_over.clone()));
    assert_eq!(attempt.poll_transmit(at(0)), None, "a clock that stands still would see endless ones");
    assert!(matches!(attempt.poll_transmit(at(1)), Some(Command::Acquire(_))));
    attempt.handle_answer(at(1), at(1), &answer(1, nearly_over));
    assert_eq!(attempt.poll_timeout(), Some(at(2)));
}

#[test]
fn pushed_grant_with_little_trust_left_is_confirmed_by_an_answer() {
    for (answered_at, is_confirmed) in [(1_000, false), (2_000, true), (2_900, true)] {
        let mut attempt = acquiring(patient());
        // The request was delayed by this much, and the store answered at once.
        attempt.handle_answer(at(0), at(answered_at), &answer(0, queued(None)));
        let now = answered_at + 1;
        attempt.handle_push(at(now), &pushed_grant(1, 1, TTL));
        assert_eq!(attempt.poll_outcome().is_none(), is_confirmed, "asked {answered_at} ms before");
        if is_confirmed {
            assert!(matches!(attempt.poll_transmit(at(now)), Some(Command::Acquire(_))));
            attempt.handle_answer(at(now), at(now + 1), &answer(2, Reply::Granted(grant(TTL))));
            let Some(Outcome::Granted { trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
            assert_eq!(trusted_until, at(now + 10_000 - 102));
        }
    }
}

#[test]
fn late_push_during_a_request_sends_nothing_twice() {
    let window = Duration::from_secs(3);
    let push = pushed_grant(1, 1_005, window);
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(10), &answer(5, queued(None)));
    attempt.handle_hint(at(8_000));
    assert!(attempt.poll_transmit(at(8_000)).is_some());
    attempt.handle_push(at(8_100), &push);
    assert_eq!(attempt.poll_transmit(at(8_100)), None, "one is under way");
    assert_ne!(attempt.tombstone(), Duration::ZERO, "and may still arrive");
    attempt.handle_answer(at(8_000), at(8_200), &answer(8_005, queued(None)));
    assert!(attempt.poll_transmit(at(8_200)).is_some());
}

#[test]
fn waiter_retries_when_the_store_is_busy() {
    let mut attempt = acquiring(patient());
    attempt.handle_failure(at(5_000), Failure::Busy);
    let again = attempt.poll_timeout().unwrap();
    assert!(again > at(5_000) && again < at(6_000));
    assert!(matches!(attempt.poll_transmit(again), Some(Command::Acquire(_))));
    attempt.handle_failure(at(60_000), Failure::Busy);
    attempt.handle_timeout(at(60_000));
    assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed), "the store has said nothing");
    assert_eq!(tombstone_sent(&mut attempt), None, "nothing of it has ever reached the store");
    let mut impatient = acquiring(None);
    impatient.handle_failure(at(5_000), Failure::Busy);
    assert_eq!(impatient.poll_outcome(), Some(Outcome::Failed));
}

#[test]
fn delayed_push_does_not_extend_the_lease() {
    let window = Duration::from_secs(3);
    let push = |ms| pushed_grant(1, ms, window);
    let mut late = acquiring(patient());
    late.handle_answer(at(0), at(10), &answer(5, queued(None)));
    late.handle_push(at(2_000), &push(1_005));
    let Some(Outcome::Granted { trusted_until, .. }) = late.poll_outcome() else { panic!() };
    assert_eq!(trusted_until, at(1_000 + 3_000 - 40 - 2), "counted from when it was sent");

    let mut stale = acquiring(patient());
    stale.handle_answer(at(0), at(10), &answer(5, queued(None)));
    stale.handle_hint(at(5_000));
    assert!(stale.poll_transmit(at(5_000)).is_some());
    stale.handle_answer(at(5_000), at(5_010), &answer(5_005, queued(None)));
    stale.handle_push(at(5_100), &push(1_005));
    assert_eq!(stale.poll_outcome(), None, "decided before the last answer, which knew nothing of it");

    let mut too_late = acquiring(patient());
    too_late.handle_answer(at(0), at(10), &answer(5, queued(None)));
    too_late.handle_push(at(4_000), &push(1_005));
    assert_eq!(too_late.poll_outcome(), None, "it is not taken for a lease");
    assert!(matches!(too_late.poll_transmit(at(4_000)), Some(Command::Acquire(_))), "and is asked for anew");
}

#[test]
fn push_with_a_time_to_come_is_confirmed() {
    let window = Duration::from_secs(10);
    let push = |ms| pushed_grant(1, ms, window);
    let pushed = |received_at, ms| {
        let mut attempt = acquiring(patient());
        attempt.handle_answer(at(0), at(10), &answer(5, queued(None)));
        attempt.handle_push(at(received_at), &push(ms));
        attempt
    };
    // The request was sent at 0, and the store answered at 5. Clocks may differ by 1 % and 2 ms.
    for (received_at, ms) in [(97, 105), (2_000, 2_020)] {
        let outcome = pushed(received_at, ms).poll_outcome();
        assert!(matches!(outcome, Some(Outcome::Granted { .. })), "{received_at}, {ms}");
    }
    // The store's clock was set forward, so the age of the push is unknown.
    let is_rechecked = |attempt: &mut AcquireMachine, now| {
        attempt.poll_outcome().is_none()
            && matches!(attempt.poll_transmit(at(now)), Some(Command::Acquire(_)))
    };
    for (received_at, ms) in [(96, 105), (2_000, 2_030)] {
        assert!(is_rechecked(&mut pushed(received_at, ms), received_at), "{received_at}, {ms}");
    }
    // Also if the push overtook the answer, which came late.
    let mut early = acquiring(patient());
    early.handle_push(at(2), &push(1_000));
    early.handle_answer(at(0), at(2_900), &answer(5, queued(None)));
    assert!(is_rechecked(&mut early, 2_900));
}

#[test]
fn head_repolls_at_the_holders_expiry_and_followers_seldom() {
    let mut head = acquiring(patient());
    head.handle_answer(at(0), at(2), &answer(0, queued(Some(5_000))));
    assert_eq!(head.poll_timeout(), Some(at(5_052)));
    assert!(matches!(head.poll_transmit(at(5_052)), Some(Command::Acquire(_))));

    let mut other = acquiring(patient());
    other.handle_answer(at(0), at(2), &answer(0, queued(None)));
    assert_eq!(other.poll_timeout(), Some(at(20_002)));
    let next = PushKind::Next(HeadHint { repoll_at: store(7_000) });
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    other.handle_push(at(100), &Push::new(acquisition, store(90), next));
    assert_eq!(other.poll_timeout(), Some(at(7_072)));
}

#[test]
fn waiter_times_out_at_its_deadline_and_leaves_the_queue() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(2), &answer(0, queued(None)));
    attempt.handle_timeout(at(60_000));
    assert_eq!(attempt.poll_outcome(), Some(Outcome::TimedOut));
    assert_eq!(tombstone_sent(&mut attempt), Some(Duration::ZERO), "all answers were seen");
    assert_eq!(tombstone_sent(&mut attempt), None, "it is owed once");
}

#[test]
fn attempt_with_an_expired_deadline_asks_once() {
    let over = || {
        let policy = patient().map(|policy| WaitPolicy { deadline: at(0), ..policy });
        let mut attempt = attempt(policy);
        assert!(matches!(attempt.poll_transmit(at(0)), Some(Command::Acquire(_))));
        attempt
    };
    let mut unheard = over();
    unheard.handle_timeout(at(0));
    assert_eq!(unheard.poll_outcome(), Some(Outcome::TimedOut), "the store may have a word to say");
    assert_eq!(tombstone_sent(&mut unheard), Some(TOMBSTONE_TTL));

    let mut never_sent = over();
    never_sent.handle_failure(at(0), Failure::Busy);
    never_sent.handle_timeout(at(1));
    assert_eq!(never_sent.poll_outcome(), Some(Outcome::Failed));
}

#[test]
fn hint_skips_the_retry_backoff() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
    assert!(attempt.poll_transmit(at(20_000)).is_some());
    attempt.handle_failure(at(20_000), Failure::Unknown);
    assert_eq!(attempt.poll_transmit(at(20_001)), None);
    attempt.handle_reconnected(at(20_001));
    assert!(matches!(attempt.poll_transmit(at(20_001)), Some(Command::Acquire(_))));
}

#[test]
fn unanswered_acquire_is_released_with_a_tombstone() {
    let mut unanswered = acquiring(None);
    unanswered.handle_cancel();
    assert_eq!(tombstone_sent(&mut unanswered), Some(TOMBSTONE_TTL));

    let mut unknown = acquiring(None);
    unknown.handle_failure(at(1), Failure::Unknown);
    assert_eq!(unknown.poll_outcome(), None);
    assert!(matches!(unknown.poll_transmit(at(1)), Some(Command::Acquire(_))), "once more");
    unknown.handle_failure(at(2), Failure::Unknown);
    assert_eq!(unknown.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut unknown), Some(TOMBSTONE_TTL));

    let mut never_sent = acquiring(None);
    never_sent.handle_failure(at(1), Failure::NotSent);
    assert_eq!(never_sent.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut never_sent), None, "nothing can be left");

    let mut untouched = attempt(None);
    untouched.handle_cancel();
    assert_eq!(tombstone_sent(&mut untouched), None);
}

#[test]
fn lease_pushed_during_a_recheck_needs_a_tombstone_until_the_answer() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    attempt.handle_hint(at(5));
    assert!(attempt.poll_transmit(at(5)).is_some());
    attempt.handle_push(at(6), &pushed_grant(1, 6, TTL));
    assert_eq!(attempt.tombstone(), TOMBSTONE_TTL);
    assert_eq!(attempt.tombstone_once_answered(), Duration::ZERO);
    attempt.handle_answer(at(5), at(7), &answer(6, Reply::Granted(grant(TTL))));
    assert_eq!(attempt.tombstone(), Duration::ZERO);
}

/// The push of a grant that proves the secret of the attempt's `Acquire` with this number.
fn pushed_grant(number: u32, ms: u64, valid_for: Duration) -> Push {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    let grant = grant(valid_for);
    let proof = SECRET_KEY.secret(acquisition, number).prove(store(ms), &grant);
    pushed(ms, PushKind::Granted(grant, proof))
}

fn pushed(ms: u64, kind: PushKind) -> Push {
    Push::new(Acquisition { client: ClientId::new(1), sequence: 1 }, store(ms), kind)
}

#[test]
fn early_push_is_measured_from_the_first_answer() {
    let mut attempt = acquiring(patient());
    attempt.handle_push(at(6), &pushed_grant(1, 6, TTL));
    assert_eq!(attempt.poll_outcome(), None, "its age is not known yet");
    attempt.handle_answer(at(0), at(7), &answer(5, queued(None)));
    let Some(Outcome::Granted { trusted_until, since, .. }) = attempt.poll_outcome() else { panic!() };
    assert_eq!(since, at(1), "it was decided 1 ms after the answer, which was not before it was asked for");
    assert!(trusted_until < at(1) + TTL);
    assert_eq!(tombstone_sent(&mut attempt), None);
    assert_eq!(attempt.tombstone(), Duration::ZERO);
    assert!(!attempt.recheck_pending());
}

#[test]
fn early_push_counts_from_its_receipt_at_the_latest() {
    let mut attempt = acquiring(patient());
    // The store's clock is faster by less than the margin.
    attempt.handle_push(at(2), &pushed_grant(1, 4, TTL));
    attempt.handle_push(at(900), &pushed_grant(1, 4, TTL));
    attempt.handle_answer(at(0), at(1_400), &answer(0, queued(None)));
    let Some(Outcome::Granted { trusted_until, since, .. }) = attempt.poll_outcome() else { panic!() };
    assert_eq!(since, at(2));
    assert!(trusted_until < at(2) + TTL);
}

#[test]
fn unmeasurable_early_push_triggers_a_recheck() {
    let granted = pushed_grant(1, 6, TTL);
    let asks_again = |attempt: &mut AcquireMachine, sent_at, ms| {
        attempt.handle_answer(sent_at, at(7), &answer(ms, queued(None)));
        matches!(attempt.poll_transmit(at(7)), Some(Command::Acquire(_)))
    };

    let mut older = acquiring(patient());
    older.handle_push(at(6), &granted);
    assert!(asks_again(&mut older, at(0), 8), "the answer knew of it, and it is over");

    let mut elsewhere = acquiring(patient());
    elsewhere.handle_push(at(6), &granted);
    elsewhere.handle_reconnected(at(6));
    assert!(asks_again(&mut elsewhere, at(0), 5), "that may be by another clock");

    let mut failed = acquiring(patient());
    failed.handle_push(at(6), &granted);
    failed.handle_failure(at(6), Failure::Unknown);
    assert!(failed.poll_transmit(at(6)).is_some());
    failed.handle_answer(at(6), at(7), &answer(5, queued(None)));
    assert_eq!(failed.poll_outcome(), None, "the answer may be another server's");

    let mut too_old = acquiring(patient());
    too_old.handle_push(at(6), &pushed_grant(1, 6, Duration::from_millis(4)));
    assert!(asks_again(&mut too_old, at(0), 5), "it took longer to arrive than it is good for");
}

#[test]
fn early_next_push_sets_the_repoll_time() {
    let next = |ms| PushKind::Next(HeadHint { repoll_at: store(ms) });
    let mut attempt = acquiring(patient());
    attempt.handle_push(at(6), &pushed(6, next(4_000)));
    attempt.handle_answer(at(0), at(7), &answer(5, queued(None)));
    assert_eq!(attempt.poll_transmit(at(7)), None, "nothing is unclear");
    let look = attempt.poll_timeout().unwrap();
    assert!(look > at(3_990) && look < at(4_100), "{look:?}");

    let mut again = acquiring(patient());
    again.handle_answer(at(0), at(1), &answer(0, queued(None)));
    assert!(matches!(again.poll_transmit(at(20_001)), Some(Command::Acquire(_))), "it looks again");
    again.handle_push(at(20_003), &pushed(20_003, next(24_000)));
    again.handle_answer(at(20_001), at(20_004), &answer(20_002, queued(None)));
    let look = again.poll_timeout().unwrap();
    assert!(look > at(23_990) && look < at(24_100), "{look:?}");

    let mut older = acquiring(patient());
    older.handle_push(at(6), &pushed(4, next(4_000)));
    older.handle_answer(at(0), at(7), &answer(5, queued(None)));
    assert_eq!(older.poll_timeout(), Some(at(20_007)), "the answer knows better");
}

#[test]
fn early_revocation_makes_the_grant_unconfirmed() {
    let mut attempt = acquiring(patient());
    attempt.handle_push(at(5), &pushed_grant(1, 5, TTL));
    attempt.handle_push(at(6), &pushed(6, PushKind::Revoked));
    attempt.handle_answer(at(0), at(7), &answer(4, queued(None)));
    assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
    assert!(attempt.recheck_pending());
}

#[test]
fn unclaimed_grant_is_released() {
    let mut attempt = acquiring(None);
    attempt.handle_answer(at(0), at(1), &answer(0, Reply::Granted(grant(TTL))));
    attempt.handle_cancel();
    assert_eq!(tombstone_sent(&mut attempt), Some(Duration::ZERO));
}

#[test]
fn queued_waiter_retries_with_exponential_backoff() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
    let (mut now, mut pauses) = (at(20_000), 0);
    while now < at(60_000) {
        if attempt.poll_transmit(now).is_some() {
            attempt.handle_failure(now, Failure::Unknown);
            pauses += 1;
        }
        let next = attempt.poll_timeout().expect("it has not ended");
        assert!(next > now);
        now = next;
    }
    attempt.handle_timeout(now);
    assert_eq!(attempt.poll_outcome(), Some(Outcome::TimedOut));
    assert!((5..20).contains(&pauses), "{pauses}");
    assert_eq!(tombstone_sent(&mut attempt), Some(TOMBSTONE_TTL));
}

#[test]
fn waiter_whose_commands_are_refused_backs_off_to_a_second() {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
    let mut now = at(20_000);
    for pause in [50, 100, 200, 400, 800, 1_000, 1_000, 1_000] {
        assert!(attempt.poll_transmit(now).is_some());
        attempt.handle_failure(now, Failure::NotSent);
        assert_eq!(attempt.poll_timeout(), Some(now + Duration::from_millis(pause)));
        now = now + Duration::from_millis(pause);
    }
    // An answer begins anew.
    assert!(attempt.poll_transmit(now).is_some());
    attempt.handle_answer(now, now, &answer(0, queued(None)));
    let now = attempt.poll_timeout().unwrap();
    assert!(attempt.poll_transmit(now).is_some());
    attempt.handle_failure(now, Failure::NotSent);
    assert_eq!(attempt.poll_timeout(), Some(now + RETRY_BACKOFF));
}

#[test]
fn refused_attempts_release_nothing() {
    let replies = [
        (Reply::Busy, Outcome::NotGranted),
        (Reply::QueueFull, Outcome::QueueFull),
        (Reply::Refused(Refusal::Weight { capacity: 1 }), Outcome::Refused(Refusal::Weight { capacity: 1 })),
        (Reply::Cancelled, Outcome::Cancelled),
    ];
    for (reply, outcome) in replies {
        let mut attempt = acquiring(None);
        attempt.handle_answer(at(0), at(1), &answer(0, reply));
        assert_eq!(attempt.poll_outcome(), Some(outcome));
        assert_eq!(tombstone_sent(&mut attempt), None);
    }
}

#[test]
fn attempt_has_waited_once_it_was_queued() {
    let mut attempt = acquiring(patient());
    assert!(!attempt.has_waited());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    assert!(attempt.has_waited());
    attempt.handle_push(at(2), &pushed_grant(1, 2, TTL));
    assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
    assert!(attempt.has_waited(), "others may be queued behind it");
}

#[test]
fn queue_entry_lasts_as_long_as_the_command_says() {
    assert_eq!(attempt(patient()).queue_entry_ttl(), TTL);
    assert_eq!(attempt(None).queue_entry_ttl(), Duration::ZERO);
    // A re-check comes at least three times within it, also if the head's re-checks are more frequent.
    let mut follower =
        acquiring(patient().map(|policy| WaitPolicy { repoll_interval: Duration::from_secs(1), ..policy }));
    follower.handle_answer(at(0), at(0), &answer(0, queued(None)));
    assert_eq!(follower.poll_timeout(), Some(at(0) + TTL / 3));
}

/// A pause says nothing about the store, however often the program pauses.
#[test]
fn attempt_asks_again_after_each_pause() {
    for policy in [None, patient().map(|policy| WaitPolicy { deadline: LocalTime::NEVER, ..policy })] {
        let mut attempt = acquiring(policy);
        let mut now = 0;
        for pause in 0..20 {
            if pause < 2 {
                // Its task is not polled.
                now += 15_000;
                assert_eq!(attempt.poll_timeout(), Some(at(now)));
            } else {
                // As the store says, it was never asked.
                now += 11_000;
                attempt.handle_failure(at(now), Failure::Paused);
            }
            assert!(matches!(attempt.poll_transmit(at(now)), Some(Command::Acquire(_))), "{pause}");
        }
        // Answers that are lost are counted all the same.
        attempt.handle_failure(at(now), Failure::Unknown);
        assert!(matches!(attempt.poll_transmit(at(now)), Some(Command::Acquire(_))));
        attempt.handle_answer(at(now), at(now), &answer(now, Reply::Granted(grant(TTL))));
        assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
        assert_eq!(attempt.tombstone(), TOMBSTONE_TTL, "an earlier one may still arrive");
    }
}

#[test]
fn store_that_hangs_is_given_up() {
    for policy in [None, patient().map(|policy| WaitPolicy { deadline: LocalTime::NEVER, ..policy })] {
        let mut attempt = acquiring(policy);
        for second in [15, 30, 45] {
            assert_eq!(attempt.poll_timeout(), Some(at(second * 1_000)));
            assert!(matches!(attempt.poll_transmit(at(second * 1_000)), Some(Command::Acquire(_))));
        }
        attempt.handle_timeout(at(60_000));
        assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
        assert_eq!(tombstone_sent(&mut attempt), Some(TOMBSTONE_TTL));
    }
}

#[test]
fn pause_of_an_attempt_that_has_ended_changes_nothing() {
    let mut attempt = acquiring(None);
    attempt.handle_answer(at(0), at(1), &answer(0, Reply::Busy));
    attempt.handle_failure(at(2), Failure::Paused);
    assert_eq!(attempt.poll_outcome(), Some(Outcome::NotGranted));
    assert_eq!(tombstone_sent(&mut attempt), None);
}

#[test]
fn answer_to_a_later_request_leaves_a_lost_one_in_flight() {
    let lost_once = || {
        let mut attempt = acquiring(None);
        attempt.handle_failure(at(1), Failure::Unknown);
        assert!(attempt.poll_transmit(at(1)).is_some());
        attempt
    };
    assert_eq!(lost_once().tombstone_once_answered(), TOMBSTONE_TTL);

    let mut refused = lost_once();
    refused.handle_answer(at(1), at(2), &answer(1, Reply::Busy));
    assert_eq!(refused.poll_outcome(), Some(Outcome::NotGranted));
    assert_eq!(tombstone_sent(&mut refused), Some(TOMBSTONE_TTL));

    let mut granted = lost_once();
    granted.handle_answer(at(1), at(2), &answer(1, Reply::Granted(grant(TTL))));
    assert!(matches!(granted.poll_outcome(), Some(Outcome::Granted { .. })));
    assert_eq!(granted.tombstone(), TOMBSTONE_TTL, "the release of the lease needs one");
    assert_eq!(tombstone_sent(&mut granted), None, "the lease is held");

    let mut not_sent = lost_once();
    not_sent.handle_failure(at(2), Failure::NotSent);
    assert_eq!(not_sent.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut not_sent), Some(TOMBSTONE_TTL));
}

#[test]
fn cancelling_an_ended_attempt_changes_nothing() {
    let mut refused = acquiring(None);
    refused.handle_answer(at(0), at(1), &answer(0, Reply::Busy));
    refused.handle_cancel();
    assert_eq!(refused.poll_outcome(), Some(Outcome::NotGranted));
    assert_eq!(tombstone_sent(&mut refused), None);
}

#[test]
fn push_between_a_reconnect_and_the_next_answer_triggers_a_recheck() {
    let kinds = [
        pushed_grant(1, 90_000, TTL).kind,
        PushKind::Next(HeadHint { repoll_at: store(95_000) }),
        PushKind::Revoked,
        PushKind::Contended,
    ];
    for kind in kinds {
        let mut attempt = acquiring(patient());
        attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
        attempt.handle_reconnected(at(5));
        assert!(attempt.poll_transmit(at(5)).is_some());
        // The push may come from the old server, whose clock is ahead of the one that answers.
        attempt.handle_push(at(6), &pushed(90_000, kind));
        attempt.handle_answer(at(5), at(7), &answer(4, queued(None)));
        assert_eq!(attempt.poll_outcome(), None, "{kind:?}");
        assert!(matches!(attempt.poll_transmit(at(7)), Some(Command::Acquire(_))), "{kind:?}");
    }
}

#[test]
fn newest_early_grant_counts() {
    let window = Duration::from_secs(3);
    let mut attempt = acquiring(patient());
    // The first lapsed unclaimed, and the attempt was granted again.
    attempt.handle_push(at(6), &pushed_grant(1, 6, window));
    attempt.handle_push(at(4_000), &pushed_grant(1, 4_000, window));
    attempt.handle_push(at(4_001), &pushed_grant(1, 6, window));
    attempt.handle_answer(at(0), at(4_002), &answer(0, queued(None)));
    let Some(Outcome::Granted { since, .. }) = attempt.poll_outcome() else { panic!("{attempt:?}") };
    assert_eq!(since, at(4_000));
}

#[test]
fn push_of_the_same_time_as_the_answer_is_newer() {
    let mut attempt = acquiring(patient());
    // An answer after the grant would have shown it.
    attempt.handle_answer(at(0), at(1), &answer(5, queued(None)));
    attempt.handle_push(at(2), &pushed_grant(1, 5, TTL));
    assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
}

#[test]
fn pushed_grant_counts_if_at_least_half_of_it_is_left() {
    // A claim window, less 1 % and 2 ms, from the time of the request.
    let last = at(2_968 - 1_500);
    for (received_at, is_granted) in [(last, true), (last + Duration::from_micros(1), false)] {
        let mut attempt = acquiring(patient());
        attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
        attempt.handle_push(received_at, &pushed_grant(1, 0, TTL));
        assert_eq!(attempt.poll_outcome().is_some(), is_granted, "received at {received_at:?}");
    }
}

#[test]
fn grant_from_before_a_release_by_the_client_does_not_count() {
    for is_pushed in [false, true] {
        let mut attempt = acquiring(patient());
        if is_pushed {
            attempt.handle_answer(at(0), at(1), &answer(1_000, queued(None)));
            attempt.handle_released(at(2));
            attempt.handle_push(at(3), &pushed_grant(1, 1_002, Duration::from_secs(3)));
        } else {
            attempt.handle_released(at(2));
            attempt.handle_answer(
                at(0),
                at(3),
                &answer(1_001, Reply::Granted(grant(Duration::from_secs(9)))),
            );
        }
        assert!(attempt.poll_outcome().is_none(), "pushed: {is_pushed}");
        assert!(matches!(attempt.poll_transmit(at(4)), Some(Command::Acquire(_))), "it asks again");
        attempt.handle_answer(at(4), at(5), &answer(1_005, Reply::Granted(grant(Duration::from_secs(9)))));
        assert!(matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. })));
    }
}

#[test]
fn permanent_refusal_ends_a_waiter_at_once_and_releases_its_queue_entry() {
    for effect in [Effect::None, Effect::Possible] {
        let mut attempt = acquiring(patient());
        attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
        assert!(attempt.poll_transmit(at(20_000)).is_some());
        attempt.handle_failure(at(20_001), Failure::Permanent(effect));
        assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
        let tombstone = if effect == Effect::None { Duration::ZERO } else { TOMBSTONE_TTL };
        assert_eq!(tombstone_sent(&mut attempt), Some(tombstone));
    }
    let mut unknown_to_the_store = acquiring(patient());
    unknown_to_the_store.handle_failure(at(1), Failure::Permanent(Effect::None));
    assert_eq!(unknown_to_the_store.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut unknown_to_the_store), None);
}

#[test]
fn refusals_that_may_pass_end_a_waiter_after_their_limit() {
    let forever = patient().map(|policy| WaitPolicy { deadline: LocalTime::NEVER, ..policy });
    let mut attempt = acquiring(forever);
    attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
    let first = attempt.poll_timeout().unwrap();
    let mut now = first;
    assert!(!attempt.is_refused());
    while attempt.poll_outcome().is_none() {
        assert!(attempt.poll_transmit(now).is_some());
        // An outage in between does not begin the count anew.
        let is_cut =
            now.since(first) > REFUSAL_LIMIT / 2 && now.since(first) < REFUSAL_LIMIT / 2 + LONGEST_REFUSAL;
        attempt.handle_failure(now, if is_cut { Failure::NotSent } else { Failure::Transient(Effect::None) });
        now = attempt.poll_timeout().unwrap_or(now);
        assert!(attempt.is_refused() == attempt.poll_outcome().is_none());
        assert!(now.since(first) <= REFUSAL_LIMIT + LONGEST_REFUSAL, "it goes on");
    }
    assert!(now.since(first) >= REFUSAL_LIMIT);
    assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
    assert_eq!(tombstone_sent(&mut attempt), Some(Duration::ZERO));
}

#[test]
fn answer_ends_the_count_of_refusals() {
    let forever = patient().map(|policy| WaitPolicy { deadline: LocalTime::NEVER, ..policy });
    let mut attempt = acquiring(forever);
    attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
    let mut now = attempt.poll_timeout().unwrap();
    for _ in 0..3 {
        let refused_until = now + (REFUSAL_LIMIT - LONGEST_REFUSAL);
        while now < refused_until {
            assert!(attempt.poll_transmit(now).is_some());
            attempt.handle_failure(now, Failure::Transient(Effect::Possible));
            now = attempt.poll_timeout().unwrap();
        }
        assert!(attempt.poll_transmit(now).is_some());
        attempt.handle_answer(now, now, &answer(0, queued(None)));
        assert!(attempt.poll_outcome().is_none() && !attempt.is_refused());
        now = attempt.poll_timeout().unwrap();
    }
}

/// Another client has queued it: a caller that tries once more is not to wait.
#[test]
fn attempt_that_does_not_wait_ends_when_it_is_in_the_queue() {
    let mut attempt = attempt(None);
    assert!(matches!(attempt.poll_transmit(at(0)), Some(Command::Acquire(_))));
    attempt.handle_answer(at(0), at(5), &answer(5, queued(None)));
    assert_eq!(attempt.poll_outcome(), Some(Outcome::NotGranted));
    assert_eq!(tombstone_sent(&mut attempt), Some(Duration::ZERO));
}
