//! What keeps one client's attempts and leases alive: the table of both, and the thread that drives it.
//!
//! The engine knows resources, commands and leases. It knows no kinds of lock and no addresses.

pub(crate) mod clock;
pub(crate) mod driver;
mod entry;
mod local_queue;
mod session;
mod sleep;
mod table;
mod timer;
mod watch;

pub(crate) use entry::{ReleaseOutcome, RenewalError};
pub(crate) use local_queue::{AcquireKey, CancelledWait, EnqueueError, Ticket, WaitOutcome};
pub(crate) use session::{AttemptEnd, Closed, Request, Session};
pub(crate) use sleep::Sleep;
