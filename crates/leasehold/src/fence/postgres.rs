//! A fence in PostgreSQL: a table of the highest tokens, which a transaction checks first and keeps locked until it ends.
//!
//! The check is one statement, [`CHECK_SQL`], which programs in other languages can run too. It records the token for the
//! resource. If a newer holder has written there, it raises an error, so the transaction cannot commit. Until the transaction
//! ends, a newer holder waits in its own check. So writes happen in the order of the tokens.
//!
//! Run it first in the transaction, and not in a savepoint (a nested `Transaction` of the driver is one): after ROLLBACK TO
//! SAVEPOINT, the transaction can go on and commit as if there had been no check, whatever it said.
//! What a transaction has written before the check is not undone by a wait. If another transaction
//! keeps the fence for longer than `lock_timeout` (10 s unless the function is altered), the error names its session.
//!
//! The store of the lock may be any, for example Redis. [`create`] makes the table and the function. The store `postgres:`
//! makes them with its own tables, if their schema is `leasehold`.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! # let (mut database, connection) = tokio_postgres::connect("host=localhost", tokio_postgres::NoTls).await?;
//! let client = leasehold::Client::connect("redis://10.0.0.1").await?;
//! let guard = client.mutex("report").lock().await?;
//!
//! let transaction = database.transaction().await?;
//! leasehold::fence::postgres::check(&transaction, &guard).await?;
//! transaction.execute("UPDATE report SET body = $1", &[&"new"]).await?;
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use super::check_ahead;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use leasehold_core::Token;
use leasehold_postgres::{Present, create_for_transactions, foreign_owners, strangers};

/// The statement of the check: the resource as text, and the token as a 64-bit integer. A stale token raises an error with the
/// SQLSTATE `LH001`.
///
/// Whatever types a driver gives its parameters, the statement calls no function of this name with other arguments, which another role may
/// have created in the schema.
///
/// ```
/// let check = "SELECT leasehold.check_fence($1::pg_catalog.text, $2::pg_catalog.int8)";
/// assert_eq!(leasehold::fence::postgres::CHECK_SQL, check);
/// ```
pub const CHECK_SQL: &str = "SELECT leasehold.check_fence($1::pg_catalog.text, $2::pg_catalog.int8)";

const SCHEMA: &str = "leasehold";

/// SQLSTATE of the error for a stale token, for programs that run [`CHECK_SQL`] with another driver.
///
/// ```
/// assert_eq!(leasehold::fence::postgres::STALE_SQLSTATE, "LH001");
/// ```
pub const STALE_SQLSTATE: &str = "LH001";

/// SQLSTATE of the error for a transaction lock in a transaction that is not READ COMMITTED.
const ISOLATION_SQLSTATE: &str = "LH002";

/// Creates the tables and the functions of the fence and of [`TransactionLock`](crate::postgres::TransactionLock) in the schema
/// `leasehold`, unless they exist. What an administrator has changed in the functions stays.
///
/// ```no_run
/// # async fn example(database: tokio_postgres::Client) -> Result<(), leasehold::Error> {
/// leasehold::fence::postgres::create(&database).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `is_unavailable` if the role may not create them, if one of them belongs to a role that this one cannot trust, or if the server is not
/// reached.
///
/// # Cancel safety
///
/// If the future is dropped, either all is created or nothing.
pub async fn create(database: &Client) -> Result<(), Error> {
    let what = "the fence could not be created";
    let present = async || {
        let rows = database.query_typed(Present::query(SCHEMA).as_str(), &[]).await;
        let rows = rows.map_err(|error| failed(what, error))?;
        let is_there = |at| rows.first().is_some_and(|row| row.try_get(at).unwrap_or(false));
        Ok::<_, Error>(Present { schema: is_there(0), fence: is_there(1), transaction_lock: is_there(2) })
    };
    let check_owners = async || {
        let rows = database.query_typed(foreign_owners(SCHEMA, None).as_str(), &[]).await;
        let rows = rows.map_err(|error| failed(what, error))?;
        let found: Option<String> = rows.first().and_then(|row| row.try_get(0).ok().flatten());
        found.map_or(Ok(()), |found| {
            Err(Error::new(ErrorKind::Unavailable, format!("{what}: {}", strangers(SCHEMA, &found))))
        })
    };
    for is_last in [false, true] {
        let found = present().await?;
        if found.fence && found.transaction_lock {
            return Ok(());
        }
        check_owners().await?;
        if let Err(error) = database.batch_execute(create_for_transactions(SCHEMA, found).as_str()).await {
            let _ = database.batch_execute("ROLLBACK").await;
            // Another session may have created them meanwhile.
            if is_last || present().await? == found {
                return Err(failed(what, error));
            }
        }
    }
    // What it did not create may be a stranger's.
    check_owners().await
}

