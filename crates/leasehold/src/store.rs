//! The stores.

#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "redlock")]
pub(crate) mod redlock;

#[cfg(feature = "redis")]
pub(crate) use self::redis::SharedConnection;
#[cfg(all(feature = "_fuzzing", feature = "redlock"))]
pub(crate) use self::redis::{fuzz_cluster_slots, fuzz_connection_info};
