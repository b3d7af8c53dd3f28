//! A store that is opened when a command first needs it.
//!
//! Until then, and while it can't be opened, a command fails as one that was never sent: a waiting attempt asks again until its
//! deadline, and any other one fails. Each command tries to open the store once, and commands at the same time share a try.

use std::sync::Arc;

use leasehold_core::{Acquire, Command, Effect, Failure, Resource};
use leasehold_store::tasks::Tasks;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, ClientRecords, Diagnose, Diagnosis, ListResult, Store,
    StoreError, VotedAttempts, diagnose, inspect_all,
};
use tokio::sync::OnceCell;

use crate::error::Error;

/// Opens the store.
pub(crate) type Open = Box<dyn Fn() -> BoxFuture<Result<Arc<dyn Store>, Error>> + Send + Sync>;

pub(crate) struct Lazy {
    capabilities: Capabilities,
    opener: Arc<Opener>,
}

struct Opener {
    store: OnceCell<Arc<dyn Store>>,
    open: Open,
    /// On the client's thread, where the connections live.
    tasks: Tasks,
}

impl Lazy {
    pub(crate) fn new(capabilities: Capabilities, tasks: Tasks, open: Open) -> Self {
        Self { capabilities, opener: Arc::new(Opener { store: OnceCell::new(), open, tasks }) }
    }

    /// The store, if it is open.
    fn opened(&self) -> Option<&Arc<dyn Store>> {
        self.opener.store.get()
    }

    /// Runs this on the store, and opens it first if necessary.
    fn with<T: Send + 'static>(
        &self,
        run: impl FnOnce(Arc<dyn Store>) -> BoxFuture<T> + Send + 'static,
        failed: impl FnOnce(StoreError) -> T + Send + 'static,
    ) -> BoxFuture<T> {
        if let Some(store) = self.opened() {
            return run(store.clone());
        }
        let opener = self.opener.clone();
        Box::pin(async move {
            match opener.get().await {
                Ok(store) => run(store).await,
                Err(error) => failed(error),
            }
        })
    }
}

impl Opener {
    async fn get(self: Arc<Self>) -> Result<Arc<dyn Store>, StoreError> {
        let opener = self.clone();
        let opening = async move { opener.store.get_or_try_init(|| (opener.open)()).await.cloned() };
        match self.tasks.start(opening).await {
            Ok(Ok(store)) => Ok(store),
            Ok(Err(error)) => {
                // A waiting attempt asks again, unless that can't help.
                let is_final = error.is_invalid() || error.is_unsupported();
                let failure = match error.failure() {
                    Some(Failure::Permanent(_)) => Failure::Permanent(Effect::None),
                    _ if is_final => Failure::NotSent,
                    _ => Failure::Busy,
                };
                Err(StoreError::new(failure, error.to_string()).caused_by(error))
            }
            Err(_) => Err(StoreError::new(Failure::NotSent, "the client's thread has ended")),
        }
    }
}

impl Store for Lazy {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        self.opened()?.try_call_inline(resource, command)
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        self.with(move |store| store.call(call, replicas), Err)
    }

    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let count = batch.len();
        self.with(move |store| store.call_batch(batch, replicas), move |error| vec![Err(error); count])
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        self.opened()?.acquire_all(attempts)
    }

    fn foreign_keys(&self, servers: &[String]) -> Result<Arc<dyn leasehold_store::ForeignKeys>, StoreError> {
        match self.opened() {
            Some(store) => store.foreign_keys(servers),
            None => Err(StoreError::new(Failure::NotSent, "the store is not open yet")),
        }
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        self.with(|store| store.list(), Err)
    }

    fn inspect_all(&self) -> Option<BoxFuture<ListResult>> {
        Some(self.with(|store| Box::pin(async move { inspect_all(&*store).await }), Err))
    }

    fn shard(&self, resource: &Resource, command: &Command) -> u64 {
        self.opened().map_or(0, |store| store.shard(resource, command))
    }

    fn client_records(&self) -> Option<&dyn ClientRecords> {
        self.opened()?.client_records()
    }

    fn voted_attempts(&self) -> Option<&dyn VotedAttempts> {
        self.opened()?.voted_attempts()
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl Diagnose for Lazy {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        self.with(|store| diagnose(&*store), Err)
    }

    fn warnings(&self) -> Vec<String> {
        self.opened().and_then(|store| store.doctor()).map_or_else(Vec::new, Diagnose::warnings)
    }
}
