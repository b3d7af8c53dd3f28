//! Looking at all nodes, and saying what they said.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{
    Acquisition, Answer, Command, Failure, Holder, Reply, Resource, Round, StoreTime, View, Vote, Word,
    Words, quorum_of,
};
use tokio::time::timeout;

use super::{Quorum, is_queue};
use crate::store::{Answered, Store as _, StoreError};

/// How long a node may take when somebody looks.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// Said of a node that had no time to answer.
const NOT_WAITED_FOR: &str = "not waited for, since the others had decided already";

impl Quorum {
    /// Who holds it, as far as a quorum may have granted it: nodes that do not answer may have.
    pub(super) async fn inspect(&self, resource: Arc<Resource>) -> Answered {
        let answers = self.ask_all(&resource, Command::Inspect).await?;
        let mut views = Vec::new();
        let mut at = StoreTime::ZERO;
        for answer in answers {
            at = at.max(answer.at);
            if let Reply::View(view) = answer.reply {
                views.push(view);
            }
        }
        let last_token = views.iter().filter_map(|view| view.last_token).max();
        let in_use = views.iter().map(|view| view.in_use).max().unwrap_or(0);
        let answered = views.len();
        let holders = self.agreed(views.into_iter().flat_map(|view| view.holders), answered);
        let in_use = if holders.is_empty() { 0 } else { in_use };
        Ok(Answer {
            at,
            reply: Reply::View(View { capacity: 1, in_use, last_token, holders, waiters: Vec::new() }),
        })
    }

    pub(super) async fn force_release(&self, resource: Arc<Resource>) -> Answered {
        let answers = self.ask_all(&resource, Command::ForceRelease).await?;
        let at = answers.iter().map(|answer| answer.at).max().unwrap_or(StoreTime::ZERO);
        let answered = answers.len();
        let taken = answers.into_iter().flat_map(|answer| match answer.reply {
            Reply::Forced(holders) => holders,
            _ => Vec::new(),
        });
        Ok(Answer { at, reply: Reply::Forced(self.agreed(taken, answered)) })
    }

    /// One view of each lease that a quorum may have granted.
    fn agreed(&self, holders: impl Iterator<Item = Holder>, answered: usize) -> Vec<Holder> {
        let mut found = BTreeMap::<Acquisition, (usize, Holder)>::new();
        for holder in holders {
            let entry = found.entry(holder.acquisition).or_insert_with(|| (0, holder.clone()));
            entry.0 += 1;
            entry.1.token = entry.1.token.max(holder.token);
            entry.1.granted_at = entry.1.granted_at.min(holder.granted_at);
            entry.1.expires_at = entry.1.expires_at.max(holder.expires_at);
        }
        let silent = self.nodes.len() - answered;
        let quorum = quorum_of(self.nodes.len());
        found.into_values().filter(|(count, _)| count + silent >= quorum).map(|(_, holder)| holder).collect()
    }

    /// The answers of all that answer, if they are a quorum.
    async fn ask_all(&self, resource: &Arc<Resource>, command: Command) -> Result<Vec<Answer>, StoreError> {
        let asked = self.nodes.iter().map(|node| {
            let call = node.clone().call_one(resource.clone(), command.clone(), None);
            async { timeout(LOOK_LIMIT, call).await }
        });
        let (mut answers, mut errors) = (Vec::new(), Vec::new());
        for (node, answered) in self.nodes.iter().zip(join_all(asked).await) {
            match answered {
                Ok(Ok(answer)) => answers.push(answer),
                Ok(Err(error)) => errors.push(format!("{}: {}", node.name, error.message)),
                Err(_) => errors.push(format!("{}: too slow", node.name)),
            }
        }
        if answers.len() >= quorum_of(self.nodes.len()) {
            return Ok(answers);
        }
        Err(StoreError { failure: Failure::Unknown, message: self.too_few(answers.len(), &errors) })
    }

    /// What any node has. Queues for a turn to try are no locks.
    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        let asked = self.nodes.iter().map(|node| async { timeout(LOOK_LIMIT, node.store.list()).await });
        let (mut resources, mut errors, mut answered) = (Vec::new(), Vec::new(), 0);
        for (node, listed) in self.nodes.iter().zip(join_all(asked).await) {
            match listed {
                Ok(Ok(listed)) => {
                    answered += 1;
                    resources.extend(listed.into_iter().filter(|resource| !is_queue(resource)));
                }
                Ok(Err(error)) => errors.push(format!("{}: {}", node.name, error.message)),
                Err(_) => errors.push(format!("{}: too slow", node.name)),
            }
        }
        if answered < quorum_of(self.nodes.len()) {
            return Err(StoreError { failure: Failure::Unknown, message: self.too_few(answered, &errors) });
        }
        resources.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        resources.dedup();
        Ok(resources)
    }

    // --- Words for people ------------------------------------------------------------------------

    fn too_few(&self, answered: usize, errors: &[String]) -> String {
        let (nodes, quorum) = (self.nodes.len(), quorum_of(self.nodes.len()));
        format!(
            "no quorum: {answered} of {nodes} nodes answered, {quorum} are needed ({})",
            errors.join("; ")
        )
    }

    /// Why a round had no quorum: what each node said.
    pub(super) fn no_quorum(&self, round: &Round, said: &[Option<String>]) -> String {
        let mut answered = 0;
        let mut parts = Vec::new();
        for ((node, vote), said) in self.nodes.iter().zip(round.votes()).zip(said) {
            let what = match vote {
                Some(Vote::Yes(_)) => {
                    answered += 1;
                    "granted it, and was told that it is given back".to_owned()
                }
                Some(Vote::No) => {
                    answered += 1;
                    "busy".to_owned()
                }
                Some(Vote::Abstains(_)) => {
                    "does not vote yet, since it was started or emptied less than the longest ttl ago"
                        .to_owned()
                }
                Some(Vote::Failed) => said.clone().unwrap_or_else(|| "too slow".to_owned()),
                None => NOT_WAITED_FOR.to_owned(),
            };
            parts.push(format!("{}: {what}", node.name));
        }
        self.too_few(answered, &parts)
    }

    /// Which nodes did not answer that they gave it back.
    pub(super) fn not_told(&self, words: &Words) -> String {
        let silent = self.nodes.iter().zip(words.words()).filter(|(_, word)| **word == Some(Word::Failed));
        let silent: Vec<String> = silent.map(|(node, _)| format!("{}: no answer", node.name)).collect();
        self.too_few(self.nodes.len() - silent.len(), &silent)
    }

    /// Why nobody can say whether a lease was renewed.
    pub(super) fn not_renewed(&self, words: &Words, errors: &[Option<String>]) -> String {
        let mut renewed = 0;
        let mut parts = Vec::new();
        for ((node, word), error) in self.nodes.iter().zip(words.words()).zip(errors) {
            let what = match word {
                Some(Word::Held { .. }) => {
                    renewed += 1;
                    continue;
                }
                Some(Word::NotHeld) => "does not have the lease (any more)",
                Some(Word::Failed) => error.as_deref().unwrap_or("too slow"),
                None => NOT_WAITED_FOR,
            };
            parts.push(format!("{}: {what}", node.name));
        }
        let (nodes, quorum) = (self.nodes.len(), quorum_of(self.nodes.len()));
        format!(
            "no quorum: {renewed} of {nodes} nodes renewed it, {quorum} are needed ({})",
            parts.join("; ")
        )
    }
}
