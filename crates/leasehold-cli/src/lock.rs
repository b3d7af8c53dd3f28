//! Which lock a command runs under, and how it is taken.

use std::time::Duration;

use leasehold::{
    Client, Election, Error, Guard, Kind, LockInfo, Mutex, OncePer, ReentrantMutex, RwLock, Semaphore,
};

use crate::args::{RunArgs, WorkArgs, name};
use crate::exit::Stop;
use crate::text::printable;

pub(crate) struct Lock {
    client: Client,
    name: String,
    /// Who may enter beside itself.
    owner: Option<String>,
    waits: bool,
    variant: Variant,
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
    /// What the arguments ask for. Others are shown the note.
    pub(crate) fn new(client: &Client, args: &RunArgs, label: &str) -> Result<Self, Stop> {
        macro_rules! set {
            ($lock:expr) => {
                $lock.ttl(args.work.ttl).min_hold(args.min_hold).label(label)
            };
        }
        let (name, kind) = (name(&args.work.name)?.to_owned(), &args.kind);
        if let Some(period) = kind.once_per {
            let once = client.once_per(&name, period).ttl(args.work.ttl).label(label);
            let once = if args.at_least_once { once.at_least_once() } else { once };
            let waits = args.at_least_once;
            return Ok(Self {
                client: client.clone(),
                name,
                owner: None,
                waits,
                variant: Variant::Once(once),
            });
        }
        let variant = match (&kind.owner, kind.semaphore) {
            (Some(owner), _) => Variant::Owner(set!(client.reentrant_mutex(&name, owner))),
            (_, Some(permits)) => Variant::Permit(set!(client.semaphore(&name, permits))),
            _ if kind.shared => Variant::Shared(set!(client.rw_lock(&name))),
            _ if kind.exclusive => Variant::Exclusive(set!(client.rw_lock(&name))),
            _ => Variant::Mutex(set!(client.mutex(&name))),
        };
        let (owner, waits) = (kind.owner.clone(), !args.no_wait && args.wait != Some(Duration::ZERO));
        Ok(Self { client: client.clone(), name, owner, waits, variant })
    }

    /// The leadership that `elect` is about.
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

    /// Whether others may hold it at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.variant, Variant::Shared(_))
    }

    /// Whether an attempt waits for holders: work that starts once in a period is done by somebody else then.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Whether this owner's lease lets the attempt in.
    pub(crate) fn is_of_owner(&self, holder: Option<&str>) -> bool {
        self.owner.is_some() && self.owner.as_deref() == holder
    }

    pub(crate) async fn inspect(&self) -> Result<LockInfo, Error> {
        self.client.inspect(self.kind(), &self.name).await
    }

    /// Takes it within this time.
    pub(crate) async fn acquire(&self, limit: Duration) -> Result<Option<Guard>, Stop> {
        let taken = match &self.variant {
            Variant::Mutex(lock) => lock.lock_timeout(limit).await,
            Variant::Owner(lock) => lock.lock_timeout(limit).await,
            Variant::Shared(lock) => lock.read_timeout(limit).await,
            Variant::Exclusive(lock) => Ok(lock.write_timeout(limit).await?.map(Guard::from)),
            Variant::Permit(lock) => lock.acquire_timeout(1, limit).await,
            Variant::Once(once) => once.start().await,
            Variant::Leadership(lock) => lock.campaign_timeout(limit).await,
        };
        let guard = taken?;
        if let Some(guard) = &guard {
            // What is refused does nothing that others must be kept from.
            self.refuse_mixture().await.inspect_err(|_| drop(guard.set_min_hold(Duration::ZERO)))?;
        }
        Ok(guard)
    }

    /// Who says -s, and who says nothing, must not work side by side unawares. Everybody takes a lock first and looks for
    /// the other then, so of two at least one sees the other.
    async fn refuse_mixture(&self) -> Result<(), Stop> {
        let (other, advice) = match self.variant {
            Variant::Mutex(_) | Variant::Owner(_) => (Kind::ReadWrite, "say -x, or -s"),
            Variant::Shared(_) | Variant::Exclusive(_) => {
                (Kind::Mutex, "say neither -s nor -x, or say it everywhere")
            }
            // A start can't be undone.
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
