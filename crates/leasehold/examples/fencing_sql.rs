//! A holder that was stopped for too long, and a table whose update refuses it.
//!
//! The condition is the same in every SQL database: the write and the check are one statement.

use std::time::Duration;

use leasehold::Token;
use leasehold::blocking::Client;
use rusqlite::{Connection, params};

const TABLE: &str =
    "CREATE TABLE report (id INTEGER PRIMARY KEY, body TEXT NOT NULL, fence INTEGER NOT NULL)";

/// Whether the row was changed. If not, somebody with a newer lease was here before.
fn write(database: &Connection, body: &str, token: Token) -> rusqlite::Result<bool> {
    let sql = "UPDATE report SET body = ?1, fence = ?2 WHERE id = 1 AND fence <= ?2";
    Ok(database.execute(sql, params![body, i64::from(token)])? == 1)
}

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = Connection::open_in_memory()?;
    database.execute_batch(TABLE)?;
    database.execute("INSERT INTO report VALUES (1, '', 0)", [])?;
    let client = Client::connect("memory:")?;

    // It takes the lock, and is stopped before it writes: its lease runs out.
    let stopped = client.mutex("report").ttl(Duration::from_millis(100)).auto_renew(false).lock()?;
    let _lost = stopped.lost_within(Duration::from_secs(10));
    let next = client.mutex("report").lock()?;
    assert!(write(&database, "by the new holder", next.token())?);

    // It goes on, and knows nothing of all that.
    assert!(!write(&database, "by the old holder", stopped.token())?);
    let body: String = database.query_row("SELECT body FROM report", [], |row| row.get(0))?;
    assert_eq!(body, "by the new holder");
    println!("the table holds what was written {body}");
    Ok(())
}
