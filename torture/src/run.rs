//! The controller: starts servers, the resource and the workers, injects faults, and looks at what is left.

use std::thread::sleep;
use std::time::Duration;

use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::Contend;
use rustix::process::Signal;

use crate::faults::{Fault, StoreKind, bound};
use crate::history::{History, Injected};
use crate::options::Options;
use crate::pauses::Pauses;
use crate::report::{Left, Report};
use crate::resource::{Fence, Resource};
use crate::rng::Rng;
use crate::serve::Fleet;
use crate::stores::{Injection, Stores};
use crate::workers::{Work, Worker, left_until, wait_until};

/// The longest usual section.
const HOLD: Duration = Duration::from_millis(30);
/// Time between two checks of the lock.
const STEP: Duration = Duration::from_millis(20);
/// How many of a hundred sections are longer than the ttl, where leases are renewed.
const LONG_PERCENT: u64 = 1;
/// A peer's task that waits for so long while the lock is free is lost.
const PEER_LIMIT: Duration = Duration::from_secs(60);
/// A sleep that is later than this is a pause of the machine.
const PAUSE: Duration = Duration::from_millis(500);
/// And one that is later than this part of the ttl: a lease may then expire.
const SHORT: u32 = 4;
/// After at least so many faults there is a time without any.
const UNTIL_REST: usize = 40;
/// That time: the effects of a fault are over sooner, and then locks are handed on promptly, no call fails, and waiters have their order.
const REST: Duration = Duration::from_secs(35);
/// So long before the last attempts the file descriptors are counted, in nanoseconds.
const END: u64 = 100_000_000;
/// A killed worker's place in a wait queue expires by then; its lease sooner.
const PLACE: Duration = Duration::from_secs(90);
/// Without a fault all is released by then: the slowest node of a quorum has its commands.
const RELEASED: Duration = Duration::from_secs(5);

struct Controller<'a> {
    options: &'a Options,
    /// The servers that the workers call, if the target is served.
    fleet: Option<Fleet>,
    stores: Stores,
    resource: Resource,
    workers: Vec<Worker>,
    work: Work,
    rng: Rng,
    faults: Vec<Injected>,
    lost_descriptors: i64,
}

/// Runs it all. Returns the report and the whole history.
///
/// # Errors
///
/// A server or a worker does not start.
pub fn run(options: &Options) -> Result<(Report, History), String> {
    let (target, store) = (options.target, options.store);
    if !target.runs_on(store) {
        return Err(format!("{} has no lock on {}", target.name, store.name()));
    }
    let stores = Stores::start(store, &options.faults)?;
    let resource = Resource::start(stores.folder(), Fence::Compares).map_err(|error| error.to_string())?;
    let fleet = target.is_served.then(|| Fleet::start(&stores.url(options.ttl))).transpose()?;
    let work = work(options, fleet.as_ref(), &stores, &resource);
    let rng = Rng::new(options.seed);
    let mut controller = Controller {
        options,
        fleet,
        stores,
        resource,
        workers: Vec::new(),
        work,
        rng,
        faults: Vec::new(),
        lost_descriptors: 0,
    };
    controller.start_workers()?;
    let pauses = Pauses::watch((options.ttl / SHORT).min(PAUSE));
    let start = now_ns();
    let end = start + u64::try_from(options.time.as_nanos()).unwrap_or(u64::MAX);
    controller.work.contend.end_ns = end;
    for worker in &mut controller.workers {
        worker.work(&controller.work)?;
    }
    let library = controller.workers[0].library().to_owned();
    controller.torture(end)?;
    let is_idle = controller.drain(end);
    // Before the workers end, since that ends their waiting too.
    let mut history = controller.resource.history();
    (history.start, history.end) = (start, now_ns());
    history.pauses = pauses.seen();
    let left = controller.finish(is_idle)?;
    history.faults = std::mem::take(&mut controller.faults);
    let report = Report::new(options, library, &history, left, controller.resource.failures());
    Ok((report, history))
}

