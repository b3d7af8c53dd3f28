//! Parses the address of a store. The printable form of an address contains no secret.

use std::fmt;

#[cfg(feature = "postgres")]
use leasehold_postgres::PostgresUrl;
#[cfg(feature = "redis")]
use leasehold_redis::RedisUrl;
#[cfg(feature = "redlock")]
use leasehold_redlock::RedlockUrl;
#[cfg(all(feature = "sqlite", unix))]
use leasehold_sqlite::SqliteUrl;
use leasehold_store::OpenError;
use leasehold_store::credentials::CredentialCache;

/// The schemes of the addresses that [`Client::connect`](crate::Client::connect) accepts, including those whose feature is off.
///
/// ```
/// assert!(leasehold::SCHEMES.contains(&"memory"));
/// ```
pub const SCHEMES: &[&str] = &[
    "memory",
    "sqlite",
    "redis",
    "rediss",
    "redis+unix",
    "redis-sentinel",
    "redis-cluster",
    "redlock",
    "postgres",
    "postgresql",
];

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    Memory {
        name: String,
    },
    #[cfg(feature = "redis")]
    Redis(Box<RedisUrl>),
    #[cfg(feature = "redlock")]
    Redlock(Box<RedlockUrl>),
    #[cfg(feature = "postgres")]
    Postgres(Box<PostgresUrl>),
    #[cfg(all(feature = "sqlite", unix))]
    Sqlite(SqliteUrl),
}

impl StoreUrl {
    pub(crate) fn parse(url: &str) -> Result<Self, OpenError> {
        let Some((scheme, rest)) = url.split_once(':') else {
            // The text may be a misplaced password, so the message does not contain it.
            return Err(OpenError::invalid(format!("a store's address begins with a scheme: {}", schemes())));
        };
        match scheme {
            "memory" => Ok(Self::Memory { name: rest.trim_start_matches("//").to_owned() }),
            #[cfg(all(feature = "sqlite", unix))]
            "sqlite" => Ok(Self::Sqlite(SqliteUrl::parse(rest)?)),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" | "redis-sentinel" | "redis-cluster" => {
                Ok(Self::Redis(Box::new(RedisUrl::parse(scheme, rest)?)))
            }
            #[cfg(feature = "redlock")]
            "redlock" => Ok(Self::Redlock(Box::new(RedlockUrl::parse(rest)?))),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Ok(Self::Postgres(Box::new(PostgresUrl::parse(rest)?))),
            _ if SCHEMES.contains(&scheme) => Err(disabled(scheme)),
            _ if is_scheme(scheme) => Err(OpenError::invalid(format!(
                "no store has the scheme {scheme}:; the schemes are {}",
                schemes()
            ))),
            _ => Err(OpenError::invalid(format!("a store's address begins with a scheme: {}", schemes()))),
        }
    }
}

impl StoreUrl {
    /// Checks that it leaves out a password of a server, so that credentials of the program's are used.
    ///
    /// # Errors
    ///
    /// They would never be used.
    pub(crate) fn check_credentials(&self) -> Result<(), OpenError> {
        let takes_credentials = match self {
            Self::Memory { .. } => None,
            #[cfg(all(feature = "sqlite", unix))]
            Self::Sqlite(_) => None,
            #[cfg(feature = "redis")]
            Self::Redis(url) => Some(url.takes_credentials()),
            #[cfg(feature = "redlock")]
            Self::Redlock(url) => Some(url.nodes.iter().any(RedisUrl::takes_credentials)),
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => Some(url.takes_credentials()),
        };
        match takes_credentials {
            None => Err(no_credentials(self)),
            Some(false) => Err(two_passwords(self)),
            Some(true) => Ok(()),
        }
    }

    /// The same address with credentials of the program's, where it leaves out a password.
    #[cfg_attr(
        not(any(feature = "redis", feature = "postgres")),
        expect(unused_variables, reason = "no store takes any")
    )]
    pub(crate) fn with_credentials(self, cache: &CredentialCache) -> Self {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(url) => Self::Redis(Box::new(url.with_credentials(cache))),
            #[cfg(feature = "redlock")]
            Self::Redlock(mut url) => {
                url.nodes = url.nodes.iter().map(|node| node.with_credentials(cache)).collect();
                Self::Redlock(url)
            }
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => Self::Postgres(Box::new(url.with_credentials(cache))),
            other => other,
        }
    }
}

