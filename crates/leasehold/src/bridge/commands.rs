//! The commands on a foreign lock, and what their answers mean.

use redis::{Cmd, RedisError, Value};

use super::foreign::{Foreign, Protocol};
use crate::store::{ForeignCall, ForeignScript};

/// What wakes a waiter of Redisson.
const REDISSON_UNLOCKED: &str = "0";

static TAKE_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/take_value.lua"));
static RENEW_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/renew_value.lua"));
static RELEASE_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/release_value.lua"));
static RELEASE_VALUE_MESSAGE: ForeignScript =
    ForeignScript::new(include_str!("scripts/release_value_message.lua"));
static RELEASE_VALUE_LIST: ForeignScript = ForeignScript::new(include_str!("scripts/release_value_list.lua"));
static TAKE_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/take_keys.lua"));
static RENEW_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/renew_keys.lua"));
static RELEASE_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/release_keys.lua"));
static TAKE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/take_hash.lua"));
static RENEW_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/renew_hash.lua"));
static RELEASE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/release_hash.lua"));

/// How long an element of python-redis-lock's list lasts, in milliseconds: as long as the library lets it last by default.
const SIGNAL_TTL_MS: &str = "1000";

impl Foreign {
    /// A new holder's value. Every command to take the lock has another one if the one before is unanswered, so that a late command
    /// changes no later lock.
    pub(super) fn holder(&self, random: u128) -> String {
        match self.protocol {
            // A client's UUID and the number of a thread.
            Protocol::Redisson => {
                let hex = format!("{random:032x}");
                format!("{}-{}-{}-{}-{}:1", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
            }
            _ => format!("{random:032x}"),
        }
    }

    pub(super) fn take(&self, holder: &str, ttl_ms: u64) -> ForeignCall {
        let arguments = [holder, &ttl_ms.to_string()];
        match self.protocol {
            Protocol::Redisson => self.script(&TAKE_HASH, arguments),
            Protocol::Rueidislock => self.script(&TAKE_KEYS, arguments),
            // A repeated vote of the same holder counts.
            _ if self.servers.is_some() => self.script(&TAKE_VALUE, arguments),
            _ => {
                let mut set = redis::cmd("SET");
                set.arg(&self.key).arg(holder).arg("NX").arg("PX").arg(ttl_ms);
                ForeignCall::Command(set)
            }
        }
    }

    pub(super) fn renew(&self, holder: &str, ttl_ms: u64) -> ForeignCall {
        let script = match self.protocol {
            Protocol::Redisson => &RENEW_HASH,
            Protocol::Rueidislock => &RENEW_KEYS,
            _ => &RENEW_VALUE,
        };
        self.script(script, [holder, &ttl_ms.to_string()])
    }

    pub(super) fn release(&self, holder: &str) -> ForeignCall {
        let wakes = self.wakes.as_deref().unwrap_or_default();
        match self.protocol {
            Protocol::SetNxPx => self.script(&RELEASE_VALUE, [holder]),
            Protocol::SpringIntegration => {
                self.script(&RELEASE_VALUE_MESSAGE, [holder, wakes, self.key.as_str()])
            }
            Protocol::PythonRedisLock => self.script(&RELEASE_VALUE_LIST, [holder, wakes, SIGNAL_TTL_MS]),
            Protocol::Rueidislock => self.script(&RELEASE_KEYS, [holder]),
            Protocol::Redisson => self.script(&RELEASE_HASH, [holder, &self.channel(), REDISSON_UNLOCKED]),
        }
    }

    /// Whether this holder has the lock, to be asked before a repeated [`Self::take`], whose first answer may have been lost.
    pub(super) fn holds(&self, holder: &str) -> Cmd {
        let mut command = Cmd::new();
        match self.protocol {
            Protocol::Redisson => command.arg("HEXISTS").arg(&self.key).arg(holder),
            Protocol::Rueidislock => command.arg("MGET").arg(self.keys()),
            _ => command.arg("GET").arg(&self.key),
        };
        command
    }

    /// Whether the answer to [`Self::holds`] says that it does.
    pub(super) fn is_holder(&self, holder: &str, answer: &Value) -> bool {
        let is_value =
            |value: &Value| matches!(value, Value::BulkString(value) if value == holder.as_bytes());
        match (self.protocol, answer) {
            (Protocol::Redisson, Value::Int(count)) => *count == 1,
            (Protocol::Redisson, _) => false,
            (Protocol::Rueidislock, Value::Array(values)) => {
                let held = values.iter().filter(|value| is_value(value)).count();
                values.first().is_some_and(is_value) && held > values.len() / 2
            }
            (_, answer) => is_value(answer),
        }
    }

    /// Reads how many waiters of the other library will be woken by a message; none if that is not known, or they poll.
    pub(super) fn count_waiters(&self) -> Option<Cmd> {
        match self.protocol {
            Protocol::Redisson => {
                let mut command = redis::cmd("PUBSUB");
                command.arg("NUMSUB").arg(self.channel());
                Some(command)
            }
            _ => None,
        }
    }

    /// The channel of a Redisson lock. A name with a hash tag keeps it, and any other one becomes the tag.
    fn channel(&self) -> String {
        let name = &self.key;
        if name.contains('{') {
            format!("redisson_lock__channel:{name}")
        } else {
            format!("redisson_lock__channel:{{{name}}}")
        }
    }

    fn script<'a>(
        &self,
        script: &'static ForeignScript,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> ForeignCall {
        let arguments = arguments.into_iter().map(str::to_owned).collect();
        ForeignCall::Script { script, keys: self.keys(), arguments }
    }
}

/// Whether an answer says yes: `SET` with OK, a script with 1.
pub(super) fn is_yes(answer: &Value) -> bool {
    matches!(answer, Value::Okay | Value::Int(1)) || *answer == Value::SimpleString("OK".to_owned())
}

/// The error of a call to which no majority of the servers gave the same answer, in time.
pub(crate) const UNDECIDED: &str = "a majority of the servers has not agreed in time";

/// Whether the servers of a lock have not agreed.
pub(super) fn is_undecided(error: &RedisError) -> bool {
    error.to_string().contains(UNDECIDED)
}

/// Whether the answer to a release says that the lock is released, but that its waiters were not woken.
pub(super) fn is_silent(answer: &Value) -> bool {
    *answer == Value::Int(2)
}

/// Whether the key has another type, and is therefore no lock of this library.
pub(super) fn is_other_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE") || error.to_string().contains("WRONGTYPE")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_of_a_redisson_lock_is_a_uuid_and_a_thread() {
        let holder = Foreign::redisson_lock("jobs").holder(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(holder, "01234567-89ab-cdef-0123-456789abcdef:1");
        assert_eq!(Foreign::set_nx_px("jobs").holder(7).len(), 32);
    }

    #[test]
    fn channel_of_a_redisson_lock_keeps_the_hash_tag_of_its_name() {
        assert_eq!(Foreign::redisson_lock("jobs").channel(), "redisson_lock__channel:{jobs}");
        assert_eq!(Foreign::redisson_lock("a:{b}").channel(), "redisson_lock__channel:a:{b}");
    }
}
