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

    pub(super) fn command(&self) -> Option<ConditionalDelete> {
        self.command.filter(|_| !self.is_refused.load(Ordering::Relaxed))
    }

    /// The command that releases this lease without the script, if there is one.
    pub(super) fn encode(&self, resource: &Resource, command: &Command) -> Option<redis::Cmd> {
        let Command::Release(release) = command else { return None };
        let delete = self.command()?;
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
            Err(error) if is_refusal(&error) => {
                self.is_refused.store(true, Ordering::Relaxed);
                None
            }
            // The lease has waiters behind it: DELIFEQ says WRONGTYPE, and DELEX says ERR and a sentence.
            Err(error) if matches!(error.code(), Some("WRONGTYPE" | "ERR")) => None,
            value => Some(value),
        }
    }
}

/// Whether the server does not know the command, or the user may not run it.
pub(super) fn is_refusal(error: &RedisError) -> bool {
    error.code() == Some("NOPERM") || error.to_string().to_lowercase().contains("unknown command")
}

#[cfg(test)]
mod tests {
    use redis::ErrorKind;

    use super::*;

    #[test]
    fn only_errors_that_deleted_nothing_and_depend_on_the_key_lead_to_the_script() {
        let deletes = || Deletes::new(Some(ConditionalDelete::DelEx));
        let reply = |line: &str| redis::parse_redis_value(format!("{line}\r\n").as_bytes());
        let says = |line: &str| {
            let deletes = deletes();
            let result = deletes.result(reply(line));
            (result, deletes.is_refused.load(Ordering::Relaxed))
        };
        for line in [
            ":0",
            "-WRONGTYPE Operation against a key holding the wrong kind of value",
            // Redis 8.4, where the key is no string.
            "-ERR Key should be of string type if conditions are specified",
        ] {
            assert_eq!(says(line), (None, false), "{line}");
        }
        for line in [
            "-NOPERM User default has no permissions to run the 'delex' command",
            "-ERR unknown command 'DELEX', with args beginning with:",
        ] {
            assert_eq!(says(line), (None, true), "{line}");
        }
        for line in ["-MOVED 7 127.0.0.1:7001", "-READONLY You can't write against a read only replica."] {
            let (result, is_refused) = says(line);
            let code = result.expect("the caller decides").unwrap_err().code().map(str::to_owned);
            assert_eq!(code.as_deref(), line[1..].split(' ').next(), "{line}");
            assert!(!is_refused, "{line}");
        }
        let lost = RedisError::from((ErrorKind::Io, "the connection was lost"));
        assert!(matches!(deletes().result(Err(lost)), Some(Err(_))));
        assert_eq!(says(":1").0, Some(Ok(Value::Int(1))));
    }
}
