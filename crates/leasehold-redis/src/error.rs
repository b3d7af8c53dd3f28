//! Classifies and explains errors of the server and of the connection.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Answer, Effect, Failure};
use leasehold_store::certificates::{self, Parameters};
use leasehold_store::{Cause, StoreError};
use redis::{ErrorKind, RedisError};

use super::limits::ANSWER_TIMEOUT;
use crate::url::Host;

/// The prefix of errors of this crate that have the driver's type.
pub(super) const OWN: &str = "leasehold";

/// As `OWN`, for what does not change by waiting: a right that the user lacks.
pub(super) const OWN_REFUSAL: &str = "leasehold refuses";

/// The error of this crate for a server that answers and executes no writes.
pub(super) const PAUSED: &str =
    "the server answers, but takes no writes at present: CLIENT PAUSE, or a failover that is under way";

/// Why a call has no answer.
#[derive(Clone)]
pub(super) enum CallError {
    /// MOVED: another node owns the slot.
    Moved(Host),
    /// ASK: another node serves this one command.
    Ask(Host),
    /// The slot is migrating, or the cluster is failing over.
    TryAgain(StoreError),
    /// The attempt was queued, but the subscription failed because the slot is migrating.
    NotSubscribed(Box<Answer>),
    /// The node is a replica.
    ReadOnly(StoreError),
    /// No connection: the command was not sent.
    NotConnected(StoreError),
    /// The connection was lost: the command may have taken effect.
    ConnectionLost(StoreError),
    /// No answer in time: the command may have taken effect.
    Timeout(StoreError),
    /// The user lacks a right, or a command is disabled.
    Denied(StoreError),
    Failed(StoreError),
}

/// What became of a call.
pub(super) type Answered = Result<Answer, CallError>;

impl CallError {
    /// Whether this call has failed with its connection, which was lost or does not answer.
    pub(super) fn is_of_connection(answered: &Answered) -> bool {
        matches!(answered, Err(Self::ConnectionLost(_) | Self::Timeout(_)))
    }
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Moved(_) | CallError::Ask(_) => Self::new(
                Failure::Transient(Effect::None),
                "this server is a node of a cluster: write redis-cluster://host[:port],…",
            ),
            CallError::NotSubscribed(_) => Self::new(
                Failure::Unknown,
                "the lock's hash slot is being moved to another node: try again soon",
            ),
            CallError::TryAgain(error)
            | CallError::ReadOnly(error)
            | CallError::NotConnected(error)
            | CallError::ConnectionLost(error)
            | CallError::Timeout(error)
            | CallError::Denied(error)
            | CallError::Failed(error) => error,
        }
    }
}

impl From<&RedisError> for CallError {
    fn from(error: &RedisError) -> Self {
        let redirect = || error.redirect_node().and_then(|(host, _)| Host::of_redirect(host));
        match (error.code(), redirect()) {
            (Some("MOVED"), Some(host)) => Self::Moved(host),
            (Some("ASK"), Some(host)) => Self::Ask(host),
            (Some("TRYAGAIN" | "CLUSTERDOWN" | "MOVED" | "ASK"), _) => Self::TryAgain(store_error(error)),
            // A WAIT that a planned failover ends says the second.
            _ if matches!(code(error), Some("READONLY" | "UNBLOCKED")) => Self::ReadOnly(store_error(error)),
            _ if error.is_timeout() => Self::Timeout(store_error(error)),
            _ if error.is_unrecoverable_error() => Self::ConnectionLost(store_error(error)),
            _ if is_denied(&error.to_string()) => Self::Denied(store_error(error)),
            _ => Self::Failed(store_error(error)),
        }
    }
}

/// Whether an address may be wrong. It decides what an error message advises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddressState {
    /// Given by the user; no server has answered there yet.
    Unproven,
    /// A server has answered there, or other servers name the address.
    Proven,
}

impl AddressState {
    pub(super) fn no_answer(self, limit: Duration) -> String {
        let advice = match self {
            Self::Unproven => "check the host and the port, and whether it is one for TLS",
            Self::Proven => "the server or the network is down, or too busy",
        };
        format!("no answer within {limit:?}: {advice}")
    }

    /// The error of a failed connection attempt.
    pub(crate) fn store_error(self, error: &RedisError) -> StoreError {
        let known = store_error(error);
        let failure = known.failure.before_sending();
        known.known_as(failure).saying(self.explain(error))
    }

