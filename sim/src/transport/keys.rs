//! How a process runs commands on the locks of another library.

use std::pin::Pin;
use std::task::{Context, Poll};

use leasehold::simulation::{CallFailed, KeyAnswered, KeyCommand, KeyHost, Pending};

use crate::executor::{self, ProcessId, Thread};
use crate::world::{KeyResult, try_with, with};

/// What the bridges of a process stand on.
pub(crate) struct KeyWire(pub(crate) ProcessId);

impl KeyHost for KeyWire {
    fn spawn(&self, task: Pending<()>) {
        executor::spawn(self.0, Thread::Driver, task);
    }

    fn run(&self, commands: Vec<KeyCommand>) -> Pending<Result<Vec<KeyAnswered>, CallFailed>> {
        Box::pin(KeyFuture::new(self.0, commands))
    }

    fn is_tracking(&self) -> bool {
        with(|world| world.bridging.tracking.contains(&self.0))
    }

    fn random(&self) -> [u8; 16] {
        with(|world| world.bridging.draw())
    }
}

/// Commands that are sent together, and their answers.
pub(crate) struct KeyFuture(u64);

impl KeyFuture {
    /// Sends them.
    pub(crate) fn new(process: ProcessId, commands: Vec<KeyCommand>) -> Self {
        Self(with(|world| world.call_keys(process, commands)))
    }
}

impl Future for KeyFuture {
    type Output = KeyResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<KeyResult> {
        match with(|world| world.take_keys(self.0, context.waker())) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Drop for KeyFuture {
    fn drop(&mut self) {
        try_with(|world| world.leave_keys(self.0));
    }
}
