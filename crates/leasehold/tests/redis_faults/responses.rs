//! Lost and late responses and pushes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard, Kind};
use leasehold_testkit::{Proxy, Server, retry_if_paused, until};
use tokio::time::timeout;

use super::{SOON, client_of, connections, until_waiting};

#[tokio::test]
async fn release_that_took_effect_before_its_answer_was_lost_succeeds() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (client, watcher) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    // Loads the scripts.
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    proxy.drop_replies(true);
    let releasing = tokio::spawn(async move { guard.release_timeout(SOON).await });
    until(async || watcher.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.holders.is_empty())).await;
    proxy.drop_replies(false);
    proxy.cut();
    timeout(SOON, releasing).await.unwrap().unwrap().unwrap();
}

/// A holder that is connected directly, and a waiter behind a proxy.
async fn one_waits_behind(proxy: &Proxy, server: &Server) -> (Guard, tokio::task::JoinHandle<Guard>) {
    let holder = client_of(server).await;
    let guard = holder.mutex("a").lock().await.unwrap();
    let mutex = Client::connect(&proxy.url()).await.unwrap().mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until_waiting(&holder, 1).await;
    (guard, waiting)
}

#[tokio::test]
async fn lost_push_only_delays_the_grant() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (guard, waiting) = one_waits_behind(&proxy, &server).await;
    proxy.drop_messages(Some(b"leasehold"));
    let token = guard.token();
    guard.release().await.unwrap();
    // The first waiter re-polls when the present lease would have expired, after 10 s.
    let next = timeout(2 * SOON, waiting).await.unwrap().unwrap();
    assert!(proxy.dropped() > 0, "the push was lost");
    assert!(next.is_held() && next.token() > token);
    next.renew().await.unwrap();
}

/// The end of an inbox name and the beginning of the push `Contended`.
const CONTENDED: &[u8] = b"\n\x04";

