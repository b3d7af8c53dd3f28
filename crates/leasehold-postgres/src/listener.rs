//! Notifications: one connection that listens to the client's channel, and is replaced when it is lost.
//!
//! While it listens, it holds an advisory lock of its session, in shared mode. A transaction that grants to a waiter tries to lock
//! it in exclusive mode: if that succeeds, the client does not listen, and is skipped. The lock ends with the connection. Until
//! there is another one, the client polls for pushes (`push_table.rs`), and its waiters ask again, so that their entries say so.

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::{ClientId, Failure};
use leasehold_store::{Inbox, StoreError, tasks};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_postgres::Row;

use super::conn::{Conn, NO_SESSION_LIMITS};
use super::dialer::Dialer;
use super::exec::Executor;
use super::limits::{ANSWER_TIMEOUT, HEARTBEAT, RECONNECT_BACKOFF, in_time};
use super::mailbox::Mailbox;
use super::params::{Reader, Request};
use super::pinned::Pinned;
use super::pool::Class;
use super::push::{Arrival, PushQueue};
use super::query::Query;
use super::server::{Epoch, STARTED, Server};
use super::sql::Sql;
use super::transaction::Progress;
use super::{error, pooler, push};
use crate::url::PostgresUrl;

/// How often, and after which pause, the lock of a client that listens is tried.
const ATTEND_TRIES: u32 = 20;
const ATTEND_PAUSE: Duration = Duration::from_millis(50);

/// A connection that listens.
pub(super) struct Listening {
    conn: Conn,
    pushes: PushQueue,
    /// Of the server, if commands have another address.
    started: Option<String>,
    epoch: Epoch,
}

/// Where to listen.
pub(super) struct Address {
    dialer: Dialer,
    client: ClientId,
    /// A pooler may be in between: the address says that it is in session mode.
    may_be_pooled: bool,
    pub(super) sql: Sql,
    server: Arc<Server>,
    /// Commands have another address, which may lead to another server than this one.
    is_separate: bool,
}

impl Address {
    pub(super) fn new(
        dialer: Dialer,
        url: &PostgresUrl,
        client: ClientId,
        may_be_pooled: bool,
        server: Arc<Server>,
    ) -> Self {
        let (sql, is_separate) = (Sql::new(&url.schema, None), url.listen.is_some());
        Self { dialer, client, may_be_pooled, sql, server, is_separate }
    }

    /// Listens to the client's channel.
    pub(super) async fn listen(&self) -> Result<Listening, StoreError> {
        let (on_message, pushes) = push::queue(self.client);
        let conn = self.dialer.connect(Some(on_message)).await?;
        let (started, epoch) = in_time(self.begin(&conn)).await?;
        Ok(Listening { conn, pushes, started, epoch })
    }

    /// When the server was started, if commands have another address; and which server that is.
    async fn begin(&self, conn: &Conn) -> Result<(Option<String>, Epoch), StoreError> {
        let is_pooled = pooler::is_between(conn).await?;
        if is_pooled && !self.may_be_pooled {
            let message = "a pooler is in between, so no notification would arrive: name the server itself in ?listen=; or \
                pooler=no, for a pooler in session mode";
            return Err(StoreError::new(Failure::NotSent, message));
        }
        // As session settings, so that neither a role's limits nor a long silence ends the session. One that is shared keeps its own.
        let settings = format!(
            "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0; {NO_SESSION_LIMITS};"
        );
        let settings = if is_pooled { "" } else { &settings };
        let listen = Sql::listen(&push::channel(self.client), settings);
        conn.run(&listen).await.map_err(|error| error::explain(error, false))?;
        // A transaction that grants to a waiter has it for a moment.
        for _ in 0..ATTEND_TRIES {
            if conn.flag(Request::new(&self.sql.attend, vec![self.client.into()])).await? {
                // Only the address of the commands says which server counts.
                let started = match self.server.question() {
                    Some(question) => Some(conn.value(&Pinned::new(question)).await?),
                    None => None,
                };
                return Ok(match started {
                    Some(started) if !self.is_separate => (None, self.server.note(started)),
                    started => (started, self.server.epoch()),
                });
            }
            sleep(ATTEND_PAUSE).await;
        }
        let message = "another session holds the advisory lock that shows that this client listens";
        Err(StoreError::new(Failure::NotSent, message))
    }

    /// Listens where the server of the commands sees it. The first pause is `pause`, which grows.
    async fn listen_again(&self, executor: &Weak<Executor>, pause: &mut Duration) -> Option<Listening> {
        loop {
            sleep(*pause).await;
            *pause = (2 * *pause).min(*RECONNECT_BACKOFF.end());
            let executor = executor.upgrade()?;
            let listened = async {
                let listening = self.listen().await?;
                if self.is_separate && !executor.sees_listener(listening.started.as_deref()).await? {
                    let message = "?listen= leads to another server than the address of the commands";
                    return Err(StoreError::new(Failure::NotSent, message));
                }
                Ok(listening)
            };
            match listened.await {
                Ok(listening) => return Some(listening),
                Err(error) => tracing::debug!(error = error.message, "no notifications from PostgreSQL yet"),
            }
        }
    }

