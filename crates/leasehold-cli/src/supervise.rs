//! The command while it runs: signals are passed on, and a lost lease stops it before the lease ends elsewhere.

use std::time::Duration;

use leasehold::{Guard, Loss};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::OnLost;
use crate::child::{Change, Child};
use crate::exit::{Exit, Stop};
use crate::output::message;
use crate::signals::Signals;

/// How often a group is looked at whose first process has ended: nobody tells when the others do.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) struct Supervision<'a> {
    child: &'a Child,
    guard: &'a Guard,
    on_lost: OnLost,
    grace: Duration,
    ending: Ending,
    /// Then the command's own exit code says nothing.
    is_lost: bool,
    /// When the command is continued although nobody continued this program.
    continue_at: Option<Instant>,
}

/// How long a command stays stopped where no shell continues it: the kernel does not stop this program then.
const ORPHANED_STOP: Duration = Duration::from_millis(100);

/// How far ending the command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    NotYet,
    /// It got TERM, because the lease is running out, and gets KILL when that ends.
    Asked,
    /// It got TERM, because the lease is gone, and gets KILL then.
    LastGrace(Instant),
    /// Nothing more is done about it.
    Done,
}

/// What has happened to the lease.
enum Event {
    RunningOut,
    Lost(Loss),
    GraceIsOver,
}

impl<'a> Supervision<'a> {
    pub(crate) fn new(child: &'a Child, guard: &'a Guard, on_lost: OnLost, grace: Duration) -> Self {
        Self { child, guard, on_lost, grace, ending: Ending::NotYet, is_lost: false, continue_at: None }
    }

    /// Waits for the end of the command, and sees to it that it comes in time.
    pub(crate) async fn until_ended(mut self, signals: &mut Signals) -> Result<Exit, Stop> {
        let failed = |error| Stop::failure(format!("the command can't be waited for: {error}"));
        loop {
            // Also at the beginning: it may have ended before the first signal was waited for.
            match self.child.look().map_err(failed)? {
                Some(Change::Ended { exit, had_terminal }) => {
                    if had_terminal && exit.is_interrupt() {
                        signals.interrupt_job();
                    }
                    self.end_the_rest().await;
                    return Ok(if self.is_lost { Exit::Lost } else { exit });
                }
                Some(Change::StoppedForTerminal) if self.child.lend_terminal() => self.resume(),
                Some(Change::StoppedForTerminal | Change::StoppedByKey) => {
                    self.child.stop_with_it();
                    self.continue_at = Some(Instant::now() + ORPHANED_STOP);
                }
                None => {}
            }
            let continue_at = self.continue_at;
            tokio::select! {
                biased;
                signal = signals.next_or_child() => match signal {
                    Some(Signal::SIGCONT) => self.resume(),
                    Some(Signal::SIGTTIN) => self.child.return_terminal(),
                    Some(signal) => self.child.signal(signal),
                    None => {}
                },
                () = sleep_until(continue_at.unwrap_or_else(Instant::now)), if continue_at.is_some() => self.resume(),
                event = self.next() => self.act(&event),
            }
        }
    }

    /// What the command leaves behind is its own business, unless the lease is lost: then all of the group must end.
    async fn end_the_rest(&mut self) {
        if self.ending == Ending::NotYet && !self.guard.is_held() {
            let loss = self.guard.lost().await;
            self.act(&Event::Lost(loss));
        }
        while matches!(self.ending, Ending::Asked | Ending::LastGrace(_)) && self.child.has_left_others() {
            tokio::select! {
                event = self.next() => self.act(&event),
                () = sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Lets a stopped command go on, unless its lease has ended meanwhile and it is about to be killed.
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
                if self.guard.is_held() { Event::RunningOut } else { Event::Lost(self.guard.lost().await) }
            }
            Ending::Asked => Event::Lost(self.guard.lost().await),
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
            Event::RunningOut => Ending::Asked,
            _ => Ending::LastGrace(Instant::now() + self.grace),
        };
        let what = match event {
            Event::RunningOut => "the lease can't be renewed".to_owned(),
            Event::Lost(loss) => format!("the lease was lost: {loss}"),
            Event::GraceIsOver => "the grace is over".to_owned(),
        };
        self.ending = match self.on_lost {
            OnLost::Ignore => {
                message(format_args!("{what}; the command goes on, as --on-lost ignore says"));
                Ending::Done
            }
            OnLost::Kill if self.is_too_late_to_ask(event) => {
                message(format_args!("{what}: the command gets KILL"));
                self.child.signal(Signal::SIGKILL);
                Ending::Done
            }
            on_lost => {
                message(format_args!("{what}: the command gets TERM"));
                self.ask_to_end();
                if on_lost == OnLost::Kill { then } else { Ending::Done }
            }
        };
    }

    /// Somebody else may hold the lock already, or the command was asked before.
    fn is_too_late_to_ask(&self, event: &Event) -> bool {
        let ran_out = matches!(event, Event::Lost(Loss::Expired | Loss::MaxHold));
        ran_out || self.ending != Ending::NotYet
    }

    fn ask_to_end(&self) {
        self.child.signal(Signal::SIGTERM);
        // A stopped group would only hear it later.
        self.child.signal(Signal::SIGCONT);
    }
}
