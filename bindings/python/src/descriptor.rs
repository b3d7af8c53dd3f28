//! The descriptor that an event loop watches.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use leasehold_binding::Notify;

/// What `poll` and its like watch.
#[cfg(target_os = "linux")]
pub(crate) struct Descriptor(OwnedFd);

#[cfg(target_os = "linux")]
impl Descriptor {
    pub(crate) fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn readable(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(target_os = "linux")]
impl Notify for Descriptor {
    /// Fails only if it is notified 2^64 - 1 times.
    fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) struct Descriptor {
    read: OwnedFd,
    write: OwnedFd,
}

#[cfg(not(target_os = "linux"))]
impl Descriptor {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (read, write) = rustix::pipe::pipe()?;
        for end in [&read, &write] {
            rustix::io::ioctl_fionbio(end, true)?;
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC)?;
        }
        Ok(Self { read, write })
    }

    pub(crate) fn readable(&self) -> RawFd {
        self.read.as_raw_fd()
    }
}

#[cfg(not(target_os = "linux"))]
impl Notify for Descriptor {
    /// At most one byte is in the pipe.
    fn notify(&self) {
        let _ = rustix::io::write(&self.write, &[1]);
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.read, &mut [0_u8; 8]);
    }
}
