//! The table of the published recipes, from the simplest to those with readers.

use super::{KnownProblem, Row, Variant, problem, problem_if};
use crate::explorer::{Check, Fault};
use crate::recipe::{GetNil, GetSetNil, Role};
use crate::recipes::exists_set::ExistsSet;
use crate::recipes::hash_pubsub::HashPubsub;
use crate::recipes::local_count::LocalCount;
use crate::recipes::lua_setnx_expire::LuaSetnxExpire;
use crate::recipes::lua_setnx_token::LuaSetnxToken;
use crate::recipes::redlock::{MASTERS, Redlock};
use crate::recipes::reentrant_hash::ReentrantHash;
use crate::recipes::rw_hash::{self, RwHash};
use crate::recipes::rw_two_keys::RwTwoKeys;
use crate::recipes::set_nx_ex::SetNxEx;
use crate::recipes::set_nx_px::SetNxPx;
use crate::recipes::set_nx_px_get_del::SetNxPxGetDel;
use crate::recipes::setnx::Setnx;
use crate::recipes::setnx_expire::SetnxExpire;
use crate::recipes::timestamp_del::TimestampDel;
use crate::recipes::timestamp_getset::TimestampGetset;
use crate::recipes::timestamp_getset_expire::TimestampGetsetExpire;

const LATE_DEL: KnownProblem = problem("a late DEL frees another client's lock", Check::FreesOnlyOwn);
const NO_RENEWAL: KnownProblem =
    problem("no renewal: a delayed holder does not notice that its lease has expired", Check::DetectsExpiry);
const SKEW: &[Fault] = &[Fault::ClocksDiffer];
const CLOCKS: KnownProblem = problem_if("needs synchronised clocks", Check::OneHolder, Fault::ClocksDiffer);
const OVERWRITTEN: KnownProblem = problem(
    "the GETSET of a client that fails to acquire overwrites the holder's value, so the holder cannot release",
    Check::CanRelease,
);
const NO_FENCING: &str = "no fencing tokens";

/// Instead of recipes that differ from `Mutex` in the same way.
const RENEWED: &str = "`Mutex`: it renews its lease while the guard lives, `Guard::lost` reports a loss, `Guard::token` is a fencing token";
const OWN_RELEASE: &str =
    "`Mutex`: a release names its own acquisition and is compared with the holder in one script";
const SERVER_CLOCK: &str = "`Mutex`: only the server's clock decides whether a lease has expired, in the script that grants the lock";

/// What the recipes that store a time leave open.
const TIMESTAMP: &[Variant] = &[
    Variant { switches: "", set: |_| {}, known: &[] },
    Variant { switches: "--get-nil getset", set: |options| options.get_nil = GetNil::GetSet, known: &[] },
    Variant {
        switches: "--getset-nil failed",
        set: |options| options.getset_nil = GetSetNil::Failed,
        known: &[problem(
            "a GETSET that returns nil counts as a failure: a client that does not know that it holds locks out all others",
            Check::NoStaleLock,
        )],
    },
];

const TWO_KEYS: &[Variant] = &[
    Variant { switches: "", set: |_| {}, known: &[] },
    Variant { switches: "--in-one-step", set: |options| options.in_one_step = true, known: &[] },
];

