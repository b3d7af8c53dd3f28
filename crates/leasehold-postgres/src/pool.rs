//! The connections for commands. A command has one for itself from its first round trip to its last.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::Failure;
use leasehold_store::StoreError;
use leasehold_store::tasks::{Task, Tasks};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{timeout, timeout_at};

use super::conn::Conn;
use super::dialer::Dialer;
use super::limits::QUEUE_TIMEOUT;
use super::server::Server;

/// What a connection is needed for. No class waits for the connections of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// An attempt may wait for a row that another session keeps. One connection is left to the commands of holders.
    Attempt,
    Command,
    /// The statement that renews waits for no row, and has connections of its own: while one of them does not answer, leases with a short
    /// ttl are renewed over another one.
    RenewBatch,
    /// The renewal of one lease as a transaction may wait for its row. It takes a free connection of commands, or else one that these
    /// transactions have for themselves.
    RenewOne,
    /// Reading pushes has a permit of its own, so that a read that hangs blocks no renewal.
    ReadPushes,
}

/// Opens connections for commands.
struct Opener {
    dialer: Dialer,
    settings: Vec<(&'static str, String)>,
    /// A pooler is in between.
    is_pooled: bool,
    server: Arc<Server>,
    #[cfg(test)]
    sent: Arc<super::conn::Sent>,
}

impl Opener {
    async fn open(&self) -> Result<Conn, StoreError> {
        let mut conn = self.dialer.connect(None).await?;
        conn.set(&self.settings, self.is_pooled, &self.server).await?;
        #[cfg(test)]
        {
            conn.sent = self.sent.clone();
        }
        Ok(conn)
    }
}

type OpenTask = Task<Result<Conn, StoreError>>;

/// Connections that are opened when they are needed, and kept.
pub(super) struct Pool {
    opener: Arc<Opener>,
    commands: Semaphore,
    attempts: Semaphore,
    renew_batch: Semaphore,
    renew_one: Semaphore,
    read_pushes: Semaphore,
    /// When a command last got an answer.
    answered: Mutex<Option<Instant>>,
    idle: Mutex<Vec<Conn>>,
    /// Connections that are being opened, and whose commands have ended before.
    opening: Mutex<Vec<OpenTask>>,
}

impl Pool {
    pub(super) fn new(
        dialer: Dialer,
        settings: Vec<(&'static str, String)>,
        is_pooled: bool,
        connections: usize,
        server: Arc<Server>,
    ) -> Self {
        let opener = Opener {
            dialer,
            settings,
            is_pooled,
            server,
            #[cfg(test)]
            sent: Arc::default(),
        };
        Self {
            opener: Arc::new(opener),
            commands: Semaphore::new(connections),
            attempts: Semaphore::new(connections.saturating_sub(1).max(1)),
            renew_batch: Semaphore::new(2),
            renew_one: Semaphore::new(1),
            read_pushes: Semaphore::new(1),
            answered: Mutex::default(),
            idle: Mutex::default(),
            opening: Mutex::default(),
        }
    }

    /// Whether the role may ask when the server was started.
    pub(super) fn may_ask_for_the_server(&self) -> bool {
        self.opener.server.question().is_some()
    }

    /// What its connections have sent: statements, and round trips.
    #[cfg(test)]
    pub(super) fn sent(&self) -> (u64, u64) {
        let count = |number: &std::sync::atomic::AtomicU64| number.load(std::sync::atomic::Ordering::Relaxed);
        (count(&self.opener.sent.statements), count(&self.opener.sent.round_trips))
    }

    /// Waits until the command may use a connection, for a limited time. Its own time limit begins after that.
    pub(super) async fn permit(&self, class: Class, until: Instant) -> Result<Permit<'_>, StoreError> {
        let permits = async {
            let attempt = match class {
                Class::Attempt => Some(self.attempts.acquire().await),
                _ => None,
            };
            let permit = match class {
                Class::Attempt | Class::Command => self.commands.acquire().await,
                Class::RenewBatch => self.renew_batch.acquire().await,
                Class::ReadPushes => self.read_pushes.acquire().await,
                Class::RenewOne => tokio::select! {
                    biased;
                    own = self.renew_one.acquire() => own,
                    common = self.commands.acquire() => common,
                },
            };
            let attempt = attempt.transpose().map_err(|_| closed())?;
            Ok(Permit { _attempt: attempt, _permit: permit.map_err(|_| closed())? })
        };
        timeout_at(until.into(), permits).await.unwrap_or_else(|_| Err(self.busy()))
    }

