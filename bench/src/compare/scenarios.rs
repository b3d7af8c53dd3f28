//! The table of scenarios: rows, clients, work and duration.

use std::time::Duration;

use clap::ValueEnum;

use super::catalog::{self, Row};
use super::figures::Rule;
use super::store::Kind;
use crate::program::Program;

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Scenario {
    /// One client, one lock without contention
    A,
    /// Many tasks of one process, each with a lock of its own
    B,
    /// Many clients, one lock
    C,
    /// Many tasks of one process, one lock
    D,
    /// A killed holder
    E,
    /// Many idle leases
    F,
    /// Readers and writers
    G,
    /// A semaphore
    H,
    /// A quorum of independent servers
    I,
    /// A slow network
    J,
}

impl Scenario {
    /// Its letter.
    #[must_use]
    pub const fn letter(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
            Self::C => "c",
            Self::D => "d",
            Self::E => "e",
            Self::F => "f",
            Self::G => "g",
            Self::H => "h",
            Self::I => "i",
            Self::J => "j",
        }
    }
}

/// The servers and the network of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The program of the servers.
    pub program: Program,
    /// Number of independent servers.
    pub servers: u32,
    /// Latency that the network adds to a round trip.
    pub delay: Duration,
}

/// Cells that share their connected clients.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its scenario.
    pub scenario: Scenario,
    /// The rows.
    pub rows: Vec<Row>,
    /// Number of processes of each peer.
    pub processes: u32,
    /// Number of clients of each process.
    pub clients: u32,
    /// Servers and network.
    pub way: Way,
    /// The cells.
    pub cells: Vec<Work>,
}

/// The work of one cell.
#[derive(Clone, Debug)]
pub struct Work {
    /// Its title.
    pub title: String,
    /// Its position on the x axis of a chart.
    pub size: u32,
    /// The line of a chart that it belongs to.
    pub series: String,
    /// Number of tasks in each process.
    pub tasks: u32,
    /// The exclusion that the lock promises.
    pub rule: Rule,
    /// Duration of a critical section.
    pub hold: Duration,
    /// Percentage of acquisitions for reading.
    pub reads_percent: u32,
    /// Whether one of the servers is stopped beforehand.
    pub one_is_stopped: bool,
    /// Duration of a round.
    pub span: Duration,
    /// Number of rounds.
    pub rounds: u32,
}

/// A server on this machine.
#[must_use]
pub const fn near(program: Program) -> Way {
    Way { program, servers: 1, delay: Duration::ZERO }
}

/// The scale of the comparison.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Fewer and shorter rounds.
    pub is_quick: bool,
    /// The server of all libraries.
    pub program: Program,
}

/// The server on which leasehold and the lower bounds run once more, because it runs an uncontended lock with less Lua.
const OTHER: Program = Program::Valkey9;

impl Scale {
    fn near(self) -> Way {
        near(self.program)
    }

    /// Every server of the comparison.
    #[must_use]
    pub fn programs(self) -> Vec<Program> {
        let other = Some(OTHER).filter(|other| *other != self.program && other.check().is_ok());
        std::iter::once(self.program).chain(other).collect()
    }

    fn pick<T>(self, quick: T, full: T) -> T {
        if self.is_quick { quick } else { full }
    }

    /// The mutexes for contended scenarios: with default settings, and in a complete run also tuned.
    fn competing(self) -> Vec<Row> {
        self.pick(catalog::plain(), catalog::contended())
    }

    fn work(self, title: String, tasks: u32, rule: Rule, hold_ms: u64) -> Work {
        Work {
            title,
            size: 0,
            series: String::new(),
            tasks,
            rule,
            hold: Duration::from_millis(hold_ms),
            reads_percent: 0,
            one_is_stopped: false,
            span: Duration::from_millis(self.pick(400, 1_000)),
            rounds: self.pick(1, 3),
        }
    }

    /// The scenarios whose peers acquire and release until the end: all but (e) and (f), which have files of their own.
    #[must_use]
    pub fn groups(self, scenario: Scenario) -> Vec<Group> {
        let groups = match scenario {
            Scenario::A => vec![self.alone(), self.alone_elsewhere()],
            Scenario::B => vec![self.own_names()],
            Scenario::C => self.clients(),
            Scenario::D => vec![self.tasks()],
            Scenario::E | Scenario::F => Vec::new(),
            Scenario::G => vec![self.readers()],
            Scenario::H => vec![self.semaphore()],
            Scenario::I => self.quorums(),
            Scenario::J => self.far_away(),
        };
        let repeated: Vec<Group> = groups.iter().filter_map(|group| self.on_other_server(group)).collect();
        groups.into_iter().chain(repeated).collect()
    }

