//! One connection, and pipelines: statements that are sent together and answered together.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::join_all;
use leasehold_store::{StoreError, tasks};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::AbortHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{
    AsyncMessage, CancelToken, Client, Connection, Error, Row, SimpleQueryMessage, SimpleQueryRow, Socket,
    Statement,
};

use super::error;
use super::limits::{IDLE_TIMEOUT_MS, LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS};
use super::params::{Reader, Request};
use super::pinned::Pinned;
use super::server::{Epoch, Server};

/// Largest number of statements that are polled in the order in which they are sent.
const MAX_PIPELINE: usize = 24;

/// Handles what the server sends unasked.
pub(super) type MessageHandler = Arc<dyn Fn(AsyncMessage) + Send + Sync>;

/// How a connection keeps the settings of transactions.
#[derive(Clone, Debug, Default)]
pub(super) enum Settings {
    /// As the role has them: a new connection.
    #[default]
    Unknown,
    /// The session has them, and statements are prepared once.
    Session,
    /// Each transaction sets them, because a pooler may give it another session.
    Transaction(Begin),
}

/// The statements that begin a transaction behind a pooler.
#[derive(Clone, Debug)]
pub(super) struct Begin {
    writing: Pinned,
    snapshot: Pinned,
}

impl Begin {
    fn with(settings: &[(&'static str, String)]) -> Self {
        let set: String =
            settings.iter().map(|(name, value)| format!("; SET LOCAL {name} = {value}")).collect();
        let begin = |begin: &str| Pinned::new(&format!("{begin}{set}"));
        Self { writing: begin(BEGIN), snapshot: begin(SNAPSHOT) }
    }
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
        // A policy that hides rows is an error: a lock whose rows are hidden would look free.
        ("row_security", "off".to_owned()),
    ]
}

/// Lets a session be silent, and a transaction wait for a row, where the server knows limits for that (since PostgreSQL 14 and 17).
pub(super) const NO_SESSION_LIMITS: &str = "SELECT set_config(name, '0', false) FROM pg_catalog.pg_settings \
    WHERE name = 'idle_session_timeout' OR name = 'transaction_timeout'";

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
const SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// What a pipeline begins or ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// It is one statement, which is its own transaction.
    Single,
    /// It begins a transaction.
    Begin,
    /// It is in the middle of one.
    Within,
    /// It commits.
    Commit,
    /// It reads a snapshot, in a transaction of its own.
    Snapshot,
}

/// The numbers of statements and of round trips.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Sent {
    pub(super) statements: std::sync::atomic::AtomicU64,
    pub(super) round_trips: std::sync::atomic::AtomicU64,
}

