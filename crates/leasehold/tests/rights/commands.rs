//! Every command of a client that lacks a right, beside a healthy client.

use std::time::Duration;

use leasehold::{Client, Error, Guard, Kind, Mutex, MutexSet};
use leasehold_testkit::until;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than a lease.
pub(crate) const LONG: Duration = Duration::from_secs(40);

/// No lease ends while it is tried.
const TTL: Duration = Duration::from_secs(60);

/// How long an attempt waits that gives up. The right is taken away meanwhile, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(12);

/// A waiter that is not told of its grant asks when the lease before it ends.
const SHORT: Duration = Duration::from_secs(5);

/// A pause of the machine that no lease outlives for certain.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// What is tried, as the table's columns say it.
pub(crate) const COMMANDS: [&str; 15] = [
    "connect",
    "try_lock",
    "lock",
    "lock, waiting before",
    "lock_timeout, waiting before",
    "renew",
    "release",
    "release to a waiter",
    "inspect",
    "list",
    "semaphore",
    "read-write lock",
    "mutex set",
    "force_release",
    "replicas(1)",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Works,
    /// The error names the right.
    Refused,
    /// The store has no such command.
    Absent,
}

type Change = Box<dyn Fn() + Send + Sync>;

/// One right, and a user of its own that lacks it.
pub(crate) struct Trial {
    /// As the table names it.
    pub(crate) right: String,
    /// A name for this user and its locks.
    pub(crate) name: String,
    pub(crate) url: String,
    /// The words by which an error says what is missing.
    pub(crate) remedy: String,
    pub(crate) take_away: Change,
    pub(crate) give_back: Change,
    /// Asserts that nothing was left that stays for ever.
    pub(crate) check: Change,
    pub(crate) has_replicas: bool,
    /// What went wrong.
    pub(crate) faults: Faults,
}

/// All of them are told at the end.
#[derive(Default)]
pub(crate) struct Faults(std::cell::RefCell<Vec<String>>);

impl Faults {
    pub(crate) fn into_inner(self) -> Vec<String> {
        self.0.into_inner()
    }
}

impl Trial {
    /// `list` is what [`Self::list`] has found.
    pub(crate) async fn run(&self, healthy: &Client, list: Outcome) -> Vec<Outcome> {
        let ended = timeout(3 * LONG, self.outcomes(healthy, list)).await;
        ended.unwrap_or_else(|_| panic!("{}: the commands do not end", self.right))
    }

    async fn outcomes(&self, healthy: &Client, list: Outcome) -> Vec<Outcome> {
        let lacking = Client::connect(&self.url).await.unwrap();
        let before = Before::prepare(self, healthy, &lacking).await;
        (self.take_away)();
        let connected = self.outcome("connect", Client::connect(&self.url).await).0;
        let mut outcomes = vec![connected];
        outcomes.push(self.try_lock(healthy, &lacking).await);
        outcomes.push(self.wait(healthy, &lacking).await);
        let (of_holders, patient) = before.go_on(self, healthy).await;
        let inspected = self.inspect(healthy, &lacking).await;
        let shared = self.share(healthy, &lacking).await;
        let read = self.read(healthy, &lacking).await;
        let locked_set = self.lock_set(healthy, &lacking).await;
        let forced = self.force(healthy, &lacking).await;
        let replicated = self.replicate(&lacking).await;
        let [waited, renewed, released, handed_over] = of_holders;
        outcomes.extend([waited, patient.give_up(self).await, renewed, released, handed_over]);
        outcomes.extend([inspected, list, shared, read, locked_set, forced, replicated]);
        (self.check)();
        (self.give_back)();
        drop(lacking);
        self.all_can_be_locked(healthy).await;
        (self.check)();
        outcomes
    }

    fn expect(&self, is_so: bool, fault: &str) {
        if !is_so {
            self.faults.0.borrow_mut().push(format!("without {}: {fault}", self.right));
        }
    }

    fn mutex(&self, client: &Client, part: &str) -> Mutex {
        let ttl = if ["handed over", "held", "waited"].contains(&part) { SHORT } else { TTL };
        client.mutex(format!("{} {part}", self.name)).ttl(ttl)
    }

    async fn hold(&self, client: &Client, part: &str) -> Guard {
        let locked = self.mutex(client, part).lock_timeout(LONG).await;
        locked.unwrap_or_else(|error| panic!("{} {part}: {error}", self.right)).expect("it is free soon")
    }

    /// Asserts that an error names the right.
    fn outcome<T>(&self, command: &str, result: Result<T, Error>) -> (Outcome, Option<T>) {
        let error = match result {
            Ok(done) => return (Outcome::Works, Some(done)),
            Err(error) => error,
        };
        let text = format!("{error:#}");
        let is_boundary = |neighbour: Option<char>| {
            neighbour.is_none_or(|neighbour| !neighbour.is_alphanumeric() && neighbour != '|')
        };
        let is_named = text.match_indices(&self.remedy).any(|(at, remedy)| {
            is_boundary(text[..at].chars().next_back())
                && is_boundary(text[at + remedy.len()..].chars().next())
        });
        self.expect(is_named, &format!("{command}: {text}"));
        (Outcome::Refused, None)
    }

