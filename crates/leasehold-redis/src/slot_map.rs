//! The slot map of a cluster, and whether another map is of the same one.

mod reply;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::mem::{replace, take};
use std::sync::{Mutex, PoisonError};

use leasehold_redis_protocol::SLOTS;

use crate::url::Host;
#[cfg(feature = "_fuzzing")]
pub use reply::fuzz;
pub(super) use reply::{query, query_if_allowed};

/// A range of hash slots and the nodes that have it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotRange {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) master: Host,
    pub(super) replicas: Vec<Host>,
    /// The ids of these nodes, which no other cluster has.
    pub(super) ids: Vec<String>,
}

/// What is wrong with a node of which the slot map has no node in common with the known one.
pub(super) const OTHER_CLUSTER: &str = "another cluster answers at this address now, so that it is not used yet: if the cluster was made anew, it is \
     used after a minute, or when this program is restarted";

/// What is wrong with a node while its slot map has few nodes in common with the known one.
pub(super) const UNCLEAR: &str = "it names few of the known nodes of the cluster, so that it is not used unless most of these say the same: use CLUSTER RESET \
     HARD before a node joins another cluster; if all nodes were replaced, restart this program";

/// Whether a node with some slot map is of the cluster of a known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Membership {
    Member,
    /// Its map has few of the known shards. The cluster was changed, or it is a node of another one that a node of this one has joined
    /// with the id that it had.
    Unclear,
    Stranger,
}

/// Whether a node with the map `found` is of the cluster of the map `known`: it is if it names a node of most shards, of each the master or
/// a replica. A server before Redis 4 says no ids.
pub(super) fn membership(known: &[SlotRange], found: &[SlotRange]) -> Membership {
    let found: HashSet<&String> = found.iter().flat_map(|range| &range.ids).collect();
    let mut shards = HashMap::<&Host, HashSet<&String>>::new();
    for range in known {
        shards.entry(&range.master).or_default().extend(&range.ids);
    }
    shards.retain(|_, ids| !ids.is_empty());
    let kept = shards.values().filter(|ids| !ids.is_disjoint(&found)).count();
    match kept {
        _ if shards.is_empty() || found.is_empty() => Membership::Member,
        0 => Membership::Stranger,
        kept if kept > shards.len() / 2 => Membership::Member,
        _ => Membership::Unclear,
    }
}

/// The map on which more than half of `voters` agree, of those that they have sent.
pub(super) fn agreed(maps: &[Vec<SlotRange>], voters: usize) -> Option<&Vec<SlotRange>> {
    let votes =
        |map: &[SlotRange]| maps.iter().filter(|other| membership(map, other) == Membership::Member).count();
    maps.iter().find(|map| votes(map) > voters / 2)
}

/// Whether both maps say the same master of each slot.
pub(super) fn same_masters(one: &[SlotRange], other: &[SlotRange]) -> bool {
    // By their ids, since not all nodes name another one by the same address. The master's is the first.
    let same = |(one, other): (&SlotRange, &SlotRange)| match (one.ids.first(), other.ids.first()) {
        (Some(id), Some(other_id)) => id == other_id,
        _ => one.master == other.master,
    };
    let slots =
        |ranges: &[SlotRange]| ranges.iter().map(|range| (range.first, range.last)).collect::<Vec<_>>();
    slots(one) == slots(other) && one.iter().zip(other).all(same)
}

/// Maps of nodes of one cluster, of which some may be cut off from the others, and name masters that were replaced.
pub(super) struct Votes {
    /// Whose maps count.
    voters: Vec<Host>,
    /// Nodes that may be cut off: nothing speaks for a map in which they are masters, or that they have sent.
    doubted: BTreeSet<Host>,
    maps: Vec<(Host, Vec<SlotRange>)>,
}

impl Votes {
    pub(super) fn new(voters: Vec<Host>, doubted: BTreeSet<Host>) -> Self {
        Self { voters, doubted, maps: Vec::new() }
    }

