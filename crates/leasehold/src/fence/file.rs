//! A file that refuses tokens lower than the highest with which it was written.

use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::Token;
use leasehold_store::access_list::AccessList;
use leasehold_store::identity::Identity;
use leasehold_store::links;

use super::{check_ahead, stale};
use crate::error::{Error, ErrorKind};

/// The default limit of the wait for other writers.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// The longest pause between two attempts to lock the `.fence` file.
const MAX_PAUSE: Duration = Duration::from_millis(10);

/// The suffix of the file that has the new content until it is complete. Leftovers are removed, so the suffix must be one that no
/// user gives a file.
const NEW: &str = ".fence-new";

/// A file that refuses tokens lower than the highest token with which it was written. A second file with the suffix `.fence`
/// contains that token. A third file with the suffix `.fence-new` contains the new content until it is complete.
///
/// All writers must use this type. An advisory lock of the `.fence` file makes the check and the write one step. The content
/// is replaced as a whole: a reader sees the old or the new content. The calls wait for the disk, so async code should make
/// them on a thread for blocking calls.
///
/// **Mode, owner, links.** The file keeps its mode, group, owner and POSIX access control list. If a writer may not change the owner, the
/// writer becomes the owner. If the writer is not in the group either, the new group gets the permissions of *others*, and the list is lost.
/// Extended attributes are not kept. A symbolic link of this user or of root is followed: its target is written, and the `.fence`
/// file is in the directory of the target. A link of another user is refused, because it may lead to any file of this one. A file with several hard links is refused, because each name would have its own
/// fence. Those who may write the file, and no others, may read and write the `.fence` file.
///
/// **Other users.** Where all users may create files, as in `/tmp`, a `.fence` file that another user made is refused, unless that user
/// may write the file: its owner, a member of its group, or all.
///
/// **Root** writes in a directory that another user owns with that user's rights, so that a name which this user exchanges leads nowhere
/// where this user may not go: a new file is that user's, and a file there that belongs to someone else, root included, is refused. A directory
/// of root's that a group or all users may write is refused, also one on the way, unless it is sticky. Write such files as another user.
///
/// **A writer that is stopped** in the middle of a write, for example by SIGSTOP, can't be overtaken, because it may
/// continue at any time. Other writers wait for 10 s, or for the limit of [`write_timeout`](Self::write_timeout), and then
/// fail.
///
/// ```
/// use leasehold::fence::FencedFile;
///
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("report");
/// let report = FencedFile::new(path);
/// let stale = client.mutex("report").lock().await?.token();
/// let guard = client.mutex("report").lock().await?;
///
/// report.write(guard.token(), b"new")?;
/// assert!(report.write(stale, b"old").unwrap_err().is_stale());
/// # assert_eq!(std::fs::read(report.path()).unwrap(), b"new");
/// # Ok(()) });
/// ```
#[derive(Clone, Debug)]
pub struct FencedFile {
    path: PathBuf,
}

