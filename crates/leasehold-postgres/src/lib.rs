//! `postgres:`, the lease tables in the application's own database.
//!
//! **Layout.** One row per resource, which also has its first lease, and one row per further lease, queue entry and tombstone
//! (`schema.rs`). The rules are the model's: they are in no function of the database.
//!
//! **Round trips.** An uncontended acquire, release or renewal is one statement (`sql.rs`). All other commands are a transaction
//! of two round trips (`transaction.rs`): lock, read, run the model on what was read (`rows.rs`), write and commit. A row lock makes
//! the commands of one resource follow each other, and no other isolation is needed.
//!
//! **Waiting.** A release also grants, in the same transaction, and notifies the waiter's client at its commit. A client
//! listens on one connection (`listener.rs`), whatever the number of its waiters. Behind a pooler in transaction mode nothing can
//! listen, unless `?listen=` names a way around it: the transaction leaves its pushes in a table, where the client looks for those
//! of all of its waiters a few times a second (`push_table.rs`).
//!
//! **Time.** Leases and tokens use the server's clock, read after the row lock was granted.
//!
//! **Errors.** A transaction whose COMMIT was not sent has changed nothing (`NotSent`). If the connection is lost after that, its
//! effect is unknown.

#![forbid(unsafe_code)]

mod answers;
mod base;
mod batch;
mod cache;
mod conn;
mod ddl;
mod dialer;
mod doctor;
mod error;
mod exec;
mod limits;
mod listener;
mod mailbox;
mod params;
mod pinned;
mod pool;
mod pooler;
mod push;
mod push_table;
mod query;
mod rights;
mod rows;
mod schema;
mod server;
mod single_statement;
mod sql;
mod sweep;
mod tls;
mod transaction;
mod url;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use leasehold_core::{Acquire, ClientId, Command, Failure, Resource};
use leasehold_store::tasks::{self, Tasks};
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Diagnose, Diagnosis, Inbox, OpenError, Store,
    StoreError,
};
use tokio::task::AbortHandle;

use conn::Conn;
pub use ddl::{Present, create_for_transactions, ddl, foreign_owners};
use dialer::Dialer;
use exec::Executor;
use limits::{POLL_INTERVALS, SWEEP_INTERVAL, in_time};
use listener::{Address, Listening};
use mailbox::Mailbox;
use params::Request;
pub use pinned::Pinned;
use pool::Pool;
use query::Query;
use schema::Home;
pub use schema::strangers;
use server::Server;
use sql::Sql;
use transaction::Session;
use url::Pooler;
pub use url::PostgresUrl;

/// What sets this store apart.
#[must_use]
pub const fn capabilities() -> Capabilities {
    Capabilities::new(POLL_INTERVALS)
}

/// Creates the tables, unless they exist, and makes the views and functions anew.
///
/// # Errors
///
/// The server is not reached, or refuses.
pub async fn migrate(url: &PostgresUrl) -> Result<(), OpenError> {
    let failed = |error| OpenError::from_store(url, &error);
    let conn = Dialer::new(url)?.connect(None).await.map_err(failed)?;
    in_time(schema::migrate(&conn, Home::of(url))).await.map_err(failed)
}

/// The lease tables of one database, for one client.
pub struct Postgres {
    executor: Arc<Executor>,
    url: Arc<PostgresUrl>,
    /// On the client's thread.
    tasks: Tasks,
    keepers: Vec<AbortHandle>,
}

impl Postgres {
    /// Connects for this client, creates missing tables, and listens. Runs on the runtime of the client's thread.
    ///
    /// # Errors
    ///
    /// The server is not reached, or refuses, or its tables are those of another version.
    pub async fn open(
        url: &PostgresUrl,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
    ) -> Result<Arc<Self>, OpenError> {
        let dialer = Dialer::open(url).await?;
        let server = Arc::new(Server::new(inbox.clone()));
        let opened = Opened::new(&dialer, url, client, &server).await;
        let Opened { listening, is_pooled, synchronous_commit } =
            opened.map_err(|error| OpenError::from_store(url, &error))?;
        let session = Session {
            sql: Sql::new(&url.schema, None),
            client,
            inbox: inbox.clone(),
            mailbox: Mailbox::new(listening.is_none()),
            // After a crash the last transactions may be missing, and tokens ahead of the clock would be given again.
            may_reserve: synchronous_commit != "off",
        };
        let pool = Pool::new(dialer, conn::settings(&synchronous_commit), is_pooled, url.connections, server);
        let executor = Arc::new(Executor { session, pool, contended: Mutex::default() });
        let mailbox = &executor.session.mailbox;
        let mut keepers = vec![
            sweep_regularly(Arc::downgrade(&executor), client),
            push_table::keep(Arc::downgrade(&executor), mailbox.clone()),
        ];
        if let Some((address, listening)) = listening {
            keepers.push(listener::keep(
                address,
                listening,
                inbox,
                Arc::downgrade(&executor),
                mailbox.clone(),
            ));
        }
        let (url, tasks) = (Arc::new(url.clone()), Tasks::current());
        Ok(Arc::new(Self { executor, url, tasks, keepers }))
    }

    /// Does this on the client's thread. The answer is waited for on any executor.
    fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        otherwise: impl FnOnce(StoreError) -> T + Send + 'static,
    ) -> BoxFuture<T> {
        self.tasks.answer(work, || otherwise(StoreError::runtime_ended()))
    }
}

