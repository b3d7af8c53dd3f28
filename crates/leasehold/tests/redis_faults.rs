//! What becomes of locks when something happens to their Redis server, or to the way there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard, Kind, Loss};
use leasehold_testkit::{Flavor, Proxy, Server, undisturbed, until};
use redis::Commands as _;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

async fn client_of(server: &Server) -> Client {
    Client::connect(&server.url()).await.unwrap()
}

async fn until_waiting(client: &Client, count: usize) {
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == count)).await;
}

#[tokio::test]
async fn flushed_scripts_are_sent_again() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    for _ in 0..3 {
        server.run(&["SCRIPT", "FLUSH"]);
        let guard = client.mutex("a").lock().await.unwrap();
        server.run(&["SCRIPT", "FLUSH"]);
        guard.renew().await.unwrap();
        server.run(&["SCRIPT", "FLUSH"]);
        guard.release().await.unwrap();
    }
}

/// The server sweeps by itself what has an expiry, so every key of a lock has one, however the lock was left.
#[tokio::test]
async fn unused_resources_are_swept_by_other_commands() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    for number in 0..100 {
        let guard = client.mutex(format!("released {number}")).lock().await.unwrap();
        guard.release().await.unwrap();
    }
    // As a process leaves it that is killed: one lease, and one that waits for it.
    std::mem::forget(client.mutex("a").auto_renew(false).lock().await.unwrap());
    let waiting = client.mutex("a").global_fifo();
    tokio::spawn(async move { waiting.lock().await });
    until_waiting(&client, 1).await;
    std::mem::forget(client.semaphore("s", 3).auto_renew(false).acquire(2).await.unwrap());
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let keys: Vec<String> = connection.keys("*").unwrap();
    assert!(keys.len() > 100, "{keys:?}");
    // One key is about the server, and no lock.
    for key in keys.into_iter().filter(|key| key != "leasehold:layout") {
        let left: i64 = connection.pttl(&key).unwrap();
        assert!((1..=3 * 3_600_000).contains(&left), "{key} goes in {left} ms");
    }
}

/// The holder of a lease of 30 s, whose next renewal is due after ten, loses it within this.
async fn emptied_server_costs_the_lease(server: &Server, protocol: &str, noticed_within: Duration) {
    let client = Client::connect(&format!("{}?protocol={protocol}", server.url())).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    server.run(&["FLUSHALL"]);
    let loss = timeout(noticed_within, guard.lost()).await.expect("the loss is noticed in time");
    assert_eq!(loss, Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test]
async fn flushed_server_loses_the_lease_and_tokens_keep_rising() {
    // Told by the server.
    for flavor in Flavor::ALL {
        let server = Server::builder().flavor(flavor).start();
        emptied_server_costs_the_lease(&server, "3", Duration::from_secs(5)).await;
    }
    // By the renewal, since the older protocol has no way to tell.
    emptied_server_costs_the_lease(&Server::on_port(), "2", Duration::from_secs(13)).await;
}

#[tokio::test]
async fn unrenewed_lease_is_lost_by_its_ttl_after_a_flush() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(3);
    let guard = client.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    server.run(&["FLUSHALL"]);
    // No renewal tells, but it does not outlast its ttl.
    timeout(ttl + Duration::from_secs(1), guard.lost()).await.expect("it ends with its ttl");
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn deleted_key_loses_the_lease_at_the_next_renewal() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(6);
    let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
    assert_eq!(server.query::<i64>(&["DEL", "leasehold:2:{mutex:a}:state"]), Ok(1));
    // Due after a third, and well before the lease would have ended by itself.
    let loss = timeout(ttl * 2 / 3, guard.lost()).await.expect("the loss is noticed in time");
    assert_eq!(loss, Loss::Gone);
}

