//! Redisson's read-write lock and its fenced lock: the keys on the wire, readers of both sides together, and tokens that rise on both.
//!
//! The other program's commands are sent one by one here. `bench/tests/bridges.rs` runs the real one.

use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Guard, Kind, Loss, RwLock};
use leasehold_testkit::{Proxy, Server, unless_paused, until};

const KEY: &str = "prices";
const CHANNEL: &str = "redisson_rwlock:{prices}";
/// A thread of a Java program, and the key of its first acquisition as a reader.
const JAVA: &str = "7a79a1d0-961b-4a34-8777-c1a19aba6efa:28";
const JAVA_KEY: &str = "{prices}:7a79a1d0-961b-4a34-8777-c1a19aba6efa:28:rwlock_timeout:1";

const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

async fn connect(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

fn lock(client: &Client) -> RwLock {
    client.rw_lock("own").bridge(Foreign::redisson_read_write_lock(KEY))
}

/// The keys that are not leasehold's.
fn keys(server: &Server) -> Vec<String> {
    let mut keys: Vec<String> = server.query(&["KEYS", "*"]).unwrap();
    keys.retain(|key| !key.starts_with("leasehold:"));
    keys.sort();
    keys
}

fn fields(server: &Server) -> Vec<String> {
    let mut fields: Vec<String> = server.query(&["HKEYS", KEY]).unwrap();
    fields.sort();
    fields
}

fn pttl(server: &Server, key: &str) -> i64 {
    server.query(&["PTTL", key]).unwrap()
}

fn mode(server: &Server) -> Option<String> {
    server.query(&["HGET", KEY, "mode"]).unwrap()
}

/// A thread in Java becomes a reader, alone or beside others. The hash lasts for as long as the longest of them.
fn read_in_java(server: &Server, ttl_ms: i64) {
    let (ttl, longest) = (ttl_ms.to_string(), ttl_ms.max(pttl(server, KEY)).to_string());
    server.run(&["HSET", KEY, "mode", "read", JAVA, "1"]);
    server.run(&["SET", JAVA_KEY, "1", "PX", &ttl]);
    server.run(&["PEXPIRE", KEY, &longest]);
}

fn write_in_java(server: &Server) {
    server.run(&["HSET", KEY, "mode", "write", &format!("{JAVA}:write"), "1"]);
    server.run(&["PEXPIRE", KEY, "60000"]);
}

/// A lease of 3 s may have been renewed by then.
const RENEWAL: Duration = Duration::from_millis(900);

async fn until_renewed(guard: &Guard) {
    until(async || guard.remaining() > Duration::from_secs(3)).await;
}

async fn own_is_free(client: &Client) -> bool {
    client.inspect(Kind::ReadWrite, "own").await.is_ok_and(|view| view.holders.is_empty())
}

/// The server reports the next change of the key.
async fn until_tracked(server: &Server) {
    let tracked = async || {
        let stats: String = server.query(&["INFO", "stats"]).unwrap();
        stats.lines().any(|line| line.starts_with("tracking_total_keys:") && !line.ends_with(":0"))
    };
    until(tracked).await;
}

#[tokio::test]
async fn readers_and_writers_have_the_form_of_the_library() {
    let server = Server::on_socket();
    let (one, other) = (connect(&server).await, connect(&server).await);
    let mut admin = server.admin();
    let mut channel = admin.as_pubsub();
    channel.subscribe(CHANNEL).unwrap();
    channel.set_read_timeout(Some(SOON)).unwrap();
    let began = Instant::now();
    let first = lock(&one).read().await.unwrap();
    let field = fields(&server).pop().unwrap();
    let field = if field == "mode" { fields(&server).remove(0) } else { field };
    let (uuid, thread) = field.split_once(':').unwrap();
    assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    assert!(thread.parse::<i64>().is_ok());
    assert_eq!(mode(&server).as_deref(), Some("read"));
    assert_eq!(server.query::<i64>(&["HGET", KEY, &field]).unwrap(), 1);
    let own_key = format!("{{prices}}:{field}:rwlock_timeout:1");
    assert_eq!(keys(&server), [KEY, &own_key]);
    let is_new = |left: i64, began: Instant| (1..=3_000).contains(&left) || began.elapsed() > RENEWAL;
    assert!(is_new(pttl(&server, &own_key), began) && is_new(pttl(&server, KEY), began));
    until_renewed(&first).await;
    assert!(pttl(&server, &own_key) > 3_000 && pttl(&server, KEY) > 3_000);
    // A second reader of leasehold, in another client.
    let second = lock(&other).read().await.unwrap();
    assert_eq!((fields(&server).len(), keys(&server).len()), (3, 3));
    first.release().await.unwrap();
    assert_eq!((fields(&server).len(), keys(&server).len()), (2, 2));
    second.release().await.unwrap();
    assert_eq!(keys(&server), [""; 0]);
    // The last one wakes one waiter, and a writer wakes all.
    assert_eq!(channel.get_message().unwrap().get_payload::<String>().unwrap(), "0");
    let began = Instant::now();
    let writer = lock(&one).write().await.unwrap();
    assert_eq!(mode(&server).as_deref(), Some("write"));
    let [field, _] = &fields(&server)[..] else { panic!("{:?}", fields(&server)) };
    assert!(field.ends_with(":1:write"), "{field}");
    assert!(is_new(pttl(&server, KEY), began));
    until_renewed(&writer).await;
    writer.release().await.unwrap();
    assert_eq!(channel.get_message().unwrap().get_payload::<String>().unwrap(), "1");
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test]
async fn readers_of_both_sides_are_together_and_writers_exclude_them() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let lock = lock(&client);
    read_in_java(&server, 60_000);
    let reader = lock.try_read().await.unwrap().expect("beside the reader in Java");
    reader.release().await.unwrap();
    assert_eq!(fields(&server), [JAVA, "mode"], "the reader in Java still has it");
    assert!(lock.try_write().await.unwrap().is_none());
    assert!(own_is_free(&client).await);
    server.run(&["DEL", KEY, JAVA_KEY]);
    write_in_java(&server);
    assert!(lock.try_read().await.unwrap().is_none() && lock.try_write().await.unwrap().is_none());
    // A writer in Java that becomes a reader sends no message.
    let mut waits = Vec::new();
    for _ in 0..5 {
        let waiter = tokio::spawn({
            let lock = lock.clone();
            async move { lock.read().await.map(|guard| (guard, Instant::now())) }
        });
        until_tracked(&server).await;
        let changed = Instant::now();
        server.run(&["SET", JAVA_KEY, "1", "PX", "60000"]);
        server.run(&["HSET", KEY, "mode", "read", JAVA, "1"]);
        server.run(&["HDEL", KEY, &format!("{JAVA}:write")]);
        let (guard, granted) = waiter.await.unwrap().unwrap();
        waits.push(granted.duration_since(changed));
        guard.release().await.unwrap();
        server.run(&["DEL", KEY, JAVA_KEY]);
        write_in_java(&server);
    }
    waits.sort_unstable();
    assert!(waits[2] < Duration::from_millis(300), "it is told, and does not poll: {waits:?}");
    // A lock of another kind is not entered.
    server.run(&["DEL", KEY, JAVA_KEY]);
    server.run(&["HSET", KEY, JAVA, "1"]);
    assert!(lock.try_read().await.unwrap().is_none() && lock.try_write().await.unwrap().is_none());
}

