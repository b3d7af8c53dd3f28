//! Nodes with different addresses, and errors of addresses.

use leasehold::{Client, Redlock, RedlockBuilder};
use leasehold_testkit::{Certificates, Proxy, Sentinels, Server, until};

use crate::nodes::url;

#[tokio::test]
async fn limits_that_no_lock_can_meet_are_refused() {
    let ms = std::time::Duration::from_millis;
    let builder = || Redlock::builder().node("redis://127.0.0.1:1").node("redis://127.0.0.1:2");
    for (wrong, what) in [
        (builder().node_timeout(ms(0)), "time limit"),
        (builder().max_ttl(ms(99)), "max_ttl"),
        (builder().max_ttl(leasehold::MAX_TTL + ms(1)), "max_ttl"),
    ] {
        let error = wrong.connect().await.expect_err("it is refused");
        assert!(error.is_invalid() && error.to_string().contains(what), "{error}");
    }
    let error = Redlock::builder().node("redis://127.0.0.1:1").connect().await.expect_err("it is refused");
    assert!(error.is_invalid() && error.to_string().contains("write its own address"), "{error}");
    assert!(builder().node_timeout(ms(1)).max_ttl(ms(100)).connect().await.unwrap_err().is_unavailable());
}

/// The admission queue of a contended lock has no replicas either.
#[tokio::test]
async fn lock_without_replicas_waits_although_its_client_asks_for_some() {
    let servers = [Server::on_socket(), Server::on_socket(), Server::on_socket()];
    let nodes = url(&servers.each_ref().map(Server::url), "");
    let client = Client::builder().store(&*nodes).replicas(1).connect().await.unwrap();
    assert!(client.mutex("a").try_lock().await.unwrap_err().is_unsupported());
    let guard = Client::connect(&nodes).await.unwrap().mutex("a").lock().await.unwrap();
    let mutex = client.mutex("a").replicas(0);
    assert!(mutex.lock_timeout(std::time::Duration::from_millis(300)).await.unwrap().is_none());
    guard.release().await.unwrap();
    mutex.lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn nodes_with_tls_passwords_and_sentinels_vote_together() {
    let files = Certificates::new();
    let encrypted = Server::builder().tls(&files.server, &files.authority).password("first").start();
    let plain = Server::builder().password("second").start();
    let mut sentinels = Sentinels::start();
    let nodes = [
        format!("{}?ca={}", encrypted.url(), files.authority.display()),
        plain.url(),
        sentinels.url(Sentinels::SERVICE),
    ];
    let client = Client::connect(&url(&nodes, "")).await.unwrap();
    let redlock = nodes.iter().fold(Redlock::builder(), RedlockBuilder::node).connect().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    assert!(redlock.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    // The failover affects one node, a minority.
    sentinels.kill_master();
    let guard = redlock.mutex("a").lock().await.unwrap();
    guard.release().await.unwrap();
    until(async || {
        let single = Client::connect(&nodes[2]).await;
        single.is_ok() && client.mutex("a").try_lock().await.is_ok_and(|taken| taken.is_some())
    })
    .await;
}

#[tokio::test]
async fn errors_name_each_node_and_no_password() {
    let servers: Vec<Server> =
        ["right0", "right1", "right2"].map(|word| Server::builder().password(word).start()).into();
    let nodes: Vec<String> = servers.iter().map(|server| server.url().replace("right", "s3cret")).collect();
    let error = Client::connect(&url(&nodes, "")).await.unwrap_err();
    assert!(error.is_unavailable());
    let mut said = vec![format!("{error} {error:?}")];
    // One password is right, which is no quorum.
    let nodes = [servers[0].url(), nodes[1].clone(), nodes[2].clone()];
    said.push(format!("{:?}", Client::connect(&url(&nodes, "")).await.unwrap_err()));
    let builder = nodes.iter().fold(Redlock::builder(), RedlockBuilder::node);
    said.push(format!("{builder:?} {:?}", builder.clone().connect().await.unwrap_err()));
    // A quorum of passwords is right, and one is changed later.
    let nodes = [servers[0].url(), servers[1].url(), nodes[2].clone()];
    let client = Client::connect(&url(&nodes, "")).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    servers[0].run(&["CONFIG", "SET", "requirepass", "n3w"]);
    let mut admin = admin_of(&servers[0]);
    for what in ["normal", "pubsub"] {
        let _: i64 = redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg(what).query(&mut admin).unwrap();
    }
    let mut last = String::new();
    until(async || {
        last = client
            .mutex("a")
            .try_lock()
            .await
            .map_or_else(|error| format!("{error} {error:?}"), |_| String::new());
        last.contains("no quorum")
    })
    .await;
    said.push(last);
    for said in &said {
        assert!(!said.contains("s3cret") && !said.contains("right") && !said.contains("n3w"), "{said}");
    }
    for server in &servers {
        assert!(
            said.iter().all(|said| said.contains("3 nodes") || said.contains(&server.port().to_string())),
            "{said:?}"
        );
    }
}

fn admin_of(server: &Server) -> redis::Connection {
    let url = format!("redis+unix://{}?pass=n3w", server.socket().display());
    redis::Client::open(url).unwrap().get_connection().unwrap()
}

#[tokio::test]
async fn duplicate_server_has_one_vote() {
    let (one, mut other) = (Server::on_port(), Server::on_port());
    let nodes = [one.url(), one.socket_url(), other.url()];
    let connected = Client::connect(&url(&nodes, "")).await;
    // Two distinct servers may answer first.
    if let Err(error) = &connected {
        assert!(error.is_invalid() && error.to_string().contains("the same server"), "{error}");
    }
    let proxy = Proxy::before(&one);
    proxy.refuse(true);
    let client = Client::connect(&url(&[one.url(), proxy.url(), other.url()], "")).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    other.stop();
    proxy.refuse(false);
    until(async || {
        let error = client.mutex("b").try_lock().await.expect_err("one server is no quorum of three");
        error.to_string().contains("the same server")
    })
    .await;
    let error = guard.renew().await.unwrap_err();
    assert!(error.to_string().contains("of 3 nodes renewed it"), "{error}");
    other.start();
    until(async || client.mutex("b").try_lock().await.is_ok_and(|taken| taken.is_some())).await;
}

/// The address leads to another server from one moment to the next, while an attempt is on its way.
#[tokio::test]
async fn server_that_becomes_another_while_a_node_connects_has_one_vote() {
    let (one, two, mut other) = (Server::on_port(), Server::on_port(), Server::on_port());
    let proxy = Proxy::before(&two);
    let client = Client::connect(&url(&[one.url(), proxy.url(), other.url()], "")).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    other.stop();
    proxy.redirect_to(one.port());
    for number in 0..40 {
        proxy.cut();
        let taken = client.mutex(format!("b {number}")).try_lock().await;
        assert!(!matches!(taken, Ok(Some(_))), "{number}: one server is no quorum of three");
        assert!(guard.renew().await.is_err(), "{number}: one server is no quorum of three");
    }
}

/// A balancer's mistake: open connections stay where they are.
#[tokio::test]
async fn node_whose_address_led_to_another_server_for_a_moment_votes_again() {
    let (one, two, mut other) = (Server::on_port(), Server::on_port(), Server::on_port());
    for wrong in [0, 1] {
        let proxies = [Proxy::before(&one), Proxy::before(&two)];
        let client =
            Client::connect(&url(&[proxies[0].url(), proxies[1].url(), other.url()], "")).await.unwrap();
        proxies[wrong].redirect_to([&two, &one][wrong].port());
        proxies[wrong].cut();
        other.stop();
        until(async || {
            let error = client.mutex("a").try_lock().await.err();
            error.is_some_and(|error| error.to_string().contains("the same server"))
        })
        .await;
        proxies[wrong].redirect_to([&one, &two][wrong].port());
        until(async || client.mutex("a").try_lock().await.is_ok_and(|taken| taken.is_some())).await;
        other.start();
    }
}
