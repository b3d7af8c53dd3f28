//! Files that are read again for each connection, since they may have been replaced: certificates and passwords.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;

use crate::{OpenError, tasks};

/// How long a connection waits for its files: what was read last is used after that.
const LIMIT: Duration = Duration::from_millis(500);

/// The same before anything was read.
const FIRST_LIMIT: Duration = Duration::from_secs(5);

/// No certificate, key or password is longer: a path that leads to something else is a mistake.
const LONGEST: u64 = 4 << 20;

/// What was made of files, as they could be read last.
pub struct Reread<T> {
    last: Mutex<T>,
    /// A read has not ended. On a file system that hangs it does not, and no other one begins.
    is_reading: AtomicBool,
}

impl<T: Clone + Send + 'static> Reread<T> {
    /// What they are at first.
    pub const fn new(first: T) -> Self {
        Self { last: Mutex::new(first), is_reading: AtomicBool::new(false) }
    }

    /// What was read last.
    pub fn latest(&self) -> T {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes what was read elsewhere.
    pub fn set(&self, read: T) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = read;
    }

    /// Reads the files again, off the runtime's thread, and for half a second at most. What comes later counts for the next connection.
    ///
    /// Cancel-safe: a read that has begun ends by itself.
    ///
    /// # Errors
    ///
    /// They can't be read, for example because they are being replaced, or a read hangs: what was read last stays.
    pub async fn renew(
        self: &Arc<Self>,
        read: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
    ) -> Result<(), OpenError> {
        if self.is_reading.swap(true, Ordering::SeqCst) {
            return Err(hanging());
        }
        let this = self.clone();
        let reading = tasks::blocking(move || {
            let _end = EndOfRead(&this.is_reading);
            this.set(read()?);
            Ok(())
        });
        match timeout(LIMIT, reading).await {
            Ok(Ok(read)) => read,
            // The client has ended.
            Ok(Err(_)) => Ok(()),
            Err(_) => Err(hanging()),
        }
    }
}

impl<T> fmt::Debug for Reread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It may be a password.
        f.debug_struct("Reread").finish_non_exhaustive()
    }
}

/// Also if the read panics.
struct EndOfRead<'a>(&'a AtomicBool);

impl Drop for EndOfRead<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn hanging() -> OpenError {
    OpenError::invalid("a file is not read in time: its file system may hang")
}

/// Reads the files of a store that is being opened, off the runtime's thread.
///
/// # Errors
///
/// They can't be read, or not within 5 s.
pub async fn first_read<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
) -> Result<T, OpenError> {
    match timeout(FIRST_LIMIT, tasks::blocking(read)).await {
        Ok(read) => read?,
        Err(_) => Err(hanging()),
    }
}

/// The content of a file of at most 4 MiB. It blocks: see [`Reread::renew`].
///
/// # Errors
///
/// It can't be read, or is no regular file. A pipe would be waited for when it is opened.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    let mut content = Vec::new();
    File::open(path)?.take(LONGEST).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn read_that_hangs_is_not_waited_for_and_no_other_one_begins() {
        let value = Arc::new(Reread::new(1));
        let (release, held) = channel::<()>();
        let hangs = value.renew(move || {
            let _ = held.recv();
            Ok(2)
        });
        assert!(hangs.await.is_err() && value.latest() == 1);
        let again = value.renew(|| panic!("the first one has not ended"));
        assert!(again.await.unwrap_err().to_string().contains("may hang"));
        drop(release);
        while value.latest() == 1 {
            tokio::task::yield_now().await;
        }
        while value.renew(|| Ok(3)).await.is_err() {}
        assert_eq!(value.latest(), 3);
    }

    #[tokio::test]
    async fn what_can_not_be_read_changes_nothing() {
        let value = Arc::new(Reread::new(1));
        assert!(value.renew(|| Err(OpenError::invalid("no"))).await.is_err());
        assert_eq!(value.latest(), 1);
        // Also a read that panics.
        let _ = value.renew(|| panic!("no")).await;
        while value.renew(|| Ok(2)).await.is_err() {}
        assert_eq!(value.latest(), 2);
    }

    #[test]
    fn pipe_folder_and_missing_file_are_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let file = folder.path().join("file");
        fs::write(&file, "content").unwrap();
        assert_eq!(read_file(&file).unwrap(), b"content");
        for other in [&*pipe, folder.path(), &folder.path().join("none")] {
            assert!(read_file(other).is_err(), "{other:?}");
        }
    }
}
