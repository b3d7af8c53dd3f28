//! Locks that count only when replicas have them, with a frozen replica.

use std::time::{Duration, Instant};

use leasehold::{Client, Kind, Loss};
use leasehold_testkit::{Builder, Flavor, Proxy, Server, retry_if_paused, unless_paused, until, until_some};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

/// A master and its synchronized replica.
async fn master_and_replica() -> (Server, Server) {
    master_and_replica_of(&Server::builder()).await
}

async fn master_and_replica_of(server: &Builder) -> (Server, Server) {
    let master = server.clone().setting("repl-diskless-sync-delay", "0").start();
    let replica = server.clone().setting("replicaof", &format!("127.0.0.1 {}", master.port())).start();
    until(async || master.query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count == 1)).await;
    (master, replica)
}

/// Whether the replica has the lease.
fn has_it(replica: &Server) -> bool {
    replica.query::<Vec<String>>(&["KEYS", "leasehold:*mutex:a*"]).unwrap().len() == 1
}

#[tokio::test]
async fn lease_counts_once_the_replica_has_it() {
    unless_paused(Duration::from_millis(300), async || {
        let (master, replica) = master_and_replica().await;
        let (one, other) =
            (Client::connect(&master.url()).await.unwrap(), Client::connect(&master.url()).await.unwrap());
        let long = Duration::from_secs(60);
        let mutex = one.mutex("a").ttl(long).replicas(1);
        // On a busy machine the replica may not answer within 0.5 s.
        let guard = until_some(async || mutex.lock().await.ok()).await;
        assert!(has_it(&replica));
        assert!(guard.remaining() > long / 2, "for its full ttl");
        guard.renew().await.unwrap();
        assert!(other.mutex("a").replicas(1).try_lock().await.unwrap().is_none());
        // The same for a waiter.
        let waiting = other.mutex("a").ttl(long).replicas(1);
        let waiting = tokio::spawn(async move { waiting.lock().await.unwrap() });
        until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
        guard.release().await.unwrap();
        let next = timeout(SOON, waiting).await.unwrap().unwrap();
        assert!(next.remaining() > long / 2, "it was claimed");
        next.release().await.unwrap();
        let error = mutex.clone().replicas(2).try_lock().await.unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("only 1 of the 2 replicas"), "{error}");
        until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.holders.is_empty())).await;
    })
    .await;
}

#[tokio::test]
async fn missing_replica_releases_the_lease_and_voids_renewals() {
    unless_paused(Duration::from_millis(300), async || {
        let (master, replica) = master_and_replica().await;
        let (one, other) =
            (Client::connect(&master.url()).await.unwrap(), Client::connect(&master.url()).await.unwrap());
        let ttl = Duration::from_secs(3);
        let guard = one.mutex("a").replicas(1).ttl(ttl).lock().await.unwrap();
        let mutex = other.mutex("a").replicas(1);
        let waiting = tokio::spawn(async move { mutex.lock().await });
        until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;

        replica.signal("STOP");
        // The master renews it, but a failover would lose the renewal.
        assert!(guard.remaining() <= ttl);
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Expired);
        drop(guard);
        // A grant that only the master has does not count either.
        let error = timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("only 0 of the 1 replicas"), "{error}");
        let error = one.mutex("a").replicas(1).lock().await.unwrap_err();
        assert!(error.to_string().contains("only 0 of the 1 replicas"), "{error}");
        until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.holders.is_empty())).await;
        // An attempt without `replicas` does not need them.
        one.mutex("a").lock().await.unwrap().release().await.unwrap();

        replica.signal("CONT");
        until(async || one.mutex("a").replicas(1).try_lock().await.is_ok_and(|guard| guard.is_some())).await;
    })
    .await;
}

/// How often the server was asked to wait for its replicas.
fn waits(server: &Server) -> usize {
    let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
    let line = stats.lines().find(|line| line.starts_with("cmdstat_wait:calls="));
    line.and_then(|line| line.split(['=', ',']).nth(1)?.parse().ok()).unwrap_or(0)
}

/// The lock stays busy after it, so a failover must not forget it. The release is repeated over another connection, where it changes
/// nothing any more. Newer servers count nothing but the writes of a connection.
#[tokio::test]
async fn release_that_retains_the_lease_counts_once_the_replica_has_it() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let (master, replica) = master_and_replica_of(&Server::builder().flavor(flavor)).await;
        let proxy = Proxy::before(&master);
        let client = Client::connect(&proxy.url()).await.unwrap();
        let long = Duration::from_secs(60);
        let mutex = client.mutex("a").ttl(long).min_hold(long * 10).replicas(1);
        let guard = until_some(async || mutex.lock().await.ok()).await;
        replica.signal("STOP");
        let error = guard.release().await.unwrap_err();
        assert!(error.to_string().contains("only 0 of the 1 replicas"), "{error}");
        // It goes on in the background.
        proxy.cut();
        let before = waits(&master);
        until(async || waits(&master) >= before + 6).await;
        replica.signal("CONT");
        until(async || has_it(&replica)).await;
        drop(master);
        replica.run(&["REPLICAOF", "NO", "ONE"]);
        let other = Client::connect(&replica.url()).await.unwrap();
        assert!(other.mutex("a").try_lock().await.unwrap().is_none(), "it is retained");
    }
}

