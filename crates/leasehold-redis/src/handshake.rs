//! First commands on a new connection: settings check, run id, layout check, and which conditional delete the server allows.

use std::time::Duration;

use leasehold_redis_protocol::{
    Channels, ConditionalDelete, LAYOUT, LAYOUT_KEY, LAYOUT_KEY_TTL, RESTRICTED_LAYOUT,
};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, Value};
use tokio::time::Instant;

use super::answer_times::limit_after;
use super::deletes::is_refusal;
use super::error::{OWN, OWN_REFUSAL, PAUSED, explain};
use super::rights;

/// What a connection has detected about its server. All of it is unknown without the right to run INFO.
#[derive(Default)]
pub(super) struct ServerFacts {
    pub(super) run_id: Option<String>,
    /// How long the first answer took.
    pub(super) answered_in: Duration,
    /// The conditional delete that the user may run.
    pub(super) delete: Option<ConditionalDelete>,
    /// The server is a node of a cluster, whatever the address says.
    pub(super) is_cluster_node: bool,
    /// The channels of the inboxes of hash slots, if the server was asked: while a cluster is upgraded, its nodes differ.
    pub(super) channels: Option<Channels>,
    /// Something restricts what scripts may do.
    pub(super) is_restricted: bool,
}

/// Checks a new connection, which is one to a node with hash slots, or not. `check_scripts` says whether scripts are restricted. Fails if
/// clients with another key layout use this server, because they would not see this client's locks. A reconnecting client may hold leases.
/// If clients with other scripts were admitted meanwhile, it is warned, not refused: a refusal would end its leases and protect no lock.
pub(super) async fn handshake(
    connection: &mut MultiplexedConnection,
    is_resp2: bool,
    has_slots: bool,
    is_reconnect: bool,
    check_scripts: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<bool, RedisError>,
    warn: &(dyn Fn(String) + Send + Sync),
) -> Result<ServerFacts, RedisError> {
    let mut questions = redis::pipe();
    questions.ignore_errors();
    questions.cmd("INFO").arg("memory");
    questions.cmd("INFO").arg("server");
    if has_slots {
        questions.cmd("PUBSUB").arg("SHARDNUMSUB");
    }
    if !is_resp2 {
        // With OPTIN and no CLIENT CACHING command, the server tracks no key. It only reports FLUSHALL and FLUSHDB. Without
        // the right to do this, a flush is noticed by the next renewal.
        questions.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
    }
    let asked = Instant::now();
    let facts: Vec<Result<Value, RedisError>> = questions.query_async(connection).await?;
    let answered_in = asked.elapsed();
    connection.set_response_timeout(limit_after(answered_in));
    let is_restricted = check_scripts(connection).await.map_err(paused)?;
    let layout = if is_restricted { RESTRICTED_LAYOUT } else { LAYOUT };
    match check_layout(connection, layout).await.map_err(paused) {
        Err(error) if is_reconnect && error.detail() == Some(&other_scripts(layout)) => warn(explain(&error)),
        checked => checked?,
    }
    let info = |at: usize| match facts.get(at) {
        Some(Ok(info)) => redis::from_redis_value_ref::<String>(info).ok(),
        _ => None,
    };
    if let Some(policy) = info(0).as_deref().and_then(unsafe_eviction_policy) {
        warn(format!(
            "maxmemory-policy is {policy}: a server that is short of memory evicts locks. Set it to noeviction"
        ));
    }
    let channels = facts.get(2).filter(|_| has_slots).map(channels_by);
    let Some(info) = info(1) else {
        return Ok(ServerFacts { channels, answered_in, is_restricted, ..ServerFacts::default() });
    };
    let delete = match ConditionalDelete::of_server(&info) {
        Some(delete) if may_delete(connection, delete).await? => Some(delete),
        _ => None,
    };
    // Redis calls it redis_mode, and Valkey server_mode.
    let is_cluster_node = info.lines().any(|line| line.trim_end().ends_with("_mode:cluster"));
    Ok(ServerFacts {
        run_id: run_id_in(&info),
        answered_in,
        delete,
        is_cluster_node,
        channels,
        is_restricted,
    })
}

/// Sharded channels (since Redis 7.0), unless the server does not know the command. An error otherwise is a right that is missing.
fn channels_by(reply: &Result<Value, RedisError>) -> Channels {
    let is_unknown = |error: &RedisError| error.to_string().to_lowercase().contains("unknown");
    if reply.as_ref().is_err_and(is_unknown) { Channels::Plain } else { Channels::Sharded }
}

/// The server has answered before: it executes no writes.
fn paused(error: RedisError) -> RedisError {
    if error.is_timeout() { (ErrorKind::Client, OWN, PAUSED.to_owned()).into() } else { error }
}

