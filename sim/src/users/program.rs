//! A program with another library, as redis-py's lock would have it: it takes the key by polling, holds it for a while, and deletes it.

use std::time::Duration;

use leasehold::simulation::{KeyAnswer, KeyCommand, LeaseProbe};
use leasehold_core::{LocalTime, drift_margin};

use super::user::span;
use crate::executor::ProcessId;
use crate::plan::{ProgramEnd, ProgramSection};
use crate::transport::{KeyFuture, Sleep};
use crate::world::{Hold, World, key_name, run_as, try_with, with};

/// A process of the program with this number.
struct Program {
    process: ProcessId,
    number: usize,
}

/// Its sections, from where an earlier process was killed.
pub(crate) async fn run_program(process: ProcessId, number: usize) {
    let plan = with(|world| world.plan.clone());
    let program = Program { process, number };
    while let Some(section) = with(|world| {
        let at = world.bridging.progress[number];
        plan.bridges.programs[number].sections.get(at).filter(|_| !world.is_healed)
    }) {
        Sleep::span(process, section.think).await;
        if !with(|world| world.is_healed) {
            program.section(section).await;
        }
        with(|world| world.bridging.progress[number] += 1);
    }
}

/// The key of this guard's lock was deleted by hand, long enough ago for the guard to know.
pub(crate) fn check_notified(guard: u64) {
    let probe = |world: &World| {
        let record = world.books.records.get(&guard)?;
        Some((record.process, record.probe.clone()))
    };
    if let Some((process, probe)) = with(|world| probe(world)) {
        let is_trusted = is_trusted(process, &probe);
        with(|world| world.check_notified(guard, is_trusted));
    }
}

/// Whether a guard's lease is trusted, by the clock of its process.
fn is_trusted(process: ProcessId, probe: &LeaseProbe) -> bool {
    run_as(process, || !probe.remaining().is_zero())
}

/// The program relies on its lock as long as this exists, and until its expiry.
struct Holding(u64);

impl Drop for Holding {
    fn drop(&mut self) {
        try_with(|world| world.bridging.holds.remove(&self.0));
    }
}

impl Holding {
    fn begin(program: &Program, lock: usize, until: LocalTime) -> Self {
        let Program { process, .. } = *program;
        let (number, guards) = with(|world| {
            let number = world.number();
            world.bridging.holds.insert(number, Hold { lock, process, until });
            (number, world.guards_of(lock))
        });
        guards.into_iter().for_each(|(guard, owner, probe)| {
            let is_trusted = is_trusted(owner, &probe);
            with(|world| world.check_program(lock, process, (guard, owner, is_trusted)));
        });
        Self(number)
    }

    fn extend(&self, until: LocalTime) {
        with(|world| {
            if let Some(hold) = world.bridging.holds.get_mut(&self.0) {
                hold.until = until;
            }
        });
    }
}

impl Program {
    fn now(&self) -> LocalTime {
        with(|world| world.local(self.process))
    }

    fn say(&self, number: u64, text: impl FnOnce() -> String) {
        with(|world| {
            let column = world.column(self.process);
            world.say(column, &[number, self.number as u64], || format!("program: {}", text()));
        });
    }

    async fn run(&self, command: KeyCommand) -> Option<KeyAnswer> {
        KeyFuture::new(self.process, vec![command]).await.ok()?.pop()?.ok()
    }

    async fn section(&self, section: &ProgramSection) {
        if section.end == ProgramEnd::Delete {
            return self.delete(section.lock).await;
        }
        let holder = format!("{:032x}", u128::from_be_bytes(with(|world| world.bridging.random())));
        let Some(holding) = self.take(section, &holder).await else { return };
        if section.renews {
            self.hold(section, &holder, &holding).await;
        } else {
            Sleep::span(self.process, section.hold).await;
        }
        drop(holding);
        self.say(91, || format!("gives up k{}", section.lock));
        if section.end == ProgramEnd::Release {
            // Without an answer the key expires.
            self.run(KeyCommand::Release(key_name(section.lock), holder)).await;
        }
    }

    /// Deletes the key of any holder.
    async fn delete(&self, lock: usize) {
        let found = self.run(KeyCommand::Holder(key_name(lock))).await;
        if let Some(KeyAnswer::Text(holder)) = found {
            self.say(92, || format!("deletes k{lock}"));
            self.run(KeyCommand::Release(key_name(lock), holder)).await;
        }
    }

    /// Tries until the lock is taken, or something fails.
    async fn take(&self, section: &ProgramSection, holder: &str) -> Option<Holding> {
        let ttl = span(section.ttl);
        let give_up_at = self.now() + span(section.patience);
        loop {
            let sent_at = self.now();
            let take = KeyCommand::Take(key_name(section.lock), holder.to_owned(), ttl);
            match self.run(take).await? {
                KeyAnswer::Okay => {
                    let until = trusted_until(sent_at, ttl);
                    self.say(90, || format!("holds k{}", section.lock));
                    return (self.now() < until).then(|| Holding::begin(self, section.lock, until));
                }
                _ if self.now() >= give_up_at || with(|world| world.is_healed) => return None,
                _ => Sleep::span(self.process, section.pause).await,
            }
        }
    }

    /// Renews the lock until the section is over, or the lock is lost.
    async fn hold(&self, section: &ProgramSection, holder: &str, holding: &Holding) {
        let (ttl, end) = (span(section.ttl), self.now() + span(section.hold));
        while self.now() < end {
            Sleep::new(self.process, end.min(self.now() + ttl / 3)).await;
            let sent_at = self.now();
            let renew = KeyCommand::Renew(key_name(section.lock), holder.to_owned(), ttl);
            match self.run(renew).await {
                Some(KeyAnswer::Number(1)) => holding.extend(trusted_until(sent_at, ttl)),
                Some(_) => return,
                // It is tried again.
                None => {}
            }
        }
    }
}

/// Until when a lock may be relied on that was asked for then. The library has no margin for clocks that differ; that is its own mistake.
fn trusted_until(sent_at: LocalTime, ttl: Duration) -> LocalTime {
    sent_at + ttl.saturating_sub(drift_margin(ttl))
}
