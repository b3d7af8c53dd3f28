//! A client whose store is opened when it is first used.

use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::Server;

async fn lazy(url: &str) -> Client {
    Client::builder().store(url).lazy().connect().await.expect("nothing is opened yet")
}

#[tokio::test]
async fn program_starts_before_its_server_and_waiters_retry() {
    let mut server = Server::on_socket();
    server.stop();
    let client = lazy(&server.url()).await;
    let orders = client.mutex("orders:42");
    assert!(orders.try_lock().await.unwrap_err().is_unavailable());
    assert!(client.list().await.unwrap_err().is_unavailable());
    let waiting = {
        let orders = orders.clone();
        tokio::spawn(async move { orders.lock_timeout(Duration::from_secs(60)).await })
    };
    // The waiter has been refused at least once.
    assert!(orders.try_lock().await.unwrap_err().is_unavailable());
    server.start();
    let guard = waiting.await.unwrap().unwrap().expect("granted");
    assert_eq!(client.list().await.unwrap().len(), 1);
    guard.release().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test]
async fn lazy_client_waits_hands_over_and_loses_as_any_other() {
    let server = Server::on_socket();
    let (one, other) = (lazy(&server.url()).await, lazy(&server.url()).await);
    let held = one.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn(async move { other.mutex("a").lock().await });
    let is_queued = async || one.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1);
    leasehold_testkit::until(is_queued).await;
    held.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(!one.force_release(leasehold::Kind::Mutex, "a").await.unwrap().is_empty());
    guard.lost().await;
    assert!(!guard.is_held());
}

#[tokio::test]
async fn settings_are_checked_before_the_store_is_opened() {
    let error = Client::builder().store("redis://host:port").lazy().connect().await.unwrap_err();
    assert!(error.is_invalid(), "{error}");
    let client = lazy("memory:").await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    // A file that can't be opened is reported by the first command.
    let client = lazy("sqlite:/no/such/folder/locks.db").await;
    assert!(client.mutex("a").lock_timeout(Duration::ZERO).await.is_err());
}
