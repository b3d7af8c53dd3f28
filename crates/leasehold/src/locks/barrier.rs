//! A place where parties wait until all have come.
//!
//! A party holds a lease while it waits, so a party that dies has not come. The weight of the lease says what the party
//! does, and each change is one step in the store (`round.rs` reads what is there):
//!
//! - **Arrival.** It weighs so much that only one round fits: a party that comes too early waits in the queue.
//! - **Claim.** A party that sees all of a round turns its arrival into a claim, and looks again. If all are still there, the
//!   round may pass; otherwise the claim is taken back.
//! - **Mark.** A claim that was confirmed becomes a mark, which is released and *kept* for a while: from that step on the
//!   round has passed, for all of its parties. A mark that is not kept yet decides nothing.
//! - **Departure.** A party that gives up turns its arrival into a departure first, and looks then. It has passed if a claim
//!   from before its departure became a mark, and while such a claim is undecided it waits for that.
//!
//! So of a party that departs and a party that claims, at least one sees the other, whatever happens between their steps.
//! Claims and departures get new tokens, which say what came first. A mark names the first and the last token of its round;
//! tokens rise, so it says nothing about a later round.

mod round;

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Kind, LocalTime, Reply, Token, View};

use crate::engine::Sleep;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::{Lock, MAX_TTL, WaitMode};
use crate::options::lease_settings;
use round::{ARRIVAL, CLAIM, DEPARTURE, MARK, RETURNED, Round};

pub(crate) use round::{parties, passed_rounds};

/// The largest number of parties: beside them there must be room for marks.
const MOST: u32 = u32::MAX / ARRIVAL - 1;

/// How long a mark is kept, and for two ttls at least. A party that does not look for longer has lost its lease, unless it
/// asked for a longer one than the others.
const KEEP: Duration = Duration::from_secs(60);

/// With so many marks, further ones are kept for two ttls only: everybody is shown all of them, and they take room, without
/// which nobody can come.
const MANY_MARKS: usize = 64;

/// How often a waiting party looks; less often where more than a hundred parties would be shown each time.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_FOR_EACH: Duration = Duration::from_millis(1);

/// How often a departing party looks whether an earlier claim is decided, which takes a few round trips.
const LOOK_FOR_DECISION: Duration = Duration::from_millis(10);

/// A place where parties wait until all have come, again and again. Made by
/// [`Client::barrier`](crate::Client::barrier).
///
/// Everybody names the same number of parties, 65,534 at most. A party that dies while it waits counts no more once its lease has ended;
/// others wait for somebody in its place. All parties should ask for the same [`ttl`](Self::ttl): for two of them the store
/// remembers who has passed. No party can come while it remembers about 65,000 rounds, which with the usual ttl takes more
/// than 3,000 rounds a second.
///
/// The store decides whether a round passes, for all of its parties at once: of those whose lease is held to the end, all are
/// told so or none is.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let barrier = client.barrier("loaded", 1);
///
/// let is_leader = barrier.wait().await?; // alone it need not wait
/// assert!(is_leader);
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Barrier(Lock, u32);

lease_settings!(Barrier);

