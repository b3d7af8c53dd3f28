//! Servers that restrict what scripts may do: proxies before clusters, and serverless offers.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::{Client, Kind};
use leasehold_testkit::{LIMIT, RuledProxy, Rules, Server, extent, until};
use tokio::time::{Instant, timeout};

/// The profiles, with each position of what is not known of them.
fn profiles() -> Vec<(&'static str, Rules)> {
    let both = [("serverless", Rules::serverless()), ("cluster proxy", Rules::cluster_proxy())];
    let switched = |(_, rules): &(&str, Rules)| {
        let rules = rules.clone();
        [
            ("other run ids", Rules { other_run_ids: true, ..rules.clone() }),
            ("no subscribers", Rules { counts_no_subscribers: true, ..rules.clone() }),
            ("no messages", Rules { loses_messages: true, ..rules.clone() }),
            ("forgotten scripts", Rules { forgets_scripts: true, ..rules.clone() }),
            ("short lives", Rules { lifetime: Some(Duration::from_secs(2)), ..rules }),
        ]
    };
    let more: Vec<_> = both.iter().flat_map(switched).collect();
    both.into_iter().chain(more).collect()
}

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
    for (name, rules) in profiles() {
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
    // It looks every 1.5 s; a machine may be slow. Without this it would look after 25 s.
    let granted = timeout(Duration::from_secs(15), waiter).await.expect("it looks soon").unwrap().unwrap();
    assert!(granted.is_held());
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

#[tokio::test]
async fn server_that_can_not_be_used_is_refused_with_what_to_do() {
    let error = async |url: String| Client::connect(&url).await.unwrap_err().to_string();
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

    // EVAL is disabled.
    let server = Server::builder().setting("rename-command", "EVAL \"\"").start();
    let message = error(server.url()).await;
    assert!(message.contains("allows no scripts"), "{message}");
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
