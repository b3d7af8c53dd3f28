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
  leasehold run report -- ./report.sh            wait for the lock, then run it
  leasehold run -n deploy -- ./deploy.sh         or exit with 1 at once
  leasehold run -w 2.5 deploy -- ./deploy.sh     or after 2.5 seconds
  leasehold run backup -c 'tar c /srv | gzip > b.tgz'
  leasehold run --once-per 1h lottery -- ./draw  on one of several hosts
  leasehold run --semaphore 3 encode -- ./encode three at a time
  leasehold run -s site -- ./crawl               beside others with -s, and
  leasehold run -x site -- ./publish             alone
  leasehold elect scheduler -- ./scheduler       on one of many hosts
  leasehold ls
  leasehold show deploy
  leasehold release --force deploy
  leasehold doctor                               check the store for unsafe settings

The store, without --store and LEASEHOLD_STORE, is a file of the user's own:
sqlite:$XDG_STATE_HOME/leasehold/locks.db, or
~/.local/state/leasehold/locks.db. So the jobs of root's cron and the shell of a
user have different stores and do not exclude each other, nor do two users. For
locks that several users share, make a directory for their group, once:
  install -d -m 2770 -o root -g GROUP /var/lib/leasehold
and name the file in each job, in crontabs too, with a umask that lets the group
write:
  umask 002; LEASEHOLD_STORE=sqlite:/var/lib/leasehold/locks.db leasehold run ...
leasehold ls, show and doctor say which store they look at.";

const RUN: &str = "\
The command gets
  LEASEHOLD_NAME      the lock's name
  LEASEHOLD_TOKEN     the fencing token: higher than that of every earlier
                      grant of this lock. Pass it to the protected resource,
                      which must refuse tokens lower than the highest it has
                      seen
  LEASEHOLD_DEADLINE  when the lease ends unless it is renewed, as it was when
                      the command started: seconds since 1970 with three
                      decimals. It is renewed at a third of its ttl for as
                      long as the command runs
  LEASEHOLD_STORE     the store's address, without its password: pass the
                      password to a nested leasehold in another way
  LEASEHOLD_TOKENS    the tokens of this run and of the enclosing ones. A nested
                      run that would wait for an enclosing one, and so for
                      itself, exits at once with 2

The command runs in a process group of its own. On a terminal it behaves as if it
were in that of leasehold: it is in the foreground from its start if leasehold is
and neither its input nor its output is a pipe; otherwise it gets the terminal as
soon as it reads from it or sets its modes, if the job is in the foreground, and
another process of the pipeline gets it back in the same way. If Ctrl-C ends the
command, it ends the job: leasehold then ends by INT itself. INT, TERM, HUP, QUIT, USR1, USR2, WINCH and TSTP that leasehold gets
go to that group, except those that were ignored when it started, as nohup
does.

If the lease can't be renewed, the group gets TERM when as much is left of the
lease as --grace says, and KILL when the lease ends. If the lock is taken away
by force, it gets TERM at once, and KILL after the grace. The exit code is 124
then, and leasehold ends only when the whole group has. With --on-lost signal
there is no KILL, and with --on-lost ignore there is no TERM either.

A command that is stopped from its terminal (Ctrl-Z) stops leasehold too; the
lease then ends after its ttl, and the command is killed when it goes on later
than that.

If leasehold is killed by KILL, so is the command (on Linux), and the lease
ends by itself after its ttl. That reaches the command itself, not its
children: with -c that is the shell. What must not outlive the lease checks
its token. Nor does it, or any other signal, reach a command that becomes
another user: write sudo leasehold run NAME -- COMMAND, and not leasehold run
NAME -- sudo COMMAND. Where COMMAND is setuid, setgid or has file capabilities,
the kernel does not kill it; a second process of leasehold does then, with its
children. It does not do so for such programs that a script calls.

Kinds of lock with the same name are different locks: a mutex (the default, also
with --owner), a rw lock (-s, -x) and a semaphore. Since that is easily forgotten,
a mutex is refused while a rw lock of the same name is in use, and the other way
round: say -x instead of nothing where others say -s.

With --once-per two starts are never closer to each other than nine tenths of
the period, by the store's clock; so all hosts may start leasehold at noon, by
clocks that differ a little. When the command ends, with whatever code, it is
done for this period. If its host crashes before that, either the period is
lost (at most once, the default), or another host starts the command again
(--at-least-once), which repeats the work.

The lock is released as soon as the command ends, even if it leaves
processes behind. The command line is visible to everyone with access to
the store; --label shows another text instead.";

const ELECT: &str = "\
Start it on every host that may run the command. One of them is elected and
runs it; the others wait. When the command ends, however that may be, its host
resigns, and the next one starts it at once. The host where it ended stands for
election again after a pause, which doubles from --backoff to --backoff-max, and
is short again once the command has run for longer than the longest pause. So
a command that fails everywhere is not started all the time. A command that
can't be started any more is tried again in the same way; one that can't be
started the first time ends leasehold, with 126 or 127.

If a host dies, its lease ends after the ttl, and the next one starts the
command. What happens when a lease is lost, what the command gets, and what
--on-lost and --grace mean is as with run: see leasehold run --help. When the
store can't be asked, the host stands for election again after 2 s at most,
whatever --backoff-max is.

INT and TERM are passed on to the command; when it has ended, leasehold resigns
and exits with the command's code. HUP, QUIT and the others are passed on too,
and leasehold continues: a command that ends is restarted as usual, and without
a command they do nothing. Where leasehold's input is a terminal,
HUP and QUIT end it as well. --label is the text that others see about the
leader: see leasehold show --kind election NAME.";