#[tokio::test]
async fn released_lock_lasts_for_as_long_as_the_longest_of_its_readers() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let ours = lock(&client).ttl(LONG).read().await.unwrap();
    until(async || pttl(&server, KEY) > 20_000).await;
    read_in_java(&server, 10_000);
    ours.release().await.unwrap();
    assert!((5_000..=10_000).contains(&pttl(&server, KEY)), "{}", pttl(&server, KEY));
    assert_eq!(keys(&server), [KEY, JAVA_KEY]);
    // Its third acquisition is the longest.
    server.run(&["HSET", KEY, JAVA, "3"]);
    server.run(&["SET", &JAVA_KEY.replace("timeout:1", "timeout:3"), "1", "PX", "20000"]);
    lock(&client).read().await.unwrap().release().await.unwrap();
    assert!((15_000..=20_000).contains(&pttl(&server, KEY)), "{}", pttl(&server, KEY));
    // A reader that has crashed leaves its field, and its keys expire.
    server.run(&["PEXPIRE", KEY, "60000"]);
    let ours = lock(&client).read().await.unwrap();
    server.run(&["DEL", JAVA_KEY, &JAVA_KEY.replace("timeout:1", "timeout:3")]);
    let mut admin = server.admin();
    let mut channel = admin.as_pubsub();
    channel.subscribe(CHANNEL).unwrap();
    channel.set_read_timeout(Some(SOON)).unwrap();
    ours.release().await.unwrap();
    assert_eq!(keys(&server), [""; 0]);
    assert_eq!(channel.get_message().unwrap().get_payload::<String>().unwrap(), "0");
}

