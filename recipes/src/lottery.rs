//! The lottery: every instance of a service wakes at noon, and exactly one may draw ten winners and store them.
//!
//! The instance that acquires the lock draws, unless the database says that the round has been drawn. No constraint in the database
//! prevents a second draw, so that a failure of the lock is visible.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, params};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::process::Command;

use crate::outcome::{Outcome, find, servers};
use crate::progress;
use crate::real::{Process, RealClient};
use crate::recipe::LockOptions;
use crate::recipes::{ROWS, Row};
use crate::redis::Redis;
use crate::worker::{self, Worker};

/// Number of winners per round.
const WINNERS: i64 = 10;

/// Number of tickets.
const TICKETS: u64 = 1_000_000;

/// The lock of the instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockChoice {
    /// A published recipe: one attempt.
    Recipe(&'static str),
    /// leasehold's mutex: one attempt.
    Mutex,
    /// leasehold's `once_per`, without a look into the database.
    OncePer,
    /// No lock: every instance draws, which must be detected.
    Nothing,
}

impl LockChoice {
    /// The lock of this name.
    ///
    /// # Errors
    ///
    /// An unknown name.
    pub fn named(name: &str) -> Outcome<Self> {
        match name {
            "leasehold" => Ok(Self::Mutex),
            "once-per" => Ok(Self::OncePer),
            "none" => Ok(Self::Nothing),
            id => Ok(Self::Recipe(find(id)?.id)),
        }
    }

    /// All locks.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| Self::Recipe(row.id)).chain([Self::Mutex, Self::OncePer])
    }

    fn row(self) -> Outcome<Option<&'static Row>> {
        match self {
            Self::Recipe(id) => find(id).map(Some),
            Self::Mutex | Self::OncePer | Self::Nothing => Ok(None),
        }
    }
}

impl fmt::Display for LockChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recipe(id) => id,
            Self::Mutex => "leasehold",
            Self::OncePer => "once-per",
            Self::Nothing => "none",
        })
    }
}

/// Number of rounds by how often they were drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// The lock.
    pub choice: LockChoice,
    /// Never.
    pub none: i64,
    /// Once, as required.
    pub once: i64,
    /// More than once.
    pub more: i64,
}

/// Runs the rounds. Each instance is a process of this program.
///
/// # Errors
///
/// A process that does not start or that fails.
pub async fn play(program: &Path, choice: LockChoice, processes: u8, rounds: u32) -> Outcome<Tally> {
    let (_servers, urls) = servers(choice.row()?.map_or(1, |row| row.nodes));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("winners.db");
    let database = open(&path)?;
    let mut instances = Vec::new();
    for _ in 0..processes {
        let mut command = Command::new(program);
        command.args(["instance", "--lock", &choice.to_string(), "--database"]).arg(&path).args(&urls);
        instances.push(Worker::start(&mut command)?);
    }
    for instance in &mut instances {
        instance.read_line().await?;
    }
    for round in 0..rounds {
        for instance in &mut instances {
            instance.write_line(&round.to_string()).await?;
        }
        for instance in &mut instances {
            instance.read_line().await?;
        }
        if round.is_multiple_of(50) {
            progress::show(choice, format_args!("{round} of {rounds} rounds"));
        }
    }
    progress::done(choice);
    tally(&database, choice, rounds)
}

fn open(path: &Path) -> Outcome<Connection> {
    let database = Connection::open(path)?;
    database.busy_timeout(worker::LIMIT)?;
    // A run does not survive a crash of the machine, so nothing needs to be synced.
    database.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
         CREATE TABLE IF NOT EXISTS draw (id INTEGER PRIMARY KEY, round INTEGER NOT NULL);
         CREATE TABLE IF NOT EXISTS winner (draw INTEGER NOT NULL, ticket INTEGER NOT NULL);",
    )?;
    Ok(database)
}

