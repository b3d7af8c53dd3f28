//! The seam of the library: how a process calls the store, and sleeps.

mod keys;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold::simulation::{Answered, Call, KeyHost, Pending, Transport};
use leasehold_core::{Acquire, Command, LocalTime, Resource};

use crate::executor::{ProcessId, Thread};
use crate::plan::Micros;
use crate::planted::Planted;
use crate::world::{Content, try_with, with};
pub(crate) use keys::KeyFuture;
use keys::KeyWire;

/// A process's way to the store, and its timer.
pub(crate) struct Wire(pub(crate) ProcessId);

impl Transport for Wire {
    fn call(&self, batch: Vec<Call>, by_driver: bool, replicas: u32) -> Pending<Vec<Answered>> {
        let thread = if by_driver { Thread::Driver } else { Thread::Callers };
        let mut batch = batch;
        if with(|world| world.planted) == Some(Planted::TombstonesUnasked) {
            for Call { command, .. } in &mut batch {
                if let Command::Release(release) = command {
                    release.tombstone = Duration::ZERO;
                }
            }
        }
        Box::pin(CallFuture::new(self.0, thread, Content::Batch(batch.into(), replicas)))
    }

    fn acquire_all(&self, attempts: Vec<(Arc<Resource>, Arc<Acquire>)>) -> Pending<Vec<Answered>> {
        Box::pin(CallFuture::new(self.0, Thread::Callers, Content::All(attempts.into())))
    }

    fn sleep_until(&self, time: LocalTime) -> Pending<()> {
        let planted = with(|world| world.planted);
        let time = match planted {
            Some(Planted::LateTimer | Planted::LateTimeout | Planted::LateTimerOfKeys)
                if time != LocalTime::NEVER =>
            {
                time + Duration::from_millis(2_500)
            }
            Some(Planted::TimerStorm) => with(|world| world.local(self.0)) + Duration::from_millis(1),
            _ => time,
        };
        Box::pin(Sleep::new(self.0, time))
    }

    fn poll_intervals(&self) -> (Duration, Duration) {
        (Duration::from_micros(with(|world| world.plan.repoll_interval)), Duration::from_secs(80))
    }

    fn key_host(&self) -> Option<Arc<dyn KeyHost>> {
        Some(Arc::new(KeyWire(self.0)))
    }
}

/// Ends when a process's clock reaches a time.
pub(crate) struct Sleep {
    process: ProcessId,
    until: LocalTime,
    number: Option<u64>,
}

impl Sleep {
    /// Until this time of this process's clock.
    #[must_use]
    pub(crate) fn new(process: ProcessId, until: LocalTime) -> Self {
        Self { process, until, number: None }
    }

    /// For this long.
    #[must_use]
    pub(crate) fn span(process: ProcessId, span: Micros) -> Self {
        let until = with(|world| world.local(process)) + Duration::from_micros(span);
        Self::new(process, until)
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        with(|world| {
            if world.local(self.process) >= self.until {
                return Poll::Ready(());
            }
            let number = *self.number.get_or_insert_with(|| world.number());
            world.sleep(number, self.process, self.until, context.waker());
            Poll::Pending
        })
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            drop(try_with(|world| world.sleeps.remove(&number)));
        }
    }
}

/// A call, sent when it is first polled.
struct CallFuture {
    process: ProcessId,
    thread: Thread,
    content: Option<Content>,
    number: u64,
}

impl CallFuture {
    fn new(process: ProcessId, thread: Thread, content: Content) -> Self {
        Self { process, thread, content: Some(content), number: 0 }
    }
}

impl Future for CallFuture {
    type Output = Vec<Answered>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Vec<Answered>> {
        with(|world| {
            if let Some(content) = self.content.take() {
                self.number = world.call(self.process, self.thread, content);
            }
            let Some(call) = world.calls.get_mut(&self.number) else { return Poll::Pending };
            match call.result.take() {
                Some(answers) => {
                    if let Some(call) = world.calls.remove(&self.number) {
                        world.books.note_denied(&call.content, &answers);
                    }
                    Poll::Ready(answers)
                }
                None => {
                    call.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        drop(try_with(|world| world.calls.remove(&self.number)));
    }
}
