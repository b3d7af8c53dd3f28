//! Each change as a line: for logs, with `--plain`, and for programs, with `--json`.

use std::io::{self, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{HolderInfo, LockInfo};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use super::source::Source;
use crate::duration::show as span;
use crate::exit::{Exit, Stop};
use crate::inspect::{holder_json, identity};
use crate::output::{Level, message};
use crate::text::printable;

/// The interval at which stdout is checked for a reader.
const READER_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
pub(super) enum Form {
    Text,
    Json,
}

/// What happened to a lock between two polls.
#[derive(Debug)]
enum Change<'a> {
    Granted(&'a LockInfo, &'a HolderInfo),
    /// The lock and the holder of the poll before.
    Ended(&'a LockInfo, &'a HolderInfo),
    /// How many wait now.
    Waiting(&'a LockInfo, usize),
}

/// Prints changes until stdout is closed. A lease that begins and ends between two polls is not printed.
pub(super) async fn follow(source: &Source, interval: Duration, form: Form) -> Result<Exit, Stop> {
    let (mut before, mut outage) = (Vec::new(), None);
    loop {
        match source.poll().await {
            Ok(now) => {
                outage = None;
                for change in changes(&before, &now) {
                    if !write(&change, form)? {
                        return Ok(Exit::Success);
                    }
                }
                before = now;
            }
            // An outage is reported once.
            Err(error) => {
                if outage.replace(error.to_string()).is_none() {
                    message(Level::Warn, "store_unavailable", &error);
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = until_unread() => return Ok(Exit::Success),
        }
    }
}

/// Waits until the program that reads stdout has ended. A write would fail then, but a quiet store gives nothing to write.
async fn until_unread() {
    while is_read() {
        tokio::time::sleep(READER_INTERVAL).await;
    }
}

/// Whether stdout is no pipe without a reader.
fn is_read() -> bool {
    let stdout = io::stdout();
    let mut polled = [PollFd::new(&stdout, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_err() || !polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

fn find<'a>(locks: &'a [LockInfo], like: &LockInfo) -> Option<&'a LockInfo> {
    locks.iter().find(|lock| (lock.kind, &lock.name) == (like.kind, &like.name))
}

/// The holders that the other poll does not have. All leases of an owner have one token, and may be those of one client. Of these, those
/// with one label are not told apart: the last ones are missing there.
fn missing<'a>(holders: &'a [HolderInfo], other: Option<&LockInfo>) -> impl Iterator<Item = &'a HolderInfo> {
    let mut there: Vec<&HolderInfo> = other.map_or_else(Vec::new, |lock| lock.holders.iter().collect());
    holders.iter().filter(move |holder| {
        let is_same = |other: &&HolderInfo| {
            (other.token, &other.client, &other.metadata.label)
                == (holder.token, &holder.client, &holder.metadata.label)
        };
        let same = there.iter().position(is_same);
        same.map(|at| there.swap_remove(at)).is_none()
    })
}

/// Ends before grants, so that the lines of a mutex never show two holders.
fn changes<'a>(before: &'a [LockInfo], now: &'a [LockInfo]) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    for lock in before {
        let then = find(now, lock);
        changes.extend(missing(&lock.holders, then).map(|holder| Change::Ended(lock, holder)));
        if then.is_none() && !lock.waiters.is_empty() {
            changes.push(Change::Waiting(lock, 0));
        }
    }
    for lock in now {
        let earlier = find(before, lock);
        changes.extend(missing(&lock.holders, earlier).map(|holder| Change::Granted(lock, holder)));
        if lock.waiters.len() != earlier.map_or(0, |earlier| earlier.waiters.len()) {
            changes.push(Change::Waiting(lock, lock.waiters.len()));
        }
    }
    changes
}

/// Writes one line. Returns false if no program reads it any more.
fn write(change: &Change<'_>, form: Form) -> Result<bool, Stop> {
    let now = SystemTime::now();
    let line = match form {
        Form::Text => format!("{} {}\n", humantime::format_rfc3339_millis(now), printable(&text(change))),
        Form::Json => format!("{}\n", object(change, now)),
    };
    let mut out = io::stdout().lock();
    match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Stop::failure(format!("stdout can't be written: {error}"))),
    }
}

fn text(change: &Change<'_>) -> String {
    let of = |lock: &LockInfo| format!("{} {}", lock.kind, printable(&lock.name));
    let who = |holder: &HolderInfo| identity(&holder.metadata, &holder.client);
    match change {
        Change::Granted(lock, holder) => {
            format!("{}: granted to {}, token {}", of(lock), who(holder), holder.token)
        }
        Change::Ended(lock, holder) => {
            format!(
                "{}: ended after {}, token {}, {}",
                of(lock),
                span(holder.held_for),
                holder.token,
                who(holder)
            )
        }
        Change::Waiting(lock, waiting) => format!("{}: {waiting} waiting", of(lock)),
    }
}

fn object(change: &Change<'_>, now: SystemTime) -> serde_json::Value {
    let time = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let (event, lock, holder, waiting) = match change {
        Change::Granted(lock, holder) => ("granted", lock, Some(holder), lock.waiters.len()),
        Change::Ended(lock, holder) => ("ended", lock, Some(holder), lock.waiters.len()),
        Change::Waiting(lock, waiting) => ("waiting", lock, None, *waiting),
    };
    json!({
        "time_ms": u64::try_from(time).unwrap_or(u64::MAX),
        "event": event,
        "kind": lock.kind.as_str(),
        "name": lock.name,
        "waiting": waiting,
        "holder": holder.map(|holder| holder_json(holder)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_of_one_owner_in_one_client_are_counted() {
        let client = leasehold::blocking::Client::connect("memory:").unwrap();
        let mutex = client.reentrant_mutex("orders", "job-7");
        let look = || vec![client.inspect(leasehold::Kind::Mutex, "orders").unwrap()];
        let first = mutex.lock().unwrap();
        let one = look();
        let second = mutex.lock().unwrap();
        let two = look();
        assert!(matches!(changes(&one, &two)[..], [Change::Granted(..)]));
        first.release().unwrap();
        assert!(matches!(changes(&two, &look())[..], [Change::Ended(..)]));
        let labelled = client.reentrant_mutex("orders", "job-7").label("nested").lock().unwrap();
        let both = look();
        second.release().unwrap();
        let now = look();
        let [Change::Ended(_, ended)] = changes(&both, &now)[..] else { panic!("one has ended") };
        assert_eq!(ended.metadata.label, None, "the lease with a label goes on");
        drop(labelled);
    }
}
