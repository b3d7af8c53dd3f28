//! Acquires a lease at all nodes.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{
    Acquire, Answer, Command, Effect, Failure, LocalTime, Queued, Reply, Resource, Round, StoreTime, Token,
    Verdict, Vote, quorum_of,
};
use leasehold_redis_protocol::{clock_key, token_at};
use leasehold_store::{BoxFuture, Call, CallResult, MAX_VOTED_TOKEN_LEAD, StoreError};

use super::attempts::{NodeAttempt, NodeRequests, Outlived, Partial, at_node};
use super::counted_servers::CountedServers;
use super::limits::TRY_LIMIT;
use super::votes::{NodeResponse, PendingResponses, VoteCollector};
use super::{Quorum, STRAGGLER_GRACE, answer};

/// Random pauses between tries: up to the first, then up to twice as long, and so on.
const FIRST_BACKOFF: Duration = Duration::from_millis(4);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

/// Max tries of an attempt that does not wait, while some nodes are free: the other nodes may be late with a release, or have
/// granted a concurrent attempt.
const MAX_IMMEDIATE_TRIES: u32 = 3;

/// Extra time before a retry after nodes have abstained.
const ABSTAIN_MARGIN: Duration = Duration::from_millis(5);

/// How much longer a missing quorum counts as restart grace, because failed tries are released first.
const RESTART_GRACE_MEMORY: Duration = Duration::from_secs(5);

/// A node does not vote if its clock is further ahead.
const FAR_AHEAD: Duration = Duration::from_secs(3_600);

/// One try of an attempt, after its vote.
struct VotedTry {
    /// The try as it was sent.
    sent: NodeAttempt,
    verdict: Verdict,
    round: Round,
    /// Why a node did not vote.
    node_errors: Vec<Option<StoreError>>,
    /// How long until a quorum may be free, if known.
    time_until_free: Option<Duration>,
}

impl VotedTry {
    /// Whether the attempt waits for the lock.
    fn waits(&self) -> bool {
        self.sent.request.wait.is_some()
    }
}

