//! A store of leasehold that is not part of it, to copy from: lease tables in a map of this process.
//!
//! The rules of all locks are `leasehold_core::model`. A store looks up the rows of a resource, runs a command on them by `apply`, writes what has
//! changed, and delivers the pushes, all as one step: no other command of that resource may come in between. Here the rows are a
//! `Table` behind a mutex. A store on a database implements `model::Rows` instead, and takes a transaction.
//!
//! ```
//! use custom_store::MapStore;
//! use leasehold::{Client, StoreConfig};
//!
//! # #[tokio::main] async fn main() -> Result<(), leasehold::Error> {
//! let store = MapStore::new("map:example");
//! let client = Client::builder().store(StoreConfig::factory(store)).connect().await?;
//! let guard = client.mutex("backup").lock().await?;
//! guard.release().await?;
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use leasehold_core::model::{CommandContext, Table, apply};
use leasehold_core::{ClientId, Command, Push, Resource};
use leasehold_store::clock::Clock;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, EMBEDDED_POLL_INTERVALS, Inbox, OpenError, Store,
    StoreError, StoreFactory,
};

/// Lease tables that the clients of this process share. Clones are the same store.
#[derive(Clone)]
pub struct MapStore {
    name: String,
    clock: Clock,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    tables: HashMap<Resource, Table>,
    inboxes: HashMap<ClientId, Weak<dyn Inbox>>,
}

impl MapStore {
    /// A store without locks. Messages name it so.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::with_clock(name, Clock::System)
    }

    /// The same by another clock than this machine's: a test moves it.
    #[must_use]
    pub fn with_clock(name: &str, clock: Clock) -> Self {
        Self { name: name.to_owned(), clock, state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, resource: &Resource, command: &Command) -> CallResult {
        let mut pushes = Vec::new();
        let (answer, inboxes) = {
            let mut state = self.state();
            let State { tables, inboxes } = &mut *state;
            let is_reachable = &mut |client| is_there(inboxes, client);
            // Read after the wait for the mutex: commands run in the order of their times.
            let context = CommandContext { now: self.clock.embedded(), is_reachable, pushes: &mut pushes };
            // A table without rows stays, because it has the last token.
            let table = tables.entry(resource.clone()).or_default();
            let answer = apply(table, context, command).unwrap_or_else(|never: Infallible| match never {});
            let inboxes: Vec<_> = pushes.iter().map(|push: &Push| inbox_of(inboxes, push)).collect();
            (answer, inboxes)
        };
        // Without the mutex: the client may call the store at once.
        for (push, inbox) in pushes.into_iter().zip(inboxes) {
            if let Some(inbox) = inbox {
                inbox.deliver(push);
            }
        }
        Ok(answer)
    }
}

/// A waiter of a client that is gone is passed over.
fn is_there(inboxes: &HashMap<ClientId, Weak<dyn Inbox>>, client: ClientId) -> bool {
    inboxes.get(&client).is_some_and(|inbox| inbox.strong_count() > 0)
}

fn inbox_of(inboxes: &HashMap<ClientId, Weak<dyn Inbox>>, push: &Push) -> Option<Arc<dyn Inbox>> {
    inboxes.get(&push.inbox)?.upgrade()
}

impl StoreFactory for MapStore {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn open(&self, client: ClientId, inbox: Weak<dyn Inbox>) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
        let mut state = self.state();
        state.inboxes.retain(|_, inbox| inbox.strong_count() > 0);
        state.inboxes.insert(client, inbox);
        Box::pin(ready(Ok(Arc::new(self.clone()) as Arc<dyn Store>)))
    }
}

impl Store for MapStore {
    fn capabilities(&self) -> Capabilities {
        StoreFactory::capabilities(self)
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(ready(self.run(&call.resource, &call.command)))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let answers = batch.iter().map(|Call { resource, command }| self.run(resource, command)).collect();
        Box::pin(ready(answers))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let state = self.state();
        let in_use = |table: &Table| table.header().is_some_and(|header| !header.is_idle());
        let listed = state.tables.iter().filter(|(_, table)| in_use(table));
        let mut listed: Vec<Resource> = listed.map(|(resource, _)| resource.clone()).collect();
        listed.sort();
        Box::pin(ready(Ok(listed)))
    }
}
