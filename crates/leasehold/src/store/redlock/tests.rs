//! What only somebody who asks the quorum itself can do: two rounds of one attempt at the same time, as when the first is taken
//! for lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Failure, Holder, Kind, Name, Push, Release, Renew, Reply,
    Resource, StoreTime, Token, WaitFor,
};
use leasehold_testkit::{Proxy, Server, until};

use super::inspect::merge_holder;
use super::{Quorum, Redlock};
use crate::store::{Inbox, Store as _, admission_queue_of};
use crate::url::StoreUrl;

/// Nobody listens.
struct Deaf;

impl Inbox for Deaf {
    fn deliver(&self, _push: Push) {}

    fn reconnected(&self, _concerns: &dyn Fn(&Resource) -> bool) {}
}

/// One of several clients of the same servers.
struct Lab {
    client: ClientId,
    redlock: Arc<Redlock>,
    resource: Arc<Resource>,
    _inbox: Arc<dyn Inbox>,
}

impl Lab {
    async fn new(servers: &[Server], client: u128) -> Self {
        Self::at(&servers.iter().map(Server::url).collect::<Vec<_>>(), client).await
    }

    async fn at(nodes: &[String], client: u128) -> Self {
        let StoreUrl::Redlock(url) =
            StoreUrl::parse(&format!("redlock:{} ?node_timeout_ms=5000", nodes.join(" "))).unwrap()
        else {
            panic!("it is one")
        };
        let inbox: Arc<dyn Inbox> = Arc::new(Deaf);
        let client = ClientId::new(client);
        let redlock = Redlock::open(&url, client, Arc::downgrade(&inbox), None).await.unwrap();
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        Self { client, redlock, resource, _inbox: inbox }
    }

    fn quorum(&self) -> &Arc<Quorum> {
        &self.redlock.quorum
    }

    fn attempt(&self, sequence: u64) -> Acquisition {
        Acquisition { client: self.client, sequence }
    }

    fn request(&self, sequence: u64) -> Arc<Acquire> {
        // Nothing goes by itself.
        let plain = Acquire::exclusive(self.attempt(sequence), Duration::from_secs(600));
        let wait = WaitFor { entry_ttl: Duration::from_secs(60), max_queue: 9 };
        Arc::new(Acquire { wait: Some(wait), ..plain })
    }

    async fn ask(&self, sequence: u64) -> Result<Reply, Failure> {
        let answered = self.quorum().acquire(self.resource.clone(), self.request(sequence)).await;
        answered.map(|answer| answer.reply).map_err(|error| error.failure)
    }

    async fn release(&self, sequence: u64, tombstone: Duration) -> Reply {
        let release = Release { acquisition: self.attempt(sequence), min_hold: Duration::ZERO, tombstone };
        self.quorum().release(self.resource.clone(), release).await.unwrap().reply
    }

