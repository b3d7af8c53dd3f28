//! Replies and pushes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquisition, Answer, ClientId, Command, Grant, GrantProof, HeadHint, Holder, Owner, Push, PushKind,
    QueueEntry, Queued, Refusal, Reply, StoreTime, Token, TokenRange, View,
};

use crate::encode::micros;
use crate::layout::{DIGEST_DIGITS, LAYOUT, TOKENS_PER_MS, token_time};
use crate::value::{ReplyValue, ValueRef};

/// The server sent a reply or a push that no script of this layout version produces.
///
/// Whether the command took effect is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError(&'static str);

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server sent a {} that is unknown to layout version {LAYOUT}", self.0)
    }
}

impl std::error::Error for ProtocolError {}

const UNKNOWN_REPLY: ProtocolError = ProtocolError("reply");
const UNKNOWN_PUSH: ProtocolError = ProtocolError("push");

/// Decodes the reply to a command. The usual reply to a release does not tell the time: [`Answer::at`] is then
/// [`StoreTime::ZERO`].
///
/// It does not decode error replies of the server (NOSCRIPT, MOVED, OOM and so on). The client library
/// reports these.
///
/// # Errors
///
/// [`ProtocolError`] for an unknown reply.
pub fn decode_answer<V: ReplyValue>(command: &Command, value: &V) -> Result<Answer, ProtocolError> {
    answer_of(command, value).ok_or(UNKNOWN_REPLY)
}

/// Decodes the reply to several renewals. Returns one answer per renewal, or `None` for a renewal that must be
/// sent separately.
///
/// # Errors
///
/// [`ProtocolError`] for an unknown reply.
pub fn decode_renewals<'a, V: ReplyValue>(
    commands: impl ExactSizeIterator<Item = &'a Command>,
    value: &V,
) -> Result<Vec<Option<Answer>>, ProtocolError> {
    let one = |(command, value): (&Command, &V)| match value.view() {
        ValueRef::Nil => Some(None),
        _ => answer_of(command, value).map(Some),
    };
    let answers: Option<Vec<_>> = match value.view() {
        ValueRef::List(values) if values.len() == commands.len() => commands.zip(values).map(one).collect(),
        ValueRef::Int(_) => commands.map(|command| one((command, value))).collect(),
        _ => None,
    };
    answers.ok_or(UNKNOWN_REPLY)
}

/// The digest in an inbox's name, and a message.
type Message = (Vec<u8>, Vec<u8>);

/// The reply to a [restricted](crate::ScriptVariant::Restricted) script call, and the messages that the client is to publish: for each the
/// digest in the name of an inbox, which [`inbox_prefix`](crate::inbox_prefix) completes, and the message.
///
/// ```
/// use leasehold_redis_protocol::{Value, decode_outbox};
///
/// let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec());
/// let outbox = Value::List(vec![bytes(b"digest"), bytes(b"message")]);
/// let reply = Value::List(vec![bytes(b"publish"), Value::Int(5), outbox]);
/// let outbox = vec![(b"digest".to_vec(), b"message".to_vec())];
/// assert_eq!(decode_outbox(&reply)?, (&Value::Int(5), outbox));
/// assert_eq!(decode_outbox(&Value::Int(5))?, (&Value::Int(5), vec![]), "nothing is to be published");
/// # Ok::<(), leasehold_redis_protocol::ProtocolError>(())
/// ```
///
/// # Errors
///
/// [`ProtocolError`] for an unknown list of messages.
pub fn decode_outbox<V: ReplyValue>(value: &V) -> Result<(&V, Vec<Message>), ProtocolError> {
    let ValueRef::List([mark, reply, outbox]) = value.view() else { return Ok((value, Vec::new())) };
    let ValueRef::Bytes(b"publish") = mark.view() else { return Ok((value, Vec::new())) };
    let ValueRef::List(outbox) = outbox.view() else { return Err(UNKNOWN_REPLY) };
    let message = |pair: &'_ [V]| match pair {
        [inbox, message] => match (inbox.view(), message.view()) {
            (ValueRef::Bytes(inbox), ValueRef::Bytes(message)) => Some((inbox.to_vec(), message.to_vec())),
            _ => None,
        },
        _ => None,
    };
    let messages: Option<Vec<_>> = outbox.chunks(2).map(message).collect();
    Ok((reply, messages.ok_or(UNKNOWN_REPLY)?))
}

