//! The promises of every store, tested through the public library. All stores share the suites.
//!
//! [`check`] runs them against a store of any kind, and returns what failed. Each test is a function of a [`Place`], an empty store, so that a
//! harness can also run them one by one: [`SUITES`] lists them.

#![forbid(unsafe_code)]

/// The tests of a suite, each by its name.
macro_rules! suite {
    ($($test:ident),* $(,)?) => {
        &[$($crate::Test { name: stringify!($test), run: |place| Box::pin($test(place)) }),*]
    };
}

pub mod barrier;
pub mod detach;
pub mod election;
pub mod handoff;
pub mod latch;
pub mod lease;
pub mod mutex;
pub mod once;
pub mod reentrant;
pub mod request;
pub mod rw;
pub mod semaphore;
pub mod set;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{Client, Kind, LockInfo, StoreConfig};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

/// Time limit of one test, for a debug build on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Limit of a wait that must end. It is below 25 s, after which a waiter re-polls, so that a lost push is found.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// How much a test does, where more finds more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// Seconds.
    #[default]
    Usual,
    /// For a night.
    Night,
    /// Before a release.
    Release,
}

impl Effort {
    fn of<T>(self, usual: T, night: T, release: T) -> T {
        match self {
            Self::Usual => usual,
            Self::Night => night,
            Self::Release => release,
        }
    }
}

/// An empty store, which several clients of one test share.
pub struct Place {
    config: StoreConfig,
    /// How long a holder may need to learn that another client waits, beyond the time of a push: zero, unless clients look for messages.
    pub push_delay: Duration,
    /// A majority of several servers decides, and one of them may be late.
    pub is_quorum: bool,
    /// Many attempts at once may find the server busy.
    pub is_slow: bool,
    /// How much the tests do.
    pub effort: Effort,
    _kept: Option<Arc<dyn Any + Send + Sync>>,
}

impl Place {
    /// The store that this configuration leads each client to. It has no locks.
    #[must_use]
    pub fn new(config: impl Into<StoreConfig>) -> Self {
        let (push_delay, effort) = (Duration::ZERO, Effort::default());
        Self { config: config.into(), push_delay, is_quorum: false, is_slow: false, effort, _kept: None }
    }

    /// Keeps what the store needs, such as its server, until the test has ended.
    #[must_use]
    pub fn keeping(self, kept: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _kept: Some(kept), ..self }
    }

    async fn client(&self) -> Client {
        let connect = async || Client::builder().store(self.config.clone()).connect().await;
        let mut opened = connect().await;
        // On a busy machine a server may take longer than the time limit.
        for _ in 0..2 {
            if opened.as_ref().is_err_and(leasehold::Error::is_unavailable) {
                opened = connect().await;
            }
        }
        opened.expect("the store opens")
    }

    /// Connects without a runtime.
    fn blocking(&self) -> impl Fn() -> Result<leasehold::blocking::Client, leasehold::Error> + Send + use<> {
        let config = self.config.clone();
        move || leasehold::blocking::Client::connect_with(Client::builder().store(config.clone()))
    }

    /// Asserts the condition; over a quorum, waits for it, since a node may be late.
    async fn eventually(&self, is_so: impl AsyncFn() -> bool) {
        if self.is_quorum {
            until_true(is_so).await;
        } else {
            assert!(is_so().await, "the condition does not hold");
        }
    }
}

/// A test. It panics if the store breaks the promise in its name.
#[derive(Clone, Copy)]
pub struct Test {
    /// What is promised.
    pub name: &'static str,
    /// Runs it, in a tokio runtime of several threads.
    pub run: fn(Place) -> Pin<Box<dyn Future<Output = ()>>>,
}

/// The tests of one kind of lock, or of one subject.
#[derive(Clone, Copy)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// The kind of lock, if the suite is the one of a kind.
    pub kind: Option<Kind>,
    /// Its tests.
    pub tests: &'static [Test],
}

macro_rules! suites {
    ($($name:ident $(: $kind:ident)?),* $(,)?) => {
        /// All suites.
        pub const SUITES: &[Suite] = &[$({
            #[allow(unused_mut, unused_assignments, reason = "some suites are those of a kind")]
            let mut kind = None;
            $(kind = Some(Kind::$kind);)?
            Suite { name: stringify!($name), kind, tests: $name::TESTS }
        }),*];
    };
}

suites! {
    mutex: Mutex,
    lease,
    detach,
    handoff,
    semaphore: Semaphore,
    rw: ReadWrite,
    reentrant,
    request,
    election: Election,
    latch: Latch,
    barrier: Barrier,
    once,
    set,
}

/// A test that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// The suite and the test.
    pub test: String,
    /// What it said.
    pub message: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.test, self.message)
    }
}

/// How many tests run at a time. Most of the time they wait.
const AT_A_TIME: usize = 8;

