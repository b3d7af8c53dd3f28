//! A stranger who publishes, listens and repeats: no push that the store did not send grants a lease, or delays a re-check.

use alloc::vec::Vec;

use super::*;
use crate::model::CLAIM_WINDOW;
use crate::secret::{GrantProof, GrantSecret};

/// The attempt is queued, and has sent nothing since.
fn waiting() -> AcquireMachine {
    let mut attempt = acquiring(patient());
    attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
    attempt
}

fn genuine(number: u32, ms: u64) -> Push {
    pushed_grant(number, ms, CLAIM_WINDOW)
}

fn is_granted(attempt: &AcquireMachine) -> bool {
    matches!(attempt.poll_outcome(), Some(Outcome::Granted { .. }))
}

/// Pushes that anybody may send, at this time of the store.
fn forged(ms: u64) -> Vec<Push> {
    let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
    let one = grant(CLAIM_WINDOW);
    let long = grant(Duration::from_secs(600));
    let high = Grant { tokens: TokenRange::next(crate::token::MAX_TOKEN - 1, 0, StoreTime::ZERO), ..one };
    let other_attempt = Acquisition { sequence: 2, ..acquisition };
    let proofs = [
        GrantProof::NONE,
        GrantSecret::UNUSED.prove(store(ms), &one),
        SecretKey::new(1).secret(acquisition, 1).prove(store(ms), &one),
        SECRET_KEY.secret(other_attempt, 1).prove(store(ms), &one),
        SECRET_KEY.secret(acquisition, 99).prove(store(ms), &one),
        SECRET_KEY.secret(acquisition, 1).for_node(0).prove(store(ms), &one),
        // What the store sent, about another time.
        SECRET_KEY.secret(acquisition, 1).prove(store(ms + 1), &one),
    ];
    let mut kinds: Vec<PushKind> = proofs.map(|proof| PushKind::Granted(one, proof)).to_vec();
    // And about another grant.
    let proof = SECRET_KEY.secret(acquisition, 1).prove(store(ms), &one);
    kinds.extend([PushKind::Granted(long, proof), PushKind::Granted(high, proof)]);
    kinds.extend([0, 1, ms, ms + 1, 500_000].map(|at| PushKind::Next(HeadHint { repoll_at: store(at) })));
    kinds.push(PushKind::Next(HeadHint { repoll_at: StoreTime::NEVER }));
    kinds.extend([PushKind::Revoked, PushKind::Contended]);
    kinds.into_iter().map(|kind| pushed(ms, kind)).collect()
}

#[test]
fn forged_push_grants_nothing_and_delays_nothing() {
    for (index, push) in forged(5).into_iter().enumerate() {
        for is_first in [false, true] {
            let mut attempt = if is_first { acquiring(patient()) } else { waiting() };
            let due = attempt.poll_timeout();
            attempt.handle_push(at(6), &push);
            if is_first {
                attempt.handle_answer(at(0), at(7), &answer(5, queued(Some(9_000))));
            }
            assert!(!is_granted(&attempt), "{index}: {push:?}");
            let due = if is_first { Some(at(9_102)) } else { due };
            assert!(
                attempt.poll_timeout() <= due,
                "{index}: {:?} instead of {due:?}",
                attempt.poll_timeout()
            );
        }
    }
}

#[test]
fn flood_of_pushes_causes_one_question_a_second() {
    for kind in 0..forged(0).len() {
        let mut attempt = waiting();
        let mut sent = 0;
        for ms in 2..10_000 {
            attempt.handle_push(at(ms), &forged(ms)[kind]);
            if attempt.poll_transmit(at(ms)).is_some() {
                sent += 1;
                attempt.handle_answer(at(ms), at(ms), &answer(ms, queued(Some(600_000))));
            }
        }
        assert!(sent <= 10, "{sent} of {:?}", forged(0)[kind]);
    }
}

#[test]
fn flood_during_an_acquire_causes_one_question_a_second() {
    let mut attempt = acquiring(patient());
    let (mut sent_at, mut sent) = (0, Vec::new());
    for ms in 2..10_000 {
        forged(ms).iter().for_each(|push| attempt.handle_push(at(ms), push));
        // Each answer takes 10 ms.
        if ms >= sent_at + 10 {
            attempt.handle_answer(at(sent_at), at(ms), &answer(ms, queued(Some(600_000))));
            sent_at = u64::MAX - 10;
        }
        if attempt.poll_transmit(at(ms)).is_some() {
            sent_at = ms;
            sent.push(ms);
        }
    }
    assert!((9..=10).contains(&sent.len()), "{sent:?}");
}

#[test]
fn grant_counts_for_the_last_answered_acquire_and_the_one_in_flight() {
    for number in [1, 2] {
        let mut attempt = waiting();
        attempt.handle_hint(at(5));
        assert!(attempt.poll_transmit(at(5)).is_some());
        attempt.handle_push(at(6), &genuine(number, 5));
        assert!(is_granted(&attempt), "{number}");
    }
    // The store has replaced the first secret.
    let mut attempt = waiting();
    attempt.handle_hint(at(5));
    assert!(attempt.poll_transmit(at(5)).is_some());
    attempt.handle_answer(at(5), at(6), &answer(5, queued(None)));
    attempt.handle_push(at(7), &genuine(1, 6));
    assert!(!is_granted(&attempt));
    attempt.handle_push(at(7), &genuine(2, 6));
    assert!(is_granted(&attempt));
}

#[test]
fn repeated_push_of_a_grant_that_was_not_used_grants_nothing() {
    let mut attempt = waiting();
    // The store's clock was set forward: the age of the push is unknown.
    let push = genuine(1, 50_000);
    attempt.handle_push(at(6), &push);
    assert!(!is_granted(&attempt));
    assert!(attempt.poll_transmit(at(6)).is_some(), "the store says what is left of it");
    // The answer is late. By this time the push would seem to be new.
    attempt.handle_push(at(50_000), &push);
    assert!(!is_granted(&attempt));
}

#[test]
fn pushed_grant_is_trusted_for_a_claim_window_at_most() {
    let mut attempt = waiting();
    attempt.handle_push(at(6), &pushed_grant(1, 5, Duration::from_secs(600)));
    let Some(Outcome::Granted { grant, trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
    assert_eq!(grant.valid_for, CLAIM_WINDOW);
    assert!(trusted_until <= at(6) + CLAIM_WINDOW);
}

#[test]
fn every_acquire_of_a_waiter_has_a_new_secret() {
    let mut attempt = attempt(patient());
    let mut secrets = Vec::new();
    for ms in [0, 20_000, 40_000] {
        let Some(Command::Acquire(acquire)) = attempt.poll_transmit(at(ms)) else { panic!() };
        assert!(!secrets.contains(&acquire.secret));
        secrets.push(acquire.secret);
        attempt.handle_answer(at(ms), at(ms), &answer(ms, queued(None)));
    }
}
