//! The base of every kind of lock: its resource, its options, and their validation.
//!
//! A kind only says which resource it uses, how much capacity that has, and how much of it an attempt takes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    HandoffLimits, Kind, LeaseTerms, LocalTime, MAX_NAME_BYTES, Name, NameError, Owner, Resource,
};
use leasehold_store::{HolderMetadata, MAX_LABEL_BYTES};

use crate::engine::ResourceHash;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::{ClientOptions, Handle, resource_of};
use crate::inspect::{HolderInfo, LockInfo};
pub use crate::options::{MAX_TTL, MIN_TTL};
use crate::telemetry::LockTelemetry;

/// A resource, and the options of its leases.
#[derive(Clone)]
pub(crate) struct Lock {
    pub(crate) handle: Arc<Handle>,
    resource: Result<Arc<Resource>, NameError>,
    pub(crate) resource_hash: ResourceHash,
    /// The total weight of the resource's holders.
    pub(crate) capacity: u32,
    pub(crate) owner: Option<Owner>,
    pub(crate) terms: LeaseTerms,
    pub(crate) min_hold: Duration,
    /// See `MinHold::ends_at_close`.
    pub(crate) min_hold_ends_at_close: bool,
    pub(crate) max_waiters: u32,
    /// The limits for handing a lease off between the client's tasks; none if tasks do not share leases.
    pub(crate) hand_off: Option<HandoffLimits>,
    pub(crate) metadata: Arc<str>,
    label_bytes: usize,
    pub(crate) ids: AttemptIds,
    /// The lock of another library that is taken with this one.
    pub(crate) bridge: Option<Arc<crate::bridge::Foreign>>,
    pub(crate) telemetry: LockTelemetry,
}

/// Where the ids of a lock's attempts come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttemptIds {
    /// The client counts them.
    Counted,
    /// Each is random, and so is proof of its lease alone: a detached lease's id can contain it.
    Random,
    /// It follows from the caller's request with this id.
    Requested(Arc<[u8]>),
}

/// Whether what is read of a lock counts. With replicas it must have been read before and after they were seen to have everything: what
/// another client has written may be at the master only, and another master may have answered, which does not have it.
pub(crate) struct Replication<'a> {
    lock: &'a Lock,
    tries: u32,
    is_confirmed: bool,
}

impl<'a> Replication<'a> {
    pub(crate) fn of(lock: &'a Lock) -> Self {
        Self { lock, tries: 0, is_confirmed: lock.terms.replicas == 0 }
    }

    /// Whether what was read just now counts. If not, it must be read again. A connection that is lost twice is an error.
    pub(crate) async fn confirms(&mut self) -> Result<bool, Error> {
        if self.is_confirmed {
            return Ok(true);
        }
        self.tries += 1;
        let Lock { handle, terms, .. } = self.lock;
        let resource = self.lock.checked_resource()?;
        self.is_confirmed =
            handle.confirm_replicated(resource.clone(), terms.replicas, self.tries > 1).await?;
        Ok(false)
    }

    /// Something else was read.
    pub(crate) fn reset(&mut self) {
        self.is_confirmed = self.lock.terms.replicas == 0;
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.debug("Lock", f)
    }
}

/// How long an attempt waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitMode {
    NoWait,
    AtMost(Duration),
    Forever,
}

impl WaitMode {
    /// Waits until the deadline; not at all without one, or if it has passed.
    pub(crate) fn until(deadline: Option<LocalTime>, now: LocalTime) -> Self {
        deadline.map_or(Self::NoWait, |deadline| Self::AtMost(deadline.since(now)))
    }

    pub(crate) fn deadline(self, now: LocalTime) -> Option<LocalTime> {
        match self {
            Self::NoWait => None,
            // Below the clock's resolution.
            Self::AtMost(limit) if limit < Duration::from_micros(1) => None,
            Self::AtMost(limit) => Some(now + limit),
            Self::Forever => Some(LocalTime::NEVER),
        }
    }
}

