//! Renews leases at all nodes.

use std::pin::pin;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{Acquire, Command, Failure, NodeReplies, NodeReply, Renew, Reply, Resource, Tally};
use tokio::time::sleep;

use super::attempts::NodeAttempt;
use super::{Quorum, answer};
use crate::engine::clock;
use crate::store::{CallResult, StoreError, missing_response};

impl Quorum {
    /// Renews these, all at each node in one flight.
    pub(super) async fn renew(self: &Arc<Self>, batch: Vec<(Arc<Resource>, Command)>) -> Vec<CallResult> {
        let known: Vec<Option<(Renew, NodeAttempt)>> = batch
            .into_iter()
            .map(|(_, command)| match command {
                Command::Renew(renew) => {
                    let known = self.attempts.get(renew.acquisition).filter(|known| known.token.is_some())?;
                    Some((renew, known))
                }
                _ => None,
            })
            .collect();
        let requests: Vec<&(Renew, NodeAttempt)> = known.iter().flatten().collect();
        if requests.is_empty() {
            return known.iter().map(|_| answer(clock::local(), Reply::NotHeld)).collect();
        }
        let commands: Vec<(Arc<Resource>, Command)> = requests
            .iter()
            .map(|(renew, known)| {
                let renew = Renew { acquisition: known.acquisition, ttl: renew.ttl, reserve: 0 };
                (known.resource.clone(), Command::Renew(renew))
            })
            .collect();
        let shortest = requests.iter().map(|(renew, _)| renew.ttl).min().unwrap_or_default();
        let mut replies: Vec<NodeReplies> =
            requests.iter().map(|_| NodeReplies::new(self.nodes.len())).collect();
        let mut responses = FuturesUnordered::new();
        let mut errors = self.duplicate_nodes();
        for (node, to) in self.nodes.iter().enumerate() {
            if errors[node].is_some() {
                replies.iter_mut().for_each(|replies| replies.handle_reply(node, NodeReply::Failed));
                continue;
            }
            let call = to.clone().call(commands.clone(), None);
            responses.push(async move { (node, call.await) });
        }
        let mut limit = pin!(sleep(self.node_timeout(shortest)));
        while replies.iter().any(|replies| replies.poll_tally().is_none()) {
            tokio::select! {
                // What is there counts, even if the whole process stood still until the time was over.
                biased;
                Some((node, answers)) = responses.next() => {
                    for (replies, answered) in replies.iter_mut().zip(&answers) {
                        replies.handle_reply(node, reply_of(answered));
                        if let Err(error) = answered {
                            errors[node] = Some(error.message.clone());
                        }
                    }
                }
                () = &mut limit => replies.iter_mut().for_each(NodeReplies::handle_timeout),
            }
        }
        if !responses.is_empty() {
            tokio::spawn(async move { while responses.next().await.is_some() {} });
        }
        let now = clock::local();
        let mut answers =
            requests.iter().zip(&replies).map(|((renew, known), replies)| match replies.poll_tally() {
                Some(Tally::Held { valid_for }) => {
                    self.rejoin_nodes(renew, known, replies);
                    answer(now, Reply::Renewed { valid_for, tokens: None, contended: false })
                }
                Some(Tally::NotHeld) => answer(now, Reply::NotHeld),
                Some(Tally::Unknown) | None => {
                    Err(StoreError::new(Failure::Unknown, self.renewal_failure(replies, &errors)))
                }
            });
        known
            .iter()
            .map(|known| match known {
                Some(_) => answers.next().unwrap_or_else(missing_response),
                None => answer(now, Reply::NotHeld),
            })
            .collect()
    }

    /// RequestCounts the nodes that do not have the lease for it too, now that a quorum has kept it: they may have been away, or were
    /// started again. They learn its token by that.
    fn rejoin_nodes(self: &Arc<Self>, renew: &Renew, known: &NodeAttempt, replies: &NodeReplies) {
        for (node, reply) in replies.replies().iter().enumerate() {
            if *reply != Some(NodeReply::NotHeld)
                || !self.attempts.join(renew.acquisition, known.acquisition, node)
            {
                continue;
            }
            let acquire = Acquire {
                metadata: known.request.metadata.clone(),
                ..Acquire::exclusive(known.acquisition, renew.ttl)
            };
            let call = (known.resource.clone(), Command::from(acquire));
            let voting = self.request_vote(node, known.requests.clone(), call, known.token);
            tokio::spawn(voting);
        }
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