impl Quorum {
    /// Acquires a lease at a majority of the nodes. An attempt that does not wait is tried up to [`MAX_IMMEDIATE_TRIES`] times
    /// while some node is free.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        resource: Arc<Resource>,
        request: Arc<Acquire>,
    ) -> CallResult {
        let tries_end = self.now() + TRY_LIMIT + 2 * self.round_trip();
        loop {
            let Some((acquisition, requests)) = self.attempts.ask(&resource, &request) else {
                return answer(self.now(), Reply::Cancelled);
            };
            let sent = self.attempts.past(resource.clone(), request.clone(), acquisition, requests);
            let voted = self.vote(sent).await;
            if let Some(result) = self.conclude(voted, tries_end).await {
                return result;
            }
        }
    }

    /// Asks all nodes for their votes on a try, and waits for the verdict.
    async fn vote(self: &Arc<Self>, sent: NodeAttempt) -> VotedTry {
        let sent_at = self.now();
        // The nodes push to this client, whose attempts at them have numbers of their own.
        let acquire =
            Acquire { acquisition: sent.acquisition, inbox: None, reserve: 0, ..(*sent.request).clone() };
        let waits = acquire.wait.is_some();
        let acquire = Arc::new(acquire);
        let floor = if self.options.is_fenced { self.floor(sent_at) } else { None };
        let responses = PendingResponses::new();
        let mut round = Round::new(self.nodes.len(), self.options.is_fenced, sent_at);
        let mut node_errors = vec![None; self.nodes.len()];
        for (node, duplicate) in self.duplicate_nodes().into_iter().enumerate() {
            if duplicate.is_some() {
                sent.requests[node].answered(false);
                round.handle_vote(node, Vote::Failed);
                node_errors[node] = duplicate.map(|why| StoreError::new(Failure::NotSent, why));
                continue;
            }
            let secret = at_node(acquire.secret, node);
            let own = waits.then(|| Arc::new(Acquire { secret, ..(*acquire).clone() }));
            let command = Command::Acquire(own.unwrap_or_else(|| acquire.clone()));
            let call = Call::new(sent.resource.clone(), command);
            responses.push(self.request_vote(node, sent.requests.clone(), call, floor));
        }
        let mut collector = VoteCollector {
            quorum: self.clone(),
            resource: sent.resource.clone(),
            acquire,
            requests: sent.requests.clone(),
            floor,
            round,
            responses,
            counted: CountedServers::default(),
            node_errors,
            repoll_hints: Vec::new(),
        };
        let verdict = collector.collect().await;
        if verdict == Verdict::Busy && sent.request.wait.is_none() {
            collector.await_stragglers().await;
        }
        let time_until_free = collector.time_until_free();
        let VoteCollector { round, responses, node_errors, .. } = collector;
        // Late votes still count: for a granted lease they are more than a bare quorum, and otherwise they say which nodes
        // have something to release.
        if sent.request.wait.is_some() && matches!(verdict, Verdict::Busy | Verdict::Split) {
            self.await_late_grants(&sent, responses);
        } else {
            self.runtime.drain(responses);
        }
        VotedTry { sent, verdict, round, node_errors, time_until_free }
    }

    /// Lets a waiter re-check if a node grants its try after the verdict. Without this the waiter would not know of that grant, and
    /// would keep all others from that node until it expires.
    fn await_late_grants(self: &Arc<Self>, sent: &NodeAttempt, mut responses: PendingResponses) {
        if responses.is_empty() {
            return;
        }
        let (quorum, attempt, acquisition) = (self.clone(), sent.request.acquisition, sent.acquisition);
        // On the caller's runtime, whose timers the calls may use.
        self.runtime.spawn_here(async move {
            while let Some((_, response)) = responses.next().await {
                if matches!(response, NodeResponse::Voted(Ok(Answer { reply: Reply::Granted(_), .. }))) {
                    quorum.attempts.partial(attempt, acquisition, Some(true), quorum.now());
                    quorum.request_recheck(acquisition);
                }
            }
        });
    }

    /// The attempt's result after a vote; `None` if the attempt retries at once.
    async fn conclude(self: &Arc<Self>, voted: VotedTry, tries_end: LocalTime) -> Option<CallResult> {
        let VotedTry { sent, verdict, round, time_until_free, .. } = &voted;
        let (attempt, waits, now) = (sent.request.acquisition, voted.waits(), self.now());
        if waits || matches!(verdict, Verdict::Busy | Verdict::Split) {
            self.note_contended(&sent.resource);
        }
        match *verdict {
            Verdict::Granted(grant) => {
                let is_current = self.attempts.granted(attempt, sent.acquisition, grant.tokens.first);
                Some(if is_current {
                    answer(now, Reply::Granted(grant))
                } else {
                    self.superseded(sent, round, Outlived::Ended).await
                })
            }
            Verdict::Busy | Verdict::Split if waits => match self.partial(&voted, now) {
                Partial::Nothing => Some(queued(now, *time_until_free)),
                Partial::Since(since) if self.may_complete(since, now) => {
                    Some(queued(now, Some(self.backoff(0))))
                }
                Partial::Since(_) | Partial::Ended => self.conclude_refused(&voted, tries_end).await,
            },
            Verdict::Busy | Verdict::Split => self.conclude_refused(&voted, tries_end).await,
            Verdict::NoQuorum | Verdict::TooLate => Some(self.conclude_undecided(&voted, now).await),
        }
    }

    /// After a quorum has answered and not granted the try: releases it, and tries again, now or later, or gives up.
    async fn conclude_refused(
        self: &Arc<Self>,
        voted: &VotedTry,
        tries_end: LocalTime,
    ) -> Option<CallResult> {
        let VotedTry { sent, verdict, round, node_errors, .. } = voted;
        let (attempt, waits) = (sent.request.acquisition, voted.waits());
        let tries = self.attempts.tries(attempt);
        let pause = self.backoff(tries);
        let next_ends = self.now() + pause + 2 * STRAGGLER_GRACE.max(self.round_trip());
        let retries_now =
            !waits && is_partial(round) && tries < MAX_IMMEDIATE_TRIES && next_ends <= tries_end;
        let failed = match self.attempts.failed(attempt, sent.acquisition, waits || retries_now) {
            Ok(failed) => failed,
            Err(outlived) => return Some(self.superseded(sent, round, outlived).await),
        };
        self.release_at_nodes(&failed, round).await;
        if waits {
            return Some(queued(self.now(), Some(pause)));
        }
        if retries_now {
            self.runtime.sleep(pause).await;
            return None;
        }
        Some(match verdict {
            Verdict::Busy => answer(self.now(), Reply::Busy),
            _ => {
                let failure = failure_without_quorum(node_errors);
                Err(StoreError::new(failure, self.split_failure(round, node_errors)))
            }
        })
    }

    /// After a vote without a quorum in time: releases the try. It is queued if enough nodes abstain only for a while.
    async fn conclude_undecided(self: &Arc<Self>, voted: &VotedTry, now: LocalTime) -> CallResult {
        let VotedTry { sent, verdict, round, node_errors, .. } = voted;
        let time_to_quorum = self.time_to_quorum(round, now).filter(|_| voted.waits());
        let failed =
            self.attempts.failed(sent.request.acquisition, sent.acquisition, time_to_quorum.is_some());
        let failed = match failed {
            Ok(failed) => failed,
            Err(outlived) => return self.superseded(sent, round, outlived).await,
        };
        self.release_at_nodes(&failed, round).await;
        if let Some(time_to_quorum) = time_to_quorum {
            return queued(self.now(), Some(time_to_quorum));
        }
        let (failure, message) = match verdict {
            Verdict::TooLate => {
                let what = "a quorum granted it, but so late that the lease may have expired";
                (Failure::NotSent, what.to_owned())
            }
            _ => (failure_without_quorum(node_errors), self.quorum_failure(round, node_errors)),
        };
        Err(StoreError::new(failure, message))
    }

    /// What a waiting try has after a vote without a quorum.
    fn partial(&self, voted: &VotedTry, now: LocalTime) -> Partial {
        let VotedTry { sent, round, .. } = voted;
        let refuses = |vote: &Option<Vote>| matches!(vote, Some(Vote::No | Vote::Abstains(_)));
        let is_partial =
            if is_partial(round) { Some(true) } else { round.votes().iter().all(refuses).then_some(false) };
        self.attempts.partial(sent.request.acquisition, sent.acquisition, is_partial, now)
    }

    /// Whether a try that has the grants of some nodes stays in the queues of the others. It does while their grants may be
    /// in flight, for example after a release at all nodes. Later it must release its grants, because two waiters may each hold
    /// some and wait for the other's.
    pub(super) fn may_complete(&self, since: LocalTime, now: LocalTime) -> bool {
        now.since(since) < self.backoff(3) + 4 * self.round_trip()
    }

    /// A random pause, so that attempts that collided do not collide again.
    fn backoff(&self, tries: u32) -> Duration {
        let longest = FIRST_BACKOFF.saturating_mul(1 << tries.min(10)).min(MAX_BACKOFF);
        let random = self.runtime.random();
        longest / 4 + (longest * 3 / 4).mul_f64(f64::from(random) / f64::from(u32::MAX))
    }

    pub(super) fn request_vote(
        self: &Arc<Self>,
        node: usize,
        requests: Arc<[NodeRequests]>,
        call: Call,
        floor: Option<Token>,
    ) -> BoxFuture<(usize, NodeResponse)> {
        let quorum = self.clone();
        let usual = self.round_trip();
        Box::pin(async move {
            let to = quorum.nodes[node].clone();
            let answered = match to.lags(usual) {
                Some(error) => Err(error),
                None => to.call(call, floor).await,
            };
            if !is_unknown(&answered) {
                let has = matches!(&answered, Ok(answer) if keeps_something(&answer.reply));
                requests[node].answered(has);
            }
            let answered = answered.and_then(|answer| match quorum.refuses_vote(node, &answer.reply) {
                None => Ok(answer),
                Some(error) => Err(error),
            });
            (node, NodeResponse::Voted(answered))
        })
    }

    /// A token that is likely higher than any node's own next token. All nodes then grant the same one, and need not propagate
    /// it to each other.
    fn floor(&self, now: LocalTime) -> Option<Token> {
        let latest = self.majority_clock(now)? + FAR_AHEAD;
        let clocks =
            self.nodes.iter().filter_map(|node| node.clock(now)).filter(|clock| *clock <= latest).max()?;
        let round_trip =
            self.nodes.iter().map(|node| node.round_trip()).max()?.min(Duration::from_millis(20));
        token_at(clocks + 2 * round_trip + Duration::from_micros(500))
    }

    /// Why the node's vote does not count, if its clock, by its last answer, or the token of its grant is too far ahead of the clocks of a
    /// majority. The clock of tokens of each node that learns such a token would be ahead for as long.
    fn refuses_vote(&self, node: usize, reply: &Reply) -> Option<StoreError> {
        let now = self.now();
        if let (Some(majority), Some(own)) = (self.majority_clock(now), self.nodes[node].clock(now))
            && own > majority + FAR_AHEAD
        {
            let ahead = format!("its clock is more than {FAR_AHEAD:?} ahead of the other nodes'");
            return Some(does_not_vote(&ahead));
        }
        match reply {
            Reply::Granted(grant) => self.refuses_token(grant.tokens.last),
            _ => None,
        }
    }

    /// Why no node may learn this token, if the clocks of a majority are known. They are as soon as a majority has answered.
    pub(super) fn refuses_token(&self, token: Token) -> Option<StoreError> {
        let highest = token_at(self.majority_clock(self.now())? + MAX_VOTED_TOKEN_LEAD)?;
        (token > highest).then(|| {
            let hours = MAX_VOTED_TOKEN_LEAD.as_secs() / 3_600;
            does_not_vote(&format!(
                "its tokens are more than {hours} h ahead of the clocks of a majority: if these are right, delete the key {} there",
                clock_key(None)
            ))
        })
    }

    /// The time that a quorum of the clocks have reached, if that many are known.
    fn majority_clock(&self, now: LocalTime) -> Option<StoreTime> {
        let mut clocks: Vec<StoreTime> = self.nodes.iter().filter_map(|node| node.clock(now)).collect();
        clocks.sort_unstable_by_key(|clock| Reverse(*clock));
        clocks.get(quorum_of(self.nodes.len()) - 1).copied()
    }

    /// How long until enough nodes vote again, if abstentions are the reason for the missing quorum.
    fn time_to_quorum(&self, round: &Round, now: LocalTime) -> Option<Duration> {
        let time_to_quorum = round.time_to_quorum()? + ABSTAIN_MARGIN;
        self.restart_grace_until
            .store((now + time_to_quorum + RESTART_GRACE_MEMORY).as_micros(), Ordering::Relaxed);
        Some(time_to_quorum)
    }

    /// Ends a round whose try has ended meanwhile: the caller released it, or a repeat after a lost reply decided it. Releases
    /// what this round was granted, unless the repeat was granted the same.
    async fn superseded(
        self: &Arc<Self>,
        sent: &NodeAttempt,
        round: &Round,
        outlived: Outlived,
    ) -> CallResult {
        if outlived == Outlived::Ended {
            self.release_at_nodes(sent, round).await;
        }
        if self.attempts.is_cancelled(sent.request.acquisition) {
            return answer(self.now(), Reply::Cancelled);
        }
        let message = "a later request of the same attempt has superseded it".to_owned();
        Err(StoreError::new(Failure::Unknown, message))
    }

    /// Releases a failed try at all nodes that may have granted it. Waits for the nodes that did, so that their
    /// leases do not block the next try.
    async fn release_at_nodes(self: &Arc<Self>, known: &NodeAttempt, round: &Round) {
        let (mut granted, not_granted) = (FuturesUnordered::new(), FuturesUnordered::new());
        for (node, vote) in round.votes().iter().enumerate() {
            let is_granted = matches!(vote, Some(Vote::Yes(_)));
            let counts = known.requests[node].get();
            // A waiting try has a queue entry there, and a node that granted it may not have confirmed the token.
            let keeps_something =
                known.request.wait.is_some() || counts.keeps_something || counts.unanswered > 0;
            if is_granted || keeps_something {
                let giving = self.clone().release_node(node, known, Duration::ZERO, !is_granted);
                if is_granted { granted.push(giving) } else { not_granted.push(giving) }
            }
        }
        if !not_granted.is_empty() {
            // Not on the caller's runtime, which may end or stall first.
            self.runtime.spawn(not_granted.for_each(|_| async {}));
        }
        let limit = self.runtime.sleep(self.patience().min(self.node_timeout(known.request.ttl)));
        let all = async { while granted.next().await.is_some() {} };
        tokio::select! {
            biased;
            () = all => {}
            () = limit => {}
        }
        self.runtime.drain(granted);
    }
}