impl Barrier {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, parties: u32) -> Self {
        let capacity = parties.min(MOST) * ARRIVAL + (ARRIVAL - 1);
        Self(Lock::new(handle, Kind::Barrier, name, capacity), parties)
    }

    /// Waits until all parties have come, and says to one of them, the first to come, that it is the leader of this round.
    /// It looks ten times a second, and less often
    /// for more than a hundred.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be, no parties, more than 65,534, or a number other than that with
    /// which the barrier is in use; `is_lost` when this party's lease was lost while it waited: it has not come then, or the
    /// others may have gone on without it. `is_unavailable` when the store could not be asked: whether the round has passed
    /// is unknown then; `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped early, this party has not come, unless the others saw it and have gone on.
    pub async fn wait(&self) -> Result<bool, Error> {
        let passed = self.pass(WaitMode::Forever).await?;
        passed.ok_or_else(|| self.0.handle.closed())
    }

    /// Waits for at most this long, and answers `None` if not all have come by then: this party leaves again, and the round
    /// does not pass without another one in its place.
    ///
    /// It may take longer when another party is just deciding that all have come: some round trips, or what is left of that
    /// party's ttl if it dies meanwhile.
    ///
    /// # Errors
    ///
    /// As [`Self::wait`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::wait`].
    pub async fn wait_timeout(&self, limit: Duration) -> Result<Option<bool>, Error> {
        self.pass(WaitMode::AtMost(limit)).await
    }

    async fn pass(&self, wait: WaitMode) -> Result<Option<bool>, Error> {
        self.check()?;
        let deadline = wait.deadline(self.0.handle.now());
        // It is renewed by looking, and not in the background: a party that does not look any more must not count for a
        // later round.
        let mut lock = self.0.clone();
        lock.terms.renews = false;
        let Some(guard) = lock.acquire(ARRIVAL, None, wait).await? else { return Ok(None) };
        let mut party =
            Party { barrier: self, lock, token: guard.token(), guard, arrived: self.0.handle.now() };
        let mut has_seen_all = false;
        loop {
            let view = self.look().await?;
            party.check_held()?;
            if let Some(round) = Round::passed(&view, party.token) {
                return Ok(Some(party.go_on(&round).await));
            }
            let is_late = deadline.is_none_or(|deadline| self.0.handle.now() >= deadline);
            let all = Round::present(&view, party.token, self.1);
            // One claim is enough, so the others leave it to the leader, but not for long.
            if let Some(round) = &all
                && (round.first == party.token || has_seen_all || is_late)
                && party.may_claim()
            {
                match party.claim(round).await? {
                    Claim::Confirmed(view) => return party.mark(round, &view).await.map(Some),
                    Claim::Late(passed) => return Ok(Some(party.go_on(&passed).await)),
                    Claim::Void => {}
                }
            }
            has_seen_all = all.is_some();
            if is_late {
                return party.depart().await;
            }
            if self.0.terms.renews && party.guard.remaining() < self.0.terms.ttl / 3 * 2 {
                party.guard.renew().await?;
            }
            let next = self.0.handle.now() + self.pause().min(self.0.terms.ttl / 4);
            let next = deadline.map_or(next, |deadline| deadline.min(next));
            party.guard.run(Sleep::until(&self.0.handle.session, next)).await?;
        }
    }

    async fn look(&self) -> Result<View, Error> {
        let (handle, resource) = (&self.0.handle, self.0.checked_resource()?);
        match handle.ask((**resource).clone(), Command::Inspect).await?.reply {
            Reply::View(view) => Ok(view),
            other => Err(handle.unexpected(resource, &other)),
        }
    }

    /// How long after its arrival, so long ago, a party's mark is kept.
    fn keep(&self, view: &View, arrived: Duration) -> Duration {
        let least = self.0.terms.ttl * 2;
        let keep = if round::count_marks(view) < MANY_MARKS { least.max(KEEP) } else { least };
        (arrived + keep).min(MAX_TTL)
    }

    fn pause(&self) -> Duration {
        LOOK.max(LOOK_FOR_EACH * self.1)
    }

    fn check(&self) -> Result<(), Error> {
        let resource = self.0.checked_resource()?;
        if (1..=MOST).contains(&self.1) {
            return Ok(());
        }
        let what = format!("a barrier has between 1 and {MOST} parties, not {}", self.1);
        Err(self.0.handle.error(ErrorKind::Invalid, resource, what))
    }
}

/// One party, from its arrival on. Dropped, it has not come.
struct Party<'a> {
    barrier: &'a Barrier,
    /// How its leases are asked for.
    lock: Lock,
    /// The lease that it has now: its arrival, or what took the place of that.
    guard: Guard,
    /// The token of its arrival, by which rounds name it.
    token: Token,
    arrived: LocalTime,
}

/// What came of a claim.
enum Claim {
    /// All are still there, as the store showed it then.
    Confirmed(View),
    /// Another party's claim was before it.
    Late(Round),
    /// Not all are there any more; this party still is.
    Void,
}

