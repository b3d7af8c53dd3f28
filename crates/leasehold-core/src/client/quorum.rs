//! Several stores that vote about one lease: what their answers come to.
//!
//! The rules of Redlock (S. Sanfilippo, *Distributed locks with Redis*, "The Redlock algorithm"), and fencing, which it does
//! not have: a token counts once a quorum knows of it, so that the next quorum, which has a member in common with this one,
//! can't but give a higher one.
//!
//! Who is asked, in which order, and what becomes of those who answer late is not decided here.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use crate::command::{Answer, Grant, Reply};
use crate::time::{LocalTime, drift_margin};
use crate::token::TokenRange;

/// How many of `nodes` are more than half.
#[must_use]
pub const fn quorum_of(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// What one node said to an `Acquire`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// It is granted there.
    Yes(Grant),
    /// Somebody else has it there.
    No,
    /// For so long yet the node may have forgotten what it granted, and does not vote. By its own clock, since clocks differ.
    Abstains(Duration),
    /// It said nothing in time, or that it can't.
    Failed,
}

impl Vote {
    /// The vote that a store's answer is.
    #[must_use]
    pub fn of(answer: &Answer) -> Self {
        match &answer.reply {
            Reply::Granted(grant) => Self::Yes(*grant),
            Reply::Busy | Reply::Queued(_) | Reply::QueueFull => Self::No,
            Reply::Abstains(until) => Self::Abstains(until.since(answer.at)),
            _ => Self::Failed,
        }
    }
}

/// What a round came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A quorum granted it, and knows its token.
    Granted(Grant),
    /// So many nodes refused it that the others are no quorum.
    Busy,
    /// A quorum answered, and some of it granted it. Whether the lock is free is for the nodes to say that did not vote.
    Split,
    /// Fewer than a quorum answered.
    NoQuorum,
    /// It was granted, but so late that the lease may be over.
    TooLate,
}

/// One round of asking all nodes for the same lease.
#[derive(Clone, Debug)]
pub struct Round {
    votes: Vec<Option<Vote>>,
    /// By the local clock, before the first node was asked.
    sent_at: LocalTime,
    is_fenced: bool,
    /// What the quorum was granted, once there is one. It does not change any more, whatever comes later.
    granted: Option<Grant>,
    /// Which nodes know a token that is at least as high.
    has_token: Vec<bool>,
    /// How many nodes are being told the token.
    propagating: usize,
}

impl Round {
    /// A round that begins now. Where it is not fenced, nobody has to know anybody else's token.
    #[must_use]
    pub fn new(nodes: usize, is_fenced: bool, sent_at: LocalTime) -> Self {
        Self {
            votes: vec![None; nodes],
            sent_at,
            is_fenced,
            granted: None,
            has_token: vec![false; nodes],
            propagating: 0,
        }
    }

    fn quorum(&self) -> usize {
        quorum_of(self.votes.len())
    }

    /// What each node has said so far.
    #[must_use]
    pub fn votes(&self) -> &[Option<Vote>] {
        &self.votes
    }

    fn count(&self, counts: impl Fn(&Option<Vote>) -> bool) -> usize {
        self.votes.iter().filter(|vote| counts(vote)).count()
    }

    /// What this node said. Only its first word counts.
    pub fn handle_vote(&mut self, node: usize, vote: Vote) {
        if self.votes[node].is_some() {
            return;
        }
        self.votes[node] = Some(vote);
        match self.granted {
            None => self.count_grants(),
            Some(granted) => {
                // It may become one of those that the lease stands on.
                if let (Vote::Yes(late), false) = (vote, self.is_token_at_quorum()) {
                    self.granted =
                        Some(Grant { valid_for: granted.valid_for.min(late.valid_for), ..granted });
                }
                // One that gave a higher token knows enough, but others are to see the same token at a quorum, if they can.
                self.has_token[node] =
                    matches!(vote, Vote::Yes(late) if late.tokens.last == granted.tokens.last);
            }
        }
    }

    /// Nobody is waited for any longer.
    pub fn handle_timeout(&mut self) {
        for node in 0..self.votes.len() {
            self.handle_vote(node, Vote::Failed);
            if self.granted.is_some() && !self.has_token[node] {
                self.votes[node] = Some(Vote::Failed);
            }
        }
        self.propagating = 0;
    }

    fn count_grants(&mut self) {
        let yeses = self.votes.iter().filter_map(|vote| match vote {
            Some(Vote::Yes(grant)) => Some(*grant),
            _ => None,
        });
        let (mut count, mut best): (usize, Option<Grant>) = (0, None);
        for grant in yeses {
            count += 1;
            best = Some(best.map_or(grant, |best| Grant {
                tokens: if grant.tokens.first > best.tokens.first { grant.tokens } else { best.tokens },
                valid_for: best.valid_for.min(grant.valid_for),
            }));
        }
        if count < self.quorum() {
            return;
        }
        self.granted = best;
        if let Some(granted) = best {
            self.has_token = self.votes.iter().map(|vote| has_token(*vote, granted.tokens)).collect();
        }
    }

    /// Which nodes that granted the lease have to be told of the quorum's token before it counts: none where enough of
    /// them know one that is as high.
    pub fn poll_propagate(&mut self) -> Option<(Vec<usize>, TokenRange)> {
        let granted = self.granted?;
        if self.propagating > 0 || self.is_token_at_quorum() {
            return None;
        }
        let must_be_told =
            |node: &usize| !self.has_token[*node] && matches!(self.votes[*node], Some(Vote::Yes(_)));
        let nodes: Vec<usize> = (0..self.votes.len()).filter(must_be_told).collect();
        self.propagating = nodes.len();
        (!nodes.is_empty()).then_some((nodes, granted.tokens))
    }

