//! What a client publishes about itself, in a key of its own.

use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::{Client, HolderMetadata, Kind, LockInfo};
use leasehold_testkit::{Cluster, Flavor, Proxy, Server, until, until_some};

const RECORDS: &str = "leasehold:4:client:*";

/// The keys of the clients' records on these servers, each as often as it is there.
fn records<'s>(servers: impl IntoIterator<Item = &'s Server>) -> Vec<String> {
    servers.into_iter().flat_map(|server| server.query::<Vec<String>>(&["KEYS", RECORDS]).unwrap()).collect()
}

/// Whether this is the metadata of this test's process.
fn is_own(metadata: &HolderMetadata, label: Option<&str>) -> bool {
    let HolderMetadata { host, pid, program, label: own, .. } = metadata;
    let has_program = program.as_ref().is_some_and(|program| program.contains("redis_records"));
    host.is_some() && *pid == Some(std::process::id()) && has_program && own.as_deref() == label
}

fn shows_only(metadata: &HolderMetadata, label: Option<&str>) -> bool {
    let HolderMetadata { host, pid, program, label: own, .. } = metadata;
    host.is_none() && pid.is_none() && program.is_none() && own.as_deref() == label
}

/// What another client sees of the lock "a".
async fn info(client: &Client) -> LockInfo {
    until_some(async || client.inspect(Kind::Mutex, "a").await.ok()).await
}

/// The record is written at the same time as the first attempt, which does not wait for it.
async fn until_shown(observer: &Client, label: Option<&str>) {
    until(async || {
        info(observer).await.holders.first().is_some_and(|holder| is_own(&holder.metadata, label))
    })
    .await;
}

/// A holder with a label and a waiter without one are shown with their process, and after the loss of the records without.
async fn clients_are_shown(url: &str, servers: &[Server]) {
    let (holder, other) = (Client::connect(url).await.unwrap(), Client::connect(url).await.unwrap());
    let observer = Client::connect(url).await.unwrap();
    let guard = holder.mutex("a").label("nightly").lock().await.unwrap();
    until_shown(&observer, Some("nightly")).await;
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || info(&observer).await.waiters.iter().any(|waiter| is_own(&waiter.metadata, None))).await;
    let listed = observer.list().await.unwrap();
    let listed = listed.iter().find(|info| info.name == "a").expect("it is listed");
    assert!(is_own(&listed.holders[0].metadata, Some("nightly")), "{url}: {listed:?}");

    for record in records(servers) {
        servers.iter().for_each(|server| drop(server.query::<i64>(&["DEL", &record])));
    }
    let seen = info(&observer).await;
    assert!(shows_only(&seen.holders[0].metadata, Some("nightly")), "{url}: {seen:?}");
    assert!(shows_only(&seen.waiters[0].metadata, None), "{url}: {seen:?}");
    observer.list().await.unwrap();
    guard.release().await.unwrap();
    let next = waiting.await.unwrap();
    let taken = observer.force_release(Kind::Mutex, "a").await.unwrap();
    assert!(shows_only(&taken[0].metadata, None), "{url}: {taken:?}");
    drop(next);
}

#[tokio::test]
async fn holders_and_waiters_are_shown_with_their_process() {
    for flavor in Flavor::ALL {
        let server = Server::builder().flavor(flavor).start();
        for protocol in [2, 3] {
            clients_are_shown(
                &format!("{}?protocol={protocol}", server.url()),
                std::slice::from_ref(&server),
            )
            .await;
        }
    }
    let cluster = Cluster::start();
    clients_are_shown(&cluster.url(), &cluster.nodes).await;
    let servers: Vec<Server> = (0..3).map(|_| Server::on_port()).collect();
    let nodes: Vec<String> = servers.iter().map(Server::url).collect();
    clients_are_shown(&format!("redlock:{}", nodes.join(" ")), &servers).await;
}

#[tokio::test]
async fn only_a_client_that_locks_has_a_record_and_it_expires() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    client.list().await.unwrap();
    info(&client).await;
    assert_eq!(records([&server]), [""; 0]);
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    until(async || !records([&server]).is_empty()).await;
    let [record] = &records([&server])[..] else { panic!("{:?}", records([&server])) };
    let left = || server.query::<i64>(&["TTL", record]).unwrap();
    assert!((590..=601).contains(&left()), "{}", left());
    // It outlasts a lease that outlasts its client.
    let guard = client.mutex("a").ttl(Duration::from_secs(3_600)).auto_renew(false).lock().await.unwrap();
    until(async || left() > 3_900).await;
    std::mem::forget(guard);
    let hidden = Client::builder().store(server.url()).metadata(HolderMetadata::default());
    let hidden = hidden.connect().await.unwrap();
    let guard = hidden.mutex("b").lock().await.unwrap();
    assert_eq!(records([&server]).len(), 1);
    let seen = client.inspect(Kind::Mutex, "b").await.unwrap();
    assert!(shows_only(&seen.holders[0].metadata, None), "{seen:?}");
    drop(guard);
}

