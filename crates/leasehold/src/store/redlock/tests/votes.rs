//! What a try makes of its nodes' answers.

use std::time::Duration;

use leasehold_core::{
    Acquire, Answer, Command, Failure, Grant, Reply, Round, StoreTime, TokenRange, Verdict, Vote,
};
use leasehold_testkit::{Proxy, Server, until};

use super::super::votes::{NodeResponse, PendingResponses, VoteCollector};
use super::{QuorumClient, servers};
use crate::store::StoreError;

/// How long a node has for its vote.
const LIMIT: Duration = Duration::from_millis(1_500);

/// A client of these servers, the second and the third behind a proxy.
async fn client_of(servers: &[Server]) -> (QuorumClient, Proxy, Proxy) {
    let proxies = (Proxy::before(&servers[1]), Proxy::before(&servers[2]));
    let nodes = [servers[0].url(), proxies.0.url(), proxies.1.url()];
    let client = QuorumClient::with_limit(&nodes, 1, LIMIT).await;
    (client, proxies.0, proxies.1)
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
    let mut round = Round::new(3, true, sent_at);
    round.handle_vote(0, Vote::Yes(grants[0]));
    let collector = VoteCollector {
        quorum: client.quorum().clone(),
        resource: client.resource.clone(),
        acquisition: acquire.acquisition,
        ttl: acquire.ttl,
        round,
        responses: PendingResponses::new(),
        node_errors: vec![None; 3],
        repoll_hints: Vec::new(),
    };
    (collector, grants)
}

#[tokio::test]
async fn token_told_to_a_server_that_was_heard_as_another_node_is_not_at_a_quorum() {
    let servers = servers();
    let (client, moved, _proxy) = client_of(&servers).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.round.handle_vote(1, Vote::Yes(grants[1]));
    collector.round.handle_vote(2, Vote::Failed);
    moved.redirect_to(&servers[0]);
    moved.cut();
    until(async || client.quorum().heard_twice(1, |other| other == 0).is_some()).await;
    assert_eq!(collector.collect().await, Verdict::NoQuorum);
    let error = collector.node_errors[1].as_deref().unwrap_or_default();
    assert!(error.contains("the same server"), "{error}");
}

/// Another node was told before, and is silent.
#[tokio::test]
async fn node_that_votes_late_has_its_own_limit_for_the_answer_to_the_token() {
    let servers = servers();
    let (client, silent, slow) = client_of(&servers).await;
    assert_eq!(client.quorum().node_timeout(Duration::from_secs(600)), LIMIT);
    // A busy machine may delay the vote or the answer beyond its limit.
    for attempt in 1.. {
        let (mut collector, grants) = granted_try(&client).await;
        collector.round.handle_vote(1, Vote::Yes(grants[1]));
        silent.hold_requests(true);
        slow.delay_replies(Duration::from_millis(700));
        let answered = Ok(Answer { at: StoreTime::ZERO, reply: Reply::Granted(grants[2]) });
        collector.responses.push(Box::pin(async move {
            tokio::time::sleep(LIMIT - Duration::from_millis(500)).await;
            (2, NodeResponse::Voted(answered))
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
    let (client, _one, _other) = client_of(&servers).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.round.handle_vote(2, Vote::Failed);
    let answered = Ok(Answer { at: StoreTime::ZERO, reply: Reply::Granted(grants[1]) });
    collector.responses.push(Box::pin(async move {
        std::thread::sleep(LIMIT + Duration::from_millis(100));
        (1, NodeResponse::Voted(answered))
    }));
    assert!(matches!(collector.collect().await, Verdict::Granted(_)), "{:?}", collector.node_errors);
}

#[tokio::test]
async fn node_that_does_not_answer_to_the_token_has_an_error_of_its_own() {
    let servers = servers();
    let (client, _one, _other) = client_of(&servers).await;
    let (mut collector, grants) = granted_try(&client).await;
    collector.round.handle_vote(1, Vote::Yes(grants[1]));
    collector.round.handle_vote(2, Vote::Failed);
    let error = StoreError::new(Failure::Unknown, "it hangs".to_owned());
    collector.handle_response(1, NodeResponse::Propagated(Err(error)));
    assert_eq!(collector.collect().await, Verdict::NoQuorum);
    assert_eq!(collector.node_errors[1].as_deref(), Some("it hangs"));
}
