//! Real threads on one client's table, in schedules that a test chooses: tasks on threads of their own, guards that are dropped
//! on other threads, futures that are dropped, and the driver. If a wake-up is lost, all threads wait, which is an error.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p leasehold-sim --test threads --target-dir target/shuttle`

#![cfg(shuttle)]

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold::Client;
use leasehold::simulation::{
    Answered, Call, Pending, SimulatedInbox, ThreadClock, Transport, client, set_clock,
};
use leasehold_core::model::{CommandContext, Table, apply};
use leasehold_core::{Acquire, ClientId, Command, LocalTime, Now, Push, Reply, Resource, StoreTime};
use shuttle::future::block_on;
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;

/// How many schedules are tried.
const SCHEDULES: usize = 3_000;

/// The store of both clients: the core's model of one lock. Time stands still.
struct Store {
    table: Mutex<Table>,
    inboxes: Mutex<Vec<(ClientId, SimulatedInbox)>>,
    /// A store without pushes must be found.
    publishes: bool,
}

impl Store {
    fn run(&self, command: &Command) -> Answered {
        let mut pushes = Vec::new();
        let answer = {
            let mut table = self.table.lock().unwrap();
            let now = Now::same(StoreTime::from_micros(1_700_000_000_000_000));
            let context = CommandContext { now, is_reachable: &mut |_| true, pushes: &mut pushes };
            apply(&mut *table, context, command).unwrap_or_else(|never| match never {})
        };
        for push in pushes.into_iter().filter(|_| self.publishes) {
            self.deliver(push);
        }
        Ok(answer)
    }

    /// With no lock of the store held.
    fn deliver(&self, push: Push) {
        let inboxes = self.inboxes.lock().unwrap().clone();
        for (_, inbox) in inboxes.into_iter().filter(|(client, _)| *client == push.inbox) {
            inbox.deliver(push.clone());
        }
    }
}

struct Wire(Arc<Store>);

impl Transport for Wire {
    fn call(&self, batch: Vec<Call>, _: bool, _: u32) -> Pending<Vec<Answered>> {
        let store = self.0.clone();
        Box::pin(async move {
            // Another thread may run between the request, the command and the answer.
            thread::yield_now();
            let answers = batch.iter().map(|Call { command, .. }| store.run(command)).collect();
            thread::yield_now();
            answers
        })
    }

    fn acquire_all(&self, _attempts: Vec<(Arc<Resource>, Arc<Acquire>)>) -> Pending<Vec<Answered>> {
        unreachable!("no set is locked")
    }

    fn sleep_until(&self, _time: LocalTime) -> Pending<()> {
        Box::pin(std::future::pending())
    }

    fn poll_intervals(&self) -> (Duration, Duration) {
        (Duration::from_secs(25), Duration::from_secs(80))
    }
}

/// Both futures, on one thread.
async fn both(one: Pin<Box<dyn Future<Output = ()>>>, other: Pin<Box<dyn Future<Output = ()>>>) {
    let mut futures = [Some(one), Some(other)];
    poll_fn(|context| {
        for slot in &mut futures {
            if let Some(future) = slot
                && future.as_mut().poll(context).is_ready()
            {
                *slot = None;
            }
        }
        if futures.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// One critical section; the guard is dropped on another thread.
fn section(client: &Client, inside: &Arc<AtomicUsize>) {
    let mutex = client.mutex("r0");
    let guard = block_on(mutex.lock()).unwrap();
    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
    thread::yield_now();
    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
    thread::spawn(move || drop(guard)).join().unwrap();
}

/// As `section`, and waits for the release.
fn released_section(client: &Client, inside: &Arc<AtomicUsize>) {
    let mutex = client.mutex("r0");
    let guard = block_on(mutex.lock()).unwrap();
    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
    block_on(guard.release()).unwrap();
}

/// An attempt that is dropped after its first poll.
fn dropped_attempt(client: &Client) {
    let mutex = client.mutex("r0");
    block_on(async {
        let mut attempt = pin!(mutex.lock());
        poll_fn(|context| {
            let _ = attempt.as_mut().poll(context);
            Poll::Ready(())
        })
        .await;
    });
}

fn scenario(publishes: bool) {
    set_clock(ThreadClock::At(LocalTime::from_micros(3_600_000_000)));
    let store =
        Arc::new(Store { table: Mutex::new(Table::new()), inboxes: Mutex::new(Vec::new()), publishes });
    let open = |id: u128| {
        let id = ClientId::new(id);
        let (client, inbox, driver) = client(id, Arc::new(Wire(store.clone())));
        store.inboxes.lock().unwrap().push((id, inbox.clone()));
        (client, inbox, driver)
    };
    let (first, first_inbox, first_driver) = open(1);
    let (second, second_inbox, second_driver) = open(2);
    let inside = Arc::new(AtomicUsize::new(0));
    let spawn = |client: &Client, run: fn(&Client, &Arc<AtomicUsize>)| {
        let (client, inside) = (client.clone(), inside.clone());
        thread::spawn(move || run(&client, &inside))
    };
    let threads = [
        spawn(&first, section),
        spawn(&first, released_section),
        spawn(&first, |client, _| dropped_attempt(client)),
        spawn(&second, section),
    ];
    drop((first, second));
    block_on(both(first_driver, second_driver));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!((first_inbox.entries(), second_inbox.entries()), (0, 0), "entries are left");
    let Ok(answer) = store.run(&Command::Inspect) else { panic!("the store answers") };
    let Reply::View(view) = answer.reply else { panic!("{answer:?}") };
    assert!(view.holders.is_empty() && view.waiters.is_empty(), "{view:?}");
    // Each inbox keeps its client's table, which the store's wires would keep for ever.
    store.inboxes.lock().unwrap().clear();
}

#[test]
fn no_schedule_of_threads_loses_a_wake_up_or_leaves_an_entry() {
    shuttle::check_random(|| scenario(true), SCHEDULES);
    shuttle::check_pct(|| scenario(true), SCHEDULES, 3);
}

#[test]
#[should_panic(expected = "deadlock")]
fn store_without_pushes_is_found() {
    shuttle::check_random(|| scenario(false), SCHEDULES);
}
