//! The kit for stores that are not part of leasehold: a store answers random histories as the model does, and pushes what the model pushes.
//!
//! [`check`] runs it against a store that lives by a clock which the test moves, and returns what failed. The client's own suite, which
//! tests a store through the public library, is the crate `leasehold-conformance`; a store should pass both.
//!
//! ```
//! use std::future::ready;
//! use std::sync::{Arc, Weak};
//!
//! use leasehold_core::ClientId;
//! use leasehold_store::clock::Clock;
//! use leasehold_store::memory::Memory;
//! use leasehold_store::testing::{Place, check};
//! use leasehold_store::{
//!     BoxFuture, Capabilities, EMBEDDED_POLL_INTERVALS, Inbox, OpenError, Store, StoreFactory,
//! };
//!
//! /// A store of which all clients of the factory are clients.
//! struct Shared(Arc<Memory>);
//!
//! impl StoreFactory for Shared {
//!     fn name(&self) -> String {
//!         "shared:".to_owned()
//!     }
//!
//!     fn capabilities(&self) -> Capabilities {
//!         Capabilities::new(EMBEDDED_POLL_INTERVALS)
//!     }
//!
//!     fn open(
//!         &self,
//!         client: ClientId,
//!         inbox: Weak<dyn Inbox>,
//!     ) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
//!         self.0.join(client, inbox);
//!         Box::pin(ready(Ok(self.0.clone() as Arc<dyn Store>)))
//!     }
//! }
//!
//! let checked = check(4, || {
//!     Place::by_clock(|clock| Shared(Arc::new(Memory::with_clock(clock))))
//! });
//! assert_eq!(checked.failed, []);
//! // A store in memory has no connection that could be lost.
//! assert_eq!(checked.skipped, ["lost_connection_is_told"]);
//! ```

mod comparison;
mod tests;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Now;

use crate::StoreFactory;
use crate::clock::Clock;
use crate::clock::manual::ManualClock;
pub use tests::TESTS;

/// The time by which a store lives. Only the test moves it.
pub trait Time: Send + Sync {
    /// What the store's clocks show.
    fn now(&self) -> Now;

    /// Moves the store's clocks forward.
    fn pass(&self, span: Duration);
}

/// A clock for [`Place::by_clock`].
struct MovedClock(Arc<ManualClock>);

impl Time for MovedClock {
    fn now(&self) -> Now {
        Clock::Manual(self.0.clone()).embedded()
    }

    fn pass(&self, span: Duration) {
        self.0.advance(span);
    }
}

/// An empty store, to which the tests connect several clients, and its time.
pub struct Place {
    factory: Arc<dyn StoreFactory>,
    time: Arc<dyn Time>,
    cut: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Place {
    /// A store that takes the time from a [`Clock`].
    pub fn by_clock<F: StoreFactory + 'static>(factory: impl FnOnce(Clock) -> F) -> Self {
        let clock = Arc::new(ManualClock::default());
        Self::by_time(factory(Clock::Manual(clock.clone())), MovedClock(clock))
    }

    /// A store whose time is set in another way, as that of a database.
    pub fn by_time(factory: impl StoreFactory + 'static, time: impl Time + 'static) -> Self {
        Self { factory: Arc::new(factory), time: Arc::new(time), cut: None }
    }

    /// The store has connections, and this cuts those of all clients. It may then connect again.
    #[must_use]
    pub fn cut_by(self, cut: impl Fn() + Send + Sync + 'static) -> Self {
        Self { cut: Some(Box::new(cut)), ..self }
    }
}

/// One test of the kit.
#[derive(Clone, Copy)]
pub struct Test {
    /// What the store does that passes it.
    pub name: &'static str,
    run: Run,
}

#[derive(Clone, Copy)]
enum Run {
    Once(fn(Place)),
    /// With so many random histories. Returns whether the store supports the kind of lock.
    Often(fn(&dyn Fn() -> Place, u32) -> bool),
    /// For a store with connections.
    Cut(fn(Place)),
}

/// What became of the tests.
#[derive(Debug, Default)]
pub struct Checked {
    /// Those that failed, with what was observed.
    pub failed: Vec<Failed>,
    /// Those that do not concern this store.
    pub skipped: Vec<&'static str>,
}

/// A test that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its name.
    pub test: &'static str,
    /// What was observed, with the smallest history that shows it.
    pub message: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.test, self.message)
    }
}

/// Runs all tests, those of histories with so many of them each: some hundred find most mistakes. `place` returns an empty store each time.
pub fn check(histories: u32, place: impl Fn() -> Place) -> Checked {
    let mut checked = Checked::default();
    for test in TESTS {
        match run(test, histories, &place) {
            Ok(true) => {}
            Ok(false) => checked.skipped.push(test.name),
            Err(failed) => checked.failed.push(failed),
        }
    }
    checked
}

/// Runs one test. `Ok(false)`: it does not concern this store.
///
/// # Errors
///
/// What was observed that must not be.
pub fn run(test: &Test, histories: u32, place: &dyn Fn() -> Place) -> Result<bool, Failed> {
    catch_unwind(AssertUnwindSafe(|| match test.run {
        Run::Once(run) => {
            run(place());
            true
        }
        Run::Often(run) => run(place, histories),
        Run::Cut(run) => {
            let place = place();
            let has_connections = place.cut.is_some();
            if has_connections {
                run(place);
            }
            has_connections
        }
    }))
    .map_err(|panic| Failed { test: test.name, message: message_of(&*panic) })
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}