/// A connection that one pipeline at a time uses.
pub(super) struct Conn {
    client: Client,
    task: AbortHandle,
    prepared: Mutex<HashMap<Pinned, Statement>>,
    settings: Settings,
    /// Another server, or another session, should answer.
    is_unfit: AtomicBool,
    /// The server ended the session within a transaction, because the client was silent for too long.
    was_rolled_back: Arc<AtomicBool>,
    /// None behind a pooler, which may choose another server for each transaction.
    pub(super) epoch: Option<Epoch>,
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
        on_message: Option<MessageHandler>,
    ) -> Self {
        let was_rolled_back = Arc::new(AtomicBool::new(false));
        let rolled_back = was_rolled_back.clone();
        let task = tasks::spawn(async move {
            loop {
                match std::future::poll_fn(|context| connection.poll_message(context)).await {
                    Some(Ok(message)) => {
                        if let Some(on_message) = &on_message {
                            on_message(message);
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
            task,
            prepared: Mutex::default(),
            settings: Settings::default(),
            is_unfit: AtomicBool::new(false),
            was_rolled_back,
            epoch: None,
            #[cfg(test)]
            sent: Arc::default(),
        }
    }

    /// Makes the settings part of the session, or of each transaction. Notes the server.
    pub(super) async fn set(
        &mut self,
        settings: &[(&'static str, String)],
        is_pooled: bool,
        server: &Server,
    ) -> Result<(), StoreError> {
        if is_pooled {
            self.settings = Settings::Transaction(Begin::with(settings));
            return Ok(());
        }
        let mut set = format!("SET default_transaction_isolation = 'read committed'; {NO_SESSION_LIMITS}");
        for (name, value) in settings {
            set += &format!("; SET {name} = {value}");
        }
        match server.question() {
            Some(question) => {
                let started = self.value(&Pinned::new(&format!("{question}; {set}"))).await?;
                self.epoch = Some(server.note(started));
            }
            None => self.run(&Pinned::new(&set)).await.map_err(|error| error::explain(error, false))?,
        }
        self.settings = Settings::Session;
        Ok(())
    }

    /// Runs statements that are sent as one text.
    pub(super) async fn run(&self, statements: &Pinned) -> Result<(), Error> {
        self.client.batch_execute(statements.as_str()).await
    }

    /// The texts of the first row that a query returns; none if it returns no row.
    pub(super) async fn row(&self, query: &Pinned) -> Result<Vec<Option<String>>, Error> {
        let messages = self.client.simple_query(query.as_str()).await?;
        let row = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let texts =
            |row: &SimpleQueryRow| (0..row.len()).map(|at| row.get(at).map(ToOwned::to_owned)).collect();
        Ok(row.map_or_else(Vec::new, texts))
    }

    /// The only value that a query returns, empty for NULL, in one line: names in it were chosen by other roles.
    pub(super) async fn line(&self, query: &Pinned) -> Result<String, Error> {
        let value = self.row(query).await?.pop().flatten().unwrap_or_default();
        Ok(value.replace(char::is_control, "?"))
    }

    /// The only value that a query returns.
    pub(super) async fn value(&self, query: &Pinned) -> Result<String, StoreError> {
        let mut row = self.row(query).await.map_err(|error| error::explain(error, false))?;
        row.pop().flatten().ok_or_else(|| error::damaged("an empty answer"))
    }

    /// Runs a statement by itself, whose parameters no list of sessions shows, and returns what it says first.
    pub(super) async fn flag(&self, request: Request<'_>) -> Result<bool, StoreError> {
        let rows =
            self.pipeline(Frame::Single, &[request]).await.map_err(|error| error::explain(error, false))?;
        let row =
            rows.first().and_then(|rows| rows.first()).ok_or_else(|| error::damaged("an empty answer"))?;
        Reader::new(row).flag()
    }

    pub(super) fn cancel_token(&self) -> CancelToken {
        self.client.cancel_token()
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
    pub(super) async fn pipeline(
        &self,
        frame: Frame,
        requests: &[Request<'_>],
    ) -> Result<Vec<Vec<Row>>, Error> {
        #[cfg(test)]
        self.sent.statements.fetch_add(requests.len() as u64, Ordering::Relaxed);
        let (before, after) = self.frame(frame);
        let statements = match &self.settings {
            Settings::Session => Some(self.prepare(requests).await?),
            Settings::Unknown | Settings::Transaction(_) => None,
        };
        let mut rows = Vec::with_capacity(requests.len());
        let count = requests.len();
        let mut parts: Vec<_> = requests.chunks(MAX_PIPELINE).collect();
        if parts.is_empty() {
            parts.push(&[]);
        }
        let (last, mut sent) = (parts.len() - 1, 0);
        for (number, part) in parts.into_iter().enumerate() {
            let part_statements = statements.as_ref().map(|all| &all[sent..sent + part.len()]);
            sent += part.len();
            let before = before.filter(|_| number == 0);
            let after = after.filter(|_| number == last);
            rows.extend(self.pipeline_part(before, part, part_statements, after).await?);
        }
        debug_assert_eq!(rows.len(), count, "each statement has its rows");
        Ok(rows)
    }

    fn frame(&self, frame: Frame) -> (Option<&str>, Option<&'static str>) {
        let (begin, snapshot) = match &self.settings {
            Settings::Transaction(Begin { writing, snapshot }) => (writing.as_str(), snapshot.as_str()),
            Settings::Unknown | Settings::Session => (BEGIN, SNAPSHOT),
        };
        let is_pooled = matches!(self.settings, Settings::Transaction(_));
        match frame {
            Frame::Single if is_pooled => (Some(begin), Some("COMMIT")),
            Frame::Single | Frame::Within => (None, None),
            Frame::Begin => (Some(begin), None),
            Frame::Commit => (None, Some("COMMIT")),
            Frame::Snapshot => (Some(snapshot), Some("COMMIT")),
        }
    }

    async fn pipeline_part(
        &self,
        before: Option<&str>,
        requests: &[Request<'_>],
        statements: Option<&[Statement]>,
        after: Option<&str>,
    ) -> Result<Vec<Vec<Row>>, Error> {
        #[cfg(test)]
        self.sent.round_trips.fetch_add(1, Ordering::Relaxed);
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
                    None => self.client.query_typed(request.sql.as_str(), &typed).await,
                }
            }
        };
        type PendingQuery<'f> = std::pin::Pin<Box<dyn Future<Output = Result<Vec<Row>, Error>> + Send + 'f>>;
        let mut pending: Vec<PendingQuery<'_>> = Vec::with_capacity(requests.len() + 2);
        pending.extend(before.map(|sql| Box::pin(simple(sql)) as PendingQuery<'_>));
        pending.extend((0..requests.len()).map(|at| Box::pin(query(at)) as PendingQuery<'_>));
        pending.extend(after.map(|sql| Box::pin(simple(sql)) as PendingQuery<'_>));
        // Each future sends its message when it is polled first, which `join_all` does in this order.
        let mut answers = join_all(pending).await;
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
            |sql: &Pinned| self.prepared.lock().unwrap_or_else(PoisonError::into_inner).get(sql).cloned();
        let mut statements = Vec::with_capacity(requests.len());
        for request in requests {
            let statement = match known(request.sql) {
                Some(statement) => statement,
                None => {
                    let types: Vec<Type> = request.params.iter().map(|param| param.typed().1).collect();
                    let statement = self.client.prepare_typed(request.sql.as_str(), &types).await?;
                    let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
                    prepared.insert(request.sql.clone(), statement.clone());
                    statement
                }
            };
            statements.push(statement);
        }
        Ok(statements)
    }

    /// Begins a transaction.
    pub(super) async fn begin(&self) -> Result<(), Error> {
        self.client.batch_execute(BEGIN).await
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
