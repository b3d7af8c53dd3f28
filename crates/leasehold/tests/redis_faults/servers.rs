//! Locks on a server that is flushed, restarted, hung or full.

use std::time::{Duration, Instant};

use leasehold::{Client, Kind, Loss};
use leasehold_testkit::{Flavor, Proxy, Server, retry_if_paused, until};
use redis::Commands as _;
use tokio::time::timeout;

use super::{SOON, client_of, until_waiting};

#[tokio::test]
async fn flushed_scripts_are_sent_again() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    for _ in 0..3 {
        server.run(&["SCRIPT", "FLUSH"]);
        let guard = client.mutex("a").lock().await.unwrap();
        server.run(&["SCRIPT", "FLUSH"]);
        guard.renew().await.unwrap();
        server.run(&["SCRIPT", "FLUSH"]);
        guard.release().await.unwrap();
    }
}

/// The server sweeps keys that expire, so every key of a lock has an expiry, whatever its last command was.
#[tokio::test]
async fn unused_resources_are_swept_by_other_commands() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    for number in 0..10 {
        let mutex = client.mutex(format!("retained {number}")).min_hold(Duration::from_secs(60));
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    // Like a killed process: a lease, and a waiter.
    std::mem::forget(client.mutex("a").auto_renew(false).lock().await.unwrap());
    let waiting = client.mutex("a").global_fifo();
    tokio::spawn(async move { waiting.lock().await });
    until_waiting(&client, 1).await;
    std::mem::forget(client.semaphore("s", 3).auto_renew(false).acquire(2).await.unwrap());
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let keys: Vec<String> = connection.keys("*").unwrap();
    assert!(keys.len() > 12, "{keys:?}");
    // Two keys belong to the server and to no lock.
    for key in keys.into_iter().filter(|key| !["leasehold:layout", "leasehold:4:clock"].contains(&&**key)) {
        let left: i64 = connection.pttl(&key).unwrap();
        assert!((1..=3 * 3_600_000).contains(&left), "{key} expires in {left} ms");
    }
}

/// Asserts that the holder of a lease notices soon that it is lost. Its next renewal is due after a third of the ttl.
async fn emptied_server_costs_the_lease(server: &Server, protocol: &str, ttl: Duration) {
    let client = Client::connect(&format!("{}?protocol={protocol}", server.url())).await.unwrap();
    let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
    server.run(&["FLUSHALL"]);
    let loss = timeout(SOON, guard.lost()).await.expect("the loss is noticed in time");
    assert_eq!(loss, Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test]
async fn flushed_server_loses_the_lease_and_tokens_keep_rising() {
    // By an invalidation push.
    for flavor in Flavor::ALL {
        let server = Server::builder().flavor(flavor).start();
        emptied_server_costs_the_lease(&server, "3", Duration::from_secs(90)).await;
    }
    // By the renewal, since RESP2 has no invalidation push.
    emptied_server_costs_the_lease(&Server::on_port(), "2", Duration::from_secs(30)).await;
}

#[tokio::test]
async fn unrenewed_lease_is_lost_by_its_ttl_after_a_flush() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(3);
    let guard = client.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    let granted = Instant::now();
    server.run(&["FLUSHALL"]);
    // No renewal reports it, but the lease does not outlast its ttl. The clock is read before each look.
    let mut looked = Instant::now();
    while guard.is_held() {
        assert!(looked <= granted + ttl, "held {:?} after its grant", looked - granted);
        tokio::time::sleep(Duration::from_millis(5)).await;
        looked = Instant::now();
    }
    timeout(SOON, guard.lost()).await.expect("it is told");
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn deleted_key_loses_the_lease_at_the_next_renewal() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(12);
    let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
    assert_eq!(server.query::<i64>(&["DEL", "leasehold:4:{mutex:a}"]), Ok(1));
    // A renewal is due after a third of the ttl, well before the lease would have expired.
    let loss = timeout(SOON, guard.lost()).await.expect("the loss is noticed");
    assert_eq!(loss, Loss::Gone, "by a renewal, and not by its expiry");
}

#[tokio::test]
async fn waiter_rechecks_at_once_after_a_flush() {
    let server = Server::on_port();
    let (holder, other) = (client_of(&server).await, client_of(&server).await);
    let _guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until_waiting(&holder, 1).await;
    server.run(&["FLUSHALL"]);
    // Its own re-poll is due after 25 s.
    drop(timeout(Duration::from_secs(15), waiting).await.expect("it has the lock").unwrap());
}

#[tokio::test]
async fn server_restarted_empty_loses_the_lease_and_tokens_keep_rising() {
    let mut server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(90)).lock().await.unwrap();
    server.stop();
    server.start();
    // Long before the next renewal is due: a reconnect renews every lease.
    assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn crashed_writer_behind_readers_delays_no_reader() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let _reader = client.rw_lock("a").ttl(Duration::from_secs(90)).read().await.unwrap();
    let proxy = Proxy::before(&server);
    let crashed = Client::connect(&proxy.url()).await.unwrap();
    let lock = crashed.rw_lock("a");
    let writer = tokio::spawn(async move { lock.write().await });
    until(async || client.inspect(Kind::ReadWrite, "a").await.is_ok_and(|view| view.waiters.len() == 1))
        .await;
    assert!(client.rw_lock("a").try_read().await.unwrap().is_none(), "it would overtake the writer");
    proxy.refuse(true);
    proxy.cut();
    // As soon as the server has seen the end of the connection.
    until(async || client.rw_lock("a").try_read().await.is_ok_and(|guard| guard.is_some())).await;
    assert_eq!(client.inspect(Kind::ReadWrite, "a").await.unwrap().waiters.len(), 1, "it keeps its place");
    writer.abort();
}

