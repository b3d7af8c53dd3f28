//! Runs commands: an uncontended one is one statement, all others are transactions of two flights.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use leasehold_core::model::{CommandContext, apply, apply_all, sweep};
use leasehold_core::{Acquire, Answer, Command, Failure, Kind, Name, Push, Renew, Reply, Resource};
use tokio::time::timeout;

use super::cache::{CachedRows, Missing};
use super::error;
use super::limits::{ANSWER_TIMEOUT, ATTEMPTS, CONTENDED_FOR, MAX_CONTENDED, SWEEP_ROWS};
use super::params::{Param, Reader};
use super::pool::{Lent, Pool};
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

    /// Runs this within the time limit.
    pub(super) async fn in_time<T>(
        &self,
        work: impl AsyncFnOnce(&Progress) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let progress = Progress::default();
        match timeout(ANSWER_TIMEOUT, work(&progress)).await {
            Ok(done) => done,
            Err(_) => Err(error::late(progress.may_be_done())),
        }
    }

    /// Runs one command.
    pub(super) async fn call(&self, resource: &Resource, command: &Command) -> CallResult {
        let is_attempt = matches!(command, Command::Acquire(_));
        let run = async |progress: &Progress| {
            let _turn = if is_attempt { Some(self.pool.attempt().await?) } else { None };
            self.run(progress, resource, command).await
        };
        self.in_time(run).await
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

    async fn write<T>(
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
        Err(last.unwrap_or_else(|| error::late(false)))
    }

    fn deliver(&self, pushes: Vec<Push>) {
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
        // What fails here is tried again one by one.
        let answers = self.in_time(async |progress| self.renew_all(progress, &plain).await).await;
        for ((at, _), answer) in renewals.iter().zip(answers.unwrap_or_default()) {
            results[*at] = answer.map(Ok);
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
        let run = async |progress: &Progress| {
            let _turn = self.pool.attempt().await?;
            self.write(progress, &plan, &step).await
        };
        self.in_time(run).await
    }

    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        self.in_time(async |progress| self.resources(progress, &self.sql().list, Vec::new()).await).await
    }

    async fn resources(
        &self,
        progress: &Progress,
        sql: &str,
        params: Vec<Param>,
    ) -> Result<Vec<Resource>, StoreError> {
        let rows = self.alone(progress, sql, params).await?;
        let resource = |row| {
            let mut reader = Reader::new(row);
            let (kind, name) = (Kind::parse(reader.text()?), Name::new(reader.text()?));
            let resource = kind.zip(name.ok()).map(|(kind, name)| Resource { kind, name });
            resource.ok_or_else(|| error::damaged("the name of a resource"))
        };
        rows.iter().map(resource).collect()
    }

    /// Removes what has expired at resources that nobody uses, and rows that have been unused for long.
    pub(super) async fn sweep(&self) -> Result<(), StoreError> {
        let limit = || vec![Param::from(SWEEP_ROWS)];
        let due =
            self.in_time(async |progress| self.resources(progress, &self.sql().due, limit()).await).await?;
        for resource in &due {
            self.sweep_resource(resource).await?;
        }
        self.in_time(async |progress| self.alone(progress, &self.sql().sweep, limit()).await).await?;
        Ok(())
    }

    /// Removes what has expired at one resource.
    pub(super) async fn sweep_resource(&self, resource: &Resource) -> Result<(), StoreError> {
        let step = |rows: &mut [CachedRows], context: CommandContext<'_>| match rows {
            [rows] => sweep(rows, context).map(drop),
            _ => Err(Missing),
        };
        let plan = [(resource, Vec::new())];
        self.in_time(async |progress| self.write(progress, &plan, &step).await).await
    }
}

/// Gives a connection back if the server still answers on it.
async fn recover(lent: Lent<'_>, error: &StoreError) {
    if error.failure != Failure::Unknown && lent.conn().roll_back().await.is_ok() {
        lent.give_back();
    }
}
