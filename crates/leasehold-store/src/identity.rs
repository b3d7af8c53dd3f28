//! With whose rights root uses a file.
//!
//! Who may write a directory can exchange what is in it at any moment, also between a look and an open, and files beside a file are opened by
//! their names. So the directories on the way to the file decide, and not the file: if all of them are root's and no other user may write them,
//! root uses the file as root. If the way leads through directories of one other user, root uses the file with that user's rights, so that an
//! exchanged name leads nowhere where this user may not go. Anything else is refused. Other users than root use files as themselves.
//!
//! The way is looked at once, and files are opened by their names afterwards. That is safe because only root can change a way for which root's
//! rights are used: every other user who may mount something has a directory on it, or the way is refused.

mod mounter;

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;

/// The maximum number of links that are followed, as on Linux.
const MAX_LINKS: usize = 40;

/// The bits of a mode.
const STICKY: u32 = 0o1000;
const WRITABLE_FOR_ALL: u32 = 0o002;
const WRITABLE_FOR_OTHERS: u32 = 0o022;

/// Whose rights are used for a file.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `None`: those that this process has.
    other: Option<User>,
}

/// The owner of a directory, and the groups that the system's accounts say.
#[derive(Clone, Debug)]
struct User {
    uid: u32,
    #[cfg(target_os = "linux")]
    gid: u32,
    #[cfg(target_os = "linux")]
    groups: Vec<u32>,
}

impl Identity {
    /// Whose rights are used for a file of this name, which need not exist, and for files beside it. Blocks.
    ///
    /// # Errors
    ///
    /// This is root, and no single user's rights would be safe. The text says what to do.
    pub fn for_folder_of(file: &Path) -> io::Result<Self> {
        Self::decide(file, false)
    }

    /// As [`Self::for_folder_of`], but an existing file of another user is used with that user's rights: for a file whose content is not
    /// trusted.
    ///
    /// # Errors
    ///
    /// As [`Self::for_folder_of`].
    pub fn for_file(file: &Path) -> io::Result<Self> {
        Self::decide(file, true)
    }

    fn decide(file: &Path, does_owner_count: bool) -> io::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { other: None });
        }
        let mut walk = Walk { owner: None };
        let found = walk.walk(file)?;
        let owner = walk.owner.map(|(uid, _)| uid);
        let of_file = found.map(|found| found.st_uid).filter(|uid| does_owner_count && *uid != 0);
        Ok(Self { other: owner.or(of_file).map(User::find).transpose()? })
    }

    /// Whether they are the rights of another user than this process's.
    #[must_use]
    pub fn is_other(&self) -> bool {
        self.other.is_some()
    }

    /// For the message of an error: whose rights were used, if they are another user's.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let uid = self.other.as_ref()?.uid;
        Some(format!(
            "used with the rights of the user with uid {uid}, who has a directory on the way, or the file"
        ))
    }

    /// Runs this with these rights: if they are another user's, on a thread of its own, whose threads have them, too. Blocks.
    ///
    /// # Errors
    ///
    /// No thread could be started, or this process may not take the rights.
    pub fn run<T: Send>(&self, run: impl FnOnce() -> T + Send) -> io::Result<T> {
        let Some(user) = &self.other else { return Ok(run()) };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("leasehold-owner".to_owned());
            let thread = thread.spawn_scoped(scope, move || user.become_it().map(|()| run()))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl User {
    #[cfg(target_os = "linux")]
    fn find(uid: u32) -> io::Result<Self> {
        use std::ffi::CString;

        // A user of another container may have no account here.
        let account = nix::unistd::User::from_uid(uid.into())?;
        let Some(account) = account else { return Ok(Self { uid, gid: uid, groups: Vec::new() }) };
        let groups = nix::unistd::getgrouplist(&CString::new(account.name)?, account.gid)?;
        Ok(Self {
            uid,
            gid: account.gid.as_raw(),
            groups: groups.iter().map(|group| group.as_raw()).collect(),
        })
    }

    #[cfg(not(target_os = "linux"))]
    fn find(uid: u32) -> io::Result<Self> {
        Ok(Self { uid })
    }

    /// Only the effective rights, so that the user may not send signals to this thread.
    #[cfg(target_os = "linux")]
    fn become_it(&self) -> io::Result<()> {
        use rustix::process::{Gid, Uid};
        use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

        let groups: Vec<_> = self.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)
            .and_then(|()| set_thread_res_gid(None, Gid::from_raw(self.gid), None))
            .and_then(|()| set_thread_res_uid(None, Uid::from_raw(self.uid), None))
            .map_err(|error| self.refused(&format!("root may not take that user's rights here ({error})")))
    }

    #[cfg(not(target_os = "linux"))]
    fn become_it(&self) -> io::Result<()> {
        Err(self.refused("a thread can't take that user's rights on this system"))
    }

    fn refused(&self, why: &str) -> io::Error {
        let uid = self.uid;
        io::Error::other(format!(
            "it is in a directory of the user with uid {uid}, and {why}: run this as that user (su, or --user of a container), or name a \
             file in a directory of root's own"
        ))
    }
}

