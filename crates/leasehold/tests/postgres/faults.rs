//! A server that stops, restarts, fails over, is full, or is in the way.

use std::time::{Duration, Instant};

use futures_util::future::select_all;
use leasehold::tokio_postgres::{NoTls, connect};
use leasehold::{Client, Guard, MutexSet};
use leasehold_testkit::{Postgres, SmallDisk, unless_paused, until};

use super::{LONG, client_of, lock, refusal, until_waiting};

/// A pause of the machine that the short leases of these tests outlast.
const SHORT_PAUSE: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_outlives_a_server_that_is_stopped_for_less_than_its_ttl() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(40)).lock().await.unwrap();
    server.freeze();
    let stopped = Instant::now();
    assert!(client.mutex("b").try_lock().await.is_err());
    server.thaw();
    assert!(stopped.elapsed() < Duration::from_secs(30), "the machine was too slow for this test");
    until(async || client.mutex("a").inspect().await.is_ok()).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_lost_before_its_ttl_while_the_server_is_stopped_for_longer() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(2);
    let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
    let first = guard.token();
    server.freeze();
    let stopped = Instant::now();
    // When it is told depends on the machine. What it trusts does not: the clock is read before each look.
    let run_result = tokio::time::timeout(LONG, guard.run(std::future::pending::<()>()));
    let looks = async {
        loop {
            let looked = Instant::now();
            if !guard.is_held() {
                return;
            }
            assert!(looked <= stopped + ttl, "held {:?} after the server stopped", looked - stopped);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (run_result, ()) = tokio::join!(run_result, looks);
    let lost = run_result.expect("it is told").unwrap_err();
    assert!(lost.is_lost(), "{lost}");
    server.thaw();
    let second = lock(&client, "a").await;
    assert!(second.token() > first);
}

/// The release of the part that is held has no answer either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set_of_which_one_part_is_held_ends_in_time_while_the_server_is_stopped() {
    unless_paused(SHORT_PAUSE, async || {
        let server = Postgres::on_port();
        let (one, other) = (client_of(&server).await, client_of(&server).await);
        let long = |client: &Client, name| client.mutex(name).ttl(Duration::from_secs(60));
        let _held = long(&other, "a").lock().await.unwrap();
        // In the order of their names.
        let set = MutexSet::new(["0", "a"].map(|name| long(&one, name)));
        let (limit, began) = (Duration::from_secs(4), Instant::now());
        let waiting = tokio::spawn(async move { set.lock_timeout(limit).await.map(drop) });
        until_waiting(&other, 1).await;
        server.freeze();
        assert!(waiting.await.unwrap().unwrap_err().is_unavailable());
        assert!(began.elapsed() < limit + Duration::from_secs(6), "{:?}", began.elapsed());
        server.thaw();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_and_queue_outlive_a_crash_of_the_server() {
    let mut server = Postgres::builder().setting("fsync=on").start();
    let (holder, waiter) = (client_of(&server).await, client_of(&server).await);
    let guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let first = guard.token();
    let waiting = tokio::spawn(async move {
        let guard = lock(&waiter, "a").await;
        (guard.token(), waiter)
    });
    until_waiting(&holder, 1).await;
    server.stop();
    server.start();
    until(async || holder.mutex("a").inspect().await.is_ok()).await;
    assert!(guard.is_held());
    assert!(client_of(&server).await.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    let (second, _waiter) = waiting.await.unwrap();
    assert!(second > first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_to_a_synchronous_standby_keeps_the_lease() {
    let mut primary = Postgres::builder().setting("synchronous_standby_names=*").start();
    // Until it has one, nothing commits.
    let standby = primary.standby();
    let client = client_of(&primary).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    primary.stop();
    standby.run("ALTER SYSTEM SET synchronous_standby_names = ''");
    standby.run("SELECT pg_reload_conf()");
    standby.promote();
    let other = client_of(&standby).await;
    let view = other.mutex("a").inspect().await.unwrap();
    assert_eq!(view.holders.first().map(|holder| holder.token), Some(guard.token()));
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_to_an_asynchronous_standby_may_forget_a_lease_and_the_next_token_is_higher() {
    let mut primary = Postgres::on_port();
    lock(&client_of(&primary).await, "a").await.release().await.unwrap();
    let standby = primary.standby();
    leasehold_testkit::wait_until("it follows", || {
        standby.try_run("SELECT count(*) FROM leasehold.resource").is_ok_and(|count| count == "1")
    });
    let client = client_of(&primary).await;
    // It receives nothing more.
    standby.run("ALTER SYSTEM SET primary_conninfo = ''");
    standby.run("SELECT pg_reload_conf()");
    leasehold_testkit::wait_until("it is cut off", || {
        primary.run("SELECT count(*) FROM pg_stat_replication") == "0"
    });
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    primary.stop();
    standby.promote();
    let second = lock(&client_of(&standby).await, "a").await;
    assert!(second.token() > guard.token(), "{} after {}", second.token(), guard.token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_refuses_locks_and_says_so_and_they_return_with_its_room() {
    let disk = SmallDisk::mount(90);
    let server = Postgres::builder()
        .data(&disk.folder())
        .setting("wal_recycle=off")
        .setting("max_wal_size=32MB")
        .setting("min_wal_size=32MB")
        .start();
    let client = client_of(&server).await;
    lock(&client, "a").await.release().await.unwrap();
    let filling = disk.fill();
    let mut error = None;
    // The log has some room left.
    for number in 0..20_000 {
        match client.mutex(format!("lock {number} {}", "x".repeat(400))).try_lock().await {
            Ok(guard) => drop(guard),
            Err(failed) => {
                error = Some(failed);
                break;
            }
        }
    }
    let error = error.expect("the disk is full");
    assert!(error.is_unavailable() && error.to_string().contains("disk is full"), "{error}");
    drop(filling);
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_that_keeps_the_row_delays_a_lock_and_its_error_names_the_cause() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    lock(&client, "a").await.release().await.unwrap();
    let session = server.session("BEGIN; SELECT * FROM leasehold.resource FOR UPDATE");
    leasehold_testkit::wait_until("it has the row", || {
        server.try_run("SELECT id FROM leasehold.resource FOR UPDATE NOWAIT").is_err()
    });
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.to_string().contains("pg_blocking_pids"), "{error}");
    // Other locks are not delayed.
    lock(&client, "b").await.release().await.unwrap();
    drop(session);
    lock(&client, "a").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_renewed_while_many_attempts_wait_for_the_row_of_another_lock() {
    unless_paused(SHORT_PAUSE, async || {
        let server = Postgres::on_port();
        let client = client_of(&server).await;
        lock(&client, "a").await.release().await.unwrap();
        let guard = client.mutex("b").ttl(Duration::from_secs(6)).lock().await.unwrap();
        let _session = server.session("BEGIN; SELECT * FROM leasehold.resource WHERE name = 'a' FOR UPDATE");
        leasehold_testkit::wait_until("it has the row", || {
            server.try_run("SELECT id FROM leasehold.resource WHERE name = 'a' FOR UPDATE NOWAIT").is_err()
        });
        // Each attempt keeps its connection for two seconds.
        let attempts: Vec<_> = (0..40)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.mutex("a").global_fifo().lock().await.map(drop) })
            })
            .collect();
        let held = guard.run(std::future::pending::<()>());
        let lost = tokio::time::timeout(Duration::from_secs(8), held).await;
        assert!(lost.is_err() && guard.is_held(), "{lost:?}");
        attempts.iter().for_each(tokio::task::JoinHandle::abort);
    })
    .await;
}

/// Attempts and cancels occupy all connections for commands, and a semaphore's leases are renewed by transactions.
async fn keeps_its_leases(server: &Postgres, parameters: &str, kept: &str) {
    let client = Client::connect(&format!("{}{parameters}", server.url())).await.unwrap();
    let of = |name: &str| format!("{name} of {kept}");
    lock(&client, kept).await.release().await.unwrap();
    let ttl = Duration::from_secs(6);
    let semaphore = client.semaphore(of("semaphore"), 2).ttl(ttl);
    let guards = [
        client.mutex(of("mutex")).ttl(ttl).lock().await.unwrap(),
        semaphore.acquire(1).await.unwrap(),
        semaphore.acquire(1).await.unwrap(),
    ];
    let row = format!("SELECT 1 FROM leasehold.resource WHERE name = '{kept}' FOR UPDATE");
    let _session = server.session(&format!("BEGIN; {row}"));
    leasehold_testkit::wait_until("it has the row", || server.try_run(&format!("{row} NOWAIT")).is_err());
    let attempts: Vec<_> = (0..23)
        .map(|number| {
            let limit = if number < 3 { Duration::from_secs(60) } else { Duration::from_millis(500) };
            let mutex = client.mutex(kept).global_fifo();
            tokio::spawn(async move {
                loop {
                    let _ = mutex.lock_timeout(limit).await;
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let lost = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
    let lost = tokio::time::timeout(3 * ttl, lost).await;
    assert!(lost.is_err(), "{parameters}: a lease was lost: {:?}", lost.map(|(loss, ..)| loss));
    assert!(guards.iter().all(Guard::is_held));
    attempts.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_of_all_kinds_are_renewed_while_attempts_and_cancels_wait_for_the_row_of_another_lock() {
    unless_paused(Duration::from_secs(1), async || {
        let server = Postgres::on_port();
        futures_util::future::join(
            keeps_its_leases(&server, "", "a"),
            keeps_its_leases(&server, "?connections=1", "b"),
        )
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_whose_row_is_kept_takes_no_other_lease_with_it() {
    unless_paused(SHORT_PAUSE, async || {
        let server = Postgres::on_port();
        let client = client_of(&server).await;
        let of = async |name: &str| client.mutex(name).ttl(Duration::from_secs(6)).lock().await.unwrap();
        let (_kept, b, c) = (of("a").await, of("b").await, of("c").await);
        let _session = server.session("BEGIN; SELECT * FROM leasehold.resource WHERE name = 'a' FOR UPDATE");
        leasehold_testkit::wait_until("it has the row", || {
            server.try_run("SELECT id FROM leasehold.resource WHERE name = 'a' FOR UPDATE NOWAIT").is_err()
        });
        let lost = futures_util::future::select(Box::pin(b.lost()), Box::pin(c.lost()));
        assert!(tokio::time::timeout(Duration::from_secs(11), lost).await.is_err(), "a lease was lost");
        assert!(b.is_held() && c.is_held());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notification_connection_that_was_killed_is_replaced() {
    let server = Postgres::on_port();
    let (holder, waiter) = (client_of(&server).await, client_of(&server).await);
    for _ in 0..3 {
        let held = lock(&holder, "a").await;
        let waiting = tokio::spawn({
            let waiter = waiter.clone();
            async move { lock(&waiter, "a").await }
        });
        until_waiting(&holder, 1).await;
        server.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE query ILIKE '%listen%' AND pid <> pg_backend_pid()",
        );
        held.release().await.unwrap();
        waiting.await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn tables_that_were_dropped_are_an_error_that_says_what_to_do() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    server.run("DROP SCHEMA leasehold CASCADE");
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("open the client again"), "{error}");
    let again = Client::connect(&server.url()).await.unwrap();
    lock(&again, "a").await.release().await.unwrap();
}

/// How many sessions wait for a lock of the server.
async fn until_blocked(server: &Postgres, count: usize) {
    let count = count.to_string();
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    until(async || server.run(blocked) == count).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_whose_connection_ends_before_its_commit_is_repeated() {
    let server = Postgres::on_port();
    let (client, other) = (client_of(&server).await, client_of(&server).await);
    let held = lock(&other, "a").await;
    // It begins with a transaction from now on, because the lock is contended.
    assert!(client.mutex("a").try_lock().await.unwrap().is_none());
    held.release().await.unwrap();
    let row = "SELECT 1 FROM leasehold.resource WHERE name = 'a' FOR UPDATE";
    let keeps = server.session(&format!("BEGIN; {row}"));
    until(async || server.try_run(&format!("{row} NOWAIT")).is_err()).await;
    let locking = tokio::spawn(async move { lock(&client, "a").await.release().await });
    until_blocked(&server, 1).await;
    server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'");
    drop(keeps);
    locking.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_is_refused_in_time_while_its_tables_are_locked() {
    let server = Postgres::on_port();
    drop(client_of(&server).await);
    let locks = "LOCK TABLE leasehold.layout";
    let _keeps = server.session(&format!("BEGIN; {locks}"));
    until(async || server.try_run(&format!("BEGIN; {locks} NOWAIT")).is_err()).await;
    let error = tokio::time::timeout(LONG, refusal(&server.url())).await.expect("it ends");
    assert!(error.is_unavailable() && error.to_string().contains("no answer within 5s"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_opens_while_a_program_creates_the_fence() {
    let server = Postgres::on_port();
    let (database, connection) = connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    // Both see that there is no schema, and want to create it.
    let keeps = server.session("BEGIN; CREATE SCHEMA leasehold");
    let creating = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'";
    until(async || server.run(creating) == "1").await;
    let creating = tokio::spawn(async move { leasehold::fence::postgres::create(&database).await });
    until_blocked(&server, 1).await;
    let url = server.url();
    let opening = tokio::spawn(async move { Client::connect(&url).await });
    until_blocked(&server, 2).await;
    drop(keeps);
    creating.await.unwrap().unwrap();
    lock(&opening.await.unwrap().unwrap(), "a").await.release().await.unwrap();
}
