//! Commands that tasks send at the same time share a script call, and nothing else.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{join_all, poll_fn};
use leasehold::{Client, Error, Guard};
use leasehold_testkit::{Flavor, Proxy, Server, until};
use tokio::task::yield_now;
use tokio::time::timeout;

use super::{calls, client_of, reset};

const TASKS: usize = 100;

/// Fewer than tasks, so that they contend.
const LOCKS: usize = 60;

async fn lock_each(client: &Client, names: impl IntoIterator<Item = String>) -> Vec<Result<Guard, Error>> {
    let lock = |name: String| {
        let mutex = client.mutex(name);
        tokio::spawn(async move { mutex.lock().await })
    };
    join_all(names.into_iter().map(lock)).await.into_iter().map(Result::unwrap).collect()
}

async fn release_each(guards: impl IntoIterator<Item = Guard>) {
    let release = |guard: Guard| tokio::spawn(async move { guard.release().await.unwrap() });
    for released in join_all(guards.into_iter().map(release)).await {
        released.unwrap();
    }
}

fn names(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|number| number.to_string())
}

async fn lock_all(client: &Client, count: usize) -> Vec<Guard> {
    lock_each(client, names(count)).await.into_iter().map(Result::unwrap).collect()
}

/// Locks that a client left behind.
fn keys(server: &Server) -> Vec<String> {
    server.query(&["KEYS", "leasehold:4:{*"]).unwrap()
}

#[tokio::test]
async fn tasks_that_lock_at_the_same_time_share_calls() {
    for flavor in [Flavor::Redis62, Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).start();
        let client = client_of(&server).await;
        client.mutex("first").lock().await.unwrap().release().await.unwrap();
        reset(&server);
        let mut tokens = HashSet::new();
        for _ in 0..3 {
            let guards = lock_all(&client, TASKS).await;
            tokens.extend(guards.iter().map(Guard::token));
            release_each(guards).await;
        }
        assert_eq!(tokens.len(), 3 * TASKS, "{flavor:?}: each lock has a token of its own");
        assert_eq!(keys(&server), [""; 0], "{flavor:?}");
        // One by one they are 200 in each of 3 rounds. The first of a round is alone, and perhaps the last 3; on Valkey 9 each release is
        // a command of its own.
        let (scripts, deletes) =
            (calls(&server, "evalsha") + calls(&server, "eval"), calls(&server, "delifeq"));
        assert!(scripts <= 3 * 2 * 10, "{flavor:?}: {scripts} calls");
        assert_eq!(deletes, if flavor == Flavor::Valkey9 { 3 * TASKS as u64 } else { 0 }, "{flavor:?}");
        // The server does not know the scripts any more.
        server.run(&["SCRIPT", "FLUSH"]);
        release_each(lock_all(&client, TASKS).await).await;
        assert_eq!(keys(&server), [""; 0], "{flavor:?}");
    }
}

/// The command of one that is waiting goes out with those of others, and its answer waits for it.
#[tokio::test]
async fn future_that_is_not_polled_holds_up_no_other() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let (mutex, other) = (client.mutex("not polled"), client.mutex("in flight"));
    let (mut in_flight, mut lock) = (pin!(other.lock()), pin!(mutex.lock()));
    poll_fn(|context| {
        assert!(in_flight.as_mut().poll(context).is_pending());
        assert!(lock.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    let guards = lock_all(&client, TASKS).await;
    release_each(guards).await;
    let guard = lock.await.unwrap();
    guard.release().await.unwrap();
    in_flight.await.unwrap().release().await.unwrap();
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test]
async fn release_that_is_polled_once_is_sent() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let guards = lock_all(&client, 3).await;
    let mut releases: Vec<_> = guards.into_iter().map(|guard| Box::pin(guard.release())).collect();
    poll_fn(|context| {
        for release in &mut releases {
            assert!(release.as_mut().poll(context).is_pending());
        }
        Poll::Ready(())
    })
    .await;
    until(async || keys(&server).is_empty()).await;
    for release in releases {
        release.await.unwrap();
    }
}

#[tokio::test]
async fn key_of_another_type_fails_its_own_lock_only() {
    for flavor in [Flavor::Redis62, Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).start();
        let client = client_of(&server).await;
        server.run(&["HSET", "leasehold:4:{mutex:7}", "field", "value"]);
        let mut failed = Vec::new();
        let mut guards = Vec::new();
        for (name, locked) in names(TASKS).zip(lock_each(&client, names(TASKS)).await) {
            match locked {
                Ok(guard) => guards.push(guard),
                Err(error) => failed.push((name, error.to_string())),
            }
        }
        assert!(
            matches!(&failed[..], [(name, error)] if name == "7" && error.contains("another program uses")),
            "{failed:?}"
        );
        release_each(guards).await;
        assert_eq!(keys(&server), ["leasehold:4:{mutex:7}"], "{flavor:?}");
    }
}

