//! Plays a history on a store and on the model, and compares what they say.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, Table, apply, apply_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Kind, Name, Push, ReleaseIf, Renew, Reply, Resource,
    View,
};
use proptest::test_runner::TestCaseError;
use tokio::runtime::{Builder, Runtime};

use super::Place;
use crate::histories::{CLIENTS, Joint, Step, client_id, with_tokens};
use crate::{Call, CallResult, Inbox, Store};

/// Limit of a wait that must end, for a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Sends what clients that are gone would send.
const OPERATOR: ClientId = ClientId::new(1);

/// Fails with what was observed.
pub(super) type Observed = Result<(), TestCaseError>;

pub(super) fn fail<T>(what: impl Into<String>) -> Result<T, TestCaseError> {
    Err(TestCaseError::fail(what.into()))
}

fn equal<T: Debug + PartialEq>(what: &str, found: &T, expected: &T, after: &dyn Debug) -> Observed {
    if found == expected {
        return Ok(());
    }
    fail(format!("{what} after {after:?}: the store has {found:?}, the model {expected:?}"))
}

/// What a client was sent.
#[derive(Default)]
pub(super) struct RecordingInbox {
    pushes: Mutex<Vec<Push>>,
    reconnected: Mutex<bool>,
}

impl RecordingInbox {
    pub(super) fn pushes(&self) -> Vec<Push> {
        self.pushes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_reconnected(&self) -> bool {
        *self.reconnected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox for RecordingInbox {
    fn deliver(&self, push: Push) {
        self.pushes.lock().unwrap_or_else(PoisonError::into_inner).push(push);
    }

    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {
        *self.reconnected.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// A push as far as it is delivered: some stores send only the number of the attempt.
fn as_delivered(push: &Push) -> Push {
    Push { acquisition: Acquisition { client: push.inbox, ..push.acquisition }, ..push.clone() }
}

/// A client of the store.
pub(super) struct Member {
    pub(super) store: Arc<dyn Store>,
    pub(super) inbox: Arc<RecordingInbox>,
    /// What the model has pushed to it.
    expected: Vec<Push>,
}

/// Waits until there is a value.
pub(super) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, TestCaseError> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() > deadline {
            return fail(format!("{what} within {LIMIT:?}"));
        }
        sleep(Duration::from_millis(1));
    }
}

/// A store beside the model of it.
pub(super) struct Comparison {
    pub(super) place: Place,
    pub(super) runtime: Runtime,
    resources: Vec<(Arc<Resource>, Table)>,
    members: BTreeMap<ClientId, Member>,
    operator: Arc<dyn Store>,
    _inbox: Arc<RecordingInbox>,
    commands: usize,
}

impl Comparison {
    /// All clients are there.
    pub(super) fn new(place: Place, kind: Kind, resources: usize) -> Result<Self, TestCaseError> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let resource = |number| {
            let name = Name::new(&format!("\u{e4}'b-{number}")).ok()?;
            Some((Arc::new(Resource { kind, name }), Table::new()))
        };
        let resources = (0..resources).filter_map(resource).collect();
        let (operator, inbox) = open(&place, &runtime, OPERATOR)?;
        let (members, commands) = (BTreeMap::new(), 0);
        let mut this = Self { place, runtime, resources, members, operator, _inbox: inbox, commands };
        for client in 0..CLIENTS {
            this.join(client_id(client))?;
        }
        Ok(this)
    }

    /// A client connects.
    pub(super) fn join(&mut self, client: ClientId) -> Observed {
        let (store, inbox) = open(&self.place, &self.runtime, client)?;
        self.members.insert(client, Member { store, inbox, expected: Vec::new() });
        Ok(())
    }

    /// A client ends.
    pub(super) fn leave(&mut self, client: ClientId) -> Observed {
        let left = self.members.remove(&client);
        left.map_or(Ok(()), |member| {
            let found: Vec<Push> = member.inbox.pushes().iter().map(as_delivered).collect();
            equal("pushes", &found, &member.expected, &"all")
        })
    }

    pub(super) fn member(&self, client: ClientId) -> Option<&Member> {
        self.members.get(&client)
    }

    pub(super) fn resource(&self, at: usize) -> Arc<Resource> {
        self.resources[at].0.clone()
    }

    pub(super) fn play(&mut self, history: &[Joint]) -> Observed {
        for joint in history {
            let is_played = match joint {
                Joint::At(at, step) => self.step(*at, step)?,
                Joint::Together(attempts) => self.run_all(attempts)?,
                Joint::Renewals(renewals) => self.renew_all(renewals)?,
            };
            if is_played {
                self.settle(joint)?;
            }
        }
        self.compare_lists()
    }

    /// Whether the step is one that the kit can take.
    fn step(&mut self, at: usize, step: &Step) -> Result<bool, TestCaseError> {
        match step {
            Step::Do(command) => self.run(at, command)?,
            Step::Pass(ms) => self.place.time.pass(Duration::from_millis(*ms)),
            Step::Leave(client) => self.leave(client_id(*client))?,
            Step::Return(client) if self.members.contains_key(&client_id(*client)) => {}
            Step::Return(client) => self.join(client_id(*client))?,
            // When a store sweeps is its own matter, and its clocks do not run backwards.
            Step::Sweep | Step::SetBack(_) | Step::Raise(_) => return Ok(false),
        }
        Ok(true)
    }

    /// Whatever has ended by now is ended in both: when else a store does that is its own matter.
    fn settle(&mut self, after: &Joint) -> Observed {
        for at in 0..self.resources.len() {
            self.run(at, &Command::Inspect)?;
        }
        self.compare_pushes(after)
    }

    /// Runs a command, each time in another of the ways in which the client does.
    pub(super) fn run(&mut self, at: usize, command: &Command) -> Observed {
        let command = &with_tokens(command, &mut self.resources[at].1);
        self.commands += 1;
        let (resource, store) = (self.resource(at), self.sender(command));
        let way = self.commands % 3;
        let inline = if way == 0 { store.try_call_inline(&resource, command) } else { None };
        let found = match inline {
            Some(answer) => answer,
            None if way == 1 => self.wait(store.call(Call::new(resource, command.clone()), 0))?,
            None => self.batch(&store, vec![Call::new(resource, command.clone())])?.remove(0),
        };
        let expected = self.model(at, command);
        compare(found, expected, command)
    }

    fn sender(&self, command: &Command) -> Arc<dyn Store> {
        let client = match command {
            Command::Acquire(acquire) => acquire.inbox(),
            Command::Renew(renew) => renew.acquisition.client,
            Command::Release(release) => match release.only_if {
                Some(ReleaseIf::SpeaksFor(client)) => client,
                _ => release.acquisition.client,
            },
            Command::Inspect | Command::ForceRelease => OPERATOR,
        };
        self.members.get(&client).map_or_else(|| self.operator.clone(), |member| member.store.clone())
    }

    pub(super) fn wait<T: Send>(&self, call: crate::BoxFuture<T>) -> Result<T, TestCaseError> {
        let limited = self.runtime.block_on(async { tokio::time::timeout(LIMIT, call).await });
        limited.or_else(|_| fail(format!("no answer within {LIMIT:?}")))
    }

    fn batch(&self, store: &Arc<dyn Store>, batch: crate::Batch) -> Result<Vec<CallResult>, TestCaseError> {
        let count = batch.len();
        let answers = self.wait(store.call_batch(batch, 0))?;
        if answers.len() == count {
            Ok(answers)
        } else {
            fail(format!("a batch of {count} has {} answers", answers.len()))
        }
    }

    fn model(&mut self, at: usize, command: &Command) -> Answer {
        let (now, mut pushes) = (self.place.time.now(), Vec::new());
        let members = &self.members;
        let is_reachable = &mut |client| members.contains_key(&client);
        let context = CommandContext { now, is_reachable, pushes: &mut pushes };
        let answer = never_fails(apply(&mut self.resources[at].1, context, command));
        self.expect(pushes);
        answer
    }

    fn expect(&mut self, pushes: Vec<Push>) {
        for push in pushes {
            if let Some(member) = self.members.get_mut(&push.inbox) {
                member.expected.push(as_delivered(&push));
            }
        }
    }

    /// The first resources are acquired together, if the store can do that.
    fn run_all(&mut self, attempts: &[Arc<Acquire>]) -> Result<bool, TestCaseError> {
        let resources = self.resources.iter().map(|(resource, _)| resource.clone());
        let calls: Vec<_> = resources.zip(attempts.iter().cloned()).collect();
        let Some(acquiring) = self.operator.acquire_all(&calls) else { return Ok(false) };
        let found = self.wait(acquiring)?;
        let (now, mut pushes) = (self.place.time.now(), Vec::new());
        let members = &self.members;
        let is_reachable = &mut |client| members.contains_key(&client);
        let context = CommandContext { now, is_reachable, pushes: &mut pushes };
        let tables = self.resources.iter_mut().map(|(_, table)| table);
        let expected = never_fails(apply_all(context, &mut tables.zip(attempts).collect::<Vec<_>>()));
        self.expect(pushes);
        if found.len() != expected.len() {
            return fail(format!("{} attempts have {} answers", expected.len(), found.len()));
        }
        let both = found.into_iter().zip(expected);
        both.zip(attempts).try_for_each(|((found, expected), attempt)| compare(found, expected, attempt))?;
        Ok(true)
    }

    /// The renewals of one client in a batch.
    fn renew_all(&mut self, renewals: &[(usize, Renew)]) -> Result<bool, TestCaseError> {
        let of_tables = |(at, renew): &(usize, Renew)| {
            (*at, with_tokens(&Command::Renew(renew.clone()), &mut self.resources[*at].1))
        };
        let renewals: Vec<_> = renewals.iter().map(of_tables).collect();
        let batch = renewals.iter().map(|(at, renew)| Call::new(self.resource(*at), renew.clone())).collect();
        let Some((_, first)) = renewals.first() else { return Ok(false) };
        let found = self.batch(&self.sender(first), batch)?;
        for ((at, renew), found) in renewals.iter().zip(found) {
            let expected = self.model(*at, renew);
            compare(found, expected, renew)?;
        }
        Ok(true)
    }

    /// Pushes may come later than the answer, and none is missing or too many.
    pub(super) fn compare_pushes(&self, after: &dyn Debug) -> Observed {
        for member in self.members.values() {
            let all = || (member.inbox.pushes().len() >= member.expected.len()).then_some(());
            let arrived = until("", all);
            let found: Vec<Push> = member.inbox.pushes().iter().map(as_delivered).collect();
            equal("pushes", &found, &member.expected, after)?;
            arrived?;
        }
        Ok(())
    }

    /// A list may also have what has just ended.
    pub(super) fn compare_lists(&self) -> Observed {
        let listed = self.wait(self.operator.list())?;
        let listed = listed.or_else(|error| fail(format!("the list fails: {}", error.message)))?;
        // A store need not list a lock without holders and waiters, even if it still refuses late attempts.
        let in_use = |table: &Table| table.header().is_some_and(|header| header.leases + header.waiters > 0);
        for (resource, table) in &self.resources {
            if in_use(table) && !listed.contains(resource) {
                return fail(format!("{resource} is in use, and not listed: {listed:?}"));
            }
        }
        let known = |listed: &Resource| self.resources.iter().any(|(resource, _)| **resource == *listed);
        match listed.iter().find(|listed| !known(listed)) {
            Some(unknown) => fail(format!("{unknown} is listed, and was never used")),
            None => Ok(()),
        }
    }
}

fn open(
    place: &Place,
    runtime: &Runtime,
    client: ClientId,
) -> Result<(Arc<dyn Store>, Arc<RecordingInbox>), TestCaseError> {
    let inbox = Arc::new(RecordingInbox::default());
    let shared: Weak<dyn Inbox> = Arc::<RecordingInbox>::downgrade(&inbox);
    let opening = place.factory.open(client, shared);
    let opened = runtime.block_on(async { tokio::time::timeout(LIMIT, opening).await });
    match opened {
        Ok(Ok(store)) => Ok((store, inbox)),
        Ok(Err(error)) => fail(format!("the store does not open: {error}")),
        Err(_) => fail(format!("the store does not open within {LIMIT:?}")),
    }
}

fn compare(found: CallResult, expected: Answer, command: &dyn Debug) -> Observed {
    let found = found.or_else(|error| fail(format!("{command:?} fails: {}", error.message)))?;
    equal("the answer", &without_old_token(found), &without_old_token(expected), command)
}

/// A store may forget the last token of a lock that is not used once its clock has passed that token.
fn without_old_token(answer: Answer) -> Answer {
    match answer.reply {
        Reply::View(view) if view.holders.is_empty() && view.waiters.is_empty() => {
            Answer { reply: Reply::View(View::default()), ..answer }
        }
        _ => answer,
    }
}

fn never_fails<T>(result: Result<T, Infallible>) -> T {
    result.unwrap_or_else(|never| match never {})
}
