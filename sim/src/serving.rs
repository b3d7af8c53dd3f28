//! How the servers run commands and publish pushes.

mod keys;

use std::sync::Arc;
use std::time::Duration;

use leasehold::simulation::{Answered, Call, CallFailed};
use leasehold_core::{
    Acquire, Answer, Command, Effect, Failure, Push, PushKind, Reply, Resource, TokenRange,
};

use crate::checks::{DENIED, Step};
use crate::executor::ProcessId;
use crate::history::Column;
use crate::plan::{Fault, FaultPlan, LockKind, SECOND};
use crate::planted::Planted;
use crate::server::index_of;
use crate::world::{Content, Event, World};

impl World {
    pub(crate) fn request(
        &mut self,
        connection: u64,
        call: u64,
        attempt: u32,
        is_late: bool,
        content: Content,
    ) {
        let again = |content| Event::Request { connection, call, attempt, is_late: true, content };
        let Some((server, process, content)) = self.receive(connection, is_late, content, again) else {
            return;
        };
        let answers = self.run(server, process, &content);
        if self.loses(false) {
            self.say(Column::Server, &[4, call], || format!("the answer to call {call} is lost"));
            return;
        }
        self.down(connection, Event::Response { connection, call, attempt, answers });
    }

    /// What has arrived over a connection, and where from. What came over one that was cut comes later, or never.
    fn receive<T>(
        &mut self,
        connection: u64,
        is_late: bool,
        content: T,
        again: impl FnOnce(T) -> Event,
    ) -> Option<(usize, ProcessId, T)> {
        let known = self.connections.get(&connection)?;
        let (server, process, late) = (known.server, known.process, known.late);
        if !self.servers[server].is_up {
            return None;
        }
        if is_late || self.servers[server].connections.contains_key(&connection) {
            return Some((server, process, content));
        }
        match late {
            Some(late) => self.after(late, again(content)),
            None => {
                let delay = self.delay();
                self.after(delay, Event::ClosedAtClient { connection });
            }
        }
        None
    }

    fn run(&mut self, server: usize, process: ProcessId, content: &Content) -> Vec<Answered> {
        match content {
            Content::Batch(batch, replicas) => batch
                .iter()
                .map(|Call { resource, command }| {
                    let is_durable = self.is_durable(server, *replicas);
                    let answer = self.run_one(server, process, resource, command, is_durable)?;
                    self.acknowledged(server, *replicas, answer)
                })
                .collect(),
            Content::All(attempts) => self.run_all(server, process, attempts),
        }
    }

    /// The answer, if the replicas have what it tells. A release needs none: a failover can undo it, and only delays the next holder.
    fn acknowledged(&mut self, server: usize, replicas: u32, answer: Answer) -> Answered {
        let is_counted = matches!(answer.reply, Reply::Granted(_) | Reply::Renewed { .. });
        if !is_counted || self.is_durable(server, replicas) {
            return Ok(answer);
        }
        self.say(Column::Server, &[8], || "no replica has it".to_owned());
        Err(CallFailed { failure: Failure::NotDurable, message: "too few replicas have it" })
    }

    /// Whether so many replicas have what the server writes now.
    fn is_durable(&self, server: usize, replicas: u32) -> bool {
        replicas == 0 || self.has_replica(server) || self.planted == Some(Planted::ReplicasUnasked)
    }

    fn refuses(&mut self, server: usize, command: &Command) -> Option<CallFailed> {
        let is_acquire = matches!(command, Command::Acquire(_));
        if is_acquire && self.servers[server].is_full {
            return Some(CallFailed {
                failure: Failure::Transient(Effect::None),
                message: "the server's memory is full",
            });
        }
        if is_acquire && self.servers[server].denies {
            return Some(self.denial());
        }
        let is_planted = match self.planted {
            Some(Planted::SpuriousError) => is_acquire && self.rng.chance(20),
            Some(Planted::ErrorForTries) => is_try(command) && self.rng.chance(20),
            _ => false,
        };
        is_planted.then_some(CallFailed { failure: Failure::NotSent, message: "a planted error" })
    }

    /// The error of an attempt while a right is missing.
    fn denial(&self) -> CallFailed {
        let failure = match self.planted {
            Some(Planted::DenialMayPass) => Failure::Transient(Effect::None),
            _ => Failure::Permanent(Effect::None),
        };
        CallFailed { failure, message: DENIED }
    }

