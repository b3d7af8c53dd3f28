//! `ls`, `show` and `release`: inspecting locks, and releasing them by force.

use std::fmt::Write as _;
use std::io;

use leasehold::{Client, ForeignInfo, HolderInfo, HolderMetadata, Kind, LockInfo, Mode, WaiterInfo};
use serde_json::{Value, json};

use crate::args::{LsArgs, ReleaseArgs, ShowArgs, name, print, print_text};
use crate::duration::show as span;
use crate::exit::{Exit, Stop};
use crate::output::message;
use crate::store::Store;
use crate::text::printable;

pub(crate) async fn ls(store: &Store, args: LsArgs) -> Result<Exit, Stop> {
    let client = store.connect().await?;
    let locks = client.list().await?;
    if args.json {
        let locks: Vec<Value> = locks.iter().map(lock_json).collect();
        return print_json(&json!({ "store": store.public_url(), "locks": locks }));
    }
    if locks.is_empty() {
        message(format_args!("no lock is in use on {}", printable(&store.public_url())));
        return Ok(Exit::Success);
    }
    let mut rows = vec![HEAD.map(str::to_owned)];
    for lock in &locks {
        rows.push(row(lock));
    }
    // Programs get all of it, and people what fits; `show` has the rest.
    let room = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0));
    print_text(&format!("{}{}", store_line(store), table(&rows, room)))
}

/// Which store was looked at: root and a user, for instance, have different ones unless they name one.
pub(crate) fn store_line(store: &Store) -> String {
    format!("store {}\n", printable(&store.public_url()))
}

pub(crate) async fn show(store: &Store, args: ShowArgs) -> Result<Exit, Stop> {
    let client = store.connect().await?;
    let locks = named(&client, name(&args.name)?, args.kind).await?;
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
        return Err(Stop::new(
            Exit::Conflict(1),
            match args.token {
                None => format!("{} is not held on {}", printable(shown), printable(&store.public_url())),
                Some(token) => {
                    let url = store.public_url();
                    format!("no holder of {} on {} has the token {token}", printable(shown), printable(&url))
                }
            },
        ));
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

pub(crate) fn row(lock: &LockInfo) -> [String; COLUMNS] {
    let holder = lock.holders.first();
    let more = lock.holders.len().saturating_sub(1);
    let without_holder = if lock.foreign.is_some() { "another program" } else { "-" };
    let shown =
        holder.map_or_else(|| without_holder.to_owned(), |holder| identity(&holder.metadata, &holder.client));
    let shown = if more > 0 { format!("{shown} and {more} more") } else { shown };
    [
        printable(&lock.name),
        lock.kind.to_string(),
        shown,
        holder.map_or_else(|| "-".to_owned(), |holder| span(holder.held_for)),
        holder.map_or_else(|| "-".to_owned(), |holder| span(holder.expires_in)),
        lock.waiters.len().to_string(),
        holder.map_or_else(|| "-".to_owned(), |holder| holder.token.to_string()),
    ]
}

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

/// Which column is cut when a terminal is too narrow for a row.
const HOLDER: usize = 2;

const COLUMNS: usize = 7;

/// The names of the columns.
pub(crate) const HEAD: [&str; COLUMNS] =
    ["NAME", "KIND", "HOLDER", "HELD FOR", "EXPIRES IN", "WAITING", "TOKEN"];

/// What a cut column keeps at least.
const NARROWEST: usize = 20;

fn table(rows: &[[String; COLUMNS]], room: Option<usize>) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let excess =
        room.map_or(0, |room| (widths.iter().sum::<usize>() + (COLUMNS - 1) * 2).saturating_sub(room));
    if excess > 0 {
        widths[HOLDER] = widths[HOLDER].saturating_sub(excess).max(NARROWEST);
    }
    let mut text = String::new();
    for row in rows {
        let line: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| fit(cell, *width)).collect();
        let _ = writeln!(text, "{}", line.join("  ").trim_end());
    }
    text
}

/// Padded or cut to this width.
fn fit(cell: &str, width: usize) -> String {
    if cell.chars().count() <= width {
        return format!("{cell:<width$}");
    }
    cell.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

// --- As JSON -------------------------------------------------------------------------------------

pub(crate) fn print_json(value: &Value) -> Result<Exit, Stop> {
    print(format!("{value}\n").as_bytes())
}

fn lock_json(lock: &LockInfo) -> Value {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_aligned_and_truncates_the_holder_column() {
        let row = |cells: [&str; COLUMNS]| cells.map(str::to_owned);
        let rows = [
            row(["NAME", "K", "HOLDER", "A", "B", "C", "D"]),
            row(["ä", "k", "somebody with a very long command line", "1", "2", "3", "4"]),
        ];
        let whole = table(&rows, None);
        assert!(whole.starts_with(
            "NAME  K  HOLDER                                  A  B  C  D\nä     k  somebody with"
        ));
        let cut = table(&rows, Some(47));
        assert_eq!(
            cut,
            "NAME  K  HOLDER                      A  B  C  D\nä     k  somebody with a very long…  1  2  3  4\n"
        );
        assert!(table(&rows, Some(1)).contains("ä     k  somebody with a ver…  1"));
    }
}
