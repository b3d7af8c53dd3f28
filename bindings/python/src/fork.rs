//! The generation of this process: how often it was forked. An object of another generation may hold mutexes that nobody will ever unlock, and
//! sockets that belong to the parent: its calls fail, and its drop does nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyModule};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The generation in which an object was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home(u32);

impl Home {
    pub(crate) fn here() -> Self {
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is still the process that made the object.
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

/// A value whose drop is left out in a forked child.
pub(crate) struct Forkable<T> {
    value: Option<T>,
    home: Home,
}

impl<T> Forkable<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), home: Home::here() }
    }

    /// None in a forked child.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.home.is_here())
    }
}

impl<T> Drop for Forkable<T> {
    fn drop(&mut self) {
        if !self.home.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}

#[pyfunction]
fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Python calls [`in_child`] in each child, before any other code there.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let hooks = [("after_in_child", wrap_pyfunction!(in_child, module)?)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}

/// A static of this process: each child has its own, because one of a parent's threads may have held a mutex in it.
pub(crate) struct PerProcess<T: 'static> {
    first: OnceLock<Node<T>>,
}

struct Node<T: 'static> {
    home: Home,
    value: T,
    forked: OnceLock<Box<Node<T>>>,
}

impl<T: Default + 'static> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    pub(crate) fn get(&'static self) -> &'static T {
        let mut node = self.first.get_or_init(Node::new);
        while !node.home.is_here() {
            node = node.forked.get_or_init(|| Box::new(Node::new()));
        }
        &node.value
    }
}

impl<T: Default> Node<T> {
    fn new() -> Self {
        Self { home: Home::here(), value: T::default(), forked: OnceLock::new() }
    }
}
