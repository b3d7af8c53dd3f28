//! Sessions that are killed in any step, and servers that stop, while clients contend.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::{PgBouncer, Postgres};

/// How long clients contend: `scripts/test --long` wants more.
fn duration() -> Duration {
    let seconds = if std::env::var_os("LEASEHOLD_TEST_LONG").is_some() { 60 } else { 8 };
    Duration::from_secs(seconds)
}

/// What the holders of one lock see of each other.
#[derive(Default)]
struct Witness {
    is_held: AtomicBool,
    last_token: AtomicU64,
    grants: AtomicU64,
    overlaps: AtomicU64,
    falls: AtomicU64,
}

impl Witness {
    async fn hold(&self, guard: leasehold::Guard) {
        let token = guard.token().get();
        if self.is_held.swap(true, Ordering::SeqCst) {
            self.overlaps.fetch_add(1, Ordering::SeqCst);
        }
        if self.last_token.fetch_max(token, Ordering::SeqCst) >= token {
            self.falls.fetch_add(1, Ordering::SeqCst);
        }
        self.grants.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        self.is_held.store(false, Ordering::SeqCst);
        drop(guard.release().await);
    }
}

async fn contend(urls: &[String], disturb: impl Fn(u32) + Send + 'static) -> Arc<Witness> {
    let witness = Arc::new(Witness::default());
    let ends = Instant::now() + duration();
    let mut workers = Vec::new();
    for url in urls {
        let client = Client::connect(url).await.unwrap();
        for _ in 0..2 {
            let (client, witness) = (client.clone(), witness.clone());
            workers.push(tokio::spawn(async move {
                while Instant::now() < ends {
                    let mutex = client.mutex("a").global_fifo().ttl(Duration::from_secs(5));
                    match mutex.lock_timeout(Duration::from_secs(3)).await {
                        Ok(Some(guard)) => witness.hold(guard).await,
                        Ok(None) => {}
                        // The server is away.
                        Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                    }
                }
            }));
        }
    }
    let disturber = tokio::task::spawn_blocking(move || {
        let mut round = 0;
        while Instant::now() < ends {
            disturb(round);
            round += 1;
        }
    });
    for worker in workers {
        worker.await.unwrap();
    }
    disturber.await.unwrap();
    witness
}

fn check(witness: &Witness) {
    let count = |of: &AtomicU64| of.load(Ordering::SeqCst);
    eprintln!("{} grants", count(&witness.grants));
    assert_eq!((count(&witness.overlaps), count(&witness.falls)), (0, 0), "holders, or tokens, overlapped");
    assert!(count(&witness.grants) > 20, "{} grants", count(&witness.grants));
}

const KILL: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.3";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_sessions_cause_no_overlap_and_no_falling_token() {
    let server = Arc::new(Postgres::on_port());
    let pooler = PgBouncer::start(&server);
    let listening = format!("{}?listen={}", pooler.url(), server.url());
    let urls = [server.url(), server.url(), server.url(), listening];
    let killed = server.clone();
    let witness = contend(&urls, move |_| {
        let _ = killed.try_run(KILL);
        std::thread::sleep(Duration::from_millis(100));
    })
    .await;
    check(&witness);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stopped_servers_cause_no_overlap_and_no_falling_token() {
    let server = Arc::new(Postgres::on_port());
    let urls = [server.url(), server.url()];
    let stopped = server.clone();
    let witness = contend(&urls, move |round| {
        std::thread::sleep(Duration::from_millis(700));
        stopped.freeze();
        std::thread::sleep(Duration::from_millis(u64::from(round % 4) * 400));
        stopped.thaw();
    })
    .await;
    check(&witness);
}
