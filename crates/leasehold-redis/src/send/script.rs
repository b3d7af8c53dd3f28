//! Script calls on the wire: by the script's hash, and by its text where the server does not know the script yet. No other file
//! knows EVALSHA and NOSCRIPT.

use std::io;
use std::mem::replace;

use leasehold_redis_protocol::{ScriptCall, decode_outbox, inbox_prefix};
use leasehold_store::ForeignScript;
use redis::{Cmd, RedisError, Value};

use crate::wire::Wire;

/// The reply to a command.
pub(crate) type Reply = Result<Value, RedisError>;

/// How a call names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Hash,
    /// The server then also knows the hash.
    Text,
}

/// A command that is sent to a server.
pub(crate) enum Request<'a> {
    /// A call of a script of leasehold.
    Script(ScriptCall),
    /// A call of another script.
    Foreign { script: &'static ForeignScript, keys: &'a [String], arguments: &'a [String] },
    /// Not a script.
    Command(Cmd),
}

impl Request<'_> {
    /// The hash of its script.
    fn hash(&self) -> Option<&str> {
        match self {
            Self::Script(call) => Some(call.sha1()),
            Self::Foreign { script, .. } => Some(script.hash()),
            Self::Command(_) => None,
        }
    }

    fn encode(&self, naming: Naming) -> Cmd {
        match self {
            Self::Script(call) => command(call, naming),
            Self::Foreign { script, keys, arguments } => {
                let size = keys.iter().chain(*arguments).map(String::len).sum();
                let parts = (keys.len() + arguments.len(), size);
                let mut command = begin(naming, (script.hash(), script.text), keys.len(), parts);
                command.arg(keys).arg(arguments);
                command
            }
            Self::Command(command) => command.clone(),
        }
    }
}

/// The command of a script call.
pub(crate) fn command(call: &ScriptCall, naming: Naming) -> Cmd {
    let parts = (call.keys().len() + call.args().len(), call.size());
    let mut command = begin(naming, (call.sha1(), call.text()), call.keys().len(), parts);
    for part in call.keys().chain(call.args()) {
        command.arg(part);
    }
    command
}

/// The beginning of the command. Its keys and arguments follow, which are so many, and of this size together.
fn begin(naming: Naming, (hash, text): (&str, &str), keys: usize, (parts, size): (usize, usize)) -> Cmd {
    let (word, script) = match naming {
        Naming::Hash => ("EVALSHA", hash),
        Naming::Text => ("EVAL", text),
    };
    let mut command = Cmd::with_capacity(3 + parts, word.len() + script.len() + 8 + size);
    command.arg(word).arg(script).arg(keys);
    command
}

/// Whether the server does not know the script.
fn is_noscript(reply: &Reply) -> bool {
    reply.as_ref().is_err_and(|error| error.code() == Some("NOSCRIPT"))
}

/// Makes a single call, without the lists of an [`Exchange`]: the usual case. A call that is encoded again is not kept meanwhile, which
/// keeps the future small.
pub(super) async fn run_one(connection: &mut Wire, encode: impl Fn() -> ScriptCall) -> Reply {
    let reply = connection.send(&command(&encode(), Naming::Hash)).await.and_then(Value::extract_error);
    let mut reply = if is_noscript(&reply) {
        let again = command(&encode(), Naming::Text);
        Box::pin(connection.send(&again)).await.and_then(Value::extract_error)
    } else {
        reply
    };
    if let Some(messages) = take_outbox(&mut reply) {
        Box::pin(publish(connection, messages)).await;
    }
    reply
}

