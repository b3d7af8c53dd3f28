//! One holder at a time: wait, try, wait with a limit, work under the lock, release it.

use std::time::Duration;

use leasehold::{Client, Error};

pub(crate) fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        let orders = client.mutex("orders:42").ttl(Duration::from_secs(30)).label("nightly export");

        let guard = orders.lock().await?;
        println!("holding {} with token {}, {:?} left", guard.name(), guard.token(), guard.remaining());
        assert!(orders.try_lock().await?.is_none());
        assert!(orders.lock_timeout(Duration::from_millis(10)).await?.is_none());

        let exported = guard.run(async { 42 }).await?; // dropped if the lease is lost
        println!("{exported} orders were exported");
        guard.release().await?;
        client.close().await
    })
}
