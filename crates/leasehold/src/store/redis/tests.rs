//! The scripts against the model, command by command, on a real server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Table, apply, apply_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Kind, Name, Now, Push, PushKind, Release, Renew, Reply,
    Resource, StoreTime, Token, View, WaitFor,
};
use leasehold_redis_protocol::{
    Channels, PLAIN_CHANNELS, Script, ScriptCall, ScriptVariant, VoteArgs, decode_answer, decode_push,
    decode_renewals, inbox_of, inbox_prefix, keys_of, slot_of,
};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, ConnectionLike as _, PubSub};

use super::codec;
use crate::store::histories::{CLIENTS, Joint, RESOURCES, Step, client_id, give_back, joint_steps, steps};

/// The scripts on a server, and who listens there.
struct Lab<'c> {
    commands: &'c mut Connection,
    inboxes: PubSub<'c>,
    /// By the text of their commands.
    scripts: HashMap<Script, String>,
}

impl<'c> Lab<'c> {
    fn new(commands: &'c mut Connection, inboxes: &'c mut Connection) -> Self {
        let mut lab = Self { commands, inboxes: inboxes.as_pubsub(), scripts: HashMap::new() };
        for script in Script::ALL {
            // The test's clock instead of the server's, which it is ahead of, so that no key expires meanwhile.
            let channels = format!("{}local INBOX = '{}'\n", PLAIN_CHANNELS, inbox_prefix(None));
            let clock = "local now, floor = tonumber(ARGV[#ARGV - 1]), tonumber(ARGV[#ARGV])\n";
            let source = script.text(clock, &channels, "");
            let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(source).query(lab.commands).unwrap();
            lab.scripts.insert(script, sha);
        }
        for client in 0..CLIENTS {
            lab.arrive(client_id(client));
        }
        lab.inboxes.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        lab
    }

    fn arrive(&mut self, client: ClientId) {
        self.inboxes.subscribe(inbox_of(client, None)).unwrap();
    }

    fn leave(&mut self, client: ClientId) {
        self.inboxes.unsubscribe(inbox_of(client, None)).unwrap();
    }

