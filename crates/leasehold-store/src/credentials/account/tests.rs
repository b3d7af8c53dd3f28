use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use futures_util::future::join_all;
use tokio::task::yield_now;
use tokio::time::{advance, sleep};

use super::super::ServerRole;
use super::*;

fn request(port: u16) -> CredentialRequest {
    CredentialRequest::new(ServerRole::Redis, "host", Some(port), None)
}

fn password(issued: &Issued) -> &str {
    issued.credentials.password.as_deref().unwrap()
}

/// A provider that counts its calls, and numbers its passwords.
fn counting(lifetime: Option<Duration>) -> (CredentialCache, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let count = calls.clone();
    let provider = CredentialProvider::new(move |_| {
        let number = count.fetch_add(1, Ordering::SeqCst) + 1;
        async move {
            yield_now().await;
            let given = Credentials::new(format!("password-{number}"));
            Ok::<_, std::io::Error>(lifetime.map_or(given.clone(), |lifetime| given.valid_for(lifetime)))
        }
    });
    (CredentialCache::new(provider), calls)
}

#[tokio::test]
async fn connections_that_ask_at_once_share_a_call_and_its_answer() {
    let (cache, calls) = counting(None);
    let account = cache.account(request(1));
    let given = join_all((0..50).map(|_| account.current())).await;
    assert!(given.iter().all(|issued| password(issued.as_ref().unwrap()) == "password-1"));
    let first = account.current().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // As with all of them that the server refuses at once.
    let given = join_all((0..50).map(|_| account.replace(&first))).await;
    assert!(given.iter().all(|issued| password(issued.as_ref().unwrap()) == "password-2"));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_eq!(password(&account.next(&first).await), "password-2");
    cache.0.provider.refresh();
    assert_eq!(password(&account.next(&account.issued().unwrap()).await), "password-3");
    // Another server has its own.
    assert_eq!(password(&cache.account(request(2)).current().await.unwrap()), "password-4");
    assert_eq!(password(&cache.account(request(1)).current().await.unwrap()), "password-3");
}

#[tokio::test(start_paused = true)]
async fn others_are_given_before_credentials_expire() {
    let lifetime = Duration::from_secs(900);
    let (cache, calls) = counting(Some(lifetime));
    let account = cache.account(request(1));
    let mut known = account.current().await.unwrap();
    for number in 2..10 {
        let began = Instant::now();
        let next = account.next(&known).await;
        assert_eq!(password(&next), format!("password-{number}"));
        let took = began.elapsed();
        assert!(took >= lifetime / 2 && took + next.spread() < lifetime.mul_f64(0.8), "{took:?}");
        known = next;
    }
    assert_eq!(calls.load(Ordering::SeqCst), 9);
    // A connection that is opened meanwhile does not wait for the provider.
    advance(lifetime.mul_f64(0.9)).await;
    assert_eq!(password(&account.current().await.unwrap()), "password-9");
    assert_eq!(password(&account.next(&known).await), "password-10");
    advance(lifetime).await;
    assert_eq!(password(&account.current().await.unwrap()), "password-11");
}

#[tokio::test(start_paused = true)]
async fn failing_provider_is_asked_again_after_pauses_while_the_old_credentials_last() {
    let (fails, calls) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (is_failing, count) = (fails.clone(), calls.clone());
    let provider = CredentialProvider::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let outcome = match is_failing.load(Ordering::SeqCst) {
            true => Err("the vault is sealed"),
            false => Ok(Credentials::new("password").valid_for(Duration::from_secs(100))),
        };
        async move { outcome }
    });
    let account = CredentialCache::new(provider).account(request(7));
    let first = account.current().await.unwrap();
    fails.store(true, Ordering::SeqCst);
    let waiting = tokio::spawn({
        let (account, first) = (account.clone(), first.clone());
        async move { account.next(&first).await }
    });
    sleep(Duration::from_secs(95)).await;
    let asked = calls.load(Ordering::SeqCst);
    assert!((5..20).contains(&asked), "{asked} calls");
    assert_eq!(account.current().await.unwrap().serial, first.serial);
    sleep(Duration::from_secs(10)).await;
    let error = account.current().await.err().unwrap();
    assert_eq!(error.message, "no credentials for redis host:7: the vault is sealed");
    assert_eq!(error.failure, Failure::NotSent);
    assert!(!waiting.is_finished());
    fails.store(false, Ordering::SeqCst);
    assert!(account.is_fresh(&waiting.await.unwrap()));
    assert!(account.current().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn provider_that_panics_is_an_error_and_is_asked_again() {
    let calls = AtomicUsize::new(0);
    let provider = CredentialProvider::new(move |_| {
        let number = calls.fetch_add(1, Ordering::SeqCst);
        assert!(number > 0, "on purpose");
        async move {
            assert!(number > 1, "on purpose");
            Ok::<_, std::io::Error>(Credentials::new("password"))
        }
    });
    let account = CredentialCache::new(provider).account(request(1));
    for _ in 0..2 {
        let error = account.current().await.err().unwrap();
        assert!(error.message.contains("has panicked"), "{}", error.message);
        sleep(MIN_RETRY_PAUSE * 2).await;
    }
    assert!(account.current().await.is_ok());
}

/// It keeps its own thread, and no other one.
#[tokio::test(start_paused = true)]
async fn call_that_never_returns_is_given_up_and_not_made_again_meanwhile() {
    let (end, ended) = mpsc::channel::<()>();
    let (ended, calls) = (Arc::new(Mutex::new(ended)), Arc::<AtomicUsize>::default());
    let count = calls.clone();
    let provider = CredentialProvider::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let _ = ended.lock().unwrap().recv();
        async { Ok::<_, std::io::Error>(Credentials::new("password")) }
    });
    let account = CredentialCache::new(provider).account(request(1));
    // The clock of the test must not move before the provider blocks its thread.
    let begun = async || {
        while calls.load(Ordering::SeqCst) == 0 {
            yield_now().await;
        }
    };
    for what in ["has not answered within 10s", "has not returned yet"] {
        let asking = tokio::spawn({
            let account = account.clone();
            async move { account.current().await.err() }
        });
        begun().await;
        while !asking.is_finished() {
            advance(Duration::from_secs(1)).await;
        }
        let error = asking.await.unwrap().unwrap();
        assert!(error.message.contains(what), "{}", error.message);
        advance(MAX_RETRY_PAUSE).await;
    }
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    drop(end);
    while account.current().await.is_err() {
        advance(MAX_RETRY_PAUSE).await;
    }
}

#[tokio::test]
async fn servers_that_are_gone_are_forgotten() {
    let (cache, _) = counting(None);
    let kept = cache.account(request(1));
    for port in 2..100 {
        cache.account(request(port)).current().await.unwrap();
    }
    assert!(cache.0.of_servers.lock().unwrap().len() <= 3);
    assert!(Arc::ptr_eq(&kept, &cache.account(request(1))));
}

#[tokio::test]
async fn password_is_in_no_debug_form() {
    let given = Credentials::new("hunter2").user("me").valid_for(Duration::from_secs(60));
    let shown = format!("{given:?}");
    assert!(shown.contains("me") && !shown.contains("hunter2"), "{shown}");
}
