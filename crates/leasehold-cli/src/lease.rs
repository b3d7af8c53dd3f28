//! `acquire`, `renew`, `status` and `release ID`: a lease that lives across commands, without a process.

mod id;

use std::io::{self, Write as _};
use std::time::Duration;

use leasehold::{Client, Error, Guard, HolderInfo, LeaseId};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::args::{AcquireArgs, LeaseArgs, ReleaseArgs, RenewArgs, print_text};
use crate::duration::show as span;
use crate::exit::{Exit, Stop};
use crate::inspect::{holder_json, holder_line, print_json, store_line};
use crate::lock::{LeaseOptions, Lock};
use crate::output;
use crate::progress;
use crate::run::{
    Acquired, Connected, RELEASE_TIMEOUT, acquire as wait_for, cannot_catch, close, connect, connect_limit,
    left_of,
};
use crate::signals::Signals;
use crate::store::Store;
use crate::text::printable;

/// Between two tries of a release.
const RELEASE_PAUSE: Duration = Duration::from_millis(100);

pub(crate) async fn acquire(
    find: impl FnOnce() -> Result<Store, Stop>,
    args: AcquireArgs,
) -> Result<Exit, Stop> {
    output::set_locks(Some(args.kind.kind()), [args.name.to_string_lossy()]);
    let mut signals = Signals::catch().map_err(|error| cannot_catch(&error))?;
    let limit = if args.no_wait { Duration::ZERO } else { args.wait.unwrap_or(Duration::MAX) };
    let (store, began) = (find()?, Instant::now());
    if store.is_memory() {
        return Err(Stop::usage("memory: ends with this process, and so does the lease: name another store"));
    }
    let client = match connect(&store, connect_limit(&store, limit), &mut signals).await? {
        Connected::Yes(client) => client,
        Connected::Interrupted(signal) => return Ok(Exit::Signal(signal as i32)),
    };
    let label = args.label.as_deref().unwrap_or("acquired by a script");
    let options = LeaseOptions { ttl: args.ttl, min_hold: Duration::ZERO, label, is_detached: true };
    let lock = Lock::of_kind(&client, &args.name, &args.kind, &options, !limit.is_zero())?;
    let left = left_of(limit, began.elapsed());
    let exit = match wait_for(&lock, left, args.verbose, &mut signals).await {
        Ok(Acquired::Granted(held)) => match held.into_only() {
            Some(guard) => detach(&store, &client, guard, args.json).await,
            None => Err(Stop::failure("several leases have no id")),
        },
        Ok(Acquired::NotGranted) => {
            progress::explain_conflict(&lock, args.verbose).await;
            Ok(Exit::Conflict(args.conflict_exit_code))
        }
        Ok(Acquired::Interrupted(signal)) => Ok(Exit::Signal(signal as i32)),
        Err(stop) => Err(stop),
    };
    close(client).await;
    exit
}

/// Prints the id only when nothing can end the lease any more but its ttl. A lease whose id can't be written is released.
async fn detach(store: &Store, client: &Client, guard: Guard, is_json: bool) -> Result<Exit, Stop> {
    let token = guard.token().get();
    let (id, left) = guard.detach_valid_for().await?;
    let text = if is_json { json_of(store, &id, token, left) } else { id.to_string() };
    let Err(error) = write_line(&text) else { return Ok(Exit::Success) };
    let then = match release_lease(client, &id).await {
        Ok(true) => "the lease was released".to_owned(),
        Ok(false) => "the lease has ended".to_owned(),
        Err(error) => format!("the lease ends within {}: {error:#}", span(id.ttl())),
    };
    Err(Stop::failure(format!("the id of the lease can't be written to stdout: {error}; {then}")))
}

fn json_of(store: &Store, id: &LeaseId, token: u64, left: Duration) -> String {
    let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    let value = json!({
        "id": id.to_string(),
        "token": token,
        "kind": id.kind().as_str(),
        "name": id.name(),
        "store": store.public_url(),
        "expires_in_ms": left_ms,
    });
    value.to_string()
}

