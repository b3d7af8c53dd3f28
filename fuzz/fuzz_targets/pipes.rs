//! What processes of a SQLite store write to each other, and what holders say about themselves.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(record) = bytes.first_chunk() {
        leasehold::fuzzing::pipe_record(record);
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        leasehold::fuzzing::metadata(text);
    }
});
