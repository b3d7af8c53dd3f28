//! How long callers and the worker wait for the file.

use std::time::Duration;

/// Max time that a caller's thread waits for other writers.
pub(super) const INLINE_TIMEOUT: Duration = Duration::from_millis(1);

/// Sleep between two checks whether a file is free.
pub(super) const MAX_BUSY_PAUSE: Duration = Duration::from_millis(2);

/// Max time that the worker waits for other writers.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of commands between two checkpoints.
pub(super) const CHECKPOINT_AFTER: u32 = 500;
