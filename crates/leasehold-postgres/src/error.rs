//! Errors of the server and of the connection, with what to do, and what is known about the command.

use std::io;
use std::time::Duration;

use leasehold_core::{Effect, Failure};
use leasehold_store::StoreError;
use leasehold_store::certificates::{self, Parameters};
use tokio_postgres::Error;
use tokio_postgres::error::{Severity, SqlState};

const CERTIFICATES: Parameters =
    Parameters { authority: "sslrootcert", certificate: "sslcert", key: "sslkey" };

/// Maps an error. `may_be_done`: the statement, or the COMMIT behind it, had been sent.
pub(super) fn explain(error: Error, may_be_done: bool) -> StoreError {
    let failure = failure_of(&error, may_be_done);
    let message = match error.as_db_error() {
        Some(db) => of_server(db.code(), db.message()),
        None if error.is_closed() => "the connection to the server was closed".to_owned(),
        None => of_connection(&error),
    };
    StoreError::new(failure, message).caused_by(error)
}

/// An ordinary error of the server has rolled the transaction back. After a fatal one the outcome is unknown: a server that shuts down may
/// end a connection whose COMMIT it has already written.
fn failure_of(error: &Error, may_be_done: bool) -> Failure {
    match error.code() {
        Some(&(SqlState::LOCK_NOT_AVAILABLE | SqlState::T_R_DEADLOCK_DETECTED)) => Failure::Busy,
        _ if may_be_done && is_fatal(error) => Failure::Unknown,
        Some(code) => prospects(code),
        None if is_failed_handshake(error) => Failure::Transient(Effect::None),
        None => Failure::NotSent,
    }
}

/// Whether a repetition of what the server refused can succeed. The first two characters of a code are its class.
fn prospects(code: &SqlState) -> Failure {
    match (&code.code()[..2], code) {
        // Connections end, and transactions are repeated: an outage, or contention.
        ("08" | "40", _) | (_, &(SqlState::ADMIN_SHUTDOWN | SqlState::CRASH_SHUTDOWN)) => Failure::NotSent,
        // A pooler may answer with another session the next time.
        (_, &SqlState::INVALID_SQL_STATEMENT_NAME) => Failure::Transient(Effect::None),
        // Unsupported features, invalid data, dropped databases and schemas, missing rights, tables and functions.
        ("0A" | "22" | "3D" | "3F" | "42" | "44", _) => Failure::Permanent(Effect::None),
        // Passwords, disk, memory, the number of connections, standbys, and what is not known here.
        _ => Failure::Transient(Effect::None),
    }
}

/// Whether a TLS handshake failed, for example because a certificate has expired: it may be renewed.
fn is_failed_handshake(error: &Error) -> bool {
    error.to_string().contains("TLS handshake")
}

/// Whether the connection has ended, or is about to.
pub(super) fn is_fatal(error: &Error) -> bool {
    error.as_db_error().is_none_or(|db| db.parsed_severity() != Some(Severity::Error))
}

/// Whether the server does not accept a login.
pub(super) fn is_login_refused(error: &StoreError) -> bool {
    let driver = error.cause.as_ref().and_then(|cause| cause.downcast_ref::<Error>());
    let code = driver.and_then(Error::code);
    code.is_some_and(|code| {
        [SqlState::INVALID_PASSWORD, SqlState::INVALID_AUTHORIZATION_SPECIFICATION].contains(code)
    })
}

fn of_server(code: &SqlState, message: &str) -> String {
    let remedy = match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            "check the user, the password and pg_hba.conf"
        }
        SqlState::INVALID_CATALOG_NAME => "name a database that exists, as postgres://host/DATABASE",
        SqlState::TOO_MANY_CONNECTIONS => {
            "raise max_connections, lower ?connections=, or use a pooler with ?listen= for notifications"
        }
        SqlState::CANNOT_CONNECT_NOW => "the server starts, stops or recovers: it is tried again",
        SqlState::ADMIN_SHUTDOWN | SqlState::CRASH_SHUTDOWN => "the server ended the connection",
        SqlState::READ_ONLY_SQL_TRANSACTION => {
            "this is a standby or a read-only database: name the primary, or several hosts with \
             target_session_attrs=read-write"
        }
        SqlState::INSUFFICIENT_PRIVILEGE => {
            "let the owner grant this role SELECT, INSERT, UPDATE and DELETE on the schema's tables, without row-level security"
        }
        SqlState::UNDEFINED_TABLE | SqlState::INVALID_SCHEMA_NAME => {
            "the tables were dropped: open the client again, which creates them"
        }
        SqlState::DISK_FULL => "the server's disk is full: free some space",
        SqlState::LOCK_NOT_AVAILABLE => {
            return format!("another session keeps the lock's row (pg_blocking_pids names it): {message}");
        }
        SqlState::INVALID_SQL_STATEMENT_NAME => {
            "another session answers: a pooler is in between, so use ?pooler=yes"
        }
        SqlState::QUERY_CANCELED => "the server's statement_timeout ended it, or another program canceled it",
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT => {
            "this process was stopped within a transaction, and the server rolled it back"
        }
        _ => return format!("PostgreSQL failed ({}): {message}", code.code()),
    };
    format!("{message} ({}): {remedy}", code.code())
}

