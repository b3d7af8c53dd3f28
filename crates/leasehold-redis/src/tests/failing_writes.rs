//! Scripts that fail half-way. The server keeps what they have written, so each prefix of the writes must be a whole step or none.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Rows as _, Table, apply};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Kind, Name, Now, Push, Release, Reply, Resource, View,
};
use leasehold_redis_protocol::{
    clock_key, decode_answer, inbox_of, resource_key, scratch_key, tombstone_key,
};
use leasehold_store::histories::{Joint, RESOURCES, Step, client_id, joint_steps, steps, with_tokens};
use leasehold_testkit::{Flavor, extent};
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::comparison::{
    ScriptRunner, expect_differences, expect_hint, expect_plain, expect_pushed_hint, start, with_scripts_on,
};
use super::may_share_a_call;

/// More writes than a script of these histories has.
const MAX_WRITES: usize = 12;

/// Commands that fail whenever they are called. Without XADD, because a step without a token is another step of the model.
const COMMANDS: [&str; 8] = ["HDEL", "PUBLISH", "RENAME", "HSET", "PEXPIREAT", "SET", "DEL", "PEXPIRE"];

/// One history on a server whose scripts fail now and then.
struct FailingRun<'l, 'c> {
    runner: &'l mut ScriptRunner<'c>,
    resources: Vec<Resource>,
    now: Now,
    absent: HashSet<ClientId>,
    /// Those of the history.
    requests: BTreeSet<Acquisition>,
    /// Number of scripts that failed.
    failed: usize,
}

/// What a table answers to a command, and what it is then.
struct Outcome {
    table: Table,
    answer: Answer,
    pushes: Vec<(String, Push)>,
}

type Checked<T = ()> = Result<T, String>;

impl<'l, 'c> FailingRun<'l, 'c> {
    fn new(runner: &'l mut ScriptRunner<'c>, name: &str, resources: usize) -> Self {
        redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
        runner.expecting = Some(0);
        let resource = |at| Resource { kind: Kind::Mutex, name: Name::new(&format!("{name}-{at}")).unwrap() };
        let resources = (0..resources).map(resource).collect();
        let (absent, requests) = (HashSet::new(), BTreeSet::new());
        Self { runner, resources, now: Now::same(start()), absent, requests, failed: 0 }
    }

    /// What is no command.
    fn pass(&mut self, step: &Step) {
        match step {
            Step::Pass(ms) => self.now = Now::same(self.now.time + Duration::from_millis(*ms)),
            Step::Leave(client) if self.absent.insert(client_id(*client)) => {
                self.runner.unsubscribe(client_id(*client));
            }
            Step::Return(client) if self.absent.remove(&client_id(*client)) => {
                self.runner.subscribe(client_id(*client));
            }
            // Quorum nodes have the same writes. A clock that was set back shows in the tokens, which the model does not compare here.
            Step::Sweep
            | Step::Raise(_)
            | Step::SetBack(_)
            | Step::Leave(_)
            | Step::Return(_)
            | Step::Do(_) => {}
        }
    }

    fn outcome(&mut self, table: &Table, now: Now, command: &Command) -> Outcome {
        let (mut table, mut pushes) = (table.clone(), Vec::new());
        let mut is_reachable = |client| !self.absent.contains(&client);
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let Ok(answer) = apply(&mut table, context, command);
        let arrives = pushes.into_iter().filter(|push| !self.absent.contains(&push.inbox));
        let arrived = arrives.map(|push| {
            // The message has only the number of the attempt.
            let acquisition = Acquisition { client: push.inbox, ..push.acquisition };
            (inbox_of(push.inbox, None), Push { acquisition, ..push })
        });
        Outcome { table, answer, pushes: arrived.collect() }
    }

    fn keys(&self) -> impl Iterator<Item = String> + use<> {
        let resources = self.resources.iter();
        let mut keys: Vec<_> = resources.clone().map(resource_key).collect();
        for resource in resources {
            keys.extend(self.requests.iter().map(|request| tombstone_key(resource, *request)));
        }
        keys.into_iter().chain([clock_key(None)])
    }

    fn set_failing(&mut self, failing: &str) {
        self.runner.failing = Some(failing.to_owned());
    }

