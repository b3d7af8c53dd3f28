//! The requests that callers have named, while this server answers them.
//!
//! The store knows the attempt of such a request by an id that each server makes from the request. So a caller repeats it at any server, and
//! no server keeps anything for it. Only what is open here is known here: a caller that repeats a request at this server, before the server
//! has seen that its former connection is gone, must not compete with itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold::Kind;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio_util::sync::CancellationToken;

/// A lock, and the id of a request for it.
type Key = (Kind, String, Vec<u8>);

/// The open requests with an id.
#[derive(Clone, Default)]
pub(crate) struct Requests(Arc<Mutex<HashMap<Key, Repeats>>>);

/// The open requests with one id.
#[derive(Default)]
struct Repeats {
    count: usize,
    sole: Arc<AsyncMutex<()>>,
    /// Ends the newest one when another one comes.
    newest: CancellationToken,
}

/// An open request with an id. No other one with this id is carried out at this server.
pub(crate) struct OpenRequest {
    _sole: OwnedMutexGuard<()>,
    place: Place,
}

/// A request among those with its id.
struct Place {
    requests: Requests,
    key: Key,
    superseded: CancellationToken,
}

impl Requests {
    /// Takes the place of an earlier request with this id, once that has ended. None if a later one has come meanwhile.
    pub(crate) async fn open(&self, kind: Kind, name: &str, id: Vec<u8>) -> Option<OpenRequest> {
        let (key, superseded) = ((kind, name.to_owned(), id), CancellationToken::new());
        let sole = {
            let mut table = self.table();
            let repeats = table.entry(key.clone()).or_default();
            repeats.count += 1;
            std::mem::replace(&mut repeats.newest, superseded.clone()).cancel();
            repeats.sole.clone()
        };
        let place = Place { requests: self.clone(), key, superseded };
        tokio::select! {
            biased;
            () = place.superseded.cancelled() => None,
            sole = sole.lock_owned() => Some(OpenRequest { _sole: sole, place }),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<Key, Repeats>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenRequest {
    /// Waits until another request with the same id comes.
    pub(crate) async fn superseded(&self) {
        self.place.superseded.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.requests.table();
        if let Some(repeats) = table.get_mut(&self.key) {
            repeats.count -= 1;
            if repeats.count == 0 {
                table.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;

    fn open(requests: &Requests) -> impl Future<Output = Option<OpenRequest>> + Send + 'static {
        let requests = requests.clone();
        async move { requests.open(Kind::Mutex, "a", vec![1; 16]).await }
    }

    #[tokio::test]
    async fn newest_request_takes_the_place_of_the_one_before() {
        let requests = Requests::default();
        let first = open(&requests).await.expect("the only one");
        assert!(first.superseded().now_or_never().is_none());
        let second = tokio::spawn(open(&requests));
        first.superseded().await;
        // The second one waits for the end of the first, and a third one ends its wait.
        let third = tokio::spawn(open(&requests));
        assert!(second.await.unwrap().is_none());
        assert!(!third.is_finished());
        drop(first);
        let third = tokio::time::timeout(Duration::from_secs(60), third).await.unwrap().unwrap();
        assert!(third.expect("the newest").superseded().now_or_never().is_none());
        assert!(requests.table().is_empty());
    }
}
