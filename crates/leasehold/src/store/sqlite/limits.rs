//! How long callers and the worker wait for the file.

use std::time::Duration;

/// How long a caller's thread may be held up by others who write.
pub(super) const INLINE_TIMEOUT: Duration = Duration::from_millis(1);

/// How long anybody sleeps between two looks at whether a file is free.
pub(super) const MAX_BUSY_PAUSE: Duration = Duration::from_millis(2);

/// How long the worker waits for others who write.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// After this many commands the write-ahead log is worth moving into the file.
pub(super) const CHECKPOINT_AFTER: u32 = 500;
