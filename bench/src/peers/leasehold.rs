//! leasehold as a peer, with default settings.

use std::cell::Cell;
use std::time::Duration;

use leasehold::bridge::Foreign;
use leasehold::{Client, Guard, Mutex, RwLock, Semaphore, WriteGuard};
use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock};
use tokio::sync::oneshot;

/// The client and its ttl.
#[derive(Default)]
pub(crate) struct Leasehold {
    ttl: Cell<Duration>,
    is_outside: bool,
}

impl Leasehold {
    /// Clients know no runtime, so that their thread sends all commands.
    pub(crate) fn outside_of_the_runtime() -> Self {
        Self { is_outside: true, ..Self::default() }
    }
}

/// Opens a client on a thread that has no runtime.
async fn connect_outside(url: String) -> Result<Client, Failure> {
    let (sender, client) = oneshot::channel();
    std::thread::spawn(move || sender.send(pollster::block_on(Client::connect(&url))));
    Ok(client.await??)
}

/// A kind of lock.
pub(crate) enum Kind {
    Mutex(Mutex),
    RwLock(RwLock),
    Semaphore(Semaphore),
    /// A mutex whose lease is detached, and goes on by its id.
    Detached(Client, Mutex, Cell<u32>),
}

/// A held lock.
pub(crate) enum Held {
    Lease(Guard),
    Write(WriteGuard),
}

impl Library for Leasehold {
    type Client = Client;
    type Lock = Kind;

    fn hello(&self) -> Hello {
        Hello {
            library: concat!("leasehold ", env!("CARGO_PKG_VERSION")).into(),
            runtime: "Rust, tokio".into(),
        }
    }

    async fn connect(&self, open: &Open, _: u32) -> Result<Client, Failure> {
        self.ttl.set(Duration::from_millis(open.ttl_ms));
        let url = match open.urls.as_slice() {
            [url] => url.clone(),
            urls => {
                let hosts: Vec<&str> = urls.iter().map(|url| url.trim_start_matches("redis://")).collect();
                format!("redlock://{}", hosts.join(","))
            }
        };
        if self.is_outside { connect_outside(url).await } else { Ok(Client::connect(&url).await?) }
    }

    fn lock(&self, client: &Client, run: &Run, name: &str, _: u32) -> Result<Kind, Failure> {
        let ttl = self.ttl.get();
        Ok(match run.lock.as_str() {
            "mutex" => Kind::Mutex(client.mutex(name).ttl(ttl)),
            "read-write" => Kind::RwLock(client.rw_lock(name).ttl(ttl)),
            "semaphore" => Kind::Semaphore(client.semaphore(name, run.permits).ttl(ttl)),
            "detached" => Kind::Detached(client.clone(), client.mutex(name).ttl(ttl), Cell::new(0)),
            bridge if bridge.starts_with("bridge:") => {
                let (scheme, servers) = bridge.split_at(bridge.find('@').unwrap_or(bridge.len()));
                let foreign = format!("{}:{name}{servers}", &scheme["bridge:".len()..]).parse::<Foreign>()?;
                match scheme {
                    "bridge:redisson-rw" => Kind::RwLock(client.rw_lock(name).ttl(ttl).bridge(foreign)),
                    _ => Kind::Mutex(client.mutex(name).ttl(ttl).bridge(foreign)),
                }
            }
            other => return Err(format!("leasehold has no lock that is called {other}").into()),
        })
    }

    async fn left(&self, client: &Client) -> Result<Option<u32>, Failure> {
        let locks = client.list().await?;
        let left = locks.iter().map(|lock| lock.holders.len() + lock.waiters.len()).sum::<usize>();
        Ok(Some(u32::try_from(left)?))
    }
}

impl Lock for Kind {
    type Held = Held;

    async fn take(&mut self, is_shared: bool) -> Result<Held, Failure> {
        Ok(match self {
            Self::Mutex(mutex) => Held::Lease(mutex.lock().await?),
            Self::RwLock(lock) if is_shared => Held::Lease(lock.read().await?),
            Self::RwLock(lock) => Held::Write(lock.write().await?),
            Self::Semaphore(semaphore) => Held::Lease(semaphore.acquire(1).await?),
            Self::Detached(client, mutex, sections) => {
                let id = mutex.lock().await?.detach().await?;
                if !sections.replace(sections.get() + 1).is_multiple_of(2) {
                    client.renew_lease(&id).await?;
                }
                Held::Lease(client.attach(&id).await?)
            }
        })
    }

    async fn give(&mut self, held: Held) -> Result<(), Failure> {
        match (self, held) {
            (Self::Detached(client, _, sections), Held::Lease(guard)) if sections.get().is_multiple_of(3) => {
                let id = guard.detach().await?;
                client.attach(&id).await?.release().await?;
            }
            (_, Held::Lease(guard)) => guard.release().await?,
            (_, Held::Write(guard)) => guard.release().await?,
        }
        Ok(())
    }

    fn is_held(held: &Held) -> bool {
        match held {
            Held::Lease(guard) => guard.is_held(),
            Held::Write(guard) => guard.is_held(),
        }
    }

    fn token(held: &Held) -> Option<u64> {
        let token = match held {
            Held::Lease(guard) => guard.token(),
            Held::Write(guard) => guard.token(),
        };
        Some(token.get())
    }
}
