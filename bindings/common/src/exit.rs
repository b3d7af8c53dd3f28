//! The end of an interpreter: every wait ends before, and all clients release what they hold.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join, join_all};
use leasehold::{Client, Error};

use crate::call::{Call, Parking};

/// A client that an exit closes.
pub(crate) trait Close: Send + Sync {
    /// Releases what it holds, within this limit.
    fn close(&self, limit: Duration) -> BoxFuture<'_, ()>;
}

/// The clients and the waits that end together: those of a process, or of one of its interpreters.
#[derive(Default)]
pub struct Exit {
    has_begun: AtomicBool,
    keys: AtomicU64,
    registry: Mutex<Registry>,
    /// The last wait has ended.
    left: Condvar,
}

#[derive(Default)]
struct Registry {
    /// Threads that wait.
    waiting: HashMap<u64, Arc<Parking>>,
    clients: HashMap<u64, Weak<dyn Close>>,
    /// Clients that were dropped without `close`, and still release what they held.
    closing: Vec<(Client, Closing)>,
}

type Closing = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

impl Exit {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether [`Self::run`] was called.
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// Notes a client. The returned key is for [`Self::remove`].
    pub(crate) fn add(&self, client: Weak<dyn Close>) -> u64 {
        let key = self.next_key();
        self.registry().clients.insert(key, client);
        key
    }

    pub(crate) fn remove(&self, key: u64) {
        self.registry().clients.remove(&key);
    }

    /// Closes a client in the background. The exit waits for it.
    pub(crate) fn close(&self, client: Client) {
        let mut closing: Closing = Box::pin(client.clone().close());
        if closing.as_mut().now_or_never().is_none() {
            let mut registry = self.registry();
            // Those that are closed by now are forgotten.
            registry.closing.retain_mut(|(_, closing)| closing.as_mut().now_or_never().is_none());
            registry.closing.push((client, closing));
        }
    }

    /// Wakes every wait, closes all clients, and waits at most `limit` for that. Later calls of clients fail.
    pub fn run(&self, limit: Duration) {
        self.has_begun.store(true, Ordering::Release);
        let mut registry = self.registry();
        let closing = std::mem::take(&mut registry.closing);
        let waiting: Vec<_> = registry.waiting.values().cloned().collect();
        let clients: Vec<_> = registry.clients.values().filter_map(Weak::upgrade).collect();
        drop(registry);
        for parking in waiting {
            parking.wake();
        }
        let open = join_all(clients.iter().map(|client| client.close(limit)));
        let dropped = join_all(closing.into_iter().map(|(client, _)| client.close_timeout(limit)));
        pollster::block_on(join(open, dropped));
        drop(clients);
        let is_waited_for = |registry: &mut Registry| !registry.waiting.is_empty();
        let _ = self.left.wait_timeout_while(self.registry(), limit, is_waited_for);
    }
}

/// A thread that waits for a call.
pub struct Waiting {
    exit: Arc<Exit>,
    key: u64,
}

impl Waiting {
    /// None while the interpreter exits.
    pub fn begin<A: Send + 'static>(exit: &Arc<Exit>, call: &Call<A>) -> Option<Self> {
        let key = exit.next_key();
        if let Some(parking) = call.parking() {
            exit.registry().waiting.insert(key, parking.clone());
        }
        let waiting = Self { exit: exit.clone(), key };
        (!exit.has_begun()).then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut registry = self.exit.registry();
        registry.waiting.remove(&self.key);
        if registry.waiting.is_empty() {
            self.exit.left.notify_all();
        }
    }
}
