//! The resource that the lock protects: a number in a file, read when a critical section begins and written, one higher,
//! when it ends. Under a lock that lets two in, increments are lost.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The number in the file.
#[derive(Debug)]
pub struct Counter(File);

impl Counter {
    /// Opens a file that was created with [`Counter::create`].
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn open(path: &Path) -> io::Result<Self> {
        File::options().read(true).write(true).open(path).map(Self)
    }

    /// Creates the file, or sets it back, to zero.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn create(path: &Path) -> io::Result<Self> {
        std::fs::write(path, 0_u64.to_le_bytes())?;
        Self::open(path)
    }

    /// The number.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn get(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Sets the number.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn set(&self, number: u64) -> io::Result<()> {
        self.0.write_all_at(&number.to_le_bytes(), 0)
    }
}