/// The server refuses a call as a whole if the user may not use one of its keys.
#[tokio::test]
async fn user_may_not_use_the_key_of_one_lock() {
    let server = Server::on_port();
    let rule = [
        "~leasehold:layout",
        "~leasehold:4:clock",
        "~leasehold:4:scratch",
        "~leasehold:4:client:*",
        "~leasehold:4:{mutex:ours:*",
        "&*",
        "+@all",
    ];
    server.run(&[&["ACL", "SETUSER", "locks", "on", ">secret"], &rule[..]].concat());
    let client = Client::connect(&format!("redis://locks:secret@127.0.0.1:{}", server.port())).await.unwrap();
    let names =
        (0..TASKS).map(|number| if number == 7 { "theirs".to_owned() } else { format!("ours:{number}") });
    let mut failed = 0;
    let mut guards = Vec::new();
    for locked in lock_each(&client, names).await {
        match locked {
            Ok(guard) => guards.push(guard),
            Err(error) => {
                failed += 1;
                assert!(error.to_string().contains("ACL SETUSER USER ~leasehold:*"), "{error}");
            }
        }
    }
    assert_eq!((failed, guards.len()), (1, TASKS - 1));
    release_each(guards).await;
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test]
async fn lost_calls_of_several_tasks_are_repeated_by_each() {
    for has_run in [false, true] {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        // The server then knows the scripts.
        release_each(lock_all(&client, TASKS).await).await;
        let guards = lock_all(&client, TASKS).await;
        let hold = |hold| if has_run { proxy.hold_replies(hold) } else { proxy.hold_requests(hold) };
        hold(true);
        let released = tokio::spawn(release_each(guards));
        until(async || proxy.held() > 0 && (!has_run || keys(&server).is_empty())).await;
        hold(false);
        proxy.cut();
        released.await.unwrap();
        assert_eq!(keys(&server), [""; 0], "{has_run}");

        hold(true);
        let locked = tokio::spawn({
            let client = client.clone();
            async move { lock_all(&client, TASKS).await }
        });
        until(async || proxy.held() > 0 && (!has_run || keys(&server).len() == TASKS)).await;
        hold(false);
        proxy.cut();
        let guards = locked.await.unwrap();
        assert!(guards.iter().all(Guard::is_held), "{has_run}");
        release_each(guards).await;
        // They leave tombstones, because a lost command may arrive late.
        let other = client_of(&server).await;
        release_each(lock_all(&other, TASKS).await).await;
    }
}

/// Each lock that was waited for in vain is left as if it had been asked for alone.
#[tokio::test]
async fn dropped_tasks_leave_the_others_their_locks() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let tasks: Vec<_> = names(TASKS)
        .map(|name| {
            let mutex = client.mutex(name);
            tokio::spawn(async move { mutex.lock().await.unwrap() })
        })
        .collect();
    // All have begun, and none has an answer.
    yield_now().await;
    let mut guards = Vec::new();
    for (number, task) in tasks.into_iter().enumerate() {
        if number % 2 == 0 {
            task.abort();
        } else {
            guards.push(task.await.unwrap());
        }
    }
    assert_eq!(guards.len(), TASKS / 2);
    // Those that were dropped are free for others, at once.
    for number in (0..TASKS).step_by(2) {
        let guard = client.mutex(number.to_string()).lock().await.unwrap();
        guards.push(guard);
    }
    release_each(guards).await;
    until(async || client.list().await.is_ok_and(|locks| locks.is_empty())).await;
}

