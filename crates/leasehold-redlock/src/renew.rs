//! Renews leases at all nodes.

use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{Acquire, Command, Failure, NodeReplies, NodeReply, Renew, Reply, Tally};
use leasehold_store::{BoxFuture, Call, CallResult, StoreError, missing_response};

use super::attempts::NodeAttempt;
use super::counted_servers::CountedServers;
use super::gather::{fail, gather};
use super::{Quorum, answer};

/// A node, and its answers to a batch.
type NodeAnswers = (usize, Vec<CallResult>);

impl Quorum {
    /// Renews several leases, with one batch per node.
    pub(super) async fn renew(self: &Arc<Self>, batch: Vec<Call>) -> Vec<CallResult> {
        let known: Vec<Option<(Renew, NodeAttempt)>> = batch
            .into_iter()
            .map(|call| match call.command {
                Command::Renew(renew) => {
                    let known = self.attempts.get(renew.acquisition).filter(|known| known.token.is_some())?;
                    Some((renew, known))
                }
                _ => None,
            })
            .collect();
        let is_known: Vec<bool> = known.iter().map(Option::is_some).collect();
        let requests: Arc<[(Renew, NodeAttempt)]> = known.into_iter().flatten().collect();
        if requests.is_empty() {
            return is_known.iter().map(|_| answer(self.now(), Reply::NotHeld)).collect();
        }
        let commands: Arc<[Call]> = requests
            .iter()
            .map(|(renew, known)| {
                let renew = Renew::to(known.acquisition, renew.ttl);
                Call::new(known.resource.clone(), Command::Renew(renew))
            })
            .collect();
        let (replies, errors, late) = self.renew_at_nodes(&requests, &commands).await;
        let now = self.now();
        let mut is_held = Vec::with_capacity(requests.len());
        let mut answers = Vec::with_capacity(requests.len());
        for (request, replies) in requests.iter().zip(&replies) {
            let tally = replies.poll_tally();
            is_held.push(matches!(tally, Some(Tally::Held { .. })));
            answers.push(match tally {
                Some(Tally::Held { valid_for }) => {
                    for (node, reply) in replies.replies().iter().enumerate() {
                        if *reply == Some(NodeReply::NotHeld) {
                            self.rejoin(request, node);
                        }
                    }
                    answer(now, Reply::Renewed { valid_for, tokens: None, contended: false })
                }
                Some(Tally::NotHeld) => answer(now, Reply::NotHeld),
                Some(Tally::Unknown) | None => {
                    Err(StoreError::new(Failure::Unknown, self.renewal_failure(replies, &errors)))
                }
            });
        }
        self.rejoin_late(late, requests, is_held);
        let mut answers = answers.into_iter();
        let answer_of = |is_known| match is_known {
            true => answers.next().unwrap_or_else(missing_response),
            false => answer(now, Reply::NotHeld),
        };
        is_known.into_iter().map(answer_of).collect()
    }

    /// Sends the renewals to every node, and gathers the replies by renewal, and the errors by node. Also returns the answers that
    /// come later than the decision.
    async fn renew_at_nodes(
        &self,
        requests: &[(Renew, NodeAttempt)],
        commands: &Arc<[Call]>,
    ) -> (Vec<NodeReplies>, Vec<Option<String>>, FuturesUnordered<BoxFuture<NodeAnswers>>) {
        let mut replies = vec![NodeReplies::new(self.nodes.len()); requests.len()];
        let mut errors = self.duplicate_nodes();
        let responses = FuturesUnordered::<BoxFuture<NodeAnswers>>::new();
        for (node, to) in self.nodes.iter().enumerate() {
            if errors[node].is_some() {
                fail(&mut replies, node);
                continue;
            }
            let (to, commands) = (to.clone(), commands.clone());
            responses.push(Box::pin(async move { (node, to.call_batch(commands).await) }));
        }
        let ttl_of = |(renew, known): &(Renew, NodeAttempt)| match renew.only_asks() {
            true => known.request.ttl,
            false => renew.ttl,
        };
        let shortest = requests.iter().map(ttl_of).min().unwrap_or_default();
        let limit = self.node_timeout(shortest);
        let mut counted = CountedServers::default();
        let late = gather(&self.runtime, responses, limit, &mut replies, |replies, node, answers| {
            let is_answered = answers.iter().any(Result::is_ok);
            if let Err(reason) = is_answered.then(|| counted.record(&self.nodes, node)).transpose() {
                errors[node] = Some(reason);
                return fail(replies, node);
            }
            for (replies, answer) in replies.iter_mut().zip(&answers) {
                replies.handle_reply(node, reply_of(answer));
                if let Err(error) = answer {
                    errors[node] = Some(error.message.clone());
                }
            }
        })
        .await;
        (replies, errors, late)
    }

    /// Acquires a renewed lease at a node that does not have it, because it was unreachable or restarted. The node learns its token
    /// by that.
    fn rejoin(self: &Arc<Self>, (renew, known): &(Renew, NodeAttempt), node: usize) {
        if renew.only_asks() || !self.attempts.join(renew.acquisition, known.acquisition, node, self.now()) {
            return;
        }
        let acquire = Acquire {
            metadata: known.request.metadata.clone(),
            ..Acquire::exclusive(known.acquisition, renew.ttl)
        };
        let call = Call::new(known.resource.clone(), acquire);
        let voting = self.request_vote(node, known.requests.clone(), call, known.token);
        self.runtime.spawn_here(async move { drop(voting.await) });
    }

    /// Rejoins at nodes whose reply comes after the quorum's; one may always be slow.
    fn rejoin_late(
        self: &Arc<Self>,
        mut late: FuturesUnordered<BoxFuture<NodeAnswers>>,
        requests: Arc<[(Renew, NodeAttempt)]>,
        is_held: Vec<bool>,
    ) {
        if late.is_empty() {
            return;
        }
        let quorum = self.clone();
        // On the caller's runtime, whose timers the calls may use.
        self.runtime.spawn_here(async move {
            while let Some((node, answers)) = late.next().await {
                for ((request, answered), is_held) in requests.iter().zip(&answers).zip(&is_held) {
                    if *is_held && reply_of(answered) == NodeReply::NotHeld {
                        quorum.rejoin(request, node);
                    }
                }
            }
        });
    }
}

fn reply_of(answered: &CallResult) -> NodeReply {
    match answered {
        Ok(answer) => match answer.reply {
            Reply::Renewed { valid_for, .. } => NodeReply::Held { valid_for },
            Reply::NotHeld => NodeReply::NotHeld,
            _ => NodeReply::Failed,
        },
        Err(_) => NodeReply::Failed,
    }
}