fn tally(database: &Connection, choice: LockChoice, rounds: u32) -> Outcome<Tally> {
    let rounds_with = |how: &str| -> rusqlite::Result<i64> {
        let sql =
            format!("SELECT count(*) FROM (SELECT round FROM draw GROUP BY round HAVING count(*) {how})");
        database.query_row(&sql, [], |row| row.get(0))
    };
    let (once, more) = (rounds_with("= 1")?, rounds_with("> 1")?);
    Ok(Tally { choice, none: i64::from(rounds) - once - more, once, more })
}

/// The table of all locks.
#[must_use]
pub fn table(tallies: &[Tally]) -> String {
    let mut out =
        String::from("| lock | not drawn | drawn once | drawn more than once |\n|---|---|---|---|\n");
    for Tally { choice, none, once, more } in tallies {
        let _ = writeln!(out, "| {choice} | {none} | {once} | {more} |");
    }
    out
}

/// One instance of the service: plays a round for each line of its standard input.
///
/// # Errors
///
/// A server or a database that fails.
pub async fn instance(choice: LockChoice, database: &Path, urls: &[String]) -> Outcome<()> {
    let database = open(database)?;
    let process = Process::connect(urls).await?;
    let client = match choice {
        LockChoice::Recipe(_) | LockChoice::Nothing => None,
        LockChoice::Mutex | LockChoice::OncePer => Some(leasehold::Client::connect(&urls[0]).await?),
    };
    println!("ready");
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let round: u32 = line.trim().parse()?;
        match &client {
            None if choice == LockChoice::Nothing => draw(round, &database)?,
            None => draw_with_recipe(choice, &process, round, &database).await?,
            Some(client) => draw_with_leasehold(choice, client, round, &database).await?,
        }
        println!("done");
    }
    Ok(())
}

async fn draw_with_recipe(
    choice: LockChoice,
    process: &Arc<Process>,
    round: u32,
    database: &Connection,
) -> Outcome<()> {
    let Some(row) = choice.row()? else { return Ok(()) };
    let redis = Redis::new(Arc::new(RealClient::new(process.clone(), None)));
    let mut recipe =
        (row.make)(redis, LockOptions { key: format!("lottery:{round}"), ..LockOptions::default() });
    if recipe.try_lock().await?.is_none() {
        return recipe.give_up().await.map_err(Into::into);
    }
    draw_unless_drawn(round, database)?;
    recipe.unlock().await?;
    Ok(())
}

async fn draw_with_leasehold(
    choice: LockChoice,
    client: &leasehold::Client,
    round: u32,
    database: &Connection,
) -> Outcome<()> {
    let name = format!("lottery:{round}");
    if choice == LockChoice::OncePer {
        if let Some(guard) = client.once_per(&name, Duration::from_secs(3_600)).start().await? {
            draw(round, database)?;
            guard.release().await?;
        }
    } else if let Some(guard) = client.mutex(&name).try_lock().await? {
        draw_unless_drawn(round, database)?;
        guard.release().await?;
    }
    Ok(())
}

fn draw_unless_drawn(round: u32, database: &Connection) -> Outcome<()> {
    let sql = "SELECT EXISTS (SELECT 1 FROM draw WHERE round = ?1)";
    let is_drawn: bool = database.query_row(sql, [round], |row| row.get(0))?;
    if is_drawn { Ok(()) } else { draw(round, database) }
}

fn draw(round: u32, database: &Connection) -> Outcome<()> {
    let transaction = database.unchecked_transaction()?;
    transaction.execute("INSERT INTO draw (round) VALUES (?1)", [round])?;
    let draw = transaction.last_insert_rowid();
    for _ in 0..WINNERS {
        let ticket = i64::try_from(getrandom::u64()? % TICKETS)?;
        transaction.execute("INSERT INTO winner (draw, ticket) VALUES (?1, ?2)", params![draw, ticket])?;
    }
    transaction.commit()?;
    Ok(())
}