#[tokio::test]
async fn record_comes_back_after_a_flush_and_at_another_server() {
    let mut server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    until(async || records([&server]).len() == 1).await;
    server.run(&["FLUSHALL"]);
    until(async || records([&server]).len() == 1).await;
    server.stop();
    server.start();
    until(async || records([&server]).len() == 1).await;
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    // The replicas have it too.
    until(async || !records(&cluster.nodes).is_empty()).await;
    let masters = || cluster.nodes.iter().filter(|node| node.query::<Vec<String>>(&["ROLE"]).is_err());
    for node in masters() {
        let _ = node.query::<()>(&["FLUSHALL"]);
    }
    until(async || !records(masters()).is_empty()).await;
}

#[tokio::test]
async fn record_is_written_though_the_first_attempt_was_dropped() {
    let server = Server::on_socket();
    let observer = Client::connect(&server.url()).await.unwrap();
    for polls in 1.. {
        let client = Client::connect(&server.url()).await.unwrap();
        let mutex = client.mutex("a");
        let mut first = Box::pin(mutex.lock());
        let mut is_done = false;
        for _ in 0..polls {
            is_done |=
                std::future::poll_fn(|context| Poll::Ready(first.as_mut().poll(context).is_ready())).await;
            if is_done {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(first);
        let guard = client.mutex("a").lock().await.unwrap();
        until_shown(&observer, None).await;
        guard.release().await.unwrap();
        if is_done {
            return;
        }
    }
}

/// Locks on other nodes are acquired and inspected at once.
#[tokio::test]
async fn node_of_the_record_may_hang() {
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let observer = Client::connect(&cluster.url()).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    until(async || !records(&cluster.nodes).is_empty()).await;
    let record = records(&cluster.nodes).remove(0);
    let hung = cluster.node_of(&record);
    let elsewhere = |name: &String| cluster.node_of(&format!("leasehold:4:{{mutex:{name}}}")) != hung;
    let name = (0..).map(|number| number.to_string()).find(elsewhere).unwrap();
    client.mutex(&name).lock().await.unwrap().release().await.unwrap();
    observer.inspect(Kind::Mutex, &name).await.unwrap();
    // On a busy machine the cluster would otherwise go down before the test has ended.
    for node in &cluster.nodes {
        node.run(&["CONFIG", "SET", "cluster-node-timeout", "60000"]);
    }
    cluster.nodes[hung].signal("STOP");
    let (mut locked, mut inspected) = (Duration::MAX, Duration::MAX);
    // The fastest of a few, because the machine may be busy. Each ttl is longer than those before, so the record must follow.
    for hours in 1..=5 {
        let mutex = client.mutex(&name).ttl(Duration::from_secs(hours * 3_600));
        let began = Instant::now();
        let guard = mutex.lock().await.unwrap();
        locked = locked.min(began.elapsed());
        let began = Instant::now();
        let seen = observer.inspect(Kind::Mutex, &name).await.unwrap();
        inspected = inspected.min(began.elapsed());
        assert!(shows_only(&seen.holders[0].metadata, None), "{seen:?}");
        guard.release().await.unwrap();
    }
    assert!(locked < Duration::from_millis(150), "{locked:?}");
    assert!(inspected < Duration::from_millis(500), "{inspected:?}");
}

/// The record's slot is being moved, and the record is not at its master.
#[tokio::test]
async fn record_is_written_and_read_while_its_slot_is_being_moved() {
    let cluster = Cluster::start();
    let (client, observer) =
        (Client::connect(&cluster.url()).await.unwrap(), Client::connect(&cluster.url()).await.unwrap());
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    until(async || !records(&cluster.nodes).is_empty()).await;
    let record = records(&cluster.nodes).remove(0);
    let slot = cluster.slot_of(&record);
    let from = cluster.node_of(&record);
    let to = (0..3).find(|node| *node != from).unwrap();
    cluster.nodes[from].run(&["DEL", &record]);
    cluster.migrate_begin(slot, to);
    // A longer lease has it written again.
    let guard = client.mutex("a").ttl(Duration::from_secs(3_600)).lock().await.unwrap();
    until_shown(&observer, None).await;
    // The master of the slot redirects, because it does not have it.
    assert!(cluster.nodes[from].query::<u64>(&["EXISTS", &record]).is_err());
    guard.release().await.unwrap();
}

/// Those who wait for a state poll it often, and do not show who is there.
#[tokio::test]
async fn polls_read_no_records() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    until_shown(&client, None).await;
    let calls = |command: &str| {
        let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |line| line.split(',').next().unwrap().parse::<u64>().unwrap())
    };
    let (barrier, latch) = (client.barrier("b", 2), client.latch("l", 2));
    latch.count_down().await.unwrap();
    server.run(&["CONFIG", "RESETSTAT"]);
    let waiting = [
        tokio::spawn(async move { barrier.wait().await.map(drop) }),
        tokio::spawn(async move { latch.wait().await }),
    ];
    until(async || calls("evalsha") >= 20).await;
    assert_eq!(calls("get"), 0);
    client.inspect(Kind::Mutex, "a").await.unwrap();
    assert_eq!(calls("get"), 1);
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn uncontended_lock_and_release_need_at_most_400_bytes() {
    const PAIRS: u64 = 100;
    for flavor in Flavor::ALL {
        let server = Server::builder().flavor(flavor).start();
        let client = Client::connect(&server.url()).await.unwrap();
        let mutex = client.mutex("lock:1234567");
        mutex.lock().await.unwrap().release().await.unwrap();
        let bytes = || {
            let info: String = server.query(&["INFO", "stats"]).unwrap();
            let number = |line: &str| line.split_once("put_bytes:")?.1.trim().parse::<u64>().ok();
            let lines = info.lines().filter(|line| line.starts_with("total_net_"));
            lines.filter_map(number).sum::<u64>()
        };
        // INFO costs something itself.
        let info = bytes();
        let info = bytes() - info;
        let before = bytes();
        for _ in 0..PAIRS {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
        let per_pair = (bytes() - before).saturating_sub(info) / PAIRS;
        assert!(per_pair <= 400, "{flavor:?}: {per_pair}");
    }
}

/// A client detaches a lease and ends. Its record would expire before the lease that others renew.
async fn record_lasts_as_long_as_a_detached_lease(url: &str, servers: &[Server]) {
    let one = Client::connect(url).await.unwrap();
    let mutex = one.mutex("a").ttl(Duration::from_secs(30));
    let id = mutex.lock().await.unwrap().detach().await.unwrap();
    until(async || records(servers).len() == 1).await;
    let [record] = &records(servers)[..] else { panic!("{:?}", records(servers)) };
    one.close().await.unwrap();
    let ask = |command: &[&str]| {
        let values = servers.iter().map(|server| server.query::<i64>(command).unwrap_or(-2));
        values.max().unwrap()
    };
    let other = Client::connect(url).await.unwrap();
    ask(&["PEXPIRE", record, "50000"]);
    other.renew_lease(&id).await.unwrap();
    assert!(ask(&["PTTL", record]) > 590_000, "{url}: {}", ask(&["PTTL", record]));
    assert_eq!(records(servers).len(), 1, "{url}: a client that only renews is not shown, and has no record");
    assert!(is_own(&info(&other).await.holders[0].metadata, None), "{url}");
    // A guard that renews by itself keeps it too, and nothing makes it end sooner.
    let third = Client::connect(url).await.unwrap();
    ask(&["PEXPIRE", record, "5000000"]);
    let guard = third.attach(&id).await.unwrap();
    guard.renew().await.unwrap();
    assert!(ask(&["PTTL", record]) > 4_000_000, "{url}: {}", ask(&["PTTL", record]));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn holder_of_a_detached_lease_is_shown_for_as_long_as_others_renew_it() {
    let server = Server::on_socket();
    record_lasts_as_long_as_a_detached_lease(&server.url(), std::slice::from_ref(&server)).await;
    let cluster = Cluster::start();
    // The replicas follow.
    record_lasts_as_long_as_a_detached_lease(&cluster.url(), &cluster.nodes[..3]).await;
}

/// Over a slow link, two round trips take longer than the 200 ms that a look-up waits for records.
#[tokio::test]
async fn renewal_over_a_slow_link_keeps_the_record_of_a_detached_lease() {
    let server = Server::on_port();
    let one = Client::connect(&server.url()).await.unwrap();
    let mutex = one.mutex("a").ttl(Duration::from_secs(60));
    let id = mutex.lock().await.unwrap().detach().await.unwrap();
    until(async || records([&server]).len() == 1).await;
    let [record] = &records([&server])[..] else { panic!("{:?}", records([&server])) };
    one.close().await.unwrap();
    let proxy = Proxy::before(&server);
    let other = Client::connect(&proxy.url()).await.unwrap();
    server.query::<i64>(&["PEXPIRE", record, "50000"]).unwrap();
    proxy.delay_requests(Duration::from_millis(100));
    proxy.delay_replies(Duration::from_millis(100));
    // Again if a busy machine adds so much that the time for the record is over.
    let left = || server.query::<i64>(&["PTTL", record]).unwrap();
    until(async || other.renew_lease(&id).await.is_ok() && left() > 590_000).await;
}
