//! The operations of one event loop that can go on.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;

use crate::core::Core;

/// Wakers push to it, from any thread; the loop's thread takes.
pub(crate) struct Queue {
    descriptor: Descriptor,
    keys: AtomicU64,
    woken: Mutex<Woken>,
}

#[derive(Default)]
struct Woken {
    cores: VecDeque<Weak<Core>>,
    /// The descriptor is readable.
    is_signalled: bool,
    /// A call on the loop's thread polls operations. Its caller takes what it wakes, so the descriptor stays as it is.
    is_in_call: bool,
}

impl Queue {
    fn woken(&self) -> MutexGuard<'_, Woken> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn push(&self, core: Weak<Core>) {
        let mut woken = self.woken();
        woken.cores.push_back(core);
        if !woken.is_in_call && !woken.is_signalled {
            woken.is_signalled = true;
            drop(woken);
            self.descriptor.signal();
        }
    }

    /// Until the returned value is dropped, the loop's thread polls operations.
    pub(crate) fn begin_call(self: &Arc<Self>) -> InCall {
        self.woken().is_in_call = true;
        InCall(self.clone())
    }

    fn take(&self) -> Vec<u64> {
        let mut woken = self.woken();
        if std::mem::replace(&mut woken.is_signalled, false) {
            self.descriptor.clear();
        }
        woken.is_in_call = true;
        let mut ended = Vec::new();
        while let Some(core) = woken.cores.pop_front() {
            drop(woken);
            if let Some(core) = core.upgrade()
                && core.poll()
            {
                ended.push(core.key);
            }
            woken = self.woken();
        }
        woken.is_in_call = false;
        ended
    }
}

pub(crate) struct InCall(Arc<Queue>);

impl Drop for InCall {
    fn drop(&mut self) {
        self.0.woken().is_in_call = false;
    }
}

/// What `poll` and its like watch.
#[cfg(target_os = "linux")]
struct Descriptor(OwnedFd);

#[cfg(target_os = "linux")]
impl Descriptor {
    fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Fails only if it is signalled 2^64 - 1 times.
    fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }

    fn readable(&self) -> &OwnedFd {
        &self.0
    }
}

#[cfg(not(target_os = "linux"))]
struct Descriptor {
    read: OwnedFd,
    write: OwnedFd,
}

#[cfg(not(target_os = "linux"))]
impl Descriptor {
    fn new() -> std::io::Result<Self> {
        let (read, write) = rustix::pipe::pipe()?;
        for end in [&read, &write] {
            rustix::io::ioctl_fionbio(end, true)?;
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC)?;
        }
        Ok(Self { read, write })
    }

    /// At most one byte is in the pipe.
    fn signal(&self) {
        let _ = rustix::io::write(&self.write, &[1]);
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.read, &mut [0_u8; 8]);
    }

    fn readable(&self) -> &OwnedFd {
        &self.read
    }
}

/// The operations of one event loop that have ended.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Completions {
    queue: Mutex<Option<Arc<Queue>>>,
}

impl Completions {
    pub(crate) fn open() -> PyResult<Self> {
        let queue =
            Queue { descriptor: Descriptor::new()?, keys: AtomicU64::new(1), woken: Mutex::default() };
        Ok(Self { queue: Mutex::new(Some(Arc::new(queue))) })
    }

    /// An error after `close`.
    pub(crate) fn queue(&self) -> PyResult<Arc<Queue>> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).clone();
        queue.ok_or_else(|| pyo3::exceptions::PyValueError::new_err("the completions are closed"))
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        Self::open()
    }

    fn fileno(&self) -> PyResult<i32> {
        Ok(self.queue()?.descriptor.readable().as_raw_fd())
    }

    #[getter]
    fn is_ready(&self) -> PyResult<bool> {
        Ok(!self.queue()?.woken().cores.is_empty())
    }

    fn take(&self) -> Vec<u64> {
        self.queue().map_or_else(|_| Vec::new(), |queue| queue.take())
    }

    fn close(&self) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(queue);
    }
}

/// The queue of these completions, if there are any.
pub(crate) fn queue_of(completions: Option<&Bound<'_, Completions>>) -> PyResult<Option<Arc<Queue>>> {
    completions.map(|completions| completions.get().queue()).transpose()
}
