//! Read-write locks: many readers, or one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Kind, Loss, Mode, RwLock};

use crate::{Place, SOON, Test, pair, queue, until, until_true};

/// The tests of this suite.
pub const TESTS: &[Test] = suite![
    readers_share_and_a_writer_excludes_all,
    waiting_writer_is_not_overtaken_and_adjacent_readers_are_granted_together,
    readers_and_writers_never_overlap,
    downgraded_writer_admits_readers_and_keeps_its_token,
    upgrade_is_granted_before_all_waiters,
    failed_upgrade_returns_the_guard,
    refused_upgrade_does_not_extend_the_lease,
    dropped_upgrade_future_leaves_nothing,
    lost_lease_cannot_be_exchanged,
    lease_lost_during_an_upgrade_ends_the_wait,
    dead_reader_delays_a_writer_for_its_own_ttl_only,
    max_hold_counts_through_upgrade_and_downgrade,
    inspect_reports_readers_and_writers,
    grant_cost_is_independent_of_the_number_of_readers,
    readers_and_writers_do_not_starve,
    blocking_rw_lock_reads_and_writes,
];

const KIND: Kind = Kind::ReadWrite;

async fn until_free(client: &Client) {
    until(client, KIND, "a", |view| view.holders.is_empty() && view.waiters.is_empty()).await;
}