/// A failed poll is followed by the same pause as another one.
#[tokio::test]
async fn observer_of_a_server_that_is_down_polls_no_faster() {
    const INTERVAL: Duration = Duration::from_millis(50);
    let mut server = Server::on_socket();
    let client = client_of(&server).await;
    let mut observer = client.election("a").observe().every(INTERVAL);
    assert!(observer.next().await.unwrap().is_none());
    server.stop();
    let began = Instant::now();
    for _ in 0..10 {
        assert!(observer.next().await.unwrap_err().is_unavailable());
    }
    assert!(began.elapsed() >= 9 * INTERVAL, "{:?}", began.elapsed());
    server.start();
    until(async || client.election("a").leader().await.is_ok()).await;
    let leadership = client.election("a").campaign().await.unwrap();
    until(async || observer.next().await.is_ok_and(|leader| leader.is_some())).await;
    leadership.release().await.unwrap();
}

#[tokio::test]
async fn server_restarted_with_its_files_keeps_leases() {
    let mut server = Server::builder().setting("appendonly", "yes").setting("appendfsync", "always").start();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    server.stop();
    server.start();
    until(async || guard.renew().await.is_ok()).await;
    assert!(client_of(&server).await.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn hang_shorter_than_the_ttl_keeps_the_lease() {
    retry_if_paused(Duration::from_millis(500), async || {
        let server = Server::on_socket();
        let client = client_of(&server).await;
        let guard = client.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
        server.signal("STOP");
        tokio::time::sleep(Duration::from_secs(3)).await;
        server.signal("CONT");
        // Beyond the first lease: only renewals can have kept it.
        tokio::time::sleep(Duration::from_secs(4)).await;
        guard.release().await.map_err(|error| error.to_string())
    })
    .await;
}

#[tokio::test]
async fn hang_longer_than_the_ttl_loses_the_lease_before_it_expires() {
    retry_if_paused(Duration::from_millis(300), async || {
        let server = Server::on_socket();
        let client = client_of(&server).await;
        let ttl = Duration::from_secs(2);
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        server.signal("STOP");
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Expired);
        let noticed = began.elapsed();
        server.signal("CONT");
        let next = timeout(SOON, client.mutex("a").lock()).await.unwrap().unwrap();
        assert!(next.token() > guard.token());
        let is_in_time = noticed < ttl + Duration::from_millis(1_500);
        is_in_time.then_some(()).ok_or_else(|| format!("noticed after {noticed:?}"))
    })
    .await;
}

#[tokio::test]
async fn full_memory_refuses_locks_and_allows_releases() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").lock().await.unwrap();
    let other = client.mutex("b").min_hold(Duration::from_secs(1)).lock().await.unwrap();
    let mutex = client.mutex("a").global_fifo();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&client, 1).await;
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = client.mutex("c").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("memory is full"), "{error}");
    guard.renew().await.unwrap();
    // A dequeue, a release, a release that retains the lock.
    waiting.abort();
    until_waiting(&client, 0).await;
    guard.release().await.unwrap();
    other.release().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn full_memory_allows_renewal_and_release_of_shared_locks() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let semaphore = client.semaphore("a", 3);
    let (one, other) = (semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap());
    let named = client.reentrant_mutex("b", "me").lock().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(semaphore.acquire(1).await.unwrap_err().is_unavailable());
    for guard in [one, other, named] {
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
    }
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(semaphore.try_acquire(3).await.unwrap().is_some());
    assert!(client.reentrant_mutex("b", "you").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn many_leases_survive_a_script_flush_at_high_latency() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mut guards = Vec::new();
    let ttl = Duration::from_secs(12);
    for number in 0..300 {
        guards.push(client.mutex(format!("{number}")).ttl(ttl).lock().await.unwrap());
    }
    // One renewal after the other would take half a minute.
    proxy.delay_requests(Duration::from_millis(100));
    server.run(&["SCRIPT", "FLUSH"]);
    // Beyond the first leases: only renewals can have kept them.
    let began = Instant::now();
    until(async || began.elapsed() > ttl).await;
    assert_eq!(guards.iter().filter(|guard| !guard.is_held()).count(), 0);
}

/// The client's thread sends at most 512 commands as one batch.
#[tokio::test]
async fn releases_of_several_batches_are_sent_at_once() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let lock = async |number| client.mutex(format!("{number}")).lock().await.unwrap();
    let guards = futures_util::future::join_all((0..1_100).map(lock)).await;
    drop(guards);
    timeout(SOON, client.close()).await.unwrap().unwrap();
    let other = client_of(&server).await;
    for number in [0, 600, 1_099] {
        assert!(other.mutex(format!("{number}")).try_lock().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn close_after_a_server_crash_returns_within_the_longest_lease() {
    let mut server = Server::on_port();
    let holder = client_of(&server).await;
    let _held = holder.mutex("a").lock().await.unwrap();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(10);
    let guard = client.mutex("b").ttl(ttl).lock().await.unwrap();
    let mutex = client.mutex("a").ttl(ttl);
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&holder, 1).await;
    server.stop();
    let began = Instant::now();
    let closing = tokio::spawn(client.close());
    assert!(timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err().is_closed());
    assert!(began.elapsed() < ttl * 4 / 5, "the wait ended after {:?}", began.elapsed());
    assert!(!guard.is_held());
    let closed = timeout(SOON, closing).await.unwrap().unwrap();
    assert!(closed.unwrap_err().is_unavailable());
    assert!(began.elapsed() < ttl * 2, "closing took {:?}", began.elapsed());
}
