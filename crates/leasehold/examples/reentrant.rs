//! One request with several steps, each of which acquires the lock.

use leasehold::{Client, Error, ReentrantMutex};

async fn transfer(account: &ReentrantMutex) -> Result<(), Error> {
    let guard = account.lock().await?;
    withdraw(account).await?;
    guard.release().await
}

async fn withdraw(account: &ReentrantMutex) -> Result<(), Error> {
    let guard = account.lock().await?; // at once, since the request holds it already
    println!("withdrawing with token {}, held {} times", guard.token(), account.hold_count().await?);
    guard.release().await
}

pub(crate) fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        transfer(&client.reentrant_mutex("account:7", "request-93ab")).await?;

        // Another owner can't release it.
        let held = client.reentrant_mutex("account:7", "request-93ab").lock().await?;
        let error = client.reentrant_mutex("account:7", "request-c001").release_all().await.unwrap_err();
        assert!(error.is_not_owner());
        println!("{error}");
        held.release().await?;
        client.close().await
    })
}