/// A token that is further from the store's time than this is not believed before the store confirms it.
const FARTHEST_TOKEN: Duration = Duration::from_secs(24 * 3600);

/// Decodes a message from this client's inbox. Any user of the server may have sent it. The proof of a grant whose token is a day or
/// more from the store's time is left out: the client then asks the store, as after any other push that proves nothing.
///
/// # Errors
///
/// [`ProtocolError`] for an unknown message.
pub fn decode_push(client: ClientId, message: &[u8]) -> Result<Push, ProtocolError> {
    push_of(client, message).ok_or(UNKNOWN_PUSH)
}

fn answer_of<V: ReplyValue>(command: &Command, value: &V) -> Option<Answer> {
    match value.view() {
        ValueRef::Bytes(id) => plain_grant(command, id),
        ValueRef::Int(at) => short_answer(command, u64::try_from(at).ok()?),
        _ => {
            let list = Reader::of(value)?;
            Some(Answer { at: list.time(0)?, reply: decode_reply(command, &list)? })
        }
    }
}

/// The grant that a stream id stands for: the lease of the first lines, whose token it is. Its milliseconds are the time.
fn plain_grant(command: &Command, id: &[u8]) -> Option<Answer> {
    let Command::Acquire(acquire) = command else { return None };
    let (ms, sequence) = std::str::from_utf8(id).ok()?.split_once('-')?;
    let (ms, sequence): (u64, u64) = (ms.parse().ok()?, sequence.parse().ok()?);
    let token = Token::new(ms.checked_mul(TOKENS_PER_MS)?.checked_add(sequence)?)?;
    let tokens = TokenRange { first: token, last: token };
    let valid_for = Duration::from_micros(micros(acquire.ttl));
    let at = StoreTime::from_micros(ms.checked_mul(1_000)?);
    Some(Answer { at, reply: Reply::Granted(Grant { tokens, valid_for, is_plain: true }) })
}

/// The result that a number stands for.
fn short_answer(command: &Command, number: u64) -> Option<Answer> {
    let at = StoreTime::from_micros(number);
    match command {
        // The number of keys that were deleted.
        Command::Release(_) if number == 1 => Some(Answer { at: StoreTime::ZERO, reply: Reply::Released }),
        Command::Release(_) => Some(Answer { at, reply: Reply::Released }),
        Command::Renew(renew) if renew.reserve == 0 => {
            let valid_for = Duration::from_micros(micros(renew.ttl));
            Some(Answer { at, reply: Reply::Renewed { valid_for, tokens: None, contended: false } })
        }
        Command::Acquire(_) | Command::Renew(_) | Command::Inspect | Command::ForceRelease => None,
    }
}

/// How often a waiter checks whether another program still holds the key, because no push reports its release.
const FOREIGN_POLL: Duration = Duration::from_secs(1);

/// The answer where another program holds the key: for this many milliseconds, or without a limit.
fn foreign(command: &Command, at: StoreTime, left: Option<Duration>) -> Reply {
    match command {
        // The lease to replace was in the key.
        Command::Acquire(acquire) if acquire.replaces.is_some() => Reply::Refused(Refusal::NotHeld),
        Command::Acquire(acquire) if acquire.wait.is_some() => {
            let repoll_at = at + left.map_or(FOREIGN_POLL, |left| left.min(FOREIGN_POLL));
            Reply::Queued(Queued { is_head: true, repoll_at })
        }
        Command::Acquire(_) => Reply::Busy,
        _ => Reply::Foreign { expires_at: left.map(|left| at + left) },
    }
}