    /// Asserts that no other client gets the lock while this guard holds it, and releases it.
    async fn end(&self, healthy: &Mutex, guard: Option<Guard>) {
        let Some(guard) = guard else { return };
        let taken = healthy.try_lock().await.unwrap();
        self.expect(taken.is_none() || !guard.is_held(), "two holders");
        self.outcome("release", guard.release().await);
    }

    async fn try_lock(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let (outcome, guard) = self.outcome("try_lock", self.mutex(lacking, "free").try_lock().await);
        if let Some(guard) = guard {
            self.expect(guard.is_some(), "a free lock is busy");
            self.end(&self.mutex(healthy, "free"), guard).await;
        }
        outcome
    }

    /// It waits, and then the holder releases.
    async fn wait(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let held = self.hold(healthy, "held").await;
        let waiting = self.waiter(lacking, "held");
        let seen = self.mutex(healthy, "held");
        until(async || {
            waiting.is_finished() || seen.inspect().await.is_ok_and(|view| view.waiters.len() == 1)
        })
        .await;
        held.release().await.unwrap();
        self.waited("lock", &seen, waiting).await
    }

    fn waiter(&self, client: &Client, part: &str) -> JoinHandle<Result<Option<Guard>, Error>> {
        let mutex = self.mutex(client, part);
        tokio::spawn(async move { mutex.lock_timeout(LONG).await })
    }

    /// What has become of a waiter once the lock is free.
    async fn waited(
        &self,
        command: &str,
        healthy: &Mutex,
        waiting: JoinHandle<Result<Option<Guard>, Error>>,
    ) -> Outcome {
        let (outcome, guard) = self.outcome(command, waiting.await.unwrap());
        if let Some(guard) = guard {
            self.expect(guard.is_some(), &format!("{command}: it waits in silence"));
            self.end(healthy, guard).await;
        }
        outcome
    }

    async fn inspect(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let _held = self.hold(healthy, "inspected").await;
        let (outcome, view) = self.outcome("inspect", self.mutex(lacking, "inspected").inspect().await);
        self.expect(view.is_none_or(|view| view.holders.len() == 1), "a held lock looks free");
        outcome
    }

    /// Tries `list`, which sees the locks of all trials, while there is one lock only.
    pub(crate) async fn list(&self, healthy: &Client) -> Outcome {
        let lacking = Client::connect(&self.url).await.unwrap();
        let held = self.hold(healthy, "listed").await;
        (self.take_away)();
        let (outcome, locks) = self.outcome("list", lacking.list().await);
        if let Some(locks) = locks {
            let name = format!("{} listed", self.name);
            self.expect(locks.iter().any(|lock| lock.name == name), "a held lock is not listed");
        }
        (self.give_back)();
        held.release().await.unwrap();
        outcome
    }

    async fn share(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let of = |client: &Client| client.semaphore(format!("{} shared", self.name), 2).ttl(TTL);
        let permit = of(healthy).acquire(1).await.unwrap();
        let (outcome, second) = self.outcome("semaphore", of(lacking).try_acquire(1).await);
        if let Some(second) = second {
            let second = second.expect("one is left");
            let third = of(healthy).try_acquire(1).await.unwrap();
            self.expect(third.is_none() || !second.is_held(), "three holders");
            self.outcome("semaphore", second.release().await);
        }
        permit.release().await.unwrap();
        outcome
    }

    async fn read(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let of = |client: &Client| client.rw_lock(format!("{} read", self.name)).ttl(TTL);
        let reader = of(healthy).read().await.unwrap();
        let (outcome, second) = self.outcome("read-write lock", of(lacking).try_read().await);
        if let Some(second) = second {
            let second = second.expect("readers share");
            let writer = of(healthy).try_write().await.unwrap();
            self.expect(writer.is_none() || !second.is_held(), "a writer beside readers");
            self.outcome("read-write lock", second.release().await);
        }
        reader.release().await.unwrap();
        outcome
    }

    async fn lock_set(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let parts = ["set one", "set two"];
        let set = MutexSet::new(parts.map(|part| self.mutex(lacking, part)));
        let (outcome, guard) = self.outcome("mutex set", set.try_lock().await);
        if let Some(guard) = guard {
            let guard = guard.unwrap_or_else(|| panic!("{}: a free set is busy", self.right));
            for part in parts {
                let taken = self.mutex(healthy, part).try_lock().await.unwrap();
                self.expect(taken.is_none() || !guard.is_held(), "two holders of a set");
            }
            self.outcome("mutex set", guard.release().await);
        }
        outcome
    }

