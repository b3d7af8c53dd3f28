//! A peer's life: it says who it is, and carries out orders until there are no more.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet, spawn_local};
use tokio::time::{sleep, timeout};

use crate::acquisition::{Acquisition, write};
use crate::clock::{now_ns, until};
use crate::contend;
use crate::counter::Counter;
use crate::library::{Failure, Library, Lock};
use crate::protocol::{Answer, Contend, Hold, Open, Order, Run};

/// After a failure a task pauses, so that a library that fails at once does not keep the processor busy.
const PAUSE: Duration = Duration::from_millis(1);
/// So long after the end a task that holds the lock has to be done with it.
const GRACE: Duration = Duration::from_millis(500);

/// Carries out orders from standard input until it ends.
///
/// # Panics
///
/// When the system gives no runtime, or standard output is closed.
pub fn serve<L: Library>(library: L) {
    println!("{}", serde_json::to_string(&library.hello()).expect("it is JSON"));
    let (order, mut orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if order.send(line).is_err() {
                return;
            }
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, async move {
        let mut peer = Peer { library: Rc::new(library), clients: Vec::new(), held: Vec::new() };
        while let Some(line) = orders.recv().await {
            let answer = match peer.obey(&line).await {
                Ok(answer) => answer,
                Err(failure) => Answer { error: Some(failure.to_string()), ..Answer::default() },
            };
            println!("{}", serde_json::to_string(&answer).expect("it is JSON"));
        }
    });
}

struct Peer<L: Library> {
    library: Rc<L>,
    clients: Vec<Rc<L::Client>>,
    /// What `hold` took.
    held: Vec<<L::Lock as Lock>::Held>,
}

impl<L: Library> Peer<L> {
    async fn obey(&mut self, line: &str) -> Result<Answer, Failure> {
        match serde_json::from_str(line)? {
            Order::Open(open) => self.open(&open).await,
            Order::Run(run) => self.run(run).await,
            Order::Hold(hold) => self.hold(hold).await,
            Order::Held => {
                let held = self.held.iter().filter(|held| L::Lock::is_held(held)).count();
                Ok(Answer { held: u32::try_from(held)?, ..Answer::default() })
            }
            Order::Contend(order) => self.contend(order).await,
            Order::Left => {
                let client = self.clients.first().ok_or("no client is connected")?;
                Ok(Answer { left: self.library.left(client).await?, ..Answer::default() })
            }
            Order::Close => {
                self.held.clear();
                self.clients.clear();
                Ok(Answer::default())
            }
        }
    }

    async fn open(&mut self, open: &Open) -> Result<Answer, Failure> {
        self.clients.clear();
        for number in 0..open.clients {
            self.clients.push(Rc::new(self.library.connect(open, number).await?));
        }
        Ok(Answer::default())
    }

    async fn run(&self, run: Run) -> Result<Answer, Failure> {
        let shared = Rc::new(SharedRun::new(run)?);
        let run = &shared.run;
        let mut tasks = JoinSet::new();
        for number in 0..run.tasks {
            let client = &self.clients[number as usize % self.clients.len().max(1)];
            let name = if run.own_names { format!("{}:{number}", run.name) } else { run.name.clone() };
            let task = run.first_task + number;
            let lock = self.library.lock(client, run, &name, task)?;
            tasks.spawn_local(run_task(Rc::clone(&shared), lock, task));
        }
        // A library that panics ends its task only; the acquisitions that are missing will show.
        let _ = timeout(until(run.end_ns), async { while tasks.join_next().await.is_some() {} }).await;
        let is_left = async {
            while shared.inside.get() > 0 {
                sleep(PAUSE).await;
            }
        };
        let _ = timeout(GRACE, is_left).await;
        tasks.shutdown().await;
        write(Path::new(&run.log), &shared.acquisitions.borrow())?;
        let failure = shared.failure.borrow().clone();
        Ok(Answer { failures: shared.failures.get(), failure, ..Answer::default() })
    }