    pub(super) fn explain(self, error: &RedisError) -> String {
        let what = match (self, Refusal::of(error)) {
            (_, None) => return explain(error),
            (Self::Unproven, Some(Refusal::ConnectionRefused)) => {
                "connection refused: check the host and the port, and that the server runs"
            }
            (Self::Proven, Some(Refusal::ConnectionRefused)) => {
                "connection refused: the server has stopped, or is being restarted"
            }
            (Self::Unproven, Some(Refusal::NoSocket)) => {
                "there is no such Unix socket: check the path, and that the server runs and has this path as its \
                 unixsocket"
            }
            (Self::Proven, Some(Refusal::NoSocket)) => {
                "its Unix socket is gone: the server has stopped, or is being restarted"
            }
            (Self::Unproven, Some(Refusal::UnknownHost)) => {
                "the host's name is not known: check how it is written, and the name server"
            }
            (Self::Proven, Some(Refusal::UnknownHost)) => {
                "the host's name is not known at present: check the name server"
            }
        };
        what.to_owned()
    }
}

/// Why a connection was refused.
enum Refusal {
    ConnectionRefused,
    NoSocket,
    UnknownHost,
}

impl Refusal {
    fn of(error: &RedisError) -> Option<Self> {
        let text = error.to_string();
        if text.contains("lookup address") || text.contains("resolve") {
            return Some(Self::UnknownHost);
        }
        // The redis crate reports a missing socket as a refusal too.
        let is_missing = io_error(error).is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        error.is_connection_refusal().then_some(if is_missing {
            Self::NoSocket
        } else {
            Self::ConnectionRefused
        })
    }
}

/// The cause of a timeout that says how long an answer was waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoAnswer(pub(super) Duration);

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no answer within {:.1?}", self.0)
    }
}

impl Error for NoAnswer {}

impl From<NoAnswer> for RedisError {
    fn from(late: NoAnswer) -> Self {
        std::io::Error::new(std::io::ErrorKind::TimedOut, late).into()
    }
}

fn io_error(error: &RedisError) -> Option<&std::io::Error> {
    error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?.downcast_ref()
}

/// A connection was lost with a command in flight, for the reason that the driver gave, if any.
pub(super) fn lost(cause: Option<Cause>) -> StoreError {
    let mut lost = StoreError::new(Failure::Unknown, "the connection was lost");
    lost.cause = cause;
    lost
}

/// The error of a command, with what is known about its effect and its prospects.
pub(crate) fn store_error(error: &RedisError) -> StoreError {
    let explained = StoreError::new(failure_of(error), explain(error));
    // An error that this crate made is the explanation.
    if own_message(error).is_some() { explained } else { explained.caused_by(error.clone()) }
}

/// Errors that the server raises before it runs a script, or at its first write, had no effect. A right may be missing at any
/// command of a script, and any other error leaves the effect unknown.
fn failure_of(error: &RedisError) -> Failure {
    let inside = if is_inside_script(error) { Effect::Possible } else { Effect::None };
    match code(error) {
        Some("TRYAGAIN") => Failure::Busy,
        _ if own_message(error) == Some(PAUSED) => Failure::Busy,
        _ if error.to_string().starts_with(OWN_REFUSAL) => Failure::Permanent(Effect::None),
        // An outage of the cluster.
        Some("CLUSTERDOWN" | "ASK" | "NOSCRIPT") => Failure::NotSent,
        Some("NOPERM") => Failure::Permanent(inside),
        Some("WRONGTYPE" | "CLOCKAHEAD") => Failure::Permanent(Effect::Possible),
        Some(
            "OOM" | "NOREPLICAS" | "MISCONF" | "BUSY" | "LOADING" | "NOAUTH" | "WRONGPASS" | "READONLY"
            | "MOVED" | "CROSSSLOT" | "MASTERDOWN",
        ) => Failure::Transient(Effect::None),
        _ if error.is_connection_refusal() => Failure::NotSent,
        _ if is_unknown_command(error) => Failure::Permanent(inside),
        _ if error.kind() == ErrorKind::AuthenticationFailed || of_certificate(error).is_some() => {
            Failure::Transient(Effect::None)
        }
        _ if error.is_timeout() || error.is_unrecoverable_error() => Failure::Unknown,
        Some(_) => Failure::Transient(Effect::Possible),
        None if own_message(error).is_some() => Failure::Transient(Effect::Possible),
        None => Failure::Unknown,
    }
}

/// Whether a command of a script failed, and not the script as a whole.
fn is_inside_script(error: &RedisError) -> bool {
    error.to_string().contains("script:")
}

