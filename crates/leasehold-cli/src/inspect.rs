//! `show` and `release`: inspecting locks, and releasing them by force.

use std::fmt::Write as _;

use leasehold::{Client, ForeignInfo, HolderInfo, HolderMetadata, Kind, LockInfo, Mode, WaiterInfo};
use serde_json::{Value, json};

use crate::args::{ReleaseArgs, ShowArgs, name, print, print_text};
use crate::duration::show as span;
use crate::exit::{Exit, Stop};
use crate::output::{self, message};
use crate::store::Store;
use crate::text::printable;

/// Which store was looked at: root and a user, for instance, have different ones unless they name one.
pub(crate) fn store_line(store: &Store) -> String {
    format!("store {}\n", printable(&store.public_url()))
}

pub(crate) async fn show(store: &Store, args: ShowArgs) -> Result<Exit, Stop> {
    let name = name(&args.name)?;
    output::set_locks(args.kind, [name]);
    let client = store.connect().await?;
    let locks = named(&client, name, args.kind).await?;
    if args.json {
        let mut value = lock_json(only(&locks)?);
        value["store"] = store.public_url().into();
        return print_json(&value);
    }
    let text = locks.iter().map(lock_text).collect::<Vec<_>>().join("\n");
    print_text(&format!("{}{text}", store_line(store)))
}

/// The locks of this name that are in use, and of those of this kind; a free one where there is none.
pub(crate) async fn named(client: &Client, name: &str, kind: Option<Kind>) -> Result<Vec<LockInfo>, Stop> {
    if let Some(kind) = kind {
        return Ok(vec![client.inspect(kind, name).await?]);
    }
    let mut locks = Vec::new();
    for kind in Kind::ALL {
        locks.push(client.inspect(*kind, name).await?);
    }
    if locks.iter().any(is_in_use) {
        locks.retain(is_in_use);
    } else {
        // One of those that are free is enough: it may have a last token.
        locks.sort_by_key(|lock| std::cmp::Reverse(lock.last_token));
        locks.truncate(1);
    }
    Ok(locks)
}

pub(crate) fn is_in_use(lock: &LockInfo) -> bool {
    !lock.holders.is_empty() || !lock.waiters.is_empty() || lock.foreign.is_some()
}

/// The one lock that is meant.
fn only(locks: &[LockInfo]) -> Result<&LockInfo, Stop> {
    match locks {
        [lock] => Ok(lock),
        _ => {
            let kinds: Vec<_> = locks.iter().map(|lock| lock.kind.as_str()).collect();
            Err(Stop::usage(format!(
                "several locks have this name: pass --kind {}",
                kinds.join(" or --kind ")
            )))
        }
    }
}

pub(crate) fn lock_text(lock: &LockInfo) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{} {}", lock.kind, printable(&lock.name));
    if is_in_use(lock) {
        let _ = match lock.kind {
            Kind::Semaphore => writeln!(text, "{} of {} permits are in use", lock.in_use, lock.capacity),
            Kind::Barrier => writeln!(text, "{} of {} parties have arrived", lock.in_use, lock.capacity),
            Kind::Latch => writeln!(text, "{} of {} have counted down", lock.in_use, lock.capacity),
            _ => Ok(()),
        };
    }
    if lock.rounds > 0 {
        let rounds = if lock.rounds == 1 { "round has" } else { "rounds have" };
        let _ = writeln!(text, "{} {rounds} passed recently", lock.rounds);
    }
    if let Some(token) = lock.last_token {
        let _ = writeln!(text, "last token {token}");
    }
    if let Some(foreign) = &lock.foreign {
        let _ = writeln!(text, "{}", foreign_line(foreign));
    }
    if !is_in_use(lock) {
        let _ = writeln!(text, "free");
    }
    for holder in &lock.holders {
        let _ = writeln!(text, "{}", holder_line(lock.kind, holder));
    }
    for waiter in &lock.waiters {
        let _ = writeln!(text, "{}", waiter_line(waiter));
    }
    text
}

/// The key has a value that is not leasehold's.
fn foreign_line(foreign: &ForeignInfo) -> String {
    match foreign.expires_in {
        Some(expires_in) => format!("held by another program, for {}", span(expires_in)),
        None => "held by another program, without an expiry".to_owned(),
    }
}

/// Releases a lock by force.
pub(crate) async fn release(
    find: impl FnOnce() -> Result<Store, Stop>,
    args: ReleaseArgs,
) -> Result<Exit, Stop> {
    let Some(typed) = &args.name else { return Err(Stop::usage("name the lock to release")) };
    let shown = name(typed)?;
    output::set_locks(args.kind, [shown]);
    let store = find()?;
    let client = store.connect().await?;
    let locks = named(&client, shown, args.kind).await?;
    let kind = only(&locks)?.kind;
    let taken = match args.token {
        None => client.force_release(kind, shown).await?,
        Some(token) => release_token(&client, kind, shown, token).await?,
    };
    if args.json {
        let released: Vec<Value> = taken.iter().map(holder_json).collect();
        print_json(&json!({ "released": released }))?;
    }
    if taken.is_empty() {
        let (shown, url, exit) = (printable(shown), printable(&store.public_url()), Exit::Conflict(1));
        let what = match args.token {
            None => format!("{shown} is not held on {url}"),
            Some(token) => format!("no holder of {shown} on {url} has the token {token}"),
        };
        // Not an error: with --json the answer is printed already.
        message(exit.level(), exit.event(), what);
        return Ok(exit);
    }
    if !args.json {
        for holder in &taken {
            let line = format!(
                "released from {}, token {}\n",
                identity(&holder.metadata, &holder.client),
                holder.token
            );
            print_text(&line)?;
        }
    }
    Ok(Exit::Success)
}

