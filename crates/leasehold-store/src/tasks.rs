//! The tasks of one client on the runtime of its thread. They end with the client, and not with the runtime.
//!
//! A task that is spawned by one of them belongs to the same client. One that is spawned elsewhere, in a task of the program, belongs to the
//! program's runtime. No other module spawns: a test reads the code.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet, yield_now};

use crate::wakes;

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

tokio::task_local! {
    static CURRENT: Tasks;
}

/// Owns the tasks of one client: they are aborted when it is dropped.
pub struct TaskScope(Tasks);

/// Spawns tasks of one client, from any thread.
#[derive(Clone)]
pub struct Tasks {
    runtime: Handle,
    /// None on a runtime of the program.
    set: Option<Arc<TaskSet>>,
}

#[derive(Default)]
struct TaskSet(Mutex<TaskState>);

enum TaskState {
    Open(JoinSet<()>),
    Ended,
}

impl Default for TaskState {
    fn default() -> Self {
        Self::Open(JoinSet::new())
    }
}

impl TaskSet {
    fn state(&self) -> MutexGuard<'_, TaskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spawns nothing any more. Returns what was spawned.
    fn close(&self) -> Option<JoinSet<()>> {
        match std::mem::replace(&mut *self.state(), TaskState::Ended) {
            TaskState::Open(tasks) => Some(tasks),
            TaskState::Ended => None,
        }
    }
}

impl TaskScope {
    /// Must be called on the runtime that is to run the tasks.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it needs a runtime")]
    pub fn new() -> Self {
        Self(Tasks { runtime: Handle::current(), set: Some(Arc::default()) })
    }

    /// What this future spawns belongs to the scope.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        CURRENT.scope(self.0.clone(), work).await
    }

    /// Aborts the tasks, and waits until they are dropped.
    pub async fn end(self) {
        let tasks = self.0.set.as_ref().and_then(|set| set.close());
        if let Some(mut tasks) = tasks {
            tasks.shutdown().await;
            // A library's own tasks, such as that of a connection, end at their next turn.
            yield_now().await;
        }
    }
}

impl Drop for TaskScope {
    fn drop(&mut self) {
        drop(self.0.set.as_ref().and_then(|set| set.close()));
    }
}

impl Tasks {
    /// Those of the client whose task this is, or of the program's runtime.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn current() -> Self {
        CURRENT.try_with(Self::clone).unwrap_or_else(|_| Self { runtime: Handle::current(), set: None })
    }

    /// Whether the current task is one of these.
    pub fn is_current(&self) -> bool {
        let is_same = |other: &Self| match (&self.set, &other.set) {
            (Some(set), Some(other)) => Arc::ptr_eq(set, other),
            _ => false,
        };
        CURRENT.try_with(is_same).unwrap_or_else(|_| {
            self.set.is_none() && Handle::try_current().is_ok_and(|here| here.id() == self.runtime.id())
        })
    }

    /// Calls this as one of the tasks would.
    pub fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        let _entered = self.runtime.enter();
        match self.set {
            Some(_) => CURRENT.sync_scope(self.clone(), call),
            None => call(),
        }
    }

    /// Spawns a task, which ends with the client.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let Some(set) = &self.set else { return self.runtime.spawn(task).abort_handle() };
        let task = CURRENT.scope(self.clone(), task);
        let mut state = set.state();
        match &mut *state {
            TaskState::Open(tasks) => {
                while tasks.try_join_next().is_some() {}
                tasks.spawn_on(task, &self.runtime)
            }
            TaskState::Ended => {
                drop(state);
                // It is dropped with the mutex free: it may own anything.
                drop(task);
                self.runtime.spawn(std::future::ready(())).abort_handle()
            }
        }
    }

    /// Does this as one of the tasks: in the current one, or else in one of its own. The result may be awaited on any executor.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        ended: impl FnOnce() -> T + Send + 'static,
    ) -> BoxFuture<T> {
        if self.is_current() { Box::pin(work) } else { self.answer(work, ended) }
    }

    /// Does this in a task of its own, which does not end if its result is not awaited. `ended` is the result if the task panics, or its
    /// client ends. It may be awaited on any executor.
    pub fn answer<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        ended: impl FnOnce() -> T + Send + 'static,
    ) -> BoxFuture<T> {
        let task = self.start(work);
        Box::pin(async move { task.await.unwrap_or_else(|TaskEnded| ended()) })
    }

    /// Spawns a task with a result. The result may be awaited on any executor, and the task does not end if it is not.
    pub fn start<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Task<T> {
        let (tell, result) = oneshot::channel();
        let handle = self.spawn(async move {
            // The receiver is gone if nothing waits for the result.
            let _ = tell.send(work.await);
        });
        Task { handle, result }
    }
}

