//! Real servers whose whole contents can be restored. A step runs on a server that contains exactly the state before that
//! step, and its result is cached, so it runs once for each state.
//!
//! No test waits for time to pass. Each key has its remaining time in whole seconds, and advancing the time subtracts from
//! these.

use std::collections::HashMap;
use std::io::{BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use leasehold_testkit::Server;
use redis::{Parser, PushKind, Value};

use crate::redis::Request;

/// The servers' time at the start, in seconds since 1970. It lies so far ahead of a real server's clock that no key with an
/// absolute expiry of that time expires by itself.
const SERVERS_START: u64 = 4_102_444_800;

/// Longer than any recipe's lease, in milliseconds: a key with more time left has an absolute expiry.
const ABSOLUTE_FROM_MS: i64 = 30 * 24 * 3_600 * 1_000;

/// Returns all contents of one server, sorted by key.
const DUMP_ALL: &str = "local keys = redis.call('KEYS', '*')
    table.sort(keys)
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local all = {}
    for i, key in ipairs(keys) do
      if key ~= 'sandbox:clock' then
        local left = redis.call('PTTL', key)
        local dumped = key
        if redis.call('TYPE', key).ok == 'hash' then
          -- A copy whose fields are in order: equal hashes may have theirs in any.
          dumped = 'sandbox:sorted'
          local fields = redis.call('HKEYS', key)
          table.sort(fields)
          for _, field in ipairs(fields) do redis.call('HSET', dumped, field, redis.call('HGET', key, field)) end
        end
        all[#all + 1] = { key, left, now + left, redis.call('DUMP', dumped) }
        if dumped ~= key then redis.call('DEL', dumped) end
      end
    end
    return all";

/// A hash stays a list there, whose dump has the order in which its fields were set.
fn server() -> Server {
    let small = Server::builder().setting("hash-max-ziplist-value", "65536");
    small.setting("hash-max-ziplist-entries", "4096").on_socket().start()
}

/// Sets the local `virtual` for `leasehold_redis_protocol::VIRTUAL_TIME`.
pub const CLOCK: &str = "local virtual = tonumber(redis.call('GET', 'sandbox:clock'))\n";

/// When a key expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Expiry {
    Never,
    /// In this many seconds.
    In(u64),
    /// At this time of the servers' clocks, in milliseconds.
    At(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry {
    key: Vec<u8>,
    expiry: Expiry,
    dump: Vec<u8>,
}

/// Number of a server's contents: equal contents have the same one.
pub(super) type Contents = usize;

/// An empty server.
pub(super) const EMPTY: Contents = 0;

/// The result of a command.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    /// The server's contents afterwards.
    pub(super) after: Contents,
    /// The server's reply.
    pub(super) reply: Value,
    /// Messages published by the command, each with its channel.
    pub(super) messages: Vec<(String, Vec<u8>)>,
}

/// The state in which a command runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Start {
    /// The server.
    pub(super) node: usize,
    /// Its contents.
    pub(super) contents: Contents,
    /// Its clock: seconds since the start.
    pub(super) seconds: u64,
    /// Channels with a subscriber.
    pub(super) channels: Vec<String>,
}

/// The key of a cached result: contents, seconds, channels, command.
type CacheKey = (Contents, u64, Vec<String>, Request);

/// A pipeline that took longer is repeated: real time has passed, so keys may have lost a second.
pub(super) const STALLED: Duration = Duration::from_millis(400);

/// Real servers, with every state and every result seen so far.
pub struct Sandbox {
    connections: Vec<Connection>,
    known: Vec<Vec<Entry>>,
    numbers: HashMap<Vec<Entry>, Contents>,
    cache: HashMap<CacheKey, Outcome>,
    /// False: contents stay as they are between commands, and no result is cached. This confirms that restoring makes no
    /// difference.
    is_restoring: bool,
    _servers: Vec<Server>,
}

impl Sandbox {
    /// Starts this many servers. Panics if that fails, as every method does when a server is gone.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        let servers: Vec<_> = (0..nodes).map(|_| server()).collect();
        let connections = servers.iter().map(Connection::to).collect();
        let (known, numbers) = (vec![Vec::new()], HashMap::from([(Vec::new(), EMPTY)]));
        Self { connections, known, numbers, cache: HashMap::new(), is_restoring: true, _servers: servers }
    }

    /// Number of servers.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.connections.len()
    }

    /// Empties all servers. From now on no contents are restored, and each command continues from the one before.
    pub(super) fn stop_restoring(&mut self) {
        self.is_restoring = false;
        for connection in &mut self.connections {
            connection.pipeline(&[vec![b"FLUSHDB".to_vec()]]);
        }
    }

    /// From now on each command runs in the state that it names.
    pub(super) fn resume_restoring(&mut self) {
        self.is_restoring = true;
    }

    /// Runs one command. If the machine stalls meanwhile, the command runs again.
    pub(super) fn run(&mut self, start: &Start, request: &Request) -> Outcome {
        if !self.is_restoring {
            return self.run_uncached(start, request);
        }
        let key = (start.contents, start.seconds, start.channels.clone(), request.clone());
        if let Some(outcome) = self.cache.get(&key) {
            return outcome.clone();
        }
        let outcome = loop {
            let began = Instant::now();
            let outcome = self.run_uncached(start, request);
            if began.elapsed() < STALLED {
                break outcome;
            }
        };
        self.cache.insert(key, outcome.clone());
        outcome
    }

    fn run_uncached(&mut self, start: &Start, request: &Request) -> Outcome {
        let mut commands = Vec::new();
        if self.is_restoring {
            commands.push(command(&["FLUSHDB"]));
            commands.extend(self.known[start.contents].iter().map(restore));
        }
        let micros = (SERVERS_START + start.seconds) * 1_000_000;
        commands.push(command(&["SET", "sandbox:clock", &micros.to_string()]));
        let before = commands.len();
        let connection = &mut self.connections[start.node];
        commands.push(connection.arguments(request));
        commands.push(command(&["EVALSHA", connection.load(DUMP_ALL), "0"]));
        connection.subscribe_to(&start.channels);
        let (mut replies, messages) = connection.pipeline(&commands);
        let contents = entries(replies.pop().expect("a reply for each command"));
        let reply = replies.pop().expect("a reply for each command");
        for reply in &replies[..before] {
            assert!(!matches!(reply, Value::ServerError(_)), "the sandbox's server replied {reply:?}");
        }
        Outcome { after: self.number(contents), reply, messages }
    }

    /// Advances the time by `span` seconds, to second `until`.
    pub(super) fn pass(&mut self, node: usize, contents: Contents, span: u64, until: u64) -> Contents {
        if !self.is_restoring {
            self.expire_keys(node, contents, span);
        }
        let server_ms = (SERVERS_START + until) * 1_000;
        let left = self.known[contents].iter().filter_map(|entry| {
            let expiry = match entry.expiry {
                Expiry::In(seconds) if seconds <= span => return None,
                Expiry::At(ms) if ms <= server_ms => return None,
                Expiry::In(seconds) => Expiry::In(seconds - span),
                expiry => expiry,
            };
            Some(Entry { expiry, ..entry.clone() })
        });
        let left = left.collect();
        self.number(left)
    }

    fn expire_keys(&mut self, node: usize, contents: Contents, span: u64) {
        let expire = self.known[contents].iter().filter_map(|entry| {
            let Expiry::In(seconds) = entry.expiry else { return None };
            let ms = i64::try_from(seconds).unwrap_or(i64::MAX) - i64::try_from(span).unwrap_or(i64::MAX);
            Some(vec![b"PEXPIRE".to_vec(), entry.key.clone(), (ms * 1_000).to_string().into_bytes()])
        });
        let commands: Vec<_> = expire.collect();
        self.connections[node].pipeline(&commands);
    }

    /// Deletes all data of a server.
    pub(super) fn empty(&mut self, node: usize) -> Contents {
        if !self.is_restoring {
            self.connections[node].pipeline(&[command(&["FLUSHDB"])]);
        }
        EMPTY
    }

    fn number(&mut self, entries: Vec<Entry>) -> Contents {
        let next = self.known.len();
        *self.numbers.entry(entries).or_insert_with_key(|entries| {
            self.known.push(entries.clone());
            next
        })
    }
}

