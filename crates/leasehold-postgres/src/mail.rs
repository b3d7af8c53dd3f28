//! Mail: the pushes to a client that cannot listen, because a pooler is in between or its connection was lost.
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
use super::limits::{MAIL_PAUSE, MAIL_TIMEOUT};
use super::mailbox::Mailbox;
use super::params::Reader;
use super::pool::Class;
use super::push;
use super::transaction::Progress;

/// In place of the number of a letter: the row says which server answers.
const SERVER: i64 = 0;

impl Executor {
    /// Delivers the mail of this client. Returns how much there was. `lost`: the answer to an earlier look, and with it some mail, may
    /// be lost, so that the waiters ask again.
    pub(super) async fn read_mail(&self, lost: bool) -> Result<usize, StoreError> {
        let client = self.session.client;
        let sql = match self.pool.may_ask_for_the_server() {
            true => &self.sql().read_mail,
            false => &self.sql().read_mail_only,
        };
        let read = async |progress: &Progress| self.alone(progress, sql, vec![client.into()]).await;
        let rows = self.within(Class::Mail, MAIL_TIMEOUT, read).await?.unwrap_or_default();
        let mail = rows.iter().map(|row| {
            let mut reader = Reader::new(row);
            Ok((reader.id()?, reader.text()?))
        });
        let mut mail = mail.collect::<Result<Vec<_>, StoreError>>()?;
        mail.sort_by_key(|(id, _)| *id);
        let mut is_other_server = false;
        let mut pushes = Vec::new();
        for (id, text) in mail {
            if id == SERVER {
                is_other_server = self.session.mailbox.note_server(text);
            } else {
                pushes.extend(push::decode(text, client));
            }
        }
        // Before the mail: times in it may be of another clock than those that the waiters know.
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

/// Looks for mail until the client is gone.
pub(super) fn keep(executor: Weak<Executor>, mailbox: Arc<Mailbox>) -> AbortHandle {
    let keep = async move {
        let mut pause = MAIL_PAUSE;
        let mut lost = false;
        loop {
            let Some(longest) = mailbox.longest_pause() else {
                mailbox.more.notified().await;
                pause = MAIL_PAUSE;
                continue;
            };
            if timeout(pause.min(longest), mailbox.more.notified()).await.is_ok() {
                pause = MAIL_PAUSE;
                // Attempts that are queued together do not make it look for each of them.
                sleep(pause).await;
            }
            let Some(executor) = executor.upgrade() else { return };
            let read = executor.read_mail(lost).await;
            lost = match &read {
                Ok(_) => false,
                Err(error) => lost || error.failure == Failure::Unknown,
            };
            pause = match read {
                Ok(0) => (pause * 3 / 2).min(longest),
                Ok(_) => MAIL_PAUSE,
                Err(error) => {
                    tracing::debug!(error = error.message, "no mail from PostgreSQL");
                    longest
                }
            };
        }
    };
    tasks::spawn(keep)
}
