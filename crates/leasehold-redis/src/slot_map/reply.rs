//! `CLUSTER SLOTS`: the question and its reply.

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::SlotRange;
use crate::error::explain;
use crate::rights;
use crate::url::{Host, NO_HOST_NAME};

/// Queries a node for the slot map.
pub(crate) async fn query(node: &mut MultiplexedConnection, host: &Host) -> Result<Vec<SlotRange>, String> {
    let reply = ask(node).await;
    let reply = reply.map_err(|error| explain(&rights::of_command(error, "+cluster|slots", None)))?;
    read(&reply, host)
}

/// The same, if the user may ask.
pub(crate) async fn query_if_allowed(
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
    let map = super::SlotMap { ranges, ..super::SlotMap::default() };
    for slot in [0, 8_191, 16_383] {
        let _ = map.master_of(slot);
    }
    let _ = map.masters();
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let ids = vec!["id".to_owned()];
            assert_eq!(ranges, [SlotRange { first: 0, last: 5, master, replicas, ids }]);
        }
        // A node that has no host name, where nodes are to be named by theirs.
        let further = Value::Array(vec![bulk("hostname"), bulk(""), bulk("ip"), bulk("10.0.0.1")]);
        let unnamed = Value::Array(vec![bulk("?"), Value::Int(7000), bulk("id"), further]);
        let asked = Host { name: "asked".to_owned(), port: 1 };
        let found = parse_host(&unnamed, &asked).unwrap();
        assert_eq!(found, Host { name: "10.0.0.1".to_owned(), port: 7000 });
        assert!(parse(&Value::Okay, &asked).is_none());
    }
}