impl FencedFile {
    /// The file at this path, which need not exist. Nothing is opened.
    ///
    /// ```
    /// let report = leasehold::fence::FencedFile::new("/var/lib/app/report");
    /// assert!(report.path().ends_with("report"));
    /// ```
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path that was given to [`Self::new`].
    ///
    /// ```
    /// let report = leasehold::fence::FencedFile::new("report");
    /// assert_eq!(report.path(), std::path::Path::new("report"));
    /// ```
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the content, unless the file was written with a higher token before. When this returns, the content is on
    /// the disk. Waits at most 10 s for other writers, and blocks the thread.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// # let folder = tempfile::tempdir().unwrap();
    /// let report = leasehold::fence::FencedFile::new(folder.path().join("report"));
    /// let guard = client.mutex("report").lock().await?;
    /// report.write(guard.token(), b"content")?;
    /// assert_eq!(std::fs::read(report.path()).unwrap(), b"content");
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_stale` for a token lower than the highest, `is_ahead` for one that is a day or more ahead of this machine's clock, and
    /// `is_timeout` if another writer did not finish in time; nothing is changed in these cases. `is_unavailable` if a file can't be read or written, with the system's error as its source; also
    /// for a hard link, a symbolic link of another user, too many symbolic links, a damaged `.fence` file, and as root for a directory that others may write.
    /// The old content is then kept, unless only the last step failed, which syncs the folder. In both cases tokens lower than this one
    /// may be refused from now on.
    pub fn write(&self, token: Token, content: &[u8]) -> Result<(), Error> {
        self.write_timeout(token, content, WRITE_LIMIT)
    }

    /// As [`Self::write`], but waits at most `limit` for other writers.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// # let folder = tempfile::tempdir().unwrap();
    /// let report = leasehold::fence::FencedFile::new(folder.path().join("report"));
    /// let guard = client.mutex("report").lock().await?;
    /// report.write_timeout(guard.token(), b"content", Duration::from_millis(100))?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::write`].
    pub fn write_timeout(&self, token: Token, content: &[u8], limit: Duration) -> Result<(), Error> {
        check_ahead(self.path.display(), token)?;
        self.write_ahead(token, content, limit)
    }

    /// As [`Self::write_timeout`], but also with a token that is ahead of this machine's clock: for a store whose tokens are, since
    /// its clock was set back.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use leasehold::Token;
    /// # let folder = tempfile::tempdir().unwrap();
    /// let report = leasehold::fence::FencedFile::new(folder.path().join("report"));
    /// let token = Token::new((1 << 53) - 1).unwrap();
    /// assert!(report.write(token, b"content").unwrap_err().is_ahead());
    /// report.write_ahead(token, b"content", Duration::from_secs(1))?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::write`], except `is_ahead`.
    pub fn write_ahead(&self, token: Token, content: &[u8], limit: Duration) -> Result<(), Error> {
        let failed = |error: io::Error| {
            let refused = |why: &dyn std::fmt::Display| {
                let what = format!("{}: it can't be written: {why}", self.path.display());
                Error::new(ErrorKind::Unavailable, what)
            };
            // An error with words of its own is one of this module.
            match error.get_ref() {
                Some(why) => refused(why),
                None => refused(&error.kind()).with_source(error),
            }
        };
        // `None` if the limit overflows: no deadline.
        let deadline = Instant::now().checked_add(limit);
        let identity = Identity::for_folder_of(&self.path).map_err(failed)?;
        let written = identity.run(|| self.write_as(&identity, token, content, deadline)).flatten();
        match written.map_err(failed)? {
            Written::Done => Ok(()),
            Written::Stale(highest) => Err(stale(self.path.display(), token, highest)),
            Written::Late => {
                let what = format!(
                    "{}: another writer has held it for {limit:?}: is that process stopped?",
                    self.path.display()
                );
                Err(Error::new(ErrorKind::Timeout, what))
            }
        }
    }

    /// On a thread with these rights.
    fn write_as(
        &self,
        identity: &Identity,
        token: Token,
        content: &[u8],
        deadline: Option<Instant>,
    ) -> io::Result<Written> {
        Target::find(&self.path)?.refuse_other_owner(identity)?;
        let Some((target, mut fence)) = self.lock(deadline)? else { return Ok(Written::Late) };
        target.refuse_other_owner(identity)?;
        let highest = read_token(&mut fence)?;
        if highest > token.get() {
            return Ok(Written::Stale(highest));
        }
        // The token first: a crash in between leaves the old content with a fence that is too high, never too low.
        write_token(&mut fence, token).and_then(|()| target.replace(content)).map(|()| Written::Done)
    }

    /// The file that the path leads to, and its fence, which stays locked until it is closed. `None` after the deadline.
    fn lock(&self, deadline: Option<Instant>) -> io::Result<Option<(Target, File)>> {
        loop {
            let target = Target::find(&self.path)?;
            let fence = target.open_fence()?;
            if !lock_until(&fence, deadline)? {
                return Ok(None);
            }
            // While this waited, a link may have changed, and another writer may have replaced the file.
            let found = Target::find(&self.path)?;
            if found.path == target.path {
                return Ok(Some((found, fence)));
            }
        }
    }
}

