//! A password that is replaced again and again: the old one is refused from then on, and all connections are closed.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard, Kind};
use leasehold_testkit::{until, until_some};
use tokio::time::{sleep, timeout};

use super::{Place, SOON, Vault};

/// How much of it there is.
#[derive(Clone, Copy)]
struct Extent {
    rotations: u32,
    interval: Duration,
    leases: usize,
}

const SHORT: Extent = Extent { rotations: 3, interval: Duration::from_secs(2), leases: 20 };
const LONG: Extent = Extent { rotations: 20, interval: Duration::from_secs(30), leases: 100 };

/// Whether the environment asks for the long tests.
fn is_long() -> bool {
    std::env::var_os("LEASEHOLD_TEST_LONG").is_some()
}

/// The lifetime of a lease: a rotation and a busy machine must not cost one.
const TTL: Duration = Duration::from_secs(20);

/// Leases that are kept, and as many waiters as rotations. After each rotation the lock is handed to the next waiter, in the order in which
/// they came.
async fn outlives_rotations(place: &Place, extent: Extent) {
    let Extent { rotations, interval, leases } = extent;
    let waiters = rotations as usize;
    let vault = Vault::default();
    vault.set("password-0");
    place.rotate("password-0");
    let holder = vault.client(place).ttl(TTL).connect().await.unwrap();
    let mut guards: Vec<Guard> = Vec::new();
    for number in 0..leases {
        guards.push(holder.mutex(format!("lease {number}")).lock().await.unwrap());
    }
    let mut held = holder.mutex("queue").lock().await.unwrap();
    let (mut known, mut waiting) = (place.subscribers(), VecDeque::new());
    for number in 0..waiters {
        let client = vault.client(place).ttl(TTL).connect().await.unwrap();
        let waiter = tokio::spawn(async move { client.mutex("queue").lock().await.unwrap() });
        let line = async |count| {
            holder.inspect(Kind::Mutex, "queue").await.is_ok_and(|view| view.waiters.len() == count)
        };
        until(async || line(number + 1).await).await;
        let subscriber = until_some(async || place.subscribers().difference(&known).next().cloned()).await;
        known.insert(subscriber.clone());
        waiting.push_back((subscriber, waiter));
    }
    let began = Instant::now();
    for rotation in 1..=rotations {
        sleep((interval * rotation).saturating_sub(began.elapsed())).await;
        let password = format!("password-{rotation}");
        vault.set(&password);
        place.rotate(&password);
        // A waiter that has not connected again is passed over.
        let is_connected =
            |connected: &BTreeSet<String>| waiting.iter().all(|(name, _)| connected.contains(name));
        until(async || is_connected(&place.subscribers())).await;
        assert!(held.is_held(), "{}: rotation {rotation}", place.name());
        let token = held.token();
        held.release_timeout(SOON).await.unwrap();
        let (_, next) = waiting.pop_front().unwrap();
        held = timeout(SOON, next).await.unwrap().unwrap();
        assert!(token < held.token(), "{}: {token} was granted before {}", place.name(), held.token());
    }
    guards.push(held);
    for guard in guards {
        assert!(guard.is_held() && guard.renewal_error().is_none(), "{}", place.name());
        until(async || guard.renew().await.is_ok()).await;
        guard.release_timeout(SOON).await.unwrap();
    }
    // Each client asks for each of its servers when it connects, and after a refusal.
    let clients = waiters + 1;
    let most = clients * place.servers().len().max(1) * (rotations as usize + 1) * 3;
    assert!(vault.calls() <= most, "{}: {} calls, at most {most}", place.name(), vault.calls());
    holder.close_timeout(SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_and_places_in_queues_outlive_rotations_of_the_password() {
    if is_long() {
        let places = Place::all();
        futures_util::future::join_all(places.iter().map(|place| outlives_rotations(place, LONG))).await;
        return;
    }
    for start in Place::EACH {
        outlives_rotations(&start(), SHORT).await;
    }
}

/// The provider still has the old one for a while.
#[tokio::test]
async fn password_that_the_provider_knows_late_is_asked_for_again() {
    for place in Place::all() {
        let vault = Vault::default();
        vault.set("password-0");
        place.rotate("password-0");
        let client: Client = vault.client(&place).ttl(TTL).connect().await.unwrap();
        let guard = client.mutex("a").lock().await.unwrap();
        place.rotate("password-1");
        sleep(Duration::from_secs(2)).await;
        let calls = vault.calls();
        // Each attempt to connect asks once more, and the pauses between them grow.
        assert!(calls < 150, "{}: {calls} calls", place.name());
        vault.set("password-1");
        until(async || guard.renew().await.is_ok()).await;
        assert!(guard.is_held());
        guard.release_timeout(SOON).await.unwrap();
    }
}
