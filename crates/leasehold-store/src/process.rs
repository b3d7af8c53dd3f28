//! Which process made a value.
//!
//! A child that is forked without `exec` has a copy of its parent's memory and its open files, but none of its threads. There a mutex may be
//! held for ever; a waker reaches a runtime that does not run, through descriptors that the parent uses; and a command over the parent's
//! connection mixes with the parent's. What the parent made is therefore neither used nor dropped in the child: a table of the parent is
//! replaced by an empty one ([`PerProcess`]), and a future of the parent, or what a binding keeps, is forgotten ([`Own`]).
//!
//! Nothing in Rust's standard library reports a fork, so the child does: by [`forked`], or by connecting a client ([`look_for_fork`]).

use std::mem::forget;
use std::pin::Pin;
use std::process::id;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process id at the last look; zero before the first.
static LAST_ID: AtomicU32 = AtomicU32::new(0);

/// A process among its parents: how many forks it is away from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// The one that runs this. Reads one atomic.
    #[must_use]
    pub fn current() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it runs this, so that it was not forked since.
    #[must_use]
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}

/// This process was forked from the one that ran until now, and continues without `exec`. The child calls it first, from its only thread
/// (`os.register_at_fork`, `pthread_atfork`); it may be called in a signal handler.
///
/// From then on every client, lock and guard that a parent made fails here with `is_forked`, and does nothing when it is dropped: the lease stays the
/// parent's. Connecting a client notices a fork as well. Between the two, nothing of the parent's may be used.
pub fn forked() {
    LAST_ID.store(id(), Ordering::Relaxed);
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// As [`forked`], if the process has another id than at the last look.
pub fn look_for_fork() {
    let (last, now) = (LAST_ID.swap(id(), Ordering::Relaxed), id());
    if last != 0 && last != now {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
}

/// A value of which each process has its own.
#[derive(Debug)]
pub struct PerProcess<T> {
    process: Process,
    value: T,
    /// Those of children that were forked.
    later: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    /// For this process.
    pub fn new(value: T) -> Self {
        Self::of(Process::current(), value)
    }

    /// For the process that runs first.
    #[must_use]
    pub const fn of_first(value: T) -> Self {
        Self::of(Process(0), value)
    }

    const fn of(process: Process, value: T) -> Self {
        Self { process, value, later: OnceLock::new() }
    }

    /// The value of this process, which is made at its first use.
    pub fn get(&self, make: impl Fn() -> T) -> &T {
        self.get_of(Process::current(), make)
    }

    fn get_of(&self, process: Process, make: impl Fn() -> T) -> &T {
        let mut own = self;
        while own.process != process {
            own = own.later.get_or_init(|| Box::new(Self::of(process, make())));
        }
        &own.value
    }

    /// Whether this process made it.
    pub fn is_current(&self) -> bool {
        self.process.is_current()
    }

    /// Those of this process's parents.
    pub fn of_parents(&self) -> impl Iterator<Item = &T> {
        let all = std::iter::successors(Some(self), |own| own.later.get().map(|later| &**later));
        all.take_while(|own| !own.is_current()).map(|own| &own.value)
    }
}

impl<T: Default> PerProcess<T> {
    /// The value of this process: the default, at its first use.
    pub fn get_or_default(&self) -> &T {
        self.get(T::default)
    }
}

/// A value that is neither used nor dropped in a process that was forked since. A future stays pending there.
pub struct Own<T> {
    process: Process,
    value: Option<T>,
}

impl<T> Own<T> {
    /// Of this process.
    pub fn new(value: T) -> Self {
        Self { process: Process::current(), value: Some(value) }
    }

    /// None in a process that was forked since.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.process.is_current())
    }
}

impl<F: Future + Unpin> Future for Own<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let is_current = self.process.is_current();
        match &mut self.value {
            Some(future) if is_current => Pin::new(future).poll(context),
            // What it waits for does not come here.
            _ => Poll::Pending,
        }
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            forget(self.value.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_a_value_of_its_own() {
        let values = PerProcess::of(Process(1), 1);
        assert_eq!(*values.get_of(Process(2), || 2), 2);
        assert_eq!(*values.get_of(Process(3), || 3), 3);
        let kept: Vec<_> = (1..4).map(|process| *values.get_of(Process(process), || 9)).collect();
        assert_eq!(kept, [1, 2, 3]);
    }
}
