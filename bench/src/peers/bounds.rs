//! The lower bounds: bare round trips, the bare commands of an uncontended lock, a message from one connection to the next, and
//! a mutex within the process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ProtocolVersion, PushInfo, PushKind, Value};
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc};

use crate::bare::Bare;

/// The library name of all lower bounds.
#[derive(Default)]
pub(crate) struct Bounds {
    /// Mutexes within this process, by name.
    mutexes: RefCell<HashMap<String, Arc<Mutex<()>>>>,
}

/// A connection, and the task that waits for messages on it.
pub(crate) struct Client {
    connection: MultiplexedConnection,
    channels: Channels,
}

type Channels = Arc<std::sync::Mutex<HashMap<String, mpsc::UnboundedSender<()>>>>;

/// The substitute for a lock.
pub(crate) enum Bound {
    Ping(MultiplexedConnection),
    Set { bare: Box<Bare>, name: String },
    Publish(Box<Ring>),
    Local(Arc<Mutex<()>>),
}

impl Library for Bounds {
    type Client = Client;
    type Lock = Bound;

    fn hello(&self) -> Hello {
        Hello { library: "redis-rs 1.8, without a lock library".into(), runtime: "Rust, tokio".into() }
    }

    async fn connect(&self, open: &Open, _: u32) -> Result<Client, Failure> {
        let channels = Channels::default();
        let told = Arc::clone(&channels);
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_push_sender(
            move |push: PushInfo| -> Result<(), mpsc::error::SendError<()>> {
                let (PushKind::Message, Some(Value::BulkString(channel))) = (push.kind, push.data.first())
                else {
                    return Ok(());
                };
                let channels = told.lock().unwrap_or_else(PoisonError::into_inner);
                channels.get(&*String::from_utf8_lossy(channel)).map_or(Ok(()), |waiter| waiter.send(()))
            },
        );
        let url = open.urls.first().ok_or("there is no server")?.as_str();
        let info = redis::IntoConnectionInfo::into_connection_info(url)?;
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let client = redis::Client::open(info.set_redis_settings(settings))?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Client { connection, channels })
    }

    fn lock(&self, client: &Client, run: &Run, name: &str, task: u32) -> Result<Bound, Failure> {
        let connection = client.connection.clone();
        Ok(match run.lock.as_str() {
            "ping" => Bound::Ping(connection),
            "set" => Bound::Set { bare: Box::new(Bare::new(connection)), name: name.to_owned() },
            "publish" => Bound::Publish(Box::new(Ring::new(client, run, task))),
            "local" => {
                Bound::Local(Arc::clone(self.mutexes.borrow_mut().entry(name.to_owned()).or_default()))
            }
            other => return Err(format!("no bound is called {other}").into()),
        })
    }
}

impl Lock for Bound {
    type Held = Option<OwnedMutexGuard<()>>;

    async fn take(&mut self, _: bool) -> Result<Self::Held, Failure> {
        match self {
            Self::Ping(connection) => ping(connection).await?,
            Self::Set { bare, name } => bare.take(name).await?,
            Self::Publish(ring) => ring.take().await?,
            Self::Local(mutex) => return Ok(Some(Arc::clone(mutex).lock_owned().await)),
        }
        Ok(None)
    }

    async fn give(&mut self, held: Self::Held) -> Result<(), Failure> {
        match self {
            Self::Ping(connection) => ping(connection).await?,
            Self::Set { bare, name } => bare.give(name).await?,
            Self::Publish(ring) => ring.give().await?,
            Self::Local(_) => drop(held),
        }
        Ok(())
    }
}

async fn ping(connection: &mut MultiplexedConnection) -> Result<(), Failure> {
    let _: String = redis::cmd("PING").query_async(connection).await?;
    Ok(())
}

/// Tasks in a ring: the task that receives the message works, and sends it to the next. This is the lower bound of a hand-off: a lock
/// without joining, leaving or crash recovery.
pub(crate) struct Ring {
    connection: MultiplexedConnection,
    channels: Channels,
    messages: Option<mpsc::UnboundedReceiver<()>>,
    own: String,
    next: String,
    /// The first task needs no message for its first acquisition.
    begins: bool,
}

impl Ring {
    fn new(client: &Client, run: &Run, task: u32) -> Self {
        Self {
            connection: client.connection.clone(),
            channels: Arc::clone(&client.channels),
            messages: None,
            own: format!("{}:{task}", run.name),
            next: format!("{}:{}", run.name, (task + 1) % run.all_tasks.max(1)),
            begins: task == 0,
        }
    }

    async fn take(&mut self) -> Result<(), Failure> {
        if self.messages.is_none() {
            let (waiter, messages) = mpsc::unbounded_channel();
            self.channels.lock().unwrap_or_else(PoisonError::into_inner).insert(self.own.clone(), waiter);
            self.connection.subscribe(&self.own).await?;
            self.messages = Some(messages);
            if self.begins {
                return Ok(());
            }
        }
        let messages = self.messages.as_mut().ok_or("it is subscribed")?;
        messages.recv().await.ok_or_else(|| "the connection is gone".into())
    }

    /// Waits until the next task has subscribed.
    async fn give(&mut self) -> Result<(), Failure> {
        loop {
            let mut publish = redis::cmd("PUBLISH");
            publish.arg(&self.next).arg("x");
            if publish.query_async::<u32>(&mut self.connection).await? > 0 {
                return Ok(());
            }
        }
    }
}
