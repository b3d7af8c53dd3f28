//! A second process that kills the command's group if `leasehold` is killed, for commands that the kernel does not kill then.
//!
//! The kernel forgets the signal that a process is to get at its parent's death when the process executes a program with
//! rights of its own: setuid, setgid, or with file capabilities. Other commands need no second process, and get none.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::exit::Exit;

/// The hidden command of this program that is the watchdog.
pub(crate) const COMMAND: &str = "watchdog";

/// The watchdog, as long as the command runs.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
}

impl Watchdog {
    /// Starts a watchdog if this program needs one.
    pub(crate) fn for_program(program: &Path) -> io::Result<Option<Self>> {
        if !cfg!(target_os = "linux") || !gains_privileges(program) {
            return Ok(None);
        }
        // In a group of its own, so that no key of a terminal reaches it. By this path also a program that was replaced.
        let process = Command::new("/proc/self/exe")
            .arg0("leasehold-watchdog")
            .arg(COMMAND)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Some(Self { process }))
    }

    /// Where the command says which group is to be killed: the command itself does, before anybody can see that it runs.
    pub(crate) fn input(&self) -> io::Result<Option<OwnedFd>> {
        self.process.stdin.as_ref().map(|pipe| pipe.as_fd().try_clone_to_owned()).transpose()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Before its input ends, which would tell that this program was killed. A killed process ends also if it was stopped.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Tells a watchdog that this process's group is to be killed. Async-signal-safe: a child does it between fork and exec.
pub(crate) fn tell(input: &OwnedFd, group: Pid) -> io::Result<()> {
    // So few bytes go into a pipe at once.
    nix::unistd::write(input, &group.as_raw().to_ne_bytes())?;
    Ok(())
}

/// The watchdog itself. Its input ends when `leasehold` does.
pub(crate) fn watch() -> Exit {
    let mut told = Vec::new();
    let _ = io::stdin().read_to_end(&mut told);
    let group = <[u8; 4]>::try_from(told).map(i32::from_ne_bytes).ok().filter(|group| *group > 1);
    if let Some(group) = group {
        // The group may have ended by itself.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    Exit::Success
}

/// Whether executing this program changes the process's rights.
fn gains_privileges(program: &Path) -> bool {
    const SETUID_OR_SETGID: u32 = 0o6000;
    program.metadata().is_ok_and(|found| found.permissions().mode() & SETUID_OR_SETGID != 0)
        || has_capabilities(program)
}

#[cfg(target_os = "linux")]
fn has_capabilities(program: &Path) -> bool {
    // What is too long for it is there as well.
    let mut found = [0_u8; 64];
    match rustix::fs::getxattr(program, "security.capability", &mut found) {
        Ok(size) => size > 0,
        Err(error) => error == rustix::io::Errno::RANGE,
    }
}

#[cfg(not(target_os = "linux"))]
fn has_capabilities(_program: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn setuid_and_setgid_programs_are_recognised() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, "").unwrap();
        for (mode, has_rights) in [(0o755, false), (0o2755, true), (0o4755, true), (0o1755, false)] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(gains_privileges(&program), has_rights, "{mode:o}");
        }
        assert!(!gains_privileges(&folder.path().join("none")));
    }
}
