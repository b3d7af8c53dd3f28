//! Many clients read the prices, and one changes them after it has checked them.

use leasehold::{Client, Error};

pub(crate) fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        let prices = client.rw_lock("prices");

        let (one, other) = (prices.read().await?, prices.read().await?);
        assert!(prices.try_write().await?.is_none());
        one.release().await?;

        // It checks beside other readers whether there is something to do. No other client can write until it has decided.
        let looking = prices.upgradable_read().await?;
        other.release().await?;
        let writer = looking.upgrade().await?;
        println!("new prices with token {}", writer.token());

        // It reads its own changes, beside other readers and before the next writer.
        let reader = writer.downgrade().await?;
        assert!(prices.try_read().await?.is_some());
        reader.release().await?;
        client.close().await
    })
}