#[tokio::test]
async fn waiter_rechecks_at_once_after_a_flush() {
    let server = Server::on_port();
    let (holder, other) = (client_of(&server).await, client_of(&server).await);
    let _guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until_waiting(&holder, 1).await;
    server.run(&["FLUSHALL"]);
    // By itself it would look after 25 s.
    drop(timeout(Duration::from_secs(8), waiting).await.expect("it has the lock").unwrap());
}

#[tokio::test]
async fn server_restarted_empty_loses_the_lease_and_tokens_keep_rising() {
    let mut server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    server.stop();
    server.start();
    // Long before the next renewal would be due: every lease is renewed when the connection is new.
    assert_eq!(timeout(Duration::from_secs(8), guard.lost()).await.unwrap(), Loss::Gone);
    let next = client.mutex("a").lock().await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn hang_shorter_than_the_ttl_keeps_the_lease() {
    undisturbed(Duration::from_millis(500), async || {
        let server = Server::on_socket();
        let client = client_of(&server).await;
        let guard = client.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
        server.signal("STOP");
        tokio::time::sleep(Duration::from_secs(3)).await;
        server.signal("CONT");
        // Beyond the first lease: only renewals can have kept it.
        tokio::time::sleep(Duration::from_secs(4)).await;
        guard.release().await.map_err(|error| error.to_string())
    })
    .await;
}

#[tokio::test]
async fn hang_longer_than_the_ttl_loses_the_lease_before_it_expires() {
    undisturbed(Duration::from_millis(300), async || {
        let server = Server::on_socket();
        let client = client_of(&server).await;
        let ttl = Duration::from_secs(2);
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        server.signal("STOP");
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Loss::Expired);
        let noticed = began.elapsed();
        server.signal("CONT");
        let next = timeout(SOON, client.mutex("a").lock()).await.unwrap().unwrap();
        assert!(next.token() > guard.token());
        let is_in_time = noticed < ttl + Duration::from_millis(500);
        is_in_time.then_some(()).ok_or_else(|| format!("noticed after {noticed:?}"))
    })
    .await;
}

#[tokio::test]
async fn disconnected_waiter_keeps_its_place_and_is_granted() {
    let server = Server::on_socket();
    let (one, other) = (client_of(&server).await, client_of(&server).await);
    for _ in 0..5 {
        let guard = one.mutex("a").lock().await.unwrap();
        let mutex = other.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await });
        until_waiting(&one, 1).await;
        // Every connection but this one, so also the holder's.
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        // It may be published while the waiter is away.
        guard.release_timeout(SOON).await.unwrap();
        // Much sooner than the 20 s after which a waiter looks again by itself.
        let guard = timeout(Duration::from_secs(8), waiting).await.unwrap().unwrap().unwrap();
        guard.release_timeout(SOON).await.unwrap();
    }
}

#[tokio::test]
async fn full_memory_refuses_locks_and_allows_releases() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").lock().await.unwrap();
    let other = client.mutex("b").min_hold(Duration::from_secs(1)).lock().await.unwrap();
    let mutex = client.mutex("a").global_fifo();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&client, 1).await;
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = client.mutex("c").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("memory is full"), "{error}");
    guard.renew().await.unwrap();
    // A cancelled place, a release, a release that keeps.
    waiting.abort();
    until_waiting(&client, 0).await;
    guard.release().await.unwrap();
    other.release().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn full_memory_allows_renewal_and_release_of_shared_locks() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let semaphore = client.semaphore("a", 3);
    let (one, other) = (semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap());
    let named = client.reentrant_mutex("b", "me").lock().await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(semaphore.acquire(1).await.unwrap_err().is_unavailable());
    for guard in [one, other, named] {
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
    }
    server.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(semaphore.try_acquire(3).await.unwrap().is_some());
    assert!(client.reentrant_mutex("b", "you").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn key_of_another_type_is_a_clear_error() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mut admin = server.admin();
    let _: () = admin.lpush("leasehold:2:{mutex:a}:state", "mine").unwrap();
    let error = client.mutex("a").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
    let kept: Vec<String> = admin.lrange("leasehold:2:{mutex:a}:state", 0, -1).unwrap();
    assert_eq!(kept, ["mine"]);
    assert!(client.mutex("b").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn refused_login_is_explained_without_the_password() {
    let server = Server::on_socket();
    server.run(&[
        "ACL",
        "SETUSER",
        "weak",
        "on",
        ">x",
        "~*",
        "&*",
        "+subscribe",
        "+hello",
        "+client",
        "+ping",
    ]);
    server.run(&["CONFIG", "SET", "requirepass", "s3cret"]);
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("wants a password"), "{error}");
    let wrong = format!("{}?pass=hunter2", server.url());
    let error = Client::connect(&wrong).await.unwrap_err();
    assert!(
        error.to_string().contains("does not accept") && !format!("{error:?}").contains("hunter2"),
        "{error}"
    );
    let right = Client::connect(&format!("{}?pass=s3cret", server.url())).await.unwrap();
    assert!(right.mutex("a").try_lock().await.unwrap().is_some());
    let weak = Client::connect(&format!("{}?user=weak&pass=x", server.url())).await.unwrap();
    let error = weak.mutex("a").try_lock().await.unwrap_err();
    assert!(error.to_string().contains("may not run scripts"), "{error}");
}

#[tokio::test]
async fn replica_is_refused() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    server.run(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = client.mutex("a").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("replica"), "{error}");
}

