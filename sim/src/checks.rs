//! What must hold in every run. Each check knows what the documents exempt, and names the place.
//!
//! The checks trust neither the model nor the engine: they keep books of their own about what the server answered, and ask guards by
//! the clock of their own machine.

mod denied;
mod lineage;
mod promise;
mod shadow;
mod steps;

use std::collections::{BTreeMap, BTreeSet};

use leasehold::simulation::LeaseProbe;
use leasehold_core::{Acquisition, ClientId, Command, Owner, StoreTime};

use crate::executor::ProcessId;
use crate::plan::{LockKind, LockPlan, MS, Micros};
pub(crate) use denied::DENIED;
pub use lineage::Lineage;
pub use promise::{Promise, Violation};
pub use shadow::Shadow;

/// One attempt, as the server saw it.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its resource.
    pub resource: usize,
    /// Which server last confirmed the lease, and in which epoch of its data.
    pub epoch: (usize, u32),
    /// From which epoch the client counts its trust: a pushed grant counts from the answer before it.
    trust: (usize, u32),
    /// In which epoch an inspection showed its lease, or it was renewed: an attached guard counts its trust from there.
    shown: (usize, u32),
    /// In which epoch a server last ran an `Acquire`, and the first. Answers may be lost, so the client may count from the first.
    anchor: (usize, u32),
    begun: (usize, u32),
    /// Its number in the order of all grants; zero before.
    pub order: u64,
    /// The tokens that it was granted.
    ranges: Vec<TokensOfGrant>,
    first_command: Micros,
    queued: bool,
    granted_at: Option<Micros>,
    /// The same by the server's clock.
    granted_clock: StoreTime,
    released_at: Option<Micros>,
    /// It was revoked by force (section "`force_release`").
    pub(crate) is_forced: bool,
    commands: u64,
    ttl: Micros,
    owner: Option<Owner>,
    /// The holder was told that another client waits.
    is_contended: bool,
    /// When the holder was last told so, and the hand-offs since then, beyond the time that this takes.
    pub(crate) contended_at: Option<Micros>,
    pub(crate) handoffs: u32,
    /// A guard of it exists, or existed: another one is a hand-off.
    pub(crate) has_begun: bool,
    /// It exchanges a lease, and goes before all others.
    replaces: bool,
    /// Its lease was detached from its guard.
    is_detached: bool,
    /// An `Acquire` that was repeated arrived after its detached lease had expired, or after the server had lost its release. Its place in
    /// the queue expires by itself.
    is_late_repeat: bool,
}

/// The tokens of one grant, or of a renewal.
#[derive(Clone, Debug)]
struct TokensOfGrant {
    first: u64,
    last: u64,
    epoch: (usize, u32),
    /// When the server granted them.
    at: Micros,
    /// The number of the grant in the order of all grants.
    order: u64,
}

impl Attempt {
    fn trusted_from(&self, guard: &Record) -> (usize, u32) {
        if guard.is_attached { self.shown } else { self.trust }
    }

    fn tokens_with(&self, token: u64) -> Option<&TokensOfGrant> {
        self.ranges.iter().find(|tokens| (tokens.first..=tokens.last).contains(&token))
    }
}

/// A guard that exists.
pub struct Record {
    /// Its lock.
    pub resource: usize,
    /// How much of the capacity it has.
    pub weight: u32,
    /// Its owner's number, if it is named.
    pub owner: Option<u64>,
    /// Its process.
    pub process: ProcessId,
    /// Its task: a guard that is being exchanged has a second record.
    pub task: usize,
    /// Its lease.
    pub probe: LeaseProbe,
    /// Its token.
    pub token: u64,
    /// Since when it exists.
    pub since: Micros,
    /// It is in a future that exchanges it for another. Its user can't use it until then, and learns of a loss from the result.
    pub is_exchanged: bool,
    /// A future waits for its loss.
    pub is_watched: bool,
    /// Its lease was detached from an earlier guard, whose token it has.
    pub is_attached: bool,
}

