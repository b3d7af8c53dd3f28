//! A holder that was stopped for longer than its lease, and an object store that refuses its write by a condition.
//!
//! The token is stored with the object. A writer reads it, and gives up if it is higher than its own. Otherwise it writes on
//! condition that the object is unchanged since the read, so the check still holds at the moment of the write.

use std::sync::Mutex;
use std::time::Duration;

use leasehold::Token;
use leasehold::blocking::Client;

/// What an object store keeps: the version is the `ETag`, and `fence` a header of the user's.
#[derive(Clone, Default)]
struct Object {
    version: u64,
    fence: u64,
    body: String,
}

/// An object store with one object, whose writes can be made conditional as with `If-Match`.
#[derive(Default)]
struct Store(Mutex<Object>);

impl Store {
    fn get(&self) -> Object {
        self.0.lock().expect("no writer panics").clone()
    }

    fn put_if_match(&self, version: u64, fence: u64, body: &str) -> bool {
        let mut object = self.0.lock().expect("no writer panics");
        let matches = object.version == version;
        if matches {
            *object = Object { version: version + 1, fence, body: body.to_owned() };
        }
        matches
    }
}

/// Whether it was written. If not, a holder with a newer lease has written before.
fn write(store: &Store, body: &str, token: Token) -> bool {
    loop {
        let object = store.get();
        if object.fence > token.get() {
            return false;
        }
        if store.put_if_match(object.version, token.get(), body) {
            return true;
        }
    }
}

pub(crate) fn main() -> Result<(), leasehold::Error> {
    let store = Store::default();
    let client = Client::connect("memory:")?;

    // It acquires the lock, and is stopped before it writes. Its lease expires.
    let stopped = client.mutex("report").ttl(Duration::from_millis(100)).auto_renew(false).lock()?;
    let _lost = stopped.lost_within(Duration::from_secs(10));
    let next = client.mutex("report").lock()?;
    assert!(write(&store, "by the new holder", next.token()));

    // It continues, and does not know that it was stopped.
    assert!(!write(&store, "by the old holder", stopped.token()));
    assert_eq!(store.get().body, "by the new holder");
    println!("the object holds what was written {}", store.get().body);
    Ok(())
}
