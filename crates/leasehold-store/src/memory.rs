//! `memory:`, lease tables in this process, for tests and single-process programs.
//!
//! `memory:` is a separate store for each client. `memory:NAME` is shared by all clients of the process that use the name. It
//! exists while one of these clients lives. The process keeps the last token of a name for one hour longer.
//!
//! The store has no timer. After every `SWEEP` commands it removes the expired state of `SWEEP` resources. Expired state is
//! therefore removed as fast as new state is created. Of more than `KEPT` resources, it also removes those of which only the
//! last token is left, if the clock has passed that token: new tokens follow the clock. `Inner::floor` remembers the highest of
//! the removed tokens, in case the clock is set back.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use leasehold_core::model::{CommandContext, TOKEN_RETENTION, Table, apply, apply_all, sweep};
use leasehold_core::{Acquire, Answer, ClientId, Command, Now, Push, Resource, StoreTime, Token};

use crate::clock::Clock;
use crate::process::PerProcess;
use crate::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Diagnose, EMBEDDED_POLL_INTERVALS, Inbox, Store,
    StoreError, trial,
};
use crate::{Check, Component, Diagnosis};

/// The number of commands between two sweeps, and the number of resources that one sweep visits.
const SWEEP: u32 = 16;

/// How many resources may keep their last token while they are not used.
const KEPT: usize = 1_024;

/// The stores with a name.
static NAMED: PerProcess<Mutex<BTreeMap<String, Named>>> = PerProcess::of_first(Mutex::new(BTreeMap::new()));

/// Entry of a named store.
struct Named {
    store: Weak<Memory>,
    /// The highest token granted under this name.
    last_token: Arc<AtomicU64>,
}

impl Named {
    /// The store, if it lives. If not, its last token is visible here.
    fn store(&self) -> Option<Arc<Memory>> {
        let store = self.store.upgrade();
        if store.is_none() {
            fence(Ordering::Acquire);
        }
        store
    }

    fn is_to_be_known(&self, now: Now) -> bool {
        self.store().is_some()
            || now.wall < StoreTime::from_micros(self.last_token.load(Ordering::Relaxed)) + TOKEN_RETENTION
    }
}

/// Lease tables shared by clients of one process.
#[derive(Default)]
pub struct Memory {
    clock: Clock,
    inner: Mutex<Inner>,
    /// Lower bound of new tokens: above those of earlier stores of the same name.
    floor: Option<Token>,
}

#[derive(Default)]
struct Inner {
    tables: BTreeMap<Resource, Table>,
    inboxes: HashMap<ClientId, Weak<dyn Inbox>>,
    /// The highest token granted; written only by this store.
    last_token: Arc<AtomicU64>,
    /// Above the last token of each resource that was removed. It does not lead the clock that removed it.
    floor: Option<Token>,
    /// Number of commands since the last sweep.
    commands: u32,
    /// The resource that was swept last.
    swept: Option<Resource>,
}

impl Memory {
    /// Opens the store of this name; an empty name gives a separate store.
    pub fn open(name: &str) -> Arc<Self> {
        if name.is_empty() {
            return Arc::default();
        }
        let mut named = NAMED.get_or_default().lock().unwrap_or_else(PoisonError::into_inner);
        let now = Clock::System.in_memory();
        named.retain(|_, known| known.is_to_be_known(now));
        let known = named.get(name);
        if let Some(store) = known.and_then(Named::store) {
            return store;
        }
        let last_token = known.map(|known| known.last_token.clone()).unwrap_or_default();
        let store = Arc::new(Self {
            clock: Clock::System,
            floor: Token::new(last_token.load(Ordering::Relaxed) + 1),
            inner: Mutex::new(Inner { last_token: last_token.clone(), ..Inner::default() }),
        });
        named.insert(name.to_owned(), Named { store: Arc::downgrade(&store), last_token });
        store
    }

    /// A separate store that lives by this clock.
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    /// Registers a client's inbox for pushes.
    pub fn join(&self, client: ClientId, inbox: Weak<dyn Inbox>) {
        let mut inner = self.inner();
        inner.inboxes.retain(|_, inbox| inbox.strong_count() > 0);
        inner.inboxes.insert(client, inbox);
    }

    /// Runs a command, which never has to wait here.
    ///
    /// # Errors
    ///
    /// None so far.
    pub fn call_inline(&self, resource: &Resource, command: &Command) -> CallResult {
        Ok(self.run(|| self.now(), resource, command))
    }

