//! Commands whose answers count only once replicas have acknowledged them.
//!
//! WAIT counts the writes of its own connection, so these commands have a connection of their own. The grant of a push or of an
//! earlier command was written by another connection. A granted `Acquire` is therefore followed by a claim, which is a
//! write of this connection. A release that retains the lease leaves a tombstone for the same reason.
//!
//! While the server waits for the replicas it runs nothing else of this connection. So the commands that come meanwhile wait in a queue
//! ([`ReplicaQueue`](super::coalesce::ReplicaQueue)), and go out together with one WAIT. Renewals and releases go first: they wait for one
//! round trip at most beside that which has begun.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Answer, Command, Effect, Failure, Grant, Release, Renew, Reply};
use leasehold_store::{Call, StoreError, tasks};
use redis::{RedisError, Value};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::coalesce::{Terms, Waiting};
use super::pipeline::{self, CallOptions, Mode};
use super::script::{EVERY, Exchange, Request};
use crate::connections::Connections;
use crate::error::{AddressState, Answered, CallError, lost};
use crate::limits::REPLICA_TIMEOUT;
use crate::rights;
use crate::wire::Wire;

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
        while let Some((terms, waiting)) = self.connections.replica_queue().pop() {
            self.send(terms, waiting).await;
        }
        self.has_ended = true;
    }

    async fn send(&self, Terms { replicas, role }: Terms, mut waiting: Vec<Waiting>) {
        Waiting::retain_due(&mut waiting);
        let calls: Vec<&Call> = waiting.iter().flat_map(|waiting| &waiting.calls).collect();
        if calls.is_empty() {
            return;
        }
        let options = self.connections.options(role, Mode::Replicated(replicas));
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
            self.connections.replica_queue().forget_unsent();
        }
    }
}