/// The way to a file, from the root directory.
struct Walk {
    /// The first user other than root who may exchange what is on the way, and where.
    owner: Option<(u32, PathBuf)>,
}

impl Walk {
    /// Returns what is at the end, if it is there.
    fn walk(&mut self, file: &Path) -> io::Result<Option<Stat>> {
        let start = if file.is_absolute() { PathBuf::new() } else { std::env::current_dir()? };
        let mut rest = components(&start.join(file));
        let mut folder = Folder::root()?;
        let mut links = 0;
        loop {
            self.enter(&folder)?;
            let Some(next) = rest.pop() else { return Ok(None) };
            let found = match statat(&folder.opened, &next, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => found,
                Err(Errno::NOENT) if rest.is_empty() => return folder.refuse_sticky().map(|()| None),
                // What is behind this can't be used, or is made with the rights that are known.
                Err(_) if self.owner.is_some() => return Ok(None),
                Err(Errno::NOENT) => return folder.refuse_missing(&next).map(|()| None),
                Err(error) => return Err(folder.unseen(&next, error.into())),
            };
            if folder.found.mode() & WRITABLE_FOR_OTHERS != 0 {
                // The directory is sticky: only its own owner can exchange this for something else, whatever it is now.
                self.see_owner(found.st_uid, &folder.shown.join(&next))?;
            }
            match FileType::from_raw_mode(found.st_mode) {
                FileType::Symlink => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(io::Error::other("it leads through too many symbolic links"));
                    }
                    let target = readlinkat(&folder.opened, &next, Vec::new())?.into_bytes();
                    let target = PathBuf::from(OsString::from_vec(target));
                    if target.is_absolute() {
                        folder = Folder::root()?;
                    }
                    rest.extend(components(&target));
                }
                FileType::Directory => match folder.open(&next) {
                    Err(_) if self.owner.is_some() => return Ok(None),
                    opened => folder = opened.map_err(|error| folder.unseen(&next, error))?,
                },
                _ if rest.is_empty() => return folder.refuse_sticky().map(|()| Some(found)),
                _ if self.owner.is_some() => return Ok(None),
                _ => {
                    let what =
                        format!("{} is no directory: name a file in one", folder.shown.join(&next).display());
                    return Err(io::Error::new(io::ErrorKind::NotADirectory, what));
                }
            }
        }
    }

    /// Looks at a directory on the way.
    fn enter(&mut self, folder: &Folder) -> io::Result<()> {
        let (uid, mode) = (folder.owner, folder.found.mode());
        self.see_owner(uid, &folder.shown)?;
        // The directory of another user is in the hands of a group by this user's own will, whose rights are used.
        let is_for_others = mode & if uid == 0 { WRITABLE_FOR_OTHERS } else { WRITABLE_FOR_ALL } != 0;
        if is_for_others && mode & STICKY == 0 { Err(folder.refusal()) } else { Ok(()) }
    }

    fn see_owner(&mut self, uid: u32, shown: &Path) -> io::Result<()> {
        match &self.owner {
            _ if uid == 0 => Ok(()),
            None => {
                self.owner = Some((uid, shown.to_path_buf()));
                Ok(())
            }
            Some((known, _)) if *known == uid => Ok(()),
            Some((known, place)) => Err(io::Error::other(format!(
                "{} is of the user with uid {known}, and {} of the one with uid {uid}, and either could lead root astray: run this as a \
                 user who is not root (su), or name a file in a directory that only root may write",
                place.display(),
                shown.display()
            ))),
        }
    }
}

