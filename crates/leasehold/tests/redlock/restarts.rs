//! Servers that forget what they granted: started again empty, or emptied.

use std::time::{Duration, Instant};

use leasehold::{Client, Guard};
use leasehold_testkit::{Flavor, Server, retry_if_paused, unless_paused, until};

use crate::nodes::{Nodes, holds, tokens_given, url};

const LONGEST: Duration = Duration::from_secs(2);

/// A pause of the machine that such a lease, and the time for which a node abstains, outlast.
const PAUSE: Duration = Duration::from_millis(500);
const ABSTAINING: &str = "max_ttl_ms=2000";

async fn try_lock(client: &Client, name: &str) -> Result<Option<Guard>, leasehold::Error> {
    client.mutex(name).ttl(LONGEST).try_lock().await
}

/// Until it is taken, whatever is said before.
async fn taken(client: &Client, name: &str) -> Guard {
    let mut taken = None;
    until(async || {
        taken = try_lock(client, name).await.ok().flatten();
        taken.is_some()
    })
    .await;
    taken.unwrap()
}

#[tokio::test]
async fn node_restarted_empty_votes_at_once_without_max_ttl() {
    let mut nodes = Nodes::start(3);
    let (client, proxies) = nodes.client_through_proxies(0, "").await;
    // Longer than this test waits for anything.
    let guard = client.mutex("h").ttl(Duration::from_secs(600)).lock().await.unwrap();
    // Its client would learn the loss as soon as it is connected again.
    proxies.iter().for_each(|proxy| proxy.refuse(true));
    nodes.stop([0, 1]);
    nodes.start_again([0, 1]);
    // A quorum has forgotten the lease: this is what the longest ttl is there for.
    let other = nodes.client().await;
    let next = taken(&other, "h").await;
    assert!(next.token() > guard.token());
    assert!(guard.is_held(), "and so there are two holders");
}

#[tokio::test]
async fn forgotten_lease_is_not_granted_while_its_holder_trusts_it() {
    unless_paused(PAUSE, async || {
        let nodes = Nodes::start(3);
        let (client, other) = (nodes.client_with(ABSTAINING).await, nodes.client_with(ABSTAINING).await);
        let guard = client.mutex("a").ttl(LONGEST).auto_renew(false).lock().await.unwrap();
        for server in &nodes.0 {
            server.run(&["FLUSHALL"]);
        }
        assert!(other.mutex("b").ttl(LONGEST).try_lock().await.is_err(), "all abstain");
        let next = taken(&other, "a").await;
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    })
    .await;
}

#[tokio::test]
async fn new_servers_abstain_and_waiters_wait_for_them() {
    unless_paused(PAUSE, async || {
        for stopped in [None, Some(0)] {
            let mut nodes = Nodes::start(3);
            nodes.stop(stopped);
            let began = Instant::now();
            let client = nodes.client_with(ABSTAINING).await;
            let error = try_lock(&client, "a").await.unwrap_err();
            let said = error.to_string();
            assert!(error.is_unavailable() && said.contains("does not vote yet"), "{said}");
            let guard = client.mutex("a").ttl(LONGEST).lock().await.unwrap();
            assert!(began.elapsed() >= LONGEST, "{:?}", began.elapsed());
            // From then on they do.
            guard.release().await.unwrap();
            assert!(try_lock(&nodes.client_with(ABSTAINING).await, "a").await.unwrap().is_some());
        }
    })
    .await;
}

/// Node 1 is stopped, and node 0 may have forgotten its grants: no lock is acquired before the longest ttl has passed.
async fn abstains_after(forget: impl Fn(&mut Server)) {
    let mut nodes = Nodes::start(3);
    let client = nodes.client_with(ABSTAINING).await;
    let token = {
        let guard = client.mutex("a").ttl(LONGEST).lock().await.unwrap();
        guard.release().await.unwrap_or_default();
        client.mutex("a").ttl(LONGEST).lock().await.unwrap().token()
    };
    nodes.stop([1]);
    let began = Instant::now();
    forget(&mut nodes.0[0]);
    let guard = taken(&client, "a").await;
    assert!(began.elapsed() >= LONGEST, "{:?}", began.elapsed());
    assert!(guard.token() > token);
}

