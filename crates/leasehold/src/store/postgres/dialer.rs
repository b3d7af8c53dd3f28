//! Opens connections: to the first host of the address that lets it, each within its own time limit.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_core::Failure;
use tokio::sync::mpsc::UnboundedSender;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{AsyncMessage, Config, Error};

use super::conn::Conn;
use super::limits::{
    ANSWER_TIMEOUT, CONNECT_TIMEOUT, HOST_TIMEOUT, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_RETRIES,
};
use super::tls::Connector;
use super::{error, tls};
use crate::error::Error as PublicError;
use crate::store::StoreError;
use crate::url::PostgresUrl;

/// Opens connections to one address.
pub(super) struct Dialer {
    /// One for each host. The driver would try them within one time limit, which the first one could use up.
    hosts: Vec<Config>,
    /// The host to begin with: the last that answered.
    next: AtomicUsize,
    /// Max time for each host, with its handshakes.
    limit: Duration,
    tls: Connector,
}

impl Dialer {
    pub(super) fn new(url: &PostgresUrl) -> Result<Self, PublicError> {
        let hosts = hosts_of(&url.config);
        let usual = if hosts.len() > 1 { HOST_TIMEOUT } else { CONNECT_TIMEOUT };
        let limit = url.config.get_connect_timeout().copied().unwrap_or(usual);
        Ok(Self { hosts, next: AtomicUsize::new(0), limit, tls: tls::connector(url)? })
    }

    /// Another one, which begins with the host that this one has reached.
    pub(super) fn again(&self) -> Self {
        let next = AtomicUsize::new(self.next.load(Ordering::Relaxed));
        Self { hosts: self.hosts.clone(), next, limit: self.limit, tls: Connector::clone(&self.tls) }
    }

    /// Connects to the first host that lets it. The connection's task runs on the current runtime. `messages` gets its
    /// notifications.
    pub(super) async fn connect(
        &self,
        messages: Option<UnboundedSender<AsyncMessage>>,
    ) -> Result<Conn, StoreError> {
        let (first, count) = (self.next.load(Ordering::Relaxed), self.hosts.len());
        let mut refused: Vec<StoreError> = Vec::new();
        for at in (0..count).map(|offset| (first + offset) % count) {
            // If the command gives up during this one, the next command begins with the next host.
            self.next.store((at + 1) % count, Ordering::Relaxed);
            match self.connect_to(&self.hosts[at], messages.clone()).await {
                Ok(conn) => {
                    self.next.store(at, Ordering::Relaxed);
                    return Ok(conn);
                }
                Err(error) => refused.push(error),
            }
        }
        let messages: Vec<_> = refused.iter().map(|error| error.message.clone()).collect();
        let last = refused.pop().unwrap_or_else(|| error::damaged("an address without hosts"));
        Err(StoreError { message: messages.join("; "), ..last })
    }

    async fn connect_to(
        &self,
        host: &Config,
        messages: Option<UnboundedSender<AsyncMessage>>,
    ) -> Result<Conn, StoreError> {
        let (client, connection) = within(self.limit, host.connect(Connector::clone(&self.tls))).await?;
        Ok(Conn::new(client, connection, messages))
    }
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
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done.map_err(|error| error::explain(error, false)),
        Err(_) => {
            Err(StoreError::new(Failure::NotSent, format!("the server did not answer within {limit:?}")))
        }
    }
}
