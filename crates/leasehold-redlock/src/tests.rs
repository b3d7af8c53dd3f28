//! The quorum without the engine, which can run two rounds of one attempt at the same time, as if the first response was lost.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Effect, Failure, Holder, Kind, Name, NodeReplies,
    NodeReply, Push, PushKind, QueueEntry, Release, Renew, Reply, Resource, StoreTime, Token, View, WaitFor,
};
use leasehold_store::clock::Clock;
use leasehold_store::{Call, Inbox, Store as _, VotedAttempts as _, admission_queue_of};
use leasehold_testkit::{Proxy, Server, until};

use super::inspect::{merge_holder, on_one_clock};
use super::{Quorum, Redlock, RedlockUrl};

mod partial;
mod votes;
mod waiters;

/// The attempts of the pushes that ask a waiter to re-check.
#[derive(Default)]
struct RecheckInbox(Mutex<Vec<Acquisition>>);

impl Inbox for RecheckInbox {
    fn deliver(&self, push: Push) {
        if push.kind == PushKind::Revoked {
            self.0.lock().unwrap().push(push.acquisition);
        }
    }

    fn reconnected(&self, _concerns: &dyn Fn(&Resource) -> bool) {}
}

/// One of several clients of the same servers.
struct QuorumClient {
    client: ClientId,
    redlock: Arc<Redlock>,
    resource: Arc<Resource>,
    inbox: Arc<RecheckInbox>,
}

impl QuorumClient {
    async fn new(servers: &[Server], client: u128) -> Self {
        Self::at(&servers.iter().map(Server::url).collect::<Vec<_>>(), client).await
    }

    async fn at(nodes: &[String], client: u128) -> Self {
        Self::with_limit(nodes, client, Duration::from_secs(5)).await
    }

    async fn with_limit(nodes: &[String], client: u128, limit: Duration) -> Self {
        Self::with(nodes, client, &format!("node_timeout_ms={}", limit.as_millis())).await
    }

    async fn with(nodes: &[String], client: u128, options: &str) -> Self {
        let url = RedlockUrl::parse(&format!("{} ?{options}", nodes.join(" "))).unwrap();
        let inbox = Arc::new(RecheckInbox::default());
        let client = ClientId::new(client);
        let pushes: Arc<dyn Inbox> = inbox.clone();
        let redlock =
            Redlock::open(&url, Clock::System, client, Arc::downgrade(&pushes), None).await.unwrap();
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        Self { client, redlock, resource, inbox }
    }

    fn quorum(&self) -> &Arc<Quorum> {
        &self.redlock.quorum
    }

    fn attempt(&self, sequence: u64) -> Acquisition {
        Acquisition { client: self.client, sequence }
    }

    fn request(&self, sequence: u64) -> Arc<Acquire> {
        // Nothing expires during the test.
        let plain = Acquire::exclusive(self.attempt(sequence), Duration::from_secs(600));
        let wait = WaitFor { entry_ttl: Duration::from_secs(60), max_queue: 9 };
        Arc::new(Acquire { wait: Some(wait), ..plain })
    }

    async fn ask(&self, sequence: u64) -> Result<Reply, Failure> {
        let answered = self.quorum().acquire(self.resource.clone(), self.request(sequence)).await;
        answered.map(|answer| answer.reply).map_err(|error| error.failure)
    }

    /// How often this attempt was asked to re-check.
    fn rechecks(&self, sequence: u64) -> usize {
        let attempt = self.attempt(sequence);
        self.inbox.0.lock().unwrap().iter().filter(|asked| **asked == attempt).count()
    }

    async fn at_node(&self, node: usize, command: Command) -> Reply {
        let node = &self.quorum().nodes[node].store;
        node.call_batch(vec![Call::new(self.resource.clone(), command)], 0).await.remove(0).unwrap().reply
    }

    async fn release(&self, sequence: u64, tombstone: Duration) -> Reply {
        let release = Release { tombstone, ..Release::now(self.attempt(sequence)) };
        self.quorum().release(self.resource.clone(), release).await.unwrap().reply
    }

