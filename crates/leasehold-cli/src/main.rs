//! `leasehold`: run a command under a lock, and look at locks.
//!
//! Arguments, then what they ask for, then an exit code. Everything about locks is the library's.

#![deny(unsafe_code)]

mod args;
mod auth;
mod child;
mod command;
mod config;
mod doctor;
mod duration;
mod elect;
mod exit;
mod held;
mod inspect;
mod lease;
mod lock;
mod log;
mod ls;
mod migrate;
mod nested;
mod notify;
mod orphans;
mod output;
mod probe;
mod process;
mod progress;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod signals;
mod store;
mod supervise;
mod table;
mod terminal;
mod text;
mod watch;
mod watchdog;

use std::process::ExitCode;

use args::{Action, Args, LogFormat, MigrateArgs, ReleaseArgs};
use clap::error::ErrorKind;
use config::Refused;
use exit::{Exit, Stop};
use output::{Level, message, write_stderr};
use serde_json::json;
use store::Store;

fn main() -> ExitCode {
    let args = match config::arguments() {
        Ok(args) => args,
        Err(Refused::Arguments(error)) => return usage(error),
        Err(Refused::File(stop)) => return finish(&stop),
    };
    if args.log == LogFormat::Json {
        output::use_json();
    }
    log::print_warnings();
    signals::let_writes_fail();
    // The commands of `run` and `elect` inherit the mask, so these look at it first.
    let has_no_command = match &args.action {
        #[cfg(feature = "serve")]
        Action::Serve(_) => true,
        action => matches!(action, Action::Watch(_)),
    };
    if has_no_command {
        // If that fails, signals stay as they were.
        let _ = signals::unblock();
    }
    let mut builder = match &args.action {
        #[cfg(feature = "serve")]
        Action::Serve(_) => tokio::runtime::Builder::new_multi_thread(),
        // One thread, the main one: it forks the command, which is killed by the kernel when its forking thread ends.
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return finish(&Stop::failure(format!("the runtime could not be started: {error}"))),
    };
    let (is_json, store) = (args.action.is_json(), args.store.clone());
    let ended = runtime.block_on(act(args));
    auth::kill_running();
    match ended {
        Ok(exit) => exit.end(),
        Err(stop) => {
            // A program that reads the answer gets one in any case.
            if is_json {
                // A usage error may be about the address: nothing says which part of it is a password then.
                let shown = store.as_deref().filter(|_| stop.exit != Exit::Usage);
                let store = shown.map(Store::without_passwords);
                let failure = json!({ "store": store, "error": stop.message, "exit_code": stop.exit.code() });
                let _ = inspect::print_json(&failure);
            }
            finish(&stop)
        }
    }
}

async fn act(args: Args) -> Result<Exit, Stop> {
    orphans::reap_in_background();
    if let Action::Migrate(MigrateArgs { print: true }) = args.action {
        return migrate::print_statements(args.store);
    }
    let store = || Store::find(args.store, args.auth_command.as_deref());
    match args.action {
        Action::Run(args) => run::run(|| store()?.usable_by_commands(), args).await,
        Action::Elect(args) => elect::elect(|| store()?.usable_by_commands(), args).await,
        Action::Ls(args) => ls::ls(&store()?, args).await,
        Action::Show(args) => inspect::show(&store()?, args).await,
        Action::Acquire(args) => lease::acquire(store, args).await,
        Action::Renew(args) => lease::renew(store, args).await,
        Action::Status(args) => lease::status(store, args).await,
        Action::Release(args) => release(store, args).await,
        Action::Watch(args) => watch::watch(store, args).await,
        Action::Wait(args) => probe::wait(store, args).await,
        Action::Health(args) => probe::health(store, args).await,
        Action::Doctor(args) => doctor::doctor(&store()?, args).await,
        Action::Migrate(_) => migrate::migrate(&store()?).await,
        #[cfg(feature = "serve")]
        Action::Serve(args) => serve::serve(store, args).await,
        Action::Watchdog => Ok(watchdog::watch()),
        Action::Completions { shell } => args::completions(shell),
        Action::Help { topic } => args::help(topic.as_deref()),
        Action::Man { command } => args::man(command.as_deref()),
    }
}

/// By force the lock of a name, otherwise the lease with an id.
async fn release(store: impl FnOnce() -> Result<Store, Stop>, args: ReleaseArgs) -> Result<Exit, Stop> {
    if args.force { inspect::release(store, args).await } else { lease::release(store, &args).await }
}

/// Help and version go to stdout, and what is wrong with the arguments goes to stderr, on one line.
fn usage(error: clap::Error) -> ExitCode {
    let is_help = !error.use_stderr();
    if error.kind() == ErrorKind::MissingSubcommand {
        // As without the environment, which clap counts as arguments.
        write_stderr(args::command().render_help().to_string());
    } else if is_help || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // A closed stdout is no reason to fail.
        let _ = error.print();
    } else {
        message(Level::Error, "usage", args::complaint(error));
    }
    if is_help { Exit::Success.end() } else { Exit::Usage.end() }
}

fn finish(stop: &Stop) -> ExitCode {
    message(stop.exit.level(), stop.exit.event(), &stop.message);
    stop.exit.end()
}
