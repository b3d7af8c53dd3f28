//! One driver per client for work that must not depend on a polled future: renewals, rechecks, losses, and releases of dropped guards.
//!
//! It is a task on a thread of the process's own (`threads`), because guards are dropped anywhere: outside a runtime, in a panic, in a
//! runtime that is shutting down. It sleeps until the earliest deadline of the table and sends everything that is due, one batch
//! for each shard. A slow response delays no loss; if too many batches have no response, what becomes due meanwhile is one more batch. The
//! driver ends when the client's last handle is dropped, everything is released, and the store has settled.

use std::future::{poll_fn, ready};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{Command, LocalTime};
use leasehold_store::clock::manual::{Driven, ManualClock};
use leasehold_store::tasks::TaskScope;
use leasehold_store::{BoxFuture, Call, Store, VotedAttempts, gate};
use tokio::task::coop::consume_budget;
use tracing::{Instrument as _, Span};

use super::outbox::{Outbox, Outgoing, Route, Transmits};
use super::session::Session;
use super::threads::{self, Drive};
use super::timer::Timer;
use crate::telemetry::{renewal_outcome, spans};

/// Starts a client's driver. `open` runs on its thread first, and `report` gets its result; `failed` is the error of a thread without a
/// runtime or timers.
pub(crate) fn start<E, F>(
    session: Arc<Session>,
    open: impl FnOnce() -> F + Send + 'static,
    report: impl FnOnce(Result<Arc<dyn Store>, E>) -> bool + Send + 'static,
    failed: impl Fn(io::Error) -> E + Send + 'static,
) -> io::Result<()>
where
    F: Future<Output = Result<Arc<dyn Store>, E>> + Send + 'static,
    E: Send + 'static,
{
    threads::start(Box::new(Client { session, open, report, failed }))
}

/// A client that has no store yet.
struct Client<O, R, M> {
    session: Arc<Session>,
    open: O,
    report: R,
    failed: M,
}

impl<E, F, O, R, M> Drive for Client<O, R, M>
where
    O: FnOnce() -> F + Send + 'static,
    F: Future<Output = Result<Arc<dyn Store>, E>> + Send + 'static,
    R: FnOnce(Result<Arc<dyn Store>, E>) -> bool + Send + 'static,
    M: Fn(io::Error) -> E + Send + 'static,
    E: Send + 'static,
{
    fn drive(self: Box<Self>, timer: Timer) -> BoxFuture<()> {
        let session = self.session.clone();
        Box::pin(async move {
            let tasks = TaskScope::new();
            // Wakers and log subscribers are code of the program. If one panics, no renewal follows, so the client is closed. Another one
            // may panic in turn.
            let driven = AssertUnwindSafe(tasks.run(self.open_and_drive(timer))).catch_unwind().await;
            if driven.is_err() {
                let _ = catch_unwind(AssertUnwindSafe(|| session.close(session.now())));
            }
            tasks.end().await;
            let _ = catch_unwind(AssertUnwindSafe(|| session.driver_gone()));
        })
    }

    fn fail(self: Box<Self>, error: io::Error) {
        (self.report)(Err((self.failed)(error)));
    }
}

impl<E, F, O, R, M> Client<O, R, M>
where
    O: FnOnce() -> F,
    F: Future<Output = Result<Arc<dyn Store>, E>>,
    R: FnOnce(Result<Arc<dyn Store>, E>) -> bool,
{
    async fn open_and_drive(self: Box<Self>, timer: Timer) {
        let Self { session, open, report, .. } = *self;
        match gate::throttled(open()).await {
            Err(error) => {
                report(Err(error));
            }
            // A client that is closed removes what its store has outside of this process, such as a pipe: the store is dropped here.
            Ok(store) => {
                if report(Ok(store.clone())) {
                    drive(&session, &*store, timer).await;
                }
            }
        }
    }
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
        // Other clients have their turn on this thread, however often this one is woken.
        consume_budget().await;
        let due = session.due(session.now());
        if due.is_over {
            let attempts = store.voted_attempts();
            let mut settle =
                attempts.map_or_else(|| Box::pin(ready(true)) as BoxFuture<_>, VotedAttempts::settle);
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
        while let Some((route, replicas, batch)) = outbox.next_batch() {
            in_flight.push(send(session, store, route, batch, replicas));
        }
        tokio::select! {
            // The order is fixed so that a run can be repeated. Everything that is due is looked at after each of them.
            biased;
            Some(route) = in_flight.next() => outbox.handle_response(route),
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

/// Sends a batch and steps its entries with the answers. Returns its route.
async fn send(
    session: &Session,
    store: &dyn Store,
    route: Route,
    transmits: Transmits,
    replicas: u32,
) -> Route {
    let call = |(resource, transmit): &Outgoing| Call::new(resource.clone(), transmit.command.clone());
    let batch = transmits.iter().map(call).collect();
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
    route
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