    /// Number of nodes at which the lock has a holder, as soon as they answer.
    async fn holding(&self) -> usize {
        let mut count = 0;
        for node in &self.quorum().nodes {
            let mut holders = None;
            until(async || {
                let answers =
                    node.store.call_batch(vec![Call::new(self.resource.clone(), Command::Inspect)], 0).await;
                if let Ok(Reply::View(view)) = answers[0].as_ref().map(|answer| &answer.reply) {
                    holders = Some(view.holders.len());
                }
                holders.is_some()
            })
            .await;
            count += holders.expect("it was waited for");
        }
        count
    }
}

fn servers() -> Vec<Server> {
    (0..3).map(|_| Server::on_port()).collect()
}

#[tokio::test]
async fn superseded_round_does_not_end_its_attempt() {
    let servers = servers();
    let (holder, waiter) = (QuorumClient::new(&servers, 1).await, QuorumClient::new(&servers, 2).await);
    assert!(matches!(holder.ask(1).await, Ok(Reply::Granted(_))));
    let (one, other) = futures_util::future::join(waiter.ask(1), waiter.ask(1)).await;
    // Both rounds belong to one attempt, which is queued at the nodes.
    assert!(matches!((one, other), (Ok(Reply::Queued(_)), Ok(Reply::Queued(_)))));
    assert_eq!(holder.release(1, Duration::ZERO).await, Reply::Released);
    assert!(matches!(waiter.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(waiter.release(1, Duration::ZERO).await, Reply::Released);
    until(async || waiter.holding().await == 0).await;
}

/// The future of the first round is not polled until its leases have expired and a second round was granted.
#[tokio::test]
async fn late_round_does_not_release_what_a_later_round_was_granted() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    // The servers know the script then, so that the first poll sends all that the round needs.
    assert!(matches!(client.ask(9).await, Ok(Reply::Granted(_))));
    assert_eq!(client.release(9, Duration::ZERO).await, Reply::Released);
    until(async || client.holding().await == 0).await;
    let ttl = Duration::from_millis(500);
    for wait in [None, client.request(1).wait] {
        let brief = Arc::new(Acquire { wait, ..Acquire::exclusive(client.attempt(1), ttl) });
        let mut first = Box::pin(client.quorum().acquire(client.resource.clone(), brief));
        let is_pending = poll_fn(|context| Poll::Ready(first.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        until(async || client.holding().await == servers.len()).await;
        // They expire.
        until(async || client.holding().await == 0).await;
        assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
        assert_eq!(first.await.map_err(|error| error.failure), Err(Failure::Unknown));
        assert_eq!(client.holding().await, servers.len());
        assert_eq!(client.release(1, Duration::ZERO).await, Reply::Released);
        until(async || client.holding().await == 0).await;
    }
}

/// Two nodes refuse, and the third one's grant arrives after that. Without a re-check no other client could take
/// that node until the grant expires.
#[tokio::test]
async fn waiter_learns_of_a_grant_after_the_verdict_and_gives_it_back() {
    let servers = servers();
    let proxy = Proxy::before(&servers[0]);
    let waiter = QuorumClient::at(&[proxy.url(), servers[1].url(), servers[2].url()], 1).await;
    let holder = QuorumClient::new(&servers, 2).await;
    let held = Acquire::exclusive(holder.attempt(1), Duration::from_secs(600));
    for node in [1, 2] {
        assert!(matches!(holder.at_node(node, Command::from(held.clone())).await, Reply::Granted(_)));
    }
    // Longer than a busy machine delays the answers of the others.
    proxy.delay_replies(Duration::from_millis(500));
    let is_given_back = async || matches!(holder.at_node(0, Command::Inspect).await, Reply::View(view) if view.holders.is_empty());
    let mut rounds = 0;
    loop {
        assert!(matches!(waiter.ask(1).await, Ok(Reply::Queued(_))));
        rounds += 1;
        // The first answer comes with the grant.
        until(async || waiter.rechecks(1) >= rounds || rounds > 1 && is_given_back().await).await;
        if rounds > 1 && is_given_back().await {
            break;
        }
        assert!(rounds < 20, "the grant is given back");
    }
    assert_eq!(waiter.release(1, Duration::ZERO).await, Reply::NotHeld, "between two tries it has nothing");
}

/// The push of the first node starts a timer. An attempt that is granted before it ends is not asked to re-check.
#[tokio::test]
async fn granted_waiter_is_not_asked_to_recheck() {
    let client = QuorumClient::new(&servers(), 1).await;
    let attempts = &client.quorum().attempts;
    let pushed = |sequence| {
        let (acquisition, _) = attempts.ask(&client.resource, &client.request(sequence)).unwrap();
        client.quorum().granted_by(0, acquisition);
        acquisition
    };
    let mut sequence = 0;
    // The timer may end before the grant on a busy machine, so the test repeats.
    until(async || {
        sequence += 2;
        let (granted, waiting) = (sequence, sequence + 1);
        let acquisition = pushed(granted);
        assert!(attempts.granted(client.attempt(granted), acquisition, Token::new(1).unwrap()));
        pushed(waiting);
        until(async || client.rechecks(waiting) == 1).await;
        client.rechecks(granted) == 0
    })
    .await;
}

#[tokio::test]
async fn two_granted_rounds_are_one_lease() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    let (one, other) = futures_util::future::join(client.ask(1), client.ask(1)).await;
    assert!(matches!((one, other), (Ok(Reply::Granted(_)), Ok(Reply::Granted(_)))));
    assert_eq!(client.release(1, Duration::ZERO).await, Reply::Released);
    until(async || client.holding().await == 0).await;
}

#[tokio::test]
async fn acquire_after_release_is_cancelled() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    assert_eq!(client.release(1, Duration::from_secs(60)).await, Reply::NotHeld);
    assert_eq!(client.ask(1).await, Ok(Reply::Cancelled));
    assert_eq!(client.holding().await, 0);
}

#[tokio::test]
async fn release_during_acquire_leaves_nothing() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    let tombstone = Duration::from_secs(60);
    for sequence in 1..=20 {
        let released = async {
            for _ in 0..sequence {
                tokio::task::yield_now().await;
            }
            client.release(sequence, tombstone).await
        };
        let (answer, _) = futures_util::future::join(client.ask(sequence), released).await;
        assert!(matches!(answer, Ok(Reply::Cancelled | Reply::Granted(_))), "{answer:?}");
        until(async || client.holding().await == 0).await;
    }
    // The attempts are forgotten after the tombstone.
    let long_after = Clock::System.local() + 2 * tombstone;
    client.quorum().attempts.sweep(long_after);
    assert!(!client.quorum().attempts.is_to_be_swept());
}

