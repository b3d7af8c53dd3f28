//! The promises of leasehold on this store, through the public API alone; and that a broken copy is found.

use std::sync::{Arc, Weak};

use custom_store::MapStore;
use leasehold::StoreConfig;
use leasehold_conformance::{Failed, Place, SUITES, check, run};
use leasehold_core::{ClientId, Command, Reply, Resource};
use leasehold_store::{
    Batch, BoxFuture, CallResult, Capabilities, Inbox, OpenError, Store, StoreError, StoreFactory,
};

#[test]
fn store_keeps_every_promise() {
    let checked = check(SUITES, || Place::new(StoreConfig::factory(MapStore::new("map:test"))));
    if let Err(failed) = checked {
        let failed: Vec<_> = failed.iter().map(Failed::to_string).collect();
        panic!("{} tests failed: {failed:#?}", failed.len());
    }
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
                Some(fault) => StoreConfig::factory(Broken { store, fault }),
            })
        };
        assert_eq!(run(test, place(None)), Ok(()), "{}", test.name);
        assert!(run(test, place(Some(fault))).is_err(), "{} does not find {fault:?}", test.name);
    }
}

/// A store with a fault.
#[derive(Clone)]
struct Broken {
    store: MapStore,
    fault: Fault,
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
    async fn run(self, resource: Arc<Resource>, command: Command) -> CallResult {
        match (self.fault, &command) {
            (Fault::KeepsReleased, Command::Release(_)) => {
                let answer = self.store.call(resource, Command::Inspect, 0).await?;
                Ok(leasehold_core::Answer { reply: Reply::Released, ..answer })
            }
            (Fault::GrantsTwice, Command::Acquire(_)) => {
                self.store.call(resource.clone(), Command::ForceRelease, 0).await?;
                self.store.call(resource, command, 0).await
            }
            _ => self.store.call(resource, command, 0).await,
        }
    }
}

impl Store for Broken {
    fn capabilities(&self) -> Capabilities {
        StoreFactory::capabilities(self)
    }

    fn call(&self, resource: Arc<Resource>, command: Command, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(self.clone().run(resource, command))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let this = self.clone();
        Box::pin(async move {
            let mut answers = Vec::new();
            for (resource, command) in batch {
                answers.push(this.clone().run(resource, command).await);
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
