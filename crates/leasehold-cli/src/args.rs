//! The arguments, and everything that is made of them: help, completions, man pages.

mod complaint;
mod help;
mod lease;
mod manual;
#[cfg(feature = "serve")]
mod serve;

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args as Arguments, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use leasehold::bridge::Foreign;
use leasehold::{FINDING_IDS, Kind};

use crate::duration;
use crate::exit::{Exit, Stop};
use crate::text::printable_lines;
pub(crate) use complaint::complaint;
#[cfg(feature = "serve")]
use help::SERVE;
use help::{ACQUIRE, DOCTOR, ELECT, RUN, SHOW, WATCH, overview};
pub(crate) use lease::{AcquireArgs, LeaseArgs, ReleaseArgs, RenewArgs};
pub(crate) use manual::{command, completions, help, man};
#[cfg(feature = "serve")]
pub(crate) use serve::ServeArgs;

/// Runs commands under distributed locks, with FIFO wait queues and leases that expire.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_long_help = overview(), max_term_width = 110, disable_help_subcommand = true)]
pub(crate) struct Args {
    /// Where the locks are: sqlite:PATH, redis://HOST, or another address (leasehold help stores)
    #[arg(long, global = true, env = "LEASEHOLD_STORE", value_name = "URL", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Program with its arguments that prints the store's password, for a store whose address has none. It is started without a shell, and
    /// again before what it printed expires (leasehold help stores)
    #[arg(long, global = true, value_name = "COMMAND")]
    pub(crate) auth_command: Option<String>,
    /// The form of leasehold's own messages on stderr
    #[arg(long, global = true, env = "LEASEHOLD_LOG", value_name = "FORMAT", default_value = "text")]
    pub(crate) log: LogFormat,
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    Text,
    /// An object on each line: time_ms (since 1970), level (info, warn, error), event, pid and message; about a lock also
    /// lock, kind and token (or null). Of several locks each has an object
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Run a command while holding a lock
    #[command(after_long_help = RUN)]
    Run(RunArgs),
    /// Keep a command running on exactly one of several hosts
    #[command(after_long_help = ELECT)]
    Elect(ElectArgs),
    /// List the locks in use
    Ls(LsArgs),
    /// Show the holders and waiters of a lock
    #[command(after_long_help = SHOW)]
    Show(ShowArgs),
    /// Acquire a lock for a script: print the id of the lease, and exit
    #[command(after_long_help = ACQUIRE)]
    Acquire(AcquireArgs),
    /// Renew a lease by its id
    Renew(RenewArgs),
    /// Show a lease by its id
    Status(LeaseArgs),
    /// Release a lease by its id, or a lock by force
    Release(ReleaseArgs),
    /// Watch locks as they change: a live view, or lines
    #[command(after_long_help = WATCH)]
    Watch(WatchArgs),
    /// Wait until a lock is free, without acquiring it
    Wait(WaitArgs),
    /// Exit with 0 if the store can grant a lock, for probes: acquires and releases one
    Health(HealthArgs),
    /// Check the store for settings that make locks unsafe, and print the fix
    #[command(after_long_help = DOCTOR)]
    Doctor(DoctorArgs),
    /// Create the tables of a postgres: store and renew its views, or print the statements that do
    Migrate(MigrateArgs),
    /// Serve locks over HTTP, with a dashboard and metrics
    #[cfg(feature = "serve")]
    #[command(after_long_help = SERVE)]
    Serve(ServeArgs),
    /// Kill a command's process group if leasehold is killed; leasehold starts this itself
    #[command(name = crate::watchdog::COMMAND, hide = true)]
    Watchdog,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the help of a command, the addresses of stores, or the exit codes
    Help {
        /// A command, stores, or exit-codes
        topic: Option<String>,
    },
    /// Print a man page: of leasehold, or of one of its commands
    Man {
        /// The command, run for example
        command: Option<String>,
    },
}

impl Action {
    /// Whether the answer is JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Ls(args) => args.json,
            Self::Show(args) => args.json,
            Self::Acquire(args) => args.json,
            Self::Renew(args) => args.json,
            Self::Status(args) => args.json,
            Self::Release(args) => args.json,
            Self::Watch(args) => args.json,
            Self::Health(args) => args.json,
            Self::Doctor(args) => args.json,
            _ => false,
        }
    }
}

#[derive(Debug, Arguments)]
pub(crate) struct MigrateArgs {
    /// Print the statements, for psql; needs no store, and connects to none
    #[arg(long)]
    pub(crate) print: bool,
}

