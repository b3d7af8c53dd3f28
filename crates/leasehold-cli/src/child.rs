//! The command's process: started in a group of its own, waited for, signalled, stopped and continued.

use std::cell::Cell;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, killpg, sigprocmask};
use nix::unistd::{Pid, getpgrp, getpid, getppid};
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, WaitStatus, waitid, waitpid};

use crate::command::Command;
use crate::exit::Exit;
use crate::orphans::Own;
use crate::output::{Level, message};
use crate::terminal::Terminal;
use crate::watchdog::{self, Watchdog};

/// The stop of a process since the last call; none also for a process that has ended and is not reaped yet. SIGCHLD reports that
/// end.
fn poll_stop(pid: rustix::process::Pid) -> io::Result<Option<Change>> {
    match waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG) {
        Ok(status) => Ok(status.as_ref().and_then(Change::from_stop)),
        // The kernel's answer if a process can't stop any more.
        Err(rustix::io::Errno::CHILD) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A started command. The process and its group have the same number.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    /// Whether the command gets the terminal when this job is in the foreground: from its start, or since its first use.
    wants_terminal: Cell<bool>,
    /// Kills the command's group if this program is killed and the kernel would not kill the command. Kept until the command has
    /// ended.
    _watchdog: Option<Watchdog>,
    /// Until it has ended and was reaped here.
    _own: Own,
}

impl Child {
    /// Starts a command with these variables in addition to this program's, and with this signal mask.
    pub(crate) fn start(command: &Command, variables: &[(&str, String)], mask: SigSet) -> io::Result<Self> {
        let wants_terminal = Cell::new(Terminal::is_given_to_command_at_start());
        let file = command.file();
        let watchdog = file.as_deref().map_or(Ok(None), Watchdog::for_program)?;
        let watched_by = watchdog.as_ref().map_or(Ok(None), Watchdog::input)?;
        let mut started = process::Command::new(&command.program);
        started
            .args(&command.args)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .process_group(0);
        let parent = getpid();
        let given = Terminal::open().filter(|terminal| wants_terminal.get() && terminal.is_own());
        let is_given = given.is_some();
        let bind = move || {
            bind(parent, given.as_ref(), &mask)?;
            watched_by.as_ref().map_or(Ok(()), |input| watchdog::tell(input, getpid()))
        };
        before_exec(&mut started, bind);
        let (child, own) = Own::spawn(&mut started).inspect_err(|_| {
            // The child had taken the terminal before exec failed.
            if let Some(terminal) = Terminal::open().filter(|_| is_given) {
                terminal.give(getpgrp());
            }
        })?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        Ok(Self { pid, wants_terminal, _watchdog: watchdog, _own: own })
    }

    /// The change of state since the last call, if there is one.
    ///
    /// An ended command is reaped only after the terminal was taken back from its group. Until then its process exists, so another
    /// `leasehold` in this group recognises the foreground group as part of this job.
    pub(crate) fn poll_change(&self) -> io::Result<Option<Change>> {
        // By number, because real-time signals have no name and may end a command, too.
        let Some(pid) = rustix::process::Pid::from_raw(self.pid.as_raw()) else { return Ok(None) };
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if waitid(WaitId::Pid(pid), peek)?.is_some() {
            let had_terminal = self.leave_terminal();
            let status = waitpid(Some(pid), WaitOptions::NOHANG)?;
            return Ok(status.and_then(|(_, status)| Change::from_end(status, had_terminal)));
        }
        poll_stop(pid)
    }

    /// Whether its group has processes.
    pub(crate) fn has_processes(&self) -> bool {
        killpg(self.pid, None) != Err(Errno::ESRCH)
    }

