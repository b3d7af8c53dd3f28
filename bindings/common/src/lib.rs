//! What the packages for other languages share: a small executor for the futures of the library, and clients, locks and leases as
//! these packages see them.
//!
//! A call of such a package is a [`Call`], which holds a future. Threads of the language poll it: the one that starts it, the one
//! that waits for it, or the thread of an event loop that takes from its [`Queue`]. A waker only pushes to a queue and notifies,
//! so no thread of the library touches the language.
//!
//! What this crate does not do: it has no thread, no runtime, no lock of its own, and knows no language.

mod call;
mod client;
mod exit;
mod failure;
mod held;
mod lease;
mod lock;
mod log;
mod opened;
mod queue;
mod testing;

pub use call::{Call, Limit};
pub use client::Client;
pub use exit::{Exit, Waiting};
pub use failure::Failure;
pub use lease::{Answer, Granted, Lease, Operation, Outcome, learn_wakers, records};
pub use lock::{Lock, Terms};
pub use log::{Record, capture};
pub use opened::Settings;
pub use queue::{Notify, Queue};
pub use testing::TestStore;