    fn run(&mut self, resource: &Resource, command: &Command, now: Now) -> Answer {
        let Now { time: now, floor, .. } = now;
        let encoded = ScriptVariant::Server.encode(resource, command, VoteArgs::default());
        let mut call = self.begin(&encoded);
        call.arg(now.as_micros()).arg(floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        decode_answer(command, floor, &value)
            .unwrap_or_else(|error| panic!("{command:?} returned {value:?}: {error}"))
    }

    /// The call of the script with the test's clock; its time and floor follow as arguments.
    fn begin(&self, call: &ScriptCall) -> redis::Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.scripts[&call.script()]).arg(call.keys().len());
        call.keys().chain(call.args()).for_each(|part| {
            command.arg(part);
        });
        command
    }

    fn run_all(&mut self, attempts: &[(&Resource, &Arc<Acquire>)], now: Now) -> Vec<Answer> {
        let commands: Vec<_> =
            attempts.iter().map(|(_, acquire)| Command::Acquire(Arc::clone(acquire))).collect();
        let resources = attempts.iter().map(|(resource, _)| *resource);
        let encoded = ScriptVariant::Server.encode_acquire_all(resources.zip(&commands));
        let mut call = self.begin(&encoded);
        call.arg(now.time.as_micros()).arg(now.floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{attempts:?}: {error}"));
        let redis::Value::Array(values) = value else { panic!("{attempts:?} returned {value:?}") };
        assert_eq!(values.len(), commands.len());
        let answer = |(command, value)| decode_answer(command, now.floor, value);
        commands.iter().zip(&values).map(|pair| answer(pair).expect("an answer")).collect()
    }

    /// None where it is to be asked for alone.
    fn renew_together(&mut self, payload: &[(&Resource, Command)], now: Now) -> Vec<Option<Answer>> {
        let renewals = payload.iter().map(|(resource, command)| match command {
            Command::Renew(renew) => (*resource, renew),
            other => panic!("no renewal: {other:?}"),
        });
        let renewals: Vec<_> = renewals.collect();
        let mut call = self.begin(&ScriptVariant::Server.encode_renewals(&renewals, VoteArgs::default()));
        call.arg(now.time.as_micros()).arg(now.floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{payload:?}: {error}"));
        let commands = payload.iter().map(|(_, command)| command);
        decode_renewals(commands, now.floor, &value)
            .unwrap_or_else(|error| panic!("{payload:?}: {value:?}: {error}"))
    }

    /// No key goes before what it holds.
    fn check_expiry(&mut self, resource: &Resource, view: &View) {
        let leases = view.holders.iter().map(|holder| holder.expires_at);
        let last = leases.chain(view.waiters.iter().map(|waiter| waiter.deadline)).max();
        let Some(last) = last else { return };
        for key in keys_of(resource) {
            let ms: i64 = redis::cmd("PEXPIRETIME").arg(&key).query(self.commands).unwrap();
            let min_lifetime = u64::try_from(ms).is_ok_and(|ms| ms * 1_000 > last.as_micros());
            assert!(ms == -2 || min_lifetime, "{key} is gone at {ms}, before {last:?}");
        }
    }

    /// The next push, with the channel that it came by.
    fn hear(&mut self) -> (String, Option<Push>) {
        let message = self.inboxes.get_message().expect("something was pushed");
        (message.get_channel_name().to_owned(), decode_push(message.get_payload_bytes()).ok())
    }
}

/// The model and the scripts: both do the same, and must say the same.
struct Twins<'l, 'c> {
    lab: &'l mut Lab<'c>,
    resources: Vec<(Resource, Table)>,
    now: Now,
    stepped_back: Duration,
    absent: Vec<ClientId>,
}

impl<'l, 'c> Twins<'l, 'c> {
    fn new(lab: &'l mut Lab<'c>, resources: &[Resource], start: StoreTime) -> Self {
        let resources = resources.iter().map(|resource| (resource.clone(), Table::new())).collect();
        Self { lab, resources, now: Now::same(start), stepped_back: Duration::ZERO, absent: Vec::new() }
    }

    fn step(&mut self, at: usize, step: &Step) {
        match step {
            // A server sweeps by itself.
            Step::Sweep => {}
            Step::Raise(ms) => {
                self.now.floor = Token::new((self.now.time + Duration::from_millis(*ms)).as_micros());
            }
            Step::Pass(ms) => {
                let later = Now::same(self.now.time + Duration::from_millis(*ms));
                self.now = Now { floor: self.now.floor, ..later };
            }
            Step::SetBack(ms) => {
                let span = Duration::from_millis(*ms);
                self.now = Now { floor: self.now.floor, ..Now::same(self.now.time.saturating_sub(span)) };
                self.stepped_back += span;
            }
            Step::Leave(client) => {
                self.absent.push(client_id(*client));
                self.lab.leave(client_id(*client));
            }
            Step::Return(client) => {
                self.absent.retain(|known| *known != client_id(*client));
                self.lab.arrive(client_id(*client));
            }
            Step::Do(command) => {
                self.run(at, command);
                self.look(at);
            }
        }
    }

    fn run(&mut self, at: usize, command: &Command) -> Reply {
        let mut pushes = Vec::new();
        let mut await_connected = |client| !self.absent.contains(&client);
        let turn = CommandContext { now: self.now, is_reachable: &mut await_connected, pushes: &mut pushes };
        let (resource, table) = &mut self.resources[at];
        let Ok(expected) = apply(table, turn, command);
        let found = self.lab.run(resource, command, self.now);
        assert_eq!(found, expected, "after {command:?}");
        self.hear(&pushes, command);
        found.reply
    }

    fn run_all(&mut self, attempts: &[Arc<Acquire>]) {
        let mut pushes = Vec::new();
        let mut await_connected = |client| !self.absent.contains(&client);
        let turn = CommandContext { now: self.now, is_reachable: &mut await_connected, pushes: &mut pushes };
        let tables = self.resources.iter_mut().map(|(_, table)| table);
        let mut steps: Vec<_> = tables.zip(attempts).collect();
        let Ok(expected) = apply_all(turn, &mut steps);
        let resources = self.resources.iter().map(|(resource, _)| resource);
        let calls: Vec<_> = resources.zip(attempts).collect();
        let found = self.lab.run_all(&calls, self.now);
        assert_eq!(found, expected, "after {attempts:?}");
        self.hear(&pushes, &attempts);
        (0..attempts.len()).for_each(|at| self.look(at));
    }

    /// As a client does it: first together, and then one by one what could not be answered.
    fn renew_together(&mut self, renewals: &[(usize, Renew)]) {
        let command = |(at, renew): &(usize, Renew)| (*at, Command::Renew(renew.clone()));
        let payload: Vec<_> = renewals.iter().map(command).collect();
        let calls: Vec<_> =
            payload.iter().map(|(at, command)| (&self.resources[*at].0, command.clone())).collect();
        let found = self.lab.renew_together(&calls, self.now);
        for ((at, command), found) in payload.iter().zip(&found) {
            let Some(found) = found else { continue };
            let mut pushes = Vec::new();
            let mut await_connected = |client| !self.absent.contains(&client);
            let turn =
                CommandContext { now: self.now, is_reachable: &mut await_connected, pushes: &mut pushes };
            let Ok(expected) = apply(&mut self.resources[*at].1, turn, command);
            assert_eq!(*found, expected, "after {command:?} of {payload:?}");
            assert_eq!(pushes, [], "what is usual pushes nothing: {command:?} of {payload:?}");
        }
        for ((at, command), found) in payload.iter().zip(&found) {
            if found.is_none() {
                self.run(*at, command);
            }
            self.look(*at);
        }
    }

    fn look(&mut self, at: usize) {
        if let Reply::View(view) = self.run(at, &Command::Inspect) {
            self.lab.check_expiry(&self.resources[at].0, &view);
        }
    }

    /// What is pushed to nobody is not heard.
    fn hear(&mut self, pushes: &[Push], command: &impl std::fmt::Debug) {
        for push in pushes.iter().filter(|push| !self.absent.contains(&push.to())) {
            let expected = (inbox_of(push.to(), None), Some(push.clone()));
            assert_eq!(self.lab.hear(), expected, "after {command:?}");
        }
    }

    fn end(self) {
        for client in self.absent {
            self.lab.arrive(client);
        }
        // Nothing more was pushed than was expected: the next thing to be heard is this.
        let inbox = inbox_of(client_id(0), None);
        let heard: i64 = redis::cmd("PUBLISH").arg(&inbox).arg("the end").query(self.lab.commands).unwrap();
        assert_eq!(heard, 1);
        assert_eq!(self.lab.hear(), (inbox, None));
        for (resource, _) in self.resources {
            forget(self.lab, &resource, self.now.time + self.stepped_back + Duration::from_secs(3 * 3_600));
        }
    }
}

/// In the end nothing is left, and while something is, every key has an expiry.
fn forget(lab: &mut Lab<'_>, resource: &Resource, now: StoreTime) {
    for key in keys_of(resource) {
        let left: i64 = redis::cmd("PTTL").arg(&key).query(lab.commands).unwrap();
        assert!(left == -2 || left > 0, "{key} stays for ever");
    }
    lab.run(resource, &Command::Inspect, Now::same(now + Duration::from_secs(3_600)));
    lab.run(resource, &Command::Inspect, Now::same(now + Duration::from_secs(3 * 3_600)));
    for key in keys_of(resource) {
        let found: bool = redis::cmd("EXISTS").arg(&key).query(lab.commands).unwrap();
        assert!(!found, "{key} is left");
    }
}

fn wall_clock() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap()
}

