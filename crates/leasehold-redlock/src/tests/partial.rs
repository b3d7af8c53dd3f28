//! Grants of a minority, answers that a minority owes, and for how long a command waits for them.

use std::time::Duration;

use leasehold_core::{Acquire, Command, LocalTime, Renew, Reply, Token};
use leasehold_store::Call;
use leasehold_testkit::{Proxy, retry_if_paused};

use super::{QuorumClient, servers};

#[tokio::test]
async fn waiter_gives_a_part_of_its_grants_back_within_some_round_trips() {
    let client = QuorumClient::new(&servers(), 1).await;
    let quorum = client.quorum();
    let since = LocalTime::ZERO;
    for _ in 0..100 {
        let round_trips = 4 * quorum.round_trip();
        assert!(quorum.may_complete(since, since + Duration::from_millis(7) + round_trips));
        assert!(!quorum.may_complete(since, since + Duration::from_millis(33) + round_trips));
    }
}

/// The node answers the second release before a late acquire reaches it.
#[tokio::test]
async fn late_acquire_is_refused_by_a_node_that_has_answered_two_releases() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    let (quorum, request) = (client.quorum(), client.request(1));
    // The acquire is on its way to all nodes.
    let (acquisition, _) = quorum.attempts.ask(&client.resource, &request).unwrap();
    let known = quorum.attempts.release(request.acquisition, quorum.now()).unwrap();
    for node in 0..3 {
        quorum.clone().release_node(node, &known, Duration::ZERO, false).await.unwrap();
        let late = Acquire { acquisition, ..(*request).clone() };
        assert_eq!(client.at_node(node, Command::from(late)).await, Reply::Cancelled);
    }
    // The release is not repeated later: the tombstone is that of the second one.
    assert!(quorum.nodes.iter().all(|node| node.unreleased().is_empty()));
}

/// Two nodes are silent. A lease of 0.3 s can't wait for them as long as one of ten minutes.
#[tokio::test]
async fn batch_of_renewals_waits_no_longer_than_its_shortest_lease_allows() {
    let servers = servers();
    let proxies: Vec<Proxy> = servers.iter().map(Proxy::before).collect();
    let nodes: Vec<String> = proxies.iter().map(Proxy::url).collect();
    let client = QuorumClient::with(&nodes, 1, "").await;
    let quorum = client.quorum();
    retry_if_paused(Duration::from_millis(200), async || {
        for sequence in [1, 2] {
            quorum.attempts.attach(&client.resource, client.request(sequence), Token::new(1).unwrap());
        }
        proxies[1..].iter().for_each(|proxy| proxy.hold_requests(true));
        let batch =
            [(1, Duration::from_secs(600)), (2, Duration::from_millis(300))].map(|(sequence, ttl)| {
                let renew = Renew::to(client.attempt(sequence), ttl);
                Call::new(client.resource.clone(), Command::Renew(renew))
            });
        let began = quorum.now();
        let answers = quorum.renew(batch.to_vec()).await;
        let took = quorum.now().since(began);
        proxies[1..].iter().for_each(|proxy| {
            proxy.hold_requests(false);
            proxy.release_held();
        });
        for sequence in [1, 2] {
            quorum.attempts.detach(client.attempt(sequence));
        }
        assert!(answers.iter().all(Result::is_err));
        if took > Duration::from_millis(600) {
            return Err(format!("the batch took {took:?}"));
        }
        Ok(())
    })
    .await;
}
