//! The world of a recipe that really runs: connections, the machine's clock, and tokens that nobody can guess.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisResult, Value};
use tokio::sync::broadcast;

use crate::redis::{Note, Op, Said, Soon, Text, World};

/// How long a server may take to answer a client that has no other.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The same where there are others, which are asked one after the other.
const SHORT_LIMIT: Duration = Duration::from_millis(500);

/// A process's way to its servers, shared by all of its clients.
pub struct Process {
    client: Client,
    connections: Vec<MultiplexedConnection>,
    channels: Mutex<HashMap<String, broadcast::Sender<()>>>,
    scripts: Mutex<HashMap<Text, Arc<redis::Script>>>,
    asked: AtomicU64,
}

impl Process {
    /// Connects to all masters.
    ///
    /// # Errors
    ///
    /// The address can't be used, or nobody answers there.
    pub async fn connect(urls: &[String]) -> RedisResult<Arc<Self>> {
        let limit = if urls.len() > 1 { SHORT_LIMIT } else { ANSWER_LIMIT };
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(limit));
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
            asked: AtomicU64::new(0),
        }))
    }

    /// How many commands were said.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    async fn ask(&self, node: usize, said: &Said) -> RedisResult<Value> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let connection = self.connections.get(node);
        let mut connection = connection.cloned().ok_or((ErrorKind::Client, "there is no such master"))?;
        match said {
            Said::Words(words) => {
                let mut command = redis::Cmd::new();
                command.arg(words);
                command.query_async(&mut connection).await
            }
            Said::Script { text, keys, words } => {
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

    /// The hash of a script is worked out once.
    fn script(&self, text: &Text) -> Arc<redis::Script> {
        let mut scripts = self.scripts.lock().unwrap_or_else(PoisonError::into_inner);
        scripts.entry(text.clone()).or_insert_with(|| Arc::new(redis::Script::new(text.as_str()))).clone()
    }

    /// One subscription for all who hear the same channel.
    async fn hear(&self, channel: &str) -> RedisResult<broadcast::Receiver<()>> {
        if let Some(sender) = self.channels.lock().unwrap_or_else(PoisonError::into_inner).get(channel) {
            return Ok(sender.subscribe());
        }
        let mut pubsub = self.client.get_async_pubsub().await?;
        pubsub.subscribe(channel).await?;
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, receiver) = broadcast::channel(1_024);
        let told = channels.entry(channel.to_owned()).or_insert(sender).clone();
        drop(channels);
        tokio::spawn(async move {
            let mut messages = pubsub.into_on_message();
            while messages.next().await.is_some() {
                // Nobody may listen just now.
                let _ = told.send(());
            }
        });
        Ok(receiver)
    }
}

/// What a client tells, to whoever shows it.
pub type Watch = Box<dyn Fn(TraceEvent<'_>) + Send + Sync>;

/// What happened to a client.
pub enum TraceEvent<'a> {
    /// A step, and what came of it.
    Step(&'a str, &'a RedisResult<Value>),
    /// What it makes of that.
    Note(&'a Note),
}

/// One client.
pub struct RealClient {
    process: Arc<Process>,
    heard: tokio::sync::Mutex<Option<broadcast::Receiver<()>>>,
    watch: Option<Watch>,
}

impl RealClient {
    /// A client of this process.
    #[must_use]
    pub fn new(process: Arc<Process>, watch: Option<Watch>) -> Self {
        Self { process, heard: tokio::sync::Mutex::default(), watch }
    }

    async fn receive(&self, until: Duration) -> RedisResult<Value> {
        let limit = until.saturating_sub(self.clock());
        let mut heard = self.heard.lock().await;
        let Some(heard) = heard.as_mut() else { return Err((ErrorKind::Client, "it hears nothing").into()) };
        match tokio::time::timeout(limit, heard.recv()).await {
            Ok(_) => Ok(Value::BulkString(Vec::new())),
            Err(_) => Ok(Value::Nil),
        }
    }
}

impl World for RealClient {
    fn perform(&self, op: Op) -> Soon<'_, RedisResult<Value>> {
        Box::pin(async move {
            match op {
                Op::Ask { node, said, shown } => {
                    let answer = self.process.ask(node, &said).await;
                    if let Some(watch) = &self.watch {
                        watch(TraceEvent::Step(&shown, &answer));
                    }
                    answer
                }
                Op::Subscribe(channel) => {
                    *self.heard.lock().await = Some(self.process.hear(&channel).await?);
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
