//! What a provider is asked, and what happens if it fails, hangs or panics.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, ClientBuilder, CredentialRequest, Credentials, ServerRole, StoreConfig, redis};
use leasehold_testkit::{Server, until};
use tokio::time::sleep;

use super::{Place, RIGHTS, SOON, Vault};

#[tokio::test]
async fn provider_is_told_for_whom_and_asked_once_for_each_server() {
    for place in Place::all() {
        let vault = Vault::default();
        vault.set("password-0");
        place.rotate("password-0");
        let client = vault.client(&place).connect().await.unwrap();
        for number in 0..20 {
            client.mutex(format!("lock {number}")).lock().await.unwrap().release().await.unwrap();
        }
        assert!(client.diagnose().await.is_ok(), "{}", place.name());
        let asked = |role| vault.asked_for(role);
        match &place {
            Place::Redis(_) => assert_eq!((vault.calls(), asked(ServerRole::Redis)), (1, 1)),
            Place::Sentinels(sentinels) => {
                assert_eq!(asked(ServerRole::Sentinel), sentinels.sentinels.len());
                // `diagnose` looks at the replicas, too.
                assert_eq!(asked(ServerRole::Redis), sentinels.servers.len());
            }
            Place::Cluster(cluster) => assert_eq!(asked(ServerRole::ClusterNode), cluster.nodes.len()),
            Place::Postgres(_) => assert_eq!((vault.calls(), asked(ServerRole::Postgres)), (1, 1)),
        }
        client.close().await.unwrap();
    }
}

#[tokio::test]
async fn connections_that_are_closed_at_once_share_one_call() {
    let place = Place::Redis(Server::on_port());
    let vault = Vault::default();
    vault.set("password-0");
    place.rotate("password-0");
    let client = vault.client(&place).connect().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    let own = place.servers()[0].query::<String>(&["CLIENT", "LIST"]).unwrap();
    assert!(own.matches("user=locks").count() >= 2, "{own}");
    for rotation in 1..=3 {
        let password = format!("password-{rotation}");
        vault.set(&password);
        place.rotate(&password);
        until(async || guard.renew().await.is_ok()).await;
        let list = || place.servers()[0].query::<String>(&["CLIENT", "LIST"]).unwrap();
        until(async || list().matches("user=locks").count() >= 3).await;
        assert_eq!(vault.calls(), rotation + 1);
    }
}

#[tokio::test]
async fn request_names_the_server_and_the_user_of_the_address() {
    let server = Server::on_port();
    server.run(&[&["ACL", "SETUSER", "me", "on", ">password"][..], &RIGHTS].concat());
    let (port, socket) = (server.port(), server.socket().display().to_string());
    let of_program = |user: &str| redis::Client::open(format!("redis://{user}127.0.0.1:{port}")).unwrap();
    let by_name = |client: ClientBuilder| client.store(format!("redis://me@127.0.0.1:{port}"));
    let on_socket = format!("redis+unix://{socket}?user=me");
    for (client, host, port) in [
        (by_name(Client::builder()), "127.0.0.1", Some(port)),
        (by_name(Client::builder()).lazy(), "127.0.0.1", Some(port)),
        (Client::builder().store(StoreConfig::redis(of_program("me@"))), "127.0.0.1", Some(port)),
        (Client::builder().store(on_socket), &*socket, None),
    ] {
        let requests: Arc<Mutex<Vec<CredentialRequest>>> = Arc::default();
        let seen = requests.clone();
        let client = client.credentials(move |request| {
            seen.lock().unwrap().push(request);
            async { Ok::<_, std::io::Error>(Credentials::new("password").user("me")) }
        });
        client.connect().await.unwrap().mutex("a").lock().await.unwrap().release().await.unwrap();
        let requests = requests.lock().unwrap();
        let [request] = &requests[..] else { panic!("{requests:?}") };
        assert_eq!((request.role, &*request.host, request.port), (ServerRole::Redis, host, port));
        assert_eq!(request.user.as_deref().unwrap_or("me"), "me");
    }
    let client = Client::builder().store(StoreConfig::redis(of_program("me:hunter2@")));
    let error = client.credentials(|_| async { Err::<Credentials, _>("asked") }).connect().await.unwrap_err();
    assert!(error.is_invalid() && !format!("{error:?}").contains("hunter2"), "{error:?}");
}

