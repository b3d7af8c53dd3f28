//! Processes that contend for a lock of servers that are killed, emptied and frozen, and that are frozen themselves: no two of them
//! have it at a time, and their tokens rise.
//!
//! This program starts itself again for each of the processes, so it has no test harness. Its argument, if there is one, is a part
//! of the name of the tests to run.

mod witness;
mod worker;

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::fence::FencedFile;
use leasehold_testkit::{PauseDetector, Server, extent, unless_paused_blocking, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use witness::{Witness, check};

/// The longest ttl, and every ttl here.
const TTL: Duration = Duration::from_secs(2);

const NODES: usize = 5;

fn main() {
    if worker::is_one() {
        return worker::work();
    }
    witness::the_check_finds_what_is_wrong();
    let filter = std::env::args().nth(1).unwrap_or_default();
    let tests = [
        ("a holder that was frozen for longer than its lease is refused", a_frozen_holder_is_refused as fn()),
        ("killed holder and first waiters delay the others by a bounded time", killed_holder_and_waiters),
        ("frozen holder and first waiters delay the others by a bounded time", frozen_holder_and_waiters),
        ("no fault of servers or processes makes two holders", no_fault_makes_two_holders),
    ];
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(&filter)) {
        let began = Instant::now();
        test();
        println!("test {name} ... ok ({:.1?})", began.elapsed());
    }
}

/// A process of this program, ended with the test.
struct Worker(Child);

impl Worker {
    fn start(task: &str, nodes: &str, witness: &Witness) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        worker::tell(&mut command, task, nodes, &witness.url());
        Self(command.spawn().expect("it starts"))
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it is our child");
    }

    fn is_over(&mut self) -> bool {
        let status = self.0.try_wait().expect("it is our child");
        status.is_some_and(|status| {
            assert!(status.success(), "{status}");
            true
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It fails only if the process has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn nodes(count: usize) -> (Vec<Server>, String) {
    let servers: Vec<Server> = (0..count).map(|_| Server::on_port()).collect();
    let url = format!("{}&max_ttl_ms={}", address(&servers), TTL.as_millis());
    (servers, url)
}

fn address(servers: &[Server]) -> String {
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    format!("redlock://{}?node_timeout_ms=500", hosts.join(","))
}

/// Takes the lock once, whatever it takes, and says with which token.
fn token_of_another(url: &str) -> leasehold::Token {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = Client::connect(url).await.expect("more than half of the nodes run");
        let guard = client.mutex(worker::NAME).ttl(TTL).lock().await.expect("it is to be had in the end");
        guard.token()
    })
}

fn a_frozen_holder_is_refused() {
    let (_servers, url) = nodes(3);
    let witness = Witness::start();
    let file = FencedFile::new(witness.folder().join("file"));
    let mut worker = Worker::start("write when told", &url, &witness);
    wait_until("it holds the lock", || !witness.events().is_empty());
    worker.signal(Signal::STOP);
    file.write(token_of_another(&url), b"ours").expect("it is the first one to write");
    witness.end();
    worker.signal(Signal::CONT);
    wait_until("it has tried to write", || worker.is_over());
    assert_eq!(std::fs::read(file.path()).expect("it was written"), b"ours");
}

/// A pause of the machine after which the holder, which is still being set up, has its lease.
const PAUSE: Duration = Duration::from_millis(500);

fn killed_holder_and_waiters() {
    unless_paused_blocking(PAUSE, || takeover_within(Signal::KILL, TTL + CLAIM_AND_LOOK));
}

fn frozen_holder_and_waiters() {
    unless_paused_blocking(PAUSE, || takeover_within(Signal::STOP, TTL + 3 * CLAIM_AND_LOOK));
}

/// How long a client that is frozen may delay those behind it: its claim window of 3 s, and 2 s until that is noticed.
const CLAIM_AND_LOOK: Duration = Duration::from_secs(5);

/// A holder and the first two of those who wait get this signal at the same time: one of the others soon has the lock.
fn takeover_within(signal: Signal, limit: Duration) {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_port()).collect();
    // No longest ttl is named, which would bound the turns to wait as well.
    let url = address(&servers);
    let witness = Witness::start();
    let said = |what: &str| witness.events().iter().filter(|event| event.as_str() == what).count();
    let holder = Worker::start("hold", &url, &witness);
    wait_until("it holds the lock", || said("it holds the lock") == 1);
    let waiters: Vec<Worker> = (1..=4)
        .map(|count| {
            let worker = Worker::start("wait", &url, &witness);
            wait_until("it waits", || waiting(&url) == count);
            worker
        })
        .collect();
    let pauses = PauseDetector::watch();
    let began = Instant::now();
    holder.signal(signal);
    waiters[..2].iter().for_each(|waiter| waiter.signal(signal));
    // The next may have it before this looks.
    wait_until("another one has the lock", || said("it had the lock") >= 1);
    let took = began.elapsed();
    assert!(took < limit + 2 * pauses.longest(), "{took:?}, although {limit:?} are promised");
    wait_until("all others have had the lock", || said("it had the lock") == waiters.len() - 2);
}

