//! Whether something between the client and the server, or a managed server itself, restricts what scripts may do.
//!
//! The first connection of a store finds out, by the script that tries the user's rights (`rights`). The others use the same scripts,
//! because the keys of locks have other names where scripts are restricted.

use std::sync::OnceLock;

/// What scripts may do, for all connections of a store.
#[derive(Debug, Default)]
pub(crate) struct Restriction(OnceLock<bool>);

impl Restriction {
    /// As the address says; otherwise the first connection finds out.
    pub(crate) fn of_address(is_proxy: Option<bool>) -> Self {
        Self(is_proxy.map_or_else(OnceLock::new, OnceLock::from))
    }

    /// Whether scripts are restricted, if that is known.
    pub(crate) fn known(&self) -> Option<bool> {
        self.0.get().copied()
    }

    /// Whether the scripts for restricted servers are used.
    pub(crate) fn is_restricted(&self) -> bool {
        self.known() == Some(true)
    }

    /// Notes what a connection has found. Returns what counts, which an earlier one may have found.
    pub(crate) fn note(&self, is_restricted: bool) -> bool {
        *self.0.get_or_init(|| is_restricted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_or_the_first_connection_decides() {
        let found = Restriction::default();
        assert_eq!((found.known(), found.is_restricted()), (None, false));
        assert!(found.note(true) && found.note(false) && found.is_restricted());
        assert!(!Restriction::of_address(Some(false)).note(true));
    }
}
