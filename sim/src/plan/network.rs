//! The network of a run.

use super::Micros;

/// The network without faults.
#[derive(Clone, Debug)]
pub struct NetworkPlan {
    /// The shortest delay of a message.
    pub base: Micros,
    /// The usual extra delay.
    pub jitter: Micros,
    /// Without a connection, a command waits for one for a while. Otherwise it fails at once.
    pub waits_for_connection: bool,
}

impl NetworkPlan {
    /// The longest delay of a message.
    #[must_use]
    pub fn slowest(&self) -> Micros {
        self.base + 21 * self.jitter
    }
}
