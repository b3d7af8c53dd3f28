//! The files of a server that can change while it runs: tokens and a certificate.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use leasehold_serve::{Tls, Tokens};

use crate::args::ServeArgs;
use crate::exit::Stop;

/// The variables that hold a token. A process list shows arguments, so no option does.
pub(super) const WRITE_TOKEN: &str = "LEASEHOLD_SERVE_TOKEN";
const READ_TOKEN: &str = "LEASEHOLD_SERVE_READ_TOKEN";

pub(super) fn tls(args: &ServeArgs) -> Option<Tls> {
    let (certificate, key) = args.tls_cert.clone().zip(args.tls_key.clone())?;
    Some(Tls { certificate, key })
}

/// The tokens of the file and of the environment.
pub(super) fn tokens(file: Option<&Path>) -> Result<Tokens, Stop> {
    let mut tokens = match file {
        Some(path) => Tokens::from_file(path).map_err(|what| Stop::usage(format!("--tokens: {what}")))?,
        None => Tokens::default(),
    };
    for (variable, is_write) in [(WRITE_TOKEN, true), (READ_TOKEN, false)] {
        if let Ok(token) = std::env::var(variable) {
            let added = if is_write { tokens.add_write(&token) } else { tokens.add_read(&token) };
            added.map_err(|what| Stop::usage(format!("{variable}: {what}")))?;
        }
    }
    Ok(tokens)
}

/// The same while the server runs. It would wait for a pipe, which only the start reads.
pub(super) fn tokens_again(file: Option<&Path>) -> Result<Tokens, String> {
    match file.filter(|path| is_pipe(path)) {
        Some(path) => Err(format!("--tokens: {}: a pipe is not read again", path.display())),
        None => tokens(file).map_err(|stop| stop.message),
    }
}

pub(super) fn is_pipe(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}
