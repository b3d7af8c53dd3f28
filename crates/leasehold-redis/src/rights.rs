//! The rights that leasehold's commands need, and which of them a user lacks.
//!
//! One list serves the check of every new connection, the explanation of a command that was refused, `doctor`, and the ACL rule in
//! docs/operations.md.

use leasehold_core::ClientId;
use leasehold_redis_protocol::{inbox_of, scratch_key};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, Value};

use super::error::{OWN_REFUSAL, explain, is_unknown, lacks_a_right};
use super::wire::{self, Wire};

/// A right that users need.
pub(super) struct Right {
    /// In the form of `ACL SETUSER`.
    pub(super) rule: &'static str,
    /// A command without effect: its key is missing, or it is refused after the check of the rights.
    pub(super) probe_command: &'static str,
    pub(super) purpose: Purpose,
}

/// The purpose of a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The scripts of locks.
    Locks,
    /// What a script may not do: to run scripts, and to subscribe.
    Connection,
    /// Locks with `replicas(n)`.
    Replicas,
    /// `ls`.
    Listing,
    /// Locks in a cluster.
    Cluster,
    /// Locks in a cluster with sharded channels.
    Sharded,
    /// Releases without a script, on servers that know the command.
    Deletes,
}

const fn right(rule: &'static str, probe_command: &'static str, purpose: Purpose) -> Right {
    Right { rule, probe_command, purpose }
}

/// The rights that leasehold's commands and scripts need. The ACL rule in docs/operations.md consists of them.
pub(super) const RIGHTS: [Right; 31] = [
    right("+get", "GET KEY", Purpose::Locks),
    right("+getex", "GETEX KEY", Purpose::Locks),
    right("+set", "SET KEY x XX", Purpose::Locks),
    right("+mget", "MGET KEY", Purpose::Locks),
    right("+exists", "EXISTS KEY", Purpose::Locks),
    right("+rename", "RENAME KEY KEY", Purpose::Locks),
    right("+pttl", "PTTL KEY", Purpose::Locks),
    right("+pexpire", "PEXPIRE KEY 1", Purpose::Locks),
    // Without effect: the key is missing, and NOMKSTREAM.
    right("+xadd", "XADD KEY NOMKSTREAM * t x", Purpose::Locks),
    right("+xtrim", "XTRIM KEY MAXLEN 0", Purpose::Locks),
    right("+del", "DEL KEY", Purpose::Locks),
    right("+pexpireat", "PEXPIREAT KEY 1", Purpose::Locks),
    // Refused after the check of the rights: a field without a value.
    right("+hset", "HSET KEY a b c", Purpose::Locks),
    right("+hdel", "HDEL KEY x", Purpose::Locks),
    right("+hmget", "HMGET KEY x", Purpose::Locks),
    right("+hgetall", "HGETALL KEY", Purpose::Locks),
    right("+time", "TIME", Purpose::Locks),
    right("+eval", "EVAL x 1", Purpose::Connection),
    right("+evalsha", "EVALSHA x 1", Purpose::Connection),
    right("+publish", "PUBLISH CHANNEL x", Purpose::Locks),
    right("+subscribe", "SUBSCRIBE CHANNEL", Purpose::Connection),
    right("+pubsub|numsub", "PUBSUB NUMSUB CHANNEL", Purpose::Locks),
    right("+wait", "WAIT 0 0", Purpose::Replicas),
    right("+scan", "SCAN 0 MATCH KEY COUNT 1", Purpose::Listing),
    right("+cluster|slots", "CLUSTER SLOTS", Purpose::Cluster),
    right("+asking", "ASKING", Purpose::Cluster),
    // Also needed on a server without sharded channels, because clients detect that by this command.
    right("+pubsub|shardnumsub", "PUBSUB SHARDNUMSUB CHANNEL", Purpose::Cluster),
    // The first one of this purpose shows whether the server knows the others.
    right("+ssubscribe", "SSUBSCRIBE CHANNEL", Purpose::Sharded),
    right("+spublish", "SPUBLISH CHANNEL x", Purpose::Sharded),
    right("+delifeq", "DELIFEQ KEY x", Purpose::Deletes),
    right("+delex", "DELEX KEY IFEQ x", Purpose::Deletes),
];

/// The patterns of keys and channels that go with them.
pub(super) const KEYS: &str = "~leasehold:*";
pub(super) const CHANNELS: &str = "&leasehold:*";

