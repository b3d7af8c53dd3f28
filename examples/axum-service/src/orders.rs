//! The orders, in SQLite. Each row remembers the highest fencing token of its writers.

use std::sync::{Arc, Mutex, PoisonError};

use leasehold::Token;
use rusqlite::{Connection, OptionalExtension as _, params};
use serde::Serialize;

use crate::failure::Failure;

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Order {
    pub(crate) id: String,
    /// Present once it is shipped.
    pub(crate) parcel: Option<i64>,
}

#[derive(Clone)]
pub(crate) struct Orders(Arc<Mutex<Connection>>);

impl Orders {
    pub(crate) fn open(path: &str) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, parcel INTEGER, fence INTEGER NOT NULL DEFAULT 0);
            INSERT OR IGNORE INTO orders (id) VALUES ('1001'), ('1002'), ('1003')",
        )?;
        Ok(Self(Arc::new(Mutex::new(connection))))
    }

    pub(crate) async fn find(&self, id: &str) -> Result<Order, Failure> {
        let wanted = id.to_owned();
        let query = "SELECT parcel FROM orders WHERE id = ?1";
        let found = self.call(move |db| db.query_row(query, [wanted], |row| row.get(0)).optional()).await?;
        let parcel = found.ok_or_else(|| Failure::UnknownOrder(id.to_owned()))?;
        Ok(Order { id: id.to_owned(), parcel })
    }

    /// Writes the parcel, unless a holder with a higher token has written since.
    ///
    /// The thread may be stopped at any point, also between the check of the lease and the write. The condition is checked by
    /// the database, in the same statement.
    pub(crate) async fn set_parcel(&self, id: &str, parcel: i64, token: Token) -> Result<Order, Failure> {
        let (wanted, fence) = (id.to_owned(), i64::from(token));
        let update = "UPDATE orders SET parcel = ?1, fence = ?2 WHERE id = ?3 AND fence <= ?2";
        let changed = self.call(move |db| db.execute(update, params![parcel, fence, wanted])).await?;
        if changed == 0 {
            return Err(Failure::Stale(id.to_owned()));
        }
        Ok(Order { id: id.to_owned(), parcel: Some(parcel) })
    }

    /// Runs SQL on a thread that may block.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> rusqlite::Result<T> {
        let connection = self.0.clone();
        let call = move || work(&connection.lock().unwrap_or_else(PoisonError::into_inner));
        tokio::task::spawn_blocking(call).await.expect("SQL does not panic")
    }
}
