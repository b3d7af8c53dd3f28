//! The log of acquisitions: five moments of one task, 40 bytes in a log that the driver reads afterwards.

use std::io;
use std::path::Path;

/// One acquisition and its release. Moments are nanoseconds of the machine's monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquisition {
    /// Which of all tasks of the run.
    pub task: u32,
    /// Whether others of its kind may be inside at the same time: a reader.
    pub is_shared: bool,
    /// It asked for the lock.
    pub asked: u64,
    /// It was inside.
    pub entered: u64,
    /// It began to release the lock.
    pub left: u64,
    /// It knew that the lock was released.
    pub done: u64,
}

impl Acquisition {
    /// How many bytes it takes.
    pub const BYTES: usize = 40;

    /// As it is in the log: two numbers of 4 bytes, four of 8, the least byte first.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.task.to_le_bytes());
        bytes[4..8].copy_from_slice(&u32::from(self.is_shared).to_le_bytes());
        for (place, moment) in
            bytes[8..].chunks_exact_mut(8).zip([self.asked, self.entered, self.left, self.done])
        {
            place.copy_from_slice(&moment.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let moment = |index: usize| {
            let place = &bytes[8 + index * 8..16 + index * 8];
            u64::from_le_bytes(place.try_into().expect("eight bytes"))
        };
        let task = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        let is_shared = bytes[4..8] != [0; 4];
        Self { task, is_shared, asked: moment(0), entered: moment(1), left: moment(2), done: moment(3) }
    }
}

/// Writes a log.
///
/// # Errors
///
/// What the file system says.
pub fn write(path: &Path, acquisitions: &[Acquisition]) -> io::Result<()> {
    let bytes: Vec<u8> = acquisitions.iter().flat_map(|acquisition| acquisition.to_bytes()).collect();
    std::fs::write(path, bytes)
}

/// Reads a log.
///
/// # Errors
///
/// What the file system says, and if it is not made of whole acquisitions.
pub fn read(path: &Path) -> io::Result<Vec<Acquisition>> {
    let bytes = std::fs::read(path)?;
    if bytes.len() % Acquisition::BYTES != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the log ends within an acquisition"));
    }
    Ok(bytes.chunks_exact(Acquisition::BYTES).map(Acquisition::from_bytes).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_read_as_it_was_written() {
        let acquisition =
            Acquisition { task: 7, is_shared: true, asked: 1, entered: 1 << 40, left: 3, done: u64::MAX };
        assert_eq!(Acquisition::from_bytes(&acquisition.to_bytes()), acquisition);
    }
}
