//! Errors of the library as the classes that every language has.

use leasehold::{Error, ErrorKind, Loss};

/// Why a call failed.
pub enum Failure {
    /// The library says so.
    Library(Error),
    /// The lease is lost: the message, and the reason.
    Lost(String, Loss),
    /// The class of the error, and its message.
    Own(&'static str, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl Failure {
    /// The client was closed.
    pub fn closed() -> Self {
        Self::Own("ClientClosed", "the client was closed".to_owned())
    }

    /// The argument is not usable.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::Own("InvalidInput", what.into())
    }

    /// The lock or the lease cannot do this.
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self::Own("Unsupported", what.into())
    }

    /// The class of the error, its message, and why a lease was lost if one was.
    pub fn parts(self) -> (&'static str, String, Option<&'static str>) {
        match self {
            Self::Own(class, message) => (class, message, None),
            Self::Lost(message, loss) => ("LeaseLost", message, Some(reason(loss))),
            Self::Library(error) => {
                let class = match error.kind() {
                    _ if error.is_refused() => "Refused",
                    ErrorKind::Invalid => "InvalidInput",
                    ErrorKind::Unsupported => "Unsupported",
                    ErrorKind::Unavailable => "Unavailable",
                    ErrorKind::Lost => "LeaseLost",
                    ErrorKind::Timeout => "Timeout",
                    ErrorKind::QueueFull => "QueueFull",
                    ErrorKind::Closed => "ClientClosed",
                    ErrorKind::Forked => "ForkedError",
                    _ => "Error",
                };
                (class, format!("{error:#}"), None)
            }
        }
    }
}

/// The reason of a lost lease, as the languages have it.
pub(crate) fn reason(loss: Loss) -> &'static str {
    match loss {
        Loss::Expired => "expired",
        Loss::MaxHold => "max_hold",
        Loss::Closed => "closed",
        Loss::Bridge => "bridge",
        _ => "gone",
    }
}
