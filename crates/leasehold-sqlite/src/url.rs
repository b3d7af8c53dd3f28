//! The address of a file.

use std::fmt;
use std::path::{Path, PathBuf};

use leasehold_store::OpenError;

/// A file, and whether each transaction is flushed to the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqliteUrl {
    path: PathBuf,
    is_durable: bool,
}

impl SqliteUrl {
    /// Parses what follows `sqlite:` in an address.
    ///
    /// # Errors
    ///
    /// What is wrong with it, and what to write.
    pub fn parse(rest: &str) -> Result<Self, OpenError> {
        let parameter = rest.rsplit_once('?').and_then(|(path, query)| Some((path, query.split_once('=')?)));
        let (path, is_durable) = match parameter {
            None => (rest, false),
            Some((path, ("synchronous", "normal"))) => (path, false),
            Some((path, ("synchronous", "full"))) => (path, true),
            Some((_, ("synchronous", other))) => {
                return Err(OpenError::invalid(format!("synchronous is normal or full, not {other:?}")));
            }
            // As part of the name it would lead to another file, and so to another store.
            Some((_, (other, _))) => {
                let what = format!(
                    "sqlite: has no parameter {other:?}: it has synchronous=normal and synchronous=full"
                );
                return Err(OpenError::invalid(what));
            }
        };
        // `sqlite://relative` would name a host in any other URL; only `sqlite:///absolute` is meant.
        let path = if path.starts_with("///") { &path[2..] } else { path };
        if path.starts_with("//") {
            return Err(OpenError::invalid("write sqlite:PATH or sqlite:///ABSOLUTE/PATH, without a host"));
        }
        Self::new(path, is_durable)
    }

    /// A file of this path.
    ///
    /// # Errors
    ///
    /// It can't be the path of a file.
    pub fn new(path: impl Into<PathBuf>, is_durable: bool) -> Result<Self, OpenError> {
        use std::os::unix::ffi::OsStrExt as _;

        let path = path.into();

        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes == b":memory:" {
            return Err(OpenError::invalid(
                "sqlite: needs the path of a file, for example sqlite:locks.db; a store without a file is memory:",
            ));
        }
        if bytes.contains(&0) {
            return Err(OpenError::invalid("a path has no NUL character"));
        }
        Ok(Self { path, is_durable })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_durable(&self) -> bool {
        self.is_durable
    }
}

impl fmt::Display for SqliteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sqlite:{}", self.path.display())
    }
}
