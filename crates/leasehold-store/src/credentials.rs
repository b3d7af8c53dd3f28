//! Credentials that a program provides while its clients run: tokens that expire, and passwords that are replaced.
//!
//! A provider is asked once for each server, and its answer serves all connections of a client to that server ([`Account`]). What is
//! not here: how a server is logged in to, which the stores know.

mod account;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

pub use self::account::{Account, CredentialCache, Issued, PROVIDER_TIMEOUT};
use crate::{BoxFuture, Cause};

/// A user and a password, and how long a server accepts them. Their `Debug` form shows no password.
///
/// ```
/// use std::time::Duration;
/// use leasehold_store::credentials::Credentials;
///
/// let token = Credentials::new("token").user("locks").valid_for(Duration::from_secs(900));
/// assert!(!format!("{token:?}").contains("token"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) expires: Option<Instant>,
}

impl Credentials {
    /// This password, of the user that the address names, or else of the server's default user. It is valid until the server refuses it.
    pub fn new(password: impl Into<String>) -> Self {
        Self { user: None, password: Some(password.into()), expires: None }
    }

    /// No login, for a server that wants none.
    #[must_use]
    pub const fn none() -> Self {
        Self { user: None, password: None, expires: None }
    }

    /// Sets the user, in place of the one that the address names.
    #[must_use]
    pub fn user(self, user: impl Into<String>) -> Self {
        Self { user: Some(user.into()), ..self }
    }

    /// Sets how long the server accepts them, from now on. The provider is asked for others when two thirds of this have passed.
    #[must_use]
    pub fn valid_for(self, lifetime: Duration) -> Self {
        Self { expires: Instant::now().checked_add(lifetime), ..self }
    }

    fn have_expired(&self) -> bool {
        self.expires.is_some_and(|expires| expires <= Instant::now())
    }

    /// As [`Self::valid_for`], with the time at which they expire, by the clock of this machine.
    #[must_use]
    pub fn expires_at(self, time: SystemTime) -> Self {
        self.valid_for(time.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.expires.map(|expires| expires.saturating_duration_since(Instant::now()));
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("valid_for", &left)
            .finish_non_exhaustive()
    }
}

/// The server that a provider gives credentials for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CredentialRequest {
    /// What the server is.
    pub role: ServerRole,
    /// Its name or its network address; the path of a Unix socket.
    pub host: String,
    /// None for a Unix socket of Redis.
    pub port: Option<u16>,
    /// The user that the address of the store names.
    pub user: Option<String>,
}

impl CredentialRequest {
    /// A request for this server.
    pub fn new(role: ServerRole, host: impl Into<String>, port: Option<u16>, user: Option<String>) -> Self {
        Self { role, host: host.into(), port, user }
    }
}

impl fmt::Display for CredentialRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role.as_str(), self.host)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// What a server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServerRole {
    /// A Redis server: a single one, the master that sentinels name, or one of a quorum.
    Redis,
    /// A sentinel.
    Sentinel,
    /// A node of a Redis cluster.
    ClusterNode,
    /// A PostgreSQL server.
    Postgres,
}

impl ServerRole {
    /// `redis`, `sentinel`, `cluster-node` or `postgres`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Sentinel => "sentinel",
            Self::ClusterNode => "cluster-node",
            Self::Postgres => "postgres",
        }
    }
}

type Provide = dyn Fn(CredentialRequest) -> BoxFuture<Result<Credentials, Cause>> + Send + Sync;

/// Code of the program that gives credentials.
#[derive(Clone)]
pub struct CredentialProvider {
    provide: Arc<Provide>,
    /// How often it was asked to give others, although the last ones last.
    refreshes: watch::Sender<u64>,
}

impl CredentialProvider {
    /// A provider that calls this.
    pub fn new<P, F, E>(provide: P) -> Self
    where
        P: Fn(CredentialRequest) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let provide = Arc::new(move |request| -> BoxFuture<_> {
            let providing = provide(request);
            Box::pin(async move { providing.await.map_err(|error| Cause::from(error.into())) })
        });
        Self { provide, refreshes: watch::Sender::default() }
    }

    /// Has others asked for, in place of what it has given so far.
    pub fn refresh(&self) {
        self.refreshes.send_modify(|count| *count += 1);
    }

    fn provide(&self, request: CredentialRequest) -> BoxFuture<Result<Credentials, Cause>> {
        (self.provide)(request)
    }
}

impl fmt::Debug for CredentialProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialProvider")
    }
}
