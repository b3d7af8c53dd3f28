//! The files in this folder: bytes that a client in another language must send, and what it must read of the answers.
//!
//! The example `vectors` writes them, and the test `vectors` compares them with the code.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, FIRST_REQUESTED, Grant, GrantSecret, Kind, Name, Owner, Release,
    ReleaseIf, Renew, Resource, StoreTime, Token, TokenRange, WaitFor,
};
use leasehold_redis_protocol::{
    Channels, ConditionalDelete, Expectation, Script, ScriptCall, ScriptVariant, Value, VoteArgs, client_key,
    clock_key, decode_answer, decode_push, decode_renewals, inbox_of, plain_value, resource_key, slot_of,
    slot_of_client, tombstone_key,
};

/// Name and content of each file.
pub(crate) fn files() -> Vec<(&'static str, String)> {
    vec![
        ("names.json", names()),
        ("scripts.json", scripts()),
        ("commands.json", commands()),
        ("replies.json", replies()),
        ("pushes.json", pushes()),
    ]
}

/// Name and text of each script.
pub(crate) fn script_texts() -> Vec<(String, String)> {
    let each = |variant: ScriptVariant| {
        Script::ALL.map(|script| (format!("{script:?}.{}.lua", name_of(variant)), variant.text(script)))
    };
    ScriptVariant::ALL.into_iter().flat_map(each).collect()
}

const CLIENT: ClientId = ClientId::new(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);
const ID: Acquisition = Acquisition { client: CLIENT, sequence: 3 };
const REQUEST: Acquisition = Acquisition { client: CLIENT, sequence: FIRST_REQUESTED };
const TOKEN: u64 = 1_700_000_000_000 * 2_048 + 7;
const TTL: Duration = Duration::from_secs(10);
const SECRET: GrantSecret = GrantSecret::new(*b"8 bytes!");

fn resource() -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new("orders:42").expect("a valid name") }
}

fn name_of(variant: ScriptVariant) -> &'static str {
    match variant {
        ScriptVariant::Server => "server",
        ScriptVariant::Voter => "voter",
        ScriptVariant::Cluster(Channels::Plain) => "cluster",
        ScriptVariant::Cluster(Channels::Sharded) => "cluster-sharded",
        ScriptVariant::Restricted => "restricted",
    }
}

/// A JSON text. Bytes are given as hexadecimal digits.
fn text(text: &str) -> String {
    let mut json = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => json.extend(['\\', char]),
            char if char.is_control() => write!(json, "\\u{:04x}", u32::from(char)).expect("a string"),
            char => json.push(char),
        }
    }
    json + "\""
}

fn hex(bytes: &[u8]) -> String {
    text(&bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(", "))
}

/// An object on one line.
fn object(fields: &[(&str, String)]) -> String {
    let fields = fields.iter().map(|(name, value)| format!("{}: {value}", text(name)));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

/// A file with an object on each line.
fn file(objects: impl IntoIterator<Item = String>) -> String {
    format!("[\n  {}\n]\n", objects.into_iter().collect::<Vec<_>>().join(",\n  "))
}

fn names() -> String {
    let resources = [(Kind::Mutex, "orders:42"), (Kind::ReadWrite, "a}{b%"), (Kind::Semaphore, "ä b")];
    let resources = resources.map(|(kind, name)| {
        let resource = Resource { kind, name: Name::new(name).expect("a valid name") };
        let slot = slot_of(&resource);
        object(&[
            ("kind", text(kind.as_str())),
            ("name", text(name)),
            ("key", text(&resource_key(&resource))),
            ("slot", slot.to_string()),
            ("clock", text(&clock_key(None))),
            ("clock_in_cluster", text(&clock_key(Some(slot)))),
            ("ended_request", text(&tombstone_key(&resource, REQUEST))),
            ("inbox", text(&inbox_of(CLIENT, None))),
            ("inbox_in_cluster", text(&inbox_of(CLIENT, Some(slot)))),
        ])
    });
    let client = object(&[
        ("client", hex(&CLIENT.get().to_be_bytes())),
        ("record", text(&client_key(CLIENT))),
        ("slot", slot_of_client(CLIENT).to_string()),
    ]);
    file(resources.into_iter().chain([client]))
}

fn scripts() -> String {
    let each = |variant: ScriptVariant| {
        Script::ALL.map(|script| {
            let text_of = variant.text(script);
            object(&[
                ("script", text(&format!("{script:?}"))),
                ("variant", text(name_of(variant))),
                ("bytes", text_of.len().to_string()),
                ("sha1", text(&sha1_smol::Sha1::from(&text_of).digest().to_string())),
            ])
        })
    };
    file(ScriptVariant::ALL.into_iter().flat_map(each))
}

fn call(what: &str, variant: ScriptVariant, call: &ScriptCall) -> String {
    object(&[
        ("what", text(what)),
        ("variant", text(name_of(variant))),
        ("script", text(&format!("{:?}", call.script()))),
        ("sha1", text(call.sha1())),
        ("keys", list(call.keys().map(|key| text(&String::from_utf8_lossy(key))))),
        ("args", list(call.args().map(hex))),
    ])
}

fn waiting() -> Acquire {
    let wait = Some(WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 100_000 });
    Acquire { wait, secret: SECRET, ..Acquire::exclusive(ID, TTL) }
}