#[tokio::test]
async fn round_whose_node_attempt_ended_is_not_granted_and_can_be_retried() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    // The round has been sent before the release, which needs no tombstone.
    let (answer, released) =
        futures_util::future::join(client.ask(1), client.release(1, Duration::ZERO)).await;
    // The release may be answered later than the round.
    assert!(matches!(answer, Err(Failure::Unknown) | Ok(Reply::Cancelled)), "{answer:?}");
    assert_eq!(released, Reply::Released);
    until(async || client.holding().await == 0).await;
    assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(client.release(1, Duration::ZERO).await, Reply::Released);
    until(async || client.holding().await == 0).await;
}

#[tokio::test]
async fn release_before_all_answers_leaves_no_tombstones() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    for sequence in 1..=50 {
        assert!(matches!(client.ask(sequence).await, Ok(Reply::Granted(_))));
        assert_eq!(client.release(sequence, Duration::ZERO).await, Reply::Released);
    }
    let has_key = |server: &Server| !server.query::<Vec<String>>(&["KEYS", "*{*}*"]).unwrap().is_empty();
    until(async || !servers.iter().any(has_key)).await;
}

#[tokio::test]
async fn inspect_reports_the_holders_token_despite_a_higher_late_token() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    for sequence in 1..=20 {
        let Ok(Reply::Granted(grant)) = client.ask(sequence).await else { panic!("the lock is free") };
        until(async || client.holding().await == servers.len()).await;
        let seen = client.quorum().inspect(client.resource.clone()).await.unwrap().reply;
        let Reply::View(view) = seen else { panic!("{seen:?}") };
        let tokens: Vec<_> = view.holders.iter().map(|holder| holder.token).collect();
        assert_eq!(tokens, [grant.tokens.first]);
        assert_eq!(client.release(sequence, Duration::ZERO).await, Reply::Released);
    }
}