/// A failover would undo a count that the master alone has. So it counts for no call before the replica has it: neither for the same call
/// again, nor for that of another client, nor for one that waits.
#[tokio::test]
async fn count_of_a_latch_counts_for_no_call_before_the_replica_has_it() {
    unless_paused(Duration::from_millis(300), async || {
        let (master, replica) = master_and_replica().await;
        let client = Client::connect(&master.url()).await.unwrap();
        let latch = client.latch("a", 1).replicas(1);
        // The replica connection is open, and the replica hangs.
        until(async || client.latch("b", 1).replicas(1).count_down().await.is_ok()).await;
        replica.signal("STOP");
        client.latch("a", 1).count_down_as("host").await.unwrap();
        let unconfirmed = |error: leasehold::Error| {
            assert!(error.to_string().contains("only 0 of the 1 replicas"), "{error}");
        };
        unconfirmed(latch.count_down_as("host").await.unwrap_err());
        unconfirmed(latch.count_down_as("other").await.unwrap_err());
        unconfirmed(latch.count_down().await.unwrap_err());
        unconfirmed(latch.wait_timeout(SOON).await.unwrap_err());
        replica.signal("CONT");
        until(async || latch.count_down_as("host").await.is_ok_and(|left| left == 0)).await;
        assert!(latch.wait_timeout(SOON).await.unwrap());
    })
    .await;
}

/// The server runs nothing of a connection while it waits for the replicas: one round trip for each of many commands would delay a renewal
/// until its lease has expired.
#[tokio::test]
async fn commands_of_one_client_wait_for_the_replicas_together() {
    let master = Server::builder().setting("repl-diskless-sync-delay", "0").start();
    let proxy = Proxy::before(&master);
    let _replica = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", proxy.port())).start();
    until(async || master.query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count == 1)).await;
    let client = Client::connect(&master.url()).await.unwrap();
    until(async || client.mutex("a").replicas(1).try_lock().await.is_ok()).await;
    proxy.delay_replies(Duration::from_millis(200));
    let guard = until_some(async || client.mutex("held").ttl(SOON).replicas(1).lock().await.ok()).await;
    let before = waits(&master);
    let attempts = (0..40).map(|number| {
        let mutex = client.mutex(format!("b{number}")).replicas(1);
        tokio::spawn(async move { mutex.try_lock().await })
    });
    for attempt in attempts.collect::<Vec<_>>() {
        // On a busy machine one may fail. What counts is that none of them has waited for all others.
        let _ = attempt.await.unwrap();
    }
    let waited = waits(&master) - before;
    assert!(waited < 20, "{waited} times for 40 commands");
    assert!(guard.is_held());
}

/// As without replicas: an answer that is late is no hung connection.
#[tokio::test]
async fn server_that_answers_later_and_later_grants_locks_with_replicas() {
    let (master, _replica) = master_and_replica().await;
    let proxy = Proxy::before(&master);
    let client = Client::builder().store(proxy.url()).replicas(1).connect().await.unwrap();
    until(async || client.mutex("first").try_lock().await.is_ok()).await;
    // Only what waits for replicas shows the client how late the server answers.
    let lease = client.mutex("held").ttl(Duration::from_secs(20)).lock().await.unwrap();
    let mut guards = Vec::new();
    for ms in [500, 900, 1_300, 1_800, 1_800, 1_800] {
        proxy.delay_replies(Duration::from_millis(ms));
        for _ in 0..2 {
            let tried = client.mutex(guards.len().to_string()).ttl(Duration::from_secs(60)).try_lock().await;
            guards.push(tried.unwrap_or_else(|error| panic!("{ms} ms late: {error}")).unwrap());
        }
    }
    assert!(lease.is_held());
}

/// A server or a firewall cuts connections that are idle.
#[tokio::test]
async fn open_latch_is_passed_although_the_connection_for_replicas_was_cut() {
    let (master, _replica) = master_and_replica().await;
    let client = Client::connect(&master.url()).await.unwrap();
    let latch = client.latch("a", 1).replicas(1);
    until(async || latch.count_down_as("host").await.is_ok()).await;
    for _ in 0..5 {
        let clients: String = master.query(&["CLIENT", "LIST"]).unwrap();
        let waited =
            clients.lines().find(|line| line.contains("cmd=wait")).expect("a connection for replicas");
        let id = waited.split(' ').find_map(|field| field.strip_prefix("id=")).unwrap();
        master.run(&["CLIENT", "KILL", "ID", id]);
        assert!(latch.wait_timeout(SOON).await.unwrap());
        assert_eq!(latch.count_down_as("host").await.unwrap(), 0);
    }
}

