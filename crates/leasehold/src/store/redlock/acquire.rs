//! Taking a lease at all nodes.

use std::cmp::Reverse;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{
    Acquire, Acquisition, Answer, Command, Failure, LocalTime, Queued, Renew, Reply, Resource, Round,
    StoreTime, Token, Verdict, Vote, quorum_of,
};
use tokio::time::{sleep, timeout};

use super::attempts::{Asked, Try};
use super::{LATE_BY, Quorum, answer};
use crate::engine::clock;
use crate::store::{Answered, Pending, StoreError};

/// The pauses between tries: random, up to the first, and then up to twice as much, and so on.
const FIRST_PAUSE: Duration = Duration::from_millis(4);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// So often somebody who does not wait asks while some nodes are free: others may be late with a release, or have been asked
/// by somebody else at the same time.
const TRIES_AT_ONCE: u32 = 3;

/// Whoever is told that nodes abstain, and for how long, looks again a little later than that.
const ABSTAINED: Duration = Duration::from_millis(5);

/// For so much longer it counts as the nodes' youth if there is no quorum: what failed for that is given back first.
const YOUTH_REMEMBERED: Duration = Duration::from_secs(5);

/// As long as a node remembers a lock that nobody uses: with a clock that is further ahead than this it does not vote.
const FAR_AHEAD: Duration = Duration::from_secs(3_600);

/// What a node answered to what it was asked.
pub(super) enum Heard {
    Voted(Answered),
    Told(Answered),
}

type Hearing = FuturesUnordered<Pending<(usize, Heard)>>;

impl Quorum {
    pub(super) async fn acquire(self: &Arc<Self>, resource: Arc<Resource>, wanted: Arc<Acquire>) -> Answered {
        let attempt = wanted.acquisition;
        let Some((acquisition, asked)) = self.leases.ask(&resource, &wanted) else {
            return answer(clock::local(), Reply::Cancelled);
        };
        let sent_at = clock::local();
        let command = Acquire { acquisition, reserve: 0, ..(*wanted).clone() };
        let command = Command::from(command);
        let floor = if self.is_fenced { self.floor(sent_at) } else { None };
        let hearing = Hearing::new();
        let mut round = Round::new(self.nodes.len(), self.is_fenced, sent_at);
        let mut said = vec![None; self.nodes.len()];
        let doubles = self.doubles();
        for (node, double) in doubles.into_iter().enumerate() {
            if double.is_some() {
                asked[node].answered(false);
                round.handle_vote(node, Vote::Failed);
                said[node] = double;
                continue;
            }
            let call = (resource.clone(), command.clone());
            hearing.push(self.ask_for_vote(node, asked.clone(), call, floor));
        }
        let mut asking = Asking {
            quorum: self.clone(),
            resource: resource.clone(),
            acquisition,
            ttl: wanted.ttl,
            round,
            hearing,
            said,
            looks: Vec::new(),
        };
        let verdict = asking.until_decided().await;
        let goes_on = wanted.wait.is_some();
        if verdict == Verdict::Busy && !goes_on {
            asking.hear_the_late().await;
        }
        let free_in = asking.free_in();
        let Asking { round, hearing, said, .. } = asking;
        // What comes late is kept if this is granted, so that the lease does not have to stand on a bare quorum; otherwise it
        // says whether there is something to give back.
        hear_out(hearing);
        let past = self.leases.past(resource, wanted.clone(), acquisition, asked);
        let now = clock::local();
        if goes_on || matches!(verdict, Verdict::Busy | Verdict::Split) {
            self.note_contended(&past.resource);
        }
        match verdict {
            Verdict::Granted(grant) => {
                if !self.leases.granted(attempt, acquisition, grant.tokens.first) {
                    return self.overtaken(past, &round).await;
                }
                answer(now, Reply::Granted(grant))
            }
            Verdict::Busy | Verdict::Split
                if goes_on && self.keeps_waiting(attempt, acquisition, &round, now) =>
            {
                queued(now, if is_partial(&round) { Some(pause(0)) } else { free_in })
            }
            Verdict::Busy | Verdict::Split => {
                let tries_again =
                    !goes_on && is_partial(&round) && !self.leases.has_tried(attempt, TRIES_AT_ONCE);
                let Some(known) = self.leases.failed(attempt, acquisition, goes_on || tries_again) else {
                    return self.overtaken(past, &round).await;
                };
                self.give_back_all(&known, &round).await;
                if goes_on {
                    return queued(clock::local(), Some(pause(known.tries)));
                }
                if !tries_again {
                    return match verdict {
                        Verdict::Busy => answer(now, Reply::Busy),
                        _ => {
                            Err(StoreError { failure: Failure::NotSent, message: self.split(&round, &said) })
                        }
                    };
                }
                sleep(pause(known.tries)).await;
                Box::pin(self.acquire(past.resource, wanted)).await
            }
            Verdict::NoQuorum | Verdict::TooLate => {
                let votes_in = self.votes_in(&round, now).filter(|_| goes_on);
                let Some(known) = self.leases.failed(attempt, acquisition, votes_in.is_some()) else {
                    return self.overtaken(past, &round).await;
                };
                self.give_back_all(&known, &round).await;
                if let Some(votes_in) = votes_in {
                    return queued(clock::local(), Some(votes_in));
                }
                let message = match verdict {
                    Verdict::TooLate => {
                        "a quorum granted it, but so late that the lease may be over".to_owned()
                    }
                    _ => self.no_quorum(&round, &said),
                };
                Err(StoreError { failure: Failure::NotSent, message })
            }
        }
    }

