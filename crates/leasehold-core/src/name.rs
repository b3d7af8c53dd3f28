//! What is locked: a kind and a name.

use alloc::sync::Arc;
use core::fmt;

/// The longest name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 512;

/// A checked name: not empty, at most [`MAX_NAME_BYTES`] bytes, no control characters.
///
/// Cloning is cheap.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    ///
    /// The rule that it breaks.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(NameError::TooLong { bytes: name.len() });
        }
        if let Some(position) = name.find(char::is_control) {
            return Err(NameError::ControlCharacter { position });
        }
        Ok(Self(Arc::from(name)))
    }

    /// The name as it was given.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// Why a name can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// It has no characters.
    Empty,
    /// It is longer than [`MAX_NAME_BYTES`].
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It has a control character, a line end for example.
    ControlCharacter {
        /// The byte where the first one stands.
        position: usize,
    },
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a lock's name can't be empty"),
            Self::TooLong { bytes } => {
                write!(f, "a lock's name has at most {MAX_NAME_BYTES} bytes, this one has {bytes}")
            }
            Self::ControlCharacter { position } => {
                write!(f, "a lock's name has no control characters, this one has one at byte {position}")
            }
        }
    }
}

impl core::error::Error for NameError {}

/// The kinds of lock. Two kinds with the same name are two locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// One holder at a time.
    Mutex,
    /// A number of permits that holders share.
    Semaphore,
    /// Many readers, or one writer.
    ReadWrite,
    /// One leader at a time.
    Election,
    /// A counter that opens at zero.
    Latch,
    /// Parties wait until all have arrived.
    Barrier,
    /// The admission queue of a lock over a quorum. It is not a lock.
    Admission,
}

impl Kind {
    /// Every kind of lock.
    pub const ALL: &[Self] =
        &[Self::Mutex, Self::Semaphore, Self::ReadWrite, Self::Election, Self::Latch, Self::Barrier];

    /// The word that stands for it in keys, tables and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::Semaphore => "semaphore",
            Self::ReadWrite => "rw",
            Self::Election => "election",
            Self::Latch => "latch",
            Self::Barrier => "barrier",
            Self::Admission => "queue",
        }
    }

    /// The kind that this word stands for.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().chain([Self::Admission]).find(|kind| kind.as_str() == word)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a lease table is about: a kind and a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource {
    /// The kind of lock.
    pub kind: Kind,
    /// Its name.
    pub name: Name,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;

    #[test]
    fn empty_long_and_control_character_names_are_refused() {
        assert_eq!(Name::new(""), Err(NameError::Empty));
        let long: String = core::iter::repeat_n('x', 513).collect();
        assert_eq!(Name::new(&long), Err(NameError::TooLong { bytes: 513 }));
        assert!(Name::new(&long[..512]).is_ok());
        assert_eq!(Name::new("a\nb"), Err(NameError::ControlCharacter { position: 1 }));
        assert!(Name::new("Bestellung {42} ✓").is_ok());
    }

    #[test]
    fn every_kind_parses_from_its_string() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.as_str()), Some(*kind));
        }
        assert_eq!(Kind::parse("mutexes"), None);
    }
}
