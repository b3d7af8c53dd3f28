//! The scripts against the model, command by command, on a real server.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::model::{Table, Turn, apply};
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Kind, Name, Now, Owner, Push, PushKind, Release, Renew, Reply,
    Resource, StoreTime, View, WaitFor, lua,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, ConnectionLike as _, PubSub};

use super::keys;
use super::script::{self, Channels, Dialect};

const CLIENTS: u128 = 4;

fn keys_of(resource: &Resource) -> Vec<String> {
    let mut keys = Vec::new();
    keys::each_key(resource, |key| keys.push(key.to_owned()));
    keys
}

/// A server of this test's own, on a socket in a folder of its own.
struct Server {
    process: Child,
    folder: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut process = Process::new("redis-server");
        process.args(["--port", "0", "--save", "", "--unixsocket"]).arg(folder.path().join("socket"));
        process.arg("--dir").arg(folder.path()).stdout(Stdio::null());
        let process = process.spawn().expect("redis-server is missing: scripts/test install");
        Self { process, folder }
    }

    fn connect(&self) -> Connection {
        let socket: &Path = &self.folder.path().join("socket");
        let client = redis::Client::open(format!("redis+unix://{}", socket.display())).unwrap();
        let give_up = Instant::now() + Duration::from_secs(10);
        loop {
            match client.get_connection() {
                Ok(connection) => return connection,
                Err(error) => assert!(Instant::now() < give_up, "{error}"),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Do(Command),
    Pass(u64),
    Leave(u128),
    Return(u128),
}

fn steps(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let who = || {
        (0..CLIENTS, 0..5_u64)
            .prop_map(|(client, sequence)| Acquisition { client: ClientId::new(client), sequence })
    };
    let owner = proptest::option::weighted(0.3, 0..3_u8);
    let replaces = proptest::option::weighted(0.2, 0..5_u64);
    let acquire = (who(), 1..=capacity + 1, any::<bool>(), owner, 0..3_u32, 0..9_u64, replaces).prop_map(
        move |(acquisition, weight, waits, owner, reserve, ttl, replaces)| {
            Step::Do(Command::from(Acquire {
                acquisition,
                owner: owner.map(|owner| Owner::new(&"o".repeat(usize::from(owner)))),
                capacity,
                weight,
                ttl: Duration::from_secs(ttl + 1),
                reserve,
                wait: waits.then_some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                replaces,
                metadata: Arc::from("ä\0b"),
            }))
        },
    );
    let renew = (who(), 0..3_u32).prop_map(|(acquisition, reserve)| {
        Step::Do(Command::Renew(Renew { acquisition, ttl: Duration::from_secs(10), reserve }))
    });
    let release = (who(), 0..4_u64, 0..3_u64).prop_map(|(acquisition, at_least, tombstone)| {
        let at_least = Duration::from_secs(at_least * at_least);
        Step::Do(Command::Release(Release {
            acquisition,
            at_least,
            tombstone: Duration::from_secs(tombstone * 4),
        }))
    });
    // A holder that waits for more: too rare in what is drawn step by step.
    let waits_for_more =
        (0..4_u128, 1..4_u128, 1..=capacity, 1..=capacity).prop_map(move |(client, others, weight, more)| {
            let ask = |client: u128, sequence, weight, replaces| {
                Step::Do(Command::from(Acquire {
                    acquisition: Acquisition { client: ClientId::new(client % 4), sequence },
                    owner: None,
                    capacity,
                    weight,
                    ttl: Duration::from_secs(4),
                    reserve: 1,
                    wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                    replaces,
                    metadata: Arc::from(""),
                }))
            };
            vec![
                ask(client, 0, weight, None),
                ask(client + others, 0, 1, None),
                ask(client, 1, more, Some(0)),
            ]
        });
    let one = prop_oneof![
        8 => acquire,
        4 => renew,
        5 => release,
        1 => Just(Step::Do(Command::ForceRelease)),
        4 => (0..6_000_u64).prop_map(Step::Pass),
        1 => (0..CLIENTS).prop_map(Step::Leave),
        2 => (0..CLIENTS).prop_map(Step::Return),
    ];
    let some = prop_oneof![20 => one.prop_map(|step| vec![step]), 1 => waits_for_more, 1 => life(capacity), 1 => queue(capacity)];
    proptest::collection::vec(some, 1..40).prop_map(|some| some.concat())
}

/// A lock as most are: taken, perhaps renewed, given back. Some take so long that the last token need not be remembered any
/// more.
fn life(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let pass = || prop_oneof![0..6_000_u64, 0..5_000_000_u64];
    let ttl = || prop_oneof![1..10_u64, Just(2 * 3_600)].prop_map(Duration::from_secs);
    let renewal = proptest::option::of((ttl(), 0..3_u32, pass()));
    let taken = (0..CLIENTS, 0..5_u64, 1..=capacity, ttl(), 0..3_u32);
    (taken, pass(), renewal, pass()).prop_map(move |(taken, before, renewal, after)| {
        let (client, sequence, weight, ttl, reserve) = taken;
        let acquisition = Acquisition { client: ClientId::new(client), sequence };
        let (owner, wait, replaces, metadata) = (None, None, None, Arc::from("m"));
        let acquire = Command::from(Acquire {
            acquisition,
            owner,
            capacity,
            weight,
            ttl,
            reserve,
            wait,
            replaces,
            metadata,
        });
        let mut steps = vec![Step::Do(acquire), Step::Pass(before)];
        if let Some((ttl, reserve, pass)) = renewal {
            steps.extend([Step::Do(Command::Renew(Renew { acquisition, ttl, reserve })), Step::Pass(pass)]);
        }
        steps.extend([Step::Do(give_back(acquisition)), Step::Pass(after)]);
        steps
    })
}

/// A queue as most are: some ask for the same lock, are granted it in turn, keep it for a while and give it back. Now and
/// then something happens in between.
fn queue(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let seconds = || prop_oneof![8 => 5..20_u64, 1 => 1..5_u64, 1 => Just(30 * 60), 1 => Just(2 * 3_600)];
    let asked =
        (0..CLIENTS, 0..3_u32, seconds(), seconds(), prop_oneof![3 => Just(capacity), 1 => 1..=capacity]);
    let asked = proptest::collection::vec(asked, 2..12);
    let aside = prop_oneof![
        6 => Just(Aside::Nothing),
        6 => (seconds(), 0..8_u32).prop_map(|(ttl, reserve)| Aside::Renew(ttl, reserve.saturating_sub(6))),
        6 => (0..900_u64).prop_map(Aside::Pass),
        1 => (0..9_u64).prop_map(|seconds| Aside::Pass(1_000 * seconds * seconds)),
        2 => (0..12_usize).prop_map(Aside::AskAgain),
        1 => (0..12_usize).prop_map(Aside::GiveUp),
        1 => (0..CLIENTS).prop_map(|client| Aside::Do(Step::Leave(client))),
        1 => (0..CLIENTS).prop_map(|client| Aside::Do(Step::Return(client))),
    ];
    let asides = proptest::collection::vec(aside, 36);
    (asked, asides, 1..8_usize, 5..100_u64).prop_map(move |(asked, asides, depth, first)| {
        let mut asides = asides.into_iter();
        let asked: Vec<Acquire> = (first..)
            .zip(asked)
            .map(|(sequence, (client, reserve, ttl, entry_ttl, weight))| Acquire {
                acquisition: Acquisition { client: ClientId::new(client), sequence },
                owner: None,
                capacity,
                weight,
                ttl: Duration::from_secs(ttl),
                reserve,
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(entry_ttl), max_queue: 6 }),
                replaces: None,
                metadata: Arc::from("m".repeat(usize::try_from(sequence % 4).unwrap_or(0))),
            })
            .collect();
        let mut steps = Vec::new();
        // As many are in it at a time as `depth` says, the holder included.
        for turn in 0..asked.len() + depth {
            let holder =
                turn.checked_sub(depth - 1).and_then(|turn| asked.get(turn)).map(|held| held.acquisition);
            let mut aside = || asides.next()?.step(holder?, &asked);
            steps.extend(aside());
            steps.extend(asked.get(turn).map(|acquire| Step::Do(Command::from(acquire.clone()))));
            steps.extend([aside(), aside()].into_iter().flatten());
            steps.extend(holder.map(|holder| Step::Do(give_back(holder))));
        }
        steps
    })
}

