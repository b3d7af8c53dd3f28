//! Addresses of a Redlock quorum.

use std::fmt;
use std::time::Duration;

use leasehold_core::{MAX_TTL, MIN_TTL};
use leasehold_redis::RedisUrl;
use leasehold_store::OpenError;

/// The minimum number of nodes: one server is no quorum, and has a majority of itself after every restart. Two must both be there.
const MIN_NODES: usize = 2;

/// The maximum number of nodes. Every lock costs a request to each of them.
const MAX_NODES: usize = 15;

/// The addresses of the nodes, and the options of the vote.
#[derive(Clone, PartialEq, Eq)]
pub struct RedlockUrl {
    /// The addresses.
    pub nodes: Vec<RedisUrl>,
    /// Whether tokens are fencing tokens.
    pub is_fenced: bool,
    /// The time limit for a node's answer, if it is set.
    pub node_timeout: Option<Duration>,
    /// The longest ttl: a node that may have forgotten something abstains for this long.
    pub max_ttl: Option<Duration>,
    /// The list of hosts, if the address was written as one.
    hosts: Option<String>,
}

impl RedlockUrl {
    /// A quorum of these nodes, with the default options. It is not checked.
    #[must_use]
    pub fn new(nodes: Vec<RedisUrl>) -> Self {
        Self { nodes, is_fenced: true, node_timeout: None, max_ttl: None, hosts: None }
    }

    /// `//[user:password@]host[:port],…[/database]`, for nodes that differ in nothing else; or whole addresses of any
    /// kind, with spaces between them. Parameters that are not the quorum's own apply to each node.
    ///
    /// # Errors
    ///
    /// It is no such address. The message contains no password.
    pub fn parse(rest: &str) -> Result<Self, OpenError> {
        let url = if rest.starts_with("//") { Self::of_hosts(rest)? } else { Self::of_addresses(rest)? };
        url.checked()
    }