/// Compares histories of so many resources, fresh ones for each on a server that is never emptied.
fn differ<H: std::fmt::Debug>(
    histories: &impl Strategy<Value = H>,
    resources: usize,
    play: impl Fn(&mut Twins<'_, '_>, &H),
) {
    let cases = if std::env::var_os("LEASEHOLD_TEST_LONG").is_some() { 50_000 } else { 5_000 };
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    let lab = std::cell::RefCell::new(Lab::new(&mut commands, &mut inboxes));
    let count = std::cell::Cell::new(0_u64);
    let start = StoreTime::ZERO + wall_clock() + Duration::from_secs(1_000 * 3_600);
    // A history of several resources looks at each of them, and takes as many times longer.
    let cases = cases / u32::try_from(resources).unwrap_or(1);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(histories, |history| {
        count.set(count.get() + 1);
        let resource = |number| {
            let name = format!("a{{b}}c-{}-{number}", count.get());
            Resource { kind: Kind::Mutex, name: Name::new(&name).unwrap() }
        };
        let resources: Vec<_> = (0..resources).map(resource).collect();
        let mut lab = lab.borrow_mut();
        let mut twins = Twins::new(&mut lab, &resources, start);
        play(&mut twins, &history);
        twins.end();
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn play_alone(twins: &mut Twins<'_, '_>, steps: &[Step]) {
    steps.iter().for_each(|step| twins.step(0, step));
}

fn play_jointly(twins: &mut Twins<'_, '_>, steps: &[Joint]) {
    for step in steps {
        match step {
            Joint::At(at, step) => twins.step(*at, step),
            Joint::Together(attempts) => twins.run_all(attempts),
            Joint::Renewals(renewals) => twins.renew_together(renewals),
        }
    }
}

#[test]
fn scripts_match_the_model() {
    differ(&steps(1), 1, |twins, steps| play_alone(twins, steps));
}

#[test]
fn scripts_match_the_model_for_shared_locks() {
    differ(&steps(4), 1, |twins, steps| play_alone(twins, steps));
}

#[test]
fn scripts_match_the_model_for_acquire_all() {
    differ(&joint_steps(1), RESOURCES, |twins, steps| play_jointly(twins, steps));
}

#[test]
fn scripts_match_the_model_for_shared_acquire_all() {
    differ(&joint_steps(4), RESOURCES, |twins, steps| play_jointly(twins, steps));
}

/// Takes it, or queues for it.
fn waits(client: u128, sequence: u64, capacity: u32, weight: u32) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence };
    Command::from(Acquire {
        capacity,
        weight,
        wait: Some(WaitFor { entry_ttl: Duration::from_secs(1_000), max_queue: 100_000 }),
        ..Acquire::exclusive(acquisition, Duration::from_secs(10))
    })
}

#[test]
fn release_grants_to_as_many_readers_as_the_model() {
    const READERS: u128 = 70;
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    let mut lab = Lab::new(&mut commands, &mut inboxes);
    (CLIENTS..=READERS).for_each(|client| lab.arrive(client_id(client)));
    let start = StoreTime::ZERO + wall_clock() + Duration::from_secs(1_000 * 3_600);
    for readers in (1..=3).chain(62..=READERS) {
        let resource = Resource { kind: Kind::ReadWrite, name: Name::new(&readers.to_string()).unwrap() };
        let mut twins = Twins::new(&mut lab, &[resource], start);
        twins.run(0, &waits(0, 1, 1_000, 1_000));
        (1..=readers).for_each(|client| drop(twins.run(0, &waits(client, 1, 1_000, 1))));
        let writer = Acquisition { client: client_id(0), sequence: 1 };
        assert_eq!(twins.run(0, &give_back(writer)), Reply::Released);
        twins.look(0);
        twins.end();
    }
}

#[test]
fn clock_step_back_extends_no_lease() {
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    let mut lab = Lab::new(&mut commands, &mut inboxes);
    let start = StoreTime::ZERO + wall_clock() + Duration::from_secs(1_000 * 3_600);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let mut twins = Twins::new(&mut lab, &[resource], start);
    let id = |client, sequence| Acquisition { client: client_id(client), sequence };
    let renew = |acquisition| Command::Renew(Renew { acquisition, ttl: Duration::from_secs(10), reserve: 0 });
    let release = |acquisition, at_least_s| {
        let min_hold = Duration::from_secs(at_least_s);
        Command::Release(Release { acquisition, min_hold, tombstone: Duration::ZERO })
    };
    let kept_until = |twins: &mut Twins<'_, '_>| match twins.run(0, &Command::Inspect) {
        Reply::View(view) => view.holders.first().map(|holder| holder.expires_at),
        other => panic!("{other:?}"),
    };

    // Contended, released without a minimum: the waiter has it.
    twins.run(0, &waits(0, 1, 1, 1));
    twins.run(0, &waits(1, 1, 1, 1));
    twins.step(0, &Step::SetBack(600_000));
    assert_eq!(twins.run(0, &give_back(id(0, 1))), Reply::Released);
    assert!(matches!(twins.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
    // ReconnectHandler after the clock was set back once more, alone and with a waiter.
    twins.step(0, &Step::SetBack(600_000));
    assert!(matches!(twins.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
    twins.run(0, &waits(2, 1, 1, 1));
    twins.step(0, &Step::SetBack(600_000));
    assert!(matches!(twins.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
    assert_eq!(twins.run(0, &give_back(id(1, 1))), Reply::Released);
    // A minimum counts from the release on, where the grant lies ahead.
    twins.step(0, &Step::SetBack(600_000));
    assert_eq!(twins.run(0, &release(id(2, 1), 20)), Reply::Released);
    assert_eq!(kept_until(&mut twins), Some(twins.now.time + Duration::from_secs(20)));
    twins.step(0, &Step::Pass(20_000));
    assert_eq!(kept_until(&mut twins), None);
    // A repeated attempt learns of no more time than it asked for.
    twins.run(0, &waits(3, 1, 1, 1));
    twins.step(0, &Step::SetBack(600_000));
    let Reply::Granted(grant) = twins.run(0, &waits(3, 1, 1, 1)) else { panic!("it holds") };
    assert_eq!(grant.valid_for, Duration::from_secs(10));
    twins.end();
}

#[test]
fn parking_a_client_has_constant_cost() {
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    let mut lab = Lab::new(&mut commands, &mut inboxes);
    let start = StoreTime::ZERO + wall_clock() + Duration::from_secs(1_000 * 3_600);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let mut twins = Twins::new(&mut lab, &[resource], start);
    twins.run(0, &waits(0, 1, 1, 1));
    for sequence in 0..1_000 {
        twins.run(0, &waits(1, sequence, 1, 1));
    }
    twins.run(0, &waits(2, 1, 1, 1));
    twins.step(0, &Step::Leave(1));
    let called = |twins: &mut Twins<'_, '_>| -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(twins.lab.commands).unwrap();
        let calls = |line: &str| line.split_once("calls=")?.1.split_once(',')?.0.parse::<u64>().ok();
        info.lines().filter_map(calls).sum()
    };
    let cost = |twins: &mut Twins<'_, '_>, command: &Command| {
        let before = called(twins);
        let reply = twins.run(0, command);
        (reply, called(twins) - before)
    };
    let first = Acquisition { client: client_id(0), sequence: 1 };
    let (released, to_park) = cost(&mut twins, &give_back(first));
    assert_eq!(released, Reply::Released);
    twins.step(0, &Step::Return(1));
    let (queued, to_return) = cost(&mut twins, &waits(1, 0, 1, 1));
    assert!(matches!(queued, Reply::Queued(queued) if queued.is_head));
    assert!(to_park < 60 && to_return < 60, "commands in the script: {to_park}, then {to_return}");
    twins.look(0);
    twins.end();
}

#[test]
fn last_token_retention_is_extended_in_time() {
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
    let mut lab = Lab::new(&mut commands, &mut inboxes);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let [state, _] = keys_of(&resource);
    let start = StoreTime::ZERO + wall_clock();
    let mut ms_left_after_use = |sequence, minutes: u64| {
        let now = start + Duration::from_secs(60 * minutes);
        let acquisition = Acquisition { client: client_id(0), sequence };
        let acquire = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(10)));
        assert!(matches!(lab.run(&resource, &acquire, Now::same(now)).reply, Reply::Granted(_)));
        assert_eq!(lab.run(&resource, &give_back(acquisition), Now::same(now)).reply, Reply::Released);
        let left: i64 = redis::cmd("PTTL").arg(&state).query(lab.commands).unwrap();
        // As if as much time had passed for the server as will have passed for the scripts.
        let _: i64 = redis::cmd("PEXPIRE").arg(&state).arg(5_000_000).query(lab.commands).unwrap();
        left
    };
    let hour = 3_600_000;
    assert!(ms_left_after_use(1, 0) > hour);
    let left = ms_left_after_use(2, 30);
    assert!((hour..=5_000_000).contains(&left), "moved without need: {left}");
    assert!(ms_left_after_use(3, 65) > 5_000_000, "not moved in time");
}

#[test]
fn every_script_variant_reaches_the_waiters_inbox() {
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inbox) = (server.admin(), server.admin());
    inbox.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (holder, waiter) = (client_id(1), client_id(2));
    let cluster = ScriptVariant::Cluster;
    let variants = [
        (ScriptVariant::Server, "SUBSCRIBE"),
        (cluster(Channels::Plain), "SUBSCRIBE"),
        (cluster(Channels::Sharded), "SSUBSCRIBE"),
    ];
    for (number, (variant, subscribe)) in (0..).zip(variants) {
        let resource = Resource { kind: Kind::Mutex, name: Name::new(&format!("a{number}")).unwrap() };
        let channel = inbox_of(waiter, variant.is_cluster().then(|| slot_of(&resource)));
        let subscribe = redis::cmd(subscribe).arg(&channel).get_packed_command();
        inbox.send_packed_command(&subscribe).unwrap();
        inbox.recv_response().unwrap();
        let mut run = |command: &Command| {
            let call = codec::command(&variant.encode(&resource, command, VoteArgs::default()), true);
            let value = commands.req_command(&call).unwrap_or_else(|error| panic!("{variant:?}: {error}"));
            decode_answer(command, None, &value).unwrap().reply
        };
        let acquire = |client| {
            Command::from(Acquire {
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                ..Acquire::exclusive(Acquisition { client, sequence: 1 }, Duration::from_secs(10))
            })
        };
        assert!(matches!(run(&acquire(holder)), Reply::Granted(_)));
        assert!(matches!(run(&acquire(waiter)), Reply::Queued(_)));
        let acquisition = Acquisition { client: holder, sequence: 1 };
        assert_eq!(run(&give_back(acquisition)), Reply::Released);
        let message = inbox.recv_response().unwrap();
        let redis::Value::Array(message) = message else { panic!("{message:?}") };
        let [_, redis::Value::BulkString(on), redis::Value::BulkString(pushed)] = &message[..] else {
            panic!("{message:?}")
        };
        assert_eq!(on, channel.as_bytes());
        let push = decode_push(pushed).unwrap();
        assert!(matches!(push.kind, PushKind::Granted(_)) && push.to() == waiter, "{variant:?}: {push:?}");
    }
}