    /// At how many nodes somebody holds it.
    async fn holding(&self) -> usize {
        let mut count = 0;
        for node in &self.quorum().nodes {
            let answers = node.store.call_batch(vec![(self.resource.clone(), Command::Inspect)], 0).await;
            let Ok(Reply::View(view)) = answers[0].as_ref().map(|answer| &answer.reply) else {
                panic!("{answers:?}")
            };
            count += view.holders.len();
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
    let (holder, waiter) = (Lab::new(&servers, 1).await, Lab::new(&servers, 2).await);
    assert!(matches!(holder.ask(1).await, Ok(Reply::Granted(_))));
    let (one, other) = futures_util::future::join(waiter.ask(1), waiter.ask(1)).await;
    // Both are the same attempt, which waits at the nodes.
    assert!(matches!((one, other), (Ok(Reply::Queued(_)), Ok(Reply::Queued(_)))));
    assert_eq!(holder.release(1, Duration::ZERO).await, Reply::Released);
    assert!(matches!(waiter.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(waiter.release(1, Duration::ZERO).await, Reply::Released);
    until(async || waiter.holding().await == 0).await;
}

#[tokio::test]
async fn two_granted_rounds_are_one_lease() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    let (one, other) = futures_util::future::join(lab.ask(1), lab.ask(1)).await;
    assert!(matches!((one, other), (Ok(Reply::Granted(_)), Ok(Reply::Granted(_)))));
    assert_eq!(lab.release(1, Duration::ZERO).await, Reply::Released);
    until(async || lab.holding().await == 0).await;
}

#[tokio::test]
async fn acquire_after_release_is_cancelled() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    assert_eq!(lab.release(1, Duration::from_secs(60)).await, Reply::NotHeld);
    assert_eq!(lab.ask(1).await, Ok(Reply::Cancelled));
    assert_eq!(lab.holding().await, 0);
}

#[tokio::test]
async fn release_during_acquire_leaves_nothing() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    let tombstone = Duration::from_secs(60);
    for sequence in 1..=20 {
        let give_back = async {
            for _ in 0..sequence {
                tokio::task::yield_now().await;
            }
            lab.release(sequence, tombstone).await
        };
        let (answer, _) = futures_util::future::join(lab.ask(sequence), give_back).await;
        assert!(matches!(answer, Ok(Reply::Cancelled | Reply::Granted(_))), "{answer:?}");
        until(async || lab.holding().await == 0).await;
    }
    // Nor are they remembered for longer than they must.
    let long_after = crate::engine::clock::local() + 2 * tombstone;
    lab.quorum().attempts.sweep(long_after);
    assert!(!lab.quorum().attempts.is_to_be_swept());
}

#[tokio::test]
async fn round_whose_node_attempt_ended_is_unknown_and_can_be_retried() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    // The round has been sent when the try is given back, which nobody need remember.
    let (answer, released) = futures_util::future::join(lab.ask(1), lab.release(1, Duration::ZERO)).await;
    assert_eq!((answer, released), (Err(Failure::Unknown), Reply::Released));
    until(async || lab.holding().await == 0).await;
    assert!(matches!(lab.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(lab.release(1, Duration::ZERO).await, Reply::Released);
    until(async || lab.holding().await == 0).await;
}

#[tokio::test]
async fn release_before_all_answers_leaves_no_tombstones() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    for sequence in 1..=50 {
        assert!(matches!(lab.ask(sequence).await, Ok(Reply::Granted(_))));
        assert_eq!(lab.release(sequence, Duration::ZERO).await, Reply::Released);
    }
    // A state that says no more than that nobody has it: scripts are done with it at once.
    let usual = async |server: &Server| {
        let keys: Vec<String> = server.query(&["KEYS", "*{*}*"]).unwrap();
        let forms = keys.iter().map(|key| server.query::<Vec<u8>>(&["GETRANGE", key, "0", "0"]).unwrap());
        forms.collect::<Vec<_>>() == [vec![0]]
    };
    until(async || {
        for server in &servers {
            if !usual(server).await {
                return false;
            }
        }
        true
    })
    .await;
}

#[tokio::test]
async fn inspect_reports_the_holders_token_despite_a_higher_late_token() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    for sequence in 1..=20 {
        let Ok(Reply::Granted(grant)) = lab.ask(sequence).await else { panic!("nobody has it") };
        until(async || lab.holding().await == servers.len()).await;
        let seen = lab.quorum().inspect(lab.resource.clone()).await.unwrap().reply;
        let Reply::View(view) = seen else { panic!("{seen:?}") };
        let tokens: Vec<_> = view.holders.iter().map(|holder| holder.token).collect();
        assert_eq!(tokens, [grant.tokens.first]);
        assert_eq!(lab.release(sequence, Duration::ZERO).await, Reply::Released);
    }
}

#[tokio::test]
async fn connect_waits_briefly_for_stragglers() {
    let servers = servers();
    let proxies: Vec<Proxy> = servers.iter().map(Proxy::before).collect();
    for (proxy, late_by) in proxies.iter().zip([100, 100, 130]) {
        proxy.delay_replies(Duration::from_millis(late_by));
    }
    let lab = Lab::at(&proxies.iter().map(Proxy::url).collect::<Vec<_>>(), 1).await;
    assert!(lab.quorum().nodes.iter().all(|node| node.store.is_connected()));
}

#[tokio::test]
async fn try_lock_retries_while_some_nodes_are_free() {
    let servers = servers();
    // The others have decided when the first one answers.
    let proxy = Proxy::before(&servers[0]);
    proxy.delay_replies(Duration::from_millis(3));
    let lab = Lab::at(&[proxy.url(), servers[1].url(), servers[2].url()], 1).await;
    let other = Lab::new(&servers, 2).await;
    let try_once = async |sequence| {
        let plain = Acquire::exclusive(lab.attempt(sequence), Duration::from_secs(600));
        lab.quorum().acquire(lab.resource.clone(), Arc::new(plain)).await.unwrap().reply
    };
    let at = async |node: usize, command| {
        let answers =
            lab.quorum().nodes[node].store.call_batch(vec![(lab.resource.clone(), command)], 0).await;
        answers.into_iter().next().unwrap().unwrap().reply
    };
    let tries = async || {
        let Reply::Granted(_) = try_once(9).await else { panic!("nobody has it") };
        let seen = lab.quorum().inspect(lab.resource.clone()).await.unwrap().reply;
        let Reply::View(view) = seen else { panic!("{seen:?}") };
        assert_eq!(lab.release(9, Duration::ZERO).await, Reply::Released);
        until(async || lab.holding().await == 0).await;
        view.holders[0].acquisition.sequence
    };
    let elsewhere = Acquire::exclusive(other.attempt(1), Duration::from_secs(600));
    // One that answers much later is not heard.
    until(async || {
        let first = tries().await;
        for node in [1, 2] {
            assert!(matches!(at(node, Command::from(elsewhere.clone())).await, Reply::Granted(_)));
        }
        assert_eq!(try_once(1).await, Reply::Busy);
        until(async || lab.holding().await == 2).await;
        assert!(matches!(at(0, Command::from(elsewhere.clone())).await, Reply::Granted(_)));
        assert_eq!(try_once(2).await, Reply::Busy);
        for node in 0..3 {
            assert_eq!(at(node, Command::Release(Release::now(other.attempt(1)))).await, Reply::Released);
        }
        let requests = tries().await - first - 1;
        assert!(requests <= 3 + 1, "{requests}");
        requests == 3 + 1
    })
    .await;
}

