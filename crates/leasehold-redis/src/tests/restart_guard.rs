//! When a quorum node abstains because it may have lost leases.

use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, Command, Kind, Name, Now, Reply, Resource, StoreTime};
use leasehold_redis_protocol::{RESTART_GUARD_KEY, VoteArgs};

use super::client_id;
use super::comparison::{ScriptRunner, start, with_scripts};

const MAX_TTL: Duration = Duration::from_secs(100);
const HOUR: Duration = Duration::from_secs(3_600);
const MICROSECOND: Duration = Duration::from_micros(1);
const LIFETIME: Duration = Duration::from_secs(90 * 24 * 3_600);

/// Until when the node abstains from the attempt; `None` if it grants it.
#[track_caller]
fn abstains_until(runner: &mut ScriptRunner<'_>, run_id: &str, now: StoreTime) -> Option<StoreTime> {
    abstains_with(runner, MAX_TTL, run_id, now)
}

#[track_caller]
fn abstains_with(
    runner: &mut ScriptRunner<'_>,
    max_ttl: Duration,
    run_id: &str,
    now: StoreTime,
) -> Option<StoreTime> {
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let acquisition = Acquisition { client: client_id(1), sequence: 1 };
    let acquire = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(10)));
    let vote_args = VoteArgs { abstains_for: Some(max_ttl), run_id, ..VoteArgs::default() };
    match runner.vote(&resource, &acquire, vote_args, Now::same(now)) {
        Reply::Abstains(until) => Some(until),
        Reply::Granted(_) => None,
        other => panic!("{other:?}"),
    }
}

/// When the key expires, in milliseconds; negative if it does not.
fn expiry(runner: &mut ScriptRunner<'_>) -> i64 {
    redis::cmd("PEXPIRETIME").arg(RESTART_GUARD_KEY).query(runner.commands).unwrap()
}

fn expiry_after(written: StoreTime) -> i64 {
    i64::try_from((written + LIFETIME).as_micros().div_ceil(1_000)).unwrap()
}

/// Whether the vote writes the key, which gives it an expiry.
fn writes(runner: &mut ScriptRunner<'_>, now: StoreTime) -> bool {
    redis::cmd("PERSIST").arg(RESTART_GUARD_KEY).exec(runner.commands).unwrap();
    abstains_until(runner, "a", now);
    let expiry = expiry(runner);
    assert!(expiry == -1 || expiry == expiry_after(now), "{expiry}");
    expiry != -1
}

#[test]
fn new_node_abstains_until_the_maximum_ttl_has_passed() {
    with_scripts(|runner| {
        let start = start();
        let until = Some(start + MAX_TTL);
        assert_eq!(abstains_until(runner, "a", start), until);
        assert_eq!(expiry(runner), expiry_after(start));
        assert_eq!(abstains_until(runner, "a", start + (MAX_TTL - MICROSECOND)), until);
        assert_eq!(abstains_until(runner, "a", start + MAX_TTL), None);
    });
}

#[test]
fn restarted_node_abstains_again() {
    with_scripts(|runner| {
        let start = start();
        abstains_until(runner, "a", start);
        let restarted = start + MAX_TTL;
        assert_eq!(abstains_until(runner, "b", restarted), Some(restarted + MAX_TTL));
        assert_eq!(abstains_until(runner, "b", restarted + MAX_TTL), None);
    });
}

/// As if the server had had another replication id at the last vote, which its present one does not follow.
fn forget_replication_id(runner: &mut ScriptRunner<'_>) {
    let born: Vec<u8> = redis::cmd("GET").arg(RESTART_GUARD_KEY).query(runner.commands).unwrap();
    let id = born.len() - 40;
    assert!(born[id..].iter().all(u8::is_ascii_hexdigit));
    redis::cmd("SETRANGE").arg(RESTART_GUARD_KEY).arg(id).arg("f".repeat(40)).exec(runner.commands).unwrap();
}

#[test]
fn node_with_a_new_replication_id_abstains_only_if_it_may_have_been_promoted() {
    with_scripts(|runner| {
        let longest = HOUR;
        let born_at = start();
        abstains_with(runner, longest, "a", born_at);
        let born = |runner: &mut ScriptRunner<'_>| -> Vec<u8> {
            redis::cmd("GET").arg(RESTART_GUARD_KEY).query(runner.commands).unwrap()
        };
        let first = born(runner);
        let now = born_at + longest;
        forget_replication_id(runner);
        assert_eq!(abstains_with(runner, longest, "a", now), None);
        let later = born(runner);
        assert_eq!((&later[..8], &later[16..]), (&first[..8], &first[16..]), "it knows the new id");
        // It would forget a promotion sooner than it may vote.
        let (longer, later) = (longest + MICROSECOND, now + MICROSECOND);
        forget_replication_id(runner);
        assert_eq!(abstains_with(runner, longer, "a", later), Some(later + longer));
        // A replica that can be written has the id of its master, and no earlier one.
        let now = later + longest;
        let mut run = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).exec(runner.commands).unwrap();
        run(&["CONFIG", "SET", "replica-read-only", "no"]);
        run(&["REPLICAOF", "127.0.0.1", "1"]);
        forget_replication_id(runner);
        assert_eq!(abstains_with(runner, longest, "a", now), Some(now + longest));
        // Promoted.
        let now = now + longest;
        assert_eq!(abstains_with(runner, longest, "a", now), None);
        redis::cmd("REPLICAOF").arg(&["NO", "ONE"]).exec(runner.commands).unwrap();
        assert_eq!(abstains_with(runner, longest, "a", now), Some(now + longest));
        assert_eq!(abstains_with(runner, longest, "a", now + longest), None);
    });
}

#[test]
fn node_whose_clock_was_set_back_to_before_its_start_abstains_again() {
    with_scripts(|runner| {
        let start = start();
        abstains_until(runner, "a", start);
        assert_eq!(abstains_until(runner, "a", start + MAX_TTL), None);
        let set_back = start.saturating_sub(MICROSECOND);
        assert_eq!(abstains_until(runner, "a", set_back), Some(set_back + MAX_TTL));
    });
}

#[test]
fn votes_write_the_key_once_an_hour() {
    with_scripts(|runner| {
        let start = start();
        abstains_until(runner, "a", start);
        for after in [Duration::ZERO, MICROSECOND, HOUR] {
            assert!(!writes(runner, start + after), "{after:?} after the last time");
        }
        let later = start + HOUR + MICROSECOND;
        assert!(writes(runner, later));
        assert!(!writes(runner, later));
        // It was written later than now: the clock was set back, though not to before the start.
        assert!(writes(runner, later.saturating_sub(MICROSECOND)));
    });
}
