//! A PostgreSQL server, its standby, and PgBouncer in front of it.
//!
//! The programs are the system's: `postgresql` and `pgbouncer` of the distribution. They refuse to run as root, so a test that
//! does runs them as `nobody`.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

use crate::certificates::Pair;
use crate::port::Port;
use crate::process::Process;
use crate::program::target;
use crate::wait::{wait_for, wait_until};

/// `nobody` on every Linux.
const NOBODY: u32 = 65_534;

/// What every server of a test has. Tests start many connections; only some of them crash the server.
const SETTINGS: &[&str] =
    &["max_connections=400", "fsync=off", "shared_buffers=16MB", "log_min_messages=warning"];

/// How a server is started.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    settings: Vec<String>,
    password: Option<String>,
    tls: Option<Pair>,
    client_authority: Option<PathBuf>,
    data: Option<PathBuf>,
}

impl PostgresOptions {
    /// Adds a line to the configuration: `name=value`.
    #[must_use]
    pub fn setting(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    /// Requires this password of the user `postgres` on the port.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Requires TLS on the port, with this certificate.
    #[must_use]
    pub fn tls(mut self, pair: &Pair) -> Self {
        self.tls = Some(pair.clone());
        self
    }

    /// Requires a client certificate of this authority, where it requires TLS.
    #[must_use]
    pub fn client_authority(mut self, authority: &Path) -> Self {
        self.client_authority = Some(authority.to_owned());
        self
    }

    /// Keeps the data in this folder, for example on a small disk. It must be empty.
    #[must_use]
    pub fn data(mut self, folder: &Path) -> Self {
        self.data = Some(folder.to_owned());
        self
    }

    /// A new folder on a disk if that is what a test looks at, otherwise in memory.
    fn folder(&self) -> TempDir {
        let needs_disk = self.settings.iter().any(|setting| setting == "fsync=on");
        new_folder(&if needs_disk { std::env::temp_dir() } else { fast_folder() })
    }

    /// Starts the server and waits until it answers.
    #[must_use]
    pub fn start(self) -> Postgres {
        let mut server =
            Postgres { process: None, port: Port::claim(), folder: self.folder(), options: self };
        server.make_data();
        server.start();
        server
    }
}

/// A server that one test owns and that is killed when this value is dropped.
pub struct Postgres {
    /// None while it is stopped.
    process: Option<Process>,
    port: Port,
    options: PostgresOptions,
    folder: TempDir,
}

impl Postgres {
    /// A server with the default options.
    #[must_use]
    pub fn on_port() -> Self {
        Self::builder().start()
    }

