//! Encodes commands as script arguments, and decodes replies and pushes.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Grant, HeadHint, Holder, Owner, Push, PushKind,
    QueueEntry, Queued, Refusal, Renew, Reply, Resource, StoreTime, Token, TokenRange, View, lua,
};
use redis::Value;

use super::keys;

/// Pub/sub channels of the clients' inboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Channels {
    /// Cluster-wide channels: single servers, and clusters before Redis 7.
    Plain,
    /// Sharded channels, which stay on the nodes of the slot.
    Sharded,
}

/// Variant of the scripts for a kind of deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ScriptVariant {
    pub(super) channels: Channels,
    /// In a cluster each hash slot has its own inbox.
    pub(super) is_cluster: bool,
    /// The server is a quorum node.
    pub(super) is_voting: bool,
}

/// Extra arguments for a quorum node.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VoteArgs<'a> {
    /// Lower bound of new tokens.
    pub(super) floor: Option<Token>,
    /// How long the node abstains after it may have lost leases.
    pub(super) abstains_for: Option<Duration>,
    /// The server's run id, if known.
    pub(super) run_id: &'a str,
}

impl ScriptVariant {
    pub(super) const SERVER: Self = Self { channels: Channels::Plain, is_cluster: false, is_voting: false };
    pub(super) const VOTER: Self = Self { channels: Channels::Plain, is_cluster: false, is_voting: true };

    /// Encodes a command, with the script's hash or its text.
    pub(super) fn encode(
        self,
        resource: &Resource,
        command: &Command,
        vote_args: VoteArgs<'_>,
        use_eval: bool,
    ) -> redis::Cmd {
        let (script, payload) = encode_args(command);
        self.encode_script(script, &[(resource, payload)], vote_args, use_eval)
    }

    /// Encodes an atomic batch of attempts at resources of one hash slot. The reply is a list of answers.
    pub(super) fn encode_acquire_all<'a>(
        self,
        attempts: impl Iterator<Item = (&'a Resource, &'a Command)>,
        use_eval: bool,
    ) -> redis::Cmd {
        let payload: Vec<_> =
            attempts.map(|(resource, command)| (resource, encode_args(command).1)).collect();
        self.encode_script(lua::Script::AcquireAll, &payload, VoteArgs::default(), use_eval)
    }

    fn encode_script(
        self,
        script: lua::Script,
        payload: &[(&Resource, Vec<u8>)],
        vote_args: VoteArgs<'_>,
        use_eval: bool,
    ) -> redis::Cmd {
        let room = |(resource, payload): &(&Resource, Vec<u8>)| {
            2 * (resource.name.as_str().len() + 40) + payload.len() + 40
        };
        let abstains_for =
            vote_args.abstains_for.filter(|_| self.is_voting && script == lua::Script::Acquire);
        let count = payload.len() * keys::KEYS + usize::from(abstains_for.is_some());
        let mut command = self.begin_command(script, count, payload.iter().map(room).sum(), use_eval);
        for (resource, _) in payload {
            keys::each_key(resource, |key| {
                command.arg(key);
            });
        }
        if abstains_for.is_some() {
            command.arg(keys::RESTART_GUARD_KEY);
        }
        for (_, payload) in payload {
            command.arg(payload);
        }
        if self.is_voting {
            command.arg(&number(vote_args.floor.map_or(0, Token::get))[..]);
        }
        if let Some(span) = abstains_for {
            let mut longest = number(micros(span)).to_vec();
            longest.extend(vote_args.run_id.as_bytes());
            command.arg(longest);
        }
        if self.is_cluster
            && let Some((resource, _)) = payload.first()
        {
            command.arg(keys::inbox(Some(keys::slot_of(resource))));
        }
        command
    }

    /// Encodes a batch of one client's renewals without token requests: see [`renewals`].
    pub(super) fn encode_renewals(
        self,
        renewals: &[(&Resource, &Renew)],
        vote_args: VoteArgs<'_>,
        use_eval: bool,
    ) -> redis::Cmd {
        let room = renewals.iter().map(|(resource, _)| resource.name.as_str().len() + 60).sum();
        let mut command = self.begin_command(lua::Script::RenewAll, renewals.len(), room, use_eval);
        for (resource, _) in renewals {
            command.arg(keys::state_key(resource));
        }
        command.arg(encode_renewal_args(renewals.iter().map(|(_, renew)| *renew)));
        if self.is_voting {
            command.arg(&number(vote_args.floor.map_or(0, Token::get))[..]);
        }
        command
    }

    /// Starts a command: EVAL or EVALSHA, and the number of keys. `room` is the expected size in bytes.
    fn begin_command(self, script: lua::Script, keys: usize, room: usize, use_eval: bool) -> redis::Cmd {
        let loaded = &LOADED[&(script, self)];
        let (word, text) = if use_eval { ("EVAL", &loaded.text) } else { ("EVALSHA", &loaded.name) };
        let mut command = redis::Cmd::with_capacity(7 + 2 * keys, text.len() + 120 + room);
        command.arg(word).arg(text).arg(keys);
        command
    }

    /// The scripts' constants for inboxes. In a cluster the channel depends on the slot and is an argument.
    fn inboxes(self) -> String {
        let commands = match self.channels {
            Channels::Plain => lua::PLAIN_CHANNELS,
            Channels::Sharded => lua::SHARDED_CHANNELS,
        };
        let name = if self.is_cluster { "ARGV[2]".to_owned() } else { format!("'{}'", keys::inbox(None)) };
        format!("{commands}local INBOX = {name}\n")
    }
}

