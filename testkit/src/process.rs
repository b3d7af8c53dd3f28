//! A server's process, and the reaper that ends it when the test's own process can't.
//!
//! A test that is killed drops nothing, and its servers would outlive it. So beside each of them stands a shell that does
//! nothing but read from the test's process: when that is gone, and with it the only writing end of the pipe, the shell
//! kills the server and removes its folder.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// First it is told the server's number, then nothing until the pipe is closed. A signal that goes to everybody, and that the
/// test's process may not survive, must not end it.
const REAPER_SCRIPT: &str = "trap '' HUP INT TERM
read -r server
read -r end
[ -n \"$server\" ] && kill -KILL \"$server\"
rm -rf \"$0\"";

/// A process that ends when this value is dropped, or when the process that has this value is gone.
pub(crate) struct Process {
    server: Child,
    /// None only while this value is dropped.
    reaper: Option<ProcessReaper>,
}

impl Process {
    /// Starts it. The folder is removed by the reaper only.
    pub(crate) fn start(command: &mut Command, folder: &Path) -> io::Result<Self> {
        // The reaper comes first, so that no server is without one for longer than it takes to name it.
        let mut reaper = ProcessReaper::start(folder)?;
        let server = command.spawn()?;
        let told = reaper.hold(server.id());
        let process = Self { server, reaper: Some(reaper) };
        told.map(|()| process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.server.id()
    }

    /// Whether it has ended by itself. Its number stays its own, since the reaper may have to kill it by that.
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
        // It fails only if the process has ended by itself.
        let _ = self.server.kill();
        // Its number stays its own until it is waited for. After that nobody must be there who would kill by it.
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

    /// Names the server that it is to end.
    fn hold(&mut self, server: u32) -> io::Result<()> {
        let pipe = self.0.stdin.as_mut().expect("it is piped");
        writeln!(pipe, "{server}")
    }
}

impl Drop for ProcessReaper {
    fn drop(&mut self) {
        // Not by closing the pipe: that is the sign to kill the server.
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
    fn a_process_that_is_dropped_ends_with_its_reaper_and_the_folder_stays() {
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
    fn the_number_of_a_process_that_ended_by_itself_is_nobody_else_s_while_its_reaper_may_kill_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start(&mut Command::new("true"), folder.path()).unwrap();
        wait_until("it has ended", || process.has_ended());
        assert!(process.has_ended() && test_kill_process(Pid::from_child(&process.server)).is_ok());
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let started = Process::start(&mut Command::new("there/is/none"), folder.path());
        assert!(started.is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    }
}
