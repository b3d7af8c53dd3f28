//! What waiters, holders and releases say when the server refuses their commands.

use std::time::Duration;

use leasehold::{Client, Kind, Loss};
use leasehold_testkit::{Server, until};
use tokio::time::timeout;

use super::client_of;

const SOON: Duration = Duration::from_secs(60);

/// A server with a user besides the default one, and a client of each.
async fn with_user() -> (Server, Client, Client) {
    let server = Server::on_socket();
    server.run(&["ACL", "SETUSER", "locks", "on", ">first", "~*", "&*", "+@all"]);
    let own = Client::connect(&format!("{}?user=locks&pass=first", server.url())).await.unwrap();
    let other = client_of(&server).await;
    (server, own, other)
}

async fn until_waiting(client: &Client) {
    until(async || client.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
}

#[tokio::test]
async fn waiter_whose_right_is_taken_away_ends_with_the_servers_word() {
    let (server, own, other) = with_user().await;
    let _held = other.mutex("a").lock().await.unwrap();
    let mutex = own.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&other).await;
    server.run(&["ACL", "SETUSER", "locks", "-eval", "-evalsha"]);
    // A reconnect lets it ask at once.
    server.run(&["CLIENT", "KILL", "USER", "locks"]);
    let error = timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("the user lacks rights"), "{error}");
}

#[tokio::test]
async fn waiter_outlasts_a_password_that_is_wrong_for_a_while() {
    let (server, own, other) = with_user().await;
    let held = other.mutex("a").lock().await.unwrap();
    let mutex = own.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&other).await;
    server.run(&["ACL", "SETUSER", "locks", "resetpass", ">second"]);
    server.run(&["CLIENT", "KILL", "USER", "locks"]);
    until(async || own.refusal().is_some()).await;
    let refusal = own.refusal().unwrap().to_string();
    assert!(refusal.contains("mutex \"a\"") && refusal.contains("does not accept this user"), "{refusal}");
    server.run(&["ACL", "SETUSER", "locks", "resetpass", ">first"]);
    until(async || own.refusal().is_none()).await;
    held.release().await.unwrap();
    drop(timeout(SOON, waiting).await.unwrap().unwrap().unwrap());
}

#[tokio::test]
async fn lost_lease_names_the_reason_of_each_refusal() {
    let wrong: [(&[&str], &str); 4] = [
        (&["ACL", "SETUSER", "locks", "resetpass", ">second"], "does not accept this user and password"),
        (&["ACL", "SETUSER", "locks", "-evalsha"], "ACL SETUSER locks +evalsha"),
        (&["REPLICAOF", "127.0.0.1", "1"], "this is a replica"),
        (&["CONFIG", "SET", "min-replicas-to-write", "1"], "fewer replicas than min-replicas-to-write"),
    ];
    for (change, reason) in wrong {
        let (server, own, _other) = with_user().await;
        let guard = own.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
        server.run(change);
        server.run(&["CLIENT", "KILL", "USER", "locks"]);
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Expired);
        let why = guard.renewal_error().expect("a renewal has failed").to_string();
        assert!(why.contains(reason), "{why}");
        let error = guard.renew().await.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains(reason), "{error}");
        assert!(!format!("{error:?}").contains("first"), "{error:?}");
    }
}

#[tokio::test]
async fn refused_release_says_so_at_once() {
    let (server, own, _other) = with_user().await;
    let guard = own.mutex("a").lock().await.unwrap();
    server.run(&["ACL", "SETUSER", "locks", "-del", "-evalsha", "-eval"]);
    let error = guard.release_timeout(SOON).await.unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("the user lacks rights"), "{error}");
    server.run(&["ACL", "SETUSER", "locks", "+@all"]);
    // It is retried in the background.
    until(async || own.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}
