//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::recipe::{GetNil, GetSetNil, Patience, Terms};
use crate::run::Outcome;
use crate::sale::{Contender, Retry};

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
    /// Sell under load: a web service that locks for each sale, and a thousand customers at once
    FlashSale(FlashSale),
    /// Wake many processes at once, of which exactly one may draw the winners
    Lottery(Lottery),
    /// One process of the lottery's service: a round for each line of its standard input
    #[command(hide = true)]
    Instance {
        /// How they agree
        #[arg(long)]
        lock: String,
        /// Where the winners are stored
        #[arg(long)]
        database: PathBuf,
        /// Where the servers are
        #[arg(required = true)]
        urls: Vec<String>,
    },
    /// One process of the flash sale's service: ends with its standard input
    #[command(hide = true)]
    Service {
        /// A recipe, `leasehold`, or `none`
        #[arg(long)]
        lock: String,
        /// A recipe: what to do while somebody else has the lock
        #[arg(long, value_enum)]
        retry: Option<Retry>,
        /// Where the servers are
        #[arg(required = true)]
        urls: Vec<String>,
    },
}

/// Sells under load.
#[derive(Args, Debug)]
pub struct FlashSale {
    /// A recipe, `leasehold`, or `none` for no lock; may be given several times
    #[arg(long, value_name = "ID", default_values = ["set-nx-px", "leasehold"])]
    pub lock: Vec<String>,
    /// What a request does while somebody else has the lock; all that suit the recipe unless some are given
    #[arg(long, value_enum)]
    pub retry: Vec<Retry>,
    /// How many service processes there are; may be given several times
    #[arg(long, value_name = "N", default_values_t = [1, 2], value_parser = clap::value_parser!(u8).range(1..=16))]
    pub services: Vec<u8>,
    /// How many requests there are
    #[arg(short = 'n', long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// How many of them at a time
    #[arg(short = 'c', long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub customers: u32,
    /// When a run is over, whatever has been answered
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub limit: u64,
    /// Who sends the requests
    #[arg(long, value_enum, default_value_t)]
    pub driver: Driver,
    /// Write the pictures of the latencies there
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}

/// Draws the winners.
#[derive(Args, Debug)]
pub struct Lottery {
    /// A recipe, `leasehold` for its mutex, `once-per`, or `none` for no lock; may be given several times; all but `none` unless some are
    #[arg(long, value_name = "ID")]
    pub lock: Vec<String>,
    /// How many instances wake at once
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub processes: u8,
    /// How many rounds there are
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
}

/// Who sends the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// `ab`, where it is installed and there is one service; the built-in one otherwise
    #[default]
    Auto,
    /// `ab` from apache2-utils, for one service
    Ab,
    /// The built-in one
    BuiltIn,
}

impl FlashSale {
    /// Who takes part, in this order.
    ///
    /// # Errors
    ///
    /// A name that there is not, or a way to wait that it does not have.
    pub fn contenders(&self) -> Outcome<Vec<Contender>> {
        let named: Outcome<Vec<_>> =
            self.lock.iter().map(|name| Contender::named(name, &self.retry)).collect();
        Ok(named?.concat())
    }
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