/// The command was renamed or disabled, or the server is too old for it. Scripts report it in other words.
fn is_unknown_command(error: &RedisError) -> bool {
    is_unknown(&error.to_string())
}

/// The parameters of an address that name certificate files.
const CERTIFICATES: Parameters = Parameters { authority: "ca", certificate: "cert", key: "key" };

fn of_certificate(error: &RedisError) -> Option<String> {
    certificates::explain(&error.to_string(), CERTIFICATES)
}

/// The error code. An error inside a script has its code in the detail text; a missing right is only described there.
fn code(error: &RedisError) -> Option<&str> {
    const INSIDE: [&str; 7] =
        ["OOM", "WRONGTYPE", "READONLY", "NOPERM", "NOREPLICAS", "MISCONF", "CLOCKAHEAD"];
    let detail = error.detail().unwrap_or_default();
    let says = |word: &&str| detail.split([' ', ':']).any(|part| part.trim_start_matches('-') == *word);
    let denied = is_denied_inside(detail).then_some("NOPERM");
    denied.or_else(|| INSIDE.into_iter().find(says)).or(error.code())
}

/// How Redis 6.2 and 7.0, and Valkey 9, describe a right that is missing inside a script.
fn is_denied_inside(detail: &str) -> bool {
    detail.contains("The user executing the script can't") || detail.contains("ACL failure in script")
}

/// Whether an error says that the user lacks a right. Redis 6.2 and 7.0, and Valkey 9, say it in other words inside a script.
pub(super) fn lacks_a_right(error: &str) -> bool {
    let text = error.to_lowercase();
    ["noperm", "the user executing the script can't", "acl failure in script"]
        .iter()
        .any(|word| text.contains(word))
}

/// Whether the server does not support RESP3. Its error text repeats the command, including the password.
pub(super) fn is_resp3_unknown(error: &RedisError) -> bool {
    let text = error.to_string().to_lowercase();
    error.kind() == ErrorKind::RESP3NotSupported || text.contains("unknown command") && text.contains("hello")
}

/// Whether the server does not accept a login, or wants one.
pub(super) fn is_login_refused(error: &RedisError) -> bool {
    matches!(error.code(), Some("WRONGPASS" | "NOAUTH")) || error.kind() == ErrorKind::AuthenticationFailed
}

/// Whether it says that, or that a command is disabled.
fn is_denied(error: &str) -> bool {
    lacks_a_right(error) || is_unknown(error)
}

/// Whether an error says that a command does not exist: the server is too old for it, or it was renamed or disabled.
pub(super) fn is_unknown(error: &str) -> bool {
    let text = error.to_lowercase();
    text.contains("unknown command") || text.contains("unknown redis command")
}

/// Explains an error and its remedy. For connection attempts see [`AddressState::explain`].
pub(super) fn explain(error: &RedisError) -> String {
    if Refusal::of(error).is_some() {
        return AddressState::Unproven.explain(error);
    }
    if code(error).is_none()
        && let Some(explained) = of_certificate(error)
    {
        return explained;
    }
    let text = error.to_string();
    let what = match code(error) {
        Some("NOAUTH") => {
            "the server wants a password: write redis://user:password@host, or redis+unix:///PATH?pass=PASSWORD"
        }
        Some("WRONGPASS") => "the server does not accept this user and password",
        Some("NOPERM") => {
            "this user may not run scripts or use these keys and channels: docs/operations.md has the rule that suffices"
        }
        Some("READONLY") => "this is a replica, which can't be written: name the master",
        Some("OOM") => "the server's memory is full: raise maxmemory, or free some",
        Some("NOREPLICAS") => {
            "the server has fewer replicas than min-replicas-to-write asks for, and takes no writes"
        }
        Some("MISCONF") => {
            "the server can't write its files, and takes no writes (stop-writes-on-bgsave-error)"
        }
        Some("BUSY") => "the server is busy with a long script: end it with SCRIPT KILL",
        Some("LOADING") => "the server is loading its data: try again soon",
        Some("WRONGTYPE") => "another program uses one of the lock's keys for something else",
        Some("CLOCKAHEAD") => {
            "the last id of the stream leasehold:4:clock (in a cluster leasehold:4:clock:{N}) is beyond the year 2109, so no \
             token can follow it: delete that key"
        }
        // The key of a lock and the clock of a single server are in different slots.
        Some("CROSSSLOT") => {
            "this server is a node of a cluster: write redis-cluster://host[:port],… with any of its nodes"
        }
        Some("TRYAGAIN") => "the lock's hash slot is being moved to another node: try again soon",
        Some("CLUSTERDOWN") => "the cluster is down: some of its hash slots have no master",
        Some("MASTERDOWN") => "this replica has lost its master: name the master",
        _ if text.contains("cluster support disabled") => "this is no cluster: write redis://host[:port]",
        // The server repeats the command, which may contain a password.
        _ if is_unknown_command(error) => {
            "the server does not know a command that is needed: it has to be Redis 6.2 or newer"
        }
        _ if text.contains("max number of clients") => {
            "the server's limit of clients is reached: raise maxclients, or close connections"
        }
        _ if text.contains("corrupt message") || text.contains("InvalidContentType") => {
            "what answers there does not speak TLS: write redis://, or name the TLS port"
        }
        _ if error.kind() == ErrorKind::Parse => "what answers there is no Redis server",
        _ if error.is_timeout() => {
            let late = io_error(error).and_then(|error| error.get_ref()?.downcast_ref::<NoAnswer>());
            return late.copied().unwrap_or(NoAnswer(ANSWER_TIMEOUT)).to_string();
        }
        _ if error.kind() == ErrorKind::AuthenticationFailed => {
            "the server does not accept this user and password"
        }
        _ if error.is_connection_dropped() => "the connection was lost",
        _ => {
            return match (own_message(error), error.code()) {
                (Some(message), _) => message.to_owned(),
                (None, Some(code)) => format!("the server answered with the error {code}: {text}"),
                (None, None) => format!("the connection failed ({}): {text}", error.category()),
            };
        }
    };
    what.to_owned()
}

