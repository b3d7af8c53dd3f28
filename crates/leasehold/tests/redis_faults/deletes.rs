//! Releases by a conditional delete, which Valkey 9 and Redis 8.4 have, and the script that takes its place.

use std::time::Duration;

use leasehold::{Client, Kind};
use leasehold_testkit::{Flavor, Proxy, Server, until};
use tokio::time::timeout;

use super::{SOON, calls, client_of, reset, until_waiting};

const KEY: &str = "leasehold:4:{mutex:a}";

/// The servers with a conditional delete, each with the name of its command.
const DELETES: [(Flavor, &str); 2] = [(Flavor::Valkey9, "delifeq"), (Flavor::Redis86, "delex")];

fn start(flavor: Flavor) -> Server {
    Server::builder().flavor(flavor).start()
}

async fn lock_and_release(client: &Client) {
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
}

fn is_free(server: &Server) -> bool {
    server.query::<u64>(&["EXISTS", KEY]).unwrap() == 0
}

#[tokio::test]
async fn uncontended_release_needs_no_script() {
    for (flavor, delete) in DELETES {
        let server = start(flavor);
        let client = client_of(&server).await;
        lock_and_release(&client).await;
        reset(&server);
        for _ in 0..10 {
            lock_and_release(&client).await;
            assert!(is_free(&server));
        }
        let guard = client.mutex("a").label("a label").lock().await.unwrap();
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        client.rw_lock("a").read().await.unwrap().release().await.unwrap();
        client.semaphore("a", 3).acquire(2).await.unwrap().release().await.unwrap();
        assert_eq!((calls(&server, delete), calls(&server, "evalsha")), (13, 14));
        // Those that are dropped go out together, from the client's thread.
        let mut guards = Vec::new();
        for number in 0..20 {
            guards.push(client.mutex(format!("{number}")).lock().await.unwrap());
        }
        drop(guards);
        until(async || client.list().await.is_ok_and(|locks| locks.is_empty())).await;
        assert_eq!(calls(&server, delete), 33);
    }
}

