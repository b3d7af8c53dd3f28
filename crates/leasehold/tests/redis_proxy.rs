//! Servers that restrict what scripts may do: proxies before clusters, and serverless offers.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::{Client, Kind};
use leasehold_testkit::{Cluster, LIMIT, RuledProxy, Rules, Server, extent, positions, until};
use tokio::time::{Instant, timeout};

/// Tasks of several clients add one to a number in a file, which is read and written without any other protection.
async fn count(proxy: &RuledProxy, span: Duration) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let path = Arc::new(folder.path().join("number"));
    fs::write(&*path, "0").unwrap();
    let (until, last_token, grants) =
        (Instant::now() + span, Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = Client::connect(&proxy.url()).await.unwrap();
        for _ in 0..3 {
            let (client, path) = (client.clone(), path.clone());
            let (last_token, grants) = (last_token.clone(), grants.clone());
            tasks.push(tokio::spawn(async move {
                while Instant::now() < until {
                    // A connection that is cut may fail an attempt.
                    let Ok(Ok(guard)) = timeout(LIMIT, client.mutex("number").lock()).await else { continue };
                    let number: u64 = fs::read_to_string(&*path).unwrap().parse().unwrap();
                    tokio::task::yield_now().await;
                    fs::write(&*path, (number + 1).to_string()).unwrap();
                    let token = guard.token().get();
                    assert!(last_token.swap(token, Ordering::SeqCst) < token, "tokens rise");
                    grants.fetch_add(1, Ordering::SeqCst);
                    let _ = guard.release().await;
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let grants = grants.load(Ordering::SeqCst);
    assert_eq!(fs::read_to_string(&*path).unwrap(), grants.to_string());
    grants
}

#[tokio::test(flavor = "multi_thread")]
async fn counter_is_exact_behind_each_proxy() {
    for (name, rules) in positions() {
        let polls = rules.loses_messages;
        let proxy = RuledProxy::start(rules);
        let span = extent(Duration::from_millis(1_500), Duration::from_secs(60), Duration::from_secs(60));
        let grants = count(&proxy, span).await;
        eprintln!("{name}: {grants} grants in {span:?}");
        let fewest = if polls { 2 } else { 20 };
        assert!(grants > fewest, "{name}: {grants} grants");
        // What tries the rights of a first connection has no keys, and no other script is refused.
        let refused = proxy.scripts_refused();
        assert!(refused.iter().all(|error| error.contains("number of keys")), "{name}: {refused:?}");
    }
}

#[tokio::test]
async fn no_script_is_refused_where_the_address_says_that_they_are_restricted() {
    for rules in [Rules::serverless(), Rules::cluster_proxy()] {
        let proxy = RuledProxy::start(rules);
        let client = Client::connect(&format!("{}?proxy=yes", proxy.url())).await.unwrap();
        let held = client.mutex("a").lock().await.unwrap();
        assert!(client.mutex("a").try_lock().await.unwrap().is_none());
        held.release().await.unwrap();
        assert_eq!(proxy.scripts_refused(), [""; 0]);
    }
}

/// The client that releases may end before it sends the message to the next one.
#[tokio::test]
async fn waiter_whose_message_was_not_sent_looks_soon() {
    let proxy = RuledProxy::start(Rules::cluster_proxy());
    let holder = Client::connect(&proxy.url()).await.unwrap();
    let client = Client::connect(&proxy.url()).await.unwrap();
    let held = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let waiter = tokio::spawn(async move { client.mutex("a").lock().await });
    until(async || holder.inspect(Kind::Mutex, "a").await.unwrap().waiters.len() == 1).await;
    proxy.lose_messages(true);
    held.release().await.unwrap();
    let token = holder.inspect(Kind::Mutex, "a").await.unwrap().holders[0].token;
    // It looks every 1.5 s. Without this it would look after 25 s, and the grant lapses after 3 s.
    let granted = timeout(Duration::from_secs(15), waiter).await.expect("it looks soon").unwrap().unwrap();
    assert_eq!(granted.token(), token, "it has found the first grant");
}

/// They go out together.
#[tokio::test]
async fn messages_of_releases_that_share_a_pipeline_are_sent() {
    const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let proxy = RuledProxy::start(Rules::serverless());
    let (holder, client) =
        (Client::connect(&proxy.url()).await.unwrap(), Client::connect(&proxy.url()).await.unwrap());
    let mut shortest = Duration::MAX;
    for _ in 0..5 {
        let (mut held, mut waiters) = (Vec::new(), Vec::new());
        for name in NAMES {
            held.push(holder.mutex(name).lock().await.unwrap());
            let mutex = client.mutex(name);
            waiters.push(tokio::spawn(async move { (mutex.lock().await.unwrap(), Instant::now()) }));
            until(async || holder.inspect(Kind::Mutex, name).await.unwrap().waiters.len() == 1).await;
        }
        let released = Instant::now();
        drop(held);
        let mut longest = Duration::ZERO;
        for waiter in waiters {
            let (granted, at) = waiter.await.unwrap();
            longest = longest.max(at - released);
            granted.release().await.unwrap();
        }
        shortest = shortest.min(longest);
    }
    assert!(shortest < Duration::from_millis(700), "{shortest:?}");
}

/// A slow moment, or a proxy that is being replaced.
#[tokio::test]
async fn messages_that_arrive_again_are_relied_on_again() {
    let proxy = RuledProxy::start(Rules::serverless());
    proxy.lose_messages(true);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let _held = client.mutex("a").lock().await.unwrap();
    let has_lost = async || {
        let diagnosis = client.diagnose().await.unwrap();
        diagnosis.components[0].findings.iter().any(|finding| finding.id == "proxy-messages")
    };
    assert!(has_lost().await);
    proxy.lose_messages(false);
    until(async || !has_lost().await).await;
}

#[tokio::test]
async fn locks_that_replicas_must_have_are_refused() {
    let proxy = RuledProxy::start(Rules { unknown: &[], ..Rules::serverless() });
    let client = Client::connect(&proxy.url()).await.unwrap();
    let error = client.mutex("a").replicas(1).try_lock().await.unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("replicas(n)"), "{error}");
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
}

/// The address of the server itself.
fn direct_url(proxy: &RuledProxy) -> String {
    proxy.server().run(&["CONFIG", "SET", "cluster-announce-port", "0"]);
    proxy.server().url().replace("redis:", "redis-cluster:")
}

#[tokio::test]
async fn clients_that_use_other_scripts_are_refused() {
    let proxy = RuledProxy::start(Rules::cluster_proxy());
    let behind = Client::connect(&proxy.url()).await.unwrap();
    let direct = direct_url(&proxy);
    let error = Client::connect(&direct).await.unwrap_err().to_string();
    assert!(error.contains("through a proxy") && error.contains("leasehold:layout"), "{error}");
    assert!(behind.mutex("a").try_lock().await.unwrap().is_some());

    let proxy = RuledProxy::start(Rules::cluster_proxy());
    let direct = Client::connect(&direct_url(&proxy)).await.unwrap();
    let error = Client::connect(&proxy.url()).await.unwrap_err().to_string();
    assert!(error.contains("directly") && error.contains("leasehold:layout"), "{error}");
    assert!(direct.mutex("a").try_lock().await.unwrap().is_some());
}

/// One of several nodes knows which scripts are used, and a client may connect to another one first.
#[tokio::test]
async fn other_scripts_are_found_out_whatever_node_a_client_connects_to() {
    let cluster = Cluster::with_masters(&Server::builder(), 3, false);
    let owner = &cluster.nodes[cluster.node_of("leasehold:layout")];
    owner.run(&["SET", "leasehold:layout", "4-restricted"]);
    for node in &cluster.nodes {
        let url = node.url().replace("redis:", "redis-cluster:");
        let error = Client::connect(&url).await.unwrap_err().to_string();
        assert!(error.contains("through a proxy"), "{error}");
    }
    owner.run(&["DEL", "leasehold:layout"]);
    let client = Client::connect(&cluster.url()).await.unwrap();
    assert_eq!(owner.query::<String>(&["GET", "leasehold:layout"]).unwrap(), "4");
    drop(client);
}

/// Another program's script runs, or a node of the cluster behind the proxy is down.
#[tokio::test]
async fn error_of_the_moment_decides_nothing() {
    let proxy = RuledProxy::start(Rules::serverless());
    for error in [
        "BUSY Redis is busy running a script",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down",
    ] {
        proxy.fail_scripts(Some(error));
        let refused = Client::connect(&proxy.url()).await;
        assert!(refused.is_err(), "{error}: {refused:?}");
        proxy.fail_scripts(None);
        assert!(
            proxy.server().query::<Option<String>>(&["GET", "leasehold:layout"]).unwrap().is_none(),
            "{error}"
        );
    }
    let client = Client::connect(&proxy.url()).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    // A client that knows it goes on.
    proxy.fail_scripts(Some("BUSY Redis is busy running a script"));
    proxy.cut();
    let error = client.mutex("b").try_lock().await.unwrap_err();
    assert!(format!("{error:#}").contains("busy with a long script"), "{error:#}");
    proxy.fail_scripts(None);
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
}

/// Reserved tokens move the clock of tokens ahead, and so does a server's clock that is set back.
#[tokio::test]
async fn clock_of_tokens_that_is_ahead_makes_no_lease_longer() {
    let proxy = RuledProxy::start(Rules::cluster_proxy());
    let client = Client::connect(&proxy.url()).await.unwrap();
    let other = Client::connect(&proxy.url()).await.unwrap();
    let held = client.mutex("a").ttl(Duration::from_secs(30)).auto_renew(false).lock().await.unwrap();
    let clocks: Vec<String> = proxy.server().query(&["KEYS", "leasehold:4:clock:*"]).unwrap();
    for clock in clocks {
        let now: (u64, u64) = proxy.server().query(&["TIME"]).unwrap();
        let ahead = format!("{}000-0", now.0 + 3_600);
        proxy.server().run(&["XADD", &clock, "MAXLEN", "0", &ahead, "t", ""]);
    }
    for _ in 0..3 {
        let waited = other.mutex("a").lock_timeout(Duration::from_millis(200)).await.unwrap();
        assert!(waited.is_none());
    }
    let holders = other.mutex("a").inspect().await.unwrap().holders;
    let left = holders[0].expires_in;
    assert!(left <= Duration::from_secs(30), "{left:?}");
    held.release().await.unwrap();
    let next = other.mutex("a").min_hold(Duration::from_secs(1)).lock().await.unwrap();
    next.release().await.unwrap();
    let again =
        timeout(Duration::from_secs(20), client.mutex("a").lock()).await.expect("the hold ends").unwrap();
    assert!(again.is_held());
}

#[tokio::test]
async fn server_that_can_not_be_used_is_refused_with_what_to_do() {
    let error = async |url: String| Client::connect(&url).await.expect_err(&url).to_string();
    let proxy = RuledProxy::start(Rules { no_scripts: true, ..Rules::cluster_proxy() });
    let message = error(proxy.url()).await;
    assert!(message.contains("allows no scripts") && message.contains("another store"), "{message}");
    let message = error(format!("{}?proxy=yes", proxy.url())).await;
    assert!(message.contains("allows no scripts"), "{message}");

    let proxy = RuledProxy::start(Rules::serverless());
    let message = error(proxy.url().replace("redis:", "redis-cluster:")).await;
    assert!(message.contains("redis://HOST:PORT"), "{message}");
    let message = error(format!("{}?proxy=no", proxy.url())).await;
    assert!(message.contains("proxy=yes"), "{message}");
    let other = Server::on_port();
    let message = error(format!("redlock:{} {} {}", proxy.url(), other.url(), Server::on_port().url())).await;
    assert!(!message.is_empty());

    // EVAL, or EVALSHA, is disabled.
    for command in ["EVAL", "EVALSHA"] {
        let server = Server::builder().setting("rename-command", &format!("{command} \"\"")).start();
        for parameter in ["", "?proxy=yes"] {
            let message = error(format!("{}{parameter}", server.url())).await;
            assert!(message.contains("allows no scripts"), "{command}{parameter}: {message}");
        }
    }

    // A node of a cluster is no proxy.
    let cluster = Cluster::with_masters(&Server::builder(), 3, false);
    for node in &cluster.nodes {
        let message = error(format!("{}?proxy=yes", node.url())).await;
        assert!(message.contains("redis-cluster://"), "{message}");
    }

    let server = Server::builder().password("secret").start();
    let message = error(format!("redis://127.0.0.1:{}?proxy=yes&protocol=2", server.port())).await;
    assert!(message.contains("password"), "{message}");
}

/// The task of the client publishes, and not the future that has released.
#[tokio::test]
async fn message_is_sent_although_the_release_is_dropped() {
    let proxy = RuledProxy::start(Rules::serverless());
    let holder = Client::connect(&proxy.url()).await.unwrap();
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mut shortest = Duration::MAX;
    // On a slow machine one hand-over may take as long as a look.
    for _ in 0..5 {
        let held = holder.mutex("a").lock().await.unwrap();
        let mutex = client.mutex("a");
        let waiter = tokio::spawn(async move { (mutex.lock().await.unwrap(), Instant::now()) });
        until(async || holder.inspect(Kind::Mutex, "a").await.unwrap().waiters.len() == 1).await;
        let released = Instant::now();
        let _ = timeout(Duration::ZERO, held.release()).await;
        let (granted, at) = waiter.await.unwrap();
        shortest = shortest.min(at - released);
        granted.release().await.unwrap();
    }
    assert!(shortest < Duration::from_secs(1), "{shortest:?}");
}

#[tokio::test]
async fn right_that_is_missing_behind_a_proxy_is_named_at_connect() {
    const RIGHTS: [&str; 8] = ["mget", "xadd", "hset", "rename", "evalsha", "publish", "pttl", "eval"];
    for rules in [Rules::serverless(), Rules::cluster_proxy()] {
        let proxy = RuledProxy::start(rules);
        let url = proxy.url().replace("redis://", "redis://locks:secret@");
        let rule =
            ["ACL", "SETUSER", "locks", "reset", "on", ">secret", "~leasehold:*", "&leasehold:*", "+@all"];
        for right in RIGHTS {
            proxy.server().run(&[&rule[..], &[&format!("-{right}")]].concat());
            let error = Client::connect(&url).await.unwrap_err().to_string();
            assert!(
                error.contains(&format!("+{right}")) && error.contains("ACL SETUSER locks"),
                "{right}: {error}"
            );
        }
        // One that is taken away later.
        proxy.server().run(&["ACL", "SETUSER", "locks", "+@all"]);
        let client = Client::connect(&url).await.unwrap();
        proxy.server().run(&["ACL", "SETUSER", "locks", "-xadd"]);
        let error = client.mutex("a").try_lock().await.unwrap_err().to_string();
        assert!(error.contains("+xadd"), "{error}");
    }
}

#[tokio::test]
async fn doctor_names_what_is_lost() {
    let proxy = RuledProxy::start(Rules { loses_messages: true, ..Rules::cluster_proxy() });
    let client = Client::connect(&proxy.url()).await.unwrap();
    let diagnosis = client.diagnose().await.unwrap();
    let found: Vec<_> =
        diagnosis.components.iter().flat_map(|part| part.findings.iter().map(|finding| finding.id)).collect();
    assert_eq!(found, ["proxy", "proxy-messages"]);
    assert!(!diagnosis.is_dangerous());
    let proxy = RuledProxy::start(Rules::serverless());
    let client = Client::connect(&proxy.url()).await.unwrap();
    let diagnosis = client.diagnose().await.unwrap();
    let found: Vec<_> =
        diagnosis.components.iter().flat_map(|part| part.findings.iter().map(|finding| finding.id)).collect();
    assert_eq!(found, ["proxy"]);
}

/// Without RESP3 an idle client does not notice that its connection was closed.
#[tokio::test]
async fn call_after_an_idle_cut_is_an_error_once_at_most() {
    let proxy = RuledProxy::start(Rules::cluster_proxy());
    let client = Client::connect(&proxy.url()).await.unwrap();
    let mutex = client.mutex("a");
    for _ in 0..4 {
        proxy.cut();
        let guard = mutex.try_lock().await.unwrap().unwrap();
        proxy.cut();
        // Who holds a lease notices it.
        guard.release().await.unwrap();
        proxy.cut();
        if let Err(error) = mutex.inspect().await {
            assert!(error.is_unavailable(), "{error}");
            mutex.inspect().await.unwrap();
        }
    }
}
