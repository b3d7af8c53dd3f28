//! Takes the foreign leg for a lease that is held.

use std::time::Duration;

use leasehold_core::{Failure, LocalTime};
use leasehold_store::{ForeignAnswer, ForeignCall, ForeignError, ForeignOutcome, KeyWatch, StoreError};

use super::commands::is_yes;
use super::leg::{Leg, millis};
use crate::engine::with_deadline;

/// Failed tries in a row that are repeated, by an attempt that does not wait and by one that does: a connection may have been cut
/// while it was idle.
const MAX_FAILURES: [u32; 2] = [1, 2];

/// How long an attempt that waits, and has had an answer, goes on while tries fail: the server restarts, or its replica becomes the master.
/// Half of its ttl is less if the own lease would be lost before.
const PATIENCE: Duration = Duration::from_secs(10);

/// After this time an answer is late.
const LATE: Duration = Duration::from_millis(100);

/// The limit of the time between two tries doubles with each, from the first value up to the second: if the server reports changes
/// of the key, and if it does not.
const WAITS: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];
const POLLS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(100)];

/// The tries of one attempt.
#[derive(Default)]
struct Tries {
    /// Whether there was one.
    are_repeated: bool,
    /// Whether the server has answered one.
    are_answered: bool,
    /// When the one in progress was begun.
    sent_at: Option<LocalTime>,
    /// Whether the server said to the last one that has ended that another program has the lock.
    is_busy: bool,
}

/// What a try has found.
enum Try {
    Taken,
    /// Another program has the lock, for as long as this if it does not renew it.
    Busy(Option<Duration>),
    /// Of several servers, a majority has answered but not agreed, and the others are silent.
    Undecided,
}

const OTHER_TYPE: &str = "its key has another type";

/// Whether the key is no lock of that library.
pub(crate) fn is_no_lock(error: &StoreError) -> bool {
    error.message.starts_with(OTHER_TYPE)
}

impl Leg {
    /// Takes the leg, and waits for it until the deadline; without one it does not wait. Returns false if it is busy.
    pub(crate) async fn take(
        &self,
        began_at: LocalTime,
        deadline: Option<LocalTime>,
    ) -> Result<bool, StoreError> {
        let key = self.keys.watch(&self.foreign.keys());
        let mut tries = Tries::default();
        if let Some(deadline) = deadline.filter(|deadline| self.session.now() < *deadline) {
            let waiting = async {
                let waited = self.session.now().since(began_at);
                self.yield_to_others(&key, waited, deadline).await;
                self.try_to_take(&mut tries, Some(&key)).await
            };
            if let Some(taken) = with_deadline(&self.session, Some(deadline), waiting).await {
                return taken;
            }
            // A try in progress that takes longer than usual may be the first one to a server that has stopped.
            let is_late = |sent_at: LocalTime| self.session.now().since(sent_at) > LATE;
            if tries.is_busy && !tries.sent_at.is_some_and(is_late) {
                return Ok(false);
            }
        }
        // Its own lease came as late as the deadline, or the server has not answered in time: that does not say that it is busy.
        self.try_to_take(&mut tries, None).await
    }

