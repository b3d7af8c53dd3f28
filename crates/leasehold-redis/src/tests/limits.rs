//! The scripts exactly at a limit: the microsecond at which something ends, the last place of a queue, the last millisecond of a key.

use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, Owner, Refusal, Release, Renew, Reply, Resource, Token,
    WaitFor,
};
use leasehold_redis_protocol::token_at;

use super::comparison::{Comparison, compare_each, compare_mutex};
use super::cost::calls_of;
use super::{Step, acquire_or_queue, client_id, release_of, share};

const MICROSECOND: Duration = Duration::from_micros(1);

const fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: client_id(client), sequence }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn release(client: u128) -> Command {
    release_of(id(client, 1))
}

fn changed(command: Command, change: impl FnOnce(&mut Acquire)) -> Command {
    let Command::Acquire(acquire) = command else { panic!("not an attempt: {command:?}") };
    let mut acquire = (*acquire).clone();
    change(&mut acquire);
    Command::from(acquire)
}

/// An attempt at an exclusive lock that waits so long.
fn wait(client: u128, entry_ttl: Duration) -> Command {
    changed(acquire_or_queue(client, 1, 1, 1), |acquire| {
        acquire.wait = Some(WaitFor { entry_ttl, max_queue: 100 });
    })
}

fn expiry(comparison: &mut Comparison<'_, '_>) -> u64 {
    let key = comparison.key();
    redis::cmd("PEXPIRETIME").arg(key).query(comparison.runner.commands).unwrap()
}

/// The attempt that comes when the holder's lease ends goes behind the waiter that then holds it.
#[test]
fn lease_that_ends_now_is_not_waited_for() {
    compare_each([Duration::ZERO, MICROSECOND], |comparison, early| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
        comparison.pass(seconds(10) - early);
        comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
        let holder = comparison.view().holders[0].acquisition;
        assert_eq!(holder, id(u128::from(early.is_zero()), 1));
    });
}

#[test]
fn lease_that_ends_now_cannot_be_released() {
    let reply = |early: Duration| if early.is_zero() { Reply::NotHeld } else { Reply::Released };
    compare_each([Duration::ZERO, MICROSECOND], |comparison, early| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
        comparison.pass(seconds(10) - early);
        assert_eq!(comparison.run(0, &release(0)), reply(early));
    });
    // Among others that share the lock.
    compare_each([Duration::ZERO, MICROSECOND], |comparison, early| {
        for client in 0..3 {
            comparison.run(0, &share(client, seconds(if client == 1 { 2 } else { 9 })));
        }
        comparison.pass(seconds(2) - early);
        assert_eq!(comparison.run(0, &release(1)), reply(early));
        comparison.inspect(0);
    });
}

#[test]
fn waiter_whose_deadline_is_now_is_removed() {
    compare_each([Duration::ZERO, MICROSECOND], |comparison, early| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &wait(1, seconds(5)));
        comparison.run(0, &wait(2, seconds(6)));
        comparison.pass(seconds(5) - early);
        assert_eq!(comparison.view().waiters.len(), 1 + usize::from(!early.is_zero()));
    });
}

/// A repeated attempt can shorten its own wait.
#[test]
fn repeat_with_a_shorter_wait_ends_the_entry_earlier() {
    compare_mutex(|comparison| {
        comparison.run(0, &changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = seconds(100)));
        comparison.run(0, &wait(1, seconds(90)));
        comparison.run(0, &wait(1, seconds(10)));
        comparison.pass(seconds(11));
        assert_eq!(comparison.view().waiters, []);
    });
}

#[test]
fn renewal_with_a_shorter_ttl_ends_the_lease_earlier() {
    compare_mutex(|comparison| {
        comparison.run(0, &changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = seconds(100)));
        comparison.run(0, &wait(1, seconds(90)));
        comparison.run(0, &Command::Renew(Renew::to(id(0, 1), seconds(1))));
        comparison.pass(seconds(1));
        assert_eq!(comparison.view().holders[0].acquisition, id(1, 1));
    });
}

#[test]
fn tombstone_that_ends_now_cancels_nothing() {
    let cases = [
        (MICROSECOND, Duration::ZERO, true),
        (seconds(4), seconds(4) - MICROSECOND, true),
        (seconds(4), seconds(4), false),
        // Longer than the key of the lock would stay otherwise.
        (seconds(7_200), seconds(7_199), true),
        (seconds(7_200), seconds(7_200), false),
    ];
    let cases = [false, true].into_iter().flat_map(|is_held| cases.map(|case| (is_held, case)));
    compare_each(cases, |comparison, (is_held, (tombstone, passed, is_cancelled))| {
        if is_held {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        }
        comparison.run(0, &Command::Release(Release { tombstone, ..Release::now(id(1, 1)) }));
        comparison.pass(passed);
        let reply = comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
        assert_eq!(reply == Reply::Cancelled, is_cancelled, "{reply:?}");
    });
}

