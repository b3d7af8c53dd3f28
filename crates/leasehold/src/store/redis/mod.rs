//! `redis://` and `redis+unix://`, one server.
//!
//! A command is one script (`leasehold_core::lua`), so an uncontended lock is one round trip, and so is a release. Waiters
//! hear of their grant through one channel per client, on the same connection (RESP3).
//!
//! All of it happens on the client's own thread, whose runtime the connection belongs to; a caller's future only waits
//! for the answer, on whatever executor it runs. After a lost connection it is opened again, with pauses that grow, and
//! the channel with it; then all waiters look again and all leases are renewed, since pushes may have been missed.

mod keys;
mod script;

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::{ClientId, Command, Failure, Resource};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{
    ErrorKind as RedisErrorKind, IntoConnectionInfo as _, ProtocolVersion, PushInfo, PushKind, RedisError,
    Value,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::{Answered, Inbox, Pending, Rhythm, Store, StoreError};
use crate::error::{Error, ErrorKind};
use crate::url::StoreUrl;

/// How long an answer may take. Whether a command that is not answered took effect is unknown.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// How long connecting may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// The pauses between attempts to connect again.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(2);

/// Looking again costs a server something, and pushes are seldom lost.
const RHYTHM: Rhythm = Rhythm { look_again: Duration::from_secs(20), entry_ttl: Duration::from_secs(60) };

pub(crate) struct Redis {
    connection: ConnectionManager,
    /// The client's own.
    runtime: Handle,
    /// Ends the task that connects again.
    keeper: tokio::task::AbortHandle,
}

impl Redis {
    /// Connects for this client, and listens to its channel. Runs on the client's own runtime.
    pub(crate) async fn open(
        url: &StoreUrl,
        address: &str,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
    ) -> Result<Arc<Self>, Error> {
        let failed = |kind, error: &RedisError| Error::new(kind, format!("{url}: {}", explain(error)));
        let info = address.into_connection_info().map_err(|_| {
            Error::new(
                ErrorKind::Invalid,
                format!("{url}: write redis://[user:password@]host[:port][/database]"),
            )
        })?;
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let opened = redis::Client::open(info.set_redis_settings(settings));
        let opened = opened.map_err(|error| failed(ErrorKind::Invalid, &error))?;
        let lost = Arc::new(Notify::new());
        let config = ConnectionManagerConfig::new()
            .set_response_timeout(Some(ANSWER_LIMIT))
            .set_connection_timeout(Some(CONNECT_LIMIT))
            .set_number_of_retries(1)
            .set_min_delay(*PAUSES.start())
            .set_automatic_resubscription()
            .set_push_sender(ear(inbox, lost.clone()));
        let connect = async {
            let mut connection = opened.get_connection_manager_with_config(config).await?;
            connection.subscribe(keys::inbox_of(client)).await?;
            Ok(connection)
        };
        let connection: ConnectionManager = match tokio::time::timeout(CONNECT_LIMIT, connect).await {
            Ok(connected) => connected.map_err(|error| failed(ErrorKind::Unavailable, &error))?,
            Err(_) => {
                let what = format!("{url}: no answer within {CONNECT_LIMIT:?}: check the host and the port");
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        };
        let keeper = tokio::spawn(keep_connected(connection.clone(), lost)).abort_handle();
        Ok(Arc::new(Self { connection, runtime: Handle::current(), keeper }))
    }

    /// Does this on the client's thread; the answer is waited for on any executor.
    fn there<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        otherwise: impl FnOnce() -> T + Send + 'static,
    ) -> Pending<T> {
        let (tell, told) = oneshot::channel();
        self.runtime.spawn(async move {
            // Nobody listens any more if the caller's future was dropped.
            let _ = tell.send(work.await);
        });
        Box::pin(async move { told.await.unwrap_or_else(|_| otherwise()) })
    }
}

impl Store for Redis {
    fn call_now(&self, _resource: &Resource, _command: &Command) -> Option<Answered> {
        None
    }

    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> Pending<Vec<Answered>> {
        let count = batch.len();
        self.there(run(self.connection.clone(), batch), move || (0..count).map(|_| Err(ended())).collect())
    }

    fn list(&self) -> Pending<Result<Vec<Resource>, StoreError>> {
        self.there(scan(self.connection.clone()), || Err(ended()))
    }

    fn rhythm(&self) -> Rhythm {
        RHYTHM
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

fn ended() -> StoreError {
    StoreError { failure: Failure::Unknown, message: "the client's thread has ended".to_owned() }
}

/// What comes unasked.
fn ear(
    inbox: Weak<dyn Inbox>,
    lost: Arc<Notify>,
) -> impl Fn(PushInfo) -> Result<(), std::convert::Infallible> + Send + Sync + 'static {
    move |info| {
        let Some(inbox) = inbox.upgrade() else { return Ok(()) };
        match (info.kind, info.data.as_slice()) {
            (PushKind::Message, [_, Value::BulkString(message)]) => match script::push(message) {
                Some(push) => inbox.deliver(push),
                None => tracing::warn!("something unknown arrived"),
            },
            // Also the first time, when there is nothing yet that could have missed anything.
            (PushKind::Subscribe, _) => inbox.reconnected(),
            (PushKind::Disconnection, _) => lost.notify_one(),
            _ => {}
        }
        Ok(())
    }
}

/// A client that only waits sends nothing, so somebody has to notice for it, and to connect again.
async fn keep_connected(mut connection: ConnectionManager, lost: Arc<Notify>) {
    loop {
        lost.notified().await;
        tracing::warn!("the connection was lost");
        let mut pause = *PAUSES.start();
        while let Err(error) = connection.send_packed_command(&redis::cmd("PING")).await {
            tracing::debug!(error = explain(&error), "not connected yet");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(*PAUSES.end());
        }
    }
}

// --- Commands ------------------------------------------------------------------------------------

/// All in one flight. A script that the server does not know (any more) is sent in full.
async fn run(mut connection: ConnectionManager, batch: Vec<(Arc<Resource>, Command)>) -> Vec<Answered> {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    for (resource, command) in &batch {
        pipeline.add_command(script::by_name(resource, command));
    }
    let values = match pipeline.query_async::<Vec<Result<Value, RedisError>>>(&mut connection).await {
        Ok(values) => values,
        Err(error) => return batch.iter().map(|_| Err(classify(&error))).collect(),
    };
    let mut answers = Vec::with_capacity(batch.len());
    for ((resource, command), value) in batch.iter().zip(values) {
        let value = match value {
            Err(error) if error.code() == Some("NOSCRIPT") => {
                connection.send_packed_command(&script::in_full(resource, command)).await
            }
            other => other,
        };
        answers.push(read(value));
    }
    answers
}

fn read(value: Result<Value, RedisError>) -> Answered {
    let value = value.and_then(Value::extract_error).map_err(|error| classify(&error))?;
    script::answer(&value).ok_or_else(|| StoreError {
        failure: Failure::Unknown,
        message: "the server answered what no script of this version answers".to_owned(),
    })
}

/// What the server says before it runs a script has changed nothing. Of anything else nobody knows.
fn classify(error: &RedisError) -> StoreError {
    const BEFORE: [&str; 11] = [
        "OOM",
        "LOADING",
        "NOAUTH",
        "WRONGPASS",
        "NOPERM",
        "READONLY",
        "MOVED",
        "ASK",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "NOSCRIPT",
    ];
    let is_before = error.is_connection_refusal() || error.code().is_some_and(|code| BEFORE.contains(&code));
    let failure = if is_before { Failure::NotSent } else { Failure::Unknown };
    StoreError { failure, message: explain(error) }
}

/// The word that an error begins with. What happens inside of a script comes with that word further behind.
fn code(error: &RedisError) -> Option<&str> {
    const INSIDE: [&str; 3] = ["OOM", "WRONGTYPE", "READONLY"];
    let detail = error.detail().unwrap_or_default();
    INSIDE.into_iter().find(|word| detail.split([' ', ':']).any(|part| part == *word)).or(error.code())
}

/// What an error means for whoever runs this, and what to do.
fn explain(error: &RedisError) -> String {
    let what = match code(error) {
        Some("NOAUTH") => "the server wants a password: write redis://user:password@host",
        Some("WRONGPASS") => "the server does not accept this user and password",
        Some("NOPERM") => "this user may not run scripts or use these keys and channels",
        Some("READONLY") => "this is a replica, which can't be written: name the master",
        Some("OOM") => "the server's memory is full: raise maxmemory, or free some",
        Some("LOADING") => "the server is loading its data: try again soon",
        Some("WRONGTYPE") => "another program uses one of the lock's keys for something else",
        _ if error.kind() == RedisErrorKind::Parse => "what answers there is no Redis server",
        _ if error.is_connection_refusal() => {
            "nobody listens there: check the host and the port, and that the server runs"
        }
        _ if error.is_timeout() => return format!("no answer within {ANSWER_LIMIT:?}"),
        _ if error.kind() == RedisErrorKind::AuthenticationFailed => {
            "the server does not accept this user and password"
        }
        _ => return error.to_string(),
    };
    what.to_owned()
}

/// Every resource that has a state, in the order of the names. `Inspect` tells which are in use.
async fn scan(mut connection: ConnectionManager) -> Result<Vec<Resource>, StoreError> {
    let mut resources = Vec::new();
    let mut cursor = 0_u64;
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(keys::every_state()).arg("COUNT").arg(1_000);
        let found: Result<(u64, Vec<Vec<u8>>), _> = scan.query_async(&mut connection).await;
        let (next, keys) = found.map_err(|error| classify(&error))?;
        resources.extend(keys.iter().filter_map(|key| keys::resource_of(key)));
        cursor = next;
        if cursor == 0 {
            break;
        }
    }
    // A scan may show a key twice.
    resources.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    resources.dedup();
    Ok(resources)
}

#[cfg(test)]
mod tests;
