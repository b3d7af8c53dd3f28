//! Inspects all nodes, and merges their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{
    Acquisition, Answer, Command, Failure, Holder, NodeReplies, NodeReply, QueueEntry, Release, Reply,
    Resource, Round, StoreTime, TOMBSTONE_TTL, Token, View, Vote, quorum_of,
};
use leasehold_store::{Call, CallResult, StoreError, admission_queue_of};

use super::Quorum;
use super::admission_state::is_admission_queue;

/// Max time for a node to answer an inspection.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Text for a node that had no time to answer.
const NOT_WAITED_FOR: &str = "not waited for: it could not change the outcome";

/// The views in these answers, with their times on the clock that is furthest ahead, and the time of that clock.
pub(super) fn on_one_clock(answers: Vec<Answer>) -> (StoreTime, Vec<View>) {
    let at = answers.iter().map(|answer| answer.at).max().unwrap_or(StoreTime::ZERO);
    (at, answers.into_iter().filter_map(|answer| view_at(at, answer)).collect())
}

/// The view in an answer, with its times on a clock that shows `at`. Each node has a clock of its own.
fn view_at(at: StoreTime, answer: Answer) -> Option<View> {
    let Reply::View(mut view) = answer.reply else { return None };
    let shift = |time: &mut StoreTime| *time = time.saturating_sub(answer.at.since(at)) + at.since(answer.at);
    for holder in &mut view.holders {
        shift(&mut holder.granted_at);
        shift(&mut holder.expires_at);
    }
    for waiter in &mut view.waiters {
        shift(&mut waiter.since);
        shift(&mut waiter.deadline);
    }
    Some(view)
}

impl Quorum {
    /// The leases that a quorum may have granted, counting nodes that do not answer.
    pub(super) async fn inspect(self: &Arc<Self>, resource: Arc<Resource>) -> CallResult {
        let answers = self.call_all(&resource, Command::Inspect).await?;
        if let Some(foreign) = self.foreign(&answers) {
            return Ok(foreign);
        }
        let answered = answers.len();
        let (at, views) = on_one_clock(answers);
        // The highest token that a quorum knows.
        let mut known: Vec<Token> = views.iter().filter_map(|view| view.last_token).collect();
        known.sort_unstable();
        let last_token = known.iter().rev().nth(quorum_of(self.nodes.len()) - 1).copied();
        let in_use = views.iter().map(|view| view.in_use).max().unwrap_or(0);
        let queued = self.quorum_waiters(&views);
        let holders = self.quorum_holders(views.into_iter().flat_map(|view| view.holders), answered);
        let in_use = if holders.is_empty() { 0 } else { in_use };
        let waiters = self.waiters(&resource, at, queued).await;
        Ok(Answer { at, reply: Reply::View(View { capacity: 1, in_use, last_token, holders, waiters }) })
    }

    /// The answer if another program's value is in the key at a majority of the nodes: until fewer have it.
    fn foreign(&self, answers: &[Answer]) -> Option<Answer> {
        let at = answers.iter().map(|answer| answer.at).max()?;
        let mut left: Vec<Option<Duration>> = answers
            .iter()
            .filter_map(|answer| match answer.reply {
                Reply::Foreign { expires_at } => Some(expires_at.map(|time| time.since(answer.at))),
                _ => None,
            })
            .collect();
        // The longest first; none has no end.
        left.sort_unstable_by_key(|left| std::cmp::Reverse(left.unwrap_or(Duration::MAX)));
        let left = left.get(quorum_of(self.nodes.len()) - 1)?;
        Some(Answer { at, reply: Reply::Foreign { expires_at: left.map(|left| at + left) } })
    }