/// How many wait for the lock. A node that is too slow to tell gives no number.
fn waiting(url: &str) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = Client::connect(url).await.expect("all nodes run");
        client.mutex(worker::NAME).inspect().await.map_or(usize::MAX, |view| view.waiters.len())
    })
}

fn no_fault_makes_two_holders() {
    let (count, seconds) = extent((10, 8), (50, 60), (50, 60));
    let span = Duration::from_secs(seconds);
    let (mut servers, url) = nodes(NODES);
    // New servers vote after the longest ttl.
    token_of_another(&url);
    let witness = Witness::start();
    let mut workers: Vec<Worker> = (0..count).map(|_| Worker::start("contend", &url, &witness)).collect();
    wait_until("a process has the lock", || check(&witness.events()).is_ok_and(|sections| sections > 0));
    let until = Instant::now() + span;
    while Instant::now() < until {
        disturb(&mut servers, &workers);
    }
    let disturbed = check(&witness.events()).unwrap_or_else(|wrong| panic!("{wrong}"));
    witness.end();
    // Each has the lock once more before it ends.
    wait_until("all have had it again", || workers.iter_mut().all(Worker::is_over));
    let sections = check(&witness.events()).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{disturbed} sections while there were faults, {} after them", sections - disturbed);
    assert!(
        sections >= disturbed + count,
        "{sections} sections, {disturbed} of them while there were faults"
    );
}

fn random(below: usize) -> usize {
    getrandom::u32().expect("the system has random numbers") as usize % below
}

/// One to three servers are killed and come back empty or with what they had some time ago, are emptied, or stand still, or a process does, for some time.
fn disturb(servers: &mut [Server], workers: &[Worker]) {
    let first = random(servers.len());
    let which: Vec<usize> = (0..=random(3)).map(|step| (first + step) % NODES).collect();
    let pause = Duration::from_millis(100 + random(500) as u64);
    // What one comes back with when it is killed later.
    servers[random(NODES)].run(&["SAVE"]);
    match random(6) {
        0 => {
            which.iter().for_each(|node| servers[*node].stop());
            sleep(pause);
            which.iter().for_each(|node| servers[*node].start());
        }
        1..=3 => {
            // What only a minority forgets is no danger.
            let which = (0..3).map(|step| (first + step) % NODES);
            which.for_each(|node| drop(servers[node].run(&["FLUSHALL"])));
        }
        4 => {
            which.iter().for_each(|node| servers[*node].signal("STOP"));
            sleep(pause);
            which.iter().for_each(|node| servers[*node].signal("CONT"));
        }
        _ => {
            let worker = &workers[random(workers.len())];
            worker.signal(Signal::STOP);
            sleep(TTL + pause);
            worker.signal(Signal::CONT);
        }
    }
    // Servers that were emptied vote again after the longest ttl, so that the lock is acquired now and then.
    sleep(TTL / 2 + pause);
}
