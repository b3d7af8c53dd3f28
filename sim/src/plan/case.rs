//! The name of a run: its seed, and the parts that were left out of its plan.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A seed, without the parts that were left out to make it smaller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    /// Where all chance comes from.
    pub seed: u64,
    /// Some sections end with a detached lease. Another stream of chance decides which, so that the rest of the plan is the same.
    pub detaches: bool,
    /// Some locks want a replica for each grant and renewal, and there are more failovers, from a stream of chance of their own.
    pub replicates: bool,
    /// There are also elections, work that is started once per period, latches and barriers, from a stream of chance of their own.
    pub gathers: bool,
    /// Mutexes and elections are bridged to locks of another library, which other programs use, from a stream of chance of their own.
    pub bridges: bool,
    /// What is left out.
    pub without: BTreeSet<Part>,
}

/// What follows the seed of a case with detached leases.
const DETACHING: &str = " detaching";
/// What follows that of a case with locks that want replicas.
const REPLICATING: &str = " replicating";
/// What follows that of a case with elections, latches and the like.
const GATHERING: &str = " gathering";
/// What follows that of a case with bridges.
const BRIDGING: &str = " bridging";

impl Case {
    /// The case of a seed that was not run before: every other one has detached leases, one of five wants replicas, two of seven
    /// gather, and one of six has bridges, also of those that are run twice.
    #[must_use]
    pub fn fresh(seed: u64) -> Self {
        let (detaches, gathers) = ((seed ^ (seed / 100)) % 2 == 1, matches!(seed % 7, 0 | 3));
        let (replicates, bridges) = (seed % 5 == 2, seed % 6 == 4);
        Self { seed, detaches, replicates, gathers, bridges, without: BTreeSet::new() }
    }
}

/// A part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A client with its tasks.
    Client(usize),
    /// A task.
    Task(usize),
    /// A task's operation.
    Op(usize, usize),
    /// A fault.
    Fault(usize),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(client) => write!(f, "c{client}"),
            Self::Task(task) => write!(f, "t{task}"),
            Self::Op(task, op) => write!(f, "t{task}.{op}"),
            Self::Fault(fault) => write!(f, "f{fault}"),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no part of a plan");
        let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        match (text.get(..1), text.get(1..)) {
            (Some("c"), Some(rest)) => Ok(Self::Client(number(rest)?)),
            (Some("f"), Some(rest)) => Ok(Self::Fault(number(rest)?)),
            (Some("t"), Some(rest)) => match rest.split_once('.') {
                Some((task, op)) => Ok(Self::Op(number(task)?, number(op)?)),
                None => Ok(Self::Task(number(rest)?)),
            },
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |is_set, mark| if is_set { mark } else { "" };
        let (detaching, gathering) = (mark(self.detaches, DETACHING), mark(self.gathers, GATHERING));
        let (replicating, bridging) = (mark(self.replicates, REPLICATING), mark(self.bridges, BRIDGING));
        write!(f, "{}{detaching}{replicating}{gathering}{bridging}", self.seed)?;
        let mut separator = " without ";
        for part in &self.without {
            write!(f, "{separator}{part}")?;
            separator = ",";
        }
        Ok(())
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (seed, without) = text.trim().split_once(" without ").unwrap_or((text.trim(), ""));
        let mark = |text: &'_ str, mark| {
            text.strip_suffix(mark).map_or((text.to_owned(), false), |rest| (rest.to_owned(), true))
        };
        let (seed, bridges) = mark(seed, BRIDGING);
        let (seed, gathers) = mark(&seed, GATHERING);
        let (seed, replicates) = mark(&seed, REPLICATING);
        let (seed, detaches) = mark(&seed, DETACHING);
        let seed = seed.parse().map_err(|_| format!("{seed:?} is no seed"))?;
        let parts = without.split(',').filter(|part| !part.is_empty());
        Ok(Self {
            seed,
            detaches,
            replicates,
            gathers,
            bridges,
            without: parts.map(Part::from_str).collect::<Result<_, _>>()?,
        })
    }
}
