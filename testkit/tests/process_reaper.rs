//! Servers end with the process that started them, however that one ends.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use leasehold_testkit::{LIMIT, Server, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// Set in the process that plays the driver: this test, run once more.
const DRIVER: &str = "LEASEHOLD_SERVERS_DRIVER";

#[test]
fn a_driver_that_is_killed_or_terminated_leaves_no_server_behind() {
    if std::env::var_os(DRIVER).is_some() {
        drive();
    }
    // Not INT, which whoever runs in the background of a shell may have been told to ignore.
    for signal in [Signal::KILL, Signal::TERM] {
        let folder = tempfile::tempdir().unwrap();
        let mut driver = start_driver(folder.path());
        let mut witness = Witness::of(&mut driver);
        // It answers only after the servers do.
        witness.repeats("the servers run");
        let sockets = sockets_in(folder.path());
        assert_eq!(sockets.len(), 2);
        let mut connections: Vec<_> = sockets.iter().map(|socket| connect(socket)).collect();
        kill_process(Pid::from_child(&driver), signal).unwrap();
        driver.wait().unwrap();
        for connection in &mut connections {
            assert!(is_over(connection), "a server outlives its driver, which got {signal:?}");
        }
        wait_until("their folders are gone", || fs::read_dir(folder.path()).unwrap().next().is_none());
        // It was started while the servers ran, and has nothing that would keep them.
        witness.repeats("somebody else lives on");
    }
}

/// Two servers, one of them frozen and one started again; then another process, which lives on.
fn drive() -> ! {
    let (frozen, mut restarted) = (Server::on_socket(), Server::on_port());
    frozen.signal("STOP");
    restarted.stop();
    restarted.start();
    let mut witness = Command::new("cat").spawn().unwrap();
    witness.wait().unwrap();
    panic!("{:?} and {:?} outlived their time", frozen.folder(), restarted.folder());
}

fn start_driver(folder: &Path) -> Child {
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", "a_driver_that_is_killed_or_terminated_leaves_no_server_behind", "--nocapture"]);
    driver.env(DRIVER, "1").env("TMPDIR", folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    driver.spawn().unwrap()
}

/// The driver's other process, which repeats what it hears until nobody can say anything any more.
struct Witness {
    ear: std::process::ChildStdin,
    mouth: BufReader<std::process::ChildStdout>,
}

impl Witness {
    fn of(driver: &mut Child) -> Self {
        Self { ear: driver.stdin.take().unwrap(), mouth: BufReader::new(driver.stdout.take().unwrap()) }
    }

    /// Says this, and waits until it comes back.
    fn repeats(&mut self, words: &str) {
        writeln!(self.ear, "{words}").unwrap();
        let heard = self.mouth.by_ref().lines().map(Result::unwrap).find(|line| line == words);
        assert!(heard.is_some(), "it has ended before it said that {words}");
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

/// Waits until the other side is gone, which has nothing to say.
fn is_over(connection: &mut UnixStream) -> bool {
    match connection.read(&mut [0]) {
        Ok(count) => count == 0,
        // A frozen server never took it from its queue.
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}
