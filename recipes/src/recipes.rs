//! The published recipes, one file each, and their catalogue.

pub mod articles;
mod catalogue;
mod exists_set;
mod hash_pubsub;
pub mod leasehold;
mod local_count;
mod lua_setnx_expire;
mod lua_setnx_token;
mod redlock;
mod reentrant_hash;
mod rw_hash;
mod rw_two_keys;
mod scenarios;
mod set_nx_ex;
mod set_nx_px;
mod set_nx_px_get_del;
mod setnx;
mod setnx_expire;
mod timestamp_del;
mod timestamp_getset;
mod timestamp_getset_expire;

pub use catalogue::{KnownProblem, ROWS, Row, Variant, find};
pub use redlock::MASTERS;
pub use rw_two_keys::keys as rw_keys;
