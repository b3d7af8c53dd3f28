//! Checks a server that restricts what scripts may do, over the connection of the store: most questions to a server are refused there, or
//! answered by one of several servers.

use std::collections::HashMap;
use std::time::Instant;

use leasehold_core::Failure;
use leasehold_redis_protocol::ScriptVariant;
use leasehold_store::{Check, Component, StoreError};

use super::acl_check::{self, Probe};
use super::probe;
use super::query::info_by;
use crate::connections::Connections;
use crate::deletes::NO_DELETES;

/// By the end of a host's name, or by what INFO calls the system: who runs the server.
const PROVIDERS: [(&str, &str); 8] = [
    ("cache.amazonaws.com", "Amazon ElastiCache"),
    ("cache.amazonaws.com.cn", "Amazon ElastiCache"),
    ("Amazon ElastiCache", "Amazon ElastiCache"),
    ("redis.rds.aliyuncs.com", "Alibaba Cloud Tair"),
    ("redis.cache.windows.net", "Azure Cache for Redis"),
    ("redis.azure.net", "Azure Managed Redis"),
    ("upstash.io", "Upstash"),
    ("tencentcdb.com", "Tencent Cloud"),
];

/// Who runs the server at this address, if that shows.
fn provider(address: &str, info: &HashMap<String, String>) -> Option<&'static str> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let system = info.get("os").map_or("", |system| system.trim());
    let is_of = |(mark, _): &&(&str, &str)| host.ends_with(mark) || system == *mark;
    PROVIDERS.iter().find(is_of).map(|(_, name)| *name)
}

/// Checks the server behind these connections.
pub(super) async fn check(connections: &Connections, address: &str) -> Result<Component, StoreError> {
    let failed = |message: String| StoreError::new(Failure::Unknown, message);
    let mut connection = connections.driver_conn();
    let mut component = Component::new(format!("proxy {address}"));
    let mut info = info_by(&mut connection, &["INFO", "server"]).await;
    info.extend(info_by(&mut connection, &["INFO", "memory"]).await);
    if let Some(version) = info.get("valkey_version").or_else(|| info.get("redis_version")) {
        component.fact("version", version.trim());
    }
    if let Some(provider) = provider(address, &info) {
        component.fact("provider", provider);
    }
    component
        .fact("round trip", format_args!("{:?}", probe::round_trip(&mut connection).await.map_err(failed)?));
    let trial = Probe::new(&[]).map_err(|error| failed(error.to_string()))?;
    let began = Instant::now();
    match acl_check::lock_and_release(&connection, ScriptVariant::Restricted, &trial, 0, &NO_DELETES).await {
        Ok(_) => component.fact("lock and release", format_args!("{:?}", began.elapsed())),
        Err(error) => {
            let what = format!("a lock can't be acquired and released: {error}");
            component.danger(Check::LockTrial, what, "no lock can be acquired", None);
        }
    }
    component.advice(
        Check::Proxy,
        "scripts are restricted, as behind a proxy",
        "the client that releases sends the message to the next waiter: if it ends before, that waiter asks within 1.5 s. A waiter that is \
         gone may keep a lock for 3 s. Several locks are acquired one after the other",
        None,
    );
    if connections.are_pushes_lost() {
        component.advice(
            Check::ProxyMessages,
            "messages do not arrive (PUBLISH, SUBSCRIBE)",
            "waiters ask 4 times a second, and the first one 20 times: a hand-over takes up to 300 ms",
            None,
        );
    }
    if let Some(policy) =
        info.get("maxmemory_policy").map(|policy| policy.trim()).filter(|policy| *policy != "noeviction")
    {
        component.danger(
            Check::Eviction,
            format!("maxmemory-policy is {policy}"),
            "a server that is short of memory evicts locks, so that one lock can get two holders",
            Some("set maxmemory-policy to noeviction, in the settings of the provider".to_owned()),
        );
    }
    Ok(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_is_known_by_the_host_or_by_the_system() {
        let info = |system: &str| HashMap::from([("os".to_owned(), format!("{system}\r"))]);
        for (address, system, name) in [
            ("locks.serverless.euc1.cache.amazonaws.com:6379", "", Some("Amazon ElastiCache")),
            ("10.0.0.1:6379", "Amazon ElastiCache", Some("Amazon ElastiCache")),
            ("r-x.redis.rds.aliyuncs.com:6379", "Linux 6.1", Some("Alibaba Cloud Tair")),
            ("127.0.0.1:6379", "Linux 6.1", None),
        ] {
            assert_eq!(provider(address, &info(system)), name, "{address}");
        }
    }
}