fn of_connection(error: &Error) -> String {
    let mut what = error.to_string();
    let mut kind = None;
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        what = format!("{what}: {inner}");
        kind = inner.downcast_ref().map(io::Error::kind).or(kind);
        source = inner.source();
    }
    if let Some(explained) = certificates::explain(&what, CERTIFICATES) {
        return explained;
    }
    match kind {
        Some(io::ErrorKind::NotFound) => {
            format!(
                "{what}: there is no such Unix socket: check the folder in host=, and that the server runs"
            )
        }
        Some(io::ErrorKind::ConnectionRefused) => {
            format!("{what}: check the host and the port, and that the server runs")
        }
        _ => what,
    }
}

/// The server did not answer in time.
pub(super) fn late(limit: Duration, may_be_done: bool) -> StoreError {
    let failure = if may_be_done { Failure::Unknown } else { Failure::NotSent };
    StoreError::new(failure, format!("no answer within {limit:?}"))
}

/// A row has a value that no store writes.
/// Nothing was changed.
pub(super) fn contradictory() -> StoreError {
    StoreError::new(
        Failure::Permanent(Effect::None),
        "the rows of a lock in the tables contradict each other: find out who writes them besides leasehold",
    )
}

pub(super) fn damaged(what: &str) -> StoreError {
    StoreError::new(
        Failure::NotSent,
        format!("a row has an unknown value in {what}: another program wrote it"),
    )
}

#[cfg(test)]
mod tests {
    use tokio_postgres::{Config, NoTls};

    use super::*;

    #[test]
    fn refusals_that_may_pass_are_told_from_those_that_stay() {
        let permanent = [
            SqlState::INSUFFICIENT_PRIVILEGE,
            SqlState::UNDEFINED_TABLE,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::INVALID_CATALOG_NAME,
            SqlState::INVALID_SCHEMA_NAME,
            SqlState::FEATURE_NOT_SUPPORTED,
        ];
        for code in permanent {
            assert_eq!(prospects(&code), Failure::Permanent(Effect::None), "{code:?}");
        }
        let passing = [
            SqlState::INVALID_PASSWORD,
            SqlState::INVALID_AUTHORIZATION_SPECIFICATION,
            SqlState::READ_ONLY_SQL_TRANSACTION,
            SqlState::DISK_FULL,
            SqlState::TOO_MANY_CONNECTIONS,
            SqlState::CANNOT_CONNECT_NOW,
            SqlState::INVALID_SQL_STATEMENT_NAME,
            SqlState::from_code("XX000"),
        ];
        for code in passing {
            assert_eq!(prospects(&code), Failure::Transient(Effect::None), "{code:?}");
        }
        for code in
            [SqlState::ADMIN_SHUTDOWN, SqlState::CONNECTION_FAILURE, SqlState::T_R_SERIALIZATION_FAILURE]
        {
            assert_eq!(prospects(&code), Failure::NotSent, "{code:?}");
        }
    }

    #[tokio::test]
    async fn connection_that_cannot_be_made_says_what_to_check() {
        let folder = tempfile::tempdir().unwrap();
        let mut socket = Config::new();
        socket.user("user").host_path(folder.path());
        let mut port = Config::new();
        // No program listens on this port.
        port.user("user").host("127.0.0.1").port(1);
        for (config, remedy) in [(socket, "no such Unix socket"), (port, "check the host and the port")] {
            let error = config.connect(NoTls).await.err().expect("it is refused");
            let message = explain(error, false).message;
            assert!(message.contains(remedy) && message.contains("os error"), "{message}");
        }
    }
}
