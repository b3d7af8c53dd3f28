//! Keeps a client's foreign legs: one task on the client's thread, which has a future for each leg.
//!
//! The legs are not rows of the session's table, because their commands are not those of a store. One task for all of them means that
//! a lock costs no task, and that legs which are due at the same time do not wait for each other's answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_store::{ForeignKeys, Store, StoreError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::foreign::Foreign;
use super::holders::Holders;
use super::leg::{Leg, OwnLease};
use super::servers::Servers;
use super::yielding::YieldTable;
use crate::engine::Session;

/// The bridges of one client.
pub(crate) struct Bridges {
    session: Arc<Session>,
    store: Arc<dyn Store>,
    /// The connections to the servers that were used: to the client's own one, and to those of locks with several.
    keys: Mutex<HashMap<Option<Servers>, Arc<dyn ForeignKeys>>>,
    yields: Arc<YieldTable>,
    /// New legs. There are no more of them than leases.
    legs: UnboundedSender<Arc<Leg>>,
}

impl Bridges {
    /// `first` is the lock that is used first.
    pub(crate) fn start(
        session: Arc<Session>,
        store: Arc<dyn Store>,
        first: &Foreign,
    ) -> Result<Self, StoreError> {
        let keys = store.foreign_keys(first.servers())?;
        let (legs, new) = unbounded_channel();
        keys.spawn(Box::pin(keep_all(new)));
        let keys = Mutex::new(HashMap::from([(first.servers.clone(), keys)]));
        Ok(Self { session, store, keys, yields: Arc::default(), legs })
    }

    fn keys(&self, foreign: &Foreign) -> Result<Arc<dyn ForeignKeys>, StoreError> {
        let mut known = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keys) = known.get(&foreign.servers) {
            return Ok(keys.clone());
        }
        let keys = self.store.foreign_keys(foreign.servers())?;
        known.insert(foreign.servers.clone(), keys.clone());
        Ok(keys)
    }

    /// Begins a leg for this lease. Nothing is sent yet.
    pub(crate) fn begin(
        &self,
        foreign: &Foreign,
        lease: OwnLease,
        ttl: Duration,
    ) -> Result<Arc<Leg>, StoreError> {
        let (session, keys, yields) = (self.session.clone(), self.keys(foreign)?, self.yields.clone());
        let holders = Holders::new(foreign.clone(), u128::from_be_bytes(keys.random()?));
        let leg = Arc::new(Leg::new(session, keys, yields, holders, lease, foreign.limit_ttl(ttl)));
        self.session.begin_companion();
        if self.legs.send(leg.clone()).is_err() {
            self.session.end_companion(true);
            let what = "the client's thread has ended";
            return Err(StoreError::new(leasehold_core::Failure::NotSent, what));
        }
        Ok(leg)
    }
}

async fn keep_all(mut new: UnboundedReceiver<Arc<Leg>>) {
    let mut kept = FuturesUnordered::new();
    loop {
        tokio::select! {
            // The order is fixed so that a simulated run can be repeated.
            biased;
            leg = new.recv() => match leg {
                Some(leg) => kept.push(leg.keep()),
                // The client's handles are gone, so there is no new leg.
                None => break,
            },
            Some(()) = kept.next() => {}
        }
    }
    while kept.next().await.is_some() {}
}
