//! One held lease, step by step.

use super::*;
use crate::client::handoff::HandoffLimits;
use crate::id::ClientId;
use crate::time::StoreTime;
use crate::token::TokenRange;

const TTL: Duration = Duration::from_secs(9);

fn at(ms: u64) -> LocalTime {
    LocalTime::ZERO + Duration::from_millis(ms)
}

fn lease(terms: LeaseTerms, valid_for: Duration) -> LeaseMachine {
    lease_after(false, terms, valid_for)
}

fn lease_after(has_waited: bool, terms: LeaseTerms, valid_for: Duration) -> LeaseMachine {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    let trusted_until = at(0) + (valid_for - drift_margin(valid_for));
    LeaseMachine::new(acquisition, terms, at(0), valid_for, trusted_until, has_waited)
}

fn terms() -> LeaseTerms {
    LeaseTerms { ttl: TTL, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas: 0 }
}

fn renewed(valid_for: Duration) -> Reply {
    Reply::Renewed { valid_for, tokens: None, contended: false }
}

#[test]
fn lease_renews_at_a_third_of_the_ttl_and_counts_from_the_send_time() {
    let mut lease = lease(terms(), TTL);
    assert_eq!(lease.poll_timeout(), Some(at(3_000)));
    assert_eq!(lease.poll_transmit(at(2_999)), None);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    assert_eq!(lease.poll_transmit(at(3_001)), None, "one renewal is under way");
    lease.handle_reply(at(3_500), at(3_000), &renewed(TTL));
    assert_eq!(lease.remaining(at(3_500)), Duration::from_millis(9_000 - 92 - 500));
    assert_eq!(lease.poll_timeout(), Some(at(6_000)));
}

#[test]
fn lease_expires_by_the_local_clock() {
    let lease = lease(terms(), TTL);
    assert_eq!(lease.state(at(8_907)), LeaseState::Held);
    assert_eq!(lease.state(at(8_908)), LeaseState::Lost(Loss::Expired));
    assert_eq!(lease.remaining(at(8_908)), Duration::ZERO);
}

#[test]
fn lease_expires_while_a_renewal_is_in_flight() {
    let mut lease = lease(terms(), TTL);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    assert_eq!(lease.poll_timeout(), Some(at(8_908)));
    lease.handle_timeout(at(8_908));
    lease.handle_reply(at(8_909), at(3_000), &renewed(TTL));
    assert_eq!(lease.state(at(8_910)), LeaseState::Lost(Loss::Expired), "what is lost stays lost");
}

#[test]
fn renewal_without_an_answer_is_repeated() {
    let mut lease = lease(terms(), TTL);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    lease.limit_answer(at(3_000));
    // Half of the time until the lease ends.
    assert_eq!(lease.poll_timeout(), Some(at(5_954)));
    assert_eq!(lease.poll_transmit(at(5_953)), None);
    assert_eq!(lease.state(at(5_953)), LeaseState::Held);
    assert_eq!(lease.poll_transmit(at(5_954)), None);
    assert_eq!(lease.state(at(5_954)), LeaseState::Uncertain);
    let again = lease.poll_timeout().unwrap();
    assert!(again > at(5_954) && again < at(7_000));
    assert!(lease.poll_transmit(again).is_some());
    // The first answer counts when it comes.
    lease.handle_reply(again, at(3_000), &renewed(TTL));
    assert_eq!(lease.state(again), LeaseState::Held);
    assert_eq!(lease.remaining(at(8_000)), Duration::from_millis(12_000 - 92 - 8_000));
}

#[test]
fn renewal_of_a_long_lease_is_repeated_after_four_seconds() {
    let ttl = Duration::from_secs(600);
    let mut lease = lease(LeaseTerms { ttl, ..terms() }, ttl);
    assert!(lease.poll_transmit(at(200_000)).is_some());
    lease.limit_answer(at(200_000));
    assert_eq!(lease.poll_timeout(), Some(at(204_000)));
}

