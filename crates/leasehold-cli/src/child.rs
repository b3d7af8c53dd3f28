//! The command's process: started in a group of its own, waited for, signalled, stopped and continued.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgrp, getpid, getppid};
use rustix::process::{WaitOptions, WaitStatus};

use crate::command::Command;
use crate::exit::Exit;
use crate::say::say;
use crate::terminal::Terminal;

/// A started command. The process and its group have the same number.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    terminal: Option<Terminal>,
}

impl Child {
    /// Starts a command with these variables in addition to ours.
    pub(crate) fn start(
        command: &Command,
        variables: &[(&str, String)],
        terminal: Option<Terminal>,
    ) -> io::Result<Self> {
        let mut started = process::Command::new(&command.program);
        started
            .args(&command.args)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .process_group(0);
        let parent = getpid();
        let given = terminal.filter(|terminal| terminal.is_ours());
        let bind = move || bind(parent, given);
        // SAFETY: between fork and exec only async-signal-safe functions may run, and nothing may be allocated. `bind`
        // makes system calls only (prctl, getppid, sigprocmask, tcsetpgrp, getpid), and its error is a plain number.
        #[allow(unsafe_code)]
        unsafe {
            started.pre_exec(bind);
        }
        let child = started.spawn().inspect_err(|_| {
            // The child had it before it failed to become the command.
            if let Some(terminal) = given {
                terminal.give(getpgrp());
            }
        })?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        Ok(Self { pid, terminal })
    }

    /// What has become of it, if anything has since the last look.
    pub(crate) fn look(&self) -> io::Result<Option<Change>> {
        // By number, because a command may be ended by a signal that has no name: the real-time ones.
        let pid = rustix::process::Pid::from_raw(self.pid.as_raw());
        let status = rustix::process::waitpid(pid, WaitOptions::NOHANG | WaitOptions::UNTRACED)?;
        Ok(status.and_then(|(_, status)| Change::from_status(status)))
    }

    /// Whether there are processes in its group, once it has ended itself.
    pub(crate) fn has_left_others(&self) -> bool {
        killpg(self.pid, None) != Err(Errno::ESRCH)
    }

    /// Signals the whole group. A group that is gone needs none.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Err(error) = killpg(self.pid, signal)
            && error != Errno::ESRCH
        {
            say(format_args!("the command can't be sent {signal}: {}", error.desc()));
        }
    }

    /// It was stopped from its terminal: stops this process too, so that the shell takes over, and comes back when the
    /// shell lets us go on.
    pub(crate) fn stop_with_it(&self) {
        self.leave_terminal();
        // By TTIN, and not by STOP, which would last for ever where no shell is there to end it: the kernel ignores this
        // one then. TSTP is caught here.
        let _ = match self.terminal {
            // Whatever else belongs to our job would have been stopped by Ctrl-Z as well.
            Some(_) => killpg(getpgrp(), Signal::SIGTTIN),
            None => kill(getpid(), Signal::SIGTTIN),
        };
    }

    fn leave_terminal(&self) {
        if let Some(terminal) = self.terminal {
            terminal.take_from(self.pid);
        }
    }

    /// Lets it go on, in the foreground if that is where we are.
    pub(crate) fn resume(&self) {
        if let Some(terminal) = self.terminal.filter(|terminal| terminal.is_ours()) {
            terminal.give(self.pid);
        }
        self.signal(Signal::SIGCONT);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.leave_terminal();
    }
}

/// What became of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Ended(Exit),
    /// By Ctrl-Z, or by using the terminal from the background. Whoever stops it otherwise means it alone.
    StoppedByTerminal,
}

impl Change {
    fn from_status(status: WaitStatus) -> Option<Self> {
        const BY_TERMINAL: [i32; 3] =
            [Signal::SIGTSTP as i32, Signal::SIGTTIN as i32, Signal::SIGTTOU as i32];
        if let Some(code) = status.exit_status() {
            return Some(Self::Ended(Exit::Command(u8::try_from(code).unwrap_or(255))));
        }
        if let Some(signal) = status.terminating_signal() {
            return Some(Self::Ended(Exit::Signal(signal)));
        }
        let is_by_terminal = status.stopping_signal().is_some_and(|signal| BY_TERMINAL.contains(&signal));
        is_by_terminal.then_some(Self::StoppedByTerminal)
    }
}

/// In the child, before it becomes the command: dies with its parent, and owns the terminal before it first reads.
fn bind(parent: Pid, terminal: Option<Terminal>) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before that.
        if getppid() != parent {
            return Err(Errno::ESRCH.into());
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (parent, getppid);
    if let Some(terminal) = terminal {
        terminal.give(getpid());
    }
    Ok(())
}
