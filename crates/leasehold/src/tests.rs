//! Futures dropped at every await point, over a store with injected faults, must leave nothing in the store.

mod detached;
mod leases;
mod locks;
mod silence;

use std::collections::VecDeque;
use std::future::{pending, poll_fn, ready};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Failure, Kind, Name, Release, Reply, Resource, View,
};
use leasehold_store::memory::Memory;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Diagnose, EMBEDDED_POLL_INTERVALS, Inbox, Store,
    StoreError, only,
};
use pollster::block_on;

use crate::client::Client;
use crate::{Error, Guard};

/// The fault injected into one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Answered inline.
    Now,
    /// Answered at the second poll.
    Later,
    /// Executed; the answer is lost, which is reported.
    AnswerLost,
    /// Not executed; reported as lost, with an unknown outcome.
    CommandLost,
    /// Not sent, which is reported.
    NotSent,
    /// Executed, and never answered.
    NeverAnswered,
    /// Not executed, and never answered.
    NeverDone,
    /// Never answered, and executed much later.
    Delayed,
    /// Reported as lost, and executed much later.
    LateAndLost,
    /// Not sent because the store is busy, which is reported.
    Busy,
    /// Not sent, because the program was paused, which is reported.
    Paused,
    /// The thread that sends it panics.
    Panics,
}

const FATES: [Fate; 8] = [
    Fate::Now,
    Fate::Later,
    Fate::AnswerLost,
    Fate::CommandLost,
    Fate::NotSent,
    Fate::NeverAnswered,
    Fate::NeverDone,
    Fate::Delayed,
];

/// A delayed command.
type Delayed = Box<dyn FnOnce(&Memory) + Send>;

/// A memory store with faults injected between it and its client.
struct Scripted {
    inner: Arc<Memory>,
    /// Faults of the next commands.
    script: Mutex<VecDeque<Fate>>,
    /// Fault of the commands after those. None: answered inline.
    later: Mutex<Option<Fate>>,
    delayed: Mutex<Vec<Delayed>>,
    /// Runs before the next `Inspect`.
    before_inspect: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Scripted {
    fn run(&self, resource: &Resource, command: &Command) -> CallResult {
        let hook = match command {
            Command::Inspect => self.before_inspect.lock().unwrap().take(),
            _ => None,
        };
        if let Some(hook) = hook {
            hook();
        }
        self.inner.try_call_inline(resource, command).expect("memory answers at once")
    }

    /// Runs a command with its fault.
    fn run_with_fault(
        &self,
        count: usize,
        work: impl FnOnce(&Memory) -> Vec<CallResult> + Send + 'static,
    ) -> BoxFuture<Vec<CallResult>> {
        let next = self.script.lock().unwrap().pop_front();
        let fate = next.or(*self.later.lock().unwrap()).unwrap_or(Fate::Now);
        let fail = |failure| {
            let error = || Err(StoreError::new(failure, "scripted"));
            Box::pin(ready((0..count).map(|_| error()).collect::<Vec<_>>()))
        };
        match fate {
            Fate::Now => Box::pin(ready(work(&self.inner))),
            Fate::Later => {
                let answers = work(&self.inner);
                Box::pin(async {
                    yield_once().await;
                    answers
                })
            }
            Fate::AnswerLost => {
                work(&self.inner);
                fail(Failure::Unknown)
            }
            Fate::CommandLost => fail(Failure::Unknown),
            Fate::NotSent => fail(Failure::NotSent),
            Fate::Paused => fail(Failure::Paused),
            Fate::Busy => fail(Failure::Busy),
            Fate::Panics => panic!("a scripted panic"),
            Fate::NeverAnswered => {
                work(&self.inner);
                Box::pin(pending())
            }
            Fate::NeverDone => Box::pin(pending()),
            Fate::Delayed => {
                self.delayed.lock().unwrap().push(Box::new(move |memory| drop(work(memory))));
                Box::pin(pending())
            }
            Fate::LateAndLost => {
                self.delayed.lock().unwrap().push(Box::new(move |memory| drop(work(memory))));
                fail(Failure::Unknown)
            }
        }
    }

    fn deliver_delayed(&self) {
        for work in std::mem::take(&mut *self.delayed.lock().unwrap()) {
            work(&self.inner);
        }
    }
}

impl Store for Scripted {
    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        let mut script = self.script.lock().unwrap();
        match script.front() {
            None if self.later.lock().unwrap().is_some() => return None,
            None => {}
            Some(Fate::Now) => drop(script.pop_front()),
            Some(_) => return None,
        }
        drop(script);
        Some(self.run(resource, command))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        let answers = self.call_batch(vec![call], replicas);
        Box::pin(async { only(answers.await) })
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        self.run_with_fault(batch.len(), move |memory| {
            let run = |Call { resource, command }: &Call| {
                memory.try_call_inline(resource, command).expect("memory answers at once")
            };
            batch.iter().map(run).collect()
        })
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let attempts = attempts.to_vec();
        let count = attempts.len();
        Some(self.run_with_fault(count, move |memory| {
            block_on(memory.acquire_all(&attempts).expect("the memory store supports acquire_all"))
        }))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        self.inner.list()
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        self.inner.doctor()
    }
}

