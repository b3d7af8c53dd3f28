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

use super::attempts::{NodeAttempt, NodeRequests};
use super::{Quorum, STRAGGLER_GRACE, answer};
use crate::engine::clock;
use crate::store::{BoxFuture, CallResult, StoreError};

/// The pauses between tries: random, up to the first, and then up to twice as much, and so on.
const FIRST_BACKOFF: Duration = Duration::from_millis(4);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

/// So often somebody who does not wait asks while some nodes are free: others may be late with a release, or have been asked
/// by somebody else at the same time.
const MAX_IMMEDIATE_TRIES: u32 = 3;

/// Whoever is told that nodes abstain, and for how long, looks again a little later than that.
const ABSTAIN_MARGIN: Duration = Duration::from_millis(5);

/// For so much longer it counts as the nodes' youth if there is no quorum: what failed for that is given back first.
const RESTART_GRACE_MEMORY: Duration = Duration::from_secs(5);

/// As long as a node remembers a lock that nobody uses: with a clock that is further ahead than this it does not vote.
const FAR_AHEAD: Duration = Duration::from_secs(3_600);

/// What a node answered to what it was asked.
pub(super) enum NodeResponse {
    Voted(CallResult),
    Propagated(CallResult),
}

type PendingResponses = FuturesUnordered<BoxFuture<(usize, NodeResponse)>>;

