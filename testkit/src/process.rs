//! A server's process, and the reaper that kills it when the test's own process cannot.
//!
//! A killed test runs no destructor, so its servers would outlive it. Each server therefore has a shell beside it that reads from
//! a pipe of the test's process. When that process is gone, the pipe closes, and the shell kills the server and removes its
//! folder.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// Reads the server's process id, then waits until the pipe closes. It ignores the signals that a terminal sends to all of its
/// processes, since the test's process may die of them.
const REAPER_SCRIPT: &str = "trap '' HUP INT TERM
read -r server
read -r end
[ -n \"$server\" ] && kill -KILL \"$server\"
rm -rf \"$0\"";

/// A process that is killed when this value is dropped, or when the process that owns this value is gone.
pub(crate) struct Process {
    server: Child,
    /// None only while this value is dropped.
    reaper: Option<ProcessReaper>,
}

impl Process {
    /// Starts the process. Only the reaper removes the folder.
    pub(crate) fn start(command: &mut Command, folder: &Path) -> io::Result<Self> {
        // The reaper starts first, so that a server has one as soon as its process id is written.
        let mut reaper = ProcessReaper::start(folder)?;
        let server = command.spawn()?;
        let registered = reaper.register(server.id());
        let process = Self { server, reaper: Some(reaper) };
        registered.map(|()| process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.server.id()
    }

    /// Whether the process has exited by itself. It is not reaped, so that its id stays its own while the reaper may kill by id.
    pub(crate) fn has_ended(&self) -> bool {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.server)), ended);
        status.map_err(io::Error::from).expect("it is our child").is_some()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let sent = kill_process(Pid::from_child(&self.server), signal);
        sent.map_err(io::Error::from).expect("it is our child");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It fails only if the process has exited by itself.
        let _ = self.server.kill();
        // After the wait another process may get this id, so the reaper must be gone before.
        drop(self.reaper.take());
        let _ = self.server.wait();
    }
}

/// The shell.
struct ProcessReaper(Child);

impl ProcessReaper {
    fn start(folder: &Path) -> io::Result<Self> {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(REAPER_SCRIPT).arg(folder);
        // In a group of its own, out of reach of Ctrl-C.
        shell.process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Self)
    }

    /// Names the server to kill.
    fn register(&mut self, server: u32) -> io::Result<()> {
        let pipe = self.0.stdin.as_mut().expect("it is piped");
        writeln!(pipe, "{server}")
    }
}

impl Drop for ProcessReaper {
    fn drop(&mut self) {
        // Closing the pipe instead would make the shell kill the server.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::test_kill_process;

    use super::*;
    use crate::wait::wait_until;

    #[test]
    fn dropping_a_process_kills_it_and_its_reaper_and_keeps_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start(Command::new("sleep").arg("600"), folder.path()).unwrap();
        let both = [&process.server, &process.reaper.as_ref().unwrap().0].map(Pid::from_child);
        assert!(both.iter().all(|pid| test_kill_process(*pid).is_ok()));
        drop(process);
        // A zombie would still be there.
        assert!(both.iter().all(|pid| test_kill_process(*pid).is_err()));
        assert!(folder.path().exists());
    }

    #[test]
    fn an_exited_process_keeps_its_id_while_its_reaper_may_kill_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start(&mut Command::new("true"), folder.path()).unwrap();
        wait_until("it has ended", || process.has_ended());
        assert!(process.has_ended() && test_kill_process(Pid::from_child(&process.server)).is_ok());
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let started = Process::start(&mut Command::new("there/is/none"), folder.path());
        assert!(started.is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    }
}
