//! The one place where keys and channels are spelled.

use std::fmt::Write as _;

use leasehold_core::{ClientId, Kind, Name, Resource};

/// Counted up when a key changes its form, so that two versions never read each other's.
const LAYOUT: &str = "leasehold:1";

/// What `model.lua` calls its keys, in its order.
const PARTS: [&str; 9] =
    ["state", "leases", "expiries", "owners", "waiters", "ready", "deadlines", "clients", "tombstones"];

/// The keys of a resource, all in one hash slot.
pub(super) fn keys(resource: &Resource) -> [String; 9] {
    let tag = tag(resource);
    PARTS.map(|part| format!("{LAYOUT}:{{{tag}}}:{part}"))
}

/// The pattern of every resource's state.
pub(super) fn every_state() -> String {
    format!("{LAYOUT}:{{*}}:{}", PARTS[0])
}

/// Whose state this key is; none where somebody else spelled it.
pub(super) fn resource_of(key: &[u8]) -> Option<Resource> {
    let key = std::str::from_utf8(key).ok()?;
    let tag = key.strip_prefix(LAYOUT)?.strip_prefix(":{")?.strip_suffix(PARTS[0])?.strip_suffix("}:")?;
    let (kind, name) = tag.split_once(':')?;
    let name = name.replace("%7B", "{").replace("%7D", "}").replace("%25", "%");
    Some(Resource { kind: Kind::parse(kind)?, name: Name::new(&name).ok()? })
}

/// What comes before a client's id in the name of its inbox.
pub(super) fn inbox() -> String {
    format!("{LAYOUT}:inbox:")
}

/// The channel that a client hears.
pub(super) fn inbox_of(client: ClientId) -> String {
    format!("{}{client}", inbox())
}

/// Kind and name. Braces would end the hash tag where they stand.
fn tag(resource: &Resource) -> String {
    let mut tag = format!("{}:", resource.kind);
    for character in resource.name.as_str().chars() {
        match character {
            '{' | '}' | '%' => {
                let _ = write!(tag, "%{:02X}", u32::from(character));
            }
            other => tag.push(other),
        }
    }
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_braces_stays_in_one_slot_and_no_two_names_meet() {
        let spelled = |name| keys(&Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() })[0].clone();
        assert_eq!(spelled("orders:42"), "leasehold:1:{mutex:orders:42}:state");
        assert_eq!(spelled("a}{b"), "leasehold:1:{mutex:a%7D%7Bb}:state");
        assert_ne!(spelled("a%7D"), spelled("a}"));
        for name in ["a", "a}{b", "%7D", "%257B", "}:state", "ä b"] {
            let resource = Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
            assert_eq!(resource_of(spelled(name).as_bytes()), Some(resource));
        }
        assert_eq!(resource_of(b"leasehold:1:{else:a}:state"), None);
        assert_eq!(inbox_of(ClientId::new(7)), "leasehold:1:inbox:00000000000000000000000000000007");
    }
}
