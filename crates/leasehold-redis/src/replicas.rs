//! Commands whose answers count only once replicas have acknowledged them.
//!
//! WAIT counts the writes of its own connection, so these commands have a connection of their own. The grant of a push or of an
//! earlier command was written by another connection. A granted `Acquire` is therefore followed by a claim, which is a
//! write of this connection. A release that retains the lease leaves a tombstone for the same reason.
//!
//! While the server waits for the replicas it runs nothing else of this connection. So the commands that come meanwhile wait here, and
//! go out together with one WAIT: none of them, least of all a renewal, waits for more than one round trip to the replicas before its own.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Answer, Command, Effect, Failure, Grant, Release, Renew, Reply, Resource};
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::{Call, StoreError, tasks};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::connections::Connections;
use super::dispatch::for_server;
use super::error::{AddressState, CallError, lost};
use super::exec::{self, CallOptions};
use super::limits::{MAX_COALESCE_DELAY, REPLICA_RESPONSE_TIMEOUT, REPLICA_TIMEOUT};
use super::wire::Wire;
use super::{codec, rights, wire};

/// Lifetime of a tombstone that is not needed as one.
const BRIEF_TOMBSTONE: Duration = Duration::from_millis(1);

/// Max number of calls that go out with one WAIT: the server must run them within the time limit of a reply.
const MAX_CALLS: usize = 200;

type Answers = Vec<Result<Answer, CallError>>;

/// The connection, once it is open, and the commands that wait for it.
#[derive(Default)]
pub(super) struct ReplicaConn {
    pub(super) connection: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// A task sends them.
    is_sending: bool,
}

/// Calls of one sender.
struct Waiting {
    terms: Terms,
    calls: Vec<Call>,
    since: Instant,
    answers: oneshot::Sender<Answers>,
}

/// What calls have in common that may share a WAIT.
#[derive(Clone, Copy, PartialEq)]
struct Terms {
    replicas: u32,
    variant: ScriptVariant,
    is_asking: bool,
}

impl ReplicaConn {
    /// Returns whether a task must be started that sends what waits.
    fn push(&self, waiting: Waiting) -> bool {
        let mut queue = self.queue();
        queue.waiting.push_back(waiting);
        !std::mem::replace(&mut queue.is_sending, true)
    }