/// Takes the messages out of the reply of a restricted script, if there are some.
fn take_outbox(reply: &mut Reply) -> Option<Vec<Cmd>> {
    // The usual replies are shorter lists, or none.
    let value = reply.as_ref().ok().filter(|value| matches!(value, Value::Array(list) if list.len() == 3))?;
    let (own, messages) = decode_outbox(value).ok()?;
    if messages.is_empty() {
        return None;
    }
    let publish = |(inbox, message): (Vec<u8>, Vec<u8>)| {
        let mut command = redis::cmd("PUBLISH");
        command.arg([inbox_prefix(None).as_bytes(), &inbox].concat()).arg(message);
        command
    };
    let (own, commands) = (own.clone(), messages.into_iter().map(publish).collect());
    *reply = Ok(own);
    Some(commands)
}

/// Publishes what scripts would have published.
async fn publish(connection: &mut Wire, messages: Vec<Cmd>) {
    for reply in connection.pipeline(messages, false).await {
        if let Err(error) = reply.and_then(Value::extract_error) {
            tracing::debug!(%error, "a message was not sent: its waiter asks");
        }
    }
}

/// Requests that go out in one pipeline, and again those whose script the server did not know.
#[derive(Default)]
pub(crate) struct Exchange<'a> {
    entries: Vec<Entry<'a>>,
    round: Round,
}

/// How the scripts of a pipeline are named.
#[derive(Clone, Copy, Default, PartialEq)]
enum Round {
    /// By their hashes.
    #[default]
    First,
    /// The first call of each script has its text: the server then knows it for the later ones.
    Second,
    /// All have their texts: between two calls, another client has let the server forget its scripts.
    Third,
}

/// The unit of a request that is repeated with any other one.
pub(super) const EVERY: usize = usize::MAX;

struct Entry<'a> {
    unit: usize,
    request: Request<'a>,
    reply: Option<Reply>,
}

impl<'a> Exchange<'a> {
    /// Requests that are repeated each for itself.
    pub(crate) fn of(requests: impl Iterator<Item = Request<'a>>) -> Self {
        let mut exchange = Self::default();
        requests.enumerate().for_each(|(unit, request)| exchange.push(unit, request));
        exchange
    }

    /// Appends a request. Those of one unit are repeated together.
    pub(crate) fn push(&mut self, unit: usize, request: Request<'a>) {
        self.entries.push(Entry { unit, request, reply: None });
    }

    /// Whether a request has no reply yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.entries.iter().any(|entry| entry.reply.is_none())
    }

    /// Sends the requests without a reply: at first all, and then those of units with a script that the server did not know.
    pub(crate) async fn send(&mut self, connection: &mut Wire, is_asking: bool) {
        let next = if self.round == Round::First { Round::Second } else { Round::Third };
        let round = replace(&mut self.round, next);
        let (mut commands, mut with_text) = (Vec::new(), Vec::new());
        for Entry { request, .. } in self.entries.iter().filter(|entry| entry.reply.is_none()) {
            let naming = match (round, request.hash()) {
                (Round::Second, Some(hash)) if !with_text.contains(&hash) => {
                    with_text.push(hash);
                    Naming::Text
                }
                (Round::Third, _) => Naming::Text,
                _ => Naming::Hash,
            };
            commands.push(request.encode(naming));
        }
        let mut replies = connection.pipeline(commands, is_asking).await.into_iter();
        let mut unknown = Vec::new();
        for entry in self.entries.iter_mut().filter(|entry| entry.reply.is_none()) {
            let reply = replies.next().unwrap_or_else(|| Err(missing()));
            if round != Round::Third && is_noscript(&reply) && unknown.last() != Some(&entry.unit) {
                unknown.push(entry.unit);
            }
            entry.reply = Some(reply);
        }
        let replies = self.entries.iter_mut().filter_map(|entry| entry.reply.as_mut());
        let messages: Vec<Cmd> = replies.filter_map(take_outbox).flatten().collect();
        if !messages.is_empty() {
            publish(connection, messages).await;
        }
        let is_repeated = |unit| unknown.contains(&unit) || unit == EVERY && !unknown.is_empty();
        let repeated = self.entries.iter_mut().filter(|entry| is_repeated(entry.unit));
        repeated.for_each(|entry| entry.reply = None);
    }

    /// Sends the requests, if need be three times. Returns the replies to them in order.
    pub(crate) async fn run(mut self, connection: &mut Wire, is_asking: bool) -> Vec<Reply> {
        while self.is_pending() {
            self.send(connection, is_asking).await;
        }
        self.into_replies()
    }

    /// The replies in the order of the requests.
    pub(crate) fn into_replies(self) -> Vec<Reply> {
        self.entries.into_iter().map(|entry| entry.reply.unwrap_or_else(|| Err(missing()))).collect()
    }
}

