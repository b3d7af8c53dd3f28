//! `run`: acquires the lock, runs the command, releases the lock.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::Client;
use nix::sys::signal::Signal;
use tokio::time::Instant;

use crate::args::{RunArgs, WorkArgs, name};
use crate::auth;
use crate::child::Child;
use crate::command::Command;
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::held::Held;
use crate::lock::Lock;
use crate::nested;
use crate::notify;
use crate::output::{self, Level, message};
use crate::progress;
use crate::signals::Signals;
use crate::store::{self, Store};
use crate::supervise::{Alert, Supervision};
use crate::text::printable;

/// Max grace if `--grace` is not given.
const GRACE: Duration = Duration::from_secs(5);

/// The shortest ttl: a renewal that waits for a busy file or a slow network must fit in several times.
const MIN_TTL: Duration = Duration::from_millis(500);

/// How long a release is retried before the lease is left to expire.
pub(crate) const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the program waits for the client to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The minimum time limit for connecting: `-w 0.1` limits the wait for the lock, and not that for the store.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The same behind sentinels: those that hang are waited for during 3 s.
const MIN_SENTINEL_CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// The time limit for connecting, if the lock is waited for during `limit`. A program that gives credentials has its own time, for the
/// sentinels and then for the server.
pub(crate) fn connect_limit(store: &Store, limit: Duration) -> Duration {
    let url = store.url();
    let hosts =
        url.split_once("//").map_or("", |(_, rest)| rest.split(['/', '?']).next().unwrap_or_default());
    // Several hosts are tried one after the other.
    let logins = 1 + u32::try_from(hosts.matches(',').count()).unwrap_or(u32::MAX).min(9);
    let (shortest, logins) = match url.contains("redis-sentinel:") {
        true => (MIN_SENTINEL_CONNECT_TIMEOUT, logins + 1),
        false => (MIN_CONNECT_TIMEOUT, logins),
    };
    limit.max(shortest + if store.has_auth_command() { auth::LIMIT * logins } else { Duration::ZERO })
}

pub(crate) async fn run(find: impl FnOnce() -> Result<Store, Stop>, args: RunArgs) -> Result<Exit, Stop> {
    let work = &args.work;
    let grace = grace(work, args.kind.shared)?;
    if args.names().len() > 1 && args.is_special() {
        return Err(Stop::usage(
            "several names are acquired as mutexes: leave out -s, -x, --semaphore, --owner and --once-per",
        ));
    }
    for typed in args.names() {
        name(typed)?;
    }
    output::set_locks(Some(args.kind.kind()), args.names().into_iter().map(|name| name.to_string_lossy()));
    let command = Command::find(work)?;
    let mut signals = Signals::catch().map_err(|error| cannot_catch(&error))?;
    let limit = if args.no_wait { Duration::ZERO } else { args.wait.unwrap_or(Duration::MAX) };
    let (store, began) = (find()?, Instant::now());
    let client = match connect(&store, connect_limit(&store, limit), &mut signals).await? {
        Connected::Yes(client) => client,
        Connected::Interrupted(signal) => return Ok(Exit::Signal(signal as i32)),
    };
    let label = work.label.clone().unwrap_or_else(|| command.label());
    let lock = Lock::new(&client, &args, &label)?;
    let job = Job { command: &command, work, grace, store: &store };
    let left = left_of(limit, began.elapsed());
    let exit = match acquire(&lock, left, work.verbose, &mut signals).await {
        Ok(Acquired::Granted(guard)) => job.run_and_release(guard, &mut signals).await,
        Ok(Acquired::NotGranted) => {
            progress::explain_conflict(&lock, work.verbose).await;
            Ok(Exit::Conflict(args.conflict_exit_code))
        }
        Ok(Acquired::Interrupted(signal)) => Ok(Exit::Signal(signal as i32)),
        Err(stop) => Err(stop),
    };
    close(client).await;
    exit.map(|exit| match exit {
        Exit::Lost => Exit::LostAs(args.lost_exit_code),
        other => other,
    })
}

/// What is left of a limit after the time that it took to connect. If that is less than a round trip may take, the lock is asked for
/// without a wait: the limit would pass before the answer, also for a free lock.
pub(crate) fn left_of(limit: Duration, connecting: Duration) -> Duration {
    let left = limit.saturating_sub(connecting);
    if left < connecting.min(MIN_CONNECT_TIMEOUT) { Duration::ZERO } else { left }
}

