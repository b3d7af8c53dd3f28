//! What every kind of lock is made of: one attempt at a lease in one resource's table, and its settings.
//!
//! The kinds are faces over this: each says which resource, how much it bears, and how much of that an attempt takes.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, HandoffLimits, Kind, LeaseTerms, LocalTime, Loss, MAX_NAME_BYTES, Name, NameError, Outcome,
    Owner, Refusal, Resource, Token, WaitFor, WaitPolicy,
};
use tracing::Instrument as _;

use crate::client::{Handle, resource_of, unanswered};
use crate::engine::clock;
use crate::engine::{Closed, Ended, Errand, Given, Sleep};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::inspect::{HolderView, LockView};
use crate::metadata::MAX_NOTE_BYTES;

/// The shortest ttl: below it a renewal could not be repeated in time.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// The longest ttl, and the longest that a released lock can be kept.
pub const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(10);
const DEFAULT_MAX_WAITERS: u32 = 100_000;

/// How long an attempt that is not granted in time waits for the store to confirm that it is over. That is the store's word
/// on it: it has to be long enough for a store that is far away, and it bounds how late a caller learns that there is none.
pub(crate) const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// A resource, and how its leases are asked for.
#[derive(Clone)]
pub(crate) struct Lock {
    pub(crate) handle: Arc<Handle>,
    resource: Result<Arc<Resource>, NameError>,
    /// How much weight the resource bears.
    pub(crate) capacity: u32,
    pub(crate) owner: Option<Owner>,
    pub(crate) terms: LeaseTerms,
    pub(crate) at_least: Duration,
    pub(crate) max_waiters: u32,
    /// Whether the client's tasks hand a lease on among themselves, and for how long.
    pub(crate) hand_off: Option<HandoffLimits>,
    pub(crate) about: Arc<str>,
    note_bytes: usize,
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.debug("Lock", f)
    }
}

/// For how long an attempt waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    No,
    For(Duration),
    ForEver,
}

impl Wait {
    /// Until then, if it is still to come.
    pub(crate) fn until(deadline: Option<LocalTime>) -> Self {
        deadline.map_or(Self::No, |deadline| Self::For(deadline.since(clock::local())))
    }

    pub(crate) fn deadline(self) -> Option<LocalTime> {
        match self {
            Self::No => None,
            // Less than the clock counts is no time.
            Self::For(limit) if limit < Duration::from_micros(1) => None,
            Self::For(limit) => Some(clock::local() + limit),
            Self::ForEver => Some(LocalTime::NEVER),
        }
    }
}

impl Lock {
    pub(crate) fn new(handle: Arc<Handle>, kind: Kind, name: &str, capacity: u32) -> Self {
        let about = handle.encoded_about.clone();
        Self {
            handle,
            resource: resource_of(kind, name).map(Arc::new),
            capacity,
            owner: None,
            terms: LeaseTerms {
                ttl: DEFAULT_TTL,
                renews: true,
                max_hold: None,
                min_lifetime: Duration::ZERO,
                replicas: 0,
            },
            at_least: Duration::ZERO,
            max_waiters: DEFAULT_MAX_WAITERS,
            hand_off: None,
            about,
            note_bytes: 0,
        }
    }

    pub(crate) fn set_note(&mut self, note: String) {
        let mut about = self.handle.about.clone();
        self.note_bytes = note.len();
        about.note = Some(note);
        self.about = about.encode();
    }

    pub(crate) async fn lock(&self, weight: u32) -> Result<Guard, Error> {
        let guard = self.acquire(weight, None, Wait::ForEver).await?;
        guard.ok_or_else(|| self.handle.closed())
    }

    pub(crate) async fn try_lock(&self, weight: u32) -> Result<Option<Guard>, Error> {
        self.acquire(weight, None, Wait::No).await
    }

    pub(crate) async fn lock_timeout(&self, weight: u32, limit: Duration) -> Result<Option<Guard>, Error> {
        self.acquire(weight, None, Wait::For(limit)).await
    }

