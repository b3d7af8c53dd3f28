//! Ids of clients, attempts and owners.

use alloc::sync::Arc;
use core::fmt;

/// One process's connection to a store: a random 128-bit number.
///
/// The upper and the lower half: a `u128` would make every id with a sequence number, and every optional one, a quarter larger.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(u64, u64);

impl ClientId {
    /// The client with this number. The caller provides the randomness.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the halves")]
    pub const fn new(number: u128) -> Self {
        Self((number >> 64) as u64, number as u64)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u128 {
        (self.0 as u128) << 64 | self.1 as u128
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.get())
    }
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The id of one attempt to lock. Every command names it, so that every command can be repeated safely.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Acquisition {
    /// The client that makes the attempt.
    pub client: ClientId,
    /// Number of the attempt, counted by the client.
    pub sequence: u64,
}

/// The sequence number from which those of attempts begin that are not counted by a client. No client counts that far, and a store keeps numbers
/// below twice this one.
pub const FIRST_UNCOUNTED: u64 = 1 << 62;

/// The sequence number from which those of attempts begin that a caller has named.
pub const FIRST_REQUESTED: u64 = FIRST_UNCOUNTED | 1 << 61;

impl Acquisition {
    /// Whether a caller has named this attempt, and may repeat it at any client. The greater numbers are those of a quorum's nodes.
    #[must_use]
    pub const fn is_requested(self) -> bool {
        FIRST_REQUESTED <= self.sequence && self.sequence < 2 * FIRST_UNCOUNTED
    }
}

impl fmt::Display for Acquisition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.client, self.sequence)
    }
}

impl fmt::Debug for Acquisition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A named owner, which may hold the same lock more than once, from any task or process. Without one, each acquisition is
/// its own owner.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(Arc<str>);

impl Owner {
    /// The owner with this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:?})", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    /// A quorum numbers the attempts at its nodes from 2^63 on.
    #[test]
    fn attempt_of_a_node_of_a_quorum_is_no_request() {
        let is_requested = |sequence| Acquisition { client: ClientId::new(1), sequence }.is_requested();
        let last = 2 * FIRST_UNCOUNTED - 1;
        assert!(is_requested(FIRST_REQUESTED) && is_requested(last));
        for other in [1, FIRST_UNCOUNTED, FIRST_REQUESTED - 1, last + 1, u64::MAX] {
            assert!(!is_requested(other), "{other}");
        }
    }

    #[test]
    fn ids_are_shown_in_full() {
        let client = ClientId::new(0xAB);
        let acquisition = Acquisition { client, sequence: 7 };
        assert_eq!(client.get(), 0xAB);
        assert_eq!(format!("{client}"), "000000000000000000000000000000ab");
        assert_eq!(format!("{client:?}"), format!("{client}"));
        assert_eq!(format!("{acquisition}"), "000000000000000000000000000000ab-7");
        assert_eq!(format!("{acquisition:?}"), format!("{acquisition}"));
        let owner = Owner::new("order \"42\"");
        assert_eq!(owner.as_str(), "order \"42\"");
        assert_eq!(format!("{owner:?}"), r#"Owner("order \"42\"")"#);
    }
}
