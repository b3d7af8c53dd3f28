//! Where the file is: whether it can be used, and whether all clients would see the same locks there.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use leasehold_store::OpenError;
use leasehold_store::links;
use leasehold_store::process::PerProcess;
use rustix::fs::Access;

use super::{access_lists, files};

/// Creates the file if it is missing, and returns its only name.
///
/// All clients must use one name, because the log and the clients' pipes are beside that name: links are followed, a relative
/// path becomes absolute, and a file with a second name is refused.
pub(super) fn check(path: &Path) -> Result<PathBuf, OpenError> {
    let name = resolve(path)?;
    let refused = |what: &str| OpenError::unavailable(format!("sqlite:{}: {what}", path.display()));
    // What is wrong with the directory is said later.
    if let Ok(Some(what)) = access_lists::list_of_new_files_in(&folder_of(&name)) {
        return Err(refused(&what));
    }
    touch(&name)?;
    match fs::symlink_metadata(&name) {
        Ok(found) if found.is_symlink() => {
            return Err(refused("another user has exchanged it for a link while it was opened"));
        }
        Ok(found) if found.nlink() != 1 => {
            return Err(refused(
                "it has a second name (a hard link), whose users would not see these locks: \
                 give each its own file, or all of them one name",
            ));
        }
        Ok(_) => {}
        Err(error) => {
            return Err(refused(&format!("it was removed while it was opened: {error}")).with_source(error));
        }
    }
    refuse_network(&name)?;
    refuse_mount_point(&name)?;
    Ok(name)
}

/// The whole name of the file, behind the links in its place.
fn resolve(path: &Path) -> Result<PathBuf, OpenError> {
    let refused = |error| OpenError::unavailable(format!("sqlite:{}: {error}", path.display()));
    let name = links::follow(path).map_err(refused)?;
    let folder = fs::canonicalize(folder_of(&name)).ok();
    let whole = folder.and_then(|folder| Some(folder.join(name.file_name()?)));
    // What is wrong with the directory is said later.
    Ok(whole.unwrap_or(name))
}

/// The mode with which a file is made. At no moment may those read it who may not write it: a reader can keep a lock of the file, or of those
/// beside it, which have its mode, and so keep everyone from writing.
const NEW: u32 = 0o622;

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(NEW).open(path)
}

/// Lets those who may write a new file read it.
fn show_to_writers(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.mode();
    let writers = mode & 0o022;
    file.set_permissions(Permissions::from_mode(0o600 | writers | (writers << 1)))
}

/// The rights to read of those who may not write.
pub(super) fn readers(mode: u32) -> u32 {
    mode & ((!mode & 0o022) << 1)
}

/// Makes sure that the file can be read and written, with the system's own words if it can't.
fn touch(path: &Path) -> Result<(), OpenError> {
    let folder = folder_of(path);
    let refused = |what: String| OpenError::unavailable(format!("sqlite:{}: {what}", path.display()));
    if let Some((what, error)) = missing(&folder) {
        let error = OpenError::unavailable(format!("sqlite:{}: {what}", path.display())).with_source(error);
        return Err(error);
    }
    if path.is_dir() {
        return Err(refused("this is a directory: name a file in it".to_owned()));
    }
    // A file that exists is never opened and closed here: closing it would drop every lock that SQLite, in another client of
    // this process, holds on it. That client does not open a new file before it is closed here.
    static CREATING: PerProcess<Mutex<()>> = PerProcess::of_first(Mutex::new(()));
    let _creating = CREATING.get_or_default().lock().unwrap_or_else(PoisonError::into_inner);
    let created =
        create(path).and_then(|file| share_with_group(&file, &folder).and_then(|()| show_to_writers(&file)));
    let usable = match created {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK).map_err(io::Error::from)
        }
        created => created,
    };
    match usable {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let what = format!(
                "no permission: it and its directory, {}, must be readable and writable for you",
                folder.display()
            );
            Err(refused(what).with_source(error))
        }
        Err(error) => {
            Err(refused(format!("it can't be opened ({}): {error}", error.kind())).with_source(error))
        }
    }
}