/// A lease beside others is no value of a key, so a conditional delete would be in vain.
#[tokio::test]
async fn joiner_of_a_shared_lock_releases_by_the_script_at_once() {
    for (flavor, delete) in DELETES {
        let server = start(flavor);
        let (client, other) = (client_of(&server).await, client_of(&server).await);
        lock_and_release(&client).await;
        lock_and_release(&other).await;
        // It joins a plain lease, and then a set.
        for joined in 0..2 {
            let first = client.rw_lock("a").read().await.unwrap();
            let second = if joined == 0 { None } else { Some(client.rw_lock("a").read().await.unwrap()) };
            let joiner = other.rw_lock("a").read().await.unwrap();
            reset(&server);
            joiner.release().await.unwrap();
            assert_eq!((calls(&server, delete), calls(&server, "evalsha")), (0, 1), "{joined}");
            first.release().await.unwrap();
            if let Some(second) = second {
                second.release().await.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn release_of_a_changed_lease_goes_to_the_script() {
    for (flavor, _) in DELETES {
        let server = start(flavor);
        let client = client_of(&server).await;
        let other = client_of(&server).await;
        // With a waiter.
        let guard = client.mutex("a").lock().await.unwrap();
        let mutex = other.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
        until_waiting(&client, 1).await;
        guard.release().await.unwrap();
        let next = timeout(SOON, waiting).await.unwrap().unwrap();
        next.release().await.unwrap();
        assert!(is_free(&server));
        // With a minimum hold.
        let guard = client.mutex("a").min_hold(Duration::from_secs(600)).lock().await.unwrap();
        guard.release().await.unwrap();
        assert!(client.inspect(Kind::Mutex, "a").await.unwrap().holders[0].retained);
        client.mutex("a").force_release().await.unwrap();
        // Of another holder.
        let lost = client.mutex("a").lock().await.unwrap();
        other.mutex("a").force_release().await.unwrap();
        let guard = other.mutex("a").lock().await.unwrap();
        assert!(lost.release().await.unwrap_err().is_lost());
        assert!(guard.is_held() && !is_free(&server));
        guard.release().await.unwrap();
        // Of another program.
        let lost = client.mutex("a").lock().await.unwrap();
        server.run(&["SET", KEY, "mine"]);
        assert!(lost.release().await.is_err());
        assert_eq!(server.query::<String>(&["GET", KEY]).unwrap(), "mine");
    }
}

#[tokio::test]
async fn user_without_the_right_releases_by_the_script() {
    for (flavor, delete) in DELETES {
        let server = start(flavor);
        server.run(&["ACL", "SETUSER", "default", &format!("-{delete}")]);
        let client = client_of(&server).await;
        lock_and_release(&client).await;
        reset(&server);
        lock_and_release(&client).await;
        assert_eq!((calls(&server, delete), calls(&server, "evalsha")), (0, 2));
        let diagnosis = client.diagnose().await.unwrap();
        let facts: Vec<_> = diagnosis.components.iter().flat_map(|component| &component.facts).collect();
        let says = format!("may not run {}", delete.to_uppercase());
        assert!(facts.iter().any(|fact| fact.name == "release" && fact.value.contains(&says)), "{facts:?}");
        // A right that is taken away while the client is connected.
        server.run(&["ACL", "SETUSER", "default", &format!("+{delete}")]);
        let client = client_of(&server).await;
        server.run(&["ACL", "SETUSER", "default", &format!("-{delete}")]);
        reset(&server);
        for _ in 0..3 {
            lock_and_release(&client).await;
            assert!(is_free(&server));
        }
        // It is tried once.
        let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
        let refused = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{delete}:"))).unwrap();
        assert!(refused.contains("rejected_calls=1,"), "{refused}");
    }
}

#[tokio::test]
async fn release_command_follows_the_server_after_a_reconnect() {
    let redis = Server::on_port();
    let [valkey, newest] = DELETES.map(|(flavor, _)| start(flavor));
    let proxy = Proxy::before(&redis);
    let client = Client::connect(&proxy.url()).await.unwrap();
    lock_and_release(&client).await;
    let steps = [(&valkey, "delifeq"), (&redis, ""), (&newest, "delex"), (&valkey, "delifeq")];
    for (next, delete) in steps {
        proxy.redirect_to(next.port());
        proxy.cut();
        until(async || client.mutex("b").lock().await.is_ok()).await;
        reset(next);
        until(async || {
            if let Ok(guard) = client.mutex("a").lock().await {
                guard.release().await.unwrap();
            }
            calls(next, "evalsha") > 0
        })
        .await;
        let all = DELETES.map(|(_, command)| command);
        assert_eq!(all.map(|command| calls(next, command) > 0), all.map(|command| command == delete));
        assert!(is_free(next));
    }
}

#[tokio::test]
async fn full_memory_allows_a_release_without_a_script() {
    for (flavor, delete) in DELETES {
        let server = start(flavor);
        let client = client_of(&server).await;
        let guard = client.mutex("a").lock().await.unwrap();
        reset(&server);
        server.run(&["CONFIG", "SET", "maxmemory", "1"]);
        guard.release().await.unwrap();
        assert_eq!((calls(&server, delete), calls(&server, "evalsha")), (1, 0));
        assert!(is_free(&server));
    }
}

/// The server deletes the key, and its answer is lost: the repeat finds nothing.
#[tokio::test]
async fn release_whose_answer_is_lost_is_confirmed() {
    for (flavor, delete) in DELETES {
        let server = start(flavor);
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        let guard = client.mutex("a").lock().await.unwrap();
        reset(&server);
        proxy.drop_replies(true);
        let releasing = tokio::spawn(async move { guard.release_timeout(SOON).await });
        until(async || calls(&server, delete) == 1).await;
        assert!(is_free(&server));
        proxy.drop_replies(false);
        proxy.cut();
        timeout(SOON, releasing).await.unwrap().unwrap().unwrap();
        lock_and_release(&client).await;
    }
}