/// A missing right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MissingRight {
    pub(super) rule: &'static str,
    pub(super) purpose: Purpose,
}

impl MissingRight {
    pub(super) fn is_required(&self) -> bool {
        !matches!(self.purpose, Purpose::Replicas | Purpose::Listing | Purpose::Deletes)
    }
}

impl Right {
    /// Whether a script may run the command.
    fn is_for_scripts(&self) -> bool {
        !["+cluster|slots", "+asking", "+ssubscribe"].contains(&self.rule)
    }

    /// The probe's words, with this key and this channel.
    pub(super) fn words<'a>(&'a self, key: &'a str, channel: &'a str) -> Vec<&'a str> {
        let word = |word: &'a str| match word {
            "KEY" => key,
            "CHANNEL" => channel,
            other => other,
        };
        self.probe_command.split(' ').map(word).collect()
    }

    /// The rule that is missing, by the text of the probe's error: the command, its keys or its channels.
    pub(super) fn missing_rule(&self, error: &str) -> Option<&'static str> {
        let text = error.to_lowercase();
        if !lacks_a_right(&text) {
            return None;
        }
        Some(match &text {
            _ if text.contains("channel") => CHANNELS,
            _ if text.contains("access") && text.contains("key") => KEYS,
            _ => self.rule,
        })
    }
}

/// Runs each command of ARGV, which begins with the number of its words. Returns the text of its error, or an empty text.
///
/// A user may lack a right that only a script would need, so the commands run in one. Their keys are not declared, because the server
/// would refuse the script as a whole. None of them has an effect on a missing key.
const PROBES: &str = "\
local errors, at = {}, 1
while at <= #ARGV do
  local reply = redis.pcall(unpack(ARGV, at + 1, at + ARGV[at]))
  errors[#errors + 1] = type(reply) == 'table' and reply.err or ''
  at = at + 1 + ARGV[at]
end
return errors";

/// Whether this is the text of the script that tries rights, or the beginning of it that the server's log keeps.
pub(super) fn is_probe(text: &str) -> bool {
    text.get(..64).is_some_and(|beginning| PROBES.starts_with(beginning))
}

/// What a user needs who uses locks here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Server,
    ClusterNode,
}

impl Place {
    /// The rights that a script can try.
    fn probed(self) -> impl Iterator<Item = &'static Right> {
        RIGHTS.iter().filter(move |right| match right.purpose {
            Purpose::Locks => true,
            Purpose::Cluster | Purpose::Sharded => self == Self::ClusterNode && right.is_for_scripts(),
            _ => false,
        })
    }
}

fn probes(place: Place, key: &str, channel: &str) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(PROBES).arg(0);
    for right in place.probed() {
        let words = right.words(key, channel);
        command.arg(words.len()).arg(words);
    }
    command
}

/// What the script that tries rights has found.
#[derive(Clone, Debug, PartialEq)]
enum Verdict {
    /// The user may do all that was tried.
    Fine,
    /// The server has run no script at this moment, and this is why.
    Unknown(RedisError),
    /// What the user lacks, as a sentence with the remedy.
    Lacks(String),
    /// A proxy, or a managed server, does not let scripts do that.
    Restricted,
}

/// Of the server as a whole, and of this moment: they do not tell what scripts may do.
const PASSING: [&str; 10] = [
    "MOVED",
    "ASK",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "LOADING",
    "READONLY",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
];

/// What a script may not do anywhere else than at a real server.
const RESTRICTED: [&str; 3] = ["+time", "+publish", "+pubsub|numsub"];

/// Whether no real server would answer so.
fn is_of_a_proxy(right: &Right, error: &str) -> bool {
    let is_refused = RESTRICTED.contains(&right.rule) && !error.is_empty() && !is_unknown(error);
    is_refused || error.to_lowercase().contains("declared")
}

/// That scripts of all kinds are refused.
fn no_scripts() -> String {
    "the server allows no scripts (EVAL), which all locks need: allow them, or use another store: another Redis or Valkey server, \
     postgres: or sqlite:"
        .to_owned()
}

/// Whether the server refuses to run a script as a whole, for another reason than a right or its state.
fn is_refused_as_a_whole(error: &RedisError) -> bool {
    error.code().is_some_and(|code| !PASSING.contains(&code)) && !lacks_a_right(&error.to_string())
}

