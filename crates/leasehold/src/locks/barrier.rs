//! A barrier: parties wait until all have arrived.
//!
//! A party holds a lease while it waits, so a party that dies has not arrived. The weight of the lease encodes the party's state,
//! and each change of state is one step in the store (`round.rs` decodes the leases):
//!
//! - **Arrival.** The arrivals of one round leave no capacity for another one: a party that arrives too early waits in the queue.
//!   A party first takes its place, and arrives once it knows that: a wait that ends before has not been counted by any round.
//! - **Claim.** A party that sees all parties of a round replaces its arrival by a claim, and reads again. If all are still there,
//!   the claim is confirmed; otherwise the party returns to its arrival.
//! - **Mark.** A confirmed claim is replaced by a mark, which is released and *retained* for a while. From the release on the round
//!   has passed, for all of its parties. A mark that is not retained yet decides nothing.
//! - **Departure.** A party that times out first replaces its arrival by a departure, and then reads. It has passed if a claim from
//!   before its departure became a mark. While such a claim is undecided, the party waits for the decision.
//!
//! If one party departs while another one claims, at least one of them therefore sees the other, in every order of their steps.
//! Claims and departures have tokens of their own, which order them. A mark names the first and the last token of its round.
//! Tokens rise, so a mark never matches a later round.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Kind, LocalTime, Reply, Token, View};

use crate::barrier_rounds::{self as rounds, ARRIVAL, ARRIVING, CLAIM, DEPARTURE, MARK, RETURNED, Round};
use crate::engine::Sleep;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::{Lock, MAX_TTL, Replication, WaitMode};
use crate::options::lease_settings;

/// The maximum number of parties. The rest of the capacity is for marks.
const MAX_PARTIES: u32 = u32::MAX / ARRIVAL - 1;

/// How long a mark is retained, if that is longer than two ttls. A party that does not poll for two of its own ttls has lost its
/// lease.
const MARK_RETENTION: Duration = Duration::from_secs(60);

/// With so many marks, further ones are retained for two ttls only: each poll returns all of them, and they use capacity that
/// arrivals need.
const MANY_MARKS: usize = 64;

/// The interval between two polls of a waiting party. It grows with the parties, because each poll returns every party.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const POLL_INTERVAL_PER_PARTY: Duration = Duration::from_millis(1);

/// The interval at which a departing party polls for the decision about an earlier claim, which takes a few round trips.
const DECISION_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A barrier at which parties wait until all have arrived, round after round. Created by
/// [`Client::barrier`](crate::Client::barrier).
///
/// All clients must pass the same number of parties, 1 to 65,534, and should use the same [`ttl`](Self::ttl). If a party
/// dies while it waits, it counts until its lease has expired; the round then needs another party. The store remembers a
/// passed round for two ttls, and for at least 1 min while it remembers fewer than 64 rounds. It admits no party while it
/// remembers about 65,000 rounds. With the default ttl, that takes more than 3,000 rounds a second.
///
/// The store decides whether a round passes. Of the parties that keep their lease to the end of the round, all pass
/// or none does.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let barrier = client.barrier("loaded", 1);
///
/// let is_leader = barrier.wait().await?; // one party: passes at once
/// assert!(is_leader);
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Barrier(Lock, u32);

lease_settings!(Barrier, "barrier(\"loaded\", 2)");

