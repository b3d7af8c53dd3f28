//! Bridges to locks on several servers, which are held by the holder of a majority.

use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Guard, Kind, Loss, Mutex};
use leasehold_testkit::{Proxy, Server, unless_paused, until, until_some};
use redis::Value;

const KEY: &str = "jobs";
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

/// Three servers that vote. The client's own lease is on another one.
struct Place {
    servers: [Server; 3],
    own: Server,
}

impl Place {
    fn new() -> Self {
        Self { servers: [Server::on_port(), Server::on_port(), Server::on_port()], own: Server::on_socket() }
    }

    fn foreign(&self) -> Foreign {
        Foreign::redlock(self.servers.each_ref().map(Server::url), KEY).unwrap()
    }

    async fn client(&self) -> Client {
        Client::connect(&self.own.url()).await.unwrap()
    }

    /// Whether each of the servers has the key.
    fn keys(&self) -> [bool; 3] {
        self.servers.each_ref().map(has_key)
    }

    /// Takes the lock on these servers, as another program would.
    fn take_as_other(&self, servers: &[usize]) {
        for server in servers {
            let taken: Value = self.servers[*server].run(&["SET", KEY, "other", "NX", "PX", "60000"]);
            assert_eq!(taken, Value::Okay);
        }
    }

    fn delete(&self, servers: &[usize]) {
        servers.iter().for_each(|server| drop(self.servers[*server].run(&["DEL", KEY])));
    }
}

fn has_key(server: &Server) -> bool {
    server.query::<i64>(&["EXISTS", KEY]).unwrap() == 1
}

fn mutex(client: &Client, foreign: &Foreign) -> Mutex {
    client.mutex("own").bridge(foreign.clone())
}

/// As soon as the server answers.
async fn own_is_free(client: &Client) -> bool {
    until_some(async || client.inspect(Kind::Mutex, "own").await.ok()).await.holders.is_empty()
}

async fn until_renewed(guard: &Guard) {
    until(async || guard.remaining() > Duration::from_secs(3)).await;
}

#[tokio::test]
async fn lock_on_several_servers_is_taken_renewed_and_released_on_all() {
    let place = Place::new();
    let client = place.client().await;
    let began = Instant::now();
    let guard = mutex(&client, &place.foreign()).lock().await.unwrap();
    let left = guard.remaining();
    assert!(left <= Duration::from_secs(3) || began.elapsed() > Duration::from_millis(900), "{left:?}");
    until(async || place.keys() == [true; 3]).await;
    let values = place.servers.each_ref().map(|server| server.query::<String>(&["GET", KEY]).unwrap());
    assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
    until_renewed(&guard).await;
    let is_renewed = |server: &Server| server.query::<i64>(&["PTTL", KEY]).unwrap() > 3_000;
    until(async || place.servers.iter().all(is_renewed)).await;
    guard.release().await.unwrap();
    until(async || place.keys() == [false; 3]).await;
    // With a try, and dropped.
    drop(mutex(&client, &place.foreign()).try_lock().await.unwrap().unwrap());
    until(async || place.keys() == [false; 3] && own_is_free(&client).await).await;
}

