//! Each recipe behaves as published, on a real server and by real clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_testkit::{unless_paused, until};
use recipes::explorer::Fault;
use recipes::outcome::servers;
use recipes::real::{Process, RealClient};
use recipes::recipe::{AnyRecipe, LockOptions, RetryPolicy, Role, lock};
use recipes::recipes::{ROWS, Row, find, rw_keys};
use recipes::redis::{BoxFuture, Environment, Op, Redis};
use redis::{RedisResult, Value};

struct TestServers {
    _servers: Vec<leasehold_testkit::Server>,
    process: Arc<Process>,
}

impl TestServers {
    async fn of(row: &Row) -> Self {
        let (servers, urls) = servers(row.nodes);
        Self { _servers: servers, process: Process::connect(&urls).await.unwrap() }
    }

    fn redis(&self) -> Redis {
        Redis::new(Arc::new(RealClient::new(self.process.clone(), None)))
    }

    fn client(&self, row: &Row, role: Role, owner: &str) -> Box<dyn AnyRecipe> {
        client(self.redis(), row, role, owner)
    }
}

fn client(redis: Redis, row: &Row, role: Role, owner: &str) -> Box<dyn AnyRecipe> {
    let owner = row.faults.contains(&Fault::SameOwner).then(|| owner.to_owned());
    (row.make)(redis, LockOptions { role, owner, ..LockOptions::default() })
}

/// An environment that records that its client has begun to wait.
struct ObservedEnvironment {
    environment: RealClient,
    waits: Arc<AtomicBool>,
}

impl Environment for ObservedEnvironment {
    fn perform(&self, op: Op) -> BoxFuture<'_, RedisResult<Value>> {
        if matches!(op, Op::Sleep(_) | Op::Receive(_)) {
            self.waits.store(true, Ordering::SeqCst);
        }
        self.environment.perform(op)
    }

    fn clock(&self) -> Duration {
        self.environment.clock()
    }

    fn token(&self) -> String {
        self.environment.token()
    }
}

#[tokio::test]
async fn the_second_client_acquires_the_lock_after_the_first_has_released_it() {
    for row in ROWS {
        let servers = TestServers::of(row).await;
        let mut one = servers.client(row, Role::Writer, "one");
        let mut other = servers.client(row, Role::Writer, "other");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_none(), "{}", row.id);
        other.give_up().await.unwrap();
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.unlock().await.unwrap(), "{}", row.id);
    }
}

#[tokio::test]
async fn a_waiter_acquires_the_lock_when_it_becomes_free() {
    for row in ROWS {
        let servers = TestServers::of(row).await;
        let mut holder = servers.client(row, Role::Writer, "holder");
        assert!(holder.try_lock().await.unwrap().is_some(), "{}", row.id);
        let waits = Arc::new(AtomicBool::new(false));
        let environment = RealClient::new(servers.process.clone(), None);
        let redis = Redis::new(Arc::new(ObservedEnvironment { environment, waits: waits.clone() }));
        let waiting = tokio::spawn(async move {
            let mut waiter = client(redis.clone(), row, Role::Writer, "waiter");
            let (timeout, interval) = (Duration::from_secs(60), Duration::from_millis(5));
            lock(&redis, &mut *waiter, RetryPolicy::Until { timeout, interval }).await.unwrap()
        });
        until(async || waits.load(Ordering::SeqCst)).await;
        assert!(!waiting.is_finished(), "{}", row.id);
        assert!(holder.unlock().await.unwrap(), "{}", row.id);
        assert!(waiting.await.unwrap().is_some(), "{}", row.id);
    }
}

#[tokio::test]
async fn bounded_polling_ends_after_its_last_attempt() {
    let row = find("lua-setnx-token").unwrap();
    let servers = TestServers::of(row).await;
    let (mut holder, mut other) =
        (servers.client(row, Role::Writer, ""), servers.client(row, Role::Writer, ""));
    let retry_policy = RetryPolicy::Polling { interval: Duration::from_millis(1), tries: 3 };
    assert!(lock(&servers.redis(), &mut *holder, RetryPolicy::OneShot).await.unwrap().is_some());
    let before = servers.process.commands_sent();
    assert!(lock(&servers.redis(), &mut *other, retry_policy).await.unwrap().is_none());
    assert_eq!(servers.process.commands_sent() - before, 3);
}

