//! What happens in one run, decided before it begins.

use crate::plan::{Case, MS, Micros, Mode, Part, SECOND};
use crate::rng::Rng;

/// A fault that lasts until all faults end.
const FOR_GOOD: Micros = Micros::MAX / 4;

/// What happens in one run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The nodes' clocks.
    pub nodes: Vec<NodePlan>,
    /// The machines that clients run on.
    pub clients: Vec<ClientPlan>,
    /// The users' tasks.
    pub tasks: Vec<TaskPlan>,
    /// How many locks there are.
    pub locks: usize,
    /// `ttl` of all locks.
    pub ttl: Micros,
    /// For how long a node abstains that may have lost leases.
    pub max_ttl: Option<Micros>,
    /// What goes wrong, and when.
    pub faults: Vec<FaultPlan>,
    /// From then on nothing goes wrong any more.
    pub heal_at: Micros,
    /// The shortest delay of a message.
    pub base: Micros,
    /// The usual extra delay.
    pub jitter: Micros,
    /// Ready tasks run in a random order.
    pub shuffles: bool,
}

/// A node.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// By how much its clock is wrong.
    pub offset: i64,
    /// By how many millionths its clock is faster than true time.
    pub ppm: i64,
}

/// A client's machine.
#[derive(Clone, Copy, Debug)]
pub struct ClientPlan {
    /// What its clock shows at the start, beyond an hour.
    pub offset: Micros,
    /// By how many millionths its clock is faster than true time.
    pub ppm: i64,
    /// It is left out.
    pub is_absent: bool,
}

/// A task and what it does.
#[derive(Clone, Debug)]
pub struct TaskPlan {
    /// On which client.
    pub client: usize,
    /// Until the network heals.
    pub ops: Vec<Op>,
    /// After that: these locks, each waited for without a limit, and held for this long.
    pub last: Vec<(usize, Micros)>,
    /// It is left out.
    pub is_absent: bool,
}

/// One thing that a task does with a lock.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// How long it does something else before.
    pub think: Micros,
    /// Which lock.
    pub lock: usize,
    /// How it waits.
    pub mode: Mode,
    /// The future is dropped after this time, if it has not ended.
    pub drop_after: Option<Micros>,
    /// How long the section takes.
    pub hold: Micros,
    /// The section runs under `Guard::run`.
    pub is_watched: bool,
    /// The guard is dropped, not released.
    pub drops_guard: bool,
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    /// When.
    pub at: Micros,
    /// What.
    pub fault: Fault,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each line above says what the names of a fault mean")]
pub enum Fault {
    /// A client's threads stand still: the callers' runtime, the driver, or both.
    Pause { client: usize, callers: bool, driver: bool, lasts: Micros },
    /// A client's process is killed, and started again.
    Crash { client: usize, restarts_after: Micros },
    /// A client's connections are cut, to one node or to all. What was in flight is lost or, if `late`, arrives after that time.
    Cut { client: usize, node: Option<usize>, late: Option<Micros> },
    /// All connections to a node are cut, and it refuses new ones.
    Unreachable { node: usize, lasts: Micros },
    /// Nothing gets through between a client and a node, in one direction or both, and no side is told.
    Silence { client: usize, node: usize, up: bool, down: bool, lasts: Micros },
    /// Single answers and pushes are lost.
    Loss { thousandths: u64, lasts: Micros },
    /// All messages take this much longer.
    Delay { by: Micros, lasts: Micros },
    /// A node does not run.
    NodePause { node: usize, lasts: Micros },
    /// All messages of a node take this much longer, in each direction.
    NodeSlow { node: usize, by: Micros, lasts: Micros },
    /// A node's process ends and comes back. Without its data only if nodes abstain after that.
    NodeRestart { node: usize, lasts: Micros, keeps_data: bool },
    /// A node is emptied, if nodes abstain after that.
    Flush { node: usize },
    /// The clock of a node, which was ahead by 35 years from the start, is set right.
    ClockSetRight { node: usize },
}