/// Checks the token of a guard for the resource that the lock protects, and records it. The resource is the lock's name.
///
/// ```no_run
/// # async fn example(transaction: tokio_postgres::Transaction<'_>, guard: leasehold::Guard) -> Result<(), leasehold::Error> {
/// leasehold::fence::postgres::check(&transaction, &guard).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `is_stale` if a newer holder has written: the transaction can only be rolled back. `is_ahead` if the token is a day or more
/// ahead of this machine's clock: nothing was sent. `is_timeout` if another transaction
/// keeps the fence. `is_unavailable` if the fence was not created, or the server is not reached.
///
/// # Cancel safety
///
/// If the future is dropped, the check may or may not be part of the transaction: roll it back.
pub async fn check(transaction: &Transaction<'_>, guard: &Guard) -> Result<(), Error> {
    check_token(transaction, guard.name(), guard.token()).await
}

/// As [`check`], for a resource of any name and a token that came from elsewhere.
///
/// ```no_run
/// # async fn example(transaction: tokio_postgres::Transaction<'_>, token: leasehold::Token) -> Result<(), leasehold::Error> {
/// leasehold::fence::postgres::check_token(&transaction, "report", token).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As [`check`].
///
/// # Cancel safety
///
/// As [`check`].
pub async fn check_token(transaction: &Transaction<'_>, resource: &str, token: Token) -> Result<(), Error> {
    check_ahead(format_args!("the fence of {resource:?}"), token)?;
    check_token_ahead(transaction, resource, token).await
}

/// As [`check_token`], but also for a token that is ahead of this machine's clock: for a store whose tokens are, since its clock was
/// set back.
///
/// ```no_run
/// # async fn example(transaction: tokio_postgres::Transaction<'_>, token: leasehold::Token) -> Result<(), leasehold::Error> {
/// leasehold::fence::postgres::check_token_ahead(&transaction, "report", token).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As [`check`], except `is_ahead`.
///
/// # Cancel safety
///
/// As [`check`].
pub async fn check_token_ahead(
    transaction: &Transaction<'_>,
    resource: &str,
    token: Token,
) -> Result<(), Error> {
    let token = i64::from(token);
    let checked = transaction.query_typed(CHECK_SQL, &[(&resource, Type::TEXT), (&token, Type::INT8)]).await;
    checked.map(drop).map_err(|error| failed(&format!("the fence of {resource:?}"), error))
}

pub(crate) fn failed(what: &str, error: tokio_postgres::Error) -> Error {
    let kind = match error.code() {
        Some(code) if code.code() == STALE_SQLSTATE => ErrorKind::Stale,
        Some(code) if code.code() == ISOLATION_SQLSTATE => ErrorKind::Invalid,
        Some(&SqlState::LOCK_NOT_AVAILABLE) => ErrorKind::Timeout,
        _ => ErrorKind::Unavailable,
    };
    let message = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
    let remedy = match error.code() {
        Some(&(SqlState::UNDEFINED_FUNCTION | SqlState::UNDEFINED_TABLE | SqlState::INVALID_SCHEMA_NAME)) => {
            "; let the owner run `leasehold migrate`, or fence::postgres::create"
        }
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            "; let the owner run: GRANT USAGE ON SCHEMA leasehold TO role; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL \
             TABLES IN SCHEMA leasehold TO role"
        }
        _ => "",
    };
    Error::new(kind, format!("{what}: {message}{remedy}")).with_source(error)
}