#[tokio::test]
async fn server_restarted_with_its_files_keeps_leases() {
    let mut server = Server::builder().setting("appendonly", "yes").setting("appendfsync", "always").start();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    server.stop();
    server.start();
    until(async || guard.renew().await.is_ok()).await;
    assert!(client_of(&server).await.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
}

/// The clients' connections, without the test's own.
fn connections(server: &Server) -> Vec<String> {
    let list: String = server.query(&["CLIENT", "LIST"]).unwrap();
    let field = |line: &str, name: &str| {
        line.split(' ').find_map(|part| part.strip_prefix(name)).unwrap_or_default().to_owned()
    };
    list.lines().filter(|line| !line.contains("cmd=client")).map(|line| field(line, "id=")).collect()
}

#[tokio::test]
async fn killing_any_connection_keeps_locks_and_waiters() {
    for protocol in ["3", "2"] {
        let server = Server::on_port();
        let url = format!("{}?protocol={protocol}", server.url());
        // Each has two, for commands and for pushes, or for either.
        let (one, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
        for victim in 0..5 {
            until(async || connections(&server).len() == 4).await;
            let guard = one.mutex("a").lock().await.unwrap();
            let mutex = other.mutex("a");
            let waiting = tokio::spawn(async move { mutex.lock().await });
            until_waiting(&one, 1).await;
            let ids = connections(&server);
            for id in ids.get(victim..=victim).unwrap_or(&ids) {
                assert_eq!(server.query::<i64>(&["CLIENT", "KILL", "ID", id]), Ok(1));
            }
            // An idle connection that was cut is no reason for an error.
            let free = one.mutex("free").lock().await.unwrap();
            free.release().await.unwrap();
            guard.renew().await.unwrap();
            guard.release_timeout(SOON).await.unwrap();
            let guard = timeout(Duration::from_secs(8), waiting).await.unwrap().unwrap().unwrap();
            guard.release_timeout(SOON).await.unwrap();
        }
    }
}

#[tokio::test]
async fn command_that_finds_its_idle_connection_cut_is_repeated() {
    let server = Server::on_port();
    // With this protocol the client does not read while it has no command, so the next command finds out.
    let client = Client::connect(&format!("{}?protocol=2", server.url())).await.unwrap();
    // Pushes come over a connection of another type.
    let cut = || assert_eq!(server.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal"]), Ok(1));
    // Its own renewals would find out first.
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).auto_renew(false).lock().await.unwrap();
    cut();
    guard.renew().await.unwrap();
    cut();
    assert_eq!(client.mutex("a").inspect().await.unwrap().holders.len(), 1);
    cut();
    guard.release().await.unwrap();
    cut();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn release_that_took_effect_before_its_answer_was_lost_succeeds() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (client, watcher) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
    // The server knows the scripts from then on.
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    proxy.swallow_replies(true);
    let releasing = tokio::spawn(async move { guard.release().await });
    until(async || watcher.inspect(Kind::Mutex, "a").await.unwrap().holders.is_empty()).await;
    proxy.swallow_replies(false);
    proxy.cut();
    timeout(SOON, releasing).await.unwrap().unwrap().unwrap();
}

/// A holder that is connected directly, and one who waits behind a proxy.
async fn one_waits_behind(proxy: &Proxy, server: &Server) -> (Guard, tokio::task::JoinHandle<Guard>) {
    let holder = client_of(server).await;
    let guard = holder.mutex("a").ttl(Duration::from_secs(2)).lock().await.unwrap();
    let mutex = Client::connect(&proxy.url()).await.unwrap().mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until_waiting(&holder, 1).await;
    (guard, waiting)
}

#[tokio::test]
async fn lost_push_only_delays_the_grant() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let (guard, waiting) = one_waits_behind(&proxy, &server).await;
    proxy.swallow_messages(Some(b"leasehold"));
    let token = guard.token();
    guard.release().await.unwrap();
    // The first in the queue knows when the present lease would have ended, and looks then.
    let next = timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap();
    assert!(proxy.swallowed() > 0, "the push was lost");
    assert!(next.is_held() && next.token() > token);
    next.renew().await.unwrap();
}

/// What ends the name of an inbox and begins the word that a lease is wanted.
const WANTED: &[u8] = b"\n\x04";

/// Takes and gives back the lock until it is told to stop, and has work to do with it, so that its tokens last.
async fn work_on(mutex: leasehold::Mutex, is_over: Arc<AtomicBool>) {
    while !is_over.load(Ordering::SeqCst) {
        let guard = mutex.lock().await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn local_handoff_learns_of_other_waiters_by_renewal_when_the_push_is_lost() {
    undisturbed(Duration::from_millis(300), async || {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let (line, other) = (Client::connect(&proxy.url()).await.unwrap(), client_of(&server).await);
        let ttl = Duration::from_secs(3);
        let is_over = Arc::new(AtomicBool::new(false));
        let work = || tokio::spawn(work_on(line.mutex("a").ttl(ttl), is_over.clone()));
        let tasks = [work(), work(), work()];
        // The line has its tokens, so no renewal is due before a third of the ttl.
        let has_tokens = async || {
            let view = other.mutex("a").inspect().await.unwrap();
            let aside = |token: Option<leasehold::Token>| token.map_or(0, leasehold::Token::get);
            let first = view.holders.first().map(|holder| holder.token);
            first.is_some() && aside(view.last_token) > aside(first) + 1_000
        };
        until(has_tokens).await;
        proxy.swallow_messages(Some(WANTED));
        let began = Instant::now();
        let guard = timeout(SOON, other.mutex("a").lock()).await.unwrap().unwrap();
        let waited = began.elapsed();
        is_over.store(true, Ordering::SeqCst);
        guard.release().await.unwrap();
        for task in tasks {
            timeout(SOON, task).await.unwrap().unwrap();
        }
        assert!(proxy.swallowed() > 0, "the push was lost");
        let is_in_time = waited < ttl / 3 + Duration::from_millis(250);
        is_in_time.then_some(()).ok_or_else(|| format!("it waited for {waited:?}"))
    })
    .await;
}

#[tokio::test]
async fn missing_response_is_an_error_and_leaves_no_lease() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = client_of(&server).await;
    let client = Client::connect(&proxy.url()).await.unwrap();
    proxy.swallow_replies(true);
    let began = Instant::now();
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "after {:?}", began.elapsed());
    // The server has granted it. It is given back at once, though that is not answered either.
    until(async || watcher.inspect(Kind::Mutex, "a").await.unwrap().holders.is_empty()).await;
    assert!(began.elapsed() < Duration::from_secs(8), "after {:?}", began.elapsed());
    proxy.swallow_replies(false);
    proxy.cut();
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
}

#[tokio::test]
async fn delayed_acquire_after_its_release_is_cancelled() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let watcher = client_of(&server).await;
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mutex = client.mutex("a");
    mutex.lock().await.unwrap().release().await.unwrap();
    // The two ways to the server are two connections, so what goes by the other one can overtake it.
    until(async || connections(&server).len() == 4).await;
    proxy.delay_requests(Duration::from_millis(700));
    let late = tokio::spawn(async move { mutex.lock().await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    proxy.delay_requests(Duration::ZERO);
    late.abort();
    let began = Instant::now();
    // From before it arrives until after that, nobody holds it and nobody waits for it.
    while began.elapsed() < Duration::from_secs(2) {
        let view = watcher.inspect(Kind::Mutex, "a").await.unwrap();
        assert!(view.holders.is_empty() && view.waiters.is_empty(), "{view:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let guard = watcher.mutex("a").try_lock().await.unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn evicting_server_is_warned_about() {
    let server = Server::builder().setting("maxmemory-policy", "volatile-lru").start();
    let client = client_of(&server).await;
    let warnings = client.warnings();
    assert!(
        warnings.iter().any(|warning| warning.contains("volatile-lru") && warning.contains("noeviction"))
    );
    let sound = Server::on_socket();
    assert_eq!(client_of(&sound).await.warnings(), Vec::<String>::new());
}

#[tokio::test]
async fn clients_with_different_layouts_are_refused() {
    let server = Server::on_socket();
    client_of(&server).await;
    server.run(&["SET", "leasehold:layout", "0"]);
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("layout 0"), "{error}");
    server.run(&["DEL", "leasehold:layout"]);
    client_of(&server).await;
    let kept: i64 = server.query(&["TTL", "leasehold:layout"]).unwrap();
    assert!(kept > 3_600, "it is remembered, but not for ever");
}

#[tokio::test]
async fn loading_and_full_servers_are_explained() {
    // Each key takes it 50 ms, and it hears its clients after each KiB.
    let builder = Server::builder().setting("save", "3600 1").setting("rdbcompression", "no");
    let builder = builder.setting("key-load-delay", "50000");
    let mut server = builder.setting("loading-process-events-interval-bytes", "1024").start();
    for number in 0..60 {
        server.run(&["SET", &format!("filler:{number}"), &"x".repeat(1_024)]);
    }
    server.shut_down();
    server.start_loading();
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("loading its data"), "{error}");

    let full = Server::builder().setting("maxclients", "3").start();
    let error = async {
        let mut clients = Vec::new();
        loop {
            match Client::connect(&full.url()).await {
                Ok(client) => clients.push(client),
                Err(error) => return error,
            }
            assert!(clients.len() < 4, "it takes no more than three connections");
        }
    };
    let error = error.await;
    let text = error.to_string();
    assert!(text.contains("as many clients as it may"), "{text}");
}

#[tokio::test]
async fn wrong_addresses_fail_in_time_without_the_password() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    proxy.refuse(true);
    let nobody = format!("redis://me:hunter2@127.0.0.1:{}", proxy.port());
    // No resolver accepts a label of 64 letters, so none is asked.
    let unknown = format!("redis://me:hunter2@{}:6379", "a".repeat(64));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("redis://me:hunter2@{}", silent.local_addr().unwrap());
    for (url, what) in
        [(&nobody, "connection refused"), (&unknown, "name is not known"), (&silent_url, "no answer within")]
    {
        let began = Instant::now();
        let error = Client::connect(url).await.unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(7), "{url} took {:?}", began.elapsed());
        let text = format!("{error} {error:?}");
        assert!(error.is_unavailable() && text.contains(what) && text.contains("redis://"), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[tokio::test]
async fn redis_client_works_like_an_address() {
    let server = Server::builder().password("s3cret").start();
    let own = redis::Client::open(server.url()).unwrap();
    let client = Client::from_redis_client(own).await.unwrap();
    let other = client_of(&server).await;
    let guard = client.mutex("a").lock().await.unwrap();
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    assert!(!format!("{client:?}").contains("s3cret"), "{client:?}");
    guard.release().await.unwrap();
}

/// A runtime of one thread that does nothing unless somebody blocks on it.
fn idle_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn renewals_and_waiters_need_no_caller_runtime() {
    let server = Server::on_port();
    let idle = idle_runtime();
    let client = idle.block_on(client_of(&server));
    let guard = idle.block_on(async {
        // Until commands go out from here.
        until(async || connections(&server).len() == 2).await;
        client.mutex("held").ttl(Duration::from_secs(2)).lock().await.unwrap()
    });
    // That runtime does nothing from now on, but is still there.
    let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    other.block_on(async {
        let holder = client_of(&server).await;
        let first = holder.mutex("a").lock().await.unwrap();
        let mutex = client.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
        until_waiting(&holder, 1).await;
        first.release().await.unwrap();
        let next = timeout(Duration::from_secs(5), waiting).await.expect("it hears of its grant").unwrap();
        // Beyond the first lease: only renewals can have kept it.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(guard.is_held(), "it is renewed");
        guard.release().await.unwrap();
        drop(next);
        timeout(SOON, client.close()).await.expect("closing is not held up").unwrap();
    });
    drop(idle);
}

#[test]
fn ended_runtime_loses_no_lock() {
    let server = Server::on_port();
    let short = idle_runtime();
    let (client, guard) = short.block_on(async {
        let client = client_of(&server).await;
        until(async || connections(&server).len() == 2).await;
        let guard = client.mutex("held").ttl(Duration::from_secs(2)).lock().await.unwrap();
        (client, guard)
    });
    drop(short);
    idle_runtime().block_on(async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(guard.is_held(), "it is renewed");
        guard.release().await.unwrap();
        client.mutex("a").lock().await.unwrap().release().await.unwrap();
    });
}

#[test]
fn runtime_without_timers_and_sockets_suffices() {
    let server = Server::on_port();
    let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let client = client_of(&server).await;
        for _ in 0..3 {
            client.mutex("a").lock().await.unwrap().release().await.unwrap();
        }
        client.close().await.unwrap();
    });
}

