//! Clients whose runtime is idle, has ended, or lacks timers and sockets.

use std::time::Duration;

use leasehold::Guard;
use leasehold_testkit::{Server, until};
use tokio::time::timeout;

use super::{SOON, client_of, connections, until_waiting};

/// Its renewals are due every four seconds, so that it outlasts a pause of the machine.
const TTL: Duration = Duration::from_secs(12);

/// Waits until more of the lease is left than before.
async fn until_renewed(guard: &Guard) {
    let mut before = guard.remaining();
    until(async || {
        let now = guard.remaining();
        now > std::mem::replace(&mut before, now)
    })
    .await;
    assert!(guard.is_held(), "it is renewed");
}

/// A runtime of one thread, which runs only while a caller blocks on it.
fn idle_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn renewals_and_waiters_need_no_caller_runtime() {
    let server = Server::on_port();
    let idle = idle_runtime();
    let client = idle.block_on(client_of(&server));
    let guard = idle.block_on(async {
        // Until the caller connection is open.
        until(async || connections(&server).len() == 3).await;
        client.mutex("held").ttl(TTL).lock().await.unwrap()
    });
    // That runtime exists but is idle from now on.
    let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    other.block_on(async {
        let holder = client_of(&server).await;
        let first = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
        let mutex = client.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
        until_waiting(&holder, 1).await;
        first.release().await.unwrap();
        // A waiter asks again after 25 s.
        let next = timeout(Duration::from_secs(15), waiting).await.expect("its grant is pushed").unwrap();
        until_renewed(&guard).await;
        guard.release().await.unwrap();
        drop(next);
        timeout(SOON, client.close()).await.expect("the client closes").unwrap();
    });
    drop(idle);
}

#[test]
fn ended_runtime_loses_no_lock() {
    let server = Server::on_port();
    let short = idle_runtime();
    let (client, guard) = short.block_on(async {
        let client = client_of(&server).await;
        until(async || connections(&server).len() == 3).await;
        let guard = client.mutex("held").ttl(TTL).lock().await.unwrap();
        (client, guard)
    });
    drop(short);
    idle_runtime().block_on(async {
        until_renewed(&guard).await;
        guard.release().await.unwrap();
        client.mutex("a").lock().await.unwrap().release().await.unwrap();
    });
}

#[test]
fn runtime_without_timers_and_sockets_suffices() {
    let server = Server::on_port();
    let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let client = client_of(&server).await;
        for _ in 0..3 {
            client.mutex("a").lock().await.unwrap().release().await.unwrap();
        }
        client.close().await.unwrap();
    });
}
