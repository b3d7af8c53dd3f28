//! The lock that a command runs under, and its acquisition.

use std::ffi::OsString;
use std::time::Duration;

use leasehold::bridge::Foreign;
use leasehold::{
    Client, Election, Error, Guard, Kind, LockInfo, Mutex, MutexSet, OncePer, ReentrantMutex, RwLock,
    Semaphore,
};

use crate::args::{KindArgs, RunArgs, WorkArgs, name};
use crate::exit::Stop;
use crate::held::Held;
use crate::output::{Level, message};
use crate::text::printable;

/// Why a lock can't be bridged.
const NOT_BRIDGED: &str = "--bridge is for a mutex, an election, or with redisson-rw:NAME a read-write lock (-s, -x): leave out \
                           --semaphore, --owner and --once-per";

pub(crate) struct Lock {
    client: Client,
    /// In the order in which they were typed.
    names: Vec<String>,
    /// The owner of a reentrant mutex.
    owner: Option<String>,
    waits: bool,
    /// The lock of another library that is held with this one.
    bridge: Option<Foreign>,
    variant: Variant,
}

/// What a lock's lease is given.
pub(crate) struct LeaseOptions<'a> {
    pub(crate) ttl: Duration,
    pub(crate) min_hold: Duration,
    pub(crate) label: &'a str,
    /// Whether the lease is renewed and released by its id, and not by this process.
    pub(crate) is_detached: bool,
}

/// Leases whose command does not start if this is dropped.
struct NotStarted<'a>(&'a Held);

impl Drop for NotStarted<'_> {
    fn drop(&mut self) {
        self.0.forget_min_hold();
    }
}

enum Variant {
    Mutex(Mutex),
    Several(MutexSet),
    Owner(ReentrantMutex),
    Shared(RwLock),
    Exclusive(RwLock),
    Permit(Semaphore),
    Once(OncePer),
    Leadership(Election),
}

impl Lock {
    /// The lock that the arguments of `run` name. Inspection shows the label.
    pub(crate) fn new(client: &Client, args: &RunArgs, label: &str) -> Result<Self, Stop> {
        let ttl = &args.work.ttl;
        let names = args.names();
        let [typed, others @ ..] = &names[..] else { return Err(Stop::usage("name a lock")) };
        if let Some(period) = args.once_per {
            if args.work.bridge.is_some() {
                return Err(Stop::usage(NOT_BRIDGED));
            }
            let name = name(typed)?.to_owned();
            let once = client.once_per(&name, period).ttl(*ttl).label(label);
            let once = if args.at_least_once { once.at_least_once() } else { once };
            let (waits, variant) = (args.at_least_once, Variant::Once(once));
            return Ok(Self {
                client: client.clone(),
                names: vec![name],
                owner: None,
                waits,
                bridge: None,
                variant,
            });
        }
        let waits = !args.no_wait && args.wait != Some(Duration::ZERO);
        let options = LeaseOptions { ttl: *ttl, min_hold: args.min_hold, label, is_detached: false };
        if others.is_empty() {
            let lock = Self::of_kind(client, typed, &args.kind, &options, waits)?;
            return lock.bridged(args.work.bridge.as_ref());
        }
        if args.work.bridge.is_some() {
            return Err(Stop::usage("--bridge is for one name"));
        }
        Self::several(client, &names, &options, waits)
    }

    /// Several mutexes, all or none of which are acquired.
    fn several(
        client: &Client,
        typed: &[&OsString],
        options: &LeaseOptions<'_>,
        waits: bool,
    ) -> Result<Self, Stop> {
        let names =
            typed.iter().map(|typed| Ok(name(typed)?.to_owned())).collect::<Result<Vec<_>, Stop>>()?;
        let mutex = |name: &String| {
            client.mutex(name).ttl(options.ttl).min_hold(options.min_hold).label(options.label)
        };
        let variant = Variant::Several(MutexSet::new(names.iter().map(mutex)));
        Ok(Self { client: client.clone(), names, owner: None, waits, bridge: None, variant })
    }

    /// A lock of the kind that the arguments name.
    pub(crate) fn of_kind(
        client: &Client,
        typed: &OsString,
        kind: &KindArgs,
        options: &LeaseOptions<'_>,
        waits: bool,
    ) -> Result<Self, Stop> {
        macro_rules! set {
            ($lock:expr) => {{
                let lock = $lock.ttl(options.ttl).min_hold(options.min_hold).label(options.label);
                if options.is_detached { lock.detachable() } else { lock }
            }};
        }
        let name = name(typed)?.to_owned();
        let variant = match (&kind.owner, kind.semaphore) {
            (Some(owner), _) => Variant::Owner(set!(client.reentrant_mutex(&name, owner))),
            (_, Some(permits)) => Variant::Permit(set!(client.semaphore(&name, permits))),
            _ if kind.shared => Variant::Shared(set!(client.rw_lock(&name))),
            _ if kind.exclusive => Variant::Exclusive(set!(client.rw_lock(&name))),
            _ => Variant::Mutex(set!(client.mutex(&name))),
        };
        Ok(Self {
            client: client.clone(),
            names: vec![name],
            owner: kind.owner.clone(),
            waits,
            bridge: None,
            variant,
        })
    }

    /// The same lock, bridged to the lock of another library.
    fn bridged(mut self, foreign: Option<&Foreign>) -> Result<Self, Stop> {
        let Some(foreign) = foreign else { return Ok(self) };
        self.variant = match self.variant {
            Variant::Mutex(mutex) => Variant::Mutex(mutex.bridge(foreign.clone())),
            Variant::Leadership(election) => Variant::Leadership(election.bridge(foreign.clone())),
            Variant::Shared(lock) => Variant::Shared(lock.bridge(foreign.clone())),
            Variant::Exclusive(lock) => Variant::Exclusive(lock.bridge(foreign.clone())),
            _ => return Err(Stop::usage(NOT_BRIDGED)),
        };
        self.bridge = Some(foreign.clone());
        Ok(self)
    }

