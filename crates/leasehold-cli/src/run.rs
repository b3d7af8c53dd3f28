//! `run`: take the lock, run the command, give the lock back, and stop the command before a lost lease ends elsewhere.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{Client, Guard, Loss, Mutex};
use nix::sys::signal::Signal;

use crate::args::{OnLost, RunArgs, name};
use crate::child::{Change, Child};
use crate::command::Command;
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::signals::Signals;
use crate::store;
use crate::terminal::Terminal;
use crate::waiting;

/// The longest grace unless one is asked for.
const GRACE: Duration = Duration::from_secs(5);

/// The shortest ttl: a renewal that waits for a busy file or a slow network must fit in several times.
const MIN_TTL: Duration = Duration::from_millis(500);

/// How long giving back may take before the lease is left to run out.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

pub(crate) async fn run(url: Option<String>, args: RunArgs) -> Result<Exit, Stop> {
    let grace = grace(&args)?;
    let name = name(&args.name)?;
    let command = Command::find(&args)?;
    let failed = |error| Stop::failure(format!("signals can't be caught: {error}"));
    let mut signals = Signals::catch().map_err(failed)?;
    let client = store::connect(url).await?;
    let note = args.note.clone().unwrap_or_else(|| command.note());
    let mutex = client.mutex(name).ttl(args.ttl).at_least(args.at_least).note(note);
    let guard = match take(&mutex, &args, &mut signals).await? {
        Taken::Yes(guard) => guard,
        Taken::No => {
            leave(client).await;
            return Ok(Exit::Conflict(args.conflict_exit_code));
        }
        Taken::Interrupted(signal) => {
            leave(client).await;
            return Ok(Exit::Signal(signal as i32));
        }
    };
    hold(&guard, grace).await?;
    let exit = match Child::start(&command, &variables(&guard), Terminal::on_stdin()) {
        Ok(child) => supervise(&child, &guard, &args, grace, &mut signals).await,
        Err(error) => Err(cannot_start(&command, &error)),
    };
    give_back(guard).await;
    leave(client).await;
    exit
}

// --- Before --------------------------------------------------------------------------------------

/// The grace, if it fits between a renewal that fails and the end of the lease.
fn grace(args: &RunArgs) -> Result<Duration, Stop> {
    let ttl = args.ttl;
    if ttl < MIN_TTL || ttl > leasehold::MAX_TTL {
        let given = duration::show(ttl);
        return Err(Stop::usage(format!("--ttl is between {MIN_TTL:?} and 30 days, not {given}")));
    }
    // It is renewed at a third, and trusted for a little less than its ttl.
    let most = ttl - ttl / 3 - ttl / 50 - Duration::from_millis(10);
    let grace = args.grace.unwrap_or_else(|| GRACE.min(ttl / 3));
    if grace >= most {
        return Err(Stop::usage(format!(
            "--grace {} does not fit: with --ttl {} the lease has {} left when it is renewed, so less than that",
            duration::show(grace),
            duration::show(ttl),
            duration::show(most)
        )));
    }
    Ok(grace)
}

enum Taken {
    Yes(Guard),
    No,
    Interrupted(Signal),
}

async fn take(mutex: &Mutex, args: &RunArgs, signals: &mut Signals) -> Result<Taken, Stop> {
    let lock = async {
        match (args.no_wait, args.wait) {
            (true, _) => mutex.try_lock().await,
            (false, Some(limit)) => mutex.lock_timeout(limit).await,
            (false, None) => mutex.lock().await.map(Some),
        }
    };
    tokio::select! {
        biased;
        taken = lock => Ok(taken?.map_or(Taken::No, Taken::Yes)),
        signal = signals.next_end() => Ok(Taken::Interrupted(signal)),
        never = waiting::tell(mutex, args.verbose) => match never {},
    }
}

/// A lease that was waited for begins with a short one, in which no grace would fit.
async fn hold(guard: &Guard, grace: Duration) -> Result<(), Stop> {
    if guard.remaining() <= grace * 2 {
        guard.renew().await?;
    }
    Ok(())
}

