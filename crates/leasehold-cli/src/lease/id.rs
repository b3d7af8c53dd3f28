//! Where the id of a lease comes from. It is a password, and process lists show arguments.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, Read as _};

use leasehold::LeaseId;

use crate::exit::Stop;
use crate::output;

/// The variable with the id, if it is not among the arguments.
const VARIABLE: &str = "LEASEHOLD_ID";

/// The argument that means stdin.
const STDIN: &str = "-";

/// The most that is read from stdin: an id with the longest name is shorter.
const MAX_LINE_BYTES: u64 = 8192;

/// The id that is typed, on stdin, or in the environment.
pub(super) fn find(typed: Option<&OsStr>) -> Result<LeaseId, Stop> {
    let id: LeaseId = read(typed)?;
    output::set_locks(Some(id.kind()), [id.name()]);
    Ok(id)
}

fn read(typed: Option<&OsStr>) -> Result<LeaseId, Stop> {
    let (text, place) = match typed {
        Some(dash) if dash == STDIN => (line()?, "stdin"),
        Some(typed) => (typed.to_string_lossy().into_owned(), "the argument"),
        None => match std::env::var_os(VARIABLE) {
            Some(id) => (id.to_string_lossy().into_owned(), VARIABLE),
            None => {
                return Err(Stop::usage(format!(
                    "there is no lease id: set {VARIABLE}, or pass {STDIN} and write it to stdin"
                )));
            }
        },
    };
    match text.trim() {
        "" => Err(Stop::usage(format!("{place} is empty, and should have the id of a lease"))),
        // The library's error does not repeat it.
        text => text.parse().map_err(|error| Stop::usage(format!("{place}: {error}"))),
    }
}

/// The first line of stdin.
fn line() -> Result<String, Stop> {
    let mut line = Vec::new();
    let read = io::stdin().lock().take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
    read.map_err(|error| Stop::failure(format!("stdin can't be read: {error}")))?;
    Ok(String::from_utf8_lossy(&line).into_owned())
}
