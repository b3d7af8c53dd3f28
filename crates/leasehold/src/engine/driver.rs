//! One thread per client that does what nobody's future is there to do: renewals, re-checks, losses, and giving
//! back what was dropped.
//!
//! It is a thread with a runtime of its own, because guards are dropped anywhere: outside a runtime, in a panic,
//! in a runtime that is shutting down. It sleeps until the earliest deadline of the session's table, sends
//! everything that is due in one batch, and never waits for the store: an answer that is slow to come delays no
//! loss and no other batch. It ends when the client's last handle is gone and nothing is left to give back.

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

/// How many batches may be on their way to one place. After a new connection all leases are renewed: if a server was
/// given more than it can answer in time, that would be taken for a lost connection.
const AT_ONCE: usize = 16;

/// Starts the thread. `open` runs on it first, and `tell` is told how that went.
pub(crate) fn start<E, F>(
    session: Arc<Session>,
    open: impl FnOnce() -> F + Send + 'static,
    tell: impl FnOnce(Result<Arc<dyn Store>, E>) -> bool + Send + 'static,
) -> io::Result<()>
where
    F: Future<Output = Result<Arc<dyn Store>, E>>,
    E: From<io::Error> + 'static,
{
    let run = move || {
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tell(Err(error.into()));
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
                    tell(Err(error));
                }
                Ok((store, timer)) => {
                    if tell(Ok(store.clone())) {
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
    let mut ways = BTreeMap::<u64, Arc<Semaphore>>::new();
    loop {
        let due = session.due(clock::local());
        if due.is_over {
            return;
        }
        if !due.requests.is_empty() {
            for ((shard, _), requests) in by_shard(&*store, due.requests) {
                let turn = ways.entry(shard).or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE))).clone();
                tokio::spawn(send(session.clone(), store.clone(), turn, requests));
            }
        }
        if due.next <= clock::local() {
            // More than one batch is due: let the first one out.
            tokio::task::yield_now().await;
            continue;
        }
        tokio::select! {
            () = session.alarm.notified() => {}
            slept = timer.until(due.next) => if let Err(error) = slept {
                // Leases are still lost on time, by the clock that their guards look at.
                tracing::error!(%error, "the timer failed; looking again in a second");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
        }
    }
}

type Requests = Vec<(Arc<Resource>, Request)>;

/// In the order of their deadlines, for each place that they go to and each safety.
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
    turn: Arc<Semaphore>,
    requests: Vec<(Arc<Resource>, Request)>,
) {
    let _turn = turn.acquire().await;
    let batch =
        requests.iter().map(|(resource, request)| (resource.clone(), request.command.clone())).collect();
    let answers =
        store.call_replicated(batch, requests.first().map_or(0, |(_, request)| request.replicas)).await;
    debug_assert_eq!(answers.len(), requests.len(), "a store answers every command");
    let now = clock::local();
    for ((_, request), answered) in requests.iter().zip(&answers) {
        session.handle_response(request, now, answered);
    }
}