#[tokio::test]
async fn many_leases_survive_a_script_flush_at_high_latency() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mut guards = Vec::new();
    for number in 0..300 {
        guards.push(client.mutex(format!("{number}")).ttl(Duration::from_secs(4)).lock().await.unwrap());
    }
    proxy.delay_requests(Duration::from_millis(20));
    server.run(&["SCRIPT", "FLUSH"]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(guards.iter().filter(|guard| !guard.is_held()).count(), 0);
}

#[tokio::test]
async fn closed_client_leaves_no_connection() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let mutex = client.mutex("a");
    until(async || connections(&server).len() == 2).await;
    client.close().await.unwrap();
    until(async || connections(&server).is_empty()).await;
    assert!(mutex.lock().await.unwrap_err().is_closed());
}

#[tokio::test]
async fn reconnects_to_a_server_that_hangs_up_are_rate_limited() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let _guard = client.mutex("a").lock().await.unwrap();
    let before: String = server.query(&["INFO", "stats"]).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let after: String = server.query(&["INFO", "stats"]).unwrap();
    let received = |stats: &str| -> u64 {
        let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:")).unwrap();
        line.trim().parse().unwrap()
    };
    // The test's own connections are made for each command.
    let own = u64::try_from(began.elapsed().as_millis()).unwrap() * 2 + 10;
    let made = (received(&after) - received(&before)).saturating_sub(own.min(received(&after)));
    assert!(made < 60, "{made} connections in 3 s");
}

