//! What the callers of each token use of a limit, so that one token can't use all of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedSemaphorePermit;

/// The used parts of one limit, by the names of the tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares(Arc<Mutex<HashMap<String, usize>>>);

/// One part of a limit, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Shares,
    name: String,
}

impl Shares {
    /// A part for this name, unless it has so many.
    pub(crate) fn take(&self, name: &str, limit: usize) -> Option<Share> {
        let mut used = self.used();
        match used.get_mut(name) {
            Some(count) if *count >= limit => return None,
            Some(count) => *count += 1,
            None if limit == 0 => return None,
            None => drop(used.insert(name.to_owned(), 1)),
        }
        drop(used);
        Some(Share { shares: self.clone(), name: name.to_owned() })
    }

    fn used(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    pub(crate) fn is_of(&self, name: &str) -> bool {
        self.name == name
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut used = self.shares.used();
        if let Some(count) = used.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                used.remove(&self.name);
            }
        }
    }
}

/// The place of a request that acquires, in the limit of all and in that of its token.
#[derive(Debug)]
pub(crate) struct WaitPermit {
    pub(crate) _of_all: OwnedSemaphorePermit,
    /// None on the Unix socket.
    pub(crate) _of_token: Option<Share>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_has_so_many_parts_until_they_are_dropped() {
        let shares = Shares::default();
        let first = shares.take("a", 2).unwrap();
        let _second = shares.take("a", 2).unwrap();
        assert!(shares.take("a", 2).is_none() && shares.take("b", 2).is_some());
        drop(first);
        assert!(shares.take("a", 2).is_some(), "the one that was refused has taken nothing");
        assert_eq!(shares.used().len(), 1, "a name without parts is forgotten");
        assert!(shares.take("c", 0).is_none());
    }
}
