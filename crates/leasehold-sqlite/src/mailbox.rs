//! Pushes to other processes: one named pipe per client, beside the database.
//!
//! The reader keeps its pipe open while it lives, and writers only while they write. Opening a pipe for writing therefore fails
//! as soon as its client is gone. A push is one record, small enough for an atomic write, with the whole grant: the waiter
//! need not re-check before it works. Records may be lost: one that finds the pipe full is dropped, and an unknown one is
//! ignored.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold_core::{
    Acquisition, ClientId, Grant, GrantProof, HeadHint, Push, PushKind, StoreTime, TokenRange,
};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

/// Max number of pipes without a reader that one sweep removes.
const SWEEP: usize = 64;

/// A pipe that has not got its name after this time is abandoned.
const UNNAMED: Duration = Duration::from_secs(60);

/// The folder with the pipes of one database.
#[derive(Clone, Debug)]
pub(super) struct Mailboxes {
    folder: PathBuf,
}

impl Mailboxes {
    /// The folder beside the database. A user who may write the database may write to its clients; others may not.
    pub(super) fn beside(database: &Path) -> io::Result<Self> {
        let mut folder = database.as_os_str().to_owned();
        folder.push("-inbox");
        let folder = PathBuf::from(folder);
        let mode = permissions(database)?;
        // Read or write permission includes the right to enter.
        let enter = ((mode & 0o444) >> 2) | ((mode & 0o222) >> 1);
        match fs::DirBuilder::new().mode(mode | enter).create(&folder) {
            Ok(()) => {
                share(&folder, database);
                fs::set_permissions(&folder, fs::Permissions::from_mode(mode | enter))?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
            Err(error) => return Err(error),
        }
        Ok(Self { folder })
    }

    fn path(&self, client: ClientId) -> PathBuf {
        self.folder.join(client.to_string())
    }

    /// Creates this client's pipe. It gets its name once it is open, so a named pipe has a reader unless the reader is dead.
    pub(super) fn open(&self, client: ClientId, database: &Path) -> io::Result<Mailbox> {
        // Users who may write the database may write to the pipe, and open it for reading, which writing needs
        // (`PipeWriter::write`). It reveals nothing that is not in the database.
        let writers = permissions(database)? & 0o022;
        let mode = 0o600 | writers | (writers << 1);
        let unnamed = self.folder.join(format!(".{client}"));
        mknodat(CWD, &unnamed, FileType::Fifo, Mode::from_raw_mode(mode), 0)?;
        let opened = (|| {
            share(&unnamed, database);
            fs::set_permissions(&unnamed, fs::Permissions::from_mode(mode))?;
            // Open for reading and writing, so that it has no end of file when a writer closes it.
            let pipe =
                OpenOptions::new().read(true).write(true).custom_flags(nonblocking()).open(&unnamed)?;
            let path = self.path(client);
            fs::rename(&unnamed, &path)?;
            Ok(Mailbox { pipe, name: MailboxName(path) })
        })();
        if opened.is_err() {
            let _ = fs::remove_file(&unnamed);
        }
        opened
    }

    /// Opens the pipe of a client.
    pub(super) fn reach(&self, client: ClientId) -> Reached {
        let path = self.path(client);
        match reach(&path) {
            Ok(pipe) => Reached::Open(PipeWriter { pipe, path }),
            Err(error) if is_gone(&error) => Reached::Gone,
            Err(error) => Reached::Closed(error),
        }
    }

    /// Removes pipes whose clients are dead.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let mut removed = 0;
        for entry in fs::read_dir(&self.folder)? {
            if removed == SWEEP {
                break;
            }
            let path = entry?.path();
            let is_named = path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."));
            let is_dead = if is_named {
                reach(&path).is_err_and(|error| is_gone(&error))
            } else {
                let age = fs::metadata(&path).and_then(|found| found.modified()).ok();
                age.and_then(|time| time.elapsed().ok()).is_some_and(|age| age > UNNAMED)
            };
            if is_dead {
                removed += 1;
                if let Err(error) = fs::remove_file(&path) {
                    tracing::debug!(%error, path = %path.display(), "a dead client's pipe stays");
                }
            }
        }
        Ok(())
    }
}

fn reach(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags(nonblocking()).open(path)
}

fn nonblocking() -> i32 {
    i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0)
}

fn permissions(database: &Path) -> io::Result<u32> {
    Ok(fs::metadata(database)?.mode() & 0o666)
}

