//! The keys of a lock: their forms, values of other programs in them, and the clock of tokens.

use std::time::{Duration, Instant};

use leasehold::{Client, Kind, Mutex, MutexSet};
use leasehold_testkit::{Proxy, Server, until};
use tokio::time::timeout;

use super::{SOON, client_of, until_waiting};

const KEY: &str = "leasehold:4:{mutex:a}";
const CLOCK: &str = "leasehold:4:clock";

fn key_type(server: &Server) -> String {
    server.query(&["TYPE", KEY]).unwrap()
}

fn keys(server: &Server) -> Vec<String> {
    let mut keys: Vec<String> = server.query(&["KEYS", "*"]).unwrap();
    keys.sort_unstable();
    keys
}

/// Moves the clock of tokens to this id.
fn set_clock(server: &Server, id: &str) {
    server.run(&["XADD", CLOCK, "MAXLEN", "0", id, "t", ""]);
}

/// The server's time in milliseconds.
fn time_ms(server: &Server) -> u64 {
    let (seconds, micros): (u64, u64) = server.query(&["TIME"]).unwrap();
    seconds * 1_000 + micros / 1_000
}

async fn token(mutex: &Mutex) -> u64 {
    let guard = timeout(SOON, mutex.lock()).await.unwrap().unwrap();
    let token = guard.token().get();
    guard.release().await.unwrap();
    token
}

#[tokio::test]
async fn released_locks_leave_only_the_clock_and_the_client() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let sixty_four = client.semaphore("s", 64);
    for _ in 0..3 {
        token(&client.mutex("a")).await;
        let permits = [sixty_four.acquire(2).await.unwrap(), sixty_four.acquire(3).await.unwrap()];
        for permit in permits {
            permit.release().await.unwrap();
        }
        client.reentrant_mutex("r", "me").lock().await.unwrap().release().await.unwrap();
        client.rw_lock("w").read().await.unwrap().release().await.unwrap();
    }
    let is_left = |keys: &[String]| {
        let [client, clock, layout] = keys else { return false };
        client.starts_with("leasehold:4:client:{") && clock == CLOCK && layout == "leasehold:layout"
    };
    until(async || is_left(&keys(&server))).await;
}

#[tokio::test]
async fn key_has_the_form_of_what_it_holds() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mutex = client.mutex("a").global_fifo();
    assert_eq!(key_type(&server), "none");
    let guard = mutex.lock().await.unwrap();
    assert_eq!(key_type(&server), "string");
    let gives_up = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until_waiting(&client, 1).await;
    assert_eq!(key_type(&server), "hash");
    gives_up.abort();
    until(async || key_type(&server) == "string").await;
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await.unwrap() }
    });
    until_waiting(&client, 1).await;
    guard.release().await.unwrap();
    let guard = timeout(SOON, waiting).await.unwrap().unwrap();
    // A claimed lease alone is plain again.
    guard.renew().await.unwrap();
    assert_eq!(key_type(&server), "string");
    guard.release().await.unwrap();
    assert_eq!(key_type(&server), "none");
    let held = client.mutex("a").min_hold(Duration::from_secs(600)).lock().await.unwrap();
    held.release().await.unwrap();
    assert_eq!(key_type(&server), "hash", "a retained lease is no plain one");
    client.mutex("a").force_release().await.unwrap();
    assert_eq!(key_type(&server), "none");
}

#[tokio::test]
async fn value_of_another_program_keeps_locks_out_and_is_left_alone() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mutex = client.mutex("a");
    server.run(&["SET", KEY, "mine"]);
    assert!(mutex.try_lock().await.unwrap().is_none());
    let info = mutex.inspect().await.unwrap();
    assert!(info.foreign.is_some_and(|foreign| foreign.expires_in.is_none()), "{info:?}");
    let listed = client.list().await.unwrap();
    assert!(listed.iter().any(|info| info.name == "a" && info.foreign.is_some()), "{listed:?}");
    let error = mutex.force_release().await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("another program"), "{error}");
    assert!(mutex.lock_timeout(Duration::from_millis(100)).await.unwrap().is_none());
    assert_eq!(server.query::<String>(&["GET", KEY]).unwrap(), "mine");
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { token(&mutex).await }
    });
    server.run(&["SET", KEY, "mine", "XX", "PX", "400"]);
    let info = client.inspect(Kind::Mutex, "a").await.unwrap();
    assert!(info.foreign.is_none_or(|foreign| foreign.expires_in.is_some()), "{info:?}");
    timeout(SOON, waiting).await.unwrap().unwrap();
    // Also after a plain DEL, which no push reports.
    server.run(&["SET", KEY, "mine"]);
    let waiting = tokio::spawn(async move { token(&mutex).await });
    server.run(&["DEL", KEY]);
    timeout(SOON, waiting).await.unwrap().unwrap();
}