#[tokio::test]
async fn renewal_of_a_reader_leaves_the_time_of_the_others() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    read_in_java(&server, 60_000);
    let ours = lock(&client).read().await.unwrap();
    until_renewed(&ours).await;
    ours.renew().await.unwrap();
    assert!(pttl(&server, KEY) > 50_000, "the reader in Java has more time");
    assert!(pttl(&server, JAVA_KEY) > 50_000);
    assert_eq!(server.query::<i64>(&["HGET", KEY, JAVA]).unwrap(), 1);
    // A watchdog in Java has less time, and sets the whole lock's.
    server.run(&["PEXPIRE", KEY, "5000"]);
    ours.renew().await.unwrap();
    assert!((5_001..=10_000).contains(&pttl(&server, KEY)));
    ours.release().await.unwrap();
    server.run(&["DEL", KEY, JAVA_KEY]);
    // So no reader relies on more than such a watchdog's 30 s.
    let ours = lock(&client).ttl(LONG).read().await.unwrap();
    until_renewed(&ours).await;
    assert!(ours.remaining() <= Duration::from_secs(30));
    assert!(pttl(&server, KEY) <= 30_000);
}

/// A command whose answer was lost may arrive twice, and late.
#[test]
fn late_commands_of_a_reader_neither_shorten_nor_double_anything() {
    let server = Server::on_socket();
    let own_key = "{prices}:uuid:1:rwlock_timeout:1";
    let call = |script: &str, arguments: &[&str]| -> i64 {
        server.query(&[&["EVAL", script, "2", KEY, own_key], arguments].concat()).unwrap()
    };
    let take = |ttl_ms| call(include_str!("../src/bridge/scripts/take_hash_shared.lua"), &["uuid:1", ttl_ms]);
    let renew =
        |ttl_ms| call(include_str!("../src/bridge/scripts/renew_hash_shared.lua"), &["uuid:1", ttl_ms]);
    let release = || {
        let script = include_str!("../src/bridge/scripts/release_hash_shared.lua");
        call(script, &["uuid:1", CHANNEL, "0", "{prices}"])
    };
    assert_eq!(take("3000"), 1);
    assert!((1..=3_000).contains(&pttl(&server, KEY)) && (1..=3_000).contains(&pttl(&server, own_key)));
    assert_eq!(renew("30000"), 1);
    assert_eq!(take("3000"), 1);
    assert!(pttl(&server, KEY) > 3_000 && pttl(&server, own_key) > 3_000);
    assert_eq!(server.query::<i64>(&["HGET", KEY, "uuid:1"]).unwrap(), 1);
    // A watchdog in Java that lets the lock expire sooner is told apart.
    server.run(&["PEXPIRE", KEY, "2000"]);
    assert_eq!((renew("30000"), renew("30000")), (2, 1));
    read_in_java(&server, 60_000);
    assert_eq!((release(), release()), (1, 0));
    assert_eq!((fields(&server), pttl(&server, own_key)), (vec![JAVA.to_owned(), "mode".to_owned()], -2));
    assert_eq!(renew("90000"), 0);
    assert!(pttl(&server, KEY) <= 60_000);
    // Beside a writer, too.
    server.run(&["DEL", KEY, JAVA_KEY]);
    write_in_java(&server);
    assert_eq!((take("3000"), renew("90000"), release()), (0, 0, 0));
    assert_eq!(keys(&server), [KEY]);
    assert!(pttl(&server, KEY) <= 60_000);
}

/// Readers that looked at each change of the key, and changed it, would keep each other busy.
#[tokio::test]
async fn readers_do_not_look_at_the_changes_of_each_other() {
    let server = Server::on_socket();
    let clients = [connect(&server).await, connect(&server).await, connect(&server).await];
    let mut guards = Vec::new();
    for client in &clients {
        guards.push(lock(client).ttl(LONG).read().await.unwrap());
    }
    for guard in &guards {
        until_renewed(guard).await;
    }
    server.run(&["CONFIG", "RESETSTAT"]);
    for _ in 0..20 {
        read_in_java(&server, 60_000);
        for guard in &guards {
            guard.renew().await.unwrap();
        }
    }
    let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
    let looks = stats.lines().find_map(|line| line.strip_prefix("cmdstat_hexists:calls="));
    let looks: u32 = looks.unwrap().split(',').next().unwrap().parse().unwrap();
    assert_eq!(looks, 60, "one for each renewal");
}

