//! The environment of one peer: its processes and its own servers.

use std::time::Duration;

use leasehold_bench_peer::protocol::{Answer, Open, Order};
use leasehold_testkit::{Proxy, Server};

use super::meter::Used;
use super::process::Process;
use super::scenarios::Way;
use super::store::{Kind, Store};

/// Maximum time to connect 1,000 clients.
const OPENING: Duration = Duration::from_secs(120);

/// One peer, ready to work.
pub(crate) struct Environment {
    program: &'static str,
    /// Its processes.
    pub(crate) processes: Vec<Process>,
    /// Its servers,
    pub(crate) servers: Vec<Server>,
    /// or the one of another kind.
    store: Option<Store>,
    /// The proxy in front of them, for a slow network.
    _proxies: Vec<Proxy>,
    open: Open,
}

impl Environment {
    /// Starts the processes of the peer and its servers, and connects the clients.
    ///
    /// # Errors
    ///
    /// Why the peer cannot take part.
    pub(crate) fn start(
        program: &'static str,
        (processes, clients): (u32, u32),
        way: Way,
        ttl: Duration,
    ) -> Result<Self, String> {
        let processes = start_processes(program, processes)?;
        let store = Kind::of(program).map(Store::start).transpose()?;
        let count = if store.is_some() { 0 } else { way.servers };
        way.program.check()?;
        let servers: Vec<Server> = (0..count).map(|_| way.program.start()).collect();
        let mut proxies = Vec::new();
        if !way.delay.is_zero() {
            for server in &servers {
                let proxy = Proxy::before(server);
                proxy.delay_requests(way.delay / 2);
                proxy.delay_replies(way.delay / 2);
                proxies.push(proxy);
            }
        }
        let urls = if let Some(store) = &store {
            vec![store.url.clone()]
        } else if proxies.is_empty() {
            servers.iter().map(Server::url).collect()
        } else {
            proxies.iter().map(Proxy::url).collect()
        };
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let open = Open { urls, clients, ttl_ms };
        let environment = Self { program, processes, servers, store, _proxies: proxies, open };
        environment.opened()
    }

    /// The same over servers that run already.
    ///
    /// # Errors
    ///
    /// Why the peer cannot take part.
    pub(crate) fn over(
        program: &'static str,
        processes: u32,
        servers: Vec<Server>,
        open: Open,
    ) -> Result<Self, String> {
        let processes = start_processes(program, processes)?;
        let environment = Self { program, processes, servers, store: None, _proxies: Vec::new(), open };
        environment.opened()
    }

    fn opened(mut self) -> Result<Self, String> {
        self.tell_all(|_, open| Order::Open(open.clone()))?;
        self.answers(OPENING)?;
        Ok(self)
    }

    /// Sends an order to every process at the same time.
    ///
    /// # Errors
    ///
    /// The first error.
    pub(crate) fn tell_all(&mut self, order: impl Fn(u32, &Open) -> Order) -> Result<(), String> {
        let mut all = (0..).zip(&mut self.processes);
        all.try_for_each(|(number, process)| process.tell(&order(number, &self.open)))
    }

    /// Waits for their answers.
    ///
    /// # Errors
    ///
    /// The first error.
    pub(crate) fn answers(&self, within: Duration) -> Result<Vec<Answer>, String> {
        self.processes.iter().map(|process| process.answer(within)).collect()
    }

    /// Restarts the processes that have failed.
    ///
    /// # Errors
    ///
    /// Why the peer cannot take part any more.
    pub(crate) fn renew(&mut self, answers: &[Answer]) -> Result<(), String> {
        for (process, answer) in self.processes.iter_mut().zip(answers) {
            if answer.is_spent {
                *process = Process::start(self.program)?;
                process.ask(&Order::Open(self.open.clone()), OPENING)?;
            }
        }
        Ok(())
    }

    /// Restarts all processes.
    ///
    /// # Errors
    ///
    /// Why the peer cannot take part any more.
    pub(crate) fn restart(&mut self) -> Result<(), String> {
        let spent = Answer { is_spent: true, ..Answer::default() };
        self.renew(&vec![spent; self.processes.len()])
    }

    /// Takes the processor from its processes, or lets them go on: 1,000 idle clients of Redisson, with a timer each, need more than a core.
    /// On a store of another kind it does nothing, since a session of ZooKeeper or etcd ends while its client is paused.
    pub(crate) fn pause(&self, pauses: bool) {
        if self.store.is_none() {
            self.processes.iter().for_each(|process| process.pause(pauses));
        }
    }

    /// Stops the last of the servers.
    pub(crate) fn stop_one(&mut self) {
        if let Some(server) = self.servers.pop() {
            drop(server);
        }
    }

    /// Its resource use so far.
    pub(crate) fn used(&self) -> Used {
        Used::now(&self.servers, self.store_pid(), &self.pids())
    }

    /// The ids of its processes.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Process::pid).collect()
    }

    /// The process id of a store of another kind than Redis.
    pub(crate) fn store_pid(&self) -> Option<u32> {
        self.store.as_ref().map(Store::pid)
    }
}

fn start_processes(program: &str, count: u32) -> Result<Vec<Process>, String> {
    (0..count).map(|_| Process::start(program)).collect()
}
