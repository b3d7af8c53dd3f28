//! Servers exit with the process that started them, however that process ends.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use leasehold_testkit::{LIMIT, Server, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// Set in the driver process, which is this test run once more.
const DRIVER: &str = "LEASEHOLD_TESTKIT_DRIVER";

#[test]
fn no_server_survives_a_driver_that_is_killed_or_terminated() {
    if std::env::var_os(DRIVER).is_some() {
        drive();
    }
    // Not INT: a shell makes its background processes ignore it.
    for signal in [Signal::KILL, Signal::TERM] {
        let folder = tempfile::tempdir().unwrap();
        let mut driver = start_driver(folder.path());
        let mut witness = Witness::of(&mut driver);
        // It echoes only after the servers respond.
        witness.echoes("the servers run");
        let sockets = sockets_in(folder.path());
        assert_eq!(sockets.len(), 2);
        let mut connections: Vec<_> = sockets.iter().map(|socket| connect(socket)).collect();
        kill_process(Pid::from_child(&driver), signal).unwrap();
        driver.wait().unwrap();
        for connection in &mut connections {
            assert!(is_over(connection), "a server outlives its driver, which got {signal:?}");
        }
        wait_until("their folders are gone", || fs::read_dir(folder.path()).unwrap().next().is_none());
        // The witness started while the servers ran, and must not keep their pipes open.
        witness.echoes("another process runs on");
    }
}

/// Starts two servers, freezes one and restarts the other, then starts a process that runs on.
fn drive() -> ! {
    let (frozen, mut restarted) = (Server::on_socket(), Server::on_port());
    frozen.signal("STOP");
    restarted.stop();
    restarted.start();
    let mut witness = Command::new("cat").spawn().unwrap();
    witness.wait().unwrap();
    panic!("{:?} and {:?} outlived the driver", frozen.folder(), restarted.folder());
}

fn start_driver(folder: &Path) -> Child {
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", "no_server_survives_a_driver_that_is_killed_or_terminated", "--nocapture"]);
    driver.env(DRIVER, "1").env("TMPDIR", folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    driver.spawn().unwrap()
}

/// The driver's other process, which echoes its input until that is closed.
struct Witness {
    stdin: std::process::ChildStdin,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Witness {
    fn of(driver: &mut Child) -> Self {
        Self { stdin: driver.stdin.take().unwrap(), stdout: BufReader::new(driver.stdout.take().unwrap()) }
    }

    /// Writes this line, and waits for its echo.
    fn echoes(&mut self, words: &str) {
        writeln!(self.stdin, "{words}").unwrap();
        let echo = self.stdout.by_ref().lines().map(Result::unwrap).find(|line| line == words);
        assert!(echo.is_some(), "the witness exited before it echoed: {words}");
    }
}

fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let servers = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path().join("socket"));
    servers.filter(|socket| socket.exists()).collect()
}

fn connect(socket: &Path) -> UnixStream {
    let connection = UnixStream::connect(socket).unwrap();
    connection.set_read_timeout(Some(LIMIT)).unwrap();
    connection
}

/// Waits until the server closes the connection.
fn is_over(connection: &mut UnixStream) -> bool {
    match connection.read(&mut [0]) {
        Ok(count) => count == 0,
        // A frozen server never accepted it.
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}
