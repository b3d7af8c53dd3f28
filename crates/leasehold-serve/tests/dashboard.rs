//! The dashboard in a real browser, with many locks. `leasehold-cli` tests it with real programs.

mod common;

use std::process::Stdio;

use common::{Place, READ, SOON, WRITE};
use futures_util::future::join_all;
use leasehold::{Client, Kind};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

/// The script that drives the browser.
fn browser(args: &[&str]) -> Child {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/browser.py");
    let mut command = Command::new("python3");
    command.arg(script).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("python3 runs")
}

/// Waits until the script has seen everything that it expects.
async fn seen(browser: Child) {
    let output = browser.wait_with_output().await.expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_lists_searches_and_opens_one_of_ten_thousand_locks() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let mut guards = Vec::new();
    for thousand in 0..10 {
        let locks = (0..1000)
            .map(|index| client.mutex(format!("lock-{:05}", thousand * 1000 + index)).ttl(SOON * 10));
        let locks: Vec<_> = locks.collect();
        for guard in join_all(locks.iter().map(leasehold::Mutex::lock)).await {
            guards.push(guard.unwrap());
        }
    }
    seen(browser(&["many", &place.tcp, READ])).await;
}

/// Names of hidden characters, of letters that look like others, and of signs that look like an escape; and ordinary names.
const NAMES: [&str; 19] = [
    "pay\u{202e}lap",
    "a\u{200b}b\u{feff}",
    "\u{2066}a\u{2069}",
    "p\u{430}yments",
    "\u{441}\u{43e}\u{440}\u{443}",
    "\u{ff50}ay",
    "cafe\u{301}",
    "order 7 ",
    "a\u{a0}b",
    "pay\\u{202e}lap",
    "\u{437}\u{430}\u{43a}\u{430}\u{437}:42",
    "\u{8ba2}\u{5355}-a:42",
    "caf\u{e9}",
    "order 7",
    ".",
    "..",
    "%",
    "a/b",
    "tenant-4711:warehouse-eu-central-1:inventory:reconcile:batch-0001:nightly:retry-3:batch:shard-07",
];

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_escapes_names_that_deceive_and_releases_what_it_names() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let mut guards = Vec::new();
    for name in NAMES {
        let lock = client.mutex(name).ttl(SOON * 10).label("l\u{202e}abel\u{2066}");
        guards.push(lock.lock().await.unwrap());
    }
    seen(browser(&["odd", &place.tcp, WRITE])).await;
    for name in [".", "..", "%", "a/b"] {
        assert!(client.inspect(Kind::Mutex, name).await.unwrap().holders.is_empty(), "{name}");
    }
    assert_eq!(client.inspect(Kind::Mutex, NAMES[0]).await.unwrap().holders.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_releases_the_chosen_one_of_several_holders() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let permits = client.semaphore("permits", 5).ttl(SOON * 10);
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(permits.acquire(1).await.unwrap());
    }
    let tokens: Vec<_> = guards.iter().map(leasehold::Guard::token).collect();
    seen(browser(&["chosen", &place.tcp, WRITE, &tokens[1].to_string()])).await;
    let holders = client.inspect(Kind::Semaphore, "permits").await.unwrap().holders;
    let left: Vec<_> = holders.iter().map(|holder| holder.token).collect();
    assert_eq!(left, [tokens[0], tokens[2]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_names_store_and_server_and_says_that_no_lock_is_in_use() {
    let place = Place::with(|_| {}).await;
    seen(browser(&["empty", &place.tcp, WRITE, &place.store])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn charts_have_axes_and_show_values_on_hover_and_by_keyboard() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let lock = client.mutex("report").ttl(SOON * 10);
    let guard = lock.lock().await.unwrap();
    let others: Vec<_> = join_all((0..3).map(|_| place.client())).await;
    let waiting: Vec<_> = others
        .iter()
        .map(|other| {
            let lock = other.mutex("report");
            tokio::spawn(async move { lock.lock().await })
        })
        .collect();
    place.until_waiting("report", 3).await;
    seen(browser(&["charts", &place.tcp, READ, "3"])).await;
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(guard);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_look_stale_when_the_events_are_late_or_cut() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let lock = client.mutex("kept").ttl(SOON * 10);
    let guard = lock.lock().await.unwrap();
    seen(browser(&["stale", &place.tcp, READ])).await;
    drop(guard);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_look_stale_when_the_store_does_not_answer() {
    let mut redis = leasehold_testkit::Server::on_port();
    let client = Client::connect(&format!("redis://127.0.0.1:{}", redis.port())).await.unwrap();
    let guard = client.mutex("kept").ttl(SOON * 10).lock().await.unwrap();
    let place = Place::of(client).await;
    let mut browser = browser(&["outage", &place.tcp, READ]);
    let mut line = String::new();
    let mut stdout = BufReader::new(browser.stdout.take().expect("a pipe"));
    stdout.read_line(&mut line).await.unwrap();
    if line == "ready\n" {
        redis.stop();
        browser.stdin.take().expect("a pipe").write_all(b"stopped\n").await.unwrap();
    }
    // Without the line, its error says why.
    seen(browser).await;
    drop(guard);
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_fits_a_telephone_and_its_token_is_last_and_whole() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let mut guards = Vec::new();
    for name in ["kept", NAMES[0], NAMES[18]] {
        guards.push(client.mutex(name).ttl(SOON * 10).label(NAMES[18]).lock().await.unwrap());
    }
    seen(browser(&["widths", &place.tcp, READ])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn access_names_the_store_without_its_password() {
    let redis = leasehold_testkit::Server::on_port();
    redis.run(&["CONFIG", "SET", "requirepass", "hidden-secret"]);
    let store = format!("redis://:hidden-secret@127.0.0.1:{}", redis.port());
    let place = Place::of(Client::connect(&store).await.unwrap()).await;
    let answer = place.get("/v1/access").await.expect(200);
    assert!(!answer.text.contains("hidden-secret"), "{}", answer.text);
    let found = answer.json();
    assert!(found["store"].as_str().unwrap().contains(&format!("127.0.0.1:{}", redis.port())), "{found}");
    assert!(found["server"]["listen"].as_array().unwrap().contains(&place.tcp.as_str().into()), "{found}");
    assert_eq!(found["server"]["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test(flavor = "multi_thread")]
async fn page_has_no_data_and_may_load_nothing_from_elsewhere() {
    let place = Place::new().await;
    place.acquire("secret-name", serde_json::json!({})).await;
    let page = place.call_with(None, "GET", "/", None).await.expect(200);
    let policy = page.headers["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"));
    let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert_eq!(page.text.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert!(!page.text.contains("secret-name") && !page.text.contains("{{"));
    for elsewhere in ["http://", "https://", "src=", "@import"] {
        let found = page.text.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(elsewhere), "{elsewhere}");
    }
    let again = place.call_with(None, "GET", "/", None).await.expect(200);
    assert_ne!(again.headers["content-security-policy"].to_str().unwrap(), policy);
}