    /// Each task has a way to the resource of its own.
    async fn contend(&self, order: Contend) -> Result<Answer, Failure> {
        let run = Run { lock: order.lock.clone(), permits: 1, ..Run::default() };
        let order = Rc::new(order);
        let mut tasks = JoinSet::new();
        for number in 0..order.tasks {
            let client = &self.clients[number as usize % self.clients.len().max(1)];
            let task = order.first_task + number;
            let lock = self.library.lock(client, &run, &order.name, task)?;
            let order = Rc::clone(&order);
            tasks.spawn_local(async move {
                contend::run(&order, lock, task).await.map_err(|failure| failure.to_string())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(Answer::default())
    }

    /// A few hundred at a time: fast, and still answered within any client's patience.
    async fn hold(&mut self, hold: Hold) -> Result<Answer, Failure> {
        const AT_ONCE: u32 = 500;
        let run = Run { lock: hold.lock, is_tuned: hold.is_tuned, permits: 1, ..Run::default() };
        for first in (0..hold.count).step_by(AT_ONCE as usize) {
            let mut taken = Vec::new();
            for number in first..hold.count.min(first + AT_ONCE) {
                let name =
                    if hold.count == 1 { hold.name.clone() } else { format!("{}:{number}", hold.name) };
                let client = &self.clients[number as usize % self.clients.len().max(1)];
                let mut lock = self.library.lock(client, &run, &name, number)?;
                taken.push(spawn_local(async move {
                    lock.take(false).await.map_err(|failure| failure.to_string())
                }));
            }
            for task in taken {
                self.held.push(task.await??);
            }
        }
        Ok(Answer::default())
    }
}

/// What the tasks of one run share.
struct SharedRun {
    run: Run,
    counter: Option<Counter>,
    acquisitions: RefCell<Vec<Acquisition>>,
    /// How many are inside, or on the way out.
    inside: Cell<u32>,
    failures: Cell<u64>,
    failure: RefCell<Option<String>>,
}

impl SharedRun {
    fn new(run: Run) -> Result<Self, Failure> {
        let counter =
            if run.counter.is_empty() { None } else { Some(Counter::open(Path::new(&run.counter))?) };
        Ok(Self {
            run,
            counter,
            acquisitions: RefCell::default(),
            inside: Cell::new(0),
            failures: Cell::new(0),
            failure: RefCell::default(),
        })
    }

    async fn failed(&self, failure: &Failure) {
        self.failures.set(self.failures.get() + 1);
        self.failure.borrow_mut().get_or_insert_with(|| failure.to_string());
        sleep(PAUSE.max(Duration::from_millis(self.run.retry_ms))).await;
    }
}

/// Which acquisitions read: spread evenly, and at another point for each task.
fn is_read(percent: u32, task: u32, acquisition: u32) -> bool {
    (acquisition.wrapping_mul(37).wrapping_add(task.wrapping_mul(61))) % 100 < percent
}

async fn run_task<L: Lock>(shared: Rc<SharedRun>, mut lock: L, task: u32) {
    let run = &shared.run;
    sleep(until(run.start_ns)).await;
    let mut acquisition = 0;
    while now_ns() < run.end_ns && (run.max_acquisitions == 0 || acquisition < run.max_acquisitions) {
        let is_shared = is_read(run.reads_percent, task, acquisition);
        let asked = now_ns();
        let held = match lock.take(is_shared).await {
            Ok(held) => held,
            Err(failure) => {
                shared.failed(&failure).await;
                continue;
            }
        };
        let entered = now_ns();
        shared.inside.set(shared.inside.get() + 1);
        let counter = shared.counter.as_ref().filter(|_| !is_shared);
        let count = counter.map(Counter::get);
        wait(run.hold_us).await;
        if let (Some(counter), Some(Ok(count))) = (counter, count) {
            counter.set(count + 1).expect("the file can be written to");
        }
        let left = now_ns();
        let given = lock.give(held).await;
        shared.inside.set(shared.inside.get() - 1);
        shared.acquisitions.borrow_mut().push(Acquisition {
            task,
            is_shared,
            asked,
            entered,
            left,
            done: now_ns(),
        });
        if let Err(failure) = given {
            shared.failed(&failure).await;
        }
        acquisition += 1;
    }
}

/// On a thread, since the runtime's own timers count in whole milliseconds.
async fn wait(us: u64) {
    if us > 0 {
        let slept = tokio::task::spawn_blocking(move || std::thread::sleep(Duration::from_micros(us)));
        let _ = slept.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_the_given_percentage_of_acquisitions() {
        for percent in [0, 50, 90, 100] {
            let reads = (0..100).filter(|acquisition| is_read(percent, 3, *acquisition)).count();
            assert_eq!(reads, percent as usize);
        }
    }
}
