//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::recipe::{GetNil, GetSetNil, Patience, Terms};

/// Every published recipe for a lock on Redis, running, with what breaks it.
#[derive(Debug, Parser)]
#[command(name = "recipes", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Name the recipes
    List,
    /// Run one: a few clients on a Redis of its own, step by step
    Run(Run),
    /// Run one in every interleaving, and show the shortest schedules that break it
    Explore(Explore),
    /// Explore all of them, and write docs/recipes.md with its pictures
    Report {
        /// The folder that gets recipes.md and recipes/
        #[arg(long, value_name = "FOLDER", default_value = "docs")]
        out: PathBuf,
    },
}

/// A recipe, and a way to have it.
#[derive(Args, Clone, Debug)]
pub struct Which {
    /// The recipe's name, as `list` has it
    #[arg(value_name = "ID")]
    pub id: String,
    /// Stored times: what to do when the lock that was taken is gone when it is looked at
    #[arg(long, value_enum, default_value_t)]
    pub get_nil: OnGetNil,
    /// Stored times: what a GETSET means that found nothing
    #[arg(long, value_enum, default_value_t)]
    pub getset_nil: OnGetSetNil,
    /// rw-two-keys: look and set in one script, which no cluster runs
    #[arg(long)]
    pub in_one_step: bool,
}

impl Which {
    /// What a client is told.
    pub fn set(&self, terms: &mut Terms) {
        terms.get_nil = match self.get_nil {
            OnGetNil::StartAgain => GetNil::StartAgain,
            OnGetNil::Getset => GetNil::GetSet,
        };
        terms.getset_nil = match self.getset_nil {
            OnGetSetNil::Acquired => GetSetNil::Acquired,
            OnGetSetNil::Failed => GetSetNil::Failed,
        };
        terms.in_one_step = self.in_one_step;
    }
}

/// What to do when the lock that was taken is gone when it is looked at.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum OnGetNil {
    /// Start again at SETNX
    #[default]
    StartAgain,
    /// Go on to GETSET
    Getset,
}

/// What a GETSET means that found nothing.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum OnGetSetNil {
    /// The lock is ours
    #[default]
    Acquired,
    /// It is not
    Failed,
}

/// Runs one.
#[derive(Args, Debug)]
pub struct Run {
    /// Which
    #[command(flatten)]
    pub which: Which,
    /// How many clients want it at once
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub clients: u8,
    /// Of a lock with readers: how many of the clients read
    #[arg(long, default_value_t = 0)]
    pub readers: u8,
    /// For how long it is taken, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease: u64,
    /// How long a client stays in the critical section
    #[arg(long, value_name = "MS", default_value_t = 50)]
    pub work_ms: u64,
    /// Try only once
    #[arg(long, conflicts_with_all = ["timeout_ms", "tries"])]
    pub once: bool,
    /// Try until this much time is over
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub timeout_ms: u64,
    /// Sleep so long between tries
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub interval_ms: u64,
    /// Try at most so often
    #[arg(long)]
    pub tries: Option<u32>,
    /// A Redis to run it on, instead of one of its own: its key `lock` is used
    #[arg(long, value_name = "ADDRESS")]
    pub url: Option<String>,
}

impl Run {
    /// How often, and for how long, each client tries.
    #[must_use]
    pub fn patience(&self) -> Patience {
        let interval = Duration::from_millis(self.interval_ms);
        match self.tries {
            _ if self.once => Patience::OneShot,
            Some(tries) => Patience::Polling { interval, tries },
            None => Patience::Until { timeout: Duration::from_millis(self.timeout_ms), interval },
        }
    }
}

/// Explores one.
#[derive(Args, Debug)]
pub struct Explore {
    /// Which
    #[command(flatten)]
    pub which: Which,
    /// Write each schedule as a picture there, and all of them as one page
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}
