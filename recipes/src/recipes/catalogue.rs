//! The table of the published recipes: what each promises, what is known to be wrong with it, and what answers that.

use std::sync::Arc;

use super::exists_set::ExistsSet;
use super::hash_pubsub::HashPubsub;
use super::local_count::LocalCount;
use super::lua_setnx_expire::LuaSetnxExpire;
use super::lua_setnx_token::LuaSetnxToken;
use super::plays::{Traits, plays};
use super::redlock::{MASTERS, Redlock};
use super::reentrant_hash::ReentrantHash;
use super::rw_hash::{self, RwHash};
use super::rw_two_keys::RwTwoKeys;
use super::set_nx_px::SetNxPx;
use super::setnx::Setnx;
use super::setnx_expire::SetnxExpire;
use super::timestamp_del::TimestampDel;
use super::timestamp_getset::TimestampGetset;
use super::timestamp_getset_expire::TimestampGetsetExpire;
use crate::explorer::{Check, Fault, Scenario, Subject};
use crate::recipe::{AnyRecipe, GetNil, GetSetNil, Make, Role, Terms};
use crate::redis::Redis;

/// A trouble that is known, in the words in which it is told, and what shows it.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    /// The trouble.
    pub trouble: &'static str,
    /// What it breaks.
    pub check: Check,
    /// What has to be wrong for that.
    pub fault: Fault,
}

const fn named(trouble: &'static str, check: Check) -> Named {
    Named { trouble, check, fault: Fault::None }
}

const fn named_if(trouble: &'static str, check: Check, fault: Fault) -> Named {
    Named { trouble, check, fault }
}

/// Another way to have a recipe.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// What is added to the recipe's name at the command line; nothing for the usual way.
    pub switches: &'static str,
    /// What it changes.
    pub set: fn(&mut Terms),
    /// What is known to be wrong with it, beside what is wrong with the recipe.
    pub known: &'static [Named],
}

const USUAL: &[Variant] = &[Variant { switches: "", set: |_| {}, known: &[] }];

/// Enough for what is known of Redlock, whose clients take three steps for one of the others.
const MOST_STATES_OF_MANY: usize = 30_000;

/// The ways that a stored time leaves open.
const TIMESTAMP: &[Variant] = &[
    Variant { switches: "", set: |_| {}, known: &[] },
    Variant { switches: "--get-nil getset", set: |terms| terms.get_nil = GetNil::GetSet, known: &[] },
    Variant {
        switches: "--getset-nil failed",
        set: |terms| terms.getset_nil = GetSetNil::Failed,
        known: &[named(
            "GETSET nil taken for failure: all are locked out by a holder that does not know it holds",
            Check::NothingLeft,
        )],
    },
];

const TWO_KEYS: &[Variant] = &[
    Variant { switches: "", set: |_| {}, known: &[] },
    Variant { switches: "--in-one-step", set: |terms| terms.in_one_step = true, known: &[] },
];

/// A published recipe.
pub struct Row {
    /// Its name.
    pub id: &'static str,
    /// How it takes the lock.
    pub acquire: &'static str,
    /// How it gives it back.
    pub release: &'static str,
    /// What is known to be wrong, that an exploration can show.
    pub known: &'static [Named],
    /// What its words say about it that no schedule can show.
    pub remark: &'static str,
    /// What leasehold has for it.
    pub answer: &'static str,
    /// The ways to have it, the usual one first.
    pub variants: &'static [Variant],
    /// Makes a client.
    pub make: Make,
    /// For how many seconds a lease runs.
    pub lease: fn(Role) -> Option<u64>,
    /// Whether it has readers.
    pub has_readers: bool,
    /// Whether it can be made to last longer.
    pub renews: bool,
    /// Whether a holder may enter again.
    pub reenters: bool,
    /// Whether it waits for word that the lock is free. The others ask again and again.
    pub waits: bool,
    /// How many servers it needs.
    pub nodes: usize,
    /// What may be wrong.
    pub faults: &'static [Fault],
}

/// More than any lease: with a second for the recipe that allows clocks to differ by one.
const LONGEST: u64 = 12;

