//! The state of a lock: its holders and its waiters.

use std::time::Duration;

use leasehold_core::weight::{UPGRADABLE, WRITER};
use leasehold_core::{Acquisition, ClientId, Holder, Kind, QueueEntry, Resource, StoreTime, Token, View};
use leasehold_store::HolderMetadata;
use leasehold_store::digest::client_name;

use crate::barrier_rounds::{parties, passed_rounds};

/// The holders and waiters of a lock at one moment of the store's clock. Returned by [`Mutex::inspect`](crate::Mutex::inspect) and
/// [`Client::list`](crate::Client::list).
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let uploads = client.semaphore("uploads", 3);
/// let guard = uploads.acquire(2).await?;
/// let info = uploads.inspect().await?;
/// assert_eq!((info.in_use, info.capacity), (2, 3));
/// assert_eq!(info.last_token, Some(guard.token()));
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LockInfo {
    /// Its kind.
    #[cfg_attr(feature = "serde", serde(serialize_with = "views::text"))]
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The maximum total weight of the holders: 1 for a mutex, the number of permits for a semaphore, the weight of a
    /// writer for a read-write lock, the number of parties for a barrier. 0 if the lock is unused.
    pub capacity: u32,
    /// The total weight of the holders; for a barrier, the number of parties that have arrived.
    pub in_use: u32,
    /// The last token that was granted, if the store still has it.
    #[cfg_attr(feature = "serde", serde(serialize_with = "views::optional_token"))]
    pub last_token: Option<Token>,
    /// Ordered by token.
    pub holders: Vec<HolderInfo>,
    /// In queue order.
    pub waiters: Vec<WaiterInfo>,
    /// The number of passed rounds of a barrier that the store still has, usually those of the last minute.
    pub rounds: usize,
    /// On Redis: another program holds the lock, because the key has a value that is not leasehold's.
    pub foreign: Option<ForeignInfo>,
}

/// A value of another program in the key of a lock.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let info = client.mutex("orders:42").inspect().await?;
/// if let Some(foreign) = info.foreign {
///     println!("another program holds it, for {:?}", foreign.expires_in);
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ForeignInfo {
    /// The time until the key expires; `None` if it does not.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "expires_in_ms", serialize_with = "views::optional_millis")
    )]
    pub expires_in: Option<Duration>,
}

/// One holder of a lock.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42").label("nightly export");
/// let guard = orders.lock().await?;
/// let info = orders.inspect().await?;
/// let holder = &info.holders[0];
/// println!("{:?} has held it for {:?}", holder.metadata.host, holder.held_for);
/// assert!(holder.is_own && holder.token == guard.token());
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HolderInfo {
    /// A name for the client: a digest of its random id.
    pub client: String,
    /// The token of its grant.
    #[cfg_attr(feature = "serde", serde(serialize_with = "views::token"))]
    pub token: Token,
    /// Its share of the capacity, for example its permits of a semaphore.
    pub weight: u32,
    /// The mode in which a read-write lock is held.
    pub mode: Option<Mode>,
    /// The named owner, if any.
    pub owner: Option<String>,
    /// How long it has held the lock.
    #[cfg_attr(feature = "serde", serde(rename = "held_for_ms", serialize_with = "views::millis"))]
    pub held_for: Duration,
    /// The time until the lease expires unless it is renewed.
    #[cfg_attr(feature = "serde", serde(rename = "expires_in_ms", serialize_with = "views::millis"))]
    pub expires_in: Duration,
    /// The holder has released the lock, and the store retains it until `expires_in` has passed.
    pub retained: bool,
    /// The metadata that it publishes.
    pub metadata: HolderMetadata,
    /// Whether it belongs to the inspecting client.
    pub is_own: bool,
    /// The attempt that was granted.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) acquisition: Acquisition,
}

/// One waiter for a lock.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42");
/// for waiter in orders.inspect().await?.waiters {
///     println!("{}. {:?}, for {:?}", waiter.position, waiter.metadata.program, waiter.waiting_for);
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct WaiterInfo {
    /// A name for the client: a digest of its random id.
    pub client: String,
    /// The position in the queue, from 1.
    pub position: usize,
    /// The share of the capacity that it requests.
    pub weight: u32,
    /// The mode that it requests of a read-write lock.
    pub mode: Option<Mode>,
    /// How long it has waited.
    #[cfg_attr(feature = "serde", serde(rename = "waiting_for_ms", serialize_with = "views::millis"))]
    pub waiting_for: Duration,
    /// The waiter's client was unreachable or did not claim a grant. The waiter keeps its position, but is skipped until
    /// its client sends a command.
    pub skipped: bool,
    /// The metadata that it publishes.
    pub metadata: HolderMetadata,
    /// Whether it belongs to the inspecting client.
    pub is_own: bool,
}

