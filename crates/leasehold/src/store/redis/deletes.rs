//! Releases of plain leases by a conditional delete, which costs the server less than a script.

use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_core::{Command, Resource};
use leasehold_redis_protocol::{ConditionalDelete, plain_value, resource_key};
use redis::{RedisError, Value};

/// Which conditional delete a server allows, as its connection has found out.
pub(super) struct Deletes {
    command: Option<ConditionalDelete>,
    /// It was refused since, for example because the user has lost the right.
    is_refused: AtomicBool,
}

/// A server without one.
pub(super) static NO_DELETES: Deletes = Deletes::new(None);

impl Deletes {
    pub(super) const fn new(command: Option<ConditionalDelete>) -> Self {
        Self { command, is_refused: AtomicBool::new(false) }
    }

    /// The command that releases this lease without the script, if there is one.
    pub(super) fn encode(&self, resource: &Resource, command: &Command) -> Option<redis::Cmd> {
        let Command::Release(release) = command else { return None };
        let delete = self.command.filter(|_| !self.is_refused.load(Ordering::Relaxed))?;
        let (key, value) = (resource_key(resource), plain_value(release)?);
        let mut command = redis::Cmd::with_capacity(4, key.len() + value.len() + 16);
        for word in delete.words(key.as_bytes(), &value) {
            command.arg(word);
        }
        Some(command)
    }

    /// The result; `None` if nothing was deleted, and the script has to decide.
    pub(super) fn result(&self, value: Result<Value, RedisError>) -> Option<Result<Value, RedisError>> {
        match value.and_then(Value::extract_error) {
            Ok(Value::Int(0)) => None,
            // The lease has waiters behind it.
            Err(error) if error.code() == Some("WRONGTYPE") => None,
            Err(error) if is_refusal(&error) => {
                self.is_refused.store(true, Ordering::Relaxed);
                None
            }
            value => Some(value),
        }
    }
}

/// Whether the server does not know the command, or the user may not run it.
pub(super) fn is_refusal(error: &RedisError) -> bool {
    error.code() == Some("NOPERM") || error.to_string().to_lowercase().contains("unknown command")
}
