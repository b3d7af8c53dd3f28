//! The command's process: started in a group of its own, waited for, signalled, stopped and continued.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process;

use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid};

use crate::command::Command;
use crate::exit::Exit;
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
        let child = started.spawn()?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        Ok(Self { pid, terminal })
    }

    /// What has become of it, if anything has since the last look.
    pub(crate) fn look(&self) -> io::Result<Option<Change>> {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        match waitpid(self.pid, Some(flags))? {
            WaitStatus::Exited(_, code) => {
                Ok(Some(Change::Ended(Exit::Command(u8::try_from(code).unwrap_or(255)))))
            }
            WaitStatus::Signaled(_, signal, _) => Ok(Some(Change::Ended(Exit::Signal(signal as i32)))),
            WaitStatus::Stopped(_, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU) => {
                Ok(Some(Change::StoppedByTerminal))
            }
            _ => Ok(None),
        }
    }

    /// Signals the whole group. A group that is gone needs none.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = killpg(self.pid, signal);
    }

    /// It was stopped from its terminal: stops this process too, so that the shell takes over, and continues the command
    /// once the shell continues us.
    pub(crate) fn stop_with_it(&self) {
        self.leave_terminal();
        let _ = kill(getpid(), Signal::SIGSTOP);
        self.resume();
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

/// In the child, before it becomes the command: dies with its parent, and owns the terminal before it first reads.
fn bind(parent: Pid, terminal: Option<Terminal>) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before that.
        if getppid() != parent {
            return Err(nix::errno::Errno::ESRCH.into());
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (parent, getppid);
    if let Some(terminal) = terminal {
        terminal.give(getpid());
    }
    Ok(())
}
