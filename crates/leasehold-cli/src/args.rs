//! The arguments, and everything that is made of them: help, completions, man pages.

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

const EXAMPLES: &str = "\
Examples:
  leasehold run report -- ./report.sh            wait for the lock, then run
  leasehold run -n deploy -- ./deploy.sh         exit with 1 if the lock is held
  leasehold run -w 2.5 deploy -- ./deploy.sh     wait up to 2.5 seconds
  leasehold run backup -c 'tar c /srv | gzip > b.tgz'
  leasehold run --once-per 1h lottery -- ./draw  on one of several hosts
  leasehold run --semaphore 3 encode -- ./encode three at a time
  leasehold run -s site -- ./crawl               shared with other runs with -s
  leasehold run -x site -- ./publish             exclusive
  leasehold elect scheduler -- ./scheduler       on one of many hosts
  leasehold ls
  leasehold show deploy
  leasehold release --force deploy
  leasehold doctor                               check the store for unsafe settings

Without --store and LEASEHOLD_STORE, the store is a file of the current user:
sqlite:$XDG_STATE_HOME/leasehold/locks.db, or
~/.local/state/leasehold/locks.db. Two users therefore have different stores and
do not exclude each other, and neither do the jobs of root's cron and your shell.
For locks that several users share, create a directory for their group once:
  install -d -m 2770 -o root -g GROUP /var/lib/leasehold
Then name the file in each job, also in crontabs:
  LEASEHOLD_STORE=sqlite:/var/lib/leasehold/locks.db leasehold run ...
leasehold ls, show and doctor print the address of their store.";

const RUN: &str = "\
The command gets
  LEASEHOLD_NAME      the lock's name
  LEASEHOLD_TOKEN     the fencing token: higher than that of every earlier
                      grant of this lock. Pass it to the protected resource,
                      which must refuse tokens lower than the highest it has
                      seen
  LEASEHOLD_DEADLINE  when the lease would expire, as known when the command
                      started: seconds since 1970 with three decimals. While
                      the command runs, the lease is renewed at a third of
                      its ttl
  LEASEHOLD_STORE     the store's address, without its password: pass the
                      password to a nested leasehold in another way
  LEASEHOLD_TOKENS    the tokens of this run and of the enclosing runs. If a
                      nested run would wait for an enclosing one, it exits at
                      once with 2

The command runs in its own process group. On a terminal it behaves as if it were
in leasehold's group. If leasehold is in the foreground, and neither its input
nor its output is a pipe, the command is in the foreground from its start.
Otherwise, if the job is in the foreground, the command gets the terminal when it
reads from it or sets its modes. Another process of the pipeline gets the
terminal back in the same way. If Ctrl-C ends the command, it also ends the job:
leasehold then ends by INT itself.

leasehold forwards INT, TERM, HUP, QUIT, USR1, USR2, WINCH and TSTP to the
command's group. A signal that was ignored when leasehold started, as by nohup,
is not forwarded.

If the lease can't be renewed, the group gets TERM when the time left reaches
--grace, and KILL when the lease expires. If the lock is released by force, the
group gets TERM at once, and KILL after --grace. In both cases the exit code is
124, and leasehold ends only when the whole group has ended. With --on-lost signal
there is no KILL. With --on-lost ignore there is neither TERM nor KILL.

If a command is stopped from its terminal (Ctrl-Z), leasehold stops too, and the
lease expires after its ttl. If the command is continued after that, it is killed.

If leasehold is killed by KILL, the command is killed too (on Linux), and the
lease expires after its ttl. The children of the command are not killed; with -c
the command is the shell. If work must not outlive the lease, the protected
resource must check its token. Neither KILL nor another signal reaches a command
that runs as another user: use sudo leasehold run NAME -- COMMAND instead of
leasehold run NAME -- sudo COMMAND. If COMMAND is setuid, setgid or has file
capabilities, the kernel does not kill it. A second process of leasehold then
kills it with its children. This does not cover such programs in a script.

Kinds of lock with the same name are different locks: a mutex (the default, also
with --owner), a rw lock (-s, -x) and a semaphore. To prevent mistakes, a mutex is
refused while a rw lock of the same name is in use, and the reverse. Use -x for
the exclusive mode of a lock that other runs share with -s.

