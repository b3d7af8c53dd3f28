//! The table of pushes, `mail`: those to a client that cannot listen, because a pooler is in between or its connection was lost.
//!
//! A transaction leaves them in a table, and the client looks for them. One statement finds those of all of its waiters, so its
//! cost does not depend on their number. A client looks often just after an attempt was queued, and less often the longer it waits;
//! a client that only holds looks once a second, and an idle one not at all.

use std::sync::{Arc, Weak};

use leasehold_core::Failure;
use leasehold_store::{StoreError, tasks};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::exec::Executor;
use super::limits::{PUSH_READ_PAUSE, PUSH_READ_TIMEOUT};
use super::mailbox::Mailbox;
use super::params::Reader;
use super::pool::Class;
use super::push;
use super::transaction::Progress;

/// The id of the row that has the server's start time instead of a push.
const SERVER: i64 = 0;

impl Executor {
    /// Delivers the pushes to this client. Returns how many there were. `lost`: the answer to an earlier look, and with it some pushes,
    /// may be lost, so that the waiters ask again.
    pub(super) async fn read_pushes(&self, lost: bool) -> Result<usize, StoreError> {
        let client = self.session.client;
        let sql = match self.pool.may_ask_for_the_server() {
            true => &self.sql().read_pushes,
            false => &self.sql().read_pushes_only,
        };
        let read = async |progress: &Progress| self.run_statement(progress, sql, vec![client.into()]).await;
        let rows = self.within(Class::ReadPushes, PUSH_READ_TIMEOUT, read).await?.unwrap_or_default();
        let rows = rows.iter().map(|row| {
            let mut reader = Reader::new(row);
            Ok((reader.id()?, reader.text()?))
        });
        let mut rows = rows.collect::<Result<Vec<_>, StoreError>>()?;
        rows.sort_by_key(|(id, _)| *id);
        let mut is_other_server = false;
        let mut pushes = Vec::new();
        for (id, text) in rows {
            if id == SERVER {
                is_other_server = self.session.mailbox.note_server(text);
            } else {
                pushes.extend(push::decode(text, client));
            }
        }
        // Before the pushes: times in them may be of another clock than those that the waiters know.
        if (lost || is_other_server)
            && let Some(inbox) = self.session.inbox.upgrade()
        {
            inbox.reconnected(&|_| true);
        }
        let count = pushes.len();
        self.deliver(pushes);
        Ok(count)
    }
}

/// Polls the table until the client is gone.
pub(super) fn keep(executor: Weak<Executor>, mailbox: Arc<Mailbox>) -> AbortHandle {
    let keep = async move {
        let mut pause = PUSH_READ_PAUSE;
        let mut lost = false;
        loop {
            let Some(longest) = mailbox.longest_pause() else {
                mailbox.more.notified().await;
                pause = PUSH_READ_PAUSE;
                continue;
            };
            if timeout(pause.min(longest), mailbox.more.notified()).await.is_ok() {
                pause = PUSH_READ_PAUSE;
                // Attempts that are queued together do not make it look for each of them.
                sleep(pause).await;
            }
            let Some(executor) = executor.upgrade() else { return };
            let read = executor.read_pushes(lost).await;
            lost = match &read {
                Ok(_) => false,
                Err(error) => lost || error.failure == Failure::Unknown,
            };
            pause = match read {
                Ok(0) => (pause * 3 / 2).min(longest),
                Ok(_) => PUSH_READ_PAUSE,
                Err(error) => {
                    tracing::debug!(error = error.message, "no mail from PostgreSQL");
                    longest
                }
            };
        }
    };
    tasks::spawn(keep)
}
