//! The protocol between leasehold's clients and a Redis server, without IO.
//!
//! Every lock command is one Lua script call. This crate defines the layout of the keys, the scripts, and the encoding of
//! commands, replies and pushes. It opens no connection. A program sends the result of [`ScriptVariant::encode`] with any
//! client library, and decodes the replies with [`decode_answer`] and the pushes with [`decode_push`].
//!
//! ```
//! use std::time::Duration;
//! use leasehold_core::{Acquire, Acquisition, ClientId, Command, Kind, Name, Reply, Resource};
//! use leasehold_redis_protocol::{Expectation, ScriptVariant, Value, VoteArgs, decode_answer};
//!
//! let resource = Resource { kind: Kind::Mutex, name: Name::new("orders:42")? };
//! let acquisition = Acquisition { client: ClientId::new(7), sequence: 1 };
//! let command = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(10)));
//!
//! // EVALSHA sha1 2 KEY KEY ARG; after NOSCRIPT the same with EVAL and the text.
//! let call = ScriptVariant::Server.encode(&resource, &command, VoteArgs::default(), Expectation::default());
//! assert_eq!(call.sha1().len(), 40);
//! assert_eq!(
//!     call.keys().collect::<Vec<_>>(),
//!     [b"leasehold:4:{mutex:orders:42}".as_slice(), b"leasehold:4:clock"]
//! );
//! assert_eq!(call.args().len(), 3);
//!
//! // A stream id means: granted, with the id as the token.
//! let answer = decode_answer(&command, &Value::Bytes(b"1700000000000-7".to_vec()))?;
//! let Reply::Granted(grant) = answer.reply else { panic!("{answer:?}") };
//! assert_eq!(grant.tokens.first.get(), 1_700_000_000_000 * 2_048 + 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The state machines that decide which command to send next, and how long a lease may be trusted, are in
//! [`leasehold_core`]. The document for clients in other languages is `docs/protocol.md` of the repository.
//!
//! The enums are exhaustive, unlike those of the crate `leasehold`: a client that does not handle a new script or reply is
//! wrong, and should not compile.
//!
//! # Features
//!
//! `redis`: implements [`ReplyValue`] for the `Value` of the `redis` crate, which is then decoded without a
//! copy.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod call;
mod decode;
mod delete;
mod encode;
mod keys;
mod layout;
mod script;
mod value;
mod variant;

pub use call::ScriptCall;
pub use decode::{ProtocolError, decode_answer, decode_outbox, decode_push, decode_renewals};
pub use delete::{ConditionalDelete, plain_value};
pub use encode::{BatchKind, Expectation, VoteArgs};
pub use keys::{
    RESOURCE_PATTERN, client_key, clock_key, inbox_of, inbox_prefix, layout_slot, private_channel_of,
    probe_key_of, resource_key, resource_of, scratch_key, slot_of, slot_of_client, slot_of_inbox,
    tombstone_key,
};
pub use layout::{
    LAYOUT, LAYOUT_KEY, LAYOUT_KEY_TTL, MAX_EACH, MAX_RENEWALS, RESTART_GUARD_KEY, RESTRICTED_LAYOUT, SLOTS,
    token_at, token_time,
};
pub use leasehold_core::weight;
pub use script::{FAILING_WRITES, Script, VIRTUAL_TIME};
pub use value::{ReplyValue, Value, ValueRef};
pub use variant::{Channels, ScriptVariant};

/// The README's example is a test too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