impl Quorum {
    pub(super) async fn acquire(
        self: &Arc<Self>,
        resource: Arc<Resource>,
        request: Arc<Acquire>,
    ) -> CallResult {
        let attempt = request.acquisition;
        let Some((acquisition, requests)) = self.attempts.ask(&resource, &request) else {
            return answer(clock::local(), Reply::Cancelled);
        };
        let sent_at = clock::local();
        let command = Acquire { acquisition, reserve: 0, ..(*request).clone() };
        let command = Command::from(command);
        let floor = if self.is_fenced { self.floor(sent_at) } else { None };
        let responses = PendingResponses::new();
        let mut round = Round::new(self.nodes.len(), self.is_fenced, sent_at);
        let mut node_errors = vec![None; self.nodes.len()];
        let duplicate_nodes = self.duplicate_nodes();
        for (node, duplicate) in duplicate_nodes.into_iter().enumerate() {
            if duplicate.is_some() {
                requests[node].answered(false);
                round.handle_vote(node, Vote::Failed);
                node_errors[node] = duplicate;
                continue;
            }
            let call = (resource.clone(), command.clone());
            responses.push(self.request_vote(node, requests.clone(), call, floor));
        }
        let mut collector = VoteCollector {
            quorum: self.clone(),
            resource: resource.clone(),
            acquisition,
            ttl: request.ttl,
            round,
            responses,
            node_errors,
            repoll_hints: Vec::new(),
        };
        let verdict = collector.collect().await;
        let retries = request.wait.is_some();
        if verdict == Verdict::Busy && !retries {
            collector.await_stragglers().await;
        }
        let time_until_free = collector.time_until_free();
        let VoteCollector { round, responses, node_errors, .. } = collector;
        // What comes late is kept if this is granted, so that the lease does not have to stand on a bare quorum; otherwise it
        // says whether there is something to give back.
        drain(responses);
        let past = self.attempts.past(resource, request.clone(), acquisition, requests);
        let now = clock::local();
        if retries || matches!(verdict, Verdict::Busy | Verdict::Split) {
            self.note_contended(&past.resource);
        }
        match verdict {
            Verdict::Granted(grant) => {
                if !self.attempts.granted(attempt, acquisition, grant.tokens.first) {
                    return self.superseded(past, &round).await;
                }
                answer(now, Reply::Granted(grant))
            }
            Verdict::Busy | Verdict::Split
                if retries && self.keeps_waiting(attempt, acquisition, &round, now) =>
            {
                queued(now, if is_partial(&round) { Some(backoff(0)) } else { time_until_free })
            }
            Verdict::Busy | Verdict::Split => {
                let retries_now =
                    !retries && is_partial(&round) && !self.attempts.has_tried(attempt, MAX_IMMEDIATE_TRIES);
                let Some(known) = self.attempts.failed(attempt, acquisition, retries || retries_now) else {
                    return self.superseded(past, &round).await;
                };
                self.release_at_nodes(&known, &round).await;
                if retries {
                    return queued(clock::local(), Some(backoff(known.tries)));
                }
                if !retries_now {
                    return match verdict {
                        Verdict::Busy => answer(now, Reply::Busy),
                        _ => Err(StoreError::new(Failure::NotSent, self.split_failure(&round, &node_errors))),
                    };
                }
                sleep(backoff(known.tries)).await;
                Box::pin(self.acquire(past.resource, request)).await
            }
            Verdict::NoQuorum | Verdict::TooLate => {
                let time_to_quorum = self.time_to_quorum(&round, now).filter(|_| retries);
                let Some(known) = self.attempts.failed(attempt, acquisition, time_to_quorum.is_some()) else {
                    return self.superseded(past, &round).await;
                };
                self.release_at_nodes(&known, &round).await;
                if let Some(time_to_quorum) = time_to_quorum {
                    return queued(clock::local(), Some(time_to_quorum));
                }
                let message = match verdict {
                    Verdict::TooLate => {
                        "a quorum granted it, but so late that the lease may be over".to_owned()
                    }
                    _ => self.quorum_failure(&round, &node_errors),
                };
                Err(StoreError::new(Failure::NotSent, message))
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
        let since = self.attempts.partial(attempt, acquisition, is_partial(round), now);
        since.is_some_and(|since| now.since(since) < backoff(3) + 4 * self.round_trip())
    }

    pub(super) fn request_vote(
        self: &Arc<Self>,
        node: usize,
        requests: Arc<[NodeRequests]>,
        (resource, command): (Arc<Resource>, Command),
        floor: Option<Token>,
    ) -> BoxFuture<(usize, NodeResponse)> {
        let quorum = self.clone();
        let usual = self.round_trip();
        Box::pin(async move {
            let to = quorum.nodes[node].clone();
            let answered = match to.lags(usual) {
                Some(error) => Err(error),
                None => to.call_one(resource, command, floor).await,
            };
            if !is_unknown(&answered) {
                let has = matches!(&answered, Ok(answer) if keeps_something(&answer.reply));
                requests[node].answered(has);
            }
            let counts = answered.is_err() || !quorum.is_far_ahead(node);
            (node, NodeResponse::Voted(if counts { answered } else { Err(far_ahead()) }))
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
    fn time_to_quorum(&self, round: &Round, now: LocalTime) -> Option<Duration> {
        let time_to_quorum = round.time_to_quorum()? + ABSTAIN_MARGIN;
        self.restart_grace_until
            .store((now + time_to_quorum + RESTART_GRACE_MEMORY).as_micros(), Ordering::Relaxed);
        Some(time_to_quorum)
    }

    /// The try came to an end while this round of it was under way: by the caller, or by another round where this one was
    /// taken for lost. What it was granted is given back.
    async fn superseded(self: &Arc<Self>, past: NodeAttempt, round: &Round) -> CallResult {
        self.release_at_nodes(&past, round).await;
        if self.attempts.is_cancelled(past.request.acquisition) {
            return answer(clock::local(), Reply::Cancelled);
        }
        let message = "it was asked for once more meanwhile".to_owned();
        Err(StoreError::new(Failure::Unknown, message))
    }

    /// Gives back a try that failed, at all nodes that may have granted it. Those that did are waited for, since whoever
    /// tries next is not to meet it there.
    async fn release_at_nodes(self: &Arc<Self>, known: &NodeAttempt, round: &Round) {
        let (mut granted, unheard) = (FuturesUnordered::new(), FuturesUnordered::new());
        for (node, vote) in round.votes().iter().enumerate() {
            let is_granted = matches!(vote, Some(Vote::Yes(_)));
            let counts = known.requests[node].get();
            // One that waits has a place in the queue there; and one that granted it may not have confirmed the token.
            let keeps_something =
                known.request.wait.is_some() || counts.keeps_something || counts.unanswered > 0;
            if is_granted || keeps_something {
                let giving = self.clone().release_node(node, known, Duration::ZERO, !is_granted);
                if is_granted { granted.push(giving) } else { unheard.push(giving) }
            }
        }
        if !unheard.is_empty() {
            // Not by the caller's runtime, which may end, or stand still, before it comes to that.
            self.runtime.spawn(unheard.for_each(|_| async {}));
        }
        let limit = sleep(self.node_timeout(known.request.ttl));
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
struct VoteCollector {
    quorum: Arc<Quorum>,
    resource: Arc<Resource>,
    acquisition: Acquisition,
    ttl: Duration,
    round: Round,
    responses: PendingResponses,
    /// Why a node did not vote.
    node_errors: Vec<Option<String>>,
    /// In how long nodes want to be asked again, since what they have granted will have ended then. They tell it to the first
    /// in their queue.
    repoll_hints: Vec<Duration>,
}

impl VoteCollector {
    async fn collect(&mut self) -> Verdict {
        let limit = self.quorum.node_timeout(self.ttl);
        let mut late = pin!(sleep(limit));
        loop {
            if let Some((nodes, tokens)) = self.round.poll_propagate() {
                for node in nodes {
                    self.propagate(node, tokens.last);
                }
                late.as_mut().reset(tokio::time::Instant::now() + limit);
            }
            if let Some(verdict) = self.round.poll_verdict(clock::local()) {
                return verdict;
            }
            tokio::select! {
                biased;
                Some((node, heard)) = self.responses.next() => self.handle_response(node, heard),
                () = &mut late => self.round.handle_timeout(),
            }
        }
    }

    /// In how long a quorum may be free, as far as is known: nobody tells a waiter that a lease has ended.
    fn time_until_free(&mut self) -> Option<Duration> {
        self.repoll_hints.sort_unstable();
        self.repoll_hints.get(quorum_of(self.quorum.nodes.len()) - 1).or(self.repoll_hints.last()).copied()
    }

    /// Whether any node is free matters to whoever does not wait.
    async fn await_stragglers(&mut self) {
        let all = async {
            while let Some((node, heard)) = self.responses.next().await {
                self.handle_response(node, heard);
            }
        };
        let _ = timeout(STRAGGLER_GRACE, all).await;
    }

    fn propagate(&self, node: usize, token: Token) {
        let renew = Renew { acquisition: self.acquisition, ttl: self.ttl, reserve: 0 };
        let command = Command::Renew(renew);
        let call = self.quorum.nodes[node].clone().call_one(self.resource.clone(), command, Some(token));
        self.responses.push(Box::pin(async move { (node, NodeResponse::Propagated(call.await)) }));
    }

    fn handle_response(&mut self, node: usize, heard: NodeResponse) {
        match heard {
            NodeResponse::Voted(answered) => {
                let vote = answered.as_ref().map_or(Vote::Failed, Vote::of);
                if let Ok(Answer { at, reply: Reply::Queued(queued) }) = &answered {
                    self.repoll_hints.push(queued.repoll_at.since(*at));
                }
                self.node_errors[node] = match &answered {
                    Err(error) => Some(error.message.clone()),
                    Ok(answer) if vote == Vote::Failed => Some(format!("answered {:?}", answer.reply)),
                    Ok(_) => None,
                };
                self.round.handle_vote(node, vote);
            }
            NodeResponse::Propagated(answered) => {
                let is_known = matches!(answered, Ok(Answer { reply: Reply::Renewed { .. }, .. }));
                self.round.handle_propagated(node, is_known);
            }
        }
    }
}

/// Waits for what is still to come, with nobody waiting for that.
fn drain(mut responses: PendingResponses) {
    if !responses.is_empty() {
        tokio::spawn(async move { while responses.next().await.is_some() {} });
    }
}

/// Whether the node keeps something for an attempt that it answered so.
fn keeps_something(reply: &Reply) -> bool {
    matches!(reply, Reply::Granted(_) | Reply::Queued(_))
}

/// Whether some node has granted it.
fn is_partial(round: &Round) -> bool {
    round.votes().iter().any(|vote| matches!(vote, Some(Vote::Yes(_))))
}

fn far_ahead() -> StoreError {
    let message =
        format!("does not vote, since its clock is more than {FAR_AHEAD:?} ahead of the other nodes'");
    StoreError::new(Failure::NotSent, message)
}

fn is_unknown(answered: &CallResult) -> bool {
    answered.as_ref().is_err_and(|error| error.failure == Failure::Unknown)
}

/// It waits, and re-checks after this pause or on a push. A quorum has no queue of its own, so each attempt polls as a head does.
fn queued(now: LocalTime, pause: Option<Duration>) -> CallResult {
    let repoll_at = pause.map_or(StoreTime::NEVER, |pause| StoreTime::from_micros(now.as_micros()) + pause);
    answer(now, Reply::Queued(Queued { is_head: true, repoll_at }))
}

/// Random, so that those who got in each other's way do not meet again.
fn backoff(tries: u32) -> Duration {
    let longest = FIRST_BACKOFF.saturating_mul(1 << tries.min(10)).min(MAX_BACKOFF);
    let random = getrandom::u32().unwrap_or(u32::MAX / 2);
    longest / 4 + (longest * 3 / 4).mul_f64(f64::from(random) / f64::from(u32::MAX))
}
