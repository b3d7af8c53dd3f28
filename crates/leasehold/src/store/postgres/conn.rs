//! One connection, and flights: statements that are sent together and answered together.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Connection, Error, Row, SimpleQueryMessage, Socket, Statement};

use super::error;
use super::limits::{IDLE_TIMEOUT_MS, LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS};
use super::params::Request;
use crate::store::StoreError;

/// Largest number of statements that are polled in the order in which they are sent.
const MAX_FLIGHT: usize = 24;

/// How a connection keeps the settings of transactions.
#[derive(Clone, Debug, Default)]
pub(super) enum Settings {
    /// As the role has them: a new connection.
    #[default]
    Unknown,
    /// The session has them, and statements are prepared once.
    Session,
    /// Each transaction sets them, because a pooler may give it another session: the statement that begins one.
    Transaction(String),
}

/// The settings of every transaction. A role or a database may have other defaults.
pub(super) fn settings(synchronous_commit: &str) -> Vec<(&'static str, String)> {
    vec![
        ("synchronous_commit", synchronous_commit.to_owned()),
        ("lock_timeout", LOCK_TIMEOUT_MS.to_string()),
        ("statement_timeout", STATEMENT_TIMEOUT_MS.to_string()),
        ("idle_in_transaction_session_timeout", IDLE_TIMEOUT_MS.to_string()),
        ("jit", "off".to_owned()),
        // A statement that was prepared while the tables were small must not read all of them once they have grown.
        ("enable_seqscan", "off".to_owned()),
    ]
}

/// Lets a session be silent, and a transaction wait for a row, where the server knows limits for that (since PostgreSQL 14 and 17).
pub(super) const NO_SESSION_LIMITS: &str = "SELECT set_config(name, '0', false) FROM pg_settings \
    WHERE name IN ('idle_session_timeout', 'transaction_timeout')";

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// The statement that begins a transaction behind a pooler.
fn begin_with(settings: &[(&'static str, String)]) -> String {
    let set = settings.iter().map(|(name, value)| format!("; SET LOCAL {name} = {value}"));
    std::iter::once(BEGIN.to_owned()).chain(set).collect()
}

/// What a flight begins or ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// It is one statement, which is its own transaction.
    Alone,
    /// It begins a transaction.
    Begin,
    /// It is in the middle of one.
    Within,
    /// It commits.
    Commit,
    /// It reads a snapshot, in a transaction of its own.
    Snapshot,
}

/// The numbers of statements and of flights.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Sent {
    pub(super) statements: std::sync::atomic::AtomicU64,
    pub(super) flights: std::sync::atomic::AtomicU64,
}

/// A connection that one flight at a time uses.
pub(super) struct Conn {
    pub(super) client: Client,
    task: AbortHandle,
    prepared: Mutex<HashMap<String, Statement>>,
    settings: Settings,
    /// Another server, or another session, should answer.
    is_unfit: AtomicBool,
    /// The server ended the session within a transaction, because the client was silent for too long.
    was_rolled_back: Arc<AtomicBool>,
    /// What was sent, for tests of what commands cost.
    #[cfg(test)]
    pub(super) sent: Arc<Sent>,
}