    fn in_use(&self) -> Vec<Resource> {
        let inner = self.inner();
        let in_use =
            inner.tables.iter().filter(|(_, table)| table.header().is_some_and(|row| !row.is_idle()));
        in_use.map(|(resource, _)| resource.clone()).collect()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic inside the model leaves a resource half stepped at worst, and its leases still expire.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, clock: impl FnOnce() -> Now, resource: &Resource, command: &Command) -> Answer {
        self.run_as(clock, |inner, now, pushes| inner.step(now, resource, command, pushes))
    }

    fn now(&self) -> Now {
        Now { floor: self.floor, ..self.clock.in_memory() }
    }

    /// Runs `step` with exclusive access, then delivers its pushes without the lock. The clock is read after the wait for that: commands
    /// run in the order of their times.
    fn run_as<T>(
        &self,
        clock: impl FnOnce() -> Now,
        step: impl FnOnce(&mut Inner, Now, &mut Vec<Push>) -> T,
    ) -> T {
        let mut pushes = Vec::new();
        let (answer, inboxes) = {
            let mut inner = self.inner();
            let now = clock();
            let answer = step(&mut inner, now, &mut pushes);
            inner.sweep_some(now, &mut pushes);
            let inboxes: Vec<_> = pushes.iter().map(|push| inner.inbox(push)).collect();
            (answer, inboxes)
        };
        for (push, inbox) in pushes.into_iter().zip(inboxes) {
            if let Some(inbox) = inbox {
                inbox.deliver(push);
            }
        }
        answer
    }
}

impl Inner {
    fn step(&mut self, now: Now, resource: &Resource, command: &Command, pushes: &mut Vec<Push>) -> Answer {
        let inboxes = &self.inboxes;
        let is_reachable = &mut |client| is_there(inboxes, client);
        if let Some(table) = self.tables.get_mut(resource) {
            let answer = never_fails(apply(table, CommandContext { now, is_reachable, pushes }, command));
            note_token(&self.last_token, table);
            return answer;
        }
        // A lower bound is for new resources only: it would raise the token of a lease that is held.
        let now = Now { floor: now.floor.max(self.floor), ..now };
        let context = CommandContext { now, is_reachable, pushes };
        let mut table = Table::new();
        let answer = never_fails(apply(&mut table, context, command));
        note_token(&self.last_token, &table);
        if !table.is_empty() {
            self.tables.insert(resource.clone(), table);
        }
        answer
    }

    fn step_together(
        &mut self,
        now: Now,
        attempts: &[(Arc<Resource>, Arc<Acquire>)],
        pushes: &mut Vec<Push>,
    ) -> Vec<Answer> {
        let table = |(resource, _): &(Arc<Resource>, _)| self.tables.remove(&**resource).unwrap_or_default();
        let mut tables: Vec<_> = attempts.iter().map(table).collect();
        let inboxes = &self.inboxes;
        let now = Now { floor: now.floor.max(self.floor), ..now };
        let context = CommandContext { now, is_reachable: &mut |client| is_there(inboxes, client), pushes };
        let acquires = attempts.iter().map(|(_, acquire)| acquire);
        let mut steps: Vec<_> = tables.iter_mut().zip(acquires).collect();
        let answers = never_fails(apply_all(context, &mut steps));
        for ((resource, _), table) in attempts.iter().zip(tables) {
            note_token(&self.last_token, &table);
            if !table.is_empty() {
                self.tables.insert((**resource).clone(), table);
            }
        }
        answers
    }

    fn sweep_some(&mut self, now: Now, pushes: &mut Vec<Push>) {
        self.commands += 1;
        if self.commands == SWEEP {
            self.commands = 0;
            for _ in 0..SWEEP.min(u32::try_from(self.tables.len()).unwrap_or(SWEEP)) {
                self.sweep_one(now, pushes);
            }
        }
    }