/// Encodes a number like Lua's `struct.pack('>d')`.
#[allow(clippy::cast_precision_loss, reason = "tokens and spans are below 2^53")]
fn number(number: u64) -> [u8; 8] {
    (number as f64).to_be_bytes()
}

/// The script of a command, and its encoded argument.
pub(super) fn encode_args(command: &Command) -> (lua::Script, Vec<u8>) {
    match command {
        Command::Acquire(acquire) => (lua::Script::Acquire, encode_acquire(acquire)),
        Command::Renew(renew) => {
            let mut payload = encode_acquisition(renew.acquisition, 12);
            payload.extend(micros(renew.ttl).to_be_bytes());
            payload.extend(renew.reserve.to_be_bytes());
            (lua::Script::Renew, payload)
        }
        Command::Release(release) => {
            let mut payload = encode_acquisition(release.acquisition, 16);
            if !(release.min_hold.is_zero() && release.tombstone.is_zero()) {
                payload.extend(micros(release.min_hold).to_be_bytes());
                payload.extend(micros(release.tombstone).to_be_bytes());
            }
            (lua::Script::Release, payload)
        }
        Command::Inspect => (lua::Script::Inspect, Vec::new()),
        Command::ForceRelease => (lua::Script::ForceRelease, Vec::new()),
    }
}

fn encode_acquire(acquire: &Acquire) -> Vec<u8> {
    let owner = acquire.owner.as_ref().map(Owner::as_str);
    let mut payload =
        encode_acquisition(acquire.acquisition, 64 + owner.map_or(0, str::len) + acquire.metadata.len());
    let flags = [acquire.wait.is_some(), owner.is_some(), acquire.replaces.is_some()];
    payload.push(flags.into_iter().rev().fold(0, |flags, flag| flags << 1 | u8::from(flag)));
    payload.extend(acquire.capacity.to_be_bytes());
    payload.extend(acquire.weight.to_be_bytes());
    payload.extend(micros(acquire.ttl).to_be_bytes());
    payload.extend(acquire.reserve.to_be_bytes());
    if let Some(wait) = acquire.wait {
        payload.extend(micros(wait.entry_ttl).to_be_bytes());
        payload.extend(wait.max_queue.to_be_bytes());
    }
    if let Some(owner) = owner {
        payload.extend(u32::try_from(owner.len()).unwrap_or(u32::MAX).to_be_bytes());
        payload.extend(owner.as_bytes());
    }
    if let Some(sequence) = acquire.replaces {
        payload.extend(sequence.to_be_bytes());
    }
    payload.extend(acquire.metadata.as_bytes());
    payload
}