/// What the checks know of one lock.
pub struct LockBook {
    kind: LockKind,
    /// Grants and renewals count only if a replica has them.
    is_replicated: bool,
    /// The highest token that was granted, and where.
    last_token: u64,
    last_token_epoch: (usize, u32),
    /// The highest token that was granted in each epoch.
    tokens: BTreeMap<(usize, u32), u64>,
    /// The highest token that the fenced resource has seen.
    fence: u64,
    /// The highest place in the grant order of an accepted write, by epoch: for a while two masters may grant in turns.
    written: BTreeMap<(usize, u32), u64>,
    /// The last trusted guard of an exclusive lock, by epoch.
    last_guards: BTreeMap<(usize, u32), LastGuard>,
}

/// The last trusted guard of an exclusive lock.
#[derive(Clone, Copy)]
struct LastGuard {
    token: u64,
    /// When its token was granted.
    granted_at: Micros,
}

/// A command that a server runs.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// The simulation's time.
    pub now: Micros,
    /// The number of the resource.
    pub resource: usize,
    /// The server's clock.
    pub clock: StoreTime,
    /// The command.
    pub command: &'a Command,
    /// The server, and which of its lives.
    pub epoch: (usize, u32),
    /// The replicas have it, if the client wants that. Otherwise it is told of a failure.
    pub is_durable: bool,
}

/// The checks' books.
pub struct Books {
    /// All attempts.
    pub attempts: BTreeMap<Acquisition, Attempt>,
    /// The attempts of which a client has heard that they are refused for good.
    denied: BTreeSet<Acquisition>,
    /// By lock.
    pub locks: Vec<LockBook>,
    /// All guards, by a number.
    pub records: BTreeMap<u64, Record>,
    /// When an owner gave up the guard of a lost lease last, by lock and owner.
    pub lost_by: BTreeMap<(usize, u64), Micros>,
    /// The attempts that were released: when by the server's clock, and in which epoch.
    gone: BTreeMap<Acquisition, (StoreTime, (usize, u32))>,
    /// When a release of a lease with a minimum hold found no lease last, by client.
    pub not_retained: BTreeMap<ClientId, Micros>,
    grants: u64,
    /// From then on the faults have no effect any more.
    pub healthy_from: Micros,
    /// From then on the network is healthy, and each operation is judged: in a run without faults from its first second.
    pub calm_from: Micros,
    /// The longest delay of a message without faults.
    slowest: Micros,
    /// A stranger publishes: each attempt and lease may look once a second.
    pub(crate) has_stranger: bool,
    /// When a server last granted a lock to an attempt that had been given up at another one.
    pub(crate) stale_grants: BTreeMap<usize, Micros>,
    /// How many tasks are releasing all acquisitions of an owner, by lock.
    forcing: BTreeMap<(usize, String), u32>,
    /// What a failover keeps of leases that replicas had.
    pub lineage: Lineage,
    /// The first broken promise.
    pub violation: Option<Violation>,
}

impl Books {
    /// Empty books for these locks.
    #[must_use]
    pub fn new(locks: &[LockPlan], slowest: Micros) -> Self {
        let book = |lock: &LockPlan| LockBook {
            kind: lock.kind,
            is_replicated: lock.replicas > 0,
            last_token: 0,
            last_token_epoch: (0, 0),
            tokens: BTreeMap::new(),
            fence: 0,
            written: BTreeMap::new(),
            last_guards: BTreeMap::new(),
        };
        Self {
            attempts: BTreeMap::new(),
            denied: BTreeSet::new(),
            locks: locks.iter().map(book).collect(),
            records: BTreeMap::new(),
            lost_by: BTreeMap::new(),
            gone: BTreeMap::new(),
            not_retained: BTreeMap::new(),
            grants: 0,
            healthy_from: Micros::MAX,
            calm_from: Micros::MAX,
            slowest,
            has_stranger: false,
            stale_grants: BTreeMap::new(),
            forcing: BTreeMap::new(),
            lineage: Lineage::default(),
            violation: None,
        }
    }

    /// Whether a guard of this lease exists.
    pub(crate) fn has_guard(&self, acquisition: Acquisition) -> bool {
        self.records.values().any(|record| record.probe.acquisition() == acquisition)
    }