/// 35 years: the resources that compare tokens with their own clock refuse such tokens, and so do servers that reserve some.
const AHEAD: i64 = 35 * 365 * 86_400 * 1_000_000;

impl Plan {
    /// Clients that contend for one lock all the time, without faults, or from the second second on with a slow or silent minority.
    #[must_use]
    pub fn contended(seed: u64, has_slow_minority: bool) -> Self {
        let mut drawing = Drawing { rng: Rng::new(seed, 14) };
        let nodes = drawing.rng.pick(&[3, 3, 5]);
        let clients = 2 + drawing.rng.index(9);
        let (base, jitter) = (drawing.rng.scaled(200, 2 * MS), drawing.rng.scaled(50, MS));
        let op = Op {
            think: drawing.rng.pick(&[10, MS]),
            lock: 0,
            mode: Mode::Wait,
            drop_after: None,
            hold: drawing.rng.pick(&[10, MS, 5 * MS]),
            is_watched: false,
            drops_guard: false,
        };
        let faults = drawing.minority(nodes, SECOND);
        let task = |client| TaskPlan { client, ops: vec![op; 20_000], last: Vec::new(), is_absent: false };
        Self {
            nodes: (0..nodes).map(|_| NodePlan { offset: 0, ppm: 0 }).collect(),
            clients: (0..clients).map(|_| ClientPlan { offset: 0, ppm: 0, is_absent: false }).collect(),
            tasks: (0..clients).map(task).collect(),
            locks: 1,
            ttl: 10 * SECOND,
            max_ttl: None,
            faults: if has_slow_minority { faults } else { Vec::new() },
            heal_at: 4 * SECOND,
            base,
            jitter,
            shuffles: true,
        }
    }

    /// The plan of this case.
    #[must_use]
    pub fn new(case: &Case) -> Self {
        let mut plan = Self::drawn(case.seed);
        for part in &case.without {
            match *part {
                Part::Client(client) => {
                    if let Some(client) = plan.clients.get_mut(client) {
                        client.is_absent = true;
                    }
                }
                Part::Task(task) => {
                    if let Some(task) = plan.tasks.get_mut(task) {
                        task.is_absent = true;
                    }
                }
                Part::Op(task, op) => {
                    if let Some(op) = plan.tasks.get_mut(task).and_then(|task| task.ops.get_mut(op)) {
                        op.drop_after = Some(0);
                    }
                }
                Part::Fault(_) => {}
            }
        }
        let without = |fault: usize| case.without.contains(&Part::Fault(fault));
        let faults = std::mem::take(&mut plan.faults).into_iter().enumerate();
        plan.faults = faults.filter(|(fault, _)| !without(*fault)).map(|(_, plan)| plan).collect();
        plan
    }

    /// The whole plan of this seed. In some of those without faults the clock of a node is ahead, and comes right. No client dies in them: what
    /// it left at this node would stay for as long as its clock was ahead.
    fn drawn(seed: u64) -> Self {
        let mut plan = Drawing { rng: Rng::new(seed, 11) }.plan();
        let mut rng = Rng::new(seed, 15);
        if plan.is_calm() && rng.chance(500) {
            let node = rng.index(plan.nodes.len());
            plan.nodes[node].offset = AHEAD;
            let at = rng.between(SECOND, plan.heal_at);
            plan.faults = vec![FaultPlan { at, fault: Fault::ClockSetRight { node } }];
        }
        plan
    }

    /// Nothing goes wrong, and each node votes from the start.
    #[must_use]
    pub fn is_calm(&self) -> bool {
        self.faults.is_empty() && self.max_ttl.is_none()
    }

    /// Since when a minority of the nodes, and nothing else, is slow or silent for good, or has another clock. Commands must not be delayed by that.
    #[must_use]
    pub fn slow_minority_from(&self) -> Option<Micros> {
        let is_for_good = |fault: &FaultPlan| {
            matches!(
                fault.fault,
                Fault::NodePause { lasts: FOR_GOOD, .. }
                    | Fault::NodeSlow { lasts: FOR_GOOD, .. }
                    | Fault::ClockSetRight { .. }
            )
        };
        let is_minority = self.max_ttl.is_none() && self.faults.iter().all(is_for_good);
        self.faults.first().filter(|_| is_minority).map(|fault| fault.at)
    }