    /// The options of a server.
    #[must_use]
    pub fn builder() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The folder with its socket and its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its URL on the port, as the superuser.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.port())
    }

    /// The same at another port, for example that of a proxy.
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        let password =
            self.options.password.as_ref().map_or(String::new(), |password| format!(":{password}"));
        format!("postgres://postgres{password}@127.0.0.1:{port}/postgres")
    }

    /// Its URL on the Unix socket.
    #[must_use]
    pub fn socket_url(&self) -> String {
        let folder = self.folder().display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{folder}:{}/postgres", self.port())
    }

    /// Its log, over all restarts.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder().join("log")).unwrap_or_default()
    }

    /// Runs a statement as the superuser, which must not fail, and returns its rows, with `|` between columns.
    pub fn run(&self, sql: &str) -> String {
        self.try_run(sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// Runs a statement as the superuser.
    ///
    /// # Errors
    ///
    /// What the server says.
    pub fn try_run(&self, sql: &str) -> Result<String, String> {
        let mut psql = Command::new(program("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-d", "postgres"]);
        psql.arg("-h").arg(self.folder()).arg("-p").arg(self.port().to_string()).args(["-c", sql]);
        let Output { status, stdout, stderr } = psql.output().expect("psql runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if status.success() { Ok(text(&stdout)) } else { Err(text(&stderr)) }
    }

    /// A statement that is run by a session of its own, which ends with this value.
    #[must_use]
    pub fn session(&self, sql: &str) -> Session {
        let mut psql = Command::new(program("psql"));
        psql.args(["-X", "-q", "-U", "postgres", "-d", "postgres"]);
        psql.arg("-h").arg(self.folder()).arg("-p").arg(self.port().to_string());
        psql.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = psql.spawn().expect("psql runs");
        let mut pipe = child.stdin.take().expect("it is piped");
        std::io::Write::write_all(&mut pipe, format!("{sql};\n").as_bytes()).expect("psql reads");
        Session { child, _pipe: pipe }
    }

    /// Starts it on the same port and files, and waits until it answers.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "the server is already running");
        let log = File::options().create(true).append(true).open(self.folder().join("log"));
        let log = log.expect("the folder can be written to");
        let started = wait_for(|| {
            let mut command = self.as_user(&program("postgres"));
            command.arg("-D").arg(self.data()).stdout(log.try_clone().expect("a file"));
            command.stderr(log.try_clone().expect("a file"));
            self.process = Some(Process::start(&mut command, self.folder()).expect("postgres runs"));
            let answers = wait_for(|| {
                let has_ended = self.process.as_ref().is_some_and(Process::has_ended);
                (has_ended || self.try_run("SELECT 1").is_ok()).then_some(!has_ended)
            });
            // A process of the server before may still have its memory.
            (answers == Some(true)).then_some(())
        });
        assert!(started.is_some(), "PostgreSQL does not start:\n{}", self.log());
    }

    /// Ends it at once, as a crash does: it finishes nothing.
    pub fn stop(&mut self) {
        let Some(process) = self.process.take() else { return };
        let processes = self.processes(&process);
        process.signal(Signal::QUIT);
        signal_all(&processes, Signal::CONT);
        let _ = wait_for(|| process.has_ended().then_some(()));
    }

    /// Stops it and all of its sessions by a signal: they exist and do not answer.
    pub fn freeze(&self) {
        let process = self.process.as_ref().expect("the server is running");
        // Its main process first, so that it starts no further ones.
        signal_all(&[process.id()], Signal::STOP);
        signal_all(&self.processes(process), Signal::STOP);
    }

    /// Continues what `freeze` stopped.
    pub fn thaw(&self) {
        let process = self.process.as_ref().expect("the server is running");
        signal_all(&self.processes(process), Signal::CONT);
    }

    fn processes(&self, process: &Process) -> Vec<u32> {
        let main = process.id();
        let children = fs::read_to_string(format!("/proc/{main}/task/{main}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(main).chain(children).collect()
    }

    /// A standby that streams from this server.
    #[must_use]
    pub fn standby(&self) -> Self {
        let options = PostgresOptions { data: None, ..self.options.clone() };
        let mut standby = Self { process: None, port: Port::claim(), folder: options.folder(), options };
        let mut backup = standby.as_user(&program("pg_basebackup"));
        backup.args(["-U", "postgres", "-R", "--no-sync", "-c", "fast", "-h"]).arg(self.folder());
        backup.arg("-p").arg(self.port().to_string()).arg("-D").arg(standby.data());
        succeed(&mut backup);
        standby.configure();
        standby.start();
        standby
    }

    /// Makes a standby the primary, and waits until it is.
    pub fn promote(&self) {
        self.run("SELECT pg_promote()");
        wait_until("it is the primary", || self.run("SELECT pg_is_in_recovery()") == "f");
    }

    fn data(&self) -> PathBuf {
        self.options.data.clone().unwrap_or_else(|| self.folder().join("data"))
    }

    /// A program that runs as a user who is not root.
    fn as_user(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder());
        not_as_root(&mut command);
        command
    }

    fn make_data(&self) {
        if let Some(data) = &self.options.data {
            give_away(data);
        }
        let kept = kept_data();
        if kept.exists() {
            copy(&kept, &self.data());
        } else {
            let mut initdb = self.as_user(&program("initdb"));
            initdb.arg("-D").arg(self.data());
            initdb.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]);
            succeed(&mut initdb);
            self.keep_data(&kept);
        }
        self.configure();
    }

    /// Keeps what initdb has made for the next server. Another process may do the same.
    fn keep_data(&self, kept: &Path) {
        let parent = kept.parent().expect("it is in a folder");
        fs::create_dir_all(parent).expect("the target folder can be written to");
        let copied = tempfile::tempdir_in(parent).expect("the target folder can be written to");
        copy(&self.data(), &copied.path().join("data"));
        // It fails if the other process was faster.
        let _ = fs::rename(copied.path().join("data"), kept);
    }

    fn configure(&self) {
        let (data, folder) = (self.data(), self.folder().display());
        let mut lines = format!(
            "port = {}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{folder}'\n",
            self.port()
        );
        for setting in SETTINGS.iter().copied().chain(self.options.settings.iter().map(String::as_str)) {
            let (name, value) = setting.split_once('=').expect("a setting is name=value");
            lines += &format!("{name} = '{value}'\n");
        }
        let mut access = "local all all trust\nlocal replication all trust\n".to_owned();
        let host = if self.options.tls.is_some() { "hostssl" } else { "host" };
        let method = if self.options.password.is_some() { "scram-sha-256" } else { "trust" };
        let client = if self.options.client_authority.is_some() { " clientcert=verify-ca" } else { "" };
        access += &format!("{host} all all 127.0.0.1/32 {method}{client}\n");
        if let Some(authority) = &self.options.client_authority {
            self.set_client_authority(authority);
            lines += "ssl_ca_file = 'root.crt'\n";
        }
        if let Some(Pair { certificate, key }) = &self.options.tls {
            for (from, to) in [(certificate, "server.crt"), (key, "server.key")] {
                let to = data.join(to);
                fs::copy(from, &to).expect("the certificate can be copied");
                fs::set_permissions(&to, fs::Permissions::from_mode(0o600)).expect("it is ours");
                give_away(&to);
            }
            lines += "ssl = on\n";
        }
        append(&data.join("postgresql.conf"), &lines);
        fs::write(data.join("pg_hba.conf"), access).expect("the folder can be written to");
        if let Some(password) = &self.options.password
            && !data.join("standby.signal").exists()
        {
            self.set_password(password);
        }
    }

    /// Makes this authority the one of client certificates. A running server reads it with its next configuration.
    pub fn set_client_authority(&self, authority: &Path) {
        let to = self.data().join("root.crt");
        fs::copy(authority, &to).expect("the certificate can be copied");
        give_away(&to);
    }

    fn set_password(&self, password: &str) {
        let mut single = self.as_user(&program("postgres"));
        single.args(["--single", "-D"]).arg(self.data()).arg("postgres");
        single.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = single.spawn().expect("postgres runs");
        let mut pipe = child.stdin.take().expect("it is piped");
        let sql = format!("ALTER USER postgres PASSWORD '{password}'\n");
        std::io::Write::write_all(&mut pipe, sql.as_bytes()).expect("postgres reads");
        drop(pipe);
        assert!(child.wait().expect("it is our child").success(), "no password could be set");
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A session of psql.
pub struct Session {
    child: std::process::Child,
    /// The session ends when this is closed.
    _pipe: std::process::ChildStdin,
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// PgBouncer in front of one server.
pub struct PgBouncer {
    _process: Process,
    port: Port,
    _folder: TempDir,
}

impl PgBouncer {
    /// Starts it in transaction mode.
    #[must_use]
    pub fn start(server: &Postgres) -> Self {
        Self::in_mode(server, "transaction")
    }

    /// Starts it with this `pool_mode`.
    #[must_use]
    pub fn in_mode(server: &Postgres, mode: &str) -> Self {
        let (folder, port) = (new_folder(&fast_folder()), Port::claim());
        let at = folder.path().display();
        let settings = format!(
            "[databases]\n* = host={} port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\n\
             unix_socket_dir = {at}\nauth_type = any\npool_mode = {mode}\nmax_client_conn = 500\n\
             default_pool_size = 20\nlogfile = {at}/log\n",
            server.folder().display(),
            server.port(),
            port.number()
        );
        let file = folder.path().join("pgbouncer.ini");
        fs::write(&file, settings).expect("the folder can be written to");
        let mut command = Command::new("/usr/sbin/pgbouncer");
        command.arg("-q").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        not_as_root(&mut command);
        let process = Process::start(&mut command, folder.path())
            .unwrap_or_else(|error| panic!("pgbouncer: {error}: scripts/test install"));
        let pooler = Self { _process: process, port, _folder: folder };
        wait_until("PgBouncer listens", || {
            std::net::TcpStream::connect(("127.0.0.1", pooler.port.number())).is_ok()
        });
        pooler
    }

    /// The URL of the server's database through it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port.number())
    }
}

/// A disk of a few megabytes, in memory, which is full soon. It is unmounted when this value is dropped.
pub struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    /// Mounts it, which root may do, also by `sudo`.
    #[must_use]
    pub fn mount(megabytes: u32) -> Self {
        let disk = Self { folder: new_folder(&std::env::temp_dir()) };
        let size = format!("size={megabytes}m,mode=777");
        let mut mount = Self::as_root("mount");
        succeed(mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(disk.folder.path()));
        disk
    }

    /// A folder on it for one server.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        let folder = self.folder.path().join("data");
        fs::create_dir(&folder).expect("the disk has room");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("it is ours");
        folder
    }

    /// Takes the room that is left. Dropping the file gives it back.
    #[must_use]
    pub fn fill(&self) -> Filling {
        let path = self.folder.path().join("filling");
        let mut file = File::create(&path).expect("the disk has room");
        let block = [0; 4_096];
        while std::io::Write::write_all(&mut file, &block).is_ok() {}
        Filling(path)
    }

    fn as_root(program: &str) -> Command {
        if geteuid().is_root() {
            return Command::new(program);
        }
        let mut sudo = Command::new("sudo");
        sudo.arg("-n").arg(program);
        sudo
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Self::as_root("umount").arg("-l").arg(self.folder.path()).status();
    }
}

