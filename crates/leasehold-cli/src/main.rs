//! `leasehold`: run a command under a lock, and look at locks.
//!
//! Arguments, then what they ask for, then an exit code. Everything about locks is the library's.

#![deny(unsafe_code)]

mod args;
mod child;
mod command;
mod doctor;
mod duration;
mod elect;
mod exit;
mod inspect;
mod lock;
mod migrate;
mod nested;
mod output;
mod process;
mod progress;
mod run;
mod signals;
mod store;
mod supervise;
mod terminal;
mod text;
mod watchdog;

use std::process::ExitCode;

use args::{Action, Args};
use clap::Parser as _;
use clap::error::ErrorKind;
use exit::{Exit, Stop};
use output::message;
use store::Store;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return usage(&error),
    };
    // One thread, the main one: it forks the command, which is killed by the kernel when its forking thread ends.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return finish(&Stop::failure(format!("the runtime could not be started: {error}"))),
    };
    match runtime.block_on(act(args)) {
        Ok(exit) => exit.end(),
        Err(stop) => finish(&stop),
    }
}

async fn act(args: Args) -> Result<Exit, Stop> {
    let store = || Store::find(args.store);
    match args.action {
        Action::Run(args) => run::run(store, args).await,
        Action::Elect(args) => elect::elect(store, args).await,
        Action::Ls(args) => inspect::ls(&store()?, args).await,
        Action::Show(args) => inspect::show(&store()?, args).await,
        Action::Release(args) => inspect::release(store, args).await,
        Action::Doctor(args) => doctor::doctor(&store()?, args).await,
        Action::Migrate(args) => migrate::migrate(&store()?, &args).await,
        Action::Watchdog => Ok(watchdog::watch()),
        Action::Completions { shell } => args::completions(shell),
        Action::Man { command } => args::man(command.as_deref()),
    }
}

/// Help and version go to stdout, and what is wrong with the arguments goes to stderr, on one line.
fn usage(error: &clap::Error) -> ExitCode {
    let is_help = !error.use_stderr();
    if is_help || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // A closed stdout is no reason to fail.
        let _ = error.print();
    } else {
        message(args::complaint(error));
    }
    if is_help { Exit::Success.end() } else { Exit::Usage.end() }
}

fn finish(stop: &Stop) -> ExitCode {
    message(&stop.message);
    stop.exit.end()
}