    /// Runs a command whose writes fail. Each table may stay as it is, or be what the command makes of it.
    fn fail(&mut self, failing: &str, at: usize, command: &Command, tables: &mut Vec<Table>) -> bool {
        let now = self.runner.model_clocks(&self.resources[at].clone(), self.now);
        let mut changed: Vec<_> =
            tables.iter().map(|table| self.outcome(table, now, command).table).collect();
        changed.extend(tables.iter().filter_map(|table| buried(table, now, command)));
        self.set_failing(failing);
        let is_done = self.runner.value_of(&self.resources[at].clone(), command, self.now).is_ok();
        self.set_failing("");
        self.failed += usize::from(!is_done);
        tables.extend(changed);
        self.runner.pushes();
        is_done
    }

    /// Runs a command of a healthy client, and returns what the tables have become that answer as the script does.
    fn run(&mut self, at: usize, command: &Command, tables: &[Table]) -> Checked<Vec<Table>> {
        let now = self.runner.model_clocks(&self.resources[at].clone(), self.now);
        let outcomes: Vec<_> = tables.iter().map(|table| self.outcome(table, now, command)).collect();
        let resource = self.resources[at].clone();
        let value = self.runner.value_of(&resource, command, self.now);
        let value = value.map_err(|error| format!("{command:?}: {error}"))?;
        let found = decode_answer(command, &value).map_err(|error| format!("{command:?}: {error}"))?;
        let pushes = self.runner.pushes();
        let is_plain = self.runner.is_plain(&resource);
        let (mut remaining, mut expected) = (Vec::new(), Vec::new());
        for mut outcome in outcomes {
            expect_differences(&mut outcome.answer, &found);
            expect_hint(&outcome.table, &mut outcome.answer, &found);
            if outcome.table.header().is_some_and(|header| header.leases > 1) {
                for ((_, expected), (_, found)) in outcome.pushes.iter_mut().zip(&pushes) {
                    expect_pushed_hint(expected, found);
                }
            }
            if let (Reply::View(expected), Reply::View(found)) = (&mut outcome.answer.reply, &found.reply)
                && is_plain
                && expected.holders.len() == found.holders.len()
            {
                expect_plain(&mut outcome.table, expected, found);
            }
            if outcome.answer == found && outcome.pushes == pushes {
                remaining.push(outcome.table);
            } else {
                expected.push((outcome.answer, outcome.pushes));
            }
        }
        if remaining.is_empty() {
            return Err(format!("{command:?}: {found:?} {pushes:?} instead of one of {expected:?}"));
        }
        Ok(remaining)
    }

    /// Checks that a healthy command leaves nothing of the one that failed.
    fn inspect(&mut self, at: usize, tables: &[Table]) -> Checked<Vec<Table>> {
        let tables = self.run(at, &Command::Inspect, tables)?;
        let resource = self.resources[at].clone();
        let Reply::View(view) = self.runner.run(&resource, &Command::Inspect, self.now).reply else {
            return Err("no view".to_owned());
        };
        self.check_rows(&resource_key(&resource), &view, &mut tables[0].clone())?;
        match redis::cmd("PTTL").arg(resource_key(&resource)).query(self.runner.commands).unwrap() {
            -1 => Err(format!("{resource:?} has no expiry")),
            _ => Ok(tables),
        }
    }

    /// Each lease and each waiter has its fields, and there are no others.
    fn check_rows(&mut self, key: &str, view: &View, table: &mut Table) -> Checked {
        if self.runner.key_type(&self.resource_of(key)) != "hash" {
            return Ok(());
        }
        let fields: BTreeMap<Vec<u8>, Vec<u8>> =
            redis::cmd("HGETALL").arg(key).query(self.runner.commands).unwrap();
        // A waiter, whose field is its number, counts as `w`.
        let mut counts = BTreeMap::<char, usize>::new();
        for field in
            fields.iter().filter(|(_, value)| !value.is_empty()).map(|(field, _)| char::from(field[0]))
        {
            let kind = if field.is_ascii_digit() || field == 'u' { 'w' } else { field };
            *counts.entry(kind).or_default() += 1;
        }
        let count = |kind| counts.get(&kind).copied().unwrap_or(0);
        let (mut all, mut parked) = (HashSet::new(), HashSet::new());
        let Ok(()) = table.each_waiter(&mut |waiter| {
            all.insert(waiter.inbox());
            if waiter.parked {
                parked.insert(waiter.inbox());
            }
        });
        let (all, parked) = (all.len(), parked.len());
        let owners: HashSet<_> = view.holders.iter().filter_map(|holder| holder.owner.as_ref()).collect();
        let (waiters, further) = (view.waiters.len(), count('l'));
        let found = [count('h'), count('w'), count('i'), count('o'), count('c'), count('p')];
        let is_known = further + 1 == view.holders.len() || further == view.holders.len();
        if found != [1, waiters, waiters + further, owners.len(), all, parked] || !is_known {
            return Err(format!("{view:?} has the fields {counts:?}"));
        }
        Ok(())
    }

