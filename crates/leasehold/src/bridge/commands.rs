//! The commands on a foreign lock, and what their answers mean.

use redis::{Cmd, RedisError, Value};

use super::foreign::{Foreign, Protocol};
use crate::store::{ForeignCall, ForeignScript};

/// What wakes a waiter of Redisson.
const REDISSON_UNLOCKED: &str = "0";

static RENEW_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/renew_value.lua"));
static RELEASE_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/release_value.lua"));
static TAKE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/take_hash.lua"));
static RENEW_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/renew_hash.lua"));
static RELEASE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/release_hash.lua"));

impl Foreign {
    /// A new holder's value. Every attempt has another one, so that a late command of one attempt changes no later one.
    pub(super) fn holder(&self, random: u128) -> String {
        match self.protocol {
            Protocol::SetNxPx => format!("{random:032x}"),
            // A client's UUID and the number of a thread.
            Protocol::Redisson => {
                let hex = format!("{random:032x}");
                format!("{}-{}-{}-{}-{}:1", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
            }
        }
    }

    pub(super) fn take(&self, holder: &str, ttl_ms: u64) -> ForeignCall {
        match self.protocol {
            Protocol::SetNxPx => {
                let mut set = redis::cmd("SET");
                set.arg(&self.key).arg(holder).arg("NX").arg("PX").arg(ttl_ms);
                ForeignCall::Command(set)
            }
            Protocol::Redisson => self.script(&TAKE_HASH, [holder, &ttl_ms.to_string()]),
        }
    }

    pub(super) fn renew(&self, holder: &str, ttl_ms: u64) -> ForeignCall {
        let script = match self.protocol {
            Protocol::SetNxPx => &RENEW_VALUE,
            Protocol::Redisson => &RENEW_HASH,
        };
        self.script(script, [holder, &ttl_ms.to_string()])
    }

    pub(super) fn release(&self, holder: &str) -> ForeignCall {
        match self.protocol {
            Protocol::SetNxPx => self.script(&RELEASE_VALUE, [holder]),
            Protocol::Redisson => self.script(&RELEASE_HASH, [holder, &self.channel(), REDISSON_UNLOCKED]),
        }
    }

    /// Whether this holder has the lock, to be asked before a repeated [`Self::take`], whose first answer may have been lost.
    pub(super) fn holds(&self, holder: &str) -> Cmd {
        let mut command = Cmd::new();
        match self.protocol {
            Protocol::SetNxPx => command.arg("GET").arg(&self.key),
            Protocol::Redisson => command.arg("HEXISTS").arg(&self.key).arg(holder),
        };
        command
    }

    /// Whether the answer to [`Self::holds`] says that it does.
    pub(super) fn is_holder(&self, holder: &str, answer: &Value) -> bool {
        match (self.protocol, answer) {
            (Protocol::SetNxPx, Value::BulkString(value)) => value == holder.as_bytes(),
            (Protocol::Redisson, Value::Int(count)) => *count == 1,
            _ => false,
        }
    }

    /// Reads how many waiters of the other library will be woken by a message; none if its waiters poll.
    pub(super) fn count_waiters(&self) -> Option<Cmd> {
        match self.protocol {
            Protocol::SetNxPx => None,
            Protocol::Redisson => {
                let mut command = redis::cmd("PUBSUB");
                command.arg("NUMSUB").arg(self.channel());
                Some(command)
            }
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
        ForeignCall::Script { script, key: self.key.clone(), arguments }
    }
}

/// Whether an answer says yes: `SET` with OK, a script with 1.
pub(super) fn is_yes(answer: &Value) -> bool {
    matches!(answer, Value::Okay | Value::Int(1)) || *answer == Value::SimpleString("OK".to_owned())
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
