//! Whether a file has changed, without reading it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// What distinguishes one version of a file from the next. Reading it is one system call.
///
/// A symbolic link has the stamp of its target. Two stamps are equal if the inode, the length and the times of the file are, or if
/// there is no file.
///
/// ```
/// use leasehold_serve::FileStamp;
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("tokens");
/// let before = FileStamp::of(&path);
/// std::fs::write(&path, "write 0123456789abcdef0123456789abcdef\n")?;
/// assert_ne!(before, FileStamp::of(&path));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp(Option<Stamp>);

/// Times are seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// The stamp of the file that is there now.
    ///
    /// ```
    /// use leasehold_serve::FileStamp;
    ///
    /// assert_eq!(FileStamp::of("/no/file".as_ref()), FileStamp::of("/no/other".as_ref()));
    /// ```
    #[must_use]
    pub fn of(path: &Path) -> Self {
        Self(fs::metadata(path).ok().map(|found| Stamp {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }))
    }
}
