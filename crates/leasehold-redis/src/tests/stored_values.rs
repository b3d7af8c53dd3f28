//! What the scripts store and reply, byte by byte, where a reader would not notice a difference; and keys whose expiry has changed.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Holder, Kind, Name, Now, Release, Renew, Reply, Resource, StoreTime, View,
};
use leasehold_redis_protocol::{VIRTUAL_TIME, plain_value, resource_key};

use super::comparison::{ScriptRunner, start, with_scripts};
use super::{acquire_or_queue, client_id, release_of, share};

const TTL: Duration = Duration::from_secs(10);

const fn id(client: u128) -> Acquisition {
    Acquisition { client: client_id(client), sequence: 1 }
}

fn resource() -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() }
}

fn run(runner: &mut ScriptRunner<'_>, command: &Command, time: StoreTime) -> Reply {
    runner.run(&resource(), command, Now::same(time)).reply
}

fn renew(reserve: u32) -> Command {
    Command::Renew(Renew { reserve, ..Renew::to(id(0), TTL) })
}

fn view(runner: &mut ScriptRunner<'_>, time: StoreTime) -> View {
    match run(runner, &Command::Inspect, time) {
        Reply::View(view) => view,
        other => panic!("{other:?}"),
    }
}

fn expiry(runner: &mut ScriptRunner<'_>) -> i64 {
    redis::cmd("PEXPIRETIME").arg(resource_key(&resource())).query(runner.commands).unwrap()
}

fn persist(runner: &mut ScriptRunner<'_>) {
    redis::cmd("PERSIST").arg(resource_key(&resource())).exec(runner.commands).unwrap();
}

fn ms(time: StoreTime) -> i64 {
    i64::try_from(time.as_micros() / 1_000).unwrap()
}

/// A lock that is plain again, after other holders have left, is stored like one that its holder acquired alone, for the time from the
/// grant to the end.
#[test]
fn plain_value_of_the_rules_is_that_of_an_attempt() {
    for (capacity, weight) in [(1, 1), (2, 1), (4, 3)] {
        with_scripts(|runner| {
            let start = start();
            let renewed = start + Duration::from_secs(4);
            run(runner, &acquire_or_queue(0, 1, capacity, weight), start);
            run(runner, &acquire_or_queue(1, 1, capacity, capacity), start);
            run(runner, &release_of(id(1)), renewed);
            // In the first lines of the script the stored ttl would stay.
            run(runner, &renew(1), renewed);
            let Holder { token, .. } = view(runner, renewed).holders[0];
            let ttl = TTL + Duration::from_secs(4);
            let attempt = Acquire { capacity, weight, ..Acquire::exclusive(id(0), ttl) };
            let release = Release { as_granted: Some((Arc::new(attempt), token)), ..Release::now(id(0)) };
            let value: Vec<u8> =
                redis::cmd("GET").arg(resource_key(&resource())).query(runner.commands).unwrap();
            let expected = plain_value(&release).unwrap();
            // After it come the time of the grant and the reserved token.
            assert_eq!(value[..expected.len()], expected, "{capacity}, {weight}");
            assert_eq!(value[expected.len()], b' ');
        });
    }
}

/// Another program may have taken the expiry away. The time of the last renewal is unknown, so the lease gets its ttl from now on.
#[test]
fn plain_lease_without_an_expiry_gets_one() {
    for command in
        [Command::Inspect, acquire_or_queue(0, 1, 1, 1), Command::from(Acquire::exclusive(id(1), TTL))]
    {
        with_scripts(|runner| {
            let start = start();
            run(runner, &acquire_or_queue(0, 1, 1, 1), start);
            persist(runner);
            let later = start + Duration::from_secs(3_600);
            run(runner, &command, later);
            assert_eq!(expiry(runner), ms(later + Duration::from_secs(10)), "{command:?}");
            assert_eq!(view(runner, later).holders[0].expires_at, later + TTL);
        });
    }
}

#[test]
fn table_without_an_expiry_gets_one_when_something_ends() {
    with_scripts(|runner| {
        let start = start();
        for client in 0..2 {
            run(runner, &acquire_or_queue(client, 1, 1, 1), start);
        }
        let before = expiry(runner);
        persist(runner);
        run(runner, &acquire_or_queue(2, 1, 1, 1), start);
        assert_eq!(expiry(runner), -1);
        run(runner, &Command::Inspect, start + TTL);
        assert_eq!(expiry(runner), before);
    });
}

