//! The signals that `leasehold` forwards to its command, or that end its wait.

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::task::Poll;

use nix::sys::signal::{SigSet, Signal, killpg, raise};
use nix::unistd::getpgrp;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// Signals that end the wait, and are forwarded to a running command. They also end a program that restarts its command.
const ENDING: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
/// Signals that end a service. Its command may use the others for something else, such as reloading its configuration.
const ENDING_A_SERVICE: [Signal; 2] = [Signal::SIGINT, Signal::SIGTERM];
/// Signals that are only forwarded.
const FORWARDED: [Signal; 4] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH, Signal::SIGCONT];
/// Signals that stop this program before the command starts, and are caught from then on: Ctrl-Z, and TTIN when another process
/// of this group reads from the terminal while the command has it.
const STOPPING: [Signal; 2] = [Signal::SIGTSTP, Signal::SIGTTIN];

/// Lets signals through that were blocked when this program started, here and in the threads that start from now on. A parent that
/// reads its signals from a descriptor leaves them blocked in its children.
pub(crate) fn unblock() -> io::Result<()> {
    Ok(SigSet::empty().thread_set_mask()?)
}

/// A file that reaches the limit of `ulimit -f`, such as the log of a database, makes its write fail, and does not end this program. The
/// command has the default again, because the handler is this program's. If it was ignored when this program started, it stays so.
pub(crate) fn let_writes_fail() {
    if is_ignored(Signal::SIGXFSZ) {
        return;
    }
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
}

/// The signals of this process, caught from the creation of this value on.
pub(crate) struct Signals {
    streams: Vec<(Signal, Stream)>,
    /// SIGCHLD.
    children: Stream,
    ending: &'static [Signal],
    is_end_requested: bool,
    /// The signal mask at this program's start, which the command inherits.
    found_mask: SigSet,
}

impl Signals {
    pub(crate) fn catch() -> io::Result<Self> {
        Self::catch_ended_by(&ENDING)
    }

    /// For a program that continues after its command has ended. At a terminal, Ctrl-\ and a hang-up are meant for the program.
    pub(crate) fn catch_of_a_service() -> io::Result<Self> {
        Self::catch_ended_by(if io::stdin().is_terminal() { &ENDING } else { &ENDING_A_SERVICE })
    }

    fn catch_ended_by(ending: &'static [Signal]) -> io::Result<Self> {
        // A blocked SIGCHLD would never report the end of the command.
        let found_mask = SigSet::thread_get_mask()?;
        unblock()?;
        let children = signal(SignalKind::child())?;
        let mut signals = Self { streams: Vec::new(), children, ending, is_end_requested: false, found_mask };
        for number in ENDING.into_iter().chain(FORWARDED) {
            signals.add(number)?;
        }
        Ok(signals)
    }

    /// Catches the signals that stop this program. Before the command starts, their default action is right.
    pub(crate) fn catch_stop(&mut self) -> io::Result<()> {
        for stopping in STOPPING {
            if !self.streams.iter().any(|(number, _)| *number == stopping) {
                self.add(stopping)?;
            }
        }
        Ok(())
    }

    /// Ctrl-C has ended the command, whose own group had the terminal. Sends the interrupt to the other processes of this group, such
    /// as a shell script or `make`, as if the command had been in this group.
    pub(crate) fn interrupt_job(&mut self) {
        let _ = killpg(getpgrp(), Signal::SIGINT);
        self.is_end_requested |= self.ending.contains(&Signal::SIGINT);
    }

    /// The signal mask of this program's start.
    pub(crate) fn found_mask(&self) -> SigSet {
        self.found_mask
    }

    /// Whether a signal has arrived that ends this program, and not only its command.
    pub(crate) fn is_end_requested(&self) -> bool {
        self.is_end_requested
    }

    /// Signals that were ignored when the program started stay ignored, here and in the command: `nohup` and `trap ''` rely on it.
    fn add(&mut self, number: Signal) -> io::Result<()> {
        if !is_ignored(number) {
            self.streams.push((number, signal(SignalKind::from_raw(number as i32))?));
        }
        Ok(())
    }

    /// The next signal to forward.
    pub(crate) async fn next(&mut self) -> Signal {
        let number = next_of(&mut self.streams).await;
        self.is_end_requested |= self.ending.contains(&number);
        number
    }

    /// The next signal that ends the wait. One that stops this program, and is caught since an earlier command, stops it here.
    pub(crate) async fn next_end(&mut self) -> Signal {
        loop {
            let number = self.next().await;
            if self.ending.contains(&number) {
                return number;
            }
            if STOPPING.contains(&number) {
                // It continues with SIGCONT.
                let _ = raise(Signal::SIGSTOP);
            }
        }
    }

    /// The next signal to forward, or `None` after SIGCHLD.
    pub(crate) async fn next_or_child(&mut self) -> Option<Signal> {
        let Self { streams, children, ending, is_end_requested, .. } = self;
        tokio::select! {
            number = next_of(streams) => {
                *is_end_requested |= ending.contains(&number);
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
pub(crate) fn is_ignored(number: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    ignored & (1 << (number as i32 - 1)) != 0
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_ignored(_number: Signal) -> bool {
    false
}
