//! Opens connections: to the first host of the address, and network address of the host, that lets it, each within its own time limit.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_core::Failure;
use leasehold_store::credentials::{CredentialRequest, ServerRole};
use leasehold_store::login::{Login, PasswordSource, Secret};
use leasehold_store::reread::first_read;
use leasehold_store::{OpenError, StoreError};
use tokio::net::lookup_host;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};
use tokio_postgres::{Config, Error};

use super::conn::{Conn, MessageHandler};
use super::error;
use super::limits::{
    ANSWER_TIMEOUT, CONNECT_TIMEOUT, HOST_TIMEOUT, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_RETRIES,
};
use super::tls::Connectors;
use crate::url::{DEFAULT_PORT, PostgresUrl};

/// Opens connections to one address.
pub(super) struct Dialer {
    /// The driver would try them within one time limit, which the first one could use up.
    hosts: Vec<Server>,
    /// The host to begin with: the last that answered.
    next: AtomicUsize,
    /// Max time for each network address, with its handshakes, if the address names one.
    limit: Option<Duration>,
    tls: Arc<Connectors>,
}

/// One host.
struct Server {
    config: Config,
    login: Login,
    /// The network address to begin with, of those that its name has: the last that answered.
    next: AtomicUsize,
}

impl Server {
    fn new(config: Config, password: &PasswordSource) -> Self {
        let login = login_of(&config, password);
        Self { config, login, next: AtomicUsize::new(0) }
    }

    /// One configuration for each network address. The driver would try them within one time limit, too.
    async fn addresses(&self) -> Result<Vec<Config>, StoreError> {
        let ([Host::Tcp(name)], []) = (self.config.get_hosts(), self.config.get_hostaddrs()) else {
            return Ok(vec![self.config.clone()]);
        };
        let found = timeout(CONNECT_TIMEOUT, lookup_host((name.as_str(), 0))).await;
        let not_found = |why: String| StoreError::new(Failure::NotSent, format!("the host {name:?}: {why}"));
        let found =
            found.map_err(|_| not_found(format!("its address was not found within {CONNECT_TIMEOUT:?}")))?;
        let addresses = found.map_err(|error| not_found(error.to_string()))?;
        Ok(self.at(addresses.map(|address| address.ip())))
    }

    /// The name is still what a certificate must have.
    fn at(&self, addresses: impl Iterator<Item = IpAddr>) -> Vec<Config> {
        let mut seen = HashSet::new();
        let at = |address| {
            let mut config = self.config.clone();
            config.hostaddr(address);
            config
        };
        addresses.filter(|address| seen.insert(*address)).map(at).collect()
    }
}

impl Dialer {
    pub(super) fn new(url: &PostgresUrl) -> Result<Self, OpenError> {
        let hosts: Vec<_> =
            hosts_of(&url.config).into_iter().map(|host| Server::new(host, &url.password)).collect();
        let first = match url.config.get_load_balance_hosts() {
            LoadBalanceHosts::Random => random(hosts.len()),
            _ => 0,
        };
        let limit = url.config.get_connect_timeout().copied();
        let tls = Arc::new(Connectors::new(url)?);
        Ok(Self { hosts, next: AtomicUsize::new(first), limit, tls })
    }

    /// As [`Self::new`]. Certificates are read, which may take long.
    pub(super) async fn open(url: &PostgresUrl) -> Result<Self, OpenError> {
        let url = url.clone();
        first_read(move || Self::new(&url)).await
    }

    /// Another one, which begins with the host that this one has reached.
    pub(super) fn again(&self) -> Self {
        let copy = |next: &AtomicUsize| AtomicUsize::new(next.load(Ordering::Relaxed));
        let hosts = self.hosts.iter();
        let hosts = hosts.map(|host| Server {
            config: host.config.clone(),
            login: host.login.clone(),
            next: copy(&host.next),
        });
        Self { hosts: hosts.collect(), next: copy(&self.next), limit: self.limit, tls: self.tls.clone() }
    }

