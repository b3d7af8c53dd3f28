//! Runs commands: an uncontended one is one statement, all others are transactions of two flights.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, apply, apply_all};
use leasehold_core::{Acquire, Answer, Command, Failure, Push, Renew, Reply, Resource};
use tokio::time::timeout;

use super::cache::{CachedRows, Missing};
use super::error;
use super::limits::{ANSWER_TIMEOUT, ATTEMPTS, CONTENDED_FOR, MAX_CONTENDED, RENEWAL_TIMEOUT};
use super::pool::{Class, Lent, Pool};
use super::query::usual_queries;
use super::sql::Sql;
use super::transaction::{Access, Failed, Plan, Progress, Session, Step, Transaction};
use crate::store::{Batch, CallResult, StoreError};

/// The commands of one client.
pub(super) struct Executor {
    pub(super) session: Session,
    pub(super) pool: Pool,
    /// Locks where other clients were met, which the statement for uncontended ones would not get.
    pub(super) contended: Mutex<HashMap<Resource, Instant>>,
}

impl Executor {
    pub(super) fn sql(&self) -> &Sql {
        &self.session.sql
    }

    /// Runs this within the usual time limit, once a connection is free.
    pub(super) async fn in_time<T>(
        &self,
        class: Class,
        work: impl AsyncFnOnce(&Progress) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.within(class, ANSWER_TIMEOUT, work).await
    }

    /// The same within another time limit.
    pub(super) async fn within<T>(
        &self,
        class: Class,
        limit: Duration,
        work: impl AsyncFnOnce(&Progress) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let _turn = self.pool.turn(class).await?;
        let progress = Progress::default();
        match timeout(limit, work(&progress)).await {
            Ok(done) => done,
            Err(_) => Err(error::late(limit, progress.may_be_done())),
        }
    }

    /// Runs one command.
    pub(super) async fn call(&self, resource: &Resource, command: &Command) -> CallResult {
        let answer = match command {
            Command::Renew(renew) => {
                let alone = self.renew_alone(&[(resource, renew)]).await?.pop().flatten();
                match alone {
                    Some(answer) => answer,
                    None => self.call_in_turn(resource, command).await?,
                }
            }
            _ => self.call_in_turn(resource, command).await?,
        };
        self.session.mailbox.note(command, &answer.reply);
        Ok(answer)
    }

    async fn call_in_turn(&self, resource: &Resource, command: &Command) -> CallResult {
        let (class, limit) = match command {
            Command::Acquire(_) => (Class::Attempt, ANSWER_TIMEOUT),
            Command::Renew(renew) => (Class::Command, renewal_timeout(renew.ttl)),
            _ => (Class::Command, ANSWER_TIMEOUT),
        };
        self.within(class, limit, async |progress| self.run(progress, resource, command).await).await
    }

    /// Renews what one statement can, in a quarter of the shortest ttl: a failed renewal can then be repeated in time.
    async fn renew_alone(&self, renewals: &[(&Resource, &Renew)]) -> Result<Vec<Option<Answer>>, StoreError> {
        let shortest = renewals.iter().map(|(_, renew)| renew.ttl).min().unwrap_or(ANSWER_TIMEOUT);
        let renew = async |progress: &Progress| self.renew_all(progress, renewals).await;
        self.within(Class::Service, renewal_timeout(shortest), renew).await
    }

