//! The lower bounds: bare round trips, the bare commands of an uncontended lock, a message from one connection to the next, the same
//! with scripts, and a mutex within the process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ProtocolVersion, PushInfo, PushKind, Value};
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc};
use tokio::time::sleep;

use crate::bare::{Bare, connection as connection_to};

/// Pause until it is tried again whether the next task of a chain has subscribed.
const PAUSE: Duration = Duration::from_millis(1);

/// The library name of all lower bounds.
#[derive(Default)]
pub(crate) struct Bounds {
    /// Mutexes within this process, by name.
    mutexes: RefCell<HashMap<String, Arc<Mutex<()>>>>,
    /// Whether clients have a second connection, for scripts.
    has_scripts: bool,
}

impl Bounds {
    /// For the bare chain.
    pub(crate) fn with_scripts() -> Self {
        Self { has_scripts: true, ..Self::default() }
    }
}

/// A connection, and the task that waits for messages on it.
pub(crate) struct Client {
    connection: MultiplexedConnection,
    channels: Channels,
    scripts: Option<MultiplexedConnection>,
}

type Channels = Arc<std::sync::Mutex<HashMap<String, mpsc::UnboundedSender<()>>>>;

/// The substitute for a lock.
pub(crate) enum Bound {
    Ping(MultiplexedConnection),
    Set { bare: Box<Bare>, name: String },
    Publish(Box<Ring>),
    Chain(Box<Chain>),
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
        let scripts = if self.has_scripts { Some(connection_to(url).await) } else { None };
        Ok(Client { connection, channels, scripts })
    }

    fn lock(&self, client: &Client, run: &Run, name: &str, task: u32) -> Result<Bound, Failure> {
        let connection = client.connection.clone();
        Ok(match run.lock.as_str() {
            "ping" => Bound::Ping(connection),
            "set" => Bound::Set { bare: Box::new(Bare::new(connection)), name: name.to_owned() },
            "publish" => Bound::Publish(Box::new(Ring::new(client, run, task))),
            "chain" => Bound::Chain(Box::new(Chain::new(client, run, task)?)),
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
            Self::Chain(chain) => chain.take().await?,
            Self::Local(mutex) => return Ok(Some(Arc::clone(mutex).lock_owned().await)),
        }
        Ok(None)
    }

    async fn give(&mut self, held: Self::Held) -> Result<(), Failure> {
        match self {
            Self::Ping(connection) => ping(connection).await?,
            Self::Set { bare, name } => bare.give(name).await?,
            Self::Publish(ring) => ring.give().await?,
            Self::Chain(chain) => chain.give().await?,
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

    /// Waits for the message.
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

/// The bare chain: the ring with what a lock needs at least. An acquisition is an empty script, a release is a script that publishes, and
/// scripts go over another connection than messages.
pub(crate) struct Chain {
    ring: Ring,
    scripts: MultiplexedConnection,
    acquire: Arc<redis::Script>,
    release: Arc<redis::Script>,
}

impl Chain {
    fn new(client: &Client, run: &Run, task: u32) -> Result<Self, Failure> {
        let release = "return redis.call('PUBLISH', KEYS[1], ARGV[1])";
        let next = format!("{}:{}", run.name, next_elsewhere(task, run.tasks, run.all_tasks));
        Ok(Self {
            ring: Ring { next, ..Ring::new(client, run, task) },
            scripts: client.scripts.clone().ok_or("its clients have no connection for scripts")?,
            acquire: Arc::new(redis::Script::new("return 0")),
            release: Arc::new(redis::Script::new(release)),
        })
    }

    async fn take(&mut self) -> Result<(), Failure> {
        self.acquire.key(&self.ring.own).invoke_async::<u32>(&mut self.scripts).await?;
        self.ring.take().await
    }

    /// Waits until the next task has subscribed.
    async fn give(&mut self) -> Result<(), Failure> {
        while self.release.key(&self.ring.next).arg("x").invoke_async::<u32>(&mut self.scripts).await? == 0 {
            sleep(PAUSE).await;
        }
        Ok(())
    }
}

/// The next task of a ring in which every message goes to another process: each has `tasks` consecutive ones.
fn next_elsewhere(task: u32, tasks: u32, all: u32) -> u32 {
    let processes = (all / tasks.max(1)).max(1);
    let place = (task % tasks.max(1) * processes + task / tasks.max(1) + 1) % all.max(1);
    place % processes * tasks + place / processes
}

#[cfg(test)]
mod tests {
    use super::next_elsewhere;

    #[test]
    fn ring_has_all_tasks_and_leaves_the_process_with_every_message() {
        for (tasks, all) in [(1, 2), (3, 12), (100, 1_000)] {
            let mut seen = vec![0];
            while seen.len() < all as usize {
                let task = seen[seen.len() - 1];
                let next = next_elsewhere(task, tasks, all);
                assert!(next / tasks != task / tasks && !seen.contains(&next), "{task} {next}");
                seen.push(next);
            }
            assert_eq!(next_elsewhere(seen[seen.len() - 1], tasks, all), 0);
        }
    }
}
