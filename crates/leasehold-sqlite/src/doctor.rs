//! Checks the database file that locks depend on.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use leasehold_store::identity::Identity;
use leasehold_store::{Check, Component, Diagnosis, StoreError};
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::files::find_strays;
use super::{BUSY_TIMEOUT, checkpoint, foreign_code, location, schema};

/// How large the log may be while its users move it into the file as they should.
const LARGE_LOG: u64 = 64 << 20;

/// With less free space than this on its disk, writes to the file are about to fail.
const LITTLE_ROOM: u64 = 64 << 20;

pub(super) fn diagnose(path: &Path, identity: &Identity, is_durable: bool) -> Result<Diagnosis, StoreError> {
    let snapshot = probe(path, identity, is_durable)?;
    Ok(Diagnosis::new(vec![check_file(&snapshot)]))
}

/// A snapshot of a file.
#[derive(Clone, Debug)]
struct FileSnapshot {
    path: PathBuf,
    bytes: u64,
    log_bytes: u64,
    free_bytes: Option<u64>,
    file_system: Option<&'static str>,
    /// The rights of the owner, the group and others.
    mode: u32,
    is_durable: bool,
    /// What SQLite finds wrong with it.
    damage: Option<String>,
    /// Processes that use the file, or one that had its name, with another log or other shared memory than what is beside it.
    strays: Vec<u32>,
}

fn probe(path: &Path, identity: &Identity, is_durable: bool) -> Result<FileSnapshot, StoreError> {
    let checked = identity.run(|| quick_check(path));
    let checked =
        checked.map_err(|error| schema::not_sent(format!("no thread could be started: {error}")))?;
    let damage = match checked {
        Ok(answer) if answer == "ok" => None,
        Ok(answer) => Some(answer),
        Err(error) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Some(error.to_string()),
            _ => return Err(schema::not_done(error)),
        },
    };
    Ok(FileSnapshot {
        path: path.to_path_buf(),
        bytes: fs::metadata(path).map_or(0, |found| found.len()),
        log_bytes: checkpoint::size(path),
        free_bytes: rustix::fs::statvfs(path).ok().map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
        file_system: file_system(path),
        mode: fs::metadata(path).map_or(0, |found| found.mode()),
        is_durable,
        damage,
        strays: find_strays(path),
    })
}

fn quick_check(path: &Path) -> rusqlite::Result<String> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    foreign_code::prepare_to_read_all(&mut connection)?;
    connection.pragma_query_value(None, "quick_check", |row| row.get(0))
}

fn check_file(snapshot: &FileSnapshot) -> Component {
    let mut component = Component::new(format!("file {}", snapshot.path.display()));
    component.fact("size", size(snapshot.bytes));
    component.fact("log", size(snapshot.log_bytes));
    if let Some(name) = snapshot.file_system {
        component.fact("file system", name);
    }
    match &snapshot.damage {
        None => {
            component.fine(Check::Integrity, "the file is whole", "PRAGMA quick_check has nothing to say");
        }
        Some(damage) => {
            let why = format!("its leases may be lost, and their locks granted to other clients: {damage}");
            let shown = snapshot.path.display();
            let remedy = format!("mv {shown} {shown}.damaged  # once no process uses it; a new one is made");
            component.danger(Check::Integrity, "the file is damaged", why, Some(remedy));
        }
    }
    let readers = location::readers(snapshot.mode);
    if readers != 0 {
        let shown = snapshot.path.display();
        let which = ["g", "o"].into_iter().zip([0o040, 0o004]);
        let which: String = which.filter(|(_, bit)| readers & bit != 0).map(|(name, _)| name).collect();
        component.advice(
            Check::Rights,
            "users who may not write the file may read it",
            "a reader can keep a lock of the file, and so keep everyone from writing, and learns the clients' ids; one that has the file open \
             keeps it so: fuser -v names the processes to root",
            Some(format!("chmod {which}-rx {shown} {shown}-wal {shown}-shm {shown}-inbox")),
        );
    }
    component.fact("synchronous", if snapshot.is_durable { "full" } else { "normal" });
    let cost = if snapshot.is_durable {
        "each change is on disk before it counts"
    } else {
        "a power cut may undo the last changes, but it also ends every lease, and tokens follow the clock"
    };
    component.fine(Check::Durability, "a crash costs no lease", cost);
    if snapshot.strays.is_empty() {
        component.fine(
            Check::SharedLog,
            "its users share one log",
            "checked for the processes that this user may inspect; root may inspect all",
        );
    } else {
        let pids: Vec<String> = snapshot.strays.iter().map(u32::to_string).collect();
        let what = match &pids[..] {
            [_] => "a process uses another log than the one beside the file".to_owned(),
            _ => format!("{} processes use another log than the one beside the file", pids.len()),
        };
        let why = "the -wal or -shm was removed or replaced under them, or a container mounts the file without its \
            directory: they and the others do not see each other's locks";
        let remedy = format!("kill {}  # and start these programs again", pids.join(" "));
        component.danger(Check::SharedLog, what, why, Some(remedy));
    }
    if snapshot.log_bytes > LARGE_LOG {
        let what = format!("the log beside the file has grown to {}", size(snapshot.log_bytes));
        let why = "a process that was stopped while it read keeps the log from being moved into the file";
        component.advice(Check::LogSize, what, why, Some(format!("fuser -v {}", snapshot.path.display())));
    }
    if let Some(free) = snapshot.free_bytes {
        component.fact("room on the disk", size(free));
        if free < LITTLE_ROOM {
            let why = "when the disk is full, no lock can be acquired, released or renewed";
            component.danger(Check::DiskSpace, format!("the disk has {} left", size(free)), why, None);
        }
    }
    let apart = match snapshot.file_system {
        Some("overlay") => Some((
            "the file is in a container's own file system",
            "only processes of the same container see its locks: a directory that several mount is for all of them",
        )),
        Some("FUSE") => Some((
            "the file is on a file system in user space",
            "whether several machines use it is not known, and they would not see each other's locks: then use a local disk",
        )),
        _ => None,
    };
    if let Some((what, why)) = apart {
        component.advice(Check::ContainerFileSystem, what, why, None);
    }
    component
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes.div_ceil(1_024)),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Those that are met most; network file systems are refused when the file is opened.
#[cfg(target_os = "linux")]
fn file_system(path: &Path) -> Option<&'static str> {
    const KNOWN: [(u32, &str); 7] = [
        (0x6573_5546, "FUSE"),
        (0xEF53, "ext"),
        (0x5846_5342, "xfs"),
        (0x9123_683E, "btrfs"),
        (0x2FC1_2FC1, "zfs"),
        (0x0102_1994, "tmpfs"),
        (0x794C_7630, "overlay"),
    ];
    location::name_of(&rustix::fs::statfs(path).ok()?, &KNOWN)
}

