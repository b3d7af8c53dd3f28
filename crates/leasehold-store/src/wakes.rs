//! Wakes the program's tasks away from the threads that drive clients.
//!
//! A waker is code of the program, which may block or panic, and all clients of a process share a few threads. So there each waker is called
//! on a thread beside, unless it is known to do neither: those of tokio's tasks, and of this library's blocking calls. A second thread switch
//! for them would delay each lock that is handed over. A waker that blocks delays the others that are called on that thread, but no renewal.

use std::cell::RefCell;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, RawWakerVTable, Wake, Waker};
use std::thread;

use tokio::runtime::Runtime;

thread_local! {
    /// Only on a thread that drives clients.
    static BESIDE: RefCell<Option<Beside>> = const { RefCell::new(None) };
}

/// The thread beside, which ends with the one that it belongs to.
struct Beside(Option<Sender<Waker>>);

/// How a harmless waker is recognised: by its functions.
static HARMLESS: [OnceLock<&'static RawWakerVTable>; 4] = [const { OnceLock::new() }; 4];

/// A kind of harmless waker.
#[derive(Clone, Copy)]
enum Kind {
    /// Of a task of tokio's, of the future that a runtime of one thread blocks on, and of one that a thread blocks on elsewhere.
    Task,
    Root,
    Thread,
    /// Of a blocking call.
    Call,
}

/// This thread drives clients from now on, on this runtime.
pub fn keep_away(runtime: &Runtime) {
    BESIDE.set(Some(Beside(None)));
    // Each runtime has the same wakers, also those of the program.
    runtime.handle().block_on(learn(Kind::Thread));
    runtime.block_on(learn(Kind::Root));
    runtime.spawn(learn(Kind::Task));
}

/// The wakers of this future, which is a blocking call, are harmless.
pub async fn learn_blocking() {
    learn(Kind::Call).await;
}

async fn learn(kind: Kind) {
    let known = &HARMLESS[kind as usize];
    if known.get().is_none() {
        let functions = poll_fn(|context: &mut Context<'_>| Poll::Ready(context.waker().vtable())).await;
        // Another thread may have learned the same.
        let _ = known.set(functions);
    }
}

/// Whether this waker neither blocks nor panics.
fn is_harmless(waker: &Waker) -> bool {
    HARMLESS.iter().filter_map(OnceLock::get).any(|functions| **functions == *waker.vtable())
}

/// Polls with a waker that may be called on a thread that drives clients.
pub fn guarded<T>(context: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> T) -> T {
    if is_harmless(context.waker()) {
        return poll(context);
    }
    let waker = Waker::from(Arc::new(Guarded(context.waker().clone())));
    poll(&mut Context::from_waker(&waker))
}

struct Guarded(Waker);

impl Wake for Guarded {
    fn wake(self: Arc<Self>) {
        wake(self.0.clone());
    }
}

/// Wakes a task: beside, if this thread drives clients.
pub fn wake(waker: Waker) {
    let mut rest = Some(waker);
    if !rest.as_ref().is_some_and(is_harmless) {
        // A thread that ends has no thread beside any more.
        let _ = BESIDE.try_with(|beside| {
            if let Some(beside) = &mut *beside.borrow_mut() {
                rest = rest.take().and_then(|waker| beside.wake(waker));
            }
        });
    }
    if let Some(waker) = rest {
        waker.wake();
    }
}

impl Beside {
    /// Returns the waker if there can be no thread for it.
    fn wake(&mut self, waker: Waker) -> Option<Waker> {
        if self.0.is_none() {
            let (wakers, arriving) = channel();
            let run = move || run(&arriving);
            self.0 = thread::Builder::new().name("leasehold-wake".to_owned()).spawn(run).ok().map(|_| wakers);
        }
        match &self.0 {
            Some(wakers) => wakers.send(waker).err().map(|unsent| unsent.0),
            None => Some(waker),
        }
    }
}

fn run(arriving: &Receiver<Waker>) {
    for waker in arriving {
        // The panic hook has reported it. Other tasks are woken all the same.
        let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Mutex;
    use std::thread::ThreadId;
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::sync::oneshot;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Panics, or blocks until it is let go.
    struct Harmful(Sender<ThreadId>, Option<Mutex<Receiver<()>>>);

    impl Wake for Harmful {
        fn wake(self: Arc<Self>) {
            self.0.send(thread::current().id()).unwrap();
            match &self.1 {
                Some(until) => drop(until.lock().unwrap().recv()),
                None => panic!("on purpose"),
            }
        }
    }

    fn waker(report: &Sender<ThreadId>, until: Option<Receiver<()>>) -> Waker {
        Waker::from(Arc::new(Harmful(report.clone(), until.map(Mutex::new))))
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn thread_that_drives_clients_goes_on_while_a_waker_blocks_or_panics() {
        let (report, reports) = channel();
        let (let_go, until) = channel();
        let driver = thread::spawn(move || {
            keep_away(&runtime());
            wake(waker(&report, None));
            let (sender, mut receiver) = oneshot::channel();
            let waker = waker(&report, Some(until));
            let polled =
                guarded(&mut Context::from_waker(&waker), |context| Pin::new(&mut receiver).poll(context));
            assert!(polled.is_pending());
            sender.send(()).unwrap();
            thread::current().id()
        });
        let driver = driver.join().expect("it did not panic");
        for _ in 0..2 {
            assert_ne!(reports.recv_timeout(LIMIT).unwrap(), driver);
        }
        drop(let_go);
        assert!(reports.recv_timeout(LIMIT).is_err(), "the thread beside has ended with it");
    }

    #[test]
    fn waker_is_called_at_once_on_other_threads() {
        let (report, reports) = channel();
        let (_, until) = channel();
        wake(waker(&report, Some(until)));
        assert_eq!(reports.try_recv(), Ok(thread::current().id()));
    }

    /// Otherwise a lock that is handed over would come later.
    #[test]
    fn wakers_of_tokio_and_of_blocking_calls_need_no_thread_beside() {
        let driver = runtime();
        keep_away(&driver);
        BESIDE.set(None);
        driver.block_on(async { tokio::task::yield_now().await });
        let is_known = || poll_fn(|context: &mut Context<'_>| Poll::Ready(is_harmless(context.waker())));
        let several = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        for runtime in [runtime(), several] {
            assert!(runtime.block_on(is_known()));
            assert!(runtime.block_on(async { tokio::spawn(is_known()).await.unwrap() }));
        }
        assert!(pollster::block_on(async {
            learn_blocking().await;
            is_known().await
        }));
        let (report, _reports) = channel();
        assert!(!is_harmless(&waker(&report, None)));
        assert!(!is_harmless(Waker::noop()));
    }
}