#[tokio::test]
async fn connect_waits_briefly_for_stragglers() {
    let servers = servers();
    let proxies: Vec<Proxy> = servers.iter().map(Proxy::before).collect();
    for (proxy, late_by) in proxies.iter().zip([100, 100, 130]) {
        proxy.delay_replies(Duration::from_millis(late_by));
    }
    let client = QuorumClient::at(&proxies.iter().map(Proxy::url).collect::<Vec<_>>(), 1).await;
    assert!(client.quorum().nodes.iter().all(|node| node.store.is_connected()));
}

#[tokio::test]
async fn try_lock_retries_while_some_nodes_are_free() {
    let servers = servers();
    // The first node answers after the others have decided.
    let proxy = Proxy::before(&servers[0]);
    proxy.delay_replies(Duration::from_millis(3));
    let client = QuorumClient::at(&[proxy.url(), servers[1].url(), servers[2].url()], 1).await;
    let other = QuorumClient::new(&servers, 2).await;
    let try_once = async |sequence| {
        let plain = Acquire::exclusive(client.attempt(sequence), Duration::from_secs(600));
        client.quorum().acquire(client.resource.clone(), Arc::new(plain)).await.unwrap().reply
    };
    let tries = async || {
        let Reply::Granted(_) = try_once(9).await else { panic!("the lock is free") };
        let seen = client.quorum().inspect(client.resource.clone()).await.unwrap().reply;
        let Reply::View(view) = seen else { panic!("{seen:?}") };
        assert_eq!(client.release(9, Duration::ZERO).await, Reply::Released);
        until(async || client.holding().await == 0).await;
        view.holders[0].acquisition.sequence
    };
    let elsewhere = Acquire::exclusive(other.attempt(1), Duration::from_secs(600));
    // A response that is much too late is ignored, so the test repeats.
    until(async || {
        let first = tries().await;
        for node in [1, 2] {
            assert!(matches!(
                client.at_node(node, Command::from(elsewhere.clone())).await,
                Reply::Granted(_)
            ));
        }
        assert_eq!(try_once(1).await, Reply::Busy);
        until(async || client.holding().await == 2).await;
        assert!(matches!(client.at_node(0, Command::from(elsewhere.clone())).await, Reply::Granted(_)));
        assert_eq!(try_once(2).await, Reply::Busy);
        for node in 0..3 {
            assert_eq!(
                client.at_node(node, Command::Release(Release::now(other.attempt(1)))).await,
                Reply::Released
            );
        }
        let requests = tries().await - first - 1;
        assert!(requests <= 3 + 1, "{requests}");
        requests == 3 + 1
    })
    .await;
}

#[tokio::test]
async fn renewals_and_attempts_use_separate_shards() {
    let client = QuorumClient::new(&servers(), 1).await;
    let (acquisition, ttl) = (client.attempt(1), Duration::from_secs(1));
    let renew = Command::Renew(Renew::to(acquisition, ttl));
    let acquire = Command::from(Acquire::exclusive(acquisition, ttl));
    let other = Resource { kind: Kind::Mutex, name: Name::new("b").unwrap() };
    let shard = |resource: &Resource, command: &Command| client.redlock.shard(resource, command);
    assert_eq!(
        shard(&client.resource, &renew),
        shard(&other, &renew),
        "all renewals use one pipeline to each node"
    );
    assert_ne!(shard(&client.resource, &renew), shard(&client.resource, &acquire));
    assert_ne!(
        shard(&client.resource, &renew),
        shard(&client.resource, &Command::Release(Release::now(acquisition)))
    );
    assert_ne!(shard(&client.resource, &acquire), shard(&other, &acquire));
    let queue = admission_queue_of(&client.resource).unwrap();
    assert_ne!(shard(&queue, &renew), shard(&client.resource, &renew));
}