/// The hold is retained for as long as the minimum hold says, and not at all once it has passed.
#[test]
fn minimum_hold_that_ends_now_retains_nothing() {
    compare_each(
        [(seconds(2), false), (seconds(2) + MICROSECOND, true)],
        |comparison, (min_hold, is_retained)| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            comparison.pass(seconds(2));
            comparison.run(0, &Command::Release(Release { min_hold, ..Release::now(id(0, 1)) }));
            let holders = comparison.view().holders;
            assert_eq!((holders.len(), holders[0].retained), (1, is_retained));
        },
    );
}

#[test]
fn queue_is_full_at_its_maximum() {
    compare_each([None, Some(Owner::new("o"))], |comparison, owner| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        for (client, is_queued) in [(1, true), (2, true), (3, false)] {
            let attempt = changed(acquire_or_queue(client, 1, 1, 1), |acquire| {
                acquire.owner.clone_from(&owner);
                acquire.wait = Some(WaitFor { entry_ttl: seconds(5), max_queue: 2 });
            });
            let reply = comparison.run(0, &attempt);
            assert_eq!(matches!(reply, Reply::Queued(_)), is_queued, "{reply:?}");
        }
    });
}

/// A lock keeps its capacity while it is in use.
#[test]
fn attempt_with_another_capacity_is_refused() {
    let shared =
        |client, capacity| changed(share(client, seconds(10)), |acquire| acquire.capacity = capacity);
    let refused = |in_use| Reply::Refused(Refusal::Capacity { in_use });
    compare_mutex(|comparison| {
        comparison.run(0, &shared(0, 4));
        // Beside a plain lease, beside rows, and in the queue.
        for holders in 1..3 {
            assert_eq!(comparison.run(0, &shared(3, 5)), refused(4));
            assert_eq!(comparison.run(0, &acquire_or_queue(3, 1, 5, 5)), refused(4));
            comparison.run(0, &shared(holders, 4));
        }
        comparison.run(0, &acquire_or_queue(0, 2, 4, 4));
        assert_eq!(comparison.run(0, &acquire_or_queue(3, 1, 5, 5)), refused(4));
    });
    compare_mutex(|comparison| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
        assert_eq!(comparison.run(0, &acquire_or_queue(3, 1, 2, 2)), refused(1));
        // The queue alone also keeps it.
        comparison.step(0, &Step::Leave(1));
        comparison.run(0, &release(0));
        assert_eq!(comparison.run(0, &acquire_or_queue(3, 1, 2, 2)), refused(1));
        comparison.step(0, &Step::Return(1));
    });
}

#[test]
fn attempt_without_weight_is_refused() {
    compare_mutex(|comparison| {
        for sequence in 1..4 {
            let attempt = |weight| acquire_or_queue(3, 9, 4, weight);
            for weight in [0, 5] {
                let refused = Reply::Refused(Refusal::Weight { capacity: 4 });
                assert_eq!(comparison.run(0, &attempt(weight)), refused);
            }
            comparison.run(0, &acquire_or_queue(0, sequence, 4, 4));
        }
    });
}

/// Only a holder of more than half of the capacity may wait for more.
#[test]
fn holder_of_half_may_not_wait_for_more() {
    compare_each([(2, false), (3, true)], |comparison, (held, is_queued)| {
        comparison.run(0, &acquire_or_queue(0, 1, 4, held));
        comparison.run(0, &acquire_or_queue(1, 1, 4, 1));
        let more = changed(acquire_or_queue(0, 2, 4, 4), |acquire| acquire.replaces = Some(1));
        let reply = comparison.run(0, &more);
        assert_eq!(matches!(reply, Reply::Queued(_)), is_queued, "{reply:?}");
    });
}

/// A follower looks again after the lease ends, later if the head may need time, and later still if there are many.
#[test]
fn followers_look_again_when_the_model_says() {
    compare_each(
        [Duration::from_millis(1), seconds(3) - MICROSECOND, seconds(3), seconds(3) + MICROSECOND],
        |comparison, left| {
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
            comparison.pass(seconds(10) - left);
            // The number of this client spreads nothing.
            for sequence in (1..6).chain(1..6) {
                comparison.run(0, &acquire_or_queue(0, sequence, 1, 1));
            }
        },
    );
}

