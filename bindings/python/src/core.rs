//! An operation: its future, the thread or the loop that its waker wakes, and its outcome.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use leasehold_store::process::Process;
use leasehold_store::wakes;
use pyo3::prelude::*;

use crate::errors::Failure;
use crate::queue::{Queue, Resume};

/// What an operation results in.
pub(crate) trait Value: Send {
    /// For Python.
    fn into_object(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

impl Value for () {
    fn into_object(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(py.None())
    }
}

impl Value for String {
    fn into_object(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok((*self).into_pyobject(py)?.into_any().unbind())
    }
}

pub(crate) type Outcome = Result<Box<dyn Value>, Failure>;
type Work = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The outcome of an operation that has succeeded.
#[expect(clippy::unnecessary_wraps, reason = "the operations end with it")]
pub(crate) fn done(value: impl Value + 'static) -> Outcome {
    Ok(Box::new(value))
}

enum State {
    Running(Work),
    Done(Outcome),
    /// Cancelled, or its outcome was taken.
    Over,
}

/// The thread or the loop that a waker wakes.
enum Target {
    /// A thread that waits for this operation.
    Thread(Mutex<bool>, Condvar),
    /// The queue of an event loop.
    Queue(Arc<Queue>),
}

/// What a waker of the library holds.
pub(crate) struct Signal {
    target: Target,
    core: OnceLock<Weak<Core>>,
    /// Whether it is in the queue.
    is_queued: AtomicBool,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match &self.target {
            Target::Thread(is_woken, condition) => {
                *is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
                condition.notify_all();
            }
            Target::Queue(queue) => {
                if !self.is_queued.swap(true, Ordering::AcqRel)
                    && let Some(core) = self.core.get()
                {
                    queue.push(core.clone() as Weak<dyn Resume>);
                }
            }
        }
    }
}

pub(crate) struct Core {
    pub(crate) key: u64,
    state: Mutex<State>,
    signal: Arc<Signal>,
    waker: Waker,
    home: Process,
}

impl Core {
    /// Starts an operation, and polls it once.
    pub(crate) fn start(
        work: impl Future<Output = Outcome> + Send + 'static,
        queue: Option<&Arc<Queue>>,
    ) -> Arc<Self> {
        let key = queue.map_or(0, |queue| queue.next_key());
        let target = queue.map_or_else(
            || Target::Thread(Mutex::new(false), Condvar::new()),
            |queue| Target::Queue(queue.clone()),
        );
        let signal = Arc::new(Signal { target, core: OnceLock::new(), is_queued: AtomicBool::new(false) });
        let (state, waker) = (Mutex::new(State::Running(Box::pin(work))), Waker::from(signal.clone()));
        let core = Arc::new(Self { key, state, signal, waker, home: Process::current() });
        let _ = core.signal.core.set(Arc::downgrade(&core));
        let _calling = queue.map(Queue::begin_call);
        core.poll();
        core
    }

    /// An operation that has ended already.
    pub(crate) fn ended(outcome: Outcome, queue: Option<&Arc<Queue>>) -> Arc<Self> {
        Self::start(std::future::ready(outcome), queue)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the operation go on. Whether it has an outcome.
    pub(crate) fn poll(&self) -> bool {
        self.signal.is_queued.store(false, Ordering::Release);
        let mut state = self.state();
        if let State::Running(work) = &mut *state
            && let std::task::Poll::Ready(outcome) = work.as_mut().poll(&mut Context::from_waker(&self.waker))
        {
            *state = State::Done(outcome);
        }
        matches!(*state, State::Done(_))
    }

    pub(crate) fn is_done(&self) -> bool {
        !matches!(*self.state(), State::Running(_))
    }

    /// Drops the future, or an outcome that was not taken.
    pub(crate) fn cancel(&self) {
        let before = std::mem::replace(&mut *self.state(), State::Over);
        drop(before);
        self.signal.wake_by_ref();
    }

    /// Ends a running operation with this outcome.
    pub(crate) fn end(&self, outcome: Outcome) {
        let mut state = self.state();
        if matches!(*state, State::Running(_)) {
            let before = std::mem::replace(&mut *state, State::Done(outcome));
            drop(state);
            drop(before);
            self.signal.wake_by_ref();
        }
    }

    /// The outcome, once.
    pub(crate) fn take(&self) -> Option<Outcome> {
        let mut state = self.state();
        if !matches!(*state, State::Done(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, State::Over) {
            State::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    pub(crate) fn is_of_queue(&self) -> bool {
        matches!(self.signal.target, Target::Queue(_))
    }

    pub(crate) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    /// Waits until the operation is woken, at most `limit`, and lets it go on. Whether it is done.
    pub(crate) fn park(&self, limit: Duration) -> bool {
        let Target::Thread(is_woken, condition) = &self.signal.target else { return self.is_done() };
        let woken = is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut woken, _) = condition
            .wait_timeout_while(woken, limit, |woken| !*woken)
            .unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *woken, false) {
            return self.is_done();
        }
        drop(woken);
        self.poll();
        let is_done = self.is_done();
        if is_done {
            // For other threads that wait for it.
            self.signal.wake_by_ref();
        }
        is_done
    }
}

/// Lets the threads of clients call the wakers of operations themselves: these neither block nor panic. A thread in between would delay each answer.
pub(crate) fn learn_wakers() {
    let learn = async {
        wakes::learn_blocking().await;
        done(())
    };
    drop(Core::start(learn, None));
}

impl Resume for Core {
    fn resume(&self) -> Option<u64> {
        self.poll().then_some(self.key)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if !self.home.is_current() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(state, State::Over));
        }
    }
}
