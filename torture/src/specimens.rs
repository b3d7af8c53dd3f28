//! Locks that are broken on purpose. A checker that does not catch its specimen cannot fail.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::time::Duration;

use leasehold::{Client, Guard, Mutex, OncePer};
use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock, serve};

use crate::kinds;

/// The defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    /// Every task has a lock of its own.
    LetsTwoIn,
    /// A lost lease is still reported as held.
    IgnoresLoss,
    /// `SET NX PX` without a token, released by `DEL`, trusted for ever.
    SetNx,
    /// Tokens fall.
    FallingToken,
    /// Some attempt is never answered.
    LostWaiter,
    /// Some release does nothing.
    KeepsLock,
    /// Every attempt opens a file.
    LeaksFiles,
    /// The first of all attempts panics, which ends its process's work.
    PanicsOnce,
    /// No lease is renewed.
    NeverRenews,
    /// Every lease is lost at once.
    AlwaysLost,
    /// Some release is never sent, so that its lease lasts until its ttl ends.
    DropsReleases,
    /// Some release is sent after 20 s.
    HangsInRelease,
    /// Some attempt fails.
    FailsCalls,
    /// Some attempt is made after 10 s, while the others work.
    Starves,
    /// Another lease is left in the store.
    LeavesLease,
    /// No lease is renewed, all tokens are the same, and no loss is noticed.
    SameToken,
}

/// Runs a specimen as a peer.
///
/// # Errors
///
/// There is no such specimen.
pub fn run(program: &str) -> Result<(), String> {
    let defect = match program {
        "broken-lets-two-in" => Defect::LetsTwoIn,
        "broken-ignores-loss" => Defect::IgnoresLoss,
        "broken-set-nx" => Defect::SetNx,
        "broken-falling-token" => Defect::FallingToken,
        "broken-lost-waiter" => Defect::LostWaiter,
        "broken-keeps-lock" => Defect::KeepsLock,
        "broken-leaks-files" => Defect::LeaksFiles,
        "broken-panics-once" => Defect::PanicsOnce,
        "broken-never-renews" => Defect::NeverRenews,
        "broken-always-lost" => Defect::AlwaysLost,
        "broken-drops-releases" => Defect::DropsReleases,
        "broken-hangs-in-release" => Defect::HangsInRelease,
        "broken-fails-calls" => Defect::FailsCalls,
        "broken-starves" => Defect::Starves,
        "broken-leaves-lease" => Defect::LeavesLease,
        "broken-same-token" => Defect::SameToken,
        "broken-kinds" => {
            kinds::run_broken();
            return Ok(());
        }
        other => return Err(format!("no peer is called {other}")),
    };
    serve(Specimen { defect, ttl: Cell::default() });
    Ok(())
}

struct Specimen {
    defect: Defect,
    ttl: Cell<Duration>,
}

enum Connected {
    Leasehold(Client),
    Redis(redis::aio::MultiplexedConnection),
}

struct Broken {
    defect: Defect,
    task: u32,
    taken: u32,
    ttl: Duration,
    name: String,
    way: Way,
    /// Granted to the first attempt of all processes.
    first: Option<OncePer>,
    /// Acquired by the first task, and never released.
    other: Option<Mutex>,
    files: RefCell<Vec<File>>,
}

enum Way {
    Leasehold(Mutex),
    Redis(redis::aio::MultiplexedConnection),
}

struct Held {
    defect: Defect,
    guard: Option<Guard>,
    /// Instead of the guard's own.
    token: Option<u64>,
}

impl Library for Specimen {
    type Client = Connected;
    type Lock = Broken;

    fn hello(&self) -> Hello {
        Hello { library: format!("{:?}", self.defect), runtime: "Rust, tokio".into() }
    }

    async fn connect(&self, open: &Open, _: u32) -> Result<Connected, Failure> {
        self.ttl.set(Duration::from_millis(open.ttl_ms));
        let url = open.urls.first().ok_or("no address")?;
        if self.defect == Defect::SetNx {
            let client = redis::Client::open(url.as_str())?;
            return Ok(Connected::Redis(client.get_multiplexed_async_connection().await?));
        }
        Ok(Connected::Leasehold(Client::connect(url).await?))
    }