    async fn run(&self, progress: &Progress, resource: &Resource, command: &Command) -> CallResult {
        if let Some(answer) = self.try_alone(progress, resource, command).await? {
            return Ok(answer);
        }
        let plan = [(resource, usual_queries(resource, command))];
        let step = move |rows: &mut [CachedRows], context: CommandContext<'_>| match rows {
            [rows] => apply(rows, context, command),
            _ => Err(Missing),
        };
        if matches!(command, Command::Inspect)
            && let Some(answer) = self.transact(progress, Access::Read, &plan, &step).await?
        {
            return Ok(answer);
        }
        let answer = self.write(progress, &plan, &step).await?;
        self.note(resource, command, &answer.reply);
        Ok(answer)
    }

    /// Remembers whether other clients want the lock.
    fn note(&self, resource: &Resource, command: &Command, reply: &Reply) {
        match (command, reply) {
            (_, Reply::Queued(_) | Reply::Busy | Reply::Renewed { contended: true, .. }) => {
                self.set_contended(resource, true);
            }
            (Command::Acquire(_), Reply::Granted(_)) => self.set_contended(resource, false),
            _ => {}
        }
    }

    pub(super) fn set_contended(&self, resource: &Resource, is_contended: bool) {
        let mut contended = self.contended.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_contended {
            contended.remove(resource);
            return;
        }
        let now = Instant::now();
        if contended.len() >= MAX_CONTENDED {
            contended.retain(|_, since| now.duration_since(*since) < CONTENDED_FOR);
        }
        if contended.len() < MAX_CONTENDED {
            contended.insert(resource.clone(), now);
        }
    }

    pub(super) fn is_contended(&self, resource: &Resource) -> bool {
        let contended = self.contended.lock().unwrap_or_else(PoisonError::into_inner);
        contended.get(resource).is_some_and(|since| since.elapsed() < CONTENDED_FOR)
    }

    pub(super) async fn write<T>(
        &self,
        progress: &Progress,
        plan: &Plan<'_>,
        step: &impl Step<T>,
    ) -> Result<T, StoreError> {
        let done = self.transact(progress, Access::Write, plan, step).await?;
        done.ok_or_else(|| StoreError::new(Failure::NotSent, "a transaction ended without an answer"))
    }

    /// Runs the transaction until it is neither deadlocked nor overtaken by an insert, and delivers this client's pushes.
    async fn transact<T>(
        &self,
        progress: &Progress,
        access: Access,
        plan: &Plan<'_>,
        step: &impl Step<T>,
    ) -> Result<Option<T>, StoreError> {
        let mut notifies = true;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let lent = self.pool.take().await?;
            let done = {
                let mut transaction = Transaction::new(&self.session, lent.conn(), progress);
                transaction.run(access, plan, step, notifies).await
            };
            match done {
                Ok(done) => {
                    lent.give_back();
                    return Ok(done.map(|(result, own)| {
                        self.deliver(own);
                        result
                    }));
                }
                Err(failed) => {
                    progress.set(false);
                    let error = match failed {
                        Failed::Final(error) => {
                            recover(lent, &error).await;
                            return Err(error);
                        }
                        Failed::Transient(error) => error,
                        Failed::QueueFull(error) => {
                            // Waiters that are not notified look again by themselves.
                            tracing::warn!("PostgreSQL's queue of notifications is full: {}", error.message);
                            notifies = false;
                            error
                        }
                    };
                    recover(lent, &error).await;
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| error::late(ANSWER_TIMEOUT, false)))
    }

    pub(super) fn deliver(&self, pushes: Vec<Push>) {
        let Some(inbox) = self.session.inbox.upgrade() else { return };
        pushes.into_iter().for_each(|push| inbox.deliver(push));
    }

    /// Runs the commands: those of one resource in order, and renewals together.
    pub(super) async fn call_batch(&self, batch: &Batch) -> Vec<CallResult> {
        let mut results: Vec<Option<CallResult>> = batch.iter().map(|_| None).collect();
        if batch.len() > 1 {
            self.renew_batch(batch, &mut results).await;
        }
        let mut of_resource: HashMap<&Resource, Vec<usize>> = HashMap::new();
        for (at, (resource, _)) in batch.iter().enumerate().filter(|(at, _)| results[*at].is_none()) {
            of_resource.entry(resource).or_default().push(at);
        }
        let groups = of_resource.into_values().map(async |group| {
            let mut done = Vec::new();
            for at in group {
                let (resource, command) = &batch[at];
                done.push((at, self.call(resource, command).await));
            }
            done
        });
        for (at, result) in futures_util::future::join_all(groups).await.into_iter().flatten() {
            results[at] = Some(result);
        }
        results.into_iter().map(|result| result.unwrap_or_else(crate::store::missing_response)).collect()
    }

    async fn renew_batch(&self, batch: &Batch, results: &mut [Option<CallResult>]) {
        // A resource with other commands keeps their order.
        let mut count: HashMap<&Resource, usize> = HashMap::with_capacity(batch.len());
        for (resource, _) in batch {
            *count.entry(resource).or_default() += 1;
        }
        let is_only = |resource: &Resource| count.get(resource) == Some(&1);
        let renewals: Vec<(usize, (&Resource, &Renew))> = batch
            .iter()
            .enumerate()
            .filter_map(|(at, (resource, command))| match command {
                Command::Renew(renew) if is_only(resource) => Some((at, (&**resource, renew))),
                _ => None,
            })
            .collect();
        let plain: Vec<_> = renewals.iter().map(|(_, renewal)| *renewal).collect();
        if plain.is_empty() {
            return;
        }
        match self.renew_alone(&plain).await {
            // What the statement leaves out takes a transaction.
            Ok(answers) => {
                for ((at, _), answer) in renewals.iter().zip(answers) {
                    if let Some(answer) = &answer {
                        self.session.mailbox.note(&batch[*at].1, &answer.reply);
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

/// Max time for a renewal. It may fail because its connection is dead, and the next one must not be late.
fn renewal_timeout(ttl: Duration) -> Duration {
    (ttl / 4).clamp(*RENEWAL_TIMEOUT.start(), *RENEWAL_TIMEOUT.end())
}

/// Gives a connection back if the server still answers on it.
async fn recover(lent: Lent<'_>, error: &StoreError) {
    if error.failure != Failure::Unknown && lent.conn().roll_back().await.is_ok() {
        lent.give_back();
    }
}