/// What happens while a queue is worked off.
#[derive(Clone, Debug)]
enum Aside {
    Nothing,
    Renew(u64, u32),
    Pass(u64),
    AskAgain(usize),
    GiveUp(usize),
    Do(Step),
}

impl Aside {
    fn step(self, acquisition: Acquisition, asked: &[Acquire]) -> Option<Step> {
        match self {
            Self::Nothing => None,
            Self::Renew(ttl, reserve) => {
                let ttl = Duration::from_secs(ttl);
                Some(Step::Do(Command::Renew(Renew { acquisition, ttl, reserve })))
            }
            Self::Pass(ms) => Some(Step::Pass(ms)),
            Self::AskAgain(index) => asked.get(index).map(|acquire| Step::Do(Command::from(acquire.clone()))),
            Self::GiveUp(index) => asked.get(index).map(|acquire| Step::Do(give_back(acquire.acquisition))),
            Self::Do(step) => Some(step),
        }
    }
}

fn give_back(acquisition: Acquisition) -> Command {
    Command::Release(Release { acquisition, at_least: Duration::ZERO, tombstone: Duration::ZERO })
}

/// The scripts on a server, and who listens there.
struct Lab<'c> {
    commands: &'c mut Connection,
    inboxes: PubSub<'c>,
    /// By the text of their commands.
    scripts: HashMap<lua::Script, String>,
}