#[tokio::test]
async fn node_with_a_clock_far_ahead_does_not_vote() {
    let mut servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(client.release(1, Duration::ZERO).await, Reply::Released);
    until(async || client.holding().await == 0).await;
    let set_ahead = |by: Duration| {
        let skew = i64::try_from(by.as_micros()).unwrap();
        client.quorum().nodes[2].skew.store(skew, Ordering::Relaxed);
    };
    let ask = async |sequence| {
        let plain = Acquire::exclusive(client.attempt(sequence), Duration::from_secs(600));
        client.quorum().acquire(client.resource.clone(), Arc::new(plain)).await
    };
    let hour = Duration::from_secs(3_600);
    for (sequence, ahead) in [(2, 24 * hour), (3, hour / 2)] {
        set_ahead(ahead);
        // Measures the clock again, since it has changed.
        client.quorum().nodes[2].clone().learn_clock().await;
        let answer = ask(sequence).await.unwrap();
        let Reply::Granted(grant) = answer.reply else { panic!("{answer:?}") };
        let real = std::time::UNIX_EPOCH.elapsed().unwrap();
        // Tokens per millisecond.
        let given = Duration::from_millis(grant.tokens.last.get() / 2_048);
        let expected = if ahead > hour { real } else { real + ahead };
        assert!(given < expected + hour / 4, "{given:?} with a clock that is {ahead:?} ahead");
        // That node has the lease too, and releases it.
        until(async || client.holding().await == 3).await;
        assert_eq!(client.release(sequence, Duration::ZERO).await, Reply::Released);
        until(async || client.holding().await == 0).await;
    }
    set_ahead(24 * hour);
    servers[0].stop();
    until(async || !client.quorum().nodes[0].store.is_connected()).await;
    let error = ask(5).await.unwrap_err();
    assert!(error.message.contains("its clock is more than 3600s ahead"), "{}", error.message);
    set_ahead(Duration::ZERO);
    let answer = ask(6).await.unwrap();
    assert!(matches!(answer.reply, Reply::Granted(_)), "{answer:?}");
}

/// As after a clock that was ahead and is right again, or by who writes that node: its clock says nothing.
#[tokio::test]
async fn node_with_tokens_far_ahead_does_not_vote_and_raises_no_token_of_another_node() {
    const CLOCK: &str = "leasehold:4:clock";
    let mut servers = servers();
    let proxies: Vec<Proxy> = servers[..2].iter().map(Proxy::before).collect();
    let client = QuorumClient::at(&[proxies[0].url(), proxies[1].url(), servers[2].url()], 1).await;
    let ask = async |sequence| {
        let plain = Acquire::exclusive(client.attempt(sequence), Duration::from_secs(600));
        client.quorum().acquire(client.resource.clone(), Arc::new(plain)).await
    };
    let hour = Duration::from_secs(3_600);
    let real = || std::time::UNIX_EPOCH.elapsed().unwrap();
    // How far the token is ahead of the time, and what is granted is released.
    let lead = async |sequence| {
        let answer = ask(sequence).await.unwrap();
        let Reply::Granted(grant) = answer.reply else { panic!("{answer:?}") };
        // Tokens per millisecond.
        let lead = Duration::from_millis(grant.tokens.last.get() / 2_048).saturating_sub(real());
        assert_eq!(client.release(sequence, Duration::ZERO).await, Reply::Released);
        until(async || client.holding().await == 0).await;
        lead
    };
    let set_tokens = |server: &Server, time: Duration| {
        server.run(&["DEL", CLOCK]);
        server.run(&["XADD", CLOCK, &format!("{}-0", time.as_millis()), "t", ""]);
    };
    // The clocks of a majority were in another time zone.
    servers.iter().for_each(|server| set_tokens(server, real() + 9 * hour));
    let ahead = lead(1).await;
    assert!(8 * hour < ahead && ahead < 10 * hour, "{ahead:?}");
    servers[..2].iter().for_each(|server| drop(server.run(&["DEL", CLOCK])));
    // The year 2061, and the end. The votes of the second and the third node come first.
    proxies[0].delay_replies(Duration::from_millis(50));
    for (sequence, time) in [(2, real() + 35 * 8_766 * hour), (3, Duration::from_millis((1 << 42) - 1))] {
        set_tokens(&servers[2], time);
        let ahead = lead(sequence).await;
        assert!(ahead < hour, "{ahead:?}");
    }
    // Before the clocks of the others are known, its vote counts, and its token is told to no other node.
    proxies[1].delay_replies(Duration::from_millis(50));
    client.quorum().nodes[..2].iter().for_each(|node| node.forget_clock());
    let error = ask(4).await.unwrap_err();
    assert!(error.message.contains("was not told the token of another node"), "{}", error.message);
    until(async || client.holding().await == 0).await;
    let ahead = lead(5).await;
    assert!(ahead < hour, "{ahead:?}");
    servers[0].stop();
    until(async || !client.quorum().nodes[0].store.is_connected()).await;
    let error = ask(6).await.unwrap_err();
    assert!(error.message.contains("delete the key leasehold:4:clock there"), "{}", error.message);
    servers[2].run(&["DEL", CLOCK]);
    // As soon as what they granted before is released at both nodes.
    let sequence = AtomicU64::new(7);
    until(async || {
        let answered = ask(sequence.fetch_add(1, Ordering::Relaxed)).await;
        answered.is_ok_and(|answer| matches!(answer.reply, Reply::Granted(_)))
    })
    .await;
}

