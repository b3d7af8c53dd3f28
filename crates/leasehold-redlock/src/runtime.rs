//! Where a quorum's tasks run, and its timers.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{AbortHandle, FutureExt as _, abortable};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_store::BoxFuture;
use leasehold_store::tasks::{self, Tasks};

/// What a quorum's tasks run on: the client's thread, or a simulation.
pub trait Host: Send + Sync {
    /// Runs a task on the client's thread, because the caller's runtime may end or stall first.
    fn spawn(&self, task: BoxFuture<()>);

    /// Runs a task on the current runtime.
    fn spawn_here(&self, task: BoxFuture<()>);

    /// Ends after this time.
    fn sleep(&self, span: Duration) -> BoxFuture<()>;

    /// A random number, for pauses.
    fn random(&self) -> u32;
}

impl Host for Tasks {
    fn spawn(&self, task: BoxFuture<()>) {
        Self::spawn(self, task);
    }

    fn spawn_here(&self, task: BoxFuture<()>) {
        tasks::spawn(task);
    }

    fn sleep(&self, span: Duration) -> BoxFuture<()> {
        Box::pin(async move { tokio::time::sleep(span).await })
    }

    fn random(&self) -> u32 {
        getrandom::u32().unwrap_or(u32::MAX / 2)
    }
}

/// Tasks and timers of a quorum.
#[derive(Clone)]
pub struct Runtime(Arc<dyn Host>);

impl Runtime {
    /// Tasks that run on this host.
    pub fn new(host: impl Host + 'static) -> Self {
        Self(Arc::new(host))
    }

    /// See [`Host::spawn`].
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(Box::pin(task));
    }

    /// As `spawn`, for a task that never ends by itself.
    pub(super) fn spawn_abortable(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let (task, handle) = abortable(task);
        self.spawn(task.map(drop));
        handle
    }

    /// See [`Host::spawn_here`].
    pub(super) fn spawn_here(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn_here(Box::pin(task));
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

    pub(super) fn sleep(&self, span: Duration) -> BoxFuture<()> {
        self.0.sleep(span)
    }

    /// `None` if `work` has not ended after `limit`.
    pub(super) async fn timeout<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let (mut work, mut limit) = (pin!(work), self.sleep(limit));
        std::future::poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => limit.as_mut().poll(context).map(|()| None),
        })
        .await
    }

    /// See [`Host::random`].
    pub(super) fn random(&self) -> u32 {
        self.0.random()
    }
}