fn variables(guard: &Guard) -> [(&'static str, String); 3] {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let deadline = (now + guard.remaining()).as_millis();
    [
        ("LEASEHOLD_NAME", guard.name().to_owned()),
        ("LEASEHOLD_TOKEN", guard.token().to_string()),
        ("LEASEHOLD_DEADLINE", format!("{}.{:03}", deadline / 1_000, deadline % 1_000)),
    ]
}

fn cannot_start(command: &Command, error: &std::io::Error) -> Stop {
    let exit = match error.kind() {
        std::io::ErrorKind::NotFound => Exit::NotFound,
        _ => Exit::NotExecutable,
    };
    Stop::new(exit, format!("{} can't be executed: {error}", command.program.display()))
}

// --- While it runs -------------------------------------------------------------------------------

/// How far ending the command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    NotYet,
    /// It was asked to end, because the lease is running out.
    Asked,
    /// The lease is gone, and only the grace is left.
    LastGrace(tokio::time::Instant),
    /// Nothing more is done about it.
    Done,
}

async fn supervise(
    child: &Child,
    guard: &Guard,
    args: &RunArgs,
    grace: Duration,
    signals: &mut Signals,
) -> Result<Exit, Stop> {
    let mut ending = Ending::NotYet;
    let mut is_lost = false;
    loop {
        // Also at the beginning: it may have ended before the first signal was waited for.
        match child
            .look()
            .map_err(|error| Stop::failure(format!("the command can't be waited for: {error}")))?
        {
            Some(Change::Ended(exit)) => return Ok(if is_lost { Exit::Lost } else { exit }),
            Some(Change::StoppedByTerminal) => child.stop_with_it(),
            None => {}
        }
        tokio::select! {
            biased;
            signal = signals.next_or_child() => match signal {
                Some(Signal::SIGCONT) => child.resume(),
                Some(signal) => child.signal(signal),
                None => {}
            },
            loss = guard.lost(), if matches!(ending, Ending::NotYet | Ending::Asked) => {
                is_lost = true;
                ending = end(child, args.on_lost, loss, ending, grace);
            },
            () = guard.expires_within(grace), if ending == Ending::NotYet && args.on_lost != OnLost::Ignore && guard.is_held() => {
                is_lost = true;
                ending = ask_to_end(child, args.on_lost, "the lease can't be renewed");
            },
            () = until(ending) => {
                eprintln!("leasehold: the grace is over: the command gets KILL");
                child.signal(Signal::SIGKILL);
                ending = Ending::Done;
            },
        }
    }
}

async fn until(ending: Ending) {
    match ending {
        Ending::LastGrace(end) => tokio::time::sleep_until(end).await,
        _ => std::future::pending().await,
    }
}

fn ask_to_end(child: &Child, on_lost: OnLost, why: &str) -> Ending {
    if on_lost == OnLost::Ignore {
        eprintln!("leasehold: {why}; the command goes on, as --on-lost ignore says");
        return Ending::Done;
    }
    eprintln!("leasehold: {why}: the command gets TERM");
    // A stopped group would only hear it later.
    child.signal(Signal::SIGTERM);
    child.signal(Signal::SIGCONT);
    if on_lost == OnLost::Kill { Ending::Asked } else { Ending::Done }
}

/// The lease is gone: there is no time left, unless nobody waited for that long, because it was taken by force.
fn end(child: &Child, on_lost: OnLost, loss: Loss, ending: Ending, grace: Duration) -> Ending {
    match (on_lost, loss, ending) {
        (OnLost::Kill, Loss::Expired | Loss::LongestHold, _) | (_, _, Ending::Asked) => {
            eprintln!("leasehold: the lease was lost: {loss}: the command gets KILL");
            child.signal(Signal::SIGKILL);
            Ending::Done
        }
        _ => match ask_to_end(child, on_lost, &format!("the lease was lost: {loss}")) {
            Ending::Asked => Ending::LastGrace(tokio::time::Instant::now() + grace),
            other => other,
        },
    }
}

// --- After ---------------------------------------------------------------------------------------

/// The command's code stays what it is, whatever happens here.
async fn give_back(guard: Guard) {
    match guard.release_within(RELEASE_LIMIT).await {
        Err(error) if !error.is_lost() => eprintln!("leasehold: {error}; the lease ends by itself"),
        _ => {}
    }
}

/// A place in the queue is withdrawn before the program ends, and the store learns that this client is gone.
async fn leave(client: Client) {
    if let Err(error) = client.close().await {
        eprintln!("leasehold: {error}");
    }
}
