//! A recipe's interface to its environment: a Redis that runs one command at a time, a clock, and unique tokens.
//!
//! A recipe is an async function over this handle, written as it was published. Either the explorer performs its steps, in
//! an order that the explorer chooses, or a real connection does.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, FromRedisValue, RedisError, RedisResult, Value};

/// A script, with a name for timelines.
#[derive(Debug)]
pub struct Script {
    /// Its name in timelines.
    pub name: &'static str,
    /// Its Lua source.
    pub text: &'static str,
}

/// A script's source, whose hash is computed once.
#[derive(Clone, Debug)]
pub struct Text {
    text: Arc<str>,
    hash: u64,
}

impl Text {
    /// Wraps a source.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Self { text: Arc::from(text), hash: hasher.finish() }
    }

    /// The source.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.text, &other.text) || self.hash == other.hash && self.text == other.text
    }
}

impl Eq for Text {}

impl Hash for Text {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.hash.hash(hasher);
    }
}

/// A request to a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// A command.
    Command(Vec<Vec<u8>>),
    /// A script with its keys and arguments.
    Script {
        /// Its source.
        text: Text,
        /// Number of keys.
        keys: usize,
        /// Keys, then arguments.
        words: Vec<Vec<u8>>,
    },
}

/// One step of a client.
#[derive(Clone, Debug)]
pub enum Op {
    /// Send a request to a server.
    Send {
        /// The server's number.
        node: usize,
        /// The request.
        request: Request,
        /// The request as text for timelines.
        label: String,
    },
    /// Subscribe to a channel.
    Subscribe(String),
    /// Wait for the next message, at most until this time of the client's clock.
    Receive(Duration),
    /// Sleep.
    Sleep(Duration),
}

/// What a client reports about itself.
#[derive(Clone, Debug)]
pub enum Note {
    /// An attempt to acquire or to renew begins.
    Attempting,
    /// The last attempt succeeded: the client is in the critical section.
    Acquired(Hold),
    /// The client has noticed that it does not hold the lock any more.
    Lost,
    /// The next step is the first of its release.
    Releasing,
    /// The release has finished. False: the lock was not the client's any more.
    Released(bool),
    /// The recipe failed with this error.
    Failed(String),
}

/// A lock as its holder knows it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hold {
    /// When the holder assumes the lock to be lost, by its own clock. None: never.
    pub valid_until: Option<Duration>,
    /// The fencing token, which increases from holder to holder.
    pub token: Option<u64>,
}

/// A boxed future.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Performs the steps of one client.
pub trait Environment: Send + Sync {
    /// Performs one step.
    fn perform(&self, op: Op) -> BoxFuture<'_, RedisResult<Value>>;

    /// The client's own clock, since 1970.
    fn clock(&self) -> Duration;

    /// A unique text.
    fn token(&self) -> String;

    /// Receives the client's notes.
    fn note(&self, _note: Note) {}
}

/// A client's handle to the servers.
#[derive(Clone)]
pub struct Redis {
    environment: Arc<dyn Environment>,
    /// None where there is only one.
    node: Option<usize>,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis(node {:?})", self.node)
    }
}

impl Redis {
    /// A handle to the only server of this environment.
    #[must_use]
    pub fn new(environment: Arc<dyn Environment>) -> Self {
        Self { environment, node: None }
    }

    /// A handle to one of several servers. Timelines name it in front of each of its commands.
    #[must_use]
    pub fn node(&self, node: usize) -> Self {
        Self { environment: self.environment.clone(), node: Some(node) }
    }

