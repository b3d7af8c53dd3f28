//! One-way names: for secrets that only a client and the store know, and for names that are too long.
//!
//! A client's id is random, and it is the client's only proof of identity: any command that contains the id acts for the
//! client. Inspection therefore shows only a digest of it. A digest has 128 bits, so it is as hard to guess as the id. SHA-1 is weak
//! against chosen collisions, which are of no use here, and not against preimages.

use leasehold_core::{Acquisition, ClientId};
use sha1_smol::Sha1;

/// The name of a client that inspection shows.
pub fn client_name(client: ClientId) -> String {
    format!("{:032x}", digest("client", &client.get().to_be_bytes()))
}

/// The name of a client's channel, which users of the store see who have no other right.
pub fn channel_name(client: ClientId) -> String {
    format!("{:032x}", digest("channel", &client.get().to_be_bytes()))
}

/// A short name that stands for a name which is too long.
pub(crate) fn short_name(name: &str) -> String {
    format!("{:032x}", digest("name", name.as_bytes()))
}

/// The secret part of a detached lease's id. It does not reveal the ids of the same client's other leases.
pub fn lease_secret(acquisition: Acquisition) -> u128 {
    let Acquisition { client, sequence } = acquisition;
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(&client.get().to_be_bytes());
    bytes[16..].copy_from_slice(&sequence.to_be_bytes());
    digest("lease", &bytes)
}

fn digest(purpose: &str, secret: &[u8]) -> u128 {
    let mut hash = Sha1::new();
    hash.update(purpose.as_bytes());
    hash.update(secret);
    hash.digest().bytes().iter().take(16).fold(0, |digest, byte| digest << 8 | u128::from(*byte))
}