fn work(options: &Options, fleet: Option<&Fleet>, stores: &Stores, resource: &Resource) -> Work {
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let (processes, tasks) = options.workers;
    // `memory:` is within one process.
    let is_one = options.store == StoreKind::Memory;
    let own = || fleet.map(Fleet::url).into_iter().chain([stores.url(options.ttl)]).collect();
    let urls = if options.target.has_bound() { own() } else { stores.urls(options.ttl) };
    let contend = Contend {
        lock: options.target.lock.to_owned(),
        name: "torture".to_owned(),
        resource: resource.path().display().to_string(),
        tasks: if is_one { processes * tasks } else { tasks },
        first_task: 0,
        hold_us: micros(HOLD),
        long_us: micros(options.ttl * 3 / 2),
        long_percent: if options.target.renews { LONG_PERCENT } else { 0 },
        write_us: micros(options.write),
        step_us: micros(STEP),
        end_ns: 0,
        seed: options.seed,
    };
    let clients = if is_one {
        processes
    } else if options.target.has_client_per_task() {
        tasks
    } else {
        1
    };
    Work { urls, ttl: options.ttl, clients, contend }
}

impl Controller<'_> {
    fn start_workers(&mut self) -> Result<(), String> {
        let processes = if self.options.store == StoreKind::Memory { 1 } else { self.options.workers.0 };
        for number in 0..processes {
            self.workers.push(self.start_worker(number * self.work.contend.tasks)?);
        }
        Ok(())
    }

    fn start_worker(&self, first_task: u32) -> Result<Worker, String> {
        Worker::start(&self.options.target, &self.work, first_task)
            .map_err(|why| format!("{}: {why}", self.options.target.program))
    }

    /// Each fault once in a random order, then again, until the time is over. There is a rest after some rounds.
    fn torture(&mut self, end: u64) -> Result<(), String> {
        self.calm();
        let (mut round, mut rested) = (Vec::new(), 0);
        while now_ns() < end && !self.options.faults.is_empty() {
            if round.is_empty() {
                round.clone_from(&self.options.faults);
                if self.faults.len() >= rested + UNTIL_REST {
                    sleep(REST.min(left_until(end)));
                    rested = self.faults.len();
                }
            }
            self.check_workers()?;
            let fault = round.swap_remove(self.rng.index(round.len()));
            self.inject(fault)?;
            self.calm();
        }
        Ok(())
    }

    /// An error if a worker has failed. It would be forgotten once it is killed, and it does not end its work.
    fn check_workers(&self) -> Result<(), String> {
        for (number, worker) in self.workers.iter().enumerate() {
            if let Some(why) = worker.failure() {
                return Err(format!("worker {number} has failed: {why}"));
            }
        }
        Ok(())
    }

    fn inject(&mut self, fault: Fault) -> Result<(), String> {
        let (start, number) = (now_ns(), self.aim());
        let (done, tasks, mut healed) = match fault {
            Fault::WorkerStop => {
                let mut injection = Injection { fault, ttl: self.options.ttl, rng: &mut self.rng };
                let time = injection.duration(20, 250);
                self.workers[number].signal(Signal::STOP);
                sleep(time);
                self.workers[number].signal(Signal::CONT);
                let tasks = self.workers[number].tasks();
                (Ok(format!("worker {number} for {} ms", time.as_millis())), tasks, None)
            }
            Fault::WorkerKill => {
                let (tasks, killed) = (self.kill_worker(number)?, Some(start));
                (Ok(format!("worker {number}")), tasks, killed)
            }
            _ => {
                let mut injection = Injection { fault, ttl: self.options.ttl, rng: &mut self.rng };
                let done = match &mut self.fleet {
                    Some(fleet) if fault.is_of_serve() => fleet.inject(&mut injection),
                    _ => self.stores.inject(&mut injection),
                };
                (done, Vec::new(), None)
            }
        };
        let healed = *healed.get_or_insert_with(now_ns);
        let has_failed = done.is_err();
        let target = done.unwrap_or_else(|why| format!("failed: {why}"));
        if self.options.is_verbose {
            println!("{:>7} ms  {} {target}", (healed - start) / 1_000_000, fault.name());
        }
        self.faults.push(Injected { fault, target, start, healed, tasks, has_failed });
        Ok(())
    }

    /// Usually the process that holds the lock.
    fn aim(&mut self) -> usize {
        let by_chance = self.rng.index(self.workers.len());
        let is_aimed = self.rng.between(0, 9) < 7;
        let holder = self.resource.holder().filter(|_| is_aimed);
        holder.map_or(by_chance, |task| (task / self.work.contend.tasks) as usize)
    }

    fn kill_worker(&mut self, number: usize) -> Result<Vec<u32>, String> {
        let tasks = self.workers[number].tasks();
        let grown = self.workers[number].descriptors_grown();
        self.lost_descriptors = self.lost_descriptors.max(grown);
        // The old process ends before the new one starts, since its tasks have the same numbers.
        self.workers.remove(number).kill();
        let first = tasks.first().copied().unwrap_or(0);
        let is_gone = || tasks.iter().all(|task| !self.resource.is_connected(*task));
        if !wait_until(Duration::from_secs(5), is_gone) {
            return Err("the resource still has a connection of a killed worker".to_owned());
        }
        let mut worker = self.start_worker(first)?;
        worker.work(&self.work)?;
        self.workers.insert(number, worker);
        Ok(tasks)
    }

    /// Lets sections go on after a fault: until each task could have had two, or nothing has happened for longer than the bound.
    fn calm(&mut self) {
        let before = self.resource.sections();
        let tasks = (self.work.contend.tasks as usize) * self.workers.len();
        sleep(Duration::from_millis(self.rng.between(50, 500)));
        let fault = self.faults.last().map_or(Fault::None, |injected| injected.fault);
        let limit = bound(fault, self.options.store, self.options.ttl) + Duration::from_secs(1);
        let mut seen = before;
        while seen < before + 2 * tasks {
            let now = seen;
            if !wait_until(limit, || self.resource.sections() > now || self.resource.is_idle()) {
                break;
            }
            seen = self.resource.sections();
            if self.resource.is_idle() {
                break;
            }
        }
        self.note_descriptors();
    }

    /// While the tasks are at work: a task that has ended has closed its files.
    fn note_descriptors(&mut self) {
        if now_ns() < self.work.contend.end_ns {
            self.workers.iter_mut().for_each(Worker::note_descriptors);
        }
    }

    /// Waits for the last sections. Returns false if a task still waits after the bound.
    fn drain(&mut self, end: u64) -> bool {
        sleep(left_until(end - END));
        self.note_descriptors();
        let fault = self.faults.last().map_or(Fault::None, |injected| injected.fault);
        // A peer promises no bound, so that only a much longer time shows that a waiter is lost.
        let bound = bound(fault, self.options.store, self.options.ttl) + Duration::from_secs(1);
        let limit = if self.options.target.has_bound() { bound } else { PEER_LIMIT };
        let latest = end + u64::try_from(limit.as_nanos()).unwrap_or(0) * 4;
        loop {
            let sections = self.resource.sections();
            let has_moved =
                wait_until(limit, || self.resource.sections() > sections || self.resource.is_idle());
            if self.resource.is_idle() {
                return true;
            }
            // A holder may be inside for longer, but not for ever.
            if !has_moved && (!self.resource.has_holder() || now_ns() > latest) {
                return false;
            }
        }
    }

    /// Looks at what is left.
    fn finish(&mut self, is_idle: bool) -> Result<Left, String> {
        let grown = self.workers.iter().map(Worker::descriptors_grown).max().unwrap_or(0);
        let descriptors = grown.max(self.lost_descriptors);
        // A task that waits for ever keeps its process from answering.
        let keys = if is_idle {
            self.left_in_store()?
        } else {
            self.check_workers()?;
            None
        };
        Ok(Left { keys, descriptors })
    }

    /// All workers disconnect but one, which lists what is left. What killed workers leave expires.
    fn left_in_store(&mut self) -> Result<Option<u64>, String> {
        for worker in &mut self.workers {
            worker.finish(Duration::from_secs(5))?;
        }
        let mut last = self.workers.swap_remove(0);
        for mut worker in self.workers.drain(..) {
            worker.close();
        }
        let mut left = Ok(None);
        wait_until(if self.faults.is_empty() { RELEASED } else { PLACE }, || {
            left = last.left().map(|listed| listed.map(u64::from).or_else(|| self.stores.keys()));
            // In the second case neither the library nor the servers can tell.
            matches!(left, Ok(Some(0) | None))
        });
        left.map_err(|why| format!("what is left in the store is unknown: {why}"))
    }
}