/// The last one first.
fn components(path: &Path) -> Vec<PathBuf> {
    let names = path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(PathBuf::from(name)),
        Component::ParentDir => Some(PathBuf::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.collect()
}

/// Opens a directory in another one, to look at it and at what is in it. With the flag `NOFOLLOW`, a link is an error.
///
/// # Errors
///
/// It is missing, no directory, or closed to this user.
pub fn open_folder(at: impl AsFd, name: &Path, flags: OFlags) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    let access = OFlags::PATH;
    #[cfg(not(target_os = "linux"))]
    let access = OFlags::RDONLY;
    let flags = flags | access | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(File::from(openat(at, name, flags, Mode::empty())?))
}

/// Who decides what is in an opened file or directory: the user who has mounted a file system in user space (FUSE), which may say anything
/// about its owners, or else its owner.
///
/// # Errors
///
/// This system does not say who has mounted it.
pub fn owner_of(opened: &File, found: &Metadata) -> io::Result<u32> {
    Ok(mounter::mounter(opened)?.unwrap_or(found.uid()))
}

/// A directory on the way.
struct Folder {
    opened: File,
    found: Metadata,
    owner: u32,
    shown: PathBuf,
}

impl Folder {
    fn root() -> io::Result<Self> {
        Self::open_at(CWD, Path::new("/"), PathBuf::from("/"))
    }

    fn open(&self, name: &Path) -> io::Result<Self> {
        let is_parent = name == Path::new("..");
        let shown = if is_parent { self.shown.parent().map(Path::to_path_buf) } else { None };
        Self::open_at(&self.opened, name, shown.unwrap_or_else(|| self.shown.join(name)))
    }

    fn open_at(at: impl AsFd, name: &Path, shown: PathBuf) -> io::Result<Self> {
        let opened = open_folder(at, name, OFlags::NOFOLLOW)?;
        let found = opened.metadata()?;
        let owner = owner_of(&opened, &found)?;
        Ok(Self { opened, found, owner, shown })
    }

    /// In a sticky directory no user exchanges the entries of others, but each may make those beside the file that are missing.
    fn refuse_sticky(&self) -> io::Result<()> {
        let is_for_others = self.owner == 0 && self.found.mode() & WRITABLE_FOR_OTHERS != 0;
        if is_for_others { Err(self.refusal()) } else { Ok(()) }
    }

    fn refusal(&self) -> io::Error {
        let shown = self.shown.display();
        let is_for_all = self.found.mode() & WRITABLE_FOR_ALL != 0;
        let (who, what) = if is_for_all { ("all users", "o") } else { ("a group", "g") };
        io::Error::other(format!(
            "{who} may write the directory {shown}, and could put other files in the place of root's: run this as a user who is not \
             root (su), name a file in a directory that only root may write, or run chmod {what}-w {shown}"
        ))
    }