    /// Tries until the leg is taken, and waits for changes of this key; without one, until it is taken or found busy.
    async fn try_to_take(&self, tries: &mut Tries, key: Option<&KeyWatch>) -> Result<bool, StoreError> {
        let (mut failures, mut failing_since, mut wait) = (0, None, Duration::ZERO);
        loop {
            let is_repeated = std::mem::replace(&mut tries.are_repeated, true);
            let sent_at = self.session.now();
            tries.sent_at = Some(sent_at);
            let tried = self.try_once(is_repeated).await;
            tries.sent_at = None;
            tries.are_answered |= tried.is_ok();
            tries.is_busy = matches!(tried, Ok(Try::Busy(_)));
            let busy_for = match tried {
                Ok(Try::Taken) => return Ok(true),
                // A first `SET` with NX does not say whether the key is a lock at all.
                Ok(Try::Busy(_)) if key.is_none() && is_repeated => return Ok(false),
                Ok(Try::Busy(left)) => {
                    (failures, failing_since) = (0, None);
                    self.yields.record_yield(&self.foreign, true);
                    left
                }
                Ok(Try::Undecided) if key.is_none() && is_repeated => {
                    return Err(ForeignError::Undecided.into());
                }
                Ok(Try::Undecided) => {
                    (failures, failing_since) = (0, None);
                    None
                }
                Err(error) => {
                    let since = *failing_since.get_or_insert(sent_at);
                    let is_patient = key.is_some() && tries.are_answered;
                    let is_over = if is_patient {
                        self.session.now().since(since) >= PATIENCE.min(self.ttl / 2)
                    } else {
                        failures == MAX_FAILURES[usize::from(key.is_some())]
                    };
                    if is_over || is_final(&error) {
                        return Err(error);
                    }
                    failures += 1;
                    None
                }
            };
            let Some(key) = key.filter(|_| is_repeated) else {
                // The next try also reads the holder, and asks for word of changes.
                continue;
            };
            // Several programs that vote may each have a part of the servers, and no change of a key shows when all have given up.
            let is_pushed = self.keys.is_tracking() && self.foreign.servers.is_none();
            // A program that takes the lock again as soon as it has released it is faster than the word of its release. A try at a
            // random moment may find the lock free between the two.
            let [first, longest] = if is_pushed { WAITS } else { POLLS };
            let most = wait.clamp(first, longest);
            let limit =
                if is_pushed { self.random_part(most) } else { most / 2 + self.random_part(most / 2) };
            wait = most * 2;
            let pause = busy_for.map_or(limit, |left| limit.min(left + Duration::from_millis(1)));
            let changed = with_deadline(&self.session, Some(self.session.now() + pause), key.changed());
            if changed.await.is_some() {
                wait = Duration::ZERO;
            }
        }
    }

    /// Sends the command once. A repeated one also finds a leg that an earlier command without an answer has taken.
    async fn try_once(&self, is_repeated: bool) -> Result<Try, StoreError> {
        let sent_at = self.session.now();
        let ttl = self.begin_take(sent_at);
        let holder = self.holders.current();
        let given_up = if is_repeated { self.holders.adoptable() } else { Vec::new() };
        let mut calls = Vec::new();
        if is_repeated {
            let left = ForeignCall::command(["PTTL", self.foreign.key()]);
            let holds = |holder: &String| self.foreign.holds(holder);
            calls.extend([ForeignCall::Track, holds(&holder), left]);
            calls.extend(given_up.iter().map(holds));
        }
        calls.push(self.foreign.take(&holder, millis(ttl), self.own.token));
        let unanswered = Unanswered { leg: self, holder: &holder, sent_at };
        let ForeignOutcome { mut answers, is_complete } = self.keys.run(calls).await?;
        std::mem::forget(unanswered);
        self.end_take();
        let is_decided = match answers.pop().unwrap_or(Ok(ForeignAnswer::Nil)) {
            Ok(taken) if is_yes(&taken) => {
                self.confirm(sent_at, ttl, &taken);
                return Ok(Try::Taken);
            }
            Ok(_) => true,
            Err(ForeignError::Undecided) => false,
            Err(error) => return Err(explain(error)),
        };
        let mut answers = answers.into_iter().skip(1);
        let mut is_held = |holder: &String| match answers.next() {
            Some(Ok(held)) => Ok(self.foreign.is_holder(holder, &held)),
            Some(Err(ForeignError::Undecided)) | None => Ok(false),
            Some(Err(error)) => Err(explain(error)),
        };
        let is_taken = is_held(&holder)?;
        let left = match answers.next() {
            Some(Ok(ForeignAnswer::Int(left))) => u64::try_from(left).ok().map(Duration::from_millis),
            _ => None,
        };
        let mut has_taken = if is_taken { Some(&holder) } else { None };
        for (earlier, answer) in given_up.iter().zip(answers) {
            if answer.is_ok_and(|held| self.foreign.is_holder(earlier, &held)) {
                has_taken = Some(earlier);
            }
        }
        if let Some(holder) = has_taken {
            self.holders.adopt(holder);
            if self.renew().await? {
                return Ok(Try::Taken);
            }
        }
        if self.foreign.servers.is_some() {
            // A minority may have granted it. An error leaves it there until it expires.
            let releases = self.releases();
            self.note_released(sent_at);
            let unreleased = Unreleased { leg: self, sent_at };
            let released = self.keys.run(releases).await;
            if is_complete && released.is_ok_and(|outcome| outcome.is_complete) {
                self.holders.settle(&holder);
                std::mem::forget(unreleased);
            }
        }
        Ok(if is_decided { Try::Busy(left) } else { Try::Undecided })
    }