    /// Connects to the first host that lets it. The connection's task runs on the current runtime. `on_message` gets its
    /// notifications.
    pub(super) async fn connect(&self, on_message: Option<MessageHandler>) -> Result<Conn, StoreError> {
        let mut refused: Vec<StoreError> = Vec::new();
        for at in throttled(&self.next, self.hosts.len()) {
            let host = &self.hosts[at];
            match host.addresses().await {
                Ok(addresses) => {
                    let on_message = on_message.clone();
                    if let Some(conn) = self.connect_to_any(host, &addresses, on_message, &mut refused).await
                    {
                        self.next.store(at, Ordering::Relaxed);
                        return Ok(conn);
                    }
                }
                Err(error) => refused.push(error),
            }
        }
        let messages: Vec<_> = refused.iter().map(|error| error.message.clone()).collect();
        let last = refused.pop().unwrap_or_else(|| error::damaged("an address without hosts"));
        Err(last.saying(messages.join("; ")))
    }

    async fn connect_to_any(
        &self,
        host: &Server,
        addresses: &[Config],
        on_message: Option<MessageHandler>,
        refused: &mut Vec<StoreError>,
    ) -> Option<Conn> {
        let is_only = self.hosts.len() == 1 && addresses.len() == 1;
        let limit = self.limit.unwrap_or(if is_only { CONNECT_TIMEOUT } else { HOST_TIMEOUT });
        for at in throttled(&host.next, addresses.len()) {
            match self.connect_to(&addresses[at], &host.login, limit, on_message.clone()).await {
                Ok(conn) => {
                    host.next.store(at, Ordering::Relaxed);
                    return Some(conn);
                }
                Err(error) => refused.push(error),
            }
        }
        None
    }

    /// If the server refuses credentials of the program's, which may have been replaced, they are asked for again.
    async fn connect_to(
        &self,
        address: &Config,
        login: &Login,
        limit: Duration,
        on_message: Option<MessageHandler>,
    ) -> Result<Conn, StoreError> {
        let connect = async |secret: Secret| {
            let mut address = address.clone();
            secret.user.map(|user| address.user(user));
            secret.password.map(|password| address.password(password));
            let connector = self.tls.connector().await;
            within(limit, address.connect(connector)).await
        };
        let secret = login.current().await?;
        let mut connected = connect(secret.clone()).await;
        if let Err(error) = &connected
            && error::is_login_refused(error)
            && let Some(other) = login.replace(&secret).await
        {
            connected = connect(other?).await;
        }
        let (client, connection) = connected?;
        Ok(Conn::new(client, connection, on_message))
    }
}

/// A number below `count`.
fn random(count: usize) -> usize {
    let hash = RandomState::new().hash_one(());
    usize::try_from(hash >> 33).unwrap_or(0) % count.max(1)
}

/// All of so many, from the last that answered on. If the command gives up during one, the next command begins with the one after it.
fn throttled(next: &AtomicUsize, count: usize) -> impl Iterator<Item = usize> {
    let first = next.load(Ordering::Relaxed);
    (0..count).map(move |offset| {
        let at = (first % count + offset) % count;
        next.store((at + 1) % count, Ordering::Relaxed);
        at
    })
}

/// The login of the connections to one host.
fn login_of(config: &Config, password: &PasswordSource) -> Login {
    let host = match (config.get_hosts().first(), config.get_hostaddrs().first()) {
        (Some(Host::Tcp(name)), _) => name.clone(),
        #[cfg(unix)]
        (Some(Host::Unix(folder)), _) => folder.display().to_string(),
        (None, address) => address.map(ToString::to_string).unwrap_or_default(),
    };
    let port = config.get_ports().first().copied().unwrap_or(DEFAULT_PORT);
    let user = config.get_user().map(ToOwned::to_owned);
    password.at(CredentialRequest::new(ServerRole::Postgres, host, Some(port), user))
}

