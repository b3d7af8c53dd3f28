//! The catalogue of published recipes: what each promises, its known problems, and what to use instead.

mod rows;

use std::sync::Arc;

use crate::explorer::{Check, Fault, Scenario, Subject};
use crate::recipe::{AnyRecipe, LockOptions, MakeRecipe, Role};
use crate::redis::Redis;

use super::scenarios::{Traits, scenarios};
pub use rows::ROWS;

/// A known problem, and the check by which an exploration shows it.
#[derive(Clone, Copy, Debug)]
pub struct KnownProblem {
    /// The problem, as articles describe it.
    pub problem: &'static str,
    /// The check that it breaks.
    pub check: Check,
    /// The fault that it needs.
    pub fault: Fault,
}

const fn problem(problem: &'static str, check: Check) -> KnownProblem {
    KnownProblem { problem, check, fault: Fault::None }
}

const fn problem_if(problem: &'static str, check: Check, fault: Fault) -> KnownProblem {
    KnownProblem { problem, check, fault }
}

/// A variant of a recipe.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Its options at the command line. Empty: the recipe as it is usually published.
    pub switches: &'static str,
    /// Sets its options.
    pub set: fn(&mut LockOptions),
    /// Its known problems, beside those of the recipe.
    pub known: &'static [KnownProblem],
}

const USUAL: &[Variant] = &[Variant { switches: "", set: |_| {}, known: &[] }];

/// A limit for recipes with several servers, whose clients take three steps for one of the others. The known problems of
/// Redlock show within it.
const MOST_STATES_OF_MANY: usize = 30_000;

/// A published recipe.
pub struct Row {
    /// Its name.
    pub id: &'static str,
    /// How it acquires the lock.
    pub acquire: &'static str,
    /// How it releases the lock.
    pub release: &'static str,
    /// Known problems that an exploration can show.
    pub known: &'static [KnownProblem],
    /// A known problem that no schedule can show.
    pub remark: &'static str,
    /// What to use instead.
    pub instead: &'static str,
    /// Its variants, the usual one first.
    pub variants: &'static [Variant],
    /// Creates a client.
    pub make: MakeRecipe,
    /// The lease in seconds.
    pub lease: fn(Role) -> Option<u64>,
    /// Whether it has readers.
    pub has_readers: bool,
    /// Whether it can renew.
    pub renews: bool,
    /// Whether a holder may acquire it again.
    pub reenters: bool,
    /// Whether its waiters wait for a notification. The others poll.
    pub waits: bool,
    /// How many servers it needs.
    pub nodes: usize,
    /// The faults that matter to it.
    pub faults: &'static [Fault],
}

/// Seconds after which every lease has expired: 10, and one for the recipe that allows clocks to differ by a second.
const LONGEST: u64 = 12;

impl Row {
    const fn new(
        id: &'static str,
        acquire: &'static str,
        release: &'static str,
        instead: &'static str,
        make: MakeRecipe,
    ) -> Self {
        Self {
            id,
            acquire,
            release,
            known: &[],
            remark: "",
            instead,
            variants: USUAL,
            make,
            lease: |_| Some(10),
            has_readers: false,
            renews: false,
            reenters: false,
            waits: false,
            nodes: 1,
            faults: &[],
        }
    }

    /// This variant as the lock under test.
    #[must_use]
    pub fn subject(&self, variant: &Variant) -> Subject {
        let (make, set, shares) = (self.make, variant.set, self.faults.contains(&Fault::SameOwner));
        let client = move |redis: Redis, role, owner: usize| -> Box<dyn AnyRecipe> {
            let mut options = LockOptions { role, ..LockOptions::default() };
            options.owner = shares.then(|| format!("owner{owner}"));
            set(&mut options);
            make(redis, options)
        };
        Subject { make: Arc::new(client), lease: self.lease, longest: LONGEST, nodes: self.nodes }
    }

    /// The scenarios in which it is explored.
    #[must_use]
    pub fn scenarios(&self) -> Vec<Scenario> {
        let mut all = scenarios(&Traits {
            has_readers: self.has_readers,
            renews: self.renews,
            reenters: self.reenters,
            waits: self.waits,
            passes: &self.passes(),
            faults: self.faults,
        });
        if self.nodes > 1 {
            all.iter_mut().for_each(|scenario| scenario.most_states = MOST_STATES_OF_MANY);
        }
        all
    }

    fn passes(&self) -> Vec<u64> {
        match (self.has_readers, (self.lease)(Role::Writer)) {
            (_, None) => Vec::new(),
            (_, Some(lease)) if lease < 10 => vec![2, LONGEST],
            (_, Some(_)) if self.renews => vec![6, LONGEST],
            _ => vec![LONGEST],
        }
    }

    /// The known problems of a variant that an exploration can show.
    #[must_use]
    pub fn known(&self, variant: &Variant) -> Vec<KnownProblem> {
        self.known.iter().chain(variant.known).copied().collect()
    }

    /// All known problems, in one line.
    #[must_use]
    pub fn problems(&self) -> String {
        let remark = Some(self.remark).filter(|remark| !remark.is_empty());
        let all: Vec<_> = self.known.iter().map(|known| known.problem).chain(remark).collect();
        all.join("; ")
    }
}

/// The recipe of that name.
#[must_use]
pub fn find(id: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.id == id)
}
