//! The scripts against the model, command by command, on a real server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{Table, Turn, apply};
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Kind, Name, Now, Push, PushKind, Reply, Resource, StoreTime,
    Token, View, WaitFor, lua,
};
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, ConnectionLike as _, PubSub};

use super::keys;
use super::script::{self, Ballot, Channels, Dialect};
use crate::store::histories::{CLIENTS, Step, give_back, steps};

fn keys_of(resource: &Resource) -> Vec<String> {
    let mut keys = Vec::new();
    keys::each_key(resource, |key| keys.push(key.to_owned()));
    keys
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
            let source = script.text(
                "local now = tonumber(ARGV[2])\n",
                &channels,
                "local floor = tonumber(ARGV[3])\n",
            );
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

    fn run(&mut self, resource: &Resource, command: &Command, now: Now) -> leasehold_core::Answer {
        let Now { time: now, floor, .. } = now;
        let (script, said) = script::call(command);
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.scripts[&script]).arg(keys::KEYS).arg(keys_of(resource)).arg(said);
        call.arg(now.as_micros()).arg(floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        script::answer(command, floor, &value).unwrap_or_else(|| panic!("{command:?} returned {value:?}"))
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
    let (mut now, mut floor) = (start, None);
    let mut absent: Vec<ClientId> = Vec::new();
    for step in steps {
        match step {
            // A server sweeps by itself.
            Step::Sweep => {}
            Step::Raise(ms) => floor = Token::new((now + Duration::from_millis(*ms)).as_micros()),
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
                    let turn = Turn {
                        now: Now { floor, ..Now::same(now) },
                        is_there: &mut is_there,
                        pushes: &mut pushes,
                    };
                    let Ok(expected) = apply(&mut table, turn, command);
                    let found = lab.run(resource, command, Now { floor, ..Now::same(now) });
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

fn differ(capacity: u32) {
    let cases = if std::env::var_os("LEASEHOLD_TEST_LONG").is_some() { 50_000 } else { 5_000 };
    let server = leasehold_servers::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
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
    let server = leasehold_servers::Server::on_socket();
    let (mut commands, mut inboxes) = (server.admin(), server.admin());
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
fn every_dialect_reaches_the_inbox_of_whoever_waits() {
    let server = leasehold_servers::Server::on_socket();
    let (mut commands, mut inbox) = (server.admin(), server.admin());
    inbox.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (holder, waiter) = (ClientId::new(1), ClientId::new(2));
    let cluster = |channels| Dialect { channels, is_cluster: true, is_voting: false };
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
            let call = dialect.spelled(&resource, command, Ballot::default(), true);
            let value = commands.req_command(&call).unwrap_or_else(|error| panic!("{dialect:?}: {error}"));
            script::answer(command, None, &value).unwrap().reply
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
