//! A server from its start to its end.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold::Client;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::api::router;
use crate::app::App;
use crate::config::{Config, Listen};
use crate::connection;
use crate::listener::{Listener, acceptor};

/// How long a stopping server waits for the last answers, after its leases are released.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// How often a stopping server looks whether its leases are released.
const DRAIN_STEP: Duration = Duration::from_millis(20);

/// Why a server can't start: the message names the setting and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError(String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listeners: Vec<Listener>,
    drain: Duration,
}

impl Server {
    /// Listens on all addresses. Connections are answered when the server runs.
    ///
    /// # Errors
    ///
    /// If an address, a certificate or a key can't be used, or if an address is TCP and there is no token.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, nothing listens.
    pub async fn bind(config: Config, client: Client) -> Result<Self, StartError> {
        let Config { listen, tokens, tls, limits, drain } = config;
        if listen.is_empty() {
            return Err(StartError("there is no address: name unix:PATH or HOST:PORT".to_owned()));
        }
        if let Some(tcp) = listen.iter().find(|listen| matches!(listen, Listen::Tcp(_)))
            && tokens.is_empty()
        {
            return Err(StartError(format!("{tcp}: connections over TCP need a token, and there is none")));
        }
        let tls = tls.as_ref().map(acceptor).transpose().map_err(StartError)?;
        let mut listeners = Vec::new();
        for listen in &listen {
            listeners.push(Listener::bind(listen, tls.as_ref()).await.map_err(StartError)?);
        }
        Ok(Self { app: Arc::new(App::new(client, tokens, limits)), listeners, drain })
    }

    /// The addresses, with the ports that the system has chosen: `unix:PATH`, `http://HOST:PORT` or `https://HOST:PORT`.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.iter().map(Listener::address).collect()
    }

    /// Answers requests until `shutdown` is ready, and then drains: nothing new is granted, and callers can release what
    /// they hold, for the time of the setting `drain` at most. Leases that remain are left to expire in the store, because
    /// their callers may still be working. Returns their number. End the process then: while it lives, its client renews the
    /// leases of sessions.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the server ends at once, and its leases are released.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> usize {
        let Self { app, listeners, drain } = self;
        let _stop = app.stopping.clone().drop_guard();
        let router = router(app.clone());
        let connections = u32::try_from(app.limits.connections).unwrap_or(u32::MAX);
        let places = Arc::new(Semaphore::new(connections as usize));
        let mut tasks = JoinSet::new();
        for listener in listeners {
            tasks.spawn(connection::accept(listener, app.clone(), router.clone(), places.clone()));
        }
        let sweeper = app.clone();
        tasks.spawn(async move { sweeper.sweep().await });
        let observer = app.clone();
        tasks.spawn(async move { observer.observer.run(&observer.stopping).await });

        shutdown.await;
        app.draining.cancel();
        let until = Instant::now() + drain;
        while app.leases.len() > 0 && Instant::now() < until {
            sleep(DRAIN_STEP).await;
        }
        app.stopping.cancel();
        while tasks.join_next().await.is_some() {}
        let _ = timeout(LAST_ANSWERS, places.acquire_many(connections)).await;
        let remaining = app.leases.len();
        if remaining == 0 {
            let _ = app.client.clone().close_timeout(LAST_ANSWERS).await;
        } else {
            app.leases.abandon();
        }
        remaining
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.addresses().join(", "))
    }
}

/// Raises this process's limit of open files to what the system allows, and returns it. Each connection is one.
#[must_use]
pub fn raise_open_files() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current }
}
