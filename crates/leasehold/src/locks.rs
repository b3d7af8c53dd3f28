//! The kinds of lock, and what they are built from: one attempt to acquire a lease.
//!
//! [`lock`] has the options that all kinds share and their validation. A kind only says which resource it uses, how much
//! capacity that has, and how much of it an attempt takes.

mod acquire;
mod acquire_all;
mod admission;
pub(crate) mod attempt;
pub(crate) mod barrier;
mod bridged;
pub(crate) mod election;
pub(crate) mod latch;
pub(crate) mod lock;
pub(crate) mod mutex;
pub(crate) mod mutex_set;
mod observe;
pub(crate) mod once_per;
pub(crate) mod reentrant;
pub(crate) mod rw;
pub(crate) mod semaphore;