#[test]
fn late_node_does_not_decide_the_expiry() {
    let seen = |seconds: u64, retained| Holder {
        acquisition: Acquisition { client: ClientId::new(1), sequence: 1 },
        owner: None,
        weight: 1,
        token: Token::new(1).unwrap(),
        granted_at: StoreTime::ZERO,
        expires_at: StoreTime::from_micros(seconds * 1_000_000),
        retained,
        metadata: Arc::from(""),
    };
    let together = |same: &[(u64, bool)], silent| {
        let same = same.iter().map(|(seconds, retained)| seen(*seconds, *retained)).collect();
        merge_holder(same, silent, 2).map(|lease| (lease.expires_at.as_micros() / 1_000_000, lease.retained))
    };
    assert_eq!(together(&[(9, false), (1, true), (1, true)], 0), Some((1, true)), "late with a release");
    assert_eq!(together(&[(5, false), (9, false), (9, false)], 0), Some((9, false)), "late with a renewal");
    assert_eq!(together(&[(9, false), (5, false)], 0), Some((5, false)), "not granted by the third");
    assert_eq!(together(&[(5, false), (9, false)], 1), Some((9, false)), "the third may hold it for longer");
    assert_eq!(together(&[(9, false)], 0), None, "fewer than a quorum have it");
    assert_eq!(together(&[(9, false)], 1), Some((9, false)), "the silent one may hold it too");
}

#[tokio::test]
async fn release_can_be_repeated_until_a_quorum_has_confirmed_it() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
    until(async || client.holding().await == 3).await;
    let writes_fail = |fail: &str| {
        for server in &servers {
            server.run(&["CONFIG", "SET", "min-replicas-to-write", fail]);
        }
    };
    let release = async || {
        let release = Release::now(client.attempt(1));
        let answered = client.quorum().release(client.resource.clone(), release).await;
        answered.map(|answer| answer.reply).map_err(|error| error.failure)
    };
    writes_fail("1");
    for _ in 0..2 {
        assert_eq!(release().await, Err(Failure::Transient(Effect::Possible)));
        assert_eq!(client.holding().await, 3);
    }
    writes_fail("0");
    assert!(release().await.is_ok());
    until(async || client.holding().await == 0).await;
    // After an answer there is nothing to repeat.
    assert_eq!(release().await, Ok(Reply::NotHeld));
}

#[tokio::test]
async fn release_of_an_attached_lease_rejects_an_acquire_that_arrives_late_at_a_node() {
    late_acquire_is_rejected_after_the_release(false).await;
    late_acquire_is_rejected_after_the_release(true).await;
}

/// With `rejoins`, the node has the lease again at the release: a later acquire with this id has arrived before.
async fn late_acquire_is_rejected_after_the_release(rejoins: bool) {
    let servers = servers();
    let (first, second) = (QuorumClient::new(&servers, 1).await, QuorumClient::new(&servers, 2).await);
    let request = Arc::new(Acquire::exclusive(first.attempt(1), Duration::from_secs(600)));
    let answer = first.quorum().acquire(first.resource.clone(), request.clone()).await.unwrap();
    let Reply::Granted(grant) = answer.reply else { panic!("{answer:?}") };
    until(async || first.holding().await == 3).await;
    let acquisition = first.quorum().attempts.detach(first.attempt(1));
    let at_last_node = async |command| first.at_node(2, command).await;
    // As if the acquire of the first client were still on its way to the last node.
    assert_eq!(at_last_node(Command::Release(Release::now(acquisition))).await, Reply::Released);
    assert_eq!(first.holding().await, 2);
    let late = Arc::new(Acquire { acquisition, ..(*request).clone() });
    if rejoins {
        let reply = at_last_node(Command::from((*late).clone())).await;
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
    }
    second.redlock.attach(&second.resource, late.clone(), grant.tokens.first);
    let release = Release::now(acquisition);
    let released = second.quorum().release(second.resource.clone(), release).await.unwrap();
    assert_eq!(released.reply, Reply::Released);
    // The release has its answer once two of the nodes have answered.
    until(async || matches!(at_last_node(Command::from((*late).clone())).await, Reply::Cancelled)).await;
    until(async || first.holding().await == 0).await;
}

