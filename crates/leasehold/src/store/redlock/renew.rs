//! Renews leases at all nodes.

use std::sync::Arc;

use futures_util::stream::FuturesUnordered;
use leasehold_core::{Acquire, Command, Failure, NodeReplies, NodeReply, Renew, Reply, Resource, Tally};

use super::attempts::NodeAttempt;
use super::gather::{fail, gather};
use super::{Quorum, answer};
use crate::store::{CallResult, StoreError, missing_response};

impl Quorum {
    /// Renews several leases, with one batch per node.
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
            return known.iter().map(|_| answer(self.now(), Reply::NotHeld)).collect();
        }
        let commands: Arc<[(Arc<Resource>, Command)]> = requests
            .iter()
            .map(|(renew, known)| {
                let renew = Renew { acquisition: known.acquisition, ttl: renew.ttl, reserve: 0 };
                (known.resource.clone(), Command::Renew(renew))
            })
            .collect();
        let (replies, errors) = self.renew_at_nodes(&requests, &commands).await;
        let now = self.now();
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

    /// Sends the renewals to every node, and gathers the replies by renewal, and the errors by node.
    async fn renew_at_nodes(
        &self,
        requests: &[&(Renew, NodeAttempt)],
        commands: &Arc<[(Arc<Resource>, Command)]>,
    ) -> (Vec<NodeReplies>, Vec<Option<String>>) {
        let mut replies = vec![NodeReplies::new(self.nodes.len()); requests.len()];
        let mut errors = self.duplicate_nodes();
        let responses = FuturesUnordered::new();
        for (node, to) in self.nodes.iter().enumerate() {
            if errors[node].is_some() {
                fail(&mut replies, node);
                continue;
            }
            let (to, commands) = (to.clone(), commands.clone());
            responses.push(async move { (node, to.call_batch(&commands).await) });
        }
        let shortest = requests.iter().map(|(renew, _)| renew.ttl).min().unwrap_or_default();
        let limit = self.node_timeout(shortest);
        gather(&self.runtime, responses, limit, &mut replies, |replies, node, answers: Vec<CallResult>| {
            let is_heard = |other: usize| {
                let heard = |replies: &NodeReplies| replies.replies()[other];
                replies.iter().filter_map(heard).any(|reply| reply != NodeReply::Failed)
            };
            if let Some(twice) = self.heard_twice(node, is_heard) {
                errors[node] = Some(twice);
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
        (replies, errors)
    }

    /// Acquires a renewed lease at the nodes that do not have it, because they were unreachable or restarted. They learn its
    /// token by that.
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
            self.runtime.spawn_here(async move { drop(voting.await) });
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
