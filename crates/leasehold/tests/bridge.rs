//! Locks that are shared with other libraries: the keys on the wire, the loss of a leg, and what is left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Kind, Loss, Mutex, MutexSet};
use leasehold_testkit::{Proxy, Server, unless_paused, until, until_some};
use redis::Value;

const KEY: &str = "jobs";

/// A ttl, and a time in which a lock with it neither expires nor is renewed again.
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

fn both() -> [Foreign; 2] {
    [Foreign::set_nx_px(KEY), Foreign::redisson_lock(KEY)]
}

async fn connect(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

fn mutex(client: &Client, foreign: &Foreign) -> Mutex {
    client.mutex("own").bridge(foreign.clone())
}

fn exists(server: &Server) -> bool {
    server.query::<i64>(&["EXISTS", KEY]).unwrap() == 1
}

fn pttl(server: &Server) -> i64 {
    server.query(&["PTTL", KEY]).unwrap()
}

/// Takes the lock as another program would that uses the same library, and leaves it for this long.
fn take_as_other(server: &Server, foreign: &Foreign, ttl_ms: &str) {
    if foreign.to_string().starts_with("redisson") {
        server.run(&["HSET", KEY, "7a79a1d0-961b-4a34-8777-c1a19aba6efa:28", "1"]);
        server.run(&["PEXPIRE", KEY, ttl_ms]);
    } else {
        let taken: Value = server.run(&["SET", KEY, "other", "NX", "PX", ttl_ms]);
        assert_eq!(taken, Value::Okay);
    }
}

/// As soon as the server answers.
async fn own_is_free(client: &Client) -> bool {
    until_some(async || client.inspect(Kind::Mutex, "own").await.ok()).await.holders.is_empty()
}

#[tokio::test]
async fn foreign_lock_is_held_as_long_as_the_guard() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_socket();
        let client = connect(&server).await;
        for foreign in both() {
            let guard = mutex(&client, &foreign).lock().await.unwrap();
            assert!(exists(&server), "{foreign}");
            // Without a holder the key expires after 3 s at most, until the first renewal.
            assert!((1..=3_000).contains(&pttl(&server)), "{foreign}");
            assert!(guard.remaining() <= Duration::from_secs(3));
            until(async || guard.remaining() > Duration::from_secs(3)).await;
            assert!(pttl(&server) > 3_000, "{foreign}");
            guard.release().await.unwrap();
            assert!(!exists(&server), "{foreign}");
            let dropped = mutex(&client, &foreign).ttl(LONG).try_lock().await.unwrap().unwrap();
            until(async || pttl(&server) > 3_000).await;
            drop(dropped);
            let began = Instant::now();
            until(async || !exists(&server) && own_is_free(&client).await).await;
            assert!(began.elapsed() < SOON, "{foreign}");
        }
    })
    .await;
}

#[tokio::test]
async fn redisson_lock_has_the_form_of_the_library() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let mut admin = server.admin();
    let mut channel = admin.as_pubsub();
    channel.subscribe("redisson_lock__channel:{jobs}").unwrap();
    let guard = mutex(&client, &Foreign::redisson_lock(KEY)).lock().await.unwrap();
    let fields: Vec<(String, String)> = server.query(&["HGETALL", KEY]).unwrap();
    let [(holder, count)] = &fields[..] else { panic!("{fields:?}") };
    assert_eq!(count, "1");
    let (uuid, thread) = holder.split_once(':').unwrap();
    assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    assert!(thread.parse::<i64>().is_ok());
    guard.release().await.unwrap();
    channel.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(channel.get_message().unwrap().get_payload::<String>().unwrap(), "0");
}

#[tokio::test]
async fn busy_foreign_lock_is_not_waited_for_by_try_lock() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        take_as_other(&server, &foreign, "60000");
        assert!(mutex(&client, &foreign).try_lock().await.unwrap().is_none(), "{foreign}");
        assert!(own_is_free(&client).await);
        let limit = Duration::from_millis(50);
        assert!(mutex(&client, &foreign).lock_timeout(limit).await.unwrap().is_none(), "{foreign}");
        assert!(own_is_free(&client).await);
        assert!(pttl(&server) > 50_000, "the other program still has it");
        server.run(&["DEL", KEY]);
    }
}