impl<'c> Lab<'c> {
    fn new(commands: &'c mut Connection, inboxes: &'c mut Connection) -> Self {
        let mut lab = Self { commands, inboxes: inboxes.as_pubsub(), scripts: HashMap::new() };
        for script in lua::Script::ALL {
            // The test's clock instead of the server's, which it is ahead of, so that no key expires meanwhile.
            let channels = format!("{}local INBOX = '{}'\n", lua::PLAIN_CHANNELS, keys::inbox(None));
            let source = script.text("local now = tonumber(ARGV[2])\n", &channels);
            let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(source).query(lab.commands).unwrap();
            lab.scripts.insert(script, sha);
        }
        for client in 0..CLIENTS {
            lab.arrive(ClientId::new(client));
        }
        lab.inboxes.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        lab
    }

    fn arrive(&mut self, client: ClientId) {
        self.inboxes.subscribe(keys::inbox_of(client, None)).unwrap();
    }

    fn leave(&mut self, client: ClientId) {
        self.inboxes.unsubscribe(keys::inbox_of(client, None)).unwrap();
    }

    fn run(&mut self, resource: &Resource, command: &Command, now: StoreTime) -> leasehold_core::Answer {
        let (script, said) = script::call(command);
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.scripts[&script]).arg(keys::KEYS).arg(keys_of(resource)).arg(said);
        call.arg(now.as_micros());
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        script::answer(command, &value).unwrap_or_else(|| panic!("{command:?} returned {value:?}"))
    }

    /// No key goes before what it holds.
    fn check_expiry(&mut self, resource: &Resource, view: &View) {
        let leases = view.holders.iter().map(|holder| holder.expires_at);
        let last = leases.chain(view.waiters.iter().map(|waiter| waiter.deadline)).max();
        let Some(last) = last else { return };
        for key in keys_of(resource) {
            let ms: i64 = redis::cmd("PEXPIRETIME").arg(&key).query(self.commands).unwrap();
            let outlives = u64::try_from(ms).is_ok_and(|ms| ms * 1_000 > last.as_micros());
            assert!(ms == -2 || outlives, "{key} is gone at {ms}, before {last:?}");
        }
    }

    /// The next push, with the channel that it came by.
    fn hear(&mut self) -> (String, Option<Push>) {
        let message = self.inboxes.get_message().expect("something was pushed");
        (message.get_channel_name().to_owned(), script::push(message.get_payload_bytes()))
    }
}

/// Says what time it is in the end.
fn compare(lab: &mut Lab<'_>, resource: &Resource, start: StoreTime, steps: &[Step]) -> StoreTime {
    let mut table = Table::new();
    let mut now = start;
    let mut absent: Vec<ClientId> = Vec::new();
    for step in steps {
        match step {
            Step::Pass(ms) => now = now + Duration::from_millis(*ms),
            Step::Leave(client) => {
                absent.push(ClientId::new(*client));
                lab.leave(ClientId::new(*client));
            }
            Step::Return(client) => {
                absent.retain(|known| *known != ClientId::new(*client));
                lab.arrive(ClientId::new(*client));
            }
            Step::Do(command) => {
                for command in [command, &Command::Inspect] {
                    let mut pushes = Vec::new();
                    let mut is_there = |client| !absent.contains(&client);
                    let turn = Turn { now: Now::same(now), is_there: &mut is_there, pushes: &mut pushes };
                    let Ok(expected) = apply(&mut table, turn, command);
                    let found = lab.run(resource, command, now);
                    assert_eq!(found, expected, "after {command:?}");
                    if let Reply::View(view) = &found.reply {
                        lab.check_expiry(resource, view);
                    }
                    // What is pushed to nobody is not heard.
                    for push in pushes.iter().filter(|push| !absent.contains(&push.to())) {
                        let heard = lab.hear();
                        assert_eq!(
                            heard,
                            (keys::inbox_of(push.to(), None), Some(push.clone())),
                            "after {command:?}"
                        );
                    }
                }
            }
        }
    }
    for client in absent {
        lab.arrive(client);
    }
    // Nothing more was pushed than was expected: the next thing to be heard is this.
    let client = ClientId::new(0);
    let last: i64 =
        redis::cmd("PUBLISH").arg(keys::inbox_of(client, None)).arg("the end").query(lab.commands).unwrap();
    assert_eq!(last, 1);
    assert_eq!(lab.hear(), (keys::inbox_of(client, None), None));
    now
}