/// An operator has replaced the password, and withdraws the old one only after the clients have logged in again.
#[tokio::test]
async fn refresh_has_the_provider_asked_and_all_connections_log_in() {
    let place = Place::Redis(Server::on_port());
    let server = place.servers()[0];
    let user = |name: &str| server.run(&[&["ACL", "SETUSER", name, ">password"][..], &RIGHTS].concat());
    let name = Arc::new(Mutex::new("old"));
    let now = name.clone();
    user("old");
    let client = Client::builder().store(place.url()).credentials(move |_| {
        let given = Credentials::new("password").user(*now.lock().unwrap());
        async move { Ok::<_, std::io::Error>(given) }
    });
    let client = client.connect().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    user("new");
    *name.lock().unwrap() = "new";
    let count = |name: &str| {
        let list: String = server.query(&["CLIENT", "LIST"]).unwrap();
        list.matches(&format!("user={name} ")).count()
    };
    until(async || count("old") >= 3).await;
    client.refresh_credentials();
    until(async || count("old") == 0 && count("new") >= 3).await;
    server.run(&["ACL", "DELUSER", "old"]);
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn servers_of_a_quorum_and_of_a_bridge_are_asked_for_by_themselves() {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_port()).collect();
    for (number, server) in servers.iter().enumerate() {
        let set = format!(">password-{}", server.port());
        server.run(&[&["ACL", "SETUSER", &format!("user-{number}"), &set][..], &RIGHTS].concat());
        server.run(&["ACL", "SETUSER", "default", "resetpass", ">unknown"]);
    }
    let ports: Vec<u16> = servers.iter().map(Server::port).collect();
    let known = ports.clone();
    let provide = move |request: CredentialRequest| {
        let number = known.iter().position(|port| Some(*port) == request.port);
        let given = Credentials::new(format!("password-{}", request.port.unwrap_or_default()));
        async move { number.map(|number| given.user(format!("user-{number}"))).ok_or("an unknown server") }
    };
    let mut redlock = leasehold::Redlock::builder().credentials(provide.clone());
    let addresses: Vec<String> = ports.iter().map(|port| format!("redis://127.0.0.1:{port}")).collect();
    for address in &addresses {
        redlock = redlock.node(address);
    }
    let redlock = redlock.connect().await.unwrap();
    redlock.mutex("a").lock().await.unwrap().release().await.unwrap();
    let client = Client::builder().store(&*addresses[0]).credentials(provide).connect().await.unwrap();
    let foreign: Foreign = format!("redlock:key@{}", addresses.join(",")).parse().unwrap();
    client.mutex("b").bridge(foreign).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn leases_last_while_the_provider_hangs_fails_or_panics() {
    #[derive(Clone, Copy, PartialEq)]
    enum Mode {
        Gives,
        Fails,
        Panics,
        Hangs,
        Blocks,
    }
    let server = Server::on_port();
    let mode = Arc::new(Mutex::new(Mode::Gives));
    let calls = Arc::<AtomicUsize>::default();
    let (now, count) = (mode.clone(), calls.clone());
    let user = |password: &str| {
        let set = format!(">{password}");
        server.run(&[&["ACL", "SETUSER", "locks", &set][..], &RIGHTS].concat())
    };
    user("password");
    let client = Client::builder().store(format!("redis://locks@127.0.0.1:{}", server.port()));
    let client = client.ttl(Duration::from_secs(30)).credentials(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let mode = *now.lock().unwrap();
        assert!(mode != Mode::Panics, "on purpose");
        if mode == Mode::Blocks {
            std::thread::sleep(Duration::from_secs(3));
        }
        async move {
            if mode == Mode::Hangs {
                sleep(Duration::from_secs(3)).await;
            }
            match mode {
                Mode::Gives => Ok(Credentials::new("password").valid_for(Duration::from_secs(2))),
                _ => Err("the vault is sealed"),
            }
        }
    });
    let client = client.connect().await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    for next in [Mode::Fails, Mode::Panics, Mode::Hangs, Mode::Blocks] {
        *mode.lock().unwrap() = next;
        let before = calls.load(Ordering::SeqCst);
        until(async || calls.load(Ordering::SeqCst) > before).await;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            guard.renew().await.unwrap();
            sleep(Duration::from_millis(50)).await;
        }
    }
    *mode.lock().unwrap() = Mode::Fails;
    let mut error = None;
    // New connections have no credentials as soon as the last ones have expired.
    until(async || {
        server.run(&["CLIENT", "KILL", "USER", "locks"]);
        error = client.mutex("b").try_lock().await.err();
        error.as_ref().is_some_and(|error| format!("{error:#}").contains("the vault is sealed"))
    })
    .await;
    assert!(error.unwrap().is_unavailable());
    *mode.lock().unwrap() = Mode::Gives;
    until(async || guard.renew().await.is_ok()).await;
    guard.release_timeout(SOON).await.unwrap();
}

#[tokio::test]
async fn error_of_the_provider_is_that_of_the_attempt_to_connect() {
    for place in Place::all() {
        let client =
            Client::builder().store(place.url()).credentials(|_| async { Err("the vault is sealed") });
        let error = client.connect().await.unwrap_err();
        let text = format!("{error:#}");
        assert!(error.is_unavailable() && text.contains("the vault is sealed"), "{}: {text}", place.name());
    }
}

#[tokio::test]
async fn provider_that_would_never_be_asked_is_refused() {
    for url in [
        "memory:",
        "sqlite:/tmp/none.db",
        "redis://me:hunter2@127.0.0.1:1",
        "redis-sentinel://:hunter2@a/s?sentinel_password=hunter2",
        "redlock://:hunter2@a,b,c",
        "postgres://me:hunter2@a/b",
    ] {
        for is_lazy in [false, true] {
            let client = Client::builder().store(url);
            let client = if is_lazy { client.lazy() } else { client };
            let client = client.credentials(|_| async { Err::<Credentials, _>("asked") });
            let error = client.connect().await.unwrap_err();
            assert!(error.is_invalid() && !format!("{error:?}").contains("hunter2"), "{url}: {error:?}");
        }
    }
}
