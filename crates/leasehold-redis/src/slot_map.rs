//! The slot map of a cluster, and the reply of `CLUSTER SLOTS`.

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::sync::{Mutex, PoisonError};

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::error::explain;
use super::rights;
use crate::url::{Host, NO_HOST_NAME};

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
pub(super) const OTHER_CLUSTER: &str = "another cluster answers at this address now, so that it is not used: if the cluster was made anew, restart \
     this program";

/// Whether both are of one cluster. A server before Redis 4 says no ids.
pub(super) fn are_of_one_cluster(one: &[SlotRange], other: &[SlotRange]) -> bool {
    let ids = |ranges: &[SlotRange]| -> HashSet<String> {
        ranges.iter().flat_map(|range| range.ids.iter().cloned()).collect()
    };
    let (one, other) = (ids(one), ids(other));
    one.is_empty() || other.is_empty() || !one.is_disjoint(&other)
}

/// The master of each slot.
#[derive(Default)]
pub(super) struct SlotMap {
    /// In order.
    ranges: Vec<SlotRange>,
    /// MOVED redirects since the last refresh.
    moved: HashMap<u16, Host>,
    /// Changes that the waiters have not been told of yet.
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

    /// Whether a node with this map may be one of this cluster. Another server may have got the address of a node.
    pub(super) fn is_of_this_cluster(&self, ranges: &[SlotRange]) -> bool {
        are_of_one_cluster(&self.ranges, ranges)
    }

    /// The masters, each once.
    pub(super) fn masters(&self) -> Vec<Host> {
        let mut hosts: Vec<Host> = self.ranges.iter().map(|range| range.master.clone()).collect();
        hosts.sort();
        hosts.dedup();
        hosts
    }

    /// Records a MOVED redirect. Returns whether the map has changed: pushes are held then until [`Self::end_announcement`].
    pub(super) fn redirect(&mut self, slot: u16, to: Host) -> bool {
        let is_new = self.master_of(slot) != Some(&to);
        if is_new {
            self.moved.insert(slot, to);
            self.unannounced += 1;
        }
        is_new
    }

    /// Keeps a push while the waiters are told of a change. Returns whether it did.
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

    /// Replaces the map. Returns whether any slot has another master: pushes are held then until [`Self::end_announcement`].
    pub(super) fn replace(&mut self, ranges: Vec<SlotRange>) -> bool {
        let masters = |ranges: &[SlotRange]| -> Vec<(u16, u16, Host)> {
            ranges.iter().map(|range| (range.first, range.last, range.master.clone())).collect()
        };
        let is_other = masters(&self.ranges) != masters(&ranges);
        self.ranges = ranges;
        let moved = take(&mut self.moved);
        // The node that was asked may not know of a redirect yet.
        let is_other = is_other || moved.iter().any(|(slot, to)| self.master_of(*slot) != Some(to));
        self.unannounced += usize::from(is_other);
        is_other
    }
}

/// Queries a node for the slot map.
pub(super) async fn query(node: &mut MultiplexedConnection, host: &Host) -> Result<Vec<SlotRange>, String> {
    let reply = ask(node).await;
    let reply = reply.map_err(|error| explain(&rights::of_command(error, "+cluster|slots", None)))?;
    read(&reply, host)
}

/// The same, if the user may ask.
pub(super) async fn query_if_allowed(
    node: &mut MultiplexedConnection,
    host: &Host,
) -> Result<Option<Vec<SlotRange>>, String> {
    match ask(node).await {
        Ok(reply) => read(&reply, host).map(Some),
        Err(error) if error.code() == Some("NOPERM") => Ok(None),
        Err(error) => Err(explain(&error)),
    }
}

async fn ask(node: &mut MultiplexedConnection) -> Result<Value, RedisError> {
    redis::cmd("CLUSTER").arg("SLOTS").query_async(node).await
}

fn read(reply: &Value, host: &Host) -> Result<Vec<SlotRange>, String> {
    let ranges = parse(reply, host).ok_or("the reply to CLUSTER SLOTS has an unknown form")?;
    if ranges.is_empty() { Err("no node has any slots".to_owned()) } else { Ok(ranges) }
}

/// Parses the reply of `CLUSTER SLOTS`. A node without a name is at its IP address, or else at the name of the node that was asked.
fn parse(reply: &Value, asked: &Host) -> Option<Vec<SlotRange>> {
    let Value::Array(entries) = reply else { return None };
    let mut ranges = entries.iter().map(|entry| parse_range(entry, asked)).collect::<Option<Vec<_>>>()?;
    ranges.sort_unstable();
    Some(ranges)
}

fn parse_range(entry: &Value, asked: &Host) -> Option<SlotRange> {
    let Value::Array(entry) = entry else { return None };
    let [Value::Int(first), Value::Int(last), master, replicas @ ..] = &entry[..] else { return None };
    Some(SlotRange {
        first: u16::try_from(*first).ok()?,
        last: u16::try_from(*last).ok()?,
        master: parse_host(master, asked)?,
        replicas: replicas.iter().filter_map(|replica| parse_host(replica, asked)).collect(),
        ids: [master].into_iter().chain(replicas).filter_map(parse_id).collect(),
    })
}