    /// Whether the server of the commands sees the session that listens. If it does not answer, nothing shows that it does not.
    async fn is_seen(&self, listening: &Listening, executor: &Weak<Executor>) -> bool {
        let Some(executor) = executor.upgrade().filter(|_| self.is_separate) else { return true };
        executor.sees_listener(listening.started.as_deref()).await.unwrap_or(true)
    }
}

impl Executor {
    /// Whether this client listens to the server that its commands go to, which was started then. Any role may take the lock that
    /// shows a listener, at any server.
    async fn sees_listener(&self, started: Option<&str>) -> Result<bool, StoreError> {
        if let Some(started) = started
            && Reader::new(&self.ask(&Pinned::new(STARTED), None).await?).text()? != started
        {
            return Ok(false);
        }
        let client = self.session.client;
        let present = self.ask(self.sql().of(&Query::Present(client)), Some(client)).await?;
        Reader::new(&present).flag()
    }

    /// The row that a query by itself returns.
    async fn ask(&self, sql: &Pinned, client: Option<ClientId>) -> Result<Row, StoreError> {
        let params = || client.map(Into::into).into_iter().collect();
        let ask = async |progress: &Progress| self.run_statement(progress, sql, params()).await;
        let rows = self.within(Class::Command, ANSWER_TIMEOUT, ask).await?.unwrap_or_default();
        rows.into_iter().next().ok_or_else(|| error::damaged("an empty answer"))
    }
}

/// Keeps listening until the client is gone.
pub(super) fn keep(
    address: Address,
    listening: Listening,
    inbox: Weak<dyn Inbox>,
    executor: Weak<Executor>,
    mailbox: Arc<Mailbox>,
) -> AbortHandle {
    // Notifications may have been missed, and the entries of waiters say how the next ones reach them.
    let ask_again =
        move |inbox: &Weak<dyn Inbox>| inbox.upgrade().map(|inbox| inbox.reconnected(&|_| true)).is_some();
    let keep = async move {
        let (mut listening, mut pause) = (listening, *RECONNECT_BACKOFF.start());
        loop {
            let began = Instant::now();
            let ended = deliver(&mut listening, &address, &inbox, &executor).await;
            if began.elapsed() > HEARTBEAT {
                pause = *RECONNECT_BACKOFF.start();
            }
            drop(listening);
            mailbox.set_polls(true);
            if !ask_again(&inbox) {
                return;
            }
            match ended {
                Ended::Lost(error) => {
                    tracing::debug!(error = error.message, "no notifications from PostgreSQL");
                }
                // There, each connection that listens would leave its settings to other clients.
                Ended::Pooled => return,
            }
            let Some(next) = address.listen_again(&executor, &mut pause).await else { return };
            listening = next;
            mailbox.set_polls(false);
            if !ask_again(&inbox) {
                return;
            }
        }
    };
    tasks::spawn(keep)
}

/// Delivers notifications until the connection is lost.
async fn deliver(
    listening: &mut Listening,
    address: &Address,
    inbox: &Weak<dyn Inbox>,
    executor: &Weak<Executor>,
) -> Ended {
    // By the clock: a stranger's notifications may be all that arrives in time.
    let mut heartbeat = Instant::now() + HEARTBEAT;
    loop {
        let arrived = tokio::select! {
            arrived = timeout_at(heartbeat, listening.pushes.next()) => arrived,
            () = address.server.until_other(listening.epoch) => return lost("the address leads to another server now"),
        };
        match arrived {
            Ok(Some(arrival)) => {
                let Some(inbox) = inbox.upgrade() else { return lost("the client is gone") };
                match arrival {
                    Arrival::Push(push) => inbox.deliver(push),
                    Arrival::Dropped => inbox.reconnected(&|_| true),
                }
            }
            Ok(None) => return lost("the connection was closed"),
            Err(_) => match listening.is_kept(address.client).await {
                Ok(true) if address.is_seen(listening, executor).await => {
                    heartbeat = Instant::now() + HEARTBEAT;
                }
                Ok(true) => return lost("the server of the commands does not see that the client listens"),
                Ok(false) => return Ended::Pooled,
                Err(error) => return Ended::Lost(error),
            },
        }
    }
}

/// Why a connection does not listen any more.
enum Ended {
    Lost(StoreError),
    /// Another session answers, so a pooler is in between.
    Pooled,
}

fn lost(message: &str) -> Ended {
    Ended::Lost(StoreError::new(Failure::NotSent, message))
}

impl Listening {
    /// Whether the session still listens. Behind a pooler in transaction mode, with `pooler=no`, another one may answer.
    pub(super) async fn is_kept(&self, client: ClientId) -> Result<bool, StoreError> {
        let sql = format!(
            "SELECT 1 FROM pg_listening_channels() AS channel WHERE channel = '{}'",
            push::channel(client)
        );
        let answered = timeout(ANSWER_TIMEOUT, self.conn.row(&Pinned::new(&sql))).await;
        let row = answered
            .map_err(|_| error::late(ANSWER_TIMEOUT, false))?
            .map_err(|error| error::explain(error, false))?;
        if !row.is_empty() {
            return Ok(true);
        }
        tracing::warn!(
            "another session answers on the connection that listens: a pooler is in between, so waiters look for mail; use \
             ?pooler=yes, or ?listen= with an address without it"
        );
        Ok(false)
    }
}
