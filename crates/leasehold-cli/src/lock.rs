//! The lock that a command runs under, and its acquisition.

use std::ffi::OsString;
use std::time::Duration;

use leasehold::{
    Client, Election, Error, Guard, Kind, LockInfo, Mutex, OncePer, ReentrantMutex, RwLock, Semaphore,
};

use crate::args::{KindArgs, RunArgs, WorkArgs, name};
use crate::exit::Stop;
use crate::text::printable;

pub(crate) struct Lock {
    client: Client,
    name: String,
    /// The owner of a reentrant mutex.
    owner: Option<String>,
    waits: bool,
    variant: Variant,
}

/// What a lock's lease is given.
pub(crate) struct LeaseOptions<'a> {
    pub(crate) ttl: Duration,
    pub(crate) min_hold: Duration,
    pub(crate) label: &'a str,
}

enum Variant {
    Mutex(Mutex),
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
        let WorkArgs { ttl, name: typed, .. } = &args.work;
        if let Some(period) = args.once_per {
            let name = name(typed)?.to_owned();
            let once = client.once_per(&name, period).ttl(*ttl).label(label);
            let once = if args.at_least_once { once.at_least_once() } else { once };
            let (waits, variant) = (args.at_least_once, Variant::Once(once));
            return Ok(Self { client: client.clone(), name, owner: None, waits, variant });
        }
        let waits = !args.no_wait && args.wait != Some(Duration::ZERO);
        let options = LeaseOptions { ttl: *ttl, min_hold: args.min_hold, label };
        Self::of_kind(client, typed, &args.kind, &options, waits)
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
            ($lock:expr) => {
                $lock.ttl(options.ttl).min_hold(options.min_hold).label(options.label)
            };
        }
        let name = name(typed)?.to_owned();
        let variant = match (&kind.owner, kind.semaphore) {
            (Some(owner), _) => Variant::Owner(set!(client.reentrant_mutex(&name, owner))),
            (_, Some(permits)) => Variant::Permit(set!(client.semaphore(&name, permits))),
            _ if kind.shared => Variant::Shared(set!(client.rw_lock(&name))),
            _ if kind.exclusive => Variant::Exclusive(set!(client.rw_lock(&name))),
            _ => Variant::Mutex(set!(client.mutex(&name))),
        };
        Ok(Self { client: client.clone(), name, owner: kind.owner.clone(), waits, variant })
    }

    /// The election of `elect`.
    pub(crate) fn leadership(client: &Client, work: &WorkArgs, label: &str) -> Result<Self, Stop> {
        let name = name(&work.name)?.to_owned();
        let variant = Variant::Leadership(client.election(&name).ttl(work.ttl).label(label));
        Ok(Self { client: client.clone(), name, owner: None, waits: true, variant })
    }

    fn kind(&self) -> Kind {
        match self.variant {
            Variant::Mutex(_) | Variant::Owner(_) | Variant::Once(_) => Kind::Mutex,
            Variant::Shared(_) | Variant::Exclusive(_) => Kind::ReadWrite,
            Variant::Permit(_) => Kind::Semaphore,
            Variant::Leadership(_) => Kind::Election,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether several holders are possible at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.variant, Variant::Shared(_))
    }

    /// Whether an attempt waits for the holder. Once-per-period work at most once does not.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Whether the attempt has this owner, so that the owner's lease does not block it.
    pub(crate) fn is_of_owner(&self, holder: Option<&str>) -> bool {
        self.owner.is_some() && self.owner.as_deref() == holder
    }

    pub(crate) async fn inspect(&self) -> Result<LockInfo, Error> {
        self.client.inspect(self.kind(), &self.name).await
    }

    /// Waits at most `limit` for the lock.
    pub(crate) async fn acquire(&self, limit: Duration) -> Result<Option<Guard>, Stop> {
        let acquired = match &self.variant {
            Variant::Mutex(lock) => lock.lock_timeout(limit).await,
            Variant::Owner(lock) => lock.lock_timeout(limit).await,
            Variant::Shared(lock) => lock.read_timeout(limit).await,
            Variant::Exclusive(lock) => Ok(lock.write_timeout(limit).await?.map(Guard::from)),
            Variant::Permit(lock) => lock.acquire_timeout(1, limit).await,
            Variant::Once(once) => once.start().await,
            Variant::Leadership(lock) => lock.campaign_timeout(limit).await,
        };
        let guard = acquired?;
        if let Some(guard) = &guard {
            // A refused command does not start, so its minimum hold need not block others.
            self.refuse_mixture().await.inspect_err(|_| drop(guard.set_min_hold(Duration::ZERO)))?;
        }
        Ok(guard)
    }

    /// A mutex and a read-write lock of one name do not exclude each other, so using both is refused. Each command acquires its
    /// lock first and then inspects the other kind, so of two commands at least one sees the other.
    async fn refuse_mixture(&self) -> Result<(), Stop> {
        let (other, advice) = match self.variant {
            Variant::Mutex(_) | Variant::Owner(_) => (Kind::ReadWrite, "say -x, or -s"),
            Variant::Shared(_) | Variant::Exclusive(_) => {
                (Kind::Mutex, "say neither -s nor -x, or say it everywhere")
            }
            // A start of once-per-period work can't be undone.
            Variant::Permit(_) | Variant::Once(_) | Variant::Leadership(_) => return Ok(()),
        };
        if self.client.inspect(other, &self.name).await?.holders.is_empty() {
            return Ok(());
        }
        let what = match other {
            Kind::Mutex => "without -s and -x",
            _ => "with -s or -x",
        };
        Err(Stop::usage(format!("\"{}\" is in use {what}: {advice}", printable(&self.name))))
    }
}