/// Whether the pipe has no reader or does not exist.
fn is_gone(error: &io::Error) -> bool {
    let no_reader = error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error());
    no_reader || error.kind() == io::ErrorKind::NotFound
}

/// Gives the pipe the group of the database, and as root its owner too: users of the database must be able to open the pipe to
/// see whether its client is there.
fn share(path: &Path, database: &Path) {
    let Ok(found) = fs::metadata(database) else { return };
    let give = |owner| std::os::unix::fs::chown(path, owner, Some(found.gid()));
    let given = if rustix::process::geteuid().is_root() { give(Some(found.uid())) } else { give(None) };
    // In a namespace without that owner, the group may still be there.
    if let Err(error) = given.or_else(|_| give(None)) {
        tracing::debug!(%error, path = %path.display(), "it could not be given to the group of the database");
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
    path: PathBuf,
}

impl PipeWriter {
    /// Writes a push, or drops it if the pipe is full.
    pub(super) fn write_push(&self, push: &Push) {
        if let Err(error) = self.write(&encode(push)) {
            tracing::debug!(%error, to = %push.to(), "a push was dropped");
        }
    }

    /// The client may have died since the pipe was opened. A write to a pipe without a reader raises SIGPIPE, which ends most
    /// programs. Therefore the writer opens the pipe for reading too, but only while it writes: to others the client would
    /// otherwise seem to be alive.
    fn write(&self, record: &[u8; RECORD]) -> io::Result<()> {
        let _reader = OpenOptions::new().read(true).custom_flags(nonblocking()).open(&self.path)?;
        (&self.pipe).write(record).map(drop)
    }
}

/// The name of a client's pipe.
#[derive(Clone)]
pub(super) struct MailboxName(PathBuf);

impl MailboxName {
    /// Removes the name, so that no writer finds it.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.0);
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
                None => tracing::warn!(path = %self.name.0.display(), "an unknown record arrived"),
            }
        }
        pushes
    }
}

impl Mailbox {
    /// Whether other clients find it by its name: a cleaner of old files may have removed it.
    pub(super) fn is_in_place(&self) -> bool {
        let named = fs::symlink_metadata(&self.name.0);
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
    Some(Push { acquisition: Acquisition { client, sequence }, at: StoreTime::from_micros(at), kind })
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
            Push { acquisition, at: StoreTime::from_micros(1), kind }
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
        let push = Push { acquisition, at: StoreTime::ZERO, kind: PushKind::Revoked };
        for _ in 0..5_000 {
            reached(&sender, client).unwrap().write_push(&push);
        }
        let read = mailbox.read(client);
        assert!(read.len() > 100 && read.len() < 5_000 && read.iter().all(|found| *found == push));
    }

    /// A killed process closes its pipe and does not remove it.
    fn kill(mailbox: Mailbox) {
        let left = mailbox.name.0.clone();
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
            let mailbox = sender.open(ClientId::new(1), &path).unwrap();
            assert_eq!(fs::metadata(&mailbox.name.0).unwrap().mode() & 0o777, pipe, "beside {database:o}");
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
        let left = sender.path(dead);
        assert!(reached(&sender, dead).is_none());
        sender.sweep().unwrap();
        assert!(!left.exists() && reached(&sender, living).is_some());
    }

    /// A user without root's rights.
    const NOBODY: u32 = 65_534;

    #[test]
    fn pipes_made_by_root_belong_to_the_database_owner() {
        let (folder, path) = database();
        let is_root = rustix::process::geteuid().is_root();
        let owner = if is_root { NOBODY } else { rustix::process::geteuid().as_raw() };
        std::os::unix::fs::chown(&path, Some(owner), is_root.then_some(NOBODY)).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let sender = Mailboxes::beside(&path).unwrap();
        let client = ClientId::new(1);
        let mailbox = sender.open(client, &path).unwrap();
        let pipe = mailbox.name.0.clone();
        assert_eq!(fs::metadata(&pipe).unwrap().uid(), owner);
        assert_eq!(fs::metadata(&sender.folder).unwrap().uid(), owner);
        // What that owner sees of it, and whether it can remove what is left.
        let run = |program: &str, args: &[&str]| {
            let mut command = std::process::Command::new(program);
            command.args(args).env("LC_ALL", "C");
            if is_root {
                std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
                std::os::unix::process::CommandExt::gid(&mut command, NOBODY);
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
