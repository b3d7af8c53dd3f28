//! The service: one process that sells.
//!
//! A sale looks how many were sold, and then writes that there is one more. Both are plain commands, so two who sell at the
//! same time count one sale: without the lock more is sold than counted.

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

use super::{CUSTOMER_LIMIT, Contender, raise_file_limit};
use crate::real::{Process, RealClient};
use crate::recipe::{AnyRecipe, Terms};
use crate::redis::Redis;
use crate::run::{Outcome, find};

/// How many there are to be sold.
pub const STOCK: u64 = 100_000;

/// Where the sales are counted.
pub const COUNT: &str = "already_bought";

/// What becomes of a customer.
enum Sale {
    Sold,
    SoldOut,
    /// The lock could not be had in time.
    Busy,
}

struct Shop {
    contender: Contender,
    process: Arc<Process>,
    /// Connected by a shop that uses it.
    leasehold: Option<leasehold::Client>,
}

/// Sells until standard input ends, which is when the process that started this one is gone. The port is written to
/// standard output.
///
/// # Errors
///
/// Servers that can't be reached.
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

/// Sells until it is told to stop.
///
/// # Errors
///
/// Servers that can't be reached.
pub async fn sell(
    listener: TcpListener,
    contender: Contender,
    urls: &[String],
    stop: impl Future<Output = ()>,
) -> Outcome<()> {
    let leasehold = match contender {
        Contender::Leasehold => Some(leasehold::Client::connect(&urls[0]).await?),
        Contender::Recipe { .. } | Contender::Nothing => None,
    };
    let shop = Shop { contender, process: Process::connect(urls).await?, leasehold };
    let app = Router::new().route("/buy", get(buy)).with_state(Arc::new(shop));
    // Customers' connections stay open, so nobody waits until they are closed.
    tokio::select! {
        served = axum::serve(listener, app).into_future() => Ok(served?),
        () = stop => Ok(()),
    }
}

async fn buy(State(shop): State<Arc<Shop>>) -> (StatusCode, &'static str) {
    match shop.sell().await {
        Ok(Sale::Sold) => (StatusCode::OK, "sold\n"),
        Ok(Sale::SoldOut) => (StatusCode::GONE, "gone\n"),
        Ok(Sale::Busy) => (StatusCode::SERVICE_UNAVAILABLE, "busy\n"),
        Err(error) => {
            eprintln!("recipes: a sale failed: {error}");
            (StatusCode::INTERNAL_SERVER_ERROR, "oops\n")
        }
    }
}

impl Shop {
    async fn sell(&self) -> Outcome<Sale> {
        let redis = Redis::new(Arc::new(RealClient::new(self.process.clone(), None)));
        if let Some(client) = &self.leasehold {
            let Some(guard) = client.mutex("flash-sale").lock_timeout(CUSTOMER_LIMIT).await? else {
                return Ok(Sale::Busy);
            };
            let sale = count_one(&redis).await?;
            // Whoever is next does not wait for the way to the server; nor does the customer.
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
        let terms =
            Terms { key: "flash-sale".to_owned(), lease: Duration::from_secs(60), ..Terms::default() };
        let mut recipe = (find(id)?.make)(redis.clone(), terms);
        let start = Instant::now();
        while recipe.try_lock().await?.is_none() {
            if start.elapsed() > CUSTOMER_LIMIT {
                recipe.give_up().await?;
                return Ok(None);
            }
            retry.pause(redis, &mut *recipe, start.elapsed()).await?;
        }
        Ok(Some(recipe))
    }
}

/// The same work for everybody: one look, one write.
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
    use crate::run::servers;

    #[tokio::test]
    async fn who_listens_asks_once_more_when_it_hears_and_then_when_it_is_told() {
        let (_server, urls) = servers(1);
        let process = Process::connect(&urls).await.unwrap();
        let contender = Contender::Recipe { id: "hash-pubsub", retry: Retry::Listen };
        let shop = Arc::new(Shop { contender, process: process.clone(), leasehold: None });
        let redis = Redis::new(Arc::new(RealClient::new(process.clone(), None)));
        let mut holder = shop.lock(&redis).await.unwrap().unwrap();
        assert_eq!(process.asked(), 1);
        let customer = tokio::spawn(async move { shop.sell().await.unwrap() });
        // It tries, subscribes, and tries again.
        until(async || process.asked() >= 4).await;
        assert!(holder.unlock().await.unwrap());
        assert!(matches!(customer.await.unwrap(), Sale::Sold));
        // It tries, looks, writes, and unlocks.
        assert_eq!(process.asked(), 4 + 1 + 4);
    }
}
