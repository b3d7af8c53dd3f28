//! The calls of one event loop that can go on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A call that was woken.
pub(crate) trait Resume: Send + Sync {
    /// Lets it go on. Its key, if it has ended.
    fn resume(&self) -> Option<u64>;
}

/// How an event loop learns that it should call [`Queue::take`]: a descriptor that it watches, or a function that is called on its thread.
pub trait Notify: Send {
    /// From any thread; neither blocks nor panics. Called once until [`Self::clear`].
    fn notify(&self);

    /// On the loop's thread: [`Queue::take`] has been called.
    fn clear(&self) {}
}

/// Wakers push to it, from any thread; the loop's thread takes.
pub struct Queue {
    keys: AtomicU64,
    woken: Mutex<Woken>,
}

struct Woken {
    waiting: VecDeque<Weak<dyn Resume>>,
    /// None after `close`, although calls may still have the queue.
    notify: Option<Box<dyn Notify>>,
    is_notified: bool,
    /// The loop's thread polls calls. What they and other threads wake meanwhile is taken, or notified, at the end.
    is_in_call: bool,
}

impl Woken {
    fn notify(&mut self) {
        if let Some(notify) = &self.notify
            && !self.is_notified
        {
            self.is_notified = true;
            notify.notify();
        }
    }
}

impl Queue {
    /// A queue of one loop.
    pub fn new(notify: Box<dyn Notify>) -> Arc<Self> {
        let woken =
            Woken { waiting: VecDeque::new(), notify: Some(notify), is_notified: false, is_in_call: false };
        Arc::new(Self { keys: AtomicU64::new(1), woken: Mutex::new(woken) })
    }

    /// Whether it was not closed.
    pub fn is_open(&self) -> bool {
        self.woken().notify.is_some()
    }

    /// Whether a call can go on.
    pub fn is_ready(&self) -> bool {
        !self.woken().waiting.is_empty()
    }

    /// Drops the notification, which is not used any more once this returns. Calls that still run are never reported.
    pub fn close(&self) {
        let mut woken = self.woken();
        let notify = woken.notify.take();
        woken.waiting.clear();
        drop(woken);
        drop(notify);
    }

    fn woken(&self) -> MutexGuard<'_, Woken> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn push(&self, call: Weak<dyn Resume>) {
        let mut woken = self.woken();
        if woken.notify.is_none() {
            return;
        }
        woken.waiting.push_back(call);
        if !woken.is_in_call {
            woken.notify();
        }
    }

    /// Until the returned value is dropped, the loop's thread polls calls.
    pub(crate) fn begin_call(self: &Arc<Self>) -> InCall {
        self.woken().is_in_call = true;
        InCall(self.clone())
    }

    /// Lets the calls go on that were woken, on the loop's thread. Returns the keys of those that have ended.
    pub fn take(&self) -> Vec<u64> {
        let mut woken = self.woken();
        if std::mem::replace(&mut woken.is_notified, false)
            && let Some(notify) = &woken.notify
        {
            notify.clear();
        }
        woken.is_in_call = true;
        let mut ended = Vec::new();
        while let Some(call) = woken.waiting.pop_front() {
            drop(woken);
            ended.extend(call.upgrade().and_then(|call| call.resume()));
            woken = self.woken();
        }
        woken.is_in_call = false;
        ended
    }
}

pub(crate) struct InCall(Arc<Queue>);

impl Drop for InCall {
    /// Another task, or a loop that does not look, may have to be woken. A caller that takes at once takes the notification back.
    fn drop(&mut self) {
        let mut woken = self.0.woken();
        woken.is_in_call = false;
        if !woken.waiting.is_empty() {
            woken.notify();
        }
    }
}