#[tokio::test]
async fn waiter_is_woken_when_the_other_program_releases_or_expires() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        // Faster than the longest time between two tries, which is 1 s.
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            take_as_other(&server, &foreign, "60000");
            let waiter = tokio::spawn({
                let mutex = mutex(&client, &foreign);
                async move { mutex.lock().await.map(|guard| (guard, Instant::now())) }
            });
            until_tracked(&server).await;
            let released = Instant::now();
            server.run(&["DEL", KEY]);
            let (guard, granted) = waiter.await.unwrap().unwrap();
            fastest = fastest.min(granted.duration_since(released));
            guard.release().await.unwrap();
        }
        assert!(fastest < Duration::from_millis(200), "{foreign}: {fastest:?}");
        // Its holder has crashed.
        let began = Instant::now();
        take_as_other(&server, &foreign, "300");
        mutex(&client, &foreign).lock().await.unwrap().release().await.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(200));
    }
}

/// The server reports the next change of the key.
async fn until_tracked(server: &Server) {
    let tracked = async || {
        let stats: String = server.query(&["INFO", "stats"]).unwrap();
        let keys = stats.lines().find_map(|line| line.strip_prefix("tracking_total_keys:"));
        keys.is_some_and(|keys| keys.trim() != "0")
    };
    until(tracked).await;
}

/// A command to take the lock that arrives after the renewal: its answer was lost, and a repeated one has taken it.
#[test]
fn late_take_of_a_redisson_lock_does_not_shorten_it() {
    let server = Server::on_socket();
    let call = |script: &str, ttl_ms: &str| {
        assert_eq!(server.query::<i64>(&["EVAL", script, "1", KEY, "uuid:1", ttl_ms]).unwrap(), 1);
    };
    let take = include_str!("../src/bridge/scripts/take_hash.lua");
    call(take, "3000");
    assert!((1..=3_000).contains(&pttl(&server)));
    call(include_str!("../src/bridge/scripts/renew_hash.lua"), "30000");
    call(take, "3000");
    assert!(pttl(&server) > 3_000);
    // A repeated one does make it longer, because its holder trusts the answer.
    call(take, "60000");
    assert!(pttl(&server) > 30_000);
}

/// A command to take the lock stays on its way, a second one takes it, another program deletes it, and then the first one arrives.
#[tokio::test]
async fn late_command_does_not_hide_that_the_lock_was_deleted() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        // Without the right to hear of changes, renewals alone show a loss.
        let rule = ["ACL", "SETUSER", "locks", "on", ">password", "~*", "&*", "+@all", "-client|tracking"];
        assert_eq!(server.run(&rule), Value::Okay);
        let url = format!("redis://locks:password@127.0.0.1:{}", proxy.port());
        for foreign in both() {
            let client = Client::connect(&url).await.unwrap();
            take_as_other(&server, &foreign, "60000");
            let waiter = tokio::spawn({
                let mutex = mutex(&client, &foreign).ttl(Duration::from_secs(6));
                async move { mutex.lock().await }
            });
            // It polls: the next try is held, and its connection is given up after a second.
            server.run(&["CONFIG", "RESETSTAT"]);
            let polls = async || {
                let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
                stats.contains("cmdstat_pttl")
            };
            until(polls).await;
            proxy.hold_requests(true);
            until(async || proxy.held() > 0).await;
            proxy.hold_requests(false);
            server.run(&["DEL", KEY]);
            let guard = waiter.await.unwrap().unwrap();
            until(async || guard.remaining() > Duration::from_secs(3)).await;
            // Between two renewals, which are 2 s apart; what the late command takes lasts 3 s.
            server.run(&["DEL", KEY]);
            proxy.release_held();
            until(async || exists(&server)).await;
            let lost = tokio::time::timeout(SOON, guard.lost()).await;
            assert_eq!(lost.expect("the renewal sees another holder"), Loss::Bridge, "{foreign}");
            drop(guard);
            // What the late command has taken is released, too.
            until(async || !exists(&server)).await;
            client.close().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn guard_is_lost_when_the_foreign_lock_is() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        let other_type = if foreign.to_string().starts_with("redisson") { "SET" } else { "RPUSH" };
        let ways: [&[&[&str]]; 3] = [
            &[&["DEL", KEY]],
            &[&["DEL", KEY], &["HSET", KEY, "somebody", "1"]],
            &[&["DEL", KEY], &[other_type, KEY, "somebody"]],
        ];
        for (number, way) in ways.into_iter().enumerate() {
            let guard = mutex(&client, &foreign).ttl(LONG).lock().await.unwrap();
            until(async || pttl(&server) > 3_000).await;
            way.iter().for_each(|words| drop(server.run(words)));
            let changed = Instant::now();
            assert_eq!(guard.lost().await, Loss::Bridge, "{foreign}, {number}");
            assert!(changed.elapsed() < SOON, "{foreign}, {number}");
            assert!(!guard.is_held() && guard.remaining().is_zero());
            let error = guard.release().await.unwrap_err();
            assert!(error.is_lost() && error.to_string().contains("other library"), "{error}");
            until(async || own_is_free(&client).await).await;
            // What another program has there is left alone.
            assert_eq!(exists(&server), number > 0, "{foreign}, {number}");
            server.run(&["DEL", KEY]);
        }
    }
}