    fn lock(&self, client: &Connected, _: &Run, name: &str, task: u32) -> Result<Broken, Failure> {
        let (defect, ttl) = (self.defect, self.ttl.get());
        let name = if defect == Defect::LetsTwoIn { format!("{name}:{task}") } else { name.to_owned() };
        let first = match client {
            Connected::Leasehold(client) if defect == Defect::PanicsOnce => {
                Some(client.once_per("first", Duration::from_secs(30)))
            }
            _ => None,
        };
        let way = match client {
            Connected::Leasehold(client) => {
                let is_renewed =
                    !matches!(defect, Defect::NeverRenews | Defect::DropsReleases | Defect::SameToken);
                Way::Leasehold(client.mutex(&name).ttl(ttl).auto_renew(is_renewed))
            }
            Connected::Redis(connection) => Way::Redis(connection.clone()),
        };
        let other = match client {
            Connected::Leasehold(client) if defect == Defect::LeavesLease => {
                Some(client.mutex(format!("{name}:other")).ttl(LEFT))
            }
            _ => None,
        };
        Ok(Broken { defect, task, taken: 0, ttl, name, way, first, other, files: RefCell::default() })
    }

    async fn left(&self, client: &Connected) -> Result<Option<u32>, Failure> {
        let Connected::Leasehold(client) = client else { return Ok(None) };
        let locks = client.list().await?;
        let left = locks.iter().map(|lock| lock.holders.len() + lock.waiters.len()).sum::<usize>();
        Ok(Some(u32::try_from(left)?))
    }
}

/// Every so many attempts of the first task meet the defect.
const EVERY: u32 = 5;

/// So long does an attempt that starves wait before it is made.
const STARVED: Duration = Duration::from_secs(10);

/// So long does a release that hangs take.
const HANGING: Duration = Duration::from_secs(20);

/// The ttl of the lease that is left.
const LEFT: Duration = Duration::from_secs(600);

impl Broken {
    fn is_due(&self) -> bool {
        self.task == 0 && self.taken.is_multiple_of(EVERY)
    }
}

impl Lock for Broken {
    type Held = Held;

    async fn take(&mut self, _: bool) -> Result<Held, Failure> {
        self.taken += 1;
        match self.defect {
            Defect::LostWaiter if self.is_due() => std::future::pending().await,
            Defect::Starves if self.is_due() => tokio::time::sleep(STARVED).await,
            Defect::FailsCalls if self.is_due() => return Err("this attempt fails".into()),
            _ => {}
        }
        if let Some(other) = self.other.take_if(|_| self.task == 0) {
            std::mem::forget(other.lock().await?);
        }
        if let Some(first) = &self.first
            && first.start().await?.is_some()
        {
            panic!("the first attempt");
        }
        if self.defect == Defect::LeaksFiles {
            self.files.borrow_mut().push(File::open("/dev/null")?);
        }
        let (defect, token) = (self.defect, u64::from(u32::MAX - self.taken));
        match &mut self.way {
            Way::Leasehold(mutex) => {
                let guard = Some(mutex.lock().await?);
                let token = match defect {
                    Defect::FallingToken => Some(token),
                    Defect::SameToken => Some(1),
                    _ => None,
                };
                Ok(Held { defect, guard, token })
            }
            Way::Redis(connection) => {
                set_nx(connection, &self.name, self.ttl).await?;
                Ok(Held { defect, guard: None, token: Some(0) })
            }
        }
    }

    async fn give(&mut self, held: Held) -> Result<(), Failure> {
        match self.defect {
            // The first one is held, and renewed, for ever; the other one until its ttl ends.
            Defect::KeepsLock | Defect::DropsReleases if self.is_due() => {
                std::mem::forget(held.guard);
                return Ok(());
            }
            Defect::HangsInRelease if self.is_due() => tokio::time::sleep(HANGING).await,
            _ => {}
        }
        match (&mut self.way, held.guard) {
            (Way::Redis(connection), _) => {
                let () = redis::cmd("DEL").arg(&self.name).query_async(connection).await?;
            }
            (Way::Leasehold(_), Some(guard)) => guard.release().await?,
            (Way::Leasehold(_), None) => {}
        }
        Ok(())
    }

    fn is_held(held: &Held) -> bool {
        match held.defect {
            Defect::IgnoresLoss => true,
            Defect::AlwaysLost => false,
            _ => held.guard.as_ref().is_none_or(Guard::is_held),
        }
    }

    fn token(held: &Held) -> Option<u64> {
        held.token.or_else(|| held.guard.as_ref().map(|guard| guard.token().get()))
    }
}

/// The recipe of many articles.
async fn set_nx(
    connection: &mut redis::aio::MultiplexedConnection,
    name: &str,
    ttl: Duration,
) -> Result<(), Failure> {
    let ttl = u64::try_from(ttl.as_millis())?;
    loop {
        let mut set = redis::cmd("SET");
        set.arg(name).arg("held").arg("NX").arg("PX").arg(ttl);
        if set.query_async::<Option<String>>(connection).await?.is_some() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
