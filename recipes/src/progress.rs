//! Progress on standard error: one line that is rewritten, if that is a terminal.

use std::fmt::Display;
use std::io::{IsTerminal as _, stderr};

/// Returns to the start of the line and clears it.
const CLEAR_LINE: &str = "\r\x1b[K";

/// Shows progress. Prints nothing if standard error is a file.
pub fn show(label: impl Display, what: impl Display) {
    if stderr().is_terminal() {
        eprint!("{CLEAR_LINE}{label}: {what}");
    }
}

/// Reports completion.
pub fn done(label: impl Display) {
    let clear = if stderr().is_terminal() { CLEAR_LINE } else { "" };
    eprintln!("{clear}{label}: done");
}
