//! The threads that drive all clients of the process. A client stays on one of them, and a thread ends with its last client.
//!
//! They are few, so nothing may block on them: files are read and names are looked up on the runtime's blocking threads.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use leasehold_store::process::PerProcess;
use leasehold_store::{BoxFuture, gate, wakes};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::timer::{Timer, Timers};

/// More of them would not be faster: a driver waits for its store.
const MAX_THREADS: usize = 4;

/// A client that is to be driven.
pub(super) trait Drive: Send {
    /// Drives it until it ends. Must be polled on the runtime of its thread.
    fn drive(self: Box<Self>, timer: Timer) -> BoxFuture<()>;

    /// Its thread has no runtime or no timers.
    fn fail(self: Box<Self>, error: io::Error);
}

/// The threads of one process.
#[derive(Default)]
pub(super) struct Threads {
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    threads: Vec<Thread>,
    /// The number of the next thread.
    next: u64,
}

struct Thread {
    number: u64,
    clients: usize,
    /// The thread ends when this is dropped.
    arriving: UnboundedSender<Box<dyn Drive>>,
}

/// Drives a client on the thread with the fewest clients. An error means that there is no thread for it.
pub(super) fn start(client: Box<dyn Drive>) -> io::Result<()> {
    static THREADS: PerProcess<Threads> = PerProcess::of_first(Threads::new());
    THREADS.get_or_default().start(client, max_threads())
}

fn max_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

impl Threads {
    const fn new() -> Self {
        Self { running: Mutex::new(Running { threads: Vec::new(), next: 0 }) }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&'static self, client: Box<dyn Drive>, max: usize) -> io::Result<()> {
        let mut running = self.running();
        // Each thread has a client, because it ends with its last one.
        let added = if running.threads.len() < max { running.spawn(self) } else { Ok(()) };
        match running.threads.iter_mut().min_by_key(|thread| thread.clients) {
            Some(idlest) => idlest.add(client),
            None => added,
        }
    }

    /// A client has ended.
    fn leave(&self, number: u64) {
        let mut running = self.running();
        let Some(at) = running.threads.iter().position(|thread| thread.number == number) else { return };
        running.threads[at].clients -= 1;
        if running.threads[at].clients == 0 {
            running.threads.swap_remove(at);
        }
    }
}

impl Running {
    /// Adds a thread, which has no client yet.
    fn spawn(&mut self, threads: &'static Threads) -> io::Result<()> {
        let number = self.next;
        self.next += 1;
        let (arriving, clients) = unbounded_channel();
        let run = move || run(threads, number, clients);
        thread::Builder::new().name("leasehold".to_owned()).spawn(run)?;
        self.threads.push(Thread { number, clients: 0, arriving });
        Ok(())
    }
}

impl Thread {
    fn add(&mut self, client: Box<dyn Drive>) -> io::Result<()> {
        self.arriving.send(client).map_err(|_| io::Error::other("the thread has ended"))?;
        self.clients += 1;
        Ok(())
    }
}

/// Counts a client of a thread while it runs.
struct Driven {
    threads: &'static Threads,
    number: u64,
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.threads.leave(self.number);
    }
}

fn runtime() -> io::Result<(Runtime, Timers)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let timers = {
        let _entered = runtime.enter();
        Timers::new()?
    };
    Ok((runtime, timers))
}

