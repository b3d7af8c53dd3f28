//! How clients and a Redis server talk, for programs that go through a lock's protocol step by step: with the machines of
//! `leasehold-core`, and a server's clock and connections of their own. Not part of the public API: it changes with the
//! layout of the keys.

pub use crate::inspect::{READER, WRITER};
pub use crate::store::steps::{answer, encode, inbox_of, push, text};
