//! What one node knows about its cluster: the answer to CLUSTER NODES.

use std::ops::RangeInclusive;

use crate::server::Server;

/// A cluster as one node sees it.
pub(super) struct View {
    pub(super) nodes: Vec<Node>,
}

/// One line of it.
pub(super) struct Node {
    pub(super) id: String,
    /// The id of the node that it is a replica of.
    pub(super) master: Option<String>,
    pub(super) has_failed: bool,
    /// Its address is known, but not yet who it is.
    is_new: bool,
    slots: Vec<RangeInclusive<u16>>,
}

/// What this node sees, if it answers.
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

/// `7`, `7-9`, or in brackets a slot that is being moved, which is listed without brackets too.
fn range(slots: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

impl View {
    /// Whether it knows who all of its nodes are.
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
    fn a_line_is_read_with_its_flags_its_slots_and_without_what_is_being_moved() {
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
