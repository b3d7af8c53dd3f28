//! Commands whose answers count only once replicas have acknowledged them.
//!
//! WAIT counts the writes of its own connection, so these commands have a connection of their own. The grant of a push or of an
//! earlier command was written by another connection. A granted `Acquire` is therefore followed by a claim, which is a
//! write of this connection. A release that retains the lease leaves a tombstone for the same reason.
//!
//! While the server waits for the replicas it runs nothing else of this connection. So the commands that come meanwhile wait in a queue
//! ([`super::replica_conn`]), and go out together with one WAIT. Renewals and releases go first: they wait for no more than the round trip
//! that has begun.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Answer, Command, Effect, Failure, Grant, Release, Renew, Reply, Resource};
use leasehold_store::{Call, StoreError, tasks};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::connections::Connections;
use super::error::{AddressState, CallError, lost};
use super::exec::{self, CallOptions};
use super::limits::REPLICA_TIMEOUT;
use super::replica_conn::{Answers, Terms, Waiting};
use super::{codec, rights, wire};

/// Lifetime of a tombstone that is not needed as one.
const BRIEF_TOMBSTONE: Duration = Duration::from_millis(1);

/// The task that sends what waits. If it is dropped, with its runtime, what waits has no answer.
struct Sender {
    connections: Arc<Connections>,
    /// It ends by itself, and another one may send already.
    has_ended: bool,
}

impl Sender {
    async fn run(mut self) {
        while let Some((terms, waiting)) = self.connections.replica_conn().pop() {
            self.send(terms, waiting).await;
        }
        self.has_ended = true;
    }

    async fn send(&self, terms: Terms, mut waiting: Vec<Waiting>) {
        // The receiver is gone if the caller's future was dropped.
        waiting.retain(|waiting| !waiting.answers.is_closed());
        for late in waiting.extract_if(.., |waiting| waiting.is_late()) {
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
        let options = self.connections.options(CallOptions { is_asking, ..CallOptions::of(variant) });
        let mut answers = send_with_wait(&self.connections, options, replicas, &calls).await.into_iter();
        for waiting in waiting {
            let own = answers.by_ref().take(waiting.calls.len()).collect();
            let _ = waiting.answers.send(own);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.has_ended {
            self.connections.replica_conn().forget_unsent();
        }
    }
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
        tasks::spawn(Sender { connections: connections.clone(), has_ended: false }.run());
    }
    let unanswered = |_| calls.iter().map(|_| Err(CallError::ConnectionLost(lost(None)))).collect();
    let answers = receiver.await.unwrap_or_else(unanswered);
    // Not by the task that sends, for which all others wait.
    exec::with_reasons(answers, &mut connections.preferred_conn(), options, calls).await
}

async fn send_with_wait(
    connections: &Connections,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Answers {
    let reply_limit = REPLICA_TIMEOUT + connections.answer_limit();
    // Opening it takes some round trips.
    let limit = 2 * reply_limit;
    let Ok(replica_conn) = timeout(limit, connections.open_replica_conn()).await else {
        let message = AddressState::Proven.no_answer(limit);
        let error = StoreError::new(Failure::NotSent, message);
        return calls.iter().map(|_| Err(CallError::Timeout(error.clone()))).collect();
    };
    match replica_conn {
        // Nothing was sent. A retry finds the right server.
        Ok(None) => calls.iter().map(|_| Err(CallError::ConnectionLost(lost(None)))).collect(),
        Ok(Some(mut connection)) => {
            connection.set_response_timeout(reply_limit);
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
    let counted = |(payload, values): (&Payload<'_>, _)| counted(payload, values, &reached, replicas);
    payloads.iter().zip(values).map(counted).collect()
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

#[cfg(test)]
mod tests {
    use leasehold_testkit::Server;

    use super::super::connections::config;
    use super::super::handshake::ServerFacts;
    use super::super::pushes::ConnectionStatus;
    use super::*;

    /// Another one may be sending already.
    #[tokio::test]
    async fn sender_that_ends_by_itself_takes_no_command_of_the_next_one() {
        let server = Server::on_port();
        let client = redis::Client::open(server.url()).unwrap();
        let own = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
        let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
        let dial = (client.get_connection_info().clone().into(), true);
        let connections = Arc::new(Connections::new(own, status, None, dial, ServerFacts::default()));
        for has_ended in [true, false] {
            let variant = leasehold_redis_protocol::ScriptVariant::Server;
            let terms = Terms { replicas: 1, variant, is_asking: false };
            let waiting =
                Waiting { terms, calls: Vec::new(), since: Instant::now(), answers: oneshot::channel().0 };
            assert!(connections.replica_conn().push(waiting));
            drop(Sender { connections: connections.clone(), has_ended });
            assert_eq!(connections.replica_conn().pop().is_some(), has_ended);
            assert!(connections.replica_conn().pop().is_none());
        }
    }
}