#[tokio::test]
async fn majority_of_the_servers_decides_who_has_the_lock() {
    let place = Place::new();
    let client = place.client().await;
    let mutex = mutex(&client, &place.foreign());
    // A minority of another program, which may have crashed, does not matter.
    place.take_as_other(&[1]);
    // A server that is silent for a second leaves it undecided.
    let guard = until_some(async || mutex.try_lock().await.ok()).await.expect("two of three");
    guard.release().await.unwrap();
    until(async || place.keys() == [false, true, false]).await;
    place.take_as_other(&[2]);
    assert!(until_some(async || mutex.try_lock().await.ok()).await.is_none());
    let limit = Duration::from_millis(300);
    assert!(until_some(async || mutex.lock_timeout(limit).await.ok()).await.is_none());
    until(async || place.keys() == [false, true, true]).await;
    assert!(own_is_free(&client).await);
    // The waiter gets it when the other program has released it.
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until(async || !own_is_free(&client).await).await;
    place.delete(&[1, 2]);
    let guard = tokio::time::timeout(SOON, waiter).await.expect("woken, or by polling").unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn lock_is_lost_with_its_majority() {
    let place = Place::new();
    let client = place.client().await;
    let guard = mutex(&client, &place.foreign()).ttl(LONG).lock().await.unwrap();
    until_renewed(&guard).await;
    place.delete(&[0]);
    guard.renew().await.unwrap();
    assert!(guard.is_held());
    place.delete(&[2]);
    let deleted = Instant::now();
    assert_eq!(guard.lost().await, Loss::Bridge);
    assert!(deleted.elapsed() < SOON, "told by the servers");
    assert!(guard.release().await.unwrap_err().is_lost());
    until(async || place.keys() == [false; 3] && own_is_free(&client).await).await;
}

#[tokio::test]
async fn one_of_three_servers_may_be_down() {
    let mut place = Place::new();
    let (client, foreign) = (place.client().await, place.foreign());
    place.servers[0].stop();
    let up = |place: &Place| [has_key(&place.servers[1]), has_key(&place.servers[2])];
    for number in 0..2 {
        let mutex = mutex(&client, &foreign);
        let guard = match number {
            0 => until_some(async || mutex.try_lock().await.ok()).await.expect("two of three"),
            _ => mutex.lock().await.unwrap(),
        };
        assert_eq!(up(&place), [true; 2]);
        until_renewed(&guard).await;
        guard.release().await.unwrap();
        assert_eq!(up(&place), [false; 2]);
    }
    // It comes back while the lock is held, without the key.
    let guard = mutex(&client, &foreign).lock().await.unwrap();
    place.servers[0].start();
    guard.renew().await.unwrap();
    until_renewed(&guard).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    assert_eq!(place.keys(), [false; 3]);
}

#[tokio::test]
async fn without_a_majority_of_servers_nothing_is_held() {
    let mut place = Place::new();
    let (client, foreign) = (place.client().await, place.foreign());
    place.servers[0].stop();
    place.servers[1].stop();
    for number in 0..2 {
        let mutex = mutex(&client, &foreign);
        let error = match number {
            0 => mutex.try_lock().await.map(drop).unwrap_err(),
            _ => mutex.lock().await.map(drop).unwrap_err(),
        };
        assert!(error.is_unavailable(), "{error}");
        let what = "2 of the 3 servers of the lock do not answer, and 2 are needed";
        assert!(error.to_string().contains(what), "{error}");
        assert!(error.to_string().contains("bridged to redlock:jobs@"), "{error}");
        until(async || own_is_free(&client).await && !has_key(&place.servers[2])).await;
    }
}

#[tokio::test]
async fn lock_is_lost_in_time_when_a_majority_of_servers_goes_down() {
    let mut place = Place::new();
    let client = place.client().await;
    let ttl = Duration::from_secs(10);
    let guard = mutex(&client, &place.foreign()).ttl(ttl).lock().await.unwrap();
    until(async || place.keys() == [true; 3]).await;
    place.servers[0].stop();
    place.servers[1].stop();
    let stopped = Instant::now();
    assert_eq!(guard.lost().await, Loss::Bridge);
    // At the end of the ttl of the last renewal; a busy machine tells of it later.
    assert!(stopped.elapsed() <= 2 * ttl, "{:?}", stopped.elapsed());
}

#[tokio::test]
async fn server_that_hangs_delays_nobody() {
    let place = Place::new();
    let client = place.client().await;
    let mutex = mutex(&client, &place.foreign());
    // Connections to all three.
    mutex.lock().await.unwrap().release().await.unwrap();
    place.servers[1].signal("STOP");
    let others = [0, 2];
    // The fastest of a few, because the machine may be busy.
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        let guard = mutex.try_lock().await.unwrap().expect("two of three");
        assert!(others.iter().all(|server| has_key(&place.servers[*server])));
        guard.release().await.unwrap();
        fastest = fastest.min(began.elapsed());
    }
    // Less than the time for one answer.
    assert!(fastest < Duration::from_millis(800), "{fastest:?}");
    place.servers[1].signal("CONT");
    until(async || place.keys() == [false; 3]).await;
}

#[tokio::test]
async fn own_lease_may_be_on_a_quorum() {
    let place = Place::new();
    let hosts: Vec<_> = place.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let client = Client::connect(&format!("redlock://{}", hosts.join(","))).await.unwrap();
    let guard = mutex(&client, &place.foreign()).lock().await.unwrap();
    until(async || place.keys() == [true; 3]).await;
    guard.release().await.unwrap();
    until(async || place.keys() == [false; 3]).await;
    let single = client.mutex("own").bridge(Foreign::set_nx_px(KEY)).lock().await.unwrap_err();
    assert!(single.is_invalid() && single.to_string().contains("Foreign::redlock"), "{single}");
}

#[tokio::test]
async fn lock_of_several_redisson_clients_is_a_hash_on_a_majority() {
    let place = Place::new();
    let client = place.client().await;
    let foreign = Foreign::redisson_redlock(place.servers.each_ref().map(Server::url), KEY).unwrap();
    let guard = mutex(&client, &foreign).lock().await.unwrap();
    until(async || place.keys() == [true; 3]).await;
    let fields: Vec<String> = place.servers[1].query(&["HKEYS", KEY]).unwrap();
    assert_eq!(fields.len(), 1, "{fields:?}");
    guard.release().await.unwrap();
    until(async || place.keys() == [false; 3]).await;
    for server in [0, 1] {
        place.servers[server].run(&["HSET", KEY, "7a79a1d0-961b-4a34-8777-c1a19aba6efa:28", "1"]);
    }
    assert!(mutex(&client, &foreign).try_lock().await.unwrap().is_none());
    until(async || place.keys() == [true, true, false]).await;
}

