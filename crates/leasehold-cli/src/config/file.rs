//! Where the configuration file is, and who may change it. Its options are not read here.
//!
//! The file may name commands that run as this user. So the usual one is judged as it was opened, folder by folder: a name may lead
//! elsewhere in the next moment, also where only a file system is mounted and unmounted.

use std::fs::{self, Metadata};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy as _;
use leasehold_store::identity::{open_folder, owner_of};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};

use crate::exit::Stop;

/// The variable that names another file.
const VARIABLE: &str = "LEASEHOLD_CONFIG";

/// The size of the largest file of options.
const MAX_SIZE: u64 = 1 << 20;

pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// Whether users may read it that are neither its owner nor in its group.
    pub(super) is_for_others: bool,
    /// Who may change it besides this user and root, if it was named.
    pub(super) changed_by: Option<String>,
}

impl File {
    /// The file, if there is one. A file that was named must be there. The usual one may also be in a home directory that is none, or
    /// that this user may not enter, as that of another user.
    pub(super) fn read() -> Result<Option<Self>, Stop> {
        let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        if let Some(path) = named {
            let read = fs::File::open(&path)
                .and_then(|file| Ok((who_changes(&path, &file)?, read_limited(file)?)))
                .map_err(|error| unreadable(&error));
            return Self::new(path, read).map(Some);
        }
        let Ok(home) = etcetera::base_strategy::Xdg::new() else { return Ok(None) };
        let path = home.config_dir().join("leasehold/config.toml");
        if path.is_relative() {
            // It would lead to a file of the folder in which the command happens to run.
            return Ok(None);
        }
        let read = read_usual(&path, home.home_dir()).transpose();
        read.map(|read| Self::new(path, read.map(|read| (None, read)))).transpose()
    }

    fn new(path: PathBuf, read: Result<(Option<String>, Text), String>) -> Result<Self, Stop> {
        const READABLE_BY_OTHERS: u32 = 0o004;
        let refused = |what: String| Stop::usage(format!("{}: {what}", path.display()));
        let (changed_by, (text, found)) = read.map_err(refused)?;
        if text.len() as u64 > MAX_SIZE {
            return Err(refused(format!("it has more than {MAX_SIZE} bytes, so it is no file of options")));
        }
        let is_for_others = found.mode() & READABLE_BY_OTHERS != 0;
        Ok(Self { path, text, is_for_others, changed_by })
    }
}

/// What a file says, and what the system says about it.
type Text = (String, Metadata);

/// The text, or a little more of it than [`MAX_SIZE`]: the path may lead to a device that never ends.
fn read_limited(file: fs::File) -> io::Result<Text> {
    let (found, mut text) = (file.metadata()?, String::new());
    file.take(MAX_SIZE + 1).read_to_string(&mut text)?;
    Ok((text, found))
}

fn unreadable(error: &io::Error) -> String {
    format!("it can't be read: {error}")
}

/// The text of the usual file, if there is one. It is refused if others than this user and root may change it: the file, a link on the way, or
/// a folder in which the next name could be replaced, from the home directory on.
fn read_usual(path: &Path, home: &Path) -> Result<Option<Text>, String> {
    // With `XDG_CONFIG_HOME`, the folder may be elsewhere.
    let config = path.ancestors().nth(2).unwrap_or(path);
    let start = if home.is_absolute() && config.starts_with(home) { home } else { config };
    let mut way = Way { folder: None, at: PathBuf::new(), others: None };
    let mut read = || {
        way.enter(start)?;
        let below = path.strip_prefix(start).unwrap_or(path);
        for folder in below.parent().into_iter().flatten() {
            way.enter(Path::new(folder))?;
        }
        let file = way.open_file(Path::new(below.file_name().unwrap_or_default()))?;
        read_limited(file).map_err(|error| Closed::Refused(unreadable(&error)))
    };
    match read() {
        Ok(read) => Ok(Some(read)),
        Err(Closed::Missing) => Ok(None),
        Err(Closed::Refused(what)) => Err(what),
    }
}

