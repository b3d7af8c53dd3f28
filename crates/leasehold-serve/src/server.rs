//! A server from its start to its end.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::router;
use crate::app::App;
use crate::config::{Config, Listen, Tls};
use crate::connection;
use crate::listener::Listener;
use crate::tls::Certificate;
use crate::tokens::Tokens;

/// How long a stopping server waits for the last answers, and for the store to confirm what it releases.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// The interval at which the files of the certificate are looked at. A handshake looks at them, too.
const FILES_INTERVAL: Duration = Duration::from_secs(2);

/// Why a server can't start: the message names the setting and the fix.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold_serve::{Config, Server};
///
/// let client = leasehold::Client::connect("memory:").await?;
/// let error = Server::bind(Config::new([]), client).await.unwrap_err();
/// assert!(error.to_string().contains("there is no address"));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError(String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

/// A server that listens.
///
/// ```no_run
/// # async fn example(client: leasehold::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold_serve::{Config, Server};
///
/// let server = Server::bind(Config::new(["unix:/run/leasehold.sock".parse()?]), client).await?;
/// server.run(std::future::pending()).await;
/// # Ok(()) }
/// ```
pub struct Server {
    app: Arc<App>,
    certificate: Option<Arc<Certificate>>,
    listeners: Vec<Listener>,
    drain: Duration,
}

impl Server {
    /// Listens on all addresses. Connections are answered when the server runs.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold_serve::{Config, Server};
    ///
    /// let mut config = Config::new(["127.0.0.1:0".parse()?]);
    /// config.tokens.add_write("0123456789abcdef0123456789abcdef")?;
    /// let server = Server::bind(config, leasehold::Client::connect("memory:").await?).await?;
    /// # drop(server);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// If an address, a certificate or a key can't be used, or if an address is TCP and there is no token.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, nothing listens.
    pub async fn bind(config: Config, client: Client) -> Result<Self, StartError> {
        let Config { listen, tokens, tls, limits, drain, notices } = config;
        if listen.is_empty() {
            return Err(StartError("there is no address: name unix:PATH or HOST:PORT".to_owned()));
        }
        if let Some(tcp) = listen.iter().find(|listen| matches!(listen, Listen::Tcp(_)))
            && tokens.is_empty()
        {
            return Err(StartError(format!("{tcp}: connections over TCP need a token, and there is none")));
        }
        let certificate = tls.map(|files| Certificate::read(&files, notices.clone()).map(Arc::new));
        let certificate = certificate.transpose().map_err(StartError)?;
        let mut listeners = Vec::new();
        for listen in &listen {
            listeners.push(Listener::bind(listen, certificate.as_ref()).await.map_err(StartError)?);
        }
        let addresses = listeners.iter().map(Listener::address).collect();
        let mut app = App::new(client, tokens, limits).listening_on(addresses);
        app.notices = notices;
        Ok(Self { app: Arc::new(app), certificate, listeners, drain })
    }