impl Row {
    const fn new(id: &'static str, acquire: &'static str, release: &'static str, make: Make) -> Self {
        Self {
            id,
            acquire,
            release,
            known: &[],
            remark: "",
            answer: "",
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

    /// What is explored when this variant is.
    #[must_use]
    pub fn subject(&self, variant: &Variant) -> Subject {
        let (make, set, shares) = (self.make, variant.set, self.faults.contains(&Fault::SameOwner));
        let client = move |redis: Redis, role, owner: usize| -> Box<dyn AnyRecipe> {
            let mut terms = Terms { role, ..Terms::default() };
            terms.owner = shares.then(|| format!("owner{owner}"));
            set(&mut terms);
            make(redis, terms)
        };
        Subject { make: Arc::new(client), lease: self.lease, longest: LONGEST, nodes: self.nodes }
    }

    /// In which scenarios it is explored.
    #[must_use]
    pub fn scenarios(&self) -> Vec<Scenario> {
        let mut all = plays(&Traits {
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

    /// What is known about this variant.
    #[must_use]
    pub fn known(&self, variant: &Variant) -> Vec<Named> {
        self.known.iter().chain(variant.known).copied().collect()
    }
}

/// The recipe of that name.
#[must_use]
pub fn find(id: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.id == id)
}

const LATE_DEL: Named = named("a late DEL frees somebody else's lock", Check::FreesOnlyOwn);
const NO_RENEWAL: Named = named("no renewal: whoever is late does not know it", Check::KnowsItsEnd);
const SKEW: &[Fault] = &[Fault::ClocksDiffer];
const CLOCKS: Named = named_if("needs clocks in step", Check::OneHolder, Fault::ClocksDiffer);
const OVERWRITTEN: Named =
    named("a loser's GETSET overwrites the holder's value, so the holder can't release", Check::CanRelease);

/// All of them.
pub static ROWS: &[Row] = &[
    Row {
        known: &[named("two steps: two holders", Check::OneHolder)],
        answer: "`Mutex`: the server decides in one step",
        lease: |_| None,
        ..Row::new("exists-set", "EXISTS, then SET 1", "DEL", |redis, terms| {
            Box::new(ExistsSet { redis, terms })
        })
    },
    Row {
        known: &[named("holder dies: locked for ever", Check::FreeAgain)],
        answer: "`Mutex`: every lease ends, renewed while its holder lives",
        lease: |_| None,
        ..Row::new("setnx", "SETNX", "DEL", |redis, terms| Box::new(Setnx { redis, terms }))
    },
    Row {
        known: &[named("dies between the two: locked for ever", Check::FreeAgain), LATE_DEL],
        answer: "`Mutex`: lease and holder are written in one step, and a release names its acquisition",
        ..Row::new("setnx-expire", "SETNX, then EXPIRE", "DEL", |redis, terms| {
            Box::new(SetnxExpire { redis, terms })
        })
    },
    Row {
        known: &[
            named("C2 and C3 both see it expired; C3's DEL removes C2's fresh lock", Check::FreesOnlyOwn),
            named("two holders", Check::OneHolder),
        ],
        answer: "`Mutex`: only the server's clock decides what has expired, in the step that grants",
        faults: SKEW,
        ..Row::new(
            "timestamp-del",
            "SETNX with a time; when it is past: DEL, SETNX",
            "DEL",
            |redis, terms| Box::new(TimestampDel { redis, terms }),
        )
    },
    Row {
        known: &[CLOCKS, OVERWRITTEN, named("compare and DEL are two steps", Check::FreesOnlyOwn)],
        answer: "`Mutex`: no client's clock decides, a loser changes nothing, a release compares in the step that deletes",
        variants: TIMESTAMP,
        faults: SKEW,
        ..Row::new(
            "timestamp-getset",
            "SETNX with a time; else GET; when past, GETSET and compare",
            "GET, compare, DEL",
            |redis, terms| Box::new(TimestampGetset::new(redis, terms)),
        )
    },
    Row {
        known: &[CLOCKS, LATE_DEL],
        answer: "the same",
        variants: TIMESTAMP,
        faults: SKEW,
        ..Row::new(
            "timestamp-getset-expire",
            "the same, EXPIRE after each success, 1 s allowed for clocks",
            "DEL",
            |redis, terms| Box::new(TimestampGetsetExpire { redis, terms }),
        )
    },
    Row {
        known: &[LATE_DEL],
        answer: "`Mutex`: a release names its acquisition",
        ..Row::new("lua-setnx-expire", "one script: SETNX and EXPIRE", "DEL", |redis, terms| {
            Box::new(LuaSetnxExpire { redis, terms })
        })
    },
    Row {
        known: &[NO_RENEWAL],
        remark: "no fencing",
        answer: "`Mutex`: renewed while held, `Guard::lost`, `Guard::token`",
        ..Row::new(
            "lua-setnx-token",
            "one script: SETNX with a unique value, and EXPIRE",
            "script: GET equal, then DEL",
            |redis, terms| Box::new(LuaSetnxToken::new(redis, terms)),
        )
    },
    Row {
        known: &[NO_RENEWAL],
        remark: "no fencing",
        answer: "`Mutex`: renewed while held, `Guard::lost`, `Guard::token`",
        ..Row::new("set-nx-px", "SET NX PX with a token", "script: compare and delete", |redis, terms| {
            Box::new(SetNxPx::new(redis, terms))
        })
    },
    Row {
        known: &[named_if("owner named by the caller", Check::OneHolder, Fault::SameOwner)],
        answer: "`Reentrant`: the owner is a *set* of acquisitions, each with a lease of its own",
        renews: true,
        reenters: true,
        faults: &[Fault::SameOwner],
        ..Row::new(
            "reentrant-hash",
            "script: absent or own field present: HINCRBY +1, EXPIRE",
            "script: count down, last: DEL",
            |redis, terms| Box::new(ReentrantHash::new(redis, terms)),
        )
    },
    Row {
        known: &[named("renewed every lease period, at most N times", Check::KnowsItsEnd)],
        answer: "`Mutex` with local hand-off: renewed at a third of the lease, for as long as it is held",
        renews: true,
        reenters: true,
        ..Row::new(
            "local-count",
            "SET NX EX once, then a count in the process",
            "count down, compare and delete at zero",
            |redis, terms| Box::new(LocalCount::new(redis, terms)),
        )
    },
    Row {
        remark: "what Redisson does; no trouble is told of it",
        answer: "`Mutex`: the release itself hands the lock to the first in the queue, and wakes nobody else",
        renews: true,
        reenters: true,
        waits: true,
        ..Row::new(
            "hash-pubsub",
            "the hash, a watchdog, waiting on a channel",
            "count down, last: DEL, PUBLISH",
            |redis, terms| Box::new(HashPubsub::new(redis, terms)),
        )
    },
    Row {
        known: &[
            named_if("clocks", Check::OneHolder, Fault::MasterJumps),
            named_if("restarts", Check::OneHolder, Fault::MasterRestarts),
        ],
        remark: "no fencing",
        answer: "`replicas(n)` on one master; fencing tokens tell a late holder",
        nodes: MASTERS,
        faults: &[Fault::MasterRestarts, Fault::MasterJumps],
        ..Row::new(
            "redlock",
            "the same key and token on N masters, majority, validity = ttl - elapsed",
            "on all nodes",
            |redis, terms| Box::new(Redlock::new(redis, terms)),
        )
    },
    Row {
        known: &[named("reader A deletes reader B's key", Check::FreesOnlyOwn)],
        remark: "keys on different cluster nodes: no script and no transaction can have both",
        answer: "`RwLock`: each reader has a lease of its own, in one table under one hash tag",
        variants: TWO_KEYS,
        has_readers: true,
        ..Row::new(
            "rw-two-keys",
            "reader: no write key, SET read key EX; writer: no read key, SET write key NX EX",
            "DEL",
            |redis, terms| Box::new(RwTwoKeys::new(redis, terms)),
        )
    },
    Row {
        known: &[
            named(
                "the second reader overwrites the first, whose release then does nothing",
                Check::CanRelease,
            ),
            named("the second's release lets a writer in beside the first", Check::OneHolder),
            named_if("client clocks", Check::OneHolder, Fault::ClocksDiffer),
        ],
        answer: "`RwLock`: each reader has a lease of its own, by the server's clock",
        lease: |role| {
            Some(if role == Role::Reader { rw_hash::READ.as_secs() } else { rw_hash::WRITE.as_secs() })
        },
        has_readers: true,
        faults: SKEW,
        ..Row::new(
            "rw-hash",
            "one hash with fields read and write, holding client times",
            "the field, if it holds my time",
            |redis, terms| Box::new(RwHash::new(redis, terms)),
        )
    },
];
