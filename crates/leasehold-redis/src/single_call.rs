//! One command of a caller to one server, which is the usual case. It needs no list of commands or answers. Everything else is
//! sent as a batch (`dispatch.rs`): several commands, clusters, quorum nodes, replicas, a command that
//! needs the client's record, and a server without a connection.
//!
//! The future of a command is large: the redis crate's part alone has 1,128 bytes, more than the allocator's fast lists hold.
//! Allocating one for each command, and copying it there, took an eighth of the client's CPU. So it is reused: a *worker* is such
//! a future that runs one command after the other. Commands that other runtimes or the driver send have no workers.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use leasehold_core::Answer;
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::{Call, CallResult, StoreError, only};

use super::caller_conn::Caller;
use super::coalesce::Transport;
use super::connections::Connections;
use super::dispatch::{is_refused_by_a_replica, settle};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::exec::{self, CallOptions};
use super::nodes::Nodes;

type Answered = Result<Answer, CallError>;

impl Nodes {
    /// Runs one command.
    pub(super) async fn run_single(&self, call: &Call, replicas: u32) -> CallResult {
        let batch = slice::from_ref(call);
        if let (Self::Server { endpoint, voting: None, record }, 0) = (self, replicas)
            && record.covers(batch)
            && let Some(connections) = endpoint.current()
        {
            let answered = connections.coalescer().run(&connections, call).await;
            return match answered {
                Ok(answer) if !connections.is_closed() => Ok(answer),
                failed => Box::pin(settled(endpoint, &connections, call, failed)).await,
            };
        }
        only(Box::pin(self.run_batch(batch, replicas, None)).await)
    }
}

impl Transport for Connections {
    async fn run_one(&self, call: &Call) -> Answered {
        exec::run_one(&mut self.preferred_conn(), options_of(self), call).await
    }

    async fn run_several(&self, calls: &[&Call]) -> Vec<Answered> {
        exec::run_in_pipeline(self.preferred_conn(), options_of(self), calls).await
    }
}

fn options_of(connections: &Connections) -> CallOptions<'_> {
    connections.options(CallOptions::of(ScriptVariant::Server))
}

/// Handles a failed single command as [`settle`] does a batch.
async fn settled(
    endpoint: &Endpoint,
    connections: &Arc<Connections>,
    call: &Call,
    answered: Answered,
) -> CallResult {
    if matches!(answered, Err(CallError::ConnectionLost(_) | CallError::Timeout(_))) {
        connections.drop_preferred_conn();
    }
    let mut answers = [answered];
    settle(endpoint, connections, options_of(connections), 0, &[call], &mut answers).await;
    if answers.iter().any(is_refused_by_a_replica) {
        endpoint.invalidate();
    }
    let [answered] = answers;
    answered.map_err(StoreError::from)
}

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
                let result = nodes.run_single(&call, replicas).await;
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