    fn sweep_one(&mut self, now: Now, pushes: &mut Vec<Push>) {
        let from = self.swept.take().map_or(Bound::Unbounded, Bound::Excluded);
        let Some((resource, table)) = self.tables.range_mut((from, Bound::Unbounded)).next() else { return };
        let resource = resource.clone();
        let inboxes = &self.inboxes;
        let context = CommandContext { now, is_reachable: &mut |client| is_there(inboxes, client), pushes };
        let is_kept = never_fails(sweep(table, context));
        note_token(&self.last_token, table);
        let past = table.header().filter(|header| header.is_idle()).map(|header| header.last_token);
        let past = past.filter(|token| StoreTime::from_micros(*token) < now.wall);
        if !is_kept {
            self.tables.remove(&resource);
        } else if let Some(token) = past.filter(|_| self.tables.len() > KEPT) {
            self.floor = self.floor.max(Token::new(token + 1));
            self.tables.remove(&resource);
        }
        self.swept = Some(resource);
    }

    fn inbox(&mut self, push: &Push) -> Option<Arc<dyn Inbox>> {
        let inbox = self.inboxes.get(&push.inbox)?.upgrade();
        if inbox.is_none() {
            self.inboxes.remove(&push.inbox);
        }
        inbox
    }
}

/// Records the table's last token, if it is the highest.
fn note_token(last: &AtomicU64, table: &Table) {
    let token = table.header().map_or(0, |header| header.last_token);
    if token > last.load(Ordering::Relaxed) {
        last.store(token, Ordering::Relaxed);
    }
}

fn is_there(inboxes: &HashMap<ClientId, Weak<dyn Inbox>>, client: ClientId) -> bool {
    inboxes.get(&client).is_some_and(|inbox| inbox.strong_count() > 0)
}

fn never_fails<T>(result: Result<T, Infallible>) -> T {
    result.unwrap_or_else(|never| match never {})
}

