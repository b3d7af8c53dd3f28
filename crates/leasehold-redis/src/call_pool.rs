//! The futures of the caller's single commands, which is the usual case.
//!
//! The future of a command is large: the redis crate's part alone has 1,128 bytes, more than the allocator's fast lists hold.
//! Allocating one for each command, and copying it there, took an eighth of the client's CPU. So it is reused: a *worker* is such
//! a future that runs one command after the other. Commands that other runtimes or the driver send have no workers.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use leasehold_store::{Call, CallResult, StoreError};

use super::caller_conn::Caller;
use super::nodes::Nodes;

/// Workers that are kept for later commands. A task that has its answer usually sends its next command at once, so few are idle.
const MAX_IDLE: usize = 64;

/// The idle workers of a client.
pub(super) struct CallPool {
    nodes: Arc<Nodes>,
    idle: Mutex<Vec<Worker>>,
}

impl CallPool {
    pub(super) fn new(nodes: Arc<Nodes>) -> Self {
        Self { nodes, idle: Mutex::default() }
    }

    /// Runs a command in the runtime of `caller`, in a task of which the future must be polled.
    pub(super) fn call(self: &Arc<Self>, caller: &Caller, call: Call, replicas: u32) -> PooledCall {
        let idle = self.idle().pop();
        let worker = idle.unwrap_or_else(|| Worker::new(self.nodes.clone()));
        locked(&worker.exchange).job = Some((call, replicas));
        PooledCall { pool: self.clone(), caller: caller.clone(), worker: Some(worker) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Worker>> {
        locked(&self.idle)
    }

    fn put_back(&self, worker: Worker) {
        let mut idle = self.idle();
        if idle.len() < MAX_IDLE {
            idle.push(worker);
        } else {
            drop(idle);
            drop(worker);
        }
    }
}

/// What a worker is given, and what it returns.
#[derive(Default)]
struct Exchange {
    job: Option<(Call, u32)>,
    result: Option<CallResult>,
}

struct Worker {
    exchange: Arc<Mutex<Exchange>>,
    future: Pin<Box<dyn Future<Output = Infallible> + Send>>,
}

impl Worker {
    fn new(nodes: Arc<Nodes>) -> Self {
        let exchange = Arc::<Mutex<Exchange>>::default();
        let shared = exchange.clone();
        let future = Box::pin(async move {
            loop {
                let next = poll_fn(|_| locked(&shared).job.take().map_or(Poll::Pending, Poll::Ready));
                let (call, replicas) = next.await;
                let result = nodes.call(&call, replicas).await;
                locked(&shared).result = Some(result);
            }
        });
        Self { exchange, future }
    }
}

/// A command in flight. If it is dropped, its worker is dropped too.
pub(super) struct PooledCall {
    pool: Arc<CallPool>,
    caller: Caller,
    /// None after the answer.
    worker: Option<Worker>,
}

impl Future for PooledCall {
    type Output = CallResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CallResult> {
        if !self.caller.is_still_here() {
            // A future may be moved to another executor half way, or its runtime be shut down: the worker would panic.
            return Poll::Ready(Err(StoreError::runtime_ended()));
        }
        let Some(worker) = &mut self.worker else { return Poll::Ready(Err(StoreError::runtime_ended())) };
        // It never ends: after a command it waits for the next one.
        let Poll::Pending = worker.future.as_mut().poll(context);
        let Some(result) = locked(&worker.exchange).result.take() else { return Poll::Pending };
        if let Some(worker) = self.worker.take() {
            self.pool.put_back(worker);
        }
        Poll::Ready(result)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