/// A runtime on a thread of its own: its commands go by the client's own connection, and not by its caller's.
fn other_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[tokio::test]
async fn caller_connection_to_another_server_makes_the_client_reconnect() {
    let (first, second) = (Server::on_port(), Server::on_port());
    let proxy = Proxy::before(&first);
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || connections(&first).len() == 2).await;
    proxy.lead_to(&second);
    // The caller's connection was made last, and is made again two seconds later.
    let callers = connections(&first).pop().unwrap();
    assert_eq!(first.query::<i64>(&["CLIENT", "KILL", "ID", &callers]), Ok(1));
    // One that stayed behind would hear of grants that its commands know nothing of.
    until(async || connections(&first).is_empty()).await;
    until(async || client.mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())).await;
    assert_eq!(second.query::<Vec<String>>(&["KEYS", "leasehold:*mutex:a*"]).unwrap().len(), 1);
}

#[tokio::test]
async fn replica_connection_to_another_server_grants_nothing() {
    let (first, second) = (Server::on_port(), Server::on_port());
    let _replica = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", second.port())).start();
    until(async || second.query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count == 1)).await;
    let proxy = Proxy::before(&first);
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || connections(&first).len() == 2).await;
    proxy.lead_to(&second);
    // It is made when it is first needed, and the others are made again there.
    let guard = timeout(SOON, client.mutex("a").replicas(1).lock()).await.unwrap().unwrap();
    until(async || connections(&first).is_empty()).await;
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
}