/// The holder with this token, if there is one.
async fn release_token(client: &Client, kind: Kind, name: &str, token: u64) -> Result<Vec<HolderInfo>, Stop> {
    let holders = client.inspect(kind, name).await?.holders;
    let Some(holder) = holders.iter().find(|holder| holder.token.get() == token) else {
        return Ok(Vec::new());
    };
    Ok(client.force_release_token(kind, name, holder.token).await?.into_iter().collect())
}

// --- As text -------------------------------------------------------------------------------------

pub(crate) fn holder_line(kind: Kind, holder: &HolderInfo) -> String {
    let what = match (holder.mode, &holder.owner) {
        _ if kind == Kind::Barrier => "here is".to_owned(),
        _ if kind == Kind::Latch => "counted down by".to_owned(),
        (Some(mode), _) => format!("held to {} by", mode_word(mode)),
        (None, Some(owner)) => format!("held by owner {} at", printable(owner)),
        (None, None) if holder.weight > 1 => format!("{} permits held by", holder.weight),
        (None, None) => "held by".to_owned(),
    };
    let who = identity(&holder.metadata, &holder.client);
    let state = if holder.retained { "released, retained for" } else { "ends unless renewed in" };
    format!(
        "{what} {who} for {}, token {}, {state} {}",
        span(holder.held_for),
        holder.token,
        span(holder.expires_in)
    )
}

fn waiter_line(waiter: &WaiterInfo) -> String {
    let who = identity(&waiter.metadata, &waiter.client);
    let absent = if waiter.skipped { ", absent" } else { "" };
    let what = match waiter.mode {
        Some(mode) => format!(" to {}", mode_word(mode)),
        None if waiter.weight > 1 => format!(" for {} permits", waiter.weight),
        None => String::new(),
    };
    format!("{}. {who} waits{what} for {}{absent}", waiter.position, span(waiter.waiting_for))
}

fn mode_word(mode: Mode) -> &'static str {
    match mode {
        Mode::Write => "write",
        Mode::UpgradableRead => "read (upgradable)",
        _ => "read",
    }
}

/// Names a holder by host, process and label or program.
pub(crate) fn identity(metadata: &HolderMetadata, client: &str) -> String {
    let mut who = match (&metadata.host, metadata.pid) {
        (Some(host), Some(pid)) => format!("{} pid {pid}", printable(host)),
        (Some(host), None) => printable(host),
        _ => client.to_owned(),
    };
    if let Some(what) = metadata.label.as_ref().or(metadata.program.as_ref()) {
        let _ = write!(who, " ({})", printable(what));
    }
    if let Some(trace_id) = &metadata.trace_id {
        let _ = write!(who, " in trace {}", printable(trace_id));
    }
    who
}

// --- As JSON -------------------------------------------------------------------------------------

pub(crate) fn print_json(value: &Value) -> Result<Exit, Stop> {
    print(format!("{value}\n").as_bytes())
}

pub(crate) fn lock_json(lock: &LockInfo) -> Value {
    json!({
        "kind": lock.kind.to_string(),
        "name": lock.name,
        "capacity": lock.capacity,
        "in_use": lock.in_use,
        "last_token": lock.last_token.map(leasehold::Token::get),
        "rounds": lock.rounds,
        "holders": lock.holders.iter().map(holder_json).collect::<Vec<_>>(),
        "waiters": lock.waiters.iter().map(waiter_json).collect::<Vec<_>>(),
        "foreign": lock.foreign.map(|foreign| json!({ "expires_in_ms": foreign.expires_in.map(millis) })),
    })
}

pub(crate) fn holder_json(holder: &HolderInfo) -> Value {
    json!({
        "client": holder.client,
        "token": holder.token.get(),
        "weight": holder.weight,
        "mode": mode_json(holder.mode),
        "owner": holder.owner,
        "held_for_ms": millis(holder.held_for),
        "expires_in_ms": millis(holder.expires_in),
        "retained": holder.retained,
        "metadata": metadata_json(&holder.metadata),
    })
}

fn waiter_json(waiter: &WaiterInfo) -> Value {
    json!({
        "client": waiter.client,
        "position": waiter.position,
        "weight": waiter.weight,
        "mode": mode_json(waiter.mode),
        "waiting_for_ms": millis(waiter.waiting_for),
        "skipped": waiter.skipped,
        "metadata": metadata_json(&waiter.metadata),
    })
}

fn mode_json(mode: Option<Mode>) -> Option<&'static str> {
    mode.map(|mode| match mode {
        Mode::Write => "write",
        Mode::UpgradableRead => "upgradable",
        _ => "read",
    })
}

fn metadata_json(metadata: &HolderMetadata) -> Value {
    json!({ "host": metadata.host, "pid": metadata.pid, "program": metadata.program, "label": metadata.label,
            "trace_id": metadata.trace_id })
}

fn millis(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
