//! The native half of the Node.js package `leasehold`: what `leasehold-binding` offers, as JavaScript sees it. `lib/native.js` is its only caller, and
//! turns it into the contract of `lib/backend.d.ts`.

#![allow(missing_docs, reason = "`lib/native.js` documents what JavaScript sees")]
#![expect(clippy::needless_pass_by_value, reason = "JavaScript's values are passed by value")]

pub mod answer;
pub mod client;
pub mod environment;
pub mod lock;
pub mod testing;
mod time;