fn verdict(place: Place, answer: Result<Value, RedisError>, user: &str) -> Verdict {
    let errors = match answer.and_then(Value::extract_error) {
        Ok(value) => redis::from_redis_value::<Vec<String>>(value).unwrap_or_default(),
        Err(error) if lacks_a_right(&error.to_string()) => return Verdict::Lacks(grant(user, "+eval")),
        Err(error) if is_unknown(&error.to_string()) => return Verdict::Lacks(no_scripts()),
        Err(error) if is_refused_as_a_whole(&error) => return Verdict::Restricted,
        Err(error) => return Verdict::Unknown(error),
    };
    let (mut rules, mut unknown) = (Vec::new(), Vec::new());
    for (right, error) in place.probed().zip(&errors) {
        if let Some(rule) = right.missing_rule(error) {
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        } else if is_of_a_proxy(right, error) {
            return Verdict::Restricted;
        } else if is_unknown(error) && right.purpose == Purpose::Locks {
            unknown.push(right.rule.trim_start_matches('+').to_uppercase());
        }
    }
    if !unknown.is_empty() {
        let names = unknown.join(", ");
        return Verdict::Lacks(format!(
            "the server does not know {names}, which leasehold needs: it is renamed or disabled (rename-command), or the \
             server is older than Redis 6.2"
        ));
    }
    if rules.is_empty() { Verdict::Fine } else { Verdict::Lacks(grant(user, &rules.join(" "))) }
}

/// That the user lacks these rights, with the remedy.
pub(super) fn grant(user: &str, rules: &str) -> String {
    format!("the user lacks rights: ACL SETUSER {user} {rules} (docs/operations.md has the whole rule)")
}

/// Refuses a new connection whose user lacks a right, before it does half of something. A right to certain names of locks only shows
/// when one is used. Returns whether scripts are restricted. An error of this moment does not tell that: it is returned if it is not `known`.
pub(super) async fn check(
    connection: &mut MultiplexedConnection,
    place: Place,
    user: Option<&str>,
    known: Option<bool>,
) -> Result<bool, RedisError> {
    let questions = questions(place, &scratch_key(None), &inbox_of(ClientId::new(0), None));
    let answers = wire::pipeline(connection, questions, false).await;
    match judge(place, answers, user.unwrap_or("default")) {
        Verdict::Lacks(message) => Err((ErrorKind::Client, OWN_REFUSAL, message).into()),
        Verdict::Fine => Ok(false),
        Verdict::Unknown(error) => known.ok_or(error),
        Verdict::Restricted => Ok(true),
    }
}

/// Refuses a connection where scripts are restricted so much that none runs.
pub(super) async fn check_restricted(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    let mut script = redis::cmd("EVAL");
    script.arg("return redis.call('EXISTS', KEYS[1])").arg(1).arg(scratch_key(Some(0)));
    match script.query_async::<Value>(connection).await {
        Err(error) if is_refused_as_a_whole(&error) => {
            let message = format!("{}; it says: {}", no_scripts(), explain(&error));
            Err((ErrorKind::Client, OWN_REFUSAL, message).into())
        }
        Err(error) if error.code().is_none() => Err(error),
        _ => Ok(()),
    }
}

/// All that a script can try, and whether scripts may be called by their hash.
fn questions(place: Place, key: &str, channel: &str) -> Vec<Cmd> {
    let mut evalsha = redis::cmd("EVALSHA");
    // No script has this hash.
    evalsha.arg("0").arg(0);
    vec![probes(place, key, channel), evalsha]
}

/// What the answers to [`questions`] tell.
fn judge(place: Place, answers: Vec<Result<Value, RedisError>>, user: &str) -> Verdict {
    let mut answers = answers.into_iter();
    let by_script = answers.next().map_or(Verdict::Fine, |answer| verdict(place, answer, user));
    let evalsha = answers.next().and_then(|answer| answer.and_then(Value::extract_error).err());
    let is_denied = evalsha.is_some_and(|error| lacks_a_right(&error.to_string()));
    if by_script == Verdict::Fine && is_denied { Verdict::Lacks(grant(user, "+evalsha")) } else { by_script }
}

/// The error of a command that needs this right: if it is missing, the error names it.
pub(super) fn of_command(error: RedisError, rule: &str, user: Option<&str>) -> RedisError {
    let right = RIGHTS.iter().find(|right| right.rule == rule);
    match right.and_then(|right| right.missing_rule(&error.to_string())) {
        Some(rule) => (ErrorKind::Client, OWN_REFUSAL, grant(user.unwrap_or(ANY_USER), rule)).into(),
        None => error,
    }
}