    /// The next calls to be sent together; `None` if none waits, and the task that sends them ends.
    fn pop(&self) -> Option<(Terms, Vec<Waiting>)> {
        let mut queue = self.queue();
        let Some(terms) = queue.waiting.front().map(|waiting| waiting.terms) else {
            queue.is_sending = false;
            return None;
        };
        let (mut next, mut count) = (Vec::new(), 0);
        for waiting in take(&mut queue.waiting) {
            if waiting.terms == terms && (next.is_empty() || count + waiting.calls.len() <= MAX_CALLS) {
                count += waiting.calls.len();
                next.push(waiting);
            } else {
                queue.waiting.push_back(waiting);
            }
        }
        Some((terms, next))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that sends what waits. If it is dropped, with its runtime, what waits has no answer.
struct Sender(Arc<Connections>);

impl Sender {
    async fn run(self) {
        while let Some((terms, waiting)) = self.0.replica_conn().pop() {
            self.send(terms, waiting).await;
        }
    }

    async fn send(&self, terms: Terms, mut waiting: Vec<Waiting>) {
        // The receiver is gone if the caller's future was dropped.
        waiting.retain(|waiting| !waiting.answers.is_closed());
        for late in waiting.extract_if(.., |waiting| is_late(waiting)) {
            let error =
                StoreError::new(Failure::Paused, "the program was paused before it could ask the store");
            let error = CallError::NotConnected(error);
            let _ = late.answers.send(late.calls.iter().map(|_| Err(error.clone())).collect());
        }
        let calls: Vec<&Call> = waiting.iter().flat_map(|waiting| &waiting.calls).collect();
        if calls.is_empty() {
            return;
        }
        let Terms { replicas, variant, is_asking } = terms;
        let options = for_server(CallOptions { is_asking, ..CallOptions::of(variant) }, &self.0);
        let mut answers = send_with_wait(&self.0, options, replicas, &calls).await.into_iter();
        for waiting in waiting {
            let own = answers.by_ref().take(waiting.calls.len()).collect();
            let _ = waiting.answers.send(own);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let mut queue = self.0.replica_conn().queue();
        // Otherwise the task has ended by itself, and another one may send already.
        if queue.is_sending {
            let unsent = take(&mut *queue);
            drop(queue);
            drop(unsent);
        }
    }
}

/// As for commands that wait for others to be sent with: an attempt may have been given up meanwhile.
fn is_late(waiting: &Waiting) -> bool {
    let has_attempt = waiting.calls.iter().any(|call| matches!(call.command, Command::Acquire(_)));
    has_attempt && waiting.since.elapsed() > MAX_COALESCE_DELAY
}

/// Runs calls, and fails those that too few replicas acknowledge.
pub(super) async fn run_replicated(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Answers {
    let terms = Terms { replicas, variant: options.variant, is_asking: options.is_asking };
    let (answers, receiver) = oneshot::channel();
    let own = calls.iter().map(|call| (*call).clone()).collect();
    if connections.replica_conn().push(Waiting { terms, calls: own, since: Instant::now(), answers }) {
        tasks::spawn(Sender(connections.clone()).run());
    }
    receiver
        .await
        .unwrap_or_else(|_| calls.iter().map(|_| Err(CallError::ConnectionLost(lost(None)))).collect())
}

async fn send_with_wait(
    connections: &Connections,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Answers {
    let Ok(replica_conn) = timeout(REPLICA_RESPONSE_TIMEOUT, connections.open_replica_conn()).await else {
        let message = AddressState::Proven.no_answer(REPLICA_RESPONSE_TIMEOUT);
        let error = StoreError::new(Failure::NotSent, message);
        return calls.iter().map(|_| Err(CallError::Timeout(error.clone()))).collect();
    };
    match replica_conn {
        // Nothing was sent. A retry finds the right server.
        Ok(None) => calls.iter().map(|_| Err(CallError::ConnectionLost(lost(None)))).collect(),
        Ok(Some(mut connection)) => {
            let answers = run_on_connection(&mut connection, options, replicas, calls).await;
            if answers
                .iter()
                .any(|answer| matches!(answer, Err(CallError::ConnectionLost(_) | CallError::Timeout(_))))
            {
                connections.drop_replica_conn().await;
            }
            answers
        }
        Err(error) => calls.iter().map(|_| Err(CallError::from(&error))).collect(),
    }
}

/// All calls are followed by one WAIT: it blocks the connection until the replicas have acknowledged.
async fn run_on_connection(
    connection: &mut MultiplexedConnection,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    let claims: Vec<Option<Command>> = calls.iter().map(|Call { command, .. }| claim_of(command)).collect();
    let commands: Vec<Cow<'_, Command>> =
        calls.iter().map(|Call { command, .. }| write_of(command)).collect();
    let payloads: Vec<Payload<'_>> = calls
        .iter()
        .zip(&commands)
        .zip(&claims)
        .map(|((Call { resource, .. }, command), claim)| Payload { resource, command, claim: claim.as_ref() })
        .collect();
    let (mut values, mut reached) = pipeline(connection, options, replicas, &payloads, false).await;
    let unknown = |at: &usize| values[*at].iter().any(exec::is_noscript);
    let unknown: Vec<usize> = (0..payloads.len()).filter(unknown).collect();
    if !unknown.is_empty() {
        let again: Vec<Payload<'_>> = unknown.iter().map(|at| payloads[*at]).collect();
        // Its WAIT counts what the first pipeline wrote, too.
        let (later, later_reached) = pipeline(connection, options, replicas, &again, true).await;
        reached = later_reached;
        for (at, later) in unknown.into_iter().zip(later) {
            values[at] = later;
        }
    }
    let reached = reached.map_err(|error| rights::of_command(error, "+wait", None));
    let mut answers = Vec::new();
    for (payload, values) in payloads.iter().zip(values) {
        let answer = counted(payload, values, &reached, replicas);
        let mut wire = Wire::from(connection.clone());
        answers.push(exec::with_reason(answer, &mut wire, options, payload.resource).await);
    }
    answers
}

/// A command, and the claim that follows it in the pipeline.
#[derive(Clone, Copy)]
struct Payload<'a> {
    resource: &'a Resource,
    command: &'a Command,
    claim: Option<&'a Command>,
}

impl<'a> Payload<'a> {
    fn commands(self) -> impl Iterator<Item = &'a Command> {
        std::iter::once(self.command).chain(self.claim)
    }
}

type Values = Vec<Result<Value, RedisError>>;

/// The answer, if the replicas have its effect.
fn counted(
    payload: &Payload<'_>,
    values: Values,
    reached: &Result<Value, RedisError>,
    replicas: u32,
) -> Result<Answer, CallError> {
    let mut replies = payload.commands().zip(values).map(|(command, value)| exec::read(command, value));
    let mut answer = replies.next().unwrap_or_else(|| Err(CallError::Failed(too_few(0, replicas))))?;
    let reached = match reached {
        Ok(Value::Int(reached)) if *reached >= i64::from(replicas) => Ok(()),
        Ok(Value::Int(reached)) => Err(CallError::Failed(too_few(*reached, replicas))),
        Ok(_) => Err(CallError::Failed(too_few(0, replicas))),
        Err(error) => Err(CallError::from(error)),
    };
    match &mut answer.reply {
        Reply::Granted(grant) => {
            // The server has the lease, so whatever follows was not the failure of a command that had no effect.
            if let Some(claim) = replies.next() {
                *grant = claim.and_then(|claim| claimed(*grant, &claim)).map_err(after_grant)?;
            }
            reached.map_err(after_grant)?;
        }
        Reply::Renewed { .. } => reached?,
        // The lease is retained, and keeps others out.
        Reply::Released if retains(payload.command) => reached.map_err(after_grant)?,
        // So it may be since an earlier release, whose reply did not count. This one had no effect.
        Reply::NotHeld if retains(payload.command) => reached.map_err(|error| {
            let without_effect = Failure::Transient(Effect::None);
            CallError::Failed(StoreError::from(error).known_as(without_effect))
        })?,
        // Nothing that a failover could undo.
        _ => {}
    }
    Ok(answer)
}

/// An error after a grant, or a release that retains. A server that refused the claim or WAIT, for example to a user who may not run it, would do it again,
/// so the lease is released. After a lost connection it may be repeated.
fn after_grant(error: CallError) -> CallError {
    match error {
        CallError::Failed(error) => CallError::Failed(error.known_as(Failure::NotDurable)),
        CallError::Denied(error) => CallError::Denied(error.known_as(Failure::NotDurable)),
        CallError::ReadOnly(_) | CallError::TryAgain(_) | CallError::Moved(_) | CallError::Ask(_) => {
            let what = "the server refused to confirm the lease: it is not the master of the lock any more";
            CallError::Failed(StoreError::new(Failure::NotDurable, what))
        }
        other => other,
    }
}

/// The renewal that makes the lease a write of this connection.
fn claim_of(command: &Command) -> Option<Command> {
    let Command::Acquire(acquire) = command else { return None };
    Some(Command::Renew(Renew { acquisition: acquire.acquisition, ttl: acquire.ttl, reserve: 0 }))
}

/// The command, so that it writes: a release that is repeated finds no lease any more.
fn write_of(command: &Command) -> Cow<'_, Command> {
    match command {
        Command::Release(release) if retains(command) => {
            let tombstone = release.tombstone.max(BRIEF_TOMBSTONE);
            Cow::Owned(Command::Release(Release { tombstone, ..release.clone() }))
        }
        _ => Cow::Borrowed(command),
    }
}

/// Whether it may retain the lease.
fn retains(command: &Command) -> bool {
    matches!(command, Command::Release(release) if !release.min_hold.is_zero())
}

/// Sends the commands and one WAIT in one pipeline. Returns the replies to the commands of each, and that to WAIT.
async fn pipeline(
    connection: &mut MultiplexedConnection,
    options: CallOptions<'_>,
    replicas: u32,
    payloads: &[Payload<'_>],
    use_eval: bool,
) -> (Vec<Values>, Result<Value, RedisError>) {
    let encode =
        |payload: &Payload<'_>, command| codec::command(&options.encode(payload.resource, command), use_eval);
    let mut commands: Vec<redis::Cmd> = payloads
        .iter()
        .flat_map(|payload| payload.commands().map(|command| encode(payload, command)))
        .collect();
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(u64::try_from(REPLICA_TIMEOUT.as_millis()).unwrap_or(u64::MAX));
    commands.push(wait);
    let mut values = wire::pipeline(connection, commands, options.is_asking).await;
    let reached = values.pop().unwrap_or(Ok(Value::Nil));
    let mut values = values.into_iter();
    let each = payloads.iter().map(|payload| values.by_ref().take(payload.commands().count()).collect());
    (each.collect(), reached)
}

fn claimed(grant: Grant, claim: &Answer) -> Result<Grant, CallError> {
    match claim.reply {
        Reply::Renewed { valid_for, .. } => Ok(Grant { valid_for, ..grant }),
        _ => Err(CallError::Failed(StoreError::new(
            Failure::NotDurable,
            "the lease was lost before the replicas acknowledged it",
        ))),
    }
}

fn too_few(reached: i64, replicas: u32) -> StoreError {
    StoreError::new(
        Failure::NotDurable,
        format!(
            "only {reached} of the {replicas} replicas that were asked for had it within {REPLICA_TIMEOUT:?}, so it does not \
             count: check the server's replicas, or ask for fewer"
        ),
    )
}
