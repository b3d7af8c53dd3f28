//! Pushes to other processes: one named pipe per client, beside the database.
//!
//! The reader keeps its pipe open while it lives, and writers only while they write. Opening a pipe for writing therefore fails
//! as soon as its client is gone. A push is one record, small enough for an atomic write, with the whole grant: the waiter
//! need not re-check before it works. Records may be lost: one that finds the pipe full is dropped, and an unknown one is
//! ignored.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold_core::{
    Acquisition, ClientId, Grant, GrantProof, HeadHint, Push, PushKind, StoreTime, TokenRange,
};
use rustix::fs::{
    AtFlags, CWD, Dir, DirEntry, FileType, Mode, OFlags, fchmod, fstat, mknodat, openat, renameat, statat,
    unlinkat,
};

use super::files::beside;
use super::side_files::{Database, may_enter};

/// Max number of pipes without a reader that one sweep removes.
const SWEEP: usize = 64;

/// A pipe that has not got its name after this time is abandoned.
const UNNAMED: Duration = Duration::from_secs(60);

/// The folder with the pipes of one database.
#[derive(Clone, Debug)]
pub(super) struct Mailboxes {
    folder: PathBuf,
    database: PathBuf,
}

impl Mailboxes {
    fn of(database: &Path) -> Self {
        Self { folder: beside(database, "-inbox"), database: database.to_path_buf() }
    }

    /// Whether a client of this database is running.
    pub(super) fn are_read(database: &Path) -> bool {
        let is_read = |folder: &OwnedFd, entry: rustix::io::Result<DirEntry>| {
            entry.is_ok_and(|entry| {
                let name = entry.file_name();
                is_of_client(name.to_bytes()) && open_pipe(folder, name, OFlags::WRONLY).is_ok()
            })
        };
        let Ok(folder) = Self::of(database).enter() else { return false };
        Dir::read_from(&folder).is_ok_and(|mut entries| entries.any(|entry| is_read(&folder, entry)))
    }