#[tokio::test]
async fn reader_and_writer_are_lost_with_the_foreign_lock() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let ttl = Duration::from_secs(6);
    let reader = lock(&client).ttl(ttl).read().await.unwrap();
    until_renewed(&reader).await;
    server.run(&["DEL", KEY]);
    write_in_java(&server);
    let deleted = Instant::now();
    assert_eq!(reader.lost().await, Loss::Bridge);
    assert!(deleted.elapsed() < ttl, "by the next renewal");
    assert!(reader.release().await.unwrap_err().is_lost());
    until(async || keys(&server) == [KEY] && own_is_free(&client).await).await;
    assert_eq!(mode(&server).as_deref(), Some("write"), "the lock of its successor is left alone");
    server.run(&["DEL", KEY]);
    let writer = lock(&client).ttl(LONG).write().await.unwrap();
    until_renewed(&writer).await;
    server.run(&["DEL", KEY]);
    let deleted = Instant::now();
    assert_eq!(writer.lost().await, Loss::Bridge);
    assert!(deleted.elapsed() < SOON, "at once");
    drop(writer);
    until(async || own_is_free(&client).await).await;
    server.run(&["SET", KEY, "a value"]);
    for error in [lock(&client).read().await.unwrap_err(), lock(&client).try_write().await.unwrap_err()] {
        assert!(error.is_invalid() && error.to_string().contains("bridged to redisson-rw:prices"), "{error}");
    }
}

#[tokio::test]
async fn cut_between_the_legs_of_readers_and_writers_leaves_one_holder_and_nothing_behind() {
    let server = Server::on_port();
    let observer = connect(&server).await;
    for is_reader in [true, false] {
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        write_in_java(&server);
        let waiter = tokio::spawn({
            let lock = lock(&client);
            async move { if is_reader { lock.read().await } else { lock.write().await.map(Guard::from) } }
        });
        until(async || !own_is_free(&observer).await).await;
        proxy.cut();
        assert_eq!(keys(&server), [KEY]);
        server.run(&["DEL", KEY]);
        let guard = tokio::time::timeout(SOON, waiter).await.expect("reconnects").unwrap().unwrap();
        assert!(guard.is_held() && fields(&server).len() == 2);
        // While it is held, too, and while it is released.
        proxy.cut();
        guard.renew().await.unwrap();
        proxy.hold_replies(true);
        let released = tokio::spawn(guard.release());
        until(async || keys(&server).is_empty()).await;
        proxy.cut();
        proxy.hold_replies(false);
        proxy.release_held();
        let released = released.await.unwrap();
        assert!(released.as_ref().err().is_none_or(|error| !error.is_lost()), "{released:?}");
        until(async || own_is_free(&observer).await).await;
        assert_eq!(keys(&server), [""; 0]);
    }
}

#[tokio::test]
async fn reader_whose_answer_is_lost_leaves_no_orphan() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        write_in_java(&server);
        let waiter = tokio::spawn({
            let lock = lock(&client);
            async move { lock.read().await }
        });
        until_tracked(&server).await;
        // The invalidation is held too: the attempt tries again within 1 s.
        let release = || drop(server.run(&["DEL", KEY]));
        proxy.hold_replies_from(release, || write_in_java(&server), || keys(&server).len() == 2).await;
        waiter.abort();
        proxy.cut();
        proxy.hold_replies(false);
        proxy.release_held();
        // Sooner than it expires.
        let began = Instant::now();
        until(async || keys(&server).is_empty()).await;
        assert!(began.elapsed() < Duration::from_secs(2));
        until(async || own_is_free(&client).await).await;
    })
    .await;
}

#[tokio::test]
async fn kinds_that_do_not_fit_are_refused() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let mutex = client.mutex("own").bridge(Foreign::redisson_read_write_lock(KEY));
    let plain = client.rw_lock("own").bridge(Foreign::redisson_lock(KEY));
    let errors = [
        mutex.lock().await.unwrap_err(),
        plain.read().await.unwrap_err(),
        plain.write().await.unwrap_err(),
        lock(&client).upgradable_read().await.unwrap_err(),
        lock(&client).write().await.unwrap().downgrade().await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_invalid(), "{error}");
    }
    until(async || own_is_free(&client).await).await;
    assert_eq!(keys(&server), [""; 0]);
    for text in ["redisson-rw:prices", "redisson-fenced:{a}:b"] {
        assert_eq!(text.parse::<Foreign>().unwrap().to_string(), text);
    }
    for (text, why) in [
        ("redisson-semaphore:jobs", "no lease"),
        ("redisson-permit-expirable-semaphore:jobs", "clocks"),
        ("redisson-fair:jobs", "clocks"),
    ] {
        let error = text.parse::<Foreign>().unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains(why), "{error}");
    }
}

