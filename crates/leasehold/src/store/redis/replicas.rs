//! Commands whose answers count only once replicas have acknowledged them.
//!
//! WAIT counts the writes of its own connection, so these commands have a connection of their own. The grant of a push or of an
//! earlier command was written by another connection. A granted `Acquire` is therefore followed by a claim, which is a
//! write of this connection.

use futures_util::future::join_all;
use leasehold_core::{Answer, Command, Failure, Grant, Renew, Reply, Resource};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};
use tokio::time::timeout;

use super::connections::Connections;
use super::error::{AddressState, CallError, lost};
use super::exec::{self, Call, CallOptions};
use super::limits::{REPLICA_RESPONSE_TIMEOUT, REPLICA_TIMEOUT};
use super::{codec, wire};
use crate::store::StoreError;

/// Runs calls, and fails those that too few replicas acknowledge.
pub(super) async fn run(
    connections: &Connections,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[Call<'_>],
) -> Vec<Result<Answer, CallError>> {
    // While one task opens the connection, the others wait for it: no longer than for a reply over it.
    let Ok(replica_conn) = timeout(REPLICA_RESPONSE_TIMEOUT, connections.replica_conn()).await else {
        let message = AddressState::Proven.no_answer(REPLICA_RESPONSE_TIMEOUT);
        let error = StoreError::new(Failure::NotSent, message);
        return calls.iter().map(|_| Err(CallError::Timeout(error.clone()))).collect();
    };
    match replica_conn {
        // Nothing was sent. A retry finds the right server.
        Ok(None) => calls.iter().map(|_| Err(CallError::ConnectionLost(lost(None)))).collect(),
        Ok(Some(connection)) => {
            let each = calls.iter().map(|call| one(connection.clone(), options, replicas, call));
            let answers = join_all(each).await;
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

async fn one(
    mut connection: MultiplexedConnection,
    options: CallOptions<'_>,
    replicas: u32,
    (resource, command): Call<'_>,
) -> Result<Answer, CallError> {
    let claim = claim_of(command);
    let payload: Vec<&Command> = [Some(command), claim.as_ref()].into_iter().flatten().collect();
    let mut values = pipeline(&mut connection, options, replicas, resource, &payload, false).await;
    if values.iter().any(exec::is_noscript) {
        values = pipeline(&mut connection, options, replicas, resource, &payload, true).await;
    }
    let reached = values.pop();
    let mut told = payload.iter().zip(values).map(|(command, value)| exec::read(command, value));
    let mut answer = told.next().unwrap_or_else(|| Err(CallError::Failed(too_few(0, replicas))))?;
    match &mut answer.reply {
        Reply::Granted(grant) => {
            if let Some(claim) = told.next() {
                *grant = claimed(*grant, &claim?)?;
            }
        }
        Reply::Renewed { .. } => {}
        // Nothing that a failover could undo.
        _ => return Ok(answer),
    }
    match reached {
        Some(Ok(Value::Int(reached))) if reached >= i64::from(replicas) => Ok(answer),
        Some(Ok(Value::Int(reached))) => Err(CallError::Failed(too_few(reached, replicas))),
        Some(Err(error)) => Err(CallError::from(&error)),
        _ => Err(CallError::Failed(too_few(0, replicas))),
    }
}

/// The renewal that makes the lease a write of this connection.
fn claim_of(command: &Command) -> Option<Command> {
    let Command::Acquire(acquire) = command else { return None };
    Some(Command::Renew(Renew { acquisition: acquire.acquisition, ttl: acquire.ttl, reserve: 0 }))
}

/// Sends commands and WAIT in one pipeline.
async fn pipeline(
    connection: &mut MultiplexedConnection,
    options: CallOptions<'_>,
    replicas: u32,
    resource: &Resource,
    payload: &[&Command],
    use_eval: bool,
) -> Vec<Result<Value, RedisError>> {
    let mut commands: Vec<redis::Cmd> = payload
        .iter()
        .map(|command| {
            codec::command(&options.variant.encode(resource, command, options.vote_args), use_eval)
        })
        .collect();
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(u64::try_from(REPLICA_TIMEOUT.as_millis()).unwrap_or(u64::MAX));
    commands.push(wait);
    wire::pipeline(connection, commands, options.is_asking).await
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
