//! One server: its process, its folder and its addresses.
//!
//! Every server also listens on a Unix socket in its folder. The test's own commands go there: they need no TLS, and never reach
//! another program that has taken the port.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, SigmaskHow};
use redis::{Connection, ErrorKind, FromRedisValue, RedisResult, ServerErrorKind, Value};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::builder::Builder;
use crate::port::Port;
use crate::process::Process;
use crate::wait::{LIMIT, wait_for};

/// When a start has completed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    Answers,
    AnswersOrLoads,
}

/// A server that one test owns and that is killed when this value is dropped.
///
/// Keep it in a local variable: a `static` is never dropped, so the server would exit only with the whole process.
pub struct Server {
    /// None while it is stopped.
    process: Option<Process>,
    /// Stopped by a signal: the process exists but does not respond.
    is_frozen: AtomicBool,
    /// Reserved while it is stopped, so that it can restart on it.
    port: Option<Port>,
    options: Builder,
    program: PathBuf,
    folder: TempDir,
}

impl Server {
    /// Default options: [`Flavor::Redis7`](crate::Flavor::Redis7), a free port, no persistence.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Creates a server without its process.
    pub(crate) fn stopped(options: Builder, port: Option<Port>, folder: TempDir) -> Self {
        Self {
            process: None,
            is_frozen: AtomicBool::new(false),
            port,
            program: options.flavor.program(),
            options,
            folder,
        }
    }

    /// A Redis on a free port.
    #[must_use]
    pub fn on_port() -> Self {
        Self::builder().start()
    }

    /// A Redis on a Unix socket only.
    #[must_use]
    pub fn on_socket() -> Self {
        Self::builder().on_socket().start()
    }

    /// Its port on 127.0.0.1. Panics if it is on a socket only.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.as_ref().expect("the server has no port").number()
    }

    /// The path of its Unix socket. Every server has one.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// The folder with its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its log, over all restarts.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Its URL for clients, with the password: `redis://`, `rediss://` or `redis+unix://`.
    #[must_use]
    pub fn url(&self) -> String {
        self.port.as_ref().map_or_else(|| self.socket_url(), |port| self.url_at(port.number()))
    }

    /// Its URL with another port.
    pub(crate) fn url_at(&self, port: u16) -> String {
        let scheme = if self.options.has_tls { "rediss" } else { "redis" };
        format!("{scheme}://{}127.0.0.1:{port}", self.login())
    }

    /// The URL of its Unix socket, with the password.
    #[must_use]
    pub fn socket_url(&self) -> String {
        let login = self.password().map_or(String::new(), |password| format!("?pass={password}"));
        format!("redis+unix://{}{login}", self.socket().display())
    }

    /// A connection for the test's own commands, on the Unix socket, with timeouts.
    #[must_use]
    pub fn admin(&self) -> Connection {
        self.connect().unwrap_or_else(|error| panic!("{}: {error}\n{}", self.url(), self.log()))
    }

    fn connect(&self) -> RedisResult<Connection> {
        let connection = redis::Client::open(self.socket_url())?.get_connection_with_timeout(LIMIT)?;
        connection.set_read_timeout(Some(LIMIT))?;
        connection.set_write_timeout(Some(LIMIT))?;
        Ok(connection)
    }

    /// Runs one command, which must not fail.
    pub fn run(&self, words: &[&str]) -> Value {
        self.query(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// Runs one command and returns its reply.
    ///
    /// # Errors
    ///
    /// An error reply, a failed connection, or a reply that is not a `T`.
    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let (name, arguments) = words.split_first().expect("a command has a name");
        // A signal, as that of a child that has ended, would interrupt a read with a time limit. Another thread or the end takes it.
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).expect("signals can be blocked");
        let reply =
            self.connect().and_then(|mut connection| redis::cmd(name).arg(arguments).query(&mut connection));
        mask.thread_set_mask().expect("signals can be unblocked");
        reply
    }

    /// Its process id. Panics while it is stopped.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the server is running").id()
    }

    /// Whether its process is running.
    pub fn is_running(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.has_ended())
    }

    /// Whether the test has neither stopped nor frozen it.
    pub(crate) fn is_up(&self) -> bool {
        self.process.is_some() && !self.is_frozen.load(Ordering::SeqCst)
    }

    /// Whether it uses TLS on its port.
    pub(crate) fn has_tls(&self) -> bool {
        self.options.has_tls
    }

    /// The password that it requires.
    pub(crate) fn password(&self) -> Option<&str> {
        self.options.password.as_deref()
    }

    /// The part of a URL before its hosts.
    pub(crate) fn login(&self) -> String {
        self.password().map_or(String::new(), |password| format!(":{password}@"))
    }

    /// Kills it at once: it saves nothing and closes no connection cleanly.
    pub fn stop(&mut self) {
        self.process = None;
        self.is_frozen.store(false, Ordering::SeqCst);
    }

    /// Shuts it down as an administrator would: it saves as configured.
    pub fn shut_down(&mut self) {
        self.signal("TERM");
        let ended = wait_for(|| (!self.is_running()).then_some(()));
        assert!(ended.is_some(), "the server does not shut down:\n{}", self.log());
        self.process = None;
    }

    /// Restarts it on the same port, socket and files, and waits until it responds.
    pub fn start(&mut self) {
        self.restart(Ready::Answers);
    }

    /// Restarts it, and waits only until it responds or reports that it is loading its files.
    pub fn start_loading(&mut self) {
        self.restart(Ready::AnswersOrLoads);
    }

    fn restart(&mut self, ready: Ready) {
        assert!(!self.is_running(), "the server is already running");
        if let Err(log) = self.try_start(ready) {
            panic!("{:?} does not start again:\n{log}", self.options.flavor);
        }
    }

    /// Starts the process and waits until it is ready. An error is its log, if it exits instead.
    pub(crate) fn try_start(&mut self, ready: Ready) -> Result<(), String> {
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"));
        let log = log.expect("the folder can be written to");
        let mut command = Command::new(&self.program);
        command.arg(self.folder.path().join("conf"));
        if self.options.is_sentinel {
            command.arg("--sentinel");
        }
        command.stdout(log.try_clone().expect("a file")).stderr(log);
        command.envs(self.options.environment.iter().map(|(name, value)| (name, value)));
        self.process = Some(Process::start(&mut command, self.folder.path()).unwrap_or_else(|error| {
            panic!("{}: {error}: scripts/test install", self.program.display());
        }));
        let is_ready = wait_for(|| {
            if !self.is_running() {
                return Some(false);
            }
            match self.query::<Value>(&["PING"]) {
                Ok(_) => Some(true),
                Err(error) => {
                    let loads = error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading);
                    (loads && ready == Ready::AnswersOrLoads).then_some(true)
                }
            }
        });
        match is_ready {
            Some(true) => Ok(()),
            Some(false) => Err(self.log()),
            None => panic!("{:?} does not answer:\n{}", self.options.flavor, self.log()),
        }
    }

    /// Sends it a signal, by its short name: `STOP` freezes it, `CONT` resumes it, `TERM` shuts it down.
    pub fn signal(&self, signal: &str) {
        let signal = match signal {
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            "TERM" => Signal::TERM,
            other => panic!("no test sends {other}"),
        };
        self.process.as_ref().expect("the server is running").signal(signal);
        if signal != Signal::TERM {
            self.is_frozen.store(signal == Signal::STOP, Ordering::SeqCst);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
