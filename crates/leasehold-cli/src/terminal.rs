//! The controlling terminal, if there is one, and its foreground process group.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use nix::fcntl::OFlag;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::{Pid, getpgid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The maximum nesting of `leasehold` processes whose groups are recognised as one job.
const MAX_NESTING: usize = 16;

/// The controlling terminal. Only its foreground group may read from it and set its modes, and Ctrl-C goes to that group.
///
/// It is opened for each use, because a terminal emulator waits until every process has closed it, even a job under `nohup`.
#[derive(Debug)]
pub(crate) struct Terminal(OwnedFd);

impl Terminal {
    /// The controlling terminal, also if stdin and stdout are pipes: a pager reads its keys from it while its input is a pipe.
    pub(crate) fn open() -> Option<Self> {
        let by_name =
            OpenOptions::new().read(true).write(true).custom_flags(OFlag::O_NOCTTY.bits()).open("/dev/tty");
        // In a chroot, /dev/tty may be missing.
        let file = by_name.or_else(|_| io::stdin().as_fd().try_clone_to_owned().map(File::from)).ok()?;
        let terminal = Self(file.into());
        terminal.foreground().is_some().then_some(terminal)
    }

    /// Whether the command should be in the foreground from its start. In a pipeline it should not: the other processes, such as the
    /// pager in `leasehold run … | less`, are in this process group and may need the terminal first. There the command gets the
    /// terminal when it first uses it.
    pub(crate) fn is_given_to_command_at_start() -> bool {
        let is_piped = fstat(io::stdout())
            .is_ok_and(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO);
        io::stdin().is_terminal() && !is_piped
    }

    fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(&self.0).ok()
    }

    /// Whether this process is in the foreground. A background job must not take the terminal.
    pub(crate) fn is_own(&self) -> bool {
        self.foreground() == Some(getpgrp())
    }

    /// Whether this job is in the foreground: this group, the group of the command, or the group of another command that a
    /// `leasehold` in this group runs, as under `make -j` or `xargs -P`.
    pub(crate) fn is_foreground_job(&self) -> bool {
        let groups = std::iter::successors(self.foreground(), |group| group_that_started(*group));
        groups.take(MAX_NESTING).any(|group| group == getpgrp())
    }

    /// Takes the terminal back from a group. Returns whether the group had it.
    pub(crate) fn take_from(&self, group: Pid) -> bool {
        let had_it = self.foreground() == Some(group);
        if had_it {
            self.give(getpgrp());
        }
        had_it
    }

    /// Puts a process group into the foreground. Async-signal-safe, because a child calls it between fork and exec.
    pub(crate) fn give(&self, group: Pid) {
        // The kernel sends TTOU to a background process that does this, unless TTOU is blocked.
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTTOU);
        let mut before = SigSet::empty();
        if sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), Some(&mut before)).is_ok() {
            let _ = tcsetpgrp(&self.0, group);
            let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
        }
    }
}

/// The process group of the process that started this group's first process.
fn group_that_started(group: Pid) -> Option<Pid> {
    let parent = crate::process::parent_of(u32::try_from(group.as_raw()).ok()?)?;
    getpgid(Some(Pid::from_raw(i32::try_from(parent).ok()?))).ok().filter(|outer| *outer != group)
}