impl Party<'_> {
    fn check_held(&self) -> Result<(), Error> {
        self.guard.loss().map_or(Ok(()), |loss| Err(self.guard.lost_error(loss)))
    }

    /// A mark is kept from the arrival on, for at most `MAX_TTL`. The party that came last can always claim.
    fn may_claim(&self) -> bool {
        self.barrier.0.handle.now().since(self.arrived) + KEEP < MAX_TTL
    }

    /// Gives the party another lease in one step, and says whether the store had room for it.
    async fn turn_into(&mut self, weight: u32, label: Option<String>) -> Result<bool, Error> {
        if let Some(label) = label {
            self.lock.set_label(label);
        }
        let Some(guard) = self.lock.replace(&self.guard, weight, WaitMode::NoWait).await? else {
            return Ok(false);
        };
        std::mem::replace(&mut self.guard, guard).mark_replaced();
        Ok(true)
    }

    /// Looks once more whether all of the round are there, in a way that parties which depart can see.
    async fn claim(&mut self, round: &Round) -> Result<Claim, Error> {
        // Alone there is nobody who needs to know.
        if self.barrier.1 == 1 {
            return Ok(Claim::Late(*round));
        }
        if !self.turn_into(CLAIM, Some(round.claim(self.token))).await? {
            return Ok(Claim::Void);
        }
        let view = self.barrier.look().await?;
        self.check_held()?;
        if let Some(passed) = Round::passed(&view, self.token) {
            return Ok(Claim::Late(passed));
        }
        if Round::present(&view, self.token, self.barrier.1).as_ref() == Some(round) {
            return Ok(Claim::Confirmed(view));
        }
        self.step_down(RETURNED, Round::returned(self.token)).await?;
        Ok(Claim::Void)
    }

    /// Decides in the store that the round has passed, and says whether this party is its leader.
    async fn mark(mut self, round: &Round, view: &View) -> Result<bool, Error> {
        self.lock.min_hold = self.barrier.keep(view, self.barrier.0.handle.now().since(self.arrived));
        self.step_down(MARK, round.mark()).await?;
        self.guard.release().await?;
        Ok(round.first == self.token)
    }

    /// Turns into something lighter, for which there always is room.
    async fn step_down(&mut self, weight: u32, label: String) -> Result<(), Error> {
        if self.turn_into(weight, Some(label)).await? {
            return Ok(());
        }
        let resource = self.lock.checked_resource()?;
        Err(self.lock.handle.unavailable(resource, "the store had no room for less than there was"))
    }

    /// Leaves after its round has passed, which is so whatever becomes of this release: the client repeats it.
    async fn go_on(self, round: &Round) -> bool {
        if let Err(error) = self.guard.release().await {
            tracing::debug!(%error, "a party that has passed could not give its place back at once");
        }
        round.first == self.token
    }

    /// Leaves because it is late, unless its round has passed before that.
    async fn depart(mut self) -> Result<Option<bool>, Error> {
        let session = &self.barrier.0.handle.session;
        while !self.turn_into(DEPARTURE, None).await? {
            // More rounds are remembered than there is room for.
            let view = self.barrier.look().await?;
            self.check_held()?;
            if let Some(round) = Round::passed(&view, self.token) {
                return Ok(Some(self.go_on(&round).await));
            }
            self.guard.run(Sleep::until(session, session.now() + self.barrier.pause())).await?;
        }
        let departed = self.guard.token();
        loop {
            let view = self.barrier.look().await?;
            if let Some(round) = Round::passed_before(&view, self.token, departed) {
                return Ok(Some(self.go_on(&round).await));
            }
            if session.is_closed() {
                return Err(self.barrier.0.handle.closed());
            }
            if !Round::is_claimed_before(&view, self.token, departed) {
                if let Err(error) = self.guard.release().await {
                    tracing::debug!(%error, "a party that has left could not give its place back at once");
                }
                return Ok(None);
            }
            Sleep::until(session, session.now() + LOOK_FOR_DECISION).await;
        }
    }
}
