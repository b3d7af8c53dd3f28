//! The caller connection: opened in the caller's runtime, so that commands need no thread switch. Pushes come over the driver
//! connection, because the caller's runtime may be idle or may have ended.

use std::cell::Cell;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use redis::{RedisError, RedisResult};
use tokio::runtime::{Handle, Id, RuntimeFlavor};
use tokio::sync::Notify;
use tokio::task::{self, AbortHandle, yield_now};
use tokio::time::sleep;

use super::connect::Dial;
use super::connections::{Connections, config};
use super::error::explain;
use super::handshake;
use super::limits::RECONNECT_BACKOFF;
use super::own_connection::OwnConnection;
use super::place::Place;
use super::pushes::{ConnectionStatus, further_handler};

/// The pause after a server did not show whether the connection leads to it.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(60);

/// Task that keeps the caller connection open.
pub(super) struct CallerConnection {
    pub(super) dial: Dial,
    pub(super) caller: Handle,
    pub(super) connections: Weak<Connections>,
    pub(super) status: Arc<ConnectionStatus>,
    pub(super) runtime: Arc<CallerRuntime>,
}

/// The runtime in which the client was created.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) id: Id,
    pub(super) runtime: Arc<CallerRuntime>,
}

impl Caller {
    /// Whether this runs in a task of that runtime, which may send commands.
    pub(super) fn is_here(&self) -> bool {
        self.entered().is_some_and(|handle| is_driven(&handle))
    }

    /// The same for a later poll of a future that began here. It is not asked again who drives the runtime, which costs a system call.
    pub(super) fn is_still_here(&self) -> bool {
        self.entered().is_some()
    }

    fn entered(&self) -> Option<Handle> {
        let here = Handle::try_current().ok().filter(|handle| handle.id() == self.id);
        here.filter(|_| self.runtime.is_usable())
    }
}

/// Whether the runtime of this thread makes progress while the thread waits. One that runs in the threads that call `block_on` does not
/// where it was only entered: no task of it would read an answer.
fn is_driven(handle: &Handle) -> bool {
    thread_local! {
        /// The last task that was found to be scheduled. One that only blocks a thread for the runtime is another one.
        static SCHEDULED: Cell<Option<task::Id>> = const { Cell::new(None) };
    }
    if handle.runtime_flavor() != RuntimeFlavor::CurrentThread {
        return true;
    }
    let task = task::try_id();
    let is_known = task.is_some() && SCHEDULED.get() == task;
    let is_scheduled = is_known || is_scheduled();
    if is_scheduled {
        SCHEDULED.set(task);
    }
    is_scheduled
}

/// Whether a scheduler of tokio has called this: it wakes later what yields to it. Elsewhere `yield_now` wakes at once.
fn is_scheduled() -> bool {
    struct Probe;
    thread_local! {
        static IS_WOKEN: Cell<bool> = const { Cell::new(false) };
    }
    impl Wake for Probe {
        fn wake(self: Arc<Self>) {
            IS_WOKEN.set(true);
        }
    }
    static PROBE: LazyLock<Waker> = LazyLock::new(|| Waker::from(Arc::new(Probe)));
    IS_WOKEN.set(false);
    let yielded = pin!(yield_now()).poll(&mut Context::from_waker(&PROBE));
    yielded.is_pending() && !IS_WOKEN.get()
}

/// Whether tasks of the caller's runtime may send commands.
#[derive(Default)]
pub(super) struct CallerRuntime {
    /// A connection was opened there, so its sockets and timers work.
    has_connected: AtomicBool,
    /// It has no sockets or no timers.
    is_unfit: AtomicBool,
    has_ended: AtomicBool,
}

impl CallerRuntime {
    pub(super) fn is_usable(&self) -> bool {
        self.has_connected.load(Ordering::SeqCst) && !self.has_ended()
    }

    /// Whether a connection may be tried there. Where sockets or timers are missing, tokio panics, which ends a program that does not
    /// unwind.
    pub(super) fn may_be_tried(&self) -> bool {
        cfg!(panic = "unwind") && !self.is_unfit.load(Ordering::SeqCst)
    }