    /// Whether an attempt stays in the nodes' queues: with what it has been granted there, if the rest may be under way, as
    /// when somebody gives the lease back at all nodes. Otherwise others wait for it as it waits for them.
    fn keeps_waiting(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        round: &Round,
        now: LocalTime,
    ) -> bool {
        let since = self.leases.partial(attempt, acquisition, is_partial(round), now);
        since.is_some_and(|since| now.since(since) < pause(3) + 4 * self.round_trip())
    }

    pub(super) fn ask_for_vote(
        self: &Arc<Self>,
        node: usize,
        asked: Arc<[Asked]>,
        (resource, command): (Arc<Resource>, Command),
        floor: Option<Token>,
    ) -> Pending<(usize, Heard)> {
        let quorum = self.clone();
        let usual = self.round_trip();
        Box::pin(async move {
            let to = quorum.nodes[node].clone();
            let answered = match to.lags(usual) {
                Some(error) => Err(error),
                None => to.call_one(resource, command, floor).await,
            };
            if !is_unknown(&answered) {
                let has = matches!(&answered, Ok(answer) if has_something(&answer.reply));
                asked[node].answered(has);
            }
            let counts = answered.is_err() || !quorum.is_far_ahead(node);
            (node, Heard::Voted(if counts { answered } else { Err(far_ahead()) }))
        })
    }

    /// A token that is likely to be higher than what any node would give by itself, so that all give the same one, and
    /// nobody has to be told what another one gave.
    fn floor(&self, now: LocalTime) -> Option<Token> {
        let latest = self.majority_clock(now)? + FAR_AHEAD;
        let clocks =
            self.nodes.iter().filter_map(|node| node.clock(now)).filter(|clock| *clock <= latest).max()?;
        let way = self.nodes.iter().map(|node| node.round_trip()).max()?.min(Duration::from_millis(20));
        Token::new((clocks + 2 * way + Duration::from_micros(500)).as_micros())
    }

    /// Whether the node's clock, by its last answer, is so far ahead of the others' that its vote does not count. The tokens that
    /// it gives follow that clock, and each node that came to know one would remember the lock until its own clock is there.
    fn is_far_ahead(&self, node: usize) -> bool {
        let now = clock::local();
        let (Some(majority), Some(own)) = (self.majority_clock(now), self.nodes[node].clock(now)) else {
            return false;
        };
        own > majority + FAR_AHEAD
    }

    /// So far at least a quorum of the clocks are, where that many are known.
    fn majority_clock(&self, now: LocalTime) -> Option<StoreTime> {
        let mut clocks: Vec<StoreTime> = self.nodes.iter().filter_map(|node| node.clock(now)).collect();
        clocks.sort_unstable_by_key(|clock| Reverse(*clock));
        clocks.get(quorum_of(self.nodes.len()) - 1).copied()
    }

    /// In how long so many nodes vote again that there may be a quorum, if it is that which is missing.
    fn votes_in(&self, round: &Round, now: LocalTime) -> Option<Duration> {
        let votes_in = round.votes_in()? + ABSTAINED;
        self.young_until.store((now + votes_in + YOUTH_REMEMBERED).as_micros(), Ordering::Relaxed);
        Some(votes_in)
    }

    /// The try came to an end while this round of it was under way: by the caller, or by another round where this one was
    /// taken for lost. What it was granted is given back.
    async fn overtaken(self: &Arc<Self>, past: Try, round: &Round) -> Answered {
        self.give_back_all(&past, round).await;
        if self.leases.is_cancelled(past.wanted.acquisition) {
            return answer(clock::local(), Reply::Cancelled);
        }
        let message = "it was asked for once more meanwhile".to_owned();
        Err(StoreError { failure: Failure::Unknown, message })
    }

    /// Gives back a try that failed, at all nodes that may have granted it. Those that did are waited for, since whoever
    /// tries next is not to meet it there.
    async fn give_back_all(self: &Arc<Self>, known: &Try, round: &Round) {
        let (mut granted, unheard) = (FuturesUnordered::new(), FuturesUnordered::new());
        for (node, vote) in round.votes().iter().enumerate() {
            let is_granted = matches!(vote, Some(Vote::Yes(_)));
            let asks = known.asked[node].get();
            // One that waits has a place in the queue there; and one that granted it may not have confirmed the token.
            let has_something = known.wanted.wait.is_some() || asks.has_something || asks.unanswered > 0;
            if is_granted || has_something {
                let giving = self.clone().give_back(node, known, Duration::ZERO, !is_granted);
                if is_granted { granted.push(giving) } else { unheard.push(giving) }
            }
        }
        if !unheard.is_empty() {
            // Not by the caller's runtime, which may end, or stand still, before it comes to that.
            self.runtime.spawn(unheard.for_each(|_| async {}));
        }
        let limit = sleep(self.limit(known.wanted.ttl));
        let all = async { while granted.next().await.is_some() {} };
        tokio::select! {
            () = all => {}
            () = limit => {}
        }
        if !granted.is_empty() {
            tokio::spawn(granted.for_each(|_| async {}));
        }
    }
}