    /// Takes the place of `held` with another weight. Where that can't be had, `held` stays as it is; otherwise its guard
    /// is to be told ([`Guard::replaced`]).
    pub(crate) async fn replace(
        &self,
        held: &Guard,
        weight: u32,
        wait: Wait,
    ) -> Result<Option<Guard>, Error> {
        if let Some(loss) = held.loss() {
            return Err(self.handle.lost(self.checked_resource()?, loss));
        }
        let session = &self.handle.session;
        session.set_replacing(held.sequence(), true, clock::local());
        let ends_at = session.ends_at(held.sequence());
        let taken = self.acquire(weight, Some(held), wait).await;
        match &taken {
            // The attempt may have waited, and the hold has not begun anew.
            Ok(Some(guard)) => session.end_by(guard.sequence(), ends_at, clock::local()),
            _ => session.set_replacing(held.sequence(), false, clock::local()),
        }
        if let Ok(None) = taken {
            // Its grant may have been on the way when the attempt gave up, and then `held` has ended with it.
            held.renew().await?;
        }
        taken
    }

    pub(crate) async fn inspect(&self) -> Result<LockView, Error> {
        let resource = self.checked_resource()?;
        self.handle.inspect((**resource).clone()).await
    }

    pub(crate) async fn force_release(&self) -> Result<Vec<HolderView>, Error> {
        let resource = self.checked_resource()?;
        self.handle.force_release((**resource).clone()).await
    }

    /// Whether this is the lock that the guard is about.
    pub(crate) fn is_of(&self, guard: &Guard) -> bool {
        self.resource.as_ref().is_ok_and(|resource| resource.name.as_str() == guard.name())
    }

    /// As the kinds print themselves.
    pub(crate) fn debug(&self, kind: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.resource.as_ref().map(|resource| resource.name.as_str());
        write!(f, "{kind}({name:?} on {})", self.handle.url)
    }

    // --- One attempt -----------------------------------------------------------------------------

    pub(crate) async fn acquire(
        &self,
        weight: u32,
        replaces: Option<&Guard>,
        wait: Wait,
    ) -> Result<Option<Guard>, Error> {
        let resource = self.check(weight)?;
        let span = tracing::debug_span!("acquire", %resource, store = %self.handle.url);
        if self.handle.store.needs_admission_queue() && resource.kind != Kind::Admission {
            return self.acquire_in_turn(weight, wait).instrument(span).await;
        }
        if let Some(hand_off) = self.handed_on().filter(|_| replaces.is_none()) {
            let wish = self.wish(resource, hand_off);
            if wait.deadline().is_some() {
                return self.acquire_in_line(resource, wish, wait).instrument(span).await;
            }
            if self.handle.session.is_occupied(&wish) {
                return Ok(None);
            }
        }
        self.attempt(resource, weight, replaces, wait).instrument(span).await
    }

    /// One attempt, by itself.
    pub(crate) async fn attempt(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        wait: Wait,
    ) -> Result<Option<Guard>, Error> {
        let (attempt, errand) = self.begin(resource, weight, replaces, wait.deadline())?;
        let (outcome, trouble) = attempt.finish(errand).await;
        if let Outcome::Granted { grant, .. } = outcome {
            let token = grant.tokens.first;
            tracing::debug!(%resource, %token, "a lease was granted");
            return Ok(Some(attempt.into_guard(token)));
        }
        match outcome {
            Outcome::NotGranted | Outcome::TimedOut => {
                let until = clock::local() + CANCEL_LIMIT;
                let is_withdrawn = withdrawn(&self.handle, attempt.sequence, until).await;
                match (is_withdrawn, replaces) {
                    (true, _) => Ok(None),
                    // The store has said so, only an earlier answer of its own was lost.
                    (false, None) if outcome == Outcome::NotGranted => Ok(None),
                    (false, None) => Err(self.failed(resource, outcome, trouble.as_deref())),
                    (false, Some(_)) => {
                        let what = "whether the lease was exchanged is unknown";
                        Err(self.handle.unavailable(resource, what))
                    }
                }
            }
            outcome => Err(self.failed(resource, outcome, trouble.as_deref())),
        }
    }

