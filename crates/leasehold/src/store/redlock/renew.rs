//! Keeping a lease at all nodes, and giving it back.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{
    Acquire, Command, Failure, LocalTime, Release, Renew, Reply, Resource, Tally, Word, Words,
};
use tokio::time::{sleep, timeout};

use super::attempts::{Asks, Try};
use super::{LATE_BY, Quorum, answer};
use crate::engine::clock;
use crate::store::{Answered, StoreError};

/// How long a tombstone stands at a node: longer than any delayed command can be under way.
pub(super) const TOMBSTONE: Duration = Duration::from_secs(60);

impl Quorum {
    // --- Keeping ---------------------------------------------------------------------------------

    /// Renews these, all at each node in one flight.
    pub(super) async fn renew(self: &Arc<Self>, batch: Vec<(Arc<Resource>, Command)>) -> Vec<Answered> {
        let known: Vec<Option<(Renew, Try)>> = batch
            .into_iter()
            .map(|(_, command)| match command {
                Command::Renew(renew) => {
                    let known = self.leases.get(renew.acquisition).filter(|known| known.token.is_some())?;
                    Some((renew, known))
                }
                _ => None,
            })
            .collect();
        let asked: Vec<&(Renew, Try)> = known.iter().flatten().collect();
        if asked.is_empty() {
            return known.iter().map(|_| answer(clock::local(), Reply::NotHeld)).collect();
        }
        let commands: Vec<(Arc<Resource>, Command)> = asked
            .iter()
            .map(|(renew, known)| {
                let renew = Renew { acquisition: known.acquisition, ttl: renew.ttl, reserve: 0 };
                (known.resource.clone(), Command::Renew(renew))
            })
            .collect();
        let shortest = asked.iter().map(|(renew, _)| renew.ttl).min().unwrap_or_default();
        let mut words: Vec<Words> = asked.iter().map(|_| Words::new(self.nodes.len())).collect();
        let mut hearing = FuturesUnordered::new();
        let mut errors = self.doubles();
        for (node, to) in self.nodes.iter().enumerate() {
            if errors[node].is_some() {
                words.iter_mut().for_each(|words| words.handle_word(node, Word::Failed));
                continue;
            }
            let call = to.clone().call(commands.clone(), None);
            hearing.push(async move { (node, call.await) });
        }
        let mut limit = pin!(sleep(self.limit(shortest)));
        while words.iter().any(|words| words.poll_tally().is_none()) {
            tokio::select! {
                // What is there counts, even if the whole process stood still until the time was over.
                biased;
                Some((node, answers)) = hearing.next() => {
                    for (words, answered) in words.iter_mut().zip(&answers) {
                        words.handle_word(node, word_of(answered));
                        if let Err(error) = answered {
                            errors[node] = Some(error.message.clone());
                        }
                    }
                }
                () = &mut limit => words.iter_mut().for_each(Words::handle_timeout),
            }
        }
        if !hearing.is_empty() {
            tokio::spawn(async move { while hearing.next().await.is_some() {} });
        }
        let now = clock::local();
        let mut answers = asked.iter().zip(&words).map(|((renew, known), words)| match words.poll_tally() {
            Some(Tally::Held { lasts }) => {
                self.join_others(renew, known, words);
                answer(now, Reply::Renewed { lasts, tokens: None, wanted: false })
            }
            Some(Tally::NotHeld) => answer(now, Reply::NotHeld),
            Some(Tally::Unknown) | None => {
                Err(StoreError { failure: Failure::Unknown, message: self.not_renewed(words, &errors) })
            }
        });
        known
            .iter()
            .map(|known| match known {
                Some(_) => answers.next().unwrap_or_else(crate::handle::missing_response),
                None => answer(now, Reply::NotHeld),
            })
            .collect()
    }

    /// Asks the nodes that do not have the lease for it too, now that a quorum has kept it: they may have been away, or were
    /// started again. They learn its token by that.
    fn join_others(self: &Arc<Self>, renew: &Renew, known: &Try, words: &Words) {
        for (node, word) in words.words().iter().enumerate() {
            if *word != Some(Word::NotHeld) || !self.leases.join(renew.acquisition, known.acquisition, node) {
                continue;
            }
            let acquire = Acquire {
                metadata: known.wanted.metadata.clone(),
                ..Acquire::exclusive(known.acquisition, renew.ttl)
            };
            let call = (known.resource.clone(), Command::from(acquire));
            let voting = self.ask_for_vote(node, known.asked.clone(), call, known.token);
            tokio::spawn(voting);
        }
    }

    // --- Giving back -----------------------------------------------------------------------------

