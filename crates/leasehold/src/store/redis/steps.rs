//! A door to the scripts, for whoever performs a client's commands by itself.

use leasehold_core::{Answer, ClientId, Command, Push, Resource, lua};
use redis::Value;

use super::{codec, keys};

/// The script of a command, its keys, and its argument.
#[must_use]
pub fn encode(resource: &Resource, command: &Command) -> (lua::Script, Vec<String>, Vec<u8>) {
    let (script, payload) = codec::encode_args(command);
    let mut names = Vec::new();
    keys::each_key(resource, |key| names.push(key.to_owned()));
    (script, names, payload)
}

/// A script's text, as a server of its own runs it. `clock` is as in [`lua::Script::text`].
#[must_use]
pub fn text(script: lua::Script, clock: &str) -> String {
    let channels = format!("{}local INBOX = '{}'\n", lua::PLAIN_CHANNELS, keys::inbox(None));
    script.text(clock, &channels, lua::NO_FLOOR)
}

/// What the script of this command returned.
#[must_use]
pub fn answer(command: &Command, value: &Value) -> Option<Answer> {
    codec::decode_answer(command, None, value)
}

/// What came by a client's channel.
#[must_use]
pub fn push(message: &[u8]) -> Option<Push> {
    codec::decode_push(message)
}

/// The channel that a client hears.
#[must_use]
pub fn inbox_of(client: ClientId) -> String {
    keys::inbox_of(client, None)
}