    /// What whoever wanted the lock is told about an attempt that was neither granted nor given up.
    pub(crate) fn failed(&self, resource: &Resource, outcome: Outcome, trouble: Option<&str>) -> Error {
        match outcome {
            Outcome::QueueFull => {
                let what = format!("{} wait already", self.max_waiters);
                self.handle.error(ErrorKind::QueueFull, resource, what)
            }
            Outcome::Refused(Refusal::NotHeld) => self.handle.lost(resource, Loss::Gone),
            Outcome::Refused(refusal) => {
                self.handle.error(ErrorKind::Invalid, resource, explain(refusal, resource.kind))
            }
            Outcome::Cancelled => self.handle.closed(),
            Outcome::TimedOut if self.handle.session.is_closed() => self.handle.closed(),
            Outcome::TimedOut => {
                let what = "the time to wait is over, and the store does not say whether it was granted";
                let trouble = trouble.map(|trouble| format!(": {trouble}")).unwrap_or_default();
                self.handle.unavailable(resource, &format!("{what}{trouble}"))
            }
            Outcome::Failed | Outcome::NotGranted | Outcome::Granted { .. } => {
                let message = trouble.unwrap_or("the answer came too late to be of use");
                self.handle.unavailable(resource, message)
            }
        }
    }

    pub(crate) fn begin<'a>(
        &'a self,
        resource: &'a Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        deadline: Option<LocalTime>,
    ) -> Result<(Attempt<'a>, Option<Errand>), Error> {
        let session = &self.handle.session;
        let poll_intervals = self.handle.store.poll_intervals();
        let terms = self.terms(replaces, clock::local());
        let acquisition = session.next_acquisition();
        let command = Acquire {
            acquisition,
            owner: self.owner.clone(),
            capacity: self.capacity,
            weight,
            ttl: terms.ttl.max(terms.min_lifetime),
            reserve: 0,
            wait: deadline
                .map(|_| WaitFor { entry_ttl: poll_intervals.entry_ttl, max_queue: self.max_waiters }),
            replaces: replaces.map(Guard::sequence),
            metadata: self.about.clone(),
        };
        let confirms_pushes = terms.replicas > 0;
        let patience = deadline.map(|deadline| WaitPolicy {
            deadline,
            repoll_interval: poll_intervals.repoll_interval,
            confirms_pushes,
        });
        let began = session.begin(resource.clone(), terms, self.at_least, command, patience, clock::local());
        let errand = began.map_err(|Closed| self.handle.closed())?;
        Ok((
            Attempt { handle: &self.handle, resource, sequence: acquisition.sequence, is_taken: false },
            errand,
        ))
    }

    /// A lease is never asked for longer than the hold may last, which goes on when another lease takes its place.
    fn terms(&self, replaces: Option<&Guard>, now: LocalTime) -> LeaseTerms {
        let mut terms = self.terms;
        if let (Some(held), Some(_)) = (replaces, terms.max_hold) {
            terms.max_hold = Some(self.handle.session.ends_at(held.sequence()).since(now));
        }
        terms.ttl = terms.max_hold.map_or(terms.ttl, |hold| hold.min(terms.ttl));
        terms
    }

    // --- What can't be ---------------------------------------------------------------------------

    pub(crate) fn checked_resource(&self) -> Result<&Arc<Resource>, Error> {
        self.resource.as_ref().map_err(|error| Error::from(*error))
    }

    pub(crate) fn check(&self, weight: u32) -> Result<&Arc<Resource>, Error> {
        let resource = self.checked_resource()?;
        let invalid = |what: String| Err(self.handle.error(ErrorKind::Invalid, resource, what));
        if weight == 0 || weight > self.capacity {
            let unit = unit(resource.kind);
            return invalid(format!("of {} {unit}, {weight} can't be had", self.capacity));
        }
        if let Some(owner) = &self.owner {
            // What is no name for a lock is none for an owner.
            Name::new(owner.as_str()).map_err(|_| {
                let what = format!("an owner is 1 to {MAX_NAME_BYTES} bytes without control characters");
                self.handle.error(ErrorKind::Invalid, resource, what)
            })?;
        }
        let store = &self.handle.store;
        if !store.supports(resource.kind, self.owner.is_some()) {
            let what = "a quorum of servers has mutexes and elections only";
            return Err(self.handle.error(ErrorKind::Unsupported, resource, what));
        }
        let ttl = self.terms.ttl.max(self.terms.min_lifetime).max(self.at_least);
        if let Some(longest) = store.max_ttl()
            && ttl > longest
        {
            return invalid(format!(
                "it may be kept for {ttl:?}, which is more than the longest_ttl, {longest:?}"
            ));
        }
        let ttl = self.terms.ttl;
        if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
            return invalid(format!("a ttl is between {MIN_TTL:?} and 30 days, not {ttl:?}"));
        }
        if let Some(hold) = self.terms.max_hold
            && hold < MIN_TTL
        {
            return invalid(format!("a longest hold is at least {MIN_TTL:?}, not {hold:?}"));
        }
        if self.terms.replicas > 0 && !self.handle.store.has_replicas() {
            let what = "this store has no replicas that could be waited for";
            return Err(self.handle.error(ErrorKind::Unsupported, resource, what));
        }
        if self.at_least > MAX_TTL {
            return invalid(format!("a lock is kept for at most 30 days, not {:?}", self.at_least));
        }
        if self.note_bytes > MAX_NOTE_BYTES {
            return invalid(format!(
                "a note has at most {MAX_NOTE_BYTES} bytes, this one has {}",
                self.note_bytes
            ));
        }
        Ok(resource)
    }
}