impl Drop for Conn {
    /// A connection whose server does not answer would wait for it for ever.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Conn {
    /// The connection's task runs on the current runtime.
    pub(super) fn new<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        client: Client,
        mut connection: Connection<Socket, S>,
        messages: Option<UnboundedSender<AsyncMessage>>,
    ) -> Self {
        let was_rolled_back = Arc::new(AtomicBool::new(false));
        let rolled_back = was_rolled_back.clone();
        let task = tokio::spawn(async move {
            loop {
                match std::future::poll_fn(|context| connection.poll_message(context)).await {
                    Some(Ok(message)) => {
                        // A receiver that is gone listens no longer.
                        if let Some(messages) = &messages {
                            let _ = messages.send(message);
                        }
                    }
                    Some(Err(error)) => {
                        tracing::debug!(%error, "a connection to PostgreSQL ended");
                        rolled_back.store(is_idle_timeout(&error), Ordering::Release);
                        return;
                    }
                    None => return,
                }
            }
        });
        Self {
            client,
            task: task.abort_handle(),
            prepared: Mutex::default(),
            settings: Settings::default(),
            is_unfit: AtomicBool::new(false),
            was_rolled_back,
            #[cfg(test)]
            sent: Arc::default(),
        }
    }

    /// Makes the settings part of the session, or of each transaction.
    pub(super) async fn set(
        &mut self,
        settings: &[(&'static str, String)],
        is_pooled: bool,
    ) -> Result<(), StoreError> {
        if is_pooled {
            self.settings = Settings::Transaction(begin_with(settings));
            return Ok(());
        }
        let mut set = format!("SET default_transaction_isolation = 'read committed'; {NO_SESSION_LIMITS}");
        for (name, value) in settings {
            set += &format!("; SET {name} = {value}");
        }
        self.client.batch_execute(&set).await.map_err(|error| error::explain(error, false))?;
        self.settings = Settings::Session;
        Ok(())
    }

    /// The only value that a query returns.
    pub(super) async fn value(&self, query: &str) -> Result<String, StoreError> {
        let messages = self.client.simple_query(query).await;
        let messages = messages.map_err(|error| error::explain(error, false))?;
        let value = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(ToOwned::to_owned),
            _ => None,
        });
        value.ok_or_else(|| error::damaged("an empty answer"))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Whether no further command should use it.
    pub(super) fn is_unfit(&self) -> bool {
        self.is_unfit.load(Ordering::Relaxed)
    }

    /// Whether the error says, or is due to it, that the server rolled the transaction back before it read what was sent last.
    pub(super) fn has_rolled_back(&self, error: &Error) -> bool {
        is_idle_timeout(error) || error.is_closed() && self.was_rolled_back.load(Ordering::Acquire)
    }

    /// Sends the statements together, and returns the rows of each. An error of a statement ends the transaction.
    pub(super) async fn fly(&self, frame: Frame, requests: &[Request<'_>]) -> Result<Vec<Vec<Row>>, Error> {
        #[cfg(test)]
        self.sent.statements.fetch_add(requests.len() as u64, Ordering::Relaxed);
        let (before, after) = self.frame(frame);
        let statements = match &self.settings {
            Settings::Session => Some(self.prepare(requests).await?),
            Settings::Unknown | Settings::Transaction(_) => None,
        };
        let mut rows = Vec::with_capacity(requests.len());
        let count = requests.len();
        let mut parts: Vec<_> = requests.chunks(MAX_FLIGHT).collect();
        if parts.is_empty() {
            parts.push(&[]);
        }
        let (last, mut sent) = (parts.len() - 1, 0);
        for (number, part) in parts.into_iter().enumerate() {
            let part_statements = statements.as_ref().map(|all| &all[sent..sent + part.len()]);
            sent += part.len();
            let before = before.filter(|_| number == 0);
            let after = after.filter(|_| number == last);
            rows.extend(self.fly_part(before, part, part_statements, after).await?);
        }
        debug_assert_eq!(rows.len(), count, "each statement has its rows");
        Ok(rows)
    }

    fn frame(&self, frame: Frame) -> (Option<&str>, Option<&'static str>) {
        let begin = match &self.settings {
            Settings::Transaction(begin) => begin,
            Settings::Unknown | Settings::Session => BEGIN,
        };
        let is_pooled = matches!(self.settings, Settings::Transaction(_));
        match frame {
            Frame::Alone if is_pooled => (Some(begin), Some("COMMIT")),
            Frame::Alone | Frame::Within => (None, None),
            Frame::Begin => (Some(begin), None),
            Frame::Commit => (None, Some("COMMIT")),
            Frame::Snapshot => (Some("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"), Some("COMMIT")),
        }
    }

    async fn fly_part(
        &self,
        before: Option<&str>,
        requests: &[Request<'_>],
        statements: Option<&[Statement]>,
        after: Option<&str>,
    ) -> Result<Vec<Vec<Row>>, Error> {
        #[cfg(test)]
        self.sent.flights.fetch_add(1, Ordering::Relaxed);
        let simple = |sql: &str| {
            let sql = sql.to_owned();
            async move { self.client.batch_execute(&sql).await.map(|()| Vec::new()) }
        };
        let query = |at: usize| {
            let request = &requests[at];
            async move {
                let typed: Vec<_> = request.params.iter().map(super::params::Param::typed).collect();
                match statements {
                    Some(statements) => {
                        let plain: Vec<_> = typed.iter().map(|(value, _)| *value).collect();
                        self.client.query(&statements[at], &plain).await
                    }
                    None => self.client.query_typed(request.sql, &typed).await,
                }
            }
        };
        type Flying<'f> = std::pin::Pin<Box<dyn Future<Output = Result<Vec<Row>, Error>> + Send + 'f>>;
        let mut flying: Vec<Flying<'_>> = Vec::with_capacity(requests.len() + 2);
        flying.extend(before.map(|sql| Box::pin(simple(sql)) as Flying<'_>));
        flying.extend((0..requests.len()).map(|at| Box::pin(query(at)) as Flying<'_>));
        flying.extend(after.map(|sql| Box::pin(simple(sql)) as Flying<'_>));
        // Each future sends its message when it is polled first, which `join_all` does in this order.
        let mut answers = join_all(flying).await;
        if let Some(at) = answers.iter().position(Result::is_err) {
            let error = answers.swap_remove(at).err().unwrap_or_else(|| unreachable!("it is an error"));
            if is_wrong_session(&error) {
                self.is_unfit.store(true, Ordering::Relaxed);
            }
            return Err(error);
        }
        let skipped = usize::from(before.is_some());
        Ok(answers.into_iter().skip(skipped).take(requests.len()).flatten().collect())
    }

    /// The statements of the session, made on their first use.
    async fn prepare(&self, requests: &[Request<'_>]) -> Result<Vec<Statement>, Error> {
        let known =
            |sql: &str| self.prepared.lock().unwrap_or_else(PoisonError::into_inner).get(sql).cloned();
        let mut statements = Vec::with_capacity(requests.len());
        for request in requests {
            let statement = match known(request.sql) {
                Some(statement) => statement,
                None => {
                    let types: Vec<Type> = request.params.iter().map(|param| param.typed().1).collect();
                    let statement = self.client.prepare_typed(request.sql, &types).await?;
                    let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
                    prepared.insert(request.sql.to_owned(), statement.clone());
                    statement
                }
            };
            statements.push(statement);
        }
        Ok(statements)
    }

    /// Ends a transaction without effect.
    pub(super) async fn roll_back(&self) -> Result<(), Error> {
        self.client.batch_execute("ROLLBACK").await
    }
}

/// Whether a new connection may lead to a server, or a session, that does not fail like this: the primary has become a standby, or
/// a pooler has changed the session.
fn is_wrong_session(error: &Error) -> bool {
    matches!(
        error.code(),
        Some(
            &(SqlState::READ_ONLY_SQL_TRANSACTION
                | SqlState::INVALID_SQL_STATEMENT_NAME
                | SqlState::DUPLICATE_PSTATEMENT)
        )
    )
}

/// Whether the server ended the session because nothing came within a transaction. What comes later is not read.
fn is_idle_timeout(error: &Error) -> bool {
    error.code() == Some(&SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT)
}

/// Whether the transaction can be run again as a whole.
pub(super) fn is_transient(error: &Error) -> bool {
    matches!(
        error.code(),
        Some(
            &(SqlState::T_R_SERIALIZATION_FAILURE
                | SqlState::T_R_DEADLOCK_DETECTED
                | SqlState::UNIQUE_VIOLATION)
        )
    )
}
