//! Real stores that do not answer: an attempt fails as *unavailable*, and returns `None` only if the store says so.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, MutexSet, blocking};
use leasehold_testkit::{Proxy, Server, unless_paused, until};

/// Tolerance for the end of an attempt at a silent store, on a busy machine. The documented time is 2 s.
const LATE: Duration = Duration::from_secs(8);

/// Attempts of all kinds at once, each with this limit. Returns whether each was granted.
async fn attempts(client: &Client, limit: Duration) -> Vec<(&'static str, Result<bool, Error>)> {
    let (mutex, global_fifo) = (client.mutex("a"), client.mutex("a").global_fifo());
    let (semaphore, rw) = (client.semaphore("a", 1), client.rw_lock("a"));
    let (owned, election) = (client.reentrant_mutex("b", "me"), client.election("a"));
    // Its first lease outlives the limit: the loss of a lease that is held already would be reported as such.
    let set = MutexSet::new(["c", "d"].map(|name| client.mutex(name).ttl(Duration::from_secs(60))));
    let ended = tokio::join!(
        mutex.lock_timeout(limit),
        mutex.lock_timeout(limit),
        global_fifo.lock_timeout(limit),
        semaphore.acquire_timeout(1, limit),
        rw.read_timeout(limit),
        rw.write_timeout(limit),
        owned.lock_timeout(limit),
        election.campaign_timeout(limit),
        set.lock_timeout(limit),
    );
    fn granted<T>(ended: Result<Option<T>, Error>) -> Result<bool, Error> {
        ended.map(|guard| guard.is_some())
    }
    vec![
        ("first of a local queue", granted(ended.0)),
        ("second of a local queue", granted(ended.1)),
        ("global-FIFO mutex", granted(ended.2)),
        ("semaphore", granted(ended.3)),
        ("read", granted(ended.4)),
        ("write", granted(ended.5)),
        ("reentrant", granted(ended.6)),
        ("election", granted(ended.7)),
        ("set", granted(ended.8)),
    ]
}

fn assert_all_unavailable(ended: &[(&str, Result<bool, Error>)]) {
    for (what, ended) in ended {
        assert!(ended.as_ref().is_err_and(Error::is_unavailable), "{what}: {ended:?}");
    }
}

#[tokio::test]
async fn free_lock_of_a_stopped_server_is_unavailable_within_the_documented_time() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    let parked = blocking::Client::connect(&server.url()).unwrap().mutex("a");
    server.signal("STOP");
    let limit = Duration::from_millis(1_500);
    let began = Instant::now();
    let parked = std::thread::spawn(move || parked.lock_timeout(limit).map(|guard| guard.is_some()));
    assert_all_unavailable(&attempts(&client, limit).await);
    assert!(began.elapsed() < limit + LATE, "ended after {:?}", began.elapsed());
    assert_all_unavailable(&[("blocking", parked.join().unwrap())]);
    let began = Instant::now();
    assert_all_unavailable(&attempts(&client, Duration::ZERO).await);
    let started = client.once_per("e", Duration::from_secs(60)).start().await;
    assert_all_unavailable(&[("once per period", started.map(|started| started.is_some()))]);
    assert!(began.elapsed() < LATE * 2, "ended after {:?}", began.elapsed());
    server.signal("CONT");
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

