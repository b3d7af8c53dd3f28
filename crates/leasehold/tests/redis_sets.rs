//! Mutex sets on Redis: the number of commands, and lost answers.

use std::time::Duration;

use leasehold::{Client, Kind, MutexSet};
use leasehold_testkit::{Cluster, Flavor, Proxy, Server, until, until_some};

const NAMES: [&str; 3] = ["c", "a", "b"];

fn set(client: &Client, names: &[&str]) -> MutexSet {
    MutexSet::new(names.iter().map(|name| client.mutex(name)))
}

/// Number of scripts that the server has run since the last call.
fn scripts(server: &Server) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
    server.run(&["CONFIG", "RESETSTAT"]);
    let calls = |line: &str| {
        let line = line.strip_prefix("cmdstat_evalsha:calls=").or(line.strip_prefix("cmdstat_eval:calls="))?;
        line.split_once(',')?.0.parse::<u64>().ok()
    };
    stats.lines().filter_map(calls).sum()
}

/// Loads the scripts.
async fn warm_up(client: &Client) {
    set(client, &["x", "y"]).lock().await.unwrap().release().await.unwrap();
}

async fn until_free(client: &Client, names: &[&str]) {
    for name in names {
        let is_free = async || {
            let view = client.inspect(Kind::Mutex, name).await;
            view.is_ok_and(|view| view.holders.is_empty() && view.waiters.is_empty())
        };
        until(is_free).await;
    }
}

#[tokio::test]
async fn free_set_is_acquired_by_one_command() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    warm_up(&client).await;
    let all = set(&client, &NAMES);
    for round in 0..3 {
        scripts(&server);
        let guard = match round {
            0 => all.lock().await.unwrap(),
            1 => all.try_lock().await.unwrap().unwrap(),
            _ => all.lock_timeout(Duration::from_secs(5)).await.unwrap().unwrap(),
        };
        assert_eq!(scripts(&server), 1, "in round {round}");
        guard.release().await.unwrap();
        assert_eq!(scripts(&server), 3);
    }
}

#[tokio::test]
async fn busy_set_costs_one_command() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    warm_up(&client).await;
    let held = other.mutex("b").lock().await.unwrap();
    scripts(&server);
    assert!(set(&client, &NAMES).try_lock().await.unwrap().is_none());
    assert_eq!(scripts(&server), 1);
    until_free(&client, &["a", "c"]).await;
    held.release().await.unwrap();
}

#[tokio::test]
async fn replicated_mutexes_are_acquired_one_by_one() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    let safe = MutexSet::new([client.mutex("a"), client.mutex("b").replicas(1)]);
    let error = safe.try_lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("replicas"), "{error}");
    until_free(&client, &["a", "b"]).await;
}

#[tokio::test]
async fn set_scripts_are_sent_again_after_a_flush() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    for _ in 0..2 {
        server.run(&["SCRIPT", "FLUSH"]);
        set(&client, &NAMES).lock().await.unwrap().release().await.unwrap();
    }
}

/// A script that ends with an error keeps what it has written.
#[tokio::test]
async fn error_at_one_mutex_acquires_none() {
    for flavor in [Flavor::Redis7, Flavor::Redis62, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).start();
        let client = Client::connect(&server.url()).await.unwrap();
        warm_up(&client).await;
        server.run(&["LPUSH", "leasehold:4:{mutex:b}", "something else"]);
        let error = set(&client, &NAMES).try_lock().await.unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
        until_free(&client, &["a", "c"]).await;
    }
}

#[tokio::test]
async fn lost_response_only_delays_the_set() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = Client::connect(&server.url()).await.unwrap();
    let client = Client::connect(&proxy.url()).await.unwrap();
    warm_up(&client).await;
    let take = async || {
        let all = set(&client, &NAMES);
        proxy.drop_replies(true);
        let taking = tokio::spawn(async move { all.lock().await });
        until(async || {
            taking.is_finished()
                || watcher.inspect(Kind::Mutex, "c").await.is_ok_and(|view| view.holders.len() == 1)
        })
        .await;
        proxy.cut();
        proxy.drop_replies(false);
        match taking.await.unwrap() {
            Ok(guard) => Some(guard),
            // A busy machine has cut the connection too late.
            Err(error) => {
                assert!(error.is_unavailable(), "{error}");
                until_free(&watcher, &NAMES).await;
                None
            }
        }
    };
    let guard = until_some(take).await;
    for name in NAMES {
        let view = watcher.inspect(Kind::Mutex, name).await.unwrap();
        assert_eq!(guard.token(name), Some(view.holders[0].token), "the retry finds each grant");
    }
    guard.release().await.unwrap();
    until_free(&watcher, &NAMES).await;
}

#[tokio::test]
async fn missing_responses_leave_no_lease() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = Client::connect(&server.url()).await.unwrap();
    let client = Client::connect(&proxy.url()).await.unwrap();
    warm_up(&client).await;
    proxy.drop_replies(true);
    let late = set(&client, &NAMES).lock_timeout(Duration::from_millis(20)).await;
    assert!(late.is_err_and(|error| error.is_unavailable()), "it is unknown whether they are free");
    until_free(&watcher, &NAMES).await;
    let error = set(&client, &NAMES).try_lock().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    until_free(&watcher, &NAMES).await;
    proxy.drop_replies(false);
    proxy.cut();
    until(async || set(&client, &NAMES).try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

/// A name that shares the hash slot of another one.
fn neighbour(cluster: &Cluster, name: &str) -> String {
    let slot = |name: &str| cluster.slot_of(&format!("{{mutex:{name}}}"));
    let of = slot(name);
    let mut names = (0..).map(|number| format!("{name}{number}"));
    names.find(|name| slot(name) == of).expect("slots are few")
}

#[tokio::test]
async fn cluster_acquires_one_slot_by_one_command_and_others_in_order() {
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let ran = || cluster.nodes[..3].iter().map(scripts).sum::<u64>();
    let neighbour = neighbour(&cluster, "a");
    let near = set(&client, &["a", &neighbour]);
    near.lock().await.unwrap().release().await.unwrap();
    ran();
    let guard = near.try_lock().await.unwrap().unwrap();
    assert_eq!(ran(), 1);
    assert!(near.try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();

    let far = set(&client, &["a", "b"]);
    assert_ne!(cluster.slot_of("{mutex:a}"), cluster.slot_of("{mutex:b}"));
    far.lock().await.unwrap().release().await.unwrap();
    ran();
    let guard = far.lock().await.unwrap();
    assert_eq!(ran(), 2);
    assert!(near.try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn set_follows_its_hash_slot() {
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let near = set(&client, &["a", &neighbour(&cluster, "a")]);
    near.lock().await.unwrap().release().await.unwrap();
    let slot = cluster.slot_of("{mutex:a}");
    let to = (cluster.owner_of(slot) + 1) % 3;
    cluster.migrate_begin(slot, to);
    // Only some of the keys can be there yet. The waiter acquires the set once the slot has moved.
    let taking = {
        let near = near.clone();
        tokio::spawn(async move { near.lock().await })
    };
    cluster.migrate_keys(slot, to);
    cluster.migrate_end(slot, to);
    let guard = tokio::time::timeout(Duration::from_secs(30), taking).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    near.lock().await.unwrap().release().await.unwrap();
}
