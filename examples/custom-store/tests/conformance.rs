//! This store passes both kits of leasehold through the public API alone: the client's suite, and the histories of the model. A broken copy
//! fails each.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use custom_store::MapStore;
use leasehold::StoreConfig;
use leasehold_conformance::{Failed, Place, SUITES, check, run};
use leasehold_core::{ClientId, Command, Now, Reply, Resource};
use leasehold_store::clock::Clock;
use leasehold_store::clock::manual::ManualClock;
use leasehold_store::testing;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Inbox, OpenError, Store, StoreError, StoreFactory,
};

#[test]
fn store_keeps_every_promise() {
    let checked = check(SUITES, || Place::new(StoreConfig::factory(MapStore::new("map:test"))));
    if let Err(failed) = checked {
        let failed: Vec<_> = failed.iter().map(Failed::to_string).collect();
        panic!("{} tests failed: {failed:#?}", failed.len());
    }
}

#[test]
fn store_answers_as_the_model() {
    let place = || testing::Place::by_clock(|clock| MapStore::with_clock("map:test", clock));
    let checked = testing::check(100, place);
    assert_eq!(checked.failed, []);
    // The store has no connections.
    assert_eq!(checked.skipped, ["lost_connection_is_told"]);
}

/// What is wrong with a copy.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A release is confirmed, and not carried out.
    KeepsReleased,
    /// A lock that is held is granted again.
    GrantsTwice,
    /// Nothing is pushed.
    PushesNothing,
    /// Locks are not listed.
    ListsNothing,
    /// A client that is gone counts as there.
    KeepsTheDead,
    /// Two commands can run at the same time.
    Overlaps,
}

#[test]
fn broken_copies_answer_otherwise_than_the_model() {
    for (fault, test) in [
        (Fault::KeepsReleased, "mutex_answers_as_the_model"),
        (Fault::GrantsTwice, "several_mutexes_answer_as_the_model"),
        (Fault::GrantsTwice, "attempts_at_the_same_time_follow_each_other"),
        (Fault::PushesNothing, "grant_is_pushed"),
        (Fault::ListsNothing, "what_is_in_use_is_listed"),
        (Fault::KeepsTheDead, "waiter_of_a_client_that_is_gone_is_passed_over"),
        (Fault::KeepsTheDead, "shared_lock_answers_as_the_model"),
        (Fault::Overlaps, "attempts_at_the_same_time_follow_each_other"),
    ] {
        let test = testing::TESTS.iter().find(|known| known.name == test).unwrap();
        let broken = |clock: Clock| Broken::new(MapStore::with_clock("map:broken", clock), fault);
        let place = || testing::Place::by_clock(broken);
        let failed = testing::run(test, 100, &place).expect_err(test.name);
        assert_eq!(failed.test, test.name, "{fault:?}");
    }
}

#[test]
fn broken_copies_fail_by_name() {
    for (fault, test) in [
        (Fault::KeepsReleased, "released_lock_is_granted_to_first_waiter"),
        (Fault::GrantsTwice, "held_mutex_is_refused_to_another_client"),
        (Fault::PushesNothing, "released_lock_is_granted_to_first_waiter"),
        (Fault::ListsNothing, "list_reports_every_lock_in_use"),
    ] {
        let test = leasehold_conformance::mutex::TESTS.iter().find(|known| known.name == test).unwrap();
        let place = |fault| {
            let store = MapStore::new("map:broken");
            Place::new(match fault {
                None => StoreConfig::factory(store),
                Some(fault) => StoreConfig::factory(Broken::new(store, fault)),
            })
        };
        assert_eq!(run(test, place(None)), Ok(()), "{}", test.name);
        assert!(run(test, place(Some(fault))).is_err(), "{} does not find {fault:?}", test.name);
    }
}

/// A store as if it had connections, which the test cuts.
#[derive(Clone)]
struct Remote {
    store: MapStore,
    inboxes: Arc<Mutex<Vec<Weak<dyn Inbox>>>>,
}

impl Remote {
    /// Pushes may have been missed: the clients are told.
    fn cut(&self) {
        for inbox in self.inboxes.lock().unwrap().iter().filter_map(Weak::upgrade) {
            inbox.reconnected(&|_| true);
        }
    }
}

impl StoreFactory for Remote {
    fn name(&self) -> String {
        StoreFactory::name(&self.store)
    }

    fn capabilities(&self) -> Capabilities {
        StoreFactory::capabilities(&self.store)
    }

    fn open(&self, client: ClientId, inbox: Weak<dyn Inbox>) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
        self.inboxes.lock().unwrap().push(inbox.clone());
        self.store.open(client, inbox)
    }
}

