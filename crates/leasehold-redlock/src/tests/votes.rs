//! What a try makes of its nodes' answers.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Answer, Command, Failure, Grant, Release, Renew, Reply, Round, StoreTime, TokenRange, Verdict,
    Vote,
};
use leasehold_store::{Call, StoreError};
use leasehold_testkit::{Proxy, Server, until};

use super::super::attempts::NodeRequests;
use super::super::counted_servers::CountedServers;
use super::super::votes::{NodeResponse, PendingResponses, VoteCollector};
use super::{QuorumClient, servers};

/// How long a node has for its vote.
const LIMIT: Duration = Duration::from_millis(1_500);

/// A client of these servers, each behind a proxy.
async fn client_of(servers: &[Server], limit: Duration) -> (QuorumClient, Vec<Proxy>) {
    let proxies: Vec<Proxy> = servers.iter().map(Proxy::before).collect();
    let nodes: Vec<String> = proxies.iter().map(Proxy::url).collect();
    (QuorumClient::with_limit(&nodes, 1, limit).await, proxies)
}

/// Leads the second node to the first one's server, and cuts off the first node.
async fn move_the_second_node(client: &QuorumClient, servers: &[Server], proxies: &[Proxy]) {
    proxies[1].redirect_to(servers[0].port());
    proxies[1].cut();
    until(async || client.quorum().duplicate_nodes()[1].is_some()).await;
    proxies[0].refuse(true);
    proxies[0].cut();
    until(async || !client.quorum().nodes[0].store.is_connected()).await;
}

fn voted(grant: Grant) -> NodeResponse {
    NodeResponse::Voted(Ok(Answer { at: StoreTime::ZERO, reply: Reply::Granted(grant) }))
}

/// A try that all nodes have granted. Only the first one's vote has arrived, whose token is higher than that of the others.
async fn granted_try(client: &QuorumClient) -> (VoteCollector, [Grant; 3]) {
    let acquire = Acquire::exclusive(client.attempt(1), Duration::from_secs(600));
    let sent_at = client.quorum().now();
    let mut grants = Vec::new();
    for node in 0..3 {
        let Reply::Granted(grant) = client.at_node(node, Command::from(acquire.clone())).await else {
            panic!("the node is free")
        };
        grants.push(grant);
    }
    let mut grants: [Grant; 3] = grants.try_into().unwrap();
    let higher = grants.iter().map(|grant| grant.tokens.last.get()).max().unwrap() + 1;
    grants[0].tokens = TokenRange::new(higher, higher).unwrap();
    let mut collector = VoteCollector {
        quorum: client.quorum().clone(),
        resource: client.resource.clone(),
        acquire: Arc::new(acquire),
        requests: (0..3).map(|_| NodeRequests::new()).collect(),
        floor: None,
        round: Round::new(3, true, sent_at),
        responses: PendingResponses::new(),
        counted: CountedServers::default(),
        node_errors: vec![None; 3],
        repoll_hints: Vec::new(),
    };
    collector.handle_response(0, voted(grants[0]));
    (collector, grants)
}

#[tokio::test]
async fn token_told_to_a_server_that_was_heard_as_another_node_is_not_at_a_quorum() {
    let servers = servers();
    let (client, proxies) = client_of(&servers, LIMIT).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.handle_response(1, voted(grants[1]));
    collector.round.handle_vote(2, Vote::Failed);
    move_the_second_node(&client, &servers, &proxies).await;
    assert_eq!(collector.collect().await, Verdict::NoQuorum);
    let error = collector.node_errors[1].as_ref().map_or("", |error| &error.message);
    assert!(error.contains("the same server"), "{error}");
}

#[tokio::test]
async fn server_that_was_heard_as_a_node_that_is_cut_off_has_one_vote() {
    let servers = servers();
    let (client, proxies) = client_of(&servers, LIMIT).await;
    let (mut collector, grants) = granted_try(&client).await;
    move_the_second_node(&client, &servers, &proxies).await;
    collector.handle_response(1, voted(grants[0]));
    assert_eq!(collector.round.votes()[1], Some(Vote::Failed));
    let error = collector.node_errors[1].as_ref().map_or("", |error| &error.message);
    assert!(error.contains("the same server"), "{error}");
    // Nor has a node whose server is not known.
    collector.handle_response(0, voted(grants[0]));
    let error = collector.node_errors[0].as_ref().map_or("", |error| &error.message);
    assert!(error.contains("not known"), "{error}");
}

