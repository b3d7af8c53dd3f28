//! `leasehold serve`: the locks of a store over HTTP, a dashboard, and metrics.

mod files;
mod reload;

use std::fmt::Write as _;
use std::fs;
use std::future::pending;
use std::io::{self, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::pin::pin;
use std::time::{Duration, Instant};

use etcetera::BaseStrategy as _;
use leasehold_serve::{Config, Listen, Notices, Server, Tls, install_recorder, raise_open_files};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use self::files::{WRITE_TOKEN, tls, tokens};
use self::reload::{Reload, TokenFile};
use crate::args::ServeArgs;
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::notify;
use crate::output::{Level, message};
use crate::signals::is_ignored;
use crate::store::{Store, own_folder};

/// Descriptors that are no connections: the store's, the listening sockets, the runtime's.
const OTHER_FILES: u64 = 64;

/// Signals within this time are one request to stop: `timeout` and some supervisors signal the process and its group.
const ONE_STOP: Duration = Duration::from_secs(1);

pub(crate) async fn serve(find: impl FnOnce() -> Result<Store, Stop>, args: ServeArgs) -> Result<Exit, Stop> {
    let drain = args.drain;
    // Before anything else: HUP does not end the server, and the start may wait for files and for the store.
    let hang_up = HangUp::catch()?;
    let token_file = TokenFile::new(args.tokens.as_deref());
    let mut config = config(&args)?;
    // Caught before anything is announced, so that a signal right after the start stops the server in the same way.
    let mut signals = Signals::catch(hang_up)?;
    fit_open_files(&mut config);
    let has_tls = config.tls.is_some();
    config.tls.iter().for_each(warn_of_key);
    let store = find()?;
    install_recorder();
    if store.is_memory() {
        message(
            Level::Warn,
            "store_warning",
            "warning: memory: is the memory of this server: when it ends, its locks are free although their holders work on. \
             Name a file (sqlite:PATH) or another store, except for trials",
        );
    }
    let client = store.connect().await?;
    let server =
        Server::bind(config, client.clone()).await.map_err(|error| Stop::usage(error.to_string()))?;
    if !has_tls {
        warn_of_plain_addresses(&server.addresses());
    }
    announce(&server.addresses());
    notify::ready();
    let mut reload = Reload::new(server.control(), (client, store), args, token_file);
    let (stop, stopped) = oneshot::channel::<()>();
    let mut running = pin!(server.run(async { drop(stopped.await) }));
    tokio::select! {
        // It ends only after a signal.
        () = &mut running => {}
        _ = signals.stop(&mut reload) => drop(stop),
    }
    message(
        Level::Info,
        "stopping",
        format_args!("stopping: nothing new is granted, and leases stay{}", answering(drain)),
    );
    let since = Instant::now();
    let mut second_signal = async || loop {
        let signal = signals.stop(&mut reload).await;
        if since.elapsed() > ONE_STOP {
            return signal;
        }
    };
    tokio::select! {
        () = running => Ok(Exit::Success),
        signal = second_signal() => {
            message(Level::Warn, "stopping", "a second signal: the server ends at once, and leases stay");
            Exit::Signal(signal as i32).end_now()
        }
    }
}

/// What a server that stops does until it ends.
fn answering(drain: Duration) -> String {
    if drain.is_zero() {
        return String::new();
    }
    format!("; other requests are answered for another {}", duration::show(drain))
}

fn announce(addresses: &[String]) {
    let mut announced = String::new();
    for address in addresses {
        let _ = writeln!(announced, "listening on {address}");
    }
    // A closed stdout is no reason to fail.
    let _ = io::stdout().write_all(announced.as_bytes()).and_then(|()| io::stdout().flush());
}

/// The signals of a server: TERM and INT stop it, HUP reloads. If INT was ignored when the program started, it stays so, as for a job of a
/// script that runs in the background.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: Option<tokio::signal::unix::Signal>,
    hang_up: HangUp,
}

struct HangUp {
    signals: tokio::signal::unix::Signal,
    /// Whether the server ends with the terminal that stderr is: it does not under `nohup`.
    ends_with_terminal: bool,
}

impl HangUp {
    fn catch() -> Result<Self, Stop> {
        let ends_with_terminal = io::stderr().is_terminal() && !is_ignored(Signal::SIGHUP);
        Ok(Self { signals: caught(SignalKind::hangup())?, ends_with_terminal })
    }
}

fn caught(kind: SignalKind) -> Result<tokio::signal::unix::Signal, Stop> {
    signal(kind).map_err(|error| Stop::failure(format!("signals can't be caught: {error}")))
}

impl Signals {
    fn catch(hang_up: HangUp) -> Result<Self, Stop> {
        Ok(Self {
            terminate: caught(SignalKind::terminate())?,
            interrupt: (!is_ignored(Signal::SIGINT)).then(|| caught(SignalKind::interrupt())).transpose()?,
            hang_up,
        })
    }

