//! `wait` and `health`: whether a lock is free, and whether the store can grant one.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::args::{HealthArgs, WaitArgs, name, print_text};
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::inspect::{is_in_use, named, print_json};
use crate::output::{self, Level, message};
use crate::run::close;
use crate::store::Store;
use crate::text::printable;

/// The first and the longest pause between two polls of a lock that is in use.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How long a store that has answered may be away.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long after its limit a wait ends without an answer, because it is not known then whether the lock is in use.
const GRACE: Duration = Duration::from_secs(2);

/// The lifetime of a probe's lease, if the probe dies before it releases it.
const PROBE_TTL: Duration = Duration::from_secs(2);

pub(crate) async fn wait(find: impl FnOnce() -> Result<Store, Stop>, args: WaitArgs) -> Result<Exit, Stop> {
    let name = name(&args.name)?;
    output::set_locks(args.kind, [name]);
    let began = Instant::now();
    let left_of = |limit: Option<Duration>| limit.unwrap_or(Duration::MAX).saturating_sub(began.elapsed());
    let left = || left_of(args.wait);
    let until_answered = || left_of(args.wait.map(|wait| wait.saturating_add(GRACE)));
    let store = find()?;
    let silent =
        |_| Stop::failure(format!("{}: the store did not answer in time", printable(&store.public_url())));
    let client = timeout(until_answered(), store.connect()).await.map_err(silent)??;
    let (mut pause, mut has_looked, mut failing_since) = (PAUSES.0, false, None);
    loop {
        let looked = timeout(until_answered(), named(&client, name, args.kind)).await;
        let stop = match looked.map_err(silent).flatten() {
            Ok(locks) if !locks.iter().any(is_in_use) => return Ok(Exit::Success),
            Ok(_) => {
                (has_looked, failing_since) = (true, None);
                Stop::new(Exit::Conflict(1), format!("{} is still in use", printable(name)))
            }
            // A store that has answered may only be restarting.
            Err(stop) if has_looked && stop.exit == Exit::Failure => {
                if failing_since.is_none() {
                    message(Level::Warn, "store_unavailable", format_args!("{stop}; waiting on"));
                }
                if failing_since.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                    return Err(stop);
                }
                stop
            }
            Err(stop) => return Err(stop),
        };
        if left().is_zero() {
            return Err(stop);
        }
        sleep(pause.min(left())).await;
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
        Err(_) => Err(unhealthy(&format!("no lock was granted within {}", duration::show(args.timeout)))),
        Ok(Err(stop)) if stop.exit == Exit::Usage => Err(stop),
        Ok(Err(stop)) => Err(Stop::new(Exit::Conflict(1), stop.message)),
        Ok(Ok((connect, lock))) if args.json => {
            let millis = |span: Duration| span.as_secs_f64() * 1e3;
            print_json(&json!({ "store": url, "connect_ms": millis(connect), "lock_ms": millis(lock) }))
        }
        Ok(Ok((_, lock))) => print_text(&format!("{url}: a lock and its release took {lock:.1?}\n")),
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