/// The argument of `RenewAll`: the client id, then each lease's sequence number and ttl.
pub(super) fn encode_renewal_args<'a>(renewals: impl Iterator<Item = &'a Renew>) -> Vec<u8> {
    let mut payload = Vec::new();
    for renew in renewals {
        if payload.is_empty() {
            payload.extend(renew.acquisition.client.get().to_be_bytes());
        }
        payload.extend(renew.acquisition.sequence.to_be_bytes());
        payload.extend(micros(renew.ttl).to_be_bytes());
    }
    payload
}

/// Encodes an acquisition id as 24 bytes whose order is that of the numbers. `room` is spare capacity.
fn encode_acquisition(acquisition: Acquisition, room: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24 + room);
    bytes.extend(acquisition.client.get().to_be_bytes());
    bytes.extend(acquisition.sequence.to_be_bytes());
    bytes
}

/// Microseconds, capped to what a Lua number represents exactly.
fn micros(span: Duration) -> u64 {
    const LONGEST: u64 = 1 << 52;
    u64::try_from(span.as_micros()).map_or(LONGEST, |micros| micros.min(LONGEST))
}

/// A script's text and its SHA-1.
struct Loaded {
    text: String,
    name: String,
}

static LOADED: LazyLock<HashMap<(lua::Script, ScriptVariant), Loaded>> = LazyLock::new(|| {
    let variants = [
        ScriptVariant::SERVER,
        ScriptVariant::VOTER,
        ScriptVariant { channels: Channels::Plain, is_cluster: true, is_voting: false },
        ScriptVariant { channels: Channels::Sharded, is_cluster: true, is_voting: false },
    ];
    let load = |script: lua::Script, variant: ScriptVariant| {
        let quorum = if variant.is_voting { script.voting() } else { lua::NO_FLOOR };
        let text = script.text(lua::CLOCK, &variant.inboxes(), quorum);
        let name = redis::Script::new(&text).get_hash().to_owned();
        ((script, variant), Loaded { text, name })
    };
    lua::Script::ALL.into_iter().flat_map(|script| variants.map(|variant| load(script, variant))).collect()
});

/// Decodes a script's reply. None for an unexpected reply.
pub(super) fn decode_answer(command: &Command, floor: Option<Token>, value: &Value) -> Option<Answer> {
    if let Value::Int(at) = value {
        let at = StoreTime::from_micros(u64::try_from(*at).ok()?);
        return Some(Answer { at, reply: short_reply(command, floor, at)? });
    }
    let list = Reader::of(value)?;
    Some(Answer { at: list.time(0)?, reply: decode_reply(&list)? })
}

/// Decodes the reply of `RenewAll`: one answer per renewal, or `None` for a renewal that must be sent alone.
pub(super) fn decode_renewals<'a>(
    commands: impl ExactSizeIterator<Item = &'a Command>,
    floor: Option<Token>,
    value: &Value,
) -> Option<Vec<Option<Answer>>> {
    let one = |(command, value): (&Command, &Value)| match value {
        Value::Nil => Some(None),
        value => decode_answer(command, floor, value).map(Some),
    };
    match value {
        Value::Array(values) if values.len() == commands.len() => commands.zip(values).map(one).collect(),
        Value::Int(_) => commands.map(|command| one((command, value))).collect(),
        _ => None,
    }
}

/// The result that a reply stands for which consists of the time only.
fn short_reply(command: &Command, floor: Option<Token>, at: StoreTime) -> Option<Reply> {
    match command {
        Command::Acquire(acquire) => {
            let first = at.as_micros().max(floor.map_or(0, Token::get));
            let last = Token::new(first + u64::from(acquire.reserve))?;
            let tokens = TokenRange { first: Token::new(first)?, last };
            Some(Reply::Granted(Grant { tokens, valid_for: Duration::from_micros(micros(acquire.ttl)) }))
        }
        Command::Release(_) => Some(Reply::Released),
        Command::Renew(renew) if renew.reserve == 0 => {
            let valid_for = Duration::from_micros(micros(renew.ttl));
            Some(Reply::Renewed { valid_for, tokens: None, contended: false })
        }
        Command::Renew(_) | Command::Inspect | Command::ForceRelease => None,
    }
}