#[test]
fn clients_of_a_cut_connection_are_told() {
    let test = testing::TESTS.iter().find(|known| known.name == "lost_connection_is_told").unwrap();
    let place = |tells: bool| {
        let clock = Arc::new(ManualClock::default());
        let store = MapStore::with_clock("map:remote", Clock::Manual(clock.clone()));
        let remote = Remote { store, inboxes: Arc::default() };
        let cut = remote.clone();
        testing::Place::by_time(remote, Moved(clock)).cut_by(move || {
            if tells {
                cut.cut();
            }
        })
    };
    assert_eq!(testing::run(test, 1, &|| place(true)), Ok(true));
    assert!(testing::run(test, 1, &|| place(false)).is_err());
}

/// A clock of the store's own.
struct Moved(Arc<ManualClock>);

impl testing::Time for Moved {
    fn now(&self) -> Now {
        Clock::Manual(self.0.clone()).embedded()
    }

    fn pass(&self, span: Duration) {
        self.0.advance(span);
    }
}

/// A store with a fault.
#[derive(Clone)]
struct Broken {
    store: MapStore,
    fault: Fault,
    /// Keeps the inboxes of all clients.
    kept: Arc<Mutex<Vec<Arc<dyn Inbox>>>>,
}

/// An inbox that stays when its client is gone.
struct Forwarding(Weak<dyn Inbox>);

impl Inbox for Forwarding {
    fn deliver(&self, push: leasehold_core::Push) {
        if let Some(inbox) = self.0.upgrade() {
            inbox.deliver(push);
        }
    }

    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}
}

impl StoreFactory for Broken {
    fn name(&self) -> String {
        StoreFactory::name(&self.store)
    }

    fn capabilities(&self) -> Capabilities {
        StoreFactory::capabilities(&self.store)
    }

    fn open(&self, client: ClientId, inbox: Weak<dyn Inbox>) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
        let inbox = match self.fault {
            Fault::KeepsTheDead => {
                let forwarding: Arc<dyn Inbox> = Arc::new(Forwarding(inbox));
                self.kept.lock().unwrap().push(forwarding.clone());
                Arc::downgrade(&forwarding)
            }
            Fault::PushesNothing => {
                Arc::downgrade(&DEAF.get_or_init(|| Arc::new(Deaf)).clone()) as Weak<dyn Inbox>
            }
            _ => inbox,
        };
        let (opening, this) = (self.store.open(client, inbox), self.clone());
        Box::pin(async move {
            opening.await?;
            Ok(Arc::new(this) as Arc<dyn Store>)
        })
    }
}

static DEAF: std::sync::OnceLock<Arc<Deaf>> = std::sync::OnceLock::new();

struct Deaf;

impl Inbox for Deaf {
    fn deliver(&self, _: leasehold_core::Push) {}
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}
}

impl Broken {
    fn new(store: MapStore, fault: Fault) -> Self {
        Self { store, fault, kept: Arc::default() }
    }

    async fn run(self, call: Call) -> CallResult {
        let lookup = Call::new(call.resource.clone(), Command::Inspect);
        let revocation = Call::new(call.resource.clone(), Command::ForceRelease);
        match (self.fault, &call.command) {
            (Fault::KeepsReleased, Command::Release(_)) => {
                let answer = self.store.call(lookup, 0).await?;
                Ok(leasehold_core::Answer { reply: Reply::Released, ..answer })
            }
            (Fault::GrantsTwice, Command::Acquire(_)) => {
                self.store.call(revocation, 0).await?;
                self.store.call(call, 0).await
            }
            (Fault::Overlaps, Command::Acquire(acquire)) => {
                // As a store that reads, and writes later what it has made of it.
                let before = self.store.call(lookup, 0).await?;
                tokio::task::yield_now().await;
                let was_free = matches!(before.reply, Reply::View(view) if view.holders.is_empty());
                let answer = self.store.call(call.clone(), 0).await?;
                let is_refused = matches!(answer.reply, Reply::Busy);
                if was_free && is_refused && acquire.wait.is_none() {
                    self.store.call(revocation, 0).await?;
                    return self.store.call(call, 0).await;
                }
                Ok(answer)
            }
            _ => self.store.call(call, 0).await,
        }
    }
}

impl Store for Broken {
    fn capabilities(&self) -> Capabilities {
        StoreFactory::capabilities(self)
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(self.clone().run(call))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let this = self.clone();
        Box::pin(async move {
            let mut answers = Vec::new();
            for call in batch {
                answers.push(this.clone().run(call).await);
            }
            answers
        })
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        match self.fault {
            Fault::ListsNothing => Box::pin(std::future::ready(Ok(Vec::new()))),
            _ => self.store.list(),
        }
    }
}
