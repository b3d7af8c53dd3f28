//! Who does what in the explorations of a lock.

use crate::explorer::{Fault, Part, Scenario, Stay};
use crate::recipe::Role;

/// Enough for all interleavings where there is one server.
const MOST_STATES: usize = 100_000;

/// What a lock has, as far as it matters to who does what.
pub(super) struct Traits<'a> {
    pub(super) has_readers: bool,
    pub(super) renews: bool,
    pub(super) reenters: bool,
    /// After a try it subscribes, after the next one it waits for word, and then it tries again.
    pub(super) waits: bool,
    /// How many seconds may pass at once.
    pub(super) passes: &'a [u64],
    pub(super) faults: &'a [Fault],
}

/// Two and three clients, in the parts that a lock has, without anything wrong and with each fault.
pub(super) fn plays(traits: &Traits<'_>) -> Vec<Scenario> {
    let (writer, reader) = (Role::Writer, Role::Reader);
    let mut casts: Vec<(Vec<Role>, u32, Stay)> =
        vec![(vec![writer; 2], 2, Stay::Plain), (vec![writer; 3], 1, Stay::Plain)];
    if traits.waits {
        casts.extend([(vec![writer; 2], 3, Stay::Plain), (vec![writer; 3], 3, Stay::Plain)]);
    }
    if traits.has_readers {
        let mixed = [
            vec![reader, reader],
            vec![reader, writer],
            vec![reader, reader, writer],
            vec![reader, writer, writer],
        ];
        casts.extend(mixed.map(|roles| (roles, 1, Stay::Plain)));
    }
    if traits.renews {
        casts.push((vec![writer; 2], 1, Stay::Renews));
    }
    if traits.reenters {
        casts.push((vec![writer; 2], 1, Stay::Twice));
    }
    let plays = casts.into_iter().flat_map(|(roles, tries, stay)| {
        let few = roles.len() == 2;
        let parts: Vec<_> = roles.iter().map(|role| Part { role: *role, tries, stay }).collect();
        let (most_passes, most_deaths) = if few { (2, 1) } else { (1, 0) };
        let faults = [Fault::None].into_iter().chain(traits.faults.iter().copied());
        faults.map(move |fault| {
            // Once something else is wrong, nobody needs to die for it.
            let most_deaths = if fault == Fault::None { most_deaths } else { 0 };
            let (parts, passes) = (parts.clone(), traits.passes.to_vec());
            Scenario { parts, fault, passes, most_passes, most_deaths, most_states: MOST_STATES }
        })
    });
    plays.collect()
}
