//! Runs commands in the model and in the scripts on a real server, and compares the answers and pushes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Table, apply, apply_all};
use leasehold_core::{
    Acquire, Answer, ClientId, Command, Kind, Name, Now, Push, Renew, Reply, Resource, StoreTime, Token, View,
};
use leasehold_redis_protocol::{
    PLAIN_CHANNELS, Script, ScriptCall, ScriptVariant, VoteArgs, decode_answer, decode_push, decode_renewals,
    inbox_of, inbox_prefix, keys_of,
};
use redis::{Connection, ConnectionLike as _, PubSub};

use crate::store::histories::{CLIENTS, Step, client_id};

/// The clock of the test starts this far ahead of the server's, so that no key expires during the test.
const CLOCK_LEAD: Duration = Duration::from_secs(1_000 * 3_600);

/// Runs the scripts on a server, with a subscription to the inbox of each client.
pub(super) struct ScriptRunner<'c> {
    pub(super) commands: &'c mut Connection,
    inboxes: PubSub<'c>,
    /// SHA1 hashes of the loaded scripts.
    scripts: HashMap<Script, String>,
}

impl<'c> ScriptRunner<'c> {
    pub(super) fn new(commands: &'c mut Connection, inboxes: &'c mut Connection) -> Self {
        let mut runner = Self { commands, inboxes: inboxes.as_pubsub(), scripts: HashMap::new() };
        for script in Script::ALL {
            // The clock of the test replaces the server's. It is ahead, so that no key expires meanwhile.
            let channels = format!("{}local INBOX = '{}'\n", PLAIN_CHANNELS, inbox_prefix(None));
            let clock = "local now, floor = tonumber(ARGV[#ARGV - 1]), tonumber(ARGV[#ARGV])\n";
            let source = script.text(clock, &channels, "");
            let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(source).query(runner.commands).unwrap();
            runner.scripts.insert(script, sha);
        }
        for client in 0..CLIENTS {
            runner.subscribe(client_id(client));
        }
        runner.inboxes.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        runner
    }

    pub(super) fn subscribe(&mut self, client: ClientId) {
        self.inboxes.subscribe(inbox_of(client, None)).unwrap();
    }

    fn unsubscribe(&mut self, client: ClientId) {
        self.inboxes.unsubscribe(inbox_of(client, None)).unwrap();
    }