    /// The folder beside the database. A user who may write the database may write to its clients; others may not.
    pub(super) fn beside(database: &Path) -> io::Result<Self> {
        let mailboxes = Self::of(database);
        let mode = Database::look(database)?.mode();
        // Closed to others until it has the group and the rights of the database.
        match fs::DirBuilder::new().mode(0o700).create(&mailboxes.folder) {
            Ok(()) => {
                let folder = mailboxes.enter()?;
                // Another user who may write beside the database could have put another folder in its place.
                if is_new(&folder)? {
                    share(&folder, database);
                    fchmod(&folder, Mode::from_raw_mode(mode | may_enter(mode)))?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => drop(mailboxes.enter()?),
            Err(error) => return Err(error),
        }
        Ok(mailboxes)
    }

    /// The folder, for one step: it may have been made anew. Users who may write beside the database could put a link in its place, which
    /// is not followed, nor is one in it, or a folder of their own.
    fn enter(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = File::from(openat(CWD, &self.folder, flags, Mode::empty())?);
        match Database::look(&self.database) {
            Ok(database) => database
                .judge_inbox(&self.folder, &folder.metadata()?)
                .map_err(|refused| io::Error::new(io::ErrorKind::PermissionDenied, refused.to_string()))?,
            // Its clients have lost their leases, and may remove their pipes.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(folder.into())
    }

    /// Creates this client's pipe. It gets its name once it is open, so a named pipe has a reader unless the reader is dead.
    pub(super) fn open(&self, client: ClientId, database: &Path) -> io::Result<Mailbox> {
        // Users who may write the database may write to the pipe, and open it for reading, which writing needs
        // (`PipeWriter::write`). It reveals nothing that is not in the database.
        let writers = Database::look(database)?.mode() & 0o022;
        let mode = 0o600 | writers | (writers << 1);
        let (folder, name, unnamed) = (self.enter()?, client.to_string(), format!(".{client}"));
        mknodat(&folder, &unnamed, FileType::Fifo, Mode::from_raw_mode(mode), 0)?;
        let opened = (|| {
            // Open for reading and writing, so that it has no end of file when a writer closes it.
            let pipe = open_pipe(&folder, &unnamed, OFlags::RDWR)?;
            share(&pipe, database);
            fchmod(&pipe, Mode::from_raw_mode(mode))?;
            renameat(&folder, &unnamed, &folder, &name)?;
            Ok(Mailbox { pipe, name: MailboxName { mailboxes: self.clone(), name } })
        })();
        if opened.is_err() {
            let _ = unlinkat(&folder, &unnamed, AtFlags::empty());
        }
        opened
    }

    /// Opens the pipe of a client.
    pub(super) fn reach(&self, client: ClientId) -> Reached {
        let name = client.to_string();
        let reached =
            self.enter().and_then(|folder| Ok((open_pipe(&folder, &name, OFlags::WRONLY)?, folder)));
        match reached {
            Ok((pipe, folder)) => Reached::Open(PipeWriter { pipe, folder, name }),
            Err(error) if is_gone(&error) => Reached::Gone,
            Err(error) => Reached::Closed(error),
        }
    }

    /// Removes pipes whose clients are dead.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let mut removed = 0;
        let folder = self.enter()?;
        for entry in Dir::read_from(&folder)? {
            if removed == SWEEP {
                break;
            }
            let name = entry?.file_name().to_owned();
            // What is no pipe with the name of a client is not leasehold's.
            let Ok(found) = statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let is_pipe = FileType::from_raw_mode(found.st_mode) == FileType::Fifo;
            if !is_pipe || !is_of_client(name.to_bytes()) {
                continue;
            }
            let is_dead = if name.to_bytes().starts_with(b".") {
                let made = u64::try_from(found.st_mtime).unwrap_or(0);
                let age = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(made));
                age.is_ok_and(|age| age > UNNAMED)
            } else {
                open_pipe(&folder, &name, OFlags::WRONLY).is_err_and(|error| is_gone(&error))
            };
            if is_dead {
                removed += 1;
                if let Err(error) = unlinkat(&folder, &name, AtFlags::empty()) {
                    tracing::debug!(%error, folder = %self.folder.display(), ?name, "a dead client's pipe stays");
                }
            }
        }
        Ok(())
    }
}

/// Whether the folder is one that this process has just made: its own, and empty.
fn is_new(folder: &OwnedFd) -> io::Result<bool> {
    let is_own = fstat(folder)?.st_uid == rustix::process::geteuid().as_raw();
    let is_entry = |entry: rustix::io::Result<DirEntry>| {
        entry.map_or(true, |entry| ![b".".as_slice(), b".."].contains(&entry.file_name().to_bytes()))
    };
    Ok(is_own && !Dir::read_from(folder)?.any(is_entry))
}

/// The id of a client, or a dot and that.
fn is_of_client(name: &[u8]) -> bool {
    let id = name.strip_prefix(b".").unwrap_or(name);
    id.len() == 32 && id.iter().all(u8::is_ascii_hexdigit)
}

/// Opens a pipe without waiting. An error if it is something else, such as a link to a file that must not be written to.
fn open_pipe(folder: &OwnedFd, name: impl rustix::path::Arg, access: OFlags) -> io::Result<File> {
    let flags = access | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let pipe = File::from(openat(folder, name, flags, Mode::empty())?);
    if pipe.metadata()?.file_type().is_fifo() {
        Ok(pipe)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "in the place of a client's pipe is another file"))
    }
}

/// Whether the pipe has no reader or does not exist.
fn is_gone(error: &io::Error) -> bool {
    let no_reader = error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error());
    no_reader || error.kind() == io::ErrorKind::NotFound
}

