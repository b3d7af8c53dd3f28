//! Servers whose whole contents can be put back: every step is run by a real server, from exactly the state that it is to
//! be run from, and never twice from the same.
//!
//! Time does not pass here by waiting. Keys keep the whole seconds that they have left, and when time is to pass, it is
//! taken off these.

use std::collections::HashMap;
use std::io::{BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use leasehold_testkit::Server;
use redis::{Parser, PushKind, Value};

use crate::redis::Said;

/// The second of 1970 at which a sandbox's servers begin: so far ahead of any real server's clock that nothing ends by
/// itself which ends at a point of that time.
const SERVERS_START: u64 = 4_102_444_800;

/// More milliseconds than any recipe says: such a key ends at a point of time, not after a span.
const NO_SPAN_MS: i64 = 30 * 24 * 3_600 * 1_000;

/// Everything in one server, sorted by key.
const LOOK: &str = "local keys = redis.call('KEYS', '*')
    table.sort(keys)
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local all = {}
    for i, key in ipairs(keys) do
      if key ~= 'sandbox:clock' then
        local left = redis.call('PTTL', key)
        all[#all + 1] = { key, left, now + left, redis.call('DUMP', key) }
      end
    end
    return all";

/// Sets the local `now` in a script of which the server's clock is part.
pub const CLOCK: &str = "local now = tonumber(redis.call('GET', 'sandbox:clock'))\n";

/// When a key ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ends {
    Never,
    /// In so many seconds.
    In(u64),
    /// When the servers' clocks say so many milliseconds.
    At(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry {
    key: Vec<u8>,
    ends: Ends,
    dump: Vec<u8>,
}

/// The contents of one server, by number.
pub(super) type Contents = usize;

/// An empty server.
pub(super) const EMPTY: Contents = 0;

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    /// What the server contains now.
    pub(super) after: Contents,
    /// What it answered.
    pub(super) reply: Value,
    /// What was published meanwhile, and on which channel.
    pub(super) messages: Vec<(String, Vec<u8>)>,
}

/// Where a step begins.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Start {
    /// Which server.
    pub(super) node: usize,
    /// What it contains.
    pub(super) contents: Contents,
    /// What its clock says: seconds since the sandbox began.
    pub(super) seconds: u64,
    /// Who listens there.
    pub(super) channels: Vec<String>,
}

/// What was performed: from which contents, at which second, with whom listening, in which words.
type Performed = (Contents, u64, Vec<String>, Said);

/// A flight that took longer has let time pass that was not to pass: keys lose their seconds.
pub(super) const STALLED: Duration = Duration::from_millis(400);

/// Some real servers, and everything that they were ever seen to contain and to do.
pub struct Sandbox {
    wires: Vec<Wire>,
    known: Vec<Vec<Entry>>,
    numbers: HashMap<Vec<Entry>, Contents>,
    done: HashMap<Performed, Outcome>,
    /// Servers are left as they are between steps, and nothing is remembered: to see that it makes no difference.
    is_straight: bool,
    /// Ended with the sandbox.
    _servers: Vec<Server>,
}

impl Sandbox {
    /// A sandbox with so many servers. Panics where they can't be started, as everything here does when they are gone.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        let servers: Vec<_> = (0..nodes).map(|_| Server::on_socket()).collect();
        let wires = servers.iter().map(Wire::to).collect();
        let (known, numbers) = (vec![Vec::new()], HashMap::from([(Vec::new(), EMPTY)]));
        Self { wires, known, numbers, done: HashMap::new(), is_straight: false, _servers: servers }
    }

    /// How many servers there are.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.wires.len()
    }

    /// From now on nothing is put back: whoever steps goes straight on from empty servers.
    pub(super) fn go_straight(&mut self) {
        self.is_straight = true;
        for wire in &mut self.wires {
            wire.flight(&[vec![b"FLUSHDB".to_vec()]]);
        }
    }

    /// From now on every step begins where it is to begin.
    pub(super) fn go_back(&mut self) {
        self.is_straight = false;
    }

    /// Runs one step: again, should the machine have stood still meanwhile.
    pub(super) fn run(&mut self, start: &Start, said: &Said) -> Outcome {
        if self.is_straight {
            return self.really_run(start, said);
        }
        let key = (start.contents, start.seconds, start.channels.clone(), said.clone());
        if let Some(outcome) = self.done.get(&key) {
            return outcome.clone();
        }
        let outcome = loop {
            let began = Instant::now();
            let outcome = self.really_run(start, said);
            if began.elapsed() < STALLED {
                break outcome;
            }
        };
        self.done.insert(key, outcome.clone());
        outcome
    }

    fn really_run(&mut self, start: &Start, said: &Said) -> Outcome {
        let mut flight = Vec::new();
        if !self.is_straight {
            flight.push(line(&["FLUSHDB"]));
            flight.extend(self.known[start.contents].iter().map(restore));
        }
        let micros = (SERVERS_START + start.seconds) * 1_000_000;
        flight.push(line(&["SET", "sandbox:clock", &micros.to_string()]));
        let before = flight.len();
        flight.push(words(said));
        flight.push(line(&["EVAL", LOOK, "0"]));
        let wire = &mut self.wires[start.node];
        wire.listen(&start.channels);
        let (mut replies, messages) = wire.flight(&flight);
        let seen = entries(replies.pop().expect("a reply for each command"));
        let reply = replies.pop().expect("a reply for each command");
        for reply in &replies[..before] {
            assert!(!matches!(reply, Value::ServerError(_)), "the sandbox's server said {reply:?}");
        }
        Outcome { after: self.number(seen), reply, messages }
    }

    /// Lets time pass, up to this second of the sandbox.
    pub(super) fn pass(&mut self, node: usize, contents: Contents, span: u64, until: u64) -> Contents {
        if self.is_straight {
            self.really_pass(node, contents, span);
        }
        let server_ms = (SERVERS_START + until) * 1_000;
        let left = self.known[contents].iter().filter_map(|entry| {
            let ends = match entry.ends {
                Ends::In(seconds) if seconds <= span => return None,
                Ends::At(ms) if ms <= server_ms => return None,
                Ends::In(seconds) => Ends::In(seconds - span),
                ends => ends,
            };
            Some(Entry { ends, ..entry.clone() })
        });
        let left = left.collect();
        self.number(left)
    }

    fn really_pass(&mut self, node: usize, contents: Contents, span: u64) {
        let expire = self.known[contents].iter().filter_map(|entry| {
            let Ends::In(seconds) = entry.ends else { return None };
            let ms = i64::try_from(seconds).unwrap_or(i64::MAX) - i64::try_from(span).unwrap_or(i64::MAX);
            Some(vec![b"PEXPIRE".to_vec(), entry.key.clone(), (ms * 1_000).to_string().into_bytes()])
        });
        let flight: Vec<_> = expire.collect();
        self.wires[node].flight(&flight);
    }

    /// Lets a server lose everything.
    pub(super) fn empty(&mut self, node: usize) -> Contents {
        if self.is_straight {
            self.wires[node].flight(&[line(&["FLUSHDB"])]);
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

/// A connection on which answers and messages come in the order in which the server made them.
struct Wire {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    parser: Parser,
    listens: Vec<String>,
}

impl Wire {
    fn to(server: &Server) -> Self {
        let writer = UnixStream::connect(server.socket()).expect("the server listens");
        let reader = BufReader::new(writer.try_clone().expect("a socket"));
        let mut wire = Self { writer, reader, parser: Parser::new(), listens: Vec::new() };
        wire.flight(&[line(&["HELLO", "3"])]);
        wire
    }

    fn listen(&mut self, channels: &[String]) {
        if self.listens == channels {
            return;
        }
        let mut said = Vec::new();
        if !self.listens.is_empty() {
            said.push(line(&["UNSUBSCRIBE"]));
        }
        for channel in channels {
            said.push(line(&["SUBSCRIBE", channel]));
        }
        // What confirms them comes as messages do, before the next answer.
        said.push(line(&["PING"]));
        self.send(&said);
        self.hear(1);
        self.listens = channels.to_vec();
    }

    fn flight(&mut self, lines: &[Vec<Vec<u8>>]) -> (Vec<Value>, Vec<(String, Vec<u8>)>) {
        self.send(lines);
        self.hear(lines.len())
    }

    fn send(&mut self, lines: &[Vec<Vec<u8>>]) {
        let packed: Vec<u8> = lines
            .iter()
            .flat_map(|words| {
                let mut command = redis::Cmd::new();
                command.arg(words);
                command.get_packed_command()
            })
            .collect();
        self.writer.write_all(&packed).expect("the server is there");
    }

    fn hear(&mut self, replies: usize) -> (Vec<Value>, Vec<(String, Vec<u8>)>) {
        let (mut heard, mut messages) = (Vec::new(), Vec::new());
        while heard.len() < replies {
            match self.parser.parse_value(&mut self.reader).expect("the server is there") {
                Value::Push { kind: PushKind::Message, data } => {
                    let (channel, message): (String, Vec<u8>) =
                        redis::from_redis_value(Value::Array(data)).expect("a message");
                    messages.push((channel, message));
                }
                Value::Push { .. } => {}
                value => heard.push(value),
            }
        }
        (heard, messages)
    }
}

fn line(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

fn words(said: &Said) -> Vec<Vec<u8>> {
    match said {
        Said::Words(words) => words.clone(),
        Said::Script { text, keys, words } => {
            let mut said = line(&["EVAL", text.as_str(), &keys.to_string()]);
            said.extend(words.iter().cloned());
            said
        }
    }
}

fn restore(entry: &Entry) -> Vec<Vec<u8>> {
    let (ms, is_point) = match entry.ends {
        Ends::Never => (0, false),
        Ends::In(seconds) => (seconds * 1_000, false),
        Ends::At(ms) => (ms, true),
    };
    let mut words = line(&["RESTORE"]);
    words.extend([entry.key.clone(), ms.to_string().into_bytes(), entry.dump.clone()]);
    if is_point {
        words.push(b"ABSTTL".to_vec());
    }
    words
}

fn entries(looked: Value) -> Vec<Entry> {
    type Seen = (Vec<u8>, i64, i64, Vec<u8>);
    let seen: Vec<Seen> = redis::from_redis_value(looked).expect("what a server contains");
    let ends = |left_ms: i64, end_ms: i64| match u64::try_from(left_ms) {
        Err(_) => Ends::Never,
        // Points of time are whole seconds here, and are read a millisecond or two beside them.
        Ok(_) if left_ms > NO_SPAN_MS => Ends::At((u64::try_from(end_ms).unwrap_or(0) + 500) / 1_000 * 1_000),
        // What has passed since it was said is less than a second.
        Ok(left) => Ends::In(left.div_ceil(1_000)),
    };
    seen.into_iter().map(|(key, left, end, dump)| Entry { key, ends: ends(left, end), dump }).collect()
}