/// The failure of a try that a quorum did not answer. It was released where a node may have granted it. If so many nodes refuse it that
/// the others are no quorum, so does the store.
pub(super) fn failure_without_quorum(node_errors: &[Option<StoreError>]) -> Failure {
    let count = |refuses: fn(Failure) -> bool| {
        node_errors.iter().flatten().filter(|error| refuses(error.failure)).count()
    };
    let without_quorum = node_errors.len() - quorum_of(node_errors.len()) + 1;
    if count(|failure| matches!(failure, Failure::Permanent(_))) >= without_quorum {
        Failure::Permanent(Effect::None)
    } else if count(Failure::is_refusal) >= without_quorum {
        Failure::Transient(Effect::None)
    } else {
        Failure::NotSent
    }
}

/// Whether a node with this reply keeps a lease or a queue entry for the attempt.
fn keeps_something(reply: &Reply) -> bool {
    matches!(reply, Reply::Granted(_) | Reply::Queued(_))
}

/// Whether some node has granted it.
fn is_partial(round: &Round) -> bool {
    round.votes().iter().any(|vote| matches!(vote, Some(Vote::Yes(_))))
}

fn does_not_vote(why: &str) -> StoreError {
    StoreError::new(Failure::NotSent, format!("does not vote, since {why}"))
}

fn is_unknown(answered: &CallResult) -> bool {
    answered.as_ref().is_err_and(|error| error.failure.may_have_effect())
}

/// It waits, and re-checks after this pause or on a push. A quorum has no queue of its own, so each attempt polls as a head does.
fn queued(now: LocalTime, pause: Option<Duration>) -> CallResult {
    let repoll_at = pause.map_or(StoreTime::NEVER, |pause| StoreTime::from_micros(now.as_micros()) + pause);
    answer(now, Reply::Queued(Queued { is_head: true, repoll_at }))
}
