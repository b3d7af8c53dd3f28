//! Runs commands that come together: renewals as one statement, and what happens at one resource in one transaction.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold_core::model::{CommandContext, Rows, apply, apply_all};
use leasehold_core::{Acquire, Answer, Command, Now, Renew, Resource};
use leasehold_store::{Batch, Call, CallResult, StoreError};

use super::cache::{CachedRows, Missing};
use super::exec::{Executor, renewal_timeout, renewals_timeout, without_answer};
use super::limits::{ANSWER_TIMEOUT, MAX_TOGETHER, QUEUE_TIMEOUT};
use super::pool::Class;
use super::query::{together, usual_queries};
use super::transaction::{Access, Progress};

impl Executor {
    /// Runs the commands: those of one resource in order, and renewals together.
    pub(super) async fn call_batch(&self, batch: &Batch) -> Vec<CallResult> {
        if let [Call { resource, command }] = &batch[..] {
            return vec![self.call(resource, command).await];
        }
        let until = Instant::now() + longest(batch);
        let mut results: Vec<Option<CallResult>> = batch.iter().map(|_| None).collect();
        self.renew_batch(batch, &mut results).await;
        let mut of_resource: HashMap<&Resource, Vec<usize>> = HashMap::new();
        for (at, Call { resource, .. }) in batch.iter().enumerate().filter(|(at, _)| results[*at].is_none()) {
            of_resource.entry(resource).or_default().push(at);
        }
        let groups = of_resource.into_values().map(async |group| {
            let mut done = Vec::with_capacity(group.len());
            let kind = |at: &usize| BatchKind::of(&batch[*at].command);
            for run in group.chunk_by(|one, next| kind(one).is_some() && kind(one) == kind(next)) {
                for some in run.chunks(MAX_TOGETHER) {
                    let commands: Vec<_> = some.iter().map(|at| &batch[*at].command).collect();
                    let answers = self.call_some(&batch[some[0]].resource, &commands, until).await;
                    done.extend(some.iter().copied().zip(answers));
                }
            }
            done
        });
        for (at, result) in join_all(groups).await.into_iter().flatten() {
            results[at] = Some(result);
        }
        results.into_iter().map(|result| result.unwrap_or_else(leasehold_store::missing_response)).collect()
    }

    /// Runs commands at one resource.
    async fn call_some(&self, resource: &Resource, commands: &[&Command], until: Instant) -> Vec<CallResult> {
        if Instant::now() >= until {
            // The commands before them have taken the time.
            return vec![Err(self.pool.busy()); commands.len()];
        }
        let kind = match commands {
            [command] => return vec![self.call_with_permit(resource, command, until).await],
            [first, ..] => BatchKind::of(first),
            [] => None,
        };
        let (class, limit, access) = match kind {
            Some(BatchKind::Renewals) => {
                let limit = renewal_timeout(shortest_ttl(commands.iter().copied()).unwrap_or_default());
                let left = until.saturating_duration_since(Instant::now());
                (Class::RenewOne, limit.min(left), Access::Renew(limit / 2))
            }
            Some(BatchKind::Attempts) => (Class::Attempt, ANSWER_TIMEOUT, Access::Write),
            Some(BatchKind::Releases) | None => (Class::Command, ANSWER_TIMEOUT, Access::Write),
        };
        let run = async |progress: &Progress| self.run_together(progress, access, resource, commands).await;
        match self.within_until(class, limit, until, run).await {
            Ok(answers) => {
                for (command, answer) in commands.iter().zip(&answers) {
                    self.session.mailbox.note(command, &answer.reply);
                    self.note(resource, command, &answer.reply);
                }
                answers.into_iter().map(Ok).collect()
            }
            Err(error) => vec![Err(error); commands.len()],
        }
    }