fn decode_reply<V: ReplyValue>(command: &Command, list: &Reader<'_, V>) -> Option<Reply> {
    Some(match list.number(1)? {
        1 => Reply::Granted(Grant { tokens: list.tokens(2)?, valid_for: list.span(4)?, is_plain: false }),
        2 => Reply::Queued(Queued { is_head: list.flag(2)?, repoll_at: list.time(3)? }),
        3 => Reply::Busy,
        4 => Reply::Cancelled,
        5 => Reply::QueueFull,
        6 => Reply::Refused(match (list.number(2)?, list.small(3)?) {
            (1, capacity) => Refusal::Weight { capacity },
            (2, in_use) => Refusal::Capacity { in_use },
            (3, held) => Refusal::HeavierReentry { held },
            (4, _) => Refusal::NotHeld,
            _ => return None,
        }),
        7 => {
            let tokens = if list.number(4)? == 0 { None } else { Some(list.tokens(4)?) };
            Reply::Renewed { valid_for: list.span(2)?, contended: list.flag(3)?, tokens }
        }
        8 => Reply::NotHeld,
        9 => Reply::Dequeued,
        10 => Reply::View(View {
            capacity: list.small(2)?,
            in_use: list.small(3)?,
            last_token: Token::new(list.number(4)?),
            holders: decode_holders(&list.list(5)?)?,
            waiters: list.list(6)?.each(decode_waiter)?,
        }),
        11 => Reply::Forced(decode_holders(&list.list(2)?)?),
        12 => Reply::Abstains(list.time(2)?),
        13 => foreign(command, list.time(0)?, list.number(2).map(Duration::from_millis)),
        _ => return None,
    })
}

fn decode_holders<V: ReplyValue>(list: &Reader<'_, V>) -> Option<Vec<Holder>> {
    let mut holders = list.each(|holder| {
        let is_named = holder.flag(1)?;
        Some(Holder {
            acquisition: holder.acquisition(0)?,
            owner: if is_named { Some(Owner::new(&holder.text(2)?)) } else { None },
            weight: holder.small(3)?,
            token: Token::new(holder.number(4)?)?,
            granted_at: holder.time(5)?,
            expires_at: holder.time(6)?,
            retained: holder.flag(7)?,
            metadata: holder.text(8)?,
        })
    })?;
    holders.sort_by_key(|holder| (holder.token, holder.acquisition));
    Some(holders)
}

fn decode_waiter<V: ReplyValue>(waiter: &Reader<'_, V>) -> Option<QueueEntry> {
    Some(QueueEntry {
        acquisition: waiter.acquisition(0)?,
        weight: waiter.small(1)?,
        since: waiter.time(2)?,
        deadline: waiter.time(3)?,
        skipped: waiter.flag(4)?,
        metadata: waiter.text(5)?,
    })
}

/// Reads a list in a reply by index.
struct Reader<'a, V>(&'a [V]);

impl<'a, V: ReplyValue> Reader<'a, V> {
    fn of(value: &'a V) -> Option<Self> {
        match value.view() {
            ValueRef::List(list) => Some(Self(list)),
            _ => None,
        }
    }

    fn list(&self, at: usize) -> Option<Self> {
        Self::of(self.0.get(at)?)
    }