    fn resource_of(&self, key: &str) -> Resource {
        self.resources.iter().find(|resource| resource_key(resource) == key).expect("a key").clone()
    }

    /// Keeps what the resources and the clock are, with their expiry.
    fn save(&mut self) {
        self.keys().for_each(|key| self.copy(&key, &format!("saved {key}")));
    }

    fn restore(&mut self) {
        self.keys().for_each(|key| self.copy(&format!("saved {key}"), &key));
    }

    fn copy(&mut self, from: &str, to: &str) {
        redis::cmd("DEL").arg(to).exec(self.runner.commands).unwrap();
        redis::cmd("COPY").arg(from).arg(to).exec(self.runner.commands).unwrap();
    }

    /// Fails a command at each of its writes, in each case followed by a healthy command: its repeat or the next one.
    fn fail_everywhere(&mut self, table: &Table, command: &Command, next: &Command) -> Checked {
        let by_number = (1..=MAX_WRITES).map(|number| number.to_string());
        let by_command = COMMANDS.iter().map(|name| (*name).to_owned());
        let mut is_complete = false;
        self.save();
        for failing in by_number.chain(by_command) {
            let is_number = failing.parse::<usize>().is_ok();
            if is_number && is_complete {
                continue;
            }
            for follow_up in [command, next] {
                let mut tables = vec![table.clone()];
                let is_done = self.fail(&failing, 0, command, &mut tables);
                // The first two may be ids of the clock, without which a script continues.
                is_complete |=
                    is_number && is_done && failing.parse::<usize>().is_ok_and(|number| number > 2);
                if !is_number {
                    // A client without a right comes again and again.
                    self.fail(&failing, 0, follow_up, &mut tables);
                    let scratch = scratch_key(None);
                    let is_left: bool =
                        redis::cmd("EXISTS").arg(&scratch).query(self.runner.commands).unwrap();
                    if is_left && failing != "DEL" {
                        return Err(format!("{command:?}, which failed at {failing}, leaves {scratch}"));
                    }
                }
                let checked = self.run(0, follow_up, &tables).and_then(|tables| self.inspect(0, &tables));
                checked.map_err(|error| format!("{command:?}, which failed at {failing}; then {error}"))?;
                self.restore();
            }
        }
        Ok(())
    }

    fn play(&mut self, steps: &[Step]) -> Checked {
        let commands: Vec<_> = steps
            .iter()
            .filter_map(|step| if let Step::Do(command) = step { Some(command) } else { None })
            .collect();
        self.requests = commands.iter().filter_map(|command| request_of(command)).collect();
        let mut following = commands.iter().skip(1);
        let mut table = Table::new();
        for step in steps {
            let Step::Do(command) = step else {
                self.pass(step);
                continue;
            };
            let next = following.next().copied().unwrap_or(&Command::Inspect);
            let (command, next) = (with_tokens(command, &mut table), with_tokens(next, &mut table));
            self.fail_everywhere(&table, &command, &next)?;
            let tables = self.run(0, &command, &[table])?;
            table = self.inspect(0, &tables)?.swap_remove(0);
        }
        Ok(())
    }

    fn end(self) {
        for client in self.absent {
            self.runner.subscribe(client);
        }
    }
}

fn request_of(command: &Command) -> Option<Acquisition> {
    let attempt = match command {
        Command::Acquire(acquire) => acquire.acquisition,
        Command::Release(release) => release.acquisition,
        Command::Renew(_) | Command::Inspect | Command::ForceRelease => return None,
    };
    attempt.is_requested().then_some(attempt)
}

/// The table after the first write of the release of a request: the tombstone is there, and nothing else has changed.
fn buried(table: &Table, now: Now, command: &Command) -> Option<Table> {
    let Command::Release(release) = command else { return None };
    let request = request_of(command).filter(|_| !release.tombstone.is_zero())?;
    let (mut table, until) = (table.clone(), now.time + release.tombstone);
    let mut header = table.header()?.clone();
    let Ok(known) = table.tombstone(request);
    header.tombstones += u32::from(known.is_none());
    header.next_expiry = header.next_expiry.min(until);
    let Ok(()) = table.put_header(&header);
    let Ok(()) = table.put_tombstone(request, until);
    Some(table)
}