#[test]
fn lease_that_only_tasks_renew_is_not_renewed_without_an_answer() {
    let mut lease = lease(LeaseTerms { renews: false, ..terms() }, TTL);
    lease.handle_hint(at(3_000));
    assert!(lease.poll_transmit(at(3_000)).is_some());
    lease.limit_answer(at(3_000));
    // The end of the lease.
    assert_eq!(lease.poll_timeout(), Some(at(8_908)));
}

#[test]
fn failed_renewal_makes_the_lease_uncertain_until_one_succeeds() {
    let mut lease = lease(terms(), TTL);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    lease.handle_failure(at(3_100));
    assert_eq!(lease.state(at(3_100)), LeaseState::Uncertain);
    let again = lease.poll_timeout().unwrap();
    assert!(again > at(3_100) && again < at(4_000));
    assert!(lease.poll_transmit(again).is_some());
    lease.handle_reply(again, again, &renewed(TTL));
    assert_eq!(lease.state(again), LeaseState::Held);
}

#[test]
fn renewal_retries_back_off_until_expiry() {
    let mut lease = lease(terms(), TTL);
    let mut sent = 0;
    while let Some(now) = lease.poll_timeout() {
        if lease.poll_transmit(now).is_some() {
            sent += 1;
            lease.handle_failure(now);
        }
    }
    assert_eq!(lease.state, LeaseState::Lost(Loss::Expired));
    assert!((10..100).contains(&sent), "{sent} renewals were tried");
}

#[test]
fn not_held_reply_loses_the_lease_at_once() {
    let mut lease = lease(terms(), TTL);
    lease.handle_hint(at(10));
    assert!(lease.poll_transmit(at(10)).is_some());
    lease.handle_reply(at(11), at(10), &Reply::NotHeld);
    assert_eq!(lease.state(at(11)), LeaseState::Lost(Loss::Gone));
    assert_eq!(lease.poll_timeout(), None);
}

#[test]
fn hint_during_a_renewal_causes_another_renewal() {
    let mut lease = lease(terms(), TTL);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    lease.handle_hint(at(3_001));
    lease.handle_reply(at(3_002), at(3_000), &renewed(TTL));
    assert!(lease.poll_transmit(at(3_002)).is_some());
    lease.handle_reply(at(3_003), at(3_002), &Reply::NotHeld);
    assert_eq!(lease.state(at(3_003)), LeaseState::Lost(Loss::Gone));
}

#[test]
fn pushed_lease_is_claimed_once_without_renewal() {
    let by_hand = LeaseTerms { renews: false, ..terms() };
    let mut lease = lease_after(true, by_hand, Duration::from_secs(3));
    assert_eq!(lease.poll_timeout(), Some(at(1_000)));
    assert!(lease.poll_transmit(at(1_000)).is_some());
    lease.handle_reply(at(1_001), at(1_000), &renewed(TTL));
    assert_eq!(lease.poll_timeout(), Some(at(1_000 + 9_000 - 92)), "nothing but the end is left");
}

/// A repeated attempt is answered with what is left.
#[test]
fn lease_whose_first_answer_was_lost_is_not_renewed_without_renewal() {
    for has_waited in [false, true] {
        let left = TTL - Duration::from_millis(100);
        let mut lease = lease_after(has_waited, LeaseTerms { renews: false, ..terms() }, left);
        assert_eq!(lease.poll_transmit(at(8_000)), None);
    }
}

/// Its lifetime is that of a pushed lease, which no reply tells apart from a claimed one.
#[test]
fn short_lease_of_a_waiter_is_claimed_without_renewal() {
    let short = Duration::from_secs(2);
    let by_hand = LeaseTerms { renews: false, ttl: short, ..terms() };
    let mut waited = lease_after(true, by_hand, short);
    assert!(waited.poll_transmit(at(667)).is_some());
    assert_eq!(lease(by_hand, short).poll_transmit(at(1_500)), None);
}

