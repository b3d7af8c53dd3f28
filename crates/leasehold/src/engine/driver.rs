//! One thread per client that does what no future is polled for: renewals, rechecks, losses, and releases of dropped guards.
//!
//! It is a thread with a runtime of its own, because guards are dropped anywhere: outside a runtime, in a panic, in a runtime
//! that is shutting down. It sleeps until the earliest deadline of the table, sends everything that is due in one batch, and
//! never waits for the store: a slow response delays no loss and no other batch. It ends when the client's last handle is
//! dropped and everything is released.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use tokio::runtime::Builder;

use leasehold_core::Resource;
use tokio::sync::Semaphore;

use crate::engine::clock;
use crate::engine::timer::Timer;
use crate::engine::{Request, Session};
use crate::store::Store;

/// How many batches may be in flight to one shard. After a reconnect all leases are renewed; a server with more requests than
/// it can answer in time would look like a lost connection.
const MAX_IN_FLIGHT: usize = 16;

/// Starts the thread. `open` runs on it first, and `report` gets its result.
pub(crate) fn start<E, F>(
    session: Arc<Session>,
    open: impl FnOnce() -> F + Send + 'static,
    report: impl FnOnce(Result<Arc<dyn Store>, E>) -> bool + Send + 'static,
) -> io::Result<()>
where
    F: Future<Output = Result<Arc<dyn Store>, E>>,
    E: From<io::Error> + 'static,
{
    let run = move || {
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                report(Err(error.into()));
                return;
            }
        };
        runtime.block_on(async move {
            let ready = match (open().await, Timer::new()) {
                (Ok(store), Ok(timer)) => Ok((store, timer)),
                (Err(error), _) => Err(error),
                (_, Err(error)) => Err(error.into()),
            };
            match ready {
                Err(error) => {
                    report(Err(error));
                }
                Ok((store, timer)) => {
                    if report(Ok(store.clone())) {
                        drive(&session, store, timer).await;
                    }
                    session.driver_gone();
                }
            }
        });
    };
    std::thread::Builder::new().name("leasehold".to_owned()).spawn(run)?;
    Ok(())
}

async fn drive(session: &Arc<Session>, store: Arc<dyn Store>, mut timer: Timer) {
    // A cluster's nodes come and go, but they are few.
    let mut in_flight_limits = BTreeMap::<u64, Arc<Semaphore>>::new();
    loop {
        let due = session.due(clock::local());
        if due.is_over {
            return;
        }
        if !due.requests.is_empty() {
            for ((shard, _), requests) in by_shard(&*store, due.requests) {
                let permit = in_flight_limits
                    .entry(shard)
                    .or_insert_with(|| Arc::new(Semaphore::new(MAX_IN_FLIGHT)))
                    .clone();
                tokio::spawn(send(session.clone(), store.clone(), permit, requests));
            }
        }
        if due.next <= clock::local() {
            // More than one batch is due: let the first one be sent.
            tokio::task::yield_now().await;
            continue;
        }
        tokio::select! {
            () = session.alarm.notified() => {}
            slept = timer.until(due.next) => if let Err(error) = slept {
                // Leases are still lost on time, because guards read the clock themselves.
                tracing::error!(%error, "the timer failed; retrying in 1 s");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
        }
    }
}

type Requests = Vec<(Arc<Resource>, Request)>;

/// Groups requests by shard and by replica count, in the order of their deadlines.
fn by_shard(store: &dyn Store, requests: Vec<(Arc<Resource>, Request)>) -> BTreeMap<(u64, u32), Requests> {
    let mut shards = BTreeMap::<_, Vec<_>>::new();
    for (resource, request) in requests {
        let shard = store.shard(&resource, &request.command);
        shards.entry((shard, request.replicas)).or_default().push((resource, request));
    }
    shards
}

async fn send(
    session: Arc<Session>,
    store: Arc<dyn Store>,
    permit: Arc<Semaphore>,
    requests: Vec<(Arc<Resource>, Request)>,
) {
    let _permit = permit.acquire().await;
    let batch =
        requests.iter().map(|(resource, request)| (resource.clone(), request.command.clone())).collect();
    let answers =
        store.call_replicated(batch, requests.first().map_or(0, |(_, request)| request.replicas)).await;
    debug_assert_eq!(answers.len(), requests.len(), "a store returns one result per command");
    let now = clock::local();
    for ((_, request), answered) in requests.iter().zip(&answers) {
        session.handle_response(request, now, answered);
    }
}