/// A command of each kind, with what is special about it.
fn each_command() -> Vec<(&'static str, Command)> {
    let acquire = |acquire: Acquire| Command::Acquire(Arc::new(acquire));
    let everything = Acquire {
        owner: Some(Owner::new("worker 7")),
        capacity: 4,
        weight: 2,
        reserve: 5,
        wait: Some(WaitFor { entry_ttl: Duration::from_secs(30), max_queue: 9 }),
        replaces: Some(2),
        metadata: Arc::from("{\"note\":\"nightly\"}"),
        ..waiting()
    };
    let release = |min_hold, tombstone| {
        let (min_hold, tombstone) = (Duration::from_secs(min_hold), Duration::from_secs(tombstone));
        Command::Release(Release { min_hold, tombstone, ..Release::now(ID) })
    };
    let release_if = |condition| Command::Release(Release { only_if: Some(condition), ..Release::now(ID) });
    let token = Token::new(TOKEN).expect("a token");
    vec![
        ("an attempt that does not wait", acquire(Acquire::exclusive(ID, TTL))),
        ("an attempt that waits", acquire(waiting())),
        (
            "an attempt of a request",
            acquire(Acquire { acquisition: REQUEST, inbox: Some(CLIENT), ..waiting() }),
        ),
        ("one of four permits", acquire(Acquire { capacity: 4, ..Acquire::exclusive(ID, TTL) })),
        ("an attempt with everything", acquire(everything)),
        ("a renewal", Command::Renew(Renew::to(ID, TTL))),
        ("a renewal that reserves tokens", Command::Renew(Renew { reserve: 5, ..Renew::to(ID, TTL) })),
        ("a question for the lease", Command::Renew(Renew::to(ID, Duration::ZERO))),
        (
            "a renewal of the lease with a token",
            Command::Renew(Renew { token: Token::new(TOKEN), ..Renew::to(ID, TTL) }),
        ),
        ("a release", release(0, 0)),
        ("a release with a minimum hold", release(25, 0)),
        ("a release with a tombstone", release(0, 60)),
        ("a release by the client that speaks for the attempt", release_if(ReleaseIf::SpeaksFor(CLIENT))),
        ("a release of the lease with a token", release_if(ReleaseIf::HasToken(token))),
        ("inspect", Command::Inspect),
        ("a forced release", Command::ForceRelease),
    ]
}

