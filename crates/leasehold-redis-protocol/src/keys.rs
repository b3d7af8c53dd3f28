//! Names of keys and channels, and their hash slots.

use std::sync::LazyLock;

use leasehold_core::{Acquisition, ClientId, Kind, Name, Resource};
use sha1_smol::Sha1;

use crate::layout::{PREFIX, SLOTS};

/// `SCAN` pattern of the resources' keys. [`resource_of`] decodes each key.
pub const RESOURCE_PATTERN: &str = "leasehold:4:{*}";

/// The key of a resource. It exists while the resource has a holder or a waiter, or must keep new attempts out.
#[must_use]
pub fn resource_key(resource: &Resource) -> String {
    // Enough for the kind, unless the name has characters to escape.
    let mut key = String::with_capacity(PREFIX.len() + resource.name.as_str().len() + 40);
    key.push_str(PREFIX);
    key.push_str(":{");
    push_tag(&mut key, resource);
    key.push('}');
    key
}

/// The stream whose ids are the tokens of a server or, in a cluster, of one slot.
#[must_use]
pub fn clock_key(slot: Option<u16>) -> String {
    common_key("clock", slot)
}

/// The key in which a script builds the rows of a resource, before they replace the resource's key. It exists after a script that
/// failed only, and expires.
#[must_use]
pub fn scratch_key(slot: Option<u16>) -> String {
    common_key("scratch", slot)
}

/// The key that is the tombstone of a request: it exists for as long as the request is refused. No call declares it, since the scripts know
/// its name. Ids of attempts are not public, and names of keys are.
#[must_use]
pub fn tombstone_key(resource: &Resource, request: Acquisition) -> String {
    let mut tag = String::new();
    push_tag(&mut tag, resource);
    let mut hash = Sha1::from(request.client.get().to_be_bytes());
    hash.update(&request.sequence.to_be_bytes());
    format!("{PREFIX}:ended:{{{tag}}}:{}", hash.digest())
}

/// A key that all resources of a server share or, in a cluster, those of one slot.
fn common_key(name: &str, slot: Option<u16>) -> String {
    match slot {
        None => format!("{PREFIX}:{name}"),
        Some(slot) => format!("{PREFIX}:{name}:{{{}}}", tag_of(slot)),
    }
}

/// The key in which a client publishes what its holders and waiters have in common.
#[must_use]
pub fn client_key(client: ClientId) -> String {
    format!("{PREFIX}:client:{{{}}}", digest_of(client))
}

/// The hash slot of [`client_key`].
#[must_use]
pub fn slot_of_client(client: ClientId) -> u16 {
    slot(&digest_of(client))
}