#[tokio::test]
async fn key_of_another_type_is_an_error_that_names_the_bridge() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        server.run(&["RPUSH", KEY, "a"]);
        for error in [
            mutex(&client, &foreign).lock().await.unwrap_err(),
            mutex(&client, &foreign).try_lock().await.unwrap_err(),
        ] {
            assert!(error.is_invalid(), "{error}");
            assert!(error.to_string().contains(&format!("bridged to {foreign}")), "{error}");
        }
        assert!(own_is_free(&client).await);
        server.run(&["DEL", KEY]);
    }
}

#[tokio::test]
async fn foreign_lock_is_released_when_the_own_lease_is_lost() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        let mutex = mutex(&client, &foreign).ttl(LONG);
        let guard = mutex.lock().await.unwrap();
        until(async || pttl(&server) > 3_000).await;
        mutex.force_release().await.unwrap();
        let began = Instant::now();
        until(async || !exists(&server)).await;
        assert!(began.elapsed() < SOON, "{foreign}");
        assert!(!guard.is_held());
        assert!(guard.release().await.unwrap_err().is_lost());
    }
}

#[tokio::test]
async fn foreign_lock_is_released_when_the_client_is_closed() {
    let server = Server::on_socket();
    for foreign in both() {
        let client = connect(&server).await;
        let guard = mutex(&client, &foreign).lock().await.unwrap();
        client.close().await.unwrap();
        assert!(!exists(&server), "{foreign}");
        assert!(!guard.is_held());
    }
}

#[tokio::test]
async fn dropped_attempt_leaves_nothing() {
    let server = Server::on_port();
    let client = connect(&server).await;
    for foreign in both() {
        take_as_other(&server, &foreign, "60000");
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &foreign);
            async move { mutex.lock().await }
        });
        until_tracked(&server).await;
        waiter.abort();
        until(async || own_is_free(&client).await).await;
        server.run(&["DEL", KEY]);
        let guard = mutex(&client, &foreign).try_lock().await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn command_whose_answer_is_lost_leaves_no_orphan() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_port();
        for foreign in both() {
            let proxy = Proxy::before(&server);
            let client = Client::connect(&proxy.url()).await.unwrap();
            // It is taken while its answers are lost, and its attempt is dropped.
            take_as_other(&server, &foreign, "60000");
            let waiter = tokio::spawn({
                let mutex = mutex(&client, &foreign);
                async move { mutex.lock().await }
            });
            until_tracked(&server).await;
            // The invalidation is held too: the attempt tries again within 1 s.
            let release = || drop(server.run(&["DEL", KEY]));
            let take = || take_as_other(&server, &foreign, "60000");
            proxy.hold_replies_from(release, take, || exists(&server)).await;
            waiter.abort();
            proxy.cut();
            proxy.hold_replies(false);
            proxy.release_held();
            // Sooner than it expires.
            let began = Instant::now();
            until(async || !exists(&server)).await;
            assert!(began.elapsed() < Duration::from_secs(2), "{foreign}");
            until(async || own_is_free(&client).await).await;
        }
    })
    .await;
}