    /// Runs commands at one resource in one transaction, each after the one before.
    async fn run_together(
        &self,
        progress: &Progress,
        access: Access,
        resource: &Resource,
        commands: &[&Command],
    ) -> Result<Vec<Answer>, StoreError> {
        let plan = [(resource, together(resource, commands))];
        let step = move |rows: &mut [CachedRows], context: CommandContext<'_>| {
            let [rows] = rows else { return Err(Missing) };
            let CommandContext { now, is_reachable, pushes } = context;
            let mut answers = Vec::with_capacity(commands.len());
            for command in commands {
                // The one before may have given tokens ahead of the clock.
                let last = rows.header()?.map_or(0, |header| header.last_token);
                let now = Now { may_reserve: now.may_reserve && last <= now.time.as_micros(), ..now };
                let context = CommandContext { now, is_reachable: &mut *is_reachable, pushes: &mut *pushes };
                answers.push(apply(rows, context, command)?);
            }
            Ok(answers)
        };
        self.transact(progress, access, &plan, &step).await?.ok_or_else(without_answer)
    }

    async fn renew_batch(&self, batch: &Batch, results: &mut [Option<CallResult>]) {
        // A resource with other commands keeps their order.
        let mut count: HashMap<&Resource, usize> = HashMap::with_capacity(batch.len());
        for Call { resource, .. } in batch {
            *count.entry(resource).or_default() += 1;
        }
        let is_only = |resource: &Resource| count.get(resource) == Some(&1);
        let renewals: Vec<(usize, (&Resource, &Renew))> = batch
            .iter()
            .enumerate()
            .filter_map(|(at, Call { resource, command })| match command {
                Command::Renew(renew) if is_only(resource) => Some((at, (&**resource, renew))),
                _ => None,
            })
            .collect();
        let plain: Vec<_> = renewals.iter().map(|(_, renewal)| *renewal).collect();
        if plain.is_empty() {
            return;
        }
        match self.renew_in_statement(&plain).await {
            // What the statement leaves out takes a transaction.
            Ok(answers) => {
                for ((at, _), answer) in renewals.iter().zip(answers) {
                    if let Some(answer) = &answer {
                        self.session.mailbox.note(&batch[*at].command, &answer.reply);
                    }
                    results[*at] = answer.map(Ok);
                }
            }
            // A second try here would take the time that the caller has for one over a new connection.
            Err(error) => renewals.iter().for_each(|(at, _)| results[*at] = Some(Err(error.clone()))),
        }
    }

    /// Runs attempts in one transaction: all are granted, or none.
    pub(super) async fn acquire_all(
        &self,
        attempts: &[(Arc<Resource>, Arc<Acquire>)],
    ) -> Result<Vec<Answer>, StoreError> {
        // Every client locks the rows in the same order.
        let mut order: Vec<usize> = (0..attempts.len()).collect();
        order.sort_by_key(|at| {
            let resource = &attempts[*at].0;
            (resource.name.as_str(), resource.kind.as_str())
        });
        let plan: Vec<_> = order
            .iter()
            .map(|at| {
                let (resource, acquire) = &attempts[*at];
                (&**resource, usual_queries(resource, &Command::Acquire(acquire.clone())))
            })
            .collect();
        let order = &order;
        let step = move |rows: &mut [CachedRows], context: CommandContext<'_>| {
            let mut places: Vec<_> = rows.iter_mut().zip(order).collect();
            places.sort_by_key(|(_, at)| **at);
            let mut steps: Vec<_> =
                places.into_iter().zip(attempts).map(|((rows, _), (_, acquire))| (rows, acquire)).collect();
            apply_all(context, &mut steps)
        };
        let answers =
            self.in_time(Class::Attempt, async |progress| self.write(progress, &plan, &step).await).await?;
        for ((_, acquire), answer) in attempts.iter().zip(&answers) {
            self.session.mailbox.note(&Command::Acquire(acquire.clone()), &answer.reply);
        }
        Ok(answers)
    }
}

/// The kind of a batch: commands of the same kind can share a transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchKind {
    Attempts,
    Releases,
    /// Of leases that the statement for single holders leaves out.
    Renewals,
}

impl BatchKind {
    fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Acquire(_) => Some(Self::Attempts),
            Command::Release(_) => Some(Self::Releases),
            Command::Renew(_) => Some(Self::Renewals),
            Command::Inspect | Command::ForceRelease => None,
        }
    }
}

/// Max time until all commands of a batch have got a connection.
fn longest(batch: &Batch) -> Duration {
    shortest_ttl(batch.iter().map(|Call { command, .. }| command)).map_or(QUEUE_TIMEOUT, renewals_timeout)
}

/// The shortest ttl of renewals, if there are any.
fn shortest_ttl<'c>(commands: impl Iterator<Item = &'c Command>) -> Option<Duration> {
    let ttl = |command: &Command| match command {
        Command::Renew(renew) if !renew.only_asks() => Some(renew.ttl),
        _ => None,
    };
    commands.filter_map(ttl).min()
}