#[tokio::test]
async fn attempts_at_servers_that_hang_end_together() {
    let place = Place::new();
    let client = place.client().await;
    let hung = &place.servers[1..];
    hung.iter().for_each(|server| server.signal("STOP"));
    let began = Instant::now();
    let attempts = (0..12).map(|number| {
        let foreign =
            Foreign::redlock(place.servers.each_ref().map(Server::url), format!("jobs {number}")).unwrap();
        let mutex = client.mutex(format!("own {number}")).bridge(foreign);
        // What has not answered is not busy. A busy machine needs time for the own lock, too.
        let limit = Duration::from_secs(1);
        tokio::spawn(async move {
            if number % 2 == 0 { mutex.try_lock().await } else { mutex.lock_timeout(limit).await }.map(drop)
        })
    });
    for attempt in attempts.collect::<Vec<_>>() {
        assert!(attempt.await.unwrap().unwrap_err().is_unavailable());
    }
    // Each of two tries waits for a connection for 1 s.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    hung.iter().for_each(|server| server.signal("CONT"));
}

/// A quorum's own lease may come after the limit, by the last vote.
#[tokio::test]
async fn foreign_lock_is_asked_for_although_the_limit_has_passed() {
    let place = Place::new();
    let nodes = format!("redlock:{}", place.servers.each_ref().map(Server::url).join(" "));
    let client = Client::connect(&nodes).await.unwrap();
    let proxies = place.servers.each_ref().map(Proxy::before);
    proxies.iter().for_each(|proxy| proxy.delay_replies(Duration::from_millis(100)));
    let mutex = mutex(&client, &Foreign::redlock(proxies.each_ref().map(Proxy::url), KEY).unwrap());
    let limit = Duration::from_micros(1);
    let guard = mutex.lock_timeout(limit).await.unwrap().expect("both are free");
    guard.release().await.unwrap();
    place.take_as_other(&[0, 1]);
    assert!(mutex.lock_timeout(limit).await.unwrap().is_none());
}

/// A task that connects again holds up no other task, whose connection has ended.
#[tokio::test]
async fn attempts_that_meet_a_hanging_majority_one_after_the_other_end_in_time() {
    let place = Place::new();
    let client = place.client().await;
    let mutex = |number| {
        let foreign = Foreign::redlock(place.servers.each_ref().map(Server::url), format!("jobs {number}"));
        client.mutex(format!("own {number}")).bridge(foreign.unwrap())
    };
    mutex(0).lock().await.unwrap().release().await.unwrap();
    let hung = &place.servers[1..];
    hung.iter().for_each(|server| server.signal("STOP"));
    let attempt = async |number: u32| {
        let began = Instant::now();
        assert!(mutex(number).try_lock().await.unwrap_err().is_unavailable());
        began.elapsed()
    };
    // The other one still waits for an answer while the first one connects again.
    let mut one = std::pin::pin!(attempt(0));
    assert!(
        tokio::time::timeout(Duration::from_millis(500), &mut one).await.is_err(),
        "no server answers it"
    );
    let (one, other) = tokio::join!(one, attempt(1));
    hung.iter().for_each(|server| server.signal("CONT"));
    // Two tries of 2 s at most, and the release of the own lease.
    assert!(one.max(other) < Duration::from_secs(7), "{one:?}, {other:?}");
}

#[tokio::test]
async fn waiter_outlasts_a_restart_of_the_servers() {
    let mut place = Place::new();
    let client = place.client().await;
    place.take_as_other(&[0, 1, 2]);
    let mut waiter = tokio::spawn({
        let mutex = mutex(&client, &place.foreign()).ttl(LONG);
        async move { mutex.lock().await }
    });
    until(async || calls(&place.servers[0], "pttl") > 0).await;
    place.servers.iter_mut().for_each(Server::stop);
    // Its first three tries have failed long before.
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut waiter).await.is_err(), "it waits");
    place.servers.iter_mut().for_each(Server::start);
    let guard = tokio::time::timeout(SOON, waiter).await.expect("it tries on").unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn close_ends_once_a_repeated_release_is_answered() {
    let place = Place::new();
    let proxies = place.servers.each_ref().map(Proxy::before);
    let client = place.client().await;
    let foreign = Foreign::redlock(proxies.each_ref().map(Proxy::url), KEY).unwrap();
    let guard = mutex(&client, &foreign).ttl(LONG).lock().await.unwrap();
    until(async || place.keys() == [true; 3]).await;
    proxies.iter().for_each(|proxy| proxy.drop_replies(true));
    let closing = tokio::spawn(async move { client.close().await });
    until(async || place.keys() == [false; 3]).await;
    proxies.iter().for_each(|proxy| {
        proxy.drop_replies(false);
        proxy.cut();
    });
    tokio::time::timeout(SOON, closing).await.expect("long before its ttl").unwrap().unwrap();
    drop(guard);
}

