//! Which locks there are, and the removal of what is not needed any more.

use std::time::Instant;

use leasehold_core::model::{CommandContext, sweep};
use leasehold_core::{Failure, Kind, Name, Resource};
use leasehold_store::StoreError;
use leasehold_store::sql::stored_number;

use super::cache::{CachedRows, Missing};
use super::exec::Executor;
use super::limits::{PUSH_LIFETIME_MICROS, SWEEP_ROWS, SWEEP_TIME};
use super::params::{Param, Reader};
use super::pinned::Pinned;
use super::pool::Class;
use super::transaction::Progress;

impl Executor {
    /// The locks with a lease, a waiter or a tombstone, without those of a kind that this version does not know.
    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        let list = async |progress: &Progress| self.resources(progress, &self.sql().list, Vec::new()).await;
        let rows = self.in_time(Class::Command, list).await?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// The resources that a statement finds; `None` for one of a kind that this version does not know.
    async fn resources(
        &self,
        progress: &Progress,
        sql: &Pinned,
        params: Vec<Param>,
    ) -> Result<Vec<Option<Resource>>, StoreError> {
        let rows = self.run_statement(progress, sql, params).await?;
        let rows = rows.ok_or_else(|| StoreError::new(Failure::Busy, "the server asks for a repetition"))?;
        let resource = |row| {
            let mut reader = Reader::new(row);
            let (kind, name) = (Kind::parse(reader.text()?), Name::new(reader.text()?));
            Ok(kind.zip(name.ok()).map(|(kind, name)| Resource { kind, name }))
        };
        rows.iter().map(resource).collect()
    }

    /// Removes what has expired at resources that no client uses, rows that have been unused for long, and old pushes.
    pub(super) async fn sweep(&self) -> Result<(), StoreError> {
        let ends = Instant::now() + SWEEP_TIME;
        self.sweep_expired(ends).await?;
        let sweep = async |progress: &Progress| {
            self.run_statement(progress, &self.sql().sweep, vec![SWEEP_ROWS.into()]).await
        };
        while Instant::now() < ends {
            let rows = self.in_time(Class::Command, sweep).await?.unwrap_or_default();
            let seen = rows.first().map(|row| Reader::new(row).id()).transpose()?;
            if seen.is_none_or(|seen| seen < SWEEP_ROWS) {
                break;
            }
        }
        let params = || vec![stored_number(PUSH_LIFETIME_MICROS).into()];
        let remove = async |progress: &Progress| {
            self.run_statement(progress, &self.sql().remove_pushes, params()).await
        };
        self.in_time(Class::Command, remove).await.map(drop)
    }

    /// A resource whose row another session keeps, or whose kind only a newer version knows, is passed over.
    async fn sweep_expired(&self, ends: Instant) -> Result<(), StoreError> {
        let mut passed_over = 0_i64;
        loop {
            let params = || vec![SWEEP_ROWS.into(), passed_over.into()];
            let due = async |progress: &Progress| self.resources(progress, &self.sql().due, params()).await;
            let due = self.in_time(Class::Command, due).await?;
            let is_last = i64::try_from(due.len()).is_ok_and(|count| count < SWEEP_ROWS);
            for resource in due {
                if Instant::now() >= ends {
                    return Ok(());
                }
                let Some(resource) = resource else {
                    passed_over += 1;
                    continue;
                };
                if let Err(error) = self.sweep_resource(&resource).await {
                    tracing::debug!(%resource, error = error.message, "a resource was not swept");
                    passed_over += 1;
                }
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// Removes what has expired at one resource.
    pub(super) async fn sweep_resource(&self, resource: &Resource) -> Result<(), StoreError> {
        let step = |rows: &mut [CachedRows], context: CommandContext<'_>| match rows {
            [rows] => sweep(rows, context).map(drop),
            _ => Err(Missing),
        };
        let plan = [(resource, Vec::new())];
        self.in_time(Class::Command, async |progress| self.write(progress, &plan, &step).await).await
    }
}
