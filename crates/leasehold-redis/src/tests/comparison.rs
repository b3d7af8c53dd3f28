//! Runs commands in the model and in the scripts on a real server, and compares the answers and pushes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Lease, Rows as _, Table, apply, apply_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Kind, Name, Now, Push, PushKind, Release, Renew, Reply,
    Resource, StoreTime, Token, View,
};
use leasehold_redis_protocol::{
    ConditionalDelete, Expectation, FAILING_WRITES, Script, ScriptCall, ScriptVariant, VIRTUAL_TIME,
    VoteArgs, clock_key, decode_answer, decode_outbox, decode_push, decode_renewals, inbox_of, inbox_prefix,
    plain_value, resource_key, slot_of,
};
use leasehold_store::histories::{CLIENTS, Step, client_id, with_tokens};
use leasehold_testkit::{Flavor, SCRIPT_RULES, Server};
use redis::{Connection, ConnectionLike as _, PubSub, RedisResult};

/// The clock of the test starts this far ahead of the server's, so that no key expires during the test.
const CLOCK_LEAD: Duration = Duration::from_secs(1_000 * 3_600);

/// Tokens per millisecond, and how far the clock of tokens may be ahead for tokens to be reserved.
pub(super) const TOKENS_PER_MS: u64 = 2_048;
const MAX_LEAD_MS: u64 = 100;

/// A change of the scripts that the comparison must notice: `scripts/lua-mutants` sets it.
struct Mutant {
    lines: String,
    instead: String,
}

impl Mutant {
    fn from_env() -> Option<Self> {
        let mutant = std::env::var("LEASEHOLD_LUA_MUTANT").ok()?;
        let (lines, instead) = mutant.split_once('\u{1}').expect("lines, and those instead of them");
        Some(Self { lines: lines.to_owned(), instead: instead.to_owned() })
    }

    fn apply(&self, text: &str) -> String {
        text.replace(&self.lines, &self.instead)
    }
}

/// When the clock of a test starts.
pub(super) fn start() -> StoreTime {
    StoreTime::ZERO + wall_clock() + CLOCK_LEAD
}

/// Runs the scripts on a server, with a subscription to the inbox of each client.
pub(super) struct ScriptRunner<'c> {
    pub(super) commands: &'c mut Connection,
    inboxes: PubSub<'c>,
    /// SHA1 hashes of the loaded scripts.
    scripts: HashMap<(Script, ScriptVariant), String>,
    /// Use the scripts for a proxy.
    pub(super) is_restricted: bool,
    /// The server has DELIFEQ, which releases plain leases.
    has_delete: bool,
    /// The attempts that the first lines granted.
    granted: HashMap<(Resource, Acquisition), (Arc<Acquire>, Token)>,
    /// Number of leases that DELIFEQ released.
    pub(super) deleted: usize,
    /// Number of calls in which every third one expects that the lock is contended; `None` if none does.
    pub(super) expecting: Option<usize>,
    /// Which writes of the next calls fail, after `load_failing`: see `failing_writes.lua`.
    pub(super) failing: Option<String>,
}

impl<'c> ScriptRunner<'c> {
    pub(super) fn new(commands: &'c mut Connection, inboxes: &'c mut Connection) -> Self {
        let mut runner = Self {
            commands,
            inboxes: inboxes.as_pubsub(),
            scripts: HashMap::new(),
            is_restricted: false,
            has_delete: false,
            granted: HashMap::new(),
            deleted: 0,
            expecting: None,
            failing: None,
        };
        let info: String = redis::cmd("INFO").arg("server").query(runner.commands).unwrap();
        runner.has_delete = ConditionalDelete::of_server(&info) == Some(ConditionalDelete::DelIfEq);
        runner.load(VIRTUAL_TIME);
        for client in 0..CLIENTS {
            runner.subscribe(client_id(client));
        }
        runner.inboxes.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        runner
    }

    /// Loads the scripts with this clock of the test.
    pub(super) fn load(&mut self, virtual_time: &str) {
        self.load_mutant(virtual_time, Mutant::from_env().as_ref());
    }