#[cfg(not(target_os = "linux"))]
fn file_system(_path: &Path) -> Option<&'static str> {
    None
}

#[cfg(test)]
mod tests {
    use leasehold_store::Severity;

    use super::*;
    use crate::files;

    fn sound() -> FileSnapshot {
        FileSnapshot {
            path: PathBuf::from("/locks.db"),
            bytes: 20_000,
            log_bytes: 1_000,
            free_bytes: Some(1 << 40),
            file_system: Some("ext"),
            mode: 0o660,
            is_durable: false,
            damage: None,
            strays: Vec::new(),
        }
    }

    fn problems(snapshot: &FileSnapshot) -> Vec<(Severity, String)> {
        let findings = check_file(snapshot).findings.into_iter();
        let problems = findings.filter(|finding| finding.severity != Severity::Fine);
        problems.map(|finding| (finding.severity, finding.what)).collect()
    }

    #[test]
    fn each_file_problem_is_reported() {
        let only = |severity, what: &str| vec![(severity, what.to_owned())];
        assert_eq!(problems(&sound()), []);
        let damaged = FileSnapshot { damage: Some("page 3".to_owned()), ..sound() };
        assert_eq!(problems(&damaged), only(Severity::Danger, "the file is damaged"));
        let long = FileSnapshot { log_bytes: 100 << 20, ..sound() };
        assert_eq!(problems(&long), only(Severity::Advice, "the log beside the file has grown to 100 MiB"));
        let full = FileSnapshot { free_bytes: Some(1 << 20), ..sound() };
        assert_eq!(problems(&full), only(Severity::Danger, "the disk has 1 MiB left"));
        let apart = FileSnapshot { strays: vec![7, 8], ..sound() };
        let what = "2 processes use another log than the one beside the file";
        assert_eq!(problems(&apart), only(Severity::Danger, what));
        for (mode, chmod) in [(0o644, "chmod go-rx "), (0o640, "chmod g-rx "), (0o664, "chmod o-rx ")] {
            let open = FileSnapshot { mode, ..sound() };
            assert_eq!(
                problems(&open),
                only(Severity::Advice, "users who may not write the file may read it")
            );
            let remedies = check_file(&open).findings.into_iter().filter_map(|finding| finding.remedy);
            assert!(remedies.collect::<String>().starts_with(chmod), "{mode:o}");
        }
        for mode in [0o600, 0o660, 0o666] {
            assert_eq!(problems(&FileSnapshot { mode, ..sound() }), []);
        }
        let inside = FileSnapshot { file_system: Some("overlay"), ..sound() };
        assert_eq!(problems(&inside), only(Severity::Advice, "the file is in a container's own file system"));
        let far = FileSnapshot { file_system: Some("FUSE"), ..sound() };
        assert_eq!(problems(&far), only(Severity::Advice, "the file is on a file system in user space"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn process_with_a_removed_log_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks.db");
        let client = leasehold::blocking::Client::connect(&format!("sqlite:{}", path.display())).unwrap();
        client.mutex("a").lock().unwrap().release().unwrap();
        assert!(find_strays(&path).is_empty());
        let (log, copy) = (files::beside(&path, "-wal"), files::beside(&path, "-copy"));
        fs::copy(&log, &copy).unwrap();
        fs::remove_file(&log).unwrap();
        assert_eq!(find_strays(&path), [std::process::id()]);
        fs::rename(copy, &log).unwrap();
        assert_eq!(find_strays(&path), [std::process::id()], "another one took its place");
    }
}