async fn yield_once() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A client of a scripted store, and another client of the same lock.
struct Stage {
    resource: Resource,
    store: Arc<Scripted>,
    client: Client,
}

const OTHER: ClientId = ClientId::new(1);

impl Stage {
    fn new() -> Self {
        Self::of(Kind::Mutex)
    }

    fn of(kind: Kind) -> Self {
        let resource = Resource { kind, name: Name::new("a").unwrap() };
        let inner = Memory::open("");
        let store = Arc::new(Scripted {
            inner,
            script: Mutex::default(),
            later: Mutex::default(),
            delayed: Mutex::default(),
            before_inspect: Mutex::default(),
        });
        let opened = store.clone();
        let open = |id: ClientId, inbox: Weak<dyn Inbox>| async move {
            opened.inner.join(id, inbox);
            Ok::<_, Error>(opened as Arc<dyn Store>)
        };
        let client = block_on(Client::with_store("memory:".to_owned(), open)).unwrap();
        Self { resource, store, client }
    }

    /// Another client of the same leases, without faults.
    fn other_client(&self) -> Client {
        let store = self.store.inner.clone();
        let open = |id: ClientId, inbox: Weak<dyn Inbox>| async move {
            store.join(id, inbox);
            Ok::<_, Error>(store as Arc<dyn Store>)
        };
        block_on(Client::with_store("memory:".to_owned(), open)).unwrap()
    }

    /// A short ttl, so that lost releases are retried soon.
    fn mutex(&self) -> crate::Mutex {
        self.client.mutex("a").ttl(Duration::from_secs(2))
    }

    fn script(&self, fates: &[Fate]) {
        *self.store.script.lock().unwrap() = fates.iter().copied().collect();
    }

    /// Injects a fault into all commands until `answers_again`.
    fn becomes(&self, fate: Fate) {
        *self.store.later.lock().unwrap() = Some(fate);
    }

    fn answers_again(&self) {
        *self.store.later.lock().unwrap() = None;
    }

    fn other_takes_it(&self) {
        self.other_takes(1, 1);
    }

    fn other_takes(&self, capacity: u32, weight: u32) {
        let acquire = Acquire {
            capacity,
            weight,
            ..Acquire::exclusive(Acquisition { client: OTHER, sequence: 1 }, Duration::from_secs(600))
        };
        let answer = self.store.run(&self.resource, &acquire.into()).unwrap();
        assert!(matches!(answer.reply, Reply::Granted(_)));
    }

    fn other_gives_it_back(&self) {
        let acquisition = Acquisition { client: OTHER, sequence: 1 };
        let release = Release::now(acquisition);
        let _ = self.store.run(&self.resource, &Command::Release(release));
    }

    fn view(&self) -> View {
        let answer = self.store.run(&self.resource, &Command::Inspect).unwrap();
        let Reply::View(view) = answer.reply else { panic!("{answer:?}") };
        view
    }

    fn is_clean(&self) -> bool {
        let view = self.view();
        view.waiters.is_empty() && view.holders.iter().all(|holder| holder.acquisition.client == OTHER)
    }

