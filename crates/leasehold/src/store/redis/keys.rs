//! The one place where keys and channels are spelled.

use std::fmt::Write as _;
use std::sync::LazyLock;

use leasehold_core::{ClientId, Kind, Name, Resource};

/// Counted up when a key changes its form, so that two versions never read each other's.
pub(super) const LAYOUT: &str = "2";

const SLOTS: u16 = 16_384;

/// What `rows.lua` calls its keys, in its order.
const PARTS: [&str; 2] = ["state", "rows"];

/// Says which layout this store's clients have, for those that have another.
pub(super) const LAYOUT_KEY: &str = "leasehold:layout";

/// Since when this server can be trusted to know its leases, where several vote.
pub(super) const RESTART_GUARD_KEY: &str = "leasehold:2:born";

const PREFIX: &str = "leasehold:2";

/// What all keys of a resource begin with, which keeps them in one hash slot.
fn stem(resource: &Resource) -> String {
    // With room for the kind, and for a name that is spelled as it is.
    let mut key = String::with_capacity(PREFIX.len() + resource.name.as_str().len() + 40);
    key.push_str(PREFIX);
    key.push_str(":{");
    push_tag(&mut key, resource);
    key.push_str("}:");
    key
}

/// The first of a resource's keys.
pub(super) fn state_key(resource: &Resource) -> String {
    stem(resource) + PARTS[0]
}

/// Calls back with each key of a resource.
pub(super) fn each_key(resource: &Resource, mut with: impl FnMut(&str)) {
    let mut key = stem(resource);
    let stem = key.len();
    for part in PARTS {
        key.truncate(stem);
        key.push_str(part);
        with(&key);
    }
}

/// How many they are.
pub(super) const KEYS: usize = PARTS.len();

/// The pattern of every resource's state.
pub(super) fn every_state() -> String {
    format!("{PREFIX}:{{*}}:{}", PARTS[0])
}

/// Whose state this key is; none where somebody else spelled it.
pub(super) fn resource_of(key: &[u8]) -> Option<Resource> {
    let key = std::str::from_utf8(key).ok()?;
    let tag = key.strip_prefix(PREFIX)?.strip_prefix(":{")?.strip_suffix(PARTS[0])?.strip_suffix("}:")?;
    let (kind, name) = tag.split_once(':')?;
    let name = name.replace("%7B", "{").replace("%7D", "}").replace("%25", "%");
    Some(Resource { kind: Kind::parse(kind)?, name: Name::new(&name).ok()? })
}

/// What comes before a client's id in the name of its inbox: one on a server of its own, one per hash slot in a cluster,
/// where a script may only publish in the slot of its keys.
pub(super) fn inbox(slot: Option<u16>) -> String {
    match slot {
        None => format!("{PREFIX}:inbox:"),
        Some(slot) => format!("{PREFIX}:inbox:{{{}}}:", TAGS[usize::from(slot)]),
    }
}

/// The channel that a client hears.
pub(super) fn inbox_of(client: ClientId, slot: Option<u16>) -> String {
    format!("{}{client}", inbox(slot))
}

/// The hash slot of a resource's keys.
pub(crate) fn slot_of(resource: &Resource) -> u16 {
    let mut tag = String::new();
    push_tag(&mut tag, resource);
    slot(&tag)
}

/// The hash slot that an inbox of a cluster is for.
pub(super) fn slot_of_channel(channel: &[u8]) -> Option<u16> {
    let channel = std::str::from_utf8(channel).ok()?;
    let (tag, _) = channel.strip_prefix(PREFIX)?.strip_prefix(":inbox:{")?.split_once('}')?;
    Some(slot(tag))
}

fn slot(tag: &str) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// For each slot the smallest number that, written in decimal, hashes to it: so that all clients name a slot's inboxes
/// alike.
static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
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

/// Kind and name. Braces would end the hash tag where they stand.
fn push_tag(text: &mut String, resource: &Resource) {
    let _ = write!(text, "{}:", resource.kind);
    for character in resource.name.as_str().chars() {
        match character {
            '{' | '}' | '%' => {
                let _ = write!(text, "%{:02X}", u32::from(character));
            }
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_in_names_are_escaped_without_collisions() {
        let encode = |name| {
            let mut keys = Vec::new();
            let resource = Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
            each_key(&resource, |key| keys.push(key.to_owned()));
            assert_eq!(keys.len(), KEYS);
            keys.swap_remove(0)
        };
        assert_eq!(encode("orders:42"), "leasehold:2:{mutex:orders:42}:state");
        assert_eq!(encode("a}{b"), "leasehold:2:{mutex:a%7D%7Bb}:state");
        assert_ne!(encode("a%7D"), encode("a}"));
        for name in ["a", "a}{b", "%7D", "%257B", "}:state", "ä b"] {
            let resource = Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
            assert_eq!(resource_of(encode(name).as_bytes()), Some(resource));
        }
        assert_eq!(resource_of(b"leasehold:2:{else:a}:state"), None);
        assert_eq!(inbox_of(ClientId::new(7), None), "leasehold:2:inbox:00000000000000000000000000000007");
    }

    #[test]
    fn every_slot_has_its_own_inbox() {
        // As CLUSTER KEYSLOT has it.
        assert_eq!(slot("foo"), 12_182);
        for slot in [0, 1, 12_182, SLOTS - 1] {
            let channel = inbox_of(ClientId::new(7), Some(slot));
            assert_eq!(slot_of_channel(channel.as_bytes()), Some(slot));
        }
        assert_eq!(slot_of_channel(b"leasehold:2:inbox:7"), None);
    }
}