/// Spawns a task of the client whose task this is, or of the program's runtime.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    match CURRENT.try_with(Tasks::clone) {
        Ok(tasks) => tasks.spawn(task),
        Err(_) => tokio::spawn(task).abort_handle(),
    }
}

/// Does work that blocks, such as reading files, on a thread that drives no clients.
///
/// # Errors
///
/// The work panicked, or the runtime has ended.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, TaskEnded> {
    tokio::task::spawn_blocking(work).await.map_err(|_| TaskEnded)
}

/// Does this on a thread that drives no clients: code of the program may block it. Its timers and sockets are those of this runtime.
///
/// # Errors
///
/// The work panicked, or the runtime has ended.
pub async fn apart<T, W>(work: impl FnOnce() -> W + Send + 'static) -> Result<T, TaskEnded>
where
    T: Send + 'static,
    W: Future<Output = T>,
{
    let runtime = Handle::current();
    blocking(move || runtime.block_on(async { work().await })).await
}

/// A task with a result.
pub struct Task<T> {
    handle: AbortHandle,
    result: oneshot::Receiver<T>,
}

/// The task panicked, or its client has ended.
#[derive(Debug)]
pub struct TaskEnded;

impl<T> Task<T> {
    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, TaskEnded>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = &mut self.result;
        wakes::guarded(context, |context| Pin::new(result).poll(context)).map_err(|_| TaskEnded)
    }
}

/// Tasks that are aborted together, when this is dropped.
#[derive(Default)]
pub struct TaskGroup(Vec<AbortHandle>);

impl TaskGroup {
    /// Spawns a task, which ends with the group.
    pub fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.retain(|task| !task.is_finished());
        self.0.push(spawn(task));
    }
}