/// A command to run under a lock.
pub(crate) struct Job<'a> {
    pub(crate) command: &'a Command,
    pub(crate) work: &'a WorkArgs,
    pub(crate) grace: Duration,
    pub(crate) store: &'a Store,
}

impl Job<'_> {
    pub(crate) async fn run_and_release(&self, guard: Held, signals: &mut Signals) -> Result<Exit, Stop> {
        let exit = self.run_under(&guard, signals).await;
        let alert = self.alert(&guard);
        match release_and_report(guard, self.work.verbose).await {
            Released::Yes => return exit,
            // The lock stays taken: the command's success is not all that is to be known.
            Released::Refused => return exit.map(|exit| if exit == SUCCESS { Exit::Failure } else { exit }),
            Released::Lost => {}
        }
        // Otherwise it was started when the supervision found the loss.
        if let Some(alert) = alert.filter(|_| !matches!(exit, Ok(Exit::Lost))) {
            alert.start("the lease was lost: its release found it ended");
        }
        exit.map(|_| Exit::Lost)
    }

    fn alert(&self, guard: &Held) -> Option<Alert<'_>> {
        self.work.run_on_lost.as_deref().map(|script| Alert::new(script, guard, self.store))
    }

    /// Runs the command. On return this process has the terminal again.
    async fn run_under(&self, guard: &Held, signals: &mut Signals) -> Result<Exit, Stop> {
        let child = self.start(guard, signals).await.inspect_err(|_| guard.forget_min_hold())?;
        notify::ready();
        let lock = format!("{} on {}", describe(guard), printable(&self.store.public_url()));
        let on_lost = (self.work.on_lost, self.alert(guard));
        Supervision::new(&child, guard, lock, on_lost, self.grace).wait_for_exit(signals).await
    }

    async fn start(&self, guard: &Held, signals: &mut Signals) -> Result<Child, Stop> {
        make_room(guard, self.grace).await?;
        signals.catch_stop().map_err(|error| cannot_catch(&error))?;
        // The status line must be cleared before the command writes.
        output::flush();
        Child::start(self.command, &variables(guard, self.store), signals.found_mask())
            .map_err(|error| cannot_start(self.command, &error))
    }
}

pub(crate) fn cannot_catch(error: &io::Error) -> Stop {
    Stop::failure(format!("signals can't be caught: {error}"))
}

// --- Before --------------------------------------------------------------------------------------

/// The grace, if it fits between the renewal, at a third of the ttl, and the end of the lease. A sixth of the ttl is left
/// to a renewal that is slow or fails at first: that alone must not end the command.
pub(crate) fn grace(work: &WorkArgs, is_shared: bool) -> Result<Duration, Stop> {
    let ttl = work.ttl;
    if ttl < MIN_TTL || ttl > leasehold::MAX_TTL {
        let given = duration::show(ttl);
        return Err(Stop::usage(format!("--ttl is between {MIN_TTL:?} and 30 days, not {given}")));
    }
    let bridge = work.bridge.as_ref().filter(|_| is_shared);
    let renewed_for = bridge.map_or(ttl, |bridge| bridge.reader_ttl(ttl));
    let most = renewed_for / 2;
    let grace = work.grace.unwrap_or_else(|| GRACE.min(ttl / 3));
    if grace <= most {
        return Ok(grace);
    }
    let why = if renewed_for < ttl {
        format!(
            "is too long: with -s and this --bridge, the lease is renewed for {renewed_for:?} at a time, so the grace"
        )
    } else {
        format!("does not fit into --ttl {ttl:?}: it")
    };
    Err(Stop::usage(format!("--grace {grace:?} {why} is at most half of it, {most:?}")))
}

pub(crate) enum Connected {
    Yes(Client),
    Interrupted(Signal),
}

pub(crate) async fn connect(
    store: &Store,
    limit: Duration,
    signals: &mut Signals,
) -> Result<Connected, Stop> {
    tokio::select! {
        biased;
        client = store.connect_within(limit) => Ok(Connected::Yes(client?)),
        signal = signals.next_end() => Ok(Connected::Interrupted(signal)),
    }
}

pub(crate) enum Acquired {
    Granted(Held),
    NotGranted,
    Interrupted(Signal),
}