    /// The client's own clock, since 1970.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.environment.clock()
    }

    /// A unique text.
    #[must_use]
    pub fn token(&self) -> String {
        self.environment.token()
    }

    /// Reports a note.
    pub fn note(&self, note: Note) {
        self.environment.note(note);
    }

    /// Sleeps.
    ///
    /// # Errors
    ///
    /// None: the type is that of every step.
    pub async fn sleep(&self, span: Duration) -> RedisResult<()> {
        self.environment.perform(Op::Sleep(span)).await.map(drop)
    }

    /// Subscribes to a channel.
    ///
    /// # Errors
    ///
    /// An error reply, or a failed connection.
    pub async fn subscribe(&self, channel: &str) -> RedisResult<()> {
        self.environment.perform(Op::Subscribe(channel.to_owned())).await.map(drop)
    }

    /// Waits for the next message. None: the limit has passed.
    ///
    /// # Errors
    ///
    /// A failed connection.
    pub async fn message(&self, limit: Duration) -> RedisResult<Option<Vec<u8>>> {
        let until = self.clock() + limit;
        Ok(Option::from_redis_value(self.environment.perform(Op::Receive(until)).await?)?)
    }

    /// Runs a command.
    ///
    /// # Errors
    ///
    /// An error reply, or a failed connection.
    pub async fn call<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let label = words.join(" ");
        let request = Request::Command(words.iter().map(|word| word.as_bytes().to_vec()).collect());
        self.send(request, label).await
    }

    /// Runs a script.
    ///
    /// # Errors
    ///
    /// An error reply, or a failed connection.
    pub async fn eval<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&str],
    ) -> RedisResult<T> {
        let words: Vec<_> = keys.iter().chain(args).copied().collect();
        let label = format!("script {}: {}", script.name, words.join(" "));
        let words = words.into_iter().map(|word| word.as_bytes().to_vec()).collect();
        self.send(Request::Script { text: Text::new(script.text), keys: keys.len(), words }, label).await
    }

    /// Sends a request.
    ///
    /// # Errors
    ///
    /// An error reply, or a failed connection.
    pub async fn send<T: FromRedisValue>(&self, request: Request, label: String) -> RedisResult<T> {
        let label = self.node.map_or(label.clone(), |node| format!("master {}: {label}", node + 1));
        let value = self
            .environment
            .perform(Op::Send { node: self.node.unwrap_or(0), request, label })
            .await?
            .extract_error()?;
        Ok(T::from_redis_value(value)?)
    }
}

/// The commands that recipes use.
#[allow(clippy::missing_errors_doc, reason = "each fails with an error reply or a failed connection")]
impl Redis {
    /// `EXISTS`
    pub async fn exists(&self, key: &str) -> RedisResult<bool> {
        self.call(&["EXISTS", key]).await
    }

    /// `GET`
    pub async fn get(&self, key: &str) -> RedisResult<Option<String>> {
        self.call(&["GET", key]).await
    }

    /// `SET`
    pub async fn set(&self, key: &str, value: &str) -> RedisResult<()> {
        self.call(&["SET", key, value]).await
    }

    /// `SETNX`
    pub async fn setnx(&self, key: &str, value: &str) -> RedisResult<bool> {
        self.call(&["SETNX", key, value]).await
    }

    /// `GETSET`
    pub async fn getset(&self, key: &str, value: &str) -> RedisResult<Option<String>> {
        self.call(&["GETSET", key, value]).await
    }

    /// `SET` with `NX` and `PX`: sets value and expiry in one command.
    pub async fn set_nx_px(&self, key: &str, value: &str, lease: Duration) -> RedisResult<bool> {
        let set: Option<String> = self.call(&["SET", key, value, "NX", "PX", &millis(lease)]).await?;
        Ok(set.is_some())
    }

    /// `EXPIRE`
    pub async fn expire(&self, key: &str, lease: Duration) -> RedisResult<bool> {
        self.call(&["EXPIRE", key, &lease.as_secs().to_string()]).await
    }

    /// `DEL`
    pub async fn del(&self, key: &str) -> RedisResult<bool> {
        self.call(&["DEL", key]).await
    }
}

/// A reply as text for timelines.
#[must_use]
pub fn display_value(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Okay => "OK".to_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::BulkString(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) if text.chars().all(|c| !c.is_control()) => format!("\"{text}\""),
            _ => format!("{} bytes", bytes.len()),
        },
        Value::Array(list) => format!("[{}]", list.iter().map(display_value).collect::<Vec<_>>().join(", ")),
        other => format!("{other:?}"),
    }
}

/// A duration in whole milliseconds, as an argument.
#[must_use]
pub fn millis(span: Duration) -> String {
    span.as_millis().to_string()
}

/// The error of a recipe that its caller misuses.
#[must_use]
pub fn misuse(what: &'static str) -> RedisError {
    (ErrorKind::Client, what).into()
}