/// The explanation in an error that this crate made, in the driver's type.
fn own_message(error: &RedisError) -> Option<&str> {
    error.detail().filter(|_| error.kind() == ErrorKind::Client && error.to_string().starts_with(OWN))
}

pub(super) fn slot_unassigned() -> StoreError {
    StoreError::new(
        Failure::NotSent,
        "no node has the lock's hash slot: the cluster is down, or not all of it is there yet",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(answer: &str) -> Failure {
        let parsed = redis::parse_redis_value(format!("-{answer}\r\n").as_bytes());
        let error = parsed.and_then(redis::Value::extract_error).expect_err("it is an error");
        store_error(&error).failure
    }

    #[test]
    fn refusals_that_may_pass_are_told_from_those_that_stay() {
        let inside = "script: 0123456789abcdef, on @user_script:1.";
        let permanent = [
            ("NOPERM this user has no permissions to run the 'evalsha' command".to_owned(), Effect::None),
            (
                format!("ERR The user executing the script can't run this command or subcommand {inside}"),
                Effect::Possible,
            ),
            (
                format!(
                    "NOPERM ACL failure in script: User locks has no permissions to run the 'hdel' command {inside}"
                ),
                Effect::Possible,
            ),
            (format!("ERR Unknown Redis command called from script {inside}"), Effect::Possible),
            ("ERR unknown command 'EVALSHA', with args beginning with: 'x'".to_owned(), Effect::None),
            (
                format!("WRONGTYPE Operation against a key holding the wrong kind of value {inside}"),
                Effect::Possible,
            ),
        ];
        for (answer, effect) in permanent {
            assert_eq!(failure(&answer), Failure::Permanent(effect), "{answer}");
        }
        let passing = [
            "OOM command not allowed when used memory > 'maxmemory'.",
            "NOREPLICAS Not enough good replicas to write.",
            "MISCONF Redis is configured to save RDB snapshots",
            "LOADING Redis is loading the dataset in memory",
            "NOAUTH Authentication required.",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "READONLY You can't write against a read only replica.",
            "MASTERDOWN Link with MASTER is down",
            "BUSY Redis is busy running a script.",
        ];
        for answer in passing {
            assert_eq!(failure(answer), Failure::Transient(Effect::None), "{answer}");
        }
        assert_eq!(failure("TRYAGAIN Multiple keys request during rehashing of slot"), Failure::Busy);
        assert_eq!(failure("CLUSTERDOWN The cluster is down"), Failure::NotSent);
        assert_eq!(failure("ODD what no one has foreseen"), Failure::Transient(Effect::Possible));
    }

    #[test]
    fn server_that_is_no_master_any_more_is_known_by_either_error() {
        for line in [
            "READONLY You can't write against a read only replica.",
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        ] {
            let error = redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
                .and_then(redis::Value::extract_error);
            assert!(matches!(CallError::from(&error.unwrap_err()), CallError::ReadOnly(_)), "{line}");
        }
    }
}
