//! Renewals before handshakes: many clients that connect at once leave the thread that they share to those that are connected.
//!
//! Between two looks at its sockets and timers, a thread advances a few handshakes only. The others wait, in order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;
use tokio::task::yield_now;

/// How many handshakes advance between two looks: a handshake with TLS takes up to a millisecond.
const AT_ONCE: usize = 4;

thread_local! {
    /// Only on a thread that drives clients.
    static GATE: RefCell<Option<Gate>> = const { RefCell::new(None) };
}

struct Gate {
    left: usize,
    waiting: VecDeque<(Waker, Arc<AtomicBool>)>,
    used: Rc<Notify>,
}

impl Gate {
    /// Whether the task may go on now. Otherwise it waits.
    fn enter(&mut self, context: &Context<'_>, is_waiting: &Arc<AtomicBool>) -> bool {
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            self.used.notify_one();
            return true;
        }
        if !is_waiting.swap(true, Ordering::Relaxed) {
            self.waiting.push_back((context.waker().clone(), is_waiting.clone()));
        }
        false
    }

    /// Lets the next ones go on. Returns those that are to be woken.
    fn open(&mut self) -> Vec<Waker> {
        self.left = AT_ONCE;
        let next = self.waiting.drain(..AT_ONCE.min(self.waiting.len()));
        let woken = |(waker, is_waiting): (Waker, Arc<AtomicBool>)| {
            is_waiting.store(false, Ordering::Relaxed);
            waker
        };
        next.map(woken).collect()
    }

    fn is_open(&self) -> bool {
        self.left == AT_ONCE && self.waiting.is_empty()
    }
}

/// Opens the gate of this thread again and again. Runs as long as the thread does.
pub async fn keep() {
    let used = Rc::new(Notify::new());
    let gate = Gate { left: AT_ONCE, waiting: VecDeque::new(), used: used.clone() };
    GATE.set(Some(gate));
    loop {
        used.notified().await;
        loop {
            // The runtime looks at its sockets and timers, and at what is ready.
            yield_now().await;
            let of_gate = |gate: &mut Option<Gate>| gate.as_mut().map(Gate::open).unwrap_or_default();
            let woken = GATE.with_borrow_mut(of_gate);
            if woken.is_empty() && GATE.with_borrow(|gate| gate.as_ref().is_none_or(Gate::is_open)) {
                break;
            }
            woken.into_iter().for_each(Waker::wake);
        }
    }
}

/// Connects, or opens a store, a few of this thread at a time.
pub async fn throttled<T>(handshake: impl Future<Output = T>) -> T {
    let (mut handshake, is_waiting) = (pin!(handshake), Arc::default());
    poll_fn(|context| {
        let enter =
            |gate: &mut Option<Gate>| gate.as_mut().is_none_or(|gate| gate.enter(context, &is_waiting));
        if GATE.with_borrow_mut(enter) { handshake.as_mut().poll(context) } else { Poll::Pending }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::task::LocalSet;

    use super::*;

    /// Each handshake needs some polls. Meanwhile a task that is ready is polled once for each few of theirs.
    #[tokio::test]
    async fn ready_task_waits_for_few_of_many_handshakes() {
        let tasks = LocalSet::new();
        tasks.spawn_local(keep());
        let polls = Arc::new(AtomicUsize::new(0));
        let handshakes = tasks.run_until(async {
            yield_now().await;
            let handshake = || {
                let polls = polls.clone();
                throttled(async move {
                    for _ in 0..3 {
                        polls.fetch_add(1, Ordering::Relaxed);
                        yield_now().await;
                    }
                })
            };
            (0..100).map(|_| tokio::task::spawn_local(handshake())).collect::<Vec<_>>()
        });
        let handshakes = handshakes.await;
        let ready = tasks.run_until(async {
            let mut before = 0;
            while handshakes.iter().any(|handshake| !handshake.is_finished()) {
                yield_now().await;
                let now = polls.load(Ordering::Relaxed);
                assert!(now - before <= 4 * AT_ONCE, "{} polls of handshakes at once", now - before);
                before = now;
            }
            before
        });
        assert_eq!(ready.await, 300);
    }

    #[tokio::test]
    async fn other_threads_have_no_gate() {
        let many = (0..100).map(|number| throttled(async move { number }));
        assert_eq!(futures_util::future::join_all(many).await.len(), 100);
    }
}