impl Lock {
    pub(crate) fn new(handle: Arc<Handle>, kind: Kind, name: &str, capacity: u32) -> Self {
        let metadata = handle.encoded_metadata.clone();
        let telemetry = handle.telemetry.lock(kind);
        let ClientOptions { ttl, max_waiters, replicas, .. } = handle.options;
        let resource = resource_of(kind, name).map(Arc::new);
        Self {
            handle,
            resource_hash: resource
                .as_ref()
                .map_or(ResourceHash::default(), |resource| ResourceHash::of(resource)),
            resource,
            capacity,
            owner: None,
            terms: LeaseTerms { ttl, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas },
            min_hold: Duration::ZERO,
            min_hold_ends_at_close: false,
            max_waiters,
            hand_off: None,
            metadata,
            label_bytes: 0,
            ids: AttemptIds::Counted,
            bridge: None,
            telemetry,
        }
    }

    /// The same lock without its minimum hold, for a part of a set: until all of it is held, a part may be released unused.
    pub(super) fn without_min_hold(&self) -> Self {
        let mut lock = self.clone();
        lock.min_hold = Duration::ZERO;
        if !self.min_hold.is_zero() {
            // A lease with a minimum hold is not handed off between the client's tasks.
            lock.hand_off = None;
        }
        lock
    }

    pub(crate) fn set_label(&mut self, label: String) {
        self.label_bytes = label.len();
        self.change_metadata(|metadata| metadata.label = Some(label));
    }

    pub(crate) fn set_trace_id(&mut self, trace_id: String) {
        // A longer one is no id of a trace.
        let trace_id = Some(trace_id).filter(|trace_id| trace_id.len() <= MAX_LABEL_BYTES);
        self.change_metadata(|metadata| metadata.trace_id = trace_id);
    }

    /// The holder that inspection shows in place of this process.
    pub(crate) fn set_holder(&mut self, program: String, host: String) {
        self.publish_all();
        self.change_metadata(|metadata| {
            (metadata.program, metadata.host, metadata.pid) = (Some(program), Some(host), None);
        });
    }

    /// The attempts get ids of which nothing says that they are this client's: each has all of the metadata.
    pub(crate) fn set_ids(&mut self, ids: AttemptIds) {
        self.ids = ids;
        self.publish_all();
    }

    /// The attempts of the request with this id.
    pub(crate) fn set_request(&mut self, request: &[u8]) {
        self.set_ids(AttemptIds::Requested(request.into()));
    }

    fn publish_all(&mut self) {
        let own = self.handle.options.metadata.encode_client();
        self.metadata = HolderMetadata::add_client(&self.metadata, &own);
    }

    fn change_metadata(&mut self, change: impl FnOnce(&mut HolderMetadata)) {
        let mut metadata = HolderMetadata::decode(&self.metadata);
        let has_client = metadata.has_client();
        change(&mut metadata);
        let has_client = has_client || metadata.has_client();
        self.metadata = if has_client { metadata.encode() } else { self.handle.encode_metadata(&metadata) };
    }

    pub(crate) fn set_metrics_label(&mut self, label: &str) {
        if let Ok(resource) = &self.resource {
            self.telemetry = self.handle.telemetry.labelled_lock(resource.kind, label);
        }
    }

    /// Exchanges the lease of `held` for one with another weight. If that fails, `held` is unchanged; if it succeeds, the caller
    /// must call [`Guard::mark_replaced`].
    pub(crate) async fn replace(
        &self,
        held: &Guard,
        weight: u32,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        if let Some(loss) = held.loss() {
            return Err(held.lost_error(loss));
        }
        self.check_exchange(self.checked_resource()?)?;
        let session = &self.handle.session;
        session.set_replacing(held.entry_id(), true, session.now());
        let ends_at = session.ends_at(held.entry_id());
        let taken = self.acquire(weight, Some(held), wait).await;
        self.handle.check_open()?;
        match &taken {
            // The exchange continues the hold, even if the attempt has waited.
            Ok(Some(guard)) => session.limit_hold(guard.entry_id(), ends_at, session.now()),
            _ => session.set_replacing(held.entry_id(), false, session.now()),
        }
        if taken.as_ref().is_err_and(Error::is_unavailable)
            && let Some(loss) = held.loss()
        {
            // For example, the answer came after the end of the maximum hold.
            return Err(held.lost_error(loss));
        }
        taken
    }

