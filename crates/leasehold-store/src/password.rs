//! A password that is kept in a file, and read again for each connection.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::OpenError;
use crate::reread::{Reread, read_file};

/// No password is longer: a path that leads to something else is a mistake.
const LONGEST: usize = 64 * 1_024;

type Read = dyn Fn(&Path) -> Result<Option<String>, OpenError> + Send + Sync;

/// The file, and the password that was read from it last.
#[derive(Clone)]
pub struct PasswordFile {
    path: Arc<Path>,
    read: Arc<Read>,
    last: Arc<Reread<Option<String>>>,
}

impl PasswordFile {
    /// A file whose first line is the password, without the end of the line. It is not read yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self::with(path, |path| read(path).map(Some))
    }

    /// A file in which this finds the password, if it has one. It is not read yet.
    pub fn with(
        path: PathBuf,
        read: impl Fn(&Path) -> Result<Option<String>, OpenError> + Send + Sync + 'static,
    ) -> Self {
        Self { path: path.into(), read: Arc::new(read), last: Arc::new(Reread::new(None)) }
    }

    /// What was read last.
    #[must_use]
    pub fn latest(&self) -> Option<String> {
        self.last.latest()
    }

    /// Reads it. If it has no password, what was read last stays.
    ///
    /// # Errors
    ///
    /// It can't be read, is no text, or its first line is empty. The message has the path, and nothing of what is in the file.
    pub fn open(&self) -> Result<(), OpenError> {
        self.last.set(self.found()?);
        Ok(())
    }

    /// Reads it again, off the runtime's thread.
    ///
    /// # Errors
    ///
    /// As [`Self::open`], for example while the file is being replaced: the password is what was read last.
    pub async fn renew(&self) -> Result<(), OpenError> {
        let this = self.clone();
        self.last.renew(move || this.found()).await
    }

    /// What it has now, or else what was read last.
    fn found(&self) -> Result<Option<String>, OpenError> {
        Ok((self.read)(&self.path)?.or_else(|| self.last.latest()))
    }
}

/// Two that name one file are equal.
impl PartialEq for PasswordFile {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for PasswordFile {}

fn read(path: &Path) -> Result<String, OpenError> {
    let unreadable = |why: &dyn std::fmt::Display| {
        OpenError::invalid(format!("the password file {} can't be read: {why}", path.display()))
    };
    let mut content = read_file(path).map_err(|error| unreadable(&error).with_source(error))?;
    content.truncate(LONGEST);
    // As in files of the system such as /proc/self/environ.
    if content.contains(&0) {
        return Err(unreadable(&"it is no text"));
    }
    let text = String::from_utf8(content).map_err(|_| unreadable(&"it is no text in UTF-8"))?;
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(password.to_owned()),
        _ => Err(unreadable(&"its first line is empty")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn file_is_read_again_and_an_unreadable_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        fs::write(&path, "first\r\nfurther\n").unwrap();
        let file = PasswordFile::new(path.clone());
        assert_eq!(file.latest(), None);
        file.open().unwrap();
        let latest = || file.latest().unwrap();
        assert_eq!(latest(), "first");
        for (content, expected) in
            [("second", "second"), ("", "second"), ("\nx", "second"), ("third\n", "third")]
        {
            fs::write(&path, content).unwrap();
            assert_eq!(file.renew().await.is_ok(), latest() == content.trim_end());
            assert_eq!(latest(), expected);
        }
        fs::remove_file(&path).unwrap();
        assert!(file.renew().await.is_err());
        assert_eq!(file.clone().latest().as_deref(), Some("third"));
    }

    #[test]
    fn error_names_the_file_and_nothing_of_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let error = |path: &Path| PasswordFile::new(path.to_owned()).open().unwrap_err().to_string();
        assert!(error(&path).contains("No such file"), "{}", error(&path));
        assert!(error(folder.path()).contains("no file"), "{}", error(folder.path()));
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success() && error(&pipe).contains("no file"));
        fs::write(&path, b"hunter2\xff").unwrap();
        let message = error(&path);
        assert!(
            message.contains("UTF-8") && message.contains("password") && !message.contains("hunter2"),
            "{message}"
        );
    }
}