fn commands() -> String {
    let resource = resource();
    let mut lines = Vec::new();
    for variant in ScriptVariant::ALL {
        let floor = variant.is_voter().then(|| Token::new(TOKEN)).flatten();
        let vote_args = VoteArgs { floor, ..VoteArgs::default() };
        for (what, command) in each_command() {
            lines.push(call(
                what,
                variant,
                &variant.encode(&resource, &command, vote_args, Expectation::Uncontended),
            ));
        }
    }
    let server = ScriptVariant::Server;
    for (what, command) in each_command() {
        let expecting = server.encode(&resource, &command, VoteArgs::default(), Expectation::Contended);
        let usual = server.encode(&resource, &command, VoteArgs::default(), Expectation::Uncontended);
        if expecting != usual {
            lines.push(call(&format!("{what}, where contention is expected"), server, &expecting));
        }
    }
    let vote_args =
        VoteArgs { floor: None, abstains_for: Some(Duration::from_secs(60)), run_id: "0123456789abcdef" };
    let attempt = Command::from(Acquire::exclusive(ID, TTL));
    lines.push(call(
        "an attempt at a node that may abstain",
        ScriptVariant::Voter,
        &ScriptVariant::Voter.encode(&resource, &attempt, vote_args, Expectation::Uncontended),
    ));
    let other = Resource { kind: Kind::Mutex, name: Name::new("orders:43").expect("a valid name") };
    let both = [(&resource, &attempt), (&other, &attempt)];
    lines.push(call(
        "attempts of which all are granted, or none",
        server,
        &server.encode_acquire_all(both.into_iter()),
    ));
    lines.push(call("attempts, each for itself", server, &server.encode_each(both.into_iter())));
    let release = Command::Release(Release::now(ID));
    let both = [(&resource, &release), (&other, &release)];
    lines.push(call("releases, each for itself", server, &server.encode_each(both.into_iter())));
    let renew = Renew::to(ID, TTL);
    let both = [(&resource, &renew), (&other, &renew)];
    lines.push(call("renewals", server, &server.encode_renewals(&both, VoteArgs::default())));
    for delete in [ConditionalDelete::DelIfEq, ConditionalDelete::DelEx] {
        let token = Token::new(TOKEN).expect("a token");
        let as_granted = Some((Arc::new(Acquire::exclusive(ID, TTL)), token));
        let value = plain_value(&Release { as_granted, ..Release::now(ID) }).expect("a plain lease");
        let words = delete.words(resource_key(&resource).as_bytes(), &value).map(hex).collect::<Vec<_>>();
        lines.push(object(&[("what", text("a release without a script")), ("words", list(words))]));
    }
    file(lines)
}

fn json_of(value: &Value) -> String {
    match value {
        Value::Nil => "null".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Bytes(bytes) => hex(bytes),
        Value::List(values) => list(values.iter().map(json_of)),
    }
}

const NOW: i64 = 1_700_000_000_000_000;

fn reply_of(numbers: &[i64]) -> Value {
    Value::List([NOW].iter().chain(numbers).map(|number| Value::Int(*number)).collect())
}

