//! The scripts exactly at a limit: the microsecond at which something ends, the last place of a queue, the last millisecond of a key.

use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, Owner, Refusal, Release, Renew, Reply, Resource, Token, View,
    WaitFor,
};
use leasehold_redis_protocol::{resource_key, token_at};

use super::comparison::{Comparison, compare_mutex};
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

fn pass(comparison: &mut Comparison<'_, '_>, time: Duration) {
    comparison.now.time = comparison.now.time + time;
    comparison.now.wall = comparison.now.time;
}

fn view(comparison: &mut Comparison<'_, '_>) -> View {
    match comparison.run(0, &Command::Inspect) {
        Reply::View(view) => view,
        other => panic!("{other:?}"),
    }
}

fn expiry(comparison: &mut Comparison<'_, '_>) -> u64 {
    let key = resource_key(&Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
    redis::cmd("PEXPIRETIME").arg(key).query(comparison.runner.commands).unwrap()
}

/// The attempt that comes when the holder's lease ends goes behind the waiter that then holds it.
#[test]
fn lease_that_ends_now_is_not_waited_for() {
    for early in [Duration::ZERO, MICROSECOND] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            pass(comparison, seconds(10) - early);
            comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
            let holder = view(comparison).holders[0].acquisition;
            assert_eq!(holder, id(u128::from(early.is_zero()), 1));
        });
    }
}

#[test]
fn lease_that_ends_now_cannot_be_released() {
    for early in [Duration::ZERO, MICROSECOND] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            pass(comparison, seconds(10) - early);
            let expected = if early.is_zero() { Reply::NotHeld } else { Reply::Released };
            assert_eq!(comparison.run(0, &release(0)), expected);
        });
        // Among others that share the lock.
        compare_mutex(|comparison| {
            for client in 0..3 {
                comparison.run(0, &share(client, seconds(if client == 1 { 2 } else { 9 })));
            }
            pass(comparison, seconds(2) - early);
            assert_eq!(comparison.run(0, &release(2)), Reply::Released);
            assert_eq!(view(comparison).holders.len(), 1 + usize::from(!early.is_zero()));
        });
    }
}

#[test]
fn waiter_whose_deadline_is_now_is_removed() {
    for early in [Duration::ZERO, MICROSECOND] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &wait(1, seconds(5)));
            comparison.run(0, &wait(2, seconds(6)));
            pass(comparison, seconds(5) - early);
            assert_eq!(view(comparison).waiters.len(), 1 + usize::from(!early.is_zero()));
        });
    }
}

/// A repeated attempt can shorten its own wait.
#[test]
fn repeat_with_a_shorter_wait_ends_the_entry_earlier() {
    compare_mutex(|comparison| {
        comparison.run(0, &changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = seconds(100)));
        comparison.run(0, &wait(1, seconds(90)));
        comparison.run(0, &wait(1, seconds(10)));
        pass(comparison, seconds(11));
        assert_eq!(view(comparison).waiters, []);
    });
}

#[test]
fn renewal_with_a_shorter_ttl_ends_the_lease_earlier() {
    compare_mutex(|comparison| {
        comparison.run(0, &changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = seconds(100)));
        comparison.run(0, &wait(1, seconds(90)));
        comparison.run(0, &Command::Renew(Renew { acquisition: id(0, 1), ttl: seconds(1), reserve: 0 }));
        pass(comparison, seconds(1));
        assert_eq!(view(comparison).holders[0].acquisition, id(1, 1));
    });
}

#[test]
fn tombstone_that_ends_now_cancels_nothing() {
    for (tombstone, passed, is_cancelled) in [
        (MICROSECOND, Duration::ZERO, true),
        (seconds(4), seconds(4) - MICROSECOND, true),
        (seconds(4), seconds(4), false),
        // Longer than the key of the lock would stay otherwise.
        (seconds(7_200), seconds(7_199), true),
        (seconds(7_200), seconds(7_200), false),
    ] {
        for is_held in [false, true] {
            compare_mutex(|comparison| {
                if is_held {
                    comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
                }
                let cancel = Release { tombstone, ..Release::now(id(1, 1)) };
                comparison.run(0, &Command::Release(cancel));
                pass(comparison, passed);
                let reply = comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
                assert_eq!(reply == Reply::Cancelled, is_cancelled, "{reply:?}");
                pass(comparison, seconds(7_200));
            });
        }
    }
}

/// The hold is retained for as long as the minimum hold says, and not at all once it has passed.
#[test]
fn minimum_hold_that_ends_now_retains_nothing() {
    for (min_hold, is_retained) in [(seconds(2), false), (seconds(2) + MICROSECOND, true)] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            pass(comparison, seconds(2));
            comparison.run(0, &Command::Release(Release { min_hold, ..Release::now(id(0, 1)) }));
            let holders = view(comparison).holders;
            assert_eq!((holders.len(), holders[0].retained), (1, is_retained));
        });
    }
}