    /// Loads scripts whose writes can be made to fail, and in which, for a specimen, these lines are replaced by those.
    pub(super) fn load_failing(&mut self, specimen: Option<(&str, &str)>) {
        let mutant = specimen
            .map(|(lines, instead)| Mutant { lines: lines.to_owned(), instead: instead.to_owned() })
            .or_else(Mutant::from_env);
        let prelude = ["local failing = table.remove(ARGV)\n", VIRTUAL_TIME, FAILING_WRITES].concat();
        self.load_mutant(&prelude, mutant.as_ref());
        self.failing = Some(String::new());
    }

    fn load_mutant(&mut self, virtual_time: &str, mutant: Option<&Mutant>) {
        let mut is_mutated = mutant.is_none();
        for script in Script::ALL {
            for variant in [ScriptVariant::Server, ScriptVariant::Voter, ScriptVariant::Restricted] {
                // The clock of the test replaces the server's. It is ahead, so that no key expires meanwhile.
                let clock = "local virtual = tonumber(table.remove(ARGV))\n";
                let text = variant.text(script);
                let mutated = mutant.map_or_else(|| text.to_string(), |mutant| mutant.apply(&text));
                is_mutated |= mutated != text;
                // The test's own preludes may do what a proxy refuses.
                let rules = if variant.is_restricted() { SCRIPT_RULES } else { "" };
                let source = [clock, virtual_time, rules, &mutated].concat();
                let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(source).query(self.commands).unwrap();
                self.scripts.insert((script, variant), sha);
            }
        }
        assert!(is_mutated, "the mutant names lines of no script");
    }

    pub(super) fn subscribe(&mut self, client: ClientId) {
        self.inboxes.subscribe(inbox_of(client, None)).unwrap();
    }

    pub(super) fn unsubscribe(&mut self, client: ClientId) {
        self.inboxes.unsubscribe(inbox_of(client, None)).unwrap();
    }

    pub(super) fn run(&mut self, resource: &Resource, command: &Command, now: Now) -> Answer {
        if let Some(answer) = self.delete(resource, command, now) {
            return answer;
        }
        let value =
            self.value_of(resource, command, now).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let answer = decode_answer(command, &value)
            .unwrap_or_else(|error| panic!("{command:?} returned {value:?}: {error}"));
        if let (Command::Acquire(acquire), redis::Value::BulkString(_), Reply::Granted(grant)) =
            (command, &value, &answer.reply)
        {
            let granted = (acquire.clone(), grant.tokens.first);
            self.granted.insert((resource.clone(), acquire.acquisition), granted);
        }
        answer
    }

    /// The reply of the command's script.
    pub(super) fn value_of(
        &mut self,
        resource: &Resource,
        command: &Command,
        now: Now,
    ) -> RedisResult<redis::Value> {
        let (variant, vote_args) = self.variant_for(now);
        let expects = self.expecting.as_mut().is_some_and(|calls| {
            *calls += 1;
            calls.is_multiple_of(3)
        });
        let expects = if expects { Expectation::Contended } else { Expectation::Uncontended };
        let call = self.call(variant, &variant.encode(resource, command, vote_args, expects), now);
        let value = self.commands.req_command(&call).and_then(redis::Value::extract_error)?;
        let (reply, messages) = decode_outbox(&value).unwrap_or_else(|error| panic!("{value:?}: {error}"));
        for (inbox, message) in messages {
            assert!(self.is_restricted, "{command:?} returned {value:?}");
            let inbox = [inbox_prefix(None).as_bytes(), &inbox].concat();
            redis::cmd("PUBLISH").arg(inbox).arg(message).exec(self.commands).unwrap();
        }
        Ok(reply.clone())
    }

    /// A quorum node if there is a floor.
    fn variant_for(&self, now: Now) -> (ScriptVariant, VoteArgs<'static>) {
        let variant = match now.floor {
            Some(_) => ScriptVariant::Voter,
            None if self.is_restricted => ScriptVariant::Restricted,
            None => ScriptVariant::Server,
        };
        (variant, VoteArgs { floor: now.floor, ..VoteArgs::default() })
    }

    /// The answer of a quorum node that may abstain.
    pub(super) fn vote(
        &mut self,
        resource: &Resource,
        command: &Command,
        vote_args: VoteArgs<'_>,
        now: Now,
    ) -> Reply {
        let variant = ScriptVariant::Voter;
        let call =
            self.call(variant, &variant.encode(resource, command, vote_args, Expectation::default()), now);
        let value = self.commands.req_command(&call).unwrap();
        decode_answer(command, &value).unwrap().reply
    }