    /// The waiters that a majority of the nodes has in the lock's own queue, in the order of their times.
    fn quorum_waiters(&self, views: &[View]) -> Vec<QueueEntry> {
        let mut queued = BTreeMap::<Acquisition, Vec<&QueueEntry>>::new();
        for waiter in views.iter().flat_map(|view| &view.waiters) {
            queued.entry(waiter.acquisition).or_default().push(waiter);
        }
        let majority = queued.values().filter(|same| same.len() >= quorum_of(self.nodes.len()));
        let mut waiters: Vec<_> = majority.map(|same| same[0].clone()).collect();
        waiters.sort_by_key(|waiter| waiter.since);
        waiters
    }

    /// The waiters: first those that queue at the nodes, which `queued` are, then the admission queue. A client that cannot
    /// reach the usual admission node queues at another one.
    async fn waiters(
        &self,
        resource: &Resource,
        at: StoreTime,
        mut queued: Vec<QueueEntry>,
    ) -> Vec<QueueEntry> {
        let Some(queue) = admission_queue_of(resource).map(Arc::new) else { return queued };
        let (mut first, mut then) = (Vec::new(), Vec::new());
        for answer in self.call_each(&queue, &Command::Inspect).await.into_iter().flatten() {
            if let Some(view) = view_at(at, answer) {
                first.extend(view.holders.into_iter().map(|holder| QueueEntry {
                    acquisition: holder.acquisition,
                    weight: holder.weight,
                    since: holder.granted_at,
                    deadline: holder.expires_at,
                    skipped: false,
                    metadata: holder.metadata,
                }));
                then.extend(view.waiters);
            }
        }
        // An admitted waiter has another id in the lock's own queue. What a client has there beside its admitted ones came before
        // them: it waits without admission, because the queue was unavailable or its admission has expired.
        for admitted in &first {
            let same = |waiter: &QueueEntry| waiter.acquisition.client == admitted.acquisition.client;
            if let Some(last) = queued.iter().rposition(same) {
                queued.remove(last);
            }
        }
        // The waiters of one node are in queue order already.
        then.sort_by_key(|waiting| waiting.since);
        let mut seen = BTreeSet::new();
        queued.extend(first);
        queued.extend(then);
        queued.retain(|waiting| seen.insert(waiting.acquisition));
        queued
    }

    pub(super) async fn force_release(&self, resource: Arc<Resource>) -> CallResult {
        let answers = self.call_all(&resource, Command::ForceRelease).await?;
        let foreign = self.foreign(&answers);
        let at = answers.iter().map(|answer| answer.at).max().unwrap_or(StoreTime::ZERO);
        let answered = answers.len();
        let taken: Vec<Holder> = answers
            .into_iter()
            .flat_map(|answer| match answer.reply {
                Reply::Forced(holders) => holders,
                _ => Vec::new(),
            })
            .collect();
        if let Some(foreign) = foreign.filter(|_| taken.is_empty()) {
            return Ok(foreign);
        }
        // A concurrent renewal may have rejoined a node that had released already. The nodes have released the leases before, so
        // a failure does not matter: for example, other programs' values are in the keys.
        let acquisitions: BTreeSet<Acquisition> = taken.iter().map(|holder| holder.acquisition).collect();
        for acquisition in acquisitions {
            let release = Release { tombstone: TOMBSTONE_TTL, ..Release::now(acquisition) };
            let _ = self.call_all(&resource, Command::Release(release)).await;
        }
        Ok(Answer { at, reply: Reply::Forced(self.quorum_holders(taken.into_iter(), answered)) })
    }

    /// The answers with what their clients have published. Each client has a record at every node, and a node may have lost it.
    pub(super) async fn add_clients(&self, answers: Vec<Answer>) -> Vec<Answer> {
        let requests = self.records().map(|records| {
            let described = records.add_to(answers.clone());
            self.runtime.timeout(INSPECT_TIMEOUT, described)
        });
        let mut described = join_all(requests).await.into_iter().flatten();
        let Some(mut best) = described.next() else { return answers };
        for mut others in described {
            let known = best.iter_mut().flat_map(|answer| answer.reply.metadata_mut());
            let others = others.iter_mut().flat_map(|answer| answer.reply.metadata_mut());
            for ((_, known), (_, other)) in known.zip(others) {
                if other.len() > known.len() {
                    *known = other.clone();
                }
            }
        }
        best
    }

