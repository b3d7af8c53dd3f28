//! The text of a foreign lock, as on the command line: the library, a colon, and the name.

use std::fmt;
use std::str::FromStr;

use super::foreign::{Foreign, Protocol};
use super::servers::Servers;
use crate::error::{Error, invalid};

/// Makes a lock of its name.
type Build = fn(&str) -> Result<Foreign, Error>;

/// What precedes the name in the text of a lock.
const SCHEMES: [(&str, Build); 16] = [
    ("set-nx-px", |key| Ok(Foreign::set_nx_px(key))),
    ("redisson", |name| Ok(Foreign::redisson_lock(name))),
    ("redisson-fenced", |name| Ok(Foreign::redisson_fenced_lock(name))),
    ("redisson-rw", |name| Ok(Foreign::redisson_read_write_lock(name))),
    ("redis-py", |name| Ok(Foreign::redis_py(name))),
    ("redsync", |name| Ok(Foreign::redsync(name))),
    ("node-redlock", |name| Ok(Foreign::node_redlock(name))),
    ("rslock", |name| Ok(Foreign::rslock(name))),
    ("bsm", |key| Ok(Foreign::bsm_redislock(key))),
    ("pottery", |name| Ok(Foreign::pottery(name))),
    ("dapr", |text| with_prefix(|app, name| Foreign::dapr(app, name), text, "dapr:APP:NAME")),
    ("spring", |text| {
        with_prefix(
            |registry, name| Foreign::spring_integration(registry, name),
            text,
            "spring:REGISTRY:NAME",
        )
    }),
    ("python-redis-lock", |name| Ok(Foreign::python_redis_lock(name))),
    ("rueidislock", |name| Ok(Foreign::rueidislock(name))),
    ("redlock", |text| on_servers(|key| Foreign::set_nx_px(key), text)),
    ("redisson-redlock", |text| on_servers(|name| Foreign::redisson_lock(name), text)),
];

/// Why some locks of Redisson have no bridge.
const REFUSED: [(&str, &str); 3] = [
    (
        "redisson-fair",
        "Redisson's fair lock can't be bridged: its queue is ordered by the clocks of its clients, and a waiter that has died delays \
         the others by minutes. Use RLock (getLock) in the Java programs first",
    ),
    (
        "redisson-semaphore",
        "Redisson's semaphore can't be bridged: its permits have no lease, so those of a program that has died are never returned. \
         Move all programs to leasehold's semaphore in one step",
    ),
    (
        "redisson-permit-expirable-semaphore",
        "Redisson's RPermitExpirableSemaphore can't be bridged: its clients compare the end of each permit with their own clocks, so \
         one whose clock is fast takes away permits that are in use. Move all programs to leasehold's semaphore in one step",
    ),
];

/// The text that [`FromStr`] reads, without the passwords of servers.
impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        let name = |prefix: &str| key.strip_prefix(prefix).unwrap_or(key).to_owned();
        match (&self.servers, self.protocol) {
            (Some(servers), Protocol::Redisson) => write!(f, "redisson-redlock:{key}@{servers}"),
            (Some(servers), _) => write!(f, "redlock:{key}@{servers}"),
            (None, Protocol::SetNxPx) => write!(f, "set-nx-px:{key}"),
            (None, Protocol::Redisson) => write!(f, "redisson:{key}"),
            (None, Protocol::RedissonFenced) => write!(f, "redisson-fenced:{key}"),
            (None, Protocol::RedissonRead | Protocol::RedissonWrite) => write!(f, "redisson-rw:{key}"),
            (None, Protocol::SpringIntegration) => write!(f, "spring:{key}"),
            (None, Protocol::PythonRedisLock) => write!(f, "python-redis-lock:{}", name("lock:")),
            (None, Protocol::Rueidislock) => write!(f, "rueidislock:{}", name("rueidislock:0:")),
        }
    }
}

impl FromStr for Foreign {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (scheme, name) = text.split_once(':').unwrap_or((text, ""));
        if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == scheme) {
            return Err(invalid(*why));
        }
        let Some((_, build)) = SCHEMES.iter().find(|(known, _)| *known == scheme) else {
            let known: Vec<_> = SCHEMES.iter().map(|(known, _)| format!("{known}:NAME")).collect();
            // The text may contain a password.
            let scheme = scheme.chars().take(40).collect::<String>();
            return Err(invalid(format!("a bridge is one of {}, not {scheme:?}", known.join(", "))));
        };
        if name.is_empty() {
            return Err(invalid(format!("a bridge has a name: {scheme}:NAME")));
        }
        build(name)
    }
}

/// What the text of a lock with a prefix looks like: the prefix is in front of the first colon.
fn with_prefix(build: fn(&str, &str) -> Foreign, text: &str, form: &str) -> Result<Foreign, Error> {
    match text.split_once(':') {
        Some((prefix, name)) if !prefix.is_empty() && !name.is_empty() => Ok(build(prefix, name)),
        _ => Err(invalid(format!("a bridge of this library has the form {form}"))),
    }
}

/// Parses `KEY@ADDRESS,ADDRESS,…`.
fn on_servers(build: fn(&str) -> Foreign, text: &str) -> Result<Foreign, Error> {
    let Some(start) = text.find("@redis").filter(|start| *start > 0) else {
        let form = "KEY@redis://HOST,redis://HOST,redis://HOST";
        return Err(invalid(format!("a bridge to a lock on several servers has the form {form}")));
    };
    let (key, urls) = (&text[..start], &text[start + 1..]);
    // A comma may also be in a password.
    let mut servers: Vec<String> = Vec::new();
    for part in urls.split(',') {
        match servers.last_mut() {
            Some(url) if !part.starts_with("redis") => url.extend([",", part]),
            _ => servers.push(part.to_owned()),
        }
    }
    Ok(Foreign { servers: Some(Servers::parse(servers)?), ..build(key) })
}
