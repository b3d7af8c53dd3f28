//! `wait` and `health`: whether a lock is free, and whether the store can grant one.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::args::{HealthArgs, WaitArgs, name, print};
use crate::exit::{Exit, Stop};
use crate::inspect::{is_in_use, named, print_json};
use crate::run::close;
use crate::store::Store;
use crate::text::printable;

/// The first and the longest pause between two polls of a lock that is in use.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The lifetime of a probe's lease, if the probe dies before it releases it.
const PROBE_TTL: Duration = Duration::from_secs(2);

pub(crate) async fn wait(find: impl FnOnce() -> Result<Store, Stop>, args: WaitArgs) -> Result<Exit, Stop> {
    let name = name(&args.name)?;
    let began = Instant::now();
    let client = find()?.connect().await?;
    let mut pause = PAUSES.0;
    loop {
        let locks = named(&client, name, args.kind).await?;
        if !locks.iter().any(is_in_use) {
            return Ok(Exit::Success);
        }
        let left = args.wait.unwrap_or(Duration::MAX).saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(Stop::new(Exit::Conflict(1), format!("{} is still in use", printable(name))));
        }
        sleep(pause.min(left)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

pub(crate) async fn health(
    find: impl FnOnce() -> Result<Store, Stop>,
    args: HealthArgs,
) -> Result<Exit, Stop> {
    let store = find()?;
    let url = store.public_url();
    let unhealthy = |what: &str| Stop::new(Exit::Conflict(1), format!("{url}: {what}"));
    match timeout(args.timeout, probe(&store)).await {
        Err(_) => Err(unhealthy(&format!("no lock was granted within {:?}", args.timeout))),
        Ok(Err(stop)) if stop.exit == Exit::Usage => Err(stop),
        Ok(Err(stop)) => Err(Stop::new(Exit::Conflict(1), stop.message)),
        Ok(Ok((connect, lock))) if args.json => {
            let millis = |span: Duration| span.as_secs_f64() * 1e3;
            print_json(&json!({ "store": url, "connect_ms": millis(connect), "lock_ms": millis(lock) }))
        }
        Ok(Ok((_, lock))) => {
            print(format!("{}: a lock and its release took {lock:.1?}\n", printable(&url)).as_bytes())
        }
    }
}

/// Acquires and releases a lock that no other program uses: process ids repeat between hosts and containers. Returns how long the connection and the lock took.
async fn probe(store: &Store) -> Result<(Duration, Duration), Stop> {
    let began = Instant::now();
    let client = store.connect_quietly().await?;
    let connected = Instant::now();
    let name = format!("leasehold health {:016x}", RandomState::new().hash_one(std::process::id()));
    let guard = client.mutex(name).ttl(PROBE_TTL).lock().await?;
    guard.release().await?;
    let locked = connected.elapsed();
    close(client).await;
    Ok((connected - began, locked))
}
