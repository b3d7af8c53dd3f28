//! The servers of a lock on which the programs of another library vote.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, invalid};
use crate::url::{Place, RedisUrl};

/// Independent servers. A lock is held by the holder of its key on more than half of them.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Servers(Arc<[RedisUrl]>);

impl Servers {
    pub(super) fn parse<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, Error> {
        let mut servers: Vec<RedisUrl> = Vec::new();
        for url in urls {
            let server = RedisUrl::of_node(url.as_ref())?;
            if !matches!(server.place, Place::Server(_) | Place::Socket(_)) {
                let what = "a bridge to a lock on several servers needs the address of each server";
                return Err(invalid(format!("{what}, not {server}")));
            }
            if servers.contains(&server) {
                return Err(invalid(format!("{server} votes twice")));
            }
            servers.push(server);
        }
        if servers.is_empty() {
            return Err(invalid("a bridge to a lock on several servers needs their addresses"));
        }
        Ok(Self(servers.into()))
    }

    pub(crate) fn urls(&self) -> &[RedisUrl] {
        &self.0
    }
}

impl Hash for Servers {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.iter().for_each(|server| server.to_string().hash(state));
    }
}

/// Without passwords.
impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&shown.join(","))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
