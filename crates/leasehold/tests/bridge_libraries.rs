//! Bridges to the libraries whose lock is a key with a value: their keys, and what wakes their waiters.

use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Kind, Loss, Mutex};
use leasehold_testkit::{Server, unless_paused, until, until_some};
use redis::Value;

const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

async fn connect(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

fn mutex(client: &Client, foreign: &Foreign) -> Mutex {
    client.mutex("own").bridge(foreign.clone())
}

fn get(server: &Server, key: &str) -> Option<String> {
    server.query(&["GET", key]).unwrap()
}

fn count(server: &Server, keys: &[&str]) -> i64 {
    server.query(&[&["EXISTS"], keys].concat()).unwrap()
}

fn pttl(server: &Server, key: &str) -> i64 {
    server.query(&["PTTL", key]).unwrap()
}

/// As soon as the server answers.
async fn own_is_free(client: &Client) -> bool {
    until_some(async || client.inspect(Kind::Mutex, "own").await.ok()).await.holders.is_empty()
}

/// The text of a bridge, and the key of the library's lock.
const LIBRARIES: [(&str, &str); 11] = [
    ("set-nx-px:a:b", "a:b"),
    ("redis-py:jobs", "jobs"),
    ("redsync:jobs", "jobs"),
    ("node-redlock:jobs", "jobs"),
    ("rslock:jobs", "jobs"),
    ("bsm:jobs", "jobs"),
    ("pottery:jobs", "redlock:jobs"),
    ("dapr:billing:jobs", "lock||billing||jobs"),
    ("spring:registry:a:b", "registry:a:b"),
    ("python-redis-lock:jobs", "lock:jobs"),
    ("rueidislock:jobs", "rueidislock:0:jobs"),
];

#[tokio::test]
async fn lock_of_each_library_is_its_key_with_an_opaque_value() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_socket();
        let client = connect(&server).await;
        for (text, key) in LIBRARIES {
            let foreign: Foreign = text.parse().unwrap();
            assert_eq!(foreign.key(), key);
            assert_eq!(foreign.to_string().parse::<Foreign>().unwrap(), foreign);
            let guard = mutex(&client, &foreign).lock().await.unwrap();
            let value = get(&server, key).unwrap_or_else(|| panic!("{text}"));
            assert!(value.len() == 32 && value.bytes().all(|byte| byte.is_ascii_hexdigit()), "{value}");
            assert!((1..=3_000).contains(&pttl(&server, key)), "{text}");
            guard.release().await.unwrap();
            assert_eq!(get(&server, key), None, "{text}");
            // As the library takes it.
            let taken: Value = server.run(&["SET", key, "other", "NX", "PX", "60000"]);
            assert_eq!(taken, Value::Okay);
            assert!(mutex(&client, &foreign).try_lock().await.unwrap().is_none(), "{text}");
            assert_eq!(get(&server, key).as_deref(), Some("other"), "{text}");
            server.run(&["DEL", key]);
            let guard = mutex(&client, &foreign).ttl(LONG).lock().await.unwrap();
            until(async || pttl(&server, key) > 3_000).await;
            server.run(&["DEL", key]);
            let deleted = Instant::now();
            assert_eq!(guard.lost().await, Loss::Bridge, "{text}");
            assert!(deleted.elapsed() < SOON, "{text}");
            drop(guard);
            // Not FLUSHALL: the word of it may come late, and the next lease would be renewed at once.
            until(async || own_is_free(&client).await).await;
        }
    })
    .await;
}

#[test]
fn text_without_all_parts_is_explained() {
    for (text, why) in [
        ("dapr:jobs", "dapr:APP:NAME"),
        ("spring:jobs", "spring:REGISTRY:NAME"),
        ("redlock:jobs", "KEY@redis://HOST"),
        ("redlock:jobs@redis://a,redis://a", "votes twice"),
        ("redlock:jobs@redis-sentinel://a/service", "address of each server"),
        ("redis://user:secret@host", "a bridge is one of"),
    ] {
        let error = text.parse::<Foreign>().unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains(why), "{text}: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    for servers in ["redis://:secret@a:1,redis://b:2", "redis://:first,secret@a:1,redis://b:2"] {
        let foreign: Foreign = format!("redlock:jobs@{servers}").parse().unwrap();
        assert_eq!(foreign.to_string(), "redlock:jobs@redis://a:1,redis://b:2");
        assert!(!format!("{foreign:?}").contains("secret"), "{foreign:?}");
    }
}

#[test]
fn server_in_two_spellings_has_one_vote() {
    for again in ["redis://a:6379", "redis://a/0", "redis:a", "redis://me:secret@a?protocol=2"] {
        let error = Foreign::redlock(["redis://a", "redis://b", again], "jobs").unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("votes twice"), "{again}: {error}");
    }
    assert!(Foreign::redlock(["redis://a", "redis://a:6380", "redis://a/1"], "jobs").is_ok());
}

#[tokio::test]
async fn waiter_of_spring_integration_gets_the_key_as_its_message() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let mut admin = server.admin();
    let mut channel = admin.as_pubsub();
    channel.set_read_timeout(Some(SOON)).unwrap();
    channel.psubscribe("registry-channel:*").unwrap();
    let guard = mutex(&client, &Foreign::spring_integration("registry", "jobs")).lock().await.unwrap();
    guard.release().await.unwrap();
    let message = channel.get_message().unwrap();
    assert_eq!(message.get_channel_name(), "registry-channel:registry:jobs");
    assert_eq!(message.get_payload::<String>().unwrap(), "registry:jobs");
}

