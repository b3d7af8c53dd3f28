//! `elect`: keep a command running on exactly one of many hosts.

use std::mem::replace;
use std::time::Duration;

use leasehold::Kind;
use nix::sys::signal::Signal;
use tokio::time::Instant;

use crate::args::{ElectArgs, name};
use crate::command::Command;
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::lock::Lock;
use crate::output::{self, Level, message};
use crate::run::{Acquired, Connected, Job, acquire, cannot_catch, close, connect, grace};
use crate::signals::Signals;
use crate::store::Store;

/// The longest pause after the store was unavailable.
const MAX_OUTAGE_PAUSE: Duration = Duration::from_secs(2);

/// After an outage of this length the store is opened anew: a file may have been removed, or tables dropped, which the client had opened.
const LONG_OUTAGE: Duration = Duration::from_secs(10);

/// How long the old client does not campaign while a new one connects.
const RECONNECT_LIMIT: Duration = Duration::from_secs(5);

pub(crate) async fn elect(find: impl FnOnce() -> Result<Store, Stop>, args: ElectArgs) -> Result<Exit, Stop> {
    let work = &args.work;
    let grace = grace(work, false)?;
    output::set_locks(Some(Kind::Election), [name(args.name()?)?]);
    let command = Command::find(work)?;
    let mut signals = Signals::catch_of_a_service().map_err(|error| cannot_catch(&error))?;
    let store = find()?;
    let label = work.label.clone().unwrap_or_else(|| command.label());
    let job = Job { command: &command, work, grace, store: &store };
    let mut pauses = Pauses::new(&args);
    let mut client = match connect_repeatedly(&store, &args, &mut signals).await? {
        Connected::Yes(client) => client,
        Connected::Interrupted(signal) => return Ok(Exit::Signal(signal as i32)),
    };
    let mut failing_since = None;
    let exit = loop {
        let lock = Lock::leadership(&client, args.name()?, work, &label)?;
        let campaigned = campaign_repeatedly(&lock, &job, &mut pauses, &mut failing_since, &mut signals);
        if let Some(ended) = campaigned.await.transpose() {
            break ended;
        }
        let interrupted = match connect(&store, RECONNECT_LIMIT, &mut signals).await {
            Ok(Connected::Yes(newer)) => {
                failing_since = None;
                close(replace(&mut client, newer)).await;
                None
            }
            Ok(Connected::Interrupted(signal)) => Some(signal),
            // The old one goes on, with the certificates that it has read last: a file that the address names may just be being replaced.
            Err(stop) => pause(&stop.message, pauses.outages.after(Duration::ZERO), &mut signals).await,
        };
        if let Some(signal) = interrupted {
            break Ok(Exit::Signal(signal as i32));
        }
    };
    close(client).await;
    exit
}

/// Connects to a store that may be started after this program.
async fn connect_repeatedly(
    store: &Store,
    args: &ElectArgs,
    signals: &mut Signals,
) -> Result<Connected, Stop> {
    let mut outages = outages(args);
    loop {
        match connect(store, Duration::MAX, signals).await {
            Err(stop) if stop.exit == Exit::Failure => {
                if let Some(signal) = pause(&stop.message, outages.after(Duration::ZERO), signals).await {
                    return Ok(Connected::Interrupted(signal));
                }
            }
            connected => return connected,
        }
    }
}

/// An unavailable store is no fault of the command, so the pauses after it stay short.
fn outages(args: &ElectArgs) -> Backoff {
    Backoff::new(args.backoff, args.backoff_max.min(MAX_OUTAGE_PAUSE))
}

/// Reports why there is a pause, and returns the signal that ends it and this program.
async fn pause(what: &str, pause: Duration, signals: &mut Signals) -> Option<Signal> {
    message(Level::Warn, "retry", format_args!("{what}; campaigning again in {}", duration::show(pause)));
    tokio::select! {
        () = tokio::time::sleep(pause) => None,
        signal = signals.next_end() => Some(signal),
    }
}