/// An attempt whose answer was lost may still arrive, so its release is repeated until its tombstone finds a place.
#[tokio::test]
async fn tombstone_finds_its_place_once_another_programs_value_is_gone() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    server.run(&["SET", KEY, "mine"]);
    server.run(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
    proxy.drop_replies(true);
    let mutex = client.mutex("a");
    let attempt = tokio::spawn(async move { mutex.try_lock().await });
    // A script of the lock: a new connection runs others.
    let has_arrived = || {
        let commands: Vec<redis::Value> = server.query(&["SLOWLOG", "GET", "-1"]).unwrap();
        let mut commands = commands.iter().map(|command| format!("{command:?}").to_lowercase());
        commands.any(|command| command.contains("evalsha") && command.contains(KEY))
    };
    until(async || has_arrived()).await;
    attempt.abort();
    server.run(&["SLOWLOG", "RESET"]);
    proxy.drop_replies(false);
    proxy.cut();
    until(async || has_arrived()).await;
    assert_eq!(server.query::<String>(&["GET", KEY]).unwrap(), "mine");
    server.run(&["DEL", KEY]);
    until(async || key_type(&server) == "hash").await;
}

/// Its rows have expiries of their own. When one of them has passed, the key gets its expiry again.
#[tokio::test]
async fn contended_key_that_lost_its_expiry_gets_it_again() {
    const KEY: &str = "leasehold:4:{semaphore:s}";
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let semaphore = client.semaphore("s", 3);
    let permits = [semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap()];
    let short = semaphore.clone().ttl(Duration::from_secs(1)).auto_renew(false);
    let expiring = short.acquire(1).await.unwrap();
    server.run(&["PERSIST", KEY]);
    assert_eq!(server.query::<i64>(&["PTTL", KEY]), Ok(-1));
    timeout(SOON, expiring.lost()).await.unwrap();
    until(async || {
        let seen = client.inspect(Kind::Semaphore, "s").await.is_ok();
        seen && server.query::<i64>(&["PTTL", KEY]).is_ok_and(|left| left > 0)
    })
    .await;
    drop(permits);
}

#[tokio::test]
async fn tokens_rise_after_the_clock_is_deleted() {
    let server = Server::on_socket();
    let mutex = client_of(&server).await.mutex("a");
    let mut last = 0;
    for _ in 0..20 {
        let next = token(&mutex).await;
        assert!(next > last);
        last = next;
        server.run(&["DEL", CLOCK]);
        // Within one millisecond the same id may come again.
        until(async || time_ms(&server) > last / 2_048).await;
    }
    // Those of layout 2 were microseconds.
    assert!(last > 1_000 * time_ms(&server));
}

#[tokio::test]
async fn tokens_rise_over_the_end_of_a_millisecond() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    // As if the server's clock had been set back by an hour.
    let ahead = time_ms(&server) + 3_600_000;
    for start in [990, 2_040] {
        set_clock(&server, &format!("{}-{start}", ahead + start));
        let mut last = (ahead + start) * 2_048 + start;
        for _ in 0..20 {
            let next = token(&client.mutex("a")).await;
            assert_eq!(next, last + 1);
            last = next;
        }
    }
}

