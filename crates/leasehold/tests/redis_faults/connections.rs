//! Lost connections, reconnects, and connections that lead to another server.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::{LIMIT, Proxy, Server, retry_if_paused, until, until_some};
use tokio::time::timeout;

use super::{SOON, client_of, connections, until_waiting};

/// Longer than a test, so that no waiter looks again because the present lease would have expired.
const LONG: Duration = Duration::from_secs(600);

/// Sooner than a waiter looks again without a push.
const PUSHED: Duration = Duration::from_secs(15);

#[tokio::test]
async fn disconnected_waiter_keeps_its_place_and_is_granted() {
    let server = Server::on_socket();
    let (one, other) = (client_of(&server).await, client_of(&server).await);
    for _ in 0..5 {
        let guard = one.mutex("a").ttl(LONG).lock().await.unwrap();
        let mutex = other.mutex("a");
        let waiting = tokio::spawn(async move { mutex.lock().await });
        until_waiting(&one, 1).await;
        // Every connection but this one, so also the holder's.
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        // The push may be published while the waiter is disconnected.
        guard.release_timeout(SOON).await.unwrap();
        // Much sooner than the 20 s after which a waiter re-polls.
        let guard = timeout(PUSHED, waiting).await.unwrap().unwrap().unwrap();
        guard.release_timeout(SOON).await.unwrap();
    }
}

/// A server that answers late is no server that hangs: an answer is waited for twice as long as the last ones took. One that hangs is given up
/// after a second again, once it has answered fast for a while.
#[tokio::test]
async fn server_that_answers_later_and_later_fails_no_command() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let lock_once = async |ms| {
        proxy.delay_replies(Duration::from_millis(ms));
        client.mutex("a").lock().await.map(drop)
    };
    for ms in [0, 800, 1_400] {
        lock_once(ms).await.unwrap();
    }
    for _ in 0..30 {
        lock_once(0).await.unwrap();
    }
    retry_if_paused(Duration::from_millis(300), async || {
        lock_once(0).await.unwrap();
        let began = Instant::now();
        let error = lock_once(10_000).await.unwrap_err();
        let took = began.elapsed();
        proxy.delay_replies(Duration::ZERO);
        until(async || lock_once(0).await.is_ok()).await;
        // An answer, that to a health check, and a new connection. With the limit of before it would be longer by two seconds and more.
        match error.is_unavailable() && took < Duration::from_millis(3_800) {
            true => Ok(()),
            false => Err(format!("after {took:?}: {error}")),
        }
    })
    .await;
}

#[tokio::test]
async fn killing_any_connection_keeps_locks_and_waiters() {
    // Each client has one for its thread and one for pushes. With RESP3 it has one for the caller's runtime, too.
    for (protocol, open) in [("3", 6), ("2", 4)] {
        let server = Server::on_port();
        let url = format!("{}?protocol={protocol}", server.url());
        let (one, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
        for victim in 0..=open {
            until(async || connections(&server).len() == open).await;
            let guard = one.mutex("a").ttl(LONG).lock().await.unwrap();
            let mutex = other.mutex("a");
            let waiting = tokio::spawn(async move { mutex.lock().await });
            until_waiting(&one, 1).await;
            let ids = connections(&server);
            for id in ids.get(victim..=victim).unwrap_or(&ids) {
                // A client that has lost one of its connections may close another before its turn.
                let killed = server.query::<i64>(&["CLIENT", "KILL", "ID", id]);
                assert!(killed == Ok(1) || victim == open && killed == Ok(0), "{killed:?}");
            }
            // The loss of an idle connection causes no error.
            let free = one.mutex("free").lock().await.unwrap();
            free.release().await.unwrap();
            guard.renew().await.unwrap();
            guard.release_timeout(SOON).await.unwrap();
            let guard = timeout(PUSHED, waiting).await.unwrap().unwrap().unwrap();
            guard.release_timeout(SOON).await.unwrap();
        }
    }
}

#[tokio::test]
async fn command_that_finds_its_idle_connection_cut_is_repeated() {
    let server = Server::on_port();
    // With RESP2 the client does not read while no command is in flight, so the next command notices the loss.
    let client = Client::connect(&format!("{}?protocol=2", server.url())).await.unwrap();
    // Pushes come over a connection of another type.
    // That of an earlier `cut` may still be there.
    let cut = || assert!(server.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap() >= 1);
    // Renewals would notice first.
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
async fn closed_client_leaves_no_connection() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let mutex = client.mutex("a");
    until(async || connections(&server).len() == 3).await;
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
    // The connection of this command, and those of the loop.
    let mut own = 1;
    while began.elapsed() < Duration::from_secs(3) {
        own += 2;
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
    let made = received(&after) - received(&before) - own;
    let most = began.elapsed().as_secs() * 20 + 20;
    assert!(made > 0 && made < most, "{made} connections in {:?}", began.elapsed());
}

#[tokio::test]
async fn caller_connection_to_another_server_makes_the_client_reconnect() {
    for has_info in [true, false] {
        lost_connection_leads_to_another_server("3", 2, has_info).await;
    }
}

#[tokio::test]
async fn subscriber_connection_to_another_server_makes_the_client_reconnect() {
    for protocol in ["3", "2"] {
        for has_info in [true, false] {
            lost_connection_leads_to_another_server(protocol, 1, has_info).await;
        }
    }
}

/// The connection of this number is lost, and opened again: the address leads to another server by then.
async fn lost_connection_leads_to_another_server(protocol: &str, number: usize, has_info: bool) {
    let (first, second) = (Server::on_port(), Server::on_port());
    if !has_info {
        for server in [&first, &second] {
            server.run(&["ACL", "SETUSER", "default", "-info"]);
        }
    }
    let proxy = Proxy::before(&first);
    let client = Client::connect(&format!("{}?protocol={protocol}", proxy.url())).await.unwrap();
    let open = if protocol == "3" { 3 } else { 2 };
    until(async || connections(&first).len() == open).await;
    proxy.redirect_to(second.port());
    let own = connections(&first);
    // A stranger listens there, as if it were the client.
    let mut stranger = first.admin();
    let inboxes: Vec<String> = first.query(&["PUBSUB", "CHANNELS", "leasehold:*"]).unwrap();
    stranger.send_packed_command(&redis::cmd("SUBSCRIBE").arg(inboxes).get_packed_command()).unwrap();
    assert_eq!(first.query::<i64>(&["CLIENT", "KILL", "ID", &own[number]]), Ok(1));
    // A connection to the first server would receive pushes of grants that the second one does not know.
    until(async || !connections(&first).iter().any(|id| own.contains(id))).await;
    let mut guard = None;
    until(async || {
        guard = client.mutex("a").try_lock().await.ok().flatten();
        guard.is_some()
    })
    .await;
    assert_eq!(second.query::<Vec<String>>(&["KEYS", "leasehold:*mutex:a*"]).unwrap().len(), 1);
}

#[tokio::test]
async fn replica_connection_to_another_server_grants_nothing() {
    let (first, second) = (Server::on_port(), Server::on_port());
    let _replica = Server::builder().setting("replicaof", &format!("127.0.0.1 {}", second.port())).start();
    until(async || second.query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count == 1)).await;
    let proxy = Proxy::before(&first);
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || connections(&first).len() == 3).await;
    proxy.redirect_to(second.port());
    // The replica connection is opened on first use, and the others then reconnect to the second server.
    // On a busy machine the replica may not answer within 0.5 s.
    let guard = until_some(async || client.mutex("a").replicas(1).lock().await.ok()).await;
    until(async || connections(&first).is_empty()).await;
    until(async || guard.renew().await.is_ok()).await;
    guard.release().await.unwrap();
}

