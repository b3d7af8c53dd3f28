//! Weights of a read-write lock's holders. All clients must use the same.

/// A reader.
pub const READER: u32 = 1;

/// An upgradable reader: more than half of the capacity, so that there is at most one.
pub const UPGRADABLE: u32 = 1 << 31;

/// A writer, and the lock's capacity.
pub const WRITER: u32 = u32::MAX;

const _: () =
    assert!(UPGRADABLE > WRITER / 2 && WRITER - UPGRADABLE > READER, "one upgradable reader, beside readers");
