//! What PostgreSQL offers beyond the locks of every store: locks inside a transaction, and the tables of `postgres:`.

use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use crate::builder::{ClientBuilder, StoreConfig};
use crate::error::{Error, invalid};
use crate::fence::postgres::failed;
use crate::url::StoreUrl;
use leasehold_core::Name;
use leasehold_postgres::{PostgresUrl, ddl, migrate as create_tables};
use leasehold_store::credentials::CredentialCache;

/// A lock of a transaction of the program: held from [`lock`](Self::lock) until it commits or rolls back.
///
/// This is the lock of a row in the table `leasehold.transaction_lock`, which [`create`](crate::fence::postgres::create) or
/// `leasehold migrate` makes, with leasehold's names and errors. It has no lease and no renewal: it is held exactly as long as
/// the transaction, and the server ends it with the connection. Its waiters queue in the server, each with a connection and an
/// open transaction. It has no token, because the transaction itself is fenced: what it writes is committed or not. Only a role
/// with rights to the table can take it, unlike an advisory lock. Each name keeps one row, which may be deleted at any time.
///
/// It has names of its own. It excludes other `TransactionLock`s of the same name and database, and **no**
/// [`Mutex`](crate::Mutex). Use it where the critical section is one transaction, and a `Mutex` where it is more. Its wait ends
/// with the setting `lock_timeout` of the transaction, if there is one.
///
/// The transaction must be READ COMMITTED, PostgreSQL's default. A stricter one reads what was committed before its first
/// statement, which is the one that waits here: it would have the lock, and not see what the holder before it wrote. It is
/// refused.
///
/// ```no_run
/// # async fn example(mut database: tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold::postgres::TransactionLock;
///
/// let transaction = database.transaction().await?;
/// TransactionLock::new("balance:42")?.lock(&transaction).await?;
/// transaction.execute("UPDATE account SET balance = balance - 1 WHERE id = 42", &[]).await?;
/// transaction.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct TransactionLock {
    name: Name,
}

impl TransactionLock {
    /// The lock of this name.
    ///
    /// ```
    /// # use leasehold::postgres::TransactionLock;
    /// assert!(TransactionLock::new("").is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name that no lock can have.
    pub fn new(name: &str) -> Result<Self, Error> {
        let name = Name::new(name).map_err(|error| invalid(error.to_string()))?;
        Ok(Self { name })
    }

    /// Waits for the lock. The transaction holds it until it ends.
    ///
    /// ```no_run
    /// # async fn example(transaction: tokio_postgres::Transaction<'_>) -> Result<(), leasehold::Error> {
    /// leasehold::postgres::TransactionLock::new("balance:42")?.lock(&transaction).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `is_timeout` if the transaction's `lock_timeout` passed. `is_invalid` if the transaction is REPEATABLE READ or
    /// SERIALIZABLE. `is_unavailable` if the server ended the transaction, for example after a deadlock.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the server goes on waiting: roll the transaction back.
    pub async fn lock(&self, transaction: &Transaction<'_>) -> Result<(), Error> {
        self.ask(transaction, "SELECT leasehold.lock_transaction($1::pg_catalog.text)").await.map(drop)
    }

    /// Acquires the lock if it is free. Returns whether the transaction holds it.
    ///
    /// ```no_run
    /// # async fn example(transaction: tokio_postgres::Transaction<'_>) -> Result<(), leasehold::Error> {
    /// if leasehold::postgres::TransactionLock::new("balance:42")?.try_lock(&transaction).await? { /* … */ }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` if the transaction is REPEATABLE READ or SERIALIZABLE. `is_unavailable` if the server is not reached.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the transaction may hold the lock.
    pub async fn try_lock(&self, transaction: &Transaction<'_>) -> Result<bool, Error> {
        let rows =
            self.ask(transaction, "SELECT leasehold.try_lock_transaction($1::pg_catalog.text)").await?;
        let held = rows.first().map(|row| row.try_get(0)).transpose().map_err(|error| self.failed(error))?;
        Ok(held.unwrap_or(false))
    }

    async fn ask(&self, transaction: &Transaction<'_>, sql: &str) -> Result<Vec<Row>, Error> {
        let name = self.name.as_str();
        let rows = transaction.query_typed(sql, &[(&name, Type::TEXT)]).await;
        rows.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: tokio_postgres::Error) -> Error {
        failed(&format!("transaction lock {:?}", self.name.as_str()), error)
    }
}

/// The statements that create the tables of `postgres:`, for a database administrator to review and run.
///
/// ```
/// let sql = leasehold::postgres::schema_sql("postgres://host/app?schema=locks")?;
/// assert!(sql.contains("CREATE TABLE locks.resource"));
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// # Errors
///
/// `is_invalid` for an invalid address.
pub fn schema_sql(url: &str) -> Result<String, Error> {
    Ok(ddl(address(url)?.schema()))
}

/// Creates the tables of `postgres:`, unless they exist. A client does the same when it connects, where its role may.
///
/// Call it in a tokio runtime.
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// leasehold::postgres::migrate("postgres://owner@host/app").await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `is_invalid` for an invalid address; `is_unavailable` if the role may not create them, or the server is not reached.
///
/// # Cancel safety
///
/// If the future is dropped, either all is created or nothing.
pub async fn migrate(url: &str) -> Result<(), Error> {
    let url = address(url)?;
    Ok(create_tables(&url).await?)
}

/// As [`migrate`], with the store and the [credentials](ClientBuilder::credentials) of a builder.
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// # async fn token() -> std::io::Result<leasehold::Credentials> { Ok(leasehold::Credentials::new("a token")) }
/// let builder = leasehold::Client::builder().store("postgres://owner@host/app").credentials(|_server| token());
/// leasehold::postgres::migrate_with(builder).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As [`migrate`]; `is_invalid` if the builder has no address.
///
/// # Cancel safety
///
/// As [`migrate`].
pub async fn migrate_with(builder: ClientBuilder) -> Result<(), Error> {
    let (store, options) = builder.into_parts()?;
    let url = store.as_ref().and_then(StoreConfig::address);
    let mut url =
        address(url.ok_or_else(|| invalid("name the store by its address, which begins with postgres:"))?)?;
    if let Some(provider) = options.provider {
        StoreUrl::Postgres(url.clone()).check_credentials()?;
        *url = url.with_credentials(&CredentialCache::new(provider));
    }
    Ok(create_tables(&url).await?)
}

fn address(url: &str) -> Result<Box<PostgresUrl>, Error> {
    match StoreUrl::parse(url)? {
        StoreUrl::Postgres(url) => Ok(url),
        _ => Err(invalid("only postgres: has tables to create; the address begins with postgres:")),
    }
}
