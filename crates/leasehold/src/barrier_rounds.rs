//! Decodes the rounds of a barrier from its leases. Pure: it only reads a view.

use leasehold_core::{Holder, Token, View};
use leasehold_store::HolderMetadata;

/// The weight of a party that has arrived and waits.
pub(crate) const ARRIVAL: u32 = 1 << 16;

/// As an arrival, after a claim that was not confirmed.
pub(crate) const RETURNED: u32 = ARRIVAL + 1;

pub(crate) const CLAIM: u32 = ARRIVAL + 2;

pub(crate) const DEPARTURE: u32 = ARRIVAL + 3;

/// The weight of a party that does not know of its lease yet. It takes the place of a party, so that no round passes around it.
pub(crate) const ARRIVING: u32 = ARRIVAL + 4;

pub(crate) const MARK: u32 = 1;

/// The number of parties in this capacity or weight.
pub(crate) fn parties(weight: u32) -> u32 {
    weight / ARRIVAL
}

/// The number of passed rounds that the store remembers. Two parties may mark the same round, and of two marked rounds with a
/// party in common only one has passed.
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

/// The number of marks.
pub(crate) fn count_marks(view: &View) -> usize {
    view.holders.iter().filter(|holder| is_mark(holder)).count()
}

/// Only a retained mark decides: a live one may still be revoked.
fn is_mark(holder: &Holder) -> bool {
    holder.weight == MARK && holder.retained
}

/// A claim that is not decided yet: a claim, or a mark that is not retained yet.
fn is_undecided(holder: &Holder) -> bool {
    matches!(holder.weight, CLAIM | MARK) && !holder.retained
}

/// The parties that pass together, by the tokens of their arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) first: Token,
    pub(crate) last: Token,
}

impl Round {
    /// The round in which this party passed, if it did. For a party that has not departed.
    pub(crate) fn passed(view: &View, party: Token) -> Option<Self> {
        view.holders.iter().filter_map(Self::of_mark).find(|round| round.has(party))
    }

    /// As [`Self::passed`], for a party that departed with the token `departed`. A claim from before its departure was confirmed only if it saw the
    /// party; a later claim did not count it.
    pub(crate) fn passed_before(view: &View, party: Token, departed: Token) -> Option<Self> {
        let before = view.holders.iter().filter(|holder| holder.token < departed);
        before.filter_map(Self::of_mark).find(|round| round.has(party))
    }

    /// Whether a claim from before this party's departure may still count it.
    pub(crate) fn is_claimed_before(view: &View, party: Token, departed: Token) -> bool {
        let before = view.holders.iter().filter(|holder| holder.token < departed && is_undecided(holder));
        before.filter_map(Self::of_claim).any(|round| round.has(party))
    }

    /// The round of this party, if all of its parties are there and none of them has passed.
    pub(crate) fn present(view: &View, party: Token, parties: u32) -> Option<Self> {
        // A party may still be in the view when its round has passed or is about to pass. A mark no longer has the weight of an
        // arrival, so a party of the next round may have arrived as well.
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

    // --- The labels of leases --------------------------------------------------------------------

    pub(crate) fn claim(&self, party: Token) -> String {
        format!("party {party} claims {} {}", self.first, self.last)
    }

    pub(crate) fn returned(party: Token) -> String {
        format!("party {party}")
    }

    pub(crate) fn mark(&self) -> String {
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

/// The token of a party's arrival, if this lease belongs to a party that has not departed.
fn arrival_of(holder: &Holder) -> Option<Token> {
    match holder.weight {
        _ if holder.retained => None,
        ARRIVAL => Some(holder.token),
        // It has replaced the arrival, and has a token of its own.
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