/// An attempt is granted, and given up with its connection before the answer arrives. By then somebody else has the lock.
async fn answered_too_late(server: &Server, proxy: &Proxy) -> Result<(), String> {
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || proxy.connections() == 2).await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    proxy.delay_replies(Duration::from_millis(900));
    let mutex = client.mutex("a");
    let late = tokio::spawn(async move { mutex.try_lock().await });
    let watcher = client_of(server).await;
    until(async || !watcher.inspect(Kind::Mutex, "a").await.unwrap().holders.is_empty()).await;
    proxy.delay_replies(Duration::ZERO);
    // A server that turns out to be a replica is given up. This goes by the other connection, and overtakes the answer.
    server.run(&["REPLICAOF", "127.0.0.1", "1"]);
    let mutex = client.mutex("b");
    let refused = tokio::task::spawn_blocking(move || other_runtime().block_on(mutex.try_lock()));
    assert!(refused.await.unwrap().unwrap_err().to_string().contains("replica"));
    server.run(&["REPLICAOF", "NO", "ONE"]);
    server.run(&["FLUSHALL"]);
    let guard = watcher.mutex("a").lock().await.unwrap();
    if late.is_finished() {
        return Err("the answer was there too soon".to_owned());
    }
    let granted = timeout(SOON, late).await.unwrap().unwrap();
    assert!(!granted.is_ok_and(|granted| granted.is_some()), "somebody else has it");
    assert!(guard.is_held());
    client.close().await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn response_over_a_closed_connection_is_ignored() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    undisturbed(Duration::from_millis(100), async || answered_too_late(&server, &proxy).await).await;
}

