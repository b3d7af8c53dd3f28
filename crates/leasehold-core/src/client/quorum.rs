//! Quorum rounds: the result of several nodes voting about one lease.
//!
//! Implements Redlock (S. Sanfilippo, *Distributed locks with Redis*, "The Redlock algorithm"), with fencing in addition: a
//! token counts once a quorum has stored it. The next quorum shares a node with this one, so its token is higher.
//!
//! The caller decides which nodes to ask, in which order, and how to handle late answers.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use crate::command::{Answer, Grant, Reply};
use crate::time::{LocalTime, drift_margin};
use crate::token::TokenRange;

/// The smallest majority of `nodes`.
#[must_use]
pub const fn quorum_of(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// A node's vote on an `Acquire`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// The node granted it.
    Yes(Grant),
    /// Another attempt has the lease at that node.
    No,
    /// The node may have lost leases and does not vote for this long, by its own clock.
    Abstains(Duration),
    /// No answer in time, or an error.
    Failed,
}

impl Vote {
    /// The vote for an answer of a node.
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

/// The result of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A quorum granted it and has its token.
    Granted(Grant),
    /// So many nodes refused that a quorum is no longer possible.
    Busy,
    /// A quorum answered, but neither a grant nor a refusal is certain. The missing votes would decide.
    Split,
    /// Fewer than a quorum answered.
    NoQuorum,
    /// A quorum granted it, but so late that the lease may have expired.
    TooLate,
}

/// One round of requests to all nodes for the same lease.
#[derive(Clone, Debug)]
pub struct Round {
    votes: Vec<Option<Vote>>,
    /// Local time before the first request was sent.
    sent_at: LocalTime,
    is_fenced: bool,
    /// The quorum's grant, once there is one. Later votes do not change its token.
    granted: Option<Grant>,
    /// Which nodes have a token that is at least as high.
    has_token: Vec<bool>,
    /// Which nodes the token was propagated to.
    has_propagated: Vec<bool>,
}

impl Round {
    /// Starts a round. An unfenced round does not propagate tokens.
    #[must_use]
    pub fn new(nodes: usize, is_fenced: bool, sent_at: LocalTime) -> Self {
        Self {
            votes: vec![None; nodes],
            sent_at,
            is_fenced,
            granted: None,
            has_token: vec![false; nodes],
            has_propagated: vec![false; nodes],
        }
    }

    fn quorum(&self) -> usize {
        quorum_of(self.votes.len())
    }

    /// The votes so far, by node.
    #[must_use]
    pub fn votes(&self) -> &[Option<Vote>] {
        &self.votes
    }

    fn count(&self, counts: impl Fn(&Option<Vote>) -> bool) -> usize {
        self.votes.iter().filter(|vote| counts(vote)).count()
    }

    /// Handles a node's vote. Its first vote counts, and a grant after a refusal: the node had queued the attempt.
    pub fn handle_vote(&mut self, node: usize, vote: Vote) {
        let is_first = self.votes[node].is_none();
        let is_late_grant = matches!((self.votes[node], vote), (Some(Vote::No), Vote::Yes(_)));
        if !is_first && !is_late_grant {
            return;
        }
        self.votes[node] = Some(vote);
        match self.granted {
            None => self.count_grants(),
            Some(granted) => {
                // The node may become part of the quorum.
                if let (Vote::Yes(late), false) = (vote, self.is_token_at_quorum()) {
                    self.granted =
                        Some(Grant { valid_for: granted.valid_for.min(late.valid_for), ..granted });
                }
                // A node with a higher token would do, but `inspect` should see one token at a quorum if possible.
                self.has_token[node] =
                    matches!(vote, Vote::Yes(late) if late.tokens.last == granted.tokens.last);
            }
        }
    }

    /// Whether a quorum has answered, and only the missing votes can decide.
    #[must_use]
    pub fn is_split(&self) -> bool {
        let answered = self.count(|vote| matches!(vote, Some(Vote::Yes(_) | Vote::No)));
        self.granted.is_none() && answered >= self.quorum()
    }

    /// Counts all missing votes as failed.
    pub fn handle_timeout(&mut self) {
        for node in 0..self.votes.len() {
            self.handle_vote(node, Vote::Failed);
            if self.granted.is_some() && !self.has_token[node] {
                self.votes[node] = Some(Vote::Failed);
            }
        }
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
                is_plain: false,
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

    /// The granting nodes to which the quorum's token must be propagated before the token counts, each once. `None` if a quorum
    /// already has a token that is at least as high. A node that grants later gets it at once, as another may be slow to answer.
    pub fn poll_propagate(&mut self) -> Option<(Vec<usize>, TokenRange)> {
        let granted = self.granted?;
        if self.is_token_at_quorum() {
            return None;
        }
        let must_propagate = |node: &usize| {
            let has_granted = matches!(self.votes[*node], Some(Vote::Yes(_)));
            has_granted && !self.has_token[*node] && !self.has_propagated[*node]
        };
        let nodes: Vec<usize> = (0..self.votes.len()).filter(must_propagate).collect();
        nodes.iter().for_each(|node| self.has_propagated[*node] = true);
        (!nodes.is_empty()).then_some((nodes, granted.tokens))
    }

    /// Handles the result of propagating the token to a node.
    pub fn handle_propagated(&mut self, node: usize, is_known: bool) {
        self.has_token[node] |= is_known;
        if !is_known {
            // Its grant does not count without the token.
            self.votes[node] = Some(Vote::Failed);
        }
    }

    fn is_token_at_quorum(&self) -> bool {
        !self.is_fenced || self.has_token.iter().filter(|has_token| **has_token).count() >= self.quorum()
    }

    /// The verdict, once no further vote can change it. `now` only matters for a granted lease.
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

    /// If abstaining nodes prevent a quorum, the time until enough of them vote again. Pending votes count as available.
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

/// A node's reply to a `Renew` or a `Release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeReply {
    /// The node had the lease.
    Held {
        /// Remaining lifetime; zero after a release.
        valid_for: Duration,
    },
    /// The node does not have the lease.
    NotHeld,
    /// No answer in time, or an error.
    Failed,
}

/// The combined result of the nodes' replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// A quorum had the lease.
    Held {
        /// Remaining lifetime at every node of the quorum, from the time of the request.
        valid_for: Duration,
    },
    /// So many nodes do not have the lease that a quorum is not possible.
    NotHeld,
    /// Too few nodes answered.
    Unknown,
}

/// The nodes' replies about a lease that a quorum granted.
#[derive(Clone, Debug)]
pub struct NodeReplies {
    replies: Vec<Option<NodeReply>>,
}

impl NodeReplies {
    /// No replies yet.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { replies: vec![None; nodes] }
    }

    /// The replies so far, by node.
    #[must_use]
    pub fn replies(&self) -> &[Option<NodeReply>] {
        &self.replies
    }

    /// Handles a node's reply. Only its first reply counts.
    pub fn handle_reply(&mut self, node: usize, reply: NodeReply) {
        self.replies[node].get_or_insert(reply);
    }

    /// Counts all missing replies as failed.
    pub fn handle_timeout(&mut self) {
        for reply in &mut self.replies {
            reply.get_or_insert(NodeReply::Failed);
        }
    }

    /// Whether a quorum has replied.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        let answered = self.replies.iter().filter(|reply| !matches!(reply, None | Some(NodeReply::Failed)));
        answered.count() >= quorum_of(self.replies.len())
    }

    /// The result, once no further reply can change it.
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