/// What became of a write.
enum Written {
    Done,
    /// The highest token is this one.
    Stale(u64),
    /// Another writer held the file for too long.
    Late,
}

/// The file that is written, with symbolic links resolved in its last component.
struct Target {
    path: PathBuf,
    /// What is there; `None` if it does not exist yet.
    found: Option<Found>,
}

/// The file that a write replaces.
struct Found {
    metadata: Metadata,
    /// With a list, the mode has the list's mask in the place of the group's rights.
    list: Option<AccessList>,
}

impl Found {
    fn is_writable_for_its_group(&self) -> bool {
        let rights = self.list.as_ref().map_or(self.metadata.mode() >> 3, AccessList::group_rights);
        rights & 0o2 != 0
    }
}

impl Target {
    fn find(path: &Path) -> io::Result<Self> {
        let path = links::follow(path)?;
        let found = match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() => {
                return Err(io::Error::other("another user has exchanged it for a link"));
            }
            Ok(found) if found.is_file() && found.nlink() > 1 => {
                let what = "it has a second name (a hard link), which would have a fence of its own";
                return Err(io::Error::other(what));
            }
            Ok(metadata) => Some(Found { metadata, list: AccessList::of(&path)? }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Self { path, found })
    }

    /// With the rights of the directory's owner, another user's file could only become that owner's, with the content.
    fn refuse_other_owner(&self, identity: &Identity) -> io::Result<()> {
        let Some(found) = self.found.as_ref().filter(|_| identity.is_other()) else { return Ok(()) };
        let (uid, of_folder) = (found.metadata.uid(), rustix::process::geteuid().as_raw());
        if uid == of_folder {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "it belongs to the user with uid {uid}, and its directory to the one with uid {of_folder}, who could exchange it: give it to that \
             user (chown), or move it to a directory that only root may write"
        )))
    }

    /// Those who may write the file may read and write the fence, because a writer must be able to open and lock it, and no others: a
    /// reader could keep it locked.
    fn open_fence(&self) -> io::Result<File> {
        let path = self.beside(".fence");
        match self.create_fence(&path) {
            Ok(fence) => {
                let created = Found { metadata: fence.metadata()?, list: AccessList::of(&path)? };
                let Found { metadata, list } = self.found.as_ref().unwrap_or(&created);
                let writers = metadata.mode() & 0o222;
                let list = list.as_ref().map(AccessList::of_writers);
                copy_ownership(&fence, metadata, 0o600 | writers | (writers << 1), list.as_ref())?;
                Ok(fence)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let fence = OpenOptions::new().read(true).write(true).open(&path)?;
                let (named, opened) = (fs::symlink_metadata(&path)?, fence.metadata()?);
                if (named.dev(), named.ino()) != (opened.dev(), opened.ino()) {
                    return Err(io::Error::other("the fence is a link: its target is not written to"));
                }
                if !opened.is_file() {
                    return Err(io::Error::other("the fence is no file, but a pipe or a device"));
                }
                if !self.is_made_by_a_writer(&opened)? {
                    let what = format!(
                        "the fence {} was made by another user (uid {}), in a directory that all may write",
                        path.display(),
                        opened.uid()
                    );
                    return Err(io::Error::other(what));
                }
                Ok(fence)
            }
            Err(error) => Err(error),
        }
    }

    /// At no moment may others read it, who could lock it then and for good. Those who may write a new file are as the umask says.
    fn create_fence(&self, path: &Path) -> io::Result<File> {
        let mode = if self.found.is_some() { 0o600 } else { 0o622 };
        OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(path)
    }

    /// Whether the fence was made by one who may write the file. Where all users may create files, as in `/tmp`, another one could make
    /// it first, keep it locked, and change the token in it.
    fn is_made_by_a_writer(&self, fence: &Metadata) -> io::Result<bool> {
        const SETGID: u32 = 0o2000;
        let folder = fs::metadata(self.folder())?;
        let user = fence.uid();
        if folder.mode() & 0o002 == 0 || user == 0 || user == rustix::process::geteuid().as_raw() {
            return Ok(true);
        }
        let Some(file) = &self.found else { return Ok(false) };
        let is_writable_for_group = file.is_writable_for_its_group();
        let file = &file.metadata;
        // Only a member of a group can give a file to it, unless the folder does.
        let is_of_group = file.gid() == fence.gid() && folder.mode() & SETGID == 0;
        Ok(user == file.uid() || file.mode() & 0o002 != 0 || is_writable_for_group && is_of_group)
    }

    fn folder(&self) -> &Path {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        folder.unwrap_or(Path::new("."))
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        // Before anything is changed: a folder that can't be read can't be synced.
        let folder = File::open(self.folder())?;
        let new = self.beside(NEW);
        // A killed writer may have left it. If it is a link, the link is removed and not followed.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(in_the_way(&new, error)),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        if self.found.is_some() {
            // Others must not read it before it has its mode.
            options.mode(0o600);
        }
        let mut file = options.open(&new).map_err(|error| in_the_way(&new, error))?;
        file.write_all(content)?;
        if let Some(found) = &self.found {
            let Found { metadata, list } = found;
            copy_ownership(&file, metadata, metadata.mode() & 0o7777, list.as_ref())?;
        }
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        folder.sync_all()
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(suffix);
        path.into()
    }
}

