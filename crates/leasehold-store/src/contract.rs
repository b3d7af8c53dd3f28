//! What the engine asks of a store. All stores run the same commands; they differ in scope (process, machine, network).

mod error;
mod facets;
mod factory;
mod foreign;
mod quorum_node;

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, Command, Failure, Kind, Name, Push, PushKind, Resource, StoreTime,
};

use crate::Diagnosis;
use crate::digest::short_name;

pub use error::{Cause, StoreError};
pub use facets::{ClientRecords, Diagnose, VotedAttempts};
pub use factory::StoreFactory;
pub use foreign::{
    ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome, ForeignScript,
    KeyWatch, MAX_DELAY, Watchers, redisson_counter, redisson_tag,
};
pub use quorum_node::{MAX_VOTED_TOKEN_LEAD, QuorumNode, SharedBatch};

/// Receives a store's pushes for one client. Called from any thread, with no lock of the store held.
pub trait Inbox: Send + Sync {
    /// Takes a push. The client decides whether it believes it.
    fn deliver(&self, push: Push);

    /// The store knows that the attempt may be granted now: it asks again at once. Unlike a push, nobody else can cause this.
    fn recheck(&self, attempt: Acquisition) {
        self.deliver(Push::new(attempt, StoreTime::ZERO, PushKind::Revoked));
    }

    /// The connection was re-established for the matching resources: pushes may have been missed.
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool);

    /// Whether the client has neither attempts nor leases: nothing is asked for it.
    fn is_idle(&self) -> bool {
        false
    }

    /// Shortest ttl of the client's renewed leases: bounds how long a reconnect may take.
    fn shortest_ttl(&self) -> Option<Duration> {
        None
    }
}

/// Resources with their states.
pub type ListResult = Result<Vec<(Resource, Answer)>, StoreError>;
/// The answer to one command.
pub type CallResult = Result<Answer, StoreError>;
/// A command and the resource that it is for.
#[derive(Clone, Debug)]
pub struct Call {
    /// The lock, semaphore, … that the command is about.
    pub resource: Arc<Resource>,
    /// What to do there.
    pub command: Command,
}

impl Call {
    /// A command for this resource.
    pub fn new(resource: Arc<Resource>, command: impl Into<Command>) -> Self {
        Self { resource, command: command.into() }
    }
}

/// Commands that are sent together.
pub type Batch = Vec<Call>;
/// A future that may be awaited on any executor.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How often waiters poll a store, and how long it keeps their queue entries.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PollIntervals {
    /// Time between re-checks of the head of a queue without a push: its max delay after a lost push.
    pub repoll_interval: Duration,
    /// Lifetime of a queue entry without a re-check; several times `repoll_interval`.
    pub entry_ttl: Duration,
}

impl PollIntervals {
    /// `entry_ttl` is several times `repoll_interval`.
    pub const fn new(repoll_interval: Duration, entry_ttl: Duration) -> Self {
        Self { repoll_interval, entry_ttl }
    }
}

/// A re-check costs an embedded store microseconds. The head re-checks before a claim window ends, so that it keeps its place if
/// a push is lost. The other waiters re-check less often, because there may be thousands of them.
pub const EMBEDDED_POLL_INTERVALS: PollIntervals =
    PollIntervals::new(Duration::from_secs(2), Duration::from_secs(80));

/// What sets a store apart from the others.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// How often its waiters poll.
    pub poll_intervals: PollIntervals,
    /// The store can wait for replicas.
    pub has_replicas: bool,
    /// The store supports only locks with one holder and without a named owner.
    pub is_exclusive_only: bool,
    /// Waiters poll and therefore need an admission queue.
    pub needs_admission_queue: bool,
    /// Max ttl of a lease, if configured.
    pub max_ttl: Option<Duration>,
    /// Locks may be bridged to keys of other libraries.
    pub has_foreign_keys: bool,
}

impl Capabilities {
    /// A store without replicas and without other peculiarities.
    pub const fn new(poll_intervals: PollIntervals) -> Self {
        Self {
            poll_intervals,
            has_replicas: false,
            is_exclusive_only: false,
            needs_admission_queue: false,
            max_ttl: None,
            has_foreign_keys: false,
        }
    }

    /// The same store, which can wait for replicas.
    #[must_use]
    pub const fn with_replicas(self) -> Self {
        Self { has_replicas: true, ..self }
    }

    /// The same store, which may have keys of other libraries.
    #[must_use]
    pub const fn with_foreign_keys(self, has_foreign_keys: bool) -> Self {
        Self { has_foreign_keys, ..self }
    }

    /// The same store as a quorum: two permits over three nodes could have three holders, and the same holds for readers and for tasks
    /// of one owner.
    #[must_use]
    pub const fn of_a_quorum(self, max_ttl: Option<Duration>) -> Self {
        Self { is_exclusive_only: true, needs_admission_queue: true, max_ttl, ..self }
    }

