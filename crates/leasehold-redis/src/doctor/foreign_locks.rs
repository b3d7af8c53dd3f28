//! Finds keys that look like locks of other libraries: such a program and one with leasehold do not exclude each other without a bridge.
//!
//! The search is bounded, and reads keys that may belong to anything. So it only guesses, and says what a key looks like.

use std::time::Duration;

use leasehold_store::{Check, Component, redisson_counter};
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisError, Value};

/// Pages of the keyspace that are looked at, for each type.
const PAGES: u32 = 20;

/// Keys in a page.
const PAGE: u32 = 500;

/// The longest value of a lock that is known, in bytes.
const MAX_VALUE: isize = 64;

/// The most fields of a lock that is looked at: the readers of a read-write lock.
const MAX_FIELDS: i64 = 64;

/// A lock that lasts longer is more likely something else.
const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

const RLOCK: &str = "Redisson RLock";

/// How many of them are named.
const SHOWN: usize = 10;

/// A key, and the library that it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ForeignLock {
    pub(super) key: String,
    pub(super) library: &'static str,
}

/// What a search has found.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    locks: Vec<ForeignLock>,
    /// The user may not read some of the keys.
    is_refused: bool,
}

/// Searches the first pages of the keyspace.
pub(super) async fn search(connection: &mut MultiplexedConnection) -> Found {
    let mut found = Found::default();
    for kind in ["hash", "string"] {
        let mut cursor = "0".to_owned();
        for _ in 0..PAGES {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor).arg("COUNT").arg(PAGE).arg("TYPE").arg(kind);
            let page: Result<(String, Vec<Vec<u8>>), RedisError> = scan.query_async(connection).await;
            let Ok((next, keys)) = page else { return found };
            let keys: Vec<String> = keys.into_iter().filter_map(|key| String::from_utf8(key).ok()).collect();
            let keys: Vec<String> = keys.into_iter().filter(|key| !key.starts_with("leasehold:")).collect();
            look(connection, kind, &keys, &mut found).await;
            if next == "0" {
                break;
            }
            cursor = next;
        }
    }
    found
}

/// Reads the lifetime and a bounded part of each key.
async fn look(connection: &mut MultiplexedConnection, kind: &str, keys: &[String], found: &mut Found) {
    if keys.is_empty() {
        return;
    }
    let mut questions = redis::pipe();
    questions.ignore_errors();
    for key in keys {
        questions.cmd("PTTL").arg(key);
        match kind {
            "hash" => questions.cmd("HLEN").arg(key),
            _ => questions.cmd("STRLEN").arg(key),
        };
    }
    let answers = ask(connection, &questions, found).await;
    let ttl = u64::try_from(MAX_TTL.as_millis()).unwrap_or(u64::MAX);
    let is_candidate = |answers: &[Option<Value>]| match answers {
        [Some(Value::Int(left)), Some(Value::Int(size))] => {
            let largest = if kind == "hash" { MAX_FIELDS } else { MAX_VALUE as i64 };
            u64::try_from(*left).is_ok_and(|left| left <= ttl) && (1..=largest).contains(size)
        }
        _ => false,
    };
    let candidates = keys.iter().zip(answers.chunks(2)).filter(|(_, answers)| is_candidate(answers));
    let candidates: Vec<&String> = candidates.map(|(key, _)| key).collect();
    let mut questions = redis::pipe();
    questions.ignore_errors();
    for key in &candidates {
        match kind {
            "hash" => questions.cmd("HKEYS").arg(key),
            _ => questions.cmd("GETRANGE").arg(key).arg(0).arg(MAX_VALUE),
        };
    }
    let answers = ask(connection, &questions, found).await;
    let library = |key: &str, answer: &Option<Value>| match answer.as_ref()? {
        Value::BulkString(value) => library_of_value(key, value),
        fields => redis::from_redis_value_ref::<Vec<String>>(fields)
            .ok()
            .and_then(|fields| library_of_fields(&fields)),
    };
    let named = candidates.into_iter().zip(&answers);
    let named = named
        .filter_map(|(key, answer)| Some(ForeignLock { key: key.clone(), library: library(key, answer)? }));
    let mut named: Vec<ForeignLock> = named.collect();
    find_fenced(connection, &mut named, found).await;
    found.locks.append(&mut named);
}

/// A lock of Redisson's beside which there is a counter of tokens is a fenced one.
async fn find_fenced(connection: &mut MultiplexedConnection, locks: &mut [ForeignLock], found: &mut Found) {
    let mut plain: Vec<_> = locks.iter_mut().filter(|lock| lock.library == RLOCK).collect();
    if plain.is_empty() {
        return;
    }
    let mut questions = redis::pipe();
    questions.ignore_errors();
    for lock in &plain {
        questions.cmd("EXISTS").arg(redisson_counter(&lock.key));
    }
    for (lock, answer) in plain.iter_mut().zip(ask(connection, &questions, found).await) {
        if answer == Some(Value::Int(1)) {
            lock.library = "Redisson RFencedLock";
        }
    }
}

async fn ask(
    connection: &mut MultiplexedConnection,
    questions: &Pipeline,
    found: &mut Found,
) -> Vec<Option<Value>> {
    let answers: Result<Vec<Result<Value, RedisError>>, _> = questions.query_async(connection).await;
    let answers = answers.unwrap_or_default();
    found.is_refused |=
        answers.iter().any(|answer| matches!(answer, Err(error) if error.code() == Some("NOPERM")));
    answers.into_iter().map(Result::ok).collect()
}