/// Nothing reports the loss before the release.
#[tokio::test]
async fn loss_that_a_release_finds_is_reported_although_the_own_store_is_silent() {
    let place = Place::new();
    let client = place.client().await;
    let urls = place.servers.each_ref().map(|server| format!("{}?protocol=2", server.url()));
    let guard = mutex(&client, &Foreign::redlock(urls, KEY).unwrap()).ttl(LONG).lock().await.unwrap();
    until_renewed(&guard).await;
    place.delete(&[0, 1, 2]);
    place.own.signal("STOP");
    let error = guard.release_timeout(Duration::from_secs(8)).await.unwrap_err();
    place.own.signal("CONT");
    assert!(error.is_lost(), "{error}");
}

#[tokio::test]
async fn close_reports_a_leg_whose_release_was_not_confirmed() {
    let mut place = Place::new();
    let client = place.client().await;
    let mutex = mutex(&client, &place.foreign()).ttl(Duration::from_secs(8));
    let guard = mutex.lock().await.unwrap();
    until_renewed(&guard).await;
    place.servers[..2].iter_mut().for_each(Server::stop);
    let error = client.close().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    drop(guard);
}

#[tokio::test]
async fn attempt_whose_own_lease_is_not_released_in_time_is_unavailable() {
    unless_paused(Duration::from_secs(1), async || {
        let place = Place::new();
        let client = place.client().await;
        place.take_as_other(&[0, 1]);
        let mutex = mutex(&client, &place.foreign());
        let waiter = tokio::spawn(async move { mutex.lock_timeout(Duration::from_secs(3)).await });
        until(async || waiter.is_finished() || !own_is_free(&client).await).await;
        place.own.signal("STOP");
        let ended = waiter.await.unwrap();
        place.own.signal("CONT");
        let error = ended.unwrap_err();
        assert!(error.is_unavailable(), "{error}");
    })
    .await;
}

/// The servers that are up report changes of the key although one was never reached.
#[tokio::test]
async fn servers_that_are_up_report_changes_while_another_one_is_down() {
    let mut place = Place::new();
    let client = place.client().await;
    let foreign = place.foreign();
    place.take_as_other(&[0, 1]);
    place.servers[2].stop();
    let waiter = tokio::spawn({
        let mutex = mutex(&client, &foreign);
        async move { mutex.lock().await }
    });
    until(async || calls(&place.servers[0], "client|caching") > 0).await;
    waiter.abort();
}

/// A try whose answers are all there leaves nothing to release again with each later try.
#[tokio::test]
async fn waiter_sends_few_commands_without_the_servers_word_of_changes() {
    let place = Place::new();
    let urls = place.servers.each_ref().map(|server| format!("{}?protocol=2", server.url()));
    let foreign = Foreign::redlock(urls, KEY).unwrap();
    let client = place.client().await;
    place.take_as_other(&[0, 1]);
    let waiter = tokio::spawn({
        let mutex = mutex(&client, &foreign);
        async move { mutex.lock().await }
    });
    let tries = || calls(&place.servers[0], "pttl");
    until(async || tries() > 30).await;
    let releases = calls(&place.servers[0], "evalsha");
    waiter.abort();
    // One to take it and one to release it.
    assert!(releases <= 3 * tries(), "{releases} scripts for {} tries", tries());
}

/// How often the server has run this command.
fn calls(server: &Server, command: &str) -> u64 {
    let text: String = server.query(&["INFO", "commandstats"]).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn attempt_on_a_quorum_that_may_not_wait_is_refused_with_a_bridge_too() {
    let place = Place::new();
    let nodes = format!("redlock:{}", place.servers.each_ref().map(Server::url).join(" "));
    let (one, other) = (Client::connect(&nodes).await.unwrap(), Client::connect(&nodes).await.unwrap());
    let guard = mutex(&one, &place.foreign()).lock().await.unwrap();
    let attempt = mutex(&other, &place.foreign()).max_waiters(0);
    let error = tokio::time::timeout(LONG, attempt.lock()).await.expect("it does not wait").unwrap_err();
    assert!(error.is_queue_full(), "{error}");
    guard.release().await.unwrap();
    attempt.lock().await.unwrap().release().await.unwrap();
}