/// All of them.
pub static ROWS: &[Row] = &[
    Row {
        known: &[problem("check and set are two steps: two holders", Check::OneHolder)],
        lease: |_| None,
        ..Row::new(
            "exists-set",
            "EXISTS, then SET 1",
            "DEL",
            "`Mutex`: the server decides in one step",
            |redis, options| Box::new(ExistsSet { redis, options }),
        )
    },
    Row {
        known: &[problem("no expiry: if the holder crashes, the lock is never free again", Check::FreeAgain)],
        lease: |_| None,
        ..Row::new(
            "setnx",
            "SETNX",
            "DEL",
            "`Mutex`: every lease expires, and is renewed while its holder lives",
            |redis, options| Box::new(Setnx { redis, options }),
        )
    },
    Row {
        known: &[
            problem("if the holder crashes between the two, the lock is never free again", Check::FreeAgain),
            LATE_DEL,
        ],
        ..Row::new(
            "setnx-expire",
            "SETNX, then EXPIRE",
            "DEL",
            "`Mutex`: one script writes holder and lease, and a release names its own acquisition",
            |redis, options| Box::new(SetnxExpire { redis, options }),
        )
    },
    Row {
        known: &[
            problem("C2 and C3 both see it expired; C3's DEL removes C2's new lock", Check::FreesOnlyOwn),
            problem("two holders", Check::OneHolder),
        ],
        faults: SKEW,
        ..Row::new(
            "timestamp-del",
            "SETNX with the expiry time as the value; when that time has passed: DEL, SETNX",
            "DEL",
            SERVER_CLOCK,
            |redis, options| Box::new(TimestampDel { redis, options }),
        )
    },
    Row {
        known: &[CLOCKS, OVERWRITTEN, problem("compare and DEL are two steps", Check::FreesOnlyOwn)],
        variants: TIMESTAMP,
        faults: SKEW,
        ..Row::new(
            "timestamp-getset",
            "SETNX with the expiry time as the value; else GET; when that time has passed: GETSET and compare",
            "GET, compare, DEL",
            SERVER_CLOCK,
            |redis, options| Box::new(TimestampGetset::new(redis, options)),
        )
    },
    Row {
        known: &[CLOCKS, LATE_DEL],
        variants: TIMESTAMP,
        faults: SKEW,
        ..Row::new(
            "timestamp-getset-expire",
            "as timestamp-getset, with EXPIRE after each success and 1 s allowed for clock differences",
            "DEL",
            SERVER_CLOCK,
            |redis, options| Box::new(TimestampGetsetExpire { redis, options }),
        )
    },
    Row {
        known: &[LATE_DEL],
        ..Row::new(
            "set-nx-ex",
            "SET 1 EX NX: the same value for every client",
            "DEL",
            OWN_RELEASE,
            |redis, options| Box::new(SetNxEx { redis, options }),
        )
    },
    Row {
        known: &[problem(
            "the lease expires between GET and DEL: the DEL frees another client's lock",
            Check::FreesOnlyOwn,
        )],
        ..Row::new(
            "set-nx-px-get-del",
            "SET NX PX with a token",
            "GET, compare in the client, then DEL: two commands",
            OWN_RELEASE,
            |redis, options| Box::new(SetNxPxGetDel::new(redis, options)),
        )
    },
    Row {
        known: &[LATE_DEL],
        ..Row::new(
            "lua-setnx-expire",
            "one script: SETNX and EXPIRE",
            "DEL",
            OWN_RELEASE,
            |redis, options| Box::new(LuaSetnxExpire { redis, options }),
        )
    },
    Row {
        known: &[NO_RENEWAL],
        remark: NO_FENCING,
        ..Row::new(
            "lua-setnx-token",
            "one script: SETNX with a unique value, and EXPIRE",
            "script: GET equal, then DEL",
            RENEWED,
            |redis, options| Box::new(LuaSetnxToken::new(redis, options)),
        )
    },
    Row {
        known: &[NO_RENEWAL],
        remark: NO_FENCING,
        ..Row::new(
            "set-nx-px",
            "SET NX PX with a token",
            "script: compare and delete",
            RENEWED,
            |redis, options| Box::new(SetNxPx::new(redis, options)),
        )
    },
    Row {
        known: &[problem_if(
            "the caller names the owner: two clients with one name hold it together",
            Check::OneHolder,
            Fault::SameOwner,
        )],
        renews: true,
        reenters: true,
        faults: &[Fault::SameOwner],
        ..Row::new(
            "reentrant-hash",
            "script: if absent or own field present, HINCRBY +1 and EXPIRE",
            "script: count down; at zero, DEL",
            "`ReentrantMutex`: the owner is a set of acquisitions, each with a lease of its own",
            |redis, options| Box::new(ReentrantHash::new(redis, options)),
        )
    },
    Row {
        known: &[problem("renewed once per lease, at most N times", Check::DetectsExpiry)],
        renews: true,
        reenters: true,
        ..Row::new(
            "local-count",
            "SET NX EX once, then a count in the process",
            "count down; at zero, compare and delete",
            "`Mutex` with local hand-off: renewed at a third of the lease for as long as it is held",
            |redis, options| Box::new(LocalCount::new(redis, options)),
        )
    },
    Row {
        known: &[problem(
            "a holder that is paused beyond its lease does not notice that it has expired",
            Check::DetectsExpiry,
        )],
        remark: "no fencing tokens; this is what Redisson does",
        renews: true,
        reenters: true,
        waits: true,
        ..Row::new(
            "hash-pubsub",
            "as reentrant-hash, with a watchdog that renews, and a channel to wait on",
            "script: count down; at zero, DEL and PUBLISH",
            "`Mutex`: the release itself grants the lock to the first waiter and wakes no other, and `Guard::lost` reports an expired lease",
            |redis, options| Box::new(HashPubsub::new(redis, options)),
        )
    },
    Row {
        known: &[
            problem_if("a master's clock jumps: two holders", Check::OneHolder, Fault::MasterJumps),
            problem_if(
                "a master restarts without its data: two holders",
                Check::OneHolder,
                Fault::MasterRestarts,
            ),
        ],
        remark: NO_FENCING,
        nodes: MASTERS,
        faults: &[Fault::MasterRestarts, Fault::MasterJumps],
        ..Row::new(
            "redlock",
            "the same key and token on N masters; majority; validity = ttl - elapsed",
            "script on all masters: compare and delete",
            "the `Redlock` type (`redlock://host,host,host`): fencing tokens, a restarted master abstains until the leases that it forgot have expired, and a release is retried on every node; or `Mutex` with `replicas(n)` on one master",
            |redis, options| Box::new(Redlock::new(redis, options)),
        )
    },
    Row {
        known: &[problem("reader A deletes reader B's key", Check::FreesOnlyOwn)],
        remark: "the keys may be on different cluster nodes, where no script and no transaction reaches both",
        variants: TWO_KEYS,
        has_readers: true,
        ..Row::new(
            "rw-two-keys",
            "reader: no write key, SET read key EX; writer: no read key, SET write key NX EX",
            "DEL",
            "`RwLock`: each reader has a lease of its own, in one table under one hash tag",
            |redis, options| Box::new(RwTwoKeys::new(redis, options)),
        )
    },
    Row {
        known: &[
            problem(
                "the second reader overwrites the first, whose release then does nothing",
                Check::CanRelease,
            ),
            problem("the second reader's release admits a writer beside the first reader", Check::OneHolder),
            problem_if("needs synchronised clocks", Check::OneHolder, Fault::ClocksDiffer),
        ],
        lease: |role| {
            Some(if role == Role::Reader { rw_hash::READ.as_secs() } else { rw_hash::WRITE.as_secs() })
        },
        has_readers: true,
        faults: SKEW,
        ..Row::new(
            "rw-hash",
            "one hash with the fields read and write, which hold client times",
            "deletes the field if it holds the client's own time",
            "`RwLock`: each reader has a lease of its own, by the server's clock",
            |redis, options| Box::new(RwHash::new(redis, options)),
        )
    },
];