    /// How many grants there were.
    #[must_use]
    pub fn grants(&self) -> u64 {
        self.grants
    }

    /// Records a broken promise; the first counts.
    pub fn broken(&mut self, at: Micros, promise: Promise, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { promise, what: what(), at });
        }
    }

    /// The user renews a lease: that command is not the engine's.
    pub fn excuse_renewal(&mut self, acquisition: Acquisition) {
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            attempt.commands = attempt.commands.saturating_sub(1);
        }
    }

    /// Whether an attempt's last `Acquire` was run by this server.
    #[must_use]
    pub fn was_asked_for_at(&self, acquisition: Acquisition, server: usize) -> bool {
        self.attempts.get(&acquisition).is_some_and(|attempt| attempt.anchor.0 == server)
    }

    /// The lease of this attempt was detached from its guard.
    pub fn note_detached(&mut self, acquisition: Acquisition) {
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            attempt.is_detached = true;
        }
    }

    /// All acquisitions of this owner are being released: each of its guards may be lost from now on.
    pub fn note_forced(&mut self, resource: usize, owner: &str) {
        *self.forcing.entry((resource, owner.to_owned())).or_default() += 1;
        let is_theirs = |attempt: &&mut Attempt| {
            attempt.resource == resource && attempt.owner.as_ref().is_some_and(|of| of.as_str() == owner)
        };
        self.attempts.values_mut().filter(is_theirs).for_each(|attempt| attempt.is_forced = true);
    }

    /// That is over: acquisitions from now on are not released by it.
    pub fn end_forced(&mut self, resource: usize, owner: &str) {
        if let Some(count) = self.forcing.get_mut(&(resource, owner.to_owned())) {
            *count -= 1;
        }
    }

    /// Whether all acquisitions of this owner are being released.
    fn is_forcing(&self, resource: usize, owner: Option<&Owner>) -> bool {
        owner.is_some_and(|owner| self.is_forced(resource, owner.as_str()))
    }

    /// The same for the owner with this name.
    pub(crate) fn is_forced(&self, resource: usize, owner: &str) -> bool {
        self.forcing.get(&(resource, owner.to_owned())).is_some_and(|count| *count > 0)
    }

    /// Whether a detached lease may have kept this lock from others since then.
    #[must_use]
    pub fn was_detached(&self, resource: usize, since: Micros) -> bool {
        let mut theirs = self.attempts.values().filter(|attempt| attempt.resource == resource);
        theirs.any(|attempt| attempt.is_detached && attempt.released_at.is_none_or(|at| at > since))
    }

    /// Whether an attempt waits because a repeated command arrived after its detached lease had expired, or after a loss of data.
    #[must_use]
    pub fn is_late_repeat(&self, acquisition: Acquisition) -> bool {
        self.attempts.get(&acquisition).is_some_and(|attempt| attempt.is_late_repeat)
    }

    /// Whether an attempt is one of this resource.
    #[must_use]
    pub fn is_of(&self, acquisition: Acquisition, resource: usize) -> bool {
        self.attempts.get(&acquisition).is_some_and(|attempt| attempt.resource == resource)
    }

    /// A guard exists from now on. `others`: the guards that are trusted now by their own clocks, with their machines' clocks
    /// within the bounds.
    pub fn guard_created(&mut self, now: Micros, record: &Record, capacity: u32, others: &[u64]) {
        let resource = record.resource;
        let Some(attempt) = self.attempts.get(&record.probe.acquisition()) else {
            self.broken(now, Promise::OneHolder, || format!("a guard of r{resource} was never granted"));
            return;
        };
        let epoch = attempt.epoch;
        // The replica that takes over has what counts only because replicas had it.
        let is_replicated = self.locks[resource].is_replicated;
        let since = |epoch| if is_replicated { self.lineage.first(epoch) } else { epoch };
        let is_forced = attempt.is_forced || since(attempt.trusted_from(record)) != since(epoch);
        let Some(&TokensOfGrant { epoch: token_epoch, at: granted_at, .. }) =
            attempt.tokens_with(record.token)
        else {
            let token = record.token;
            self.broken(now, Promise::TokensRise, || {
                format!("a guard has token {token}, which was never granted to it")
            });
            return;
        };
        if is_forced {
            return;
        }
        let mut owners = Vec::new();
        let mut weight = u64::from(record.weight);
        let mut with = String::new();
        for (number, other) in others.iter().filter_map(|number| Some((number, self.records.get(number)?))) {
            let Some(known) = self.attempts.get(&other.probe.acquisition()) else { continue };
            // Section "Redis: what no setting prevents": data that a server has lost, a failover, a clock set forward.
            if since(known.epoch) != since(epoch)
                || since(known.trusted_from(other)) != since(epoch)
                || known.is_forced
                || other.is_exchanged
                || other.task == record.task
            {
                continue;
            }
            if other.owner.is_some() && (other.owner == record.owner || owners.contains(&other.owner)) {
                continue;
            }
            owners.push(other.owner);
            weight += u64::from(other.weight);
            with += &format!(
                " guard {number} of process {} (weight {}, token {})",
                other.process, other.weight, other.token
            );
        }
        if weight > u64::from(capacity) {
            let (process, token) = (record.process, record.token);
            let replicas = if is_replicated { " with replicas" } else { "" };
            self.broken(now, Promise::OneHolder, || {
                format!("process {process} holds r{resource}{replicas} with token {token} beside{with}: {weight} of {capacity}")
            });
        }
        // A master that took over may know the lease with a token of its own. It may also have a detached lease that had ended at
        // the one before: a guard that is attached to it has the token of its grant.
        let is_exclusive = self.locks[resource].kind.is_exclusive();
        if is_exclusive && token_epoch == epoch && !record.is_attached {
            let last = self.locks[resource].last_guards.get(&epoch).copied();
            if let Some(LastGuard { token: last, .. }) = last
                && record.token <= last
            {
                let token = record.token;
                self.broken(now, Promise::TokensRise, || {
                    format!("a guard has token {token} after {last} on r{resource}")
                });
            }
            if let (LockKind::OncePer(retention), Some(last)) = (self.locks[resource].kind, last) {
                // Tokens say less: those after a clock was set back follow the last one. The server's clock may be faster than true time.
                let apart = granted_at.saturating_sub(last.granted_at);
                let early = retention.saturating_sub(apart + apart / 100 + MS);
                if early > 0 {
                    self.broken(now, Promise::OncePer, || {
                        format!("the work of r{resource} started again {early} µs before its period was over")
                    });
                }
            }
            let guard = LastGuard { token: record.token, granted_at };
            self.locks[resource].last_guards.insert(epoch, guard);
        }
    }

    /// The next guard of this lease is no hand-off.
    pub fn begin_anew(&mut self, acquisition: Acquisition) {
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            attempt.has_begun = false;
        }
    }

    /// A write with a guard's token reaches the fenced resource, which compares tokens. Returns whether it was accepted.
    pub fn write(
        &mut self,
        now: Micros,
        resource: usize,
        acquisition: Acquisition,
        token: u64,
        is_fenced: bool,
    ) -> bool {
        let Some(attempt) = self.attempts.get(&acquisition) else { return false };
        // Of the grant with this token: the server may have granted to the attempt again, and the client does not know it yet.
        let granted = attempt.tokens_with(token).map(|tokens| (tokens.order, tokens.epoch));
        let (order, epoch) = granted.unwrap_or((attempt.order, attempt.epoch));
        let book = &mut self.locks[resource];
        if is_fenced && token < book.fence {
            return false;
        }
        book.fence = book.fence.max(token);
        let written = book.written.get(&epoch).copied().unwrap_or(0);
        if order < written {
            self.broken(now, Promise::Fenced, || {
                format!("r{resource} accepted the write with token {token} of grant {order} after one of grant {written}")
            });
        }
        self.locks[resource].written.insert(epoch, order.max(written));
        true
    }
}

fn micros(span: std::time::Duration) -> Micros {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