    pub(super) async fn release(self: &Arc<Self>, resource: Arc<Resource>, release: Release) -> Answered {
        let until = (!release.tombstone.is_zero()).then(|| clock::local() + release.tombstone);
        if until.is_some() {
            self.in_debt.notify_one();
        }
        let Some(known) = self.leases.give_back(release.acquisition, until) else {
            // No try of it has left anything. Whoever gave up wants to know whether that is the word of a quorum.
            self.ask_all(&resource, Command::Inspect).await?;
            return answer(clock::local(), Reply::NotHeld);
        };
        if known.wanted.wait.is_some() {
            // Others may wait as this client did.
            self.note_contended(&known.resource);
        }
        let mut words = Words::new(self.nodes.len());
        let mut hearing = FuturesUnordered::new();
        for node in 0..self.nodes.len() {
            let giving = self.clone().give_back(node, &known, release.min_hold, false);
            hearing.push(async move { (node, giving.await) });
        }
        let mut limit = pin!(sleep(self.limit(known.wanted.ttl)));
        let tally = loop {
            if let Some(tally) = words.poll_tally() {
                break tally;
            }
            tokio::select! {
                biased;
                Some((node, word)) = hearing.next() => words.handle_word(node, word),
                () = &mut limit => words.handle_timeout(),
            }
        };
        if !hearing.is_empty() {
            tokio::spawn(async move { while hearing.next().await.is_some() {} });
        }
        let now = clock::local();
        match tally {
            Tally::Held { .. } => answer(now, Reply::Released),
            Tally::NotHeld => answer(now, Reply::NotHeld),
            Tally::Unknown if words.is_quorum() => answer(now, Reply::Released),
            // Nodes that did not answer are told again until the lease is over there.
            Tally::Unknown => {
                let message = self.not_told(&words);
                Err(StoreError { failure: Failure::Unknown, message })
            }
        }
    }

    /// Tells one node, and remembers it if it does not answer. If it may have nothing, that is waited for first.
    pub(super) fn give_back(
        self: Arc<Self>,
        node: usize,
        known: &Try,
        min_hold: Duration,
        may_have_nothing: bool,
    ) -> impl Future<Output = Word> + Send + use<> {
        let (resource, asked) = (known.resource.clone(), known.asked.clone());
        let release = Release { acquisition: known.acquisition, min_hold, tombstone: Duration::ZERO };
        // Nothing that was asked for before can last longer.
        let until = clock::local() + known.wanted.ttl + TOMBSTONE;
        // Dropped before it is answered, it is owed too.
        let mut owing = Owing { quorum: self.clone(), node, resource, release, until, is_told: false };
        if asked[node].get().unanswered > 0 {
            owing.release.tombstone = TOMBSTONE;
        }
        async move {
            if may_have_nothing {
                let _ = timeout(LATE_BY, asked[node].all_answered()).await;
                if matches!(asked[node].get(), Asks { unanswered: 0, has_something: false, .. }) {
                    owing.paid();
                    return Word::NotHeld;
                }
            }
            let asks = asked[node].get();
            // What is not answered yet mostly is on its way, ahead of this. A tombstone, which the store would have to keep,
            // is for what is not.
            let first = owing.tell(Duration::ZERO).await;
            let is_over = match first {
                Word::Failed => return first,
                // What the node gave back is what it was asked for, and it was asked only once.
                Word::Held { .. } => asks.unanswered == 0 || asks.sent == 1,
                Word::NotHeld => asks.unanswered == 0,
            };
            if asks.unanswered > 0 {
                let _ = timeout(LATE_BY, asked[node].all_answered()).await;
            }
            if is_over && asked[node].get().unanswered == 0 {
                owing.paid();
                return first;
            }
            // It may have been granted since.
            let tombstone = if asked[node].get().unanswered > 0 { TOMBSTONE } else { Duration::ZERO };
            let second = owing.tell(tombstone).await;
            if second != Word::Failed {
                owing.paid();
            }
            if second == Word::NotHeld { first } else { second }
        }
    }
}

/// A release that is owed unless the node has answered it.
struct Owing {
    quorum: Arc<Quorum>,
    node: usize,
    resource: Arc<Resource>,
    release: Release,
    until: LocalTime,
    is_told: bool,
}

impl Owing {
    fn paid(&mut self) {
        self.is_told = true;
    }

    async fn tell(&self, tombstone: Duration) -> Word {
        let command = Command::Release(Release { tombstone, ..self.release.clone() });
        match self.quorum.nodes[self.node].clone().call_one(self.resource.clone(), command, None).await {
            Ok(answer) if answer.reply == Reply::Released => Word::Held { lasts: Duration::ZERO },
            Ok(_) => Word::NotHeld,
            Err(_) => Word::Failed,
        }
    }
}

impl Drop for Owing {
    fn drop(&mut self) {
        if !self.is_told {
            self.quorum.nodes[self.node].owe(self.resource.clone(), self.release.clone(), self.until);
            self.quorum.in_debt.notify_one();
        }
    }
}

fn word_of(answered: &Answered) -> Word {
    match answered {
        Ok(answer) => match answer.reply {
            Reply::Renewed { lasts, .. } => Word::Held { lasts },
            Reply::NotHeld => Word::NotHeld,
            _ => Word::Failed,
        },
        Err(_) => Word::Failed,
    }
}