/// The file that fills a disk.
pub struct Filling(PathBuf);

impl Drop for Filling {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A folder in memory, if there is one with room: the disk of a busy machine stops a server for seconds, even one that does not
/// wait for it.
fn fast_folder() -> PathBuf {
    const ROOM: u64 = 4 << 30;
    let memory = Path::new("/dev/shm");
    match rustix::fs::statvfs(memory) {
        Ok(room) if room.f_bavail * room.f_frsize >= ROOM => memory.to_owned(),
        _ => std::env::temp_dir(),
    }
}

fn new_folder(parent: &Path) -> TempDir {
    let folder = tempfile::Builder::new().prefix("postgres-").tempdir_in(parent).expect("a temporary folder");
    give_away(folder.path());
    folder
}

fn not_as_root(command: &mut Command) {
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
}

/// Makes the user of the server the owner.
fn give_away(path: &Path) {
    if geteuid().is_root() {
        chown(path, Some(NOBODY), Some(NOBODY)).expect("root may give files away");
    }
}

/// A new server's data, as initdb of this version makes it for this user. Copying it takes a tenth of the processor's time.
fn kept_data() -> PathBuf {
    let version = Command::new(program("initdb")).arg("--version").output();
    let version = version.unwrap_or_else(|error| panic!("initdb: {error}: scripts/test install")).stdout;
    let version =
        String::from_utf8_lossy(&version).replace(|found: char| !found.is_ascii_alphanumeric(), "-");
    let name = format!("{}-{}", version.trim_end_matches('-'), geteuid().as_raw());
    target().join("postgres-data").join(name)
}

/// Copies a folder into a new one or an empty one.
fn copy(from: &Path, to: &Path) {
    succeed(Command::new("cp").arg("-a").arg(from.join(".")).arg(to));
}

fn append(file: &Path, lines: &str) {
    let mut file = File::options().append(true).open(file).expect("initdb has made it");
    std::io::Write::write_all(&mut file, lines.as_bytes()).expect("the folder can be written to");
}

fn succeed(command: &mut Command) {
    let output =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}: scripts/test install"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn signal_all(pids: &[u32], signal: Signal) {
    for pid in pids {
        if let Some(pid) = i32::try_from(*pid).ok().and_then(Pid::from_raw) {
            // A session may have ended meanwhile.
            let _ = kill_process(pid, signal);
        }
    }
}

/// A program of the newest version that is installed. Debian keeps them off the PATH.
fn program(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> = versions
        .filter_map(|version| {
            let number = version.file_name().to_str()?.parse().ok()?;
            let path = version.path().join("bin").join(name);
            path.exists().then_some((number, path))
        })
        .collect();
    found.sort();
    found.pop().map_or_else(|| PathBuf::from(name), |(_, path)| path)
}
