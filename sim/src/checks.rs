//! What must hold in every run. Each check knows what the documents exempt, and names the place.
//!
//! The checks trust neither the model nor the engine: they keep books of their own about what the server answered, and ask guards by
//! the clock of their own machine.

use std::collections::BTreeMap;
use std::fmt;

use leasehold::simulation::LeaseProbe;
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Grant, Push, PushKind, Reply, StoreTime, TOMBSTONE_TTL,
};

use crate::executor::ProcessId;
use crate::plan::{LockKind, Micros, SECOND};

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Promise {
    /// No two trusted holders.
    OneHolder,
    /// Tokens rise in the order of the grants.
    TokensRise,
    /// A fenced resource accepts no stale write.
    Fenced,
    /// First come, first served.
    Fifo,
    /// A lost lease is reported before another can hold it.
    LossReported,
    /// Nothing is left behind.
    NothingLeft,
    /// Commands per acquisition are within the stated figure.
    FewCommands,
    /// Timers fire when something is due.
    NoTimerStorm,
    /// After the faults, each waiter is granted within the bound.
    Liveness,
    /// After the faults, no operation fails.
    NoError,
    /// `lock_timeout` and `close` end in time.
    InTime,
    /// A command that arrives after its attempt was given up acquires nothing.
    NoGhost,
    /// Two runs of one seed are the same.
    Repeatable,
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneHolder => "no two trusted holders",
            Self::TokensRise => "tokens rise in grant order",
            Self::Fenced => "a fenced resource accepts no stale write",
            Self::Fifo => "first come, first served",
            Self::LossReported => "a lost lease is reported before another can hold it",
            Self::NothingLeft => "nothing is left behind",
            Self::FewCommands => "commands per acquisition",
            Self::NoTimerStorm => "no timer storm",
            Self::Liveness => "each waiter is granted within the bound",
            Self::NoError => "no error on a healthy network",
            Self::InTime => "limits are kept",
            Self::NoGhost => "a late command acquires nothing",
            Self::Repeatable => "a run can be repeated",
        })
    }
}

/// A broken promise and what was seen.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Which.
    pub promise: Promise,
    /// What was seen.
    pub what: String,
    /// When.
    pub at: Micros,
}

/// One attempt, as the server saw it.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its resource.
    pub resource: usize,
    /// Which server last confirmed the lease, and in which epoch of its data.
    pub epoch: (usize, u32),
    /// From which epoch the client counts its trust: a pushed grant counts from the answer before it.
    trust: (usize, u32),
    /// In which epoch a server last ran an `Acquire`, and the first. Answers may be lost, so the client may count from the first.
    anchor: (usize, u32),
    begun: (usize, u32),
    /// Its number in the order of all grants; zero before.
    pub order: u64,
    /// The tokens that it was granted.
    ranges: Vec<(u64, u64, (usize, u32))>,
    first_command: Micros,
    queued: bool,
    granted_at: Option<Micros>,
    released_at: Option<Micros>,
    /// A release with a tombstone was processed at this time of the server, in this epoch.
    tombstone: Option<(StoreTime, (usize, u32))>,
    /// It was revoked by force (section "`force_release`").
    is_forced: bool,
    commands: u64,
    ttl: Micros,
    has_owner: bool,
    /// The holder was told that another client waits.
    is_contended: bool,
    /// It exchanges a lease, and goes before all others.
    replaces: bool,
}

/// The queue of a resource, from the server's answers. It is copied with the server's data.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    queue: Vec<ShadowEntry>,
    /// Grants that were pushed and that the server has not heard of since.
    unclaimed: Vec<(Acquisition, StoreTime)>,
}

#[derive(Clone, Debug)]
struct ShadowEntry {
    acquisition: Acquisition,
    deadline: StoreTime,
    /// The server found its client unreachable, or a claim window lapsed, and has not heard of the client since.
    is_excused: bool,
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
    /// It is in a future that exchanges it for another. Its user can't use it until then, and learns of a loss from the result.
    pub is_exchanged: bool,
    /// A future waits for its loss.
    pub is_watched: bool,
}

/// What the checks know of one lock.
pub struct LockBook {
    kind: LockKind,
    /// The highest token that was granted, and where.
    last_token: u64,
    last_token_epoch: (usize, u32),
    /// The highest token that the fenced resource has seen.
    fence: u64,
    /// The highest place in the grant order of an accepted write, and its epoch.
    written: (u64, (usize, u32)),
    last_guard: Option<(u64, (usize, u32))>,
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
}

