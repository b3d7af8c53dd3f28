//! What can be tortured: leasehold, the peers of the comparison, and specimens that are broken on purpose.

use crate::faults::{Fault, StoreKind};

/// A lock of a library.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name on the command line.
    pub name: &'static str,
    /// The peer program, as `bench/setup` names it.
    pub program: &'static str,
    /// The kind of lock, as the peer names it.
    pub lock: &'static str,
    /// Whether its leases are renewed while it holds them, so that a section may be longer than the ttl.
    pub renews: bool,
    /// Whether it gives out fencing tokens.
    pub has_tokens: bool,
    /// Whether its workers call servers of `leasehold serve` behind a balancer, which are then a part of the run.
    pub is_served: bool,
    /// What the library says about its own safety.
    pub promise: &'static str,
    /// Where it says so.
    pub source: &'static str,
}

const fn peer(name: &'static str, program: &'static str, lock: &'static str) -> Target {
    Target {
        name,
        program,
        lock,
        renews: false,
        has_tokens: false,
        is_served: false,
        promise: "",
        source: "",
    }
}

const fn specimen(name: &'static str) -> Target {
    Target { renews: true, has_tokens: true, ..peer(name, name, "mutex") }
}

/// leasehold's mutex.
pub const LEASEHOLD: Target = Target {
    renews: true,
    has_tokens: true,
    promise: "At any time by the store's clock, a mutex has at most one holder.",
    source: "docs/guarantees.md",
    ..peer("leasehold", "leasehold", "mutex")
};

/// The same mutex, whose leases are detached: another guard takes each over by its id, after a renewal by the id or at once.
pub const DETACHED: Target = Target { name: "leasehold-detached", lock: "detached", ..LEASEHOLD };

/// The same mutex over HTTP: three servers behind a balancer, and callers that acquire by requests that they repeat, renew and release.
pub const SERVED: Target = Target {
    name: "leasehold-serve",
    program: "leasehold-serve",
    is_served: true,
    promise: "No server knows the lease. The id is all that a renewal or a release needs, at every server of the store, also after a restart.",
    source: "docs/http-api.md",
    ..LEASEHOLD
};

/// The same mutex from Python: threads of a process that use one client of the package.
pub const PYTHON: Target =
    Target { name: "leasehold-python", program: "leasehold-python", source: "docs/python.md", ..LEASEHOLD };

/// The same mutex from Node.js: tasks of a process that use one client of the package.
pub const NODE: Target =
    Target { name: "leasehold-node", program: "leasehold-node", source: "docs/node.md", ..LEASEHOLD };

const fn kind(name: &'static str, lock: &'static str, promise: &'static str) -> Target {
    Target { name, program: "leasehold-kinds", lock, promise, ..LEASEHOLD }
}

/// leasehold's other kinds of lock, and all of them beside mutexes.
pub const KINDS: [Target; 7] = [
    kind("leasehold-semaphore", "semaphore", "A semaphore never grants more permits than it has."),
    kind("leasehold-read-write", "read-write", "A writer excludes all other holders."),
    kind("leasehold-reentrant", "reentrant", "A reentrant mutex has a named owner."),
    kind("leasehold-election", "election", LEASEHOLD.promise),
    kind("leasehold-set", "set", "A `MutexSet` acquires all of its mutexes or returns without any."),
    kind(
        "leasehold-once-per",
        "once-per",
        "Two starts of once-per-period work are at least nine tenths of the period apart.",
    ),
    kind("leasehold-mixed", "mixed", LEASEHOLD.promise),
];

/// What Redisson's documentation says of all its locks.
const REDISSON: Target = Target {
    renews: true,
    promise: "Redisson's distributed locks are built on Valkey or Redis and are advisory: they coordinate only the clients that acquire \
              the same lock object, and their safety depends on the deployment topology.",
    source: "https://redisson.pro/docs/data-and-services/locks-and-synchronizers/",
    ..peer("redisson", "redisson", "mutex")
};

