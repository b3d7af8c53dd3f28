//! Commands on one connection.

use std::sync::Arc;

use leasehold_core::{Answer, Command, Failure, Resource, Token};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::keys;
use super::script::{self, Ballot, Dialect};
use super::trouble::{Trouble, store_error};
use crate::store::StoreError;

/// One command, and whose.
pub(super) type Call<'a> = &'a (Arc<Resource>, Command);

/// How commands go to a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'a> {
    pub(super) dialect: Dialect,
    pub(super) ballot: Ballot<'a>,
    /// The node is about to get the slot, and has to be told that we know.
    pub(super) is_asking: bool,
    /// As one command: attempts at resources of one hash slot, all of which are granted, or none.
    pub(super) is_together: bool,
}

/// All in one flight. A script that the server does not know (any more) is sent in full.
pub(super) async fn run(
    mut connection: MultiplexedConnection,
    way: Way<'_>,
    calls: &[Call<'_>],
) -> Vec<Result<Answer, Trouble>> {
    if way.is_together {
        return run_together(connection, way, calls).await;
    }
    let commands =
        calls.iter().map(|(resource, command)| way.dialect.spelled(resource, command, way.ballot, false));
    let mut values = flight(&mut connection, commands.collect(), way.is_asking).await;
    let unknown: Vec<usize> = (0..values.len()).filter(|at| is_unknown(&values[*at])).collect();
    if !unknown.is_empty() {
        // In full once, and then the server knows it for those behind.
        let mut told = Vec::new();
        let commands = unknown.iter().map(|at| {
            let (resource, command) = calls[*at];
            let kind = std::mem::discriminant(command);
            let is_in_full = !told.contains(&kind);
            told.push(kind);
            way.dialect.spelled(resource, command, way.ballot, is_in_full)
        });
        let again = flight(&mut connection, commands.collect(), way.is_asking).await;
        for (at, value) in unknown.into_iter().zip(again) {
            values[at] = value;
        }
    }
    calls.iter().zip(values).map(|((_, command), value)| read(command, way.ballot.floor, value)).collect()
}

async fn run_together(
    mut connection: MultiplexedConnection,
    way: Way<'_>,
    calls: &[Call<'_>],
) -> Vec<Result<Answer, Trouble>> {
    let mut value = Ok(Value::Nil);
    for is_in_full in [false, true] {
        let attempts = calls.iter().map(|(resource, command)| (&**resource, command));
        let command = way.dialect.spelled_together(attempts, is_in_full);
        value = flight(&mut connection, vec![command], way.is_asking).await.swap_remove(0);
        if !is_unknown(&value) {
            break;
        }
    }
    match value {
        Ok(Value::Array(values)) if values.len() == calls.len() => calls
            .iter()
            .zip(values)
            .map(|((_, command), value)| read(command, way.ballot.floor, Ok(value)))
            .collect(),
        // One answer to all of them: an error, or something that no script answers.
        value => calls.iter().map(|(_, command)| read(command, way.ballot.floor, value.clone())).collect(),
    }
}

/// Whether the server does not know the script (any more).
pub(super) fn is_unknown(value: &Result<Value, RedisError>) -> bool {
    value.as_ref().is_err_and(|error| error.code() == Some("NOSCRIPT"))
}

pub(super) async fn flight(
    connection: &mut MultiplexedConnection,
    mut commands: Vec<redis::Cmd>,
    is_asking: bool,
) -> Vec<Result<Value, RedisError>> {
    if commands.len() == 1
        && !is_asking
        && let Some(command) = commands.pop()
    {
        return vec![connection.send_packed_command(&command).await.and_then(Value::extract_error)];
    }
    let count = commands.len();
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    for command in commands {
        if is_asking {
            pipeline.cmd("ASKING").ignore();
        }
        pipeline.add_command(command);
    }
    match pipeline.query_async::<Vec<Result<Value, RedisError>>>(connection).await {
        Ok(values) => values,
        Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
    }
}

pub(super) fn read(
    command: &Command,
    floor: Option<Token>,
    value: Result<Value, RedisError>,
) -> Result<Answer, Trouble> {
    let value = value.and_then(Value::extract_error).map_err(|error| Trouble::from(&error))?;
    script::answer(command, floor, &value).ok_or_else(|| {
        Trouble::Failed(StoreError {
            failure: Failure::Unknown,
            message: "the server answered what no script of this version answers".to_owned(),
        })
    })
}

/// Every resource that has a state on this server.
pub(super) async fn scan(mut connection: MultiplexedConnection) -> Result<Vec<Resource>, StoreError> {
    let mut resources = Vec::new();
    let mut cursor = 0_u64;
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(keys::every_state()).arg("COUNT").arg(1_000);
        let found: Result<(u64, Vec<Vec<u8>>), _> = scan.query_async(&mut connection).await;
        let (next, keys) = found.map_err(|error| store_error(&error))?;
        resources.extend(keys.iter().filter_map(|key| keys::resource_of(key)));
        cursor = next;
        if cursor == 0 {
            return Ok(resources);
        }
    }
}
