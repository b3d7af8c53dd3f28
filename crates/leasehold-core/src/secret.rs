//! The secrets by which a client recognises the push of a grant.
//!
//! Any user of a server may be able to send bytes to a client: the names of the channels are public. So a client sends a secret with
//! each `Acquire` that may be queued. The store keeps it with the queue entry, and a push of the grant *proves* that its sender knows
//! it. The push does not contain the secret: a listener learns nothing that it could use in another push, and a push that it
//! repeats only says what the store has said. Each `Acquire` has a new secret.

use core::fmt;

use sha1_smol::Sha1;

use crate::id::Acquisition;

/// A client's random key, from which the secrets of its attempts are derived. It never leaves the client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SecretKey(u128);

impl SecretKey {
    /// The caller provides the randomness.
    #[must_use]
    pub const fn new(number: u128) -> Self {
        Self(number)
    }

    /// The secret of an attempt's `Acquire` with this number. Without the key it cannot be told from a random one.
    #[must_use]
    pub fn secret(self, acquisition: Acquisition, number: u32) -> GrantSecret {
        let Acquisition { client, sequence } = acquisition;
        GrantSecret(digest(&[
            &self.0.to_be_bytes(),
            &client.get().to_be_bytes(),
            &sequence.to_be_bytes(),
            &number.to_be_bytes(),
        ]))
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(..)")
    }
}

/// A secret that a client and a store share about one `Acquire`. No command lists it, and no log shows it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GrantSecret([u8; 8]);

impl GrantSecret {
    /// For attempts that do not wait: no client believes a push that proves it.
    pub const UNUSED: Self = Self([0; 8]);

    /// The secret with these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 8] {
        self.0
    }

    /// The secret for one node of a quorum: what is heard at one node proves nothing at another.
    #[must_use]
    pub fn for_node(self, node: u32) -> Self {
        Self(digest(&[&self.0, &node.to_be_bytes()]))
    }
}

impl fmt::Debug for GrantSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantSecret(..)")
    }
}

/// Shows that the sender of a push knew the secret of the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantProof([u8; 8]);

impl GrantProof {
    /// Proves nothing.
    pub const NONE: Self = Self([0; 8]);

    /// The proof with these bytes, which may prove nothing.
    #[must_use]
    pub const fn new(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 8] {
        self.0
    }
}

/// The first half of a SHA-1. SHA-1 is weak against chosen collisions, which are of no use here, and not against preimages; the
/// parts have fixed lengths. Redis offers no other hash to scripts.
pub(crate) fn digest(parts: &[&[u8]]) -> [u8; 8] {
    let mut hash = Sha1::new();
    parts.iter().for_each(|part| hash.update(part));
    let bytes = hash.digest().bytes();
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    first
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use core::time::Duration;

    use super::*;
    use crate::command::Grant;
    use crate::id::ClientId;
    use crate::time::StoreTime;
    use crate::token::{Token, TokenRange};

    const ATTEMPT: Acquisition = Acquisition { client: ClientId::new(7), sequence: 1 };

    fn grant(first: u64, last: u64, ms: u64) -> Grant {
        let tokens = TokenRange { first: Token::new(first).unwrap(), last: Token::new(last).unwrap() };
        Grant { tokens, valid_for: Duration::from_millis(ms), is_plain: false }
    }

    #[test]
    fn every_acquire_of_every_attempt_and_client_has_its_own_secret() {
        let key = SecretKey::new(1);
        let other_attempt = Acquisition { sequence: 2, ..ATTEMPT };
        let other_client = Acquisition { client: ClientId::new(8), ..ATTEMPT };
        let secrets = [
            key.secret(ATTEMPT, 1),
            key.secret(ATTEMPT, 2),
            key.secret(other_attempt, 1),
            key.secret(other_client, 1),
            SecretKey::new(2).secret(ATTEMPT, 1),
            key.secret(ATTEMPT, 1).for_node(0),
            key.secret(ATTEMPT, 1).for_node(1),
        ];
        for (index, secret) in secrets.iter().enumerate() {
            assert!(secrets[index + 1..].iter().all(|other| other != secret), "{index}");
        }
        assert_eq!(key.secret(ATTEMPT, 1), secrets[0], "it is the same again");
    }

    #[test]
    fn proof_covers_everything_that_the_push_says() {
        let secret = GrantSecret::new(*b"8 bytes!");
        let at = StoreTime::from_micros(5);
        let proofs = [
            secret.prove(at, &grant(7, 8, 3_000)),
            secret.prove(StoreTime::from_micros(6), &grant(7, 8, 3_000)),
            secret.prove(at, &grant(6, 8, 3_000)),
            secret.prove(at, &grant(7, 9, 3_000)),
            secret.prove(at, &grant(7, 8, 3_001)),
            GrantSecret::new(*b"8 bytes?").prove(at, &grant(7, 8, 3_000)),
        ];
        for (index, proof) in proofs.iter().enumerate() {
            assert!(proofs[index + 1..].iter().all(|other| other != proof), "{index}");
        }
    }

    #[test]
    fn proof_is_the_digest_that_the_scripts_compute() {
        // redis.sha1hex('8 bytes!' .. struct.pack('>dddd', 5, 7, 8, 3000000))
        let proof = GrantSecret::new(*b"8 bytes!").prove(StoreTime::from_micros(5), &grant(7, 8, 3_000));
        assert_eq!(u64::from_be_bytes(proof.bytes()), 0x5c95_96e6_c30c_53d8);
    }

    #[test]
    fn secrets_are_not_shown() {
        let key = SecretKey::new(0x1234);
        assert_eq!(format!("{key:?}"), "SecretKey(..)");
        assert_eq!(format!("{:?}", key.secret(ATTEMPT, 1)), "GrantSecret(..)");
    }
}
