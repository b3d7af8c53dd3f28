//! A client between two of its steps: what it was told so far, and what it wants next.
//!
//! A client is a plain async function, which can't be copied. But it is the same function each time, so whoever was told the
//! same is at the same point: a client is taken up again by telling it everything once more.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::{RedisResult, Value};

use super::scenario::Visit;
use crate::redis::{Note, Op, Redis, Soon, World};

/// What a client was told in answer to a step, and what its clock said then.
#[derive(Clone, Debug)]
pub(super) struct Told {
    /// The answer.
    pub(super) value: Value,
    /// The client's own clock.
    pub(super) clock: Duration,
}

/// A client between two of its steps.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    told: Arc<Vec<Told>>,
    start: Duration,
    /// Two clients of the same number who were told the same have the same.
    pub(super) hash: u64,
    /// The next step; none when it has done all that it came for.
    pub(super) next: Option<Op>,
}

/// Begins it.
pub(super) type Program<'a> = &'a dyn Fn(Redis) -> Visit;

impl Standing {
    /// At the beginning, with what it tells until its first step.
    pub(super) fn begin(program: Program<'_>, name: &'static str, clock: Duration) -> (Self, Vec<Note>) {
        let standing = Self { told: Arc::default(), start: clock, hash: 0, next: None };
        standing.go_on(program, name)
    }

    /// After one more step, with what it tells until the next one.
    pub(super) fn tell(&self, program: Program<'_>, name: &'static str, told: Told) -> (Self, Vec<Note>) {
        let mut hasher = DefaultHasher::new();
        (self.hash, format!("{told:?}")).hash(&mut hasher);
        let mut all = (*self.told).clone();
        all.push(told);
        let standing = Self { told: Arc::new(all), start: self.start, hash: hasher.finish(), next: None };
        standing.go_on(program, name)
    }

    /// Whether it has not made any step yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.told.is_empty()
    }

    fn go_on(mut self, program: Program<'_>, name: &'static str) -> (Self, Vec<Note>) {
        let desk = Arc::new(Desk {
            name,
            start: self.start,
            told: self.told.clone(),
            at: Mutex::new(At { cursor: 0, next: None, tokens: 0, notes: Vec::new() }),
        });
        let mut future = program(Redis::new(desk.clone()));
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut at = desk.at.lock().expect("nobody panicked");
        if let Poll::Ready(Err(error)) = polled {
            at.notes.push(Note::Failed(error.to_string()));
        }
        self.next = at.next.take();
        (self, std::mem::take(&mut at.notes))
    }
}

/// The world of a client that is taken up again.
struct Desk {
    name: &'static str,
    start: Duration,
    told: Arc<Vec<Told>>,
    at: Mutex<At>,
}

struct At {
    cursor: usize,
    next: Option<Op>,
    tokens: u32,
    /// What it told since the last thing that it was told.
    notes: Vec<Note>,
}

impl World for Desk {
    fn perform(&self, op: Op) -> Soon<'_, RedisResult<Value>> {
        // Sleeping is to be late, and who is late is a matter of the schedule.
        if let Op::Sleep(_) = op {
            return Box::pin(async { Ok(Value::Nil) });
        }
        let mut op = Some(op);
        Box::pin(std::future::poll_fn(move |_| {
            let mut at = self.at.lock().expect("nobody panicked");
            let Some(told) = self.told.get(at.cursor) else {
                at.next = op.take().or(at.next.take());
                return Poll::Pending;
            };
            at.cursor += 1;
            at.notes.clear();
            Poll::Ready(Ok(told.value.clone()))
        }))
    }

    fn clock(&self) -> Duration {
        let at = self.at.lock().expect("nobody panicked");
        at.cursor.checked_sub(1).map_or(self.start, |last| self.told[last].clock)
    }

    fn token(&self) -> String {
        let mut at = self.at.lock().expect("nobody panicked");
        at.tokens += 1;
        format!("{}{}", self.name, at.tokens)
    }

    fn note(&self, note: Note) {
        self.at.lock().expect("nobody panicked").notes.push(note);
    }
}