fn decode_reply(list: &Reader<'_>) -> Option<Reply> {
    Some(match list.number(1)? {
        1 => Reply::Granted(Grant { tokens: list.tokens(2)?, valid_for: list.span(4)? }),
        2 => Reply::Queued(Queued { is_head: list.number(2)? != 0, repoll_at: list.time(3)? }),
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
            Reply::Renewed { valid_for: list.span(2)?, contended: list.number(3)? != 0, tokens }
        }
        8 => Reply::NotHeld,
        10 => Reply::View(View {
            capacity: list.small(2)?,
            in_use: list.small(3)?,
            last_token: Token::new(list.number(4)?),
            holders: decode_holders(&list.list(5)?)?,
            waiters: list.list(6)?.each(decode_waiter)?,
        }),
        11 => Reply::Forced(decode_holders(&list.list(2)?)?),
        12 => Reply::Abstains(list.time(2)?),
        _ => return None,
    })
}

fn decode_holders(list: &Reader<'_>) -> Option<Vec<Holder>> {
    let mut holders = list.each(|holder| {
        let is_named = holder.number(1)? != 0;
        Some(Holder {
            acquisition: holder.acquisition(0)?,
            owner: if is_named { Some(Owner::new(&holder.text(2)?)) } else { None },
            weight: holder.small(3)?,
            token: Token::new(holder.number(4)?)?,
            granted_at: holder.time(5)?,
            expires_at: holder.time(6)?,
            retained: holder.number(7)? != 0,
            metadata: holder.text(8)?,
        })
    })?;
    holders.sort_by_key(|holder| (holder.token, holder.acquisition));
    Some(holders)
}

fn decode_waiter(waiter: &Reader<'_>) -> Option<QueueEntry> {
    Some(QueueEntry {
        acquisition: waiter.acquisition(0)?,
        weight: waiter.small(1)?,
        since: waiter.time(2)?,
        deadline: waiter.time(3)?,
        skipped: waiter.number(4)? != 0,
        metadata: waiter.text(5)?,
    })
}

/// Reads a list in a reply by index.
struct Reader<'a>(&'a [Value]);

impl<'a> Reader<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        match value {
            Value::Array(list) => Some(Self(list)),
            _ => None,
        }
    }

    fn list(&self, at: usize) -> Option<Self> {
        Self::of(self.0.get(at)?)
    }

    fn each<T>(&self, read: impl Fn(&Reader<'_>) -> Option<T>) -> Option<Vec<T>> {
        self.0.iter().map(|value| read(&Reader::of(value)?)).collect()
    }

    fn number(&self, at: usize) -> Option<u64> {
        match self.0.get(at)? {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    fn small(&self, at: usize) -> Option<u32> {
        u32::try_from(self.number(at)?).ok()
    }

    fn bytes(&self, at: usize) -> Option<&'a [u8]> {
        match self.0.get(at)? {
            Value::BulkString(bytes) => Some(bytes),
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
        Some(TokenRange { first: Token::new(self.number(at)?)?, last: Token::new(self.number(at + 1)?)? })
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

/// Decodes a push: kind, acquisition and four numbers, as packed by `struct.pack('>Bc24dddd')`.
pub(super) fn decode_push(message: &[u8]) -> Option<Push> {
    let (kind, rest) = message.split_first()?;
    let (acquisition, rest) = rest.split_at_checked(24)?;
    let mut numbers = [0; 4];
    for (number, bytes) in numbers.iter_mut().zip(rest.chunks_exact(8)) {
        *number = whole(f64::from_be_bytes(bytes.try_into().ok()?))?;
    }
    let [at, a, b, c] = numbers;
    let kind = match kind {
        1 => {
            let tokens = TokenRange { first: Token::new(a)?, last: Token::new(b)? };
            PushKind::Granted(Grant { tokens, valid_for: Duration::from_micros(c) })
        }
        2 => PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(a) }),
        3 => PushKind::Revoked,
        4 => PushKind::Contended,
        _ => return None,
    };
    Some(Push { acquisition: decode_acquisition(acquisition)?, at: StoreTime::from_micros(at), kind })
}

/// Converts a double to an integer below 2^53.
fn whole(number: f64) -> Option<u64> {
    let is_whole = (0.0..9_007_199_254_740_992.0).contains(&number) && number.fract() == 0.0;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
    is_whole.then_some(number as u64)
}
