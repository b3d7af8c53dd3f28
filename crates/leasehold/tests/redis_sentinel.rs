//! A master that is replaced while locks are held and waited for.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, Kind};
use leasehold_testkit::{Proxy, Sentinels, Server, until};
use tokio::time::timeout;

/// What a failover may take, until the clients have followed it.
const SOON: Duration = Duration::from_secs(30);

/// Waits until the replicas have what the master has.
async fn until_followed(sentinels: &Sentinels) {
    until(async || sentinels.master().query::<i64>(&["WAIT", "2", "100"]).is_ok_and(|count| count == 2))
        .await;
}

#[tokio::test]
async fn holder_and_waiter_follow_a_planned_failover() {
    let sentinels = Sentinels::start();
    let url = sentinels.url(Sentinels::SERVICE);
    let (one, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
    let guard = one.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    until_followed(&sentinels).await;
    let old = sentinels.master_number();
    let new = sentinels.fail_over();
    // Much sooner than the old master learns that it is none any more.
    let new = &sentinels.servers[new];
    until(async || listening(new) == 2).await;
    // Pushes of the old master are ignored from now on: the client is not subscribed there.
    until(async || listening(&sentinels.servers[old]) == 0).await;
    guard.renew().await.unwrap();
    let token = guard.token();
    guard.release_timeout(SOON).await.unwrap();
    let next = timeout(SOON, waiting).await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release_timeout(SOON).await.unwrap();
}

#[tokio::test]
async fn tokens_keep_rising_after_a_master_crash() {
    let mut sentinels = Sentinels::start();
    let client = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    let mut last = guard.token();
    until_followed(&sentinels).await;
    sentinels.kill_master();
    // What the replica knows of goes on.
    until(async || guard.renew().await.is_ok()).await;
    assert!(guard.is_held());
    guard.release_timeout(SOON).await.unwrap();
    for _ in 0..3 {
        let guard = client.mutex("a").lock().await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn unknown_service_and_non_sentinels_are_reported() {
    let sentinels = Sentinels::start();
    let error = Client::connect(&sentinels.url("nothing")).await.unwrap_err();
    assert!(error.to_string().contains("knows no service \"nothing\""), "{error}");
    let port = sentinels.master().port();
    let error = Client::connect(&format!("redis-sentinel://127.0.0.1:{port}/locks")).await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("is no sentinel"), "{error}");
}

/// A host that is down, and does not even refuse.
#[tokio::test]
async fn sentinels_that_hang_keep_no_client_from_the_master_that_the_others_name() {
    let sentinels = Sentinels::start();
    let url = sentinels.url(Sentinels::SERVICE);
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
    sentinels.sentinels[1..].iter().for_each(|sentinel| sentinel.signal("STOP"));
    let killed: i64 = sentinels.master().query(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    assert!(killed > 0);
    until(async || guard.renew().await.is_ok()).await;
    let other = Client::connect(&url).await.unwrap();
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    let next = other.mutex("a").try_lock().await.unwrap().unwrap();
    next.release().await.unwrap();
    sentinels.sentinels[1..].iter().for_each(|sentinel| sentinel.signal("CONT"));
}

/// Sentinels that do not know each other: each names what it is told to. Two of three are far.
struct Apart {
    sentinels: Vec<Server>,
    /// In front of the sentinels.
    proxies: Vec<Proxy>,
}

impl Apart {
    fn start(master: &Server) -> Self {
        let monitor = format!("sentinel monitor {}", Sentinels::SERVICE);
        let sentinel =
            Server::builder().sentinel().setting(&monitor, &format!("127.0.0.1 {} 2", master.port()));
        let sentinels: Vec<Server> = (0..3).map(|_| sentinel.clone().start()).collect();
        let proxies: Vec<Proxy> = sentinels.iter().map(Proxy::before).collect();
        Self { sentinels, proxies }
    }

    fn url(&self) -> String {
        let hosts: Vec<String> =
            self.proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        format!("redis-sentinel://{}/{}", hosts.join(","), Sentinels::SERVICE)
    }

    /// These sentinels name this master from now on.
    fn name(&self, sentinels: Range<usize>, master: &Server) {
        for sentinel in &self.sentinels[sentinels] {
            sentinel.run(&["SENTINEL", "REMOVE", Sentinels::SERVICE]);
            let port = master.port().to_string();
            sentinel.run(&["SENTINEL", "MONITOR", Sentinels::SERVICE, "127.0.0.1", &port, "2"]);
            // Its clients connect again, and so learn of it at once.
            sentinel.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
    }
}

/// How many clients of leasehold listen at this server.
fn listening(server: &Server) -> usize {
    server.query::<Vec<String>>(&["PUBSUB", "CHANNELS", "leasehold:*"]).unwrap().len()
}

/// The near sentinel is cut off from the others, together with the old master. That goes on, or has died.
#[tokio::test]
async fn client_moves_to_the_master_of_far_sentinels_although_a_near_one_is_behind() {
    for is_dead in [false, true] {
        let (mut old, new) = (Server::on_port(), Server::on_port());
        let sentinels = Apart::start(&old);
        // More than an answer may take if the near ones name the master in use.
        for proxy in &sentinels.proxies[1..] {
            proxy.delay_replies(Duration::from_millis(150));
        }
        let client = Client::connect(&sentinels.url()).await.unwrap();
        let guard = client.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
        sentinels.name(1..3, &new);
        if is_dead {
            old.stop();
        }
        until(async || listening(&new) == 1).await;
        // It is another server: the lease is not there.
        timeout(SOON, guard.lost()).await.unwrap();
        client.mutex("a").lock_timeout(SOON).await.unwrap().unwrap().release().await.unwrap();
        assert_eq!(listening(&new), 1);
    }
}

/// The client reaches a minority only when the master dies: an attempt to connect may take a quarter of the ttl, and silent sentinels are
/// waited for longer.
#[tokio::test]
async fn lease_outlasts_a_failover_that_only_one_sentinel_reports() {
    let mut old = Server::on_port();
    let new = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", old.port())).start();
    let sentinels = Apart::start(&old);
    let client = Client::connect(&sentinels.url()).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(11)).lock().await.unwrap();
    until(async || old.query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count == 1)).await;
    sentinels.proxies[1..].iter().for_each(|proxy| proxy.hold_requests(true));
    old.stop();
    new.run(&["REPLICAOF", "NO", "ONE"]);
    sentinels.name(0..1, &new);
    until(async || guard.renew().await.is_ok()).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// One of them may be cut off from the others, and hear of no failover.
#[tokio::test]
async fn client_listens_to_every_sentinel() {
    let sentinels = Sentinels::start();
    let _client = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
    let listens = |sentinel: &Server| {
        let listeners = sentinel.query::<String>(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        listeners.is_ok_and(|listeners| !listeners.trim().is_empty())
    };
    for _ in 0..2 {
        until(async || sentinels.sentinels.iter().all(listens)).await;
        // And again when a connection was lost.
        for sentinel in &sentinels.sentinels {
            sentinel.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
    }
}

/// Acquires and releases the lock, and counts how often it was granted, until it is told to stop.
async fn work_on(mutex: leasehold::Mutex, grants: Arc<AtomicUsize>, is_over: Arc<AtomicBool>) {
    while !is_over.load(Ordering::SeqCst) {
        match mutex.lock_timeout(SOON).await {
            Ok(Some(guard)) => {
                grants.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(60)).await;
                // The client's thread releases what can't be released now.
                let _ = guard.release_timeout(Duration::from_millis(10)).await;
            }
            Ok(None) => {}
            // In between there is no master.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Waiters learn of the new master while the old one, once it goes on, still believes that it is the master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_lock_continues_after_a_frozen_master_is_replaced() {
    let sentinels = Sentinels::start();
    let (grants, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut workers = Vec::new();
    for _ in 0..8 {
        let client = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
        let mutex = client.mutex("a").ttl(Duration::from_secs(2));
        workers.push(tokio::spawn(work_on(mutex, grants.clone(), is_over.clone())));
    }
    until(async || grants.load(Ordering::SeqCst) >= 20).await;
    let old = sentinels.master_number();
    let new = sentinels.freeze_master();
    assert_ne!(old, new);
    sentinels.servers[old].signal("CONT");
    // An unreleased lease delays the next one by its ttl. A waiter without a push re-polls after 25 s.
    let before = grants.load(Ordering::SeqCst);
    for next in before + 1..=before + 50 {
        let granted = until(async || grants.load(Ordering::SeqCst) >= next);
        timeout(Duration::from_secs(22), granted).await.expect("the lock is granted again and again");
    }
    is_over.store(true, Ordering::SeqCst);
    for worker in workers {
        timeout(SOON * 2, worker).await.unwrap().unwrap();
    }
}

/// A client dials the master while that is frozen. Another server becomes the master, and only then the old one goes on, and
/// answers as a master, since it has not heard of its demotion yet.
#[tokio::test]
async fn connection_to_a_replaced_master_is_not_used() {
    let sentinels = Sentinels::start();
    let proxies: Vec<Proxy> = sentinels.sentinels.iter().map(Proxy::before).collect();
    let hosts: Vec<String> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let url = format!("redis-sentinel://{}/{}", hosts.join(","), Sentinels::SERVICE);
    let late = Client::connect(&url).await.unwrap();
    until_followed(&sentinels).await;
    let old = sentinels.master_number();
    sentinels.servers[old].signal("STOP");
    // Lost after a second without an answer, and dialed anew while the sentinels still name the old master.
    assert!(late.mutex("b").try_lock().await.is_err());
    let new = sentinels.await_failover(old);
    let holder = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
    let guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    // A slow way to the sentinels, so that their word comes after that of the old master.
    proxies.iter().for_each(|proxy| proxy.delay_replies(Duration::from_millis(300)));
    let mutex = late.mutex("a");
    let trying = tokio::spawn(async move {
        loop {
            match mutex.try_lock().await {
                Ok(granted) => return granted,
                Err(error) => assert!(error.is_unavailable(), "{error}"),
            }
        }
    });
    sentinels.servers[old].signal("CONT");
    let granted = timeout(SOON, trying).await.unwrap().unwrap();
    assert!(granted.is_none(), "the new master's holder has it: {granted:?}");
    assert!(guard.is_held());
    assert_ne!(new, old);
}