/// What a new client finds out about the way to the server.
struct Opened {
    listening: Option<(Address, Listening)>,
    is_pooled: bool,
    /// As the address has it, or else the server for this role and database. All transactions of the client keep it, because it
    /// decides whether tokens may be reserved.
    synchronous_commit: String,
}

impl Opened {
    async fn new(
        dialer: &Dialer,
        url: &PostgresUrl,
        client: ClientId,
        server: &Arc<Server>,
    ) -> Result<Self, StoreError> {
        let first = dialer.connect(None).await?;
        in_time(schema::prepare(&first, Home::of(url))).await?;
        let settings = Pinned::new(
            "SELECT current_setting('synchronous_commit'), getdatabaseencoding(),
                has_function_privilege('pg_postmaster_start_time()', 'EXECUTE')",
        );
        let settings = in_time(async { Ok(first.row(&settings).await) }).await?;
        let settings = settings.map_err(|error| error::explain(error, false))?;
        let setting = |at: usize| settings.get(at).and_then(|setting| setting.as_deref()).unwrap_or_default();
        let (commit, encoding) = (setting(0), setting(1));
        if setting(2) != "t" {
            server.hide();
        }
        if encoding != "UTF8" {
            let message = format!("the database has the encoding {encoding}, and names of locks need UTF8");
            return Err(StoreError::new(Failure::NotSent, message));
        }
        let synchronous_commit = url.synchronous_commit.unwrap_or(commit).to_owned();
        // With `pooler=no` the client listens, but its settings stay out of sessions that may be shared.
        let is_pooled = url.pooler == Pooler::Yes || in_time(pooler::is_between(&first)).await?;
        if is_pooled {
            in_time(pooler::try_transaction(&first)).await?;
        }
        let listening = Self::listen(dialer, url, client, (&first, is_pooled), server).await?;
        Ok(Self { listening, is_pooled, synchronous_commit })
    }

    async fn listen(
        dialer: &Dialer,
        url: &PostgresUrl,
        client: ClientId,
        (first, is_pooled): (&Conn, bool),
        server: &Arc<Server>,
    ) -> Result<Option<(Address, Listening)>, StoreError> {
        let invalid = |error: OpenError| StoreError::new(Failure::NotSent, error.to_string());
        let may_be_pooled = url.pooler == Pooler::No;
        let Some(direct) = &url.listen else {
            if is_pooled && !may_be_pooled {
                tracing::info!(
                    "a pooler is in between: clients of {url} look for mail instead of being notified"
                );
                return Ok(None);
            }
            let address = Address::new(dialer.again(), url, client, may_be_pooled, server.clone());
            let listening = address.listen().await?;
            return Ok(Some((address, listening)));
        };
        let may_be_pooled = may_be_pooled || direct.pooler == Pooler::No;
        let dialer = Dialer::open(direct).await.map_err(invalid)?;
        let address = Address::new(dialer, url, client, may_be_pooled, server.clone());
        let listening = address.listen().await?;
        let present = Request::new(address.sql.of(&Query::Present(client)), vec![client.into()]);
        let seen = in_time(first.flag(present)).await?;
        if !seen {
            let message = "?listen= leads to another database: a notification would never arrive";
            return Err(StoreError::new(Failure::NotSent, message));
        }
        Ok(Some((address, listening)))
    }
}

/// Sweeps once a minute, at another time than other clients.
fn sweep_regularly(executor: Weak<Executor>, client: ClientId) -> AbortHandle {
    let offset = Duration::from_millis(u64::try_from(client.get() % 60_000).unwrap_or(0));
    let sweep = async move {
        tokio::time::sleep(offset).await;
        while let Some(executor) = executor.upgrade() {
            if let Err(error) = executor.sweep().await {
                tracing::debug!(error = error.message, "unused rows of PostgreSQL were not removed");
            }
            drop(executor);
            tokio::time::sleep(SWEEP_INTERVAL).await;
        }
    };
    tasks::spawn(sweep)
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.keepers.iter().for_each(AbortHandle::abort);
    }
}

impl Store for Postgres {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        let executor = self.executor.clone();
        self.spawn(async move { executor.call(&call.resource, &call.command).await }, Err)
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let (executor, count) = (self.executor.clone(), batch.len());
        let failed = move |error: StoreError| vec![Err(error); count];
        self.spawn(async move { executor.call_batch(&batch).await }, failed)
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let resources: HashSet<_> = attempts.iter().map(|(resource, _)| resource).collect();
        if resources.len() < attempts.len() {
            return None;
        }
        let (executor, attempts, count) = (self.executor.clone(), attempts.to_vec(), attempts.len());
        let failed = move |error: StoreError| vec![Err(error); count];
        let work = async move {
            match executor.acquire_all(&attempts).await {
                Ok(answers) => answers.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error); count],
            }
        };
        Some(self.spawn(work, failed))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let executor = self.executor.clone();
        self.spawn(async move { executor.list().await }, Err)
    }

    fn shard(&self, _resource: &Resource, command: &Command) -> u64 {
        // Renewals wait for no row. The other commands of holders do not wait for those of waiters, of which there may be thousands.
        match command {
            Command::Renew(_) => 2,
            Command::Acquire(_) => 1,
            _ => 0,
        }
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl Diagnose for Postgres {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let (url, executor) = (self.url.clone(), self.executor.clone());
        self.spawn(async move { doctor::diagnose(&url, &executor).await }, Err)
    }
}

#[cfg(test)]
mod tests;