#[tokio::test]
async fn client_reconnects_soon_after_a_network_outage() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let ttl = Duration::from_secs(4);
    undisturbed(Duration::from_millis(300), async || {
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        // What is dialed now never gets an answer, nor does it when the way is free again.
        proxy.swallow_requests(true);
        proxy.cut();
        until(async || proxy.connections() > 0).await;
        proxy.swallow_requests(false);
        // Long before a dial of five seconds would have been over.
        let began = Instant::now();
        until(async || guard.renew().await.is_ok() || !guard.is_held()).await;
        guard.release().await.map_err(|error| format!("after {:?}: {error}", began.elapsed()))
    })
    .await;
}

#[tokio::test]
async fn due_renewal_skips_the_reconnect_backoff() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let ttl = Duration::from_secs(5);
    undisturbed(Duration::from_millis(300), async || {
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        proxy.refuse(true);
        proxy.cut();
        // By then the pauses are two seconds long; the last one began at 3.15 s and ends after the lease.
        tokio::time::sleep(Duration::from_millis(3_300)).await;
        proxy.refuse(false);
        until(async || guard.remaining() > ttl / 2 || !guard.is_held()).await;
        guard.release().await.map_err(|error| error.to_string())
    })
    .await;
}

#[tokio::test]
async fn repeated_disconnects_lose_no_lease_and_fail_no_lock() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let ttl = Duration::from_millis(1_500);
    undisturbed(Duration::from_millis(300), async || {
        let guard = client.mutex("held").ttl(ttl).lock().await.unwrap();
        for cut in 0..14 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
            server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            let free = client.mutex("free").lock().await.map_err(|error| format!("cut {cut}: {error}"))?;
            free.release().await.map_err(|error| format!("cut {cut}: {error}"))?;
        }
        guard.release().await.map_err(|error| error.to_string())
    })
    .await;
}