#[tokio::test]
async fn locking_twice_and_unlocking_without_a_lock_are_errors_of_the_token_recipe() {
    let row = find("lua-setnx-token").unwrap();
    let servers = TestServers::of(row).await;
    let mut client = servers.client(row, Role::Writer, "");
    assert!(client.unlock().await.is_err());
    assert!(client.try_lock().await.unwrap().is_some());
    assert!(client.try_lock().await.is_err());
    assert!(client.unlock().await.unwrap());
}

#[tokio::test]
async fn a_reentrant_recipe_is_free_after_as_many_releases_as_acquisitions() {
    let rows: Vec<_> = ROWS.iter().filter(|row| row.reenters).collect();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let servers = TestServers::of(row).await;
        let mut one = servers.client(row, Role::Writer, "one");
        let mut other = servers.client(row, Role::Writer, "other");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_none(), "{}", row.id);
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
    }
}

#[tokio::test]
async fn a_renewal_restores_the_whole_lease_unless_the_key_is_gone() {
    unless_paused(Duration::from_millis(300), async || {
        let rows: Vec<_> = ROWS.iter().filter(|row| row.renews).collect();
        assert_eq!(rows.len(), 3);
        for row in rows {
            let servers = TestServers::of(row).await;
            let (redis, mut client) = (servers.redis(), servers.client(row, Role::Writer, "one"));
            assert!(client.try_lock().await.unwrap().is_some());
            redis.call::<bool>(&["PEXPIRE", "lock", "1000"]).await.unwrap();
            assert!(client.renew().await.unwrap().unwrap().is_some(), "{}", row.id);
            assert!(redis.call::<u64>(&["PTTL", "lock"]).await.unwrap() > 5_000, "{}", row.id);
            redis.del("lock").await.unwrap();
            assert!(client.renew().await.unwrap().unwrap().is_none(), "{}", row.id);
        }
    })
    .await;
}

#[tokio::test]
async fn local_count_knows_whether_it_holds_and_renews_four_times_at_most() {
    let row = find("local-count").unwrap();
    let servers = TestServers::of(row).await;
    let mut client = servers.client(row, Role::Writer, "");
    assert!(client.try_lock().await.unwrap().is_some());
    assert_eq!(client.is_mine().await.unwrap(), Some(true));
    for _ in 0..4 {
        assert!(client.renew().await.unwrap().unwrap().is_some());
    }
    assert!(client.renew().await.unwrap().unwrap().is_none());
    servers.redis().del("lock").await.unwrap();
    assert_eq!(client.is_mine().await.unwrap(), Some(false));
}

#[tokio::test]
async fn readers_share_the_lock_and_writers_are_exclusive() {
    let rows: Vec<_> = ROWS.iter().filter(|row| row.has_readers).collect();
    assert_eq!(rows.len(), 2);
    for row in rows {
        let servers = TestServers::of(row).await;
        let [mut one, mut other] = [1, 2].map(|_| servers.client(row, Role::Reader, ""));
        let mut writer = servers.client(row, Role::Writer, "");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(writer.try_lock().await.unwrap().is_none(), "{}", row.id);
        other.unlock().await.unwrap();
        assert!(writer.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.try_lock().await.unwrap().is_none(), "{}", row.id);
    }
}

/// In a cluster `rw-two-keys` can therefore not use one script for both keys.
#[test]
fn the_two_keys_of_rw_two_keys_are_in_different_slots() {
    let server = leasehold_testkit::Server::builder().setting("cluster-enabled", "yes").start();
    let slots = rw_keys("lock").map(|key| server.query::<u16>(&["CLUSTER", "KEYSLOT", &key]).unwrap());
    assert_ne!(slots[0], slots[1]);
}