/// Stands for a client's id in names: a server lists the names of its keys and channels to users without a right to any of them.
pub(crate) fn digest_of(client: ClientId) -> String {
    Sha1::from(client.get().to_be_bytes()).digest().to_string()
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

/// The resource of a key; `None` for any other key.
#[must_use]
pub fn resource_of(key: &[u8]) -> Option<Resource> {
    let key = std::str::from_utf8(key).ok()?;
    let tag = key.strip_prefix(PREFIX)?.strip_prefix(":{")?.strip_suffix('}')?;
    let (kind, name) = tag.split_once(':')?;
    let name = name.replace("%7B", "{").replace("%7D", "}").replace("%25", "%");
    let resource = Resource { kind: Kind::parse(kind)?, name: Name::new(&name).ok()? };
    // A key of another program may have a name that is not escaped.
    (resource_key(&resource) == key).then_some(resource)
}

/// The first part of inbox names, before the digest of the client's id. A single server has one inbox per client. A cluster has one per
/// client and hash slot, because a script may only publish in the slot of its keys.
#[must_use]
pub fn inbox_prefix(slot: Option<u16>) -> String {
    match slot {
        None => format!("{PREFIX}:inbox:"),
        Some(slot) => format!("{PREFIX}:inbox:{{{}}}:", tag_of(slot)),
    }
}

/// The channel to which a client subscribes, on a single server or, in a cluster, for one slot.
#[must_use]
pub fn inbox_of(client: ClientId, slot: Option<u16>) -> String {
    format!("{}{}", inbox_prefix(slot), digest_of(client))
}

/// The hash slot of [`LAYOUT_KEY`](crate::LAYOUT_KEY).
#[must_use]
pub fn layout_slot() -> u16 {
    slot(crate::layout::LAYOUT_KEY)
}

/// The hash slot of a resource's keys.
#[must_use]
pub fn slot_of(resource: &Resource) -> u16 {
    let mut tag = String::new();
    push_tag(&mut tag, resource);
    slot(&tag)
}

/// A key that shows whether two connections lead to one server, if need be in a slot. It exists for a moment.
#[must_use]
pub fn probe_key_of(random: u128, slot: Option<u16>) -> String {
    let tag = slot.map_or_else(String::new, |slot| format!("{{{}}}:", tag_of(slot)));
    format!("leasehold:probe:{tag}{random:032x}")
}

/// A channel to which one connection subscribes, so that the server of that connection can be told. Nothing is published there.
#[must_use]
pub fn private_channel_of(random: u128) -> String {
    format!("{PREFIX}:private:{random:032x}")
}

/// The hash slot of a cluster's inbox; `None` for any other channel.
#[must_use]
pub fn slot_of_inbox(channel: &[u8]) -> Option<u16> {
    let channel = std::str::from_utf8(channel).ok()?;
    let (tag, _) = channel.strip_prefix(PREFIX)?.strip_prefix(":inbox:{")?.split_once('}')?;
    Some(slot(tag))
}

fn tag_of(slot: u16) -> u32 {
    SLOT_TAGS[usize::from(slot % SLOTS)]
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

    /// Of client 7.
    const DIGEST: &str = "aae36ccd737159a99c3555f66b2a9a0b475eedaf";

    fn mutex(name: &str) -> Resource {
        Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
    }

    #[test]
    fn braces_in_names_are_escaped_without_collisions() {
        let encode = |name| resource_key(&mutex(name));
        assert_eq!(encode("orders:42"), "leasehold:4:{mutex:orders:42}");
        assert_eq!(encode("a}{b"), "leasehold:4:{mutex:a%7D%7Bb}");
        assert_ne!(encode("a%7D"), encode("a}"));
        for name in ["a", "a}{b", "%7D", "%257B", "}", "}:", "ä b"] {
            assert_eq!(resource_of(encode(name).as_bytes()), Some(mutex(name)));
        }
        assert_eq!(resource_of(b"leasehold:4:{else:a}"), None);
        // The names show a digest: sha1sum of the id's 16 bytes.
        assert_eq!(inbox_of(ClientId::new(7), None), format!("leasehold:4:inbox:{DIGEST}"));
    }

    #[test]
    fn key_whose_name_is_not_escaped_is_no_resource() {
        for key in ["{mutex:a}b}", "{mutex:a{b}", "{mutex:50%}", "{mutex:a%7db}"] {
            assert_eq!(resource_of(format!("leasehold:4:{key}").as_bytes()), None, "{key}");
        }
    }

    #[test]
    fn pattern_finds_resources_and_nothing_else() {
        let (before, after) = RESOURCE_PATTERN.split_once('*').unwrap();
        let key = resource_key(&mutex("a}{b"));
        assert!(key.starts_with(before) && key.ends_with(after));
        let client = ClientId::new(7);
        let tombstone =
            tombstone_key(&mutex("a}{b"), Acquisition { client, sequence: leasehold_core::FIRST_REQUESTED });
        assert_eq!(slot(tombstone.split(['{', '}']).nth(1).unwrap()), slot_of(&mutex("a}{b")));
        assert!(!tombstone.contains(&client.to_string()), "{tombstone}");
        for other in
            [clock_key(None), clock_key(Some(7)), inbox_of(client, Some(7)), client_key(client), tombstone]
        {
            assert!(!other.starts_with(before), "{other}");
            assert_eq!(resource_of(other.as_bytes()), None);
        }
    }

    #[test]
    fn every_slot_has_its_own_inbox() {
        // As CLUSTER KEYSLOT has it.
        assert_eq!(slot("foo"), 12_182);
        for slot in [0, 1, 12_182, SLOTS - 1] {
            let channel = inbox_of(ClientId::new(7), Some(slot));
            assert_eq!(slot_of_inbox(channel.as_bytes()), Some(slot));
            let clock = clock_key(Some(slot));
            let (_, tag) = clock.split_once('{').unwrap();
            assert_eq!(super::slot(tag.trim_end_matches('}')), slot);
        }
        assert_eq!(slot_of_inbox(b"leasehold:4:inbox:7"), None);
    }

    #[test]
    fn clock_and_inboxes_are_in_the_slot_of_the_resource() {
        // As CLUSTER KEYSLOT has them; 12980 is the smallest number in slot 1637.
        assert_eq!(slot_of(&mutex("orders:42")), 1_637);
        assert_eq!(slot_of(&mutex("a}{b")), 5_221);
        assert_eq!(clock_key(None), "leasehold:4:clock");
        assert_eq!(clock_key(Some(1_637)), "leasehold:4:clock:{12980}");
        assert_eq!(scratch_key(None), "leasehold:4:scratch");
        assert_eq!(scratch_key(Some(1_637)), "leasehold:4:scratch:{12980}");
        assert_eq!(inbox_prefix(Some(1_637)), "leasehold:4:inbox:{12980}:");
        assert_eq!(slot_of_inbox(b"leasehold:4:inbox:{12980}:7"), Some(1_637));
    }

    #[test]
    fn record_of_a_client_is_in_the_slot_of_its_digest() {
        let key = client_key(ClientId::new(7));
        assert_eq!(key, format!("leasehold:4:client:{{{DIGEST}}}"));
        let (_, tag) = key.split_once('{').unwrap();
        assert_eq!(slot_of_client(ClientId::new(7)), slot(tag.trim_end_matches('}')));
    }
}
