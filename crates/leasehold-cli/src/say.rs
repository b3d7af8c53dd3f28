//! What `leasehold` itself has to say, which is never on stdout: that is the command's.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Says one thing on stderr. That nobody reads there is no reason to end, least of all while a command runs.
pub(crate) fn say(message: impl Display) {
    let _ = writeln!(io::stderr(), "leasehold: {message}");
}