/// A connection on which replies and messages arrive in the order in which the server sent them.
struct Connection {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    parser: Parser,
    subscriptions: Vec<String>,
    /// The hash of each script that the server has loaded.
    loaded: HashMap<String, String>,
}

impl Connection {
    fn to(server: &Server) -> Self {
        let writer = UnixStream::connect(server.socket()).expect("the server listens");
        let reader = BufReader::new(writer.try_clone().expect("a socket"));
        let (parser, subscriptions, loaded) = (Parser::new(), Vec::new(), HashMap::new());
        let mut connection = Self { writer, reader, parser, subscriptions, loaded };
        connection.pipeline(&[command(&["HELLO", "3"])]);
        connection
    }

    /// The hash of a script, which it loads if necessary.
    fn load(&mut self, text: &str) -> &str {
        if !self.loaded.contains_key(text) {
            let (replies, _) = self.pipeline(&[command(&["SCRIPT", "LOAD", text])]);
            let hash = redis::from_redis_value(replies.into_iter().next().expect("a reply"))
                .expect("a script's hash");
            self.loaded.insert(text.to_owned(), hash);
        }
        &self.loaded[text]
    }

    fn arguments(&mut self, request: &Request) -> Vec<Vec<u8>> {
        match request {
            Request::Command(words) => words.clone(),
            Request::Script { text, keys, words } => {
                let mut arguments = command(&["EVALSHA", self.load(text.as_str()), &keys.to_string()]);
                arguments.extend(words.iter().cloned());
                arguments
            }
        }
    }