impl Barrier {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, parties: u32) -> Self {
        let capacity = parties.min(MAX_PARTIES) * ARRIVAL + (ARRIVAL - 1);
        Self(Lock::new(handle, Kind::Barrier, name, capacity), parties)
    }

    /// Waits without a limit until all parties have arrived. Returns `true` for the first party that arrived, the leader of
    /// the round, and `false` for the others. This polls every 100 ms, or every 1 ms × parties for more than 100 parties.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let barrier = client.barrier("loaded", 2);
    /// let (one, other) = futures_util::future::join(barrier.wait(), barrier.wait()).await;
    /// assert_ne!(one?, other?); // one leader
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name or option, or a number of parties that is invalid or differs from the one in use;
    /// `is_lost` if this party's lease was lost while it waited (the other parties may pass with or without it);
    /// `is_unavailable` if the store did not respond (it is then unknown whether the round has passed); `is_queue_full`;
    /// `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, this party departs, unless the round has already passed.
    pub async fn wait(&self) -> Result<bool, Error> {
        let passed = self.wait_within(WaitMode::Forever).await?;
        passed.ok_or_else(|| self.0.handle.closed())
    }

    /// Waits at most `limit` for all parties, as [`Self::wait`]. At the limit this party departs, the result is `None`, and
    /// the round needs another party.
    ///
    /// If another party is deciding whether the round passes when the limit is reached, this call waits for that decision.
    /// The decision takes a few round trips. If the other party dies, it takes the rest of that party's ttl.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let passed = client.barrier("loaded", 2).wait_timeout(Duration::from_millis(5)).await?;
    /// assert_eq!(passed, None); // no second party
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::wait`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::wait`].
    pub async fn wait_timeout(&self, limit: Duration) -> Result<Option<bool>, Error> {
        self.wait_within(WaitMode::AtMost(limit)).await
    }

    async fn wait_within(&self, wait: WaitMode) -> Result<Option<bool>, Error> {
        self.check()?;
        self.pass_within(wait).await.map_err(|error| self.0.handle.closed_or(error))
    }

    async fn pass_within(&self, wait: WaitMode) -> Result<Option<bool>, Error> {
        let deadline = wait.deadline(self.0.handle.now());
        // This loop renews the lease instead of the driver: a party whose future is no longer polled must not count for a later
        // round.
        let mut lock = self.0.clone();
        lock.terms.renews = false;
        // No round counts the party before it knows of its lease, so a wait that ends at its limit has not passed.
        let Some(guard) = lock.acquire(ARRIVING, None, wait).await? else { return Ok(None) };
        let mut party =
            Party { barrier: self, lock, token: guard.token(), guard, arrived: self.0.handle.now() };
        party.step_down(ARRIVAL, None).await?;
        let mut has_seen_all = false;
        loop {
            let view = self.view().await?;
            party.check_held()?;
            if let Some(round) = Round::passed(&view, party.token) {
                return party.pass(&round).await.map(Some);
            }
            let is_late = deadline.is_none_or(|deadline| self.0.handle.now() >= deadline);
            let all = Round::present(&view, party.token, self.1);
            // One claim is enough, so the other parties leave it to the leader for one poll.
            if let Some(round) = &all
                && (round.first == party.token || has_seen_all || is_late)
                && party.may_claim()
            {
                match party.claim(round).await? {
                    Claim::Confirmed(view) => return party.mark(round, &view).await.map(Some),
                    Claim::Late(passed) => return party.pass(&passed).await.map(Some),
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
            let next = self.0.handle.now() + self.poll_interval().min(self.0.terms.ttl / 4);
            let next = deadline.map_or(next, |deadline| deadline.min(next));
            party.guard.run(Sleep::until(&self.0.handle.session, next)).await?;
        }
    }

    async fn view(&self) -> Result<View, Error> {
        let (handle, resource) = (&self.0.handle, self.0.checked_resource()?);
        match handle.ask((**resource).clone(), Command::Inspect).await?.reply {
            Reply::View(view) => Ok(view),
            other => Err(handle.unexpected(resource, &other)),
        }
    }

    /// The minimum hold of a mark, counted from the arrival of its party `age` ago.
    fn mark_min_hold(&self, view: &View, age: Duration) -> Duration {
        let least = self.0.terms.ttl * 2;
        let retention =
            if rounds::count_marks(view) < MANY_MARKS { least.max(MARK_RETENTION) } else { least };
        (age + retention).min(MAX_TTL)
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL.max(POLL_INTERVAL_PER_PARTY * self.1)
    }

    fn check(&self) -> Result<(), Error> {
        let resource = self.0.checked_resource()?;
        if (1..=MAX_PARTIES).contains(&self.1) {
            return Ok(());
        }
        let what = format!("a barrier has between 1 and {MAX_PARTIES} parties, not {}", self.1);
        Err(self.0.handle.error(ErrorKind::Invalid, resource, what))
    }
}

/// One party, from its arrival on. Dropping it releases the arrival.
struct Party<'a> {
    barrier: &'a Barrier,
    /// The options of its leases.
    lock: Lock,
    /// Its present lease: the arrival, or the lease that replaced it.
    guard: Guard,
    /// The token of its arrival, which identifies it in a round.
    token: Token,
    arrived: LocalTime,
}

/// The outcome of a claim.
enum Claim {
    /// All parties are still there, as this view shows.
    Confirmed(View),
    /// Another party's claim came first, and this round has passed.
    Late(Round),
    /// A party has left. This one has returned to its arrival.
    Void,
}