#[test]
fn renewal_that_fails_after_a_reconnect_is_retried_at_once() {
    let mut lease = lease(terms(), TTL);
    assert!(lease.poll_transmit(at(3_000)).is_some());
    lease.handle_reconnected(at(3_100));
    lease.handle_failure(at(3_200));
    assert!(lease.poll_transmit(at(3_200)).is_some());
    lease.handle_failure(at(3_300));
    assert_eq!(lease.poll_transmit(at(3_300)), None, "nothing is new");
}

#[test]
fn reconnects_do_not_extend_an_unrenewed_lease() {
    let by_hand = LeaseTerms { renews: false, ..terms() };
    let mut lease = lease(by_hand, TTL);
    lease.handle_hint(at(10));
    assert!(lease.poll_transmit(at(10)).is_some());
    lease.handle_reconnected(at(11));
    lease.handle_reply(at(12), at(10), &renewed(TTL));
    assert_eq!(lease.poll_transmit(at(12)), None, "the caller asked once");
    // One that fails is repeated, until it succeeds.
    lease.handle_hint(at(20));
    assert!(lease.poll_transmit(at(20)).is_some());
    lease.handle_reconnected(at(21));
    lease.handle_failure(at(22));
    lease.handle_reconnected(at(23));
    assert!(lease.poll_transmit(at(23)).is_some());
}

#[test]
fn reconnect_renews_only_renewed_leases() {
    let mut renewed_by_itself = lease(terms(), TTL);
    renewed_by_itself.handle_reconnected(at(10));
    assert!(renewed_by_itself.poll_transmit(at(10)).is_some());

    let by_hand = LeaseTerms { renews: false, ..terms() };
    let mut unrenewed = lease(by_hand, TTL);
    unrenewed.handle_reconnected(at(10));
    assert_eq!(unrenewed.poll_transmit(at(10)), None);
    assert_eq!(unrenewed.poll_timeout(), Some(at(8_908)), "nothing but the end is left");

    let mut pushed = lease_after(true, by_hand, Duration::from_secs(3));
    pushed.handle_reconnected(at(10));
    assert!(pushed.poll_transmit(at(10)).is_some(), "it is claimed sooner");
    pushed.handle_reply(at(11), at(10), &renewed(TTL));
    pushed.handle_reconnected(at(20));
    assert_eq!(pushed.poll_transmit(at(20)), None);
}

#[test]
fn renewal_never_shortens_the_min_lifetime() {
    let min_lifetime = Duration::from_secs(60);
    let mut lease = lease(LeaseTerms { min_lifetime, ..terms() }, min_lifetime);
    let mut hold_ends_at = at(60_000);
    while hold_ends_at < at(100_000) {
        let now = lease.poll_timeout().unwrap();
        let Some(Command::Renew(renew)) = lease.poll_transmit(now) else { panic!() };
        assert!(now + renew.ttl >= hold_ends_at && renew.ttl >= TTL);
        hold_ends_at = now + renew.ttl;
        lease.handle_reply(now, now, &renewed(TTL));
    }
    assert_eq!(lease.state(at(95_000)), LeaseState::Held);
}

/// A lease that was exchanged continues the hold of the one before it, so its first renewal may shorten it.
#[test]
fn renewal_that_shortens_the_lease_shortens_its_trust() {
    let mut lease = lease(LeaseTerms { max_hold: Some(TTL), ..terms() }, TTL);
    lease.end_by(at(8_900));
    let Some(Command::Renew(renew)) = lease.poll_transmit(at(3_000)) else { panic!("a renewal is due") };
    assert_eq!(renew.ttl, Duration::from_millis(5_900));
    // The store's clock is up to 1 % faster: there the lease ends 5.9 s of its clock later.
    let trusted_until = at(3_000) + (renew.ttl - drift_margin(renew.ttl));
    assert_eq!(at(3_000) + lease.remaining(at(3_000)), trusted_until, "whether or not it is answered");
    lease.handle_reply(at(3_010), at(3_000), &renewed(renew.ttl));
    assert_eq!(at(3_010) + lease.remaining(at(3_010)), trusted_until);
}

