//! The other half of fencing: resources that remember the highest token they have seen, and refuse lower ones.
//!
//! A lock alone can't stop a holder that was stopped for longer than its lease and then goes on. A resource can, and two
//! are here: something in this process, and a file. For what is in a database or an object store, see the examples
//! `fencing_sql` and `fencing_object`: there it is a condition of the write itself.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Token;

use crate::error::{Error, ErrorKind};

/// The highest token that something in this process has seen.
///
/// ```
/// use leasehold::fence::Fence;
///
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let fence = Fence::new(); // belongs to what is protected
/// let first = client.mutex("device").lock().await?.token();
/// let second = client.mutex("device").lock().await?.token();
///
/// fence.admit(second)?;
/// fence.admit(second)?; // the same holder, once more
/// assert!(fence.admit(first).unwrap_err().is_stale());
/// # Ok(()) });
/// ```
#[derive(Debug, Default)]
pub struct Fence(AtomicU64);

impl Fence {
    /// A fence that has seen no token yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Lets this token pass, unless a higher one has passed before.
    ///
    /// What follows must happen before anybody else asks, under the resource's own lock for instance: otherwise a holder may
    /// be stopped right after it was let in.
    ///
    /// # Errors
    ///
    /// `is_stale`, and nothing is changed.
    pub fn admit(&self, token: Token) -> Result<(), Error> {
        let highest = self.0.fetch_max(token.get(), Ordering::AcqRel);
        if highest > token.get() { Err(stale("it", token, highest)) } else { Ok(()) }
    }

    /// The highest token that has passed.
    #[must_use]
    pub fn highest(&self) -> Option<Token> {
        Token::new(self.0.load(Ordering::Acquire))
    }
}

/// A file that remembers the highest token with which it was written, beside it, in a file with `.fence` added to its name.
///
/// Every writer must use this. The check and the write are one step, under an advisory lock of the `.fence` file, and
/// the content is replaced as a whole: whoever reads sees the old or the new one. All of this waits for the disk, so it
/// does not belong into async code.
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
    /// The file at this path, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the content, unless it was written with a higher token before. On return it is on the disk.
    ///
    /// # Errors
    ///
    /// `is_stale`, and nothing is changed. `is_unavailable` when a file can't be read or written, with the system's error
    /// as its source: the content is the old one then, but a lower token may be refused from now on.
    pub fn write(&self, token: Token, content: &[u8]) -> Result<(), Error> {
        let failed = |error: io::Error| {
            let what = format!("{}: it can't be written: {error}", self.path.display());
            Error::new(ErrorKind::Unavailable, what).with_source(error)
        };
        let mut fence = self.lock().map_err(failed)?;
        let highest = read_token(&mut fence).map_err(failed)?;
        if highest > token.get() {
            return Err(stale(self.path.display(), token, highest));
        }
        // First the token: should this end half way, the old content stays, with a fence that is too high, not too low.
        write_token(&mut fence, token).and_then(|()| self.replace(content)).map_err(failed)
    }

    /// Held until the file is closed.
    fn lock(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let fence =
            options.read(true).write(true).create(true).truncate(false).open(self.beside(".fence"))?;
        fence.lock()?;
        Ok(fence)
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        let new = self.beside(".new");
        let mut file = File::create(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(suffix);
        path.into()
    }
}

/// Zero in a file that is new.
fn read_token(fence: &mut File) -> io::Result<u64> {
    let mut text = String::new();
    fence.read_to_string(&mut text)?;
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "its .fence file holds no token");
    if text.is_empty() { Ok(0) } else { text.trim_end().parse().map_err(|_| damaged()) }
}

/// Always the same number of bytes, so that it is never half a number.
fn write_token(fence: &mut File, token: Token) -> io::Result<()> {
    fence.rewind()?;
    fence.write_all(format!("{token:016}\n").as_bytes())?;
    fence.sync_all()
}

fn stale(what: impl std::fmt::Display, token: Token, highest: u64) -> Error {
    let message =
        format!("{what} was written with token {highest}, and {token} is older: its lease has ended");
    Error::new(ErrorKind::Stale, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    #[test]
    fn a_fence_refuses_what_is_lower_than_the_highest_and_stays_where_it_is() {
        let fence = Fence::new();
        assert_eq!(fence.highest(), None);
        fence.admit(token(7)).unwrap();
        fence.admit(token(7)).unwrap();
        assert!(fence.admit(token(6)).unwrap_err().is_stale());
        assert_eq!(fence.highest(), Some(token(7)));
        fence.admit(token(8)).unwrap();
    }

    #[test]
    fn a_fenced_file_keeps_what_the_highest_token_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let file = FencedFile::new(folder.path().join("a"));
        file.write(token(100_000), b"new").unwrap();
        let error = file.write(token(99), b"old").unwrap_err();
        assert!(error.is_stale() && error.to_string().contains("100000"), "{error}");
        // Another process, which has only the files.
        let again = FencedFile::new(file.path());
        assert!(again.write(token(99_999), b"old").unwrap_err().is_stale());
        assert_eq!(fs::read(file.path()).unwrap(), b"new");
        again.write(token(100_000), b"newer").unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"newer");
    }

    #[test]
    fn many_writers_leave_what_the_highest_token_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let file = FencedFile::new(folder.path().join("a"));
        std::thread::scope(|scope| {
            for number in 1..=16 {
                let file = &file;
                scope.spawn(move || {
                    let written = file.write(token(number), number.to_string().as_bytes());
                    assert!(written.is_ok() || written.unwrap_err().is_stale());
                });
            }
        });
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "16");
    }

    #[test]
    fn a_file_that_can_t_be_written_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let file = FencedFile::new(folder.path().join("no/such/folder/a"));
        let error = file.write(token(1), b"x").unwrap_err();
        assert!(error.is_unavailable() && std::error::Error::source(&error).is_some(), "{error}");
        let file = FencedFile::new(folder.path().join("a"));
        fs::write(folder.path().join("a.fence"), "nonsense").unwrap();
        assert!(file.write(token(1), b"x").unwrap_err().to_string().contains("no token"));
    }
}