/// Gives the pipe the group of the database, and as root its owner too: users of the database must be able to open the pipe to
/// see whether its client is there.
fn share(file: &impl AsFd, database: &Path) {
    let Ok(found) = fs::metadata(database) else { return };
    let give = |owner| std::os::unix::fs::fchown(file, owner, Some(found.gid()));
    let given = if rustix::process::geteuid().is_root() { give(Some(found.uid())) } else { give(None) };
    // In a namespace without that owner, the group may still be there.
    if let Err(error) = given.or_else(|_| give(None)) {
        tracing::debug!(%error, "a pipe could not be given to the group of the database");
    }
}

/// Whether a client is reachable.
pub(super) enum Reached {
    Open(PipeWriter),
    /// It may be alive, but this process cannot write to it.
    Closed(io::Error),
    Gone,
}

/// A reachable client.
pub(super) struct PipeWriter {
    pipe: File,
    folder: OwnedFd,
    name: String,
}

impl PipeWriter {
    /// Writes a push, or drops it if the pipe is full.
    pub(super) fn write_push(&self, push: &Push) {
        if let Err(error) = self.write(&encode(push)) {
            tracing::debug!(%error, to = %push.inbox, "a push was dropped");
        }
    }

    /// The client may have died since the pipe was opened. A write to a pipe without a reader raises SIGPIPE, which ends most
    /// programs. Therefore the writer opens the pipe for reading too, but only while it writes: to others the client would
    /// otherwise seem to be alive.
    fn write(&self, record: &[u8; RECORD]) -> io::Result<()> {
        let reader = open_pipe(&self.folder, &self.name, OFlags::RDONLY)?;
        if !is_same(&reader, &self.pipe)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the client has another pipe now"));
        }
        (&self.pipe).write(record).map(drop)
    }
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// The name of a client's pipe.
#[derive(Clone)]
pub(super) struct MailboxName {
    mailboxes: Mailboxes,
    name: String,
}

impl MailboxName {
    /// Removes the name, so that no writer finds it.
    pub(super) fn remove(&self) {
        if let Ok(folder) = self.mailboxes.enter() {
            let _ = unlinkat(&folder, &self.name, AtFlags::empty());
        }
    }

    fn path(&self) -> PathBuf {
        self.mailboxes.folder.join(&self.name)
    }
}

/// This client's own pipe. Its name is removed when this is dropped.
pub(super) struct Mailbox {
    pub(super) pipe: File,
    pub(super) name: MailboxName,
}

impl Mailbox {
    /// The pushes that have arrived.
    pub(super) fn read(&self, client: ClientId) -> Vec<Push> {
        let mut pushes = Vec::new();
        let mut record = [0; RECORD];
        while let Ok(RECORD) = (&self.pipe).read(&mut record) {
            match decode(&record, client) {
                Some(push) => pushes.push(push),
                None => tracing::warn!(path = %self.name.path().display(), "an unknown record arrived"),
            }
        }
        pushes
    }
}

impl Mailbox {
    /// Whether other clients find it by its name: a cleaner of old files may have removed it.
    pub(super) fn is_in_place(&self) -> bool {
        let named = fs::symlink_metadata(self.name.path());
        named.is_ok_and(|named| self.pipe.metadata().is_ok_and(|own| own.ino() == named.ino()))
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        if self.is_in_place() {
            self.name.remove();
        }
    }
}

/// Eight numbers of eight bytes.
const RECORD: usize = 64;

/// "lease", the layout 2, and what happened.
const MAGIC: u64 = 0x6C65_6173_6502_0000;

