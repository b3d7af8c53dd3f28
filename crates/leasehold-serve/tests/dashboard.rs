//! The dashboard in a real browser, with many locks. `leasehold-cli` tests it with real programs.

mod common;

use common::{Place, READ, SOON, WRITE};
use futures_util::future::join_all;
use leasehold::Kind;

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
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/browser.py");
    let output = tokio::process::Command::new("python3")
        .args([script, "many", &place.tcp, READ])
        .output()
        .await
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_escapes_hidden_characters_and_releases_what_it_names() {
    let place = Place::with(|_| {}).await;
    let client = place.client().await;
    let mut guards = Vec::new();
    for name in ["pay\u{202e}lap", "a\u{200b}b\u{feff}", ".", "..", "%", "a/b"] {
        let lock = client.mutex(name).ttl(SOON * 10).label("l\u{202e}abel\u{2066}");
        guards.push(lock.lock().await.unwrap());
    }
    let permits = client.semaphore("permits", 5).ttl(SOON * 10);
    for _ in 0..3 {
        guards.push(permits.acquire(1).await.unwrap());
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/browser.py");
    let output = tokio::process::Command::new("python3")
        .args([script, "odd", &place.tcp, WRITE])
        .output()
        .await
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in [".", "..", "%", "a/b"] {
        assert!(client.inspect(Kind::Mutex, name).await.unwrap().holders.is_empty(), "{name}");
    }
    assert!(client.inspect(Kind::Semaphore, "permits").await.unwrap().holders.is_empty());
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