#[tokio::test]
async fn node_restarted_empty_abstains_for_max_ttl() {
    unless_paused(PAUSE, async || {
        abstains_after(|server| {
            server.stop();
            server.start();
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn flushed_node_abstains_for_max_ttl() {
    unless_paused(PAUSE, async || {
        abstains_after(|server| drop(server.run(&["FLUSHALL"]))).await;
    })
    .await;
}

/// Its data is then that of the other server, although it was not restarted.
#[tokio::test]
async fn node_that_was_a_replica_meanwhile_abstains_for_max_ttl() {
    unless_paused(PAUSE, async || {
        abstains_after(|server| {
            server.run(&["REPLICAOF", "127.0.0.1", "1"]);
            server.run(&["REPLICAOF", "NO", "ONE"]);
        })
        .await;
    })
    .await;
}

/// A backup is one, too. The server makes a new replication id then, and again some time after the replica has left.
#[tokio::test]
async fn node_that_gets_or_loses_its_only_replica_goes_on_voting() {
    for flavor in [Flavor::Redis7, Flavor::Redis62, Flavor::Valkey9] {
        let node = Server::builder().flavor(flavor).setting("repl-diskless-sync-delay", "0");
        let nodes = Nodes((0..2).map(|_| node.clone().start()).collect());
        let client = nodes.client_with(ABSTAINING).await;
        until_all_vote(&client).await;
        let server = &nodes.0[0];
        let info = |of: &str| -> String {
            let info: redis::InfoDict = server.query(&["INFO", "replication"]).unwrap();
            info.get(of).unwrap()
        };
        let mut ids = vec![info("master_replid")];
        let replica = node.start();
        replica.run(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
        until(async || info("connected_slaves") == "1").await;
        ids.push(info("master_replid"));
        try_lock(&client, "a").await.unwrap().expect("it is free").release().await.unwrap();
        server.run(&["CONFIG", "SET", "repl-backlog-ttl", "1"]);
        drop(replica);
        until(async || info("repl_backlog_active") == "0").await;
        ids.push(info("master_replid"));
        try_lock(&client, "a").await.unwrap().expect("it is free").release().await.unwrap();
        ids.dedup();
        assert_eq!(ids.len(), 3, "{flavor:?}");
    }
}

#[tokio::test]
async fn lease_survives_a_minority_forgetting_it() {
    retry_if_paused(LONGEST / 4, async || {
        let mut nodes = Nodes::start(3);
        let (client, other) = (nodes.client_with(ABSTAINING).await, nodes.client_with(ABSTAINING).await);
        let guard = client.mutex("a").ttl(LONGEST).lock().await.unwrap();
        until(async || nodes.holders("a").await.len() == 3 || !guard.is_held()).await;
        let holder = nodes.holders("a").await.pop();
        for round in 0..4 {
            nodes.stop([round % 3]);
            nodes.start_again([round % 3]);
            // Until it has the lease again, which takes it as long as it abstains.
            until(async || {
                let taken = try_lock(&other, "a").await;
                assert!(!guard.is_held() || taken.is_err() || taken.is_ok_and(|taken| taken.is_none()));
                let holders = nodes.holders("a").await;
                !guard.is_held() || holders.len() == 3 && holders.into_iter().all(|one| Some(one) == holder)
            })
            .await;
        }
        if guard.is_held() { Ok(()) } else { Err("it was lost".to_owned()) }
    })
    .await;
}

#[tokio::test]
async fn ttl_above_max_ttl_is_refused() {
    let nodes = Nodes::start(2);
    let client = nodes.client_with(ABSTAINING).await;
    let error = client.mutex("a").ttl(LONGEST + Duration::from_millis(1)).lock().await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("exceeds max_ttl"), "{error}");
}

/// Acquires and releases a lock, so that the nodes have abstained for as long as they must.
async fn until_all_vote(client: &Client) {
    taken(client, "votes").await.release().await.unwrap();
}

/// Nodes 0 and 1 are killed, and come back with the data that they had before `lease` was granted.
async fn restore_snapshot(nodes: &mut Nodes, lease: impl Future<Output = Guard>) -> Guard {
    for server in &nodes.0[..2] {
        server.run(&["SAVE"]);
    }
    let guard = lease.await;
    nodes.stop([0, 1]);
    nodes.start_again([0, 1]);
    for server in &nodes.0[..2] {
        assert!(!holds(server, "a").await, "the snapshot is older than the lease");
    }
    guard
}

#[tokio::test]
async fn restored_node_with_old_snapshot_abstains_until_lost_leases_have_expired() {
    unless_paused(PAUSE, async || {
        let mut nodes = Nodes::start(3);
        let client = nodes.client_with(ABSTAINING).await;
        until_all_vote(&client).await;
        let mutex = client.mutex("a").ttl(LONGEST).auto_renew(false);
        let guard = restore_snapshot(&mut nodes, async { mutex.lock().await.unwrap() }).await;
        let other = nodes.client_with(ABSTAINING).await;
        // Nodes 0 and 1 abstain from their first vote on, so a node that answers at all has not waited long enough.
        let error = try_lock(&other, "b").await.unwrap_err();
        assert!(error.to_string().contains("does not vote yet"), "{error}");
        let next = taken(&other, "a").await;
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    })
    .await;
}

const BORN_KEY: &str = "leasehold:4:born";

/// In how many seconds the server forgets since when it may vote.
fn born_expires_in(server: &Server) -> i64 {
    server.query(&["TTL", BORN_KEY]).unwrap()
}

#[tokio::test]
async fn restart_guard_expires_unless_used_and_use_does_not_reset_it() {
    unless_paused(PAUSE, async || {
        const MAX_GRACE_SECONDS: i64 = 90 * 24 * 3600;
        let nodes = Nodes::start(2);
        let client = nodes.client_with(ABSTAINING).await;
        until_all_vote(&client).await;
        let remaining = born_expires_in(&nodes.0[0]);
        assert!((MAX_GRACE_SECONDS - 3600..=MAX_GRACE_SECONDS).contains(&remaining), "{remaining}");
        // As if it had been written long ago: two numbers, since when it may vote and when that was written, and the run id.
        let mut admin = nodes.0[0].admin();
        let mut born: Vec<u8> = redis::cmd("GET").arg(BORN_KEY).query(&mut admin).unwrap();
        let micros = |of: &[u8]| f64::from_be_bytes(of.try_into().unwrap());
        let hours_ago = |hours: f64, of: &[u8]| (micros(of) - hours * 3.6e9).to_be_bytes();
        let (since, written) = (hours_ago(5.0, &born[..8]), hours_ago(2.0, &born[8..16]));
        born[..8].copy_from_slice(&since);
        born[8..16].copy_from_slice(&written);
        let _: () = redis::cmd("SET").arg(BORN_KEY).arg(&born).arg("EX").arg(600).query(&mut admin).unwrap();
        try_lock(&client, "a").await.unwrap().expect("it votes").release().await.unwrap();
        assert!(born_expires_in(&nodes.0[0]) > MAX_GRACE_SECONDS - 3600);
        let after: Vec<u8> = redis::cmd("GET").arg(BORN_KEY).query(&mut admin).unwrap();
        assert_eq!(after[..8], since, "it is as old as before");
        assert_eq!(after[16..], born[16..]);
        // Once it has expired, the node may have forgotten something.
        nodes.0[0].run(&["DEL", BORN_KEY]);
        let error = try_lock(&client, "a").await.unwrap_err();
        assert!(error.to_string().contains("does not vote yet"), "{error}");
    })
    .await;
}

/// A user of every server, who is not allowed INFO whenever the server starts.
const BLIND_USER: &str = "blind on >pass ~* &* +@all -info";

fn blind_nodes(count: usize) -> Nodes {
    Nodes((0..count).map(|_| Server::builder().setting("user", BLIND_USER).start()).collect())
}

fn blind_url(server: &Server) -> String {
    server.url().replace("redis://", "redis://blind:pass@")
}

#[tokio::test]
async fn restored_node_without_info_gets_no_vote_from_client() {
    unless_paused(PAUSE, async || {
        let mut nodes = blind_nodes(3);
        for server in &nodes.0 {
            server.run(&["ACL", "SETUSER", "blind", "+info"]);
        }
        let blind: Vec<String> = nodes.0.iter().map(blind_url).collect();
        let (holder, blind) =
            (nodes.client_with(ABSTAINING).await, Client::connect(&url(&blind, ABSTAINING)).await.unwrap());
        until_all_vote(&blind).await;
        let mutex = holder.mutex("a").ttl(LONGEST).auto_renew(false);
        // The servers that are started again do not allow INFO.
        let guard = restore_snapshot(&mut nodes, async { mutex.lock().await.unwrap() }).await;
        until(async || match try_lock(&blind, "a").await {
            Err(error) => error.to_string().contains("ACL SETUSER blind +info"),
            Ok(taken) => {
                assert!(taken.is_none() || !guard.is_held(), "two holders");
                false
            }
        })
        .await;
        for server in &nodes.0[..2] {
            server.run(&["ACL", "SETUSER", "blind", "+info"]);
        }
        let next = taken(&blind, "a").await;
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    })
    .await;
}

#[tokio::test]
async fn connect_without_info_is_refused_and_names_the_missing_right() {
    let nodes = blind_nodes(3);
    let blind: Vec<String> = nodes.0.iter().map(blind_url).collect();
    for parameters in ["", ABSTAINING] {
        let error = Client::connect(&url(&blind, parameters)).await.unwrap_err();
        let said = error.to_string();
        assert!(error.is_unavailable() && said.contains("ACL SETUSER blind +info"), "{said}");
    }
    // What does not vote needs no INFO.
    Client::connect(&blind[0]).await.unwrap().mutex("a").lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn minority_without_info_does_not_vote_until_it_is_allowed() {
    let mut nodes = blind_nodes(3);
    let urls = [nodes.0[0].url(), nodes.0[1].url(), blind_url(&nodes.0[2])];
    let client = Client::connect(&url(&urls, "")).await.unwrap();
    until(async || client.warnings().iter().any(|warning| warning.contains("ACL SETUSER blind +info"))).await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    assert_eq!(tokens_given(&nodes.0[2]), 0);
    nodes.stop([0]);
    until(async || {
        let error = client.mutex("a").try_lock().await.expect_err("one of three nodes votes");
        error.to_string().contains("ACL SETUSER blind +info")
    })
    .await;
    nodes.0[2].run(&["ACL", "SETUSER", "blind", "+info"]);
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}