// --- RFencedLock ---------------------------------------------------------------------------------

const COUNTER: &str = "redisson_lock_token:{prices}";

fn fenced(client: &Client) -> leasehold::Mutex {
    client.mutex("own").bridge(Foreign::redisson_fenced_lock(KEY))
}

fn counter(server: &Server) -> u64 {
    server.query(&["GET", COUNTER]).unwrap()
}

#[tokio::test]
async fn tokens_of_a_fenced_lock_rise_on_both_sides() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let in_java = || {
        server.run(&["HSET", KEY, JAVA, "1"]);
        let token: u64 = server.query(&["INCR", COUNTER]).unwrap();
        server.run(&["DEL", KEY]);
        token
    };
    let mut last = in_java();
    assert_eq!(last, 1);
    for _ in 0..3 {
        let guard = fenced(&client).lock().await.unwrap();
        let own = client.inspect(Kind::Mutex, "own").await.unwrap().holders[0].token;
        let token = guard.token().get();
        assert!(token > last && token >= own.get());
        assert_eq!(counter(&server), token);
        until_renewed(&guard).await;
        guard.renew().await.unwrap();
        assert_eq!((guard.token().get(), counter(&server)), (token, token), "a renewal changes no token");
        guard.release().await.unwrap();
        last = in_java();
        assert_eq!(last, token + 1);
    }
    // The programs that have only leasehold continue with higher tokens.
    assert!(client.mutex("own").lock().await.unwrap().token().get() > last);
    // A counter that is ahead of the server's clock.
    let ahead = (1_u64 << 52) + 5;
    server.run(&["SET", COUNTER, &ahead.to_string(), "EX", "1000"]);
    let guard = fenced(&client).lock().await.unwrap();
    assert_eq!(guard.token().get(), ahead + 1);
    assert!(pttl(&server, COUNTER) > 0, "its expiry is kept");
}

#[test]
fn late_take_of_a_fenced_lock_gets_the_same_token() {
    let server = Server::on_socket();
    let take = |holder: &str, least: &str| -> i64 {
        let script = include_str!("../src/bridge/scripts/take_hash_token.lua");
        server.query(&["EVAL", script, "2", KEY, COUNTER, holder, "3000", least]).unwrap()
    };
    assert_eq!(take("uuid:1", "700"), 700);
    server.run(&["PEXPIRE", KEY, "30000"]);
    assert_eq!(take("uuid:1", "700"), 700);
    assert!(pttl(&server, KEY) > 3_000, "it is not shortened");
    assert_eq!(take("uuid:2", "800"), 0);
    server.run(&["DEL", KEY]);
    assert_eq!(take("uuid:2", "600"), 701);
    assert_eq!(counter(&server), 701);
}

#[tokio::test]
async fn fenced_lock_that_was_taken_by_a_command_without_an_answer_has_its_token() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    server.run(&["SET", COUNTER, &(1_u64 << 52).to_string()]);
    let take = || {
        server.run(&["HSET", KEY, JAVA, "1"]);
        server.run(&["PEXPIRE", KEY, "60000"]);
    };
    take();
    let waiter = tokio::spawn({
        let mutex = fenced(&client);
        async move { mutex.lock().await }
    });
    until_tracked(&server).await;
    let release = || drop(server.run(&["DEL", KEY]));
    proxy.hold_replies_from(release, take, || counter(&server) > 1 << 52).await;
    proxy.cut();
    proxy.hold_replies(false);
    // A new connection may have been opened in between.
    proxy.release_held();
    let guard = tokio::time::timeout(SOON, waiter).await.expect("tries again").unwrap().unwrap();
    assert_eq!(guard.token().get(), counter(&server));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn counter_that_is_none_is_an_error_and_nothing_is_held() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for value in ["another program's text", "9007199254740991"] {
        server.run(&["SET", COUNTER, value]);
        assert!(fenced(&client).lock().await.is_err());
        until(async || client.inspect(Kind::Mutex, "own").await.unwrap().holders.is_empty()).await;
        assert_eq!(keys(&server), [COUNTER]);
    }
}