    /// Whether a majority of the nodes, and all clients and connections to it, are healthy all the time.
    #[must_use]
    pub fn has_healthy_majority(&self) -> bool {
        self.is_calm() || self.slow_minority_from().is_some()
    }

    /// When the faults end that may delay a grant; zero without such faults.
    #[must_use]
    pub fn faults_end(&self) -> Micros {
        if self.has_healthy_majority() { 0 } else { self.heal_at }
    }

    /// The longest extra delay of a node's messages.
    #[must_use]
    pub fn slowest_node(&self) -> Micros {
        let delays = self.faults.iter().map(|fault| match fault.fault {
            Fault::NodeSlow { by, .. } => by,
            _ => 0,
        });
        delays.max().unwrap_or(0)
    }

    /// The parts that could be left out of this case, large ones first.
    #[must_use]
    pub fn parts(case: &Case) -> Vec<Part> {
        let plan = Self::drawn(case.seed);
        let clients = (0..plan.clients.len()).map(Part::Client);
        let tasks = (0..plan.tasks.len()).map(Part::Task);
        let faults = (0..plan.faults.len()).map(Part::Fault);
        let ops = plan.tasks.iter().enumerate();
        let ops = ops.flat_map(|(task, plan)| (0..plan.ops.len()).map(move |op| Part::Op(task, op)));
        clients.chain(tasks).chain(faults).chain(ops).filter(|part| !case.without.contains(part)).collect()
    }
}

struct Drawing {
    rng: Rng,
}

impl Drawing {
    fn plan(mut self) -> Plan {
        let nodes = self.rng.pick(&[3, 3, 5]);
        let mut nodes: Vec<NodePlan> =
            (0..nodes).map(|_| NodePlan { offset: self.signed(200 * MS), ppm: self.ppm() }).collect();
        let clients: Vec<ClientPlan> = (0..self.rng.between(2, 5))
            .map(|_| ClientPlan {
                offset: self.rng.scaled(1, 1_000_000 * SECOND),
                ppm: self.ppm(),
                is_absent: false,
            })
            .collect();
        let locks = if self.rng.chance(700) { 1 } else { 2 };
        let ttl = self.rng.pick(&[SECOND, 3 * SECOND, 10 * SECOND]);
        let max_ttl = self.rng.chance(600).then(|| ttl * self.rng.pick(&[1, 2]));
        if max_ttl.is_some() {
            // Of a majority that has lost its data, tokens rise if the clocks differ by less than it has abstained
            // (section "Tokens").
            nodes.iter_mut().for_each(|node| node.ppm = node.ppm.clamp(-500, 500));
        }
        let heal_at = self.rng.between(10, 40) * SECOND;
        let pace = self.rng.pick(&[100 * MS, SECOND, 4 * SECOND]);
        let mut tasks = Vec::new();
        for client in 0..clients.len() {
            for _ in 0..self.rng.between(1, 2) {
                tasks.push(self.task(client, locks, ttl, heal_at, pace));
            }
        }
        let count = self.rng.pick(&[0, 1, 2, 4, 8]);
        let mut faults: Vec<FaultPlan> = (0..count)
            .map(|_| FaultPlan {
                at: self.rng.below(heal_at),
                fault: self.fault(clients.len(), nodes.len(), max_ttl.is_some()),
            })
            .collect();
        faults.sort_by_key(|fault| fault.at);
        if faults.is_empty() && max_ttl.is_none() && self.rng.chance(600) {
            faults = self.minority(nodes.len(), 2 * SECOND);
        }
        Plan {
            nodes,
            clients,
            tasks,
            locks,
            ttl,
            max_ttl,
            faults,
            heal_at,
            base: self.rng.scaled(20, 5 * MS),
            jitter: self.rng.scaled(10, 5 * MS),
            shuffles: self.rng.chance(500),
        }
    }

