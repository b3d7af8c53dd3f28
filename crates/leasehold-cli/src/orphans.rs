//! Reaps processes whose parent has ended, if the kernel gives them to this process: as process 1 of a container, or as a
//! subreaper. Without that each of them would be a zombie for as long as this process lives.
//!
//! A process that this one has started is never reaped here: the code that waits for it needs its exit status.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::signal::unix::{SignalKind, signal};

/// How soon it is looked again after a process of our own has ended, which may hide orphans until it is reaped.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The processes that this one has started.
static OWN: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// A process that is no orphan, until this is dropped.
#[derive(Debug)]
pub(crate) struct Own(i32);

impl Own {
    /// Starts a process. While the set is locked, no process is found to be an orphan, so this one is not reaped before it is registered.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<(Child, Self)> {
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        let process = command.spawn()?;
        let pid = i32::try_from(process.id()).unwrap_or_default();
        own.insert(pid);
        Ok((process, Self(pid)))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        OWN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

fn is_own(pid: i32) -> bool {
    OWN.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
}

/// Reaps orphans until the program ends, if this process gets any.
pub(crate) fn reap_in_background() {
    if !gets_orphans() {
        return;
    }
    // Without it they stay zombies, which harms no lock.
    let Ok(mut ended) = signal(SignalKind::child()) else { return };
    tokio::spawn(async move {
        loop {
            if reap() == Left::MaybeSome {
                tokio::time::sleep(RETRY_INTERVAL).await;
            } else if ended.recv().await.is_none() {
                return;
            }
        }
    });
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn gets_orphans() -> bool {
    std::process::id() == 1 || nix::sys::prctl::get_child_subreaper().unwrap_or(false)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn gets_orphans() -> bool {
    std::process::id() == 1
}

/// What may be left after orphans were reaped.
#[derive(PartialEq, Eq)]
enum Left {
    Nothing,
    /// Orphans behind a process of our own that has ended and is not reaped yet.
    MaybeSome,
}

fn reap() -> Left {
    let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    loop {
        match waitid(Id::All, peek).map(|status| status.pid()) {
            Ok(Some(pid)) if is_own(pid.as_raw()) => return Left::MaybeSome,
            Ok(Some(pid)) => reap_one(pid.as_raw()),
            // A real-time signal ended it, for which `waitid` of nix has no name. The number of the process is lost with it.
            Err(Errno::EINVAL) => return reap_all_but_own(),
            Ok(None) | Err(_) => return Left::Nothing,
        }
    }
}

fn reap_one(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Reaps every process that has ended, by number.
fn reap_all_but_own() -> Left {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| !is_own(*pid)).for_each(reap_one);
    Left::MaybeSome
}
