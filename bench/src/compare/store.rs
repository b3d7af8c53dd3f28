//! Servers of other kinds than Redis, for the libraries that lock on those: as Debian packages them, one node each, with the
//! durability that they come with.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold_testkit::Port;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

const STARTING: Duration = Duration::from_secs(30);
const STOPPING: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(20);

/// The kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// etcd: writes each lock to its log, and syncs it.
    Etcd,
    /// `ZooKeeper`: the same.
    ZooKeeper,
    /// PostgreSQL: advisory locks are in memory only, and leases are committed.
    Postgres,
}

impl Kind {
    /// Where this program's locks live, if not in Redis.
    #[must_use]
    pub fn of(program: &str) -> Option<Self> {
        match program {
            "etcd" => Some(Self::Etcd),
            "curator" => Some(Self::ZooKeeper),
            "postgres" | "leasehold-postgres" => Some(Self::Postgres),
            _ => None,
        }
    }
}

/// A running store, killed when this value is dropped.
pub struct Store {
    kind: Kind,
    process: Child,
    /// The URL for clients.
    pub(crate) url: String,
    folder: TempDir,
    /// For clients, and for other servers of its kind.
    ports: [Port; 2],
}

impl Store {
    /// Starts a store, and waits until it accepts connections.
    ///
    /// # Errors
    ///
    /// Why it does not start.
    pub fn start(kind: Kind) -> Result<Self, String> {
        let folder =
            tempfile::Builder::new().prefix("store-").tempdir().map_err(|error| error.to_string())?;
        let ports = [Port::claim(), Port::claim()];
        let (process, url) = launch(kind, folder.path(), &ports)?;
        let mut store = Self { kind, process, url, folder, ports };
        store.wait_until_ready()?;
        Ok(store)
    }

    /// Kills it, as a crash does.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts it again with its files and on its ports, after [`Store::kill`].
    ///
    /// # Errors
    ///
    /// Why it does not start.
    pub fn restart(&mut self) -> Result<(), String> {
        (self.process, _) = launch(self.kind, self.folder.path(), &self.ports)?;
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<(), String> {
        let limit = Instant::now() + STARTING;
        loop {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            // PostgreSQL accepts connections before it is ready, and then rejects them.
            let is_ready = self.kind != Kind::Postgres || log.contains("ready to accept connections");
            if is_ready && TcpStream::connect((Ipv4Addr::LOCALHOST, self.port())).is_ok() {
                return Ok(());
            }
            if Instant::now() > limit || !matches!(self.process.try_wait(), Ok(None)) {
                let last = log.lines().last().unwrap_or_default();
                return Err(format!("{:?} does not start: {last}", self.kind));
            }
            std::thread::sleep(STEP);
        }
    }

    /// The port for clients.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports[0].number()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Store {
    /// Asked to end first: PostgreSQL has processes of its own to end.
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.process), Signal::INT);
        let limit = Instant::now() + STOPPING;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < limit {
            std::thread::sleep(STEP);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn launch(kind: Kind, folder: &Path, [port, peers]: &[Port; 2]) -> Result<(Child, String), String> {
    let (mut command, url) = prepare(kind, folder, port.number(), peers.number())?;
    let log = File::create(folder.join("log")).map_err(|error| error.to_string())?;
    let errors = log.try_clone().map_err(|error| error.to_string())?;
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    let process = command.spawn().map_err(|error| format!("{kind:?} does not start: {error}"))?;
    Ok((process, url))
}

fn prepare(kind: Kind, folder: &Path, port: u16, peers: u16) -> Result<(Command, String), String> {
    let data = folder.join("data");
    match kind {
        Kind::Etcd => {
            let [clients, peers] = [port, peers].map(|port| format!("http://127.0.0.1:{port}"));
            let mut command = Command::new("etcd");
            command.arg("--data-dir").arg(&data);
            command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
            command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
            command.args(["--initial-cluster", &format!("default={peers}")]);
            Ok((command, format!("etcd://127.0.0.1:{port}")))
        }
        Kind::ZooKeeper => {
            let settings = format!(
                "dataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n\
                 admin.enableServer=false\n",
                data.display()
            );
            std::fs::write(folder.join("conf"), settings).map_err(|error| error.to_string())?;
            let mut command = Command::new("java");
            command.args(["-cp", "/usr/share/java/zookeeper.jar"]);
            command.arg("org.apache.zookeeper.server.ZooKeeperServerMain").arg(folder.join("conf"));
            Ok((command, format!("zookeeper://127.0.0.1:{port}")))
        }
        Kind::Postgres => {
            if !data.exists() {
                postgres_data(folder, &data)?;
            }
            let mut command = as_its_user("postgres");
            command.arg("-D").arg(&data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
            command.args(["-c", "unix_socket_directories=", "-c", "max_connections=200"]);
            Ok((command, format!("postgres://postgres@127.0.0.1:{port}/postgres")))
        }
    }
}

fn postgres_data(folder: &Path, data: &Path) -> Result<(), String> {
    if geteuid().is_root() {
        run(Command::new("chown").arg("postgres").arg(folder))?;
    }
    run(as_its_user("initdb").arg("-D").arg(data).args(["--username=postgres", "--auth=trust"]))
}

/// PostgreSQL refuses to be run by the superuser.
fn as_its_user(program: &str) -> Command {
    let program = postgres_program(program);
    if !geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(program);
    command
}

/// Debian keeps them out of the path.
fn postgres_program(program: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let found = versions.map(|version| version.path().join("bin").join(program)).find(|path| path.exists());
    found.unwrap_or_else(|| program.into())
}

fn run(command: &mut Command) -> Result<(), String> {
    let done = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
    let why = String::from_utf8_lossy(&done.stderr);
    if done.status.success() { Ok(()) } else { Err(why.lines().last().unwrap_or("it failed").to_owned()) }
}
