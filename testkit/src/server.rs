//! One server: its process, its folder and its addresses.
//!
//! Whatever it listens on besides, it also listens on a Unix socket in its folder. There it is asked whether it is
//! ready, and there it gets the test's own commands: without TLS, and never another program that took its port.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{Connection, ErrorKind, FromRedisValue, RedisResult, ServerErrorKind, Value};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::builder::Builder;
use crate::port::Port;
use crate::process::Process;
use crate::wait::{LIMIT, wait_for};

/// When a start is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    Answers,
    AnswersOrLoads,
}

/// A server of one test's own, ended with it, whatever state it is in.
///
/// One in a `static` is never dropped, and ends only when the process that started it is gone: keep it in a local variable.
pub struct Server {
    /// None while it is stopped.
    process: Option<Process>,
    /// Stopped by a signal: it is there, and says nothing.
    is_frozen: AtomicBool,
    /// Kept while it is stopped, so that it can come back on it.
    port: Option<Port>,
    shape: Builder,
    program: PathBuf,
    folder: TempDir,
}

impl Server {
    /// What it is to be. Unless told otherwise: [`Flavor::Redis7`](crate::Flavor::Redis7), on a free port, without files that last.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Everything but the process.
    pub(crate) fn stopped(shape: Builder, port: Option<Port>, folder: TempDir) -> Self {
        Self {
            process: None,
            is_frozen: AtomicBool::new(false),
            port,
            program: shape.flavor.program(),
            shape,
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
        self.port.as_ref().expect("it is on a socket only").number()
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

    /// What it has logged in all of its lives.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Where clients connect, with the password: `redis://`, `rediss://` or `redis+unix://`.
    #[must_use]
    pub fn url(&self) -> String {
        self.port.as_ref().map_or_else(|| self.socket_url(), |port| self.url_at(port.number()))
    }

    /// The same, as if it were on this port.
    pub(crate) fn url_at(&self, port: u16) -> String {
        let scheme = if self.shape.has_tls { "rediss" } else { "redis" };
        format!("{scheme}://{}127.0.0.1:{port}", self.login())
    }

    /// The address of its Unix socket, with the password.
    #[must_use]
    pub fn socket_url(&self) -> String {
        let login = self.password().map_or(String::new(), |password| format!("?pass={password}"));
        format!("redis+unix://{}{login}", self.socket().display())
    }

    /// A connection of the test's own, on the Unix socket. What takes too long on it is an error.
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

    /// Runs one command and reads its answer.
    ///
    /// # Errors
    ///
    /// What the server says, a connection that can't be made or that breaks, an answer that is no `T`.
    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let (name, arguments) = words.split_first().expect("a command has a name");
        redis::cmd(name).arg(arguments).query(&mut self.connect()?)
    }

    /// Its process. Panics while it is stopped.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").id()
    }

    /// Whether its process is there.
    pub fn is_running(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.has_ended())
    }

    /// Whether it can be asked, as far as that is the test's doing: it is neither ended nor frozen.
    pub(crate) fn is_up(&self) -> bool {
        self.process.is_some() && !self.is_frozen.load(Ordering::SeqCst)
    }

    /// Whether it speaks TLS on its port.
    pub(crate) fn has_tls(&self) -> bool {
        self.shape.has_tls
    }

    /// The password that it asks for.
    pub(crate) fn password(&self) -> Option<&str> {
        self.shape.password.as_deref()
    }

    /// What comes before the hosts in an address.
    pub(crate) fn login(&self) -> String {
        self.password().map_or(String::new(), |password| format!(":{password}@"))
    }

    /// Kills it at once: nothing is saved, no connection is closed politely.
    pub fn stop(&mut self) {
        self.process = None;
        self.is_frozen.store(false, Ordering::SeqCst);
    }

    /// Ends it as an administrator would: it saves what it is told to save.
    pub fn shut_down(&mut self) {
        self.signal("TERM");
        let ended = wait_for(|| (!self.is_running()).then_some(()));
        assert!(ended.is_some(), "it does not shut down:\n{}", self.log());
        self.process = None;
    }

    /// Starts it again on the same port, socket and files, and waits until it answers.
    pub fn start(&mut self) {
        self.restart(Ready::Answers);
    }

    /// The same, but waits only until it answers that it is loading its files, or more than that.
    pub fn start_loading(&mut self) {
        self.restart(Ready::AnswersOrLoads);
    }

    fn restart(&mut self, ready: Ready) {
        assert!(!self.is_running(), "it runs already");
        if let Err(log) = self.try_start(ready) {
            panic!("{:?} does not start again:\n{log}", self.shape.flavor);
        }
    }

    /// Starts the process and waits until it is ready. If it ends instead: what it logged.
    pub(crate) fn try_start(&mut self, ready: Ready) -> Result<(), String> {
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"));
        let log = log.expect("the folder can be written to");
        let mut command = Command::new(&self.program);
        command.arg(self.folder.path().join("conf"));
        if self.shape.is_sentinel {
            command.arg("--sentinel");
        }
        command.stdout(log.try_clone().expect("a file")).stderr(log);
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
            None => panic!("{:?} does not answer:\n{}", self.shape.flavor, self.log()),
        }
    }

    /// Sends it a signal, by its short name: `STOP` freezes it, `CONT` lets it go on, `TERM` shuts it down.
    pub fn signal(&self, signal: &str) {
        let signal = match signal {
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            "TERM" => Signal::TERM,
            other => panic!("no test sends {other}"),
        };
        self.process.as_ref().expect("it runs").signal(signal);
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