With --once-per, two starts are at least nine tenths of the period apart, by the
store's clock. All hosts can therefore start leasehold at noon, even if their
clocks differ a little. When the command ends, with any exit code, the period is
used up. If its host crashes before that, the period is lost (at most once, the
default), or another host starts the command again (--at-least-once), which
repeats the work.

The lock is released as soon as the command ends, even if the command leaves
processes behind. All users of the store can see the command line. --label
replaces it with another text.";

const ELECT: &str = "\
Start it on every host that may run the command. One host is elected and runs the
command; the others wait. When the command ends, with any exit code, its host
resigns, and the next host starts the command at once. The host where it ended
campaigns again after a pause. The pause doubles from --backoff to --backoff-max,
so a command that fails on every host is not restarted continuously. After a run
of more than --backoff-max, the pause is --backoff again. If the command can't be
started any more, leasehold retries in the same way. If the command can't be
started the first time, leasehold exits with 126 or 127.

If a host dies, its lease expires after the ttl, and the next host starts the
command. The environment of the command, the handling of a lost lease, --on-lost
and --grace are the same as for run: see leasehold run --help. If the store is
unavailable, the host campaigns again after at most 2 s, whatever --backoff-max.

INT and TERM are forwarded to the command. When it has ended, leasehold resigns
and exits with the command's code. Other signals, such as HUP and QUIT, are
forwarded too, but leasehold continues: if the command ends, it is restarted as
usual. While no command runs, these signals have no effect. If leasehold's input
is a terminal, HUP and QUIT also end leasehold. --label is the text that
leasehold show --kind election NAME prints for the leader.";

const SHOW: &str = "\
With --json the output is one value with these keys. Later versions may add keys:
  store             the store's address, without its password
  kind, name        the lock; the kinds are mutex, semaphore, rw, election,
                    latch and barrier
  capacity, in_use  both 1 for a mutex that is held. For a semaphore, its
                    permits and the granted ones. For a rw lock, a writer
                    uses the whole capacity. For a barrier, its parties and
                    the arrived ones. 0 if the lock is unused
  rounds            the number of recent rounds of a barrier that the store
                    remembers, otherwise null
  last_token        the last fencing token that was granted, or null
  holders           a list, empty if the lock is free; each has
                    client         the random id of the holder's client
                    token          its fencing token
                    weight         its share of the capacity
                    mode           read, upgradable or write for a rw lock,
                                   otherwise null
                    owner          the named owner (run --owner), or null
                    held_for_ms    the time since the grant
                    expires_in_ms  the time until the lease expires unless it
                                   is renewed
                    retained       true: the lock was released, but is
                                   retained until it expires (run --min-hold)
                    metadata       host, pid, program and label, each of them
                                   a value or null
  waiters           a list in queue order; each has client, weight, mode,
                    metadata and
                    position       1 for the next waiter
                    waiting_for_ms the time since it was queued
                    skipped        true: its client was unreachable. The
                                   waiter keeps its position

ls --json prints {\"store\": ..., \"locks\": [...]} with such values. release --json
prints {\"released\": [...]} with such holders.";

const DOCTOR: &str = "\
It prints its findings, the most severe first:
  danger    one lock can get two holders, or locks are unavailable
  advice    a setting should be improved, or could not be read
  fine      nothing to do
The id of each finding is in brackets, and is the same in later versions. With
--accept ID the exit code does not depend on that finding, for example if a test
server needs no persistence. The line after > is the fix: a command for the
server's console (redis-cli), its configuration file, or a shell. The observed
facts about each server, or about the file, follow.

It changes no setting and leaves nothing behind. On a Redis server it acquires
and releases a test lock to measure the cost, and tests each right that the user
needs. docs/operations.md lists these rights, and those of doctor itself.

With --json the output is one value with these keys. Later versions may add keys:
  store       the store's address, without its password
  dangerous   whether there is a danger that was not accepted; the exit code
              is 1 in that case
  components  a list: servers, sentinels, cluster, clocks, or a file. Each has
              name
              facts     what was observed: an object of texts
              findings  a list; each has
                        id        the id of the check
                        accepted  whether --accept names the id
                        severity  danger, advice or fine
                        what      what was found
                        why       why it matters for locks
                        remedy    the fix, or null";

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
