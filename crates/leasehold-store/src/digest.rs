//! One-way names: for secrets that only a client and the store know, and for names that are too long.
//!
//! A client's id is random, and it is the client's only proof of identity: any command that contains the id acts for the
//! client. Inspection therefore shows only a digest of it. A digest has 128 bits, so it is as hard to guess as the id. SHA-1 is weak
//! against chosen collisions, which are of no use here, and not against preimages.

use std::time::Duration;

use leasehold_core::{Acquisition, ClientId, FIRST_REQUESTED, FIRST_UNCOUNTED, Owner, Resource};
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

/// What a named attempt asks for.
#[derive(Clone, Copy, Debug)]
pub struct RequestedTerms<'a> {
    /// The capacity of the resource.
    pub capacity: u32,
    /// How much of it.
    pub weight: u32,
    /// The owner of a reentrant lock.
    pub owner: Option<&'a Owner>,
    /// How long the lease is to last at least.
    pub min_lifetime: Duration,
}

/// The id of the attempt that a caller names at a resource: the same at each client of the store. With other terms it is another attempt.
pub fn requested_attempt(resource: &Resource, terms: RequestedTerms<'_>, request: &[u8]) -> Acquisition {
    let RequestedTerms { capacity, weight, owner, min_lifetime } = terms;
    let (kind, name, micros) = (resource.kind.as_str(), resource.name.as_str(), min_lifetime.as_micros());
    let owner = owner
        .map_or_else(String::new, |owner| format!("{:032x}", digest("owner", owner.as_str().as_bytes())));
    // No part can be read as the beginning of the next one.
    let terms = format!("{kind}\0{name}\0{capacity}\0{weight}\0{micros}\0{owner}\0");
    let parts = [terms.as_bytes(), request].concat();
    let number = u64::try_from(digest("request number", &parts) >> 64).unwrap_or(u64::MAX);
    let client = ClientId::new(digest("request", &parts));
    Acquisition { client, sequence: FIRST_REQUESTED | number >> 3 }
}

/// The id of an attempt from random numbers.
pub fn random_attempt(client: u128, number: u64) -> Acquisition {
    Acquisition { client: ClientId::new(client), sequence: FIRST_UNCOUNTED | number >> 3 }
}

fn digest(purpose: &str, secret: &[u8]) -> u128 {
    let mut hash = Sha1::new();
    hash.update(purpose.as_bytes());
    hash.update(secret);
    hash.digest().bytes().iter().take(16).fold(0, |digest, byte| digest << 8 | u128::from(*byte))
}
