//! Locks on executors of all sorts, and beside runtimes that do not run, or lack a part.

use std::panic;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use leasehold_testkit::{Server, wait_until};
use pollster::block_on;
use tokio::runtime::{Builder, Runtime};

/// Far below the time after which a command counts as lost, and far above that of a pause of the machine.
const LIMIT: Duration = Duration::from_secs(8);

async fn lock_and_release(client: &Client, name: &str) -> Result<(), Error> {
    client.mutex(name).lock().await?.release().await?;
    let guard = client.mutex(name).try_lock().await?.expect("it is free");
    guard.release().await
}

/// A client whose connection in the runtime is open, and has been used.
fn connected_in(runtime: &Runtime, server: &Server) -> Client {
    let client = runtime.block_on(Client::connect(&server.url())).unwrap();
    wait_until("the client has three connections, beside that of this question", || {
        runtime.block_on(lock_and_release(&client, "first")).unwrap();
        server.query::<String>(&["CLIENT", "LIST"]).unwrap().lines().count() >= 4
    });
    for _ in 0..20 {
        runtime.block_on(lock_and_release(&client, "first")).unwrap();
    }
    client
}

/// Fails if `work` takes too long, for example for ever.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let worker = thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    if is_done.recv_timeout(3 * LIMIT).is_err() {
        assert!(worker.is_finished(), "it does not return");
    }
    worker.join().unwrap();
}

#[test]
fn lock_in_a_runtime_that_was_entered_and_is_not_driven_is_granted_at_once() {
    in_time(|| {
        let server = Server::on_port();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let client = connected_in(&runtime, &server);
        let entered = || {
            let _entered = runtime.enter();
            let began = Instant::now();
            for number in 0..3 {
                block_on(lock_and_release(&client, &number.to_string())).unwrap();
            }
            assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
        };
        entered();
        thread::scope(|scope| scope.spawn(entered).join().unwrap());
        runtime.block_on(lock_and_release(&client, "driven again")).unwrap();
    });
}

/// Tokio panics where it lacks a part. A connection is tried once in such a runtime, and not again when the client reconnects.
#[test]
fn runtime_without_timers_or_sockets_has_locks_all_the_same() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if info.to_string().contains("disabled. Call `enable_") {
            PANICS.fetch_add(1, Ordering::SeqCst);
        } else {
            hook(info);
        }
    }));
    in_time(|| {
        let server = Server::on_port();
        type Configure = fn(&mut Builder) -> &mut Builder;
        let configure: [Configure; 3] = [|builder| builder, Builder::enable_io, Builder::enable_time];
        for configure in configure {
            for runtime in [Builder::new_current_thread(), Builder::new_multi_thread()] {
                let mut builder = runtime;
                let runtime = configure(&mut builder).build().unwrap();
                let began = Instant::now();
                let client = runtime.block_on(Client::connect(&server.url())).unwrap();
                let use_it = || {
                    runtime.block_on(async {
                        lock_and_release(&client, "a").await.unwrap();
                        tokio::task::yield_now().await;
                    });
                };
                wait_until("a connection was tried", || {
                    use_it();
                    PANICS.load(Ordering::SeqCst) > 0
                });
                for _ in 0..3 {
                    server.run(&["CLIENT", "KILL", "TYPE", "normal"]);
                    (0..9).for_each(|_| use_it());
                }
                assert_eq!(PANICS.swap(0, Ordering::SeqCst), 1);
                runtime.block_on(client.close()).unwrap();
                assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
            }
        }
    });
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls its tasks in one thread, which knows of no runtime.
#[derive(Default)]
struct Executor {
    ready: Vec<(usize, Task)>,
    waiting: Vec<Option<Task>>,
}

struct Ready {
    task: usize,
    queue: Sender<usize>,
    thread: Thread,
}

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        let _ = self.queue.send(self.task);
        self.thread.unpark();
    }
}

impl Executor {
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.ready.push((self.waiting.len(), Box::pin(task)));
        self.waiting.push(None);
    }

    fn run(mut self) {
        let (queue, woken) = mpsc::channel();
        let mut left = self.waiting.len();
        while left > 0 {
            for (task, mut future) in std::mem::take(&mut self.ready) {
                let waker =
                    Waker::from(Arc::new(Ready { task, queue: queue.clone(), thread: thread::current() }));
                match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(()) => left -= 1,
                    Poll::Pending => self.waiting[task] = Some(future),
                }
            }
            let known: Vec<usize> = woken.try_iter().collect();
            self.ready.extend(known.into_iter().filter_map(|task| Some((task, self.waiting[task].take()?))));
            if self.ready.is_empty() && left > 0 {
                thread::park();
            }
        }
    }
}

#[test]
fn executor_without_a_runtime_has_locks() {
    in_time(|| {
        let server = Server::on_port();
        for url in [server.url(), "memory:".to_owned()] {
            let client = block_on(Client::connect(&url)).unwrap();
            let mut executor = Executor::default();
            for number in 0..30 {
                let client = client.clone();
                executor.spawn(async move {
                    for _ in 0..3 {
                        client.mutex((number % 5).to_string()).lock().await.unwrap().release().await.unwrap();
                    }
                });
            }
            executor.run();
            block_on(client.close()).unwrap();
        }
    });
}