    fn set_unfit(&self) {
        if !self.is_unfit.swap(true, Ordering::SeqCst) {
            tracing::warn!(
                "the tokio runtime that the client was created in has no I/O or no timers (Builder::enable_all), as a panic has told: \
                 the client's own thread sends its commands"
            );
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    pub(super) fn set_usable(&self) {
        self.has_connected.store(true, Ordering::SeqCst);
    }

    /// Detects the runtime's shutdown by a task that it drops.
    pub(super) fn watch(self: &Arc<Self>, caller: &Handle) -> AbortHandle {
        let end = End(self.clone());
        let watch = async move {
            let _end = end;
            std::future::pending::<()>().await;
        };
        caller.spawn(watch).abort_handle()
    }
}

struct End(Arc<CallerRuntime>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::SeqCst);
    }
}

/// Notifies when the connection's task ends, including by a runtime shutdown.
struct Ending(Arc<Notify>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl CallerConnection {
    pub(super) async fn keep(self) {
        loop {
            let lost = Arc::new(Notify::new());
            match self.caller.spawn(self.connect(lost.clone())).await {
                Ok(Ok((mut connection, run_id))) => {
                    let Some(connections) = self.connections.upgrade() else { return };
                    match connections.place_at(run_id.as_deref(), &mut connection).await {
                        Ok(Place::Here) => {
                            connections.set_caller_conn(connection);
                            drop(connections);
                            self.runtime.set_usable();
                            lost.notified().await;
                            let Some(connections) = self.connections.upgrade() else { return };
                            connections.drop_caller_conn();
                        }
                        // The address leads to another server now.
                        Ok(Place::Elsewhere) => return connections.close(),
                        // Its commands might go to another server than the others.
                        Ok(Place::Unknown) => {
                            // Both would stay open meanwhile.
                            drop((connection, connections));
                            sleep(UNKNOWN_PAUSE).await;
                        }
                        Err(error) => not_yet(&error),
                    }
                }
                Ok(Err(error)) => not_yet(&error),
                Err(error) => {
                    if error.is_panic() {
                        self.runtime.set_unfit();
                    }
                    // Otherwise the caller's runtime has ended.
                    return;
                }
            }
            sleep(*RECONNECT_BACKOFF.end()).await;
        }
    }

    fn connect(
        &self,
        lost: Arc<Notify>,
    ) -> impl Future<Output = RedisResult<(OwnConnection, Option<String>)>> + Send + 'static {
        let (dial, status, ending) = (self.dial.clone(), self.status.clone(), Ending(lost));
        async move {
            let config = config().set_push_sender(further_handler(status, move || ending.0.notify_one()));
            let mut connection = dial.open(false, &config).await?;
            let run_id = handshake::run_id(&mut connection).await?;
            Ok((connection, run_id))
        }
    }
}

fn not_yet(error: &RedisError) {
    tracing::debug!(error = explain(error), "no connection of the caller's own yet");
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn runtime_of_one_thread_is_driven_only_by_the_thread_that_blocks_on_it() {
        let runtime = Builder::new_current_thread().build().unwrap();
        let is_here = || Handle::try_current().is_ok_and(|handle| is_driven(&handle));
        for _ in 0..3 {
            assert!(runtime.block_on(async { is_here() }));
            assert!(
                runtime
                    .block_on(async { tokio::spawn(async move { is_here() && is_here() }).await.unwrap() })
            );
            // The thread that blocks on the runtime may have left it before the task has ended.
            assert!(!runtime.block_on(async { task::spawn_blocking(is_here).await.unwrap() }));
            {
                let _entered = runtime.enter();
                assert!(!is_here());
                let of_other = || {
                    let _entered = runtime.handle().enter();
                    is_here()
                };
                assert!(!std::thread::scope(|scope| scope.spawn(of_other).join().unwrap()));
            }
        }
    }

    /// Its workers drive it.
    #[test]
    fn runtime_of_several_threads_is_driven_wherever_it_is_entered() {
        let runtime = Builder::new_multi_thread().worker_threads(1).build().unwrap();
        {
            let _entered = runtime.enter();
            assert!(is_driven(&Handle::current()));
        }
        assert!(runtime.block_on(async { is_driven(&Handle::current()) }));
    }

    #[test]
    fn runtime_without_sockets_is_not_tried_again() {
        let runtime = CallerRuntime::default();
        assert!(runtime.may_be_tried());
        runtime.set_unfit();
        assert!(!runtime.may_be_tried() && !runtime.is_usable());
    }
}
