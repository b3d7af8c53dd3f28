//! `leasehold serve`: the locks of a store over HTTP, a dashboard, and metrics.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::pin::pin;
use std::time::{Duration, Instant};

use etcetera::BaseStrategy as _;
use leasehold_serve::{Config, Listen, Server, Tls, Tokens, install_recorder, raise_open_files};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::args::ServeArgs;
use crate::duration;
use crate::exit::{Exit, Stop};
use crate::notify;
use crate::output::{Level, message};
use crate::store::{Store, own_folder};

/// The variables that hold a token. A process list shows arguments, so no option does.
const WRITE_TOKEN: &str = "LEASEHOLD_SERVE_TOKEN";
const READ_TOKEN: &str = "LEASEHOLD_SERVE_READ_TOKEN";

/// Descriptors that are no connections: the store's, the listening sockets, the runtime's.
const OTHER_FILES: u64 = 64;

/// Signals within this time are one request to stop: `timeout` and some supervisors signal the process and its group.
const ONE_STOP: Duration = Duration::from_secs(1);

pub(crate) async fn serve(find: impl FnOnce() -> Result<Store, Stop>, args: ServeArgs) -> Result<Exit, Stop> {
    let drain = args.drain;
    let config = config(args)?;
    // Caught before anything is announced, so that a signal right after the start drains, too.
    let caught =
        |kind| signal(kind).map_err(|error| Stop::failure(format!("signals can't be caught: {error}")));
    let (mut terminate, mut interrupt) = (caught(SignalKind::terminate())?, caught(SignalKind::interrupt())?);
    let files = raise_open_files();
    if let Some(files) = files
        && files < config.limits.connections as u64 + OTHER_FILES
    {
        message(
            Level::Warn,
            "few_files",
            format_args!(
                "warning: this process may open {files} files, which is fewer than --max-connections {}: raise ulimit -n \
             or LimitNOFILE=",
                config.limits.connections
            ),
        );
    }
    let store = find()?;
    install_recorder();
    let client = store.connect().await?;
    let server = Server::bind(config, client).await.map_err(|error| Stop::usage(error.to_string()))?;
    let mut announced = String::new();
    for address in server.addresses() {
        let _ = writeln!(announced, "listening on {address}");
    }
    // A closed stdout is no reason to fail.
    let _ = io::stdout().write_all(announced.as_bytes()).and_then(|()| io::stdout().flush());
    notify::ready();
    let mut next_signal = async || {
        tokio::select! {
            _ = terminate.recv() => Signal::SIGTERM,
            _ = interrupt.recv() => Signal::SIGINT,
        }
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let mut running = pin!(server.run(async { drop(stopped.await) }));
    tokio::select! {
        // It ends only after a signal.
        _ = &mut running => {}
        _ = next_signal() => drop(stop),
    }
    message(
        Level::Info,
        "draining",
        format_args!("draining for up to {}: nothing new is granted", duration::show(drain)),
    );
    let since = Instant::now();
    let mut second_signal = async || loop {
        let signal = next_signal().await;
        if since.elapsed() > ONE_STOP {
            return signal;
        }
    };
    let remaining = tokio::select! {
        remaining = running => remaining,
        signal = second_signal() => {
            message(Level::Warn, "stopping", "a second signal: leases that are not released expire within their ttl");
            Exit::Signal(signal as i32).end_now()
        }
    };
    if remaining > 0 {
        let leases =
            if remaining == 1 { "1 lease was".to_owned() } else { format!("{remaining} leases were") };
        message(
            Level::Warn,
            "not_released",
            format_args!("{leases} not released before the end of --drain; the ttl ends what is left"),
        );
    }
    Ok(Exit::Success)
}

fn config(args: ServeArgs) -> Result<Config, Stop> {
    let listen = if args.listen.is_empty() { vec![default_socket()?] } else { args.listen };
    let mut config = Config::new(listen);
    config.tokens = tokens(args.tokens)?;
    config.tls = args.tls_cert.zip(args.tls_key).map(|(certificate, key)| Tls { certificate, key });
    config.limits.connections = args.max_connections;
    config.drain = args.drain;
    if config.tokens.is_empty()
        && let Some(tcp) = config.listen.iter().find(|listen| matches!(listen, Listen::Tcp(_)))
    {
        return Err(Stop::usage(format!(
            "{tcp}: connections over TCP need a token: write `write TOKEN` into a file for --tokens, with a token from \
             openssl rand -hex 16, or set {WRITE_TOKEN}"
        )));
    }
    Ok(config)
}

fn tokens(file: Option<PathBuf>) -> Result<Tokens, Stop> {
    let mut tokens = match file {
        Some(path) => Tokens::from_file(&path).map_err(|what| Stop::usage(format!("--tokens: {what}")))?,
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
