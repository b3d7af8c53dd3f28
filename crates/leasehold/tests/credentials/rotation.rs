//! A password that is replaced again and again: the old one is refused from then on, and all connections are closed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard, Kind, Token};
use leasehold_testkit::{unless_paused, until};
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

/// Leases that are kept, and as many waiters as rotations. Between two rotations the lock is handed from one waiter to the next, in the
/// order in which they came.
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
    let first = holder.mutex("queue").lock().await.unwrap();
    let granted: Arc<Mutex<Vec<(usize, Token)>>> = Arc::default();
    let mut waiting = Vec::new();
    for number in 0..waiters {
        let client = vault.client(place).ttl(TTL).connect().await.unwrap();
        let granted = granted.clone();
        waiting.push(tokio::spawn(async move {
            let guard = client.mutex("queue").lock().await.unwrap();
            granted.lock().unwrap().push((number, guard.token()));
            sleep(interval).await;
            assert!(guard.is_held(), "waiter {number}");
            guard.release_timeout(SOON).await.unwrap();
        }));
        let line = async |count| {
            holder.inspect(Kind::Mutex, "queue").await.is_ok_and(|view| view.waiters.len() == count)
        };
        until(async || line(number + 1).await).await;
    }
    let began = Instant::now();
    let releasing = tokio::spawn(async move {
        sleep(interval * 3 / 2).await;
        first.release_timeout(SOON).await.unwrap();
    });
    for rotation in 1..=rotations {
        sleep((interval * rotation).saturating_sub(began.elapsed())).await;
        let password = format!("password-{rotation}");
        vault.set(&password);
        place.rotate(&password);
    }
    timeout(interval + SOON, releasing).await.unwrap().unwrap();
    for waiter in waiting {
        timeout(interval * rotations + SOON, waiter).await.unwrap().unwrap();
    }
    let granted = granted.lock().unwrap().clone();
    let order: Vec<usize> = granted.iter().map(|(number, _)| *number).collect();
    assert_eq!(order, (0..waiters).collect::<Vec<_>>(), "{}", place.name());
    assert!(granted.windows(2).all(|pair| pair[0].1 < pair[1].1), "{}: tokens rise", place.name());
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
        // A waiter that the server takes for absent, because it has not connected again in time, is passed over.
        unless_paused(Duration::from_millis(200), async || outlives_rotations(&start(), SHORT).await).await;
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
