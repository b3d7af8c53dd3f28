//! The locks of another library, as a server keeps them: keys with the value of their holder and an expiry.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::simulation::{KeyAnswer, KeyCommand};
use leasehold_core::StoreTime;

/// The keys of a server.
#[derive(Clone, Debug, Default)]
pub struct Keys(BTreeMap<String, Key>);

#[derive(Clone, Debug)]
struct Key {
    holder: String,
    expires_at: StoreTime,
}

impl Keys {
    /// The holder's value, if the key exists.
    #[must_use]
    pub fn holder(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(|key| &*key.holder)
    }

    /// When the key expires, if it exists.
    #[must_use]
    pub fn expires_at(&self, key: &str) -> Option<StoreTime> {
        self.0.get(key).map(|key| key.expires_at)
    }

    /// The names of all keys.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// The key of this holder expires so much earlier.
    pub fn shorten(&mut self, key: &str, holder: &str, by: Duration) {
        if let Some(key) = self.0.get_mut(key).filter(|key| key.holder == holder) {
            key.expires_at = StoreTime::from_micros(key.expires_at.as_micros().saturating_sub(micros(by)));
        }
    }

    /// Removes the key if its time is over. Returns whether it has.
    pub fn expire(&mut self, key: &str, now: StoreTime) -> bool {
        let is_over = self.0.get(key).is_some_and(|key| key.expires_at <= now);
        is_over && self.0.remove(key).is_some()
    }

    /// Runs a command on a key whose time is not over. Returns whether the key has changed, too.
    pub fn run(&mut self, command: &KeyCommand, now: StoreTime) -> (KeyAnswer, bool) {
        match command {
            KeyCommand::Take(key, holder, ttl) => {
                if self.0.contains_key(key) {
                    return (KeyAnswer::Nil, false);
                }
                self.0.insert(key.clone(), Key { holder: holder.clone(), expires_at: now + *ttl });
                (KeyAnswer::Okay, true)
            }
            KeyCommand::Renew(key, holder, ttl) => self.change(key, holder, Some(now + *ttl)),
            KeyCommand::Release(key, holder) => self.change(key, holder, None),
            KeyCommand::Holder(key) => {
                let holder = self.holder(key);
                (holder.map_or(KeyAnswer::Nil, |holder| KeyAnswer::Text(holder.to_owned())), false)
            }
            KeyCommand::TimeLeft(key) => {
                let left = self.expires_at(key).map(|at| at.since(now));
                (KeyAnswer::Number(left.map_or(-2, millis)), false)
            }
            KeyCommand::Exists(key) => (KeyAnswer::Number(i64::from(self.0.contains_key(key))), false),
            KeyCommand::Track => (KeyAnswer::Okay, false),
        }
    }

    /// Sets the expiry of a key that has this holder, or deletes it.
    fn change(&mut self, name: &str, holder: &str, expires_at: Option<StoreTime>) -> (KeyAnswer, bool) {
        let Some(key) = self.0.get_mut(name).filter(|key| key.holder == holder) else {
            return (KeyAnswer::Number(0), false);
        };
        match expires_at {
            Some(at) => key.expires_at = at,
            None => drop(self.0.remove(name)),
        }
        (KeyAnswer::Number(1), true)
    }
}

/// The key of a command.
#[must_use]
pub fn key_of(command: &KeyCommand) -> Option<&str> {
    match command {
        KeyCommand::Take(key, ..)
        | KeyCommand::Renew(key, ..)
        | KeyCommand::Release(key, _)
        | KeyCommand::Holder(key)
        | KeyCommand::TimeLeft(key)
        | KeyCommand::Exists(key) => Some(key),
        KeyCommand::Track => None,
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn millis(left: Duration) -> i64 {
    i64::try_from(left.as_millis()).unwrap_or(i64::MAX)
}
