//! What becomes of locks when something happens to their Redis server, or to the way there.

use std::time::{Duration, Instant};

use leasehold::{Client, Loss};
use leasehold_servers::Server;
use redis::Commands as _;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

async fn client_of(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let give_up = Instant::now() + SOON;
    while !is_so().await {
        assert!(Instant::now() < give_up, "it did not become so");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_waiting(client: &Client, count: usize) {
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == count)).await;
}

#[tokio::test]
async fn forgotten_scripts_are_sent_again() {
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

#[tokio::test]
async fn a_server_that_is_emptied_costs_the_lease_and_no_token_falls() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
    server.run(&["FLUSHALL"]);
    assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn a_server_that_comes_back_empty_costs_the_lease_and_no_token_falls() {
    let mut server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    server.stop();
    server.start();
    // Long before the next renewal would be due: every lease is renewed when the connection is new.
    assert_eq!(timeout(Duration::from_secs(8), guard.lost()).await.unwrap(), Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn a_server_that_hangs_for_less_than_the_ttl_costs_nothing() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
    server.signal("STOP");
    tokio::time::sleep(Duration::from_secs(3)).await;
    server.signal("CONT");
    // Beyond the first lease: only renewals can have kept it.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_server_that_hangs_for_longer_costs_the_lease_in_time() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(2);
    let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
    server.signal("STOP");
    let began = Instant::now();
    assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Expired);
    assert!(began.elapsed() < ttl + Duration::from_millis(500), "noticed after {:?}", began.elapsed());
    server.signal("CONT");
    let next = timeout(SOON, client.mutex("a").lock()).await.unwrap().unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn a_waiter_whose_connection_is_cut_keeps_its_place_and_hears_of_its_grant() {
    let server = Server::on_socket();
    let (one, other) = (client_of(&server).await, client_of(&server).await);
    for _ in 0..5 {
        let guard = one.mutex("a").lock().await.unwrap();
        let mutex = other.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await });
        until_waiting(&one, 1).await;
        // Every connection but this one, so also the holder's.
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        // It may be published while the waiter is away.
        guard.release_within(SOON).await.unwrap();
        // Much sooner than the 20 s after which a waiter looks again by itself.
        let guard = timeout(Duration::from_secs(8), waiting).await.unwrap().unwrap().unwrap();
        guard.release_within(SOON).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_memory_refuses_locks_clearly_and_still_lets_go() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").lock().await.unwrap();
    let other = client.mutex("b").at_least(Duration::from_secs(1)).lock().await.unwrap();
    let mutex = client.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&client, 1).await;
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = client.mutex("c").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("memory is full"), "{error}");
    guard.renew().await.unwrap();
    // A cancelled place, a release, a release that keeps.
    waiting.abort();
    until_waiting(&client, 0).await;
    guard.release().await.unwrap();
    other.release().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_full_memory_lets_whoever_shares_a_lock_keep_it_and_let_go() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let semaphore = client.semaphore("a", 3);
    let (one, other) = (semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap());
    let named = client.reentrant("b", "me").lock().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(semaphore.acquire(1).await.unwrap_err().is_unavailable());
    for guard in [one, other, named] {
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
    }
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(semaphore.try_acquire(3).await.unwrap().is_some());
    assert!(client.reentrant("b", "you").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_key_that_somebody_else_uses_is_an_error_that_says_so() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mut admin = server.admin();
    let _: () = admin.lpush("leasehold:1:{mutex:a}:state", "mine").unwrap();
    let error = client.mutex("a").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
    let kept: Vec<String> = admin.lrange("leasehold:1:{mutex:a}:state", 0, -1).unwrap();
    assert_eq!(kept, ["mine"]);
    assert!(client.mutex("b").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn whoever_may_not_connect_is_told_why_and_no_password_is_shown() {
    let server = Server::on_socket();
    server.run(&[
        "ACL",
        "SETUSER",
        "weak",
        "on",
        ">x",
        "~*",
        "&*",
        "+subscribe",
        "+hello",
        "+client",
        "+ping",
    ]);
    server.run(&["CONFIG", "SET", "requirepass", "s3cret"]);
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("wants a password"), "{error}");
    let wrong = format!("{}?pass=hunter2", server.url());
    let error = Client::connect(&wrong).await.unwrap_err();
    assert!(
        error.to_string().contains("does not accept") && !format!("{error:?}").contains("hunter2"),
        "{error}"
    );
    let right = Client::connect(&format!("{}?pass=s3cret", server.url())).await.unwrap();
    assert!(right.mutex("a").try_lock().await.unwrap().is_some());
    let weak = Client::connect(&format!("{}?user=weak&pass=x", server.url())).await.unwrap();
    let error = weak.mutex("a").try_lock().await.unwrap_err();
    assert!(error.to_string().contains("may not run scripts"), "{error}");
}

#[tokio::test]
async fn a_replica_is_not_written_to() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    server.run(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = client.mutex("a").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("replica"), "{error}");
}
