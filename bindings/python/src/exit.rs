//! The end of the interpreter. A thread that comes back to Python after it would be ended through frames of Rust, so every wait ends before.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Wake as _;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join, join_all};
use leasehold::{Client, Error};
use leasehold_store::process::PerProcess;
use pyo3::prelude::*;

use crate::core::{Core, Signal};

/// A client that an exit closes.
pub(crate) trait Close: Send + Sync {
    /// Releases what it holds, within this limit.
    fn close(&self, limit: Duration) -> BoxFuture<'_, ()>;
}

/// What an exit ends.
#[derive(Default)]
struct Exit {
    is_exiting: AtomicBool,
    keys: AtomicU64,
    registry: Mutex<Registry>,
    /// The last wait has ended.
    left: Condvar,
}

#[derive(Default)]
struct Registry {
    /// Threads that wait without the GIL.
    waiting: HashMap<u64, Arc<Signal>>,
    backends: HashMap<u64, Weak<dyn Close>>,
    /// Clients that were dropped without `close`, and still release what they held.
    closing: Vec<(Client, Closing)>,
}

type Closing = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

static EXIT: PerProcess<OnceLock<Exit>> = PerProcess::of_first(OnceLock::new());

fn exit() -> &'static Exit {
    EXIT.get_or_default().get_or_init(Exit::default)
}

impl Exit {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }
}

pub(crate) fn is_exiting() -> bool {
    exit().is_exiting.load(Ordering::Acquire)
}

/// A thread that waits for an operation.
pub(crate) struct Waiting(u64);

impl Waiting {
    /// None while the interpreter exits.
    pub(crate) fn begin(core: &Arc<Core>) -> Option<Self> {
        let exit = exit();
        let key = exit.next_key();
        exit.registry().waiting.insert(key, core.signal().clone());
        let waiting = Self(key);
        (!is_exiting()).then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let exit = exit();
        let mut registry = exit.registry();
        registry.waiting.remove(&self.0);
        if registry.waiting.is_empty() {
            exit.left.notify_all();
        }
    }
}

/// Notes a client for the exit. The returned key is for [`remove`].
pub(crate) fn add(backend: Weak<dyn Close>) -> u64 {
    let exit = exit();
    let key = exit.next_key();
    exit.registry().backends.insert(key, backend);
    key
}

pub(crate) fn remove(key: u64) {
    exit().registry().backends.remove(&key);
}

/// Closes a client in the background. The exit waits for it.
pub(crate) fn close(client: Client) {
    let mut closing: Closing = Box::pin(client.clone().close());
    if closing.as_mut().now_or_never().is_none() {
        let mut registry = exit().registry();
        // Those that are closed by now are forgotten.
        registry.closing.retain_mut(|(_, closing)| closing.as_mut().now_or_never().is_none());
        registry.closing.push((client, closing));
    }
}

/// Wakes every wait, closes all clients, and waits at most `timeout` seconds for that.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>, timeout: f64) {
    let exit = exit();
    exit.is_exiting.store(true, Ordering::Release);
    let limit = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
    let mut registry = exit.registry();
    let closing = std::mem::take(&mut registry.closing);
    let signals: Vec<_> = registry.waiting.values().cloned().collect();
    let backends: Vec<_> = registry.backends.values().filter_map(Weak::upgrade).collect();
    drop(registry);
    for signal in signals {
        signal.wake();
    }
    py.detach(|| {
        let open = join_all(backends.iter().map(|backend| backend.close(limit)));
        let dropped = join_all(closing.into_iter().map(|(client, _)| client.close_timeout(limit)));
        pollster::block_on(join(open, dropped));
        drop(backends);
        let is_waited_for = |registry: &mut Registry| !registry.waiting.is_empty();
        let _ = exit.left.wait_timeout_while(exit.registry(), limit, is_waited_for);
    });
}