/// The error for a file that can't be made or removed: in a directory where all users may create files, another one can take its name.
fn in_the_way(name: &Path, error: io::Error) -> io::Error {
    let Ok(found) = fs::symlink_metadata(name) else { return error };
    let (shown, owner) = (name.display(), found.uid());
    io::Error::other(format!("{shown}, of the user with uid {owner}, is in the way: {}", error.kind()))
}

/// Gives a new file this mode and access control list, and the owner and group of the existing one as far as this process may. A list that the
/// new file has from its directory is removed: the mode would widen it.
fn copy_ownership(file: &File, found: &Metadata, mode: u32, list: Option<&AccessList>) -> io::Result<()> {
    use std::os::unix::fs::fchown;
    let new = file.metadata()?;
    let (mut mode, mut list) = (mode, list);
    if (new.uid(), new.gid()) != (found.uid(), found.gid())
        && fchown(file, Some(found.uid()), Some(found.gid())).is_err()
    {
        // A setuid file of another owner would run with that owner's rights.
        mode &= 0o777;
        if new.gid() != found.gid() && fchown(file, None, Some(found.gid())).is_err() {
            mode = mode & !0o070 | (mode & 0o007) << 3;
            // Its entry for the group would be one for another group.
            list = None;
        }
    }
    AccessList::set(list, file)?;
    file.set_permissions(Permissions::from_mode(mode))
}

/// Locks the file before the deadline, if there is one. Returns whether it succeeded.
fn lock_until(fence: &File, deadline: Option<Instant>) -> io::Result<bool> {
    let mut pause = Duration::from_micros(100);
    loop {
        match fence.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {}
        }
        let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Ok(false);
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// The stored token; zero in a new file.
fn read_token(fence: &mut File) -> io::Result<u64> {
    const LONGEST: u64 = 64;
    let mut text = String::new();
    fence.take(LONGEST).read_to_string(&mut text)?;
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "its .fence file holds no token");
    if text.is_empty() { Ok(0) } else { text.trim_end().parse().map_err(|_| damaged()) }
}

/// A fixed number of bytes, so that a crash never leaves half a number.
fn write_token(fence: &mut File, token: Token) -> io::Result<()> {
    fence.rewind()?;
    fence.write_all(format!("{token:016}\n").as_bytes())?;
    fence.sync_all()
}

#[cfg(test)]
mod tests;
