//! A lock with one holder at a time.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, LeaseTerms, LocalTime, NameError, Outcome, Patience, Refusal, Resource, Token, WaitFor,
};
use tracing::Instrument as _;

use crate::about::MAX_NOTE_BYTES;
use crate::client::{Handle, mutex_resource, unanswered};
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::session::{Closed, Ended, Errand};
use crate::view::{HolderView, LockView};

/// The shortest ttl: below it a renewal could not be repeated in time.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// The longest ttl, and the longest that a released lock can be kept.
pub const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

const DEFAULT_TTL: Duration = Duration::from_secs(10);
const DEFAULT_MAX_WAITERS: u32 = 100_000;

/// A lock with one holder at a time, and how to take it. Made by [`Client::mutex`](crate::Client::mutex).
///
/// It waits in the store's queue: first come, first served, across processes. Cloning is cheap.
#[derive(Clone)]
pub struct Mutex {
    handle: Arc<Handle>,
    resource: Result<Arc<Resource>, NameError>,
    terms: LeaseTerms,
    at_least: Duration,
    max_waiters: u32,
    about: Arc<str>,
    note_bytes: usize,
}

impl Mutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        let about = handle.encoded_about.clone();
        Self {
            handle,
            resource: mutex_resource(name).map(Arc::new),
            terms: LeaseTerms { ttl: DEFAULT_TTL, renews: true, longest_hold: None },
            at_least: Duration::ZERO,
            max_waiters: DEFAULT_MAX_WAITERS,
            about,
            note_bytes: 0,
        }
    }

    /// How long the lease runs without renewal: 10 s unless set, 100 ms to 30 days. It is what a holder that
    /// dies costs those behind it.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// Whether the lease is renewed, at a third of its ttl, for as long as the guard lives. It is unless set.
    #[must_use]
    pub fn auto_renew(mut self, renews: bool) -> Self {
        self.terms.renews = renews;
        self
    }

    /// Ends the lease this long after the grant, however well renewals go: for work that may hang.
    #[must_use]
    pub fn longest_hold(mut self, hold: Duration) -> Self {
        self.terms.longest_hold = Some(hold);
        self
    }

    /// Keeps others out until this long after the grant, also when it is released before. For work that must not
    /// run twice although the clocks that start it differ.
    #[must_use]
    pub fn at_least(mut self, at_least: Duration) -> Self {
        self.at_least = at_least;
        self
    }

    /// How many may wait for this lock; beyond that, waiting fails with `is_queue_full`. 100,000 unless set.
    #[must_use]
    pub fn max_waiters(mut self, max_waiters: u32) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// Text that is shown to everybody who looks at the lock, besides host, process and program. Up to 1 KiB.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        let mut about = self.handle.about.clone();
        let note = note.into();
        self.note_bytes = note.len();
        about.note = Some(note);
        self.about = about.encode();
        self
    }

    /// Waits for the lock, for as long as it takes.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be; `is_unavailable` when the store could not be asked;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn lock(&self) -> Result<Guard, Error> {
        let guard = self.acquire(Some(LocalTime::NEVER)).await?;
        guard.ok_or_else(|| self.handle.closed())
    }

    /// Takes the lock if it can be had at once, and otherwise answers `None`.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>, Error> {
        self.acquire(None).await
    }

    /// Waits for the lock for at most this long, and then answers `None`.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        if limit.is_zero() {
            return self.try_lock().await;
        }
        self.acquire(Some(clock::local() + limit)).await
    }

    /// Who holds the lock and who waits for it.
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`.
    pub async fn inspect(&self) -> Result<LockView, Error> {
        let resource = self.checked_resource()?;
        self.handle.inspect((**resource).clone()).await
    }

    /// Takes the lock away from whoever holds it, and gives it to the next in the queue. The holder learns that it
    /// has lost; until then both work, and only their tokens tell them apart.
    ///
    /// # Errors
    ///
    /// As [`Self::inspect`].
    pub async fn force_release(&self) -> Result<Vec<HolderView>, Error> {
        let resource = self.checked_resource()?;
        self.handle.force_release((**resource).clone()).await
    }

    // --- One attempt -----------------------------------------------------------------------------

    async fn acquire(&self, deadline: Option<LocalTime>) -> Result<Option<Guard>, Error> {
        let resource = self.check()?;
        let span = tracing::debug_span!("acquire", %resource, store = %self.handle.url);
        let ended = async {
            let (attempt, errand) = self.begin(resource, deadline)?;
            let ended = attempt.finish(errand).await;
            Ok::<_, Error>((attempt, ended))
        };
        let (attempt, (outcome, trouble)) = ended.instrument(span).await?;
        if let Outcome::Granted { grant, .. } = outcome {
            let token = grant.tokens.first;
            tracing::debug!(%resource, %token, "a lease was granted");
            return Ok(Some(attempt.into_guard(token)));
        }
        match outcome {
            Outcome::Granted { .. } | Outcome::NotGranted => Ok(None),
            Outcome::QueueFull => {
                let what = format!("{} wait already", self.max_waiters);
                Err(self.handle.error(ErrorKind::QueueFull, resource, what))
            }
            Outcome::Refused(refusal) => {
                Err(self.handle.error(ErrorKind::Invalid, resource, explain(refusal)))
            }
            Outcome::Cancelled => Err(self.handle.closed()),
            Outcome::Failed => {
                let message = trouble.as_deref().unwrap_or("the answer came too late to be of use");
                Err(self.handle.unavailable(resource, message))
            }
        }
    }

    fn begin<'a>(
        &'a self,
        resource: &'a Arc<Resource>,
        deadline: Option<LocalTime>,
    ) -> Result<(Attempt<'a>, Option<Errand>), Error> {
        let session = &self.handle.session;
        let rhythm = self.handle.store.rhythm();
        let terms = LeaseTerms { ttl: self.shortest_ttl(), ..self.terms };
        let acquisition = session.next_acquisition();
        let command = Acquire {
            acquisition,
            owner: None,
            capacity: 1,
            weight: 1,
            ttl: terms.ttl,
            reserve: 0,
            wait: deadline.map(|_| WaitFor { entry_ttl: rhythm.entry_ttl, max_queue: self.max_waiters }),
            metadata: self.about.clone(),
        };
        let patience = deadline.map(|deadline| Patience { deadline, look_again: rhythm.look_again });
        let began = session.begin(resource.clone(), terms, self.at_least, command, patience, clock::local());
        let errand = began.map_err(|Closed| self.handle.closed())?;
        Ok((
            Attempt { handle: &self.handle, resource, sequence: acquisition.sequence, is_taken: false },
            errand,
        ))
    }

    /// A lease is never asked for longer than the hold may last.
    fn shortest_ttl(&self) -> Duration {
        self.terms.longest_hold.map_or(self.terms.ttl, |hold| hold.min(self.terms.ttl))
    }

    // --- What can't be ---------------------------------------------------------------------------

    fn checked_resource(&self) -> Result<&Arc<Resource>, Error> {
        self.resource
            .as_ref()
            .map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()).with_source(*error))
    }

    fn check(&self) -> Result<&Arc<Resource>, Error> {
        let resource = self.checked_resource()?;
        let invalid = |what: String| Err(self.handle.error(ErrorKind::Invalid, resource, what));
        let ttl = self.terms.ttl;
        if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
            return invalid(format!("a ttl is between {MIN_TTL:?} and 30 days, not {ttl:?}"));
        }
        if let Some(hold) = self.terms.longest_hold
            && hold < MIN_TTL
        {
            return invalid(format!("a longest hold is at least {MIN_TTL:?}, not {hold:?}"));
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

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.resource.as_ref().map(|resource| resource.name.as_str());
        write!(f, "Mutex({name:?} on {})", self.handle.url)
    }
}

fn explain(refusal: Refusal) -> String {
    match refusal {
        Refusal::Capacity { in_use } => {
            format!("it is in use with a capacity of {in_use}: everyone must name the same")
        }
        Refusal::Weight { capacity } => {
            format!("it has a capacity of {capacity}, and less than that was left to take")
        }
        other => format!("the store refused: {other:?}"),
    }
}

/// An attempt under way. Dropped, it gives back whatever it has or may come to have.
struct Attempt<'a> {
    handle: &'a Arc<Handle>,
    resource: &'a Arc<Resource>,
    sequence: u64,
    is_taken: bool,
}

impl Attempt<'_> {
    /// Sends the first command, and waits for the end. Further commands are the driver's.
    async fn finish(&self, errand: Option<Errand>) -> Ended {
        let (session, store) = (&self.handle.session, &self.handle.store);
        let mut call = None;
        if let Some(errand) = errand {
            match store.call_now(self.resource, &errand.command) {
                Some(answered) => {
                    let outcome = session.absorb(&errand, clock::local(), &answered);
                    if let Some(granted @ Outcome::Granted { .. }) = outcome {
                        return (granted, None);
                    }
                }
                None => {
                    let sent = store.call(vec![(self.resource.clone(), errand.command.clone())]);
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
    fn into_guard(mut self, token: Token) -> Guard {
        self.is_taken = true;
        Guard::new(self.handle.clone(), self.sequence, self.resource.clone(), token)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            self.handle.let_go(self.resource, self.sequence);
        }
    }
}