    fn run_one(
        &mut self,
        server: usize,
        process: ProcessId,
        resource: &Resource,
        command: &Command,
        is_durable: bool,
    ) -> Answered {
        if let Some(failed) = self.refuses(server, command) {
            return Err(failed);
        }
        let index = index_of(resource);
        if let Command::Acquire(acquire) = command {
            self.stranger.note(acquire);
        }
        let (now, planted) = (self.now, self.planted);
        let chance = self.planted.is_some() && self.rng.chance(100);
        let is_owned = self.plan.locks[index].kind == LockKind::Reentrant;
        let is_short = self.is_healed && self.plan.locks[index].ttl <= 3 * SECOND;
        let Self { servers, books, .. } = self;
        let this = &mut servers[server];
        let (clock, epoch) = (this.clock.at(now), (server, this.epoch));
        let mut shadow = std::mem::take(&mut this.data.shadows[index]);
        let step = Step { now, resource: index, clock, command, epoch, is_durable };
        books.before(step, &mut shadow, false);
        let (mut unreachable, mut pushes) = (Vec::new(), Vec::new());
        let reachable: Vec<_> = this.subscribers().map(|(_, peer)| peer.client).collect();
        let mut is_first = chance
            && match planted {
                Some(Planted::HeadSkipped) => true,
                Some(Planted::OwnerSkipped) => is_owned,
                _ => false,
            };
        let mut is_reachable = |client| {
            let is_reachable = reachable.contains(&client);
            if !is_reachable {
                unreachable.push(client);
            }
            is_reachable && !std::mem::take(&mut is_first)
        };
        let mut answer = match (planted, command) {
            (Some(Planted::RenewalsForgotten), Command::Renew(_)) => {
                let before = this.data.tables[index].clone();
                let answer = this.apply(now, index, command, &mut is_reachable, &mut pushes);
                this.data.tables[index] = before;
                pushes.clear();
                answer
            }
            (Some(Planted::RenewalRefused), Command::Renew(_)) if chance => {
                Answer { at: clock, reply: Reply::NotHeld }
            }
            (Some(Planted::ReleaseForgotten), Command::Release(_)) if chance => {
                Answer { at: clock, reply: Reply::Released }
            }
            (Some(Planted::ShortReleaseForgotten), Command::Release(_)) if chance && is_short => {
                Answer { at: clock, reply: Reply::Released }
            }
            (Some(Planted::TombstonesKept), Command::Release(release)) if !release.tombstone.is_zero() => {
                let tombstone = Duration::from_secs(36_000);
                let lasting = leasehold_core::Release { tombstone, ..release.clone() };
                this.apply(now, index, &Command::Release(lasting), &mut is_reachable, &mut pushes)
            }
            (Some(Planted::WaiterForgotten), Command::Acquire(acquire))
                if acquire.wait.is_some() && acquire.acquisition.sequence.is_multiple_of(4) =>
            {
                let before = this.data.tables[index].clone();
                let answer = this.apply(now, index, command, &mut is_reachable, &mut pushes);
                if let Reply::Queued(_) = answer.reply {
                    this.data.tables[index] = before;
                    pushes.clear();
                }
                answer
            }
            (Some(Planted::RetentionForgotten), Command::Release(release)) if chance => {
                let early = leasehold_core::Release { min_hold: Duration::ZERO, ..release.clone() };
                this.apply(now, index, &Command::Release(early), &mut is_reachable, &mut pushes)
            }
            (Some(Planted::NoTombstones), Command::Release(release)) => {
                let plain = leasehold_core::Release { tombstone: Duration::ZERO, ..release.clone() };
                this.apply(now, index, &Command::Release(plain), &mut is_reachable, &mut pushes)
            }
            _ => this.apply(now, index, command, &mut is_reachable, &mut pushes),
        };
        match (planted, &mut answer.reply) {
            (Some(Planted::TokenRepeated), Reply::Granted(grant)) if chance => {
                let earlier = grant.tokens.first.get() - 30 * SECOND;
                if let Some(token) = leasehold_core::Token::new(earlier) {
                    grant.tokens.first = token;
                    grant.tokens.last = token;
                }
            }
            (Some(bug @ (Planted::OwnerKeepsToken | Planted::UpgradeKeepsToken)), Reply::Granted(grant))
                if is_owned == (bug == Planted::OwnerKeepsToken) =>
            {
                if let Some(token) = books.earlier_token(index, command) {
                    grant.tokens = TokenRange { first: token, last: token };
                }
            }
            (Some(Planted::EagerRecheck), Reply::Queued(queued)) => {
                queued.is_head = true;
                queued.repoll_at = answer.at;
            }
            _ => {}
        }
        books.after(step, &mut shadow, &answer.reply, &pushes, &unreachable);
        this.data.shadows[index] = shadow;
        // A guard whose lease is renewed, or ended by force, held the lock until now, also if its user looks for a loss later.
        let was_held = match (command, &answer.reply) {
            (Command::Renew(renew), Reply::Renewed { .. }) => books.has_guard(renew.acquisition),
            (_, Reply::Forced(holders)) => holders.iter().any(|holder| books.has_guard(holder.acquisition)),
            _ => false,
        };
        if was_held {
            self.demand[index].busy_at = now;
        }
        if let Command::ForceRelease = command {
            self.demand[index].forced_at = now;
        }
        if self.plan.locks[index].is_bridged {
            self.check_key_of_ended(server, index, command, &answer.reply);
        }
        let column = self.column(process);
        self.note_command(column, server, resource, command, &answer);
        self.publish(server, pushes);
        self.note_refusal(process, &answer);
        if planted == Some(Planted::BusyWhileFree) && chance && is_try(command) {
            answer.reply = Reply::Busy;
        }
        Ok(answer)
    }