#[tokio::test]
async fn release_whose_answer_is_lost_is_not_a_loss() {
    let server = Server::on_port();
    for foreign in both() {
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        let guard = mutex(&client, &foreign).lock().await.unwrap();
        proxy.hold_replies(true);
        let released = tokio::spawn(guard.release());
        until(async || !exists(&server)).await;
        proxy.cut();
        proxy.hold_replies(false);
        // A new connection may have been opened in between.
        proxy.release_held();
        let released = released.await.unwrap();
        assert!(released.as_ref().err().is_none_or(|error| !error.is_lost()), "{foreign}: {released:?}");
    }
}

#[tokio::test]
async fn lock_of_redisson_is_released_without_the_right_to_its_channel() {
    let server = Server::on_port();
    let mut rule = vec!["ACL", "SETUSER", "locks", "on", ">password", "~*", "+@all", "resetchannels"];
    rule.push("&leasehold:*");
    assert_eq!(server.run(&rule), Value::Okay);
    let url = format!("redis://locks:password@127.0.0.1:{}", server.port());
    let client = Client::connect(&url).await.unwrap();
    let guard = mutex(&client, &Foreign::redisson_lock(KEY)).lock().await.unwrap();
    guard.release().await.unwrap();
    assert!(!exists(&server));
}

#[tokio::test]
async fn uncontended_pair_costs_two_commands_more() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let plain = client.mutex("own");
    let commands = async |mutex: &Mutex| {
        // Without a wait, because a waiting attempt offers a turn to others after it has held the lock for long, as on a busy machine.
        let pair = async || mutex.try_lock().await.unwrap().unwrap().release().await.unwrap();
        // The first one loads the scripts.
        pair().await;
        server.run(&["CONFIG", "RESETSTAT"]);
        pair().await;
        let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
        let calls = |command: &str| -> u64 {
            let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
            line.map_or(0, |line| line.split_once(',').unwrap().0.parse().unwrap())
        };
        // `set` is also what the script of an own lease runs.
        (calls("evalsha") + calls("set"), calls("eval") + calls("client|caching"))
    };
    let (plain, _) = commands(&plain).await;
    for foreign in both() {
        let (sent, other) = commands(&mutex(&client, &foreign)).await;
        assert_eq!((sent - plain, other), (2, 0), "{foreign}");
    }
}

#[tokio::test]
async fn bridge_is_refused_where_it_cannot_work() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let foreign = Foreign::set_nx_px(KEY);
    let refused = [
        mutex(&client, &foreign).auto_renew(false),
        mutex(&client, &foreign).min_hold(Duration::from_secs(1)),
        mutex(&Client::connect("memory:").await.unwrap(), &foreign),
    ];
    for mutex in refused {
        let error = mutex.lock().await.unwrap_err();
        assert!(error.is_invalid(), "{error}");
    }
    assert!(!exists(&server));
    let guard = mutex(&client, &foreign).lock().await.unwrap();
    guard.set_min_hold(Duration::ZERO).unwrap();
    assert!(guard.set_min_hold(Duration::from_secs(1)).unwrap_err().is_invalid());
    assert!(guard.detach().await.unwrap_err().is_invalid());
    until(async || !exists(&server)).await;
}

