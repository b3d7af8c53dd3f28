//! A connection that commands go out over: one of ours, or one that the program shares with us.
//!
//! A shared connection may reconnect by itself, possibly to another server, and its owner may select another database. Every
//! pipeline over it therefore begins with CLIENT INFO. If the reply does not match the connection that was verified, the replies
//! that follow are discarded and reported as a lost connection. Later commands go out over our own connection, until the shared
//! one is verified again.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_redis_protocol::probe_key_of;
use leasehold_store::OpenError;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::answer_times::AnswerTimes;
use super::error::{OWN, explain, store_error};
use super::own_connection::OwnConnection;

/// Lifetime of the key that shows that two connections lead to one database.
pub(super) const PROBE_TTL_SECONDS: u32 = 60;

/// CLIENT INFO counts whole seconds, by a clock that the server reads now and then.
const AGE_TOLERANCE: u64 = 2;

type Values = RedisResult<Vec<RedisResult<Value>>>;

#[derive(Clone)]
pub(super) enum Wire {
    Own(Timed),
    /// One of ours that has its time limit, and whose answers do not show how fast the server is.
    Limited(OwnConnection),
    Shared(SharedWire),
}

/// A connection of ours whose answers have a time limit, and show how fast the server is.
#[derive(Clone)]
pub(super) struct Timed {
    connection: OwnConnection,
    times: Arc<AnswerTimes>,
    /// For so long the server may wait for replicas before it answers.
    for_replicas: Duration,
}

impl Timed {
    pub(super) const fn new(connection: OwnConnection, times: Arc<AnswerTimes>) -> Self {
        Self { connection, times, for_replicas: Duration::ZERO }
    }

    /// For commands that are followed by a WAIT of so long.
    pub(super) fn for_replicas(self, limit: Duration) -> Self {
        Self { for_replicas: limit, ..self }
    }

    async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        let (sent, limit) = self.begin();
        let answered = self.connection.send_packed_command(command).await;
        self.times.note(sent, limit, answered)
    }

    async fn pipeline(&mut self, commands: Vec<Cmd>, is_asking: bool) -> Values {
        let (sent, limit) = self.begin();
        let answered = query(&mut self.connection, commands, is_asking).await;
        // How much of it was a wait for replicas is not known.
        self.times.note(sent, limit, answered)
    }

    fn begin(&mut self) -> (Instant, Duration) {
        let limit = self.times.limit() + self.for_replicas;
        self.connection.set_response_timeout(limit);
        (Instant::now(), limit)
    }
}

impl Wire {
    pub(super) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Own(timed) => timed.send(command).await,
            Self::Limited(connection) => connection.send_packed_command(command).await,
            Self::Shared(wire) => Box::pin(wire.send(command.clone())).await,
        }
    }

    /// Returns one result per command. `is_asking` is used only for cluster nodes, which have no shared connection.
    pub(super) async fn pipeline(
        &mut self,
        commands: Vec<Cmd>,
        is_asking: bool,
    ) -> Vec<Result<Value, RedisError>> {
        match self {
            Self::Own(timed) => {
                let count = commands.len();
                timed.pipeline(commands, is_asking).await.unwrap_or_else(|error| vec![Err(error); count])
            }
            Self::Limited(connection) => pipeline(connection, commands, is_asking).await,
            Self::Shared(wire) => {
                let count = commands.len();
                wire.pipeline(commands).await.unwrap_or_else(|error| vec![Err(error); count])
            }
        }
    }
}

/// Runs commands on a connection of ours. Returns one result per command.
pub(super) async fn pipeline(
    connection: &mut MultiplexedConnection,
    commands: Vec<Cmd>,
    is_asking: bool,
) -> Vec<Result<Value, RedisError>> {
    let count = commands.len();
    query(connection, commands, is_asking).await.unwrap_or_else(|error| vec![Err(error); count])
}

async fn query(connection: &mut MultiplexedConnection, commands: Vec<Cmd>, is_asking: bool) -> Values {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    for command in commands {
        if is_asking {
            pipeline.cmd("ASKING").ignore();
        }
        pipeline.add_command(command);
    }
    pipeline.query_async(connection).await
}