    fn note_refusal(&mut self, process: ProcessId, answer: &Answer) {
        if let Reply::Busy | Reply::Queued(_) = answer.reply {
            self.processes[process].refused_at = self.now;
        }
    }

    fn run_all(
        &mut self,
        server: usize,
        process: ProcessId,
        attempts: &[(Arc<Resource>, Arc<Acquire>)],
    ) -> Vec<Answered> {
        if self.servers[server].is_full {
            let full = CallFailed {
                failure: Failure::Transient(Effect::None),
                message: "the server's memory is full",
            };
            return vec![Err(full); attempts.len()];
        }
        if self.servers[server].denies {
            return vec![Err(self.denial()); attempts.len()];
        }
        let now = self.now;
        let Self { servers, books, .. } = self;
        let this = &mut servers[server];
        let (clock, epoch) = (this.clock.at(now), (server, this.epoch));
        let commands: Vec<Command> =
            attempts.iter().map(|(_, acquire)| Command::Acquire(acquire.clone())).collect();
        let indexes: Vec<usize> = attempts.iter().map(|(resource, _)| index_of(resource)).collect();
        for (index, command) in indexes.iter().zip(&commands) {
            let mut shadow = std::mem::take(&mut this.data.shadows[*index]);
            books.before(
                Step { now, resource: *index, clock, command, epoch, is_durable: true },
                &mut shadow,
                true,
            );
            this.data.shadows[*index] = shadow;
        }
        let (mut unreachable, mut pushes) = (Vec::new(), Vec::new());
        let reachable: Vec<_> = this.subscribers().map(|(_, peer)| peer.client).collect();
        let mut is_reachable = |client| {
            let is_reachable = reachable.contains(&client);
            if !is_reachable {
                unreachable.push(client);
            }
            is_reachable
        };
        let steps: Vec<_> =
            indexes.iter().copied().zip(attempts.iter().map(|(_, acquire)| acquire)).collect();
        let answers = this.apply_all(now, &steps, &mut is_reachable, &mut pushes);
        let mut seen = Vec::new();
        for (((index, command), answer), (resource, _)) in
            indexes.iter().zip(&commands).zip(&answers).zip(attempts)
        {
            let mut shadow = std::mem::take(&mut this.data.shadows[*index]);
            // Pushes name no resource: those of the attempts that the books know here.
            let theirs: Vec<Push> =
                pushes.iter().filter(|push| books.is_of(push.acquisition, *index)).cloned().collect();
            let step = Step { now, resource: *index, clock, command, epoch, is_durable: true };
            books.after(step, &mut shadow, &answer.reply, &theirs, &unreachable);
            this.data.shadows[*index] = shadow;
            seen.push((resource.clone(), command.clone(), answer.clone()));
        }
        let column = self.column(process);
        for (resource, command, answer) in seen {
            self.note_refusal(process, &answer);
            self.note_command(column, server, &resource, &command, &answer);
        }
        self.publish(server, pushes);
        answers.into_iter().map(Ok).collect()
    }