/// What a kind's weight counts.
fn unit(kind: Kind) -> &'static str {
    match kind {
        Kind::Semaphore => "permits",
        Kind::Latch => "counts",
        Kind::Barrier => "parties",
        _ => "holders",
    }
}

fn explain(refusal: Refusal, kind: Kind) -> String {
    let unit = unit(kind);
    match refusal {
        Refusal::Capacity { in_use } => {
            let in_use = if kind == Kind::Barrier { crate::locks::barrier::parties(in_use) } else { in_use };
            format!("it is in use with {in_use} {unit}: everybody must name the same number")
        }
        Refusal::Weight { capacity } => format!("more than its {capacity} {unit}, or none, can't be had"),
        other => format!("the store refused: {other:?}"),
    }
}

/// Waits until the store has taken back what the attempt may have there, so that its caller, who may try again at once,
/// does not meet it. The driver sends it. Says whether the store has confirmed it by then, and ends with the client.
pub(crate) async fn withdrawn(handle: &Handle, attempt: u64, until: LocalTime) -> bool {
    let session = &handle.session;
    let mut limit = pin!(Sleep::until(session, until));
    let mut watch = session.watch(attempt);
    poll_fn(|context| match session.poll_given(&mut watch, context) {
        Poll::Ready(given) => Poll::Ready(given != Given::Unanswered),
        Poll::Pending if session.is_closed() => Poll::Ready(false),
        Poll::Pending => limit.as_mut().poll(context).map(|()| false),
    })
    .await
}

/// An attempt under way. Dropped, it gives back whatever it has or may come to have.
pub(crate) struct Attempt<'a> {
    handle: &'a Arc<Handle>,
    pub(crate) resource: &'a Arc<Resource>,
    pub(crate) sequence: u64,
    is_taken: bool,
}

impl Attempt<'_> {
    /// Sends the first command, and waits for the end. Further commands are the driver's.
    pub(crate) async fn finish(&self, errand: Option<Errand>) -> Ended {
        let (session, store) = (&self.handle.session, &self.handle.store);
        let mut call = None;
        if let Some(errand) = errand {
            match store.try_call_inline(self.resource, &errand.command) {
                Some(answered) => {
                    let outcome = session.absorb(&errand, clock::local(), &answered);
                    if let Some(granted @ Outcome::Granted { .. }) = outcome {
                        return (granted, None);
                    }
                }
                None => {
                    let batch = vec![(self.resource.clone(), errand.command.clone())];
                    let sent = store.call_replicated(batch, errand.replicas);
                    call = Some((errand, sent));
                }
            }
        }
        let mut watch = session.watch(self.sequence);
        poll_fn(|context| {
            if let Some((errand, sent)) = &mut call
                && let Poll::Ready(mut answers) = sent.as_mut().poll(context)
            {
                let answered = answers.pop().unwrap_or_else(unanswered);
                session.absorb(errand, clock::local(), &answered);
                call = None;
            }
            // The deadline may come before the answer.
            session.poll_ended(&mut watch, context)
        })
        .await
    }

    /// A guard stands for the lease from now on.
    pub(crate) fn into_guard(mut self, token: Token) -> Guard {
        self.is_taken = true;
        Guard::new(self.handle.clone(), self.sequence, self.resource.clone(), token)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            // What nobody came to have was never used, and need not be kept.
            self.handle.session.set_at_least(self.sequence, Duration::ZERO, clock::local());
            self.handle.let_go(self.resource, self.sequence);
        }
    }
}