#[tokio::test]
async fn renewals_and_attempts_use_separate_shards() {
    let lab = Lab::new(&servers(), 1).await;
    let (acquisition, ttl) = (lab.attempt(1), Duration::from_secs(1));
    let renew = Command::Renew(Renew { acquisition, ttl, reserve: 0 });
    let acquire = Command::from(Acquire::exclusive(acquisition, ttl));
    let other = Resource { kind: Kind::Mutex, name: Name::new("b").unwrap() };
    let shard = |resource: &Resource, command: &Command| lab.redlock.shard(resource, command);
    assert_eq!(
        shard(&lab.resource, &renew),
        shard(&other, &renew),
        "all renewals are one flight to each node"
    );
    assert_ne!(shard(&lab.resource, &renew), shard(&lab.resource, &acquire));
    assert_ne!(
        shard(&lab.resource, &renew),
        shard(&lab.resource, &Command::Release(Release::now(acquisition)))
    );
    assert_ne!(shard(&lab.resource, &acquire), shard(&other, &acquire));
    let queue = admission_queue_of(&lab.resource).unwrap();
    assert_ne!(shard(&queue, &renew), shard(&lab.resource, &renew));
}

#[tokio::test]
async fn node_with_a_clock_far_ahead_does_not_vote() {
    let mut servers = servers();
    let lab = Lab::new(&servers, 1).await;
    assert!(matches!(lab.ask(1).await, Ok(Reply::Granted(_))));
    assert_eq!(lab.release(1, Duration::ZERO).await, Reply::Released);
    until(async || lab.holding().await == 0).await;
    let set_ahead = |by: Duration| {
        let skew = i64::try_from(by.as_micros()).unwrap();
        lab.quorum().nodes[2].skew.store(skew, Ordering::Relaxed);
    };
    let ask = async |sequence| {
        let plain = Acquire::exclusive(lab.attempt(sequence), Duration::from_secs(600));
        lab.quorum().acquire(lab.resource.clone(), Arc::new(plain)).await
    };
    let hour = Duration::from_secs(3_600);
    for (sequence, ahead) in [(2, 24 * hour), (3, hour / 2)] {
        set_ahead(ahead);
        // So that it is known how far the clock is ahead: it was not when it was last asked.
        lab.quorum().nodes[2].clone().learn_clock().await;
        let answer = ask(sequence).await.unwrap();
        let Reply::Granted(grant) = answer.reply else { panic!("{answer:?}") };
        let real = std::time::UNIX_EPOCH.elapsed().unwrap();
        let given = Duration::from_micros(grant.tokens.last.get());
        let expected = if ahead > hour { real } else { real + ahead };
        assert!(given < expected + hour / 4, "{given:?} with a clock that is {ahead:?} ahead");
        // The lease itself is known there, and is given back there too.
        until(async || lab.holding().await == 3).await;
        assert_eq!(lab.release(sequence, Duration::ZERO).await, Reply::Released);
        until(async || lab.holding().await == 0).await;
    }
    set_ahead(24 * hour);
    servers[0].stop();
    until(async || !lab.quorum().nodes[0].store.is_connected()).await;
    let error = ask(5).await.unwrap_err();
    assert!(error.message.contains("its clock is more than 3600s ahead"), "{}", error.message);
    set_ahead(Duration::ZERO);
    let answer = ask(6).await.unwrap();
    assert!(matches!(answer.reply, Reply::Granted(_)), "{answer:?}");
}

#[tokio::test]
async fn inspect_includes_waiters_queued_at_another_node() {
    let servers = servers();
    let lab = Lab::new(&servers, 1).await;
    let queue = Arc::new(admission_queue_of(&lab.resource).unwrap());
    let mut expected = Vec::new();
    for place in 1..=2 {
        for (number, node) in (1..).zip(&lab.quorum().nodes) {
            let request = lab.request(10 * place + number);
            expected.push(request.acquisition);
            let answers = node.store.call_batch(vec![(queue.clone(), Command::Acquire(request))], 0).await;
            let is_first = matches!(answers[0].as_ref().unwrap().reply, Reply::Granted(_));
            assert_eq!(is_first, place == 1, "{answers:?}");
        }
    }
    // It has moved on, and left its place.
    let moved = lab.request(expected[3].sequence);
    drop(lab.quorum().nodes[1].store.call_batch(vec![(queue, Command::Acquire(moved))], 0).await);
    let seen = lab.quorum().inspect(lab.resource.clone()).await.unwrap().reply;
    let Reply::View(view) = seen else { panic!("{seen:?}") };
    let waiters: Vec<_> = view.waiters.iter().map(|waiting| waiting.acquisition).collect();
    assert_eq!(waiters, expected);
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
    assert_eq!(together(&[(5, false), (9, false)], 1), Some((9, false)), "the third may have it for longer");
    assert_eq!(together(&[(9, false)], 0), None, "fewer than a quorum have it");
    assert_eq!(together(&[(9, false)], 1), Some((9, false)), "the one that is silent may have it too");
}
