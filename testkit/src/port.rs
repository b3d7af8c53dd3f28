//! Loopback ports that stay reserved for one server, also while it is stopped.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

/// Below the ephemeral ports, so that no outgoing connection takes a stopped server's port.
const FIRST: u16 = 12_000;
const COUNT: u16 = 10_000;

/// Offset of a cluster node's bus port.
const CLUSTER_BUS: u16 = 10_000;

/// A port that is reserved on this machine until this value is dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// The UDP port of the same number, which no server uses: it marks the TCP port as reserved for other tests.
    _claim: UdpSocket,
}

impl Port {
    /// Reserves a port whose cluster bus port is free too.
    #[must_use]
    pub fn claim() -> Self {
        let start = RandomState::new().hash_one(FIRST) % u64::from(COUNT);
        let start = u16::try_from(start).expect("it is below COUNT");
        (0..COUNT)
            .find_map(|step| Self::try_claim(FIRST + (start + step) % COUNT))
            .expect("a port is free on the loopback address")
    }

    fn try_claim(number: u16) -> Option<Self> {
        let claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        for number in [number, number + CLUSTER_BUS] {
            TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        }
        Some(Self { number, _claim: claim })
    }

    /// The port.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::wait_until;

    /// A process that another test starts has copies of the sockets until it runs its own program.
    fn until_free(number: u16) {
        wait_until("the port is free", || Port::try_claim(number).is_some());
    }

    #[test]
    fn a_claimed_port_is_reserved_until_it_is_dropped() {
        let port = Port::claim();
        let number = port.number();
        assert!(Port::try_claim(number).is_none());
        drop(port);
        until_free(number);
    }

    #[test]
    fn a_port_with_a_listener_on_it_or_on_its_cluster_bus_is_not_claimed() {
        let number = Port::claim().number();
        for taken in [number, number + CLUSTER_BUS] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, taken)).unwrap();
            assert!(Port::try_claim(number).is_none());
            drop(listener);
            until_free(number);
        }
    }
}