#[tokio::test]
async fn store_without_replicas_refuses_wait_for_replicas() {
    let client = Client::connect("memory:").await.unwrap();
    let error = client.mutex("a").replicas(1).lock().await.unwrap_err();
    assert!(error.is_unsupported(), "{error}");
}

/// The replica connection is opened on first use.
#[tokio::test]
async fn attempts_at_a_hung_server_time_out_together() {
    let (master, _replica) = master_and_replica().await;
    let client = Client::connect(&master.url()).await.unwrap();
    master.signal("STOP");
    let began = Instant::now();
    let attempts = (0..8).map(|number| {
        let mutex = client.mutex(format!("a{number}")).replicas(1);
        tokio::spawn(async move { mutex.try_lock().await })
    });
    for attempt in attempts.collect::<Vec<_>>() {
        let error = timeout(SOON, attempt).await.unwrap().unwrap().unwrap_err();
        assert!(error.is_unavailable(), "{error}");
    }
    let took = began.elapsed();
    master.signal("CONT");
    // One after the other they would take 16 s.
    assert!(took < Duration::from_secs(10), "it took {took:?}");
}

/// The server grants the lease before it refuses WAIT, so the lease must be released.
#[tokio::test]
async fn lease_of_a_user_who_may_not_wait_is_released() {
    let (master, _replica) = master_and_replica().await;
    master.run(&["ACL", "SETUSER", "locks", "on", ">hunter2", "~*", "&*", "+@all", "-wait"]);
    let url = format!("redis://locks:hunter2@127.0.0.1:{}", master.port());
    let (one, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
    let is_free = async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.holders.is_empty());
    let error = one.mutex("a").replicas(1).lock().await.unwrap_err();
    assert!(error.to_string().contains("+wait (docs/operations.md"), "{error}");
    until(is_free).await;
    // The same for a waiter.
    let guard = other.mutex("a").lock().await.unwrap();
    let waiting = one.mutex("a").replicas(1);
    let waiting = tokio::spawn(async move { waiting.lock().await });
    until(async || other.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    guard.release().await.unwrap();
    let error = timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("+wait (docs/operations.md"), "{error}");
    until(is_free).await;
}

/// Which right is missing is asked for by each of them, and not by the task that sends for all: that took a round trip for each.
#[tokio::test]
async fn refused_attempts_do_not_keep_the_others_from_the_replicas() {
    let (master, _replica) = master_and_replica().await;
    let proxy = Proxy::before(&master);
    master.run(&["ACL", "SETUSER", "locks", "on", ">hunter2", "~*", "&*", "+@all"]);
    let url = proxy.url().replace("redis://", "redis://locks:hunter2@");
    let client = Client::connect(&url).await.unwrap();
    until(async || client.mutex("a").replicas(1).try_lock().await.is_ok()).await;
    master.run(&["ACL", "SETUSER", "locks", "-xadd"]);
    retry_if_paused(Duration::from_millis(300), async || {
        proxy.delay_replies(Duration::from_millis(50));
        let began = Instant::now();
        let attempts = (0..200).map(|number| {
            let mutex = client.mutex(format!("b{number}")).replicas(1);
            tokio::spawn(async move { mutex.try_lock().await })
        });
        for attempt in attempts.collect::<Vec<_>>() {
            let error = attempt.await.unwrap().unwrap_err();
            assert!(error.to_string().contains("+xadd"), "{error}");
        }
        let took = began.elapsed();
        proxy.delay_replies(Duration::ZERO);
        if took < Duration::from_secs(4) { Ok(()) } else { Err(format!("200 refusals took {took:?}")) }
    })
    .await;
}

/// WAIT blocks its connection, so a batch of renewals has one.
#[tokio::test]
async fn renewals_of_many_leases_wait_for_the_replicas_together() {
    const LEASES: usize = 50;
    let (master, _replica) = master_and_replica().await;
    let client = Client::connect(&master.url()).await.unwrap();
    let mut guards = Vec::new();
    for number in 0..LEASES {
        let mutex = client.mutex(format!("a{number}")).ttl(Duration::from_secs(12)).replicas(1);
        guards.push(until_some(async || mutex.lock().await.ok()).await);
    }
    let calls = |command: &str| {
        let stats: String = master.query(&["INFO", "commandstats"]).unwrap();
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:calls=")));
        line.and_then(|line| line.split(['=', ',']).nth(1)?.parse().ok()).unwrap_or(0)
    };
    let (renewals, waits) = (calls("evalsha"), calls("wait"));
    until(async || calls("evalsha") >= renewals + LEASES).await;
    let (renewals, waits) = (calls("evalsha") - renewals, calls("wait") - waits);
    assert!(waits * 2 < renewals, "{waits} times WAIT for {renewals} renewals");
    assert!(guards.iter().all(leasehold::Guard::is_held));
}
