//! The callbacks of an endpoint, and their order.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_testkit::{Proxy, Server, until};
use redis::IntoConnectionInfo as _;

use super::reconnector::{MIN_CONNECT_TIMEOUT, connect_timeout, jittered};
use super::*;
use crate::limits::CONNECT_TIMEOUT;

const CHANNEL: &str = "leasehold:4:inbox:test";

/// The callbacks so far.
#[derive(Default)]
struct Calls {
    messages: AtomicUsize,
    on_reconnect: AtomicUsize,
    on_disconnect: AtomicUsize,
    /// Between the loss of a connection and the callback for the new one.
    is_between: AtomicBool,
    messages_between: AtomicUsize,
    /// How often the callback for a new connection panics.
    panics: AtomicUsize,
}

fn endpoint_to(url: &str, calls: &Arc<Calls>) -> Endpoint {
    let [on_message, on_reconnect, on_disconnect] = [calls.clone(), calls.clone(), calls.clone()];
    let endpoint_config = EndpointConfig {
        channel: Some(CHANNEL.to_owned()),
        on_message: Arc::new(move |_, _| {
            on_message.messages.fetch_add(1, Ordering::SeqCst);
            let is_between = usize::from(on_message.is_between.load(Ordering::SeqCst));
            on_message.messages_between.fetch_add(is_between, Ordering::SeqCst);
        }),
        on_reconnect: Arc::new(move |_| {
            let left = on_reconnect.panics.load(Ordering::SeqCst);
            if left > 0 {
                on_reconnect.panics.store(left - 1, Ordering::SeqCst);
                panic!("a callback of the program");
            }
            on_reconnect.is_between.store(false, Ordering::SeqCst);
            on_reconnect.on_reconnect.fetch_add(1, Ordering::SeqCst);
        }),
        on_disconnect: Arc::new(move || {
            on_disconnect.is_between.store(true, Ordering::SeqCst);
            on_disconnect.on_disconnect.fetch_add(1, Ordering::SeqCst);
        }),
        is_resp2: url.ends_with("protocol=2"),
        ..EndpointConfig::quiet()
    };
    let address = url.split('?').next().unwrap();
    Endpoint::new(Target::Server(address.into_connection_info().unwrap().into()), endpoint_config)
}

#[tokio::test]
async fn pushes_count_only_after_on_reconnect() {
    for protocol in [3, 2] {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let calls = Arc::new(Calls::default());
        let url = format!("{}?protocol={protocol}", proxy.url());
        let endpoint = endpoint_to(&url, &calls);
        endpoint.connections().await.unwrap();
        let is_closed = Arc::new(AtomicBool::new(false));
        let publisher = {
            let (mut admin, is_closed) = (server.admin(), is_closed.clone());
            std::thread::spawn(move || {
                while !is_closed.load(Ordering::SeqCst) {
                    redis::cmd("PUBLISH").arg(CHANNEL).arg("x").exec(&mut admin).unwrap();
                }
            })
        };
        for _ in 0..5 {
            // Messages pour in from the moment that the new connection has subscribed.
            proxy.delay_replies(Duration::from_millis(20));
            let reconnects = calls.on_reconnect.load(Ordering::SeqCst);
            proxy.cut();
            until(async || calls.on_reconnect.load(Ordering::SeqCst) > reconnects).await;
            let messages = calls.messages.load(Ordering::SeqCst);
            until(async || calls.messages.load(Ordering::SeqCst) > messages).await;
        }
        is_closed.store(true, Ordering::SeqCst);
        publisher.join().unwrap();
        // The loss of the subscriber connection may be noticed first.
        assert!(calls.on_disconnect.load(Ordering::SeqCst) >= 5);
        assert_eq!(calls.messages_between.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn connect_timeout_follows_the_shortest_ttl_and_the_last_connect() {
    let limit =
        |last_connect: Option<u64>, ttl: Option<u64>| connect_timeout(last_connect.map(ms), ttl.map(ms));
    assert_eq!(limit(None, Some(1_000)), CONNECT_TIMEOUT, "the first time");
    assert_eq!(limit(Some(1), None), CONNECT_TIMEOUT, "nothing is at stake");
    assert_eq!(limit(Some(1), Some(8_000)), ms(2_000));
    assert_eq!(limit(Some(1), Some(100)), MIN_CONNECT_TIMEOUT);
    assert_eq!(limit(Some(700), Some(4_000)), ms(2_800), "the way is slow");
    assert_eq!(limit(Some(9_000), Some(4_000)), CONNECT_TIMEOUT);
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// As a log subscriber or a waker of the program may do.
#[tokio::test]
async fn endpoint_connects_again_after_a_callback_has_panicked() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let calls = Arc::new(Calls { panics: AtomicUsize::new(2), ..Calls::default() });
    let endpoint = endpoint_to(&proxy.url(), &calls);
    endpoint.connections().await.unwrap();
    proxy.cut();
    until(async || calls.on_reconnect.load(Ordering::SeqCst) >= 1).await;
    until(async || endpoint.current().is_some()).await;
    assert_eq!(calls.panics.load(Ordering::SeqCst), 0);
}

#[test]
fn clients_that_lose_a_server_at_once_reconnect_at_different_times() {
    let (half, whole) = (Duration::from_millis(800), Duration::from_millis(1_600));
    let mut pauses: Vec<Duration> = (0..100).map(|_| jittered(whole)).collect();
    assert!(pauses.iter().all(|pause| (half..=whole).contains(pause)), "{pauses:?}");
    pauses.sort_unstable();
    assert!(pauses[75] - pauses[25] > Duration::from_millis(100), "{pauses:?}");
    assert_eq!(jittered(Duration::ZERO), Duration::ZERO);
}
