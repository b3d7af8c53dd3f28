//! Mail: the pushes to a client that cannot listen, because a pooler is in between or its connection was lost.
//!
//! A transaction leaves them in a table, and the client looks for them. One statement finds those of all of its waiters, so its
//! cost does not depend on their number. A client looks often just after an attempt was queued, and less often the longer it waits;
//! a client that only holds looks once a second, and an idle one not at all.

use std::sync::{Arc, Weak};

use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::exec::Executor;
use super::limits::{MAIL_PAUSE, MAIL_TIMEOUT};
use super::mailbox::Mailbox;
use super::params::Reader;
use super::pool::Class;
use super::push;
use super::transaction::Progress;
use crate::store::StoreError;

impl Executor {
    /// Delivers the mail of this client. Returns how much there was.
    pub(super) async fn read_mail(&self) -> Result<usize, StoreError> {
        let client = self.session.client;
        let read = async |progress: &Progress| {
            self.alone(progress, &self.sql().read_mail, vec![client.into()]).await
        };
        let rows = self.within(Class::Service, MAIL_TIMEOUT, read).await?.unwrap_or_default();
        let mut mail = rows
            .iter()
            .map(|row| {
                let mut reader = Reader::new(row);
                Ok((reader.id()?, push::decode(reader.text()?, client)))
            })
            .collect::<Result<Vec<_>, StoreError>>()?;
        mail.sort_by_key(|(id, _)| *id);
        self.deliver(mail.into_iter().filter_map(|(_, push)| push).collect());
        Ok(rows.len())
    }
}

/// Looks for mail until the client is gone.
pub(super) fn keep(executor: Weak<Executor>, mailbox: Arc<Mailbox>) -> AbortHandle {
    let keep = async move {
        let mut pause = MAIL_PAUSE;
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
            pause = match executor.read_mail().await {
                Ok(0) => (pause * 3 / 2).min(longest),
                Ok(_) => MAIL_PAUSE,
                Err(error) => {
                    tracing::debug!(error = error.message, "no mail from PostgreSQL");
                    longest
                }
            };
        }
    };
    tokio::spawn(keep).abort_handle()
}