    /// Whether this node knows the token now.
    pub fn handle_propagated(&mut self, node: usize, is_known: bool) {
        self.has_token[node] |= is_known;
        if !is_known {
            // It has granted the lease, but nobody can rely on it.
            self.votes[node] = Some(Vote::Failed);
        }
        self.propagating = self.propagating.saturating_sub(1);
    }

    fn is_token_at_quorum(&self) -> bool {
        !self.is_fenced || self.has_token.iter().filter(|has_token| **has_token).count() >= self.quorum()
    }

    /// What it comes to, once no further word can change it. Time is only looked at where the lease is granted.
    #[must_use]
    pub fn poll_verdict(&self, now: LocalTime) -> Option<Verdict> {
        let pending = self.count(Option::is_none);
        if let Some(granted) = self.granted {
            if self.is_token_at_quorum() {
                let trusted_until =
                    self.sent_at + granted.valid_for.saturating_sub(drift_margin(granted.valid_for));
                return Some(if now < trusted_until { Verdict::Granted(granted) } else { Verdict::TooLate });
            }
            let may_know = (0..self.votes.len())
                .filter(|node| {
                    self.has_token[*node] || matches!(self.votes[*node], None | Some(Vote::Yes(_)))
                })
                .count();
            return (may_know < self.quorum()).then_some(Verdict::NoQuorum);
        }
        let yeses = self.count(|vote| matches!(vote, Some(Vote::Yes(_))));
        let noes = self.count(|vote| matches!(vote, Some(Vote::No)));
        let most_noes = self.votes.len() - self.quorum();
        if noes > most_noes {
            Some(Verdict::Busy)
        } else if yeses + pending >= self.quorum() || noes + pending > most_noes {
            None
        } else if yeses + noes >= self.quorum() {
            Some(Verdict::Split)
        } else if yeses + noes + pending < self.quorum() {
            Some(Verdict::NoQuorum)
        } else {
            None
        }
    }

    /// In how long so many nodes vote again that there may be a quorum, if it is only that which there is none for. Nodes
    /// that have said nothing yet may still have a vote.
    #[must_use]
    pub fn time_to_quorum(&self) -> Option<Duration> {
        let mut spans: Vec<Duration> = self
            .votes
            .iter()
            .filter_map(|vote| match vote {
                Some(Vote::Abstains(span)) => Some(*span),
                Some(Vote::Yes(_) | Vote::No) | None => Some(Duration::ZERO),
                Some(Vote::Failed) => None,
            })
            .collect();
        spans.sort_unstable();
        spans.get(self.quorum() - 1).copied().filter(|span| !span.is_zero())
    }
}

fn has_token(vote: Option<Vote>, tokens: TokenRange) -> bool {
    matches!(vote, Some(Vote::Yes(grant)) if grant.tokens.last >= tokens.last)
}

/// What one node said to a `Renew`, or to a `Release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeReply {
    /// The lease was there, and runs for so long from now, if it does.
    Held {
        /// How long it lasts.
        valid_for: Duration,
    },
    /// The node knows no such lease.
    NotHeld,
    /// It said nothing in time, or that it can't.
    Failed,
}

/// What the nodes' words about a lease come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// A quorum had it: for so long it lasts at all of these.
    Held {
        /// From when they were asked.
        valid_for: Duration,
    },
    /// So many do not have it that no quorum can.
    NotHeld,
    /// Nobody can say.
    Unknown,
}

/// The nodes' words about a lease that a quorum granted.
#[derive(Clone, Debug)]
pub struct NodeReplies {
    replies: Vec<Option<NodeReply>>,
}

impl NodeReplies {
    /// Nobody has said anything yet.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { replies: vec![None; nodes] }
    }

    /// What each node has said so far.
    #[must_use]
    pub fn replies(&self) -> &[Option<NodeReply>] {
        &self.replies
    }

    /// What this node said. Only its first word counts.
    pub fn handle_reply(&mut self, node: usize, reply: NodeReply) {
        self.replies[node].get_or_insert(reply);
    }

    /// Nobody is waited for any longer.
    pub fn handle_timeout(&mut self) {
        for reply in &mut self.replies {
            reply.get_or_insert(NodeReply::Failed);
        }
    }

    /// Whether a quorum has said something, whatever it was.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        let said = self.replies.iter().filter(|reply| !matches!(reply, None | Some(NodeReply::Failed)));
        said.count() >= quorum_of(self.replies.len())
    }

    /// What it comes to, once no further word can change it.
    #[must_use]
    pub fn poll_tally(&self) -> Option<Tally> {
        let quorum = quorum_of(self.replies.len());
        let pending = self.replies.iter().filter(|reply| reply.is_none()).count();
        let gone = self.replies.iter().filter(|reply| **reply == Some(NodeReply::NotHeld)).count();
        let mut held: Vec<Duration> = self
            .replies
            .iter()
            .filter_map(|reply| match reply {
                Some(NodeReply::Held { valid_for }) => Some(*valid_for),
                _ => None,
            })
            .collect();
        held.sort_unstable_by(|a, b| b.cmp(a));
        if let Some(valid_for) = held.get(quorum - 1) {
            Some(Tally::Held { valid_for: *valid_for })
        } else if gone > self.replies.len() - quorum {
            Some(Tally::NotHeld)
        } else if held.len() + pending < quorum && gone + pending <= self.replies.len() - quorum {
            Some(Tally::Unknown)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests;