    fn subscribe_to(&mut self, channels: &[String]) {
        if self.subscriptions == channels {
            return;
        }
        let mut commands = Vec::new();
        if !self.subscriptions.is_empty() {
            commands.push(command(&["UNSUBSCRIBE"]));
        }
        for channel in channels {
            commands.push(command(&["SUBSCRIBE", channel]));
        }
        // Confirmations arrive as messages do, before the reply to PING.
        commands.push(command(&["PING"]));
        self.send(&commands);
        self.receive(1);
        self.subscriptions = channels.to_vec();
    }

    fn pipeline(&mut self, commands: &[Vec<Vec<u8>>]) -> (Vec<Value>, Vec<(String, Vec<u8>)>) {
        self.send(commands);
        self.receive(commands.len())
    }

    fn send(&mut self, commands: &[Vec<Vec<u8>>]) {
        let mut packed = Vec::new();
        for words in commands {
            packed.extend(redis::Cmd::new().arg(words).get_packed_command());
        }
        self.writer.write_all(&packed).expect("the server is there");
    }

    fn receive(&mut self, replies: usize) -> (Vec<Value>, Vec<(String, Vec<u8>)>) {
        let (mut received, mut messages) = (Vec::new(), Vec::new());
        while received.len() < replies {
            match self.parser.parse_value(&mut self.reader).expect("the server is there") {
                Value::Push { kind: PushKind::Message, data } => {
                    let (channel, message): (String, Vec<u8>) =
                        redis::from_redis_value(Value::Array(data)).expect("a message");
                    messages.push((channel, message));
                }
                Value::Push { .. } => {}
                value => received.push(value),
            }
        }
        (received, messages)
    }
}

fn command(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

fn restore(entry: &Entry) -> Vec<Vec<u8>> {
    let (ms, is_point) = match entry.expiry {
        Expiry::Never => (0, false),
        Expiry::In(seconds) => (seconds * 1_000, false),
        Expiry::At(ms) => (ms, true),
    };
    let mut words = command(&["RESTORE"]);
    words.extend([entry.key.clone(), ms.to_string().into_bytes(), entry.dump.clone()]);
    if is_point {
        words.push(b"ABSTTL".to_vec());
    }
    words
}

fn entries(dump: Value) -> Vec<Entry> {
    type LoadResult = (Vec<u8>, i64, i64, Vec<u8>);
    let seen: Vec<LoadResult> = redis::from_redis_value(dump).expect("what a server contains");
    let expiry = |left_ms: i64, end_ms: i64| match u64::try_from(left_ms) {
        Err(_) => Expiry::Never,
        // Absolute expiries are whole seconds here, and are read with an error of a millisecond or two.
        Ok(_) if left_ms > ABSOLUTE_FROM_MS => {
            Expiry::At((u64::try_from(end_ms).unwrap_or(0) + 500) / 1_000 * 1_000)
        }
        // Less than a second has passed since the command that set it.
        Ok(left) => Expiry::In(left.div_ceil(1_000)),
    };
    seen.into_iter().map(|(key, left, end, dump)| Entry { key, expiry: expiry(left, end), dump }).collect()
}