    /// The addresses, with the ports that the system has chosen: `unix:PATH`, `http://HOST:PORT` or `https://HOST:PORT`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use leasehold_serve::{Config, Server};
    /// # let mut config = Config::new(["127.0.0.1:0".parse()?]);
    /// # config.tokens.add_write("0123456789abcdef0123456789abcdef")?;
    /// let server = Server::bind(config, leasehold::Client::connect("memory:").await?).await?;
    /// assert!(server.addresses()[0].starts_with("http://127.0.0.1:"));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.iter().map(Listener::address).collect()
    }

    /// What can be changed while the server runs.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use leasehold_serve::{Config, Server, Tokens};
    /// # let mut config = Config::new(["127.0.0.1:0".parse()?]);
    /// # config.tokens.add_write("0123456789abcdef0123456789abcdef")?;
    /// let server = Server::bind(config, leasehold::Client::connect("memory:").await?).await?;
    /// let control = server.control();
    /// control.set_tokens(Tokens::parse("write fedcba9876543210fedcba9876543210")?)?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn control(&self) -> Control {
        let has_tcp = self.listeners.iter().any(Listener::is_tcp);
        Control { tokens: self.app.tokens.clone(), certificate: self.certificate.clone(), has_tcp }
    }

    /// Answers requests until `shutdown` is ready. Then requests that wait are answered at once, nothing new is granted, and other requests are
    /// answered for the time of the setting `drain`. The leases of callers stay in the store: they renew and release them at another server.
    ///
    /// ```no_run
    /// # async fn example(server: leasehold_serve::Server) {
    /// # async fn signal() {}
    /// server.run(signal()).await; // for example `tokio::signal::ctrl_c`
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the server ends at once. The leases of callers stay.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { app, certificate, listeners, drain } = self;
        let _stop = app.stopping.clone().drop_guard();
        let router = router(app.clone());
        let connections = TaskTracker::new();
        let mut tasks = JoinSet::new();
        for listener in listeners {
            tasks.spawn(connection::accept(listener, app.clone(), router.clone(), connections.clone()));
        }
        let upkeep = app.clone();
        tasks.spawn(async move { upkeep.keep_up().await });
        let observer = app.clone();
        tasks.spawn(async move { observer.observer.run(&observer.stopping).await });
        if let Some(certificate) = certificate {
            tasks.spawn(watch(certificate, app.stopping.clone()));
        }

        shutdown.await;
        app.draining.cancel();
        sleep(drain).await;
        app.stopping.cancel();
        while tasks.join_next().await.is_some() {}
        connections.close();
        let _ = timeout(LAST_ANSWERS, connections.wait()).await;
        let _ = app.client.clone().close_timeout(LAST_ANSWERS).await;
    }
}

/// Reads the certificate again when its files have changed, so that one that can't be used is reported before a client needs it.
async fn watch(certificate: Arc<Certificate>, stopping: CancellationToken) {
    while timeout(FILES_INTERVAL, stopping.cancelled()).await.is_err() {
        certificate.refresh();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.addresses().join(", "))
    }
}

/// Changes a running server.
///
/// ```
/// # fn example(server: &leasehold_serve::Server) {
/// let control = server.control();
/// # }
/// ```
#[derive(Clone)]
pub struct Control {
    tokens: watch::Sender<Tokens>,
    certificate: Option<Arc<Certificate>>,
    has_tcp: bool,
}

impl Control {
    /// Accepts these tokens, and no others. A connection whose token is withdrawn, or allows less than before, is closed: its
    /// waiting requests leave their queues. Leases stay.
    ///
    /// ```
    /// # fn example(control: leasehold_serve::Control) -> Result<(), String> {
    /// control.set_tokens(leasehold_serve::Tokens::from_file("/etc/leasehold/tokens".as_ref())?)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no token, and an address is TCP. The tokens before then stay.
    pub fn set_tokens(&self, tokens: Tokens) -> Result<(), String> {
        if self.has_tcp && tokens.is_empty() {
            return Err("connections over TCP need a token, and there is none".to_owned());
        }
        self.tokens.send_replace(tokens);
        Ok(())
    }

    /// Reads the certificate and its key again, from these files. Without a call, files that change are read again at the next
    /// handshake.
    ///
    /// ```
    /// # fn example(control: leasehold_serve::Control, tls: leasehold_serve::Tls) -> Result<(), String> {
    /// control.set_tls(&tls)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If they can't be used: those before stay in use. If the server was started without TLS.
    pub fn set_tls(&self, files: &Tls) -> Result<(), String> {
        let certificate = self.certificate.as_ref();
        certificate.ok_or("the server was started without TLS: restart it")?.replace(files)
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Control")
    }
}

/// Raises this process's limit of open files to what the system allows, and returns it. Each connection is one.
///
/// ```
/// let limit = leasehold_serve::raise_open_files();
/// assert!(limit.is_none_or(|limit| limit > 0)); // None: without a limit
/// ```
#[must_use]
pub fn raise_open_files() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current }
}