    /// Signals the whole group. A group without processes is no error.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Err(error) = killpg(self.pid, signal)
            && error != Errno::ESRCH
        {
            message(
                Level::Warn,
                "signal_failed",
                format_args!("the command can't be sent {signal}: {}", error.desc()),
            );
        }
    }

    /// Stops this process after its command was stopped from the terminal, so that the shell takes over. Returns when the shell
    /// continues this process.
    pub(crate) fn stop_with_command(&self) {
        self.leave_terminal();
        // TTOU and not STOP: without a shell no process would end a STOP, but the kernel ignores TTOU then. TSTP and TTIN are
        // caught here.
        let _ = match Terminal::open() {
            // Ctrl-Z would have stopped the other processes of this group, too.
            Some(_) => killpg(getpgrp(), Signal::SIGTTOU),
            None => kill(getpid(), Signal::SIGTTOU),
        };
    }

    /// Gives the terminal to a command that was stopped because it used it from the background, if this job is in the foreground.
    /// Returns whether it did.
    pub(crate) fn lend_terminal(&self) -> bool {
        self.wants_terminal.set(true);
        let Some(terminal) = Terminal::open().filter(Terminal::is_foreground_job) else {
            return false;
        };
        terminal.give(self.pid);
        true
    }

    /// Takes the terminal back for another process of this group, which was stopped because it used the terminal, and continues
    /// that process. The command gets the terminal again when it next uses it.
    pub(crate) fn return_terminal(&self) {
        if let Some(terminal) = Terminal::open().filter(Terminal::is_foreground_job) {
            self.wants_terminal.set(false);
            terminal.give(getpgrp());
            let _ = killpg(getpgrp(), Signal::SIGCONT);
        }
    }

    /// Takes the terminal back. Returns whether the command had it.
    pub(crate) fn leave_terminal(&self) -> bool {
        Terminal::open().is_some_and(|terminal| terminal.take_from(self.pid))
    }

    /// Continues the command, in the foreground if this group is there and the command wants the terminal.
    pub(crate) fn resume(&self) {
        if self.wants_terminal.get()
            && let Some(terminal) = Terminal::open().filter(Terminal::is_own)
        {
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

/// A change of a command's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Ended {
        exit: Exit,
        /// Its group was in the foreground. This group is there again.
        had_terminal: bool,
    },
    /// Stopped by Ctrl-Z. Another kind of stop, such as SIGSTOP, is meant for the command alone.
    StoppedByKey,
    /// Stopped because it read from the terminal, or set its modes, in the background.
    StoppedForTerminal,
}

impl Change {
    fn from_end(status: WaitStatus, had_terminal: bool) -> Option<Self> {
        let code = status.exit_status().map(|code| Exit::Command(u8::try_from(code).unwrap_or(255)));
        let exit = code.or_else(|| status.terminating_signal().map(Exit::Signal))?;
        Some(Self::Ended { exit, had_terminal })
    }

    fn from_stop(status: &WaitIdStatus) -> Option<Self> {
        match Signal::try_from(status.stopping_signal()?).ok()? {
            Signal::SIGTSTP => Some(Self::StoppedByKey),
            Signal::SIGTTIN | Signal::SIGTTOU => Some(Self::StoppedForTerminal),
            _ => None,
        }
    }
}

/// Starts this program in a process group of its own, and with no signal blocked. It is killed when the thread that starts it ends, where the
/// kernel can do that.
pub(crate) fn die_with_parent(program: &mut process::Command) {
    let parent = getpid();
    program.process_group(0);
    before_exec(program, move || bind(parent, None, &SigSet::empty()));
}

/// Runs [`bind`], and possibly `tell`, between fork and exec.
fn before_exec(program: &mut process::Command, work: impl FnMut() -> io::Result<()> + Send + Sync + 'static) {
    // SAFETY: between fork and exec only async-signal-safe functions may run, and nothing may be allocated. `bind`
    // and `tell` make system calls only (prctl, getppid, sigprocmask, tcsetpgrp, getpid, write), and their error is a plain
    // number.
    #[allow(unsafe_code)]
    unsafe {
        program.pre_exec(work);
    }
}

/// Prepares the child between fork and exec: it dies with its parent, has the terminal before it first reads, and blocks the
/// signals that were blocked when this program started.
fn bind(parent: Pid, terminal: Option<&Terminal>, mask: &SigSet) -> io::Result<()> {
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
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(mask), None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command may end between the two checks of `poll_change`.
    #[test]
    fn process_that_has_ended_meanwhile_has_no_stop() {
        let mut ended = process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_raw(i32::try_from(ended.id()).unwrap()).unwrap();
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        assert!(poll_stop(pid).unwrap().is_none());
        assert!(ended.wait().unwrap().success(), "it is not reaped");
    }
}