    /// The election of `elect`.
    pub(crate) fn leadership(
        client: &Client,
        typed: &OsString,
        work: &WorkArgs,
        label: &str,
    ) -> Result<Self, Stop> {
        let name = name(typed)?.to_owned();
        let variant = Variant::Leadership(client.election(&name).ttl(work.ttl).label(label));
        let lock = Self {
            client: client.clone(),
            names: vec![name],
            owner: None,
            waits: true,
            bridge: None,
            variant,
        };
        lock.bridged(work.bridge.as_ref())
    }

    fn kind(&self) -> Kind {
        match self.variant {
            Variant::Mutex(_) | Variant::Several(_) | Variant::Owner(_) | Variant::Once(_) => Kind::Mutex,
            Variant::Shared(_) | Variant::Exclusive(_) => Kind::ReadWrite,
            Variant::Permit(_) => Kind::Semaphore,
            Variant::Leadership(_) => Kind::Election,
        }
    }

    /// Whether several holders are possible at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.variant, Variant::Shared(_))
    }

    /// The lock of another library, which an attempt that has its own lease still waits for.
    pub(crate) fn bridge(&self) -> Option<&Foreign> {
        self.bridge.as_ref()
    }

    /// Whether an attempt waits for the holder. Once-per-period work at most once does not.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Whether the attempt has this owner, so that the owner's lease does not block it.
    pub(crate) fn is_of_owner(&self, holder: Option<&str>) -> bool {
        self.owner.is_some() && self.owner.as_deref() == holder
    }

    /// The lock. Of several, the first that another client holds: it is what the attempt waits for.
    pub(crate) async fn inspect(&self) -> Result<LockInfo, Error> {
        let mut last = self.client.inspect(self.kind(), &self.names[0]).await?;
        for name in &self.names[1..] {
            if last.holders.iter().any(|holder| !holder.is_own) {
                break;
            }
            last = self.client.inspect(self.kind(), name).await?;
        }
        Ok(last)
    }

    /// Why the store refuses the attempt at present, which waits and is retried.
    pub(crate) fn refusal(&self) -> Option<Error> {
        self.client.refusal()
    }

    /// All of the locks that the attempt needs.
    pub(crate) async fn inspect_all(&self) -> Result<Vec<LockInfo>, Error> {
        let mut all = Vec::new();
        for name in &self.names {
            all.push(self.client.inspect(self.kind(), name).await?);
        }
        Ok(all)
    }

    /// Waits at most `limit` for the lock.
    pub(crate) async fn acquire(&self, limit: Duration) -> Result<Option<Held>, Stop> {
        let one = |acquired: Result<Option<Guard>, Error>| acquired.map(|guard| guard.map(Held::from));
        let acquired = match &self.variant {
            Variant::Several(set) => {
                Ok(set.lock_timeout(limit).await?.map(|set| Held::several(set.into_guards())))
            }
            Variant::Mutex(lock) => one(lock.lock_timeout(limit).await),
            Variant::Owner(lock) => one(lock.lock_timeout(limit).await),
            Variant::Shared(lock) => one(lock.read_timeout(limit).await),
            Variant::Exclusive(lock) => one(Ok(lock.write_timeout(limit).await?.map(Guard::from))),
            Variant::Permit(lock) => one(lock.acquire_timeout(1, limit).await),
            Variant::Once(once) => one(once.start().await),
            Variant::Leadership(lock) => one(lock.campaign_timeout(limit).await),
        };
        let held = acquired?;
        if let Some(held) = &held {
            // A command that is refused, or interrupted by a signal, does not start.
            let refused = NotStarted(held);
            self.refuse_mixture().await?;
            std::mem::forget(refused);
        }
        Ok(held)
    }

    /// A mutex and a read-write lock of one name do not exclude each other, so using both is refused. Each command acquires its
    /// lock first and then inspects the other kind, so of two commands at least one sees the other.
    async fn refuse_mixture(&self) -> Result<(), Stop> {
        let (other, advice) = match self.variant {
            Variant::Mutex(_) | Variant::Several(_) | Variant::Owner(_) => (Kind::ReadWrite, "pass -x or -s"),
            Variant::Shared(_) | Variant::Exclusive(_) => {
                (Kind::Mutex, "pass neither -s nor -x, or one in every run")
            }
            // A start of once-per-period work can't be undone.
            Variant::Permit(_) | Variant::Once(_) | Variant::Leadership(_) => return Ok(()),
        };
        let mut used = None;
        for name in &self.names {
            match self.client.inspect(other, name).await {
                Ok(view) if view.holders.is_empty() => {}
                Ok(_) => {
                    used = Some(name);
                    break;
                }
                // It may be kept on another server than the lock that was granted.
                Err(error) if error.is_unavailable() => message(
                    Level::Warn,
                    "store_warning",
                    format_args!(
                        "whether \"{}\" is also in use as a {other} is not known: {error}",
                        printable(name)
                    ),
                ),
                Err(error) => return Err(error.into()),
            }
        }
        let Some(name) = used else { return Ok(()) };
        let what = match other {
            Kind::Mutex => "without -s and -x",
            _ => "with -s or -x",
        };
        Err(Stop::usage(format!("\"{}\" is in use {what}: {advice}", printable(name))))
    }
}