/// Replies to these commands, with what they say in Rust's words: times and spans in microseconds.
fn replies() -> String {
    let token = 1_700_000_000_000 * 2_048 + 7;
    let id = [CLIENT.get().to_be_bytes().as_slice(), &3_u64.to_be_bytes()].concat();
    let attempt = Command::from(Acquire::exclusive(ID, TTL));
    let wait = Command::from(waiting());
    let renew = Command::Renew(Renew::to(ID, TTL));
    let reserve = Command::Renew(Renew { reserve: 5, ..Renew::to(ID, TTL) });
    let release = Command::Release(Release::now(ID));
    let number = |number: i64| Value::Int(number);
    let holder = Value::List(vec![
        Value::Bytes(id.clone()),
        number(1),
        Value::Bytes(b"worker 7".to_vec()),
        number(1),
        number(token),
        number(NOW - 5),
        number(NOW + 9_000_000),
        number(0),
        Value::Bytes(b"{}".to_vec()),
    ]);
    let waiter = Value::List(vec![
        Value::Bytes(id),
        number(1),
        number(NOW - 4),
        number(NOW + 80_000_000),
        number(0),
        Value::Bytes(Vec::new()),
    ]);
    let view = Value::List(vec![
        number(NOW),
        number(10),
        number(1),
        number(1),
        number(token),
        Value::List(vec![holder.clone()]),
        Value::List(vec![waiter]),
    ]);
    let forced = Value::List(vec![number(NOW), number(11), Value::List(vec![holder])]);
    let each = [
        ("granted by the first lines", &attempt, Value::Bytes(b"1700000000000-7".to_vec())),
        ("granted", &attempt, reply_of(&[1, token, token, 10_000_000])),
        ("queued as the head", &wait, reply_of(&[2, 1, NOW + 9_000_000])),
        ("queued", &wait, reply_of(&[2, 0, NOW + 12_345_678])),
        ("busy", &attempt, reply_of(&[3])),
        ("cancelled", &attempt, reply_of(&[4])),
        ("the queue is full", &wait, reply_of(&[5])),
        ("refused: weight", &attempt, reply_of(&[6, 1, 4])),
        ("refused: another capacity is in use", &attempt, reply_of(&[6, 2, 4])),
        ("refused: held with less weight", &attempt, reply_of(&[6, 3, 1])),
        ("refused: the lease to replace is not held", &attempt, reply_of(&[6, 4, 0])),
        ("another program holds the key", &attempt, reply_of(&[13, 500])),
        ("another program holds the key, to a waiter", &wait, reply_of(&[13, 500])),
        ("extended, with nothing else to say", &renew, number(NOW)),
        ("extended, and others wait", &renew, reply_of(&[7, 10_000_000, 1, 0, 0])),
        ("extended, with tokens", &reserve, reply_of(&[7, 10_000_000, 0, token, token + 5])),
        ("not held", &renew, reply_of(&[8])),
        ("a plain lease is released", &release, number(1)),
        ("released", &release, number(NOW)),
        ("not held", &release, reply_of(&[8])),
        ("a queue entry is removed", &release, reply_of(&[9])),
        ("a view", &Command::Inspect, view),
        ("revoked", &Command::ForceRelease, forced),
        ("the node abstains", &attempt, reply_of(&[12, NOW + 60_000_000])),
    ];
    let lines = each.map(|(what, command, value)| {
        let answer = decode_answer(command, &value).unwrap_or_else(|error| panic!("{what}: {error}"));
        object(&[
            ("what", text(what)),
            ("reply", json_of(&value)),
            ("at", answer.at.as_micros().to_string()),
            ("means", text(&format!("{:?}", answer.reply))),
        ])
    });
    let several = Value::List(vec![number(NOW), Value::Nil]);
    let answers = decode_renewals([&renew, &renew].into_iter(), &several).expect("known replies");
    let several = object(&[
        ("what", text("two renewals, of which the second must be sent by itself")),
        ("reply", json_of(&several)),
        ("means", text(&format!("{answers:?}"))),
    ]);
    file(lines.into_iter().chain([several]))
}

/// Messages to the inbox of the client. The proof of a grant is that of the secret.
fn pushes() -> String {
    let token = Token::new(TOKEN).expect("a token");
    let tokens = TokenRange { first: token, last: token };
    let now = StoreTime::from_micros(NOW.unsigned_abs());
    let grant = Grant { tokens, valid_for: Duration::from_secs(3), is_plain: false };
    #[allow(clippy::cast_precision_loss, reason = "tokens and times are below 2^53")]
    let message = |kind: u8, numbers: [u64; 3], proof: &str| {
        let mut bytes = vec![kind];
        bytes.extend(ID.sequence.to_be_bytes());
        bytes.extend((now.as_micros() as f64).to_be_bytes());
        numbers.iter().for_each(|number| bytes.extend((*number as f64).to_be_bytes()));
        bytes.extend(proof.as_bytes());
        bytes
    };
    // The SHA-1 of the secret and the four numbers.
    let numbers = &message(1, [token.get(), token.get(), 3_000_000], "")[9..];
    let digest = sha1_smol::Sha1::from([SECRET.bytes().as_slice(), numbers].concat()).digest().to_string();
    let proof = SECRET.prove(now, &grant);
    let each = [
        ("granted", message(1, [token.get(), token.get(), 3_000_000], &digest)),
        ("the head of the queue", message(2, [NOW.unsigned_abs() + 9_000_000, 0, 0], "")),
        ("revoked", message(3, [0, 0, 0], "")),
        ("contended", message(4, [0, 0, 0], "")),
    ];
    let lines = each.map(|(what, message)| {
        let push = decode_push(CLIENT, &message).unwrap_or_else(|error| panic!("{what}: {error}"));
        if let leasehold_core::PushKind::Granted(_, found) = push.kind {
            assert_eq!(found, proof, "the proof of a grant");
        }
        object(&[
            ("what", text(what)),
            ("inbox", text(&inbox_of(CLIENT, None))),
            ("message", hex(&message)),
            ("secret", hex(&SECRET.bytes())),
            ("means", text(&format!("{:?}", push.kind))),
        ])
    });
    file(lines)
}
