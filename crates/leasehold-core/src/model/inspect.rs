//! `Inspect` and `ForceRelease`. The counterpart of the scripts `inspect.lua` and `force_release.lua`.

use alloc::vec::Vec;

use super::{Rows, Step};
use crate::command::{Holder, PushKind, QueueEntry, Reply, View};
use crate::token::Token;

impl<R: Rows> Step<'_, '_, R> {
    pub(super) fn inspect(&mut self) -> Result<Reply, R::Error> {
        let holders = self.holders()?;
        let mut waiters = Vec::new();
        self.rows.each_waiter(&mut |waiter| {
            waiters.push(QueueEntry {
                acquisition: waiter.acquisition,
                weight: waiter.weight,
                since: waiter.since,
                deadline: waiter.deadline,
                skipped: waiter.parked,
                metadata: waiter.metadata,
            });
        })?;
        Ok(Reply::View(View {
            capacity: self.header.capacity,
            in_use: self.header.in_use,
            last_token: Token::new(self.header.last_token),
            holders,
            waiters,
        }))
    }

    pub(super) fn force_release(&mut self) -> Result<Reply, R::Error> {
        let holders = self.holders()?;
        for holder in &holders {
            if let Some(lease) = self.rows.lease(holder.acquisition)? {
                self.remove_lease(&lease)?;
                self.push(lease.inbox(), lease.acquisition, PushKind::Revoked);
            }
        }
        self.grant()?;
        Ok(Reply::Forced(holders))
    }

    fn holders(&mut self) -> Result<Vec<Holder>, R::Error> {
        let mut holders = Vec::new();
        self.rows.each_lease(&mut |lease| {
            holders.push(Holder {
                acquisition: lease.acquisition,
                owner: lease.owner,
                weight: lease.weight,
                token: lease.token,
                granted_at: lease.granted_at,
                expires_at: lease.expires_at,
                retained: lease.retained,
                metadata: lease.metadata,
            });
        })?;
        holders.sort_by_key(|holder| (holder.token, holder.acquisition));
        Ok(holders)
    }
}