impl Store for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        Some(self.call_inline(resource, command))
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(std::future::ready(self.call_inline(&call.resource, &call.command)))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let answers: Vec<_> =
            batch.iter().map(|Call { resource, command }| self.call_inline(resource, command)).collect();
        Box::pin(std::future::ready(answers))
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let answers =
            self.run_as(|| self.now(), |inner, now, pushes| inner.step_together(now, attempts, pushes));
        Some(Box::pin(std::future::ready(answers.into_iter().map(Ok).collect())))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        Box::pin(std::future::ready(Ok(self.in_use())))
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl Diagnose for Memory {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let mut component = Component::new("the memory of this process");
        component.fact("locks in use", self.in_use().len());
        component.fine(
            Check::InProcess,
            "the locks are in this process",
            "they end with it, and no other process sees them: sqlite: is for all processes of a machine",
        );
        let tried = trial::commands(false);
        let results: Vec<_> =
            tried.iter().map(|Call { resource, command }| self.call_inline(resource, command)).collect();
        trial::judge(&results, &mut component);
        Box::pin(std::future::ready(Ok(Diagnosis { components: vec![component] })))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use leasehold_core::{Acquisition, Kind, Name, PushKind, Release, Reply, TokenRange, WaitFor};
    use std::time::Duration;

    struct RecordingInbox(Mutex<Vec<Push>>);

    impl Inbox for RecordingInbox {
        fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

        fn deliver(&self, push: Push) {
            self.0.lock().unwrap().push(push);
        }
    }

    fn resource(name: &str) -> Resource {
        Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
    }

    fn acquire(client: u128) -> Command {
        Command::from(Acquire {
            wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 10 }),
            ..Acquire::exclusive(
                Acquisition { client: ClientId::new(client), sequence: 0 },
                Duration::from_secs(10),
            )
        })
    }

    fn release(client: u128) -> Command {
        Command::Release(Release::now(Acquisition { client: ClientId::new(client), sequence: 0 }))
    }

    fn at(seconds: u64) -> Now {
        Now::same(StoreTime::from_micros(1_700_000_000_000_000) + Duration::from_secs(seconds))
    }

    #[test]
    fn release_delivers_the_grant_only_to_the_waiters_inbox() {
        let store = Memory::open("");
        let inboxes: Vec<_> = (0..3).map(|_| Arc::new(RecordingInbox(Mutex::default()))).collect();
        for (client, inbox) in (0_u128..).zip(&inboxes) {
            let inbox: Arc<dyn Inbox> = inbox.clone();
            store.join(ClientId::new(client), Arc::downgrade(&inbox));
        }
        assert!(matches!(store.run(|| at(0), &resource("a"), &acquire(0)).reply, Reply::Granted(_)));
        assert!(matches!(store.run(|| at(0), &resource("a"), &acquire(1)).reply, Reply::Queued(_)));
        store.run(|| at(1), &resource("a"), &release(0));
        let pushes = inboxes[1].0.lock().unwrap();
        assert!(matches!(pushes[..], [Push { kind: PushKind::Granted(..), .. }]), "{pushes:?}");
        assert!(inboxes[0].0.lock().unwrap().is_empty() && inboxes[2].0.lock().unwrap().is_empty());
    }

    /// Otherwise a renewal that waits for others could shorten the lease to before a later one.
    #[test]
    fn clock_is_read_when_no_other_command_runs() {
        let store = Memory::open("");
        let clock = || {
            assert!(store.inner.try_lock().is_err());
            at(0)
        };
        assert!(matches!(store.run(clock, &resource("a"), &acquire(0)).reply, Reply::Granted(_)));
    }

    #[test]
    fn client_without_an_inbox_is_skipped() {
        let store = Memory::open("");
        let inbox: Arc<dyn Inbox> = Arc::new(RecordingInbox(Mutex::default()));
        store.join(ClientId::new(2), Arc::downgrade(&inbox));
        for client in 0..3 {
            store.run(|| at(0), &resource("a"), &acquire(client));
        }
        store.run(|| at(1), &resource("a"), &release(0));
        assert!(matches!(store.run(|| at(1), &resource("a"), &acquire(2)).reply, Reply::Granted(_)));
    }

    #[test]
    fn unused_resources_are_swept_by_other_commands() {
        let store = Memory::open("");
        for number in 0..100 {
            store.run(|| at(0), &resource(&number.to_string()), &acquire(0));
        }
        assert_eq!(store.inner().tables.len(), 100);
        for _ in 0..2 * (100 + SWEEP) {
            store.run(|| at(7_300), &resource("x"), &release(0));
        }
        assert_eq!(store.inner().tables.len(), 0);
    }

    #[test]
    fn used_resources_are_soon_forgotten_and_their_tokens_rise_all_the_same() {
        let store = Memory::open("");
        let time = Cell::new(at(0).time);
        let use_once = |name: String| {
            time.set(time.get() + Duration::from_micros(10));
            let now = || Now::same(time.get());
            let granted = store.run(now, &resource(&name), &acquire(0));
            store.run(now, &resource(&name), &release(0));
            let Reply::Granted(grant) = granted.reply else { panic!("it is free") };
            grant.tokens.first
        };
        let names = || (0..10 * KEPT).map(|number| number.to_string());
        let first: Vec<_> = names().map(use_once).collect();
        let second: Vec<_> = names().map(use_once).collect();
        assert!(store.inner().tables.len() <= 2 * KEPT, "{} are left", store.inner().tables.len());
        // The clock is set back.
        time.set(at(0).time);
        let third: Vec<_> = names().map(use_once).collect();
        for ((first, second), third) in first.iter().zip(&second).zip(&third) {
            assert!(first < second && second < third, "{first}, {second}, {third}");
        }
    }

    #[test]
    fn named_store_is_shared_and_dropped_with_its_last_client() {
        let first = Memory::open("a_named_store");
        assert!(Arc::ptr_eq(&first, &Memory::open("a_named_store")));
        assert!(!Arc::ptr_eq(&first, &Memory::open("another_named_store")));
        token_of(&first, &acquire(0));
        drop(first);
        token_of(&Memory::open("a_named_store"), &acquire(1));
    }

    #[test]
    fn tokens_rise_across_stores_of_one_name() {
        let reserving = |client| match acquire(client) {
            Command::Acquire(plain) => Command::from(Acquire { reserve: 1_000_000, ..(*plain).clone() }),
            other => other,
        };
        let (mut last, unnamed) = (None, Memory::open(""));
        for client in 0..20 {
            // Its clock moves in steps, and the tokens that are set aside are ahead of it.
            let tokens = token_of(&Memory::open("tokens_rise"), &reserving(client));
            assert!(last < Some(tokens.first), "{last:?} was before {tokens:?}");
            last = Some(tokens.last);
        }
        assert!(last > Some(token_of(&unnamed, &acquire(0)).last), "other stores have tokens of their own");
    }

    /// The resource is free, so it is granted.
    fn token_of(store: &Memory, acquire: &Command) -> TokenRange {
        match store.try_call_inline(&resource("a"), acquire) {
            Some(Ok(Answer { reply: Reply::Granted(grant), .. })) => grant.tokens,
            other => panic!("{other:?}"),
        }
    }
}
