//! Names of keys and channels, and their hash slots.

use std::sync::LazyLock;

use leasehold_core::{ClientId, Kind, Name, Resource};

use crate::layout::{PREFIX, SLOTS};

/// The last part of a resource's keys, in the order in which the scripts expect them.
const STATE: &str = "state";
const ROWS: &str = "rows";

/// Number of keys of a resource.
pub(crate) const KEYS: usize = 2;

/// `SCAN` pattern of the `state` keys. [`resource_of`] decodes each key.
pub const STATE_PATTERN: &str = "leasehold:2:{*}:state";

/// The keys of a resource, in the order in which the scripts expect them. All are in one hash slot.
#[must_use]
pub fn keys_of(resource: &Resource) -> [String; KEYS] {
    [STATE, ROWS].map(|part| stem(resource) + part)
}

/// The first of a resource's keys. It exists while the resource has a holder or a waiter, and for an hour
/// after that.
#[must_use]
pub fn state_key(resource: &Resource) -> String {
    stem(resource) + STATE
}

/// Passes the bytes of each key to `push`, without a `String` per key.
pub(crate) fn push_keys(resource: &Resource, mut push: impl FnMut(&[u8])) {
    let mut key = stem(resource);
    let stem = key.len();
    for part in [STATE, ROWS] {
        key.truncate(stem);
        key.push_str(part);
        push(key.as_bytes());
    }
}

/// The common first part of a resource's keys, with the hash tag.
fn stem(resource: &Resource) -> String {
    // Enough for the kind and the longest part, unless the name has characters to escape.
    let mut key = String::with_capacity(PREFIX.len() + resource.name.as_str().len() + 40);
    key.push_str(PREFIX);
    key.push_str(":{");
    push_tag(&mut key, resource);
    key.push_str("}:");
    key
}

/// Appends kind and name. A brace in the name would end the hash tag early.
fn push_tag(text: &mut String, resource: &Resource) {
    text.push_str(resource.kind.as_str());
    text.push(':');
    for character in resource.name.as_str().chars() {
        match character {
            '{' => text.push_str("%7B"),
            '}' => text.push_str("%7D"),
            '%' => text.push_str("%25"),
            other => text.push(other),
        }
    }
}

/// The resource of a `state` key; `None` for any other key.
#[must_use]
pub fn resource_of(key: &[u8]) -> Option<Resource> {
    let key = std::str::from_utf8(key).ok()?;
    let tag = key.strip_prefix(PREFIX)?.strip_prefix(":{")?.strip_suffix(STATE)?.strip_suffix("}:")?;
    let (kind, name) = tag.split_once(':')?;
    let name = name.replace("%7B", "{").replace("%7D", "}").replace("%25", "%");
    Some(Resource { kind: Kind::parse(kind)?, name: Name::new(&name).ok()? })
}

/// The first part of inbox names, before the client id. A single server has one inbox per client. A cluster has one per
/// client and hash slot, because a script may only publish in the slot of its keys.
#[must_use]
pub fn inbox_prefix(slot: Option<u16>) -> String {
    match slot {
        None => format!("{PREFIX}:inbox:"),
        Some(slot) => format!("{PREFIX}:inbox:{{{}}}:", SLOT_TAGS[usize::from(slot % SLOTS)]),
    }
}

/// The channel to which a client subscribes, on a single server or, in a cluster, for one slot.
#[must_use]
pub fn inbox_of(client: ClientId, slot: Option<u16>) -> String {
    format!("{}{client}", inbox_prefix(slot))
}

/// The hash slot of a resource's keys.
#[must_use]
pub fn slot_of(resource: &Resource) -> u16 {
    let mut tag = String::new();
    push_tag(&mut tag, resource);
    slot(&tag)
}

/// The hash slot of a cluster's inbox; `None` for any other channel.
#[must_use]
pub fn slot_of_inbox(channel: &[u8]) -> Option<u16> {
    let channel = std::str::from_utf8(channel).ok()?;
    let (tag, _) = channel.strip_prefix(PREFIX)?.strip_prefix(":inbox:{")?.split_once('}')?;
    Some(slot(tag))
}

fn slot(tag: &str) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// For each slot the smallest number whose decimal digits hash to it. Thus all clients use the same inbox names.
static SLOT_TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let mut tags = vec![None; usize::from(SLOTS)];
    let mut missing = tags.len();
    for number in 0.. {
        let tag: &mut Option<u32> = &mut tags[usize::from(slot(&number.to_string()))];
        if tag.is_none() {
            *tag = Some(number);
            missing -= 1;
            if missing == 0 {
                break;
            }
        }
    }
    tags.into_iter().flatten().collect()
});

#[cfg(test)]
mod tests {
    use super::*;

    fn mutex(name: &str) -> Resource {
        Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
    }

    #[test]
    fn braces_in_names_are_escaped_without_collisions() {
        let encode = |name| state_key(&mutex(name));
        assert_eq!(encode("orders:42"), "leasehold:2:{mutex:orders:42}:state");
        assert_eq!(encode("a}{b"), "leasehold:2:{mutex:a%7D%7Bb}:state");
        assert_ne!(encode("a%7D"), encode("a}"));
        for name in ["a", "a}{b", "%7D", "%257B", "}:state", "ä b"] {
            assert_eq!(resource_of(encode(name).as_bytes()), Some(mutex(name)));
        }
        assert_eq!(resource_of(b"leasehold:2:{else:a}:state"), None);
        assert_eq!(inbox_of(ClientId::new(7), None), "leasehold:2:inbox:00000000000000000000000000000007");
    }

    #[test]
    fn every_way_to_the_keys_yields_the_same_keys() {
        let resource = mutex("a}{b");
        let mut pushed = Vec::new();
        push_keys(&resource, |key| pushed.push(String::from_utf8(key.to_vec()).unwrap()));
        assert_eq!(pushed, keys_of(&resource));
        assert_eq!(pushed[0], state_key(&resource));
        let (before, after) = STATE_PATTERN.split_once('*').unwrap();
        assert!(pushed[0].starts_with(before) && pushed[0].ends_with(after));
    }

    #[test]
    fn every_slot_has_its_own_inbox() {
        // As CLUSTER KEYSLOT has it.
        assert_eq!(slot("foo"), 12_182);
        for slot in [0, 1, 12_182, SLOTS - 1] {
            let channel = inbox_of(ClientId::new(7), Some(slot));
            assert_eq!(slot_of_inbox(channel.as_bytes()), Some(slot));
        }
        assert_eq!(slot_of_inbox(b"leasehold:2:inbox:7"), None);
    }
}