/// A connection of the program's, of any type.
#[derive(Clone)]
pub struct SharedConnection {
    connection: Arc<dyn RunPipeline>,
    /// It was lost, or has reconnected.
    changed: Arc<Notify>,
    times: Arc<AnswerTimes>,
}

trait RunPipeline: Send + Sync {
    fn run(&self, pipeline: Pipeline) -> Pin<Box<dyn Future<Output = Values> + Send>>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> RunPipeline for C {
    fn run(&self, pipeline: Pipeline) -> Pin<Box<dyn Future<Output = Values> + Send>> {
        let mut connection = self.clone();
        Box::pin(async move { pipeline.query_async(&mut connection).await })
    }
}

/// A random number.
pub(super) fn random() -> RedisResult<u128> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(u128::from_be_bytes(random))
}

impl SharedConnection {
    /// A connection that the program shares.
    pub fn new(connection: impl ConnectionLike + Clone + Send + Sync + 'static) -> Self {
        Self { connection: Arc::new(connection), changed: Arc::default(), times: Arc::default() }
    }

    /// The same connection for one more client, which is notified by itself.
    pub(super) fn for_client(self) -> Self {
        Self { changed: Arc::default(), times: Arc::default(), ..self }
    }

    /// Waits until the connection is lost, or has reconnected.
    pub(super) async fn until_changed(&self) {
        self.changed.notified().await;
    }

    /// Ends one wait in [`Self::until_changed`], also one that begins later.
    pub(super) fn notify_changed(&self) {
        self.changed.notify_one();
    }

    async fn run(&self, pipeline: Pipeline) -> Values {
        // The program may have set no limit of its own.
        let (sent, limit) = (Instant::now(), self.times.limit());
        let answered = timeout(limit, self.connection.run(pipeline)).await;
        let answered = answered.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
        self.times.note(sent, limit, answered)
    }

    /// Runs a pipeline in a task of `caller`. A connection that reconnects starts its new connection in the runtime of the task
    /// that uses it, where it would end with that runtime.
    async fn run_in(&self, caller: &Handle, pipeline: Pipeline) -> Values {
        let shared = self.clone();
        caller.spawn(async move { shared.run(pipeline).await }).await.unwrap_or_else(|_| {
            let message =
                "the tokio runtime that `connect` was called in has ended, or has no timers or sockets";
            Err((ErrorKind::Client, OWN, message.to_owned()).into())
        })
    }

    /// Verifies that the connection leads to the database of `own`: writes a key over `own`, and reads it over this connection.
    /// A task of `caller` uses this connection. While that runtime does not run, this waits for it.
    pub(super) async fn verify(
        &self,
        own: &mut MultiplexedConnection,
        caller: &Handle,
    ) -> RedisResult<SharedWire> {
        let random = random()?;
        let (key, nonce) = (probe_key_of(random, None), format!("{random:032x}"));
        let verified = Instant::now();
        let mut questions = client_info();
        questions.cmd("SET").arg(&key).arg(&nonce).arg("EX").arg(PROBE_TTL_SECONDS);
        let mut answers = self.run_in(caller, questions).await?.into_iter();
        let mut next = || answers.next().unwrap_or_else(|| Err(changed())).and_then(Value::extract_error);
        let identity = Identity::parse(&next()?).ok_or_else(changed)?;
        next()?;
        let mut read = redis::pipe();
        let (found, _): (Option<String>, i64) =
            read.cmd("GET").arg(&key).cmd("DEL").arg(&key).query_async(own).await?;
        if found.as_deref() != Some(&nonce) {
            let message = "the shared connection leads to another server or database than the redis::Client beside it: \
                           pass the client that the connection was made with";
            return Err((ErrorKind::Client, OWN, message.to_owned()).into());
        }
        Ok(SharedWire { connection: self.clone(), identity, verified })
    }
}

/// The error for a shared connection that can't be used.
pub(super) fn refused(store: &str, error: &RedisError) -> OpenError {
    let store = format!("{store}, over the shared connection");
    if leads_elsewhere(error) {
        return OpenError::invalid(format!("{store}: {}", explain(error)));
    }
    OpenError::from_store(store, &store_error(error))
}

/// Whether the error reports that a shared connection can't be used, for example because it leads to another database.
pub(super) fn leads_elsewhere(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Client && error.to_string().starts_with(OWN)
}

