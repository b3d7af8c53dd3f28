//! The lottery: every instance of a service wakes at noon, and exactly one may draw ten winners and store them.
//!
//! Whoever gets the lock looks whether this round was drawn, and otherwise draws. Nothing in the database keeps two from
//! drawing, so that it can be seen.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, params};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::process::Command;

use crate::progress;
use crate::real::{Process, RealClient};
use crate::recipe::Terms;
use crate::recipes::{ROWS, Row};
use crate::redis::Redis;
use crate::run::{Outcome, find, servers};
use crate::worker::{self, Worker};

/// How many win.
const WINNERS: i64 = 10;

/// From how many they are drawn.
const TICKETS: u64 = 1_000_000;

/// How the instances agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a published recipe: one try.
    Recipe(&'static str),
    /// By leasehold's mutex: one try.
    Mutex,
    /// By leasehold's `once_per`, without looking into the database.
    OncePer,
    /// Not at all: each one draws, which has to be seen.
    Nothing,
}

impl Way {
    /// By its name.
    ///
    /// # Errors
    ///
    /// There is none of that name.
    pub fn named(name: &str) -> Outcome<Self> {
        match name {
            "leasehold" => Ok(Self::Mutex),
            "once-per" => Ok(Self::OncePer),
            "none" => Ok(Self::Nothing),
            id => Ok(Self::Recipe(find(id)?.id)),
        }
    }

    /// All of them.
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

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recipe(id) => id,
            Self::Mutex => "leasehold",
            Self::OncePer => "once-per",
            Self::Nothing => "none",
        })
    }
}

/// How many rounds were drawn how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// By whom.
    pub way: Way,
    /// Not at all.
    pub none: i64,
    /// As they should be.
    pub once: i64,
    /// More than once.
    pub more: i64,
}

/// Runs so many rounds with so many instances, each a process of this program.
///
/// # Errors
///
/// A process that can't be started or that fails.
pub async fn play(program: &Path, way: Way, processes: u8, rounds: u32) -> Outcome<Tally> {
    let (_servers, urls) = servers(way.row()?.map_or(1, |row| row.nodes));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("winners.db");
    let database = open(&path)?;
    let mut instances = Vec::new();
    for _ in 0..processes {
        let mut command = Command::new(program);
        command.args(["instance", "--lock", &way.to_string(), "--database"]).arg(&path).args(&urls);
        instances.push(Worker::start(&mut command)?);
    }
    for instance in &mut instances {
        instance.hear().await?;
    }
    for round in 0..rounds {
        for instance in &mut instances {
            instance.tell(&round.to_string()).await?;
        }
        for instance in &mut instances {
            instance.hear().await?;
        }
        if round.is_multiple_of(50) {
            progress::show(way, format_args!("{round} of {rounds} rounds"));
        }
    }
    progress::done(way);
    tally(&database, way, rounds)
}

fn open(path: &Path) -> Outcome<Connection> {
    let database = Connection::open(path)?;
    database.busy_timeout(worker::LIMIT)?;
    // What is lost with the machine is of no interest here.
    database.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
         CREATE TABLE IF NOT EXISTS draw (id INTEGER PRIMARY KEY, round INTEGER NOT NULL);
         CREATE TABLE IF NOT EXISTS winner (draw INTEGER NOT NULL, ticket INTEGER NOT NULL);",
    )?;
    Ok(database)
}

fn tally(database: &Connection, way: Way, rounds: u32) -> Outcome<Tally> {
    let rounds_with = |how: &str| -> rusqlite::Result<i64> {
        let sql =
            format!("SELECT count(*) FROM (SELECT round FROM draw GROUP BY round HAVING count(*) {how})");
        database.query_row(&sql, [], |row| row.get(0))
    };
    let (once, more) = (rounds_with("= 1")?, rounds_with("> 1")?);
    Ok(Tally { way, none: i64::from(rounds) - once - more, once, more })
}

/// The table of all ways.
#[must_use]
pub fn table(tallies: &[Tally]) -> String {
    let mut out =
        String::from("| lock | not drawn | drawn once | drawn more than once |\n|---|---|---|---|\n");
    for Tally { way, none, once, more } in tallies {
        let _ = writeln!(out, "| {way} | {none} | {once} | {more} |");
    }
    out
}

/// One instance of the service: a round for each line that it hears.
///
/// # Errors
///
/// A server or a database that fails.
pub async fn instance(way: Way, database: &Path, urls: &[String]) -> Outcome<()> {
    let database = open(database)?;
    let process = Process::connect(urls).await?;
    let client = match way {
        Way::Recipe(_) | Way::Nothing => None,
        Way::Mutex | Way::OncePer => Some(leasehold::Client::connect(&urls[0]).await?),
    };
    println!("ready");
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let round: u32 = line.trim().parse()?;
        match &client {
            None if way == Way::Nothing => draw(round, &database)?,
            None => by_recipe(way, &process, round, &database).await?,
            Some(client) => by_leasehold(way, client, round, &database).await?,
        }
        println!("done");
    }
    Ok(())
}

async fn by_recipe(way: Way, process: &Arc<Process>, round: u32, database: &Connection) -> Outcome<()> {
    let Some(row) = way.row()? else { return Ok(()) };
    let redis = Redis::new(Arc::new(RealClient::new(process.clone(), None)));
    let mut recipe = (row.make)(redis, Terms { key: format!("lottery:{round}"), ..Terms::default() });
    if recipe.try_lock().await?.is_none() {
        return recipe.give_up().await.map_err(Into::into);
    }
    draw_unless_drawn(round, database)?;
    recipe.unlock().await?;
    Ok(())
}

async fn by_leasehold(
    way: Way,
    client: &leasehold::Client,
    round: u32,
    database: &Connection,
) -> Outcome<()> {
    let name = format!("lottery:{round}");
    if way == Way::OncePer {
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
