//! A job that stops when it loses its lock, and its tests, in which no real time passes.
//!
//! In a program of your own the job is in `src/`, and the tests are under `#[cfg(test)]`.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold::testing::TestStore;
use leasehold::{Client, Error};

/// The job: it copies pages while it holds the lock, and stops at once when the lease is lost.
async fn copy_pages(client: &Client, next_page: impl AsyncFnMut() -> bool) -> Result<&'static str, Error> {
    let guard = client.mutex("copy").ttl(Duration::from_secs(10)).lock().await?;
    let mut next_page = next_page;
    let copied = guard.run(async { while next_page().await {} }).await;
    match copied {
        Ok(()) => guard.release().await.map(|()| "copied"),
        Err(error) if error.is_lost() => Ok("stopped"),
        Err(error) => Err(error),
    }
}

/// Polls once, as an executor does when a task is woken.
fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn job_goes_on_while_its_lease_is_renewed() -> Result<(), Error> {
    let store = TestStore::new();
    let client = store.client()?;
    // A page that never completes.
    let mut job = pin!(copy_pages(&client, async || std::future::pending().await));
    assert!(poll(job.as_mut()).is_pending());
    store.advance(Duration::from_secs(3600));
    assert!(poll(job.as_mut()).is_pending(), "an hour later it still has its lock");
    Ok(())
}

fn job_stops_when_the_store_is_away_for_longer_than_the_lease() -> Result<(), Error> {
    let store = TestStore::new();
    let client = store.client()?;
    let mut job = pin!(copy_pages(&client, async || std::future::pending().await));
    assert!(poll(job.as_mut()).is_pending());
    store.set_reachable(false);
    store.advance(Duration::from_secs(5));
    assert!(poll(job.as_mut()).is_pending(), "the lease lasts for 10 s");
    store.advance(Duration::from_secs(5));
    assert!(matches!(poll(job.as_mut()), Poll::Ready(Ok("stopped"))));
    Ok(())
}

fn job_stops_when_its_process_was_suspended_and_another_one_takes_over() -> Result<(), Error> {
    let store = TestStore::new();
    let (here, there) = (store.client()?, store.client()?);
    let mut first = pin!(copy_pages(&here, async || std::future::pending().await));
    let mut second = pin!(copy_pages(&there, async || false));
    assert!(poll(first.as_mut()).is_pending());
    assert!(poll(second.as_mut()).is_pending());
    store.suspend(Duration::from_secs(20));
    assert!(matches!(poll(first.as_mut()), Poll::Ready(Ok("stopped"))));
    store.advance(Duration::from_secs(5));
    assert!(matches!(poll(second.as_mut()), Poll::Ready(Ok("copied"))));
    Ok(())
}

pub(crate) fn main() -> Result<(), Error> {
    job_goes_on_while_its_lease_is_renewed()?;
    job_stops_when_the_store_is_away_for_longer_than_the_lease()?;
    job_stops_when_its_process_was_suspended_and_another_one_takes_over()?;
    println!("three tests passed, and no time");
    Ok(())
}