#[test]
fn max_hold_caps_the_last_renewal_and_ends_the_lease() {
    let hold = Some(Duration::from_secs(10));
    let mut lease = lease(LeaseTerms { max_hold: hold, ..terms() }, TTL);
    let Some(Command::Renew(renew)) = lease.poll_transmit(at(3_000)) else { panic!() };
    assert_eq!(renew.ttl, Duration::from_secs(7));
    lease.handle_reply(at(3_000), at(3_000), &renewed(renew.ttl));
    assert_eq!(lease.renew_at, LocalTime::NEVER);
    let end = lease.poll_timeout().unwrap();
    assert!(end <= at(10_000));
    assert_eq!(lease.state(end), LeaseState::Lost(Loss::MaxHold));
}

#[test]
fn only_a_healthy_lease_is_handed_off_and_tokens_are_requested_early() {
    let bound = HandoffLimits { max_handoffs: 9, max_duration: TTL };
    let tokens = TokenRange::next(0, 5, StoreTime::ZERO);
    let mut lease = lease(terms(), TTL).with_handoff_budget(HandoffBudget::new(bound, tokens));
    assert!(matches!(lease.hand_off(at(1)), HandoffDecision::Next(token) if token.get() == 2));
    let Some(Command::Renew(renewal)) = lease.poll_transmit(at(1)) else { panic!("{lease:?}") };
    assert!(renewal.reserve > 0);
    lease.handle_failure(at(2));
    assert_eq!(lease.hand_off(at(2)), HandoffDecision::Release, "the expiry of the lease is unknown");
    lease.handle_reply(at(4), at(3), &renewed(TTL));
    assert!(matches!(lease.hand_off(at(4)), HandoffDecision::Next(token) if token.get() == 3));
    assert!(matches!(lease.hand_off(at(8_000)), HandoffDecision::Next(_)));
    assert_eq!(lease.hand_off(at(8_500)), HandoffDecision::Release, "too little is left of it");
}

fn with_tokens(reserve: u32) -> LeaseMachine {
    let limits = HandoffLimits { max_handoffs: 2, max_duration: TTL };
    let tokens = TokenRange::next(0, reserve, StoreTime::ZERO);
    lease(terms(), TTL).with_handoff_budget(HandoffBudget::new(limits, tokens))
}

#[test]
fn contended_lease_is_handed_off_up_to_its_limit() {
    let mut lease = with_tokens(100);
    lease.handle_contended(at(1));
    for _ in 0..2 {
        assert!(matches!(lease.hand_off(at(2)), HandoffDecision::Next(_)));
    }
    assert_eq!(lease.hand_off(at(2)), HandoffDecision::Release);
}

#[test]
fn lease_with_only_a_quarter_of_a_claim_window_left_is_not_handed_off() {
    let mut lease = with_tokens(10_000);
    let end = at(8_908);
    let least = CLAIM_WINDOW / 4;
    assert!(matches!(
        lease.hand_off(end.saturating_sub(least + Duration::from_micros(1))),
        HandoffDecision::Next(_)
    ));
    assert_eq!(lease.hand_off(end.saturating_sub(least)), HandoffDecision::Release);
}

#[test]
fn handoff_with_enough_tokens_renews_no_earlier() {
    let mut lease = with_tokens(10_000);
    assert!(matches!(lease.hand_off(at(1)), HandoffDecision::Next(_)));
    assert_eq!(lease.poll_renewal(), Some(at(3_000)));
}

#[test]
fn tokens_are_requested_by_one_renewal() {
    let mut lease = with_tokens(5);
    assert!(matches!(lease.hand_off(at(1)), HandoffDecision::Next(_)));
    assert!(lease.poll_transmit(at(1)).is_some());
    assert!(matches!(lease.hand_off(at(2)), HandoffDecision::Next(_)), "while the renewal is in flight");
    let tokens = Some(TokenRange::next(9, 10_000, StoreTime::ZERO));
    lease.handle_reply(at(3), at(1), &Reply::Renewed { valid_for: TTL, tokens, contended: false });
    assert_eq!(lease.poll_renewal(), Some(at(3_001)));
}

