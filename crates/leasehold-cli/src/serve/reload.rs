//! Reads again what can change while the server runs: on HUP everything, and the token file when it has changed.

use std::fmt::Display;
use std::mem;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold::Client;
use leasehold_serve::{Control, FileStamp};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::files::{is_pipe, tls, tokens_again};
use crate::args::{Action, Args, ServeArgs, complaint};
use crate::config::{self, Refused};
use crate::output::{Level, message};
use crate::store::Store;

/// The interval at which the token file is looked at, which is one system call.
const LOOK: Duration = Duration::from_secs(1);

/// A token file that is read again when it has changed.
pub(super) struct TokenFile {
    /// None if there is no file, or if it is a pipe, which only the start reads.
    path: Option<PathBuf>,
    /// Of the version that was read last, whether it could be used or not.
    read: FileStamp,
    /// At the last look. A version that two looks have found is complete: no program is writing it.
    seen: FileStamp,
}

impl TokenFile {
    /// Call it before the file is read: a change while it is read is a change.
    pub(super) fn new(path: Option<&Path>) -> Self {
        let stamp = path.map_or_else(|| FileStamp::of("".as_ref()), FileStamp::of);
        let path = path.filter(|path| !is_pipe(path)).map(Path::to_owned);
        Self { path, read: stamp, seen: stamp }
    }

    /// Whether there is a new version, which the caller reads.
    fn has_changed(&mut self) -> bool {
        let Some(path) = &self.path else { return false };
        let found = FileStamp::of(path);
        let is_complete = mem::replace(&mut self.seen, found) == found;
        is_complete && mem::replace(&mut self.read, found) != found
    }
}

/// Changes a running server.
pub(super) struct Reload {
    control: Control,
    client: Client,
    store: Store,
    /// The settings with which the server was started.
    args: ServeArgs,
    tokens: TokenFile,
    /// Why the token file was refused, so that the operator is told once.
    refusal: Option<String>,
    looks: Interval,
}

impl Reload {
    pub(super) fn new(
        control: Control,
        (client, store): (Client, Store),
        args: ServeArgs,
        tokens: TokenFile,
    ) -> Self {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { control, client, store, args, tokens, refusal: None, looks }
    }

    /// Waits until the token file has changed. Cancel safe.
    pub(super) async fn tokens_changed(&mut self) {
        loop {
            self.looks.tick().await;
            if self.tokens.has_changed() {
                return;
            }
        }
    }

    /// Reads the token file again, after it has changed.
    pub(super) fn read_tokens(&mut self) {
        match tokens_again(self.tokens.path.as_deref()).and_then(|tokens| self.control.set_tokens(tokens)) {
            Ok(()) => {
                self.refusal = None;
                message(Level::Info, "reloaded", "the token file has changed, and was read again");
            }
            Err(what) if self.refusal.as_ref() == Some(&what) => {}
            Err(what) => {
                refused("the token file has changed", &what);
                self.refusal = Some(what);
            }
        }
    }

    /// Reads everything again, as HUP asks for.
    pub(super) fn read_all(&mut self) {
        let refused = |what: &dyn Display| refused("HUP", what);
        // The program of --auth-command, if there is one.
        self.client.refresh_credentials();
        let (args, store) = match config::arguments() {
            Ok(Args { action: Action::Serve(args), store, auth_command, .. }) => {
                (args, Store::find(store, auth_command.as_deref()))
            }
            // The same command was typed.
            Ok(_) => return,
            Err(Refused::Arguments(error)) => return refused(&complaint(error)),
            Err(Refused::File(stop)) => return refused(&stop.message),
        };
        let path = args.tokens.as_deref();
        self.tokens = TokenFile::new(path);
        match tokens_again(path).and_then(|tokens| self.control.set_tokens(tokens)) {
            Ok(()) => {
                self.refusal = None;
                message(Level::Info, "reloaded", "HUP: the tokens were read again");
            }
            Err(what) => {
                refused(&what);
                self.refusal = Some(what);
            }
        }
        match tls(&args).map(|files| self.control.set_tls(&files)) {
            Some(Ok(())) => message(Level::Info, "reloaded", "HUP: the certificate was read again"),
            Some(Err(what)) => refused(&what),
            None => {}
        }
        match store {
            Ok(store) => self.store.changed_options(&store).for_each(ignored),
            Err(stop) => refused(&stop.message),
        }
        self.report_ignored(&args);
    }

    /// Names the settings that have changed and take effect at the next start.
    fn report_ignored(&self, args: &ServeArgs) {
        let ServeArgs { listen, tokens: _, tls_cert, tls_key: _, max_connections, token_share, drain } =
            &self.args;
        for (option, is_changed) in [
            ("--listen", *listen != args.listen),
            ("--max-connections", *max_connections != args.max_connections),
            ("--token-share", *token_share != args.token_share),
            ("--drain", *drain != args.drain),
            ("--tls-cert", tls_cert.is_some() && args.tls_cert.is_none()),
        ] {
            if is_changed {
                ignored(option);
            }
        }
    }
}

fn ignored(option: &str) {
    let what = format_args!("HUP: {option} has changed, which takes effect at the next start");
    message(Level::Warn, "not_reloaded", what);
}

fn refused(why: &str, what: &(impl Display + ?Sized)) {
    message(Level::Warn, "not_reloaded", format_args!("{why}: {what}; what was in use before stays in use"));
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn file_has_changed_once_when_two_looks_find_the_same_new_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        fs::write(&path, "a").unwrap();
        let mut file = TokenFile::new(Some(&path));
        assert!(!file.has_changed() && !file.has_changed());
        // A program writes it in parts.
        fs::write(&path, "ab").unwrap();
        assert!(!file.has_changed());
        fs::write(&path, "abc").unwrap();
        assert!(!file.has_changed());
        assert!(file.has_changed());
        assert!(!file.has_changed() && !file.has_changed());
        fs::remove_file(&path).unwrap();
        assert!(!file.has_changed() && file.has_changed() && !file.has_changed());
    }

    #[test]
    fn without_a_file_nothing_changes() {
        let mut none = TokenFile::new(None);
        assert!(!none.has_changed() && !none.has_changed());
    }
}
