//! A holder that was stopped for longer than its lease, and a table whose update refuses its write.
//!
//! The condition is the same in every SQL database: the write and the check are one statement. This runs on SQLite, in
//! memory, or on PostgreSQL, by way of `psql`, where `LEASEHOLD_EXAMPLE_POSTGRES` is a connection string.

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use leasehold::Token;
use leasehold::blocking::Client;
use rusqlite::{Connection, params};

type Outcome<T> = Result<T, Box<dyn Error>>;

trait Database {
    /// Whether the row was changed. If not, a holder with a newer lease has changed it before.
    fn write(&self, body: &str, token: Token) -> Outcome<bool>;

    fn read(&self) -> Outcome<String>;
}

struct Sqlite(Connection);

impl Sqlite {
    fn new() -> Outcome<Self> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(
            "CREATE TABLE report (id INTEGER PRIMARY KEY, body TEXT NOT NULL, fence INTEGER NOT NULL);
            INSERT INTO report VALUES (1, '', 0)",
        )?;
        Ok(Self(connection))
    }
}

impl Database for Sqlite {
    fn write(&self, body: &str, token: Token) -> Outcome<bool> {
        let sql = "UPDATE report SET body = ?1, fence = ?2 WHERE id = 1 AND fence <= ?2";
        Ok(self.0.execute(sql, params![body, i64::from(token)])? == 1)
    }

    fn read(&self) -> Outcome<String> {
        Ok(self.0.query_row("SELECT body FROM report", [], |row| row.get(0))?)
    }
}

/// A connection string. The table goes with the example.
struct Postgres(String);

impl Postgres {
    fn new(url: String) -> Outcome<Self> {
        let database = Self(url);
        database.run(
            "CREATE TABLE leasehold_report (id bigint PRIMARY KEY, body text NOT NULL, fence bigint NOT NULL);
            INSERT INTO leasehold_report VALUES (1, '', 0)",
        )?;
        Ok(database)
    }

    fn run(&self, sql: &str) -> Outcome<String> {
        let mut psql = Command::new("psql");
        psql.args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--dbname"]).arg(&self.0);
        let output = psql.args(["--command", sql]).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }
}

impl Database for Postgres {
    fn write(&self, body: &str, token: Token) -> Outcome<bool> {
        let body = body.replace('\'', "''");
        let sql = format!(
            "UPDATE leasehold_report SET body = '{body}', fence = {token}
            WHERE id = 1 AND fence <= {token} RETURNING id"
        );
        Ok(self.run(&sql)? == "1")
    }

    fn read(&self) -> Outcome<String> {
        self.run("SELECT body FROM leasehold_report")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let _ = self.run("DROP TABLE leasehold_report");
    }
}

pub(crate) fn main() -> Outcome<()> {
    match std::env::var("LEASEHOLD_EXAMPLE_POSTGRES") {
        Ok(url) => show(&Postgres::new(url)?),
        Err(_) => show(&Sqlite::new()?),
    }
}

fn show(database: &dyn Database) -> Outcome<()> {
    let client = Client::connect("memory:")?;

    // It acquires the lock, and is stopped before it writes. Its lease expires.
    let stopped = client.mutex("report").ttl(Duration::from_millis(100)).auto_renew(false).lock()?;
    let _lost = stopped.lost_within(Duration::from_secs(10));
    let next = client.mutex("report").lock()?;
    assert!(database.write("by the new holder", next.token())?);

    // It continues, and does not know that it was stopped.
    assert!(!database.write("by the old holder", stopped.token())?);
    assert_eq!(database.read()?, "by the new holder");
    println!("the table holds what was written {}", database.read()?);
    Ok(())
}
