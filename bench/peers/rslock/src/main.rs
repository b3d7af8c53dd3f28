//! rslock as a peer of the benchmark. Its `acquire` waits for as long as it takes, at a pace of up to 200 ms, or, tuned, of
//! up to 5 ms.

use std::cell::Cell;
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock, serve};
use rslock::{LockGuard, LockManager};

#[derive(Default)]
struct Rslock {
    ttl: Cell<Duration>,
}

struct Mutex {
    manager: LockManager,
    name: String,
    ttl: Duration,
}

impl Library for Rslock {
    type Client = LockManager;
    type Lock = Mutex;

    fn hello(&self) -> Hello {
        // Its manifest asks for this version.
        Hello { library: "rslock 0.10.0".into(), runtime: "Rust, tokio".into() }
    }

    async fn connect(&self, open: &Open, number: u32) -> Result<LockManager, Failure> {
        self.ttl.set(Duration::from_millis(open.ttl_ms));
        let manager = LockManager::new(open.urls.clone());
        // It connects when it is first used.
        let first = manager.acquire(format!("warm:{number}").as_bytes(), self.ttl.get()).await?;
        first.release().await;
        Ok(manager)
    }

    fn lock(&self, manager: &LockManager, run: &Run, name: &str, _: u32) -> Result<Mutex, Failure> {
        if run.lock != "mutex" {
            return Err("rslock has only a mutex".into());
        }
        let mut manager = manager.clone();
        if run.is_tuned {
            manager.set_retry(3, Duration::from_millis(5));
        }
        Ok(Mutex { manager, name: name.to_owned(), ttl: self.ttl.get() })
    }
}

/// A lock, and the time until which the library calls it valid. The library counts from within `acquire`, which may have tried for
/// long: so does this, from its return.
struct Held {
    guard: LockGuard,
    valid_until: Instant,
}

impl Lock for Mutex {
    type Held = Held;

    async fn take(&mut self, _: bool) -> Result<Held, Failure> {
        let guard = self.manager.acquire(self.name.as_bytes(), self.ttl).await?;
        let validity = Duration::from_millis(u64::try_from(guard.lock.validity_time)?);
        Ok(Held { guard, valid_until: Instant::now() + validity })
    }

    async fn give(&mut self, held: Held) -> Result<(), Failure> {
        held.guard.release().await;
        Ok(())
    }

    fn is_held(held: &Held) -> bool {
        Instant::now() < held.valid_until
    }
}

fn main() {
    serve(Rslock::default());
}