/// The peers, each as its documentation advises.
pub const PEERS: [Target; 10] = [
    REDISSON,
    Target { name: "redisson-fair", lock: "fair", ..REDISSON },
    Target { name: "redisson-fenced", lock: "fenced", has_tokens: true, ..REDISSON },
    Target {
        promise: "This code implements an algorithm which is currently a proposal, it was not formally analyzed.",
        source: "README of redsync",
        ..peer("redsync", "redsync", "mutex")
    },
    Target {
        renews: true,
        promise: "The returned `ctx` will be canceled automatically and immediately once the `KeyMajority` is not held anymore.",
        source: "README of rueidislock",
        ..peer("rueidislock", "rueidislock", "mutex")
    },
    Target {
        renews: true,
        promise: "It provides strong guarantees in both single-redis and multi-redis environments, and provides fault tolerance through \
                  use of multiple independent redis instances or clusters.",
        source: "README of node-redlock",
        ..peer("redlock", "redlock", "mutex")
    },
    Target {
        promise: "It's left to the user to resolve deadlock issues and make sure multiple clients play nicely together.",
        source: "docstring of redis.lock.Lock",
        ..peer("redis-py", "redis-py", "mutex")
    },
    Target {
        promise: "Work while the lock is valid.",
        source: "documentation of LockGuard::release",
        ..peer("rslock", "rslock", "mutex")
    },
    Target {
        renews: true,
        has_tokens: true,
        promise: "Generally speaking, a lease-based lock service cannot provide mutual exclusion to processes.",
        source: "etcd, contrib/lock/README.md",
        ..peer("etcd", "etcd", "mutex")
    },
    Target {
        renews: true,
        promise: "Once acquired at session level, an advisory lock is held until explicitly released or the session ends.",
        source: "documentation of PostgreSQL, chapter Explicit Locking",
        ..peer("postgres-advisory", "postgres", "mutex")
    },
];

/// Locks that are broken on purpose: each must be caught by the checker that looks for its defect.
pub const SPECIMENS: [Target; 18] = [
    Target { is_served: true, ..specimen("broken-asks-once") },
    Target { lock: "mixed", ..specimen("broken-kinds") },
    specimen("broken-lets-two-in"),
    specimen("broken-ignores-loss"),
    Target { has_tokens: false, renews: false, ..specimen("broken-set-nx") },
    specimen("broken-falling-token"),
    specimen("broken-lost-waiter"),
    specimen("broken-keeps-lock"),
    specimen("broken-leaks-files"),
    specimen("broken-panics-once"),
    specimen("broken-never-renews"),
    specimen("broken-always-lost"),
    Target { renews: false, ..specimen("broken-drops-releases") },
    specimen("broken-hangs-in-release"),
    specimen("broken-fails-calls"),
    specimen("broken-starves"),
    specimen("broken-leaves-lease"),
    Target { renews: false, ..specimen("broken-same-token") },
];

impl Target {
    /// By its name on the command line.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|target| target.name == name)
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        [LEASEHOLD, DETACHED, SERVED, PYTHON, NODE].into_iter().chain(KINDS).chain(PEERS).chain(SPECIMENS)
    }

    /// Whether it is part of this program.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.has_bound() && ![PYTHON.program, NODE.program].contains(&self.program)
    }

    /// Whether it has a lock on this store.
    #[must_use]
    pub fn runs_on(&self, store: StoreKind) -> bool {
        match (self.program, store) {
            ("etcd", _) => store == StoreKind::Etcd,
            ("postgres", _) => store == StoreKind::Postgres,
            (_, StoreKind::Etcd) => false,
            // `memory:` is within one process, and a quorum has no requests that can be repeated.
            (_, StoreKind::Memory | StoreKind::Redlock) if self.is_served => false,
            // A quorum has no such locks.
            (_, StoreKind::Redlock) if matches!(self.lock, "semaphore" | "read-write" | "reentrant") => false,
            (_, StoreKind::Redis | StoreKind::Redis62 | StoreKind::Valkey | StoreKind::Redlock) => true,
            _ => self.has_bound(),
        }
    }

    /// The faults that apply to it on this store.
    #[must_use]
    pub fn faults(&self, store: StoreKind) -> Vec<Fault> {
        Fault::all(store).filter(|fault| self.is_served || !fault.is_of_serve()).collect()
    }

    /// Whether all tasks of a client are the same holder to it, so that each task needs a client.
    #[must_use]
    pub fn has_client_per_task(&self) -> bool {
        matches!(self.program, "etcd" | "postgres")
    }

    /// Whether leasehold's promises apply: to itself, and to the specimens that must break them.
    #[must_use]
    pub fn has_bound(&self) -> bool {
        self.is_leasehold() || SPECIMENS.iter().any(|specimen| specimen.name == self.name)
    }

    /// Whether it is leasehold itself.
    #[must_use]
    pub fn is_leasehold(&self) -> bool {
        [LEASEHOLD.program, SERVED.program, PYTHON.program, NODE.program].contains(&self.program)
            || KINDS.iter().any(|kind| kind.program == self.program)
    }
}
