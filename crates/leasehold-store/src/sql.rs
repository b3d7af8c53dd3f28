//! How the values of rows are stored in SQL, in SQLite and in PostgreSQL alike.

use leasehold_core::{Acquisition, StoreTime};

/// A number below 2^63, which is what both databases can store.
pub fn stored_number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The number that is stored like this; `None` for one that no store writes.
pub fn read_number(stored: i64) -> Option<u64> {
    u64::try_from(stored).ok()
}

/// A time, whose *never* is the largest number there.
pub fn stored_time(time: StoreTime) -> i64 {
    stored_number(time.as_micros())
}

/// The time that is stored like this; `None` for one that no store writes.
pub fn read_time(stored: i64) -> Option<StoreTime> {
    match stored {
        i64::MAX => Some(StoreTime::NEVER),
        _ => read_number(stored).map(StoreTime::from_micros),
    }
}

/// How an acquisition is stored: bytes that sort as the number does.
pub fn stored_key(acquisition: Acquisition) -> ([u8; 16], i64) {
    (acquisition.client.get().to_be_bytes(), stored_number(acquisition.sequence))
}