#[test]
fn times_of_a_node_are_relative_to_its_own_clock() {
    let second = |seconds: u64| StoreTime::from_micros(seconds * 1_000_000);
    let answer = |at: u64| Answer {
        at: second(at),
        reply: Reply::View(View {
            capacity: 1,
            in_use: 1,
            last_token: None,
            holders: vec![Holder {
                acquisition: Acquisition { client: ClientId::new(1), sequence: 1 },
                owner: None,
                weight: 1,
                token: Token::new(1).unwrap(),
                granted_at: second(at - 5),
                expires_at: second(at + 60),
                retained: false,
                metadata: Arc::from(""),
            }],
            waiters: vec![QueueEntry {
                acquisition: Acquisition { client: ClientId::new(2), sequence: 1 },
                weight: 1,
                since: second(at - 4),
                deadline: second(at + 70),
                skipped: false,
                metadata: Arc::from(""),
            }],
        }),
    };
    // The second node's clock is five minutes ahead, and the third one's ten seconds behind.
    let (at, views) = on_one_clock(vec![answer(1000), answer(1300), answer(990)]);
    for holder in views.iter().flat_map(|view| &view.holders) {
        assert_eq!((at.since(holder.granted_at), holder.expires_at.since(at)), (5 * SECOND, 60 * SECOND));
    }
    for waiter in views.iter().flat_map(|view| &view.waiters) {
        assert_eq!((at.since(waiter.since), waiter.deadline.since(at)), (4 * SECOND, 70 * SECOND));
    }
    assert_eq!(views.len(), 3);
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn minimum_hold_needs_a_majority_that_retains_the_lock() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
    until(async || client.holding().await == 3).await;
    assert!(matches!(client.at_node(2, Command::ForceRelease).await, Reply::Forced(_)));
    servers[1].signal("STOP");
    let release = || {
        let release = Release { min_hold: Duration::from_secs(60), ..Release::now(client.attempt(1)) };
        client.quorum().release(client.resource.clone(), release)
    };
    let error = release().await.unwrap_err();
    assert!(error.message.contains("1 of 3 nodes released it, 2 are needed"), "{}", error.message);
    servers[1].signal("CONT");
    // It is repeated in the background, too. The first node has nothing to release any more, and says so.
    until(async || matches!(release().await.map(|answer| answer.reply), Ok(Reply::Released))).await;
    assert_eq!(client.holding().await, 2, "two nodes retain it");
}

#[tokio::test]
async fn failure_of_a_release_counts_the_nodes_that_have_released_it() {
    let client = QuorumClient::new(&servers(), 1).await;
    let mut replies = NodeReplies::new(3);
    replies.handle_reply(0, NodeReply::Failed);
    replies.handle_reply(1, NodeReply::Failed);
    let message = client.quorum().release_failure(&replies, &[const { None }; 3]);
    assert!(message.contains("0 of 3 nodes released it") && message.contains("not waited for"), "{message}");
}

#[tokio::test]
async fn releases_that_a_minority_has_not_answered_keep_no_lock() {
    let servers = servers();
    let client = QuorumClient::new(&servers, 1).await;
    assert!(matches!(client.ask(1).await, Ok(Reply::Granted(_))));
    until(async || client.holding().await == 3).await;
    servers[1..].iter().for_each(|server| server.signal("STOP"));
    let release = || client.quorum().release(client.resource.clone(), Release::now(client.attempt(1)));
    assert!(release().await.is_err());
    assert!(client.quorum().keeps_a_lock());
    servers[1].signal("CONT");
    until(async || release().await.is_ok()).await;
    // The third node has a pending release. That of the second one is repeated once more.
    until(async || !client.quorum().keeps_a_lock()).await;
    servers[2].signal("CONT");
}