/// Acquires and releases the lock until `is_over`. It holds it for a while, so that its reserved tokens last.
async fn work_on(mutex: leasehold::Mutex, is_over: Arc<AtomicBool>) {
    while !is_over.load(Ordering::SeqCst) {
        let guard = mutex.lock().await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn local_handoff_learns_of_other_waiters_by_renewal_when_the_push_is_lost() {
    retry_if_paused(Duration::from_millis(300), async || {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let (local, other) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
        let ttl = Duration::from_secs(6);
        let is_over = Arc::new(AtomicBool::new(false));
        let work = || tokio::spawn(work_on(local.mutex("a").ttl(ttl), is_over.clone()));
        let tasks = [work(), work(), work()];
        // The local queue has its reserved tokens, so no renewal is due before a third of the ttl.
        let has_tokens = async || {
            let view = other.mutex("a").inspect().await.unwrap();
            let number = |token: Option<leasehold::Token>| token.map_or(0, leasehold::Token::get);
            let first = view.holders.first().map(|holder| holder.token);
            first.is_some() && number(view.last_token) > number(first) + 1_000
        };
        until(has_tokens).await;
        proxy.drop_messages(Some(CONTENDED));
        let began = Instant::now();
        let guard = timeout(SOON, other.mutex("a").lock()).await.unwrap().unwrap();
        let waited = began.elapsed();
        is_over.store(true, Ordering::SeqCst);
        guard.release().await.unwrap();
        for task in tasks {
            timeout(SOON, task).await.unwrap().unwrap();
        }
        assert!(proxy.dropped() > 0, "the push was lost");
        let is_in_time = waited < ttl / 3 + Duration::from_millis(1_500);
        is_in_time.then_some(()).ok_or_else(|| format!("the other client waited for {waited:?}"))
    })
    .await;
}

#[tokio::test]
async fn missing_response_is_an_error_and_leaves_no_lease() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = client_of(&server).await;
    let client = Client::connect(&proxy.url()).await.unwrap();
    proxy.drop_replies(true);
    let began = Instant::now();
    // Does not expire during the test.
    let error = client.mutex("a").ttl(Duration::from_secs(600)).try_lock().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    // Two seconds, and a pause of the machine.
    assert!(began.elapsed() < Duration::from_secs(10), "after {:?}", began.elapsed());
    // The server has granted it. The client releases it at once, although that response is lost too.
    until(async || watcher.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.holders.is_empty())).await;
    assert!(began.elapsed() < Duration::from_secs(20), "after {:?}", began.elapsed());
    proxy.drop_replies(false);
    proxy.cut();
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

#[tokio::test]
async fn delayed_acquire_after_its_release_is_cancelled() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = client_of(&server).await;
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mutex = client.mutex("a");
    mutex.lock().await.unwrap().release().await.unwrap();
    // With several connections the release can overtake the acquire.
    until(async || connections(&server).len() == 6).await;
    proxy.hold_requests(true);
    let late = tokio::spawn(async move { mutex.lock().await });
    until(async || proxy.held() > 0).await;
    proxy.hold_requests(false);
    late.abort();
    // The lock has no holder and no waiter from before the acquire arrives until long after that.
    for is_released in [false, true] {
        if is_released {
            // What the release has left, which refuses the acquire.
            until(async || server.query::<i64>(&["EXISTS", "leasehold:4:{mutex:a}"]) == Ok(1)).await;
            proxy.release_held();
        }
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(700) {
            let view = watcher.inspect(Kind::Mutex, "a").await.unwrap();
            assert!(view.holders.is_empty() && view.waiters.is_empty(), "{view:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let guard = watcher.mutex("a").try_lock().await.unwrap().unwrap();
    guard.release().await.unwrap();
}

/// A second runtime, whose commands use the driver connection and not the caller connection.
fn other_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Grants an attempt, and delivers the response only after the client has closed that connection and another client holds the
/// lock. False: the attempt ended before the delivery, so the run tests nothing.
async fn response_after_closing(server: &Server, proxy: &Proxy) -> bool {
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || proxy.connections() == 3).await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    let watcher = client_of(server).await;
    proxy.hold_replies(true);
    let mutex = client.mutex("a");
    let late = tokio::spawn(async move { mutex.try_lock().await });
    until(async || proxy.held() > 0).await;
    proxy.hold_replies(false);
    // A refusal by a replica closes the connections. It arrives over the driver connection, and overtakes the response.
    server.run(&["REPLICAOF", "127.0.0.1", "1"]);
    let mutex = client.mutex("b");
    let refused = tokio::task::spawn_blocking(move || other_runtime().block_on(mutex.try_lock()));
    // A server that is too slow refuses nothing.
    let is_refused = refused.await.unwrap().unwrap_err().to_string().contains("replica");
    server.run(&["REPLICAOF", "NO", "ONE"]);
    server.run(&["FLUSHALL"]);
    let guard = watcher.mutex("a").try_lock().await.unwrap();
    let is_in_time = !late.is_finished();
    proxy.release_held();
    let late = timeout(SOON, late).await.unwrap().unwrap();
    if let Some(guard) = &guard {
        assert!(!late.is_ok_and(|late| late.is_some()), "the watcher holds it");
        assert!(guard.is_held());
    }
    client.close().await.unwrap();
    is_refused && is_in_time && guard.is_some()
}

#[tokio::test]
async fn response_over_a_closed_connection_is_ignored() {
    // A caller waits for its response for one second at most, which a busy machine may exceed.
    for _ in 0..20 {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        if response_after_closing(&server, &proxy).await {
            return;
        }
    }
    panic!("the response was never delivered while its caller waited for it");
}

/// The store does not retain the lock then, so that a minimum hold, a period that is done, or the count of a latch is lost.
#[tokio::test]
async fn release_that_arrives_after_the_end_of_its_lease_is_not_confirmed() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (client, direct) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    let lasting = client.mutex("a").min_hold(Duration::from_secs(3_600));
    let guard = lasting.ttl(Duration::from_secs(8)).auto_renew(false).lock().await.unwrap();
    guard.wait_until_expiring(Duration::from_secs(6)).await;
    proxy.hold_requests(true);
    let releasing = tokio::spawn(guard.release());
    // It is sent again after a second without an answer, which is before the lease expires.
    until(async || direct.mutex("a").inspect().await.is_ok_and(|view| view.holders.is_empty())).await;
    proxy.hold_requests(false);
    proxy.release_held();
    let error = releasing.await.unwrap().unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(direct.mutex("a").try_lock().await.unwrap().is_some());
}

/// A caller leaves a client whose command is still on its way, and goes on at another one.
#[tokio::test]
async fn late_command_of_a_client_that_the_caller_has_left_ends_nothing() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (left, other) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    left.mutex("b").lock().await.unwrap().release().await.unwrap();
    let request = |client: &Client| client.mutex("a").ttl(Duration::from_secs(600)).request([7; 16]);
    proxy.hold_requests(true);
    let first = request(&left);
    let asking = tokio::spawn(async move { first.lock().await });
    until(async || proxy.held() > 0).await;
    asking.abort();
    let guard = timeout(SOON, request(&other).lock()).await.unwrap().unwrap();
    proxy.hold_requests(false);
    proxy.release_held();
    // Longer than the client waits for a repeat, and for the answer to its release.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        guard.renew().await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn request_whose_store_stops_answering_is_not_told_that_it_waits() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (client, holder) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    let held = holder.mutex("a").lock().await.unwrap();
    client.mutex("b").lock().await.unwrap().release().await.unwrap();
    proxy.drop_replies(true);
    let request = client.mutex("a").request([7; 16]);
    let error = request.lock_timeout(Duration::from_secs(4)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    proxy.drop_replies(false);
    proxy.cut();
    held.release().await.unwrap();
}

/// Only the answer tells whether the release has ended the request: it goes on at another client.
#[tokio::test]
async fn request_has_not_ended_while_the_answer_to_its_release_is_missing() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (left, other) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    let held = other.mutex("a").lock().await.unwrap();
    let request = |client: &Client, label: &str| client.mutex("a").request([9; 16]).label(label);
    assert!(request(&left, "here").lock_timeout(Duration::from_secs(1)).await.unwrap().is_none());
    let suspended = Instant::now();
    let elsewhere = request(&other, "elsewhere");
    let waiting = tokio::spawn(async move { elsewhere.lock().await });
    until(async || {
        let view = other.inspect(Kind::Mutex, "a").await.unwrap();
        view.waiters.first().is_some_and(|waiter| waiter.metadata.label.as_deref() == Some("elsewhere"))
    })
    .await;
    proxy.hold_replies(true);
    // The release is sent 2.5 s after the attempt.
    until(async || suspended.elapsed() > Duration::from_secs(3) && proxy.held() > 0).await;
    let error = request(&left, "here").lock_timeout(Duration::from_secs(5)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    proxy.hold_replies(false);
    proxy.release_held();
    held.release().await.unwrap();
    timeout(SOON, waiting).await.unwrap().unwrap().unwrap().release().await.unwrap();
}
