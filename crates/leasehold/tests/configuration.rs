//! Settings of clients, errors with their sources, and the cost of a list.

use std::error::Error as _;
use std::time::{Duration, Instant};

use leasehold::{Client, ErrorKind, StoreConfig};
use leasehold_testkit::{Cluster, Proxy, Server};

#[tokio::test]
async fn defaults_of_the_builder_apply_unless_a_lock_sets_its_own() {
    let client =
        Client::builder().store("memory:").ttl(Duration::from_secs(60)).label("all").connect().await.unwrap();
    let (by_default, own) = (client.mutex("a"), client.mutex("b").ttl(Duration::from_secs(5)).label("own"));
    let guards = [by_default.lock().await.unwrap(), own.lock().await.unwrap()];
    assert!(
        guards[0].remaining() > Duration::from_secs(30) && guards[1].remaining() <= Duration::from_secs(5)
    );
    let label = async |lock: &leasehold::Mutex| {
        lock.inspect().await.unwrap().holders[0].metadata.label.clone().unwrap()
    };
    assert_eq!((&*label(&by_default).await, &*label(&own).await), ("all", "own"));
}

#[tokio::test]
async fn invalid_settings_are_refused() {
    let settings = || Client::builder().store(StoreConfig::memory());
    let mut metadata = leasehold::HolderMetadata::default();
    metadata.host = Some("x".repeat(leasehold::MAX_LABEL_BYTES + 1));
    for builder in [
        Client::builder(),
        settings().ttl(Duration::ZERO),
        settings().label("x".repeat(2_000)),
        settings().metadata(metadata),
    ] {
        assert_eq!(builder.connect().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn limits_of_the_builder_apply_to_every_kind() {
    let client = Client::builder().store("memory:").max_waiters(0).connect().await.unwrap();
    let _mutex = client.mutex("a").lock().await.unwrap();
    assert!(client.mutex("a").lock().await.unwrap_err().is_queue_full());
    let _permit = client.semaphore("a", 1).acquire(1).await.unwrap();
    assert!(client.semaphore("a", 1).acquire(1).await.unwrap_err().is_queue_full());
    let _writer = client.rw_lock("a").write().await.unwrap();
    assert!(client.rw_lock("a").read().await.unwrap_err().is_queue_full());

    let client = Client::builder().store("memory:").replicas(1).connect().await.unwrap();
    assert!(client.mutex("a").try_lock().await.unwrap_err().is_unsupported());
    assert!(client.semaphore("a", 1).try_acquire(1).await.unwrap_err().is_unsupported());
    assert!(client.election("a").try_campaign().await.unwrap_err().is_unsupported());
}

#[tokio::test]
async fn path_of_no_file_is_refused() {
    for path in ["", ":memory:", "locks\0.db"] {
        let connected = Client::builder().store(StoreConfig::sqlite(path)).connect().await;
        assert_eq!(connected.map(drop).unwrap_err().kind(), ErrorKind::Invalid, "{path:?}");
    }
}

#[tokio::test]
async fn connect_and_close_end_at_their_limits() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::builder()
        .store(proxy.url())
        .close_timeout(Duration::from_millis(50))
        .connect()
        .await
        .unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(3_600)).lock().await.unwrap();
    proxy.drop_replies(true);
    let late =
        Client::builder().store(proxy.url()).connect_timeout(Duration::from_millis(50)).connect().await;
    assert!(late.unwrap_err().is_timeout());
    // Without a limit it would wait until the lease has expired.
    assert!(client.close().await.unwrap_err().is_timeout());
    drop(guard);
}

/// Each text of the chain appears once.
fn assert_chain(error: &leasehold::Error) {
    let mut said = error.to_string();
    let source = error.source().unwrap_or_else(|| panic!("no source: {error}"));
    assert!(!said.contains(&source.to_string()), "{error} repeats {source}");
    assert!(said.len() > 20, "it says what happened: {error}");
    said.push_str(&source.to_string());
    assert!(!said.contains("secret"));
}

#[tokio::test]
async fn redis_errors_are_the_source() {
    let mut server = Server::on_port();
    let client = Client::connect(&server.url()).await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = client.mutex("a").lock().await.unwrap_err();
    assert_chain(&full);
    let source = full.source().unwrap().downcast_ref::<redis::RedisError>().unwrap();
    assert!(source.to_string().contains("OOM") && full.is_unavailable(), "{source:?}");
    assert!(full.to_string().contains("mutex \"a\" on redis://"), "the lock and the store: {full}");
    assert_eq!(full.clone().to_string(), full.to_string());
    server.stop();
    let refused = Client::connect(&server.url()).await.unwrap_err();
    assert_chain(&refused);
    let source = refused.source().unwrap().downcast_ref::<redis::RedisError>().unwrap();
    assert!(source.is_connection_refusal() && refused.to_string().contains("connection refused"));
}

#[tokio::test]
async fn sqlite_errors_are_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    std::fs::write(&path, "no database, ".repeat(1_000)).unwrap();
    let error = Client::builder().store(StoreConfig::sqlite(&path)).connect().await.unwrap_err();
    assert_chain(&error);
    assert!(error.source().unwrap().is::<rusqlite::Error>(), "{error:?}");
}

