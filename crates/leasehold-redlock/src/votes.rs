//! Collects the nodes' votes on one try.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{
    Acquire, Answer, Command, Failure, Renew, Reply, Resource, Round, Token, Verdict, Vote, quorum_of,
};
use leasehold_store::{BoxFuture, Call, CallResult, StoreError};

use super::attempts::{NodeRequests, at_node};
use super::counted_servers::CountedServers;
use super::{MIN_PATIENCE, Quorum, SLOW_ROUND_TRIPS, STRAGGLER_GRACE};

/// A node's response in a round.
pub(super) enum NodeResponse {
    Voted(CallResult),
    Propagated(CallResult),
}

pub(super) type PendingResponses = FuturesUnordered<BoxFuture<(usize, NodeResponse)>>;

/// Collects the votes of one try.
pub(super) struct VoteCollector {
    pub(super) quorum: Arc<Quorum>,
    pub(super) resource: Arc<Resource>,
    /// The command that asks for a vote. Its id is that of the try.
    pub(super) acquire: Arc<Acquire>,
    /// By node: what it was sent.
    pub(super) requests: Arc<[NodeRequests]>,
    pub(super) floor: Option<Token>,
    pub(super) round: Round,
    pub(super) responses: PendingResponses,
    pub(super) counted: CountedServers,
    /// Why a node did not vote.
    pub(super) node_errors: Vec<Option<StoreError>>,
    /// When nodes expect the current lease to end. A node reports that to the head of its queue.
    pub(super) repoll_hints: Vec<Duration>,
}

impl VoteCollector {
    pub(super) async fn collect(&mut self) -> Verdict {
        let limit = self.quorum.node_timeout(self.acquire.ttl);
        let runtime = self.quorum.runtime.clone();
        let mut late = pin!(runtime.sleep(limit));
        let mut patience = pin!(runtime.sleep(limit));
        let mut pushes = self.grant_pushes();
        let mut pushed = Vec::new();
        let sent_at = self.quorum.now();
        let votes_end = sent_at + limit;
        let (mut has_propagated, mut is_split) = (false, false);
        loop {
            self.ask_again(&mut pushed);
            if !is_split && self.round.is_split() {
                is_split = true;
                let took = self.quorum.now().since(sent_at);
                patience.set(runtime.sleep(self.patience(took).saturating_sub(took)));
            }
            if let Some((nodes, tokens)) = self.round.poll_propagate() {
                // A vote counts also before the clocks of a majority are known, which they are now.
                let refusal = self.quorum.refuses_token(tokens.last);
                for node in nodes {
                    match &refusal {
                        None => self.propagate(node, tokens.last),
                        Some(error) => {
                            self.node_errors[node] = Some(token_of_another_node(error));
                            self.round.handle_propagated(node, false);
                        }
                    }
                }
                // A node that has voted within its limit has another one for this answer. So have the first ones, if the whole
                // process was suspended.
                if !std::mem::replace(&mut has_propagated, true) || self.quorum.now() <= votes_end {
                    late.set(runtime.sleep(limit));
                }
            }
            if let Some(verdict) = self.round.poll_verdict(self.quorum.now()) {
                return verdict;
            }
            tokio::select! {
                biased;
                Some((node, response)) = self.responses.next() => self.handle_response(node, response),
                Some(node) = pushes.next() => pushed.push(node),
                () = &mut patience, if is_split && self.round.is_split() => self.round.handle_timeout(),
                () = &mut late => self.round.handle_timeout(),
            }
        }
    }

    /// For how long after the requests a minority's votes are waited for that would decide. The majority's votes took this long. An
    /// attempt that does not wait has several tries within [`TRY_LIMIT`](super::limits::TRY_LIMIT).
    fn patience(&self, took: Duration) -> Duration {
        match self.acquire.wait {
            Some(_) => self.quorum.patience().min(SLOW_ROUND_TRIPS * took).max(MIN_PATIENCE),
            None => (2 * self.quorum.round_trip().min(took)).max(STRAGGLER_GRACE),
        }
    }