    /// A minority of the nodes is slow or silent from then on.
    fn minority(&mut self, nodes: usize, at: Micros) -> Vec<FaultPlan> {
        let first = self.rng.index(nodes);
        let count = 1 + self.rng.index((nodes - 1) / 2);
        let chosen = (0..count).map(|number| (first + number) % nodes);
        chosen
            .map(|node| {
                let by = self.rng.pick(&[20 * MS, 50 * MS, 200 * MS]);
                let slow = Fault::NodeSlow { node, by, lasts: FOR_GOOD };
                let silent = Fault::NodePause { node, lasts: FOR_GOOD };
                FaultPlan { at, fault: if self.rng.chance(500) { slow } else { silent } }
            })
            .collect()
    }

    /// Two clocks within these bounds are less than 1 % apart.
    fn ppm(&mut self) -> i64 {
        let ppm = self.rng.pick(&[0, 50, 500, 4_500]);
        if self.rng.chance(500) { ppm } else { -ppm }
    }

    fn signed(&mut self, most: Micros) -> i64 {
        let by = i64::try_from(self.rng.scaled(MS, most)).unwrap_or(0);
        if self.rng.chance(500) { by } else { -by }
    }

    fn task(&mut self, client: usize, locks: usize, ttl: Micros, heal_at: Micros, pace: Micros) -> TaskPlan {
        let mut ops = Vec::new();
        let mut passed = 0;
        while passed < heal_at && ops.len() < 40 {
            let op = self.op(locks, ttl, pace);
            passed += op.think + op.hold;
            ops.push(op);
        }
        let last =
            (0..self.rng.between(1, 3)).map(|_| (self.rng.index(locks), self.rng.scaled(MS, 800 * MS)));
        TaskPlan { client, ops, last: last.collect(), is_absent: false }
    }

    fn op(&mut self, locks: usize, ttl: Micros, pace: Micros) -> Op {
        let mode = match self.rng.below(10) {
            0..6 => Mode::Wait,
            6 => Mode::Try,
            _ => Mode::Timeout(self.rng.scaled(MS, 20 * SECOND)),
        };
        Op {
            think: self.rng.scaled(10, 2 * pace),
            lock: self.rng.index(locks),
            mode,
            drop_after: self.rng.chance(120).then(|| self.rng.scaled(10, 10 * SECOND)),
            hold: if self.rng.chance(100) {
                self.rng.between(ttl / 2, ttl * 2)
            } else {
                self.rng.scaled(10, pace)
            },
            is_watched: self.rng.chance(600),
            drops_guard: self.rng.chance(300),
        }
    }

    fn fault(&mut self, clients: usize, nodes: usize, abstains: bool) -> Fault {
        let (client, node) = (self.rng.index(clients), self.rng.index(nodes));
        let lasts = self.rng.scaled(MS, 15 * SECOND);
        let (one, other) = self.rng.pick(&[(true, true), (true, false), (false, true)]);
        match self.rng.below(20) {
            0..2 => Fault::Pause { client, callers: one, driver: other, lasts: 2 * lasts },
            2..4 => Fault::Crash { client, restarts_after: lasts },
            4..8 => Fault::Cut {
                client,
                node: self.rng.chance(700).then_some(node),
                late: self.rng.chance(300).then(|| self.rng.scaled(MS, 20 * SECOND)),
            },
            8..11 => Fault::Unreachable { node, lasts },
            11..13 => Fault::Silence { client, node, up: one, down: other, lasts },
            13 => Fault::Loss { thousandths: self.rng.pick(&[20, 100, 300]), lasts },
            14 => Fault::Delay { by: self.rng.scaled(MS, SECOND), lasts },
            15 => Fault::NodePause { node, lasts },
            16..18 if abstains => Fault::NodeRestart { node, lasts: lasts / 4, keeps_data: false },
            18 if abstains => Fault::Flush { node },
            _ => Fault::NodeRestart { node, lasts: lasts / 4, keeps_data: true },
        }
    }
}