/// A shared connection that was verified.
#[derive(Clone)]
pub(super) struct SharedWire {
    connection: SharedConnection,
    identity: Identity,
    verified: Instant,
}

impl SharedWire {
    async fn send(&self, command: Cmd) -> RedisResult<Value> {
        self.pipeline(vec![command]).await?.pop().unwrap_or_else(|| Err(changed()))
    }

    async fn pipeline(&self, commands: Vec<Cmd>) -> Values {
        self.checked(commands).await.map_err(|error| {
            self.connection.notify_changed();
            if error.is_timeout() || error.is_unrecoverable_error() {
                return error;
            }
            // For callers any other error of the connection is a lost connection too.
            io::Error::new(io::ErrorKind::ConnectionReset, error).into()
        })
    }

    /// An error is one of the connection. Those of commands are among the values.
    async fn checked(&self, commands: Vec<Cmd>) -> Values {
        let mut pipeline = client_info();
        let count = commands.len();
        for command in commands {
            pipeline.add_command(command);
        }
        let mut values = self.connection.run(pipeline).await?;
        if values.len() != count + 1 {
            return Err(changed());
        }
        // An error in place of the identity says nothing about the commands: the server has run them nevertheless.
        let now = values.remove(0).ok().and_then(|info| Identity::parse(&info));
        let is_same = now.is_some_and(|now| now.continues(&self.identity, self.verified.elapsed()));
        if is_same { Ok(values) } else { Err(changed()) }
    }
}

fn client_info() -> Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    pipeline.cmd("CLIENT").arg("INFO");
    pipeline
}

/// The replies came over another connection than was verified. For callers this is a lost connection.
fn changed() -> RedisError {
    let what = "the shared connection has reconnected, or its database was changed";
    io::Error::new(io::ErrorKind::ConnectionReset, what).into()
}

/// The identity of a connection, from CLIENT INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    /// Its number at the server, both addresses, and the selected database.
    fields: [String; 4],
    /// Seconds since it was made. A server that is new counts its connections from the start again, so the rest might be equal.
    age: u64,
}

impl Identity {
    fn parse(info: &Value) -> Option<Self> {
        let text: String = redis::from_redis_value_ref(info).ok()?;
        let field = |name: &str| {
            let mut fields = text.split_ascii_whitespace().filter_map(|field| field.split_once('='));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let fields = [field("id")?, field("addr")?, field("laddr")?, field("db")?];
        Some(Self { fields, age: field("age")?.parse().ok()? })
    }

    /// Whether this is the connection of `earlier`, `elapsed` later.
    fn continues(&self, earlier: &Self, elapsed: Duration) -> bool {
        let age = self.age.saturating_add(AGE_TOLERANCE);
        self.fields == earlier.fields && age >= earlier.age.saturating_add(elapsed.as_secs())
    }
}

/// For `fuzz/`: any reply is parsed or refused, and any two can be compared.
#[cfg(feature = "_fuzzing")]
pub fn fuzz(now: &Value, earlier: &Value) {
    if let (Some(now), Some(earlier)) = (Identity::parse(now), Identity::parse(earlier)) {
        now.continues(&earlier, Duration::from_secs(9));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(id: u32, db: u32, age: u64) -> Identity {
        let text = format!(
            "id={id} addr=10.0.0.1:5000 laddr=10.0.0.2:6379 fd=8 name= age={age} idle=0 db={db} sub=0"
        );
        Identity::parse(&Value::BulkString(text.into_bytes())).unwrap()
    }

    #[test]
    fn replies_over_a_connection_that_was_made_again_do_not_count() {
        let verified = identity(7, 0, 100);
        assert!(identity(7, 0, 160).continues(&verified, Duration::from_secs(60)));
        assert!(identity(7, 0, 159).continues(&verified, Duration::from_secs(60)));
        assert!(!identity(8, 0, 160).continues(&verified, Duration::from_secs(60)), "another connection");
        assert!(!identity(7, 1, 160).continues(&verified, Duration::from_secs(60)), "another database");
        assert!(
            !identity(7, 0, 0).continues(&verified, Duration::from_secs(60)),
            "an equal one of a new server"
        );
    }
}
