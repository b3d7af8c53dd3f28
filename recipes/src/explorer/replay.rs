//! A client between two of its steps: the results it has received so far, and the step that it requests next.
//!
//! A client is an async function, whose future cannot be cloned. The function is deterministic, so the same results always lead
//! to the same point. A branch of the search therefore restarts the function and replays all results.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::{RedisResult, Value};

use super::scenario::Visit;
use crate::redis::{BoxFuture, Environment, Note, Op, Redis};

/// The result of one step, and the client's clock at that moment.
#[derive(Clone, Debug)]
pub(super) struct StepResult {
    pub(super) value: Value,
    pub(super) clock: Duration,
}

/// A client between two of its steps.
#[derive(Clone, Debug)]
pub(super) struct ClientState {
    results: Arc<Vec<StepResult>>,
    start: Duration,
    /// Hash of all results: equal for two clients of the same number that are at the same point.
    pub(super) hash: u64,
    /// The step that the client requests next. None: the client has finished.
    pub(super) next: Option<Op>,
}

/// Starts the client's function.
pub(super) type Program<'a> = &'a dyn Fn(Redis) -> Visit;

impl ClientState {
    /// The client before its first step, and the notes that it emits up to there.
    pub(super) fn begin(program: Program<'_>, name: &'static str, clock: Duration) -> (Self, Vec<Note>) {
        let state = Self { results: Arc::default(), start: clock, hash: 0, next: None };
        state.replay(program, name)
    }

    /// The client after one more step, and the notes that it emits up to the next one.
    pub(super) fn advance(
        &self,
        program: Program<'_>,
        name: &'static str,
        result: StepResult,
    ) -> (Self, Vec<Note>) {
        let mut hasher = DefaultHasher::new();
        (self.hash, format!("{result:?}")).hash(&mut hasher);
        let mut results = (*self.results).clone();
        results.push(result);
        let state = Self { results: Arc::new(results), start: self.start, hash: hasher.finish(), next: None };
        state.replay(program, name)
    }

    /// Whether the client has not performed any step yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.results.is_empty()
    }

    fn replay(mut self, program: Program<'_>, name: &'static str) -> (Self, Vec<Note>) {
        let replay = Arc::new(Replay {
            name,
            start: self.start,
            results: self.results.clone(),
            position: Mutex::new(Position { cursor: 0, next: None, tokens: 0, notes: Vec::new() }),
        });
        let mut future = program(Redis::new(replay.clone()));
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut position = replay.position.lock().expect("no thread panicked");
        if let Poll::Ready(Err(error)) = polled {
            position.notes.push(Note::Failed(error.to_string()));
        }
        self.next = position.next.take();
        (self, std::mem::take(&mut position.notes))
    }
}

/// The environment of a client that is replayed.
struct Replay {
    name: &'static str,
    start: Duration,
    results: Arc<Vec<StepResult>>,
    position: Mutex<Position>,
}

struct Position {
    cursor: usize,
    next: Option<Op>,
    tokens: u32,
    /// Notes since the last result.
    notes: Vec<Note>,
}

impl Environment for Replay {
    fn perform(&self, op: Op) -> BoxFuture<'_, RedisResult<Value>> {
        // The schedule decides when time passes, so a sleep returns at once.
        if let Op::Sleep(_) = op {
            return Box::pin(async { Ok(Value::Nil) });
        }
        let mut op = Some(op);
        Box::pin(std::future::poll_fn(move |_| {
            let mut position = self.position.lock().expect("no thread panicked");
            let Some(result) = self.results.get(position.cursor) else {
                position.next = op.take().or(position.next.take());
                return Poll::Pending;
            };
            position.cursor += 1;
            position.notes.clear();
            Poll::Ready(Ok(result.value.clone()))
        }))
    }

    fn clock(&self) -> Duration {
        let position = self.position.lock().expect("no thread panicked");
        position.cursor.checked_sub(1).map_or(self.start, |last| self.results[last].clock)
    }

    fn token(&self) -> String {
        let mut position = self.position.lock().expect("no thread panicked");
        position.tokens += 1;
        format!("{}{}", self.name, position.tokens)
    }

    fn note(&self, note: Note) {
        self.position.lock().expect("no thread panicked").notes.push(note);
    }
}
