//! The files of one database: which ones they were when this client opened them, and whether they are still in place.
//!
//! SQLite keeps the latest writes in a log, and its own locks in shared memory. Both are files beside the database. If the log is
//! removed, a client that has it open continues with the removed log, and a later client creates a new one: neither sees the
//! other's leases. Each command therefore compares the three files with those that the client has opened.
//!
//! **A client whose files were removed** has lost its leases: a renewal gets *not held*, and the store requests one as soon as it
//! notices, within [`FILE_CHECK_INTERVAL`](super::worker::FILE_CHECK_INTERVAL). Every other command is an error. Nothing is
//! written any more, because that would damage the files of later clients.

use std::fs;
use std::io;
use std::mem::forget;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

use leasehold_store::process::PerProcess;

/// What is beside the database, by what is added to its name.
pub(super) const SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];

/// The error of a client whose files were removed.
pub(super) const GONE: &str = "the file, or its -wal or -shm, was removed or replaced while it was in use, and with it the locks: \
    connect again, from all clients of this process";

/// The files that the clients of this process use.
static IN_USE: PerProcess<InUse> = PerProcess::of_first(InUse::new());

#[derive(Debug, Default)]
struct InUse {
    known: Mutex<Vec<Weak<Files>>>,
    /// How many clients open a file at present.
    opening: AtomicUsize,
}

impl InUse {
    const fn new() -> Self {
        Self { known: Mutex::new(Vec::new()), opening: AtomicUsize::new(0) }
    }

    fn known(&self) -> MutexGuard<'_, Vec<Weak<Files>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Device and number of a file.
pub(super) type FileId = (u64, u64);

/// The files that a client has opened.
#[derive(Debug)]
pub(super) struct Files {
    paths: [PathBuf; 3],
    ids: [FileId; 3],
    /// When the database was created, where the file system knows it.
    created: Option<SystemTime>,
}

impl Files {
    /// Those that are in place now, right after they were opened.
    pub(super) fn identify(path: &Path) -> io::Result<Arc<Self>> {
        let paths = SUFFIXES.map(|suffix| beside(path, suffix));
        let ids = [id_of(&paths[0])?, id_of(&paths[1])?, id_of(&paths[2])?];
        let created = created(path);
        Ok(Self { paths, ids, created }.register())
    }

    fn register(self) -> Arc<Self> {
        let files = Arc::new(self);
        let mut in_use = IN_USE.get_or_default().known();
        in_use.retain(|known| known.strong_count() > 0);
        in_use.push(Arc::downgrade(&files));
        files
    }

    /// Whether they are still in place.
    pub(super) fn are_in_place(&self) -> bool {
        self.paths.iter().zip(&self.ids).all(|(path, id)| id_of(path).is_ok_and(|found| found == *id))
    }
}

/// Whether a client of this process uses this database with files that are no longer in place. SQLite shares memory between
/// all connections of a process to one file, so a new client would share the old one's.
pub(super) fn are_stale_in_process(path: &Path) -> bool {
    let (Ok(id), created) = (id_of(path), created(path)) else { return false };
    let in_use = IN_USE.get_or_default().known();
    // A file that a client has closed but not forgotten yet may have been removed, and its number belong to a new file.
    let is_same = |files: &Arc<Files>| files.ids[0] == id && files.created == created;
    in_use.iter().filter_map(Weak::upgrade).filter(is_same).any(|files| !files.are_in_place())
}

/// Counts a client that opens a file, until its files are known.
pub(super) struct Opening(&'static InUse);

impl Opening {
    pub(super) fn begin() -> Self {
        let in_use = IN_USE.get_or_default();
        in_use.opening.fetch_add(1, Ordering::Relaxed);
        Self(in_use)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.opening.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a process from which this one was forked had the file open then, or may have had it. SQLite in this process takes the locks on the
/// file for its own that are its parent's: it would write beside others.
pub(super) fn are_open_in_parent(path: &Path) -> bool {
    let id = id_of(path).ok();
    IN_USE.of_parents().any(|in_use| {
        let is_open = |files: &Arc<Files>| id.is_some_and(|id| files.ids.contains(&id));
        match in_use.known.try_lock() {
            Ok(known) => {
                let opened: Vec<_> = known.iter().filter_map(Weak::upgrade).collect();
                let is_open = in_use.opening.load(Ordering::Relaxed) > 0 || opened.iter().any(is_open);
                // They are the parent's to drop.
                forget(opened);
                is_open
            }
            // A thread that does not run here has it.
            Err(_) => true,
        }
    })
}

fn created(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|found| found.created()).ok()
}

/// Whether something else was mounted over the name of this one file: then its log and its shared memory are not beside
/// those of other users.
#[cfg(target_os = "linux")]
pub(super) fn is_mount_point(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let found = statx(CWD, path, AtFlags::empty(), StatxFlags::empty());
    found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_mount_point(_path: &Path) -> bool {
    false
}

pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    PathBuf::from(path)
}

pub(super) fn id_of(path: &Path) -> io::Result<FileId> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The processes that use a log or shared memory other than the files beside the database. Only root sees those of other users.
#[cfg(target_os = "linux")]
pub(super) fn find_strays(path: &Path) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut strays: Vec<u32> = pids.filter(|pid| is_stray(*pid, path).unwrap_or(false)).collect();
    strays.sort_unstable();
    strays
}

#[cfg(not(target_os = "linux"))]
pub(super) fn find_strays(_path: &Path) -> Vec<u32> {
    Vec::new()
}

/// Whether this process uses a log or shared memory of the file that is not what lies beside it now. None if it can't be
/// looked at.
#[cfg(target_os = "linux")]
fn is_stray(pid: u32, path: &Path) -> Option<bool> {
    let [in_place, log, memory] = SUFFIXES.map(|suffix| id_of(&beside(path, suffix)).ok());
    let removed = SUFFIXES.map(|suffix| beside(path, &format!("{suffix} (deleted)")));
    let file_name = path.file_name()?.to_str()?;
    let others = [format!("{file_name}-wal"), format!("{file_name}-shm")];
    let (mut ids, mut has_log) = (Vec::new(), false);
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if removed.contains(&link) {
            return Some(true);
        }
        ids.extend(id_of(&entry.path()));
        // In a container that mounts the file alone, its log has the same name in another directory.
        has_log |= link
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| others.iter().any(|other| other == name));
    }
    let has = |id: Option<_>| id.is_some_and(|id| ids.contains(&id));
    Some(has(in_place) && has_log && !(has(log) && has(memory)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_file_with_the_number_of_a_removed_one_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks.db");
        fs::write(&path, "").unwrap();
        let removed = folder.path().join("removed.db");
        let closed = |created| {
            let paths = SUFFIXES.map(|suffix| beside(&removed, suffix));
            Files { paths, ids: [id_of(&path).unwrap(); 3], created }.register()
        };
        let _earlier = closed(Some(SystemTime::UNIX_EPOCH));
        assert!(!are_stale_in_process(&path));
        let _same = closed(created(&path));
        assert!(are_stale_in_process(&path), "the same file, whose name was changed");
    }
}
