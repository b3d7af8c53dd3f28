//! The servers of a lock on which the programs of another library vote.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "redis")]
use leasehold_redis::RedisUrl;

use crate::error::{Error, invalid};

/// Independent servers. A lock is held by the holder of its key on more than half of them.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Servers {
    /// Their addresses, with passwords.
    urls: Arc<[String]>,
    /// The same without passwords.
    shown: Arc<str>,
}

impl Servers {
    #[cfg(not(feature = "redis"))]
    pub(super) fn parse<U: AsRef<str>>(_urls: impl IntoIterator<Item = U>) -> Result<Self, Error> {
        Err(invalid("a bridge to a lock on several servers needs the feature `redis` of leasehold"))
    }

    #[cfg(feature = "redis")]
    pub(super) fn parse<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, Error> {
        let urls: Vec<String> = urls.into_iter().map(|url| url.as_ref().to_owned()).collect();
        let mut servers: Vec<RedisUrl> = Vec::new();
        for url in &urls {
            let server = RedisUrl::of_node(url)?;
            if !server.is_one_server() {
                let what = "a bridge to a lock on several servers needs the address of each server";
                return Err(invalid(format!("{what}, not {server}")));
            }
            if servers.iter().any(|other| other.is_same_server(&server)) {
                return Err(invalid(format!("{server} votes twice")));
            }
            servers.push(server);
        }
        if servers.is_empty() {
            return Err(invalid("a bridge to a lock on several servers needs their addresses"));
        }
        let shown: Vec<_> = servers.iter().map(ToString::to_string).collect();
        Ok(Self { urls: urls.into(), shown: shown.join(",").into() })
    }

    pub(crate) fn urls(&self) -> &[String] {
        &self.urls
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}