#[tokio::test]
async fn waiter_of_python_redis_lock_gets_an_element_of_its_list() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let foreign = Foreign::python_redis_lock("jobs");
    let guard = mutex(&client, &foreign).lock().await.unwrap();
    let mut admin = server.admin();
    let waiter = std::thread::spawn(move || {
        redis::cmd("BLPOP").arg("lock-signal:jobs").arg(10).query::<Vec<String>>(&mut admin).unwrap()
    });
    let is_blocked = async || {
        let clients: String = server.query(&["INFO", "clients"]).unwrap();
        clients.contains("blocked_clients:1")
    };
    until(is_blocked).await;
    guard.release().await.unwrap();
    assert_eq!(waiter.join().unwrap(), ["lock-signal:jobs", "1"]);
    // An element that no program takes stays for a second, and there is one of them.
    for _ in 0..3 {
        mutex(&client, &foreign).lock().await.unwrap().release().await.unwrap();
    }
    assert!(server.query::<i64>(&["LLEN", "lock-signal:jobs"]).unwrap() <= 1);
    assert!(pttl(&server, "lock-signal:jobs") <= 1_000);
}

/// The lock of one library, and the user's rights to what wakes its waiters.
#[tokio::test]
async fn lock_is_released_without_the_right_to_wake_the_waiters() {
    let server = Server::on_port();
    let rule = ["ACL", "SETUSER", "locks", "on", ">password", "+@all", "resetchannels", "&leasehold:*"];
    let keys = ["~leasehold:*", "~lock:*", "~registry:*"];
    assert_eq!(server.run(&[&rule[..], &keys].concat()), Value::Okay);
    let url = format!("redis://locks:password@127.0.0.1:{}", server.port());
    let client = Client::connect(&url).await.unwrap();
    for foreign in [Foreign::python_redis_lock("jobs"), Foreign::spring_integration("registry", "jobs")] {
        let guard = mutex(&client, &foreign).lock().await.unwrap();
        guard.release().await.unwrap();
        assert_eq!(get(&server, foreign.key()), None, "{foreign}");
    }
}

const RUEIDISLOCK: [&str; 3] = ["rueidislock:0:jobs", "rueidislock:1:jobs", "rueidislock:2:jobs"];

#[tokio::test]
async fn lock_of_rueidislock_needs_its_first_key_and_a_majority() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let mutex = mutex(&client, &Foreign::rueidislock("jobs")).ttl(LONG);
    // By the keys that another program has: whether the lock can be taken.
    for (others, is_free) in [
        (&RUEIDISLOCK[2..], true),
        (&RUEIDISLOCK[1..2], true),
        (&RUEIDISLOCK[..1], false),
        (&RUEIDISLOCK[1..], false),
    ] {
        for key in others {
            server.run(&["SET", key, "other", "PX", "60000"]);
        }
        let guard = mutex.try_lock().await.unwrap();
        assert_eq!(guard.is_some(), is_free, "{others:?}");
        let keys = if is_free { 3 } else { i64::try_from(others.len()).unwrap() };
        assert_eq!(count(&server, &RUEIDISLOCK), keys, "no key is taken in vain");
        if let Some(guard) = guard {
            guard.release().await.unwrap();
        }
        for key in others {
            assert_eq!(get(&server, key).as_deref(), Some("other"));
        }
        server.run(&[&["DEL"], &RUEIDISLOCK[..]].concat());
    }
    // By the keys that are deleted: whether the lock is lost.
    for (deleted, is_lost) in
        [(&RUEIDISLOCK[2..], false), (&RUEIDISLOCK[1..], true), (&RUEIDISLOCK[..1], true)]
    {
        let guard = mutex.lock().await.unwrap();
        until(async || pttl(&server, RUEIDISLOCK[0]) > 3_000).await;
        server.run(&[&["DEL"], deleted].concat());
        if is_lost {
            let changed = Instant::now();
            assert_eq!(guard.lost().await, Loss::Bridge, "{deleted:?}");
            assert!(changed.elapsed() < SOON, "{deleted:?}");
            drop(guard);
        } else {
            guard.renew().await.unwrap();
            assert!(guard.is_held());
            guard.release().await.unwrap();
        }
        until(async || count(&server, &RUEIDISLOCK) == 0 && own_is_free(&client).await).await;
    }
}

#[tokio::test]
async fn waiter_for_several_keys_is_woken_by_the_last_one() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        for key in RUEIDISLOCK {
            server.run(&["SET", key, "other", "PX", "60000"]);
        }
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &Foreign::rueidislock("jobs"));
            async move { mutex.lock().await.map(|guard| (guard, Instant::now())) }
        });
        let tracked = async || {
            let stats: String = server.query(&["INFO", "stats"]).unwrap();
            stats.contains("tracking_total_keys:3")
        };
        until(tracked).await;
        // The library deletes them one by one.
        server.run(&["DEL", RUEIDISLOCK[0]]);
        until(async || !own_is_free(&client).await).await;
        server.run(&["DEL", RUEIDISLOCK[2]]);
        let released = Instant::now();
        let (guard, granted) = waiter.await.unwrap().unwrap();
        fastest = fastest.min(granted.duration_since(released));
        guard.release().await.unwrap();
        server.run(&[&["DEL"], &RUEIDISLOCK[..]].concat());
    }
    assert!(fastest < Duration::from_millis(200), "{fastest:?}");
}
