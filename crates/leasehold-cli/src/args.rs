//! The arguments, and everything that is made of them: help, completions, man pages.

mod help;

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args as Arguments, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use leasehold::{FINDING_IDS, Kind};

use crate::duration;
use crate::exit::{Exit, Stop, TABLE};
use crate::text::printable;
use help::{DOCTOR, ELECT, EXAMPLES, RUN, SHOW};

/// Runs commands under distributed locks, with FIFO wait queues and leases that expire.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_long_help = after(EXAMPLES), max_term_width = 110)]
pub(crate) struct Args {
    /// Where the locks are: sqlite:PATH, redis://, or another address
    ///
    /// One of
    ///   sqlite:PATH                         a file, for the processes of a machine
    ///   redis://HOST[:PORT][/DATABASE]      one server; USER:PASSWORD@ comes before the host
    ///   rediss://...                        the same with TLS
    ///   redis+unix:///PATH                  one server, through its Unix socket
    ///   redis-sentinel://HOST,HOST/SERVICE  the master that Sentinels name
    ///   redis-cluster://HOST,HOST           a cluster
    ///   redlock://HOST,HOST,HOST            a quorum of independent servers
    ///   postgres://HOST/DATABASE            a database; postgresql: is the same
    ///   postgresql://HOST/DATABASE          PGHOST, PGUSER, PGPASSWORD, PGDATABASE and others count
    ///   memory:                             this process only; excludes no other process
    #[arg(
        long,
        verbatim_doc_comment,
        global = true,
        env = "LEASEHOLD_STORE",
        value_name = "URL",
        hide_env_values = true
    )]
    pub(crate) store: Option<String>,
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Run a command while holding a lock
    #[command(after_long_help = after(RUN))]
    Run(RunArgs),
    /// Keep a command running on exactly one of several hosts
    #[command(after_long_help = after(ELECT))]
    Elect(ElectArgs),
    /// List the locks in use
    Ls(LsArgs),
    /// Show the holders and waiters of a lock
    #[command(after_long_help = after(SHOW))]
    Show(ShowArgs),
    /// Release a lock by force
    Release(ReleaseArgs),
    /// Check the store for settings that make locks unsafe, and print the fix
    #[command(after_long_help = after(DOCTOR))]
    Doctor(DoctorArgs),
    /// Create the tables of a postgres: store, or print the statements that do
    Migrate(MigrateArgs),
    /// Kill a command's process group if leasehold is killed; leasehold starts this itself
    #[command(name = crate::watchdog::COMMAND, hide = true)]
    Watchdog,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print a man page: of leasehold, or of one of its commands
    Man {
        /// The command, run for example
        command: Option<String>,
    },
}

#[derive(Debug, Arguments)]
pub(crate) struct MigrateArgs {
    /// Print the statements, and connect to nothing
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
    #[arg(long, value_name = "CODE", default_value_t = 124)]
    pub(crate) lost_exit_code: u8,
    #[command(flatten)]
    pub(crate) kind: KindArgs,
    /// With --once-per: if the host crashes, another one starts the command again. The others wait until the command has
    /// ended, and then exit with 1
    #[arg(long, requires = "once_per")]
    pub(crate) at_least_once: bool,
    /// Hold the lock for at least this long, even if the command finishes sooner. If leasehold is killed, the lock is free
    /// after the ttl
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse, hide_default_value = true,
          allow_negative_numbers = true)]
    pub(crate) min_hold: Duration,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
}

#[derive(Debug, Arguments)]
pub(crate) struct ElectArgs {
    /// The first pause before the command is restarted. It doubles each time, until a run lasts longer than --backoff-max
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) backoff: Duration,
    /// The maximum pause
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) backoff_max: Duration,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
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
    #[arg(long, value_name = "N")]
    pub(crate) semaphore: Option<u32>,
    /// Start the command on one host per period, for example 1h; the others exit with 1 at once
    #[arg(long, value_name = "PERIOD", value_parser = duration::parse, allow_negative_numbers = true,
          conflicts_with_all = ["no_wait", "wait", "min_hold"])]
    pub(crate) once_per: Option<Duration>,
    /// Acquire the lock at once if this owner already holds it, on any host
    #[arg(long, value_name = "ID")]
    pub(crate) owner: Option<String>,
}

/// The command and its lease.
#[derive(Debug, Arguments)]
pub(crate) struct WorkArgs {
    /// Lifetime of the lease without renewal. It is renewed at a third of this
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) ttl: Duration,
    /// Action on the command when the lease is lost
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub(crate) on_lost: OnLost,
    /// If the lease can't be renewed: time from TERM to the end of the lease
    /// (at most half the ttl) [default: a third of the ttl, 5s at most]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) grace: Option<Duration>,
    /// Text that is published instead of the command line
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report progress, even if stderr is not a terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Shell command to run, instead of a program and its arguments
    #[arg(short = 'c', value_name = "SCRIPT", conflicts_with = "command")]
    pub(crate) script: Option<OsString>,
    /// The lock's name
    pub(crate) name: OsString,
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
pub(crate) struct ReleaseArgs {
    /// Confirm the release. The holder may still be working, and only tokens distinguish it from the next holder
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON: {"released": [...]}
    #[arg(long)]
    pub(crate) json: bool,
    /// The kind of lock, if several locks have this name
    #[arg(long, value_name = "KIND", value_parser = kinds())]
    pub(crate) kind: Option<Kind>,
    /// The lock's name
    pub(crate) name: OsString,
}

/// The words that stand for kinds of lock.
fn kinds() -> impl TypedValueParser<Value = Kind> {
    let words = Kind::ALL.iter().map(|kind| kind.as_str());
    PossibleValuesParser::new(words).map(|word| Kind::parse(&word).expect("one of the possible values"))
}

fn after(text: &str) -> String {
    format!("{text}\n\n{TABLE}")
}

/// A name that was typed, or what is wrong with it.
pub(crate) fn name(typed: &OsString) -> Result<&str, Stop> {
    typed.to_str().ok_or_else(|| Stop::usage(format!("a lock's name is UTF-8, {} is not", typed.display())))
}

/// What is wrong with the arguments, in one line.
pub(crate) fn complaint(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    // The usage that follows is for a screen of its own.
    let what = rendered.split("Usage:").next().unwrap_or_default().split("For more information").next();
    let words: Vec<&str> = what.unwrap_or_default().split_whitespace().collect();
    let what = words.join(" ");
    let what = printable(what.strip_prefix("error: ").unwrap_or(&what)).replace(" tip: ", "; ");
    // `flock` needs no dashes there.
    let is_about_it = matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument);
    let is_of_command = is_about_it && rendered.contains("-- <COMMAND>");
    let dashes = if is_of_command { "; the command comes after --" } else { "" };
    format!("{what}{dashes}; see leasehold --help")
}

pub(crate) fn completions(shell: Shell) -> Result<Exit, Stop> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "leasehold", &mut text);
    print(&text)
}

pub(crate) fn man(command: Option<&str>) -> Result<Exit, Stop> {
    let mut whole = Args::command();
    whole.build();
    let page = match command {
        None => whole,
        Some(name) => {
            let found = whole.find_subcommand(name).cloned();
            let unknown = || Stop::usage(format!("there is no command {name:?}: see leasehold --help"));
            let found = found.ok_or_else(unknown)?;
            found.display_name(format!("leasehold-{name}"))
        }
    };
    let mut text = Vec::new();
    let rendered = clap_mangen::Man::new(page).render(&mut text);
    rendered.map_err(|error| Stop::failure(format!("the page could not be made: {error}")))?;
    print(&text)
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