fn parse_id(node: &Value) -> Option<String> {
    let Value::Array(node) = node else { return None };
    match node.get(2)? {
        Value::BulkString(id) => String::from_utf8(id.clone()).ok(),
        Value::SimpleString(id) => Some(id.clone()),
        _ => None,
    }
}

fn parse_host(node: &Value, asked: &Host) -> Option<Host> {
    let Value::Array(node) = node else { return None };
    let [name, Value::Int(port), rest @ ..] = &node[..] else { return None };
    let text = |value: &Value| match value {
        Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    };
    let is_name = |name: &String| !name.is_empty() && name != NO_HOST_NAME;
    let ip = || {
        // The node's id, and a list of names and values.
        let Some(Value::Array(further)) = rest.get(1) else { return None };
        let ip = further.chunks_exact(2).find(|pair| text(&pair[0]).as_deref() == Some("ip"))?;
        text(&ip[1]).filter(is_name)
    };
    let name = text(name).filter(is_name).or_else(ip).unwrap_or_else(|| asked.name.clone());
    Some(Host { name, port: u16::try_from(*port).ok()? })
}

/// For `fuzz/`: any reply is parsed or refused.
#[cfg(feature = "_fuzzing")]
pub fn fuzz(reply: &Value) {
    let asked = Host { name: "asked".to_owned(), port: 6379 };
    let Some(ranges) = parse(reply, &asked) else { return };
    let map = SlotMap { ranges, ..SlotMap::default() };
    for slot in [0, 8_191, 16_383] {
        let _ = map.master_of(slot);
    }
    let _ = map.masters();
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

    /// The node that was asked may not know of the redirect: what was sent to the new master must be sent again.
    #[test]
    fn map_that_undoes_a_redirect_is_another_one() {
        let mut slots = SlotMap::default();
        assert!(slots.replace(vec![range(0, 99, host(1))]));
        assert!(slots.redirect(5, host(2)));
        assert!(slots.replace(vec![range(0, 99, host(1))]));
        assert!(slots.redirect(0, host(2)));
        assert!(slots.replace(vec![range(0, 0, host(2)), range(1, 99, host(1))]));
        assert!(!slots.replace(vec![range(0, 0, host(2)), range(1, 99, host(1))]));
    }

    #[test]
    fn cluster_is_known_by_any_of_its_nodes() {
        let of = |ids: &[&str]| {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            vec![SlotRange { ids, ..range(0, 99, host(1)) }]
        };
        let mut slots = SlotMap::default();
        assert!(slots.is_of_this_cluster(&of(&["a", "b"])), "none is known yet");
        slots.replace(of(&["a", "b"]));
        assert!(slots.is_of_this_cluster(&of(&["b", "c"])) && slots.is_of_this_cluster(&of(&[])));
        assert!(!slots.is_of_this_cluster(&of(&["c", "d"])));
        slots.replace(of(&["b", "c"]));
        assert!(!slots.is_of_this_cluster(&of(&["a"])));
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
        assert!(slots.replace(vec![range(0, 99, host(1))]));
        assert!(hold(&slots, 1));
        assert!(slots.redirect(5, host(2)) && !slots.redirect(5, host(2)));
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
        assert!(slots.replace(ranges.clone()) && !slots.replace(ranges));
        let found = |slots: &SlotMap, slot| slots.master_of(slot).map(|host| host.port);
        assert_eq!(
            [0, 99, 100, 101, 200, 299, 300].map(|slot| found(&slots, slot)),
            [Some(1), Some(1), Some(2), None, Some(3), Some(3), None]
        );
        assert!(slots.redirect(99, host(3)) && !slots.redirect(99, host(3)));
        assert_eq!(found(&slots, 99), Some(3));
        assert_eq!(found(&slots, 98), Some(1));
        assert_eq!(slots.masters(), [host(1), host(2), host(3)]);
    }

    #[test]
    fn node_without_a_name_is_the_queried_node() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |name: Value| Value::Array(vec![name, Value::Int(7000), bulk("id")]);
        let entry = |name: Value| {
            let replica = Value::Array(vec![Value::BulkString(b"r".to_vec()), Value::Int(7001)]);
            Value::Array(vec![Value::Int(0), Value::Int(5), node(name), replica])
        };
        for (name, expected) in [
            (Value::Nil, "asked"),
            (Value::BulkString(Vec::new()), "asked"),
            (bulk("b"), "b"),
            (bulk("?"), "asked"),
        ] {
            let asked = Host { name: "asked".to_owned(), port: 1 };
            let ranges = parse(&Value::Array(vec![entry(name)]), &asked).unwrap();
            let master = Host { name: expected.to_owned(), port: 7000 };
            let replicas = vec![Host { name: "r".to_owned(), port: 7001 }];
            assert_eq!(ranges, [SlotRange { replicas, ids: vec!["id".to_owned()], ..range(0, 5, master) }]);
        }
        // A node that has no host name, where nodes are to be named by theirs.
        let further = Value::Array(vec![bulk("hostname"), bulk(""), bulk("ip"), bulk("10.0.0.1")]);
        let unnamed = Value::Array(vec![bulk("?"), Value::Int(7000), bulk("id"), further]);
        let found = parse_host(&unnamed, &host(1)).unwrap();
        assert_eq!(found, Host { name: "10.0.0.1".to_owned(), port: 7000 });
        assert!(parse(&Value::Okay, &host(1)).is_none());
    }
}