    fn each<T>(&self, read: impl Fn(&Reader<'_, V>) -> Option<T>) -> Option<Vec<T>> {
        self.0.iter().map(|value| read(&Reader::of(value)?)).collect()
    }

    /// A number that is 0 or 1.
    fn flag(&self, at: usize) -> Option<bool> {
        match self.number(at)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn number(&self, at: usize) -> Option<u64> {
        match self.0.get(at)?.view() {
            ValueRef::Int(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    fn small(&self, at: usize) -> Option<u32> {
        u32::try_from(self.number(at)?).ok()
    }

    fn bytes(&self, at: usize) -> Option<&'a [u8]> {
        match self.0.get(at)?.view() {
            ValueRef::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    fn text(&self, at: usize) -> Option<Arc<str>> {
        Some(Arc::from(std::str::from_utf8(self.bytes(at)?).ok()?))
    }

    fn time(&self, at: usize) -> Option<StoreTime> {
        self.number(at).map(StoreTime::from_micros)
    }

    fn span(&self, at: usize) -> Option<Duration> {
        self.number(at).map(Duration::from_micros)
    }

    fn tokens(&self, at: usize) -> Option<TokenRange> {
        TokenRange::new(self.number(at)?, self.number(at + 1)?)
    }

    fn acquisition(&self, at: usize) -> Option<Acquisition> {
        decode_acquisition(self.bytes(at)?)
    }
}

fn decode_acquisition(bytes: &[u8]) -> Option<Acquisition> {
    let (client, sequence) = bytes.split_at_checked(16)?;
    Some(Acquisition {
        client: ClientId::new(u128::from_be_bytes(client.try_into().ok()?)),
        sequence: u64::from_be_bytes(sequence.try_into().ok()?),
    })
}

/// Kind, sequence number and four numbers, as packed by `struct.pack('>Bc8dddd')`; of a grant also a SHA-1 in hexadecimal digits.
fn push_of(client: ClientId, message: &[u8]) -> Option<Push> {
    let (kind, rest) = message.split_first()?;
    let (sequence, rest) = rest.split_first_chunk()?;
    let mut numbers = [0; 4];
    let (packed, proof) = rest.split_at_checked(8 * numbers.len())?;
    for (number, bytes) in numbers.iter_mut().zip(packed.chunks_exact(8)) {
        *number = whole(f64::from_be_bytes(bytes.try_into().ok()?))?;
    }
    let [at, a, b, c] = numbers;
    let at = StoreTime::from_micros(at);
    let kind = match kind {
        1 => {
            let tokens = TokenRange::new(a, b)?;
            let proof = decode_proof(proof)?;
            let grant = Grant { tokens, valid_for: Duration::from_micros(c), is_plain: false };
            let is_far = [tokens.first, tokens.last].into_iter().any(|token| is_far(token, at));
            PushKind::Granted(grant, if is_far { GrantProof::NONE } else { proof })
        }
        2 => PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(a) }),
        3 => PushKind::Revoked,
        4 => PushKind::Contended,
        _ => return None,
    };
    let acquisition = Acquisition { client, sequence: u64::from_be_bytes(*sequence) };
    Some(Push::new(acquisition, at, kind))
}

/// The first 16 digits are the proof.
fn decode_proof(digits: &[u8]) -> Option<GrantProof> {
    // A number may also have a sign.
    let is_digest = digits.len() == DIGEST_DIGITS && digits.iter().all(u8::is_ascii_hexdigit);
    let proof = std::str::from_utf8(digits.get(..16)?).ok().filter(|_| is_digest)?;
    Some(GrantProof::new(u64::from_str_radix(proof, 16).ok()?.to_be_bytes()))
}

/// Whether the token is a day or more from the store's time.
fn is_far(token: Token, at: StoreTime) -> bool {
    let time = token_time(token);
    time.since(at).max(at.since(time)) >= FARTHEST_TOKEN
}

/// Converts a double to an integer below 2^53.
fn whole(number: f64) -> Option<u64> {
    let is_whole = (0.0..9_007_199_254_740_992.0).contains(&number) && number.fract() == 0.0;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
    is_whole.then_some(number as u64)
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Release, Renew, WaitFor};

    use super::*;
    use crate::value::Value;

    const ID: Acquisition = Acquisition { client: ClientId::new(0x0102), sequence: 3 };

    fn id() -> Vec<u8> {
        [0x0102_u128.to_be_bytes().as_slice(), &3_u64.to_be_bytes()].concat()
    }

    fn acquire(reserve: u32) -> Command {
        Command::from(Acquire { reserve, ..Acquire::exclusive(ID, Duration::from_secs(10)) })
    }

    fn renew(reserve: u32) -> Command {
        Command::Renew(Renew { reserve, ..Renew::to(ID, Duration::from_secs(10)) })
    }

    fn numbers(numbers: &[i64]) -> Value {
        Value::List(numbers.iter().copied().map(Value::Int).collect())
    }

    fn tokens(first: u64, last: u64) -> TokenRange {
        TokenRange { first: Token::new(first).unwrap(), last: Token::new(last).unwrap() }
    }

    fn reply(command: &Command, value: &Value) -> Result<Reply, ProtocolError> {
        decode_answer(command, value).map(|answer| answer.reply)
    }

    #[test]
    fn usual_answers_are_an_id_or_a_number() {
        let valid_for = Duration::from_secs(10);
        let id = Value::Bytes(b"50-3".to_vec());
        let tokens = tokens(50 * 2_048 + 3, 50 * 2_048 + 3);
        let granted = Answer {
            at: StoreTime::from_micros(50_000),
            reply: Reply::Granted(Grant { tokens, valid_for, is_plain: true }),
        };
        assert_eq!(decode_answer(&acquire(0), &id), Ok(granted));
        let renewed = Reply::Renewed { valid_for, tokens: None, contended: false };
        assert_eq!(reply(&renew(0), &Value::Int(50)), Ok(renewed));
        let release = Command::Release(Release::now(ID));
        for (number, at) in [(50, 50), (1, 0)] {
            let released = Answer { at: StoreTime::from_micros(at), reply: Reply::Released };
            assert_eq!(decode_answer(&release, &Value::Int(number)), Ok(released));
        }
        for command in [acquire(0), renew(1), Command::Inspect, Command::ForceRelease] {
            assert_eq!(reply(&command, &Value::Int(50)), Err(UNKNOWN_REPLY), "{command:?}");
        }
        for command in [renew(0), release, Command::Inspect] {
            assert_eq!(reply(&command, &id), Err(UNKNOWN_REPLY), "{command:?}");
        }
    }

    #[test]
    fn key_of_another_program_is_looked_at_again() {
        let waits = |ttl_ms: i64| {
            let wait = Some(WaitFor { entry_ttl: Duration::from_secs(9), max_queue: 9 });
            let acquire = Acquire { wait, ..Acquire::exclusive(ID, Duration::from_secs(10)) };
            reply(&Command::from(acquire), &numbers(&[5, 13, ttl_ms]))
        };
        let queued = |at| Reply::Queued(Queued { is_head: true, repoll_at: StoreTime::from_micros(at) });
        assert_eq!(waits(7), Ok(queued(7_005)));
        assert_eq!(waits(9_000), Ok(queued(1_000_005)), "it may be released before it expires");
        assert_eq!(waits(-1), Ok(queued(1_000_005)));
        assert_eq!(reply(&acquire(0), &numbers(&[5, 13, -1])), Ok(Reply::Busy));
        for wait in [None, Some(WaitFor { entry_ttl: Duration::from_secs(9), max_queue: 9 })] {
            let exchange =
                Acquire { wait, replaces: Some(2), ..Acquire::exclusive(ID, Duration::from_secs(10)) };
            let refused = reply(&Command::from(exchange), &numbers(&[5, 13, -1]));
            assert_eq!(refused, Ok(Reply::Refused(Refusal::NotHeld)), "the lease was in the key");
        }
        let foreign = |expires_at| Ok(Reply::Foreign { expires_at });
        assert_eq!(reply(&Command::Inspect, &numbers(&[5, 13, -1])), foreign(None));
        let expires_at = Some(StoreTime::from_micros(2_005));
        assert_eq!(reply(&Command::ForceRelease, &numbers(&[5, 13, 2])), foreign(expires_at));
    }

    #[test]
    fn every_numbered_reply_is_decoded() {
        let span = Duration::from_micros;
        let time = StoreTime::from_micros;
        let renewed = |tokens, contended| Reply::Renewed { valid_for: span(9), tokens, contended };
        let expected = [
            (
                numbers(&[5, 1, 6, 8, 9]),
                Reply::Granted(Grant { tokens: tokens(6, 8), valid_for: span(9), is_plain: false }),
            ),
            (numbers(&[5, 2, 1, 9]), Reply::Queued(Queued { is_head: true, repoll_at: time(9) })),
            (numbers(&[5, 2, 0, 9]), Reply::Queued(Queued { is_head: false, repoll_at: time(9) })),
            (numbers(&[5, 3]), Reply::Busy),
            (numbers(&[5, 4]), Reply::Cancelled),
            (numbers(&[5, 5]), Reply::QueueFull),
            (numbers(&[5, 6, 1, 7]), Reply::Refused(Refusal::Weight { capacity: 7 })),
            (numbers(&[5, 6, 2, 7]), Reply::Refused(Refusal::Capacity { in_use: 7 })),
            (numbers(&[5, 6, 3, 7]), Reply::Refused(Refusal::HeavierReentry { held: 7 })),
            (numbers(&[5, 6, 4, 0]), Reply::Refused(Refusal::NotHeld)),
            (numbers(&[5, 7, 9, 1, 0, 0]), renewed(None, true)),
            (numbers(&[5, 7, 9, 0, 6, 8]), renewed(Some(tokens(6, 8)), false)),
            (numbers(&[5, 8]), Reply::NotHeld),
            (numbers(&[5, 12, 9]), Reply::Abstains(time(9))),
        ];
        for (value, reply) in expected {
            let answer = decode_answer(&acquire(0), &value);
            assert_eq!(answer, Ok(Answer { at: time(5), reply }), "{value:?}");
        }
    }

    fn holder(token: i64, owner: Option<&str>, retained: i64) -> Value {
        let text = |text: &str| Value::Bytes(text.as_bytes().to_vec());
        let is_named = i64::from(owner.is_some());
        let [is_named, weight, token, granted, expires, retained] =
            [is_named, 4, token, 6, 7, retained].map(Value::Int);
        let (id, owner) = (Value::Bytes(id()), text(owner.unwrap_or_default()));
        Value::List(vec![id, is_named, owner, weight, token, granted, expires, retained, text("{}")])
    }

    fn waiter(skipped: i64) -> Value {
        let [weight, since, deadline, skipped] = [1, 2, 3, skipped].map(Value::Int);
        let metadata = Value::Bytes(b"[]".to_vec());
        Value::List(vec![Value::Bytes(id()), weight, since, deadline, skipped, metadata])
    }

    fn view(last_token: i64, holders: Vec<Value>, waiters: Vec<Value>) -> Value {
        let [at, number, capacity, in_use, last] = [5, 10, 8, 4, last_token].map(Value::Int);
        Value::List(vec![at, number, capacity, in_use, last, Value::List(holders), Value::List(waiters)])
    }

    #[test]
    fn view_lists_holders_by_token_and_waiters_in_order() {
        let decoded = |token, owner: Option<&str>, retained| Holder {
            acquisition: ID,
            owner: owner.map(Owner::new),
            weight: 4,
            token: Token::new(token).unwrap(),
            granted_at: StoreTime::from_micros(6),
            expires_at: StoreTime::from_micros(7),
            retained,
            metadata: Arc::from("{}"),
        };
        let queue_entry = |skipped| QueueEntry {
            acquisition: ID,
            weight: 1,
            since: StoreTime::from_micros(2),
            deadline: StoreTime::from_micros(3),
            skipped,
            metadata: Arc::from("[]"),
        };
        let (me, nobody) = (holder(12, Some("me"), 0), holder(11, None, 1));
        let value = view(0, vec![me.clone(), nobody.clone()], vec![waiter(1), waiter(0)]);
        let holders = vec![decoded(11, None, true), decoded(12, Some("me"), false)];
        let waiters = vec![queue_entry(true), queue_entry(false)];
        let expected = View { capacity: 8, in_use: 4, last_token: None, holders: holders.clone(), waiters };
        assert_eq!(reply(&Command::Inspect, &value), Ok(Reply::View(expected)));
        let Ok(Reply::View(empty)) = reply(&Command::Inspect, &view(9, vec![], vec![])) else {
            panic!("no view")
        };
        assert_eq!((empty.last_token, empty.holders.len(), empty.waiters.len()), (Token::new(9), 0, 0));
        let forced = Value::List(vec![Value::Int(5), Value::Int(11), Value::List(vec![me, nobody])]);
        assert_eq!(reply(&Command::ForceRelease, &forced), Ok(Reply::Forced(holders)));
    }

    /// Copies of a reply in which one part is missing, has another type, or is out of range.
    fn damaged(value: &Value) -> Vec<Value> {
        let parts = match value {
            Value::Nil => return Vec::new(),
            Value::Int(_) => return vec![Value::Nil, Value::Int(-1)],
            Value::Bytes(_) => return vec![Value::Nil, Value::Bytes(vec![0xFF])],
            Value::List(parts) => parts,
        };
        let mut copies = vec![Value::Nil];
        // A list of holders or waiters may have any length.
        if !parts.iter().all(|part| matches!(part, Value::List(_))) {
            copies.push(Value::List(parts[..parts.len() - 1].to_vec()));
        }
        for (at, part) in parts.iter().enumerate() {
            copies.extend(damaged(part).into_iter().map(|part| {
                let mut parts = parts.clone();
                parts[at] = part;
                Value::List(parts)
            }));
        }
        copies
    }

    #[test]
    fn reply_with_a_missing_or_invalid_part_is_an_error() {
        let holders = vec![holder(12, Some("me"), 0), holder(11, Some("you"), 1)];
        let replies = [
            numbers(&[5, 1, 6, 8, 9]),
            numbers(&[5, 2, 1, 9]),
            numbers(&[5, 3]),
            numbers(&[5, 6, 1, 7]),
            numbers(&[5, 7, 9, 1, 6, 8]),
            view(9, holders.clone(), vec![waiter(0), waiter(1)]),
            Value::List(vec![Value::Int(5), Value::Int(11), Value::List(holders)]),
            numbers(&[5, 12, 9]),
        ];
        for value in replies {
            assert!(reply(&acquire(0), &value).is_ok(), "{value:?}");
            for damaged in damaged(&value) {
                assert_eq!(reply(&acquire(0), &damaged), Err(UNKNOWN_REPLY), "{damaged:?}");
            }
        }
    }

    #[test]
    fn unknown_replies_are_errors() {
        let values = [
            Value::Nil,
            Value::Int(-1),
            Value::Bytes(b"OK".to_vec()),
            Value::Bytes(b"4398046511104-0".to_vec()),
            numbers(&[]),
            numbers(&[5]),
            numbers(&[5, 14]),
            numbers(&[5, 1, 6]),
            numbers(&[5, 1, 0, 8, 9]),
            numbers(&[5, 2, 2, 9]),
            numbers(&[5, 6, 5, 0]),
            numbers(&[5, 7, 9, 2, 0, 0]),
            numbers(&[5, 6, 1, 1 << 32]),
        ];
        for value in values {
            assert_eq!(reply(&acquire(0), &value), Err(UNKNOWN_REPLY), "{value:?}");
        }
        assert_eq!(UNKNOWN_REPLY.to_string(), "the server sent a reply that is unknown to layout version 4");
    }

    #[test]
    fn renewals_that_must_be_sent_alone_are_none() {
        let commands = [renew(0), renew(0)];
        let decode = |value: &Value| decode_renewals(commands.iter(), value);
        let one = decode_answer(&commands[0], &Value::Int(5)).unwrap();
        assert_eq!(decode(&Value::Int(5)), Ok(vec![Some(one.clone()), Some(one.clone())]));
        let mixed = Value::List(vec![Value::Nil, Value::Int(5)]);
        assert_eq!(decode(&mixed), Ok(vec![None, Some(one)]));
        assert_eq!(decode(&Value::List(vec![Value::Nil])), Err(UNKNOWN_REPLY));
        assert_eq!(decode(&Value::Nil), Err(UNKNOWN_REPLY));
    }

    /// A message from the inbox of the client, with a proof if it is a grant.
    fn message(kind: u8, numbers: [f64; 4]) -> Vec<u8> {
        let mut message = vec![kind];
        message.extend(3_u64.to_be_bytes());
        numbers.iter().for_each(|number| message.extend(number.to_be_bytes()));
        if kind == 1 {
            message.extend(b"0123456789abcdef0123456789abcdef01234567");
        }
        message
    }

    fn decoded(message: &[u8]) -> Result<Push, ProtocolError> {
        decode_push(ID.client, message)
    }

    #[test]
    fn truncated_push_is_an_error() {
        for kind in 1..=4 {
            let message = message(kind, [5.0, 6.0, 8.0, 9.0]);
            for length in 0..message.len() {
                assert_eq!(decoded(&message[..length]), Err(UNKNOWN_PUSH), "{kind}, {length} bytes");
            }
        }
    }

    #[test]
    fn pushes_are_decoded() {
        let push = |kind| Push::new(ID, StoreTime::from_micros(5), kind);
        let grant = Grant { tokens: tokens(6, 8), valid_for: Duration::from_micros(9), is_plain: false };
        let proof = GrantProof::new([0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
        let head = HeadHint { repoll_at: StoreTime::from_micros(6) };
        for (kind, expected) in [
            (1, PushKind::Granted(grant, proof)),
            (2, PushKind::Next(head)),
            (3, PushKind::Revoked),
            (4, PushKind::Contended),
        ] {
            assert_eq!(decoded(&message(kind, [5.0, 6.0, 8.0, 9.0])), Ok(push(expected)));
        }
        let refused = [
            Vec::new(),
            message(5, [5.0, 6.0, 8.0, 9.0]),
            message(1, [5.0, 0.0, 8.0, 9.0]),
            message(3, [-5.0, 0.0, 0.0, 0.0]),
            message(3, [f64::NAN, 0.0, 0.0, 0.0]),
            message(3, [0.5, 0.0, 0.0, 0.0]),
            message(3, [f64::from(1 << 27) * f64::from(1 << 26), 0.0, 0.0, 0.0]),
            [&message(1, [5.0, 6.0, 8.0, 9.0])[..41], b"no hexadecimal of a digest of 40 digits!"].concat(),
            [&message(1, [5.0, 6.0, 8.0, 9.0])[..41], b"+123456789abcdef0123456789abcdef01234567"].concat(),
            [&message(1, [5.0, 6.0, 8.0, 9.0])[..41], b"0123456789abcdef0123456789abcdef0123456!"].concat(),
            [&message(1, [5.0, 6.0, 8.0, 9.0])[..41], b"0123456789abcdef"].concat(),
        ];
        for message in refused {
            assert_eq!(decoded(&message), Err(UNKNOWN_PUSH), "{message:?}");
        }
    }

    #[test]
    fn grant_whose_token_is_a_day_from_the_stores_time_proves_nothing() {
        const DAY_MS: u64 = 24 * 3_600_000;
        let now_ms = 1_700_000_000_000;
        let is_proven = |first_ms: u64, last_ms: u64| {
            #[allow(clippy::cast_precision_loss, reason = "they are below 2^53")]
            let [at, first, last] = [now_ms * 1_000, first_ms * TOKENS_PER_MS, last_ms * TOKENS_PER_MS]
                .map(|number| number as f64);
            match decoded(&message(1, [at, first, last, 9.0])) {
                Ok(Push { kind: PushKind::Granted(_, proof), .. }) => proof != GrantProof::NONE,
                other => panic!("{other:?}"),
            }
        };
        assert!(is_proven(now_ms, now_ms));
        assert!(is_proven(now_ms - DAY_MS + 1, now_ms + DAY_MS - 1));
        assert!(!is_proven(now_ms - DAY_MS, now_ms));
        assert!(!is_proven(now_ms, now_ms + DAY_MS));
    }
}
