//! Runs one command: an uncontended one is one statement, all others are transactions of two round trips.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, apply};
use leasehold_core::{Answer, Command, Failure, Push, Renew, Reply, Resource};
use leasehold_store::{CallResult, StoreError};
use tokio::time::timeout;

use super::cache::{CachedRows, Missing};
use super::error;
use super::limits::{ANSWER_TIMEOUT, ATTEMPTS, CONTENDED_FOR, MAX_CONTENDED, QUEUE_TIMEOUT, RENEWAL_TIMEOUT};
use super::pool::{Class, Lent, Pool};
use super::query::usual_queries;
use super::rights;
use super::sql::Sql;
use super::transaction::{Access, Failed, Plan, Progress, Session, Step, Transaction};

/// The commands of one client.
pub(super) struct Executor {
    pub(super) session: Session,
    pub(super) pool: Pool,
    /// Locks where other clients were met, which the statement for uncontended ones would not get.
    pub(super) contended: Mutex<HashMap<Resource, Instant>>,
}

/// More connections than are idle at a time.
const EXPLANATIONS: usize = 8;

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

    /// Runs `work` on a connection of `class` within `limit`.
    pub(super) async fn within<T>(
        &self,
        class: Class,
        limit: Duration,
        work: impl AsyncFnOnce(&Progress) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.within_until(class, limit, Instant::now() + QUEUE_TIMEOUT, work).await
    }

    /// Runs `work` on a connection of `class` within `limit`, if a connection is free by `until`.
    pub(super) async fn within_until<T>(
        &self,
        class: Class,
        limit: Duration,
        until: Instant,
        work: impl AsyncFnOnce(&Progress) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let _permit = self.pool.permit(class, until).await?;
        if class == Class::RenewBatch {
            self.pool.connect_within(limit).await?;
        }
        let progress = Progress::default();
        let Ok(done) = timeout(limit, work(&progress)).await else {
            return Err(error::late(limit, progress.may_be_done()));
        };
        match done {
            Ok(done) => {
                self.pool.note_answer();
                Ok(done)
            }
            Err(error) if rights::is_refusal(&error) => Err(self.explain_refusal(error).await),
            Err(error) => Err(error),
        }
    }

    /// Adds what the role lacks, if the server says it soon. A connection that was idle may be lost, for example with all others of the role.
    async fn explain_refusal(&self, refusal: StoreError) -> StoreError {
        let explained = async {
            for _ in 0..EXPLANATIONS {
                let lent = self.pool.take().await.ok()?;
                if let Ok(remedy) = lent.conn().line(&self.sql().lacking).await {
                    lent.give_back().ok()?;
                    return Some(rights::explain(refusal.clone(), &remedy));
                }
            }
            None
        };
        timeout(*RENEWAL_TIMEOUT.end(), explained).await.ok().flatten().unwrap_or(refusal)
    }

    /// Runs one command.
    pub(super) async fn call(&self, resource: &Resource, command: &Command) -> CallResult {
        let now = Instant::now();
        let until = match command {
            Command::Renew(renew) => {
                let until = now + renewals_timeout(renew.ttl);
                match self.renew_in_statement(&[(resource, renew)]).await?.pop().flatten() {
                    Some(answer) => {
                        self.session.mailbox.note(command, &answer.reply);
                        return Ok(answer);
                    }
                    None => until,
                }
            }
            _ => now + QUEUE_TIMEOUT,
        };
        self.call_with_permit(resource, command, until).await
    }

    /// Runs one command that is no statement of its own, or not known to be one. `until`: it must have a connection by then, and a
    /// renewal must have ended.
    pub(super) async fn call_with_permit(
        &self,
        resource: &Resource,
        command: &Command,
        until: Instant,
    ) -> CallResult {
        let run = async |progress: &Progress| self.run(progress, resource, command).await;
        let answer = match command {
            Command::Renew(renew) => {
                let left = until.saturating_duration_since(Instant::now());
                let limit = renewal_timeout(renew.ttl).min(left);
                self.within_until(Class::RenewOne, limit, until, run).await?
            }
            Command::Acquire(_) => self.within_until(Class::Attempt, ANSWER_TIMEOUT, until, run).await?,
            _ => self.within_until(Class::Command, ANSWER_TIMEOUT, until, run).await?,
        };
        self.session.mailbox.note(command, &answer.reply);
        Ok(answer)
    }

    /// Renews what one statement can, in a quarter of the shortest ttl: a failed renewal can then be repeated in time.
    pub(super) async fn renew_in_statement(
        &self,
        renewals: &[(&Resource, &Renew)],
    ) -> Result<Vec<Option<Answer>>, StoreError> {
        if renewals.iter().all(|(_, renew)| renew.reserve > 0) {
            // Nothing to send: that is no answer of the server.
            return Ok(vec![None; renewals.len()]);
        }
        let ttls = renewals.iter().filter(|(_, renew)| !renew.only_asks()).map(|(_, renew)| renew.ttl);
        let shortest = ttls.min().unwrap_or(ANSWER_TIMEOUT);
        let renew = async |progress: &Progress| self.renew_all(progress, renewals).await;
        self.within(Class::RenewBatch, renewal_timeout(shortest), renew).await
    }

    async fn run(&self, progress: &Progress, resource: &Resource, command: &Command) -> CallResult {
        if let Some(answer) = self.try_single_statement(progress, resource, command).await? {
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
        let access = match command {
            // Its time limit would cost the connection, and this one does not.
            Command::Renew(renew) => Access::Renew(renewal_timeout(renew.ttl) / 2),
            _ => Access::Write,
        };
        let answer = self.transact(progress, access, &plan, &step).await?;
        let answer = answer.ok_or_else(without_answer)?;
        self.note(resource, command, &answer.reply);
        Ok(answer)
    }

    /// Remembers whether other clients want the lock.
    pub(super) fn note(&self, resource: &Resource, command: &Command, reply: &Reply) {
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
        self.transact(progress, Access::Write, plan, step).await?.ok_or_else(without_answer)
    }

    /// Runs the transaction until it is neither deadlocked nor overtaken by an insert, and delivers this client's pushes.
    pub(super) async fn transact<T>(
        &self,
        progress: &Progress,
        access: Access,
        plan: &Plan<'_>,
        step: &impl Step<T>,
    ) -> Result<Option<T>, StoreError> {
        let mut notifies = true;
        let mut was_cut = false;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let lent = self.pool.take().await?;
            let done = {
                let mut transaction = Transaction::new(&self.session, lent.conn(), progress);
                transaction.run(access, plan, step, notifies).await
            };
            match done {
                Ok(done) => {
                    lent.give_back()?;
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
                        // A connection may end at any time, and nothing has happened on it. A server that ends each one does not
                        // answer.
                        Failed::Cut(error) if std::mem::replace(&mut was_cut, true) => return Err(error),
                        Failed::Cut(error) | Failed::Transient(error) => error,
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
}

pub(super) fn without_answer() -> StoreError {
    StoreError::new(Failure::NotSent, "a transaction ended without an answer")
}

/// Max time for renewals that were asked for together, with their waits for connections and rows: the answers come together, and those
/// of the others must not be late.
pub(super) fn renewals_timeout(shortest: Duration) -> Duration {
    (shortest / 4).clamp(*RENEWAL_TIMEOUT.start(), QUEUE_TIMEOUT)
}

/// Max time for a renewal. It may fail because its connection is dead, and the next one must not be late.
pub(super) fn renewal_timeout(ttl: Duration) -> Duration {
    (ttl / 4).clamp(*RENEWAL_TIMEOUT.start(), *RENEWAL_TIMEOUT.end())
}

/// Gives a connection back if the server still answers on it.
async fn recover(lent: Lent<'_>, error: &StoreError) {
    if error.failure != Failure::Unknown && lent.conn().roll_back().await.is_ok() {
        // The command has failed anyway.
        let _ = lent.give_back();
    }
}