    /// While others get answers, one that waits for a connection in vain can ask for it again.
    pub(super) fn busy(&self) -> StoreError {
        let answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        let moves = answered.is_some_and(|at| at.elapsed() < QUEUE_TIMEOUT);
        let failure = if moves { Failure::Busy } else { Failure::NotSent };
        let message = format!(
            "all connections of this client were in use for {QUEUE_TIMEOUT:?}, so nothing was sent: raise ?connections="
        );
        StoreError::new(failure, message)
    }

    /// Notes that a command got an answer.
    pub(super) fn note_answer(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// A connection, for a command that has a permit.
    pub(super) async fn take(&self) -> Result<Lent<'_>, StoreError> {
        let conn = match self.pop_idle() {
            Some(conn) => conn,
            None => self.open().await?,
        };
        Ok(Lent { conn: Some(conn), pool: self })
    }

    /// Makes sure that there is a connection. A command with a short time limit has that limit for its own round trips then.
    pub(super) async fn connect_within(&self, limit: Duration) -> Result<(), StoreError> {
        if let Some(conn) = self.pop_idle() {
            self.idle().push(conn);
            return Ok(());
        }
        let opened = timeout(limit, self.open()).await.unwrap_or_else(|_| {
            Err(StoreError::new(Failure::NotSent, format!("there is no connection within {limit:?}")))
        });
        self.idle().push(opened?);
        Ok(())
    }

    /// A new connection, or one that an earlier command has not waited for: on a slow network a renewal has less time than the handshakes
    /// take.
    async fn open(&self) -> Result<Conn, StoreError> {
        loop {
            let earlier = self.opening().pop();
            let was_over = earlier.as_ref().is_some_and(Task::is_finished);
            let task = earlier.unwrap_or_else(|| {
                let opener = self.opener.clone();
                Tasks::current().start(async move { opener.open().await })
            });
            let opened = Opening { task: Some(task), pool: self }.wait().await;
            match opened {
                Ok(conn) if self.is_usable(&conn) => return Ok(conn),
                // What was found out some time ago.
                _ if was_over => {}
                Ok(_) => return Err(StoreError::new(Failure::NotSent, "the server closed a new connection")),
                Err(error) => return Err(error),
            }
        }
    }

    fn opening(&self) -> MutexGuard<'_, Vec<OpenTask>> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Conn>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop_idle(&self) -> Option<Conn> {
        let mut idle = self.idle();
        idle.retain(|conn| self.is_usable(conn));
        idle.pop()
    }

    fn is_usable(&self, conn: &Conn) -> bool {
        !conn.is_closed() && conn.epoch.is_none_or(|epoch| self.opener.server.is_current(epoch))
    }
}

fn closed() -> StoreError {
    StoreError::new(Failure::NotSent, "the store is closed")
}

/// The right to use one connection.
pub(super) struct Permit<'p> {
    _attempt: Option<SemaphorePermit<'p>>,
    _permit: SemaphorePermit<'p>,
}

/// A command waits for a connection to be opened. If the command ends first, the next one waits for the same connection.
struct Opening<'p> {
    task: Option<OpenTask>,
    pool: &'p Pool,
}

impl Opening<'_> {
    async fn wait(mut self) -> Result<Conn, StoreError> {
        let Some(task) = &mut self.task else { return Err(closed()) };
        let opened = task.await;
        self.task = None;
        opened.unwrap_or_else(|_| Err(closed()))
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.pool.opening().extend(self.task.take());
    }
}

/// A connection in use.
pub(super) struct Lent<'p> {
    conn: Option<Conn>,
    pool: &'p Pool,
}

impl Lent<'_> {
    pub(super) fn conn(&self) -> &Conn {
        self.conn.as_ref().unwrap_or_else(|| unreachable!("it is there until it is given back"))
    }

    /// No transaction is open on it. An error if it leads to another server than newer connections: its answers do not count.
    pub(super) fn give_back(mut self) -> Result<(), StoreError> {
        if let Some(epoch) = self.conn().epoch
            && let Err(other) = self.pool.opener.server.check(epoch)
        {
            // The idle ones may lead to the newer server.
            self.conn = None;
            return Err(other);
        }
        if let Some(conn) = self.conn.take_if(|conn| !conn.is_closed() && !conn.is_unfit()) {
            self.pool.idle().push(conn);
        }
        Ok(())
    }
}

impl Drop for Lent<'_> {
    /// Closes a connection that is not given back: its server did not answer, or is the wrong one now. The idle ones lead to the
    /// same server, and each of them would cost a command its time limit.
    ///
    /// Its statement is not cancelled. A commit that waits for a synchronous standby would become visible, and push a grant that
    /// no standby has.
    fn drop(&mut self) {
        if self.conn.take().is_some() {
            self.pool.idle().clear();
        }
    }
}
