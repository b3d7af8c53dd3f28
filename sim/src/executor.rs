//! The tasks of a run: one thread polls them, in an order that the seed decides.
//!
//! A task belongs to one thread of one simulated process, and is not polled while that thread stands still.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

/// A process: an incarnation of a client.
pub type ProcessId = usize;
/// A task's number, never used again.
pub type TaskId = usize;

/// The two threads of a process: its users' runtime, and the client's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The users' tasks, and the first connection.
    Callers = 0,
    /// The driver, and the second connection.
    Driver = 1,
}

type Future = Pin<Box<dyn std::future::Future<Output = ()>>>;

struct Task {
    process: ProcessId,
    thread: Thread,
    waker: Arc<TaskWaker>,
    future: Option<Future>,
}

struct TaskWaker {
    task: TaskId,
    is_queued: AtomicBool,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::Relaxed) {
            READY.with_borrow_mut(|ready| ready.push_back(self.task));
        }
    }
}

thread_local! {
    static READY: RefCell<VecDeque<TaskId>> = const { RefCell::new(VecDeque::new()) };
    static TASKS: RefCell<Vec<Option<Task>>> = const { RefCell::new(Vec::new()) };
}

/// Adds a task, which is ready.
pub fn spawn(process: ProcessId, thread: Thread, future: impl std::future::Future<Output = ()> + 'static) {
    let waker = TASKS.with_borrow_mut(|tasks| {
        let waker = Arc::new(TaskWaker { task: tasks.len(), is_queued: AtomicBool::new(false) });
        tasks.push(Some(Task { process, thread, waker: waker.clone(), future: Some(Box::pin(future)) }));
        waker
    });
    waker.wake();
}

/// Takes the next ready task: the first, or the one at the index that `choose` returns for their number.
pub fn next_ready(choose: impl FnOnce(usize) -> usize) -> Option<TaskId> {
    READY.with_borrow_mut(|ready| match ready.len() {
        0 => None,
        1 => ready.pop_front(),
        count => {
            let at = choose(count);
            if at == 0 { ready.pop_front() } else { ready.remove(at) }
        }
    })
}

/// The process and the thread of a task that has not ended.
#[must_use]
pub fn place_of(task: TaskId) -> Option<(ProcessId, Thread)> {
    TASKS.with_borrow(|tasks| tasks.get(task)?.as_ref().map(|task| (task.process, task.thread)))
}

/// Polls a task once.
pub fn poll(task: TaskId) {
    let taken = TASKS.with_borrow_mut(|tasks| {
        let task = tasks.get_mut(task)?.as_mut()?;
        task.waker.is_queued.store(false, Ordering::Relaxed);
        Some((task.future.take()?, task.waker.clone()))
    });
    let Some((mut future, waker)) = taken else { return };
    let waker = Waker::from(waker);
    let is_over = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
    if is_over {
        // Its guards are dropped here, while it still counts as a task of its process.
        drop(future);
        TASKS.with_borrow_mut(|tasks| drop(tasks[task].take()));
    } else {
        TASKS.with_borrow_mut(|tasks| {
            if let Some(task) = &mut tasks[task] {
                task.future = Some(future);
            }
        });
    }
}

/// Makes a task ready again that was taken but not polled.
pub fn put_back(task: TaskId) {
    READY.with_borrow_mut(|ready| ready.push_back(task));
}

/// Removes the tasks of a process. The caller drops their futures.
#[must_use]
pub fn kill(process: Option<ProcessId>) -> Vec<Future> {
    TASKS.with_borrow_mut(|tasks| {
        let theirs = tasks.iter_mut().filter(|task| {
            task.as_ref().is_some_and(|task| process.is_none_or(|process| task.process == process))
        });
        theirs.filter_map(|task| task.take()?.future).collect()
    })
}

/// How many tasks of a process have not ended.
#[must_use]
pub fn count(process: ProcessId) -> usize {
    TASKS.with_borrow(|tasks| tasks.iter().flatten().filter(|task| task.process == process).count())
}

/// Forgets everything, for the next run.
pub fn clear() {
    drop(kill(None));
    TASKS.with_borrow_mut(Vec::clear);
    READY.with_borrow_mut(VecDeque::clear);
}