/// In place of a user's name that is not known.
const ANY_USER: &str = "USER";

/// What a user lacks for this missing key and this channel, after a command was refused. `None` if all that is tried is allowed, for example
/// because the right was given back.
pub(super) async fn explain_refusal(
    connection: &mut Wire,
    place: Place,
    key: &str,
    channel: &str,
) -> Option<String> {
    match judge(place, connection.pipeline(questions(place, key, channel), false).await, ANY_USER) {
        Verdict::Lacks(what) => Some(what),
        Verdict::Fine | Verdict::Unknown(_) | Verdict::Restricted => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_spelling_of_a_refusal_names_what_is_missing() {
        let hdel = RIGHTS.iter().find(|right| right.rule == "+hdel").unwrap();
        for (error, rule) in [
            ("NOPERM this user has no permissions to run the 'hdel' command", Some("+hdel")),
            ("NOPERM User locks has no permissions to run the 'hdel' command", Some("+hdel")),
            ("The user executing the script can't run this command or subcommand", Some("+hdel")),
            ("ERR The user executing the script can't run this command or subcommand", Some("+hdel")),
            (
                "The user executing the script can't access at least one of the keys mentioned in the command arguments",
                Some(KEYS),
            ),
            ("NOPERM ACL failure in script: No permissions to access a key", Some(KEYS)),
            ("NOPERM this user has no permissions to access one of the keys used as arguments", Some(KEYS)),
            (
                "NOPERM ACL failure in script: User locks has no permissions to access a channel",
                Some(CHANNELS),
            ),
            (
                "The user executing the script can't publish to the channel mentioned in the command",
                Some(CHANNELS),
            ),
            ("READONLY You can't write against a read only replica.", None),
            ("", None),
        ] {
            assert_eq!(hdel.missing_rule(error), rule, "{error}");
        }
    }

    #[test]
    fn disabled_command_is_named() {
        let errors = Place::Server.probed().map(|right| {
            let text =
                if right.rule == "+hdel" { "ERR Unknown Redis command called from script" } else { "" };
            Value::BulkString(text.as_bytes().to_vec())
        });
        let found = verdict(Place::Server, Ok(Value::Array(errors.collect())), "me");
        let Verdict::Lacks(message) = found else { panic!("{found:?}") };
        assert!(message.contains("HDEL") && message.contains("rename-command"), "{message}");
    }

    /// What each of these answers to the script that tries rights, and what that tells.
    #[test]
    fn proxies_are_known_by_what_they_refuse() {
        let errors = |rule: &str, text: &str| {
            let errors = Place::Server.probed().map(|right| if right.rule == rule { text } else { "" });
            Ok(Value::Array(errors.map(|text| Value::BulkString(text.as_bytes().to_vec())).collect()))
        };
        let refused = |line: &str| redis::parse_redis_value(format!("-{line}\r\n").as_bytes());
        for (answer, expected) in [
            (errors("+time", "ERR This Redis command is not allowed from script"), Verdict::Restricted),
            (errors("+publish", "ERR command not allowed in a script"), Verdict::Restricted),
            (
                errors("+get", "ERR Script attempted to access keys that were not declared"),
                Verdict::Restricted,
            ),
            (
                errors("+get", "ERR Script attempted to access a non local key in a cluster node"),
                Verdict::Fine,
            ),
            (
                refused("ERR bad lua script for redis cluster, all the keys should be passed using KEYS"),
                Verdict::Restricted,
            ),
            (
                refused("NOPERM User locks has no permissions to run the 'eval' command"),
                Verdict::Lacks(grant("me", "+eval")),
            ),
            (refused("ERR unknown command 'EVAL', with args beginning with:"), Verdict::Lacks(no_scripts())),
        ] {
            assert_eq!(verdict(Place::Server, answer, "me"), expected);
        }
        for passing in [
            "LOADING Redis is loading the dataset in memory",
            "MOVED 5 127.0.0.1:1",
            "BUSY Redis is busy",
            "CLUSTERDOWN x",
        ] {
            let found = verdict(Place::Server, refused(passing), "me");
            assert!(matches!(found, Verdict::Unknown(_)), "{passing}: {found:?}");
        }
    }
}
