//! A stranger: another user of the servers, without a right to any key. It knows the names of all channels, listens, repeats what it has
//! heard, and publishes what it likes.
//!
//! It has its own source of chance, so that a run without it is the same otherwise.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, ClientId, Grant, GrantProof, GrantSecret, HeadHint, MAX_TOKEN, Push, PushKind,
    StoreTime, TokenRange,
};

use crate::rng::Rng;

/// How many pushes it remembers.
const MEMORY: usize = 64;

/// What a stranger knows, and what it does not.
#[derive(Debug)]
pub struct Stranger {
    rng: Rng,
    /// It is in about every second run.
    is_present: bool,
    overheard: VecDeque<Push>,
    /// It does not know them: with a planted bug, clients believe what proves nothing.
    secrets: BTreeMap<Acquisition, GrantSecret>,
}

impl Stranger {
    /// The stranger of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 7);
        let is_present = rng.chance(500);
        Self { rng, is_present, overheard: VecDeque::new(), secrets: BTreeMap::new() }
    }

    /// Whether it publishes in this run.
    #[must_use]
    pub const fn is_present(&self) -> bool {
        self.is_present
    }

    /// A server has received this attempt.
    pub fn note(&mut self, acquire: &Acquire) {
        if acquire.wait.is_some() {
            self.secrets.insert(acquire.acquisition, acquire.secret);
        }
    }

    /// The secret that a server has last received for an attempt.
    #[must_use]
    pub fn secret(&self, acquisition: Acquisition) -> GrantSecret {
        self.secrets.get(&acquisition).copied().unwrap_or(GrantSecret::UNUSED)
    }

    /// Hears a push.
    pub fn hear(&mut self, push: &Push) {
        if self.overheard.len() == MEMORY {
            self.overheard.pop_front();
        }
        self.overheard.push_back(push.clone());
    }

    /// Which of the subscribed clients gets what, now by the server's clock. `is_believed`: the planted bug.
    pub fn publish(&mut self, at: StoreTime, clients: &[ClientId], is_believed: bool) -> Vec<Push> {
        if !self.is_present || clients.is_empty() || !self.rng.chance(100) {
            return Vec::new();
        }
        let count = if self.rng.chance(50) { 200 } else { self.rng.between(1, 4) };
        (0..count).filter_map(|_| self.forge(at, clients, is_believed)).collect()
    }

    fn forge(&mut self, now: StoreTime, clients: &[ClientId], is_believed: bool) -> Option<Push> {
        if self.rng.chance(300) {
            // As it was, or to another attempt.
            let index = self.rng.index(self.overheard.len());
            let push = self.overheard.get(index).cloned()?;
            return Some(if self.rng.chance(500) {
                push
            } else {
                Push::new(self.target(clients), push.at, push.kind)
            });
        }
        let acquisition = self.target(clients);
        let span = Duration::from_millis(self.rng.scaled(1, 600_000));
        let at = match self.rng.below(4) {
            0 => now.saturating_sub(span),
            1 => now + span,
            _ => now,
        };
        let kind = match self.rng.below(5) {
            0 => PushKind::Revoked,
            1 => PushKind::Contended,
            2 => {
                let choices = [StoreTime::ZERO, now, now + span, StoreTime::NEVER];
                PushKind::Next(HeadHint { repoll_at: self.rng.pick(&choices) })
            }
            _ => {
                let grant = self.grant(now);
                let proof = GrantProof::new(self.rng.bits().to_be_bytes());
                let believed = self.secret(acquisition).prove(at, &grant);
                PushKind::Granted(grant, if is_believed { believed } else { proof })
            }
        };
        Some(Push::new(acquisition, at, kind))
    }

    fn grant(&mut self, now: StoreTime) -> Grant {
        let before = self.rng.pick(&[now.as_micros(), now.as_micros() + 1_000_000, MAX_TOKEN - 1, 1]);
        let valid_for = Duration::from_millis(self.rng.scaled(1, 600_000));
        Grant { tokens: TokenRange::next(before, 0, StoreTime::ZERO), valid_for, is_plain: false }
    }

    /// An attempt that it has heard of, or whose number it guesses.
    fn target(&mut self, clients: &[ClientId]) -> Acquisition {
        let index = self.rng.index(self.overheard.len());
        if self.rng.chance(500)
            && let Some(push) = self.overheard.get(index)
        {
            return push.acquisition;
        }
        let client = clients[self.rng.index(clients.len())];
        // Most are of attempts that exist.
        let known: Vec<Acquisition> =
            self.secrets.keys().filter(|known| known.client == client).copied().collect();
        match known.last() {
            Some(known) if self.rng.chance(800) => *known,
            _ => Acquisition { client, sequence: self.rng.between(1, 30) },
        }
    }
}