/// The server deletes a key after the millisecond in which it expires. In that millisecond the lease has ended.
#[test]
fn lease_has_ended_in_the_last_millisecond_of_its_key() {
    with_scripts(|runner| {
        let virtual_time = VIRTUAL_TIME.replace("expiry <= virtual_ms", "expiry < virtual_ms");
        assert_ne!(virtual_time, VIRTUAL_TIME);
        runner.load(&virtual_time);
        let start = start();
        let end = start + TTL;
        for attempt in
            [Command::from(Acquire::exclusive(id(1), TTL)), acquire_or_queue(1, 1, 1, 1), share(1, TTL)]
        {
            let Command::Acquire(acquire) = &attempt else { panic!() };
            run(runner, &acquire_or_queue(0, 1, acquire.capacity, 1), start);
            assert_eq!(expiry(runner), ms(end));
            let granted = run(runner, &attempt, end);
            assert!(matches!(granted, Reply::Granted(_)), "{granted:?}");
            let holders = view(runner, end).holders;
            assert_eq!(holders.iter().map(|holder| holder.acquisition).collect::<Vec<_>>(), [id(1)]);
            run(runner, &release_of(id(1)), end);
        }
    });
}

#[test]
fn free_lock_has_nothing() {
    with_scripts(|runner| {
        let free = View { capacity: 0, in_use: 0, last_token: None, holders: vec![], waiters: vec![] };
        assert_eq!(view(runner, start()), free);
    });
}

fn reply_of(runner: &mut ScriptRunner<'_>, command: &Command, time: StoreTime) -> Vec<redis::Value> {
    match runner.value_of(&resource(), command, Now::same(time)).unwrap() {
        redis::Value::Array(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Numbers without a meaning are zero, as the scripts document.
#[test]
fn numbers_that_mean_nothing_are_zero() {
    let numbers = |numbers: &[i64]| numbers.iter().copied().map(redis::Value::Int).collect::<Vec<_>>();
    with_scripts(|runner| {
        let time = start();
        let Command::Acquire(acquire) = share(0, TTL) else { panic!() };
        let replaces = Acquire { replaces: Some(9), ..(*acquire).clone() };
        assert_eq!(reply_of(runner, &Command::from(replaces), time)[1..], numbers(&[6, 4, 0]));
        run(runner, &acquire_or_queue(0, 1, 1, 1), time);
        run(runner, &acquire_or_queue(1, 1, 1, 1), time);
        let micros = i64::try_from(TTL.as_micros()).unwrap();
        assert_eq!(reply_of(runner, &renew(0), time)[1..], numbers(&[7, micros, 1, 0, 0]));
    });
}

/// In the first lines the reply is the number of keys, and not the time.
#[test]
fn first_lines_release_a_plain_lease() {
    with_scripts(|runner| {
        let time = start();
        run(runner, &acquire_or_queue(0, 1, 1, 1), time);
        let reply = runner.value_of(&resource(), &release_of(id(0)), Now::same(time)).unwrap();
        assert_eq!(reply, redis::Value::Int(1));
    });
}

/// A share that does not fit beside a plain lease is refused without a look at the key's expiry, but for the one of the rules.
#[test]
fn share_that_does_not_fit_asks_once_for_the_expiry() {
    with_scripts(|runner| {
        let time = start();
        run(runner, &acquire_or_queue(0, 1, 4, 3), time);
        let Command::Acquire(acquire) = share(1, TTL) else { panic!() };
        let heavy = Command::from(Acquire { weight: 2, ..(*acquire).clone() });
        redis::cmd("CONFIG").arg("RESETSTAT").exec(runner.commands).unwrap();
        assert_eq!(run(runner, &heavy, time), Reply::Busy);
        let info: String = redis::cmd("INFO").arg("commandstats").query(runner.commands).unwrap();
        // The clock of the test asks for that of each of the two keys.
        assert!(info.contains("cmdstat_pexpiretime:calls=3,"), "{info}");
    });
}