    pub(super) fn run(&mut self, resource: &Resource, command: &Command, now: Now) -> Answer {
        let Now { time: now, floor, .. } = now;
        let encoded = ScriptVariant::Server.encode(resource, command, VoteArgs::default());
        let mut call = self.begin(&encoded);
        call.arg(now.as_micros()).arg(floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        decode_answer(command, floor, &value)
            .unwrap_or_else(|error| panic!("{command:?} returned {value:?}: {error}"))
    }

    /// The call of a script. The time and the floor of the test's clock follow as arguments.
    fn begin(&self, call: &ScriptCall) -> redis::Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.scripts[&call.script()]).arg(call.keys().len());
        call.keys().chain(call.args()).for_each(|part| {
            command.arg(part);
        });
        command
    }

    pub(super) fn run_all(&mut self, attempts: &[(&Resource, &Arc<Acquire>)], now: Now) -> Vec<Answer> {
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

    /// `None` for a renewal that must be sent alone.
    pub(super) fn renew_all(&mut self, payload: &[(&Resource, Command)], now: Now) -> Vec<Option<Answer>> {
        let renewals = payload.iter().map(|(resource, command)| match command {
            Command::Renew(renew) => (*resource, renew),
            other => panic!("not a renewal: {other:?}"),
        });
        let renewals: Vec<_> = renewals.collect();
        let mut call = self.begin(&ScriptVariant::Server.encode_renewals(&renewals, VoteArgs::default()));
        call.arg(now.time.as_micros()).arg(now.floor.map_or(0, Token::get));
        let value = self.commands.req_command(&call).unwrap_or_else(|error| panic!("{payload:?}: {error}"));
        let commands = payload.iter().map(|(_, command)| command);
        decode_renewals(commands, now.floor, &value)
            .unwrap_or_else(|error| panic!("{payload:?}: {value:?}: {error}"))
    }

    /// Asserts that no key expires before the leases and waiters that it stores.
    fn check_expiry(&mut self, resource: &Resource, view: &View) {
        let leases = view.holders.iter().map(|holder| holder.expires_at);
        let last = leases.chain(view.waiters.iter().map(|waiter| waiter.deadline)).max();
        let Some(last) = last else { return };
        for key in keys_of(resource) {
            let ms: i64 = redis::cmd("PEXPIRETIME").arg(&key).query(self.commands).unwrap();
            let min_lifetime = u64::try_from(ms).is_ok_and(|ms| ms * 1_000 > last.as_micros());
            assert!(ms == -2 || min_lifetime, "{key} expires at {ms}, before {last:?}");
        }
    }

    /// The next push and its channel.
    fn next_push(&mut self) -> (String, Option<Push>) {
        let message = self.inboxes.get_message().expect("a push");
        (message.get_channel_name().to_owned(), decode_push(message.get_payload_bytes()).ok())
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
        let start = StoreTime::ZERO + wall_clock() + CLOCK_LEAD;
        let resources = resources.iter().map(|resource| (resource.clone(), Table::new())).collect();
        Self { runner, resources, now: Now::same(start), stepped_back: Duration::ZERO, absent: Vec::new() }
    }

    pub(super) fn step(&mut self, at: usize, step: &Step) {
        match step {
            // The server sweeps without a command.
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
        let mut pushes = Vec::new();
        let mut is_reachable = |client| !self.absent.contains(&client);
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let (resource, table) = &mut self.resources[at];
        let Ok(expected) = apply(table, context, command);
        let found = self.runner.run(resource, command, self.now);
        assert_eq!(found, expected, "after {command:?}");
        self.expect_pushes(&pushes, command);
        found.reply
    }

    pub(super) fn run_all(&mut self, attempts: &[Arc<Acquire>]) {
        let mut pushes = Vec::new();
        let mut is_reachable = |client| !self.absent.contains(&client);
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let tables = self.resources.iter_mut().map(|(_, table)| table);
        let mut steps: Vec<_> = tables.zip(attempts).collect();
        let Ok(expected) = apply_all(context, &mut steps);
        let resources = self.resources.iter().map(|(resource, _)| resource);
        let calls: Vec<_> = resources.zip(attempts).collect();
        let found = self.runner.run_all(&calls, self.now);
        assert_eq!(found, expected, "after {attempts:?}");
        self.expect_pushes(&pushes, &attempts);
        (0..attempts.len()).for_each(|at| self.inspect(at));
    }

    /// Like a client: all renewals in one command, then one by one those that it did not answer.
    pub(super) fn renew_all(&mut self, renewals: &[(usize, Renew)]) {
        let command = |(at, renew): &(usize, Renew)| (*at, Command::Renew(renew.clone()));
        let payload: Vec<_> = renewals.iter().map(command).collect();
        let calls: Vec<_> =
            payload.iter().map(|(at, command)| (&self.resources[*at].0, command.clone())).collect();
        let found = self.runner.renew_all(&calls, self.now);
        for ((at, command), found) in payload.iter().zip(&found) {
            let Some(found) = found else { continue };
            let mut pushes = Vec::new();
            let mut is_reachable = |client| !self.absent.contains(&client);
            let context =
                CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut pushes };
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
        for push in pushes.iter().filter(|push| !self.absent.contains(&push.to())) {
            let expected = (inbox_of(push.to(), None), Some(push.clone()));
            assert_eq!(self.runner.next_push(), expected, "after {command:?}");
        }
    }

    pub(super) fn end(self) {
        for client in self.absent {
            self.runner.subscribe(client);
        }
        // No further push has arrived: the next message is this one.
        let inbox = inbox_of(client_id(0), None);
        let heard: i64 =
            redis::cmd("PUBLISH").arg(&inbox).arg("the end").query(self.runner.commands).unwrap();
        assert_eq!(heard, 1);
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

/// Asserts that every key has an expiry, and that all are swept long after the last use.
fn check_swept(runner: &mut ScriptRunner<'_>, resource: &Resource, now: StoreTime) {
    for key in keys_of(resource) {
        let left: i64 = redis::cmd("PTTL").arg(&key).query(runner.commands).unwrap();
        assert!(left == -2 || left > 0, "{key} has no expiry");
    }
    runner.run(resource, &Command::Inspect, Now::same(now + Duration::from_secs(3_600)));
    runner.run(resource, &Command::Inspect, Now::same(now + Duration::from_secs(3 * 3_600)));
    for key in keys_of(resource) {
        let found: bool = redis::cmd("EXISTS").arg(&key).query(runner.commands).unwrap();
        assert!(!found, "{key} was not swept");
    }
}

/// Runs a test with the scripts on a server of its own.
pub(super) fn with_scripts(test: impl FnOnce(&mut ScriptRunner<'_>)) {
    let server = leasehold_testkit::Server::on_socket();
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

pub(super) fn wall_clock() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap()
}
