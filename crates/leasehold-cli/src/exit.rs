//! The exit codes, and their table in the help and the man page.

use std::fmt;
use std::process::ExitCode;

use nix::sys::signal::Signal;
use signal_hook::low_level::emulate_default_handler;

use crate::output::{self, Level};
use crate::terminal::Terminal;

/// The outcome of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Success,
    /// The command's own code.
    Command(u8),
    /// The command, or `leasehold` while it waited, was ended by this signal.
    Signal(i32),
    /// The lock was not acquired: 1, or the code of `-E`.
    Conflict(u8),
    /// `doctor` found a danger.
    Danger,
    Usage,
    Lost,
    /// A lost lease, with the code of `--lost-exit-code`.
    LostAs(u8),
    Failure,
    NotExecutable,
    NotFound,
}

/// As the help prints it.
pub(crate) const TABLE: &str = "\
Exit codes:
  0..125   the exit code of the command
  1        the lock was held (-n) or was not free in time (-w); -E sets
           another code
           release --force: the lock is not held
           renew, status, release: the lease with this id has ended
           wait: the lock was not free in time
           health: the store granted no lock, or not in time
           doctor: something is dangerous for locks
  2        the arguments are wrong; nothing was done
  124      the lease was lost, whatever the exit code of the command.
           --lost-exit-code sets another code, because timeout(1) uses 124 too
  125      leasehold itself failed, for example because of the store
  126      the command can't be executed
  127      the command was not found
  128+N    signal N ended the command, or leasehold while it waited";

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Command(code) | Self::Conflict(code) | Self::LostAs(code) => code,
            Self::Signal(signal) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(127)),
            Self::Danger => 1,
            Self::Usage => 2,
            Self::Lost => 124,
            Self::Failure => 125,
            Self::NotExecutable => 126,
            Self::NotFound => 127,
        }
    }

    /// Whether it was ended by INT, as Ctrl-C does.
    pub(crate) fn is_interrupt(self) -> bool {
        self == Self::Signal(Signal::SIGINT as i32)
    }

    /// Ends the program. At a terminal, an interrupted program ends by the signal itself, as the command did: then a shell aborts the
    /// script or loop that called it, which it would continue after an exit code.
    pub(crate) fn end(self) -> ExitCode {
        output::flush();
        if self.is_interrupt() && Terminal::open().is_some_and(|terminal| terminal.is_own()) {
            // It returns only if the signal can't be raised. The exit code then says the same.
            let _ = emulate_default_handler(Signal::SIGINT as i32);
        }
        self.code().into()
    }
}

impl Exit {
    /// How important a message is that ends the program. That a lock is held by another is an answer, and no error.
    pub(crate) fn level(self) -> Level {
        if matches!(self, Self::Conflict(_)) { Level::Info } else { Level::Error }
    }

    /// The event of that message.
    pub(crate) fn event(self) -> &'static str {
        match self {
            Self::Conflict(_) => "refused",
            Self::Usage => "usage",
            Self::NotExecutable | Self::NotFound => "command_failed",
            _ => "failed",
        }
    }

    /// Ends the process at once: nothing is released or cleaned up.
    #[cfg(feature = "serve")]
    pub(crate) fn end_now(self) -> ! {
        let _ = self.end();
        std::process::exit(self.code().into())
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(number) => write!(f, "by signal {number}"),
            Self::Lost | Self::LostAs(_) => f.write_str("the lease was lost"),
            other => write!(f, "exit code {}", other.code()),
        }
    }
}

/// An early end of the program, with a message.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) exit: Exit,
    pub(crate) message: String,
}

impl Stop {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    pub(crate) fn failure(message: impl Into<String>) -> Self {
        Self::new(Exit::Failure, message)
    }
}

impl From<leasehold::Error> for Stop {
    fn from(error: leasehold::Error) -> Self {
        let is_usage = error.is_invalid() || error.is_unsupported();
        Self::new(if is_usage { Exit::Usage } else { Exit::Failure }, format!("{error:#}"))
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_table_has_a_line_for_each_code() {
        let fixed =
            [Exit::Conflict(1), Exit::Usage, Exit::Lost, Exit::Failure, Exit::NotExecutable, Exit::NotFound];
        for exit in fixed {
            let begin = format!("\n  {:<9}", exit.code());
            assert_eq!(TABLE.matches(&begin).count(), 1, "{exit:?}");
        }
        assert_eq!((Exit::Success.code(), Exit::Command(7).code(), Exit::Signal(15).code()), (0, 7, 143));
        assert!(TABLE.contains("\n  128+N    "));
    }
}
