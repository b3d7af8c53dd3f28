//! Root uses the file with the rights of its owner. SQLite opens the files beside it by their names, and those who may write the directory can put
//! a private file of another user, or of root, in their place: it would be overwritten, and given to the owner of the database.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;

/// Runs this with the rights of the owner of the file, on a thread of its own, if this is root and the owner is not.
pub(super) fn as_owner_of<T: Send>(database: &Path, run: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(owner) = other_owner(database) else { return Ok(run()) };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("leasehold-sqlite".to_owned());
        let thread = thread.spawn_scoped(scope, move || {
            owner.become_it();
            run()
        })?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// Gives this thread the rights of the owner of the file for good, if it is root's and the owner is another user.
pub(super) fn become_owner_of(database: &Path) {
    if let Some(owner) = other_owner(database) {
        owner.become_it();
    }
}

struct Owner {
    user: u32,
    group: u32,
}

impl Owner {
    fn of(found: &fs::Metadata) -> Option<Self> {
        let (user, group) = (found.uid(), found.gid());
        (user != 0).then_some(Self { user, group })
    }

    /// Without the right to do so, as in a container, this thread goes on as root. What stands beside the file is checked all the same.
    #[cfg(target_os = "linux")]
    fn become_it(&self) {
        use rustix::process::{Gid, Uid};
        use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        let became = set_thread_groups(&[group])
            .and_then(|()| set_thread_res_gid(None, group, None))
            .and_then(|()| set_thread_res_uid(None, user, None));
        if let Err(error) = became {
            tracing::debug!(%error, user = self.user, "the file is used with the rights of root");
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn become_it(&self) {}
}

/// The owner of the file, or of the directory if there is none yet, if it is another user than root, and this is root. Who owns a link in
/// the place of the file counts first: it may lead anywhere.
fn other_owner(database: &Path) -> Option<Owner> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    match fs::symlink_metadata(database) {
        Ok(found) => Owner::of(&found).or_else(|| Owner::of(&fs::metadata(database).ok()?)),
        Err(_) => {
            let folder = database.parent().filter(|folder| !folder.as_os_str().is_empty());
            Owner::of(&fs::metadata(folder.unwrap_or(Path::new("."))).ok()?)
        }
    }
}