/// The second node connects to the first one's server while a renewal is on its way, after the first node has been cut off.
#[tokio::test]
async fn server_that_was_heard_as_a_node_that_is_cut_off_renews_once() {
    let servers = servers();
    let (client, proxies) = client_of(&servers, 4 * LIMIT).await;
    let quorum = client.quorum();
    let is_connected = |node: usize| quorum.nodes[node].store.is_connected();
    let renew_while_it_moves = async |acquisition| {
        proxies[1].redirect_to(servers[0].port());
        proxies[1].hold_replies(true);
        proxies[2].refuse(true);
        proxies[1..].iter().for_each(Proxy::cut);
        until(async || !is_connected(1) && !is_connected(2)).await;
        let renew = Renew::to(acquisition, Duration::from_secs(600));
        let renewing = quorum.renew(vec![Call::new(client.resource.clone(), Command::Renew(renew))]);
        let moving = async {
            // The first node answers meanwhile.
            tokio::time::sleep(Duration::from_millis(100)).await;
            proxies[0].refuse(true);
            proxies[0].cut();
            until(async || !is_connected(0)).await;
            proxies[1].hold_replies(false);
            proxies[1].release_held();
        };
        let (answers, ()) = tokio::join!(renewing, moving);
        proxies[1].redirect_to(servers[1].port());
        proxies[1].cut();
        proxies.iter().for_each(|proxy| proxy.refuse(false));
        answers[0].as_ref().expect_err("one server is no quorum of three").message.clone()
    };
    let mut sequence = 0;
    // A busy machine may delay an answer beyond its limit.
    until(async || {
        sequence += 1;
        let granted = client.ask(sequence).await;
        let error = match granted {
            Ok(Reply::Granted(_)) => renew_while_it_moves(client.attempt(sequence)).await,
            _ => String::new(),
        };
        until(async || (0..3).all(is_connected)).await;
        let release = Release::now(client.attempt(sequence));
        until(async || quorum.release(client.resource.clone(), release.clone()).await.is_ok()).await;
        error.contains("the same server")
    })
    .await;
}

#[tokio::test]
async fn server_that_was_heard_as_another_node_releases_once() {
    let servers = servers();
    let (client, proxies) = client_of(&servers, LIMIT).await;
    until(async || matches!(client.ask(1).await, Ok(Reply::Granted(_)))).await;
    proxies[1].redirect_to(servers[0].port());
    proxies[1].cut();
    until(async || client.quorum().duplicate_nodes()[1].is_some()).await;
    proxies[2].hold_requests(true);
    let release = async || {
        let release = Release::now(client.attempt(1));
        client.quorum().release(client.resource.clone(), release).await
    };
    let error = release().await.expect_err("two servers of three have the lease").message;
    assert!(error.contains("the same server"), "{error}");
    proxies[1].redirect_to(servers[1].port());
    proxies[1].cut();
    until(async || release().await.is_ok()).await;
}

/// Another node was sent the token before, and is silent.
#[tokio::test]
async fn node_that_votes_late_has_its_own_limit_for_the_answer_to_the_token() {
    let servers = servers();
    let (client, proxies) = client_of(&servers, LIMIT).await;
    let (silent, slow) = (&proxies[1], &proxies[2]);
    assert_eq!(client.quorum().node_timeout(Duration::from_secs(600)), LIMIT);
    // A busy machine may delay the vote or the answer beyond its limit.
    for attempt in 1.. {
        let (mut collector, grants) = granted_try(&client).await;
        collector.handle_response(1, voted(grants[1]));
        silent.hold_requests(true);
        slow.delay_replies(Duration::from_millis(700));
        collector.responses.push(Box::pin(async move {
            tokio::time::sleep(LIMIT - Duration::from_millis(500)).await;
            (2, voted(grants[2]))
        }));
        let verdict = collector.collect().await;
        if matches!(verdict, Verdict::Granted(_)) {
            break;
        }
        assert!(attempt < 9, "{verdict:?}: {:?}", collector.node_errors);
        silent.hold_requests(false);
        silent.release_held();
        slow.delay_replies(Duration::ZERO);
    }
}

#[tokio::test]
async fn votes_that_a_suspended_process_finds_late_count() {
    let servers = servers();
    let (client, _proxies) = client_of(&servers, LIMIT).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.round.handle_vote(2, Vote::Failed);
    collector.responses.push(Box::pin(async move {
        std::thread::sleep(LIMIT + Duration::from_millis(100));
        (1, voted(grants[1]))
    }));
    assert!(matches!(collector.collect().await, Verdict::Granted(_)), "{:?}", collector.node_errors);
}

#[tokio::test]
async fn node_that_does_not_answer_to_the_token_has_an_error_of_its_own() {
    let servers = servers();
    let (client, _proxies) = client_of(&servers, LIMIT).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.handle_response(1, voted(grants[1]));
    collector.round.handle_vote(2, Vote::Failed);
    let error = StoreError::new(Failure::Unknown, "it hangs".to_owned());
    collector.handle_response(1, NodeResponse::Propagated(Err(error)));
    assert_eq!(collector.collect().await, Verdict::NoQuorum);
    let error = collector.node_errors[1].as_ref().map(|error| &*error.message);
    assert_eq!(error, Some("it hangs"));
}