    /// Local file systems close nothing to root, unless it lacks its usual capabilities. A user may mount one in user space (FUSE) on an own
    /// directory, which is closed to root: whose the directory is can't be seen, and it is back in the next moment.
    fn unseen(&self, name: &Path, error: io::Error) -> io::Error {
        if error.kind() != io::ErrorKind::PermissionDenied {
            return error;
        }
        let (closed, shown) = (self.shown.display(), self.shown.join(name));
        let what = format!(
            "permission denied: the directory {closed} does not let you in (x is missing), or another user's file system (FUSE) is mounted on \
             {}, so root can't see whose that is: run this as its user (su), or name another file",
            shown.display()
        );
        io::Error::new(error.kind(), what)
    }

    /// What is missing here could be made by another user in the next moment.
    fn refuse_missing(&self, name: &Path) -> io::Result<()> {
        if self.found.mode() & WRITABLE_FOR_OTHERS == 0 {
            return Ok(());
        }
        let shown = self.shown.join(name);
        Err(io::Error::other(format!(
            "{} does not exist, and other users may make it: create it first",
            shown.display()
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use rustix::process::geteuid;

    use super::*;

    const ALICE: u32 = 12_345;
    const BOB: u32 = 12_346;

    fn folder(path: &Path, uid: u32, mode: u32) -> PathBuf {
        fs::create_dir(path).unwrap();
        chown(path, Some(uid), Some(uid)).unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        path.to_path_buf()
    }

    fn decide(file: &Path) -> Result<Option<u32>, String> {
        let identity = Identity::for_folder_of(file).map_err(|error| error.to_string())?;
        Ok(identity.other.map(|user| user.uid))
    }

    #[test]
    fn owner_of_the_first_directory_that_is_not_root_s_decides() {
        if !geteuid().is_root() {
            assert_eq!(decide(Path::new("/tmp/file")), Ok(None));
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let own = folder(&place.path().join("own"), 0, 0o755);
        assert_eq!(decide(&own.join("file")), Ok(None));
        assert_eq!(decide(&own.join("no/such/file")), Ok(None));
        let of_alice = folder(&own.join("alice"), ALICE, 0o755);
        // A file and a directory of root in it, and what is not there yet.
        fs::write(of_alice.join("of_root"), "").unwrap();
        folder(&of_alice.join("below"), 0, 0o755);
        symlink(&own, of_alice.join("link")).unwrap();
        for file in ["of_root", "missing", "below/file", "link/file", "link/../own/file", "no/such/file"] {
            assert_eq!(decide(&of_alice.join(file)), Ok(Some(ALICE)), "{file}");
        }
        // The file alone decides nothing, unless it is asked for.
        fs::write(own.join("of_bob"), "").unwrap();
        chown(own.join("of_bob"), Some(BOB), None).unwrap();
        assert_eq!(decide(&own.join("of_bob")), Ok(None));
        assert_eq!(Identity::for_file(&own.join("of_bob")).unwrap().other.unwrap().uid, BOB);
        assert_eq!(Identity::for_file(&of_alice.join("of_root")).unwrap().other.unwrap().uid, ALICE);
    }

    /// Whatever is there when it is looked at, it may be a directory with links in the next moment.
    #[test]
    fn owner_of_anything_in_a_sticky_directory_decides() {
        if !geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let shared = folder(&place.path().join("shared"), 0, 0o1777);
        let file = shared.join("file");
        fs::write(&file, "").unwrap();
        let said = decide(&file.join("below/it")).unwrap_err();
        assert!(said.contains("is no directory"), "root's own file: {said}");
        chown(&file, Some(ALICE), None).unwrap();
        assert_eq!(decide(&file.join("below/it")), Ok(Some(ALICE)));
        let own = folder(&place.path().join("own"), 0, 0o755);
        fs::write(own.join("file"), "").unwrap();
        assert!(decide(&own.join("file/it")).unwrap_err().contains("is no directory"));
    }

    #[test]
    fn way_that_several_users_may_change_is_refused() {
        if !geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let refused = |file: PathBuf, word: &str| {
            let said = decide(&file).unwrap_err();
            assert!(said.contains(word) && said.contains("su"), "{}: {said}", file.display());
        };
        for (mode, word) in
            [(0o775, "chmod g-w"), (0o2770, "chmod g-w"), (0o777, "chmod o-w"), (0o1777, "chmod o-w")]
        {
            let shared = folder(&place.path().join(format!("{mode:o}")), 0, mode);
            refused(shared.join("file"), word);
            let below = folder(&shared.join("of_root"), 0, 0o700);
            if mode == 0o1777 {
                assert_eq!(decide(&below.join("file")), Ok(None), "no other user may exchange it");
                let of_alice = folder(&shared.join("alice"), ALICE, 0o700);
                assert_eq!(decide(&of_alice.join("file")), Ok(Some(ALICE)));
                symlink(&below, shared.join("link")).unwrap();
                std::os::unix::fs::lchown(shared.join("link"), Some(ALICE), None).unwrap();
                assert_eq!(decide(&shared.join("link/file")), Ok(Some(ALICE)));
                assert!(decide(&shared.join("missing/file")).unwrap_err().contains("create it first"));
            } else {
                refused(below.join("file"), word);
            }
        }
        let of_alice = folder(&place.path().join("alice"), ALICE, 0o775);
        assert_eq!(decide(&of_alice.join("file")), Ok(Some(ALICE)), "her group is her own affair");
        let of_bob = folder(&of_alice.join("bob"), BOB, 0o700);
        refused(of_bob.join("file"), "uid 12345");
        refused(folder(&of_alice.join("all"), ALICE, 0o777).join("file"), "chmod o-w");
    }

    /// Without its capabilities, root is kept out of a closed directory as it is kept out of another user's FUSE.
    #[test]
    #[cfg(target_os = "linux")]
    fn directory_whose_owner_root_cannot_see_is_refused() {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

        if !geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let closed = folder(&place.path().join("closed"), 0, 0);
        let below = folder(&closed.join("below"), ALICE, 0o755);
        let of_alice = folder(&place.path().join("alice"), ALICE, 0o700);
        // The capabilities are those of a thread.
        thread::scope(|scope| {
            let without_capabilities = scope.spawn(|| {
                let mut sets = capabilities(None).unwrap();
                sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
                set_capabilities(None, sets).unwrap();
                (decide(&below.join("file")), decide(&closed.join("file")), decide(&of_alice.join("no/file")))
            });
            let (hidden, in_closed, known) = without_capabilities.join().unwrap();
            for said in [hidden.unwrap_err(), in_closed.unwrap_err()] {
                assert!(
                    said.contains("root can't see whose") && said.contains("does not let you in"),
                    "{said}"
                );
            }
            assert_eq!(known, Ok(Some(ALICE)), "the rights of a known owner can't be too many");
        });
        assert_eq!(decide(&below.join("file")), Ok(Some(ALICE)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn other_user_s_rights_are_those_of_that_user() {
        if !geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
        let of_alice = folder(&place.path().join("alice"), ALICE, 0o700);
        let of_root = folder(&place.path().join("root"), 0, 0o750);
        // A group that she has no account in.
        chown(&of_alice, None, Some(0)).unwrap();
        let identity = Identity::for_folder_of(&of_alice.join("file")).unwrap();
        let (made, elsewhere, again) = identity
            .run(|| {
                let again = thread::spawn(geteuid).join().unwrap();
                (fs::write(of_alice.join("file"), ""), fs::read_dir(&of_root).is_err(), again)
            })
            .unwrap();
        made.unwrap();
        assert!(elsewhere && again.as_raw() == ALICE);
        let made = fs::metadata(of_alice.join("file")).unwrap();
        assert_eq!((made.uid(), made.gid()), (ALICE, ALICE));
        assert!(geteuid().is_root());
    }
}