    fn of_hosts(rest: &str) -> Result<Self, OpenError> {
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = Self::new(Vec::new());
        let (mut node_parameters, mut scheme) = (Vec::new(), "redis");
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            match parameter {
                "tls" | "tls=true" | "tls=1" | "tls=yes" => scheme = "rediss",
                "tls=false" | "tls=0" | "tls=no" => scheme = "redis",
                _ if url.set(parameter)? => {}
                _ => node_parameters.push(parameter),
            }
        }
        let (authority, path) = place[2..].split_once('/').unwrap_or((&place[2..], ""));
        let (login, hosts) =
            authority.rsplit_once('@').map_or(("", authority), |(login, hosts)| (login, hosts));
        let at = if authority.contains('@') { "@" } else { "" };
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        url.hosts = Some(format!("{hosts}{path}"));
        for host in hosts.split(',') {
            let address = format!("//{login}{at}{host}{path}?{}", node_parameters.join("&"));
            url.nodes.push(RedisUrl::parse(scheme, &address)?);
        }
        Ok(url)
    }

    fn of_addresses(rest: &str) -> Result<Self, OpenError> {
        let mut url = Self::new(Vec::new());
        for word in rest.split_whitespace() {
            if let Some(query) = word.strip_prefix('?') {
                for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
                    if !url.set(parameter)? {
                        return Err(unknown_parameter());
                    }
                }
                continue;
            }
            url.nodes.push(RedisUrl::of_node(word)?);
        }
        Ok(url)
    }

    /// Sets a parameter of the quorum's own. Returns whether it is one.
    fn set(&mut self, parameter: &str) -> Result<bool, OpenError> {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match name {
            "unfenced" => {
                self.is_fenced = match value {
                    "" | "true" | "1" | "yes" => false,
                    "false" | "0" | "no" => true,
                    _ => return Err(OpenError::invalid("unfenced is true or false")),
                };
            }
            "node_timeout_ms" => self.node_timeout = Some(milliseconds(name, value)?),
            "max_ttl_ms" => self.max_ttl = Some(milliseconds(name, value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The same, if it is a quorum.
    ///
    /// # Errors
    ///
    /// There are too few or too many nodes, or one of them twice, or an option is out of its range.
    pub fn checked(self) -> Result<Self, OpenError> {
        let count = self.nodes.len();
        if !(MIN_NODES..=MAX_NODES).contains(&count) {
            let advice =
                if count == 1 { "; for one server, write its own address, redis://host" } else { "" };
            return Err(OpenError::invalid(format!(
                "a quorum has {MIN_NODES} to {MAX_NODES} nodes, better three or five, not {count}: \
                 redlock://host[:port],host[:port],…, or redlock: and whole addresses with spaces between them{advice}"
            )));
        }
        if self.node_timeout.is_some_and(|limit| limit.is_zero() || limit > MAX_TTL) {
            return Err(OpenError::invalid(
                "the time limit for a node's answer is more than zero, and at most 30 days",
            ));
        }
        if self.max_ttl.is_some_and(|longest| !(MIN_TTL..=MAX_TTL).contains(&longest)) {
            return Err(OpenError::invalid(format!(
                "max_ttl is between {MIN_TTL:?} and 30 days, as every ttl"
            )));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            if node.is_cluster() {
                return Err(OpenError::invalid(
                    "a cluster can't be one of the nodes: write the address of one server",
                ));
            }
            if self.nodes[..index].iter().any(|other| other.is_same_server(node)) {
                return Err(OpenError::invalid(format!(
                    "{node} is named twice, so its vote would count twice"
                )));
            }
        }
        Ok(self)
    }
}

fn milliseconds(name: &str, value: &str) -> Result<Duration, OpenError> {
    let number = value.parse().ok().filter(|number| (1..=30 * 24 * 3_600_000).contains(number));
    number
        .map(Duration::from_millis)
        .ok_or_else(|| OpenError::invalid(format!("{name} is a number of milliseconds, 30 days at most")))
}

fn unknown_parameter() -> OpenError {
    // The text may be part of a password, so the message does not contain it.
    OpenError::invalid("the address has an unknown parameter: docs/operations.md lists them")
}

impl fmt::Display for RedlockUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hosts) = &self.hosts {
            return write!(f, "redlock://{hosts}");
        }
        f.write_str("redlock:")?;
        for (index, node) in self.nodes.iter().enumerate() {
            write!(f, "{}{node}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> RedlockUrl {
        RedlockUrl::parse(url.strip_prefix("redlock:").unwrap()).unwrap()
    }

    #[test]
    fn host_list_gives_every_node_the_same_login_and_parameters() {
        let url = parsed(
            "redlock://me:secret@a,b:7000,[::1]/2?tls=true&ca=/ca.pem&node_timeout_ms=80&max_ttl_ms=30000",
        );
        let each: Vec<RedisUrl> = ["a", "b:7000", "[::1]"]
            .into_iter()
            .map(|host| RedisUrl::of_node(&format!("rediss://me:secret@{host}/2?ca=/ca.pem")).unwrap())
            .collect();
        assert!(url.nodes == each);
        assert_eq!(url.to_string(), "redlock://a,b:7000,[::1]/2");
        assert_eq!(url.nodes[0].to_string(), "rediss://a/2");
        assert_eq!(url.node_timeout, Some(Duration::from_millis(80)));
        assert_eq!(url.max_ttl, Some(Duration::from_secs(30)));
        assert!(url.is_fenced && !parsed("redlock://a,b,c?unfenced").is_fenced);
    }

    #[test]
    fn addresses_separated_by_spaces_may_differ_in_kind() {
        let url = parsed("redlock:redis://:one@a ?unfenced rediss://:two@b redis-sentinel://c,d/master");
        assert_eq!(url.nodes.len(), 3);
        let node = |address| RedisUrl::of_node(address).unwrap();
        assert!(
            !url.is_fenced
                && url.nodes[0] == node("redis://:one@a")
                && url.nodes[1] == node("rediss://:two@b")
        );
        assert_eq!(url.to_string(), "redlock:redis://a rediss://b redis-sentinel://c,d/master");
    }

    #[test]
    fn invalid_quorum_is_refused() {
        let sixteen = vec!["a"; 16].join(",");
        for (url, says) in [
            ("redlock:", "2 to 15 nodes, better three or five, not 0"),
            ("redlock://a", "not 1: "),
            ("redlock:redis://a", "write its own address, redis://host"),
            (&format!("redlock://{sixteen}"), "not 16: "),
            ("redlock://", "a host is"),
            ("redlock://a,,b", "a host is"),
            ("redlock://a,b,a", "named twice"),
            ("redlock:redis://a redis-cluster://b", "a cluster can't be"),
            ("redlock:memory: sqlite:a", "a node's address begins with"),
            ("redlock://a?unfenced=maybe", "true or false"),
            ("redlock://a?node_timeout_ms=0", "a number of milliseconds"),
            ("redlock://a?max_ttl_ms=30s", "a number of milliseconds"),
            ("redlock://a?colour=red", "an unknown parameter"),
        ] {
            let error = RedlockUrl::parse(url.strip_prefix("redlock:").unwrap()).map(drop).unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains(says), "{url}: {error}");
        }
    }
}
