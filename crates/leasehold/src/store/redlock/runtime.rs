//! Where a quorum's tasks run, and its timers: tokio, or a simulation.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

#[cfg(feature = "_simulation")]
use std::sync::Arc;

use futures_util::future::{AbortHandle, FutureExt as _, abortable};
use futures_util::stream::{FuturesUnordered, StreamExt as _};

#[cfg(feature = "_simulation")]
use crate::clock::Clock;
#[cfg(feature = "_simulation")]
use crate::simulation::QuorumHost;
use crate::tasks::{self, Tasks};

#[derive(Clone)]
pub(super) enum Runtime {
    /// On the client's thread.
    Client(Tasks),
    #[cfg(feature = "_simulation")]
    Simulated(Arc<dyn QuorumHost>),
}

impl Runtime {
    /// Runs a task on the client's thread, because the caller's runtime may end or stall first.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Client(tasks) => drop(tasks.spawn(task)),
            #[cfg(feature = "_simulation")]
            Self::Simulated(host) => host.spawn(Box::pin(task)),
        }
    }

    /// As `spawn`, for a task that never ends by itself.
    pub(super) fn spawn_abortable(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let (task, handle) = abortable(task);
        self.spawn(task.map(drop));
        handle
    }

    /// Runs a task on the current runtime.
    pub(super) fn spawn_here(&self, task: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Client(_) => drop(tasks::spawn(task)),
            #[cfg(feature = "_simulation")]
            Self::Simulated(host) => host.spawn(Box::pin(task)),
        }
    }

    /// Awaits the remaining responses in a task of its own.
    pub(super) fn drain<F>(&self, responses: FuturesUnordered<F>)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        if !responses.is_empty() {
            self.spawn_here(responses.for_each(|_| async {}));
        }
    }

    pub(super) async fn sleep(&self, span: Duration) {
        match self {
            Self::Client(_) => tokio::time::sleep(span).await,
            #[cfg(feature = "_simulation")]
            Self::Simulated(host) => host.sleep_until(Clock::System.local() + span).await,
        }
    }

    /// `None` if `work` has not ended after `limit`.
    pub(super) async fn timeout<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let (mut work, mut limit) = (pin!(work), pin!(self.sleep(limit)));
        std::future::poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => limit.as_mut().poll(context).map(|()| None),
        })
        .await
    }

    /// A random number, for pauses.
    pub(super) fn random(&self) -> u32 {
        match self {
            Self::Client(_) => getrandom::u32().unwrap_or(u32::MAX / 2),
            #[cfg(feature = "_simulation")]
            Self::Simulated(host) => host.random(),
        }
    }
}