const SHOW: &str = "\
With --json it is one value, with these keys, to which later versions only add:
  store             the store's address, without its password
  kind, name        what is locked; the kinds are mutex, semaphore, rw,
                    election, latch and barrier
  capacity, in_use  1 and 1 for a mutex that is held; for a semaphore how many
                    permits there are, and are out; for a rw lock a writer
                    takes all of the capacity; for a barrier how many
                    parties there are, and have arrived; 0 if it is unused
  rounds            how many recent rounds of a barrier the store remembers,
                    otherwise null
  last_token        the last fencing token that was given, or null
  holders           a list, empty when the lock is free; each has
                    client         the random id of the holder's connection
                    token          its fencing token
                    weight         how much of the capacity it takes
                    mode           read, upgradable or write in a rw lock,
                                   otherwise null
                    owner          the named owner (run --owner), or null
                    held_for_ms    how long it has held the lock
                    expires_in_ms  how much longer, unless it renews
                    retained       true: released, but retained until then
                                   (run --min-hold)
                    metadata       host, pid, program and label, each of them
                                   a value or null
  waiters           a list, the next one first; each has client, weight,
                    mode, metadata and
                    position       1 for the next one
                    waiting_for_ms
                    skipped        true: it did not respond when the lock was
                                   free for it, and keeps its position

ls --json prints {\"store\": ..., \"locks\": [...]} of such values, and release --json
prints {\"released\": [...]} of such holders.";

const DOCTOR: &str = "\
It prints what it found, the worst first:
  danger    one lock can get two holders, or locks are unavailable
  advice    a setting could be better, or could not be read
  fine      nothing to do
In brackets is the id of the finding, which stays the same: with --accept ID, for
instance where a test's server needs no persistence, the exit code does not
depend on it. After > comes what to do about it: a line for the server's console
(redis-cli), its file, or a shell. Then comes what was seen of each server, or
of the file.

It changes no setting and leaves nothing behind. On a Redis server it takes
and releases a lock of its own to see what that costs, and tries each right
that the user needs; docs/operations.md has the whole rule, and that for
doctor itself.

With --json it is one value, with these keys, to which later versions only
add:
  store       the store's address, without its password
  dangerous   whether there is a danger that was not accepted; the exit code
              is 1 then
  components    a list: servers, sentinels, cluster, clocks, or a file. Each has
              name
              facts     what was observed: an object of texts
              findings  a list; each has
                        id        of the check that found it
                        accepted  whether --accept names the id
                        severity  danger, advice or fine
                        what      what was found
                        why       why it matters for locks
                        remedy    what to do, or null";

/// Runs commands under locks, first come, first served, with leases that end by themselves.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_long_help = after(EXAMPLES), max_term_width = 110)]
pub(crate) struct Args {
    /// Where the locks are: sqlite:PATH, redis://, or another address
    ///
    /// One of
    ///   sqlite:PATH                         a file, for the processes of a machine
    ///   redis://HOST[:PORT][/DATABASE]      one server; USER:PASSWORD@ comes before the host
    ///   rediss://...                        the same with TLS
    ///   redis+unix:///PATH                  one server, by its socket
    ///   redis-sentinel://HOST,HOST/SERVICE  the master that Sentinels name
    ///   redis-cluster://HOST,HOST           a cluster
    ///   redlock://HOST,HOST,HOST            several servers that vote
    ///   memory:                             this process alone: excludes nobody
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
    /// Kill a command's group if leasehold is killed; started by leasehold itself
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
    /// Don't wait: exit with 1 if the lock is held. Connecting to the store may take 1 s
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// Wait at most this long, then exit with 1. The time to connect counts, and may take at least 1 s
    #[arg(short, long, value_name = "SECS", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) wait: Option<Duration>,
    /// The exit code if the lock was not acquired
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub(crate) conflict_exit_code: u8,
    /// The exit code if the lease was lost
    #[arg(long, value_name = "CODE", default_value_t = 124)]
    pub(crate) lost_exit_code: u8,
    #[command(flatten)]
    pub(crate) kind: KindArgs,
    /// With --once-per: if the host crashes, another one starts the command again. The others wait until the command has
    /// ended, and then exit with 1
    #[arg(long, requires = "once_per")]
    pub(crate) at_least_once: bool,
    /// Hold the lock for at least this long, even if the command finishes sooner. If leasehold is killed, only the ttl
    /// counts
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
    /// Acquire the lock in shared mode, together with other -s; -x waits
    #[arg(short, long)]
    pub(crate) shared: bool,
    /// Acquire the lock in exclusive mode, for a lock that others share with -s
    #[arg(short = 'x', long)]
    pub(crate) exclusive: bool,
    /// Up to N holders; everyone passes the same N
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
    /// How long the lease lasts if leasehold is killed; it is renewed at a third of this
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) ttl: Duration,
    /// What happens to the command when the lease is lost
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub(crate) on_lost: OnLost,
    /// How long before the end of a lease that can't be renewed the command gets TERM
    /// (at most half the ttl) [default: a third of the ttl, 5s at most]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, allow_negative_numbers = true)]
    pub(crate) grace: Option<Duration>,
    /// The text that others see instead of the command line
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report progress, even if stderr is no terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// A command for the shell, instead of a program and its arguments
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
    /// The kind of lock, where several locks have this name
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
    /// Confirm: the holder may still be working, and only tokens distinguish it from the next one
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON: {"released": [...]}
    #[arg(long)]
    pub(crate) json: bool,
    /// The kind of lock, where several locks have this name
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