/// The checks' books.
pub struct Books {
    /// All attempts.
    pub attempts: BTreeMap<Acquisition, Attempt>,
    /// By lock.
    pub locks: Vec<LockBook>,
    /// All guards, by a number.
    pub records: BTreeMap<u64, Record>,
    grants: u64,
    /// From then on the network is healthy, and commands are counted.
    pub healthy_from: Micros,
    /// The longest delay of a message without faults.
    slowest: Micros,
    /// The first broken promise.
    pub violation: Option<Violation>,
}

impl Books {
    /// Empty books for these locks.
    #[must_use]
    pub fn new(kinds: impl Iterator<Item = LockKind>, slowest: Micros) -> Self {
        let book = |kind| LockBook {
            kind,
            last_token: 0,
            last_token_epoch: (0, 0),
            fence: 0,
            written: (0, (0, 0)),
            last_guard: None,
        };
        Self {
            attempts: BTreeMap::new(),
            locks: kinds.map(book).collect(),
            records: BTreeMap::new(),
            grants: 0,
            healthy_from: Micros::MAX,
            slowest,
            violation: None,
        }
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

    /// Whether an attempt is one of this resource.
    #[must_use]
    pub fn is_of(&self, acquisition: Acquisition, resource: usize) -> bool {
        self.attempts.get(&acquisition).is_some_and(|attempt| attempt.resource == resource)
    }

    /// Before the server runs a command. `is_batch`: it may be left out.
    pub fn before(&mut self, step: Step<'_>, shadow: &mut Shadow, is_batch: bool) {
        let Step { now, resource, clock, command, epoch } = step;
        shadow.queue.retain(|entry| entry.deadline > clock);
        let lapsed: Vec<ClientId> = shadow
            .unclaimed
            .iter()
            .filter(|(_, until)| *until <= clock)
            .map(|(acquisition, _)| acquisition.client)
            .collect();
        shadow.unclaimed.retain(|(_, until)| *until > clock);
        for client in lapsed {
            shadow.excuse(client, true);
        }
        let (acquisition, is_sign_of_life) = match command {
            Command::Acquire(acquire) => (acquire.acquisition, true),
            Command::Renew(renew) => (renew.acquisition, true),
            Command::Release(release) => (release.acquisition, false),
            Command::Inspect | Command::ForceRelease => return,
        };
        if !matches!(command, Command::Acquire(_)) {
            shadow.unclaimed.retain(|(other, _)| *other != acquisition);
        }
        // Of several attempts as one command, those behind a refused one are not made.
        if is_sign_of_life && !is_batch {
            shadow.excuse(acquisition.client, false);
        }
        if let Command::Acquire(acquire) = command {
            let attempt = self.attempts.entry(acquisition).or_insert_with(|| Attempt {
                resource,
                epoch,
                trust: epoch,
                anchor: epoch,
                begun: epoch,
                order: 0,
                ranges: Vec::new(),
                first_command: now,
                queued: false,
                granted_at: None,
                released_at: None,
                tombstone: None,
                is_forced: false,
                commands: 0,
                ttl: micros(acquire.ttl),
                has_owner: acquire.owner.is_some(),
                is_contended: false,
                replaces: acquire.replaces.is_some(),
            });
            attempt.anchor = epoch;
        }
        // A renewal that fetches tokens for hand-offs within the client serves many sections.
        let is_counted = !matches!(command, Command::Renew(renew) if renew.reserve > 0);
        if let Some(attempt) = self.attempts.get_mut(&acquisition).filter(|_| is_counted) {
            attempt.commands += 1;
        }
    }

    /// After the server has run a command. `unreachable`: the clients that it could not reach.
    pub fn after(
        &mut self,
        step: Step<'_>,
        shadow: &mut Shadow,
        reply: &Reply,
        pushes: &[Push],
        unreachable: &[ClientId],
    ) {
        let Step { now, resource, clock, command, epoch } = step;
        for client in unreachable {
            shadow.excuse(*client, true);
        }
        if let Command::Release(release) = command {
            shadow.queue.retain(|entry| entry.acquisition != release.acquisition);
        }
        if let Command::ForceRelease = command {
            for attempt in self.attempts.values_mut().filter(|attempt| attempt.resource == resource) {
                attempt.is_forced |= attempt.granted_at.is_some() && attempt.released_at.is_none();
            }
        }
        for push in pushes {
            if push.kind == PushKind::Contended
                && let Some(attempt) = self.attempts.get_mut(&push.acquisition)
            {
                attempt.is_contended = true;
            }
            // The lease was revoked by force, or the lease that a waiter wanted to replace is gone.
            if push.kind == PushKind::Revoked {
                if let (Command::ForceRelease, Some(attempt)) =
                    (command, self.attempts.get_mut(&push.acquisition))
                {
                    attempt.is_forced = true;
                }
                shadow.queue.retain(|entry| entry.acquisition != push.acquisition);
            }
        }
        // A lease may be granted and exchanged in one step.
        let exchanged = match (command, reply) {
            (Command::Acquire(acquire), Reply::Granted(_)) => {
                let client = acquire.acquisition.client;
                acquire.replaces.map(|sequence| Acquisition { client, sequence })
            }
            _ => None,
        };
        let granted: Vec<Acquisition> = pushes
            .iter()
            .filter(|push| matches!(push.kind, PushKind::Granted(_)))
            .map(|push| push.acquisition)
            .chain(exchanged)
            .chain(match (command, reply) {
                (Command::Acquire(acquire), Reply::Granted(_)) => Some(acquire.acquisition),
                _ => None,
            })
            .collect();
        // A replica that is behind may grant once more what was granted before.
        let waited: Vec<Acquisition> = shadow.queue.iter().map(|entry| entry.acquisition).collect();
        let is_new = |acquisition: &Acquisition| {
            self.attempts.get(acquisition).is_none_or(|attempt| {
                (attempt.granted_at.is_none() || waited.contains(acquisition)) && !attempt.replaces
            })
        };
        // What was granted and given back in one step overtook no one.
        let is_given_back = |acquisition: &Acquisition| {
            matches!(command, Command::Release(release) if release.acquisition == *acquisition)
                || pushes
                    .iter()
                    .any(|push| push.acquisition == *acquisition && push.kind == PushKind::Revoked)
        };
        let new: Vec<Acquisition> = granted
            .iter()
            .copied()
            .filter(|acquisition| {
                is_new(acquisition) && !is_given_back(acquisition) && exchanged != Some(*acquisition)
            })
            .collect();
        if let Some((late, early)) = shadow.overtaken(&new, &granted)
            && self.locks[resource].kind != LockKind::Reentrant
        {
            self.broken(now, Promise::Fifo, || {
                format!("{late} was granted before {early}, which came earlier")
            });
        }
        shadow.queue.retain(|entry| !granted.contains(&entry.acquisition));
        let mut grants: Vec<_> = pushes
            .iter()
            .filter_map(|push| match push.kind {
                PushKind::Granted(grant) => Some((grant, push.acquisition, None)),
                _ => None,
            })
            .collect();
        if let (Command::Acquire(acquire), Reply::Granted(grant)) = (command, reply) {
            grants.push((*grant, acquire.acquisition, Some(&**acquire)));
        }
        for (grant, acquisition, _) in &grants {
            if waited.contains(acquisition) {
                shadow.unclaimed.push((*acquisition, clock + grant.valid_for));
            }
        }
        // One command may grant to several.
        grants.sort_by_key(|(grant, ..)| grant.tokens.first.get());
        for (grant, acquisition, acquire) in grants {
            let begun = self.attempts.get(&acquisition).map_or(epoch, |attempt| attempt.begun);
            self.granted(now, resource, clock, acquisition, grant, (epoch, begun), acquire);
        }
        match (command, reply) {
            (Command::Acquire(_), Reply::Granted(_)) => {}
            (Command::Acquire(acquire), Reply::Queued(_)) => {
                if let Some(attempt) = self.attempts.get_mut(&acquire.acquisition) {
                    attempt.queued = true;
                    self.check_ghost(now, clock, acquire.acquisition, epoch, "queued");
                }
                shadow.enqueue(acquire, clock);
            }
            (Command::Acquire(acquire), _) => {
                shadow.queue.retain(|entry| entry.acquisition != acquire.acquisition);
            }
            (Command::Renew(renew), Reply::Renewed { tokens, .. }) => {
                if let Some(attempt) = self.attempts.get_mut(&renew.acquisition) {
                    (attempt.epoch, attempt.trust) = (epoch, epoch);
                    if let Some(tokens) = tokens {
                        attempt.ranges.push((tokens.first.get(), tokens.last.get(), epoch));
                        self.note_token(now, resource, clock, (tokens.first.get(), tokens.last.get()), epoch);
                    }
                }
            }
            (Command::Release(release), _) => self.released(now, clock, release, epoch),
            _ => {}
        }
    }

    fn released(
        &mut self,
        now: Micros,
        clock: StoreTime,
        release: &leasehold_core::Release,
        epoch: (usize, u32),
    ) {
        let healthy_from = self.healthy_from;
        let Some(attempt) = self.attempts.get_mut(&release.acquisition) else { return };
        if !release.tombstone.is_zero() {
            attempt.tombstone = Some((clock, epoch));
        }
        if attempt.released_at.is_some() {
            return;
        }
        attempt.released_at = Some(now);
        let Some(granted_at) = attempt.granted_at else { return };
        if attempt.first_command < healthy_from || attempt.has_owner || attempt.is_forced {
            return;
        }
        // One command to acquire, one to release; a renewal for each third of the ttl, and one to claim; a re-check when the
        // holder's lease may have ended.
        let waited = granted_at - attempt.first_command;
        let held = now - granted_at;
        // Renewals count from when the attempt was sent.
        let renewals = (held + 2 * self.slowest) * 10 / (attempt.ttl.min(3 * SECOND) * 3).max(1);
        // Of several holders, or of leases that are retained, each may end at a time of its own.
        let rechecks = if attempt.queued { 8 + waited / (250 * 1000) } else { 0 };
        // A push that another client waits may overtake the grant's answer: one renewal asks whether it is so.
        let asks = u64::from(attempt.is_contended);
        let allowed = 2 + renewals + rechecks + asks;
        let sent = attempt.commands;
        if sent > allowed {
            self.broken(now, Promise::FewCommands, || {
                format!(
                    "{} took {sent} commands; {allowed} are enough for waiting {waited} µs and holding {held} µs",
                    release.acquisition
                )
            });
        }
    }

    /// A lease was granted, by an answer or a push.
    #[allow(clippy::too_many_arguments)]
    fn granted(
        &mut self,
        now: Micros,
        resource: usize,
        clock: StoreTime,
        acquisition: Acquisition,
        grant: Grant,
        (epoch, trusted_epoch): ((usize, u32), (usize, u32)),
        acquire: Option<&Acquire>,
    ) {
        let (first, last) = (grant.tokens.first.get(), grant.tokens.last.get());
        let is_repeat = self.attempts.get(&acquisition).is_some_and(|attempt| {
            attempt.granted_at.is_some() && attempt.ranges.iter().any(|range| range.0 == first)
        });
        let is_exchange = acquire.is_some_and(|acquire| acquire.replaces.is_some());
        self.check_ghost(now, clock, acquisition, epoch, "granted");
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            (attempt.epoch, attempt.trust) = (epoch, trusted_epoch);
        }
        if is_repeat {
            return;
        }
        let is_owned = self.locks[resource].kind == LockKind::Reentrant;
        // A re-entry and a downgrade are the same critical section, with the same token.
        let is_same_section = (is_owned || is_exchange)
            && self.attempts.values().any(|attempt| {
                attempt.resource == resource && attempt.ranges.iter().any(|range| range.0 == first)
            });
        if !is_same_section {
            self.note_token(now, resource, clock, (first, last), epoch);
        }
        self.grants += 1;
        let order = self.grants;
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            attempt.order = order;
            attempt.ranges.push((first, last, epoch));
            attempt.granted_at = Some(now);
        }
    }

    /// Section "A command arrives after its attempt was given up: it acquires nothing".
    fn check_ghost(
        &mut self,
        now: Micros,
        clock: StoreTime,
        acquisition: Acquisition,
        epoch: (usize, u32),
        what: &str,
    ) {
        let Some((at, of)) = self.attempts.get(&acquisition).and_then(|attempt| attempt.tombstone) else {
            return;
        };
        if of == epoch && clock.since(at) < TOMBSTONE_TTL {
            self.broken(now, Promise::NoGhost, || {
                format!("{acquisition} was {what} after it had been given up")
            });
        }
    }

    fn note_token(
        &mut self,
        now: Micros,
        resource: usize,
        wall: StoreTime,
        (first, last): (u64, u64),
        epoch: (usize, u32),
    ) {
        let book = &mut self.locks[resource];
        // Section "Tokens and the wall clock": if the last token is forgotten, only the clock keeps tokens rising.
        let is_forgotten = book.last_token_epoch != epoch && book.last_token >= wall.as_micros();
        let before = book.last_token;
        book.last_token = if is_forgotten { last } else { before.max(last) };
        book.last_token_epoch = epoch;
        if first <= before && !is_forgotten {
            self.broken(now, Promise::TokensRise, || {
                format!("token {first} was granted after {before} on r{resource}")
            });
        }
    }

    /// A guard exists from now on. `others`: the guards that are trusted now by their own clocks, with their machines' clocks
    /// within the bounds.
    pub fn guard_created(&mut self, now: Micros, record: &Record, capacity: u32, others: &[u64]) {
        let resource = record.resource;
        let Some(attempt) = self.attempts.get(&record.probe.acquisition()) else {
            self.broken(now, Promise::OneHolder, || format!("a guard of r{resource} was never granted"));
            return;
        };
        let (epoch, is_forced) = (attempt.epoch, attempt.is_forced || attempt.trust != attempt.epoch);
        let range = attempt.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&record.token));
        let Some(&(.., token_epoch)) = range else {
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
            if known.epoch != epoch
                || known.trust != epoch
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
            self.broken(now, Promise::OneHolder, || {
                format!("process {process} holds r{resource} with token {token} beside{with}: {weight} of {capacity}")
            });
        }
        // A master that took over may know the lease with a token of its own.
        if self.locks[resource].kind == LockKind::Mutex && token_epoch == epoch {
            if let Some((last, of)) = self.locks[resource].last_guard
                && of == epoch
                && record.token <= last
            {
                let token = record.token;
                self.broken(now, Promise::TokensRise, || {
                    format!("a guard has token {token} after {last} on r{resource}")
                });
            }
            self.locks[resource].last_guard = Some((record.token, epoch));
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
        let (order, epoch) = (attempt.order, attempt.epoch);
        let book = &mut self.locks[resource];
        if is_fenced && token < book.fence {
            return false;
        }
        book.fence = book.fence.max(token);
        let (written, of) = book.written;
        if order < written && of == epoch {
            self.broken(now, Promise::Fenced, || {
                format!("r{resource} accepted the write with token {token} of grant {order} after one of grant {written}")
            });
        }
        let book = &mut self.locks[resource];
        if order > written || of != epoch {
            book.written = (order, epoch);
        }
        true
    }
}

