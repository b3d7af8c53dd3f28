//! The terminal, where there is one: who is in its foreground.

use std::io::{self, IsTerminal as _};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The terminal on stdin. Its foreground group is who may read from it, and who Ctrl-C goes to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminal;

impl Terminal {
    /// The terminal, if the command should have it. Not when others read our output, as in `leasehold run … | less`: they
    /// are of our job and need the terminal themselves.
    pub(crate) fn to_share() -> Option<Self> {
        let is_piped = fstat(io::stdout())
            .is_ok_and(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO);
        (io::stdin().is_terminal() && !is_piped).then_some(Self)
    }

    /// Whether this process is in the foreground. A background job must not take the terminal.
    pub(crate) fn is_ours(self) -> bool {
        self.belongs_to(getpgrp())
    }

    pub(crate) fn belongs_to(self, group: Pid) -> bool {
        tcgetpgrp(io::stdin()).is_ok_and(|foreground| foreground == group)
    }

    /// Takes it back from a group, if it has it.
    pub(crate) fn take_from(self, group: Pid) {
        if self.belongs_to(group) {
            self.give(getpgrp());
        }
    }

    /// Puts this process group into the foreground. Async-signal-safe: a child does it between fork and exec.
    pub(crate) fn give(self, group: Pid) {
        // Whoever does this from the background is stopped by TTOU, unless it blocks that.
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTTOU);
        let mut before = SigSet::empty();
        if sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), Some(&mut before)).is_ok() {
            let _ = tcsetpgrp(io::stdin(), group);
            let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
        }
    }
}