#[derive(Debug, Arguments)]
pub(crate) struct RunArgs {
    /// Don't wait: exit with 1 if the lock is held. Connecting to the store may take up to 1 s
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// Wait at most this long, then exit with 1. This includes the time to connect, which may take up to 1 s in any case
    #[arg(short, long, value_name = "SECS", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) wait: Option<Duration>,
    /// Exit code if the lock was not acquired
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub(crate) conflict_exit_code: u8,
    /// Exit code if the lease was lost
    #[arg(long, value_name = "CODE", default_value_t = 124, value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) lost_exit_code: u8,
    #[command(flatten)]
    pub(crate) kind: KindArgs,
    /// Start the command on one host per period, for example 1h; the others exit with 1 at once
    #[arg(long, value_name = "PERIOD", value_parser = duration::parse, allow_negative_numbers = true,
          conflicts_with_all = ["no_wait", "wait", "min_hold", "KindArgs"])]
    pub(crate) once_per: Option<Duration>,
    /// With --once-per: if the host crashes, another one starts the command again. The others wait until the command has
    /// ended, and then exit with 1
    #[arg(long, requires = "once_per")]
    pub(crate) at_least_once: bool,
    /// Hold the lock for at least this long, even if the command finishes sooner. If leasehold is killed, the lock is free
    /// after the ttl
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse, hide_default_value = true,
          allow_negative_numbers = true)]
    pub(crate) min_hold: Duration,
    /// A lock's name, also one that begins with a dash. Repeatable
    #[arg(long = "name", value_name = "NAME", allow_hyphen_values = true)]
    pub(crate) dashed: Vec<OsString>,
    /// The names of the locks. Several mutexes are acquired together: all of them or none
    #[arg(value_name = "NAME", required_unless_present = "dashed", num_args = 1..)]
    pub(crate) typed: Vec<OsString>,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
}

impl RunArgs {
    /// All names, those of `--name` first.
    pub(crate) fn names(&self) -> Vec<&OsString> {
        self.dashed.iter().chain(&self.typed).collect()
    }

    /// Whether a kind is requested that only a single lock can have.
    pub(crate) fn is_special(&self) -> bool {
        let KindArgs { shared, exclusive, semaphore, owner } = &self.kind;
        *shared || *exclusive || semaphore.is_some() || owner.is_some() || self.once_per.is_some()
    }
}

#[derive(Debug, Arguments)]
pub(crate) struct ElectArgs {
    /// The first pause before the command is restarted, at least 100ms. It doubles each time, until a run lasts longer than
    /// --backoff-max
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) backoff: Duration,
    /// The maximum pause
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) backoff_max: Duration,
    /// The lock's name, also one that begins with a dash
    #[arg(long = "name", value_name = "NAME", allow_hyphen_values = true)]
    pub(crate) dashed: Option<OsString>,
    /// The lock's name
    #[arg(value_name = "NAME", required_unless_present = "dashed", conflicts_with = "dashed")]
    pub(crate) typed: Option<OsString>,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
}

impl ElectArgs {
    pub(crate) fn name(&self) -> Result<&OsString, Stop> {
        self.dashed.as_ref().or(self.typed.as_ref()).ok_or_else(|| Stop::usage("name a lock"))
    }
}

/// The kind of lock; a mutex by default.
#[derive(Debug, Arguments)]
#[group(multiple = false)]
pub(crate) struct KindArgs {
    /// Acquire the lock in shared mode, together with other runs that use -s
    #[arg(short, long)]
    pub(crate) shared: bool,
    /// Acquire the lock in exclusive mode, for a lock that other runs share with -s
    #[arg(short = 'x', long)]
    pub(crate) exclusive: bool,
    /// Allow up to N holders; all runs must pass the same N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) semaphore: Option<u32>,
    /// Acquire the lock at once if this owner already holds it, on any host
    #[arg(long, value_name = "ID")]
    pub(crate) owner: Option<String>,
}

impl KindArgs {
    pub(crate) fn kind(&self) -> Kind {
        match (self.semaphore, self.shared || self.exclusive) {
            (Some(_), _) => Kind::Semaphore,
            (None, true) => Kind::ReadWrite,
            (None, false) => Kind::Mutex,
        }
    }
}

