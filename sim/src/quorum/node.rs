//! A quorum node: the core's model for each resource, with a clock, a restart guard and data that can be lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Table, apply, sweep};
use leasehold_core::{Answer, ClientId, Command, Now, Push, Release, Reply, Resource, StoreTime, Token};

use super::event::Event;
use super::planted::Planted;
use crate::executor::ProcessId;
use crate::plan::Micros;
use crate::server::ServerClock;

/// Those of Redis follow its clock of tokens.
pub(super) const TOKENS_PER_MS: u64 = 2_048;

/// A node.
pub(super) struct Node {
    pub(super) is_up: bool,
    pub(super) is_paused: bool,
    /// It refuses connections until then.
    pub(super) unreachable_until: Micros,
    /// Its messages take this much longer until then.
    pub(super) slow: (Micros, Micros),
    pub(super) clock: ServerClock,
    /// Of this life.
    pub(super) run_id: Arc<str>,
    lives: u64,
    number: usize,
    tables: BTreeMap<String, Table>,
    /// Since when the memory of the life with this run id is complete.
    born: Option<(Arc<str>, StoreTime)>,
    /// The connections that are open on its side.
    pub(super) connections: BTreeMap<u64, (ProcessId, ClientId)>,
    /// What arrived while it was paused.
    pub(super) backlog: Vec<Event>,
}

impl Node {
    pub(super) fn new(number: usize, clock: ServerClock) -> Self {
        Self {
            is_up: true,
            is_paused: false,
            unreachable_until: 0,
            slow: (0, 0),
            clock,
            run_id: Arc::from(format!("node-{number}-1")),
            lives: 1,
            number,
            tables: BTreeMap::new(),
            born: None,
            connections: BTreeMap::new(),
            backlog: Vec::new(),
        }
    }

    /// The server process was started anew.
    pub(super) fn begin_life(&mut self, keeps_data: bool) {
        self.lives += 1;
        self.run_id = Arc::from(format!("node-{}-{}", self.number, self.lives));
        if !keeps_data {
            self.flush();
        }
    }

    pub(super) fn flush(&mut self) {
        self.tables.clear();
        self.born = None;
    }

    /// `restart_guard.lua`: until when the node abstains, if it may have lost leases.
    fn abstains_until(&mut self, now: StoreTime, max_ttl: Duration) -> Option<StoreTime> {
        let known = self.born.as_ref().filter(|(run_id, since)| *run_id == self.run_id && *since <= now);
        let since = known.map_or(now, |(_, since)| *since);
        self.born = Some((self.run_id.clone(), since));
        (now < since + max_ttl).then_some(since + max_ttl)
    }

    fn clocks(&self, now: Micros, floor: Option<Token>) -> Now {
        let time = self.clock.at(now);
        let wall = u128::from(time.as_micros()) * u128::from(TOKENS_PER_MS) / 1_000;
        let wall = StoreTime::from_micros(u64::try_from(wall).unwrap_or(u64::MAX));
        Now { wall, floor, may_reserve: false, ..Now::same(time) }
    }

    /// Runs one command. Returns the answer and the pushes.
    pub(super) fn run(
        &mut self,
        now: Micros,
        resource: &Resource,
        command: &Command,
        (floor, max_ttl): (Option<Token>, Option<Duration>),
        planted: Option<Planted>,
    ) -> (Answer, Vec<Push>) {
        let clocks = self.clocks(now, floor);
        let is_planted = |bug| planted == Some(bug);
        if let (Command::Acquire(_), Some(max_ttl)) = (command, max_ttl)
            && let Some(until) = self.abstains_until(clocks.time, max_ttl)
            && !is_planted(Planted::RestartGuardIgnored)
        {
            return (Answer { at: clocks.time, reply: Reply::Abstains(until) }, Vec::new());
        }
        let mut pushes = Vec::new();
        let reachable: Vec<ClientId> = self.connections.values().map(|(_, client)| *client).collect();
        let context = CommandContext {
            now: clocks,
            is_reachable: &mut |client| reachable.contains(&client),
            pushes: &mut pushes,
        };
        let table = self.tables.entry(resource.to_string()).or_default();
        let before = table.clone();
        let mut answer = apply(table, context, command).unwrap_or_else(|never| match never {});
        match command {
            Command::Renew(renew)
                if is_planted(Planted::RenewalsForgotten)
                    || is_planted(Planted::TokenNotStored) && floor.is_some() && renew.reserve == 0 =>
            {
                *table = before;
                pushes.clear();
            }
            Command::Renew(_) if is_planted(Planted::RenewalsRefused) && floor.is_none() => {
                answer.reply = Reply::NotHeld;
            }
            Command::Release(Release { acquisition, .. })
                if is_planted(Planted::ReleaseForgotten) && acquisition.sequence.is_multiple_of(4) =>
            {
                *table = before;
                pushes.clear();
            }
            _ if is_planted(Planted::PushesLost) => pushes.clear(),
            _ => {}
        }
        (answer, pushes)
    }

    /// Holders and waiters by resource, as `Inspect` shows them.
    pub(super) fn left(&mut self, now: Micros) -> Vec<(String, ClientId)> {
        let clocks = self.clocks(now, None);
        let mut left = Vec::new();
        for (name, table) in &mut self.tables {
            let context =
                CommandContext { now: clocks, is_reachable: &mut |_| false, pushes: &mut Vec::new() };
            let answer = apply(table, context, &Command::Inspect).unwrap_or_else(|never| match never {});
            let Reply::View(view) = answer.reply else { continue };
            left.extend(view.holders.iter().map(|holder| (name.clone(), holder.acquisition.client)));
            left.extend(view.waiters.iter().map(|waiter| (name.clone(), waiter.acquisition.client)));
        }
        left
    }

    /// Whether anything is left of any resource at this time.
    pub(super) fn keeps(&mut self, now: Micros) -> Option<String> {
        let clocks = self.clocks(now, None);
        self.tables.iter_mut().find_map(|(name, table)| {
            let context =
                CommandContext { now: clocks, is_reachable: &mut |_| false, pushes: &mut Vec::new() };
            let keeps = sweep(table, context).unwrap_or_else(|never| match never {});
            keeps.then(|| name.clone())
        })
    }
}
