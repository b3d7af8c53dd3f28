//! Two accounts at once, without a deadlock, in any order of their names.

use leasehold::{Client, Error, MutexSet};

pub(crate) fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        for (from, to) in [("account:7", "account:9"), ("account:9", "account:7")] {
            let accounts = MutexSet::new([from, to].map(|name| client.mutex(name)));
            let guard = accounts.lock().await?;
            println!("from {from} with {:?} to {to} with {:?}", guard.token(from), guard.token(to));
            assert!(accounts.try_lock().await?.is_none());
            guard.release().await?;
        }
        let twice = MutexSet::new(["account:7", "account:7"].map(|name| client.mutex(name)));
        assert!(twice.lock().await.unwrap_err().is_invalid());
        client.close().await
    })
}