/// Why the usual file is not read.
enum Closed {
    /// There is none for this user.
    Missing,
    Refused(String),
}

/// The way to the usual file.
struct Way {
    /// The last folder that was opened; `None` at the beginning.
    folder: Option<fs::File>,
    /// Its name.
    at: PathBuf,
    /// Who else may change what is on the way. That is no matter if there is no file in the end.
    others: Option<String>,
}

impl Way {
    /// Where the next name is looked up.
    fn place(&self) -> BorrowedFd<'_> {
        self.folder.as_ref().map_or(CWD, |folder| folder.as_fd())
    }

    fn enter(&mut self, name: &Path) -> Result<(), Closed> {
        let shown = self.at.join(name);
        let found = self.judge_link(name).and_then(|()| {
            let folder = open_folder(self.place(), name, OFlags::empty())?;
            let others = who_changes(&shown, &folder)?;
            Ok((folder, others))
        });
        let (folder, others) = found.map_err(|error| self.closed(&shown, &error))?;
        self.note(others);
        (self.folder, self.at) = (Some(folder), shown);
        Ok(())
    }

    fn open_file(&mut self, name: &Path) -> Result<fs::File, Closed> {
        let shown = self.at.join(name);
        self.judge_link(name).map_err(|error| self.closed(&shown, &error))?;
        // A file that others have chosen is not even opened: that may have effects of its own.
        if let Some(others) = self.others.take() {
            return Err(refused(&others));
        }
        // Neither a pipe without a writer nor a terminal is waited for, nor does the latter become that of this process.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let unread = |error: io::Error| Closed::Refused(unreadable(&error));
        let file = openat(self.place(), name, flags, Mode::empty()).map_err(|error| unread(error.into()))?;
        let file = fs::File::from(file);
        match who_changes(&shown, &file).map_err(unread)? {
            Some(others) => Err(refused(&others)),
            None if !file.metadata().map_err(unread)?.is_file() => {
                Err(Closed::Refused("this is no file".to_owned()))
            }
            None => Ok(file),
        }
    }

    /// Looks at the owner of a link, who may exchange it in a folder that is sticky, or has made it before the folder had its mode.
    fn judge_link(&mut self, name: &Path) -> io::Result<()> {
        let found = statat(self.place(), name, AtFlags::SYMLINK_NOFOLLOW)?;
        self.note(other_owner(&self.at.join(name), found.st_uid));
        Ok(())
    }

    fn note(&mut self, others: Option<String>) {
        self.others = self.others.take().or(others);
    }

    /// What an error on the way means.
    fn closed(&self, shown: &Path, error: &io::Error) -> Closed {
        // No local file system keeps root out, but one that another user has mounted for a moment (FUSE) does: that is not taken for a home
        // without a file.
        let is_strange = rustix::process::geteuid().is_root() && self.others.is_none();
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Closed::Missing,
            io::ErrorKind::PermissionDenied if !is_strange => Closed::Missing,
            _ => {
                let what = format!("{} can't be looked at ({error})", shown.display());
                refused(&what)
            }
        }
    }
}

fn refused(what: &str) -> Closed {
    let advice =
        format!("and it may name commands that run as you: chown or chmod it, or name it in {VARIABLE}");
    Closed::Refused(format!("{what}, {advice}"))
}

/// Who may change it besides this user and root. The user's own group is trusted: where files are made writable for it by default, it
/// is this user's alone.
fn who_changes(path: &Path, opened: &fs::File) -> io::Result<Option<String>> {
    const WRITABLE_BY_OTHERS: u32 = 0o002;
    const WRITABLE_BY_GROUP: u32 = 0o020;
    let found = opened.metadata()?;
    if let Some(owner) = other_owner(path, owner_of(opened, &found)?) {
        return Ok(Some(owner));
    }
    let shown = path.display();
    let is_writable = |rights| (found.is_file() || found.is_dir()) && found.mode() & rights != 0;
    if is_writable(WRITABLE_BY_OTHERS) {
        return Ok(Some(format!("every user of this machine may change {shown}")));
    }
    // A group of one user usually has that user's number.
    let is_own_group = [rustix::process::getegid().as_raw(), found.uid()].contains(&found.gid());
    let is_of_group = !is_own_group && is_writable(WRITABLE_BY_GROUP);
    Ok(is_of_group.then(|| format!("the group {} may change {shown}", found.gid())))
}