fn library_of_fields(fields: &[String]) -> Option<&'static str> {
    let is_holder = |field: &str| {
        field.split_once(':').is_some_and(|(uuid, thread)| {
            is_uuid(uuid) && thread.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
        })
    };
    let is_side =
        |field: &String| field == "mode" || is_holder(field.strip_suffix(":write").unwrap_or(field));
    match fields {
        [holder] if is_holder(holder) => Some(RLOCK),
        [_, _, ..] if fields.iter().any(|field| field == "mode") && fields.iter().all(is_side) => {
            Some("Redisson RReadWriteLock")
        }
        _ => None,
    }
}

fn library_of_value(key: &str, value: &[u8]) -> Option<&'static str> {
    let prefixes = [("redlock:", "pottery"), ("lock||", "Dapr"), ("rueidislock:", "rueidislock")];
    if let Some((_, library)) = prefixes.iter().find(|(prefix, _)| key.starts_with(prefix)) {
        return Some(library);
    }
    let Ok(text) = std::str::from_utf8(value) else {
        return (value.len() == 20).then_some("rslock");
    };
    let is_base64 =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/-_=".contains(&byte));
    match text.len() {
        // A UUID of version 1 without its dashes.
        32 if is_hex(text) && text.as_bytes()[12] == b'1' => Some("redis-py"),
        32 if is_hex(text) => Some("node-redlock, or a bridge of leasehold"),
        24 if is_base64(text) && text.ends_with("==") => Some("redsync"),
        24 if is_base64(text) && key.starts_with("lock:") => Some("python-redis-lock"),
        22 if is_base64(text) => Some("bsm/redislock"),
        36 if is_uuid(text) && key.contains(':') => {
            Some("Spring Integration, or another lock by SET NX PX with a UUID")
        }
        36 if is_uuid(text) => Some("a lock by SET NX PX with a UUID"),
        _ => None,
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_uuid(text: &str) -> bool {
    let mut parts = text.split('-');
    [8, 4, 4, 4, 12]
        .iter()
        .all(|length| parts.next().is_some_and(|part| part.len() == *length && is_hex(part)))
        && parts.next().is_none()
}

/// Names a few of them.
pub(super) fn show(found: &Found, component: &mut Component) {
    if found.is_refused {
        component.fine(
            Check::ForeignLocks,
            "whether other libraries have locks here is not known: the user may not read all keys",
            "for this check the user also needs the rights in docs/operations.md",
        );
    }
    let locks = &found.locks;
    if locks.is_empty() {
        return;
    }
    let shown = locks.iter().take(SHOWN).map(|lock| format!("{:?} (like {})", lock.key, lock.library));
    let mut shown = shown.collect::<Vec<_>>().join(", ");
    if locks.len() > SHOWN {
        shown += &format!(", and {} more", locks.len() - SHOWN);
    }
    component.fact("locks of other libraries", &shown);
    let why = "programs with another library and programs with leasehold exclude each other only with a bridge, such as --bridge \
               redisson:NAME: see docs/bridges.md";
    component.fine(
        Check::ForeignLocks,
        format!("keys that look like locks of other libraries: {shown}"),
        why,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that the libraries have written.
    #[test]
    fn locks_of_the_libraries_are_recognised() {
        let fields = |field: &str| library_of_fields(&[field.to_owned()]);
        assert_eq!(fields("9557684a-c856-4883-9094-904228b43691:27"), Some("Redisson RLock"));
        assert_eq!(fields("name"), None);
        let both = |mode: &str, field: &str| library_of_fields(&[mode.to_owned(), field.to_owned()]);
        let read_write = Some("Redisson RReadWriteLock");
        assert_eq!(both("mode", "9557684a-c856-4883-9094-904228b43691:27"), read_write);
        assert_eq!(both("mode", "9557684a-c856-4883-9094-904228b43691:27:write"), read_write);
        assert_eq!(both("mode", "colour"), None);
        assert_eq!(both("colour", "9557684a-c856-4883-9094-904228b43691:27"), None);
        let value = |value: &[u8]| library_of_value("jobs", value);
        assert_eq!(value(b"696bb90ee6de11f1a35602fc00000001"), Some("redis-py"));
        assert_eq!(value(b"UcCWk/JMjsVw3kqcyKZanQ=="), Some("redsync"));
        assert_eq!(
            value(b"c11556289c20084783c2a1ed0f0af03b"),
            Some("node-redlock, or a bridge of leasehold")
        );
        assert_eq!(value(b"\x16\xcb\xe2F\xd1UZ\xdc\xa28\x06o\xb9\xa3\xbf,\xce47\x12"), Some("rslock"));
        assert_eq!(library_of_value("rueidislock:0:jobs", b"\xca\xac"), Some("rueidislock"));
        let named = |key: &str, value: &[u8]| library_of_value(key, value);
        assert_eq!(named("lock:jobs", b"fBEXfiPw2VNC3hwrJXrNRXUq"), Some("python-redis-lock"));
        assert_eq!(named("other:jobs", b"fBEXfiPw2VNC3hwrJXrNRXUq"), None);
        let uuid = b"0d3c1b52-6d1e-4c83-9a7e-3f4c5b6a7d8e";
        assert!(named("registry:jobs", uuid).unwrap().starts_with("Spring Integration"));
        assert_eq!(named("redlock:jobs", uuid), Some("pottery"));
        assert_eq!(named("lock||billing||jobs", b"owner"), Some("Dapr"));
        assert_eq!(value(b"DR5zQ7n5oQ3dqP1vOQ9V7w"), Some("bsm/redislock"));
        assert_eq!(value(b"a session of a user"), None);
    }
}