/// What the tasks of one client do with the locks that both clients want.
struct Contender {
    client: Client,
    /// For each lock the token of its holder, or 0, and the last holder's token.
    holders: Arc<[(AtomicU64, AtomicU64); LOCKS]>,
    acquired: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Contender {
    async fn run(&self, task: usize) {
        for round in 0.. {
            if self.is_over.load(SeqCst) {
                return;
            }
            let number = (task + 7 * round) % LOCKS;
            // No lease expires within the test.
            let mutex = self.client.mutex(number.to_string()).ttl(Duration::from_secs(60));
            let guard = match (task + round) % 4 {
                0 => mutex.try_lock().await.ok().flatten(),
                // Mostly it is dropped while its command is in flight.
                1 => timeout(Duration::from_micros(100), mutex.lock()).await.ok().and_then(Result::ok),
                _ => mutex.lock().await.ok(),
            };
            let Some(guard) = guard else { continue };
            let (holder, last) = &self.holders[number];
            let token = guard.token().get();
            assert_eq!(holder.swap(token, SeqCst), 0, "lock {number} has two holders");
            assert!(last.swap(token, SeqCst) < token, "lock {number} has a token that is not new");
            self.acquired.fetch_add(1, SeqCst);
            yield_now().await;
            assert!(guard.is_held(), "lock {number}");
            holder.store(0, SeqCst);
            if (task + round).is_multiple_of(16) {
                drop(guard);
            } else {
                let _ = guard.release().await;
            }
        }
    }
}

/// Faults that lose no data: calls that fail, hang, run without an answer, or find no script.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_exclude_each_other_while_shared_calls_are_lost() {
    let server = Server::on_port();
    let proxies = [Proxy::before(&server), Proxy::before(&server)];
    let holders = Arc::new(std::array::from_fn(|_| Default::default()));
    let (acquired, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let mut tasks = Vec::new();
    for proxy in &proxies {
        let client = Client::connect(&proxy.url()).await.unwrap();
        let (holders, acquired) = (Arc::clone(&holders), Arc::clone(&acquired));
        let contender = Arc::new(Contender { client, holders, acquired, is_over: Arc::clone(&is_over) });
        for task in 0..TASKS {
            let contender = Arc::clone(&contender);
            tasks.push(tokio::spawn(async move { contender.run(task).await }));
        }
    }
    for fault in 0..60 {
        let proxy = &proxies[fault / 5 % 2];
        let before = acquired.load(SeqCst);
        match fault % 5 {
            0 => {}
            1 => drop(server.run(&["SCRIPT", "FLUSH"])),
            2 => {
                proxy.hold_requests(true);
                until(async || proxy.held() > 0).await;
            }
            3 => {
                proxy.hold_replies(true);
                until(async || proxy.held() > 0).await;
            }
            _ => {
                let dropped = proxy.dropped();
                proxy.drop_replies(true);
                until(async || proxy.dropped() > dropped).await;
            }
        }
        if fault % 5 != 1 {
            proxy.cut();
        }
        proxy.hold_requests(false);
        proxy.hold_replies(false);
        proxy.drop_replies(false);
        until(async || acquired.load(SeqCst) >= before + 100).await;
    }
    is_over.store(true, SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
    let acquired = acquired.load(SeqCst);
    // On a busy machine few tasks are ready at the same time.
    assert!(calls(&server, "evalsha") < 3 * acquired, "calls are shared, or not repeated for nothing");
    let observer = client_of(&server).await;
    until(async || observer.list().await.is_ok_and(|locks| locks.is_empty())).await;
}