    /// Whether the store supports this kind of lock, with or without a named owner.
    pub fn supports(&self, kind: Kind, is_owned: bool) -> bool {
        !self.is_exclusive_only || matches!(kind, Kind::Mutex | Kind::Election | Kind::Admission) && !is_owned
    }
}

/// A place that keeps leases.
///
/// A store must answer every command within a bounded time, if necessary with an error, because a waiter without a
/// deadline waits for the answer.
pub trait Store: Send + Sync {
    /// What sets this store apart from the others. It never changes.
    fn capabilities(&self) -> Capabilities;

    /// Runs one command inline; `None` if that might block.
    fn try_call_inline(&self, _resource: &Resource, _command: &Command) -> Option<CallResult> {
        None
    }

    /// Runs one command. It fails with `Failure::NotDurable` unless this many replicas acknowledge, which only a store with
    /// replicas is asked for.
    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult>;

    /// As `call`, for the driver. Returns one result per command, in the same order. A store may run them side by side, also those of
    /// one attempt: a release that may overtake its attempt has a tombstone.
    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>>;

    /// Runs non-waiting attempts atomically: all are granted, or none. `None`, without effect, if the store cannot do that for
    /// these resources.
    fn acquire_all(&self, _attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        None
    }

    /// Resources with holders or waiters. May include ones that have just expired.
    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>>;

    /// As `list`, with the answer to an `Inspect` of each, ordered by name. `None` if the store does that no faster than by
    /// such commands.
    fn inspect_all(&self) -> Option<BoxFuture<ListResult>> {
        None
    }

    /// The keys of other libraries, for bridges: on the same server, or on the servers with these addresses, which vote.
    ///
    /// # Errors
    ///
    /// The store has no such keys, or an address is wrong.
    fn foreign_keys(&self, _servers: &[String]) -> Result<Arc<dyn ForeignKeys>, StoreError> {
        Err(StoreError::new(Failure::NotSent, "this store has no keys of other libraries"))
    }

    /// Batching key: commands with the same key go to the same node in one batch, so that a slow node delays no other.
    fn shard(&self, _resource: &Resource, _command: &Command) -> u64 {
        0
    }

    /// What it keeps once for each client, if it does.
    fn client_records(&self) -> Option<&dyn ClientRecords> {
        None
    }

    /// What a quorum knows of its attempts.
    fn voted_attempts(&self) -> Option<&dyn VotedAttempts> {
        None
    }

    /// Its diagnosis.
    fn doctor(&self) -> Option<&dyn Diagnose> {
        None
    }
}

/// Resources whose state is asked for in one batch: enough to hide the round trip, few enough for a slow store.
const INSPECT_BATCH: usize = 100;

/// Every resource of a store with its state, ordered by name: all at once, or else in batches.
///
/// # Errors
///
/// Those of the store.
pub async fn inspect_all(store: &dyn Store) -> ListResult {
    if let Some(inspected) = store.inspect_all() {
        return inspected.await;
    }
    let resources = store.list().await?;
    let mut listed = Vec::with_capacity(resources.len());
    for page in resources.chunks(INSPECT_BATCH) {
        let batch =
            page.iter().map(|resource| Call::new(Arc::new(resource.clone()), Command::Inspect)).collect();
        let answers = store.call_batch(batch, 0).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let answers = match store.client_records() {
            Some(records) => records.add_to(answers).await,
            None => answers,
        };
        listed.extend(page.iter().cloned().zip(answers));
    }
    Ok(listed)
}

/// What an operator should know about a store.
pub fn diagnose(store: &dyn Store) -> BoxFuture<Result<Diagnosis, StoreError>> {
    match store.doctor() {
        Some(doctor) => doctor.diagnose(),
        None => Box::pin(ready(Ok(Diagnosis { components: Vec::new() }))),
    }
}

/// The result of a batch of one command.
///
/// # Errors
///
/// Those of the command, or that it has no answer.
pub fn only(mut results: Vec<CallResult>) -> CallResult {
    results.pop().unwrap_or_else(missing_response)
}

/// The result of a command that a response left out, which violates the `Store` contract.
///
/// # Errors
///
/// Always.
pub fn missing_response() -> CallResult {
    Err(StoreError::new(Failure::Unknown, "the store sent no response"))
}

/// The admission queue of a resource.
pub fn admission_queue_of(resource: &Resource) -> Option<Resource> {
    let of = |name: &str| Name::new(&format!("{}:{name}", resource.kind));
    let name = resource.name.as_str();
    let name = of(name).or_else(|_| of(&short_name(name))).ok()?;
    Some(Resource { kind: Kind::Admission, name })
}