    pub(crate) async fn inspect(&self) -> Result<LockInfo, Error> {
        let resource = self.checked_resource()?;
        self.handle.inspect((**resource).clone()).await
    }

    /// As `inspect`, without what the clients have published.
    pub(crate) async fn look_up(&self) -> Result<LockInfo, Error> {
        let resource = self.checked_resource()?;
        self.handle.look_up((**resource).clone()).await
    }

    pub(crate) async fn force_release(&self) -> Result<Vec<HolderInfo>, Error> {
        let resource = self.checked_resource()?;
        self.handle.force_release((**resource).clone()).await
    }

    /// Whether the guard is one of this lock.
    pub(crate) fn is_of(&self, guard: &Guard) -> bool {
        self.resource.as_ref().is_ok_and(|resource| resource.name.as_str() == guard.name())
    }

    /// The `Debug` form of the kinds.
    pub(crate) fn debug(&self, kind: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.resource.as_ref().map(|resource| resource.name.as_str());
        write!(f, "{kind}({name:?} on {})", self.handle.url)
    }

    // --- Validation ------------------------------------------------------------------------------

    pub(crate) fn checked_resource(&self) -> Result<&Arc<Resource>, Error> {
        self.resource.as_ref().map_err(|error| Error::from(*error))
    }

    pub(crate) fn check(&self, weight: u32) -> Result<&Arc<Resource>, Error> {
        let resource = self.checked_resource()?;
        let invalid = |what: String| Err(self.handle.error(ErrorKind::Invalid, resource, what));
        if weight == 0 || weight > self.capacity {
            let unit = unit(resource.kind);
            return invalid(format!("{weight} of {} {unit} requested", self.capacity));
        }
        if let Some(owner) = &self.owner {
            // Owners follow the rules for lock names.
            Name::new(owner.as_str()).map_err(|_| {
                let what = format!("an owner is 1 to {MAX_NAME_BYTES} bytes without control characters");
                self.handle.error(ErrorKind::Invalid, resource, what)
            })?;
        }
        let capabilities = &self.handle.capabilities;
        if !capabilities.supports(resource.kind, self.owner.is_some()) {
            let what = "a quorum supports only mutexes and elections";
            return Err(self.handle.error(ErrorKind::Unsupported, resource, what));
        }
        let ttl = self.terms.ttl.max(self.terms.min_lifetime).max(self.min_hold);
        if let Some(longest) = capabilities.max_ttl
            && ttl > longest
        {
            return invalid(format!("a lease of up to {ttl:?} exceeds max_ttl, {longest:?}"));
        }
        let ttl = self.terms.ttl;
        if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
            return invalid(format!("a ttl is between {MIN_TTL:?} and 30 days, not {ttl:?}"));
        }
        if let Some(hold) = self.terms.max_hold
            && hold < MIN_TTL
        {
            return invalid(format!("a maximum hold is at least {MIN_TTL:?}, not {hold:?}"));
        }
        if self.terms.replicas > 0 && !capabilities.has_replicas {
            let what = "this store has no replicas to wait for";
            return Err(self.handle.error(ErrorKind::Unsupported, resource, what));
        }
        self.check_bridge(resource, weight)?;
        let is_request = matches!(self.ids, AttemptIds::Requested(_));
        if is_request && (capabilities.needs_admission_queue || self.bridge.is_some()) {
            let what = "a request can be repeated neither over a quorum nor with a bridged lock";
            return Err(self.handle.error(ErrorKind::Unsupported, resource, what));
        }
        if self.min_hold > MAX_TTL {
            return invalid(format!("a minimum hold is at most 30 days, not {:?}", self.min_hold));
        }
        if self.label_bytes > MAX_LABEL_BYTES {
            return invalid(format!(
                "a label has at most {MAX_LABEL_BYTES} bytes, this one has {}",
                self.label_bytes
            ));
        }
        Ok(resource)
    }
}

/// The unit of a kind's weight.
pub(super) fn unit(kind: Kind) -> &'static str {
    match kind {
        Kind::Semaphore => "permits",
        Kind::Latch => "counts",
        Kind::Barrier => "parties",
        _ => "holders",
    }
}