    async fn force(&self, healthy: &Client, lacking: &Client) -> Outcome {
        let held = self.hold(healthy, "forced").await;
        let name = format!("{} forced", self.name);
        let (outcome, _) = self.outcome("force_release", lacking.force_release(Kind::Mutex, &name).await);
        // Nothing is half done: a revoked lease is no one's, or else it is held.
        if outcome == Outcome::Works {
            let next = self.hold(healthy, "forced").await;
            next.release().await.unwrap();
        }
        drop(held.release().await);
        outcome
    }

    async fn replicate(&self, lacking: &Client) -> Outcome {
        if !self.has_replicas {
            return Outcome::Absent;
        }
        let mutex = self.mutex(lacking, "replicated").replicas(1);
        let (outcome, guard) = self.outcome("replicas(1)", mutex.try_lock().await);
        if let Some(guard) = guard {
            self.outcome("replicas(1)", guard.expect("it is free").release().await);
        }
        outcome
    }

    /// The healthy client ends what is left of the other's leases, and gets every lock of the trial.
    async fn all_can_be_locked(&self, healthy: &Client) {
        for part in [
            "free",
            "held",
            "waited",
            "renewed",
            "released",
            "handed over",
            "set one",
            "set two",
            "forced",
            "replicated",
            "kept",
        ] {
            self.mutex(healthy, part).force_release().await.unwrap();
            self.hold(healthy, part).await.release().await.unwrap();
        }
    }
}

/// What the client has while it has all rights.
struct Before {
    renewed: Guard,
    released: Guard,
    handed_over: Guard,
    /// Of the healthy client, behind `handed_over`.
    next: JoinHandle<Result<Option<Guard>, Error>>,
    /// Of the healthy client.
    held: Guard,
    /// Behind `held`.
    waiting: JoinHandle<Result<Option<Guard>, Error>>,
    patient: Patient,
}

/// A waiter that gives up when its time is up.
struct Patient {
    /// Of the healthy client.
    _kept: Guard,
    /// Behind it.
    waiting: JoinHandle<Result<Option<Guard>, Error>>,
}

impl Patient {
    async fn give_up(self, trial: &Trial) -> Outcome {
        let (outcome, guard) = trial.outcome("lock_timeout", self.waiting.await.unwrap());
        trial.expect(guard.flatten().is_none(), "two holders");
        outcome
    }
}

impl Before {
    async fn prepare(trial: &Trial, healthy: &Client, lacking: &Client) -> Self {
        // In a cluster this connects to every node.
        lacking.list().await.unwrap();
        let [renewed, released, handed_over] = [
            trial.hold(lacking, "renewed").await,
            trial.hold(lacking, "released").await,
            trial.hold(lacking, "handed over").await,
        ];
        let next = trial.waiter(healthy, "handed over");
        let held = trial.hold(healthy, "waited").await;
        let waiting = trial.waiter(lacking, "waited");
        for part in ["handed over", "waited"] {
            let seen = trial.mutex(healthy, part);
            until(async || seen.inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        }
        let kept = trial.hold(healthy, "kept").await;
        let mutex = trial.mutex(lacking, "kept");
        let gives_up = tokio::spawn(async move { mutex.lock_timeout(PATIENCE).await });
        let seen = trial.mutex(healthy, "kept");
        until(async || {
            assert!(!gives_up.is_finished(), "{}: it gave up before it was seen", trial.right);
            seen.inspect().await.is_ok_and(|view| view.waiters.len() == 1)
        })
        .await;
        let patient = Patient { _kept: kept, waiting: gives_up };
        Self { renewed, released, handed_over, next, held, waiting, patient }
    }

    /// The waiter that was there before, renew, release, and release to a waiter. One waiter is left.
    async fn go_on(self, trial: &Trial, healthy: &Client) -> ([Outcome; 4], Patient) {
        self.held.release().await.unwrap();
        let waited =
            trial.waited("lock, waiting before", &trial.mutex(healthy, "waited"), self.waiting).await;
        let renewed = trial.outcome("renew", self.renewed.renew().await).0;
        let released = trial.outcome("release", self.released.release().await).0;
        if released == Outcome::Works {
            let next = trial.mutex(healthy, "released").try_lock().await.unwrap();
            trial.expect(next.is_some(), "a lock that was released is held");
        }
        let token = self.handed_over.token();
        let handed_over = trial.outcome("release to a waiter", self.handed_over.release().await).0;
        // Instead of a wait for the end of the lease, if it is still there.
        let name = format!("{} handed over", trial.name);
        healthy.force_release_token(Kind::Mutex, &name, token).await.unwrap();
        let next = self.next.await.unwrap().unwrap();
        next.unwrap_or_else(|| panic!("{}: it waits for ever", trial.right)).release().await.unwrap();
        trial.end(&trial.mutex(healthy, "renewed"), Some(self.renewed)).await;
        ([waited, renewed, released, handed_over], self.patient)
    }
}