impl Party<'_> {
    fn check_held(&self) -> Result<(), Error> {
        self.guard.loss().map_or(Ok(()), |loss| Err(self.guard.lost_error(loss)))
    }

    /// A mark's minimum hold is counted from its party's arrival and is at most `MAX_TTL`. The party that arrived last can always
    /// claim.
    fn may_claim(&self) -> bool {
        self.barrier.0.handle.now().since(self.arrived) + MARK_RETENTION < MAX_TTL
    }

    /// Replaces the party's lease in one step. Returns whether the store had capacity for the new one.
    async fn replace_lease(&mut self, weight: u32, label: Option<String>) -> Result<bool, Error> {
        if let Some(label) = label {
            self.lock.set_label(label);
        }
        let Some(guard) = self.lock.replace(&self.guard, weight, WaitMode::NoWait).await? else {
            return Ok(false);
        };
        std::mem::replace(&mut self.guard, guard).mark_replaced();
        Ok(true)
    }

    /// Publishes a claim that departing parties can see, then checks again that all parties are there.
    async fn claim(&mut self, round: &Round) -> Result<Claim, Error> {
        // A single party needs no agreement.
        if self.barrier.1 == 1 {
            return Ok(Claim::Late(*round));
        }
        if !self.replace_lease(CLAIM, Some(round.claim(self.token))).await? {
            return Ok(Claim::Void);
        }
        let view = self.barrier.view().await?;
        self.check_held()?;
        if let Some(passed) = Round::passed(&view, self.token) {
            return Ok(Claim::Late(passed));
        }
        if Round::present(&view, self.token, self.barrier.1).as_ref() == Some(round) {
            return Ok(Claim::Confirmed(view));
        }
        self.step_down(RETURNED, Some(Round::returned(self.token))).await?;
        Ok(Claim::Void)
    }

    /// Records in the store that the round has passed. Returns whether this party is its leader.
    async fn mark(mut self, round: &Round, view: &View) -> Result<bool, Error> {
        self.lock.min_hold =
            self.barrier.mark_min_hold(view, self.barrier.0.handle.now().since(self.arrived));
        self.step_down(MARK, Some(round.mark())).await?;
        self.guard.release().await?;
        Ok(round.first == self.token)
    }

    /// Replaces the lease by one of less weight, for which there always is capacity.
    async fn step_down(&mut self, weight: u32, label: Option<String>) -> Result<(), Error> {
        if self.replace_lease(weight, label).await? {
            return Ok(());
        }
        let resource = self.lock.checked_resource()?;
        Err(self
            .lock
            .handle
            .unavailable(resource, "the store refused a lease of less weight than the one it replaces"))
    }

    /// Releases after the round has passed, and returns whether this party is the leader. A failed release changes nothing about
    /// that: the client repeats it. The mark must outlast a failover, as the party's lease would have.
    async fn pass(self, round: &Round) -> Result<bool, Error> {
        self.confirm_passed().await?;
        if let Err(error) = self.guard.release().await {
            tracing::debug!(%error, "release of a party that has passed not confirmed; it is repeated");
        }
        Ok(round.first == self.token)
    }

    /// Waits until the replicas have the mark by which this party passes.
    async fn confirm_passed(&self) -> Result<(), Error> {
        // A single party passes without a mark.
        if self.barrier.1 == 1 {
            return Ok(());
        }
        let mut replication = Replication::of(&self.lock);
        while !replication.confirms().await? {
            let view = self.barrier.view().await?;
            if Round::passed(&view, self.token).is_none() {
                let resource = self.lock.checked_resource()?;
                let what = "the mark of the round was lost before the replicas had it";
                return Err(self.lock.handle.unavailable(resource, what));
            }
        }
        Ok(())
    }

    /// Departs at the deadline, unless the round has passed before.
    async fn depart(mut self) -> Result<Option<bool>, Error> {
        let session = &self.barrier.0.handle.session;
        while !self.replace_lease(DEPARTURE, None).await? {
            // Marks use the whole capacity.
            let view = self.barrier.view().await?;
            self.check_held()?;
            if let Some(round) = Round::passed(&view, self.token) {
                return self.pass(&round).await.map(Some);
            }
            self.guard.run(Sleep::until(session, session.now() + self.barrier.poll_interval())).await?;
        }
        let departed = self.guard.token();
        loop {
            let view = self.barrier.view().await?;
            if let Some(round) = Round::passed_before(&view, self.token, departed) {
                return self.pass(&round).await.map(Some);
            }
            if session.is_closed() {
                return Err(self.barrier.0.handle.closed());
            }
            if !Round::is_claimed_before(&view, self.token, departed) {
                if let Err(error) = self.guard.release().await {
                    tracing::debug!(%error, "release of a party that has departed not confirmed; it is repeated");
                }
                return Ok(None);
            }
            Sleep::until(session, session.now() + DECISION_POLL_INTERVAL).await;
        }
    }
}