/// Publishes the key layout of this client, and compares it with that of the others.
pub(super) async fn check_layout(
    connection: &mut MultiplexedConnection,
    own: &str,
) -> Result<(), RedisError> {
    let mut questions = redis::pipe();
    questions.ignore_errors();
    for command in layout_commands(own) {
        questions.add_command(command);
    }
    let answers: Vec<Result<Value, RedisError>> = questions.query_async(connection).await?;
    if own == RESTRICTED_LAYOUT
        && answers.iter().any(|answer| answer.as_ref().is_err_and(|error| error.code() == Some("MOVED")))
    {
        return Err((ErrorKind::Client, OWN_REFUSAL, rights::NO_PROXY.to_owned()).into());
    }
    // Other errors (replica, full memory, redirect, ACL) either do not matter or also fail the first lock command.
    if let Some(Err(error)) = answers.get(1)
        && error.code() == Some("LOADING")
    {
        return Err(error.clone());
    }
    match answers.get(1) {
        Some(Ok(found)) => compare_layout(found, own).map_err(|other| (ErrorKind::Client, OWN, other).into()),
        _ => Ok(()),
    }
}

/// Publish the key layout of this client, unless there is another one, and read the one that is there, which then lasts.
pub(super) fn layout_commands(own: &str) -> [Cmd; 2] {
    let (mut set, mut get) = (redis::cmd("SET"), redis::cmd("GETEX"));
    set.arg(LAYOUT_KEY).arg(own).arg("NX").arg("EX").arg(LAYOUT_KEY_TTL.as_secs());
    get.arg(LAYOUT_KEY).arg("EX").arg(LAYOUT_KEY_TTL.as_secs());
    [set, get]
}

/// The error says who has the other layout that was read.
pub(super) fn compare_layout(found: &Value, own: &str) -> Result<(), String> {
    let Value::BulkString(layout) = found else { return Ok(()) };
    let other = String::from_utf8_lossy(layout);
    if other == own {
        Ok(())
    } else if [LAYOUT, RESTRICTED_LAYOUT].contains(&&*other) {
        Err(other_scripts(own))
    } else {
        Err(format!(
            "programs with a version of leasehold that keeps its keys in another layout (layout {other}, here {own}) use this \
             server, and would not see our locks: use the same version everywhere. When none of them runs any more, \
             delete the key {LAYOUT_KEY}"
        ))
    }
}

/// Whether clients with another key layout, or with other scripts, use the server.
pub(super) fn is_of_other_layout(error: &RedisError) -> bool {
    error.detail().is_some_and(|what| what.contains(LAYOUT_KEY))
}

/// Why a client does not use the scripts that the others use: the keys have other names, and the time is another one.
fn other_scripts(own: &str) -> String {
    let (others, this) = match own {
        RESTRICTED_LAYOUT => ("directly", "through a proxy, or with proxy=yes"),
        _ => ("through a proxy, or with proxy=yes", "directly"),
    };
    format!(
        "other programs reach these servers {others}, and this one {this}: they would not see each other's locks. Let all \
         programs connect the same way: proxy=yes in an address is possible everywhere but in a cluster's. When none of the others runs any more, delete the key {LAYOUT_KEY}"
    )
}

/// The server's run id, which changes at each start; none if the user may not ask.
pub(super) async fn run_id(connection: &mut MultiplexedConnection) -> Result<Option<String>, RedisError> {
    Ok(server_info(connection).await?.as_deref().and_then(run_id_in))
}

async fn server_info(connection: &mut MultiplexedConnection) -> Result<Option<String>, RedisError> {
    match redis::cmd("INFO").arg("server").query_async(connection).await {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.code().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

fn run_id_in(info: &str) -> Option<String> {
    info.lines().find_map(|line| line.strip_prefix("run_id:")).map(|id| id.trim().to_owned())
}

/// Whether the user may run the conditional delete. It is tried with a value that the key never has. Any error except a refusal,
/// for instance a redirect, shows that the server knows the command.
async fn may_delete(
    connection: &mut MultiplexedConnection,
    delete: ConditionalDelete,
) -> Result<bool, RedisError> {
    let mut probe = Cmd::new();
    for word in delete.words(LAYOUT_KEY.as_bytes(), b"") {
        probe.arg(word);
    }
    match probe.query_async::<Value>(connection).await {
        Err(error) if error.code().is_none() => Err(error),
        Err(error) => Ok(!is_refusal(&error)),
        Ok(_) => Ok(true),
    }
}

/// The error for a quorum node without a run id.
pub(super) fn missing_run_id(user: Option<&str>) -> RedisError {
    let user = user.unwrap_or("default");
    let message = format!(
        "INFO does not report its run id, so a restart would not be noticed, nor that two addresses lead to it, and it does \
         not vote: ACL SETUSER {user} +info"
    );
    (ErrorKind::Client, OWN, message).into()
}

/// The error where a further connection can't be compared with the others.
pub(super) fn unknown_place(user: Option<&str>) -> RedisError {
    let user = user.unwrap_or("default");
    let message = format!(
        "INFO does not report its run id, and a key that shows whether a further connection leads to the same server could not be set, so \
         that it is not used: ACL SETUSER {user} +info"
    );
    (ErrorKind::Client, OWN, message).into()
}

/// The policy, if it allows the server to evict keys with an expiry, as all lock keys are.
fn unsafe_eviction_policy(info: &str) -> Option<&str> {
    let policy = info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?.trim();
    (policy != "noeviction").then_some(policy)
}