    /// As `value_of`, while the server's memory is full. A key that has expired is deleted before, as a server does.
    ///
    /// `is_current`: no row of the resource has expired. A refused command removes such rows, and nothing else.
    pub(super) fn value_with_full_memory(
        &mut self,
        resource: &Resource,
        command: &Command,
        now: Now,
        is_current: bool,
    ) -> RedisResult<redis::Value> {
        if self.has_expired(resource, now) {
            redis::cmd("DEL").arg(resource_key(resource)).exec(self.commands).unwrap();
        }
        let before = self.dump(resource);
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).exec(self.commands).unwrap();
        let value = self.value_of(resource, command, now);
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(0).exec(self.commands).unwrap();
        if value.is_err() && is_current {
            assert_eq!(self.dump(resource), before, "{command:?} was refused, and has changed something");
        }
        value
    }

    /// What the key has: the fields of a hash in their order, since the server keeps none.
    fn dump(&mut self, resource: &Resource) -> Vec<Vec<u8>> {
        let key = resource_key(resource);
        if self.key_type(resource) == "hash" {
            let fields: BTreeMap<Vec<u8>, Vec<u8>> =
                redis::cmd("HGETALL").arg(key).query(self.commands).unwrap();
            return fields.into_iter().flat_map(<[_; 2]>::from).collect();
        }
        let dumped: Option<Vec<u8>> = redis::cmd("DUMP").arg(key).query(self.commands).unwrap();
        dumped.into_iter().collect()
    }

    /// The server does not know that the key has expired by the clock of the test.
    fn has_expired(&mut self, resource: &Resource, now: Now) -> bool {
        let expiry: i64 = redis::cmd("PEXPIRETIME").arg(resource_key(resource)).query(self.commands).unwrap();
        u64::try_from(expiry).is_ok_and(|ms| ms * 1_000 <= now.time.as_micros())
    }

    /// Like a client of a server that deletes a key by its value. `None` if the script has to decide.
    fn delete(&mut self, resource: &Resource, command: &Command, now: Now) -> Option<Answer> {
        let Command::Release(release) = command else { return None };
        let as_granted = self.granted.get(&(resource.clone(), release.acquisition)).cloned();
        let value = plain_value(&Release { as_granted, ..release.clone() }).filter(|_| self.has_delete)?;
        if self.has_expired(resource, now) {
            return None;
        }
        let key = resource_key(resource);
        let mut delete = redis::Cmd::new();
        for word in ConditionalDelete::DelIfEq.words(key.as_bytes(), &value) {
            delete.arg(word);
        }
        // An error if the key is a hash.
        let value = self.commands.req_command(&delete).ok().filter(|value| *value == redis::Value::Int(1))?;
        self.deleted += 1;
        Some(decode_answer(command, &value).unwrap())
    }

    /// The call of a script, with the time of the test's clock.
    fn call(&self, variant: ScriptVariant, call: &ScriptCall, now: Now) -> redis::Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.scripts[&(call.script(), variant)]).arg(call.keys().len());
        call.keys().chain(call.args()).for_each(|part| {
            command.arg(part);
        });
        if let Some(failing) = &self.failing {
            command.arg(failing);
        }
        command.arg(now.time.as_micros());
        command
    }

    /// What the model's clocks are at this time: its tokens follow the ids of the server's clock.
    pub(super) fn model_clocks(&mut self, resource: &Resource, now: Now) -> Now {
        let next = self.next_token(resource, now);
        let first = next.max(now.floor.map_or(0, Token::get));
        Now { wall: StoreTime::from_micros(next), may_reserve: first <= last_reserving(now), ..now }
    }

    /// The token that the server's clock gives next.
    fn next_token(&mut self, resource: &Resource, now: Now) -> u64 {
        let ms = now.time.as_micros() / 1_000;
        let key = clock_key(self.is_restricted.then(|| slot_of(resource)));
        let exists: bool = redis::cmd("EXISTS").arg(&key).query(self.commands).unwrap();
        let last = if exists {
            let stream: HashMap<String, redis::Value> =
                redis::cmd("XINFO").arg("STREAM").arg(&key).query(self.commands).unwrap();
            let id: String = redis::from_redis_value(stream["last-generated-id"].clone()).unwrap();
            let (ms, sequence) = id.split_once('-').unwrap();
            ms.parse::<u64>().unwrap() * TOKENS_PER_MS + sequence.parse::<u64>().unwrap()
        } else {
            0
        };
        (last + 1).max(ms * TOKENS_PER_MS)
    }

    /// The reply of the script for several attempts.
    pub(super) fn value_of_all(
        &mut self,
        attempts: &[(&Resource, &Arc<Acquire>)],
        now: Now,
    ) -> RedisResult<redis::Value> {
        let commands: Vec<_> =
            attempts.iter().map(|(_, acquire)| Command::Acquire(Arc::clone(acquire))).collect();
        let resources = attempts.iter().map(|(resource, _)| *resource);
        let encoded = ScriptVariant::Server.encode_acquire_all(resources.zip(&commands));
        let call = self.call(ScriptVariant::Server, &encoded, now);
        match self.commands.req_command(&call)? {
            // Of the whole, and not of one attempt.
            error @ redis::Value::ServerError(_) => error.extract_error(),
            value => Ok(value),
        }
    }

    pub(super) fn run_all(&mut self, attempts: &[(&Resource, &Arc<Acquire>)], now: Now) -> Vec<Answer> {
        let commands: Vec<_> =
            attempts.iter().map(|(_, acquire)| Command::Acquire(Arc::clone(acquire))).collect();
        let value = self.value_of_all(attempts, now).unwrap_or_else(|error| panic!("{attempts:?}: {error}"));
        let redis::Value::Array(values) = value else { panic!("{attempts:?} returned {value:?}") };
        assert_eq!(values.len(), commands.len());
        let answer = |(command, value)| decode_answer(command, value);
        commands.iter().zip(&values).map(|pair| answer(pair).expect("an answer")).collect()
    }

    /// `None` for a renewal that must be sent alone.
    pub(super) fn renew_all(&mut self, payload: &[(&Resource, Command)], now: Now) -> Vec<Option<Answer>> {
        let renewals = payload.iter().map(|(resource, command)| match command {
            Command::Renew(renew) => (*resource, renew),
            other => panic!("not a renewal: {other:?}"),
        });
        let renewals: Vec<_> = renewals.collect();
        let (variant, vote_args) = self.variant_for(now);
        let call = self.call(variant, &variant.encode_renewals(&renewals, vote_args), now);
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{payload:?}: {error}"));
        let commands = payload.iter().map(|(_, command)| command);
        decode_renewals(commands, &value).unwrap_or_else(|error| panic!("{payload:?}: {value:?}: {error}"))
    }

    /// The replies to commands that share a call: one for each, of which some may be errors.
    pub(super) fn values_of_each(&mut self, calls: &[(&Resource, &Command)], now: Now) -> Vec<redis::Value> {
        match self.try_values_of_each(calls, now).unwrap_or_else(|error| panic!("{calls:?}: {error}")) {
            redis::Value::Array(values) if values.len() == calls.len() => values,
            all @ redis::Value::Int(_) => vec![all; calls.len()],
            other => panic!("{calls:?}: {other:?}"),
        }
    }

    pub(super) fn try_values_of_each(
        &mut self,
        calls: &[(&Resource, &Command)],
        now: Now,
    ) -> RedisResult<redis::Value> {
        let encoded = ScriptVariant::Server.encode_each(calls.iter().copied());
        let call = self.call(ScriptVariant::Server, &encoded, now);
        self.commands.req_command(&call)
    }

    pub(super) fn run_each(&mut self, calls: &[(&Resource, &Command)], now: Now) -> Vec<Answer> {
        if calls.is_empty() {
            return Vec::new();
        }
        let values = self.values_of_each(calls, now);
        let answer = |((_, command), value): (&(_, &Command), &_)| {
            decode_answer(command, value).unwrap_or_else(|error| panic!("{command:?}: {value:?}: {error}"))
        };
        calls.iter().zip(&values).map(answer).collect()
    }

    /// Takes the pushes that were sent so far.
    pub(super) fn pushes(&mut self) -> Vec<(String, Push)> {
        let inbox = inbox_of(client_id(CLIENTS), None);
        self.inboxes.subscribe(&inbox).unwrap();
        redis::cmd("PUBLISH").arg(&inbox).arg("the end").exec(self.commands).unwrap();
        let mut pushes = Vec::new();
        while let (channel, Some(push)) = self.next_push() {
            pushes.push((channel, push));
        }
        pushes
    }

    /// Whether the key is a plain lease.
    pub(super) fn is_plain(&mut self, resource: &Resource) -> bool {
        self.key_type(resource) == "string"
    }

    pub(super) fn key_type(&mut self, resource: &Resource) -> String {
        redis::cmd("TYPE").arg(resource_key(resource)).query(self.commands).unwrap()
    }

    /// Asserts that no key expires before the leases and waiters that it stores.
    fn check_expiry(&mut self, resource: &Resource, view: &View) {
        let leases = view.holders.iter().map(|holder| holder.expires_at);
        let last = leases.chain(view.waiters.iter().map(|waiter| waiter.deadline)).max();
        let Some(last) = last else { return };
        let is_plain = self.is_plain(resource);
        let ms: i64 = redis::cmd("PEXPIRETIME").arg(resource_key(resource)).query(self.commands).unwrap();
        let margin = if is_plain { 0 } else { 1 };
        let min_lifetime = u64::try_from(ms).is_ok_and(|ms| ms * 1_000 >= last.as_micros() + margin);
        assert!(min_lifetime, "{resource} expires at {ms}, before {last:?}");
        // The key has the form that tells what is left, and not more.
        let [holder] = &view.holders[..] else { return assert!(!is_plain, "{resource}: {view:?}") };
        let may_be_plain = holder.owner.is_none() && !holder.retained && view.waiters.is_empty();
        assert!(may_be_plain || !is_plain, "{resource}: {view:?}");
    }

    /// The next push and its channel.
    fn next_push(&mut self) -> (String, Option<Push>) {
        let message = self.inboxes.get_message().expect("a push");
        let payload = message.get_payload_bytes();
        let channel = message.get_channel_name();
        // A test may have more clients than the histories.
        let client = (0..=100).map(client_id).find(|client| inbox_of(*client, None) == channel);
        let push = decode_push(client.expect("the inbox of a client"), payload).ok();
        let used = match push.as_ref().map(|push| push.kind) {
            Some(PushKind::Next(_)) => 1,
            Some(PushKind::Revoked | PushKind::Contended) => 0,
            // And the proof.
            Some(PushKind::Granted(..)) | None => 8,
        };
        let unused = payload.iter().skip(1 + 8 + 8 + 8 * used);
        assert!(unused.copied().all(|byte| byte == 0) || push.is_none(), "{push:?} with more numbers");
        (channel.to_owned(), push)
    }
}

