//! One client's attempts and leases: a table behind one mutex, stepped by the core's machines.
//!
//! Whoever asks (a future, a guard, the driver) takes the mutex, steps a machine, and lets go before it
//! speaks to the store, since the store may deliver a push to this very table. Futures are passive: they leave
//! a waker here and look at their entry when they are woken, so they run on any executor.
//!
//! Nothing here is a queue: what an ended attempt or a dropped guard owes stays in its own entry until
//! the store has answered, or has let go by itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, LeaseTerms, LocalTime, Loss, Outcome, Owner,
    Push, Resource, Token, WaitPolicy,
};
use tokio::sync::Notify;

use super::clock;
use super::entry::{Entry, Given, News, Renewal};
use super::table::{After, Due, State};
use super::watch::Watch;
use crate::store::CallResult;
use crate::store::Inbox;

/// Everything that one client has under way.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    state: Mutex<State>,
    pub(super) sequence: Arc<AtomicU64>,
    /// Wakes the driver when it would otherwise sleep past something.
    pub(crate) alarm: Notify,
}

/// What is to be sent: about which entry, and when that was decided.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) sequence: u64,
    pub(crate) sent_at: LocalTime,
    pub(crate) command: Command,
    /// How many replicas must have it before its answer counts.
    pub(crate) replicas: u32,
}

/// The client was closed.
pub(crate) struct Closed;

/// How an attempt ended, with the store's last error where there was one.
pub(crate) type Ended = (Outcome, Option<String>);

impl Session {
    pub(crate) fn new(id: ClientId) -> Self {
        let sequence = Arc::new(AtomicU64::new(1));
        let state = State::new(id, sequence.clone());
        Self { id, state: Mutex::new(state), sequence, alarm: Notify::new() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // A panic in a machine leaves one entry half stepped at worst.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_acquisition(&self) -> Acquisition {
        Acquisition { client: self.id, sequence: self.sequence.fetch_add(1, Ordering::Relaxed) }
    }

    /// Steps one entry, settles what follows from it, and tells whom it concerns with the mutex free.
    fn step<T>(&self, sequence: u64, now: LocalTime, act: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let (result, after) = {
            let mut state = self.state();
            let result = act(state.entries.get_mut(&sequence)?);
            let mut after = After::default();
            state.settle(sequence, now, &mut after);
            (result, after)
        };
        self.tell(after);
        Some(result)
    }

    pub(super) fn tell(&self, after: After) {
        after.wakers.into_iter().for_each(Waker::wake);
        if after.is_sooner {
            self.alarm.notify_one();
        }
        for (resource, news) in after.news {
            match news {
                News::Lost(loss) => tracing::warn!(%resource, %loss, "a lease was lost"),
                News::NotRenewed(error) => tracing::warn!(%resource, error, "a lease could not be renewed"),
                News::RenewedAgain => tracing::info!(%resource, "a lease is renewed again"),
                News::NotGivenBack(error) => {
                    tracing::warn!(%resource, error, "a lease is yet to be given back");
                }
                News::GivenBack => tracing::info!(%resource, "a lease was given back at last"),
                News::LeftToRunOut => {
                    tracing::warn!(%resource, "a lease was not given back, and left to run out");
                }
            }
        }
    }

    // --- Attempts --------------------------------------------------------------------------------

    /// Enters an attempt, unless the client is closed, and says what it sends first. It is entered before
    /// anything is sent, so that no push can come too early.
    pub(crate) fn begin(
        &self,
        resource: Arc<Resource>,
        terms: LeaseTerms,
        at_least: Duration,
        command: Acquire,
        patience: Option<WaitPolicy>,
        now: LocalTime,
    ) -> Result<Option<Errand>, Closed> {
        let sequence = command.acquisition.sequence;
        let owner = command.owner.clone();
        let machine = AcquireMachine::new(command, patience, now);
        let mut entry = Box::new(Entry::new(resource, owner, terms, at_least, machine));
        let mut after = After::default();
        let errand = {
            let mut state = self.state();
            if state.is_closed {
                return Err(Closed);
            }
            let errand = entry.poll_transmit(sequence, now);
            state.entries.insert(sequence, entry);
            state.unsettled += 1;
            state.settle(sequence, now, &mut after);
            errand
        };
        self.tell(after);
        Ok(errand)
    }

    /// How an errand went. Says how the attempt stands now, which saves whoever waits for that a look.
    pub(crate) fn absorb(&self, errand: &Errand, now: LocalTime, answered: &CallResult) -> Option<Outcome> {
        self.step(errand.sequence, now, |entry| {
            entry.handle_answered(errand, now, answered);
            entry.outcome(now)
        })?
    }

    /// How a release went. Where that is the end, nobody stands for the entry any more.
    pub(crate) fn absorb_release(&self, errand: &Errand, answered: &CallResult) -> Option<Given> {
        // Only a release that failed is concerned with the time.
        let now = if answered.is_ok() { errand.sent_at } else { clock::local() };
        self.step(errand.sequence, now, |entry| {
            entry.handle_answered(errand, now, answered);
            entry.is_wanted = entry.given().is_none();
            entry.given()
        })?
    }

    /// For a future that waits for this entry.
    pub(crate) fn watch(&self, sequence: u64) -> Watch<'_> {
        Watch { session: self, sequence, key: None, retired: Vec::new() }
    }