    /// The same work on [`OTHER`], by leasehold and the lower bounds only. Of (c), the processes and the crowd: they show the hand-off.
    fn on_other_server(self, group: &Group) -> Option<Group> {
        let is_repeated = match group.scenario {
            Scenario::A | Scenario::B => true,
            Scenario::C => group.processes > 1 || group.clients == 1_000,
            _ => false,
        };
        let is_elsewhere = group.rows.iter().any(|row| Kind::of(row.program).is_some());
        if !is_repeated || is_elsewhere || self.program == OTHER {
            return None;
        }
        let rows = group.rows.iter().filter(|row| catalog::OWN.contains(&row.program)).copied().collect();
        let on_other = |work: &Work| Work {
            title: format!("on Valkey 9, {}", work.title),
            // The charts show one server.
            series: String::new(),
            ..work.clone()
        };
        let cells = group.cells.iter().map(on_other).collect();
        Some(Group { rows, cells, way: near(OTHER), ..group.clone() })
    }

    fn alone(self) -> Group {
        let mut work = self.work("one after the other".into(), 1, Rule::Exclusive, 0);
        work.rounds = self.pick(3, 7);
        let rows = catalog::with(&[catalog::PINGS, catalog::SET], catalog::plain());
        Group { scenario: Scenario::A, rows, processes: 1, clients: 1, way: self.near(), cells: vec![work] }
    }

    /// The contended scenario on other stores, with leasehold for comparison.
    fn alone_elsewhere(self) -> Group {
        let work = self.work("on stores of other kinds, one after the other".into(), 1, Rule::Exclusive, 0);
        let rows = catalog::with(&[catalog::LEASEHOLD], catalog::OTHER_STORES.to_vec());
        Group { scenario: Scenario::A, rows, processes: 1, clients: 1, way: self.near(), cells: vec![work] }
    }

    fn clients_elsewhere(self) -> Group {
        let title = "on stores of other kinds, 10 clients, hold 1 ms";
        let work = self.work(title.into(), 10, Rule::Exclusive, 1);
        let rows = catalog::with(&[catalog::LEASEHOLD], catalog::OTHER_STORES.to_vec());
        Group { scenario: Scenario::C, rows, processes: 1, clients: 10, way: self.near(), cells: vec![work] }
    }

    fn own_names(self) -> Group {
        let cell = |tasks: u32| {
            let mut work = self.work(format!("{tasks} tasks, a lock each"), tasks, Rule::Alone, 0);
            work.size = tasks;
            work
        };
        let rows = catalog::with(&[catalog::SET], catalog::plain());
        let cells = vec![cell(64), cell(1_000)];
        Group { scenario: Scenario::B, rows, processes: 1, clients: 1, way: self.near(), cells }
    }

    fn clients(self) -> Vec<Group> {
        let together = self.pick(vec![2, 100, 1_000], vec![2, 10, 100, 1_000]);
        let apart = self.pick(vec![2], vec![2, 8]);
        let holds = |size: u32, processes: u32| match (self.is_quick, size) {
            (false, _) => vec![0, 1, 10],
            (true, 100) => vec![1],
            (true, _) => vec![u64::from(processes > 1)],
        };
        let group = |clients: u32, processes: u32| {
            let mut rows = self.competing();
            // 1,000 polling clients would take as long as all other rows together.
            rows.retain(|row| !self.is_quick || clients < 1_000 || row.promises.has_push);
            let rows = catalog::with(&[catalog::PUBLISH], rows);
            let who = if processes > 1 { "processes" } else { "clients" };
            let cell = |hold: u64| {
                let size = clients * processes;
                let mut work =
                    self.work(format!("{size} {who}, hold {hold} ms"), clients, Rule::Exclusive, hold);
                (work.size, work.series) = (size, format!("{who}, hold {hold} ms"));
                // More clients need more time until each has acquired the lock.
                if size >= 1_000 {
                    (work.span, work.rounds) =
                        self.pick((Duration::from_secs(1), 1), (Duration::from_secs(2), 2));
                }
                work
            };
            let cells = holds(clients * processes, processes).into_iter().map(cell).collect();
            Group { scenario: Scenario::C, rows, processes, clients, way: self.near(), cells }
        };
        let together = together.into_iter().map(|clients| group(clients, 1));
        let apart = apart.into_iter().map(|processes| group(1, processes));
        together.chain(apart).chain(self.pick(None, Some(self.clients_elsewhere()))).collect()
    }

    fn tasks(self) -> Group {
        let work = self.work("1,000 tasks of one client".into(), 1_000, Rule::Exclusive, 0);
        let rows = catalog::with(&[catalog::LOCAL], self.competing());
        Group { scenario: Scenario::D, rows, processes: 1, clients: 1, way: self.near(), cells: vec![work] }
    }

