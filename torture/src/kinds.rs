//! leasehold's other kinds of lock, as a peer: one of them, or a mixture of all in which chance chooses the kind of each section.

use std::cell::Cell;
use std::fmt::Write as _;
use std::time::Duration;

use leasehold::{Client, Guard, Mutex, MutexSet, SetGuard, WriteGuard};
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, serve};

use crate::parts::{Lock, Part, Share};

/// The permits of the semaphore.
const PERMITS: u32 = 4;
/// The mutexes of which a set has some.
const SET: u8 = 3;
/// Owners whose tasks are in different processes.
const OWNERS: u32 = 3;
/// The shortest period.
const PERIOD: Duration = Duration::from_secs(1);
/// Two starts are nine tenths of the period apart, in nanoseconds.
const RETAINED: u64 = 900_000_000;
/// Between two attempts to start the work of a period.
const POLL: Duration = Duration::from_millis(20);

/// A kind of lock that an order names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mutex,
    Semaphore,
    ReadWrite,
    Reentrant,
    Election,
    Set,
    OncePer,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Mutex,
        Self::Semaphore,
        Self::ReadWrite,
        Self::Reentrant,
        Self::Election,
        Self::Set,
        Self::OncePer,
    ];
    /// Those that a quorum has.
    const QUORUM: [Self; 4] = [Self::Mutex, Self::Election, Self::Set, Self::OncePer];

    fn named(lock: &str, is_quorum: bool) -> Result<Vec<Self>, Failure> {
        Ok(match lock {
            "semaphore" => vec![Self::Semaphore],
            "read-write" => vec![Self::ReadWrite],
            "reentrant" => vec![Self::Reentrant],
            "election" => vec![Self::Election],
            "set" => vec![Self::Set],
            "once-per" => vec![Self::OncePer],
            "mixed" if is_quorum => Self::QUORUM.to_vec(),
            "mixed" => Self::ALL.to_vec(),
            other => return Err(format!("leasehold has no lock that is called {other}").into()),
        })
    }
}

/// What one section acquires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Mutex,
    Permits(u32),
    Read,
    Write,
    Owner(u32),
    Election,
    /// Bits: which of the mutexes. One alone is acquired as a mutex, beside the sets.
    Set(u8),
    Start,
}

impl Choice {
    /// The digits of the number decide one after the other.
    fn of(kinds: &[Kind], task: u32, mut chance: u64) -> Self {
        let mut below = |limit: u64| {
            let digit = chance % limit;
            chance /= limit;
            u32::try_from(digit).unwrap_or(0)
        };
        let kind = kinds[below(kinds.len() as u64) as usize];
        match kind {
            Kind::Mutex => Self::Mutex,
            Kind::Semaphore => Self::Permits(below(u64::from(PERMITS) - 1) + 1),
            Kind::ReadWrite if below(3) == 0 => Self::Write,
            Kind::ReadWrite => Self::Read,
            // The tasks of one process, or tasks of several.
            Kind::Reentrant if below(2) == 0 => Self::Owner(OWNERS + task / 2),
            Kind::Reentrant => Self::Owner(task % OWNERS),
            Kind::Election => Self::Election,
            Kind::Set => Self::Set(u8::try_from(below((1 << SET) - 1) + 1).unwrap_or(1)),
            // In a mixture only some: the others would wait for their period, and nothing else would happen.
            Kind::OncePer if kinds.len() > 1 && below(8) > 0 => Self::Mutex,
            Kind::OncePer => Self::Start,
        }
    }

    fn parts(self) -> Vec<Part> {
        let (lock, share) = match self {
            Self::Mutex => (Lock::Mutex, Share::Whole),
            Self::Permits(weight) => (Lock::Semaphore, Share::Permits { weight, of: PERMITS }),
            Self::Read => (Lock::ReadWrite, Share::Read),
            Self::Write => (Lock::ReadWrite, Share::Whole),
            Self::Owner(owner) => (Lock::Reentrant, Share::Owner(owner)),
            Self::Election => (Lock::Election, Share::Whole),
            Self::Set(bits) => {
                let part = |number| Part { lock: Lock::Set(number), share: Share::Whole };
                return numbers(bits).map(part).collect();
            }
            Self::Start => (Lock::OncePer, Share::Start { retained: RETAINED }),
        };
        vec![Part { lock, share }]
    }
}

