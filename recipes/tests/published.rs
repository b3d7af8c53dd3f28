//! Each recipe does what it was published to do, on a real server and by real clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_testkit::until;
use recipes::explorer::Fault;
use recipes::real::{Process, RealClient};
use recipes::recipe::{AnyRecipe, Patience, Role, Terms, lock};
use recipes::recipes::{ROWS, Row, find, rw_keys};
use recipes::redis::{Op, Redis, Soon, World};
use recipes::run::servers;
use redis::{RedisResult, Value};

struct House {
    _servers: Vec<leasehold_testkit::Server>,
    process: Arc<Process>,
}

impl House {
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
    (row.make)(redis, Terms { role, owner, ..Terms::default() })
}

/// The world of a client of which it can be seen that it has begun to wait.
struct Watched {
    world: RealClient,
    waits: Arc<AtomicBool>,
}

impl World for Watched {
    fn perform(&self, op: Op) -> Soon<'_, RedisResult<Value>> {
        if matches!(op, Op::Sleep(_) | Op::Receive(_)) {
            self.waits.store(true, Ordering::SeqCst);
        }
        self.world.perform(op)
    }

    fn clock(&self) -> Duration {
        self.world.clock()
    }

    fn token(&self) -> String {
        self.world.token()
    }
}

#[tokio::test]
async fn whoever_comes_second_gets_it_after_the_first_has_left() {
    for row in ROWS {
        let house = House::of(row).await;
        let mut one = house.client(row, Role::Writer, "one");
        let mut other = house.client(row, Role::Writer, "other");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_none(), "{}", row.id);
        other.give_up().await.unwrap();
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.unlock().await.unwrap(), "{}", row.id);
    }
}

#[tokio::test]
async fn who_waits_until_a_timeout_gets_it_when_it_is_free() {
    for row in ROWS {
        let house = House::of(row).await;
        let mut holder = house.client(row, Role::Writer, "holder");
        assert!(holder.try_lock().await.unwrap().is_some(), "{}", row.id);
        let waits = Arc::new(AtomicBool::new(false));
        let world = RealClient::new(house.process.clone(), None);
        let redis = Redis::new(Arc::new(Watched { world, waits: waits.clone() }));
        let waiting = tokio::spawn(async move {
            let mut waiter = client(redis.clone(), row, Role::Writer, "waiter");
            let (timeout, interval) = (Duration::from_secs(60), Duration::from_millis(5));
            lock(&redis, &mut *waiter, Patience::Until { timeout, interval }).await.unwrap()
        });
        until(async || waits.load(Ordering::SeqCst)).await;
        assert!(!waiting.is_finished(), "{}", row.id);
        assert!(holder.unlock().await.unwrap(), "{}", row.id);
        assert!(waiting.await.unwrap().is_some(), "{}", row.id);
    }
}

#[tokio::test]
async fn bounded_polling_ends_after_its_last_try() {
    let row = find("lua-setnx-token").unwrap();
    let house = House::of(row).await;
    let (mut holder, mut other) = (house.client(row, Role::Writer, ""), house.client(row, Role::Writer, ""));
    let patience = Patience::Polling { interval: Duration::from_millis(1), tries: 3 };
    assert!(lock(&house.redis(), &mut *holder, Patience::OneShot).await.unwrap().is_some());
    let before = house.process.asked();
    assert!(lock(&house.redis(), &mut *other, patience).await.unwrap().is_none());
    assert_eq!(house.process.asked() - before, 3);
}

#[tokio::test]
async fn locking_twice_and_unlocking_what_is_not_locked_are_errors_of_the_token_recipe() {
    let row = find("lua-setnx-token").unwrap();
    let house = House::of(row).await;
    let mut client = house.client(row, Role::Writer, "");
    assert!(client.unlock().await.is_err());
    assert!(client.try_lock().await.unwrap().is_some());
    assert!(client.try_lock().await.is_err());
    assert!(client.unlock().await.unwrap());
}

#[tokio::test]
async fn a_reentrant_recipe_is_free_after_as_many_releases_as_it_was_entered() {
    let rows: Vec<_> = ROWS.iter().filter(|row| row.reenters).collect();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let house = House::of(row).await;
        let mut one = house.client(row, Role::Writer, "one");
        let mut other = house.client(row, Role::Writer, "other");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_none(), "{}", row.id);
        assert!(one.unlock().await.unwrap(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
    }
}

#[tokio::test]
async fn who_renews_has_a_whole_lease_again_unless_it_was_taken_away() {
    let rows: Vec<_> = ROWS.iter().filter(|row| row.renews).collect();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let house = House::of(row).await;
        let (redis, mut client) = (house.redis(), house.client(row, Role::Writer, "one"));
        assert!(client.try_lock().await.unwrap().is_some());
        redis.call::<bool>(&["PEXPIRE", "lock", "1000"]).await.unwrap();
        assert!(client.renew().await.unwrap().unwrap().is_some(), "{}", row.id);
        assert!(redis.call::<u64>(&["PTTL", "lock"]).await.unwrap() > 5_000, "{}", row.id);
        redis.del("lock").await.unwrap();
        assert!(client.renew().await.unwrap().unwrap().is_none(), "{}", row.id);
    }
}

#[tokio::test]
async fn a_local_count_is_asked_whether_it_is_mine_and_renewed_four_times_at_most() {
    let row = find("local-count").unwrap();
    let house = House::of(row).await;
    let mut client = house.client(row, Role::Writer, "");
    assert!(client.try_lock().await.unwrap().is_some());
    assert_eq!(client.is_mine().await.unwrap(), Some(true));
    for _ in 0..4 {
        assert!(client.renew().await.unwrap().unwrap().is_some());
    }
    assert!(client.renew().await.unwrap().unwrap().is_none());
    house.redis().del("lock").await.unwrap();
    assert_eq!(client.is_mine().await.unwrap(), Some(false));
}

#[tokio::test]
async fn readers_are_in_beside_each_other_and_writers_are_alone() {
    let rows: Vec<_> = ROWS.iter().filter(|row| row.has_readers).collect();
    assert_eq!(rows.len(), 2);
    for row in rows {
        let house = House::of(row).await;
        let [mut one, mut other] = [1, 2].map(|_| house.client(row, Role::Reader, ""));
        let mut writer = house.client(row, Role::Writer, "");
        assert!(one.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(other.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(writer.try_lock().await.unwrap().is_none(), "{}", row.id);
        other.unlock().await.unwrap();
        assert!(writer.try_lock().await.unwrap().is_some(), "{}", row.id);
        assert!(one.try_lock().await.unwrap().is_none(), "{}", row.id);
    }
}

/// What `rw-two-keys` does in one step, it can't do in a cluster.
#[test]
fn the_two_keys_of_a_read_write_lock_are_on_different_nodes_of_a_cluster() {
    let server = leasehold_testkit::Server::builder().setting("cluster-enabled", "yes").start();
    let slots = rw_keys("lock").map(|key| server.query::<u16>(&["CLUSTER", "KEYSLOT", &key]).unwrap());
    assert_ne!(slots[0], slots[1]);
}