/// The pauses between two campaigns.
struct Pauses {
    outages: Backoff,
    failures: Backoff,
    /// The command could be started before, so its file may just be being replaced when it can't be.
    has_run: bool,
}

impl Pauses {
    fn new(args: &ElectArgs) -> Self {
        let failures = Backoff::new(args.backoff, args.backoff_max);
        Self { outages: outages(args), failures, has_run: false }
    }
}

/// Campaigns until the program ends, or until the client has failed for so long that a new one may do better: then there is no exit.
async fn campaign_repeatedly(
    lock: &Lock,
    job: &Job<'_>,
    pauses: &mut Pauses,
    failing_since: &mut Option<Instant>,
    signals: &mut Signals,
) -> Result<Option<Exit>, Stop> {
    loop {
        let (wait, what) = match campaign(lock, job, signals).await {
            Ok(Term::Interrupted(exit)) => return Ok(Some(exit)),
            Ok(Term::Served { exit, ran_for }) => {
                pauses.has_run = true;
                *failing_since = None;
                if signals.is_end_requested() {
                    return Ok(Some(exit));
                }
                let backoff = if exit == Exit::Lost { &mut pauses.outages } else { &mut pauses.failures };
                (backoff.after(ran_for), format!("the command ended: {exit}"))
            }
            Err(stop) => match stop.exit {
                Exit::Failure => {
                    if failing_since.get_or_insert_with(Instant::now).elapsed() > LONG_OUTAGE {
                        return Ok(None);
                    }
                    (pauses.outages.after(Duration::ZERO), stop.message)
                }
                Exit::NotFound | Exit::NotExecutable if pauses.has_run => {
                    (pauses.failures.after(Duration::ZERO), stop.message)
                }
                // An error at the first start is permanent.
                _ => return Err(stop),
            },
        };
        if let Some(signal) = pause(&what, wait, signals).await {
            return Ok(Some(Exit::Signal(signal as i32)));
        }
    }
}

/// One term as the leader.
enum Term {
    Served { exit: Exit, ran_for: Duration },
    Interrupted(Exit),
}

async fn campaign(lock: &Lock, job: &Job<'_>, signals: &mut Signals) -> Result<Term, Stop> {
    let guard = match acquire(lock, Duration::MAX, job.work.verbose, signals).await? {
        Acquired::Granted(guard) => guard,
        Acquired::NotGranted => return Err(Stop::failure("the election ended without a leader")),
        Acquired::Interrupted(signal) => return Ok(Term::Interrupted(Exit::Signal(signal as i32))),
    };
    let began = Instant::now();
    let exit = job.run_and_release(guard, signals).await?;
    Ok(Term::Served { exit, ran_for: began.elapsed() })
}

/// The shortest pause before the command is restarted: `--backoff 0` must not restart a failing command hundreds of times a second.
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Pauses that double.
struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    fn new(first: Duration, most: Duration) -> Self {
        let most = most.max(MIN_PAUSE);
        let first = first.clamp(MIN_PAUSE, most);
        Self { first, most, next: first }
    }

    /// The pause after a command that ran for this long.
    fn after(&mut self, ran_for: Duration) -> Duration {
        if ran_for > self.most {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.most);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_its_maximum_and_resets_after_a_long_run() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(5));
        let pauses: Vec<_> = (0..4).map(|_| backoff.after(seconds(5)).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 5]);
        assert_eq!(backoff.after(seconds(6)), seconds(1));
        assert_eq!(Backoff::new(seconds(9), seconds(5)).after(seconds(0)), seconds(5));
        for (first, most) in
            [(seconds(0), seconds(0)), (seconds(0), seconds(5)), (Duration::from_millis(1), seconds(1))]
        {
            let mut backoff = Backoff::new(first, most);
            assert!((0..3).all(|_| backoff.after(seconds(0)) >= MIN_PAUSE), "{first:?}, {most:?}");
        }
    }
}