/// In the end nothing is left, and while something is, every key has an expiry.
fn forget(lab: &mut Lab<'_>, resource: &Resource, now: StoreTime) {
    for key in keys_of(resource) {
        let left: i64 = redis::cmd("PTTL").arg(&key).query(lab.commands).unwrap();
        assert!(left == -2 || left > 0, "{key} stays for ever");
    }
    lab.run(resource, &Command::Inspect, now + Duration::from_secs(3_600));
    lab.run(resource, &Command::Inspect, now + Duration::from_secs(3 * 3_600));
    for key in keys_of(resource) {
        let found: bool = redis::cmd("EXISTS").arg(&key).query(lab.commands).unwrap();
        assert!(!found, "{key} is left");
    }
}

fn wall_clock() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap()
}

fn differ(capacity: u32) {
    let cases = if std::env::var_os("LEASEHOLD_TEST_LONG").is_some() { 50_000 } else { 5_000 };
    let server = Server::start();
    let (mut commands, mut inboxes) = (server.connect(), server.connect());
    let lab = std::cell::RefCell::new(Lab::new(&mut commands, &mut inboxes));
    let count = std::cell::Cell::new(0_u64);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a{b}c").unwrap() };
    let start = StoreTime::ZERO + wall_clock() + Duration::from_secs(24 * 3_600);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&steps(capacity), |steps| {
        count.set(count.get() + 1);
        let mut lab = lab.borrow_mut();
        // A fresh resource for each history, on a server that is never emptied.
        let name = format!("{}-{}", resource.name.as_str(), count.get());
        let resource = Resource { kind: Kind::Mutex, name: Name::new(&name).unwrap() };
        let end = compare(&mut lab, &resource, start, &steps);
        forget(&mut lab, &resource, end + Duration::from_secs(3 * 3_600));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn the_scripts_say_what_the_model_says() {
    differ(1);
}

#[test]
fn the_scripts_say_what_the_model_says_of_what_many_share() {
    differ(4);
}

#[test]
fn the_last_token_of_a_lock_in_use_is_kept_for_another_hour_before_it_could_be_missed() {
    let server = Server::start();
    let (mut commands, mut inboxes) = (server.connect(), server.connect());
    let mut lab = Lab::new(&mut commands, &mut inboxes);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let state = keys_of(&resource).swap_remove(0);
    let start = StoreTime::ZERO + wall_clock();
    let mut ms_left_after_use = |sequence, minutes: u64| {
        let now = start + Duration::from_secs(60 * minutes);
        let acquisition = Acquisition { client: ClientId::new(0), sequence };
        let acquire = Command::from(Acquire {
            acquisition,
            owner: None,
            capacity: 1,
            weight: 1,
            ttl: Duration::from_secs(10),
            reserve: 0,
            wait: None,
            replaces: None,
            metadata: Arc::from(""),
        });
        assert!(matches!(lab.run(&resource, &acquire, now).reply, Reply::Granted(_)));
        assert_eq!(lab.run(&resource, &give_back(acquisition), now).reply, Reply::Released);
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
fn every_dialect_reaches_the_inbox_of_whoever_waits() {
    let server = Server::start();
    let (mut commands, mut inbox) = (server.connect(), server.connect());
    inbox.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (holder, waiter) = (ClientId::new(1), ClientId::new(2));
    let cluster = |channels| Dialect { channels, is_cluster: true };
    let dialects = [
        (Dialect::SERVER, "SUBSCRIBE"),
        (cluster(Channels::Plain), "SUBSCRIBE"),
        (cluster(Channels::Sharded), "SSUBSCRIBE"),
    ];
    for (number, (dialect, subscribe)) in (0..).zip(dialects) {
        let resource = Resource { kind: Kind::Mutex, name: Name::new(&format!("a{number}")).unwrap() };
        let channel = keys::inbox_of(waiter, dialect.is_cluster.then(|| keys::slot_of(&resource)));
        let subscribe = redis::cmd(subscribe).arg(&channel).get_packed_command();
        inbox.send_packed_command(&subscribe).unwrap();
        inbox.recv_response().unwrap();
        let mut run = |command: &Command| {
            let call = dialect.spelled(&resource, command, true);
            let value = commands.req_command(&call).unwrap_or_else(|error| panic!("{dialect:?}: {error}"));
            script::answer(command, &value).unwrap().reply
        };
        let acquire = |client| {
            Command::from(Acquire {
                acquisition: Acquisition { client, sequence: 1 },
                owner: None,
                capacity: 1,
                weight: 1,
                ttl: Duration::from_secs(10),
                reserve: 0,
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                replaces: None,
                metadata: Arc::from(""),
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
        let push = script::push(pushed).unwrap();
        assert!(matches!(push.kind, PushKind::Granted(_)) && push.to() == waiter, "{dialect:?}: {push:?}");
    }
}
