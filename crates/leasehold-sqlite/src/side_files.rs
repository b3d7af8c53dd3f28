//! The files beside the database: which owners they may have, and which users may read and write them.
//!
//! SQLite trusts what it finds at these names. It rolls the database back by a `-journal`, reads rows from a `-wal`, and believes the index and
//! the locks in a `-shm`. A client believes the pipes in an `-inbox`. Each must therefore be of a user who may write the database, and be
//! closed to all others.
//!
//! A connection is used only if these files were looked at before it was opened, and are the same ones afterwards: what SQLite or another user
//! has made meanwhile is looked at before the next try. In a sticky directory, such as `/tmp`, no other user can remove or replace what was
//! found. In any other directory, a user who may write it can replace the database itself.
//!
//! A database with a POSIX access control list is refused, and so is a file beside it. SQLite gives the files that it makes the mode of the
//! database, where the list's mask stands in the place of the group's rights: the group could use the log and the shared memory of a
//! database that it may not open.

use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::Path;

use super::access_lists::list_of;
use super::files::{FileId, beside};
use super::location::folder_of;

/// The rights of the group and of others, except that to run a file.
const OF_OTHERS: u32 = 0o066;

const OF_GROUP: u32 = 0o060;
const WRITABLE_FOR_GROUP: u32 = 0o020;
const WRITABLE_FOR_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// The files of SQLite's that were found beside a database.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SideFiles {
    ids: [Option<FileId>; 3],
}

/// Why one of them can't be used. The text names it, its owner and the remedy.
#[derive(Debug)]
pub(super) enum Refused {
    /// Another user has put it there, or may use it who may not use the database.
    Foreign(String),
    /// Users of the database can't use it. So it is for a moment, while another client creates it.
    Closed(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign(what) | Self::Closed(what) => f.write_str(what),
        }
    }
}

impl SideFiles {
    /// Looks at all files beside the database.
    pub(super) fn look(path: &Path) -> Result<Self, Refused> {
        let unusable = |error: io::Error| {
            Refused::Foreign(match error.kind() {
                io::ErrorKind::NotFound => format!("it was removed while it was opened: {error}"),
                _ => error.to_string(),
            })
        };
        let database = Database::look(path).map_err(unusable)?;
        let look = |suffix| {
            let name = beside(path, suffix);
            let Ok(found) = fs::symlink_metadata(&name) else { return Ok(None) };
            database.judge(&name, &found, found.is_file())?;
            Ok(Some((found.dev(), found.ino())))
        };
        let ids = [look("-journal")?, look("-wal")?, look("-shm")?];
        let inbox = beside(path, "-inbox");
        if let Ok(found) = fs::symlink_metadata(&inbox) {
            database.judge_inbox(&inbox, &found)?;
        }
        Ok(Self { ids })
    }
}

/// A database, and who may write it.
pub(super) struct Database {
    found: Metadata,
    folder: Metadata,
}

impl Database {
    pub(super) fn look(path: &Path) -> io::Result<Self> {
        let database = Self { found: fs::symlink_metadata(path)?, folder: fs::metadata(folder_of(path))? };
        match list_of(path)? {
            None => Ok(database),
            Some(refused) => Err(io::Error::new(io::ErrorKind::PermissionDenied, refused)),
        }
    }

    /// The rights of its users, except that to run a file.
    pub(super) fn mode(&self) -> u32 {
        self.found.mode() & 0o666
    }

    /// Whether the owner of a file is known to be a user who may write the database. The group of a file says so only where none but its members can
    /// make files: in a directory with the setgid bit, each file has the group of the directory.
    fn is_writable_for_owner_of(&self, file: &Metadata) -> bool {
        let Self { found, folder } = self;
        let is_for_all = found.mode() & WRITABLE_FOR_ALL != 0;
        let is_for_group = found.mode() & WRITABLE_FOR_GROUP != 0 && folder.mode() & WRITABLE_FOR_ALL == 0;
        file.uid() == found.uid()
            || file.uid() == rustix::process::geteuid().as_raw()
            || is_for_all
            || is_for_group && file.gid() == found.gid()
    }