#[tokio::test]
async fn client_reconnects_soon_after_a_network_outage() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let ttl = Duration::from_secs(4);
    retry_if_paused(Duration::from_millis(300), async || {
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        // A connection opened now never gets an answer, even after the outage.
        proxy.drop_requests(true);
        proxy.cut();
        until(async || proxy.connections() > 0).await;
        proxy.drop_requests(false);
        // Long before a connect timeout of five seconds.
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
    retry_if_paused(Duration::from_millis(300), async || {
        let guard = client.mutex("a").ttl(ttl).lock().await.unwrap();
        proxy.refuse(true);
        proxy.cut();
        // The backoff is two seconds by then; the last pause began at 3.15 s and ends after the lease.
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
    let ttl = Duration::from_secs(4);
    retry_if_paused(Duration::from_millis(300), async || {
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
async fn unrenewed_lease_expires_despite_repeated_reconnects() {
    let server = Server::on_port();
    let client = client_of(&server).await;
    let ttl = Duration::from_millis(800);
    let guard = client.mutex("a").ttl(ttl).auto_renew(false).lock().await.unwrap();
    let began = Instant::now();
    let mut cuts = 0;
    while began.elapsed() < ttl * 3 || cuts <= 3 {
        assert!(began.elapsed() < LIMIT, "the client reconnected {cuts} times");
        cuts += server.query::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!guard.is_held());
    let view = client_of(&server).await.mutex("a").inspect().await.unwrap();
    assert!(view.holders.is_empty(), "{view:?}");
}

/// A held reply blocks the later ones of its connection. Another connection of the client is answered.
#[tokio::test]
async fn caller_connection_that_hangs_alone_is_not_used_again() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let client = Client::connect(&proxy.url()).await.unwrap();
    until(async || proxy.connections() == 3).await;
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    proxy.hold_replies(true);
    let attempt = tokio::spawn({
        let mutex = client.mutex("b");
        async move { mutex.try_lock().await }
    });
    until(async || proxy.held() == 1).await;
    proxy.hold_replies(false);
    let granted = timeout(SOON, attempt).await.unwrap().unwrap();
    assert!(granted.as_ref().is_ok_and(Option::is_some), "{granted:?}");
    assert_eq!(proxy.held(), 1, "the connection still hangs");
    // The server would carry out what is sent over that connection, too.
    server.run(&["CONFIG", "RESETSTAT"]);
    // It is held until the server is asked: a release is a command, too.
    let other = timeout(SOON, client.mutex("c").try_lock()).await.unwrap().unwrap();
    assert!(other.is_some());
    let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "the next command goes elsewhere: {stats}");
    drop(other);
}

/// Other programs take all places while the connections are lost.
#[tokio::test]
async fn lease_outlasts_a_time_without_a_free_place() {
    let server = Server::builder().setting("maxclients", "20").start();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(20)).lock().await.unwrap();
    let mut others = Vec::new();
    server.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    let _ = server.query::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    let full = Instant::now();
    // A server that is full closes what comes, and the client comes again: so it is filled again and again.
    while full.elapsed() < Duration::from_secs(3) {
        others.push(std::net::TcpStream::connect(("127.0.0.1", server.port())).unwrap());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(others);
    // The pause before the next attempt to connect may not be over.
    until(async || guard.renew().await.is_ok()).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}
