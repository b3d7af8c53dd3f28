//! Symbolic links in the place of a file: whose links are followed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The maximum number of links that are followed, as on Linux.
const MAX_LINKS: usize = 40;

/// Follows links in the last component of a path: those of root, of the user who runs this, and of the one whose rights the thread has. A link
/// that another user has put there may lead to any file of this user. The kernel refuses such a link in a sticky directory only if it is
/// opened itself (`fs.protected_symlinks`), and this reads it.
///
/// What has the returned name is no link, or was none when it was looked at: open it without following one.
///
/// # Errors
///
/// For a link of another user, too many links, and a path without a last component.
pub fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut name = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        if name.file_name().is_none() {
            return Err(io::Error::other("this is a directory: name a file in it"));
        }
        let found = fs::symlink_metadata(&name).ok();
        let Some(link) = found.filter(fs::Metadata::is_symlink) else { return Ok(name) };
        if !is_trusted(link.uid()) {
            let what = format!("this is a link of another user (uid {}): name the file itself", link.uid());
            return Err(io::Error::other(what));
        }
        let target = fs::read_link(&name).ok();
        // The link that was looked at, which can't change.
        let again = fs::symlink_metadata(&name).ok().map(|again| (again.dev(), again.ino()));
        let Some(target) = target.filter(|_| again == Some((link.dev(), link.ino()))) else {
            return Err(io::Error::other("another user has exchanged it while it was opened"));
        };
        name = name.parent().unwrap_or(Path::new("")).join(target);
    }
    Err(io::Error::other("it leads through too many links"))
}

fn is_trusted(user: u32) -> bool {
    let (real, effective) = (rustix::process::getuid(), rustix::process::geteuid());
    user == 0 || user == real.as_raw() || user == effective.as_raw()
}
