//! What the leases of a barrier say about its rounds. Pure: it only reads what the store showed.

use leasehold_core::{Holder, Token, View};

use crate::metadata::HolderMetadata;

/// The weight of a party that has come and waits.
pub(super) const ARRIVAL: u32 = 1 << 16;

/// As an arrival, after a claim that was taken back.
pub(super) const RETURNED: u32 = ARRIVAL + 1;

pub(super) const CLAIM: u32 = ARRIVAL + 2;

pub(super) const DEPARTURE: u32 = ARRIVAL + 3;

pub(super) const MARK: u32 = 1;

/// For how many parties this capacity is, or how many have come with this weight.
pub(crate) fn parties(weight: u32) -> u32 {
    weight / ARRIVAL
}

/// How many rounds have passed, as far as the store remembers. Two parties may mark the same round; and of two rounds with
/// a party in common, one was completed in place of the other.
pub(crate) fn passed_rounds(holders: &[Holder]) -> usize {
    let mut rounds: Vec<Round> = holders.iter().filter_map(Round::of_mark).collect();
    rounds.sort_by_key(|round| round.first);
    let mut last = None;
    let mut count = 0;
    for round in rounds {
        count += usize::from(last.is_none_or(|last| round.first > last));
        last = last.max(Some(round.last));
    }
    count
}

/// How many leases say that a round has passed.
pub(super) fn count_marks(view: &View) -> usize {
    view.holders.iter().filter(|holder| is_mark(holder)).count()
}

/// Only what is kept decides: anything else may still be taken back.
fn is_mark(holder: &Holder) -> bool {
    holder.weight == MARK && holder.retained
}

/// A claim that is not decided yet: a claim proper, or one on its way to a mark.
fn is_undecided(holder: &Holder) -> bool {
    matches!(holder.weight, CLAIM | MARK) && !holder.retained
}

/// All that pass together, by the tokens of their arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) first: Token,
    pub(super) last: Token,
}

impl Round {
    /// The round in which this party passed, if it did. The party is still there.
    pub(super) fn passed(view: &View, party: Token) -> Option<Self> {
        view.holders.iter().filter_map(Self::of_mark).find(|round| round.has(party))
    }

    /// As [`Self::passed`], for a party that has departed since. A claim from before that was confirmed only if it saw the
    /// party; one from after that did not count it.
    pub(super) fn passed_before(view: &View, party: Token, departed: Token) -> Option<Self> {
        let before = view.holders.iter().filter(|holder| holder.token < departed);
        before.filter_map(Self::of_mark).find(|round| round.has(party))
    }

    /// Whether a claim from before this party's departure may still count it.
    pub(super) fn is_claimed_before(view: &View, party: Token, departed: Token) -> bool {
        let before = view.holders.iter().filter(|holder| holder.token < departed && is_undecided(holder));
        before.filter_map(Self::of_claim).any(|round| round.has(party))
    }

    /// The round of this party, if all of it are there and none of them has passed.
    pub(super) fn present(view: &View, party: Token, parties: u32) -> Option<Self> {
        // A party that has passed may still be there. So may one whose round is about to pass: its claim no longer takes a
        // place, so a party of the next round may have come in addition.
        let marks = view.holders.iter().filter(|holder| holder.weight == MARK);
        let latest = marks.filter_map(Self::of_claim).map(|round| round.last).max();
        let present = view.holders.iter().filter_map(arrival_of).filter(|token| Some(*token) > latest);
        let present: Vec<Token> = present.collect();
        let all = present.len() >= usize::try_from(parties).unwrap_or(usize::MAX);
        let (first, last) = (present.iter().min().copied()?, present.iter().max().copied()?);
        (all && present.contains(&party)).then_some(Self { first, last })
    }

    fn has(&self, party: Token) -> bool {
        (self.first..=self.last).contains(&party)
    }

    // --- What is written into leases -------------------------------------------------------------

    pub(super) fn claim(&self, party: Token) -> String {
        format!("party {party} claims {} {}", self.first, self.last)
    }

    pub(super) fn returned(party: Token) -> String {
        format!("party {party}")
    }

    pub(super) fn mark(&self) -> String {
        format!("passed {} {}", self.first, self.last)
    }

    fn of_mark(holder: &Holder) -> Option<Self> {
        is_mark(holder).then(|| Self::read(&label_of(holder)?, "passed ")).flatten()
    }

    fn of_claim(holder: &Holder) -> Option<Self> {
        let label = label_of(holder)?;
        Self::read(&label, "passed ")
            .or_else(|| Self::read(label.split_once(' ')?.1.split_once(' ')?.1, "claims "))
    }

    fn read(text: &str, word: &str) -> Option<Self> {
        let (first, last) = text.strip_prefix(word)?.split_once(' ')?;
        Some(Self { first: read_token(first)?, last: read_token(last)? })
    }
}

/// The token of a party's arrival, if this lease is that of a party which is there and has not departed.
fn arrival_of(holder: &Holder) -> Option<Token> {
    match holder.weight {
        _ if holder.retained => None,
        ARRIVAL => Some(holder.token),
        // It took the place of the arrival, and has a token of its own.
        RETURNED | CLAIM => read_token(label_of(holder)?.split(' ').nth(1)?),
        _ => None,
    }
}

fn label_of(holder: &Holder) -> Option<String> {
    HolderMetadata::decode(&holder.metadata).label
}

fn read_token(text: &str) -> Option<Token> {
    text.parse().ok().and_then(Token::new)
}