    /// Asserts that the settled client has left nothing in the store, also after the delayed commands have arrived.
    fn assert_nothing_is_left(&self, case: &str) {
        let give_up = Instant::now() + Duration::from_secs(20);
        while !self.client.is_settled() {
            assert!(Instant::now() < give_up, "{case}: the client does not settle; {:?}", self.view());
            thread::sleep(Duration::from_millis(5));
        }
        assert!(self.is_clean(), "{case}: {:?} was left", self.view());
        self.store.deliver_delayed();
        assert!(self.is_clean(), "{case}: {:?} was left by a delayed command", self.view());
    }
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[derive(Clone, Copy, Debug)]
enum Scene {
    Free,
    /// Another client holds the lock; the attempt is a `try_lock`.
    Busy,
    /// Another client keeps the lock.
    Held,
    /// Another client releases the lock during the wait.
    HandedOver,
    /// The queue is full.
    QueueFull,
}

const SCENES: [Scene; 5] = [Scene::Free, Scene::Busy, Scene::Held, Scene::HandedOver, Scene::QueueFull];

/// Polls `lock` this often, and drops the future or its result.
fn drop_lock(scene: Scene, fates: [Fate; 2], polls: u32) {
    let stage = Stage::new();
    if !matches!(scene, Scene::Free) {
        stage.other_takes_it();
    }
    stage.script(&fates);
    let mutex = stage.mutex().max_waiters(if matches!(scene, Scene::QueueFull) { 0 } else { 10 });
    {
        let mut future = pin!(async {
            match scene {
                Scene::Busy => mutex.try_lock().await,
                _ => mutex.lock().await.map(Some),
            }
        });
        for poll in 0..polls {
            if poll == 2 && matches!(scene, Scene::HandedOver) {
                stage.other_gives_it_back();
            }
            if let Poll::Ready(ended) = poll_once(future.as_mut()) {
                // A guard is dropped here too.
                drop::<Result<Option<Guard>, Error>>(ended);
                break;
            }
        }
    }
    stage.assert_nothing_is_left(&format!("{scene:?}, {fates:?}, dropped after {polls} polls"));
}

/// Two tasks wait in a local queue. Polls the first this often, and drops the future or its result: the second must not be blocked.
fn drop_first_in_queue(scene: Scene, fates: [Fate; 2], polls: u32) {
    let case = format!("{scene:?}, {fates:?}, first task dropped after {polls} polls");
    let stage = Stage::new();
    if !matches!(scene, Scene::Free) {
        stage.other_takes_it();
    }
    stage.script(&fates);
    let mutex = stage.mutex();
    let mut second = Box::pin(mutex.lock_timeout(Duration::from_secs(20)));
    let mut ended = None;
    {
        let mut first = pin!(mutex.lock());
        for poll in 0..polls {
            if poll == 2 && matches!(scene, Scene::HandedOver) {
                stage.other_gives_it_back();
            }
            if poll_once(first.as_mut()).is_ready() {
                break;
            }
            if poll == 0
                && let Poll::Ready(end) = poll_once(second.as_mut())
            {
                ended = Some(end);
            }
        }
    }
    if matches!(scene, Scene::HandedOver) {
        stage.other_gives_it_back();
    }
    // If the store did not answer, the error is the outcome.
    let ended = ended.unwrap_or_else(|| block_on(second));
    assert!(!matches!(ended, Ok(None)), "{case}: the second task was forgotten");
    drop(ended);
    stage.assert_nothing_is_left(&case);
}

fn drop_release(fates: [Fate; 2], polls: u32, limit: Option<Duration>) {
    let stage = Stage::new();
    let guard = block_on(stage.mutex().lock()).unwrap();
    stage.script(&fates);
    {
        let mut future = pin!(async {
            match limit {
                None => guard.release().await,
                Some(limit) => guard.release_timeout(limit).await,
            }
        });
        for _ in 0..polls {
            if poll_once(future.as_mut()).is_ready() {
                break;
            }
        }
    }
    stage.assert_nothing_is_left(&format!("release with {fates:?}, {limit:?}, dropped after {polls} polls"));
}

fn every_pair() -> impl Iterator<Item = [Fate; 2]> {
    FATES.into_iter().flat_map(|first| FATES.into_iter().map(move |second| [first, second]))
}

/// A case mostly waits, so many run concurrently.
fn run_together<C: Copy + Send + Sync>(cases: &[C], run: impl Fn(C) + Sync) {
    let run = &run;
    for some in cases.chunks(128) {
        thread::scope(|scope| {
            for case in some {
                scope.spawn(move || run(*case));
            }
        });
    }
}

#[test]
fn lock_future_dropped_at_any_await_point_leaves_nothing() {
    let cases: Vec<_> = SCENES
        .into_iter()
        .flat_map(|scene| every_pair().flat_map(move |fates| (0..5).map(move |polls| (scene, fates, polls))))
        .collect();
    run_together(&cases, |(scene, fates, polls)| drop_lock(scene, fates, polls));
}

#[test]
fn first_task_of_a_local_queue_dropped_at_any_await_point_blocks_no_other() {
    let scenes = [Scene::Free, Scene::HandedOver];
    let cases: Vec<_> = scenes
        .into_iter()
        .flat_map(|scene| every_pair().flat_map(move |fates| (1..4).map(move |polls| (scene, fates, polls))))
        .collect();
    run_together(&cases, |(scene, fates, polls)| drop_first_in_queue(scene, fates, polls));
}

#[test]
fn release_future_dropped_at_any_await_point_leaves_nothing() {
    let limits = [None, Some(Duration::ZERO), Some(Duration::from_secs(5))];
    let cases: Vec<_> = limits
        .into_iter()
        .flat_map(|limit| every_pair().flat_map(move |fates| (0..4).map(move |polls| (fates, polls, limit))))
        .collect();
    run_together(&cases, |(fates, polls, limit)| drop_release(fates, polls, limit));
}

/// Polls an upgrade this often and drops it, while another reader is there, leaves, or never was.
fn drop_upgrade(scene: Scene, fates: [Fate; 2], polls: u32) {
    let stage = Stage::of(Kind::ReadWrite);
    let lock = stage.client.rw_lock("a").ttl(Duration::from_secs(2));
    let guard = block_on(lock.upgradable_read()).unwrap();
    if !matches!(scene, Scene::Free) {
        stage.other_takes(u32::MAX, 1);
    }
    stage.script(&fates);
    {
        let mut future = pin!(guard.upgrade());
        for poll in 0..polls {
            if poll == 2 && matches!(scene, Scene::HandedOver) {
                stage.other_gives_it_back();
            }
            if poll_once(future.as_mut()).is_ready() {
                break;
            }
        }
    }
    stage.assert_nothing_is_left(&format!("{scene:?}, upgrade with {fates:?}, dropped after {polls} polls"));
}

#[test]
fn upgrade_future_dropped_at_any_await_point_leaves_nothing() {
    let scenes = [Scene::Free, Scene::Held, Scene::HandedOver];
    let cases: Vec<_> = scenes
        .into_iter()
        .flat_map(|scene| every_pair().flat_map(move |fates| (0..5).map(move |polls| (scene, fates, polls))))
        .collect();
    run_together(&cases, |(scene, fates, polls)| drop_upgrade(scene, fates, polls));
}

#[test]
fn client_that_forgets_a_cancelled_attempt_fails_the_check() {
    // Shows that the check can fail: the queue entry is never cancelled.
    let stage = Stage::new();
    stage.other_takes_it();
    let mutex = stage.mutex();
    let mut future = Box::pin(mutex.lock());
    assert!(poll_once(future.as_mut()).is_pending());
    assert!(!stage.is_clean());
    std::mem::forget(future);
    assert!(!stage.is_clean());
}

/// A waker whose clones are counted.
struct Counted {
    _alive: Arc<()>,
}

impl std::task::Wake for Counted {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn dropped_future_drops_its_waker() {
    let stage = Stage::new();
    let guard = block_on(stage.mutex().lock()).unwrap();
    let alive = Arc::new(());
    for _ in 0..100 {
        let waker = Waker::from(Arc::new(Counted { _alive: alive.clone() }));
        let mut context = Context::from_waker(&waker);
        let mut lost = pin!(guard.lost());
        assert!(lost.as_mut().poll(&mut context).is_pending());
        let mut expires = pin!(guard.wait_until_expiring(Duration::ZERO));
        assert!(expires.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(Arc::strong_count(&alive), 1, "no waker of a dropped future is kept");
}

/// A caller's task has room for them, and copies them.
#[test]
fn futures_of_callers_are_small() {
    let client = block_on(Client::connect("memory:")).unwrap();
    let mutex = client.mutex("a");
    let guard = block_on(mutex.lock()).unwrap();
    let sizes = [size_of_val(&mutex.lock()), size_of_val(&mutex.try_lock()), size_of_val(&guard.release())];
    assert!(sizes.iter().all(|size| *size <= 1_240), "{sizes:?}");
}

/// They share threads, so the end of a thread ends no task.
#[test]
fn close_ends_the_tasks_of_its_own_client_only() {
    let connect = || {
        let alive = Arc::new(());
        let kept = alive.clone();
        let open = |id: ClientId, inbox: Weak<dyn Inbox>| async move {
            leasehold_store::tasks::spawn(async move {
                let _kept = kept;
                pending::<()>().await;
            });
            let store = Memory::open("");
            store.join(id, inbox);
            Ok::<_, Error>(store as Arc<dyn Store>)
        };
        (block_on(Client::with_store("memory:".to_owned(), open)).unwrap(), alive)
    };
    // More than there are threads.
    let mut clients: Vec<_> = (0..6).map(|_| connect()).collect();
    while let Some((client, alive)) = clients.pop() {
        block_on(client.close()).unwrap();
        assert_eq!(Arc::strong_count(&alive), 1, "its task has ended");
        assert!(clients.iter().all(|(_, alive)| Arc::strong_count(alive) == 2), "the others run");
    }
}
