//! The service: one process of the web service that sells.
//!
//! A sale reads the count and then writes it plus one, with two plain commands. Two concurrent sales therefore count one: without
//! the lock, more is sold than counted.

use std::future::Future;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use super::{Contender, REQUEST_TIMEOUT, raise_file_limit};
use crate::outcome::{Outcome, find};
use crate::real::{Process, RealClient};
use crate::recipe::{AnyRecipe, LockOptions};
use crate::redis::Redis;

/// Items in stock.
pub const STOCK: u64 = 100_000;

/// The key that counts the sales.
pub const COUNT: &str = "already_bought";

/// The outcome of one request.
enum Sale {
    Sold,
    SoldOut,
    /// The lock was not acquired in time.
    Busy,
}

struct Service {
    contender: Contender,
    process: Arc<Process>,
    /// Connected if the contender is leasehold.
    leasehold: Option<leasehold::Client>,
}

/// Sells until standard input ends, that is until the parent process is gone. Prints its port to standard output.
///
/// # Errors
///
/// A server that cannot be reached.
pub async fn serve(contender: Contender, urls: &[String]) -> Outcome<()> {
    raise_file_limit();
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    println!("{}", listener.local_addr()?.port());
    std::io::stdout().flush()?;
    let parent_is_gone = async {
        let mut rest = [0; 64];
        while matches!(tokio::io::stdin().read(&mut rest).await, Ok(1..)) {}
    };
    sell(listener, contender, urls, parent_is_gone).await
}

/// Sells until `stop` completes.
///
/// # Errors
///
/// A server that cannot be reached.
pub async fn sell(
    listener: TcpListener,
    contender: Contender,
    urls: &[String],
    stop: impl Future<Output = ()>,
) -> Outcome<()> {
    // Where the lock has a server of its own, that is the last one.
    let (nodes, store) = match (&contender, urls) {
        (Contender::LeaseholdPostgres, [nodes @ .., store]) => (nodes, Some(store)),
        (Contender::Leasehold, _) => (urls, urls.first()),
        _ => (urls, None),
    };
    let leasehold = match store {
        Some(url) => Some(leasehold::Client::connect(url).await?),
        None => None,
    };
    let service = Service { contender, process: Process::connect(nodes).await?, leasehold };
    let app = Router::new().route("/buy", get(buy)).with_state(Arc::new(service));
    // Clients keep their connections open, so a graceful shutdown would never end.
    tokio::select! {
        served = axum::serve(listener, app).into_future() => Ok(served?),
        () = stop => Ok(()),
    }
}

async fn buy(State(service): State<Arc<Service>>) -> (StatusCode, &'static str) {
    match service.sell().await {
        Ok(Sale::Sold) => (StatusCode::OK, "sold\n"),
        Ok(Sale::SoldOut) => (StatusCode::GONE, "gone\n"),
        Ok(Sale::Busy) => (StatusCode::SERVICE_UNAVAILABLE, "busy\n"),
        Err(error) => {
            eprintln!("recipes: a sale failed: {error}");
            (StatusCode::INTERNAL_SERVER_ERROR, "oops\n")
        }
    }
}

impl Service {
    async fn sell(&self) -> Outcome<Sale> {
        let redis = Redis::new(Arc::new(RealClient::new(self.process.clone(), None)));
        if let Some(client) = &self.leasehold {
            let Some(guard) = client.mutex("flash-sale").lock_timeout(REQUEST_TIMEOUT).await? else {
                return Ok(Sale::Busy);
            };
            let sale = count_one(&redis).await?;
            // The drop releases in the background, so that the response does not wait for a round trip.
            drop(guard);
            return Ok(sale);
        }
        if self.contender == Contender::Nothing {
            return count_one(&redis).await;
        }
        let Some(mut recipe) = self.lock(&redis).await? else { return Ok(Sale::Busy) };
        let sale = count_one(&redis).await;
        recipe.unlock().await?;
        sale
    }

    async fn lock(&self, redis: &Redis) -> Outcome<Option<Box<dyn AnyRecipe>>> {
        let Contender::Recipe { id, retry } = self.contender else { return Ok(None) };
        let options = LockOptions {
            key: "flash-sale".to_owned(),
            lease: Duration::from_secs(60),
            ..LockOptions::default()
        };
        let mut recipe = (find(id)?.make)(redis.clone(), options);
        let start = Instant::now();
        while recipe.try_lock().await?.is_none() {
            if start.elapsed() > REQUEST_TIMEOUT {
                recipe.give_up().await?;
                return Ok(None);
            }
            retry.pause(redis, &mut *recipe, start.elapsed()).await?;
        }
        Ok(Some(recipe))
    }
}

/// The critical section, the same for every lock: one read, one write.
async fn count_one(redis: &Redis) -> Outcome<Sale> {
    let sold: Option<u64> = redis.call(&["GET", COUNT]).await?;
    let sold = sold.unwrap_or(0);
    if sold >= STOCK {
        return Ok(Sale::SoldOut);
    }
    redis.set(COUNT, &(sold + 1).to_string()).await?;
    Ok(Sale::Sold)
}

#[cfg(test)]
mod tests {
    use leasehold_testkit::until;

    use super::super::Retry;
    use super::*;
    use crate::outcome::servers;

    #[tokio::test]
    async fn a_listener_retries_once_after_subscribing_and_once_after_the_notification() {
        let (_server, urls) = servers(1);
        let process = Process::connect(&urls).await.unwrap();
        let contender = Contender::Recipe { id: "hash-pubsub", retry: Retry::Listen };
        let service = Arc::new(Service { contender, process: process.clone(), leasehold: None });
        let redis = Redis::new(Arc::new(RealClient::new(process.clone(), None)));
        let mut holder = service.lock(&redis).await.unwrap().unwrap();
        assert_eq!(process.commands_sent(), 1);
        let request = tokio::spawn(async move { service.sell().await.unwrap() });
        // The holder's attempt; then an attempt, SUBSCRIBE, and one more attempt.
        until(async || process.commands_sent() >= 4).await;
        assert!(holder.unlock().await.unwrap());
        assert!(matches!(request.await.unwrap(), Sale::Sold));
        // The holder's release; then an attempt, GET, SET, and the release.
        assert_eq!(process.commands_sent(), 4 + 1 + 4);
    }
}
