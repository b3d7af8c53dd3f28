//! The cluster as one node sees it: the reply to CLUSTER NODES.

use std::ops::RangeInclusive;

use crate::server::Server;

/// The cluster as one node sees it.
pub(super) struct View {
    pub(super) nodes: Vec<Node>,
}

/// One line of the reply.
pub(super) struct Node {
    pub(super) id: String,
    /// The id of its master, if it is a replica.
    pub(super) master: Option<String>,
    pub(super) has_failed: bool,
    /// In handshake: its address is known, but not its id.
    is_new: bool,
    slots: Vec<RangeInclusive<u16>>,
}

/// Asks this node. None: it does not respond.
pub(super) fn view(node: &Server) -> Option<View> {
    let text: String = node.query(&["CLUSTER", "NODES"]).ok()?;
    Some(View { nodes: text.lines().filter_map(parse).collect() })
}

/// `id host:port@bus,name flags master ping pong epoch link slots…`
fn parse(line: &str) -> Option<Node> {
    let words: Vec<&str> = line.split(' ').collect();
    let [id, _, flags, master, _, _, _, _, slots @ ..] = words.as_slice() else { return None };
    let has = |name: &str| flags.split(',').any(|flag| flag == name);
    Some(Node {
        id: (*id).to_owned(),
        master: (*master != "-").then(|| (*master).to_owned()),
        has_failed: has("fail"),
        is_new: has("handshake"),
        slots: slots.iter().filter_map(|slots| range(slots)).collect(),
    })
}

/// Parses `7` or `7-9`. A migrating slot appears a second time in brackets, which is ignored.
fn range(slots: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

impl View {
    /// Whether it knows the ids of all nodes.
    pub(super) fn is_settled(&self) -> bool {
        self.nodes.iter().all(|node| !node.is_new)
    }

    pub(super) fn of(&self, id: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The id of a slot's master.
    pub(super) fn owner_of(&self, slot: u16) -> Option<String> {
        let owner = self.nodes.iter().find(|node| node.slots.iter().any(|slots| slots.contains(&slot)));
        owner.map(|node| node.id.clone())
    }
}

impl Node {
    pub(super) fn has_slots(&self) -> bool {
        !self.slots.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_parsed_with_flags_and_slots_and_without_migrating_slots() {
        let node =
            parse("07c3 127.0.0.1:30004@31004,host myself,master,fail - 0 1 4 connected 3 5-7 [9->-e7d1]");
        let node = node.unwrap();
        assert!(node.id == "07c3" && node.master.is_none() && node.has_failed && !node.is_new);
        assert_eq!(node.slots, [3..=3, 5..=7]);
        let replica = parse("e7d1 127.0.0.1:30005@31005 slave,handshake 07c3 0 1 4 connected").unwrap();
        assert_eq!(replica.master.as_deref(), Some("07c3"));
        assert!(replica.is_new && !replica.has_failed && !replica.has_slots());
    }
}
