//! Commands that are one statement, if nothing else happens at the resource. Each has the rules of the model for that case.

use std::collections::HashMap;

use leasehold_core::{Acquire, Answer, Command, Failure, Grant, Release, Renew, Reply, Resource, TokenRange};
use leasehold_store::StoreError;
use leasehold_store::sql::{stored_key, stored_number};

use super::conn::{Frame, is_transient};
use super::error;
use super::exec::Executor;
use super::params::{Param, Reader, Request, micros, of_key, of_resource};
use super::pinned::Pinned;
use super::transaction::Progress;

impl Executor {
    /// Runs the command as one statement. `None`, without effect, if it takes a transaction.
    pub(super) async fn try_single_statement(
        &self,
        progress: &Progress,
        resource: &Resource,
        command: &Command,
    ) -> Result<Option<Answer>, StoreError> {
        match command {
            Command::Acquire(acquire) if is_plain(acquire) && !self.is_contended(resource) => {
                let answer = self.acquire_in_statement(progress, resource, acquire).await?;
                self.set_contended(resource, answer.is_none());
                Ok(answer)
            }
            Command::Release(release) if is_unconditional(release) => {
                if self.is_contended(resource) {
                    return Ok(None);
                }
                self.release_in_statement(progress, resource, release).await
            }
            _ => Ok(None),
        }
    }

    /// Runs one statement in a transaction of its own. `None` after a deadlock, or another failure that a repetition may not have.
    pub(super) async fn run_statement(
        &self,
        progress: &Progress,
        sql: &Pinned,
        params: Vec<Param>,
    ) -> Result<Option<Vec<tokio_postgres::Row>>, StoreError> {
        let lent = self.pool.take().await?;
        progress.set(true);
        let done = lent.conn().pipeline(Frame::Single, &[Request::new(sql, params)]).await;
        progress.set(false);
        match done {
            Ok(mut rows) => {
                lent.give_back()?;
                Ok(Some(rows.pop().unwrap_or_default()))
            }
            Err(failed) => {
                let can_repeat = is_transient(&failed);
                let failed = error::explain(failed, true);
                if failed.failure != Failure::Unknown {
                    // The command has failed anyway.
                    let _ = lent.give_back();
                }
                if can_repeat { Ok(None) } else { Err(failed) }
            }
        }
    }

    async fn acquire_in_statement(
        &self,
        progress: &Progress,
        resource: &Resource,
        acquire: &Acquire,
    ) -> Result<Option<Answer>, StoreError> {
        let mut params = of_resource(resource);
        let reserve = if self.session.may_reserve { acquire.reserve } else { 0 };
        params.extend([acquire.capacity.into(), acquire.weight.into(), reserve.into()]);
        params.push(stored_number(micros(acquire.ttl)).into());
        params.extend(of_key(acquire.acquisition));
        params.extend([
            acquire.inbox.into(),
            acquire.owner.as_ref().into(),
            acquire.metadata.as_bytes().into(),
        ]);
        let rows = self.run_statement(progress, &self.sql().acquire, params).await?.unwrap_or_default();
        let Some(row) = rows.first() else { return Ok(None) };
        let mut reader = Reader::new(row);
        let at = reader.time()?;
        let tokens = TokenRange { first: reader.token()?, last: reader.token()? };
        Ok(Some(Answer {
            at,
            reply: Reply::Granted(Grant { tokens, valid_for: acquire.ttl, is_plain: false }),
        }))
    }

    async fn release_in_statement(
        &self,
        progress: &Progress,
        resource: &Resource,
        release: &Release,
    ) -> Result<Option<Answer>, StoreError> {
        let mut params = of_resource(resource);
        params.extend(of_key(release.acquisition));
        let rows = self.run_statement(progress, &self.sql().release, params).await?.unwrap_or_default();
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(Answer { at: Reader::new(row).time()?, reply: Reply::Released }))
    }

    /// Renews in one statement what it can, with one lease of each resource. The others are `None`.
    pub(super) async fn renew_all(
        &self,
        progress: &Progress,
        renewals: &[(&Resource, &Renew)],
    ) -> Result<Vec<Option<Answer>>, StoreError> {
        let mut answers = vec![None; renewals.len()];
        let plain: Vec<_> = renewals
            .iter()
            .enumerate()
            .filter(|(_, (_, renew))| renew.reserve == 0 && !renew.only_asks())
            .collect();
        if plain.is_empty() {
            return Ok(answers);
        }
        let texts = |text: fn(&Resource) -> &str| {
            Param::Texts(plain.iter().map(|(_, (resource, _))| text(resource).to_owned()).collect())
        };
        let keys = plain.iter().map(|(_, (_, renew))| stored_key(renew.acquisition));
        let (clients, sequences) = keys.map(|(client, sequence)| (client.to_vec(), sequence)).unzip();
        let ttls = plain.iter().map(|(_, (_, renew))| stored_number(micros(renew.ttl))).collect();
        let tokens =
            plain.iter().map(|(_, (_, renew))| renew.token.map_or(0, |token| stored_number(token.get())));
        let params = vec![
            texts(|resource| resource.name.as_str()),
            texts(|resource| resource.kind.as_str()),
            Param::ByteLists(clients),
            Param::Ints(sequences),
            Param::Ints(ttls),
            // No token is 0.
            Param::Ints(tokens.collect()),
        ];
        let by_name: HashMap<_, _> = plain
            .iter()
            .map(|(index, (resource, renew))| {
                ((resource.name.as_str(), resource.kind.as_str()), (*index, *resource, renew.ttl))
            })
            .collect();
        for row in self.run_statement(progress, &self.sql().renew, params).await?.unwrap_or_default() {
            let mut reader = Reader::new(&row);
            let (name, kind) = (reader.text()?, reader.text()?);
            let (at, contended) = (reader.time()?, reader.flag()?);
            if let Some((index, resource, ttl)) = by_name.get(&(name, kind)) {
                let reply = Reply::Renewed { valid_for: *ttl, tokens: None, contended };
                if contended {
                    self.set_contended(resource, true);
                }
                answers[*index] = Some(Answer { at, reply });
            }
        }
        Ok(answers)
    }
}

/// Whether the statement for uncontended locks has all of its rules.
fn is_plain(acquire: &Acquire) -> bool {
    acquire.replaces.is_none() && acquire.weight > 0 && acquire.weight <= acquire.capacity
}

/// Whether the statement for a release has all of its rules.
fn is_unconditional(release: &Release) -> bool {
    release.only_if.is_none() && release.min_hold.is_zero() && release.tombstone.is_zero()
}