impl Shadow {
    fn excuse(&mut self, client: ClientId, is_excused: bool) {
        let theirs = self.queue.iter_mut().filter(|entry| entry.acquisition.client == client);
        theirs.for_each(|entry| entry.is_excused = is_excused);
    }

    fn enqueue(&mut self, acquire: &Acquire, clock: StoreTime) {
        let Some(wait) = acquire.wait else { return };
        let deadline = clock + wait.entry_ttl;
        match self.queue.iter_mut().find(|entry| entry.acquisition == acquire.acquisition) {
            Some(entry) => entry.deadline = deadline,
            None => {
                let entry = ShadowEntry { acquisition: acquire.acquisition, deadline, is_excused: false };
                // A holder that waits for an upgrade goes first.
                let at = if acquire.replaces.is_some() { 0 } else { self.queue.len() };
                self.queue.insert(at, entry);
            }
        }
    }

    /// One of these new grants, and an entry before it that has no excuse and was not granted in the same step.
    fn overtaken(&self, new: &[Acquisition], granted: &[Acquisition]) -> Option<(Acquisition, Acquisition)> {
        new.iter().find_map(|late| {
            let at =
                self.queue.iter().position(|entry| entry.acquisition == *late).unwrap_or(self.queue.len());
            let early = self.queue[..at]
                .iter()
                .find(|entry| !entry.is_excused && !granted.contains(&entry.acquisition));
            early.map(|early| (*late, early.acquisition))
        })
    }
}

fn micros(span: std::time::Duration) -> Micros {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
