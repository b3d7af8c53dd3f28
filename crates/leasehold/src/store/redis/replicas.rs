//! Answers that count only when replicas have what they tell.
//!
//! WAIT counts what its own connection has written, so such a command and its WAIT have a connection for themselves. A grant
//! that was pushed, or that an earlier command got, was written by another connection: so a granted `Acquire` is followed by
//! a claim, which is a write of this one.

use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{Answer, Command, Failure, Grant, Renew, Reply, Resource};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};
use tokio::time::timeout;

use super::connections::Lanes;
use super::error::{AddressState, Trouble, lost};
use super::exec::{self, Call, Way};
use crate::store::StoreError;

/// How long the replicas have.
pub(super) const REPLICAS_LIMIT: Duration = Duration::from_millis(500);

/// Each of these, once enough replicas have it.
pub(super) async fn run(
    lanes: &Lanes,
    way: Way<'_>,
    replicas: u32,
    calls: &[Call<'_>],
) -> Vec<Result<Answer, Trouble>> {
    // Whoever makes the connection holds up all others that need it, so they wait no longer than for an answer over it.
    let Ok(durable) = timeout(DURABLE_LIMIT, lanes.durable()).await else {
        let message = AddressState::Proven.no_answer(DURABLE_LIMIT);
        let error = StoreError { failure: Failure::NotSent, message };
        return calls.iter().map(|_| Err(Trouble::Late(error.clone()))).collect();
    };
    match durable {
        // Nothing was sent, but whoever tries again is to find the right server.
        Ok(None) => calls.iter().map(|_| Err(Trouble::Lost(lost()))).collect(),
        Ok(Some(connection)) => {
            let each = calls.iter().map(|call| one(connection.clone(), way, replicas, call));
            let answers = join_all(each).await;
            if answers.iter().any(|answer| matches!(answer, Err(Trouble::Lost(_) | Trouble::Late(_)))) {
                lanes.drop_durable().await;
            }
            answers
        }
        Err(error) => calls.iter().map(|_| Err(Trouble::from(&error))).collect(),
    }
}

async fn one(
    mut connection: MultiplexedConnection,
    way: Way<'_>,
    replicas: u32,
    (resource, command): Call<'_>,
) -> Result<Answer, Trouble> {
    let claim = claim_of(command);
    let said: Vec<&Command> = [Some(command), claim.as_ref()].into_iter().flatten().collect();
    let mut values = flight(&mut connection, way, replicas, resource, &said, false).await;
    if values.iter().any(exec::is_unknown) {
        values = flight(&mut connection, way, replicas, resource, &said, true).await;
    }
    let reached = values.pop();
    let mut told =
        said.iter().zip(values).map(|(command, value)| exec::read(command, way.ballot.floor, value));
    let mut answer = told.next().unwrap_or_else(|| Err(Trouble::Failed(too_few(0, replicas))))?;
    match &mut answer.reply {
        Reply::Granted(grant) => {
            if let Some(claim) = told.next() {
                *grant = claimed(*grant, &claim?)?;
            }
        }
        Reply::Renewed { .. } => {}
        // Nothing that a failover could take away.
        _ => return Ok(answer),
    }
    match reached {
        Some(Ok(Value::Int(reached))) if reached >= i64::from(replicas) => Ok(answer),
        Some(Ok(Value::Int(reached))) => Err(Trouble::Failed(too_few(reached, replicas))),
        Some(Err(error)) => Err(Trouble::from(&error)),
        _ => Err(Trouble::Failed(too_few(0, replicas))),
    }
}

/// What makes a lease that was got by this or an earlier command a write of this connection.
fn claim_of(command: &Command) -> Option<Command> {
    let Command::Acquire(acquire) = command else { return None };
    Some(Command::Renew(Renew { acquisition: acquire.acquisition, ttl: acquire.ttl, reserve: 0 }))
}

/// These commands, and the waiting, in one flight.
async fn flight(
    connection: &mut MultiplexedConnection,
    way: Way<'_>,
    replicas: u32,
    resource: &Resource,
    said: &[&Command],
    is_in_full: bool,
) -> Vec<Result<Value, RedisError>> {
    let mut commands: Vec<redis::Cmd> =
        said.iter().map(|command| way.dialect.spelled(resource, command, way.ballot, is_in_full)).collect();
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(u64::try_from(REPLICAS_LIMIT.as_millis()).unwrap_or(u64::MAX));
    commands.push(wait);
    exec::flight(connection, commands, way.is_asking).await
}

fn claimed(grant: Grant, claim: &Answer) -> Result<Grant, Trouble> {
    match claim.reply {
        Reply::Renewed { lasts, .. } => Ok(Grant { lasts, ..grant }),
        _ => Err(Trouble::Failed(StoreError {
            failure: Failure::NotDurable,
            message: "the lease was taken away before the replicas had it".to_owned(),
        })),
    }
}

fn too_few(reached: i64, replicas: u32) -> StoreError {
    StoreError {
        failure: Failure::NotDurable,
        message: format!(
            "only {reached} of the {replicas} replicas that were asked for had it within {REPLICAS_LIMIT:?}, so it does not \
             count: check the server's replicas, or ask for fewer"
        ),
    }
}

/// What the durable connection's answers may take.
pub(super) const DURABLE_LIMIT: Duration = REPLICAS_LIMIT.saturating_add(super::ANSWER_LIMIT);