    /// How the attempt ended, once it has.
    pub(crate) fn poll_ended(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<Ended> {
        watch.retired.clear();
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(&watch.sequence) else {
            return Poll::Ready((Outcome::Cancelled, None));
        };
        match entry.outcome {
            Some(outcome) => Poll::Ready((outcome, entry.trouble.take())),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    // --- Leases ----------------------------------------------------------------------------------

    /// Looks at a held lease; zero and a loss when it is not held any more.
    pub(crate) fn remaining(&self, sequence: u64, now: LocalTime) -> Result<Duration, Loss> {
        self.state().entries.get(&sequence).map_or(Err(Loss::Closed), |entry| entry.remaining(now))
    }

    /// Why a lease of this owner is lost that a guard still stands for; also if the owner was granted this token since.
    pub(crate) fn loss_of_owner(
        &self,
        resource: &Resource,
        owner: &Owner,
        granted: Option<Token>,
        now: LocalTime,
    ) -> Option<Loss> {
        // All of the table, which is no longer than what one client holds.
        let state = self.state();
        let mut theirs = state.entries.values().filter(|entry| {
            entry.is_wanted && entry.owner.as_ref() == Some(owner) && *entry.resource == *resource
        });
        theirs.find_map(|entry| entry.loss(now, granted))
    }

    pub(crate) fn poll_lost(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<Loss> {
        watch.retired.clear();
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(&watch.sequence) else { return Poll::Ready(Loss::Closed) };
        match entry.remaining(clock::local()) {
            Err(loss) => Poll::Ready(loss),
            Ok(_) => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Begins a renewal now, unless one is under way.
    pub(crate) fn begin_renewal(&self, sequence: u64, now: LocalTime) -> Option<Errand> {
        self.step(sequence, now, |entry| {
            entry.renew_now(now);
            entry.poll_transmit(sequence, now)
        })?
    }

    /// Nobody listens for the answer to a renewal any more.
    pub(crate) fn abandon_renewal(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| entry.abandon_renewal(now));
    }

    /// Once no renewal is under way: the last one's error, if it failed.
    pub(crate) fn poll_renewed(
        &self,
        watch: &mut Watch<'_>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Renewal>> {
        watch.retired.clear();
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(&watch.sequence) else {
            return Poll::Ready(Err(Renewal::Lost(Loss::Closed)));
        };
        match entry.renewed(clock::local()) {
            Some(renewed) => Poll::Ready(renewed),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    /// Begins to give back a lease. Says what to send for it, and whether it was lost before.
    pub(crate) fn begin_release(&self, sequence: u64, now: LocalTime) -> (Option<Errand>, Option<Loss>) {
        let began = self.step(sequence, now, |entry| {
            let loss = entry.remaining(now).err();
            entry.let_go(now);
            (entry.poll_transmit(sequence, now), loss)
        });
        began.unwrap_or((None, Some(Loss::Closed)))
    }

    /// When the longest hold of this lease is over; never without one.
    pub(crate) fn ends_at(&self, sequence: u64) -> LocalTime {
        self.state().entries.get(&sequence).map_or(LocalTime::NEVER, |entry| entry.ends_at())
    }

    /// The hold goes on from an earlier lease, and ends with it.
    pub(crate) fn end_by(&self, sequence: u64, ends_at: LocalTime, now: LocalTime) {
        self.step(sequence, now, |entry| entry.end_by(ends_at));
    }

    /// How long what was taken stays taken from now on, after its grant.
    pub(crate) fn set_at_least(&self, sequence: u64, at_least: Duration, now: LocalTime) {
        self.step(sequence, now, |entry| entry.at_least = at_least);
    }

    /// Another lease is to take the place of this one, or is not after all. Meanwhile its end is no news.
    pub(crate) fn set_replacing(&self, sequence: u64, is_replacing: bool, now: LocalTime) {
        self.step(sequence, now, |entry| entry.is_replacing = is_replacing);
    }

    /// Another lease has taken the place of this one, and nobody stands for it any more.
    pub(crate) fn replaced(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| {
            entry.is_wanted = false;
            entry.replaced(now);
        });
    }

    /// Nobody stands for this entry any more: it gives back whatever it has, and goes once that is done.
    pub(crate) fn forget(&self, sequence: u64, now: LocalTime) -> Option<Errand> {
        self.step(sequence, now, |entry| {
            entry.is_wanted = false;
            entry.let_go(now);
            entry.poll_transmit(sequence, now)
        })?
    }

    /// Leaves it to the driver to send this release.
    pub(crate) fn postpone(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry| entry.send_again(now));
    }

    /// Whether the entry was given back, once the store has answered or has let go by itself.
    pub(crate) fn poll_given(&self, watch: &mut Watch<'_>, context: &mut Context<'_>) -> Poll<Given> {
        watch.retired.clear();
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(&watch.sequence) else { return Poll::Ready(Given::Back) };
        match entry.given() {
            Some(given) => Poll::Ready(given),
            None => {
                watch.register(entry, context);
                Poll::Pending
            }
        }
    }

    // --- The whole -------------------------------------------------------------------------------

    /// Nothing begins any more, and everything is being given back.
    pub(crate) fn close(&self, now: LocalTime) {
        let mut after = After::default();
        {
            let mut state = self.state();
            if !std::mem::replace(&mut state.is_closed, true) {
                // What was left to run out before that is over.
                state.unanswered = 0;
            }
            after.is_sooner = true;
            let sequences: Vec<u64> = state.entries.keys().copied().collect();
            for sequence in sequences {
                if let Some(entry) = state.entries.get_mut(&sequence) {
                    entry.close(now);
                }
                state.settle(sequence, now, &mut after);
            }
        }
        self.tell(after);
    }

    /// Once nothing is left that the store may keep: how often that had to go without the store's word.
    pub(crate) fn poll_closed(&self, context: &mut Context<'_>) -> Poll<u64> {
        let mut state = self.state();
        if state.unsettled == 0 {
            return Poll::Ready(state.unanswered);
        }
        state.register_closer(context);
        Poll::Pending
    }

    /// Once the driver has let go of the store, which it does when the client is closed and nothing is left.
    pub(crate) fn poll_driver_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state();
        if state.is_driver_gone {
            return Poll::Ready(());
        }
        state.register_closer(context);
        Poll::Pending
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    pub(crate) fn driver_gone(&self) {
        let (closers, sleepers) = {
            let mut state = self.state();
            state.is_driver_gone = true;
            (std::mem::take(&mut state.closers), std::mem::take(&mut state.sleepers))
        };
        // Nobody is there any more who would wake them in time.
        closers.into_iter().chain(sleepers.into_values()).for_each(Waker::wake);
    }

    /// The last handle is gone: the driver ends once nothing is left to give back.
    pub(crate) fn orphan(&self) {
        self.state().is_orphaned = true;
        self.alarm.notify_one();
    }

    /// What the driver is to send now, and when it is to ask again.
    pub(crate) fn due(&self, now: LocalTime) -> Due {
        let mut after = After::default();
        let due = self.state().due(now, &mut after);
        // The driver is awake already.
        after.is_sooner = false;
        self.tell(after);
        due
    }
}

impl Inbox for Session {
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let now = clock::local();
        let entries: Vec<(u64, Arc<Resource>)> = self
            .state()
            .entries
            .iter()
            .map(|(sequence, entry)| (*sequence, entry.resource.clone()))
            .collect();
        let sequences =
            entries.into_iter().filter(|(_, resource)| concerns(resource)).map(|(sequence, _)| sequence);
        for sequence in sequences {
            self.step(sequence, now, |entry| entry.handle_reconnected(now));
        }
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        let now = clock::local();
        self.state().entries.values().filter_map(|entry| entry.ttl_at_stake(now)).min()
    }

    fn deliver(&self, push: Push) {
        let now = clock::local();
        self.step(push.acquisition.sequence, now, |entry| entry.handle_push(now, &push));
    }
}