    /// At random between nothing and all of it, so that clients do not poll in step.
    fn random_part(&self, time: Duration) -> Duration {
        // Without random numbers the middle will do.
        let random = self.keys.random().map_or(128, |[first, ..]| first);
        time * u32::from(random) / 256
    }

    /// Leaves the foreign lock to other programs for a bounded time, if they are due: for half of the time until the deadline at most.
    async fn yield_to_others(&self, key: &KeyWatch, waited: Duration, deadline: LocalTime) {
        let Some(yield_time) = self.yields.yield_time(&self.foreign, waited) else { return };
        // Noted before, because this future may be dropped: the next attempt does not yield again.
        self.yields.record_yield(&self.foreign, false);
        let yield_time = yield_time.min(deadline.since(self.session.now()) / 2);
        let exists = ForeignCall::command(["EXISTS", self.foreign.key()]);
        let mut calls = vec![ForeignCall::Track, exists];
        calls.extend(self.foreign.count_waiters());
        // If the server does not answer, the next command says so.
        let Ok(ForeignOutcome { answers, .. }) = self.keys.run(calls).await else { return };
        let is_taken = matches!(answers.get(1), Some(Ok(ForeignAnswer::Int(1))));
        let has_no_waiters = matches!(answers.get(2), Some(Ok(answer)) if subscribers(answer) == Some(0));
        let until = self.session.now() + yield_time;
        let was_taken = is_taken
            || !has_no_waiters && with_deadline(&self.session, Some(until), key.changed()).await.is_some();
        if was_taken {
            self.yields.record_yield(&self.foreign, true);
        }
    }
}

/// A command to take a leg whose answer has not come. Dropped, the command may still arrive.
struct Unanswered<'a> {
    leg: &'a Leg,
    holder: &'a str,
    sent_at: LocalTime,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.leg.session.is_forked() {
            return;
        }
        self.leg.note_unanswered(self.holder, self.sent_at);
        self.leg.end_take();
    }
}

/// A leg that was not taken, until every server has answered the command to take it and its release. Dropped, one of them may still
/// arrive.
struct Unreleased<'a> {
    leg: &'a Leg,
    sent_at: LocalTime,
}

impl Drop for Unreleased<'_> {
    fn drop(&mut self) {
        if self.leg.session.is_forked() {
            return;
        }
        self.leg.note_late(self.sent_at);
    }
}

/// The number in an answer to PUBSUB NUMSUB for one channel.
fn subscribers(answer: &ForeignAnswer) -> Option<i64> {
    match answer {
        ForeignAnswer::List(parts) => match parts.get(1)? {
            ForeignAnswer::Int(number) => Some(*number),
            _ => None,
        },
        _ => None,
    }
}

fn explain(error: ForeignError) -> StoreError {
    match error {
        ForeignError::OtherType(error) => {
            let message = format!("{OTHER_TYPE}: it is no lock of this library");
            error.known_as(Failure::Unknown).saying(message)
        }
        error => error.into(),
    }
}

/// Whether trying again can't help.
fn is_final(error: &StoreError) -> bool {
    is_no_lock(error) || matches!(error.failure, Failure::Permanent(_))
}
