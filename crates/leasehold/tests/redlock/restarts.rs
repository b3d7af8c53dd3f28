//! Servers that forget what they granted: started again empty, or emptied.

use std::time::{Duration, Instant};

use leasehold::{Client, Guard};
use leasehold_servers::{Server, undisturbed, until};

use crate::nodes::{Nodes, url};

const LONGEST: Duration = Duration::from_secs(2);
const ABSTAINING: &str = "longest_ttl_ms=2000";

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
async fn a_node_that_comes_back_empty_votes_at_once_unless_told_otherwise() {
    let mut nodes = Nodes::start(3);
    let client = nodes.client().await;
    // Longer than this test waits for anything.
    let guard = client.mutex("h").ttl(Duration::from_secs(600)).lock().await.unwrap();
    nodes.stop([0, 1]);
    nodes.start_again([0, 1]);
    // A quorum has forgotten the lease: this is what the longest ttl is there for.
    let other = nodes.client().await;
    let next = taken(&other, "h").await;
    assert!(next.token() > guard.token());
    assert!(guard.is_held(), "and so there are two holders");
}

#[tokio::test]
async fn nobody_gets_what_all_nodes_have_forgotten_while_its_holder_believes_in_it() {
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
}

#[tokio::test]
async fn servers_that_are_new_are_waited_for_or_it_is_said_that_they_do_not_vote_yet() {
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
}

/// Node 1 is gone, and node 0 may have forgotten what it granted: nobody has a lock of theirs before the longest ttl is over.
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
async fn a_node_that_was_started_again_empty_abstains_until_what_it_forgot_is_over() {
    abstains_after(|server| {
        server.stop();
        server.start();
    })
    .await;
}

#[tokio::test]
async fn a_node_that_was_emptied_abstains_as_well() {
    abstains_after(|server| drop(server.run(&["FLUSHALL"]))).await;
}

#[tokio::test]
async fn a_lease_is_kept_while_a_minority_forgets_it_and_nobody_else_gets_it() {
    undisturbed(LONGEST / 4, async || {
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
async fn a_longer_ttl_than_the_longest_that_was_named_is_refused() {
    let nodes = Nodes::start(1);
    let client = nodes.client_with(ABSTAINING).await;
    let error = client.mutex("a").ttl(LONGEST + Duration::from_millis(1)).lock().await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("longest"), "{error}");
}

#[tokio::test]
async fn clients_that_may_not_ask_which_life_of_a_server_it_is_do_not_keep_it_from_voting() {
    let nodes = Nodes::start(1);
    nodes.0[0].run(&["ACL", "SETUSER", "curt", "on", ">pass", "~*", "&*", "+@all", "-info"]);
    let curt = nodes.0[0].url().replace("redis://", "redis://curt:pass@");
    let (curt, other) = (url(&[curt], ABSTAINING), nodes.client_with(ABSTAINING).await);
    let curt = Client::connect(&curt).await.unwrap();
    for round in 0..3 {
        // Both ask all the time, and each has its turn.
        for (client, neighbour) in [(&curt, &other), (&other, &curt)] {
            until(async || {
                let _ = try_lock(neighbour, "b").await;
                try_lock(client, "a").await.is_ok_and(|taken| taken.is_some())
            })
            .await;
        }
        assert!(round > 0 || try_lock(&other, "c").await.is_ok());
    }
}
