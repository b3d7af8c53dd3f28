//! The commands on a foreign lock, and what their answers mean.

use leasehold_core::Token;
use leasehold_store::{ForeignAnswer, ForeignCall, ForeignScript};

use super::foreign::{Foreign, Protocol};

static TAKE_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/take_value.lua"));
pub(crate) static RENEW_VALUE: ForeignScript = ForeignScript::new(include_str!("scripts/renew_value.lua"));
pub(crate) static RELEASE_VALUE: ForeignScript =
    ForeignScript::new(include_str!("scripts/release_value.lua"));
static RELEASE_VALUE_MESSAGE: ForeignScript =
    ForeignScript::new(include_str!("scripts/release_value_message.lua"));
static RELEASE_VALUE_LIST: ForeignScript = ForeignScript::new(include_str!("scripts/release_value_list.lua"));
static TAKE_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/take_keys.lua"));
static RENEW_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/renew_keys.lua"));
static RELEASE_KEYS: ForeignScript = ForeignScript::new(include_str!("scripts/release_keys.lua"));
static TAKE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/take_hash.lua"));
static TAKE_HASH_TOKEN: ForeignScript = ForeignScript::new(include_str!("scripts/take_hash_token.lua"));
static TAKE_HASH_SHARED: ForeignScript = ForeignScript::new(include_str!("scripts/take_hash_shared.lua"));
static RENEW_HASH_SHARED: ForeignScript = ForeignScript::new(include_str!("scripts/renew_hash_shared.lua"));
static RELEASE_HASH_SHARED: ForeignScript =
    ForeignScript::new(include_str!("scripts/release_hash_shared.lua"));
static RENEW_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/renew_hash.lua"));
static RELEASE_HASH: ForeignScript = ForeignScript::new(include_str!("scripts/release_hash.lua"));

/// How long an element of python-redis-lock's list lasts, in milliseconds: as long as the library lets it last by default.
const SIGNAL_TTL_MS: &str = "1000";

impl Foreign {
    /// A new holder's value. Every command to take the lock has another one if the one before is unanswered, so that a late command
    /// changes no later lock.
    pub(super) fn holder(&self, random: u128) -> String {
        if self.protocol.is_redisson() { self.redisson_holder(random) } else { format!("{random:032x}") }
    }

    /// `token` is that of the own lease. A lock with tokens gives that one, or a higher one.
    pub(super) fn take(&self, holder: &str, ttl_ms: u64, token: Token) -> ForeignCall {
        let ttl_ms = ttl_ms.to_string();
        let arguments = [holder, ttl_ms.as_str()];
        match self.protocol {
            Protocol::Redisson => self.script(&TAKE_HASH, arguments),
            Protocol::RedissonWrite => self.script(&TAKE_HASH, [holder, &ttl_ms, "write"]),
            Protocol::RedissonRead => {
                self.script_beside(&TAKE_HASH_SHARED, self.reader_key(holder), arguments)
            }
            Protocol::RedissonFenced => {
                let token = token.get().to_string();
                self.script_beside(&TAKE_HASH_TOKEN, self.counter(), [holder, &ttl_ms, &token])
            }
            Protocol::Rueidislock => self.script(&TAKE_KEYS, arguments),
            // A repeated vote of the same holder counts.
            _ if self.servers.is_some() => self.script(&TAKE_VALUE, arguments),
            _ => ForeignCall::command(["SET", &self.key, holder, "NX", "PX", &ttl_ms]),
        }
    }

    pub(super) fn renew(&self, holder: &str, ttl_ms: u64) -> ForeignCall {
        let arguments = [holder, &ttl_ms.to_string()];
        match self.protocol {
            Protocol::Redisson | Protocol::RedissonWrite => self.script(&RENEW_HASH, arguments),
            Protocol::RedissonFenced => self.script_beside(&RENEW_HASH, self.counter(), arguments),
            Protocol::RedissonRead => {
                self.script_beside(&RENEW_HASH_SHARED, self.reader_key(holder), arguments)
            }
            Protocol::Rueidislock => self.script(&RENEW_KEYS, arguments),
            _ => self.script(&RENEW_VALUE, arguments),
        }
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
            Protocol::Redisson | Protocol::RedissonFenced | Protocol::RedissonWrite => {
                self.script(&RELEASE_HASH, [holder, &self.channel(), self.unlock_message()])
            }
            Protocol::RedissonRead => {
                let arguments = [holder, &self.channel(), self.unlock_message(), &self.tagged()];
                self.script_beside(&RELEASE_HASH_SHARED, self.reader_key(holder), arguments)
            }
        }
    }

    /// Whether this holder has the lock, to be asked before a repeated [`Self::take`], whose first answer may have been lost.
    pub(super) fn holds(&self, holder: &str) -> ForeignCall {
        match self.protocol {
            protocol if protocol.is_redisson() => ForeignCall::command(["HEXISTS", &self.key, holder]),
            Protocol::Rueidislock => {
                let words = ["MGET".to_owned()].into_iter().chain(self.keys());
                ForeignCall::Command(words.collect())
            }
            _ => ForeignCall::command(["GET", &self.key]),
        }
    }

    /// Whether the answer to [`Self::holds`] says that it does.
    pub(super) fn is_holder(&self, holder: &str, answer: &ForeignAnswer) -> bool {
        let is_value = |value: &ForeignAnswer| matches!(value, ForeignAnswer::Bytes(value) if value == holder.as_bytes());
        match (self.protocol, answer) {
            (protocol, answer) if protocol.is_redisson() => *answer == ForeignAnswer::Int(1),
            (Protocol::Rueidislock, ForeignAnswer::List(values)) => {
                let held = values.iter().filter(|value| is_value(value)).count();
                values.first().is_some_and(is_value) && held > values.len() / 2
            }
            (_, answer) => is_value(answer),
        }
    }

    /// Reads how many waiters of the other library will be woken by a message; none if that is not known, or they poll.
    pub(super) fn count_waiters(&self) -> Option<ForeignCall> {
        let has_channel = self.protocol.is_redisson();
        has_channel.then(|| ForeignCall::command(["PUBSUB", "NUMSUB", &self.channel()]))
    }

    /// The token in an answer that says yes, if the lock has tokens.
    pub(super) fn token(&self, answer: &ForeignAnswer) -> Option<Token> {
        match (self.protocol, answer) {
            (Protocol::RedissonFenced, ForeignAnswer::Int(number)) => {
                Token::new(u64::try_from(*number).ok()?)
            }
            _ => None,
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

    /// A script that also has a key beside the lock.
    fn script_beside<'a>(
        &self,
        script: &'static ForeignScript,
        beside: String,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> ForeignCall {
        let arguments = arguments.into_iter().map(str::to_owned).collect();
        ForeignCall::Script { script, keys: vec![self.key.clone(), beside], arguments }
    }
}

/// Whether an answer says yes: `SET` with OK, a script with 1, or with a token.
pub(super) fn is_yes(answer: &ForeignAnswer) -> bool {
    matches!(answer, ForeignAnswer::Okay | ForeignAnswer::Int(1..))
}

/// Whether the answer to a release says that the lock is released, but that its waiters were not woken.
pub(super) fn is_silent(answer: &ForeignAnswer) -> bool {
    *answer == ForeignAnswer::Int(2)
}