    fn note_command(
        &mut self,
        column: Column,
        server: usize,
        resource: &Resource,
        command: &Command,
        answer: &Answer,
    ) {
        let number = match &answer.reply {
            Reply::Granted(grant) => grant.tokens.first.get(),
            Reply::Renewed { valid_for, .. } => u64::try_from(valid_for.as_micros()).unwrap_or(0),
            Reply::Queued(queued) => queued.repoll_at.as_micros(),
            _ => 0,
        };
        let who = match column {
            Column::Server => 0,
            Column::Client(client) => client as u64 + 1,
        };
        let kind = match command {
            Command::Acquire(acquire) => 16 + acquire.acquisition.sequence * 8,
            Command::Renew(renew) => 17 + renew.acquisition.sequence * 8,
            Command::Release(release) => 18 + release.acquisition.sequence * 8,
            Command::Inspect => 19,
            Command::ForceRelease => 20,
        };
        self.say(Column::Server, &[kind, who, number, server as u64], || {
            let who = match column {
                Column::Server => String::new(),
                Column::Client(client) => format!("client {client}: "),
            };
            format!("{who}{}", describe(server, resource, command, &answer.reply))
        });
    }

    /// Sends pushes to the subscribed connections of their clients.
    fn publish(&mut self, server: usize, pushes: Vec<Push>) {
        for push in pushes {
            self.stranger.hear(&push);
            let to: Vec<(u64, ProcessId)> = self.servers[server]
                .subscribers()
                .filter(|(_, peer)| peer.client == push.inbox)
                .map(|(connection, peer)| (connection, peer.process))
                .collect();
            for (connection, process) in to {
                let column = self.column(process);
                let is_planted = matches!(push.kind, PushKind::Granted(..)) && self.loses_grant();
                if is_planted || self.loses(true) {
                    self.say(column, &[5, connection], || format!("the push {:?} is lost", push.kind));
                    continue;
                }
                self.processes[process].messages += 1;
                self.down(connection, Event::Push { connection, push: push.clone() });
            }
        }
        self.publish_forged(server);
    }

    /// Whether a planted bug loses a pushed grant.
    fn loses_grant(&self) -> bool {
        let is_behind = |planned: &FaultPlan| {
            matches!(planned.fault, Fault::Failover { lag: 1.., .. } | Fault::Failover { overlaps: 1.., .. })
        };
        let is_planted = match self.planted {
            Some(Planted::PushLost) => true,
            Some(Planted::PushLostAtNewMaster) => self.plan.faults.iter().any(is_behind),
            _ => false,
        };
        is_planted && self.now > self.books.calm_from
    }

    /// What the stranger publishes now.
    fn publish_forged(&mut self, server: usize) {
        let subscribers: Vec<_> = self.servers[server]
            .subscribers()
            .map(|(connection, peer)| (connection, peer.process, peer.client))
            .collect();
        let clients: Vec<_> = subscribers.iter().map(|(_, _, client)| *client).collect();
        let at = self.servers[server].clock.at(self.now);
        let is_believed = self.planted == Some(Planted::ForgedGrantBelieved);
        for push in self.stranger.publish(at, &clients, is_believed) {
            for (connection, process, _) in subscribers.iter().filter(|(_, _, client)| *client == push.inbox)
            {
                let column = self.column(*process);
                self.say(column, &[7, *connection], || format!("a stranger publishes {:?}", push.kind));
                self.down(*connection, Event::Push { connection: *connection, push: push.clone() });
            }
        }
    }
}

fn is_try(command: &Command) -> bool {
    matches!(command, Command::Acquire(acquire) if acquire.wait.is_none())
}

/// The last digits of a token or a time, which distinguish it.
#[must_use]
pub(crate) fn short(number: u64) -> String {
    format!("…{:09}", number % 1_000_000_000)
}

fn describe(server: usize, resource: &Resource, command: &Command, reply: &Reply) -> String {
    let what = match command {
        Command::Acquire(acquire) => format!("acquire {}", acquire.acquisition.sequence),
        Command::Renew(renew) => format!("renew {}", renew.acquisition.sequence),
        Command::Release(release) => format!("release {}", release.acquisition.sequence),
        Command::Inspect => "inspect".to_owned(),
        Command::ForceRelease => "release by force".to_owned(),
    };
    let reply = match reply {
        Reply::Granted(grant) => {
            format!("granted {}, {:?}", short(grant.tokens.first.get()), grant.valid_for)
        }
        Reply::Renewed { valid_for, .. } => format!("renewed, {valid_for:?}"),
        Reply::Queued(queued) if queued.is_head => "next".to_owned(),
        Reply::Queued(_) => "queued".to_owned(),
        Reply::View(_) => "shown".to_owned(),
        Reply::Forced(holders) => format!("{} ended", holders.len()),
        other => format!("{other:?}"),
    };
    let at = if server == 0 { String::new() } else { format!(" at {server}") };
    format!("{what} {resource}{at} → {reply}")
}