/// Plays histories until one is found in which a failed script breaks a rule. Returns how many scripts failed.
fn play_all(flavor: Flavor, capacity: u32, cases: u32, specimen: Option<(&str, &str)>) -> Checked<usize> {
    let mut result = Ok(0);
    with_scripts_on(flavor, |runner| {
        runner.load_failing(specimen);
        let runner = std::cell::RefCell::new(runner);
        let (count, failed) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let config = Config {
            cases,
            failure_persistence: None,
            max_shrink_iters: if specimen.is_some() { 0 } else { 200 },
            ..Config::default()
        };
        let played = TestRunner::new(config).run(&steps(capacity), |steps| {
            count.set(count.get() + 1);
            let mut runner = runner.borrow_mut();
            let mut run = FailingRun::new(&mut runner, &format!("a-{}", count.get()), 1);
            let played = run.play(&steps);
            failed.set(failed.get() + run.failed);
            run.end();
            played.map_err(TestCaseError::fail)
        });
        result = played.map(|()| failed.get()).map_err(|error| error.to_string());
    });
    result
}

#[track_caller]
fn check(flavor: Flavor) {
    for capacity in [1, 4] {
        let cases = extent(5, 100, 2_000);
        let failed = play_all(flavor, capacity, cases, None).unwrap_or_else(|error| panic!("{error}"));
        assert!(failed > 20 * cases as usize, "{failed} scripts failed");
    }
}

#[test]
fn script_that_fails_half_way_is_a_whole_step_or_none_on_redis_7() {
    check(Flavor::Redis7);
}

#[test]
fn script_that_fails_half_way_is_a_whole_step_or_none_on_redis_6_2() {
    check(Flavor::Redis62);
}

#[test]
fn script_that_fails_half_way_is_a_whole_step_or_none_on_valkey_9() {
    check(Flavor::Valkey9);
}

#[test]
fn script_that_fails_half_way_is_a_whole_step_or_none_on_redis_8_6() {
    check(Flavor::Redis86);
}

/// Scripts whose writes are in an order that does harm, each with what is wrong in it.
const SPECIMENS: [(&str, &str, &str); 6] = [
    (
        "old fields are removed first",
        "  if #fields > 0 then write(function() return redis.pcall('HSET', KEYS[1], unpack(fields)) end) end\n",
        "  if #removed > 0 then redis.call('HDEL', KEYS[1], unpack(removed)) end
           if #fields > 0 then write(function() return redis.pcall('HSET', KEYS[1], unpack(fields)) end) end\n",
    ),
    (
        "each field is written by itself",
        "  if #fields > 0 then write(function() return redis.pcall('HSET', KEYS[1], unpack(fields)) end) end\n",
        "  for i = 1, #fields, 2 do write(function() return redis.pcall('HSET', KEYS[1], fields[i], fields[i + 1]) end) end\n",
    ),
    (
        "old fields are not emptied before they are removed",
        "      fields[#fields + 1], fields[#fields + 2] = field, value\n",
        "      if value ~= '' then fields[#fields + 1], fields[#fields + 2] = field, value end\n",
    ),
    (
        "a hand-over removes the waiter first",
        "  call('HSET', KEYS[1], 'h', lease, field, '', own_field, '', client_field, count)\n",
        "  call('HDEL', KEYS[1], field, own_field)
           call('HSET', KEYS[1], 'h', lease, field, '', own_field, '', client_field, count)\n",
    ),
    (
        "a hand-over does not empty its waiter",
        "'h', lease, field, '', own_field, '', client_field, count)",
        "'h', lease)",
    ),
    (
        "the plain lease is deleted first",
        "  write(function() return redis.pcall('HSET', SCRATCH, unpack(fields)) end)\n",
        "  redis.call('DEL', KEYS[1])\n  write(function() return redis.pcall('HSET', SCRATCH, unpack(fields)) end)\n",
    ),
];

#[test]
fn harmful_orders_of_writes_are_noticed() {
    for (what, lines, instead) in SPECIMENS {
        let noticed = [1, 4]
            .iter()
            .any(|capacity| play_all(Flavor::Redis7, *capacity, 60, Some((lines, instead))).is_err());
        assert!(noticed, "{what}: not noticed");
    }
}

/// A view without its tokens, and without what follows from them.
fn without_tokens(mut view: View) -> View {
    view.last_token = None;
    if view.holders.is_empty() {
        view.capacity = 0;
    }
    for holder in &mut view.holders {
        holder.granted_at = holder.expires_at;
        holder.token = leasehold_core::Token::new(1).expect("a token");
    }
    view.holders.sort_by_key(|holder| holder.acquisition);
    view
}