    /// The nodes that push a grant to this try, each once.
    fn grant_pushes(&self) -> FuturesUnordered<BoxFuture<usize>> {
        let pushes = FuturesUnordered::<BoxFuture<usize>>::new();
        if self.acquire.wait.is_some() {
            for node in 0..self.requests.len() {
                let requests = self.requests.clone();
                pushes.push(Box::pin(async move {
                    requests[node].pushed().await;
                    node
                }));
            }
        }
        pushes
    }

    /// Asks those nodes again that have queued the try and have then pushed a grant, so that a grant does not wait for the end of
    /// a round that a silent node delays. The push itself is no vote: its time is not known, nor who has sent it.
    fn ask_again(&mut self, pushed: &mut Vec<usize>) {
        let acquisition = self.acquire.acquisition;
        for node in pushed.extract_if(.., |node| self.round.votes()[*node] == Some(Vote::No)) {
            let attempts = &self.quorum.attempts;
            // Nothing is sent for an attempt that is being released.
            let Some(attempt) = attempts.attempt_of(acquisition) else { continue };
            if !attempts.join(attempt, acquisition, node, self.quorum.now()) {
                continue;
            }
            let secret = at_node(self.acquire.secret, node);
            let acquire = Acquire { secret, ..(*self.acquire).clone() };
            let call = Call::new(self.resource.clone(), acquire);
            self.responses.push(self.quorum.request_vote(node, self.requests.clone(), call, self.floor));
        }
    }

    /// How long until a quorum may be free, if known. No node pushes the expiry of a lease.
    pub(super) fn time_until_free(&mut self) -> Option<Duration> {
        self.repoll_hints.sort_unstable();
        self.repoll_hints.get(quorum_of(self.quorum.nodes.len()) - 1).or(self.repoll_hints.last()).copied()
    }

    /// Waits a little for the other votes: an attempt that does not wait retries if any node is free.
    pub(super) async fn await_stragglers(&mut self) {
        let runtime = self.quorum.runtime.clone();
        let all = async {
            while let Some((node, response)) = self.responses.next().await {
                self.handle_response(node, response);
            }
        };
        let _ = runtime.timeout(STRAGGLER_GRACE, all).await;
    }

    fn propagate(&self, node: usize, token: Token) {
        let renew = Renew::to(self.acquire.acquisition, self.acquire.ttl);
        let command = Command::Renew(renew);
        let call =
            self.quorum.nodes[node].clone().call(Call::new(self.resource.clone(), command), Some(token));
        self.responses.push(Box::pin(async move { (node, NodeResponse::Propagated(call.await)) }));
    }

    pub(super) fn handle_response(&mut self, node: usize, response: NodeResponse) {
        match response {
            NodeResponse::Voted(answered) => {
                let answered = self.of_a_server(node, answered);
                let vote = answered.as_ref().map_or(Vote::Failed, Vote::of);
                if let Ok(Answer { at, reply: Reply::Queued(queued) }) = &answered {
                    self.repoll_hints.push(queued.repoll_at.since(*at));
                }
                self.node_errors[node] = match &answered {
                    Err(error) => Some(error.clone()),
                    Ok(answer) if vote == Vote::Failed => {
                        Some(StoreError::new(Failure::NotSent, format!("answered {:?}", answer.reply)))
                    }
                    Ok(_) => None,
                };
                self.round.handle_vote(node, vote);
            }
            NodeResponse::Propagated(answered) => {
                let answered = self.of_a_server(node, answered);
                let is_known = matches!(answered, Ok(Answer { reply: Reply::Renewed { .. }, .. }));
                if let Err(error) = answered {
                    self.node_errors[node] = Some(error);
                }
                self.round.handle_propagated(node, is_known);
            }
        }
    }

    /// The answer, or an error if it does not count.
    fn of_a_server(&mut self, node: usize, answered: CallResult) -> CallResult {
        let answer = answered?;
        let recorded = self.counted.record(&self.quorum.nodes, node);
        recorded.map(|()| answer).map_err(|reason| StoreError::new(Failure::Unknown, reason))
    }
}

fn token_of_another_node(error: &StoreError) -> StoreError {
    StoreError::new(error.failure, format!("was not told the token of another node, which {}", error.message))
}
