//! The server of a quorum node: Redis, or one of a simulation.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Answer, Command, Resource, Token};

#[cfg(feature = "_simulation")]
use crate::simulation::{QuorumHost, call_result};
#[cfg(feature = "_simulation")]
use crate::store::only;
use crate::store::redis::Redis;
use crate::store::{BoxFuture, CallResult, Store as _, StoreError};

pub(super) enum Voter {
    Redis(Arc<Redis>),
    #[cfg(feature = "_simulation")]
    Simulated {
        host: Arc<dyn QuorumHost>,
        node: usize,
    },
}

impl Voter {
    /// Waits until the first connection attempt has succeeded or failed.
    pub(super) async fn await_connected(&self) -> Result<(), StoreError> {
        match self {
            Self::Redis(store) => store.await_connected().await,
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Ok(()),
        }
    }

    /// Whether there is a connection now.
    pub(super) fn is_connected(&self) -> bool {
        match self {
            Self::Redis(store) => store.is_connected(),
            #[cfg(feature = "_simulation")]
            Self::Simulated { host, node } => host.is_connected(*node),
        }
    }

    /// The server's run id, if it is connected.
    pub(super) fn run_id(&self) -> Option<Arc<str>> {
        match self {
            Self::Redis(store) => store.run_id(),
            #[cfg(feature = "_simulation")]
            Self::Simulated { host, node } => host.run_id(*node),
        }
    }

    /// Takes the client's part of the metadata; see `Store::publish_client`.
    pub(super) fn publish_client(&self, metadata: Arc<str>) -> bool {
        match self {
            Self::Redis(store) => store.publish_client(metadata),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => false,
        }
    }

    /// Waits for the client's record; see `Store::await_published`.
    pub(super) fn await_published(&self, limit: Duration) -> BoxFuture<()> {
        match self {
            Self::Redis(store) => store.await_published(limit),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Box::pin(std::future::ready(())),
        }
    }

    /// Adds what the clients in these answers have published; see `Store::add_clients`.
    pub(super) fn add_clients(&self, answers: Vec<Answer>) -> BoxFuture<Vec<Answer>> {
        match self {
            Self::Redis(store) => store.add_clients(answers),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Box::pin(std::future::ready(answers)),
        }
    }

    /// Runs a command; no token below `floor` is granted.
    pub(super) async fn call(
        &self,
        resource: Arc<Resource>,
        command: Command,
        floor: Option<Token>,
    ) -> CallResult {
        match self {
            Self::Redis(store) => store.call_as_voter(resource, command, floor).await,
            #[cfg(feature = "_simulation")]
            Self::Simulated { host, node } => {
                let answered = host.call(*node, vec![(resource, command)], floor).await;
                only(answered.into_iter().map(call_result).collect())
            }
        }
    }

    /// Runs commands in this order.
    pub(super) async fn call_batch(&self, batch: &[(Arc<Resource>, Command)]) -> Vec<CallResult> {
        match self {
            Self::Redis(store) => store.call_batch_as_voter(batch).await,
            #[cfg(feature = "_simulation")]
            Self::Simulated { host, node } => {
                let answered = host.call(*node, batch.to_vec(), None).await;
                answered.into_iter().map(call_result).collect()
            }
        }
    }

    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        match self {
            Self::Redis(store) => store.list().await,
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Ok(Vec::new()),
        }
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        match self {
            Self::Redis(store) => store.warnings(),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Vec::new(),
        }
    }

    /// Whether the current task would send its commands itself.
    pub(super) fn runs_on_caller(&self) -> bool {
        match self {
            Self::Redis(store) => store.runs_on_caller(),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => true,
        }
    }

    /// Does this where timers and sockets work; see `Redis::run_on_runtime`.
    pub(super) fn run_on_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        otherwise: impl Fn() -> T + Send + 'static,
    ) -> BoxFuture<T> {
        match self {
            Self::Redis(store) => store.run_on_runtime(work, otherwise),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => Box::pin(work),
        }
    }

    /// For `diagnose`, which opens connections of its own.
    pub(super) fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Redis(store) => Some(store),
            #[cfg(feature = "_simulation")]
            Self::Simulated { .. } => None,
        }
    }
}
