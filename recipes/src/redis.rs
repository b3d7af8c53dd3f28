//! What a recipe sees of the world: a Redis that takes one command at a time, a clock, and luck with unguessable tokens.
//!
//! A recipe is written as it was published, as a plain async function over this handle. Who performs a step, and when, is
//! not its business: the explorer, in an order of its choosing, or a real connection.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, FromRedisValue, RedisError, RedisResult, Value};

/// A script, by the name that people are shown.
#[derive(Debug)]
pub struct Script {
    /// What a timeline calls it.
    pub name: &'static str,
    /// What the server runs.
    pub text: &'static str,
}

/// A script's text, which may be long: hashed once.
#[derive(Clone, Debug)]
pub struct Text {
    text: Arc<str>,
    hash: u64,
}

impl Text {
    /// This text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Self { text: Arc::from(text), hash: hasher.finish() }
    }

    /// The text.
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

/// What is said to a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Said {
    /// A command.
    Words(Vec<Vec<u8>>),
    /// A script with its keys and arguments.
    Script {
        /// What the server runs.
        text: Text,
        /// How many of the words are keys.
        keys: usize,
        /// Keys, then arguments.
        words: Vec<Vec<u8>>,
    },
}

/// One step of a client.
#[derive(Clone, Debug)]
pub enum Op {
    /// Ask a server.
    Ask {
        /// Which of the servers: there is more than one where there are several masters.
        node: usize,
        /// What it is told.
        said: Said,
        /// The same for people.
        shown: String,
    },
    /// Hear what is published on a channel.
    Subscribe(String),
    /// Wait for the next message, at most until the client's clock says this.
    Receive(Duration),
    /// Do nothing for a while.
    Sleep(Duration),
}

/// What a client tells whoever watches it.
#[derive(Clone, Debug)]
pub enum Note {
    /// It starts to ask: for the lock, or that it lasts longer.
    Asks,
    /// It is in the critical section, by what it began to ask for last.
    Holds(Hold),
    /// It was told that it does not hold any more.
    Lost,
    /// The next step is the first of its release.
    Leaves,
    /// It is through with the release, which found its lock, or did not.
    Released(bool),
    /// Something is not as the recipe wants it.
    Failed(String),
}

/// A lock as its holder knows it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hold {
    /// By the holder's own clock: it stops believing in the lock then. None: it never does.
    pub valid_until: Option<Duration>,
    /// A number that rises from holder to holder.
    pub token: Option<u64>,
}

/// What comes of a step, later.
pub type Soon<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who performs the steps.
pub trait World: Send + Sync {
    /// Performs one.
    fn perform(&self, op: Op) -> Soon<'_, RedisResult<Value>>;

    /// The client's own clock, since 1970.
    fn clock(&self) -> Duration;

    /// A text that nobody else has.
    fn token(&self) -> String;

    /// Hears what the client tells.
    fn note(&self, _note: Note) {}
}

/// A client's way to the servers.
#[derive(Clone)]
pub struct Redis {
    world: Arc<dyn World>,
    node: usize,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis(node {})", self.node)
    }
}

impl Redis {
    /// The way to the first server of this world.
    #[must_use]
    pub fn new(world: Arc<dyn World>) -> Self {
        Self { world, node: 0 }
    }

    /// The way to another server.
    #[must_use]
    pub fn node(&self, node: usize) -> Self {
        Self { world: self.world.clone(), node }
    }

    /// The client's own clock, since 1970.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.world.clock()
    }

    /// A text that nobody else has.
    #[must_use]
    pub fn token(&self) -> String {
        self.world.token()
    }

    /// Tells whoever watches.
    pub fn note(&self, note: Note) {
        self.world.note(note);
    }

    /// Does nothing for a while.
    ///
    /// # Errors
    ///
    /// None; it has the form of every step.
    pub async fn sleep(&self, span: Duration) -> RedisResult<()> {
        self.world.perform(Op::Sleep(span)).await.map(drop)
    }

    /// Hears what is published on a channel from now on.
    ///
    /// # Errors
    ///
    /// The server's, and the connection's.
    pub async fn subscribe(&self, channel: &str) -> RedisResult<()> {
        self.world.perform(Op::Subscribe(channel.to_owned())).await.map(drop)
    }

    /// The next message, or none within this time.
    ///
    /// # Errors
    ///
    /// The connection's.
    pub async fn message(&self, limit: Duration) -> RedisResult<Option<Vec<u8>>> {
        let until = self.clock() + limit;
        Ok(Option::from_redis_value(self.world.perform(Op::Receive(until)).await?)?)
    }

    /// Runs a command.
    ///
    /// # Errors
    ///
    /// The server's, and the connection's.
    pub async fn call<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let shown = words.join(" ");
        let said = Said::Words(words.iter().map(|word| word.as_bytes().to_vec()).collect());
        self.ask(said, shown).await
    }

    /// Runs a script.
    ///
    /// # Errors
    ///
    /// The server's, and the connection's.
    pub async fn eval<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&str],
    ) -> RedisResult<T> {
        let words: Vec<_> = keys.iter().chain(args).copied().collect();
        let shown = format!("script {}: {}", script.name, words.join(" "));
        let words = words.into_iter().map(|word| word.as_bytes().to_vec()).collect();
        self.ask(Said::Script { text: Text::new(script.text), keys: keys.len(), words }, shown).await
    }

    /// Says what was put together elsewhere.
    ///
    /// # Errors
    ///
    /// The server's, and the connection's.
    pub async fn ask<T: FromRedisValue>(&self, said: Said, shown: String) -> RedisResult<T> {
        let shown = if self.node == 0 { shown } else { format!("{}: {shown}", self.node) };
        let value = self.world.perform(Op::Ask { node: self.node, said, shown }).await?.extract_error()?;
        Ok(T::from_redis_value(value)?)
    }
}

/// The commands of the recipes, by their names.
#[allow(clippy::missing_errors_doc, reason = "each fails as the server or the connection does")]
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

    /// `SET` with `NX` and `PX`: the expiry comes with the value.
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

/// An answer, for people.
#[must_use]
pub fn shown(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Okay => "OK".to_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::BulkString(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) if text.chars().all(|c| !c.is_control()) => format!("\"{text}\""),
            _ => format!("{} bytes", bytes.len()),
        },
        Value::Array(list) => format!("[{}]", list.iter().map(shown).collect::<Vec<_>>().join(", ")),
        other => format!("{other:?}"),
    }
}

/// A span in whole milliseconds, as commands want it.
#[must_use]
pub fn millis(span: Duration) -> String {
    span.as_millis().to_string()
}

/// A recipe that is used against its rules.
#[must_use]
pub fn misuse(what: &'static str) -> RedisError {
    (ErrorKind::Client, what).into()
}
