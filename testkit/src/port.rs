//! Ports of the loopback address that stay free for one server, also while it is stopped.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

/// Below the ports that systems give to outgoing connections, so that none of those takes a stopped server's port.
const FIRST: u16 = 12_000;
const COUNT: u16 = 10_000;

/// What Redis adds to the port of a cluster's node to get the one where nodes speak to each other.
const CLUSTER_BUS: u16 = 10_000;

/// A port that no other claim on this machine has, for as long as this value lives.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// TCP is the server's. The same number's UDP, which no server uses, says to other tests that it is taken.
    _claim: UdpSocket,
}

impl Port {
    /// Claims any port whose cluster bus is free as well.
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

    #[test]
    fn a_claimed_port_is_not_claimed_again_until_it_is_given_up() {
        let port = Port::claim();
        let number = port.number();
        assert!(Port::try_claim(number).is_none());
        drop(port);
        assert!(Port::try_claim(number).is_some());
    }

    #[test]
    fn a_port_is_not_claimed_while_another_program_listens_on_it_or_on_its_cluster_bus() {
        let number = Port::claim().number();
        for taken in [number, number + CLUSTER_BUS] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, taken)).unwrap();
            assert!(Port::try_claim(number).is_none());
            drop(listener);
            assert!(Port::try_claim(number).is_some());
        }
    }
}