/// The key of a lock outlives its waiters, though its expiry is only moved if it must be.
#[test]
fn key_of_a_queue_outlives_its_waiters() {
    let more = [seconds(0), seconds(8), seconds(9), seconds(9) + MICROSECOND, seconds(10), seconds(11)];
    let cases = [3_600, 7_200].into_iter().flat_map(|second| more.map(|more| seconds(second) + more));
    compare_each(cases, |comparison, entry_ttl| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        for (client, entry_ttl) in [(1, seconds(5)), (2, entry_ttl), (3, seconds(5))] {
            comparison.run(0, &wait(client, entry_ttl));
            // It compares the key's expiry with every deadline.
            comparison.inspect(0);
        }
    });
}

/// A waiter whose wait is short must not shorten the life of the key.
#[test]
fn key_of_a_queue_outlives_its_holder() {
    compare_mutex(|comparison| {
        comparison.run(0, &changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = seconds(7_200)));
        comparison.run(0, &wait(1, seconds(5)));
        comparison.inspect(0);
    });
}

/// The waiter's lease is short, but the key's expiry may be an hour old.
#[test]
fn key_outlives_a_lease_that_is_handed_off() {
    compare_each([2_000, 3_000, 4_000, 5_000], |comparison, left| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &wait(1, seconds(3_600)));
        let expires_at = Duration::from_millis(expiry(comparison));
        let set = expires_at - Duration::from_micros(comparison.now.time.as_micros());
        // As late as it may end without moving the expiry.
        let renew = Renew::to(id(0, 1), set - seconds(1));
        comparison.run(0, &Command::Renew(renew));
        comparison.run(0, &wait(1, set - seconds(1)));
        // The next expiry is now that of the lease.
        comparison.pass(seconds(3_605));
        comparison.inspect(0);
        comparison.pass(set - seconds(3_605) - Duration::from_millis(left));
        assert_eq!(comparison.run(0, &release(0)), Reply::Released);
        comparison.inspect(0);
    });
}

/// One second is spared for the clocks: an expiry that is that much later than the lease's end stays.
#[test]
fn expiry_of_the_key_is_moved_only_if_it_must_be() {
    compare_each(
        [(seconds(3_609), false), (seconds(3_609) + MICROSECOND, true)],
        |comparison, (more, is_moved)| {
            for client in 0..2 {
                comparison.run(0, &share(client, seconds(10)));
            }
            let before = expiry(comparison);
            comparison.run(0, &share(2, more));
            assert_eq!(expiry(comparison) != before, is_moved);
        },
    );
}

/// The lease ends in a millisecond.
#[test]
fn last_millisecond_of_a_plain_lease_is_shared_in_the_usual_way() {
    compare_mutex(|comparison| {
        comparison.run(0, &share(0, seconds(10)));
        comparison.pass(seconds(10) - Duration::from_millis(1));
        let now = comparison.now;
        let resource = Resource { kind: Kind::Mutex, name: Name::new("b").unwrap() };
        let start =
            leasehold_core::Now::same(now.time.saturating_sub(seconds(10) - Duration::from_millis(1)));
        comparison.runner.run(&resource, &share(0, seconds(10)), start);
        let calls = calls_of(comparison.runner, |runner| {
            let granted = runner.run(&resource, &share(1, seconds(10)), now).reply;
            assert!(matches!(granted, Reply::Granted(_)), "{granted:?}");
        });
        assert_eq!(calls, "hmget, hset, mget, pexpireat, rename, set, xadd");
    });
}

/// A node that has the lease's token as its last one, or a later one that was reserved, does not raise the token.
#[test]
fn renewal_at_the_last_token_does_not_raise_the_token() {
    compare_mutex(|comparison| {
        comparison.now.floor = Token::new(1);
        let acquire = changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.reserve = 5);
        let Reply::Granted(grant) = comparison.run(0, &acquire) else { panic!("not granted") };
        comparison.now.floor = Some(grant.tokens.last);
        comparison.run(0, &Command::Renew(Renew::to(id(0, 1), seconds(10))));
        assert_eq!(comparison.view().holders[0].token, grant.tokens.first);
        comparison.pass(Duration::from_millis(10));
        comparison.now.floor = token_at(comparison.now.time);
        for reserve in [1, 2] {
            comparison.run(0, &Command::Renew(Renew { reserve, ..Renew::to(id(0, 1), seconds(10)) }));
        }
    });
}