/// Runs calls, and fails those that too few replicas acknowledge.
pub(super) async fn run(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Vec<Answered> {
    let terms = Terms { replicas, role: options.role };
    let (answers, receiver) = oneshot::channel();
    let own = calls.iter().map(|call| (*call).clone()).collect();
    if connections.replica_queue().push(Waiting { terms, calls: own, since: Instant::now(), answers }) {
        tasks::spawn(Sender { connections: connections.clone(), has_ended: false }.run());
    }
    let unanswered = |_| vec![Err(CallError::ConnectionLost(lost(None))); calls.len()];
    let answers = receiver.await.unwrap_or_else(unanswered);
    // Not by the task that sends, for which all others wait.
    pipeline::with_reasons(answers, &mut connections.preferred_conn(), options, calls).await
}

async fn send_with_wait(
    connections: &Connections,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Vec<Answered> {
    let reply_limit = REPLICA_TIMEOUT + connections.answer_limit();
    // Opening it takes some round trips.
    let limit = 2 * reply_limit;
    let failed = |error| vec![Err(error); calls.len()];
    let Ok(replica_conn) = timeout(limit, connections.open_replica_conn()).await else {
        let message = AddressState::Proven.no_answer(limit);
        return failed(CallError::Timeout(StoreError::new(Failure::NotSent, message)));
    };
    match replica_conn {
        // Nothing was sent. A retry finds the right server.
        Ok(None) => failed(CallError::ConnectionLost(lost(None))),
        Ok(Some(connection)) => {
            let wire = Wire::Own(connections.timed(connection).for_replicas(REPLICA_TIMEOUT));
            let answers = run_on_connection(wire, options, replicas, calls).await;
            if answers.iter().any(CallError::is_of_connection) {
                connections.drop_replica_conn().await;
            }
            answers
        }
        Err(error) => failed(CallError::from(&error)),
    }
}

/// All calls are followed by one WAIT: it blocks the connection until the replicas have acknowledged.
async fn run_on_connection(
    mut wire: Wire,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Vec<Answered> {
    let steps: Vec<Vec<Cow<'_, Command>>> = calls.iter().map(|call| steps_of(&call.command)).collect();
    let mut exchange = Exchange::default();
    for (unit, (call, steps)) in calls.iter().zip(&steps).enumerate() {
        for step in steps {
            exchange.push(unit, Request::Script(options.encode(&call.resource, step)));
        }
    }
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(u64::try_from(REPLICA_TIMEOUT.as_millis()).unwrap_or(u64::MAX));
    // One that follows repeated commands counts what the first pipeline wrote, too.
    exchange.push(EVERY, Request::Command(wait));
    let mut replies = exchange.run(&mut wire, options.role.is_asking).await;
    let reached = replies.pop().unwrap_or(Ok(Value::Nil));
    let reached = reached.map_err(|error| rights::of_command(error, "+wait", None));
    let mut replies = replies.into_iter();
    let counted = |steps: &Vec<Cow<'_, Command>>| {
        let own = replies.by_ref().take(steps.len());
        let answers = steps.iter().zip(own).map(|(step, reply)| pipeline::read(step, reply)).collect();
        counted(&steps[0], answers, &reached, replicas)
    };
    steps.iter().map(counted).collect()
}

/// The answer to a command, from those to it and to the claim that follows it, if the replicas have its effect.
fn counted(
    command: &Command,
    answers: Vec<Answered>,
    reached: &Result<Value, RedisError>,
    replicas: u32,
) -> Answered {
    let mut answers = answers.into_iter();
    let mut answer = answers.next().unwrap_or_else(|| Err(CallError::Failed(too_few(0, replicas))))?;
    let reached = match reached {
        Ok(Value::Int(reached)) if *reached >= i64::from(replicas) => Ok(()),
        Ok(Value::Int(reached)) => Err(CallError::Failed(too_few(*reached, replicas))),
        Ok(_) => Err(CallError::Failed(too_few(0, replicas))),
        Err(error) => Err(CallError::from(error)),
    };
    match &mut answer.reply {
        Reply::Granted(grant) => {
            // The server has the lease, so whatever follows was not the failure of a command that had no effect.
            if let Some(claim) = answers.next() {
                *grant = claim.and_then(|claim| claimed(*grant, &claim)).map_err(after_grant)?;
            }
            reached.map_err(after_grant)?;
        }
        Reply::Renewed { .. } => reached?,
        // The lease is retained, and keeps others out.
        Reply::Released if retains(command) => reached.map_err(after_grant)?,
        // So it may be since an earlier release, whose reply did not count. This one had no effect.
        Reply::NotHeld if retains(command) => reached.map_err(|error| {
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

/// The command, and the renewal that makes a lease that it grants a write of this connection.
fn steps_of(command: &Command) -> Vec<Cow<'_, Command>> {
    match command {
        Command::Acquire(acquire) => {
            let claim = Renew::to(acquire.acquisition, acquire.ttl);
            vec![Cow::Borrowed(command), Cow::Owned(Command::Renew(claim))]
        }
        // So that it writes: a release that is repeated finds no lease any more.
        Command::Release(release) if retains(command) => {
            let tombstone = release.tombstone.max(BRIEF_TOMBSTONE);
            vec![Cow::Owned(Command::Release(Release { tombstone, ..release.clone() }))]
        }
        _ => vec![Cow::Borrowed(command)],
    }
}

/// Whether it may retain the lease.
fn retains(command: &Command) -> bool {
    matches!(command, Command::Release(release) if !release.min_hold.is_zero())
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
    use leasehold_redis_protocol::ScriptVariant;
    use leasehold_testkit::Server;

    use super::super::pipeline::Role;
    use super::*;
    use crate::connections::config;
    use crate::handshake::ServerFacts;
    use crate::pushes::ConnectionStatus;

    /// Another one may be sending already.
    #[tokio::test]
    async fn sender_that_ends_by_itself_takes_no_command_of_the_next_one() {
        let server = Server::on_port();
        let client = redis::Client::open(server.url()).unwrap();
        let own = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
        let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
        let dial = (client.get_connection_info().clone().into(), true);
        let connections = Arc::new(Connections::new(own.into(), status, None, dial, ServerFacts::default()));
        for has_ended in [true, false] {
            let terms = Terms { replicas: 1, role: Role::of(ScriptVariant::Server) };
            let waiting =
                Waiting { terms, calls: Vec::new(), since: Instant::now(), answers: oneshot::channel().0 };
            assert!(connections.replica_queue().push(waiting));
            drop(Sender { connections: connections.clone(), has_ended });
            assert_eq!(connections.replica_queue().pop().is_some(), has_ended);
            assert!(connections.replica_queue().pop().is_none());
        }
    }
}
