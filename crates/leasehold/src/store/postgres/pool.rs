//! The connections for commands. A command has one for itself from its first flight to its last.

use std::sync::{Mutex, PoisonError};

use leasehold_core::Failure;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::conn::{Conn, Dialer};
use crate::store::StoreError;

/// Connections that are opened when they are needed, and kept.
pub(super) struct Pool {
    dialer: Dialer,
    settings: Vec<(&'static str, String)>,
    /// A pooler is in between.
    is_pooled: bool,
    permits: Semaphore,
    /// Attempts at a row that another session keeps wait for it. One connection is left to holders, whose renewals must go on.
    attempts: Semaphore,
    idle: Mutex<Vec<Conn>>,
    #[cfg(test)]
    sent: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

impl Pool {
    pub(super) fn new(
        dialer: Dialer,
        settings: Vec<(&'static str, String)>,
        is_pooled: bool,
        connections: usize,
    ) -> Self {
        let (permits, idle) = (Semaphore::new(connections), Mutex::default());
        let attempts = Semaphore::new(connections.saturating_sub(1).max(1));
        Self {
            dialer,
            settings,
            is_pooled,
            permits,
            attempts,
            idle,
            #[cfg(test)]
            sent: std::sync::Arc::default(),
        }
    }

    /// The statements that its connections have sent.
    #[cfg(test)]
    pub(super) fn statements(&self) -> u64 {
        self.sent.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Waits for the turn of an attempt to acquire, which it has before it takes a connection.
    pub(super) async fn attempt(&self) -> Result<SemaphorePermit<'_>, StoreError> {
        self.attempts.acquire().await.map_err(|_| closed())
    }

    /// A connection, once one is free.
    pub(super) async fn take(&self) -> Result<Lent<'_>, StoreError> {
        let permit = self.permits.acquire().await.map_err(|_| closed())?;
        let conn = match self.idle() {
            Some(conn) => conn,
            None => {
                let mut conn = self.dialer.connect(None).await?;
                conn.set(&self.settings, self.is_pooled).await?;
                #[cfg(test)]
                {
                    conn.sent = self.sent.clone();
                }
                conn
            }
        };
        Ok(Lent { conn: Some(conn), pool: self, _permit: permit })
    }

    fn idle(&self) -> Option<Conn> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|conn| !conn.is_closed());
        idle.pop()
    }
}

fn closed() -> StoreError {
    StoreError::new(Failure::NotSent, "the store is closed")
}

/// A connection in use. It is closed unless it is given back, since a transaction may be open on it.
pub(super) struct Lent<'p> {
    conn: Option<Conn>,
    pool: &'p Pool,
    _permit: SemaphorePermit<'p>,
}

impl Lent<'_> {
    pub(super) fn conn(&self) -> &Conn {
        self.conn.as_ref().unwrap_or_else(|| unreachable!("it is there until it is given back"))
    }

    /// No transaction is open on it.
    pub(super) fn give_back(mut self) {
        if let Some(conn) = self.conn.take().filter(|conn| !conn.is_closed()) {
            self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
        }
    }
}
