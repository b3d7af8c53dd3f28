//! What is said first on a new connection: is it the same layout, and is the server fit for locks?

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError, Value};

use super::keys::{LAYOUT, LAYOUT_KEY};

/// How long a server remembers which layout its clients have, since the last of them connected.
const LAYOUT_KEY_TTL_SECONDS: u32 = 30 * 24 * 3600;

/// Says which server this is, as far as that may be known. Fails when clients with another layout use this server: they and we would not see each other's locks.
pub(super) async fn handshake(
    connection: &mut MultiplexedConnection,
    is_resp2: bool,
    warn: &(dyn Fn(String) + Send + Sync),
) -> Result<Option<String>, RedisError> {
    let mut questions = redis::pipe();
    questions.ignore_errors();
    questions.cmd("SET").arg(LAYOUT_KEY).arg(LAYOUT).arg("NX").arg("EX").arg(LAYOUT_KEY_TTL_SECONDS);
    questions.cmd("GETEX").arg(LAYOUT_KEY).arg("EX").arg(LAYOUT_KEY_TTL_SECONDS);
    questions.cmd("INFO").arg("memory");
    if !is_resp2 {
        // By opt-in, which no command ever asks for, the server remembers no key for this connection. All that is left of
        // tracking is that it says when FLUSHALL or FLUSHDB has emptied it. A user who may not ask for that learns of it by
        // the next renewal.
        questions.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
    }
    let answers: Vec<Result<Value, RedisError>> = questions.query_async(connection).await?;
    // A replica, a full memory, another node of the cluster or a narrow ACL: whatever refuses these will refuse locks, and
    // say why, or does not matter.
    if let Some(Err(error)) = answers.get(1)
        && error.code() == Some("LOADING")
    {
        return Err(error.clone());
    }
    if let Some(Ok(Value::BulkString(layout))) = answers.get(1)
        && layout != LAYOUT.as_bytes()
    {
        let message = format!(
            "programs with a version of leasehold that keeps its keys in another options (layout {}, here {LAYOUT}) use this \
             server, and would not see our locks: use the same version everywhere. When none of them runs any more, \
             delete the key {LAYOUT_KEY}",
            String::from_utf8_lossy(layout)
        );
        return Err((ErrorKind::Client, "layout", message).into());
    }
    if let Some(Ok(info)) = answers.get(2)
        && let Ok(info) = redis::from_redis_value_ref::<String>(info)
        && let Some(policy) = unsafe_eviction_policy(&info)
    {
        warn(format!(
            "maxmemory-policy is {policy}: a server that is short of memory throws locks away. Set it to noeviction"
        ));
    }
    run_id(connection).await
}

/// Which server this is, and which of its lives; none where the user may not ask.
pub(super) async fn run_id(connection: &mut MultiplexedConnection) -> Result<Option<String>, RedisError> {
    match redis::cmd("INFO").arg("server").query_async::<String>(connection).await {
        Ok(info) => {
            Ok(info.lines().find_map(|line| line.strip_prefix("run_id:")).map(|id| id.trim().to_owned()))
        }
        Err(error) if error.code().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Why a server whose run id is not known may not vote.
pub(super) fn missing_run_id(user: Option<&str>) -> RedisError {
    let user = user.unwrap_or("default");
    let message = format!(
        "INFO does not tell its run id, so a restart would not be noticed, nor that two addresses lead to it, and it does \
         not vote: ACL SETUSER {user} +info"
    );
    (ErrorKind::Client, "run id", message).into()
}

/// The policy, where it lets the server remove keys that have an expiry, as all of ours do.
fn unsafe_eviction_policy(info: &str) -> Option<&str> {
    let policy = info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?.trim();
    (policy != "noeviction").then_some(policy)
}