fn other_owner(path: &Path, uid: u32) -> Option<String> {
    let is_trusted = uid == 0 || uid == rustix::process::geteuid().as_raw();
    (!is_trusted).then(|| format!("{} belongs to another user (uid {uid})", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, chown};
    use std::thread;

    use rustix::fs::{RenameFlags, renameat_with};

    use super::*;

    /// As where another user mounts a file system on the home directory for a moment.
    #[test]
    #[cfg(target_os = "linux")]
    fn file_that_is_exchanged_while_it_is_judged_is_not_read() {
        if !rustix::process::geteuid().is_root() {
            // Only root can give files away.
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let (home, other) = (place.path().join("home"), place.path().join("other"));
        for (home, text, owner) in [(&home, "own", 0), (&other, "another's", 12_345)] {
            let folder = home.join(".config/leasehold");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("config.toml"), text).unwrap();
            let all = [home.clone(), home.join(".config"), folder.clone(), folder.join("config.toml")];
            all.iter().for_each(|path| chown(path, Some(owner), None).unwrap());
        }
        let path = home.join(".config/leasehold/config.toml");
        let (config, folder) = (Path::new(".config"), Path::new("leasehold"));
        // Whenever it is exchanged: what is read was judged.
        for steps in 0..4 {
            let mut way = Way { folder: None, at: PathBuf::new(), others: None };
            let exchange = || renameat_with(CWD, &home, CWD, &other, RenameFlags::EXCHANGE).unwrap();
            for (step, name) in [home.as_path(), config, folder].into_iter().enumerate() {
                if step == steps {
                    exchange();
                }
                way.enter(name).ok().unwrap();
            }
            if steps == 3 {
                exchange();
            }
            let read = way.open_file(Path::new("config.toml")).map(|file| read_limited(file).unwrap().0);
            match read {
                Ok(text) => assert!(text == "own" && steps > 0, "{steps}: {text}"),
                Err(Closed::Refused(what)) => {
                    assert!(what.contains("uid 12345") && steps == 0, "{steps}: {what}");
                }
                Err(Closed::Missing) => panic!("{steps}: there is a file"),
            }
            exchange();
        }
        assert_eq!(read_usual(&path, &home).unwrap().unwrap().0, "own");
    }

    /// Without its capabilities, root is kept out of a closed directory as it is kept out of another user's FUSE.
    #[test]
    #[cfg(target_os = "linux")]
    fn home_that_root_cannot_look_at_is_refused() {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

        if !rustix::process::geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let (closed, of_alice) = (place.path().join("closed"), place.path().join("alice"));
        for (folder, owner) in [(&closed, 0), (&of_alice, 12_345)] {
            fs::create_dir(folder).unwrap();
            fs::set_permissions(folder, Permissions::from_mode(0o000)).unwrap();
            chown(folder, Some(owner), None).unwrap();
        }
        let read = |home: &Path| {
            let found = read_usual(&home.join(".config/leasehold/config.toml"), home);
            found.map(|found| found.is_some())
        };
        // The capabilities are those of a thread.
        thread::scope(|scope| {
            let without_capabilities = scope.spawn(|| {
                let mut sets = capabilities(None).unwrap();
                sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
                set_capabilities(None, sets).unwrap();
                (read(&closed), read(&of_alice))
            });
            let (hidden, known) = without_capabilities.join().unwrap();
            let said = hidden.unwrap_err();
            assert!(said.contains("can't be looked at") && said.contains(VARIABLE), "{said}");
            assert_eq!(known, Ok(false), "a home of another user that is closed has no file for this one");
        });
        assert_eq!(read(&closed), Ok(false));
    }
}