fn numbers(bits: u8) -> impl Iterator<Item = u8> {
    (0..SET).filter(move |number| bits & (1 << number) != 0)
}

/// Whether the locks exclude anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// All tasks use the same locks.
    Shared,
    /// Each attempt uses a lock of its own: a broken specimen.
    Own,
}

/// Runs as a peer.
pub fn run() {
    serve(Kinds::new(Names::Shared));
}

/// Runs as a peer whose locks let everybody in.
pub(crate) fn run_broken() {
    serve(Kinds::new(Names::Own));
}

struct Kinds {
    names: Names,
    ttl: Cell<Duration>,
    is_quorum: Cell<bool>,
}

impl Kinds {
    fn new(names: Names) -> Self {
        Self { names, ttl: Cell::default(), is_quorum: Cell::default() }
    }
}

/// One task, and what it acquires next.
struct Contender {
    client: Client,
    kinds: Vec<Kind>,
    name: String,
    names: Names,
    attempts: u32,
    task: u32,
    ttl: Duration,
    choice: Choice,
}

enum Held {
    Guard(Guard),
    Write(WriteGuard),
    Set(SetGuard),
    /// With the time of the attempt that was granted.
    Start(Guard, u64),
}

impl Library for Kinds {
    type Client = Client;
    type Lock = Contender;

    fn hello(&self) -> Hello {
        Hello {
            library: concat!("leasehold ", env!("CARGO_PKG_VERSION")).into(),
            runtime: "Rust, tokio".into(),
        }
    }

    async fn connect(&self, open: &Open, _: u32) -> Result<Client, Failure> {
        self.ttl.set(Duration::from_millis(open.ttl_ms));
        let url = open.urls.first().ok_or("no address")?;
        self.is_quorum.set(url.starts_with("redlock:"));
        Ok(Client::connect(url).await?)
    }

    fn lock(&self, client: &Client, run: &Run, name: &str, task: u32) -> Result<Contender, Failure> {
        Ok(Contender {
            client: client.clone(),
            kinds: Kind::named(&run.lock, self.is_quorum.get())?,
            name: name.to_owned(),
            names: self.names,
            attempts: 0,
            task,
            ttl: self.ttl.get(),
            choice: Choice::Mutex,
        })
    }

    async fn left(&self, client: &Client) -> Result<Option<u32>, Failure> {
        let locks = client.list().await?;
        let left = locks.iter().map(|lock| lock.holders.len() + lock.waiters.len()).sum::<usize>();
        Ok(Some(u32::try_from(left)?))
    }
}

impl Contender {
    fn name(&self, of: &str) -> String {
        let mut name = format!("{}:{of}", self.name);
        if self.names == Names::Own {
            let _ = write!(name, ":{}:{}", self.task, self.attempts);
        }
        name
    }

    fn set(&self, bits: u8) -> Vec<Mutex> {
        let mutex = |number: u8| self.client.mutex(self.name(&number.to_string())).ttl(self.ttl);
        numbers(bits).map(mutex).collect()
    }

