//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::outcome::Outcome;
use crate::recipe::{GetNil, GetSetNil, LockOptions, RetryPolicy};
use crate::sale::{Contender, Retry};

/// Runs every published recipe for a lock on Redis, and shows what breaks it.
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
    /// List the recipes, their known problems, and what to use instead
    List {
        /// List the words of articles in English and Chinese, with the recipes that they mean
        #[arg(long)]
        articles: bool,
    },
    /// Run a recipe with a few clients on a Redis of its own, and print every step
    Run(Run),
    /// Run a recipe in every interleaving, and print the shortest schedules that break it
    Explore(Explore),
    /// Explore all recipes, and write docs/recipes.md with its pictures
    Report {
        /// The folder for recipes.md and recipes/
        #[arg(long, value_name = "FOLDER", default_value = "docs")]
        out: PathBuf,
    },
    /// Measure a flash sale: a web service locks for each sale, under 1,000 concurrent clients
    FlashSale(FlashSale),
    /// Run a lottery: many processes wake at once, and exactly one may draw the winners
    Lottery(Lottery),
    /// One process of the lottery: plays a round for each line of its standard input
    #[command(hide = true)]
    Instance {
        /// The lock
        #[arg(long)]
        lock: String,
        /// The file that stores the winners
        #[arg(long)]
        database: PathBuf,
        /// Addresses of the servers
        #[arg(required = true)]
        urls: Vec<String>,
    },
    /// One process of the flash sale's service: exits when its standard input ends
    #[command(hide = true)]
    Service {
        /// A recipe, `leasehold`, `leasehold-postgres`, or `none`
        #[arg(long)]
        lock: String,
        /// For a recipe: what a request does while the lock is held
        #[arg(long, value_enum)]
        retry: Option<Retry>,
        /// Addresses of the servers
        #[arg(required = true)]
        urls: Vec<String>,
    },
}

/// Arguments of the flash sale.
#[derive(Args, Debug)]
pub struct FlashSale {
    /// A recipe, `leasehold`, `leasehold-postgres` for its mutex on PostgreSQL, or `none` for no lock; repeatable
    #[arg(long, value_name = "ID", default_values = ["set-nx-px", "leasehold"])]
    pub lock: Vec<String>,
    /// What a request does while the lock is held; repeatable [default: all that the recipe supports]
    #[arg(long, value_enum)]
    pub retry: Vec<Retry>,
    /// Number of service processes; repeatable
    #[arg(long, value_name = "N", default_values_t = [1, 2], value_parser = clap::value_parser!(u8).range(1..=16))]
    pub services: Vec<u8>,
    /// Number of requests
    #[arg(short = 'n', long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Number of concurrent clients
    #[arg(short = 'c', long, visible_alias = "customers", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub clients: u32,
    /// Maximum duration of a run; requests without a response by then have failed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub limit: u64,
    /// Number of runs of each lock; the comparison prints the range of their ratios
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    pub runs: u8,
    /// The program that sends the requests
    #[arg(long, value_enum, default_value_t)]
    pub driver: Driver,
    /// Write comparison and table into this page, between its two `flash-sale` marks
    #[arg(long, value_name = "FILE")]
    pub page: Option<PathBuf>,
    /// Write the charts to this folder
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}

/// Arguments of the lottery.
#[derive(Args, Debug)]
pub struct Lottery {
    /// A recipe, `leasehold` for its mutex, `once-per`, or `none` for no lock; repeatable [default: all but `none`]
    #[arg(long, value_name = "ID")]
    pub lock: Vec<String>,
    /// Number of processes
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub processes: u8,
    /// Number of rounds
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
}

/// The program that sends the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// `ab` if it is installed and there is one service, otherwise the built-in driver
    #[default]
    Auto,
    /// `ab` from apache2-utils, for one service
    Ab,
    /// The built-in driver
    BuiltIn,
}

impl FlashSale {
    /// The locks to measure, in this order.
    ///
    /// # Errors
    ///
    /// An unknown name, or a policy that the recipe does not support.
    pub fn contenders(&self) -> Outcome<Vec<Contender>> {
        let named: Outcome<Vec<_>> =
            self.lock.iter().map(|name| Contender::named(name, &self.retry)).collect();
        Ok(named?.concat())
    }
}

/// A recipe and its variant.
#[derive(Args, Clone, Debug)]
pub struct Which {
    /// The recipe, as `list` names it
    #[arg(value_name = "ID")]
    pub id: String,
    /// timestamp-getset: what to do if GET returns nil after SETNX has failed
    #[arg(long, value_enum, default_value_t)]
    pub get_nil: OnGetNil,
    /// timestamp-getset: what a GETSET that returns nil means
    #[arg(long, value_enum, default_value_t)]
    pub getset_nil: OnGetSetNil,
    /// rw-two-keys: check and set in one script, which a cluster rejects
    #[arg(long)]
    pub in_one_step: bool,
}

impl Which {
    /// Sets the options of a client.
    pub fn set(&self, options: &mut LockOptions) {
        options.get_nil = match self.get_nil {
            OnGetNil::StartAgain => GetNil::StartAgain,
            OnGetNil::Getset => GetNil::GetSet,
        };
        options.getset_nil = match self.getset_nil {
            OnGetSetNil::Acquired => GetSetNil::Acquired,
            OnGetSetNil::Failed => GetSetNil::Failed,
        };
        options.in_one_step = self.in_one_step;
    }
}

/// What to do if GET returns nil after SETNX has failed.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum OnGetNil {
    /// Start again at SETNX
    #[default]
    StartAgain,
    /// Go on to GETSET
    Getset,
}

/// What a GETSET that returns nil means.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum OnGetSetNil {
    /// The client has acquired the lock
    #[default]
    Acquired,
    /// The attempt has failed
    Failed,
}

/// Arguments of `run`.
#[derive(Args, Debug)]
pub struct Run {
    /// The recipe
    #[command(flatten)]
    pub which: Which,
    /// Number of clients that lock at the same time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub clients: u8,
    /// For a lock with readers: number of clients that read
    #[arg(long, default_value_t = 0)]
    pub readers: u8,
    /// The lease, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease: u64,
    /// Time in the critical section, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50)]
    pub work_ms: u64,
    /// Make one attempt only
    #[arg(long, conflicts_with_all = ["timeout_ms", "tries"])]
    pub once: bool,
    /// Poll until this time has passed, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub timeout_ms: u64,
    /// Pause between two attempts, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub interval_ms: u64,
    /// Maximum number of attempts
    #[arg(long)]
    pub tries: Option<u32>,
    /// Use this Redis instead of starting one; the recipe uses the key `lock`
    #[arg(long, value_name = "ADDRESS")]
    pub url: Option<String>,
}

impl Run {
    /// How often and for how long each client polls.
    #[must_use]
    pub fn retry_policy(&self) -> RetryPolicy {
        let interval = Duration::from_millis(self.interval_ms);
        match self.tries {
            _ if self.once => RetryPolicy::OneShot,
            Some(tries) => RetryPolicy::Polling { interval, tries },
            None => RetryPolicy::Until { timeout: Duration::from_millis(self.timeout_ms), interval },
        }
    }
}

/// Arguments of `explore`.
#[derive(Args, Debug)]
pub struct Explore {
    /// The recipe
    #[command(flatten)]
    pub which: Which,
    /// Write each schedule as an SVG picture to this folder, and all of them as one HTML page
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}
