//! Supervises the running command: forwards signals, and stops the command before its lease expires in the store.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use leasehold::Loss;
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::OnLost;
use crate::child::{Change, Child};
use crate::exit::{Exit, Stop};
use crate::held::Held;
use crate::orphans::Own;
use crate::output::{Level, message};
use crate::signals::Signals;
use crate::store::{self, Store};

/// The interval at which a group without its first process is polled. No signal reports the end of its other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) struct Supervision<'a> {
    child: &'a Child,
    guard: &'a Held,
    /// The names of the locks, and their store.
    lock: String,
    on_lost: OnLost,
    /// Started at the loss, once.
    alert: Option<Alert<'a>>,
    grace: Duration,
    ending: Ending,
    /// The lease was lost. The exit code reports that, and not the command's exit code.
    is_lost: bool,
    /// When the command is continued if no SIGCONT reaches this program.
    continue_at: Option<Instant>,
}

/// How long a command stays stopped if there is no shell to continue it. The kernel does not stop this program then.
const ORPHANED_STOP: Duration = Duration::from_millis(100);

/// The progress of ending the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    NotYet,
    /// It got TERM, because the lease can't be renewed, and gets KILL when the lease ends.
    TermSent,
    /// It got TERM, because the lease is lost, and gets KILL at this time.
    LastGrace(Instant),
    /// Nothing more is to be done.
    Done,
}

/// A change of the lease, or the end of the grace.
enum Event {
    Expiring,
    Lost(Loss),
    GraceIsOver,
}