fn missing() -> RedisError {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the server sent fewer replies than commands").into()
}

#[cfg(test)]
mod tests {
    use leasehold_testkit::Server;

    use super::*;
    use crate::connections::config;

    static APPEND: ForeignScript = ForeignScript::new("return redis.call('APPEND', KEYS[1], ARGV[1])");
    static READ: ForeignScript = ForeignScript::new("return redis.call('GET', KEYS[1])");

    /// How often the server was called so.
    fn calls(server: &Server, command: &str) -> u64 {
        let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
    }

    /// Another client lets the server forget its scripts, between two calls of a pipeline.
    #[tokio::test]
    async fn script_that_is_forgotten_again_is_sent_again() {
        let server = Server::on_socket();
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
        let keys: [_; 2] = ["a", "b"].map(|key| vec![key.to_owned()]);
        let arguments = vec!["x".to_owned()];
        let append = |at: usize| Request::Foreign { script: &APPEND, keys: &keys[at], arguments: &arguments };
        let mut exchange = Exchange::default();
        exchange.push(0, append(0));
        exchange.push(EVERY, Request::Command(redis::cmd("SCRIPT").arg("FLUSH").to_owned()));
        exchange.push(1, append(1));
        let replies = exchange.run(&mut Wire::Limited(connection.into()), false).await;
        assert_eq!((&replies[0], &replies[2]), (&Ok(Value::Int(1)), &Ok(Value::Int(1))), "{replies:?}");
    }

    #[tokio::test]
    async fn units_whose_script_is_unknown_are_repeated_with_one_text_for_each_script() {
        let server = Server::on_socket();
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
        let mut wire = Wire::Limited(connection.into());
        let keys: [_; 3] = ["a", "b", "c"].map(|key| vec![key.to_owned()]);
        let arguments = vec!["x".to_owned()];
        let foreign = |script, at: usize| Request::Foreign { script, keys: &keys[at], arguments: &arguments };
        let plain = |word| Request::Command(redis::cmd("APPEND").arg("c").arg(word).to_owned());
        let mut exchange = Exchange::default();
        exchange.push(0, foreign(&APPEND, 0));
        exchange.push(0, foreign(&READ, 0));
        exchange.push(1, foreign(&APPEND, 1));
        exchange.push(2, plain("once"));
        exchange.push(EVERY, Request::Command(redis::cmd("DBSIZE")));
        let mut replies = exchange.run(&mut wire, false).await;
        let last = replies.pop().unwrap();
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        assert_eq!(replies, [Ok(Value::Int(1)), Ok(text("x")), Ok(Value::Int(1)), Ok(Value::Int(4))]);
        assert_eq!(last, Ok(Value::Int(3)), "it follows what was repeated, too");
        assert_eq!((calls(&server, "eval"), calls(&server, "evalsha"), calls(&server, "dbsize")), (2, 4, 2));
        // Now it knows both. A unit is repeated as a whole.
        server.run(&["SCRIPT", "FLUSH"]);
        let mut exchange = Exchange::default();
        exchange.push(0, plain("!"));
        exchange.push(0, foreign(&READ, 2));
        assert_eq!(exchange.run(&mut wire, false).await, [Ok(Value::Int(6)), Ok(text("once!!"))]);
    }
}