    /// Waits for a signal that stops the server, and reloads for those that do not, and for a new token file.
    async fn stop(&mut self, reload: &mut Reload) -> Signal {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Signal::SIGTERM,
                _ = received(&mut self.interrupt) => return Signal::SIGINT,
                _ = self.hang_up.signals.recv() => {}
                () = reload.tokens_changed() => {
                    reload.read_tokens();
                    continue;
                }
            }
            // The terminal of the server was closed.
            if self.hang_up.ends_with_terminal && !io::stderr().is_terminal() {
                return Signal::SIGHUP;
            }
            reload.read_all();
        }
    }
}

async fn received(signal: &mut Option<tokio::signal::unix::Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => pending().await,
    }
}

/// Lowers the limits of connections where the process may not open so many files: strangers are not to take the descriptors of those
/// with a token.
fn fit_open_files(config: &mut Config) {
    let Some(files) = raise_open_files() else { return };
    let room = usize::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
    let (needed, asked) = (config.limits.descriptors(&config.listen), config.limits.connections);
    if config.limits.fit(room, &config.listen) {
        message(
            Level::Warn,
            "few_files",
            format_args!(
                "warning: this process may open {files} files, which is fewer than the {needed} that --max-connections {asked} needs: \
                 it is lowered to {}; raise ulimit -n or LimitNOFILE=",
                config.limits.connections
            ),
        );
    }
}

fn warn_of_key(tls: &Tls) {
    const FOR_OTHERS: u32 = 0o006;
    let mode = fs::metadata(&tls.key).map_or(0, |found| found.permissions().mode());
    if mode & FOR_OTHERS != 0 {
        let shown = tls.key.display();
        message(
            Level::Warn,
            "key_for_others",
            format_args!(
                "warning: --tls-key: every user of this machine may read or change {shown}: chmod 600 {shown}"
            ),
        );
    }
}

fn warn_of_plain_addresses(addresses: &[String]) {
    for address in addresses.iter().filter(|address| is_plain_for_others(address)) {
        message(
            Level::Warn,
            "no_tls",
            format_args!(
                "warning: {address} is reachable by other hosts, and without TLS everyone on the way can read its tokens and leases: \
             set --tls-cert and --tls-key, or listen on 127.0.0.1"
            ),
        );
    }
}

/// Whether other hosts can reach an address, without TLS.
fn is_plain_for_others(address: &str) -> bool {
    let plain = address.strip_prefix("http://").and_then(|address| address.parse::<SocketAddr>().ok());
    plain.is_some_and(|address| !address.ip().to_canonical().is_loopback())
}

fn config(args: &ServeArgs) -> Result<Config, Stop> {
    let listen = if args.listen.is_empty() { vec![default_socket()?] } else { args.listen.clone() };
    let mut config = Config::new(listen);
    config.tokens = tokens(args.tokens.as_deref())?;
    config.tls = tls(args);
    config.notices = Notices::new(|text| message(Level::Warn, "serve", text));
    config.limits.connections = args.max_connections;
    config.limits.token_share_percent = args.token_share;
    config.drain = args.drain;
    if config.tokens.is_empty()
        && let Some(tcp) = config.listen.iter().find(|listen| matches!(listen, Listen::Tcp(_)))
    {
        return Err(Stop::usage(format!(
            "{tcp}: connections over TCP need a token: write `NAME write TOKEN` into a file for --tokens, with a token from \
             openssl rand -hex 16, or set {WRITE_TOKEN}"
        )));
    }
    Ok(config)
}

/// `$XDG_RUNTIME_DIR/leasehold.sock`, or a socket beside the user's own store.
fn default_socket() -> Result<Listen, Stop> {
    let nowhere = || Stop::failure("there is no home directory for the default socket: set --listen");
    let strategy = etcetera::base_strategy::Xdg::new().map_err(|_| nowhere())?;
    let socket = match strategy.runtime_dir() {
        Some(folder) if folder.is_dir() => folder.join("leasehold.sock"),
        _ => own_folder()?.join("serve.sock"),
    };
    Ok(Listen::Unix(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_without_tls_that_other_hosts_can_reach_is_found() {
        for open in
            ["http://0.0.0.0:8430", "http://[::]:80", "http://10.0.0.1:1", "http://[::ffff:10.0.0.1]:1"]
        {
            assert!(is_plain_for_others(open), "{open}");
        }
        for closed in [
            "http://127.0.0.1:8430",
            "http://127.8.8.8:1",
            "http://[::1]:80",
            "http://[::ffff:127.0.0.1]:1",
            "https://0.0.0.0:8430",
            "unix:/run/leasehold.sock",
        ] {
            assert!(!is_plain_for_others(closed), "{closed}");
        }
    }
}