    /// Adds the map of a node.
    pub(super) fn add(&mut self, host: Host, map: Vec<SlotRange>) {
        self.maps.push((host, map));
    }

    /// The map on which most of all voters agree.
    pub(super) fn agreed(&self) -> Option<&Vec<SlotRange>> {
        let found = self.maps.iter().find(|(_, map)| self.votes_for(map) > self.voters.len() / 2);
        found.map(|(_, map)| map)
    }

    /// The map that counts if no further one comes: the first of those for which most speaks.
    pub(super) fn best(&self) -> Option<&Vec<SlotRange>> {
        let rank = |(sender, map): &&(Host, Vec<SlotRange>)| {
            let is_safe = !self.doubted.contains(sender) && !names_as_master(map, &self.doubted);
            let all = self.maps.iter().filter(|(_, other)| same_masters(map, other)).count();
            (is_safe, self.votes_for(map), all)
        };
        // The last of equal ones is the maximum.
        self.agreed().or_else(|| self.maps.iter().rev().max_by_key(rank).map(|(_, map)| map))
    }

    fn votes_for(&self, map: &[SlotRange]) -> usize {
        let votes = |(sender, other): &&(Host, Vec<SlotRange>)| {
            self.voters.contains(sender) && !self.doubted.contains(sender) && same_masters(map, other)
        };
        self.maps.iter().filter(votes).count()
    }
}

/// Whether one of these nodes is a master in this map.
pub(super) fn names_as_master(map: &[SlotRange], nodes: &BTreeSet<Host>) -> bool {
    map.iter().any(|range| nodes.contains(&range.master))
}

/// The master of each slot.
#[derive(Default)]
pub(super) struct SlotMap {
    /// In order.
    ranges: Vec<SlotRange>,
    /// MOVED redirects since the last refresh.
    moved: HashMap<u16, Host>,
    /// Changes that the waiters have not been notified of yet.
    unannounced: usize,
    /// Pushes that came meanwhile: the waiters would measure them by the old node's clock.
    held: Mutex<Vec<HeldPush>>,
}

/// Delivers a push.
pub(super) type HeldPush = Box<dyn FnOnce() + Send>;

impl SlotMap {
    /// The known master of a slot.
    pub(super) fn master_of(&self, slot: u16) -> Option<&Host> {
        self.moved.get(&slot).or_else(|| {
            let at = self.ranges.partition_point(|range| range.last < slot);
            self.ranges.get(at).filter(|range| range.first <= slot).map(|range| &range.master)
        })
    }

    /// Whether a node with this map is one of this cluster. Another server may have got the address of a node.
    pub(super) fn membership_of(&self, ranges: &[SlotRange]) -> Membership {
        membership(&self.ranges, ranges)
    }

    /// Whether this map says the same masters as the last one that was adopted.
    pub(super) fn has_masters_of(&self, ranges: &[SlotRange]) -> bool {
        same_masters(&self.ranges, ranges)
    }

    /// The masters, each once.
    pub(super) fn masters(&self) -> Vec<Host> {
        let mut hosts: Vec<Host> = self.ranges.iter().map(|range| range.master.clone()).collect();
        hosts.sort();
        hosts.dedup();
        hosts
    }

    /// The masters and the replicas, each once.
    pub(super) fn nodes(&self) -> BTreeSet<Host> {
        self.ranges.iter().flat_map(|range| range.replicas.iter().chain([&range.master])).cloned().collect()
    }

    /// Records MOVED redirects. Returns the slots that have another master now. If there are some, pushes are held until
    /// [`Self::end_announcement`].
    pub(super) fn redirect(&mut self, redirects: impl IntoIterator<Item = (u16, Host)>) -> HashSet<u16> {
        let mut changed = HashSet::new();
        for (slot, to) in redirects {
            if self.master_of(slot) != Some(&to) {
                self.moved.insert(slot, to);
                changed.insert(slot);
            }
        }
        self.unannounced += usize::from(!changed.is_empty());
        changed
    }