#[tokio::test]
async fn error_of_a_proven_address_does_not_question_it() {
    let mut server = Server::on_port();
    let socket_url = server.socket_url();
    let over_port = client_of(&server).await;
    let over_socket = Client::connect(&socket_url).await.unwrap();
    let guards = [&over_port, &over_socket].map(|client| client.mutex("a"));
    server.shut_down();
    for (mutex, what) in guards.into_iter().zip(["connection refused", "socket is gone"]) {
        let error = mutex.lock().await.unwrap_err().to_string();
        assert!(!error.contains("check the"), "{error}");
        until(async || mutex.lock().await.unwrap_err().to_string().contains(what)).await;
    }
    // For one that never answered, the address is the first thing to look at.
    for (url, what) in [(server.url(), "check the host and the port"), (socket_url, "no such Unix socket")] {
        let error = Client::connect(&url).await.unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("check"), "{error}");
        assert!(!error.contains("host") || url.starts_with("redis://"), "{error}");
    }
}

#[tokio::test]
async fn error_of_an_old_server_omits_the_password() {
    for (command, url) in [("HELLO", ""), ("EVALSHA", "?protocol=2")] {
        let server = Server::builder()
            .password("s3cret")
            .setting("rename-command", &format!("{command} \"\""))
            .start();
        let client = Client::connect(&format!("{}{url}", server.url())).await;
        let told = match client {
            Ok(client) => client.mutex("a").lock().await.map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = &told {
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
        }
        assert_eq!(told.is_ok(), command == "HELLO", "{told:?}");
    }
}

#[tokio::test]
async fn unrenewed_lease_expires_despite_repeated_reconnects() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let ttl = Duration::from_millis(800);
    let guard = client.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    let began = Instant::now();
    let mut cuts = 0;
    while began.elapsed() < ttl * 3 {
        cuts += server.query::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(cuts > 3, "the connection was made again {cuts} times");
    assert!(!guard.is_held());
    let view = client_of(&server).await.mutex("a").inspect().await.unwrap();
    assert!(view.holders.is_empty(), "{view:?}");
}

#[tokio::test]
async fn close_after_a_server_crash_returns_within_the_longest_lease() {
    let mut server = Server::on_port();
    let holder = client_of(&server).await;
    let _held = holder.mutex("a").lock().await.unwrap();
    let client = client_of(&server).await;
    let ttl = Duration::from_secs(3);
    let guard = client.mutex("b").ttl(ttl).lock().await.unwrap();
    let mutex = client.mutex("a").ttl(ttl);
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_waiting(&holder, 1).await;
    server.stop();
    let began = Instant::now();
    let closing = tokio::spawn(client.close());
    assert!(timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err().is_closed());
    assert!(began.elapsed() < Duration::from_secs(1), "what waits ended after {:?}", began.elapsed());
    assert!(!guard.is_held());
    let closed = timeout(SOON, closing).await.unwrap().unwrap();
    assert!(closed.unwrap_err().is_unavailable());
    assert!(began.elapsed() < ttl * 2, "closing took {:?}", began.elapsed());
}