/// Why a directory can't be used: it does not exist, or one on the way to it does not let this user in.
fn missing(folder: &Path) -> Option<(String, io::Error)> {
    let error = match fs::metadata(folder) {
        Ok(found) if found.is_dir() => return None,
        Ok(_) => io::ErrorKind::NotADirectory.into(),
        Err(error) => error,
    };
    let shown = folder.display();
    let what = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            // The first one that hides what is in it.
            let is_hidden = |path: &&Path| {
                fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
            };
            let hidden = folder.ancestors().filter(is_hidden).last();
            let closed = hidden.and_then(Path::parent).unwrap_or(folder).display();
            format!(
                "permission denied: the directory {closed} does not let you in (x is missing), so {shown} can't be used"
            )
        }
        io::ErrorKind::NotADirectory => format!("{shown} is no directory: name a file in one"),
        _ => format!("the directory {shown} does not exist: create it, or name another file"),
    };
    Some((what, error))
}

/// The mode bits of a directory whose files are for its group: setgid, and writable for the group.
const SHARED_FOLDER: u32 = 0o2020;

/// In a directory that is shared by a group, gives a new file to that group, independently of the umask. SQLite gives the log and
/// the shared memory the same mode and group, and `mailbox.rs` the pipes.
fn share_with_group(file: &File, folder: &Path) -> io::Result<()> {
    let folder = fs::metadata(folder)?;
    if folder.mode() & SHARED_FOLDER != SHARED_FOLDER {
        return Ok(());
    }
    let found = file.metadata()?;
    if found.gid() != folder.gid() {
        std::os::unix::fs::fchown(file, None, Some(folder.gid()))?;
    }
    file.set_permissions(Permissions::from_mode(found.mode() & 0o777 | 0o060))
}

/// A container that mounts the file, and not its directory, has a log and shared memory of its own.
fn refuse_mount_point(path: &Path) -> Result<(), OpenError> {
    if !files::is_mount_point(path) {
        return Ok(());
    }
    let what = format!(
        "sqlite:{}: this file is mounted by itself, without the -wal, -shm and -inbox beside it, so others would not see these \
         locks: mount its directory",
        path.display()
    );
    Err(OpenError::unsupported(what))
}

pub(super) fn folder_of(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// File systems that several machines share. 9P has no locks either.
#[cfg(target_os = "linux")]
const NETWORKS: [(u32, &str); 12] = [
    (0x7461_636F, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFE53_4D42, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0x5346_414F, "AFS"),
    (0x00C3_6400, "Ceph"),
    (0x0BD0_0BD0, "Lustre"),
    (0x0102_1997, "9P"),
];

#[cfg(target_os = "linux")]
fn refuse_network(path: &Path) -> Result<(), OpenError> {
    let Ok(found) = rustix::fs::statfs(path) else { return Ok(()) };
    match name_of(&found, &NETWORKS) {
        None => Ok(()),
        Some(name) => Err(OpenError::unsupported(format!(
            "sqlite:{}: it is on a network file system ({name}), whose machines would not see each other's locks: \
                 name a file on a local disk",
            path.display()
        ))),
    }
}

/// The name of a file system, if it is one of these. Its number has 32 bits, which some machines show with a sign, and some
/// in a wider number.
#[cfg(target_os = "linux")]
pub(super) fn name_of(found: &rustix::fs::StatFs, known: &[(u32, &'static str)]) -> Option<&'static str> {
    #[expect(clippy::cast_possible_truncation, reason = "what is cut off is the sign, repeated")]
    let magic = found.f_type as u32;
    known.iter().find(|(number, _)| *number == magic).map(|(_, name)| *name)
}

#[cfg(not(target_os = "linux"))]
fn refuse_network(_path: &Path) -> Result<(), OpenError> {
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn new_file_is_hidden_from_readers_from_its_first_moment() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(&folder.path().join("locks.db")).unwrap();
        let mode = file.metadata().unwrap().mode();
        assert_eq!((mode & 0o044, mode & 0o600), (0, 0o600), "{mode:o}");
        show_to_writers(&file).unwrap();
        assert_eq!(readers(file.metadata().unwrap().mode()), 0);
    }

    #[test]
    fn bind_mounted_file_is_refused() {
        let error = refuse_mount_point(Path::new("/proc")).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("mount its directory"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        assert!(refuse_mount_point(folder.path()).is_ok());
    }

    #[test]
    fn file_system_with_a_signed_number_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let mut found = rustix::fs::statfs(folder.path()).unwrap();
        for (number, name) in [(-0x00AC_B2BE, "CIFS"), (-0x01AC_B2BE, "SMB"), (0x6969, "NFS")] {
            found.f_type = number;
            assert_eq!(name_of(&found, &NETWORKS), Some(name));
        }
        found.f_type = 0xEF53;
        assert_eq!(name_of(&found, &NETWORKS), None);
    }
}