/// Every way to a grant, of locks that the server knows from before and of new ones: the clock is an hour ahead, and the keys of the locks are
/// deleted, so that nothing else remembers a token.
#[tokio::test]
async fn tokens_of_every_kind_rise_while_the_servers_clock_is_behind() {
    let server = Server::on_socket();
    let (client, other) = (client_of(&server).await, client_of(&server).await);
    let ahead = time_ms(&server) + 3_600_000;
    set_clock(&server, &format!("{ahead}-0"));
    let mut last = ahead * 2_048;
    for _ in 0..3 {
        for tokens in [
            one_after_the_other(&client).await,
            handed_over(&client, &other).await,
            of_a_set(&client).await,
            of_calls_that_go_together(&client).await,
        ] {
            for token in tokens {
                assert!(token > last, "{token} after {last}");
                last = token;
            }
        }
        server.run(&[
            "EVAL",
            "for _, key in ipairs(redis.call('KEYS', 'leasehold:4:{*')) do redis.call('DEL', key) end",
            "0",
        ]);
    }
    assert!(last / 2_048 < ahead + 10, "the clock ran away");
}

/// Of each kind that waits in a queue of its own.
async fn one_after_the_other(client: &Client) -> Vec<u64> {
    let (semaphore, lock) = (client.semaphore("s", 3), client.rw_lock("w"));
    let held = [
        client.mutex("a").lock().await.unwrap(),
        semaphore.acquire(1).await.unwrap(),
        semaphore.acquire(2).await.unwrap(),
        lock.read().await.unwrap(),
        lock.read().await.unwrap(),
        client.reentrant_mutex("r", "me").lock().await.unwrap(),
        client.election("e").campaign().await.unwrap(),
    ];
    let tokens = held.each_ref().map(|guard| guard.token().get());
    for guard in held {
        guard.release().await.unwrap();
    }
    tokens.to_vec()
}

/// The release grants the lock to the waiter.
async fn handed_over(client: &Client, other: &Client) -> Vec<u64> {
    let guard = client.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = other.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    until_waiting(client, 1).await;
    let first = guard.token().get();
    guard.release().await.unwrap();
    let guard = timeout(SOON, waiting).await.unwrap().unwrap();
    let second = guard.token().get();
    guard.release().await.unwrap();
    vec![first, second]
}

/// In one command.
async fn of_a_set(client: &Client) -> Vec<u64> {
    let set = MutexSet::new(["b", "c", "d"].map(|name| client.mutex(name)));
    let guard = timeout(SOON, set.lock()).await.unwrap().unwrap();
    let tokens = guard.guards().iter().map(|guard| guard.token().get()).collect();
    guard.release().await.unwrap();
    tokens
}

/// Of tasks that run at the same time, whose commands are one call. Their order is not known.
async fn of_calls_that_go_together(client: &Client) -> Vec<u64> {
    let tasks: Vec<_> = (0..8)
        .map(|number| {
            let mutex = client.mutex(format!("t{number}"));
            tokio::spawn(async move { token(&mutex).await })
        })
        .collect();
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.push(timeout(SOON, task).await.unwrap().unwrap());
    }
    tokens.sort_unstable();
    tokens
}

/// The server forgets keys that were not used for long, also the clock.
#[tokio::test]
async fn tokens_rise_after_the_clock_is_evicted() {
    let server = Server::builder()
        .setting("maxmemory-policy", "allkeys-lru")
        .setting("maxmemory-samples", "64")
        .on_socket()
        .start();
    let client = client_of(&server).await;
    let memory: String = server.query(&["INFO", "memory"]).unwrap();
    let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    let used: u64 = used.parse().unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", &(used + 4_000_000).to_string()]);
    let mut last = token(&client.mutex("a")).await;
    for round in 0..3 {
        let fill = "for i = 1, 1000 do redis.call('SET', ARGV[1] .. ':' .. i, string.rep('x', 2000)) end";
        let mut filled = 0;
        until(async || {
            filled += 1;
            server.run(&["EVAL", fill, "0", &format!("other:{round}:{filled}")]);
            server.query::<u64>(&["EXISTS", CLOCK]) == Ok(0)
        })
        .await;
        // Within one millisecond the same id may come again.
        until(async || time_ms(&server) > last / 2_048).await;
        for mutex in [client.mutex("a"), client.mutex("a").global_fifo(), client.mutex("new")] {
            let next = token(&mutex).await;
            assert!(next > last, "{next} after {last}");
            last = next;
        }
    }
}

