//! What a link tells, and in which order.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use leasehold_testkit::{Proxy, Server, until};
use redis::IntoConnectionInfo as _;

use super::*;

const CHANNEL: &str = "leasehold:2:inbox:test";

/// What a link told.
#[derive(Default)]
struct Told {
    heard: AtomicUsize,
    renewed: AtomicUsize,
    missed: AtomicUsize,
    /// Between the loss of a connection and the word that there is a new one.
    is_between: AtomicBool,
    heard_between: AtomicUsize,
}

fn link_to(url: &str, told: &Arc<Told>) -> Link {
    let [hearing, renewing, missing] = [told.clone(), told.clone(), told.clone()];
    let terms = Terms {
        channel: Some(CHANNEL.to_owned()),
        hear: Arc::new(move |_, _| {
            hearing.heard.fetch_add(1, Ordering::SeqCst);
            let is_between = usize::from(hearing.is_between.load(Ordering::SeqCst));
            hearing.heard_between.fetch_add(is_between, Ordering::SeqCst);
        }),
        renewed: Arc::new(move |_| {
            renewing.is_between.store(false, Ordering::SeqCst);
            renewing.renewed.fetch_add(1, Ordering::SeqCst);
        }),
        missed: Arc::new(move || {
            missing.is_between.store(true, Ordering::SeqCst);
            missing.missed.fetch_add(1, Ordering::SeqCst);
        }),
        at_stake: Arc::new(|| None),
        warn: Arc::new(|_| ()),
        caller: None,
        is_voter: false,
        is_resp2: url.ends_with("protocol=2"),
        runtime: Arc::default(),
    };
    let address = url.split('?').next().unwrap();
    Link::new(Goal::Server(address.into_connection_info().unwrap()), terms)
}

#[tokio::test]
async fn no_push_over_a_new_connection_counts_before_its_word_that_it_is_new() {
    for protocol in [3, 2] {
        let server = Server::on_port();
        let proxy = Proxy::before(&server);
        let told = Arc::new(Told::default());
        let url = format!("{}?protocol={protocol}", proxy.url());
        let link = link_to(&url, &told);
        link.lanes().await.unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let publisher = {
            let (mut admin, is_over) = (server.admin(), is_over.clone());
            std::thread::spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    redis::cmd("PUBLISH").arg(CHANNEL).arg("x").exec(&mut admin).unwrap();
                }
            })
        };
        for round in 1..=5 {
            // Messages pour in from the moment that the new connection has subscribed.
            proxy.delay_replies(Duration::from_millis(20));
            proxy.cut();
            until(async || told.renewed.load(Ordering::SeqCst) == round).await;
            let heard = told.heard.load(Ordering::SeqCst);
            until(async || told.heard.load(Ordering::SeqCst) > heard).await;
        }
        is_over.store(true, Ordering::SeqCst);
        publisher.join().unwrap();
        assert_eq!(told.missed.load(Ordering::SeqCst), 5);
        assert_eq!(told.heard_between.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn dial_limit_follows_the_shortest_ttl_at_stake_and_the_last_dial() {
    let limit = |usual: Option<u64>, ttl: Option<u64>| dial_limit(usual.map(ms), ttl.map(ms));
    assert_eq!(limit(None, Some(1_000)), CONNECT_LIMIT, "the first time");
    assert_eq!(limit(Some(1), None), CONNECT_LIMIT, "nothing is at stake");
    assert_eq!(limit(Some(1), Some(8_000)), ms(2_000));
    assert_eq!(limit(Some(1), Some(100)), LEAST_DIAL);
    assert_eq!(limit(Some(700), Some(4_000)), ms(2_800), "the way is slow");
    assert_eq!(limit(Some(9_000), Some(4_000)), CONNECT_LIMIT);
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