/// A reply over the proxy takes 50 ms, so a round trip per lock would take 15 s.
#[tokio::test]
async fn list_takes_one_round_trip_per_page() {
    const LOCKS: usize = 300;
    const DELAY: Duration = Duration::from_millis(50);
    let server = Server::on_port();
    let direct = Client::connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for number in 0..LOCKS {
        guards.push(
            direct.mutex(format!("lock {number:03}")).ttl(Duration::from_secs(600)).lock().await.unwrap(),
        );
    }
    let proxy = Proxy::before(&server);
    let open = Client::connect(&proxy.url()).await.unwrap();
    let unopened = Client::builder().store(proxy.url()).lazy().connect().await.unwrap();
    proxy.delay_replies(DELAY);
    for client in [open, unopened] {
        let begun = Instant::now();
        let listed = client.list().await.unwrap();
        let took = begun.elapsed();
        assert_eq!(listed.len(), LOCKS);
        assert!(listed.is_sorted_by_key(|lock| lock.name.clone()));
        assert_eq!(listed[7].holders[0].token, guards[7].token());
        assert!(took < DELAY * 200, "{took:?}");
    }
}

#[tokio::test]
async fn list_of_a_cluster_has_the_locks_of_all_nodes() {
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let mut guards = Vec::new();
    for number in 0..30 {
        guards.push(client.mutex(format!("lock {number:02}")).lock().await.unwrap());
    }
    let listed = client.list().await.unwrap();
    let names: Vec<_> = listed.iter().map(|lock| lock.name.clone()).collect();
    assert_eq!(names, (0..30).map(|number| format!("lock {number:02}")).collect::<Vec<_>>());
    assert!(listed.iter().zip(&guards).all(|(lock, guard)| lock.holders[0].token == guard.token()));
}

#[cfg(feature = "serde")]
#[tokio::test]
async fn views_are_serialized_with_the_names_of_the_command_line() {
    let client = Client::connect("memory:").await.unwrap();
    let guard = client.rw_lock("table").label("me").write().await.unwrap();
    let view = client.list().await.unwrap();
    let json = serde_json::to_value(&view[0]).unwrap();
    assert_eq!(json["kind"], "rw");
    assert_eq!(json["holders"][0]["token"], guard.token().get());
    assert_eq!(json["holders"][0]["mode"], "write");
    assert_eq!(json["holders"][0]["metadata"]["label"], "me");
    assert!(json["holders"][0]["expires_in_ms"].as_u64().unwrap() > 1_000, "{json}");
    let waiting = client.rw_lock("table");
    let waiter = tokio::spawn(async move { waiting.read().await });
    leasehold_testkit::until(async || client.list().await.unwrap()[0].waiters.len() == 1).await;
    let json = serde_json::to_value(&client.list().await.unwrap()[0]).unwrap();
    let names = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let both = ["client", "is_own", "metadata", "mode"];
    assert_eq!(
        names(&json["waiters"][0]),
        [&both[..], &["position", "skipped", "waiting_for_ms", "weight"]].concat()
    );
    let holder =
        [&["client", "expires_in_ms", "held_for_ms"], &both[1..], &["owner", "retained", "token", "weight"]];
    assert_eq!(names(&json["holders"][0]), holder.concat());
    guard.release().await.unwrap();
    drop(waiter.await.unwrap().unwrap());
    let diagnosis = serde_json::to_value(client.diagnose().await.unwrap()).unwrap();
    assert_eq!(diagnosis["components"][0]["findings"][0]["severity"], "fine");
    assert_eq!(serde_json::to_value(ErrorKind::QueueFull).unwrap(), "queue_full");
}

#[cfg(feature = "blocking")]
mod without_async {
    use super::*;
    use leasehold::blocking;

    /// tokio lets a task poll its resources 128 times; a call that blocks in the task must not depend on that.
    #[test]
    fn blocking_calls_in_a_task_end_however_many_there_are() {
        let (result_sender, result) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let connect = || blocking::Client::connect("memory:").map(drop);
            result_sender.send(runtime.block_on(async { (0..200).try_for_each(|_| connect()) }))
        });
        result.recv_timeout(Duration::from_secs(60)).expect("the calls end").unwrap();
    }

    /// A reply over the proxy takes 300 ms, so one after the other they would take 14 s.
    #[test]
    fn blocking_set_releases_its_locks_at_the_same_time() {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let client = blocking::Client::connect(&proxy.url()).unwrap();
        let set = blocking::MutexSet::new((0..48).map(|number| client.mutex(format!("lock {number}"))));
        let guard = set.lock().unwrap();
        proxy.delay_replies(Duration::from_millis(300));
        let begun = Instant::now();
        guard.release().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    }

    #[test]
    fn blocking_guards_have_the_methods_of_the_async_ones() {
        let builder = Client::builder().store("memory:").ttl(Duration::from_secs(60)).label("all");
        let client = blocking::Client::connect_with(builder).unwrap();
        assert!(client.warnings().is_empty());
        let lottery = client.mutex("a").min_hold(Duration::from_secs(3_600));
        let guard = lottery.lock().unwrap();
        guard.wait_until_expiring(Duration::from_secs(60));
        guard.set_min_hold(Duration::ZERO).unwrap();
        guard.release().unwrap();
        let set = blocking::MutexSet::new([lottery.min_hold(Duration::ZERO), client.mutex("b")]);
        let set = set.lock().unwrap();
        set.renew().unwrap();
        assert!(set.remaining() > Duration::from_secs(50));
        let names = set.into_guards().iter().map(|guard| guard.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names, ["a", "b"]);
        let writer = client.rw_lock("c").write().unwrap();
        blocking::Guard::from(writer).release().unwrap();
        let traced =
            client.mutex("d").trace_id("4bf92f").metrics_label("checkout").ttl(Duration::from_secs(10));
        let lease = traced.lock().unwrap().detach().unwrap();
        client.renew_lease(&lease).unwrap();
        assert_eq!(client.list_names().unwrap(), [(leasehold::Kind::Mutex, "d".to_owned())]);
        assert_eq!(traced.inspect().unwrap().holders[0].metadata.trace_id.as_deref(), Some("4bf92f"));
        client.attach(&lease).unwrap().release().unwrap();
    }
}