fn run(threads: &'static Threads, number: u64, mut arriving: UnboundedReceiver<Box<dyn Drive>>) {
    match runtime() {
        Ok((runtime, timers)) => {
            wakes::keep_away(&runtime);
            runtime.spawn(timers.clone().run());
            runtime.block_on(async {
                let mut gate = pin!(gate::keep());
                let mut next = pin!(async {
                    while let Some(client) = arriving.recv().await {
                        let (driven, timer) = (Driven { threads, number }, timers.timer());
                        // A panic ends this task only.
                        runtime.spawn(async move {
                            let _driven = driven;
                            client.drive(timer).await;
                        });
                    }
                });
                // The gate is kept here, because it is a thread's own.
                poll_fn(|context| {
                    let _ = gate.as_mut().poll(context);
                    next.as_mut().poll(context)
                })
                .await;
            });
            // A name may still be looked up for a client that has ended.
            runtime.shutdown_background();
        }
        Err(error) => {
            // The last one ends the channel.
            while let Some(client) = arriving.blocking_recv() {
                let _driven = Driven { threads, number };
                client.fail(io::Error::new(error.kind(), error.to_string()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;
    use std::time::{Duration, Instant};

    use tokio::sync::oneshot;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Reports its thread, and lives until the test ends it.
    struct Client {
        begun: Sender<(usize, ThreadId)>,
        number: usize,
        end: oneshot::Receiver<()>,
    }

    impl Drive for Client {
        fn drive(self: Box<Self>, _timer: Timer) -> BoxFuture<()> {
            Box::pin(async move {
                self.begun.send((self.number, thread::current().id())).unwrap();
                if self.end.await.is_err() {
                    panic!("on purpose");
                }
            })
        }

        fn fail(self: Box<Self>, error: io::Error) {
            panic!("{error}");
        }
    }

    struct Scene {
        threads: &'static Threads,
        begun: Receiver<(usize, ThreadId)>,
        tell: Sender<(usize, ThreadId)>,
        ends: HashMap<usize, oneshot::Sender<()>>,
    }

    impl Scene {
        fn new() -> Self {
            let (tell, begun) = channel();
            let threads = Box::leak(Box::default());
            Self { threads, begun, tell, ends: HashMap::new() }
        }

        /// Starts a client. Returns its thread.
        fn start(&mut self, number: usize) -> ThreadId {
            let (end, ended) = oneshot::channel();
            self.ends.insert(number, end);
            let client = Client { begun: self.tell.clone(), number, end: ended };
            self.threads.start(Box::new(client), 2).unwrap();
            let (started, thread) = self.begun.recv_timeout(LIMIT).unwrap();
            assert_eq!(started, number);
            thread
        }

        fn counts(&self) -> Vec<usize> {
            let mut counts: Vec<_> =
                self.threads.running().threads.iter().map(|thread| thread.clients).collect();
            counts.sort_unstable();
            counts
        }

        fn settles(&self, counts: &[usize]) {
            let give_up = Instant::now() + LIMIT;
            while self.counts() != counts {
                assert!(Instant::now() < give_up, "{:?}, not {counts:?}", self.counts());
                thread::yield_now();
            }
        }
    }

    #[test]
    fn client_starts_on_the_thread_with_the_fewest_and_a_thread_ends_with_its_last() {
        let mut scene = Scene::new();
        let on: Vec<_> = (0..6).map(|number| scene.start(number)).collect();
        assert_ne!(on[0], on[1]);
        assert!(on.iter().all(|thread| on[..2].contains(thread)));
        assert_eq!(scene.counts(), [3, 3]);
        let of_first: Vec<_> = (0..6).filter(|number| on[*number] == on[0]).collect();
        for number in &of_first[..2] {
            scene.ends.remove(number).unwrap().send(()).unwrap();
        }
        scene.settles(&[1, 3]);
        assert_eq!(scene.start(6), on[0]);
        for number in [of_first[2], 6] {
            scene.ends.remove(&number).unwrap().send(()).unwrap();
        }
        scene.settles(&[3]);
        let next = scene.start(7);
        assert!(!on.contains(&next), "the first thread has ended");
        scene.ends.drain().for_each(|(_, end)| end.send(()).unwrap());
        scene.settles(&[]);
    }

    #[test]
    fn panic_ends_one_client_of_a_thread() {
        let mut scene = Scene::new();
        let on: Vec<_> = (0..4).map(|number| scene.start(number)).collect();
        drop(scene.ends.remove(&0));
        scene.settles(&[1, 2]);
        assert_eq!(scene.start(4), on[0], "its thread goes on");
        scene.ends.drain().for_each(|(_, end)| end.send(()).unwrap());
        scene.settles(&[]);
    }
}