/// The command and its lease.
#[derive(Debug, Arguments)]
pub(crate) struct WorkArgs {
    /// Lifetime of the lease without renewal. It is renewed at a third of this
    #[arg(long, env = "LEASEHOLD_TTL", value_name = "DURATION", default_value = "10s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) ttl: Duration,
    /// Action on the command when the lease is lost
    #[arg(long, env = "LEASEHOLD_ON_LOST", value_name = "ACTION", default_value = "kill")]
    pub(crate) on_lost: OnLost,
    /// Shell command to start when the lease is lost, or can't be renewed, for example to send an alert. It gets LEASEHOLD_NAME,
    /// LEASEHOLD_TOKEN and LEASEHOLD_LOSS (the reason). leasehold does not wait for it
    #[arg(long, value_name = "SCRIPT", env = "LEASEHOLD_RUN_ON_LOST")]
    pub(crate) run_on_lost: Option<OsString>,
    /// If the lease can't be renewed: time from TERM to the end of the lease
    /// (at most half the ttl) [default: a third of the ttl, 5s at most]
    #[arg(long, env = "LEASEHOLD_GRACE", value_name = "DURATION", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) grace: Option<Duration>,
    /// Also hold the lock of another library on the same Redis server: redisson:NAME, redis-py:NAME, redsync:NAME,
    /// node-redlock:NAME, rslock:NAME, rueidislock:NAME, bsm:KEY, pottery:NAME, python-redis-lock:NAME, dapr:APP:NAME,
    /// spring:REGISTRY:NAME, redisson-fenced:NAME, with -s or -x redisson-rw:NAME, or set-nx-px:KEY; where several servers vote: redlock:KEY@URL,URL,URL or
    /// redisson-redlock:NAME@URL,URL,URL
    #[arg(long, value_name = "LIBRARY:NAME", value_parser = bridge)]
    pub(crate) bridge: Option<Foreign>,
    /// Text that is published instead of the command line
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report progress, even if stderr is not a terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Shell command to run, instead of a program and its arguments
    #[arg(short = 'c', value_name = "SCRIPT", conflicts_with = "command")]
    pub(crate) script: Option<OsString>,
    /// The program and its arguments
    #[arg(last = true, required_unless_present = "script")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// TERM before the lease ends, KILL when it ends
    Kill,
    /// TERM before the lease ends, and no KILL
    Signal,
    /// Only report it
    Ignore,
}

#[derive(Debug, Arguments)]
pub(crate) struct LsArgs {
    /// Only locks of this kind
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    pub(crate) kind: Option<Kind>,
    /// Only locks that are waited for
    #[arg(long)]
    pub(crate) waiting: bool,
    /// Only locks with these names, in which * stands for any text, ? for a character, and [ab] for one of these. Quote it
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<OsString>,
    /// Print JSON: {"store": ..., "locks": [...]}, each lock as `show --json` prints it
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Arguments)]
pub(crate) struct ShowArgs {
    /// Print JSON; times are in milliseconds
    #[arg(long)]
    pub(crate) json: bool,
    /// The kind of lock, if several locks have this name
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    pub(crate) kind: Option<Kind>,
    /// The lock's name
    pub(crate) name: OsString,
}

#[derive(Debug, Arguments)]
pub(crate) struct DoctorArgs {
    /// Accept a finding: it is printed at the end and does not affect the exit code. Repeatable
    #[arg(long, value_name = "ID", value_parser = PossibleValuesParser::new(FINDING_IDS), hide_possible_values = true)]
    pub(crate) accept: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Arguments)]
pub(crate) struct WatchArgs {
    /// Print each change as a line; the default if stdout is not a terminal
    #[arg(long, conflicts_with = "json")]
    pub(crate) plain: bool,
    /// Print each change as a JSON object on a line
    #[arg(long)]
    pub(crate) json: bool,
    /// The time between two refreshes. Each of them reads all locks in use
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) interval: Duration,
    /// Only the locks of this name
    pub(crate) name: Option<OsString>,
}

#[derive(Debug, Arguments)]
pub(crate) struct WaitArgs {
    /// Wait at most this long, then exit with 1
    #[arg(short, long, value_name = "SECS", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) wait: Option<Duration>,
    /// The kind of lock; otherwise all locks of this name must be free
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    pub(crate) kind: Option<Kind>,
    /// The lock's name
    pub(crate) name: OsString,
}

#[derive(Debug, Arguments)]
pub(crate) struct HealthArgs {
    /// The maximum duration, with the time to connect
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) timeout: Duration,
    /// Print JSON: the store, the time to connect, and the time of the lock and its release, in milliseconds
    #[arg(long)]
    pub(crate) json: bool,
}

/// The words that stand for kinds of lock.
fn kinds() -> impl TypedValueParser<Value = Kind> {
    let words = Kind::ALL.iter().map(|kind| kind.as_str());
    PossibleValuesParser::new(words).map(|word| Kind::parse(&word).expect("one of the possible values"))
}

/// The lock of another library.
fn bridge(typed: &str) -> Result<Foreign, leasehold::Error> {
    typed.parse()
}

/// A name that was typed, or what is wrong with it.
pub(crate) fn name(typed: &OsString) -> Result<&str, Stop> {
    typed.to_str().ok_or_else(|| Stop::usage(format!("a lock's name is UTF-8, {} is not", typed.display())))
}

/// Writes text for people to stdout. Parts of it come from other clients, such as names.
pub(crate) fn print_text(text: &str) -> Result<Exit, Stop> {
    print(printable_lines(text).as_bytes())
}

/// Writes to stdout. A closed pipe is no failure.
pub(crate) fn print(text: &[u8]) -> Result<Exit, Stop> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Stop::failure(format!("stdout can't be written: {error}")))
        }
        _ => Ok(Exit::Success),
    }
}