pub(crate) async fn acquire(
    lock: &Lock,
    limit: Duration,
    is_verbose: bool,
    signals: &mut Signals,
) -> Result<Acquired, Stop> {
    let began = Instant::now();
    output::set_tokens(&[]);
    let acquired = tokio::select! {
        biased;
        acquired = lock.acquire(limit) => acquired?.map_or(Acquired::NotGranted, Acquired::Granted),
        signal = signals.next_end() => Acquired::Interrupted(signal),
        stop = nested::until_self_deadlock(lock) => return Err(stop),
        never = progress::show(lock, is_verbose) => match never {},
    };
    if let Acquired::Granted(guard) = &acquired {
        output::set_tokens(&guard.tokens());
    }
    if let Acquired::Granted(guard) = &acquired
        && is_verbose
    {
        let (what, waited) = (describe(guard), duration::show(began.elapsed()));
        let tokens = guard.tokens().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        message(Level::Info, "acquired", format_args!("acquired {what} after {waited}, token {tokens}"));
    }
    Ok(acquired)
}

/// The quoted names.
fn describe(guard: &Held) -> String {
    let names: Vec<_> = guard.names().iter().map(|name| format!("\"{}\"", printable(name))).collect();
    names.join(", ")
}

/// Renews a lease that is too short for the grace: a lease granted after a wait begins with 3 s.
async fn make_room(guard: &Held, grace: Duration) -> Result<(), Stop> {
    if guard.remaining() <= grace * 2 {
        guard.renew().await?;
    }
    Ok(())
}

fn variables(guard: &Held, store: &Store) -> Vec<(&'static str, String)> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let deadline = (now + guard.remaining()).as_millis();
    let (names, tokens) = (guard.names(), guard.tokens());
    vec![
        ("LEASEHOLD_NAME", names.join("\n")),
        ("LEASEHOLD_TOKEN", tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
        ("LEASEHOLD_DEADLINE", format!("{}.{:03}", deadline / 1_000, deadline % 1_000)),
        (store::VARIABLE, store.for_command()),
        nested::variable(&guard.lease_tokens()),
    ]
}

fn cannot_start(command: &Command, error: &io::Error) -> Stop {
    let exit = match error.kind() {
        io::ErrorKind::NotFound => Exit::NotFound,
        _ => Exit::NotExecutable,
    };
    Stop::new(exit, format!("{} can't be executed: {error}", command.program.display()))
}

// --- After ---------------------------------------------------------------------------------------

/// How a release ended that changes the exit code.
#[derive(PartialEq)]
enum Released {
    /// The lock is free, or is free once the lease ends, because the store does not respond.
    Yes,
    Lost,
    /// The store refused the release.
    Refused,
}

/// The exit code of a command that has succeeded.
const SUCCESS: Exit = Exit::Command(0);

/// Releases the lease.
async fn release_and_report(guard: Held, is_verbose: bool) -> Released {
    let what = describe(&guard);
    let Err(error) = guard.release_timeout(RELEASE_TIMEOUT).await else {
        if is_verbose {
            message(Level::Info, "released", format_args!("released {what}"));
        }
        return Released::Yes;
    };
    if error.is_lost() {
        if is_verbose {
            message(Level::Error, "lease_lost", &error);
        }
        return Released::Lost;
    }
    if error.is_refused() {
        let what = format_args!("{error:#}; the lease was not released, and expires by itself");
        message(Level::Error, "release_failed", what);
        return Released::Refused;
    }
    let then = if error.is_timeout() { "; the lease expires by itself" } else { "" };
    message(Level::Warn, "release_failed", format_args!("{error:#}{then}"));
    Released::Yes
}

/// Cancels a wait in the queue and closes the client. An unresponsive store must not delay the exit until its leases expire.
pub(crate) async fn close(client: Client) {
    let closing = client.clone();
    match tokio::time::timeout(CLOSE_TIMEOUT, closing.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => message(Level::Warn, "close_failed", error),
        Err(_) => {
            let refusal = client.refusal().map(|refusal| format!("{refusal:#}"));
            let why = refusal.as_deref().unwrap_or("the store does not respond");
            let what = format_args!("{why}; this program's leases expire by themselves");
            message(Level::Warn, "close_failed", what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_that_is_almost_over_when_connected_is_no_wait() {
        let left = |limit, connecting| {
            left_of(Duration::from_millis(limit), Duration::from_millis(connecting)).as_millis()
        };
        assert_eq!([left(0, 10), left(200, 200), left(220, 200)], [0; 3]);
        assert_eq!([left(400, 200), left(5_000, 1_500), left(2_600, 1_500)], [200, 3_500, 1_100]);
        assert_eq!(left(2_000, 1_500), 0);
    }
}
