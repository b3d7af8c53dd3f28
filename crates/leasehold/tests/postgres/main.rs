//! Locks in PostgreSQL: what the server, the way to it, and its settings can do to them.

mod faults;
mod kills;
mod network;
mod rights;
mod servers;
mod stranger;
mod transactions;

use std::time::Duration;

use leasehold::{Client, Error, Guard};
use leasehold_testkit::{Postgres, until};

/// Long enough for a server that was restarted on a busy machine.
const LONG: Duration = Duration::from_secs(30);

async fn client_of(server: &Postgres) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

/// Acquires within a time that a queue never needs.
async fn lock(client: &Client, name: &str) -> Guard {
    let locked = client.mutex(name).lock_timeout(LONG).await;
    locked.unwrap().expect("the lock is free soon")
}

async fn until_waiting(client: &Client, count: usize) {
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == count)).await;
}

/// A client that cannot be opened.
async fn refusal(url: &str) -> Error {
    match Client::connect(url).await {
        Ok(_) => panic!("{url} was opened"),
        Err(error) => error,
    }
}
