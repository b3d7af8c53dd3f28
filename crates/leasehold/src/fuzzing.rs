//! The private parsers, for the fuzz targets in `fuzz/`. It is no part of the public API.
//!
//! Each function panics if a property of its parser does not hold.

use leasehold_core::ClientId;
use leasehold_redis::{fuzz_cluster_slots, fuzz_connection_info};
use leasehold_sqlite::fuzz_pipe_record;
use leasehold_store::HolderMetadata;
use redis::Value;

use crate::url::StoreUrl;

/// A store's address.
pub fn url(text: &str) {
    match StoreUrl::parse(text) {
        Ok(url) => drop(url.to_string()),
        Err(error) => drop(error.to_string()),
    }
}

/// What a holder says about itself.
///
/// # Panics
///
/// If the stored form of what was decoded is not decoded to the same.
pub fn metadata(stored: &str) {
    let decoded = HolderMetadata::decode(stored);
    assert_eq!(HolderMetadata::decode(&decoded.encode()), decoded);
}

/// A record of a pipe between processes of a SQLite store.
pub fn pipe_record(record: &[u8; 64]) {
    fuzz_pipe_record(record, ClientId::new(7));
}

/// The reply to `CLUSTER SLOTS`.
pub fn cluster_slots(reply: &Value) {
    fuzz_cluster_slots(reply);
}

/// The reply to `CLIENT INFO`, now and earlier.
pub fn connection_info(now: &Value, earlier: &Value) {
    fuzz_connection_info(now, earlier);
}