    fn readers(self) -> Group {
        let cell = |hold: u64| {
            let title = format!("20 clients, 90 % of the acquisitions are reads, hold {hold} ms");
            let mut work = self.work(title, 20, Rule::Exclusive, hold);
            work.reads_percent = 90;
            work
        };
        let rows = catalog::READ_WRITE.to_vec();
        let cells = vec![cell(0), cell(1)];
        Group { scenario: Scenario::G, rows, processes: 1, clients: 20, way: self.near(), cells }
    }

    fn semaphore(self) -> Group {
        let cell = |hold: u64| {
            self.work(format!("10 permits, 110 clients, hold {hold} ms"), 110, Rule::Permits(10), hold)
        };
        let rows = catalog::SEMAPHORES.to_vec();
        let cells = vec![cell(0), cell(1)];
        Group { scenario: Scenario::H, rows, processes: 1, clients: 110, way: self.near(), cells }
    }

    fn quorums(self) -> Vec<Group> {
        let group = |(servers, clients): (u32, u32)| {
            let cell = |one_is_stopped: bool| {
                let state = if one_is_stopped { "one stopped" } else { "all healthy" };
                let who = if clients == 1 { "one client".into() } else { format!("{clients} clients") };
                let title = format!("{servers} servers, {state}, {who}");
                let work = self.work(title, clients, Rule::Exclusive, 0);
                // Some libraries wait for the stopped server each time.
                let span = if one_is_stopped { work.span * 2 } else { work.span };
                Work { one_is_stopped, span, ..work }
            };
            let way = Way { program: self.program, servers, delay: Duration::ZERO };
            let (rows, cells) = (catalog::QUORUM.to_vec(), vec![cell(false), cell(true)]);
            Group { scenario: Scenario::I, rows, processes: 1, clients, way, cells }
        };
        self.pick(vec![(3, 1)], vec![(3, 1), (3, 10), (5, 1), (5, 10)]).into_iter().map(group).collect()
    }

    fn far_away(self) -> Vec<Group> {
        let group = |(delay, clients): (u64, u32)| {
            let title = match clients {
                1 => format!("{delay} ms away, one after the other"),
                _ => format!("{delay} ms away, {clients} clients, hold 1 ms"),
            };
            let mut work = self.work(title, clients, Rule::Exclusive, if clients == 1 { 0 } else { 1 });
            work.span = Duration::from_millis(self.pick(500, 1_200));
            let rows = if clients == 1 {
                catalog::with(&[catalog::PINGS, catalog::SET], catalog::plain())
            } else {
                catalog::with(&[catalog::PUBLISH], self.competing())
            };
            let way = Way { program: self.program, servers: 1, delay: Duration::from_millis(delay) };
            Group { scenario: Scenario::J, rows, processes: 1, clients, way, cells: vec![work] }
        };
        let all = self.pick(vec![(1, 1), (1, 10)], vec![(1, 1), (1, 10), (20, 1), (20, 10)]);
        all.into_iter().map(group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups_on(program: Program, server: Program, scenario: Scenario) -> Vec<Group> {
        let scale = Scale { is_quick: true, program };
        let mut groups = scale.groups(scenario);
        groups.retain(|group| group.way.program == server);
        groups
    }

    #[test]
    fn leasehold_and_the_lower_bounds_run_once_more_on_valkey() {
        for (scenario, rows) in [
            (Scenario::A, vec!["two PINGs", "SET NX PX, compare and delete", "leasehold"]),
            (Scenario::B, vec!["SET NX PX, compare and delete", "leasehold"]),
            (Scenario::C, vec!["PUBLISH to the next", "leasehold"]),
        ] {
            let groups = groups_on(Program::Redis7, Program::Valkey9, scenario);
            assert!(!groups.is_empty());
            for group in groups {
                assert_eq!(group.rows.iter().map(|row| row.name).collect::<Vec<_>>(), rows);
                assert!(group.cells.iter().all(|work| work.title.starts_with("on Valkey 9, ")));
            }
        }
        assert!(groups_on(Program::Redis7, Program::Valkey9, Scenario::D).is_empty());
    }

    #[test]
    fn chosen_server_runs_every_group() {
        for scenario in [Scenario::A, Scenario::B, Scenario::C, Scenario::D, Scenario::I, Scenario::J] {
            assert!(groups_on(Program::Valkey9, Program::Redis7, scenario).is_empty());
            assert!(!groups_on(Program::Valkey9, Program::Valkey9, scenario).is_empty());
        }
    }
}
