//! The seam of the library: how a process reaches the nodes, sleeps and runs tasks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold::simulation::{Answered, Call, Pending, QuorumHost};
use leasehold_core::{LocalTime, Token};

use super::event::Content;
use super::planted::Planted;
use super::world::{try_with, with};
use crate::executor::{self, ProcessId, Thread};
use crate::plan::Micros;

/// What a process stands on.
pub(super) struct Host {
    pub(super) process: ProcessId,
    pub(super) nodes: usize,
}

impl QuorumHost for Host {
    fn nodes(&self) -> usize {
        self.nodes
    }

    fn is_connected(&self, node: usize) -> bool {
        try_with(|world| world.processes[self.process].slots[node].link.is_some()).unwrap_or(false)
    }

    fn run_id(&self, node: usize) -> Option<Arc<str>> {
        try_with(|world| {
            let is_connected = world.processes[self.process].slots[node].link.is_some();
            is_connected.then(|| world.nodes[node].run_id.clone())
        })?
    }

    fn call(&self, node: usize, batch: Vec<Call>, floor: Option<Token>) -> Pending<Vec<Answered>> {
        let content = Some(Content { batch: batch.into(), floor });
        Box::pin(CallFuture { process: self.process, node, content, number: 0 })
    }

    fn spawn(&self, task: Pending<()>) {
        // Dropped guards of a killed process spawn tasks that must not run.
        if try_with(|world| world.processes[self.process].is_alive) == Some(true) {
            executor::spawn(self.process, Thread::Driver, task);
        }
    }

    fn sleep_until(&self, time: LocalTime) -> Pending<()> {
        let late = match try_with(|world| world.planted).flatten() {
            Some(Planted::LateTimers) if time != LocalTime::NEVER => Duration::from_millis(2_500),
            Some(Planted::LateTimeouts) if time != LocalTime::NEVER => Duration::from_secs(8),
            _ => Duration::ZERO,
        };
        Box::pin(Sleep::new(self.process, time + late))
    }

    fn random(&self) -> u32 {
        try_with(|world| u32::try_from(world.rng.bits() >> 32).unwrap_or(0)).unwrap_or(0)
    }
}

/// Ends when a process's clock reaches a time.
pub(super) struct Sleep {
    process: ProcessId,
    until: LocalTime,
    number: Option<u64>,
}

impl Sleep {
    pub(super) fn new(process: ProcessId, until: LocalTime) -> Self {
        Self { process, until, number: None }
    }

    /// For this long.
    pub(super) fn span(process: ProcessId, span: Micros) -> Self {
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
            drop(try_with(|world| world.end_sleep(number)));
        }
    }
}

/// A call, sent when it is first polled.
struct CallFuture {
    process: ProcessId,
    node: usize,
    content: Option<Content>,
    number: u64,
}

impl Future for CallFuture {
    type Output = Vec<Answered>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Vec<Answered>> {
        with(|world| {
            if let Some(content) = self.content.take() {
                self.number = world.call(self.process, self.node, content);
            }
            let Some(call) = world.calls.get_mut(&self.number) else { return Poll::Pending };
            match call.result.take() {
                Some(answers) => {
                    world.calls.remove(&self.number);
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