/// How views are serialized.
#[cfg(feature = "serde")]
mod views {
    use std::fmt::Display;
    use std::time::Duration;

    use leasehold_core::Token;
    use serde::Serializer;

    pub(super) fn text<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn token<S: Serializer>(token: &Token, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(token.get())
    }

    #[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
    pub(super) fn optional_token<S: Serializer>(token: &Option<Token>, to: S) -> Result<S::Ok, S::Error> {
        match token {
            None => to.serialize_none(),
            Some(token) => to.serialize_some(&token.get()),
        }
    }

    #[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
    pub(super) fn optional_millis<S: Serializer>(span: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match span {
            None => to.serialize_none(),
            Some(span) => millis(span, to),
        }
    }

    pub(super) fn millis<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
    }
}

/// The mode in which a read-write lock is held or requested.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let prices = client.rw_lock("prices");
/// let guard = prices.write().await?;
/// assert_eq!(prices.inspect().await?.holders[0].mode, Some(leasehold::Mode::Write));
/// # Ok(()) });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Mode {
    /// Shared.
    Read,
    /// Shared, and upgradable to exclusive.
    #[cfg_attr(feature = "serde", serde(rename = "upgradable"))]
    UpgradableRead,
    /// Exclusive.
    Write,
}

impl Mode {
    fn of(kind: Kind, weight: u32) -> Option<Self> {
        (kind == Kind::ReadWrite).then_some(match weight {
            WRITER => Self::Write,
            UPGRADABLE => Self::UpgradableRead,
            _ => Self::Read,
        })
    }
}

/// The weight in the unit of the kind.
fn shown_weight(kind: Kind, weight: u32) -> u32 {
    if kind == Kind::Barrier { parties(weight) } else { weight }
}

/// Whether the row marks a barrier round as passed, and is no waiting party.
fn is_mark(kind: Kind, holder: &Holder) -> bool {
    kind == Kind::Barrier && parties(holder.weight) == 0
}

impl LockInfo {
    pub(crate) fn new(resource: &Resource, view: View, at: StoreTime, requester: ClientId) -> Self {
        let waiters = view.waiters.into_iter().enumerate();
        let rounds = if resource.kind == Kind::Barrier { passed_rounds(&view.holders) } else { 0 };
        Self {
            kind: resource.kind,
            name: resource.name.as_str().to_owned(),
            capacity: shown_weight(resource.kind, view.capacity),
            in_use: shown_weight(resource.kind, view.in_use),
            last_token: view.last_token,
            holders: view
                .holders
                .iter()
                .filter(|holder| !is_mark(resource.kind, holder))
                .map(|holder| HolderInfo::new(resource.kind, holder, at, requester))
                .collect(),
            waiters: waiters
                .map(|(index, waiter)| WaiterInfo::new(resource.kind, index + 1, &waiter, at, requester))
                .collect(),
            rounds,
            foreign: None,
        }
    }
}

impl HolderInfo {
    pub(crate) fn new(kind: Kind, holder: &Holder, at: StoreTime, requester: ClientId) -> Self {
        Self {
            client: client_name(holder.acquisition.client),
            token: holder.token,
            weight: shown_weight(kind, holder.weight),
            mode: Mode::of(kind, holder.weight),
            owner: holder.owner.as_ref().map(|owner| owner.as_str().to_owned()),
            held_for: at.since(holder.granted_at),
            expires_in: holder.expires_at.since(at),
            retained: holder.retained,
            metadata: HolderMetadata::decode(&holder.metadata),
            is_own: holder.acquisition.client == requester,
            acquisition: holder.acquisition,
        }
    }
}

impl HolderInfo {
    /// Names the holder in an error message.
    pub(crate) fn describe(&self) -> String {
        let owner = self.owner.as_ref().map(|owner| format!("owner {owner:?}"));
        let process = match (&self.metadata.host, self.metadata.pid) {
            (Some(host), Some(pid)) => format!("{host:?} pid {pid}"),
            _ => format!("client {}", self.client),
        };
        owner.map_or_else(|| process.clone(), |owner| format!("{owner}, {process}"))
    }
}

impl WaiterInfo {
    fn new(kind: Kind, position: usize, waiter: &QueueEntry, at: StoreTime, requester: ClientId) -> Self {
        Self {
            client: client_name(waiter.acquisition.client),
            position,
            weight: shown_weight(kind, waiter.weight),
            mode: Mode::of(kind, waiter.weight),
            waiting_for: at.since(waiter.since),
            skipped: waiter.skipped,
            metadata: HolderMetadata::decode(&waiter.metadata),
            is_own: waiter.acquisition.client == requester,
        }
    }
}
