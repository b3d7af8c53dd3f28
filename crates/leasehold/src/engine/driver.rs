//! One thread per client for work that must not depend on a polled future: renewals, rechecks, losses, and releases of dropped guards.
//!
//! It is a thread with a runtime of its own, because guards are dropped anywhere: outside a runtime, in a panic, in a runtime
//! that is shutting down. It sleeps until the earliest deadline of the table and sends everything that is due, one batch
//! for each shard. A slow response delays no loss; if too many batches have no response, what becomes due meanwhile is one more batch. The
//! thread ends when the client's last handle is dropped, everything is released, and the store has settled.

use std::future::poll_fn;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{Command, LocalTime};
use tokio::runtime::Builder;
use tracing::{Instrument as _, Span};

use super::manual::{Driven, ManualClock};
use super::outbox::{Outbox, Transmits};
use super::session::Session;
use super::timer::Timer;
use crate::store::{BoxFuture, Store};
use crate::tasks::TaskScope;
use crate::telemetry::{renewal_outcome, spans};

/// Starts the thread. `open` runs on it first, and `report` gets its result; `failed` is the error of a thread without a runtime or
/// a timer.
pub(crate) fn start<E, F>(
    session: Arc<Session>,
    open: impl FnOnce() -> F + Send + 'static,
    report: impl FnOnce(Result<Arc<dyn Store>, E>) -> bool + Send + 'static,
    failed: impl Fn(io::Error) -> E + Send + 'static,
) -> io::Result<()>
where
    F: Future<Output = Result<Arc<dyn Store>, E>>,
    E: 'static,
{
    let known = session.clone();
    let run = move || {
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                report(Err(failed(error)));
                return;
            }
        };
        runtime.block_on(async move {
            let tasks = TaskScope::new();
            let work = async {
                let ready = match (open().await, Timer::new()) {
                    (Ok(store), Ok(timer)) => Ok((store, timer)),
                    (Err(error), _) => Err(error),
                    (_, Err(error)) => Err(failed(error)),
                };
                match ready {
                    Err(error) => {
                        report(Err(error));
                    }
                    // A client that is closed removes what its store has outside of this process, such as a pipe.
                    Ok((store, timer)) => {
                        if report(Ok(store.clone())) {
                            drive(&session, &*store, timer).await;
                        }
                    }
                }
            };
            tasks.run(work).await;
            tasks.end().await;
            session.driver_gone();
        });
    };
    let run = move || {
        // Wakers and log subscribers are code of the program. If one panics, no renewal follows, so the client is closed.
        if std::panic::catch_unwind(AssertUnwindSafe(run)).is_err() {
            // Another one may panic in turn.
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| known.close(known.now())));
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| known.driver_gone()));
        }
    };
    std::thread::Builder::new().name("leasehold".to_owned()).spawn(run)?;
    Ok(())
}

/// Wakes the driver at a time of the local clock.
pub(crate) trait DriverTimer {
    /// Ends at this time or later. Cancel safe.
    fn until(&mut self, time: LocalTime) -> impl Future<Output = io::Result<()>>;
}

impl DriverTimer for Timer {
    fn until(&mut self, time: LocalTime) -> impl Future<Output = io::Result<()>> {
        Timer::until(self, time)
    }
}

pub(crate) async fn drive(session: &Session, store: &dyn Store, mut timer: impl DriverTimer) {
    let mut outbox = Outbox::default();
    let mut in_flight = FuturesUnordered::new();
    let mut settling = None::<BoxFuture<bool>>;
    loop {
        let due = session.due(session.now());
        if due.is_over {
            let mut settle = store.settle();
            // Usually there is nothing to wait for.
            if let Some(is_settled) = settle.as_mut().now_or_never() {
                session.end_settling(is_settled);
                return;
            }
            session.begin_settling();
            settling = Some(settle);
            continue;
        }
        outbox.add(store, due.transmits);
        while let Some((shard, replicas, batch)) = outbox.next_batch() {
            in_flight.push(send(session, store, shard, batch, replicas));
        }
        tokio::select! {
            // The order is fixed so that a run can be repeated. Everything that is due is looked at after each of them.
            biased;
            Some(shard) = in_flight.next() => outbox.handle_response(shard),
            () = session.alarm.notified() => {}
            is_settled = poll_fn(|context| poll_some(&mut settling, context)) => {
                session.end_settling(is_settled);
                return;
            }
            slept = timer.until(due.next) => if let Err(error) = slept {
                // Leases are still lost on time, because guards read the clock themselves.
                tracing::error!(%error, "the timer failed; retrying in 1 s");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
        }
    }
}

/// Polls a future, if there is one.
fn poll_some<T>(future: &mut Option<BoxFuture<T>>, context: &mut Context<'_>) -> Poll<T> {
    future.as_mut().map_or(Poll::Pending, |future| future.as_mut().poll(context))
}

/// Sends a batch and steps its entries with the answers. Returns the shard.
async fn send(session: &Session, store: &dyn Store, shard: u64, transmits: Transmits, replicas: u32) -> u64 {
    let batch =
        transmits.iter().map(|(resource, transmit)| (resource.clone(), transmit.command.clone())).collect();
    let renews = transmits.iter().any(|(_, transmit)| matches!(transmit.command, Command::Renew(_)));
    let span = if renews { spans::renew(transmits.len()) } else { Span::none() };
    let answers = store.call_batch(batch, replicas).instrument(span.clone()).await;
    let _entered = span.entered();
    debug_assert_eq!(answers.len(), transmits.len(), "a store returns one result per command");
    let now = session.now();
    for ((resource, transmit), answered) in transmits.iter().zip(&answers) {
        if matches!(transmit.command, Command::Renew(_)) {
            spans::renewed(resource, renewal_outcome(answered));
        }
        session.handle_response(transmit, now, answered);
    }
    shard
}

/// Drives a client of a manual clock, whose store answers inline.
pub(crate) fn start_manual(clock: &ManualClock, session: Arc<Session>, store: Arc<dyn Store>) {
    clock.add(Arc::new(ManualDriver { session, store }));
}

struct ManualDriver {
    session: Arc<Session>,
    store: Arc<dyn Store>,
}

impl Driven for ManualDriver {
    fn run_due(&self, now: LocalTime) -> Option<LocalTime> {
        loop {
            let due = self.session.due(now);
            if due.is_over {
                self.session.driver_gone();
                return None;
            }
            if due.transmits.is_empty() {
                return Some(due.next);
            }
            for (resource, transmit) in due.transmits {
                if let Some(answered) = self.store.try_call_inline(&resource, &transmit.command) {
                    self.session.handle_response(&transmit, now, &answered);
                }
            }
        }
    }
}