    /// Merges the nodes' views of each lease that a quorum may have granted.
    fn quorum_holders(&self, holders: impl Iterator<Item = Holder>, answered: usize) -> Vec<Holder> {
        let mut found = BTreeMap::<Acquisition, Vec<Holder>>::new();
        for holder in holders {
            found.entry(holder.acquisition).or_default().push(holder);
        }
        let (silent, quorum) = (self.nodes.len() - answered, quorum_of(self.nodes.len()));
        found.into_values().filter_map(|same| merge_holder(same, silent, quorum)).collect()
    }

    /// The answers of the nodes that answer, if they are a quorum.
    pub(super) async fn call_all(
        &self,
        resource: &Arc<Resource>,
        command: Command,
    ) -> Result<Vec<Answer>, StoreError> {
        let (mut answers, mut errors) = (Vec::new(), Vec::new());
        for (node, answered) in self.nodes.iter().zip(self.call_each(resource, &command).await) {
            match answered {
                Ok(answer) => answers.push(answer),
                Err(error) => errors.push(format!("{}: {error}", node.name)),
            }
        }
        if answers.len() >= quorum_of(self.nodes.len()) {
            return Ok(answers);
        }
        Err(StoreError::new(Failure::Unknown, self.too_few(answers.len(), &errors)))
    }

    /// Each node's answer or error.
    async fn call_each(&self, resource: &Arc<Resource>, command: &Command) -> Vec<Result<Answer, String>> {
        let requests = self.nodes.iter().map(|node| {
            let call = node.clone().call(Call::new(resource.clone(), command.clone()), None);
            async { self.runtime.timeout(INSPECT_TIMEOUT, call).await }
        });
        let answered = join_all(requests).await.into_iter().map(|answered| match answered {
            Some(answered) => answered.map_err(|error| error.message),
            None => Err("too slow".to_owned()),
        });
        answered.collect()
    }