    /// The rights that a file of this group may give to its group and to others.
    fn rights_of(&self, group: u32) -> u32 {
        let mode = self.found.mode() & OF_OTHERS;
        if group == self.found.gid() { mode } else { mode & !OF_GROUP | (mode & !OF_GROUP) << 3 }
    }

    fn judge(&self, name: &Path, file: &Metadata, is_of_this_kind: bool) -> Result<(), Refused> {
        let (shown, owner) = (name.display(), file.uid());
        let not_ours = |why: &str| {
            Refused::Foreign(format!(
                "{shown} beside it, of the user with uid {owner}, is not SQLite's, because {why}: find out who has put it there, and remove it; in \
                 a directory that only users of the database may write, no other user can put it there again"
            ))
        };
        if !is_of_this_kind {
            return Err(not_ours("it is another kind of file"));
        }
        if !self.is_writable_for_owner_of(file) {
            return Err(not_ours("this user is not known to be one who may write the database"));
        }
        if file.is_file() && file.nlink() != 1 {
            return Err(not_ours("it has a second name (a hard link)"));
        }
        match list_of(name) {
            Ok(None) => {}
            Ok(Some(refused)) => return Err(Refused::Foreign(refused)),
            // It is gone, which is seen when it is looked at again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Refused::Foreign(format!("{shown} can't be looked at: {error}"))),
        }
        let (mode, group) = (self.mode(), self.found.gid());
        let rights = |what: &str| {
            let mode = if file.is_dir() { mode | may_enter(mode) } else { mode };
            format!(
                "{shown} beside it, of the user with uid {owner}, {what}: chgrp {group} {shown} && chmod {mode:o} {shown}"
            )
        };
        if file.mode() & OF_OTHERS & !self.rights_of(file.gid()) != 0 {
            return Err(Refused::Foreign(rights("lets in users who may not use the database")));
        }
        if mode & OF_OTHERS & !file.mode() != 0 {
            return Err(Refused::Closed(rights("does not let in all users who may use the database")));
        }
        Ok(())
    }

    /// The directory of the clients' pipes. While another client creates it, it is closed to all but its owner.
    pub(super) fn judge_inbox(&self, name: &Path, inbox: &Metadata) -> Result<(), Refused> {
        match self.judge(name, inbox, inbox.is_dir()) {
            Err(Refused::Closed(_)) => Ok(()),
            judged => judged,
        }
    }
}

/// The rights to enter a directory, for all who may read or write it.
pub(super) fn may_enter(mode: u32) -> u32 {
    ((mode & 0o444) >> 2) | ((mode & 0o222) >> 1)
}

/// In a sticky directory, makes an empty `-journal`, which SQLite does not take for one, and which keeps the name: a database in WAL mode has no
/// journal, so any other user could put one there between a look and the moment when SQLite rolls the database back by it.
pub(super) fn reserve_journal(path: &Path) -> io::Result<()> {
    let Database { found, folder } = Database::look(path)?;
    if folder.mode() & STICKY == 0 || folder.mode() & (WRITABLE_FOR_GROUP | WRITABLE_FOR_ALL) == 0 {
        return Ok(());
    }
    let journal = beside(path, "-journal");
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&journal) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|journal| share(&journal, &found)),
    }
}

/// Gives a new file the group and the rights of the database.
fn share(file: &File, database: &Metadata) -> io::Result<()> {
    let is_for_group = database.mode() & OF_GROUP != 0;
    if is_for_group && file.metadata()?.gid() != database.gid() {
        fchown(file, None, Some(database.gid()))?;
    }
    file.set_permissions(Permissions::from_mode(database.mode() & 0o666))
}
