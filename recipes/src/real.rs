//! The environment of a recipe that runs over real connections, by the machine's clock, with random tokens.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisResult, Value};
use tokio::sync::broadcast;

use crate::redis::{BoxFuture, Environment, Note, Op, Request, Text};

/// Response timeout if the recipe uses one server.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The same where there are others, which are commands_sent one after the other.
const NODE_TIMEOUT: Duration = Duration::from_millis(500);

/// A process's connections to its servers, shared by all of its clients.
pub struct Process {
    client: Client,
    connections: Vec<MultiplexedConnection>,
    channels: Mutex<HashMap<String, broadcast::Sender<()>>>,
    scripts: Mutex<HashMap<Text, Arc<redis::Script>>>,
    commands_sent: AtomicU64,
}

impl Process {
    /// Connects to all masters.
    ///
    /// # Errors
    ///
    /// The address is invalid, or the connection fails.
    pub async fn connect(urls: &[String]) -> RedisResult<Arc<Self>> {
        let limit = if urls.len() > 1 { NODE_TIMEOUT } else { RESPONSE_TIMEOUT };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(RESPONSE_TIMEOUT))
            .set_response_timeout(Some(limit));
        let mut connections = Vec::new();
        for url in urls {
            connections.push(
                Client::open(url.as_str())?.get_multiplexed_async_connection_with_config(&config).await?,
            );
        }
        let client = Client::open(urls[0].as_str())?;
        Ok(Arc::new(Self {
            client,
            connections,
            channels: Mutex::default(),
            scripts: Mutex::default(),
            commands_sent: AtomicU64::new(0),
        }))
    }

    /// Number of commands sent.
    #[must_use]
    pub fn commands_sent(&self) -> u64 {
        self.commands_sent.load(Ordering::Relaxed)
    }

    async fn send(&self, node: usize, request: &Request) -> RedisResult<Value> {
        self.commands_sent.fetch_add(1, Ordering::Relaxed);
        let connection = self.connections.get(node);
        let mut connection = connection.cloned().ok_or((ErrorKind::Client, "no master has this number"))?;
        match request {
            Request::Command(words) => {
                let mut command = redis::Cmd::new();
                command.arg(words);
                command.query_async(&mut connection).await
            }
            Request::Script { text, keys, words } => {
                let script = self.script(text);
                let mut invocation = script.prepare_invoke();
                for (place, word) in words.iter().enumerate() {
                    if place < *keys {
                        invocation.key(word)
                    } else {
                        invocation.arg(word)
                    };
                }
                invocation.invoke_async(&mut connection).await
            }
        }
    }

    /// The script with this source, whose hash is computed once.
    fn script(&self, text: &Text) -> Arc<redis::Script> {
        let mut scripts = self.scripts.lock().unwrap_or_else(PoisonError::into_inner);
        scripts.entry(text.clone()).or_insert_with(|| Arc::new(redis::Script::new(text.as_str()))).clone()
    }

    /// One subscription for all clients of a channel.
    async fn subscribe(&self, channel: &str) -> RedisResult<broadcast::Receiver<()>> {
        if let Some(sender) = self.channels.lock().unwrap_or_else(PoisonError::into_inner).get(channel) {
            return Ok(sender.subscribe());
        }
        let mut pubsub = self.client.get_async_pubsub().await?;
        pubsub.subscribe(channel).await?;
        self.commands_sent.fetch_add(1, Ordering::Relaxed);
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, receiver) = broadcast::channel(1_024);
        let sender = channels.entry(channel.to_owned()).or_insert(sender).clone();
        drop(channels);
        tokio::spawn(async move {
            let mut messages = pubsub.into_on_message();
            while messages.next().await.is_some() {
                // It fails if no client is subscribed at present.
                let _ = sender.send(());
            }
        });
        Ok(receiver)
    }
}

/// Receives the trace of a client.
pub type Watch = Box<dyn Fn(TraceEvent<'_>) + Send + Sync>;

/// One entry of a client's trace.
pub enum TraceEvent<'a> {
    /// A command and its result.
    Step(&'a str, &'a RedisResult<Value>),
    /// A note of the client.
    Note(&'a Note),
}

/// One client.
pub struct RealClient {
    process: Arc<Process>,
    messages: tokio::sync::Mutex<Option<broadcast::Receiver<()>>>,
    watch: Option<Watch>,
}

impl RealClient {
    /// A client of this process.
    #[must_use]
    pub fn new(process: Arc<Process>, watch: Option<Watch>) -> Self {
        Self { process, messages: tokio::sync::Mutex::default(), watch }
    }

    async fn receive(&self, until: Duration) -> RedisResult<Value> {
        let limit = until.saturating_sub(self.clock());
        let mut messages = self.messages.lock().await;
        let Some(messages) = messages.as_mut() else {
            return Err((ErrorKind::Client, "the client has no subscription").into());
        };
        match tokio::time::timeout(limit, messages.recv()).await {
            Ok(_) => Ok(Value::BulkString(Vec::new())),
            Err(_) => Ok(Value::Nil),
        }
    }
}

impl Environment for RealClient {
    fn perform(&self, op: Op) -> BoxFuture<'_, RedisResult<Value>> {
        Box::pin(async move {
            match op {
                Op::Send { node, request, label } => {
                    let reply = self.process.send(node, &request).await;
                    if let Some(watch) = &self.watch {
                        watch(TraceEvent::Step(&label, &reply));
                    }
                    reply
                }
                Op::Subscribe(channel) => {
                    *self.messages.lock().await = Some(self.process.subscribe(&channel).await?);
                    Ok(Value::Okay)
                }
                Op::Receive(until) => self.receive(until).await,
                Op::Sleep(span) => {
                    if span.is_zero() {
                        tokio::task::yield_now().await;
                    } else {
                        tokio::time::sleep(span).await;
                    }
                    Ok(Value::Nil)
                }
            }
        })
    }

    fn clock(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn token(&self) -> String {
        let number = getrandom::u64().unwrap_or_default();
        format!("{number:016x}-{}", self.clock().as_nanos())
    }

    fn note(&self, note: Note) {
        if let Some(watch) = &self.watch {
            watch(TraceEvent::Note(&note));
        }
    }
}