impl<'a> Supervision<'a> {
    pub(crate) fn new(
        child: &'a Child,
        guard: &'a Held,
        lock: String,
        (on_lost, alert): (OnLost, Option<Alert<'a>>),
        grace: Duration,
    ) -> Self {
        Self {
            child,
            guard,
            lock,
            on_lost,
            alert,
            grace,
            ending: Ending::NotYet,
            is_lost: false,
            continue_at: None,
        }
    }

    /// Waits for the end of the command, and ends it if its lease is lost.
    pub(crate) async fn wait_for_exit(mut self, signals: &mut Signals) -> Result<Exit, Stop> {
        let failed = |error| Stop::failure(format!("the command can't be waited for: {error}"));
        loop {
            // Also before the first wait: the command may have ended before this listened for SIGCHLD.
            match self.child.poll_change().map_err(failed)? {
                Some(Change::Ended { exit, had_terminal }) => {
                    if had_terminal && exit.is_interrupt() {
                        signals.interrupt_job();
                    }
                    self.end_remaining_processes(signals).await;
                    return Ok(if self.is_lost { Exit::Lost } else { exit });
                }
                Some(Change::StoppedForTerminal) if self.child.lend_terminal() => self.resume(),
                Some(Change::StoppedForTerminal | Change::StoppedByKey) => {
                    self.child.stop_with_command();
                    self.continue_at = Some(Instant::now() + ORPHANED_STOP);
                }
                None => {}
            }
            let continue_at = self.continue_at;
            tokio::select! {
                biased;
                signal = signals.next_or_child() => if let Some(signal) = signal { self.forward(signal) },
                () = sleep_until(continue_at.unwrap_or_else(Instant::now)), if continue_at.is_some() => self.resume(),
                event = self.next() => self.act(&event),
            }
        }
    }

    /// Processes that the command leaves behind may continue, unless the lease is lost: then the whole group must end. A renewal may
    /// have succeeded after TERM. The lease does not end then, so the group gets KILL after the grace.
    async fn end_remaining_processes(&mut self, signals: &mut Signals) {
        if self.ending == Ending::NotYet && !self.guard.is_held() {
            let loss = self.guard.lost().await;
            self.act(&Event::Lost(loss));
        }
        let grace_ends_at = Instant::now() + self.grace;
        while matches!(self.ending, Ending::TermSent | Ending::LastGrace(_)) && self.child.has_processes() {
            tokio::select! {
                event = self.next() => self.act(&event),
                () = sleep_until(grace_ends_at), if self.ending == Ending::TermSent => self.act(&Event::GraceIsOver),
                signal = signals.next() => self.forward(signal),
                () = sleep(POLL_INTERVAL) => {}
            }
        }
    }

    fn forward(&mut self, signal: Signal) {
        match signal {
            Signal::SIGCONT => self.resume(),
            Signal::SIGTTIN => self.child.return_terminal(),
            signal => self.child.signal(signal),
        }
    }

    /// Continues a stopped command, unless its lease has ended meanwhile and it is about to be killed.
    fn resume(&mut self) {
        self.continue_at = None;
        if self.on_lost != OnLost::Kill || self.guard.is_held() {
            self.child.resume();
        }
    }

    async fn next(&self) -> Event {
        match self.ending {
            Ending::NotYet if self.on_lost == OnLost::Ignore => Event::Lost(self.guard.lost().await),
            Ending::NotYet => {
                self.guard.wait_until_expiring(self.grace).await;
                if self.guard.is_held() { Event::Expiring } else { Event::Lost(self.guard.lost().await) }
            }
            Ending::TermSent => Event::Lost(self.guard.lost().await),
            Ending::LastGrace(end) => {
                sleep_until(end).await;
                Event::GraceIsOver
            }
            Ending::Done => std::future::pending().await,
        }
    }

    fn act(&mut self, event: &Event) {
        self.is_lost = true;
        let then = match event {
            Event::Expiring => Ending::TermSent,
            _ => Ending::LastGrace(Instant::now() + self.grace),
        };
        let renewal_error = self.guard.renewal_error();
        let why = renewal_error.map_or_else(String::new, |error| format!(": {error:#}"));
        let (name, what) = match event {
            Event::Expiring => ("lease_expiring", format!("the lease can't be renewed{why}")),
            Event::Lost(loss @ Loss::Expired) => ("lease_lost", format!("the lease was lost: {loss}{why}")),
            Event::Lost(loss) => ("lease_lost", format!("the lease was lost: {loss}")),
            Event::GraceIsOver => ("grace_over", "the grace is over".to_owned()),
        };
        if let Some(alert) = self.alert.take() {
            alert.start(&what);
        }
        let lock = &self.lock;
        self.ending = match self.on_lost {
            OnLost::Ignore => {
                message(
                    Level::Error,
                    name,
                    format_args!("{lock}: {what}; the command continues, because of --on-lost ignore"),
                );
                Ending::Done
            }
            OnLost::Kill if self.must_kill(event) => {
                message(Level::Error, name, format_args!("{lock}: {what}: the command gets KILL"));
                self.child.signal(Signal::SIGKILL);
                Ending::Done
            }
            on_lost => {
                message(Level::Error, name, format_args!("{lock}: {what}: the command gets TERM"));
                self.send_term();
                if on_lost == OnLost::Kill { then } else { Ending::Done }
            }
        };
    }

    /// Another client may already hold the lock, or the command got TERM before.
    fn must_kill(&self, event: &Event) -> bool {
        let ran_out = matches!(event, Event::Lost(Loss::Expired | Loss::MaxHold | Loss::Bridge));
        ran_out || self.ending != Ending::NotYet
    }

    fn send_term(&self) {
        self.child.signal(Signal::SIGTERM);
        // A stopped group would not handle TERM before it is continued.
        self.child.signal(Signal::SIGCONT);
    }
}

/// The shell command of `--run-on-lost`. It is not part of the command's group, and the program does not wait for it.
pub(crate) struct Alert<'a> {
    script: &'a OsStr,
    names: String,
    tokens: String,
    /// The store's address without its password.
    store: String,
}

impl<'a> Alert<'a> {
    pub(crate) fn new(script: &'a OsStr, guard: &Held, store: &Store) -> Self {
        let tokens = guard.tokens().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        Self { script, names: guard.names().join("\n"), tokens, store: store.for_command() }
    }

    /// Starts it, and tells it the reason.
    pub(crate) fn start(self, loss: &str) {
        let mut alert = Command::new("/bin/sh");
        alert.arg("-c").arg(self.script).stdin(Stdio::null());
        alert
            .env("LEASEHOLD_NAME", self.names)
            .env("LEASEHOLD_TOKEN", self.tokens)
            .env(store::VARIABLE, self.store)
            .env("LEASEHOLD_LOSS", loss);
        match Own::spawn(&mut alert) {
            // Only for its exit status, which the system keeps as a zombie until it is read. `elect` may run for long.
            Ok((mut alert, own)) => {
                let wait = move || {
                    let _ = alert.wait();
                    drop(own);
                };
                let _ = thread::Builder::new().name("alert".to_owned()).spawn(wait);
            }
            Err(error) => message(
                Level::Warn,
                "alert_failed",
                format_args!("the command of --run-on-lost can't be started: {error}"),
            ),
        }
    }
}