/// A configuration for each host, which differs in nothing else.
fn hosts_of(all: &Config) -> Vec<Config> {
    let (names, addresses, ports) = (all.get_hosts(), all.get_hostaddrs(), all.get_ports());
    let count = names.len().max(addresses.len());
    let fits = |length: usize| length == 0 || length == count;
    if !fits(names.len()) || !fits(addresses.len()) || !fits(ports.len()) && ports.len() != 1 {
        // The driver says what does not fit.
        return vec![all.clone()];
    }
    let host = |at: usize| {
        let mut one = without_host(all);
        // Of several, only the primary can keep locks. A standby would be asked by every connection that does not begin with the primary.
        if count > 1 && all.get_target_session_attrs() == TargetSessionAttrs::Any {
            one.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        match names.get(at) {
            #[cfg(unix)]
            // As with libpq, a socket is not encrypted.
            Some(Host::Unix(path)) => {
                one.host_path(path).ssl_mode(SslMode::Disable);
            }
            Some(Host::Tcp(name)) => {
                one.host(name);
            }
            None => {
                addresses.get(at).map(|address| one.host(address.to_string()));
            }
        }
        if let Some(address) = addresses.get(at) {
            one.hostaddr(*address);
        }
        if let Some(port) = ports.get(at).or_else(|| ports.first()) {
            one.port(*port);
        }
        one
    };
    (0..count).map(host).collect()
}

/// All of a configuration but its hosts, with limits for a server that has vanished.
fn without_host(all: &Config) -> Config {
    let mut one = Config::new();
    one.ssl_mode(all.get_ssl_mode())
        .ssl_negotiation(all.get_ssl_negotiation())
        .target_session_attrs(all.get_target_session_attrs())
        .channel_binding(all.get_channel_binding())
        .keepalives(all.get_keepalives())
        .tcp_user_timeout(all.get_tcp_user_timeout().copied().unwrap_or(ANSWER_TIMEOUT));
    if all.get_keepalives_idle() == Config::new().get_keepalives_idle() {
        one.keepalives_idle(KEEPALIVE_IDLE);
    } else {
        one.keepalives_idle(all.get_keepalives_idle());
    }
    one.keepalives_interval(all.get_keepalives_interval().unwrap_or(KEEPALIVE_INTERVAL));
    one.keepalives_retries(all.get_keepalives_retries().unwrap_or(KEEPALIVE_RETRIES));
    all.get_user().map(|user| one.user(user));
    all.get_password().map(|password| one.password(password));
    all.get_dbname().map(|name| one.dbname(name));
    all.get_options().map(|options| one.options(options));
    all.get_application_name().map(|name| one.application_name(name));
    all.get_connect_timeout().map(|limit| one.connect_timeout(*limit));
    one
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, Error>>) -> Result<T, StoreError> {
    match timeout(limit, work).await {
        Ok(done) => done.map_err(|error| error::explain(error, false)),
        Err(_) => {
            Err(StoreError::new(Failure::NotSent, format!("the server did not answer within {limit:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use leasehold_testkit::Postgres;

    use super::super::pinned::Pinned;
    use super::*;
    use crate::url::PostgresUrl;

    fn dialer(url: &str) -> Dialer {
        let url = PostgresUrl::of(url);
        Dialer::new(&url).unwrap()
    }

    #[tokio::test]
    async fn address_of_a_host_that_never_answers_does_not_keep_the_client_from_the_next_one() {
        let server = Postgres::on_port();
        let dead = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let _silent = TcpListener::bind((dead, server.port())).unwrap();
        let dialer = dialer(&server.url().replace("127.0.0.1", "localhost"));
        let [host] = &dialer.hosts[..] else { panic!("one host") };
        let addresses = host.at([dead, dead, IpAddr::V4(Ipv4Addr::LOCALHOST)].into_iter());
        assert_eq!(addresses.len(), 2);
        let mut refused = Vec::new();
        let conn = dialer.connect_to_any(host, &addresses, None, &mut refused).await;
        assert_eq!(conn.unwrap().value(&Pinned::new("SELECT 1")).await.unwrap(), "1");
        assert!(refused[0].message.contains("did not answer"), "{refused:?}");
        // The next one begins with the address that answered.
        refused.clear();
        assert!(dialer.connect_to_any(host, &addresses, None, &mut refused).await.is_some());
        assert!(refused.is_empty());
        assert!(dialer.connect(None).await.is_ok());
    }

    #[test]
    fn load_balance_hosts_lets_clients_begin_with_different_hosts() {
        let url = "postgres://a@one,two,three,four/db?load_balance_hosts=random";
        let firsts = || (0..64).map(|_| dialer(url).next.into_inner()).collect::<HashSet<_>>();
        assert_eq!(firsts().len(), 4);
        assert_eq!(dialer("postgres://a@one,two/db").next.into_inner(), 0);
    }
}