/// Several resources, whose commands go in one script.
struct Locks<'l, 'c> {
    run: FailingRun<'l, 'c>,
    tables: Vec<Table>,
}

impl Locks<'_, '_> {
    /// What a resource looks like after these commands.
    fn view(&mut self, at: usize, commands: &[Command]) -> (View, Table) {
        let now = self.run.runner.model_clocks(&self.run.resources[at].clone(), self.run.now);
        let mut table = self.tables[at].clone();
        for command in commands {
            table = self.run.outcome(&table, now, command).table;
        }
        let Outcome { answer, table, .. } = self.run.outcome(&table, now, &Command::Inspect);
        match answer.reply {
            Reply::View(view) => (without_tokens(view), table),
            other => panic!("{other:?}"),
        }
    }

    /// Fails a script for several resources at each of its writes: each is done for a resource or not, or undone again.
    fn fail_together(
        &mut self,
        attempts: &[Arc<Acquire>],
        call: impl Fn(&mut FailingRun<'_, '_>) -> bool,
    ) -> Checked {
        self.run.save();
        for number in 1..=2 * MAX_WRITES {
            self.run.set_failing(&number.to_string());
            let is_done = call(&mut self.run);
            self.run.set_failing("");
            self.run.failed += usize::from(!is_done);
            for (at, attempt) in attempts.iter().enumerate() {
                let (acquire, release) = (
                    Command::Acquire(Arc::clone(attempt)),
                    Command::Release(Release::now(attempt.acquisition)),
                );
                let expected = [
                    self.view(at, &[]),
                    self.view(at, std::slice::from_ref(&acquire)),
                    self.view(at, &[acquire.clone(), release]),
                ];
                let resource = self.run.resources[at].clone();
                let Reply::View(found) =
                    self.run.runner.run(&resource, &Command::Inspect, self.run.now).reply
                else {
                    return Err("no view".to_owned());
                };
                let shown = without_tokens(found.clone());
                let key = resource_key(&resource);
                let mut checked =
                    Err(format!("{attempts:?} failed at {number}: {found:?}, not one of {expected:?}"));
                for (_, mut table) in expected.into_iter().filter(|(view, _)| *view == shown) {
                    checked = checked.or_else(|_| self.run.check_rows(&key, &found, &mut table));
                }
                checked?;
            }
            self.run.runner.pushes();
            self.run.restore();
        }
        Ok(())
    }
}

#[test]
fn scripts_for_several_locks_that_fail_half_way_are_done_or_not_for_each_lock() {
    with_scripts_on(Flavor::Redis7, |runner| {
        runner.load_failing(None);
        let mut random = TestRunner::deterministic();
        let mut failed = 0;
        for number in 0..extent(10, 200, 2_000) {
            let history =
                joint_steps(if number % 2 == 0 { 1 } else { 4 }).new_tree(&mut random).unwrap().current();
            let run = FailingRun::new(runner, &format!("b-{number}"), RESOURCES);
            let mut locks = Locks { run, tables: vec![Table::new(); RESOURCES] };
            for step in &history {
                let Joint::Together(attempts) = step else {
                    if let Joint::At(at, step) = step {
                        locks.run.pass(step);
                        if let Step::Do(command) = step {
                            let tables = locks.run.run(*at, command, &locks.tables[*at..=*at]).unwrap();
                            locks.tables[*at] = locks.run.inspect(*at, &tables).unwrap().swap_remove(0);
                        }
                    }
                    continue;
                };
                let commands: HashMap<usize, Command> = attempts
                    .iter()
                    .map(|attempt| Command::Acquire(Arc::clone(attempt)))
                    .enumerate()
                    .collect();
                let checked = locks.fail_together(attempts, |run| {
                    let calls: Vec<_> = run.resources.iter().zip(attempts).collect();
                    run.runner.value_of_all(&calls, run.now).is_ok()
                });
                checked.unwrap_or_else(|error| panic!("{error}"));
                if commands.values().all(may_share_a_call) {
                    let checked = locks.fail_together(attempts, |run| {
                        let calls: Vec<_> =
                            (0..attempts.len()).map(|at| (&run.resources[at], &commands[&at])).collect();
                        run.runner.try_values_of_each(&calls, run.now).is_ok()
                    });
                    checked.unwrap_or_else(|error| panic!("{error}"));
                }
            }
            failed += locks.run.failed;
            locks.run.end();
        }
        assert!(failed > 100, "{failed} scripts failed");
    });
}
