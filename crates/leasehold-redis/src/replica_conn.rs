//! The connection for commands that wait for replicas, and those that wait for it.
//!
//! While the server waits for the replicas it runs nothing else of this connection. What comes meanwhile waits here, and goes out together:
//! renewals and releases first.

use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Mutex, MutexGuard, PoisonError};

use leasehold_core::{Answer, Command};
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::Call;
use redis::aio::MultiplexedConnection;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::error::CallError;
use super::limits::MAX_COALESCE_DELAY;

/// Max number of calls that go out with one WAIT: the server must run them within the time limit of a reply.
const MAX_CALLS: usize = 200;

pub(super) type Answers = Vec<Result<Answer, CallError>>;

/// The connection, once it is open, and the commands that wait for it.
#[derive(Default)]
pub(super) struct ReplicaConn {
    pub(super) connection: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Renewals and releases, which go before attempts: there may be thousands of these, and a lease would expire behind them.
    of_holders: VecDeque<Waiting>,
    attempts: VecDeque<Waiting>,
    /// A task sends them.
    is_sending: bool,
}

/// Calls of one sender.
pub(super) struct Waiting {
    pub(super) terms: Terms,
    pub(super) calls: Vec<Call>,
    pub(super) since: Instant,
    pub(super) answers: oneshot::Sender<Answers>,
}

impl Waiting {
    fn has_attempt(&self) -> bool {
        self.calls.iter().any(|call| matches!(call.command, Command::Acquire(_)))
    }

    /// As for commands that wait for others to be sent with: an attempt may have been given up meanwhile.
    pub(super) fn is_late(&self) -> bool {
        self.has_attempt() && self.since.elapsed() > MAX_COALESCE_DELAY
    }
}

/// What calls have in common that may share a WAIT.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Terms {
    pub(super) replicas: u32,
    pub(super) variant: ScriptVariant,
    pub(super) is_asking: bool,
}

impl ReplicaConn {
    /// Returns whether a task must be started that sends what waits.
    pub(super) fn push(&self, waiting: Waiting) -> bool {
        let mut queue = self.queue();
        let is_attempt = waiting.has_attempt();
        if is_attempt { &mut queue.attempts } else { &mut queue.of_holders }.push_back(waiting);
        !std::mem::replace(&mut queue.is_sending, true)
    }

    /// The next calls to be sent together; `None` if none waits, and the task that sends them ends.
    pub(super) fn pop(&self) -> Option<(Terms, Vec<Waiting>)> {
        let mut queue = self.queue();
        let first = queue.of_holders.front().or_else(|| queue.attempts.front());
        let Some(terms) = first.map(|waiting| waiting.terms) else {
            queue.is_sending = false;
            return None;
        };
        let mut next = Vec::new();
        let Queue { of_holders, attempts, .. } = &mut *queue;
        let mut room = MAX_CALLS;
        for waiting in [of_holders, attempts] {
            for one in take(waiting) {
                if one.terms == terms && (next.is_empty() || one.calls.len() <= room) {
                    room = room.saturating_sub(one.calls.len());
                    next.push(one);
                } else {
                    waiting.push_back(one);
                }
            }
        }
        Some((terms, next))
    }

    /// The task that sends what waits is dropped.
    pub(super) fn forget_unsent(&self) {
        let unsent = take(&mut *self.queue());
        drop(unsent);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, ClientId, Kind, Name, Renew, Resource};

    use super::*;

    fn waiting(sequence: u64, replicas: u32, is_renewal: bool) -> Waiting {
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let acquisition = Acquisition { client: ClientId::new(1), sequence };
        let ttl = Duration::from_secs(9);
        let call = match is_renewal {
            true => Call::new(resource, Renew { acquisition, ttl, reserve: 0 }),
            false => Call::new(resource, Acquire::exclusive(acquisition, ttl)),
        };
        let terms = Terms { replicas, variant: ScriptVariant::Server, is_asking: false };
        Waiting { terms, calls: vec![call], since: Instant::now(), answers: oneshot::channel().0 }
    }

    fn numbers(waiting: &[Waiting]) -> Vec<u64> {
        let number = |waiting: &Waiting| match &waiting.calls[0].command {
            Command::Renew(renew) => renew.acquisition.sequence,
            Command::Acquire(acquire) => acquire.acquisition.sequence,
            other => panic!("{other:?}"),
        };
        waiting.iter().map(number).collect()
    }

    #[tokio::test]
    async fn renewal_goes_before_all_attempts_that_wait() {
        let conn = ReplicaConn::default();
        let count = 2 * MAX_CALLS as u64;
        let started = (0..count).filter(|number| conn.push(waiting(*number, 1, false))).count();
        assert_eq!(started, 1, "one task sends them");
        conn.push(waiting(count, 1, true));
        conn.push(waiting(count + 1, 2, false));
        let (terms, first) = conn.pop().unwrap();
        assert_eq!((terms.replicas, first.len()), (1, MAX_CALLS));
        assert_eq!(numbers(&first)[..3], [count, 0, 1]);
        conn.push(waiting(count + 2, 2, true));
        let sizes: Vec<_> =
            std::iter::from_fn(|| conn.pop()).map(|(terms, next)| (terms.replicas, next.len())).collect();
        assert_eq!(sizes, [(2, 2), (1, MAX_CALLS), (1, 1)]);
        assert!(conn.push(waiting(0, 1, false)), "the task has ended");
    }
}
