//! The admission queue, and which waiters `inspect` shows.

use std::sync::Arc;

use leasehold_core::{Acquire, Acquisition, Command, Release, Reply};
use leasehold_store::{Call, admission_queue_of};
use leasehold_testkit::{Proxy, until};

use super::{QuorumClient, servers};

#[tokio::test]
async fn inspect_includes_waiters_queued_at_another_node() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    let queue = Arc::new(admission_queue_of(&client.resource).unwrap());
    let mut expected = Vec::new();
    for position in 1..=2 {
        for (number, node) in (1..).zip(&client.quorum().nodes) {
            let request = client.request(10 * position + number);
            expected.push(request.acquisition);
            let answers = node.store.call_batch(vec![Call::new(queue.clone(), request)], 0).await;
            let is_first = matches!(answers[0].as_ref().unwrap().reply, Reply::Granted(_));
            assert_eq!(is_first, position == 1, "{answers:?}");
        }
    }
    // An attempt may be queued at two nodes, until its release at the first one has arrived.
    let moved = client.request(expected[3].sequence);
    drop(client.quorum().nodes[1].store.call_batch(vec![Call::new(queue, moved)], 0).await);
    let seen = client.quorum().inspect(client.resource.clone()).await.unwrap().reply;
    let Reply::View(view) = seen else { panic!("{seen:?}") };
    let mut waiters: Vec<_> = view.waiters.iter().map(|waiting| waiting.acquisition).collect();
    // Those of different nodes are in the order of the nodes' clocks, which is known to within the time that an answer takes.
    let (admitted, queued) = waiters.split_at_mut(servers.len());
    admitted.sort();
    queued.sort();
    assert_eq!(waiters, expected);
}

/// A client may wait at the nodes without admission. An admitted waiter, which is there too, is shown once.
#[tokio::test]
async fn inspect_includes_waiters_without_admission() {
    let servers = servers();
    let (holder, waits) = (QuorumClient::new(&servers, 1).await, QuorumClient::new(&servers, 2).await);
    assert!(matches!(holder.ask(1).await, Ok(Reply::Granted(_))));
    let waiters = async || {
        let seen = holder.quorum().inspect(holder.resource.clone()).await.unwrap().reply;
        let Reply::View(view) = seen else { panic!("{seen:?}") };
        view.waiters.into_iter().map(|waiting| waiting.acquisition).collect::<Vec<_>>()
    };
    for sequence in 1..=2 {
        assert!(matches!(waits.ask(sequence).await, Ok(Reply::Queued(_))));
    }
    let at_nodes =
        [1, 2].map(|sequence| waits.quorum().attempts.get(waits.attempt(sequence)).unwrap().acquisition);
    // At each node, because only the times of one node tell their order.
    for node in 0..servers.len() {
        let queued = async || match waits.at_node(node, Command::Inspect).await {
            Reply::View(view) => view.waiters.len(),
            other => panic!("{other:?}"),
        };
        until(async || queued().await == 2).await;
    }
    assert_eq!(waiters().await, at_nodes);
    let queue = Arc::new(admission_queue_of(&waits.resource).unwrap());
    let admit = async |sequence| {
        let acquire = Command::Acquire(waits.request(sequence));
        waits.quorum().call_admission_queue(queue.clone(), acquire).await.unwrap().reply
    };
    assert!(matches!(admit(12).await, Reply::Granted(_)));
    assert_eq!(waiters().await, [at_nodes[0], waits.attempt(12)], "the admission is the later one's");
    assert!(matches!(admit(13).await, Reply::Queued(_)));
    assert_eq!(waiters().await, [at_nodes[0], waits.attempt(12), waits.attempt(13)]);
    // What one node alone has is left over from an attempt that has ended.
    let left = Acquisition { sequence: waits.attempt(14).sequence, ..at_nodes[0] };
    let request = Arc::new(Acquire { acquisition: left, ..(*waits.request(14)).clone() });
    assert!(matches!(waits.at_node(0, Command::Acquire(request)).await, Reply::Queued(_)));
    assert_eq!(waiters().await.len(), 3);
}

/// An entry that its client has left behind is granted in its turn, and blocks the queue for a claim window of 3 s.
#[tokio::test]
async fn waiter_that_moves_to_another_admission_queue_leaves_no_entry() {
    let servers = servers();
    let proxies: Vec<Proxy> = servers.iter().map(Proxy::before).collect();
    let urls: Vec<String> = proxies.iter().map(Proxy::url).collect();
    let (holder, moves, waits) = (
        QuorumClient::at(&urls, 1).await,
        QuorumClient::at(&urls, 2).await,
        QuorumClient::at(&urls, 3).await,
    );
    let queue = Arc::new(admission_queue_of(&holder.resource).unwrap());
    let ask = async |client: &QuorumClient| {
        let acquire = Command::Acquire(client.request(1));
        client.quorum().call_admission_queue(queue.clone(), acquire).await.unwrap().reply
    };
    let set_cut = async |node: usize, is_cut: bool| {
        proxies[node].refuse(is_cut);
        proxies[node].cut();
        for client in [&holder, &moves, &waits] {
            until(async || client.quorum().nodes[node].store.is_connected() != is_cut).await;
        }
    };
    let clients_at = async |node: usize| {
        let inspect = vec![Call::new(queue.clone(), Command::Inspect)];
        let answers = holder.quorum().nodes[node].store.call_batch(inspect, 0).await;
        let Ok(Reply::View(view)) = answers[0].as_ref().map(|answer| &answer.reply) else {
            return Vec::new();
        };
        let (holders, waiters) = (view.holders.iter(), view.waiters.iter());
        let there = holders.map(|holder| holder.acquisition).chain(waiters.map(|waiter| waiter.acquisition));
        there.map(|acquisition| acquisition.client).collect::<Vec<_>>()
    };
    // A node that a client has not reached yet, or whose first answer came late, is passed over for admission.
    for client in [&holder, &moves, &waits] {
        until(async || {
            let _ = client.quorum().call_all(&client.resource, Command::Inspect).await;
            (0..servers.len()).all(|node| !client.quorum().is_passed_over(node))
        })
        .await;
    }
    let first = holder.quorum().admission_node(&queue);
    assert!(matches!(ask(&holder).await, Reply::Granted(_)));
    assert!(matches!(ask(&moves).await, Reply::Queued(_)));
    assert!(matches!(ask(&waits).await, Reply::Queued(_)));
    set_cut(first, true).await;
    let second = moves.quorum().admission_node(&queue);
    assert_ne!(first, second);
    assert!(matches!(ask(&moves).await, Reply::Granted(_)), "no other client is at that node");
    set_cut(first, false).await;
    until(async || clients_at(first).await == [holder.client, waits.client]).await;
    assert_eq!(clients_at(second).await, [moves.client]);
    // It may come back.
    set_cut(second, true).await;
    assert!(matches!(ask(&moves).await, Reply::Queued(_)));
    set_cut(second, false).await;
    until(async || clients_at(second).await.is_empty()).await;
    assert_eq!(clients_at(first).await, [holder.client, waits.client, moves.client]);
    let release = Command::Release(Release::now(moves.attempt(1)));
    let released = moves.quorum().call_admission_queue(queue.clone(), release).await.unwrap().reply;
    assert_eq!(released, Reply::Dequeued);
    assert_eq!(clients_at(first).await, [holder.client, waits.client]);
}
