//! A call: its future, the thread or the loop that its waker wakes, and its outcome.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use leasehold_store::process::Process;

use crate::failure::Failure;
use crate::queue::{Queue, Resume};

type Work<A> = Pin<Box<dyn Future<Output = Result<A, Failure>> + Send>>;

enum State<A> {
    Running(Work<A>),
    Done(Result<A, Failure>),
    /// Cancelled, or its outcome was taken.
    Over,
}

/// The thread or the loop that a waker wakes.
enum Target {
    Thread(Arc<Parking>),
    /// The queue of an event loop.
    Queue(Arc<Queue>),
}

/// Where the threads wait that wait for a call.
#[derive(Default)]
pub(crate) struct Parking {
    is_woken: Mutex<bool>,
    condition: Condvar,
}

impl Parking {
    /// The threads look again.
    pub(crate) fn wake(&self) {
        *self.is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.condition.notify_all();
    }

    /// Waits until it is woken, at most `limit`. Whether it was.
    fn park(&self, limit: Duration) -> bool {
        let woken = self.is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.condition.wait_timeout_while(woken, limit, |woken| !*woken);
        let (mut woken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *woken, false)
    }
}

/// What a waker of the library holds.
struct Signal<A> {
    target: Target,
    call: OnceLock<Weak<Call<A>>>,
    /// Whether it is in the queue.
    is_queued: AtomicBool,
}

impl<A: Send + 'static> Wake for Signal<A> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match &self.target {
            Target::Thread(parking) => parking.wake(),
            Target::Queue(queue) => {
                if !self.is_queued.swap(true, Ordering::AcqRel)
                    && let Some(call) = self.call.get()
                {
                    queue.push(call.clone() as Weak<dyn Resume>);
                }
            }
        }
    }
}

/// A started call with an answer of type `A`. Its owner cancels it before dropping it.
pub struct Call<A> {
    key: u64,
    state: Mutex<State<A>>,
    signal: Arc<Signal<A>>,
    waker: Waker,
    home: Process,
}

impl<A: Send + 'static> Call<A> {
    /// Starts a call, and polls it once. Without a queue a thread waits for it ([`Self::park`]).
    pub fn start(
        work: impl Future<Output = Result<A, Failure>> + Send + 'static,
        queue: Option<&Arc<Queue>>,
    ) -> Arc<Self> {
        let key = queue.map_or(0, |queue| queue.next_key());
        let target =
            queue.map_or_else(|| Target::Thread(Arc::default()), |queue| Target::Queue(queue.clone()));
        let signal = Arc::new(Signal { target, call: OnceLock::new(), is_queued: AtomicBool::new(false) });
        let (state, waker) = (Mutex::new(State::Running(Box::pin(work))), Waker::from(signal.clone()));
        let call = Arc::new(Self { key, state, signal, waker, home: Process::current() });
        let _ = call.signal.call.set(Arc::downgrade(&call));
        let _calling = queue.map(Queue::begin_call);
        call.poll();
        call
    }

    /// A call that has ended already.
    pub fn ended(outcome: Result<A, Failure>, queue: Option<&Arc<Queue>>) -> Arc<Self> {
        Self::start(std::future::ready(outcome), queue)
    }

    /// By which [`Queue::take`] names it.
    pub fn key(&self) -> u64 {
        self.key
    }

    fn state(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the call go on. Whether it has an outcome.
    fn poll(&self) -> bool {
        self.signal.is_queued.store(false, Ordering::Release);
        let mut state = self.state();
        if let State::Running(work) = &mut *state
            && let std::task::Poll::Ready(outcome) = work.as_mut().poll(&mut Context::from_waker(&self.waker))
        {
            *state = State::Done(outcome);
        }
        matches!(*state, State::Done(_))
    }

    /// Whether it has an outcome, or was cancelled.
    pub fn is_done(&self) -> bool {
        !matches!(*self.state(), State::Running(_))
    }

    /// Drops the future, or an outcome that was not taken.
    pub fn cancel(&self) {
        let before = std::mem::replace(&mut *self.state(), State::Over);
        drop(before);
        self.signal.wake_by_ref();
    }

    /// Ends a running call with this outcome.
    pub(crate) fn end(&self, outcome: Result<A, Failure>) {
        let mut state = self.state();
        if matches!(*state, State::Running(_)) {
            let before = std::mem::replace(&mut *state, State::Done(outcome));
            drop(state);
            drop(before);
            self.signal.wake_by_ref();
        }
    }

    /// The outcome, once.
    pub fn take(&self) -> Option<Result<A, Failure>> {
        let mut state = self.state();
        if !matches!(*state, State::Done(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, State::Over) {
            State::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Whether it reports to a queue, so that no thread waits for it.
    pub fn is_of_queue(&self) -> bool {
        self.parking().is_none()
    }

    /// Where a thread waits for it. None if it reports to a queue.
    pub(crate) fn parking(&self) -> Option<&Arc<Parking>> {
        match &self.signal.target {
            Target::Thread(parking) => Some(parking),
            Target::Queue(_) => None,
        }
    }

    /// Waits until the call is woken, at most `limit`, and lets it go on. Whether it is done.
    pub fn park(&self, limit: Duration) -> bool {
        if !self.parking().is_some_and(|parking| parking.park(limit)) {
            return self.is_done();
        }
        self.poll();
        let is_done = self.is_done();
        if is_done {
            // For other threads that wait for it.
            self.signal.wake_by_ref();
        }
        is_done
    }
}

impl<A: Send + 'static> Resume for Call<A> {
    fn resume(&self) -> Option<u64> {
        self.poll().then_some(self.key)
    }
}

impl<A> Drop for Call<A> {
    fn drop(&mut self) {
        if !self.home.is_current() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(state, State::Over));
        }
    }
}

/// How long a call may wait, from its start on.
#[derive(Clone, Copy)]
pub struct Limit {
    started: Instant,
    wait: Duration,
}

impl Limit {
    /// From now on; None is no limit.
    #[must_use]
    pub fn new(wait: Option<Duration>) -> Self {
        Self { started: Instant::now(), wait: wait.unwrap_or(Duration::MAX) }
    }

    pub(crate) fn left(self) -> Duration {
        if self.wait == Duration::MAX { self.wait } else { self.wait.saturating_sub(self.started.elapsed()) }
    }
}