/// One try, while nodes are still heard.
struct Asking {
    quorum: Arc<Quorum>,
    resource: Arc<Resource>,
    acquisition: Acquisition,
    ttl: Duration,
    round: Round,
    hearing: Hearing,
    /// Why a node did not vote.
    said: Vec<Option<String>>,
    /// In how long nodes want to be asked again, since what they have granted will have ended then. They tell it to the first
    /// in their queue.
    looks: Vec<Duration>,
}

impl Asking {
    async fn until_decided(&mut self) -> Verdict {
        let limit = self.quorum.limit(self.ttl);
        let mut late = pin!(sleep(limit));
        loop {
            if let Some((nodes, tokens)) = self.round.poll_tell() {
                for node in nodes {
                    self.tell(node, tokens.last);
                }
                late.as_mut().reset(tokio::time::Instant::now() + limit);
            }
            if let Some(verdict) = self.round.poll_verdict(clock::local()) {
                return verdict;
            }
            tokio::select! {
                biased;
                Some((node, heard)) = self.hearing.next() => self.hear(node, heard),
                () = &mut late => self.round.handle_timeout(),
            }
        }
    }

    /// In how long a quorum may be free, as far as is known: nobody tells a waiter that a lease has ended.
    fn free_in(&mut self) -> Option<Duration> {
        self.looks.sort_unstable();
        self.looks.get(quorum_of(self.quorum.nodes.len()) - 1).or(self.looks.last()).copied()
    }

    /// Whether any node is free matters to whoever does not wait.
    async fn hear_the_late(&mut self) {
        let all = async {
            while let Some((node, heard)) = self.hearing.next().await {
                self.hear(node, heard);
            }
        };
        let _ = timeout(LATE_BY, all).await;
    }

    fn tell(&self, node: usize, token: Token) {
        let renew = Renew { acquisition: self.acquisition, ttl: self.ttl, reserve: 0 };
        let command = Command::Renew(renew);
        let call = self.quorum.nodes[node].clone().call_one(self.resource.clone(), command, Some(token));
        self.hearing.push(Box::pin(async move { (node, Heard::Told(call.await)) }));
    }

    fn hear(&mut self, node: usize, heard: Heard) {
        match heard {
            Heard::Voted(answered) => {
                let vote = answered.as_ref().map_or(Vote::Failed, Vote::of);
                if let Ok(Answer { at, reply: Reply::Queued(queued) }) = &answered {
                    self.looks.push(queued.look_again_at.since(*at));
                }
                self.said[node] = match &answered {
                    Err(error) => Some(error.message.clone()),
                    Ok(answer) if vote == Vote::Failed => Some(format!("answered {:?}", answer.reply)),
                    Ok(_) => None,
                };
                self.round.handle_vote(node, vote);
            }
            Heard::Told(answered) => {
                let is_known = matches!(answered, Ok(Answer { reply: Reply::Renewed { .. }, .. }));
                self.round.handle_told(node, is_known);
            }
        }
    }
}

/// Waits for what is still to come, with nobody waiting for that.
fn hear_out(mut hearing: Hearing) {
    if !hearing.is_empty() {
        tokio::spawn(async move { while hearing.next().await.is_some() {} });
    }
}

/// Whether the node keeps something for an attempt that it answered so.
fn has_something(reply: &Reply) -> bool {
    matches!(reply, Reply::Granted(_) | Reply::Queued(_))
}

/// Whether some node has granted it.
fn is_partial(round: &Round) -> bool {
    round.votes().iter().any(|vote| matches!(vote, Some(Vote::Yes(_))))
}

fn far_ahead() -> StoreError {
    let message =
        format!("does not vote, since its clock is more than {FAR_AHEAD:?} ahead of the other nodes'");
    StoreError { failure: Failure::NotSent, message }
}

fn is_unknown(answered: &Answered) -> bool {
    answered.as_ref().is_err_and(|error| error.failure == Failure::Unknown)
}

/// It waits, and looks again after this pause, or when it is told to.
fn queued(now: LocalTime, pause: Option<Duration>) -> Answered {
    let look_again_at =
        pause.map_or(StoreTime::NEVER, |pause| StoreTime::from_micros(now.as_micros()) + pause);
    answer(now, Reply::Queued(Queued { is_head: pause.is_some(), look_again_at }))
}

/// Random, so that those who got in each other's way do not meet again.
fn pause(tries: u32) -> Duration {
    let longest = FIRST_PAUSE.saturating_mul(1 << tries.min(10)).min(LONGEST_PAUSE);
    let random = getrandom::u32().unwrap_or(u32::MAX / 2);
    longest / 4 + (longest * 3 / 4).mul_f64(f64::from(random) / f64::from(u32::MAX))
}