/// A program that polls is not starved by leasehold clients that hand the lock on among themselves.
#[tokio::test]
async fn program_that_polls_gets_turns() {
    let server = Server::on_socket();
    let clients = [connect(&server).await, connect(&server).await];
    let foreign = Foreign::set_nx_px(KEY);
    let busy: Vec<_> = clients
        .iter()
        .map(|client| {
            let mutex = mutex(client, &foreign);
            tokio::spawn(async move {
                loop {
                    let guard = mutex.lock().await.unwrap();
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    // As redis-py does it, with its default pause.
    let mut acquired = 0;
    until(async || {
        let taken: Value = server.run(&["SET", KEY, "other", "NX", "PX", "60000"]);
        if taken == Value::Okay {
            acquired += 1;
            assert_eq!(server.query::<String>(&["GET", KEY]).unwrap(), "other");
            server.run(&["DEL", KEY]);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        acquired == 5
    })
    .await;
    busy.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A lease that was handed off to the next task would keep its foreign lock, for which that task waits.
#[tokio::test]
async fn tasks_with_a_set_of_bridged_mutexes_take_turns() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let bridged = mutex(&client, &Foreign::set_nx_px(KEY)).local_handoff(64, Duration::from_secs(1));
    let set = MutexSet::new([bridged, client.mutex("b")]);
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let set = set.clone();
            tokio::spawn(async move {
                for _ in 0..5 {
                    drop(set.lock().await.unwrap());
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(30), task).await.expect("a turn").unwrap();
    }
}

/// The limit is shorter than the time for which a free lock is left to other programs.
#[tokio::test]
async fn short_limit_is_enough_for_a_free_lock() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_socket();
        let client = connect(&server).await;
        for foreign in both() {
            let mutex = mutex(&client, &foreign);
            let mut taken = None;
            // More than one try, because a busy machine may need longer. Each round is as the first one.
            for _ in 0..10 {
                let guard = mutex.lock().await.unwrap();
                tokio::time::sleep(Duration::from_millis(120)).await;
                guard.release().await.unwrap();
                for _ in 0..5 {
                    taken = taken.or(mutex.lock_timeout(Duration::from_millis(40)).await.unwrap());
                }
                if taken.is_some() {
                    break;
                }
            }
            taken.expect("a free lock").release().await.unwrap();
        }
    })
    .await;
}

/// A program that takes the lock again within 2 ms of its release, while the word of the release and the waiter's command take 5 ms each:
/// a try that follows the word is always too late.
#[tokio::test]
async fn waiter_gets_turns_beside_a_program_that_takes_the_lock_again_at_once() {
    const ROUNDS: u32 = 5;
    let server = Arc::new(Server::on_port());
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mutex = mutex(&client, &Foreign::set_nx_px(KEY));
    let is_done = Arc::new(AtomicBool::new(false));
    let other = std::thread::spawn({
        let (server, is_done) = (server.clone(), is_done.clone());
        move || {
            while !is_done.load(Ordering::SeqCst) {
                let taken: Value = server.run(&["SET", KEY, "other", "NX", "PX", "60000"]);
                if taken == Value::Okay {
                    std::thread::sleep(Duration::from_millis(20));
                    server.run(&["DEL", KEY]);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
    proxy.delay_requests(Duration::from_millis(5));
    proxy.delay_replies(Duration::from_millis(5));
    for round in 1..=ROUNDS {
        let waiting = mutex.lock_timeout(SOON).await.unwrap();
        waiting.unwrap_or_else(|| panic!("turn {round}")).release().await.unwrap();
    }
    is_done.store(true, Ordering::SeqCst);
    other.join().unwrap();
}

/// As in a shell loop around `leasehold run`: no client has held the lock before.
#[tokio::test]
async fn program_that_polls_gets_turns_beside_clients_without_history() {
    let server = Server::on_socket();
    let foreign = Foreign::set_nx_px(KEY);
    let (url, held) = (server.url(), Arc::new(AtomicU32::new(0)));
    let busy: Vec<_> = (0..3)
        .map(|_| {
            let (url, foreign, held) = (url.clone(), foreign.clone(), held.clone());
            tokio::spawn(async move {
                loop {
                    let client = Client::connect(&url).await.unwrap();
                    let guard = mutex(&client, &foreign).lock().await.unwrap();
                    held.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    guard.release().await.unwrap();
                    client.close().await.unwrap();
                }
            })
        })
        .collect();
    let mut acquired = 0;
    until(async || {
        let taken: Value = server.run(&["SET", KEY, "other", "NX", "PX", "60000"]);
        if taken == Value::Okay {
            acquired += 1;
            server.run(&["DEL", KEY]);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        acquired == 5 || held.load(Ordering::SeqCst) > 100
    })
    .await;
    busy.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(acquired, 5, "beside {held:?} turns of leasehold");
}

#[tokio::test]
async fn foreign_lock_is_released_before_the_own_one() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    for foreign in both() {
        let guard = client.mutex("zebra").bridge(foreign.clone()).lock().await.unwrap();
        // A log of all commands, the newest one first.
        server.run(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        guard.release().await.unwrap();
        let log: Vec<Value> = server.query(&["SLOWLOG", "GET", "100"]).unwrap();
        let log: Vec<_> = log.iter().map(|entry| format!("{entry:?}")).collect();
        let age = |word: &str| log.iter().position(|entry| entry.contains(word)).expect("a command");
        assert!(age("zebra") < age(KEY), "{foreign}: {log:#?}");
        server.run(&["CONFIG", "SET", "slowlog-log-slower-than", "-1"]);
        server.run(&["SLOWLOG", "RESET"]);
    }
}

#[tokio::test]
async fn waiter_polls_without_the_right_to_tracking() {
    let server = Server::on_port();
    let rule = ["ACL", "SETUSER", "locks", "on", ">password", "~*", "&*", "+@all", "-client|tracking"];
    assert_eq!(server.run(&rule), Value::Okay);
    let url = format!("redis://locks:password@127.0.0.1:{}", server.port());
    let client = Client::connect(&url).await.unwrap();
    for foreign in both() {
        take_as_other(&server, &foreign, "60000");
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &foreign);
            async move { mutex.lock().await }
        });
        until(async || !own_is_free(&client).await).await;
        server.run(&["DEL", KEY]);
        let guard = tokio::time::timeout(SOON, waiter).await.expect("polls").unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn set_of_bridged_mutexes_takes_all_foreign_locks_or_none() {
    let server = Server::on_socket();
    let client = connect(&server).await;
    let bridged = |name: &str, key: &str| client.mutex(name).bridge(Foreign::set_nx_px(key));
    let set = MutexSet::new([bridged("a", "2"), client.mutex("b"), bridged("c", "1")]);
    let keys = || server.query::<i64>(&["EXISTS", "1", "2"]).unwrap();
    let guard = set.lock().await.unwrap();
    assert_eq!(keys(), 2);
    assert_eq!(guard.guards().iter().map(leasehold::Guard::name).collect::<Vec<_>>(), ["a", "b", "c"]);
    guard.release().await.unwrap();
    assert_eq!(keys(), 0);
    // Another program has the second one in the order of the keys.
    server.run(&["SET", "2", "other", "PX", "60000"]);
    assert!(set.try_lock().await.unwrap().is_none());
    assert!(set.lock_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    assert_eq!(keys(), 1, "nothing is held in part");
    assert!(client.mutex("b").try_lock().await.unwrap().is_some());
    // Nor is it retained in part.
    let retained = client.mutex("d").min_hold(Duration::from_secs(3_600));
    let set = MutexSet::new([retained.clone(), bridged("a", "2")]);
    assert!(set.try_lock().await.unwrap().is_none());
    let dropped = tokio::time::timeout(Duration::from_millis(50), set.lock()).await;
    assert!(dropped.is_err(), "it waits");
    until(async || client.mutex("d").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
    server.run(&["DEL", "2"]);
    set.lock().await.unwrap().release().await.unwrap();
    assert!(client.mutex("d").try_lock().await.unwrap().is_none(), "it is retained once all were held");
    let twice = MutexSet::new([bridged("a", "1"), bridged("b", "1")]);
    let error = twice.lock().await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("also bridged to the key"), "{error}");
}

#[tokio::test]
async fn close_does_not_wait_for_an_attempt_that_is_not_polled() {
    let server = Server::on_socket();
    let other = connect(&server).await;
    for foreign in both() {
        let client = connect(&server).await;
        take_as_other(&server, &foreign, "60000");
        let jobs = mutex(&client, &foreign);
        let mut waiter = Box::pin(jobs.lock());
        until(async || {
            let polled = tokio::time::timeout(Duration::from_millis(20), waiter.as_mut()).await;
            assert!(polled.is_err(), "another program has the lock");
            !own_is_free(&other).await
        })
        .await;
        tokio::time::timeout(SOON, client.close()).await.expect("it ends").unwrap();
        let error = waiter.await.unwrap_err();
        assert!(error.is_closed(), "{error}");
        server.run(&["DEL", KEY]);
    }
}

#[tokio::test]
async fn close_ends_a_waiting_attempt_soon() {
    let server = Server::on_socket();
    let foreign = Foreign::set_nx_px(KEY);
    take_as_other(&server, &foreign, "600000");
    // A command to take the lock is on its way only now and then, and is waited for.
    let mut took = Vec::new();
    for _ in 0..3 {
        let client = connect(&server).await;
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &foreign);
            async move { mutex.lock().await }
        });
        until_tracked(&server).await;
        let began = Instant::now();
        client.close().await.unwrap();
        took.push(began.elapsed());
        assert!(waiter.await.unwrap().unwrap_err().is_closed());
    }
    assert!(took.iter().any(|took| *took < Duration::from_secs(2)), "{took:?}");
}