/// Runs each command in the model and in the scripts, and asserts equal answers and pushes.
pub(super) struct Comparison<'l, 'c> {
    pub(super) runner: &'l mut ScriptRunner<'c>,
    resources: Vec<(Resource, Table)>,
    pub(super) now: Now,
    stepped_back: Duration,
    absent: Vec<ClientId>,
}

impl<'l, 'c> Comparison<'l, 'c> {
    pub(super) fn new(runner: &'l mut ScriptRunner<'c>, resources: &[Resource]) -> Self {
        let start = start();
        runner.expecting = Some(0);
        let resources = resources.iter().map(|resource| (resource.clone(), Table::new())).collect();
        Self { runner, resources, now: Now::same(start), stepped_back: Duration::ZERO, absent: Vec::new() }
    }

    pub(super) fn resource(&self) -> Resource {
        self.resources[0].0.clone()
    }

    /// The key of the first resource.
    pub(super) fn key(&self) -> String {
        resource_key(&self.resources[0].0)
    }

    pub(super) fn view(&mut self) -> View {
        match self.run(0, &Command::Inspect) {
            Reply::View(view) => view,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let later = Now::same(self.now.time + time);
        self.now = Now { floor: self.now.floor, ..later };
    }

    pub(super) fn step(&mut self, at: usize, step: &Step) {
        match step {
            // The server sweeps without a command.
            Step::Sweep => {}
            // There is no quorum of proxies.
            Step::Raise(_) if self.runner.is_restricted => {}
            Step::Raise(ms) => {
                let ms = self.now.time.as_micros() / 1_000 + ms;
                // Not the first token of a millisecond: whether tokens are reserved changes at that one, and a renewal draws the token
                // after the floor.
                self.now.floor = Token::new(ms * TOKENS_PER_MS + 1);
            }
            Step::Pass(ms) => self.pass(Duration::from_millis(*ms)),
            Step::SetBack(ms) => {
                let span = Duration::from_millis(*ms);
                self.now = Now { floor: self.now.floor, ..Now::same(self.now.time.saturating_sub(span)) };
                self.stepped_back += span;
            }
            Step::Leave(client) => {
                self.absent.push(client_id(*client));
                self.runner.unsubscribe(client_id(*client));
            }
            Step::Return(client) => {
                self.absent.retain(|known| *known != client_id(*client));
                self.runner.subscribe(client_id(*client));
            }
            Step::Do(command) => {
                self.run(at, command);
                self.inspect(at);
            }
        }
    }

    pub(super) fn run(&mut self, at: usize, command: &Command) -> Reply {
        let command = &with_tokens(command, &mut self.resources[at].1);
        let mut pushes = Vec::new();
        let is_restricted = self.runner.is_restricted;
        let mut is_reachable = |client| is_restricted || !self.absent.contains(&client);
        let (resource, table) = &mut self.resources[at];
        let now = self.runner.model_clocks(resource, self.now);
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let Ok(mut expected) = apply(table, context, command);
        let found = self.runner.run(resource, command, self.now);
        expect_differences(&mut expected, &found);
        expect_hint(table, &mut expected, &found);
        if let (Reply::View(expected), Reply::View(found)) = (&mut expected.reply, &found.reply)
            && self.runner.is_plain(resource)
        {
            expect_plain(table, expected, found);
        }
        assert_eq!(found, expected, "after {command:?}");
        self.expect_pushes(&pushes, command);
        found.reply
    }

    /// Runs the last command of a history while the server's memory is full. If it is refused, it has changed nothing, and its
    /// repeat does what it would have done. Returns whether it was refused.
    pub(super) fn run_with_full_memory(&mut self, command: &Command) -> bool {
        let (resource, table) = &self.resources[0];
        let is_current = table.header().is_none_or(|header| header.next_expiry > self.now.time);
        match self.runner.value_with_full_memory(resource, command, self.now, is_current) {
            Ok(_) => {
                // What could not be granted is not what the model grants: the history ends here.
                self.skip_pushes();
                false
            }
            Err(error) => {
                assert!(error.to_string().contains("OOM"), "{command:?}: {error}");
                let is_needed =
                    matches!(command, Command::Release(_) | Command::Renew(_) | Command::ForceRelease);
                assert!(!is_needed, "{command:?} works although memory is full: {error}");
                self.run(0, command);
                true
            }
        }
    }

    /// Receives what the inboxes were sent so far.
    fn skip_pushes(&mut self) {
        let mut receivers = 0;
        for client in (0..CLIENTS).map(client_id) {
            let inbox = inbox_of(client, None);
            receivers +=
                redis::cmd("PUBLISH").arg(inbox).arg("skip").query::<usize>(self.runner.commands).unwrap();
        }
        while receivers > 0 {
            receivers -= usize::from(self.runner.next_push().1.is_none());
        }
    }

    pub(super) fn run_all(&mut self, attempts: &[Arc<Acquire>]) {
        // The model reserves tokens for all attempts of a batch or for none, the script decides for each.
        let next = self.runner.next_token(&self.resources[0].0, self.now);
        let most_tokens = attempts.iter().map(|attempt| 2 + u64::from(attempt.reserve)).sum::<u64>();
        if (next..next + most_tokens).contains(&last_reserving(self.now)) {
            self.pass(Duration::from_millis(1));
        }
        let mut pushes = Vec::new();
        let mut is_reachable = |client| !self.absent.contains(&client);
        let now = self.runner.model_clocks(&self.resources[0].0, Now { floor: None, ..self.now });
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let tables = self.resources.iter_mut().map(|(_, table)| table);
        let mut steps: Vec<_> = tables.zip(attempts).collect();
        let Ok(mut expected) = apply_all(context, &mut steps);
        let resources = self.resources.iter().map(|(resource, _)| resource);
        let calls: Vec<_> = resources.zip(attempts).collect();
        let found = self.runner.run_all(&calls, Now { floor: None, ..self.now });
        expected.iter_mut().zip(&found).for_each(|(expected, found)| expect_differences(expected, found));
        assert_eq!(found, expected, "after {attempts:?}");
        self.expect_pushes(&pushes, &attempts);
        (0..attempts.len()).for_each(|at| self.inspect(at));
    }

    /// Like a client: all renewals in one command, then one by one those that it did not answer.
    pub(super) fn renew_all(&mut self, renewals: &[(usize, Renew)]) {
        let command = |(at, renew): &(usize, Renew)| {
            (*at, with_tokens(&Command::Renew(renew.clone()), &mut self.resources[*at].1))
        };
        let payload: Vec<_> = renewals.iter().map(command).collect();
        let calls: Vec<_> =
            payload.iter().map(|(at, command)| (&self.resources[*at].0, command.clone())).collect();
        let found = self.runner.renew_all(&calls, self.now);
        for ((at, command), found) in payload.iter().zip(&found) {
            let Some(found) = found else { continue };
            let mut pushes = Vec::new();
            let mut is_reachable = |client| !self.absent.contains(&client);
            let now = self.runner.model_clocks(&self.resources[*at].0, self.now);
            let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
            let Ok(expected) = apply(&mut self.resources[*at].1, context, command);
            assert_eq!(*found, expected, "after {command:?} of {payload:?}");
            assert_eq!(pushes, [], "a plain renewal pushes nothing: {command:?} of {payload:?}");
        }
        for ((at, command), found) in payload.iter().zip(&found) {
            if found.is_none() {
                self.run(*at, command);
            }
            self.inspect(*at);
        }
    }

    pub(super) fn inspect(&mut self, at: usize) {
        if let Reply::View(view) = self.run(at, &Command::Inspect) {
            self.runner.check_expiry(&self.resources[at].0, &view);
        }
    }

    /// A push to an unsubscribed client does not arrive.
    fn expect_pushes(&mut self, pushes: &[Push], command: &impl std::fmt::Debug) {
        let is_shared = self.resources.iter().any(|(_, table)| has_several_leases(table));
        for push in pushes.iter().filter(|push| !self.absent.contains(&push.inbox)) {
            // The message has only the number of the attempt.
            let acquisition = Acquisition { client: push.inbox, ..push.acquisition };
            let mut expected = (inbox_of(push.inbox, None), Some(Push { acquisition, ..push.clone() }));
            let found = self.runner.next_push();
            if let (true, Some(expected), Some(found)) = (is_shared, &mut expected.1, &found.1) {
                expect_pushed_hint(expected, found);
            }
            assert_eq!(found, expected, "after {command:?}");
        }
    }

    pub(super) fn end(self) {
        for client in self.absent {
            self.runner.subscribe(client);
        }
        // No further push has arrived: the next message is this one.
        let inbox = inbox_of(client_id(0), None);
        let receivers: i64 =
            redis::cmd("PUBLISH").arg(&inbox).arg("the end").query(self.runner.commands).unwrap();
        assert_eq!(receivers, 1);
        assert_eq!(self.runner.next_push(), (inbox, None));
        for (resource, _) in self.resources {
            check_swept(
                self.runner,
                &resource,
                self.now.time + self.stepped_back + Duration::from_secs(3 * 3_600),
            );
        }
    }
}

/// The last token for whose grant others are reserved.
fn last_reserving(now: Now) -> u64 {
    (now.time.as_micros() / 1_000 + MAX_LEAD_MS) * TOKENS_PER_MS
}

/// What the scripts answer differently from the model.
pub(super) fn expect_differences(expected: &mut Answer, found: &Answer) {
    if let (Reply::Granted(expected), Reply::Granted(found)) = (&mut expected.reply, &found.reply) {
        expected.is_plain = found.is_plain;
    }
    match (&mut expected.reply, &found.reply) {
        // The usual answer does not tell the time.
        (Reply::Released, Reply::Released) if found.at == StoreTime::ZERO => expected.at = found.at,
        // The time of a plain grant is that of its token, which is later while the clock of tokens is ahead.
        (Reply::Granted(_), Reply::Granted(grant)) if found.at > expected.at => {
            assert_eq!(found.at, time_of(grant.tokens.first));
            expected.at = found.at;
        }
        // A released lock is forgotten.
        (Reply::View(expected), Reply::View(found)) if expected.holders.is_empty() => {
            expected.last_token = found.last_token;
            if expected.waiters.is_empty() {
                expected.capacity = found.capacity;
            }
        }
        _ => {}
    }
}

fn has_several_leases(table: &Table) -> bool {
    table.header().is_some_and(|header| header.leases > 1)
}

/// The scripts know of several leases only when the first one ends at the earliest.
pub(super) fn expect_hint(table: &Table, expected: &mut Answer, found: &Answer) {
    if let (Reply::Queued(expected), Reply::Queued(found)) = (&mut expected.reply, &found.reply)
        && has_several_leases(table)
    {
        expect_earlier(&mut expected.repoll_at, found.repoll_at);
    }
}

/// As `expect_hint`, of a lock with several leases.
pub(super) fn expect_pushed_hint(expected: &mut Push, found: &Push) {
    if let (PushKind::Next(expected), PushKind::Next(hint)) = (&mut expected.kind, &found.kind)
        && hint.repoll_at > found.at
    {
        expect_earlier(&mut expected.repoll_at, hint.repoll_at);
    }
}

fn expect_earlier(expected: &mut StoreTime, found: StoreTime) {
    *expected = found.min(*expected);
}

/// A plain lease was granted at the time of its token, which is later than the grant while the clock of tokens is ahead. It
/// also keeps the time of its grant when it is renewed after the clock was set back. The model continues with that time.
pub(super) fn expect_plain(table: &mut Table, expected: &mut View, found: &View) {
    let ([expected], [found]) = (&mut expected.holders[..], &found.holders[..]) else { return };
    if found.granted_at > expected.granted_at {
        expected.granted_at = found.granted_at;
        let Ok(lease) = table.lease(found.acquisition);
        let Some(lease) = lease else { panic!("{found:?}") };
        let Ok(()) = table.put_lease(Lease { granted_at: found.granted_at, ..lease });
    }
}

fn time_of(token: Token) -> StoreTime {
    StoreTime::from_micros(token.get() / TOKENS_PER_MS * 1_000)
}

/// Moves the clock of tokens to this id: milliseconds and sequence number.
pub(super) fn set_clock(runner: &mut ScriptRunner<'_>, id: (u64, u64)) {
    let id = format!("{}-{}", id.0, id.1);
    let add = ["MAXLEN", "0", &id, "t", ""];
    redis::cmd("XADD").arg(clock_key(None)).arg(&add).exec(runner.commands).unwrap();
}

/// Asserts that the key has an expiry, and that it is swept long after the last use.
fn check_swept(runner: &mut ScriptRunner<'_>, resource: &Resource, now: StoreTime) {
    let key = resource_key(resource);
    let left: i64 = redis::cmd("PTTL").arg(&key).query(runner.commands).unwrap();
    assert!(left == -2 || left > 0, "{key} has no expiry");
    runner.run(resource, &Command::Inspect, Now::same(now + Duration::from_secs(3_600)));
    let found: bool = redis::cmd("EXISTS").arg(&key).query(runner.commands).unwrap();
    assert!(!found, "{key} was not swept");
}

/// Runs a test with the scripts on a server of its own.
pub(super) fn with_scripts(test: impl FnOnce(&mut ScriptRunner<'_>)) {
    with_scripts_on(Flavor::Redis7, test);
}

pub(super) fn with_scripts_on(flavor: Flavor, test: impl FnOnce(&mut ScriptRunner<'_>)) {
    let server = Server::builder().flavor(flavor).on_socket().start();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    test(&mut ScriptRunner::new(&mut commands, &mut inboxes));
}

/// Compares the commands of a test about one mutex.
pub(super) fn compare_mutex(test: impl FnOnce(&mut Comparison<'_, '_>)) {
    with_scripts(|runner| {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        let mut comparison = Comparison::new(runner, &[resource]);
        test(&mut comparison);
        comparison.end();
    });
}

/// As `compare_mutex`, once for each case, with a new mutex and a new clock of tokens.
pub(super) fn compare_each<C>(cases: impl IntoIterator<Item = C>, test: impl Fn(&mut Comparison<'_, '_>, C)) {
    with_scripts(|runner| {
        for (number, case) in (0_u32..).zip(cases) {
            redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
            let resource = Resource { kind: Kind::Mutex, name: Name::new(&format!("a{number}")).unwrap() };
            let mut comparison = Comparison::new(runner, &[resource]);
            test(&mut comparison, case);
            comparison.end();
        }
    });
}

/// In whole milliseconds, like the expiry of keys.
pub(super) fn wall_clock() -> Duration {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    Duration::from_millis(u64::try_from(since.as_millis()).unwrap())
}