/// Unlike `print`, it fails if stdout has no reader.
fn write_line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

pub(crate) async fn renew(find: impl FnOnce() -> Result<Store, Stop>, args: RenewArgs) -> Result<Exit, Stop> {
    let id = id::find(args.id.as_deref())?;
    let store = find()?;
    let client = store.connect().await?;
    client.renew_lease(&id).await.map_err(ended)?;
    let shown = if args.json { show(&store, &client, &id, true).await } else { Ok(Exit::Success) };
    close(client).await;
    shown
}

pub(crate) async fn status(
    find: impl FnOnce() -> Result<Store, Stop>,
    args: LeaseArgs,
) -> Result<Exit, Stop> {
    let id = id::find(args.id.as_deref())?;
    let store = find()?;
    let client = store.connect().await?;
    show(&store, &client, &id, args.json).await
}

pub(crate) async fn release(
    find: impl FnOnce() -> Result<Store, Stop>,
    args: &ReleaseArgs,
) -> Result<Exit, Stop> {
    let id = id::find(args.name.as_deref()).map_err(|stop| {
        let advice = "or pass --force with the lock's name, while the holder may still be working";
        Stop::usage(format!("{stop}; {advice}"))
    })?;
    let store = find()?;
    let client = store.connect().await?;
    // It is shown as it was.
    let holder = if args.json { client.inspect_lease(&id).await? } else { None };
    let released = release_lease(&client, &id).await;
    close(client).await;
    if !released? {
        return Err(no_such_lease(&store, &id));
    }
    if args.json {
        let released: Vec<Value> = holder.iter().map(holder_json).collect();
        return print_json(&json!({ "released": released }));
    }
    Ok(Exit::Success)
}

/// Releases a lease, again while there is no answer. False if it had ended before.
async fn release_lease(client: &Client, id: &LeaseId) -> Result<bool, Error> {
    let began = Instant::now();
    let mut is_repeated = false;
    loop {
        // There is a result for each id.
        match client.release_leases([id]).await.pop().unwrap_or(Ok(false)) {
            Err(error) if error.is_unavailable() && began.elapsed() < RELEASE_TIMEOUT => {
                is_repeated = true;
                sleep(RELEASE_PAUSE).await;
            }
            // The release without an answer was carried out, or the lease has ended meanwhile: it is not held either way.
            Ok(false) if is_repeated => return Ok(true),
            released => return released,
        }
    }
}

fn no_such_lease(store: &Store, id: &LeaseId) -> Stop {
    let (kind, name, store) = (id.kind(), printable(id.name()), store.public_url());
    let what = "there is no such lease: it was released, it has expired, or the id is wrong";
    Stop::new(Exit::Conflict(1), format!("{kind} \"{name}\" on {}: {what}", printable(&store)))
}

async fn show(store: &Store, client: &Client, id: &LeaseId, is_json: bool) -> Result<Exit, Stop> {
    let Some(holder) = client.inspect_lease(id).await? else {
        return Err(no_such_lease(store, id));
    };
    if is_json {
        return print_json(&status_json(store, id, &holder));
    }
    let line = holder_line(id.kind(), &holder);
    let text = format!("{}{} {}\n{line}\n", store_line(store), id.kind(), printable(id.name()));
    print_text(&text)
}

fn status_json(store: &Store, id: &LeaseId, holder: &HolderInfo) -> Value {
    let mut value = holder_json(holder);
    value["kind"] = id.kind().as_str().into();
    value["name"] = id.name().into();
    value["store"] = store.public_url().into();
    value
}

/// An ended lease is an answer, and not a failure of the program.
fn ended(error: Error) -> Stop {
    if error.is_lost() { Stop::new(Exit::Conflict(1), error.to_string()) } else { error.into() }
}
