//! A connection that this crate has opened. It logs in again before its credentials expire, as long as it is in use.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use leasehold_store::login::{Login, Secret};
use leasehold_store::tasks::TaskGroup;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, RedisFuture, Value};
use tokio::time::sleep;

use super::error::explain;
use super::limits::CONNECT_TIMEOUT;

/// The pause after the server has refused a login of an open connection, at first and at most.
const MIN_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// An open connection, and the task that keeps it logged in, which ends with its last clone.
#[derive(Clone)]
pub(super) struct OwnConnection {
    connection: MultiplexedConnection,
    /// None if its login does not change.
    _keeper: Option<Arc<TaskGroup>>,
}

impl OwnConnection {
    /// A connection that has logged in with this.
    pub(super) fn new(connection: MultiplexedConnection, login: Login, secret: Secret) -> Self {
        let keeper = secret.may_change().then(|| {
            let mut keeper = TaskGroup::default();
            keeper.spawn(keep_logged_in(connection.clone(), login, secret));
            Arc::new(keeper)
        });
        Self { connection, _keeper: keeper }
    }
}

#[cfg(test)]
impl From<MultiplexedConnection> for OwnConnection {
    fn from(connection: MultiplexedConnection) -> Self {
        Self { connection, _keeper: None }
    }
}

impl Deref for OwnConnection {
    type Target = MultiplexedConnection;

    fn deref(&self) -> &Self::Target {
        &self.connection
    }
}

impl DerefMut for OwnConnection {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.connection
    }
}

impl ConnectionLike for OwnConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.connection.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

/// Logs in with each new secret. The redis crate's own task for this ends at the first refusal, and the connection with its credentials.
async fn keep_logged_in(mut connection: MultiplexedConnection, login: Login, mut known: Secret) {
    connection.set_response_timeout(CONNECT_TIMEOUT);
    let mut refusals = None;
    loop {
        let next = match &refusals {
            None => login.next(&known).await,
            // The refused ones may be old. While the provider fails, the old ones last.
            Some(pause) => {
                sleep(*pause).await;
                match login.replace(&known).await {
                    Some(Ok(other)) => other,
                    _ => known.clone(),
                }
            }
        };
        if refusals.is_none() {
            sleep(next.spread()).await;
        }
        let answered = authenticate(&mut connection, &next).await;
        known = next;
        match answered {
            Ok(()) => refusals = None,
            Err(error) if error.is_unrecoverable_error() => return,
            Err(error) => {
                let explained = explain(&error);
                if refusals.is_none() {
                    tracing::warn!(
                        "the server does not take the new credentials of an open connection: {explained}; tried again"
                    );
                } else {
                    tracing::debug!(explained, "the server still does not take the new credentials");
                }
                refusals = Some(refusals.map_or(MIN_PAUSE, |pause: Duration| pause * 2).min(MAX_PAUSE));
            }
        }
    }
}

async fn authenticate(connection: &mut MultiplexedConnection, secret: &Secret) -> Result<(), RedisError> {
    let Some(password) = &secret.password else { return Ok(()) };
    let mut command = redis::cmd("AUTH");
    if let Some(user) = &secret.user {
        command.arg(user);
    }
    command.arg(password).query_async(connection).await
}