async fn readers_share_and_a_writer_excludes_all(store: Place) {
    let (one, other) = pair(&store).await;
    let (mine, theirs) = (one.rw_lock("a"), other.rw_lock("a"));
    let readers = (mine.read().await.unwrap(), theirs.read().await.unwrap());
    assert!(readers.0.token() < readers.1.token());
    assert!(theirs.try_write().await.unwrap().is_none());
    assert!(theirs.write_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    readers.0.release().await.unwrap();
    readers.1.release().await.unwrap();
    let writer = theirs.write().await.unwrap();
    assert!(writer.is_held() && writer.name() == "a");
    assert!(mine.try_read().await.unwrap().is_none() && mine.try_write().await.unwrap().is_none());
    assert!(mine.read_timeout(Duration::from_millis(50)).await.unwrap().is_none());
    assert!(mine.try_upgradable_read().await.unwrap().is_none());
    writer.release().await.unwrap();
    assert!(mine.try_write().await.unwrap().is_some());
}

async fn waiting_writer_is_not_overtaken_and_adjacent_readers_are_granted_together(store: Place) {
    let (one, other) = pair(&store).await;
    let first = one.rw_lock("a").read().await.unwrap();
    let lock = other.rw_lock("a");
    let writer = queue(&one, KIND, "a", async move { lock.write().await }).await;
    // Those who wait are not overtaken once they listen for messages, which the first of a client in a hash slot of a cluster may not do at once.
    until_true(async || one.rw_lock("a").try_read().await.unwrap().is_none()).await;
    let mut readers = Vec::new();
    for client in [&one, &other, &one] {
        let lock = client.rw_lock("a");
        readers.push(queue(&one, KIND, "a", async move { lock.read().await }).await);
    }
    first.release().await.unwrap();
    let writer = writer.await.unwrap();
    assert_eq!(one.inspect(KIND, "a").await.unwrap().waiters.len(), 3);
    writer.release().await.unwrap();
    until(&one, KIND, "a", |view| view.holders.len() == 3 && view.waiters.is_empty()).await;
    for reader in readers {
        assert!(reader.await.unwrap().is_held());
    }
}

async fn readers_and_writers_never_overlap(store: Place) {
    // Each reader adds one, a writer makes it minus one.
    let inside = Arc::new(AtomicI32::new(0));
    let overlap = Arc::new(AtomicI32::new(0));
    // Where a client looks for its grant, another one may find its own a moment later.
    let longer = store.push_delay / 4;
    let mut tasks = Vec::new();
    for number in 0..8 {
        let lock = store.client().await.rw_lock("a");
        let (inside, overlap) = (inside.clone(), overlap.clone());
        tasks.push(tokio::spawn(async move {
            for round in 0..30 {
                if (number + round) % 4 == 0 {
                    let guard = lock.write().await.unwrap();
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 0, "a writer is alone");
                    tokio::task::yield_now().await;
                    inside.fetch_add(1, Ordering::SeqCst);
                    guard.release().await.unwrap();
                } else {
                    let guard = lock.read().await.unwrap();
                    let readers = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(readers > 0, "no writer is there");
                    overlap.fetch_max(readers, Ordering::SeqCst);
                    let longer = if round < 3 { longer } else { Duration::ZERO };
                    tokio::time::sleep(Duration::from_millis(1) + longer).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(overlap.load(Ordering::SeqCst) > 1, "readers overlapped");
}

async fn downgraded_writer_admits_readers_and_keeps_its_token(store: Place) {
    let (one, other) = pair(&store).await;
    let writer = one.rw_lock("a").write().await.unwrap();
    let token = writer.token();
    let lock = other.rw_lock("a");
    let reader = queue(&one, KIND, "a", async move { lock.read().await }).await;
    let lock = other.rw_lock("a");
    let next = queue(&one, KIND, "a", async move { lock.write().await }).await;
    let guard = writer.downgrade().await.unwrap();
    assert_eq!(guard.token(), token);
    let reader = tokio::time::timeout(SOON, reader).await.expect("the reader is granted").unwrap();
    let view = one.inspect(KIND, "a").await.unwrap();
    assert_eq!((view.holders.len(), view.waiters.len()), (2, 1), "the writer behind it waits");
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
    reader.release().await.unwrap();
    assert!(next.await.unwrap().token() > token);
    until_free(&one).await;
}

async fn upgrade_is_granted_before_all_waiters(store: Place) {
    let (one, other) = pair(&store).await;
    let upgradable = one.rw_lock("a").upgradable_read().await.unwrap();
    let token = upgradable.token();
    let reader = other.rw_lock("a").read().await.unwrap();
    assert!(other.rw_lock("a").try_upgradable_read().await.unwrap().is_none(), "there is at most one");
    let lock = other.rw_lock("a");
    let later = queue(&one, KIND, "a", async move { lock.write().await }).await;
    let writer = queue(&one, KIND, "a", async move { upgradable.upgrade().await }).await;
    let view = one.inspect(KIND, "a").await.unwrap();
    assert!(view.waiters[0].is_own && !view.waiters[1].is_own, "the upgrade is first in the queue");
    assert!(other.rw_lock("a").try_read().await.unwrap().is_none());
    reader.release().await.unwrap();
    let writer = writer.await.unwrap();
    assert!(writer.token() > token && writer.is_held());
    let view = one.inspect(KIND, "a").await.unwrap();
    assert_eq!((view.holders.len(), view.waiters.len()), (1, 1));
    // The lease outlives the claim window of a push.
    writer.renew().await.unwrap();
    assert!(writer.remaining() > Duration::from_secs(4));
    writer.release().await.unwrap();
    later.await.unwrap().release().await.unwrap();
    until_free(&one).await;
}

async fn failed_upgrade_returns_the_guard(store: Place) {
    let (one, other) = pair(&store).await;
    let upgradable = one.rw_lock("a").upgradable_read().await.unwrap();
    let reader = other.rw_lock("a").read().await.unwrap();
    let token = upgradable.token();
    let upgradable = upgradable.try_upgrade().await.unwrap().unwrap_err();
    let limit = Duration::from_millis(50);
    let upgradable = upgradable.upgrade_timeout(limit).await.unwrap().unwrap_err();
    assert!(upgradable.is_held() && upgradable.token() == token);
    until(&one, KIND, "a", |view| view.waiters.is_empty()).await;
    let again = other.rw_lock("a").try_read().await.unwrap().expect("readers are admitted again");
    again.release().await.unwrap();
    reader.release().await.unwrap();
    let writer = upgradable.try_upgrade().await.unwrap().unwrap();
    let reader = writer.downgrade().await.unwrap();
    reader.release().await.unwrap();
    let upgradable = one.rw_lock("a").upgradable_read_timeout(SOON).await.unwrap().unwrap();
    let reader = upgradable.downgrade().await.unwrap();
    assert!(other.rw_lock("a").try_upgradable_read().await.unwrap().is_some());
    reader.release().await.unwrap();
    until_free(&one).await;
}

async fn refused_upgrade_does_not_extend_the_lease(store: Place) {
    let client = store.client().await;
    let lock = client.rw_lock("a").auto_renew(false);
    let _reader = lock.read().await.unwrap();
    let mut upgradable = lock.upgradable_read().await.unwrap();
    let (began, before) = (Instant::now(), upgradable.remaining());
    let span = Duration::from_millis(150);
    while began.elapsed() < span {
        upgradable = upgradable.try_upgrade().await.unwrap().unwrap_err();
    }
    // Less what the two clocks may differ by.
    assert!(upgradable.remaining() <= before - span * 9 / 10);
}

async fn dropped_upgrade_future_leaves_nothing(store: Place) {
    let (one, other) = pair(&store).await;
    let upgradable = one.rw_lock("a").upgradable_read().await.unwrap();
    let reader = other.rw_lock("a").read().await.unwrap();
    let upgrade = queue(&one, KIND, "a", async move { upgradable.upgrade().await }).await;
    upgrade.abort();
    until(&one, KIND, "a", |view| view.holders.len() == 1 && view.waiters.is_empty()).await;
    reader.release().await.unwrap();
    until_free(&one).await;
}

async fn lost_lease_cannot_be_exchanged(store: Place) {
    let (one, other) = pair(&store).await;
    let lock = one.rw_lock("a");
    // Force-released, which only the store knows.
    let writer = lock.write().await.unwrap();
    other.rw_lock("a").force_release().await.unwrap();
    assert!(writer.downgrade().await.unwrap_err().is_lost());
    let upgradable = lock.upgradable_read().await.unwrap();
    other.rw_lock("a").force_release().await.unwrap();
    assert!(upgradable.upgrade().await.unwrap_err().is_lost());
    // Expired, which the holder knows by its own clock.
    let writer = lock.ttl(Duration::from_secs(1)).auto_renew(false).write().await.unwrap();
    assert_eq!(writer.lost().await, Loss::Expired);
    let next = other.rw_lock("a").write().await.unwrap();
    let error = writer.downgrade().await.unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("rw \"a\" on "), "{error}");
    let view = one.inspect(KIND, "a").await.unwrap();
    assert!(view.holders.len() == 1 && view.holders[0].token == next.token(), "{view:?}");
}

async fn lease_lost_during_an_upgrade_ends_the_wait(store: Place) {
    let (one, other) = pair(&store).await;
    let upgradable = one.rw_lock("a").upgradable_read().await.unwrap();
    let _reader = other.rw_lock("a").read().await.unwrap();
    let upgrade = tokio::spawn(upgradable.upgrade());
    until(&one, KIND, "a", |view| view.waiters.len() == 1).await;
    other.rw_lock("a").force_release().await.unwrap();
    let ended: Result<_, Error> = tokio::time::timeout(SOON, upgrade).await.expect("the wait ends").unwrap();
    assert!(ended.unwrap_err().is_lost());
    until_free(&one).await;
}

async fn dead_reader_delays_a_writer_for_its_own_ttl_only(store: Place) {
    let (one, other) = pair(&store).await;
    let living = one.rw_lock("a").read().await.unwrap();
    let dead = one.rw_lock("a").ttl(Duration::from_secs(1)).auto_renew(false).read().await.unwrap();
    let lock = other.rw_lock("a");
    let writer = queue(&one, KIND, "a", async move { lock.write().await }).await;
    living.release().await.unwrap();
    let began = Instant::now();
    let writer = tokio::time::timeout(SOON, writer).await.expect("the writer is granted").unwrap();
    assert!(began.elapsed() < Duration::from_secs(6), "the writer waited for {:?}", began.elapsed());
    assert!(writer.is_held() && !dead.is_held());
}

async fn max_hold_counts_through_upgrade_and_downgrade(store: Place) {
    let client = store.client().await;
    let hold = Duration::from_secs(6);
    let writer = client.rw_lock("a").max_hold(hold).write().await.unwrap();
    let granted = Instant::now();
    assert!(tokio::time::timeout(hold / 2, writer.lost()).await.is_err());
    let reader = writer.downgrade().await.unwrap();
    let (held, left) = (granted.elapsed(), reader.remaining());
    assert!(held + left <= hold, "it is held for {held:?} and another {left:?}");
    assert_eq!(tokio::time::timeout(SOON, reader.lost()).await.unwrap(), Loss::MaxHold);
}

async fn inspect_reports_readers_and_writers(store: Place) {
    let (one, other) = pair(&store).await;
    let reader = one.rw_lock("a").read().await.unwrap();
    let upgradable = one.rw_lock("a").upgradable_read().await.unwrap();
    let lock = other.rw_lock("a");
    let waiting = queue(&one, KIND, "a", async move { lock.write().await }).await;
    let views = other.list().await.unwrap();
    let [view] = &views[..] else { panic!("{views:?}") };
    assert_eq!(view.kind, KIND);
    let modes: Vec<_> = view.holders.iter().map(|holder| holder.mode).collect();
    assert_eq!(modes, [Some(Mode::Read), Some(Mode::UpgradableRead)]);
    assert_eq!(view.waiters[0].mode, Some(Mode::Write));
    drop((reader, upgradable));
    drop(waiting.await.unwrap());
    let _guard = one.mutex("b").lock().await.unwrap();
    assert_eq!(one.mutex("b").inspect().await.unwrap().holders[0].mode, None);
}

/// Duration of one more reader's acquire and release.
async fn cost_of_a_reader(lock: &RwLock) -> Duration {
    let began = Instant::now();
    lock.read().await.unwrap().release().await.unwrap();
    began.elapsed()
}

fn median(mut spans: Vec<Duration>) -> Duration {
    spans.sort_unstable();
    spans[spans.len() / 2]
}

async fn grant_cost_is_independent_of_the_number_of_readers(store: Place) {
    let many = store.effort.of(500, 2_000, 5_000);
    let (one, other) = pair(&store).await;
    let mut readers = Vec::new();
    for (name, count) in [("few", 10), ("many", many)] {
        // No renewals in between.
        let lock = one.rw_lock(name).ttl(Duration::from_secs(600));
        for _ in 0..count {
            readers.push(lock.read().await.unwrap());
        }
    }
    let (mut beside_few, mut beside_many) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        beside_few.push(cost_of_a_reader(&other.rw_lock("few")).await);
        beside_many.push(cost_of_a_reader(&other.rw_lock("many")).await);
    }
    let (few, full) = (median(beside_few), median(beside_many));
    println!("a reader beside 10 takes {few:?}, beside {many} {full:?}");
    assert!(full < few * 2, "beside 10 {few:?}, beside {many} {full:?}");
}

/// Acquires and releases until `end`. Returns the number of acquisitions and the longest wait.
async fn acquire_until(lock: RwLock, writes: bool, end: Instant) -> (u32, Duration) {
    let (mut count, mut longest) = (0, Duration::ZERO);
    while Instant::now() < end {
        let began = Instant::now();
        let guard = if writes { None } else { Some(lock.read().await.unwrap()) };
        let writer = if writes { Some(lock.write().await.unwrap()) } else { None };
        longest = longest.max(began.elapsed());
        count += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
        drop((guard, writer));
    }
    (count, longest)
}

async fn readers_and_writers_do_not_starve(store: Place) {
    let mut locks = Vec::new();
    for _ in 0..12 {
        locks.push(store.client().await.rw_lock("a"));
    }
    // Starts after all are connected, which may take long on a busy machine.
    let span = Duration::from_secs(store.effort.of(1, 10, 30));
    let end = Instant::now() + span;
    let mut tasks = Vec::new();
    for (number, lock) in locks.into_iter().enumerate() {
        // Eight readers and four writers, so that both always wait.
        let writes = number % 3 == 0;
        tasks.push((writes, tokio::spawn(acquire_until(lock, writes, end))));
    }
    let (mut least, mut longest) = (u32::MAX, [Duration::ZERO; 2]);
    for (writes, task) in tasks {
        let (count, wait) = task.await.unwrap();
        least = least.min(count);
        let longest = &mut longest[usize::from(writes)];
        *longest = wait.max(*longest);
    }
    println!("in {span:?} the longest wait of a reader was {:?}, of a writer {:?}", longest[0], longest[1]);
    assert!(longest[0].max(longest[1]) < Duration::from_secs(15), "{longest:?}");
    assert!(least > 0, "every client acquired the lock");
}

async fn blocking_rw_lock_reads_and_writes(store: Place) {
    let connect = store.blocking();
    let work = move || {
        let client = connect()?;
        let lock = client.rw_lock("a").ttl(Duration::from_secs(5));
        let (one, other) = (lock.read()?, lock.read()?);
        assert!(lock.try_write()?.is_none() && lock.write_timeout(Duration::from_millis(10))?.is_none());
        one.release()?;
        other.release()?;
        let upgradable = lock.upgradable_read()?;
        let reader = lock.try_read()?;
        let upgradable = upgradable.try_upgrade()?.unwrap_err();
        let upgradable = upgradable.upgrade_timeout(Duration::from_millis(10))?.unwrap_err();
        drop(reader);
        let writer = upgradable.upgrade()?;
        assert!(writer.is_held() && lock.try_read()?.is_none());
        writer.downgrade()?.release()?;
        client.close()
    };
    let worked: Result<(), Error> = tokio::task::spawn_blocking(work).await.unwrap();
    worked.unwrap();
}
