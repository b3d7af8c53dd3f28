//! Errors and warnings about servers that cannot be used, and about wrong addresses.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::{Proxy, Server, until};
use redis::Commands as _;

use super::client_of;

#[tokio::test]
async fn key_of_another_type_is_a_clear_error() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let mut admin = server.admin();
    let _: () = admin.lpush("leasehold:4:{mutex:a}", "mine").unwrap();
    let error = client.mutex("a").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
    let kept: Vec<String> = admin.lrange("leasehold:4:{mutex:a}", 0, -1).unwrap();
    assert_eq!(kept, ["mine"]);
    assert!(client.mutex("b").try_lock().await.unwrap().is_some());
    // Also a hash, which is a type of leasehold's own.
    server.run(&["HSET", "leasehold:4:{mutex:c}", "h", "mine"]);
    let error = client.mutex("c").lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another program uses"), "{error}");
    assert_eq!(server.query::<i64>(&["HLEN", "leasehold:4:{mutex:c}"]), Ok(1));
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
    let error = Client::connect(&format!("{}?user=weak&pass=x", server.url())).await.unwrap_err();
    assert!(error.to_string().contains("the user lacks rights: ACL SETUSER weak +eval"), "{error}");
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
    assert!(kept > 3_600, "the layout expires, but not soon");
}

/// Otherwise one with another layout would be admitted beside those that run.
#[tokio::test]
async fn layout_is_published_again_after_a_flush() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    for _ in 0..2 {
        let guard = client.mutex("a").lock().await.unwrap();
        server.run(&["FLUSHALL"]);
        until(async || server.query::<Option<String>>(&["GET", "leasehold:layout"]).unwrap().is_some()).await;
        drop(guard);
    }
    let error = Client::connect(&format!("{}?proxy=yes", server.url())).await.unwrap_err().to_string();
    assert!(error.contains("directly") && error.contains("leasehold:layout"), "{error}");
}

/// A program that was admitted wrongly takes no leases away from those that run.
#[tokio::test]
async fn leases_outlast_a_reconnect_beside_a_program_with_other_scripts() {
    let server = Server::on_socket();
    let client = client_of(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(2)).lock().await.unwrap();
    server.run(&["SET", "leasehold:layout", "4-restricted"]);
    let connections = || server.query::<String>(&["CLIENT", "LIST"]).unwrap();
    let before = connections();
    server.run(&["CLIENT", "KILL", "SKIPME", "yes"]);
    guard.renew().await.unwrap();
    assert_ne!(connections(), before);
    until(async || client.warnings().iter().any(|warning| warning.contains("through a proxy"))).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    let error = Client::connect(&server.url()).await.unwrap_err().to_string();
    assert!(error.contains("through a proxy"), "{error}");
}

#[tokio::test]
async fn loading_and_full_servers_are_explained() {
    // Loading takes 50 ms a key, 20 s in all, and the server answers its clients after each KiB.
    let builder = Server::builder().setting("save", "3600 1").setting("rdbcompression", "no");
    let builder = builder.setting("key-load-delay", "50000");
    let mut server = builder.setting("loading-process-events-interval-bytes", "1024").start();
    for number in 0..400 {
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
            assert!(clients.len() < 4, "the server accepts no more than three connections");
        }
    };
    let error = error.await;
    let text = error.to_string();
    assert!(text.contains("limit of clients"), "{text}");
}

#[tokio::test]
async fn wrong_addresses_fail_in_time_without_the_password() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    proxy.refuse(true);
    let refused = format!("redis://me:hunter2@127.0.0.1:{}", proxy.port());
    // A label of 64 letters is invalid, so no resolver is queried.
    let unknown = format!("redis://me:hunter2@{}:6379", "a".repeat(64));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("redis://me:hunter2@{}", silent.local_addr().unwrap());
    for (url, what) in
        [(&refused, "connection refused"), (&unknown, "name is not known"), (&silent_url, "no answer within")]
    {
        let began = Instant::now();
        let error = Client::connect(url).await.unwrap_err();
        // Five seconds, and a pause of the machine.
        assert!(began.elapsed() < Duration::from_secs(15), "{url} took {:?}", began.elapsed());
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
    // An address that never answered may be wrong.
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
        let result = match client {
            Ok(client) => client.mutex("a").lock().await.map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = &result {
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
        }
        assert_eq!(result.is_ok(), command == "HELLO", "{result:?}");
    }
}