impl Drop for TaskGroup {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A future that never ends. Its drop is reported.
    fn endless(
        dropped: &Sender<&'static str>,
        name: &'static str,
    ) -> impl Future<Output = ()> + Send + 'static {
        struct Report(Sender<&'static str>, &'static str);
        impl Drop for Report {
            fn drop(&mut self) {
                let _ = self.0.send(self.1);
            }
        }
        let report = Report(dropped.clone(), name);
        async move {
            let _report = report;
            std::future::pending::<()>().await;
        }
    }

    fn sorted(dropped: &Receiver<&'static str>) -> Vec<&'static str> {
        let mut names: Vec<_> = dropped.try_iter().collect();
        names.sort_unstable();
        names
    }

    #[tokio::test]
    async fn tasks_and_their_own_tasks_are_dropped_when_the_scope_has_ended() {
        let (tell, dropped) = channel();
        let (scope, other) = (TaskScope::new(), TaskScope::new());
        let (begun, has_begun) = oneshot::channel();
        let parent = {
            let tell = tell.clone();
            async move {
                spawn(endless(&tell, "child"));
                let _ = begun.send(());
                endless(&tell, "parent").await;
            }
        };
        let outside = scope.run(async {
            spawn(parent);
            Tasks::current()
        });
        let outside = outside.await;
        let from_elsewhere = outside.clone();
        let thread = tell.clone();
        std::thread::spawn(move || from_elsewhere.spawn(endless(&thread, "thread"))).join().unwrap();
        let entered = outside.enter(|| spawn(endless(&tell, "entered")));
        other.run(async { spawn(endless(&tell, "of another client")) }).await;
        spawn(endless(&tell, "of the program"));
        has_begun.await.unwrap();
        assert_eq!(sorted(&dropped), [""; 0]);
        scope.end().await;
        assert_eq!(sorted(&dropped), ["child", "entered", "parent", "thread"]);
        assert!(entered.is_finished());
        drop(other);
        yield_now().await;
        assert_eq!(sorted(&dropped), ["of another client"]);
    }

    #[tokio::test]
    async fn task_of_a_scope_that_has_ended_is_dropped_and_has_no_result() {
        let (tell, dropped) = channel();
        let scope = TaskScope::new();
        let tasks = scope.run(async { Tasks::current() }).await;
        scope.end().await;
        let late = tasks.start(endless(&tell, "late"));
        assert_eq!(sorted(&dropped), ["late"]);
        late.await.unwrap_err();
    }

    #[tokio::test]
    async fn result_of_a_task_is_there_and_a_panic_is_its_end() {
        let scope = TaskScope::new();
        let tasks = scope.run(async { Tasks::current() }).await;
        assert!(!tasks.is_current());
        let known = tasks.clone();
        assert!(tasks.start(async move { known.is_current() }).await.unwrap());
        tasks.start(async { panic!("on purpose") }).await.unwrap_err();
        assert_eq!(tasks.start(async { 1 }).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn tasks_that_have_ended_are_forgotten() {
        let scope = TaskScope::new();
        let tasks = scope.run(async { Tasks::current() }).await;
        for _ in 0..100 {
            tasks.start(async {}).await.unwrap();
        }
        let TaskState::Open(set) = &*scope.0.set.as_ref().unwrap().state() else { panic!("it is open") };
        assert!(set.len() <= 2, "{} tasks are kept", set.len());
    }

    #[tokio::test]
    async fn group_of_tasks_ends_by_itself() {
        let (tell, dropped) = channel();
        let mut group = TaskGroup::default();
        group.spawn(endless(&tell, "grouped"));
        yield_now().await;
        drop(group);
        yield_now().await;
        assert_eq!(sorted(&dropped), ["grouped"]);
    }

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_test = path.file_stem().is_some_and(|stem| stem == "tests");
            if path.is_dir() && !is_test {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
                found.push(path);
            }
        }
    }

    /// A task that is spawned in another way may outlive its client. On a runtime of the program, that is as it should be.
    #[test]
    fn no_other_module_spawns_tasks_of_a_client() {
        let ways = ["tokio::spawn", "task::spawn(", "spawn_local", "spawn_on", "JoinSet", "Handle::current"];
        let mut files = Vec::new();
        for sibling in ["", "-store", "-sqlite", "-postgres", "-redis", "-redlock"] {
            let sibling = format!("leasehold{sibling}");
            sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(sibling).join("src"), &mut files);
        }
        assert!(files.len() > 100);
        let mut found = Vec::new();
        for file in files.iter().filter(|file| !file.ends_with("src/tasks.rs")) {
            let text = fs::read_to_string(file).unwrap();
            let code = text.split("mod tests {").next().unwrap_or_default();
            let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            let spawning = code.filter(|line| ways.iter().any(|way| line.contains(way)));
            found.extend(spawning.map(|line| format!("{}: {}", file.display(), line.trim())));
        }
        assert_eq!(found, [""; 0], "use leasehold_store::tasks");
    }

    #[tokio::test]
    async fn work_runs_here_or_in_a_task_that_needs_no_one_to_wait() {
        let scope = TaskScope::new();
        let tasks = scope.run(async { Tasks::current() }).await;
        let (sender, ran) = channel();
        let work = |sender: Sender<bool>, tasks: Tasks| async move {
            sender.send(tasks.is_current()).unwrap();
            1
        };
        let own = scope.run(tasks.run(work(sender.clone(), tasks.clone()), || 2));
        assert_eq!((own.await, ran.recv()), (1, Ok(true)));
        // Nothing waits for this one.
        let unpolled = tasks.answer(work(sender.clone(), tasks.clone()), || 2);
        while ran.try_recv().is_err() {
            yield_now().await;
        }
        drop(unpolled);
        let endless = tasks.run(
            async {
                std::future::pending::<()>().await;
                1
            },
            || 2,
        );
        scope.end().await;
        assert_eq!(endless.await, 2);
        assert_eq!(tasks.answer(work(sender, tasks.clone()), || 2).await, 2, "the client has ended");
    }
}
