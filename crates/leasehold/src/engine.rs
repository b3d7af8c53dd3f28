//! Keeps one client's attempts and leases alive: the table of both, and the thread that drives it.
//!
//! The engine knows resources, commands and leases. It knows no kinds of lock and no addresses. It reaches the clock through
//! [`leasehold_store::clock::Clock`], the timer through [`driver`], and the store through `store::Store`.

mod companions;
pub(crate) mod driver;
mod due;
mod entries;
mod entry;
mod ids;
mod leases;
mod local_queue;
mod log_event;
mod number_map;
mod outbox;
mod releasing;
mod request;
mod session;
mod sleep;
mod table;
#[cfg(test)]
mod tests;
mod threads;
mod timer;
mod trust_limit;
mod waiting;
mod watch;

pub(crate) use entry::{AttemptEnd, BeginError, MinHold, RenewalError, Transmit};
pub(crate) use ids::{EntryId, QueueId};
pub(crate) use leases::{AttachedLease, DetachedLease, EndedHold, QueuedGrant};
pub(crate) use local_queue::{AcquireKey, CancelledWait, EnqueueError, ResourceHash, Ticket, WaitOutcome};
pub(crate) use releasing::ReleaseOutcome;
pub(crate) use request::{End, Request, Response, release_dropped};
pub(crate) use session::Session;
pub(crate) use sleep::{Sleep, with_deadline};