#[cfg(feature = "redlock")]
impl From<RedlockUrl> for StoreUrl {
    fn from(url: RedlockUrl) -> Self {
        Self::Redlock(Box::new(url))
    }
}

/// The error for a provider of credentials where no server wants any.
pub(crate) fn no_credentials(store: &impl fmt::Display) -> OpenError {
    OpenError::invalid(format!("{store}: no credentials are needed for this store"))
}

/// The error for a provider of credentials that would never be asked.
pub(crate) fn two_passwords(store: &impl fmt::Display) -> OpenError {
    OpenError::invalid(format!(
        "{store}: the password is in the address or comes from a provider, not from both"
    ))
}

/// The error for an address that this build has no store for.
fn disabled(scheme: &str) -> OpenError {
    let feature = match scheme {
        "sqlite" if !cfg!(unix) => {
            return OpenError::unsupported("sqlite: needs Unix");
        }
        "sqlite" => "sqlite",
        "rediss" => "tls",
        "redlock" => "redlock",
        "postgres" | "postgresql" => "postgres",
        _ => "redis",
    };
    OpenError::needs_feature(&format!("{scheme}:…"), feature)
}

fn is_scheme(word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    word.starts_with(|c: char| c.is_ascii_alphabetic()) && word.chars().all(is_part)
}

fn schemes() -> String {
    SCHEMES.iter().map(|scheme| format!("{scheme}:")).collect::<Vec<_>>().join(", ")
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { name } => write!(f, "memory:{name}"),
            #[cfg(feature = "redis")]
            Self::Redis(url) => url.fmt(f),
            #[cfg(feature = "redlock")]
            Self::Redlock(url) => url.fmt(f),
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => url.fmt(f),
            #[cfg(all(feature = "sqlite", unix))]
            Self::Sqlite(url) => url.fmt(f),
        }
    }
}

#[cfg(all(test, feature = "redlock", feature = "sqlite", feature = "tls"))]
mod tests {
    use super::*;

    fn sqlite(path: &str, is_durable: bool) -> StoreUrl {
        StoreUrl::Sqlite(SqliteUrl::new(path, is_durable).unwrap())
    }

    #[test]
    fn address_formats_are_parsed() {
        assert_eq!(StoreUrl::parse("memory:").unwrap(), StoreUrl::Memory { name: String::new() });
        assert_eq!(StoreUrl::parse("memory:jobs").unwrap(), StoreUrl::Memory { name: "jobs".to_owned() });
        assert_eq!(StoreUrl::parse("sqlite:a/b.db").unwrap(), sqlite("a/b.db", false));
        assert_eq!(StoreUrl::parse("sqlite:/a/b.db").unwrap(), sqlite("/a/b.db", false));
        assert_eq!(StoreUrl::parse("sqlite:///a/b.db").unwrap(), sqlite("/a/b.db", false));
        assert_eq!(StoreUrl::parse("sqlite:a?b").unwrap(), sqlite("a?b", false));
        assert_eq!(StoreUrl::parse("sqlite:a?synchronous=full").unwrap(), sqlite("a", true));
    }

    #[test]
    fn invalid_address_is_refused_with_the_list_of_schemes() {
        for url in ["", "locks.db", "mysql://a", ":x", "a b:c"] {
            let error = StoreUrl::parse(url).unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains("memory:, sqlite:"), "{error}");
        }
        for url in
            ["sqlite:", "sqlite::memory:", "sqlite://host/a", "sqlite:a?synchronous=no", "sqlite:a?sync=full"]
        {
            assert!(StoreUrl::parse(url).unwrap_err().is_invalid(), "{url}");
        }
    }

    #[test]
    fn password_is_never_printed() {
        for url in [
            "redis://:hunter2@host/1",
            "redis://me:hun@hunter2@host",
            "redis+unix:///socket?pass=hunter2",
            "redlock://me:hunter2@a,b,c",
            "redlock:redis://:hunter2@a redis://:hunter2@b ?unfenced",
        ] {
            let url = StoreUrl::parse(url).unwrap();
            assert!(!format!("{url} {url:?}").contains("hunter2"), "{url}");
        }
        for url in [
            "redis://:hunter2@host:port",
            "redlock://:hunter2@a,a",
            "redlock://a?pass=hunter2",
            "redlock:redis://a hunter2",
            "redlock:redis://a ?hunter2",
            "redis://:hunter2@",
            "redis://h?pass=hunter2",
            "mysql://me:hunter2@host",
            "hunter2",
            "hunter2 x:y",
        ] {
            let error = StoreUrl::parse(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
