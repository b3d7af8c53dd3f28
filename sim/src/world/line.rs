//! The connections that a process has.

use crate::executor::Thread;

/// One of the connections of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// That of the users' runtime.
    Callers = 0,
    /// The driver's, which is subscribed to the inbox.
    Driver = 1,
    /// That of bridges, and of a program with another library.
    Keys = 2,
}

impl Line {
    /// The thread that uses it.
    #[must_use]
    pub const fn thread(self) -> Thread {
        match self {
            Self::Callers => Thread::Callers,
            Self::Driver | Self::Keys => Thread::Driver,
        }
    }
}
