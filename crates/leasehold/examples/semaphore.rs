//! At most three uploads at once, by any number of clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold::{Client, Error};

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let client = Client::connect("memory:").await?;
    let uploads = client.semaphore("uploads", 3);
    let busy = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = (0..10)
        .map(|number| {
            let (uploads, busy) = (uploads.clone(), busy.clone());
            tokio::spawn(async move {
                let guard = uploads.acquire(1).await?;
                let others = busy.fetch_add(1, Ordering::SeqCst);
                assert!(others < 3);
                println!("upload {number} beside {others} others");
                tokio::task::yield_now().await;
                busy.fetch_sub(1, Ordering::SeqCst);
                guard.release().await
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no upload panics")?;
    }
    client.close().await
}