#[test]
fn queue_is_full_at_its_maximum() {
    for owner in [None, Some(Owner::new("o"))] {
        compare_mutex(|comparison| {
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
    for (held, is_queued) in [(2, false), (3, true)] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 4, held));
            comparison.run(0, &acquire_or_queue(1, 1, 4, 1));
            let more = changed(acquire_or_queue(0, 2, 4, 4), |acquire| acquire.replaces = Some(1));
            let reply = comparison.run(0, &more);
            assert_eq!(matches!(reply, Reply::Queued(_)), is_queued, "{reply:?}");
        });
    }
}

/// A follower looks again after the lease ends, later if the head may need time, and later still if there are many.
#[test]
fn followers_look_again_when_the_model_says() {
    for left in [Duration::from_millis(1), seconds(3) - MICROSECOND, seconds(3), seconds(3) + MICROSECOND] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
            comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
            pass(comparison, seconds(10) - left);
            // The number of this client spreads nothing.
            for sequence in (1..6).chain(1..6) {
                comparison.run(0, &acquire_or_queue(0, sequence, 1, 1));
            }
        });
    }
}

/// The key of a lock outlives its waiters, though its expiry is only moved if it must be.
#[test]
fn key_of_a_queue_outlives_its_waiters() {
    let hour = seconds(3_600);
    for second in [hour, 2 * hour] {
        for more in [seconds(0), seconds(8), seconds(9), seconds(9) + MICROSECOND, seconds(10), seconds(11)] {
            compare_mutex(|comparison| {
                comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
                for (client, entry_ttl) in [(1, seconds(5)), (2, second + more), (3, seconds(5))] {
                    comparison.run(0, &wait(client, entry_ttl));
                    // It compares the key's expiry with every deadline.
                    comparison.inspect(0);
                }
            });
        }
    }
}

/// The waiter's lease is short, but the key's expiry may be an hour old.
#[test]
fn key_outlives_a_lease_that_is_handed_off() {
    for left in [2_000, 3_000, 4_000, 5_000] {
        compare_mutex(|comparison| {
            comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
            comparison.run(0, &wait(1, seconds(3_600)));
            let expires_at = Duration::from_millis(expiry(comparison));
            let set = expires_at - Duration::from_micros(comparison.now.time.as_micros());
            // As late as it may end without moving the expiry.
            let renew = Renew { acquisition: id(0, 1), ttl: set - seconds(1), reserve: 0 };
            comparison.run(0, &Command::Renew(renew));
            comparison.run(0, &wait(1, set - seconds(1)));
            pass(comparison, set - Duration::from_millis(left));
            assert_eq!(comparison.run(0, &release(0)), Reply::Released);
            comparison.inspect(0);
        });
    }
}

/// One second is spared for the clocks: an expiry that is that much later than the lease's end stays.
#[test]
fn expiry_of_the_key_is_moved_only_if_it_must_be() {
    for (more, is_moved) in [(seconds(3_609), false), (seconds(3_609) + MICROSECOND, true)] {
        compare_mutex(|comparison| {
            for client in 0..2 {
                comparison.run(0, &share(client, seconds(10)));
            }
            let before = expiry(comparison);
            comparison.run(0, &share(2, more));
            assert_eq!(expiry(comparison) != before, is_moved);
        });
    }
}

/// The lease ends in a millisecond.
#[test]
fn last_millisecond_of_a_plain_lease_is_shared_in_the_usual_way() {
    compare_mutex(|comparison| {
        comparison.run(0, &share(0, seconds(10)));
        pass(comparison, seconds(10) - Duration::from_millis(1));
        let now = comparison.now;
        let resource = Resource { kind: Kind::Mutex, name: Name::new("b").unwrap() };
        let start =
            leasehold_core::Now::same(now.time.saturating_sub(seconds(10) - Duration::from_millis(1)));
        comparison.runner.run(&resource, &share(0, seconds(10)), start);
        let calls = calls_of(comparison.runner, |runner| {
            let granted = runner.run(&resource, &share(1, seconds(10)), now).reply;
            assert!(matches!(granted, Reply::Granted(_)), "{granted:?}");
        });
        assert_eq!(calls, "del, mget, pexpireat, set, xadd, zadd");
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
        comparison.run(0, &Command::Renew(Renew { acquisition: id(0, 1), ttl: seconds(10), reserve: 0 }));
        assert_eq!(view(comparison).holders[0].token, grant.tokens.first);
        pass(comparison, Duration::from_millis(10));
        comparison.now.floor = token_at(comparison.now.time);
        for reserve in [1, 2] {
            comparison.run(0, &Command::Renew(Renew { acquisition: id(0, 1), ttl: seconds(10), reserve }));
        }
    });
}