    /// Polls, and so knows when the attempt began that was granted.
    async fn start(&self) -> Result<Held, Failure> {
        let work = self.client.once_per(self.name("once-per"), PERIOD).ttl(self.ttl);
        loop {
            let asked = now_ns();
            if let Some(guard) = work.start().await? {
                return Ok(Held::Start(guard, asked));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

impl leasehold_bench_peer::Lock for Contender {
    type Held = Held;

    fn plan(&mut self, chance: u64) -> String {
        self.choice = Choice::of(&self.kinds, self.task, chance);
        serde_json::to_string(&self.choice.parts()).unwrap_or_default()
    }

    async fn take(&mut self, _: bool) -> Result<Held, Failure> {
        self.attempts += 1;
        let (client, ttl) = (&self.client, self.ttl);
        Ok(match self.choice {
            Choice::Mutex => Held::Guard(client.mutex(self.name("mutex")).ttl(ttl).lock().await?),
            Choice::Permits(weight) => {
                Held::Guard(client.semaphore(self.name("semaphore"), PERMITS).ttl(ttl).acquire(weight).await?)
            }
            Choice::Read => Held::Guard(client.rw_lock(self.name("rw")).ttl(ttl).read().await?),
            Choice::Write => Held::Write(client.rw_lock(self.name("rw")).ttl(ttl).write().await?),
            Choice::Owner(owner) => {
                let name = self.name("reentrant");
                Held::Guard(client.reentrant_mutex(name, owner.to_string()).ttl(ttl).lock().await?)
            }
            Choice::Election => {
                Held::Guard(client.election(self.name("election")).ttl(ttl).campaign().await?)
            }
            Choice::Set(bits) => match self.set(bits).as_slice() {
                [mutex] => Held::Guard(mutex.lock().await?),
                mutexes => Held::Set(MutexSet::new(mutexes.iter().cloned()).lock().await?),
            },
            Choice::Start => self.start().await?,
        })
    }

    async fn give(&mut self, held: Held) -> Result<(), Failure> {
        match held {
            Held::Guard(guard) | Held::Start(guard, _) => guard.release().await?,
            Held::Write(guard) => guard.release().await?,
            Held::Set(set) => set.release().await?,
        }
        Ok(())
    }

    fn is_held(held: &Held) -> bool {
        match held {
            Held::Guard(guard) | Held::Start(guard, _) => guard.is_held(),
            Held::Write(guard) => guard.is_held(),
            Held::Set(set) => set.is_held(),
        }
    }

    fn tokens(held: &Held) -> Vec<u64> {
        match held {
            Held::Guard(guard) | Held::Start(guard, _) => vec![guard.token().get()],
            Held::Write(guard) => vec![guard.token().get()],
            Held::Set(set) => set.guards().iter().map(|guard| guard.token().get()).collect(),
        }
    }

    fn asked(held: &Held) -> Option<u64> {
        match held {
            Held::Start(_, asked) => Some(*asked),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn chosen(lock: &str, is_quorum: bool) -> BTreeSet<Lock> {
        let kinds = Kind::named(lock, is_quorum).unwrap();
        let numbers = (0..4_000_u64).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 3);
        numbers.flat_map(|chance| Choice::of(&kinds, 5, chance).parts()).map(|part| part.lock).collect()
    }

    #[test]
    fn mixture_has_every_lock_and_each_kind_alone_has_its_own() {
        let set = [Lock::Set(0), Lock::Set(1), Lock::Set(2)];
        assert_eq!(chosen("mixed", false).len(), 9);
        let quorum: Vec<Lock> = chosen("mixed", true).into_iter().collect();
        assert_eq!(quorum, [&[Lock::Mutex, Lock::Election][..], &set, &[Lock::OncePer]].concat());
        assert_eq!(chosen("set", false), BTreeSet::from(set));
        assert_eq!(chosen("reentrant", false), BTreeSet::from([Lock::Reentrant]));
    }

    #[test]
    fn chance_chooses_all_weights_owners_readers_and_writers() {
        let kinds = [Kind::Semaphore, Kind::ReadWrite, Kind::Reentrant];
        let shares = (0..200).flat_map(|chance| Choice::of(&kinds, 4, chance).parts()).map(|part| part.share);
        let shares: BTreeSet<String> = shares.map(|share| format!("{share:?}")).collect();
        let weights = (1..PERMITS).map(|weight| format!("{:?}", Share::Permits { weight, of: PERMITS }));
        let others =
            [Share::Read, Share::Whole, Share::Owner(1), Share::Owner(5)].map(|share| format!("{share:?}"));
        assert_eq!(shares, weights.chain(others).collect());
    }
}
