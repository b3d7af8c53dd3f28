//! What is watched: all locks of a store, or those of one name.

use leasehold::{Client, Error, Kind, LockInfo, Token};

use crate::inspect::is_in_use;

/// The locks to watch.
#[cfg_attr(not(feature = "watch"), allow(dead_code))]
pub(super) struct Source {
    pub(super) client: Client,
    pub(super) url: String,
    /// One name only.
    pub(super) name: Option<String>,
}

impl Source {
    /// The locks in use, ordered by name.
    pub(super) async fn poll(&self) -> Result<Vec<LockInfo>, Error> {
        let Some(name) = &self.name else { return self.client.list().await };
        let mut locks = Vec::new();
        for kind in Kind::ALL {
            locks.push(self.client.inspect(*kind, name).await?);
        }
        locks.retain(is_in_use);
        Ok(locks)
    }

    /// Releases the holder with this token, and no later one.
    #[cfg_attr(not(feature = "watch"), allow(dead_code))]
    pub(super) async fn release(&self, kind: Kind, name: &str, token: Token) -> Result<bool, Error> {
        Ok(self.client.force_release_token(kind, name, token).await?.is_some())
    }
}