/// Runs the tests of these suites, each on an empty store that `place` makes, several at a time. All suites take minutes.
///
/// # Errors
///
/// The tests that failed.
///
/// ```
/// use leasehold::StoreConfig;
/// use leasehold_conformance::{Place, SUITES, check};
///
/// // One suite, of a store of leasehold. `StoreConfig::factory` takes any other.
/// let suites: Vec<_> = SUITES.iter().filter(|suite| suite.name == "latch").copied().collect();
/// let mut number = 0;
/// check(&suites, || {
///     number += 1;
///     Place::new(format!("memory:example-{number}"))
/// })
/// .unwrap();
/// ```
pub fn check(suites: &[Suite], place: impl FnMut() -> Place + Send) -> Result<(), Vec<Failed>> {
    let tests: Vec<_> =
        suites.iter().flat_map(|suite| suite.tests.iter().map(|test| (suite.name, test))).collect();
    let (next, place, failed) = (AtomicUsize::new(0), Mutex::new(place), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((suite, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let place = lock(&place)();
                    if let Err(message) = run(test, place) {
                        lock(&failed).push(Failed { test: format!("{suite}::{}", test.name), message });
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.is_empty() { Ok(()) } else { Err(failed) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one test in a runtime of its own.
///
/// # Errors
///
/// What it said, if it failed.
pub fn run(test: &Test, place: Place) -> Result<(), String> {
    let work = AssertUnwindSafe(move || {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(|error| format!("no runtime: {error}"))?;
        let ended = runtime.block_on(async { timeout(LIMIT, (test.run)(place)).await });
        ended.map_err(|_| format!("the test did not end within {LIMIT:?}"))
    });
    catch_unwind(work).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(text.unwrap_or_else(|| "it panicked".to_owned()))
    })
}

pub(crate) async fn pair(place: &Place) -> (Client, Client) {
    (place.client().await, place.client().await)
}

/// Waits until the condition holds.
pub(crate) async fn until_true(mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT / 2;
    while !is_so().await {
        assert!(Instant::now() < deadline, "the condition does not hold after half of the test's time");
        sleep(Duration::from_millis(5)).await;
    }
}
/// Inspects the lock until the condition holds.
pub(crate) async fn until(
    client: &Client,
    kind: Kind,
    name: &str,
    is_so: impl Fn(&LockInfo) -> bool,
) -> LockInfo {
    until_seen(async || client.inspect(kind, name).await, is_so).await
}

/// Inspects with `look` until the condition holds.
pub(crate) async fn until_seen(
    look: impl AsyncFn() -> Result<LockInfo, leasehold::Error>,
    is_so: impl Fn(&LockInfo) -> bool,
) -> LockInfo {
    let began = Instant::now();
    loop {
        let asked = Instant::now();
        let seen = look().await;
        let late = began.elapsed() > LIMIT / 2;
        match seen {
            Ok(view) if is_so(&view) => return view,
            Ok(view) if late => panic!(
                "the condition does not hold after half of the test's time, with {} holders and {} waiters: {:.4000}",
                view.holders.len(),
                view.waiters.len(),
                format!("{view:?}")
            ),
            // A busy machine.
            Err(error) if late || !error.is_unavailable() => panic!("the store does not answer: {error}"),
            // At most half of the time is spent on looking, because a look at many waiters is work.
            Ok(_) | Err(_) => sleep(asked.elapsed().max(Duration::from_millis(2))).await,
        }
    }
}

/// Starts an attempt, and returns once it is queued.
pub(crate) async fn queue<T: Send + 'static>(
    client: &Client,
    kind: Kind,
    name: &str,
    attempt: impl Future<Output = Result<T, leasehold::Error>> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    queue_seen(async || client.inspect(kind, name).await, attempt).await
}

/// Starts an attempt, and returns once `look` reports it in the queue.
pub(crate) async fn queue_seen<T: Send + 'static>(
    look: impl AsyncFn() -> Result<LockInfo, leasehold::Error>,
    attempt: impl Future<Output = Result<T, leasehold::Error>> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    // The time that a waiter has waited distinguishes it from earlier ones, to the precision of the clocks. A count does not
    // suffice: a quorum may report a waiter for a moment after its grant.
    const TICK: Duration = Duration::from_millis(2);
    let asked = Cell::new(Instant::now());
    let look = async || {
        asked.set(Instant::now());
        look().await
    };
    let youngest = |view: &LockInfo| view.waiters.iter().map(|waiter| waiter.waiting_for).min();
    // So long before the new one that they differ by more than a look takes.
    let is_apart =
        |view: &LockInfo| youngest(view).is_none_or(|waited| waited > 2 * TICK + 4 * asked.get().elapsed());
    let earlier = youngest(&until_seen(&look, is_apart).await);
    let began = Instant::now();
    let task = tokio::spawn(async move { attempt.await.expect("the attempt is granted") });
    // An earlier waiter has waited for as long as it had before, and since.
    let is_new = |waited: Duration| match earlier {
        Some(earlier) => waited + TICK < earlier + asked.get().duration_since(began),
        None => waited < began.elapsed() + TICK,
    };
    until_seen(&look, |view| view.waiters.iter().any(|waiter| is_new(waiter.waiting_for))).await;
    task
}