fn encode(push: &Push) -> [u8; RECORD] {
    let (kind, rest) = match push.kind {
        PushKind::Granted(grant, proof) => {
            let valid_for = u64::try_from(grant.valid_for.as_micros()).unwrap_or(u64::MAX);
            let proof = u64::from_be_bytes(proof.bytes());
            (1, [grant.tokens.first.get(), grant.tokens.last.get(), valid_for, proof])
        }
        PushKind::Next(head) => (2, [head.repoll_at.as_micros(), 0, 0, 0]),
        PushKind::Revoked => (3, [0; 4]),
        PushKind::Contended => (4, [0; 4]),
    };
    let numbers =
        [MAGIC | kind, push.acquisition.sequence, push.at.as_micros(), rest[0], rest[1], rest[2], rest[3], 0];
    let mut record = [0; RECORD];
    for (place, number) in record.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_be_bytes());
    }
    record
}

fn decode(record: &[u8; RECORD], client: ClientId) -> Option<Push> {
    let mut numbers = [0; 8];
    for (number, place) in numbers.iter_mut().zip(record.chunks_exact(8)) {
        *number = u64::from_be_bytes(place.try_into().ok()?);
    }
    let [head, sequence, at, first, last, valid_for, proof, _] = numbers;
    let kind = match head ^ MAGIC {
        1 => {
            let tokens = TokenRange::new(first, last)?;
            let grant = Grant { tokens, valid_for: Duration::from_micros(valid_for), is_plain: false };
            PushKind::Granted(grant, GrantProof::new(proof.to_be_bytes()))
        }
        2 => PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(first) }),
        3 => PushKind::Revoked,
        4 => PushKind::Contended,
        _ => return None,
    };
    let acquisition = Acquisition { client, sequence };
    Some(Push::new(acquisition, StoreTime::from_micros(at), kind))
}

/// For `fuzz/`: any record is refused, or is a push that is written and read unchanged.
///
/// # Panics
///
/// If a record that was read is written as another one.
#[cfg(feature = "_fuzzing")]
pub fn fuzz(record: &[u8; RECORD], client: ClientId) {
    if let Some(push) = decode(record, client) {
        assert_eq!(decode(&encode(&push), client), Some(push));
    }
}