    /// The resources of all nodes, without admission queues.
    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        let requests = self.nodes.iter().map(|node| self.runtime.timeout(INSPECT_TIMEOUT, node.store.list()));
        let (mut resources, mut errors, mut answered) = (Vec::new(), Vec::new(), 0);
        for (node, listed) in self.nodes.iter().zip(join_all(requests).await) {
            match listed {
                Some(Ok(listed)) => {
                    answered += 1;
                    resources.extend(listed.into_iter().filter(|resource| !is_admission_queue(resource)));
                }
                Some(Err(error)) => errors.push(format!("{}: {}", node.name, error.message)),
                None => errors.push(format!("{}: too slow", node.name)),
            }
        }
        if answered < quorum_of(self.nodes.len()) {
            return Err(StoreError::new(Failure::Unknown, self.too_few(answered, &errors)));
        }
        resources.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        resources.dedup();
        Ok(resources)
    }

    // --- Error texts -----------------------------------------------------------------------------------

    fn too_few(&self, answered: usize, errors: &[String]) -> String {
        let (nodes, quorum) = (self.nodes.len(), quorum_of(self.nodes.len()));
        format!(
            "no quorum: {answered} of {nodes} nodes answered, {quorum} are needed ({})",
            errors.join("; ")
        )
    }

    /// The error of a round without a quorum, with each node's reason.
    pub(super) fn quorum_failure(&self, round: &Round, node_errors: &[Option<StoreError>]) -> String {
        let answered = |vote: &&Option<Vote>| matches!(vote, Some(Vote::Yes(_) | Vote::No));
        self.too_few(round.votes().iter().filter(answered).count(), &self.describe_votes(round, node_errors))
    }

    /// The error of a round in which a quorum answered but did not agree, with each node's vote.
    pub(super) fn split_failure(&self, round: &Round, node_errors: &[Option<StoreError>]) -> String {
        let yeses = round.votes().iter().filter(|vote| matches!(vote, Some(Vote::Yes(_)))).count();
        let noes = round.votes().iter().filter(|vote| matches!(vote, Some(Vote::No))).count();
        let (nodes, quorum) = (self.nodes.len(), quorum_of(self.nodes.len()));
        format!(
            "no quorum: {yeses} of {nodes} nodes granted it and {noes} refused it, {quorum} have to agree ({})",
            self.describe_votes(round, node_errors).join("; ")
        )
    }

    fn describe_votes(&self, round: &Round, node_errors: &[Option<StoreError>]) -> Vec<String> {
        let each = self.nodes.iter().zip(round.votes()).zip(node_errors);
        each.map(|((node, vote), error)| {
            let what = match vote {
                Some(Vote::Yes(_)) => "granted it, and was told to release it".to_owned(),
                Some(Vote::No) => "busy".to_owned(),
                Some(Vote::Abstains(_)) => {
                    "does not vote yet, since it was started, emptied or promoted less than the longest ttl ago"
                        .to_owned()
                }
                Some(Vote::Failed) => {
                    error.as_ref().map_or_else(|| "too slow".to_owned(), |error| error.message.clone())
                }
                None => NOT_WAITED_FOR.to_owned(),
            };
            format!("{}: {what}", node.name)
        })
        .collect()
    }

    /// The error of an unconfirmed release, with each node's reason.
    pub(super) fn release_failure(&self, replies: &NodeReplies, errors: &[Option<StoreError>]) -> String {
        let why = |node: usize| errors[node].as_ref().map_or("no answer", |error| &error.message);
        self.too_few_did(replies, "released", why)
    }

    /// The error of a renewal without a quorum, with each node's reason.
    pub(super) fn renewal_failure(&self, replies: &NodeReplies, errors: &[Option<String>]) -> String {
        self.too_few_did(replies, "renewed", |node| errors[node].as_deref().unwrap_or("too slow"))
    }

    fn too_few_did<'a>(
        &self,
        replies: &NodeReplies,
        what: &str,
        why_not: impl Fn(usize) -> &'a str,
    ) -> String {
        let mut done = 0;
        let mut parts = Vec::new();
        for (index, (node, reply)) in self.nodes.iter().zip(replies.replies()).enumerate() {
            let why = match reply {
                Some(NodeReply::Held { .. }) => {
                    done += 1;
                    continue;
                }
                Some(NodeReply::NotHeld) => "does not have the lease (any more)",
                Some(NodeReply::Failed) => why_not(index),
                None => NOT_WAITED_FOR,
            };
            parts.push(format!("{}: {why}", node.name));
        }
        let (nodes, quorum) = (self.nodes.len(), quorum_of(self.nodes.len()));
        format!("no quorum: {done} of {nodes} nodes {what} it, {quorum} are needed ({})", parts.join("; "))
    }
}

/// Merges several nodes' views of one lease. `None` if no quorum can have granted it, counting the silent nodes.
pub(super) fn merge_holder(mut same: Vec<Holder>, silent: usize, quorum: usize) -> Option<Holder> {
    // It has expired when fewer than a quorum have it: one node that is late with a release or a renewal does not decide.
    same.sort_unstable_by_key(|holder| std::cmp::Reverse(holder.expires_at));
    let mut lease = same.get(quorum.saturating_sub(silent + 1))?.clone();
    // A quorum knows its token. A late node may have granted a higher one, but fewer than a quorum did.
    let mut tokens: Vec<Token> = same.iter().map(|holder| holder.token).collect();
    tokens.sort_unstable_by_key(|token| std::cmp::Reverse(*token));
    tokens.truncate(quorum);
    lease.token = *tokens.last()?;
    // A node may have lost the record of its client.
    lease.metadata = same.iter().map(|holder| &holder.metadata).max_by_key(|text| text.len())?.clone();
    lease.granted_at = same.iter().map(|holder| holder.granted_at).min()?;
    Some(lease)
}