#[test]
fn renewal_is_due_unless_one_is_in_flight_or_the_lease_ends_first() {
    let mut lease = lease(terms(), TTL);
    assert!(!lease.is_renewing());
    assert_eq!(lease.poll_renewal(), Some(at(3_000)));
    assert!(lease.poll_transmit(at(3_000)).is_some());
    assert!(lease.is_renewing());
    assert_eq!(lease.poll_renewal(), None);
    lease.handle_failure(at(3_100));
    assert!(!lease.is_renewing());
    assert!(lease.poll_renewal() > Some(at(3_100)));
    // The retry would be due when the lease is lost.
    assert!(lease.poll_transmit(at(8_000)).is_some());
    lease.handle_failure(at(8_908).saturating_sub(MIN_RETRY_DELAY));
    assert_eq!(lease.poll_timeout(), Some(at(8_908)));
    assert_eq!(lease.poll_renewal(), None);
    lease.handle_timeout(at(8_908));
    assert_eq!(lease.poll_renewal(), None);
}

#[test]
fn each_loss_is_explained() {
    let texts = [
        (Loss::Expired, "it expired before a renewal succeeded"),
        (Loss::Gone, "the store no longer has it: it was revoked or expired there"),
        (Loss::MaxHold, "its maximum hold is over"),
        (Loss::Closed, "the client was closed"),
        (
            Loss::Bridge,
            "the other library's lock that it is bridged to expired, was deleted or was taken over",
        ),
    ];
    for (loss, text) in texts {
        assert_eq!(alloc::format!("{loss}"), text);
    }
}

#[test]
fn pushes_cause_one_question_a_second_and_end_no_lease() {
    for renews in [false, true] {
        let mut lease = lease(LeaseTerms { renews, ..terms() }, TTL);
        let mut sent = 0;
        for ms in 1..5_000 {
            lease.handle_pushed_hint(at(ms));
            if let Some(Command::Renew(renew)) = lease.poll_transmit(at(ms)) {
                sent += 1;
                lease.handle_reply(at(ms), at(ms), &renewed(renew.ttl));
            }
            assert_eq!(lease.state(at(ms)), LeaseState::Held);
        }
        assert_eq!(sent, 5, "renews: {renews}");
    }
}

#[test]
fn pushes_do_not_extend_a_lease_that_is_not_renewed() {
    let mut lease = lease(LeaseTerms { renews: false, ..terms() }, TTL);
    let end = at(0) + (TTL - drift_margin(TTL));
    let mut now = at(0);
    while !matches!(lease.state(now), LeaseState::Lost(_)) {
        lease.handle_pushed_hint(now);
        if let Some(Command::Renew(renew)) = lease.poll_transmit(now) {
            assert!(renew.only_asks(), "{renew:?}");
            // Some answers are lost.
            if now.as_micros().is_multiple_of(2_000_000) {
                lease.handle_failure(now);
            } else {
                lease.handle_reply(now, now, &renewed(renew.ttl));
            }
        }
        now = now + Duration::from_millis(1);
    }
    assert_eq!((now, lease.state(now)), (end, LeaseState::Lost(Loss::Expired)));
}

#[test]
fn look_of_a_lease_that_the_store_does_not_have_ends_it() {
    let mut lease = lease(LeaseTerms { renews: false, ..terms() }, TTL);
    lease.handle_pushed_hint(at(5));
    assert!(lease.poll_transmit(at(5)).is_some());
    lease.handle_reply(at(6), at(5), &Reply::NotHeld);
    assert_eq!(lease.state(at(6)), LeaseState::Lost(Loss::Gone));
}

#[test]
fn pushed_lease_is_claimed_by_a_full_renewal_whatever_pushes_ask_for() {
    let window = CLAIM_WINDOW;
    let mut lease = lease_after(true, LeaseTerms { renews: false, ..terms() }, window);
    lease.handle_pushed_hint(at(5));
    let Some(Command::Renew(renew)) = lease.poll_transmit(at(5)) else { panic!() };
    assert_eq!(renew.ttl, TTL);
}