    /// Keeps a push while the waiters are notified of a change. Returns whether it did.
    pub(super) fn hold(&self, push: impl FnOnce() -> HeldPush) -> bool {
        let is_held = self.unannounced > 0;
        if is_held {
            self.held.lock().unwrap_or_else(PoisonError::into_inner).push(push());
        }
        is_held
    }

    /// The waiters know of a change. Returns the pushes that can be delivered now.
    pub(super) fn end_announcement(&mut self) -> Vec<HeldPush> {
        self.unannounced -= 1;
        if self.unannounced > 0 {
            return Vec::new();
        }
        take(self.held.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the map. Returns the slots that have another master now, also those of a redirect that the node which was asked does not
    /// know of yet. If there are some, pushes are held until [`Self::end_announcement`].
    pub(super) fn replace(&mut self, ranges: Vec<SlotRange>) -> HashSet<u16> {
        let before = Self {
            ranges: replace(&mut self.ranges, ranges),
            moved: take(&mut self.moved),
            ..Self::default()
        };
        let changed: HashSet<u16> =
            (0..SLOTS).filter(|slot| self.master_of(*slot) != before.master_of(*slot)).collect();
        self.unannounced += usize::from(!changed.is_empty());
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(port: u16) -> Host {
        Host { name: "h".to_owned(), port }
    }

    /// A range without replicas.
    fn range(first: u16, last: u16, master: Host) -> SlotRange {
        SlotRange { first, last, master, replicas: Vec::new(), ids: Vec::new() }
    }

    /// The node that was asked may not know of a redirect: what was sent to the new master must be sent again.
    #[test]
    fn new_map_names_the_slots_that_have_another_master_now() {
        let mut slots = SlotMap::default();
        let one = || vec![range(0, 99, host(1))];
        assert_eq!(slots.replace(one()), (0..100).collect());
        assert_eq!(slots.redirect([(5, host(2)), (6, host(1))]), HashSet::from([5]));
        assert_eq!(slots.replace(one()), HashSet::from([5]), "it undoes the redirect");
        slots.redirect([(0, host(2))]);
        let two = || vec![range(0, 1, host(2)), range(2, 98, host(1))];
        assert_eq!(slots.replace(two()), HashSet::from([1, 99]), "the redirect was known");
        assert_eq!(slots.replace(two()), HashSet::new());
    }

    /// A shard for each word: the ids of its master and its replicas, by one letter each.
    fn shards(ids: &str) -> Vec<SlotRange> {
        let shard = |(port, ids): (u16, &str)| SlotRange {
            ids: ids.chars().map(String::from).collect(),
            ..range(port, port, host(port))
        };
        (0..).zip(ids.split(' ')).map(shard).collect()
    }

    #[test]
    fn cluster_is_known_by_a_node_of_most_shards() {
        use Membership::{Member, Stranger, Unclear};
        for (known, found, expected) in [
            ("", "a", Member),
            ("a b c", "", Member),
            ("a b c", "a b c", Member),
            ("a b c", "a b x", Member),
            ("a b c", "a x y", Unclear),
            ("a b c", "x y z", Stranger),
            ("a b", "a", Unclear),
            ("a b", "a x", Unclear),
            ("a b", "a b x", Member),
            ("a", "a x", Member),
            ("ax by cz", "x y c", Member),
            ("ax by cz", "ax p q", Unclear),
            ("abc x y", "ab bc", Unclear),
        ] {
            let mut slots = SlotMap::default();
            assert_eq!(slots.membership_of(&shards(found)), Member, "none is known yet");
            slots.replace(shards(known));
            assert_eq!(slots.membership_of(&shards(found)), expected, "{known} and {found}");
        }
    }

    #[test]
    fn map_counts_if_most_nodes_agree_on_it() {
        for (maps, voters, expected) in [
            (&["a"][..], 1, Some("a")),
            (&["a"], 2, None),
            (&["a x", "a x", "b p q"], 3, Some("a x")),
            (&["b p q", "a x", "a x y"], 3, Some("a x")),
            (&["b p q", "a x"], 2, None),
            (&["b p q", "a x", "a x"], 4, None),
        ] {
            let maps: Vec<_> = maps.iter().map(|ids| shards(ids)).collect();
            assert_eq!(agreed(&maps, voters), expected.map(shards).as_ref());
        }
    }

    /// Three shards at the ports 1 to 3, or 4 in the place of 1, whose replica it was.
    #[test]
    fn map_of_most_masters_counts_and_not_that_of_nodes_that_are_cut_off() {
        let map = |masters: [u16; 3]| -> Vec<SlotRange> {
            let ids = |port: u16| vec![port.to_string()];
            let shard = |(slot, port)| SlotRange { ids: ids(port), ..range(slot, slot, host(port)) };
            (0..).zip(masters).map(shard).collect()
        };
        let (old, new) = (map([1, 2, 3]), map([4, 2, 3]));
        // Who has answered with which map, in this order.
        for (answers, doubted, agreed, best) in [
            (&[(1, &old), (2, &new), (3, &new)][..], &[][..], Some(&new), Some(&new)),
            (&[(1, &old), (2, &old)], &[], Some(&old), Some(&old)),
            // A replica that is cut off with its master answers first.
            (&[(5, &old), (2, &new), (3, &new)], &[1], Some(&new), Some(&new)),
            (&[(5, &old), (6, &old), (2, &new)], &[1], None, Some(&new)),
            (&[(1, &old), (5, &old), (4, &new)], &[1], None, Some(&new)),
            (&[(1, &old), (2, &old)], &[1], None, Some(&old)),
            (&[(5, &old), (6, &new), (2, &new)], &[], None, Some(&new)),
            (&[(5, &old), (4, &new)], &[], None, Some(&old)),
            (&[], &[1], None, None),
        ] {
            let doubted = doubted.iter().copied().map(host).collect();
            let mut votes = Votes::new([1, 2, 3].map(host).into(), doubted);
            answers.iter().for_each(|(port, map)| votes.add(host(*port), (*map).clone()));
            assert_eq!(votes.agreed(), agreed);
            assert_eq!(votes.best(), best);
        }
        assert!(same_masters(&old, &old) && !same_masters(&old, &new) && !same_masters(&old, &old[..2]));
    }

    #[test]
    fn pushes_are_held_until_the_waiters_know_of_every_change() {
        let mut slots = SlotMap::default();
        let (sender, delivered) = std::sync::mpsc::channel();
        let hold = |slots: &SlotMap, number: u32| {
            let sender = sender.clone();
            slots.hold(|| Box::new(move || sender.send(number).unwrap()))
        };
        assert!(!hold(&slots, 0));
        assert!(!slots.replace(vec![range(0, 99, host(1))]).is_empty());
        assert!(hold(&slots, 1));
        // Two slots are one change.
        slots.redirect([(5, host(2)), (6, host(2))]);
        slots.redirect([(5, host(2))]);
        assert!(hold(&slots, 2));
        assert!(slots.end_announcement().is_empty());
        assert!(hold(&slots, 3));
        slots.end_announcement().into_iter().for_each(|deliver| deliver());
        assert_eq!(delivered.try_iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert!(!hold(&slots, 4));
    }

    #[test]
    fn slot_is_found_in_its_range_unless_redirected() {
        let ranges = vec![range(0, 99, host(1)), range(100, 100, host(2)), range(200, 299, host(3))];
        let mut slots = SlotMap::default();
        slots.replace(ranges);
        let found = |slots: &SlotMap, slot| slots.master_of(slot).map(|host| host.port);
        assert_eq!(
            [0, 99, 100, 101, 200, 299, 300].map(|slot| found(&slots, slot)),
            [Some(1), Some(1), Some(2), None, Some(3), Some(3), None]
        );
        slots.redirect([(99, host(3))]);
        assert_eq!(found(&slots, 99), Some(3));
        assert_eq!(found(&slots, 98), Some(1));
        assert_eq!(slots.masters(), [host(1), host(2), host(3)]);
    }
}
