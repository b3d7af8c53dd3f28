//! A second process that kills the command's group if `leasehold` is killed and the kernel would not kill the command.
//!
//! The kernel clears a process's parent-death signal when the process executes a privileged program: setuid, setgid, or with file
//! capabilities. Other commands need no watchdog, and get none.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::exit::Exit;
use crate::orphans::Own;

/// The hidden subcommand of this program that runs the watchdog.
pub(crate) const COMMAND: &str = "watchdog";

/// The watchdog, as long as the command runs.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
    _own: Own,
}

impl Watchdog {
    /// Starts a watchdog if this program needs one.
    pub(crate) fn for_program(program: &Path) -> io::Result<Option<Self>> {
        if !cfg!(target_os = "linux") || !gains_privileges(program) {
            return Ok(None);
        }
        // In its own group, so that no key of a terminal reaches it. This path also works if the program file was replaced.
        let mut watchdog = Command::new("/proc/self/exe");
        watchdog
            .arg0("leasehold-watchdog")
            .arg(COMMAND)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let (process, _own) = Own::spawn(&mut watchdog)?;
        Ok(Some(Self { process, _own }))
    }

    /// The pipe on which the command names the group to kill. The command writes before exec, so no group runs unwatched.
    pub(crate) fn input(&self) -> io::Result<Option<OwnedFd>> {
        self.process.stdin.as_ref().map(|pipe| pipe.as_fd().try_clone_to_owned()).transpose()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Kill it before its input ends, because that end means that this program was killed. KILL also ends a stopped process.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Tells a watchdog which group to kill. Async-signal-safe, because a child calls it between fork and exec.
pub(crate) fn tell(input: &OwnedFd, group: Pid) -> io::Result<()> {
    // A pipe takes so few bytes in one write.
    nix::unistd::write(input, &group.as_raw().to_ne_bytes())?;
    Ok(())
}

/// The watchdog itself. Its input ends when `leasehold` does.
pub(crate) fn watch() -> Exit {
    let mut input = Vec::new();
    let _ = io::stdin().read_to_end(&mut input);
    let group = <[u8; 4]>::try_from(input).map(i32::from_ne_bytes).ok().filter(|group| *group > 1);
    if let Some(group) = group {
        // The group may have ended by itself.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    Exit::Success
}

/// Whether executing this program changes the process's privileges.
fn gains_privileges(program: &Path) -> bool {
    const SETUID_OR_SETGID: u32 = 0o6000;
    program.metadata().is_ok_and(|found| found.permissions().mode() & SETUID_OR_SETGID != 0)
        || has_capabilities(program)
}

#[cfg(target_os = "linux")]
fn has_capabilities(program: &Path) -> bool {
    // A value that does not fit exists as well: the error is RANGE.
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