/// Waiters of each kind, whose server is stopped or killed while they are queued.
async fn waiters_of_a_server_that_ends(end: impl AsyncFnOnce(&mut Server)) {
    let mut server = Server::on_socket();
    let holder = Client::connect(&server.url()).await.unwrap();
    let _held = (
        holder.mutex("a").lock().await.unwrap(),
        holder.semaphore("a", 1).acquire(1).await.unwrap(),
        holder.rw_lock("a").write().await.unwrap(),
        holder.mutex("b").lock().await.unwrap(),
        holder.election("a").campaign().await.unwrap(),
        holder.mutex("d").lock().await.unwrap(),
    );
    let client = Client::connect(&server.url()).await.unwrap();
    let limit = Duration::from_secs(8);
    let began = Instant::now();
    let waiting = tokio::spawn(async move { attempts(&client, limit).await });
    let names = ["a", "b", "d"].map(|name| holder.mutex(name));
    until(async || {
        let mut waiting = 0;
        for mutex in &names {
            waiting += mutex.inspect().await.map_or(0, |view| view.waiters.len());
        }
        // Two of the waiters for `a` share one entry in the store's queue.
        waiting == 4 && holder.election("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)
    })
    .await;
    assert!(began.elapsed() < limit, "the waiters are queued in time");
    end(&mut server).await;
    assert_all_unavailable(&waiting.await.unwrap());
    assert!(began.elapsed() < limit + LATE, "ended after {:?}", began.elapsed());
}

#[tokio::test]
async fn waiters_of_a_stopped_server_are_unavailable_at_their_deadline() {
    waiters_of_a_server_that_ends(async |server| server.signal("STOP")).await;
}

#[tokio::test]
async fn waiters_of_a_killed_server_are_unavailable_at_their_deadline() {
    waiters_of_a_server_that_ends(async |server| server.stop()).await;
}

async fn quorum_waiter_when_most_servers(end: impl Fn(&mut Server)) {
    let mut servers: Vec<Server> = (0..3).map(|_| Server::on_socket()).collect();
    let urls: Vec<String> = servers.iter().map(Server::socket_url).collect();
    let url = format!("redlock:{}", urls.join(" "));
    let holder = Client::connect(&url).await.unwrap();
    let _held = holder.mutex("a").lock().await.unwrap();
    let client = Client::connect(&url).await.unwrap();
    let limit = Duration::from_secs(8);
    let began = Instant::now();
    let mutex = client.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock_timeout(limit).await.map(|guard| guard.is_some()) });
    until(async || holder.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
    servers[..2].iter_mut().for_each(end);
    assert_all_unavailable(&[("mutex", waiting.await.unwrap())]);
    assert!(began.elapsed() < limit + LATE, "ended after {:?}", began.elapsed());
}

#[tokio::test]
async fn quorum_waiter_is_unavailable_when_most_servers_are_stopped() {
    quorum_waiter_when_most_servers(|server| server.signal("STOP")).await;
}

#[tokio::test]
async fn quorum_waiter_is_unavailable_when_most_servers_are_killed() {
    quorum_waiter_when_most_servers(Server::stop).await;
}

#[tokio::test]
async fn timed_out_waiters_of_a_distant_server_get_none() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let holder = Client::connect(&server.url()).await.unwrap();
        let _held = holder.mutex("a").lock().await.unwrap();
        let client = Client::connect(&proxy.url()).await.unwrap();
        proxy.delay_requests(Duration::from_millis(300));
        // The first limit is shorter than a round trip.
        for limit in [Duration::from_millis(100), Duration::from_millis(900)] {
            let mutex = client.mutex("a");
            let (one, other) = tokio::join!(mutex.lock_timeout(limit), mutex.lock_timeout(limit));
            assert!(one.unwrap().is_none() && other.unwrap().is_none());
            assert!(mutex.global_fifo().lock_timeout(limit).await.unwrap().is_none());
        }
        assert!(holder.mutex("a").inspect().await.unwrap().waiters.is_empty());
    })
    .await;
}

#[tokio::test]
async fn file_that_another_process_locks_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let client = Client::connect(&format!("sqlite:{}", path.display())).await.unwrap();
    drop(client.mutex("a").lock().await.unwrap());
    let busy = rusqlite::Connection::open(&path).unwrap();
    busy.execute_batch("BEGIN IMMEDIATE").unwrap();
    let limit = Duration::from_millis(300);
    let began = Instant::now();
    assert_all_unavailable(&attempts(&client, limit).await);
    assert!(began.elapsed() < limit + LATE, "ended after {:?}", began.elapsed());
    busy.execute_batch("ROLLBACK").unwrap();
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}
