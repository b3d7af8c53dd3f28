//! The operations of one event loop that can go on.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An operation that was woken.
pub(crate) trait Resume: Send + Sync {
    /// Lets it go on. Its key, if it has ended.
    fn resume(&self) -> Option<u64>;
}

/// Wakers push to it, from any thread; the loop's thread takes.
pub(crate) struct Queue {
    keys: AtomicU64,
    woken: Mutex<Woken>,
}

struct Woken {
    waiting: VecDeque<Weak<dyn Resume>>,
    /// None after `close`, although operations may still have the queue.
    descriptor: Option<Descriptor>,
    /// The descriptor is readable.
    is_signalled: bool,
    /// A call on the loop's thread polls operations. What they and other threads wake meanwhile is taken, or signalled, at its end.
    is_in_call: bool,
}

impl Woken {
    fn signal(&mut self) {
        if let Some(descriptor) = &self.descriptor
            && !self.is_signalled
        {
            self.is_signalled = true;
            descriptor.signal();
        }
    }
}

impl Queue {
    pub(crate) fn open() -> std::io::Result<Arc<Self>> {
        let descriptor = Some(Descriptor::new()?);
        let woken = Woken { waiting: VecDeque::new(), descriptor, is_signalled: false, is_in_call: false };
        Ok(Arc::new(Self { keys: AtomicU64::new(1), woken: Mutex::new(woken) }))
    }

    /// None after `close`.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.woken().descriptor.as_ref().map(|descriptor| descriptor.readable().as_raw_fd())
    }

    /// Whether an operation can go on.
    pub(crate) fn is_ready(&self) -> bool {
        !self.woken().waiting.is_empty()
    }

    pub(crate) fn close(&self) {
        let mut woken = self.woken();
        woken.descriptor = None;
        woken.waiting.clear();
    }

    fn woken(&self) -> MutexGuard<'_, Woken> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn push(&self, operation: Weak<dyn Resume>) {
        let mut woken = self.woken();
        if woken.descriptor.is_none() {
            return;
        }
        woken.waiting.push_back(operation);
        if !woken.is_in_call {
            woken.signal();
        }
    }

    /// Until the returned value is dropped, the loop's thread polls operations.
    pub(crate) fn begin_call(self: &Arc<Self>) -> InCall {
        self.woken().is_in_call = true;
        InCall(self.clone())
    }

    /// Lets the operations go on that were woken. Returns the keys of those that have ended.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut woken = self.woken();
        if std::mem::replace(&mut woken.is_signalled, false)
            && let Some(descriptor) = &woken.descriptor
        {
            descriptor.clear();
        }
        woken.is_in_call = true;
        let mut ended = Vec::new();
        while let Some(operation) = woken.waiting.pop_front() {
            drop(woken);
            ended.extend(operation.upgrade().and_then(|operation| operation.resume()));
            woken = self.woken();
        }
        woken.is_in_call = false;
        ended
    }
}

pub(crate) struct InCall(Arc<Queue>);

impl Drop for InCall {
    /// Another task, or a loop that does not look, may have to be woken. A caller that takes at once takes the signal back.
    fn drop(&mut self) {
        let mut woken = self.0.woken();
        woken.is_in_call = false;
        if !woken.waiting.is_empty() {
            woken.signal();
        }
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