#[cfg(test)]
mod tests {
    use leasehold_testkit::wait_until;

    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn database() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks.db");
        fs::write(&path, "").unwrap();
        (folder, path)
    }

    fn reached(sender: &Mailboxes, client: ClientId) -> Option<PipeWriter> {
        match sender.reach(client) {
            Reached::Open(writer) => Some(writer),
            Reached::Gone => None,
            Reached::Closed(error) => panic!("{error}"),
        }
    }

    #[test]
    fn written_push_is_read_unchanged() {
        let (_folder, path) = database();
        let (client, sender) = (ClientId::new(7), Mailboxes::beside(&path).unwrap());
        let mailbox = sender.open(client, &path).unwrap();
        let tokens = TokenRange::next(4, 3, StoreTime::from_micros(9));
        let kinds = [
            PushKind::Granted(
                Grant { tokens, valid_for: Duration::from_millis(3_000), is_plain: false },
                GrantProof::new(*b"a proof."),
            ),
            PushKind::Next(HeadHint { repoll_at: StoreTime::NEVER }),
            PushKind::Revoked,
            PushKind::Contended,
        ];
        let pushes = kinds.map(|kind| {
            let acquisition = Acquisition { client, sequence: 5 };
            Push::new(acquisition, StoreTime::from_micros(1), kind)
        });
        for push in &pushes {
            reached(&sender, client).unwrap().write_push(push);
        }
        assert_eq!(mailbox.read(client), pushes);
        assert_eq!(mailbox.read(client), []);
    }

    #[test]
    fn garbage_is_ignored_and_a_full_pipe_drops_pushes() {
        let (_folder, path) = database();
        let (client, sender) = (ClientId::new(7), Mailboxes::beside(&path).unwrap());
        let mailbox = sender.open(client, &path).unwrap();
        (&mailbox.pipe).write_all(&[7; RECORD]).unwrap();
        let acquisition = Acquisition { client, sequence: 5 };
        let push = Push::new(acquisition, StoreTime::ZERO, PushKind::Revoked);
        for _ in 0..5_000 {
            reached(&sender, client).unwrap().write_push(&push);
        }
        let read = mailbox.read(client);
        assert!(read.len() > 100 && read.len() < 5_000 && read.iter().all(|found| *found == push));
    }

    /// A killed process closes its pipe and does not remove it.
    fn kill(mailbox: Mailbox) {
        let left = mailbox.name.path();
        let kept = left.with_extension("kept");
        fs::hard_link(&left, &kept).unwrap();
        drop(mailbox);
        fs::rename(&kept, &left).unwrap();
    }

    #[test]
    fn writing_to_a_closed_pipe_raises_no_signal() {
        let (_folder, path) = database();
        let sender = Mailboxes::beside(&path).unwrap();
        for go in [kill, drop::<Mailbox>] {
            let client = ClientId::new(1);
            let mailbox = sender.open(client, &path).unwrap();
            let writer = reached(&sender, client).unwrap();
            go(mailbox);
            // The signal comes with the error that says that the pipe is broken, and with nothing else.
            let written = writer.write(&[7; RECORD]);
            assert!(!written.is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe));
            // A process that another test starts has the pipe open until it runs its own program.
            wait_until("the pipe is closed", || reached(&sender, client).is_none());
        }
    }

    #[test]
    fn pipe_permissions_follow_the_database() {
        let (_folder, path) = database();
        let sender = Mailboxes::beside(&path).unwrap();
        for (database, pipe) in
            [(0o600, 0o600), (0o644, 0o600), (0o660, 0o660), (0o664, 0o660), (0o666, 0o666)]
        {
            fs::set_permissions(&path, fs::Permissions::from_mode(database)).unwrap();
            fs::remove_dir_all(&sender.folder).unwrap();
            let sender = Mailboxes::beside(&path).unwrap();
            let mailbox = sender.open(ClientId::new(1), &path).unwrap();
            assert_eq!(
                fs::metadata(mailbox.name.path()).unwrap().mode() & 0o777,
                pipe,
                "beside {database:o}"
            );
        }
    }

    #[test]
    fn dead_client_is_unreachable_and_its_pipe_is_removed() {
        let (_folder, path) = database();
        let sender = Mailboxes::beside(&path).unwrap();
        let (dead, living) = (ClientId::new(1), ClientId::new(2));
        let mailbox = sender.open(dead, &path).unwrap();
        let _living = sender.open(living, &path).unwrap();
        assert!(reached(&sender, dead).is_some());
        kill(mailbox);
        let left = sender.folder.join(dead.to_string());
        assert!(reached(&sender, dead).is_none());
        sender.sweep().unwrap();
        assert!(!left.exists() && reached(&sender, living).is_some());
    }

    /// Another user who may write beside the database puts links there.
    #[test]
    fn links_in_the_place_of_the_folder_and_of_pipes_are_not_followed() {
        let (folder, path) = database();
        let elsewhere = folder.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let (precious, hidden) = (elsewhere.join("precious"), elsewhere.join(".hidden"));
        for file in [&precious, &hidden] {
            fs::write(file, "text").unwrap();
            let old = File::options().write(true).open(file).unwrap();
            old.set_modified(SystemTime::now() - 2 * UNNAMED).unwrap();
        }
        let client = ClientId::new(1);
        let sender = Mailboxes::beside(&path).unwrap();
        symlink(&precious, sender.folder.join(client.to_string())).unwrap();
        assert!(matches!(sender.reach(client), Reached::Closed(_)));
        for name in ["link", ".link"] {
            symlink(&precious, sender.folder.join(name)).unwrap();
        }
        fs::write(sender.folder.join("file"), "text").unwrap();
        sender.sweep().unwrap();
        assert_eq!(fs::read_dir(&sender.folder).unwrap().count(), 4, "what is no pipe stays");
        fs::remove_dir_all(&sender.folder).unwrap();
        symlink(&elsewhere, &sender.folder).unwrap();
        assert!(sender.open(client, &path).is_err() && sender.sweep().is_err());
        assert!(Mailboxes::beside(&path).is_err());
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 2);
        if rustix::process::geteuid().is_root() {
            // Nor is a folder of another user's used, and a client does not count as gone because it has no pipe in that.
            fs::remove_file(&sender.folder).unwrap();
            fs::create_dir(&sender.folder).unwrap();
            std::os::unix::fs::chown(&sender.folder, Some(OTHER_USER), None).unwrap();
            assert!(sender.open(client, &path).is_err() && Mailboxes::beside(&path).is_err());
            assert!(matches!(sender.reach(client), Reached::Closed(_)));
        }
        assert!([precious, hidden].iter().all(|file| fs::read_to_string(file).unwrap() == "text"));
    }

    /// Another user may exchange the folder right after it was made.
    #[test]
    fn only_an_own_empty_folder_is_new() {
        let folder = tempfile::tempdir().unwrap();
        let open = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(CWD, folder.path(), flags, Mode::empty()).unwrap()
        };
        assert!(is_new(&open()).unwrap());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.path(), Some(OTHER_USER), None).unwrap();
            assert!(!is_new(&open()).unwrap());
            std::os::unix::fs::chown(folder.path(), Some(0), None).unwrap();
        }
        fs::write(folder.path().join("letter"), "").unwrap();
        assert!(!is_new(&open()).unwrap());
        let id = ClientId::new(7).to_string();
        assert!(is_of_client(id.as_bytes()) && is_of_client(format!(".{id}").as_bytes()));
        assert!(!is_of_client(b"backup.fifo") && !is_of_client(b""));
    }

    /// A pipe that is exchanged between the look and the write raises no signal.
    #[test]
    fn pipe_that_was_exchanged_is_not_written_to() {
        let (_folder, path) = database();
        let (client, sender) = (ClientId::new(1), Mailboxes::beside(&path).unwrap());
        let mailbox = sender.open(client, &path).unwrap();
        let writer = reached(&sender, client).unwrap();
        let other = sender.open(client, &path).unwrap();
        assert!(writer.write(&[7; RECORD]).is_err());
        assert!(mailbox.read(client).is_empty() && other.read(client).is_empty());
    }

    /// A user without root's rights.
    const OTHER_USER: u32 = 65_534;

    #[test]
    fn pipes_made_by_root_belong_to_the_database_owner() {
        let (folder, path) = database();
        let is_root = rustix::process::geteuid().is_root();
        let owner = if is_root { OTHER_USER } else { rustix::process::geteuid().as_raw() };
        std::os::unix::fs::chown(&path, Some(owner), is_root.then_some(OTHER_USER)).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let sender = Mailboxes::beside(&path).unwrap();
        let client = ClientId::new(1);
        let mailbox = sender.open(client, &path).unwrap();
        let pipe = mailbox.name.path();
        assert_eq!(fs::metadata(&pipe).unwrap().uid(), owner);
        assert_eq!(fs::metadata(&sender.folder).unwrap().uid(), owner);
        // What that owner sees of it, and whether it can remove what is left.
        let run = |program: &str, args: &[&str]| {
            let mut command = std::process::Command::new(program);
            command.args(args).env("LC_ALL", "C");
            if is_root {
                std::os::unix::process::CommandExt::uid(&mut command, OTHER_USER);
                std::os::unix::process::CommandExt::gid(&mut command, OTHER_USER);
            }
            let output = command.output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let output = format!("of={}", pipe.display());
        let look = || run("dd", &["if=/dev/null", &output, "oflag=nonblock", "conv=notrunc"]);
        assert!(look().0, "it is there: {:?}", look());
        kill(mailbox);
        let (is_open, error) = look();
        assert!(!is_open && error.contains("No such device"), "it is gone: {error}");
        assert!(run("rm", &["-f", &pipe.display().to_string()]).0 && !pipe.exists());
    }
}