#[tokio::test]
async fn clock_of_another_age_is_an_error_that_names_it() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    set_clock(&server, "5000000000000-0");
    for mutex in [client.mutex("a"), client.mutex("a").global_fifo()] {
        let error = mutex.try_lock().await.unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains(CLOCK), "{error}");
    }
    assert!(client.mutex("a").inspect().await.unwrap().holders.is_empty());
    server.run(&["DEL", CLOCK]);
    server.run(&["SET", CLOCK, "mine"]);
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
    server.run(&["DEL", CLOCK]);
    token(&client.mutex("a")).await;
}

#[tokio::test]
async fn layout_2_is_refused() {
    let server = Server::on_socket();
    server.run(&["SET", "leasehold:layout", "2"]);
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("layout"), "{error}");
}

/// What a command has removed is booked although the clock then refused the token of the next lease.
#[tokio::test]
async fn queue_survives_a_clock_that_gives_no_token() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mutex = client.mutex("a").global_fifo();
    let guard = mutex.lock().await.unwrap();
    let waiters: Vec<_> = (0..2)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { token(&mutex).await })
        })
        .collect();
    until_waiting(&client, 2).await;
    set_clock(&server, "5000000000000-0");
    guard.release().await.unwrap();
    let info = mutex.inspect().await.unwrap();
    assert_eq!((info.holders.len(), info.waiters.len()), (0, 2), "{info:?}");
    server.run(&["DEL", CLOCK]);
    // Any command moves the queue.
    mutex.inspect().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter).await.unwrap().unwrap();
    }
    until(async || key_type(&server) == "none").await;
}

#[tokio::test]
async fn renewed_lease_whose_key_lost_its_expiry_is_held_and_expires() {
    const TTL: Duration = Duration::from_secs(8);
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mutex = client.mutex("a").ttl(TTL).auto_renew(false);
    let guard = mutex.lock().await.unwrap();
    let begun = Instant::now();
    // Longer than the ttl since the grant.
    until(async || {
        guard.renew().await.unwrap();
        begun.elapsed() > TTL + Duration::from_millis(200)
    })
    .await;
    server.run(&["PERSIST", KEY]);
    assert!(client_of(&server).await.mutex("a").try_lock().await.unwrap().is_none());
    let left: i64 = server.query(&["PTTL", KEY]).unwrap();
    assert!((1..=8_001).contains(&left), "the key has its expiry again: {left}");
    guard.renew().await.unwrap();
    drop(guard);
}

#[tokio::test]
async fn values_that_only_look_like_a_lock_are_those_of_another_program() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    server.run(&["SET", KEY, "job leasehold:4@1-1"]);
    assert!(client.mutex("a").try_lock().await.unwrap().is_none());
    assert!(client.mutex("a").inspect().await.unwrap().foreign.is_some());
    server.run(&["DEL", KEY]);
    server.run(&["HSET", KEY, "h", "hello"]);
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program"), "{error}");
}

#[tokio::test]
async fn exchange_of_a_lease_that_another_program_has_overwritten_is_a_loss() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let lock = client.rw_lock("a").ttl(Duration::from_secs(60));
    let overwrite = || {
        let key = keys(&server).into_iter().find(|key| key.ends_with(":a}")).expect("the lock's key");
        server.run(&["SET", &key, "mine"]);
        key
    };
    let writer = lock.write().await.unwrap();
    let key = overwrite();
    let mut errors = vec![timeout(SOON, writer.downgrade()).await.expect("an answer").err()];
    server.run(&["DEL", &key]);
    let reader = lock.upgradable_read().await.unwrap();
    overwrite();
    errors.push(timeout(SOON, reader.try_upgrade()).await.expect("an answer").err());
    server.run(&["DEL", &key]);
    let reader = lock.upgradable_read().await.unwrap();
    overwrite();
    errors.push(timeout(SOON, reader.upgrade()).await.expect("an answer").err());
    assert!(errors.iter().all(|error| error.as_ref().is_some_and(leasehold::Error::is_lost)), "{errors:?}");
}
