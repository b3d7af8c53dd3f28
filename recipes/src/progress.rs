//! How far something is, for whoever waits for it: on one line where that is a terminal.

use std::fmt::Display;
use std::io::{IsTerminal as _, stderr};

/// Goes back to the beginning of the line, and clears it.
const AGAIN: &str = "\r\x1b[K";

/// It is under way. Who reads a file later is told nothing.
pub fn show(label: impl Display, what: impl Display) {
    if stderr().is_terminal() {
        eprint!("{AGAIN}{label}: {what}");
    }
}

/// It is over.
pub fn done(label: impl Display) {
    let again = if stderr().is_terminal() { AGAIN } else { "" };
    eprintln!("{again}{label}: done");
}
