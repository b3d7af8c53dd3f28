//! The signals that `leasehold` passes on, or that end its waiting.

use std::io::{self, IsTerminal as _};
use std::task::Poll;

use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::getpgrp;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// What ends the waiting, and is passed on to a command that runs. Of a program that keeps a command running, it is the
/// end.
const ENDING: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
/// What ends a service. Its command may understand the others as something else: to read its settings again, for instance.
const ENDING_A_SERVICE: [Signal; 2] = [Signal::SIGINT, Signal::SIGTERM];
/// What is passed on only.
const PASSED_ON: [Signal; 4] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH, Signal::SIGCONT];
/// What stops this program until there is a command, and is caught from then on: Ctrl-Z, and another process of our group that
/// reads from the terminal while the command has it.
const STOPPING: [Signal; 2] = [Signal::SIGTSTP, Signal::SIGTTIN];

/// The signals of this process, caught from the moment this is made.
pub(crate) struct Signals {
    streams: Vec<(Signal, Stream)>,
    /// Something about a child.
    children: Stream,
    ending: &'static [Signal],
    is_end_wanted: bool,
    /// What was blocked when this program started, and is to be blocked when the command starts.
    found_mask: SigSet,
}

impl Signals {
    pub(crate) fn catch() -> io::Result<Self> {
        Self::catch_ended_by(&ENDING)
    }

    /// Of a program that goes on when its command has ended. Who sits at its terminal means the program.
    pub(crate) fn catch_of_a_service() -> io::Result<Self> {
        Self::catch_ended_by(if io::stdin().is_terminal() { &ENDING } else { &ENDING_A_SERVICE })
    }

    fn catch_ended_by(ending: &'static [Signal]) -> io::Result<Self> {
        // A program that reads its signals from a descriptor leaves them blocked in what it starts. Blocked here, SIGCHLD
        // would never tell that the command has ended. Threads that are started from now on inherit the empty mask.
        let found_mask = SigSet::thread_get_mask()?;
        SigSet::empty().thread_set_mask()?;
        let children = signal(SignalKind::child())?;
        let mut signals = Self { streams: Vec::new(), children, ending, is_end_wanted: false, found_mask };
        for number in ENDING.into_iter().chain(PASSED_ON) {
            signals.add(number)?;
        }
        Ok(signals)
    }

    /// From now on the signals that would stop this program are caught. Before there is a command they just stop it.
    pub(crate) fn catch_stop(&mut self) -> io::Result<()> {
        for stopping in STOPPING {
            if !self.streams.iter().any(|(number, _)| *number == stopping) {
                self.add(stopping)?;
            }
        }
        Ok(())
    }

    /// Ctrl-C has ended the command, which had the terminal for its own group. The other processes of our group, a shell
    /// script or `make` for instance, hear of it now, as they would have if the command had been in our group.
    pub(crate) fn interrupt_job(&mut self) {
        let _ = killpg(getpgrp(), Signal::SIGINT);
        self.is_end_wanted |= self.ending.contains(&Signal::SIGINT);
    }

    /// The signal mask of this program's start.
    pub(crate) fn found_mask(&self) -> SigSet {
        self.found_mask
    }

    /// Whether a signal has come that is to end this program, and not just its command.
    pub(crate) fn is_end_wanted(&self) -> bool {
        self.is_end_wanted
    }

    /// What was ignored when the program started stays so, here and in the command: `nohup` and `trap ''` mean that.
    fn add(&mut self, number: Signal) -> io::Result<()> {
        if !is_ignored(number) {
            self.streams.push((number, signal(SignalKind::from_raw(number as i32))?));
        }
        Ok(())
    }

    /// The next signal that is passed on.
    pub(crate) async fn next(&mut self) -> Signal {
        let number = next_of(&mut self.streams).await;
        self.is_end_wanted |= self.ending.contains(&number);
        number
    }

    /// The next signal that ends the waiting.
    pub(crate) async fn next_end(&mut self) -> Signal {
        loop {
            let number = self.next().await;
            if self.ending.contains(&number) {
                return number;
            }
        }
    }

    /// The next signal that is passed on, or none when something happened to a child.
    pub(crate) async fn next_or_child(&mut self) -> Option<Signal> {
        let Self { streams, children, ending, is_end_wanted, .. } = self;
        tokio::select! {
            number = next_of(streams) => {
                *is_end_wanted |= ending.contains(&number);
                Some(number)
            }
            _ = children.recv() => None,
        }
    }
}

async fn next_of(streams: &mut [(Signal, Stream)]) -> Signal {
    std::future::poll_fn(|context| {
        for (number, stream) in &mut *streams {
            if stream.poll_recv(context).is_ready() {
                return Poll::Ready(*number);
            }
        }
        Poll::Pending
    })
    .await
}

/// Asking the kernel directly would need unsafe code.
#[cfg(target_os = "linux")]
fn is_ignored(number: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    ignored & (1 << (number as i32 - 1)) != 0
}

#[cfg(not(target_os = "linux"))]
fn is_ignored(_number: Signal) -> bool {
    false
}
