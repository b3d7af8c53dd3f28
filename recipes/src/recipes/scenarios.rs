//! The scenarios in which a lock is explored.

use crate::explorer::{Fault, HolderAction, Participant, Scenario};
use crate::recipe::Role;

/// Enough for all interleavings on one server.
const MOST_STATES: usize = 100_000;

/// The features of a lock that determine its scenarios.
pub(super) struct Traits<'a> {
    pub(super) has_readers: bool,
    pub(super) renews: bool,
    pub(super) reenters: bool,
    /// After its first attempt a client subscribes, and after each further one it waits for a message.
    pub(super) waits: bool,
    /// By how many seconds time may advance at once.
    pub(super) passes: &'a [u64],
    pub(super) faults: &'a [Fault],
}

/// Two and three clients that use all features of the lock, without a fault and with each fault.
pub(super) fn scenarios(traits: &Traits<'_>) -> Vec<Scenario> {
    let (writer, reader) = (Role::Writer, Role::Reader);
    let mut groups: Vec<(Vec<Role>, u32, HolderAction)> =
        vec![(vec![writer; 2], 2, HolderAction::None), (vec![writer; 3], 1, HolderAction::None)];
    if traits.waits {
        groups.extend([(vec![writer; 2], 3, HolderAction::None), (vec![writer; 3], 3, HolderAction::None)]);
    }
    if traits.has_readers {
        let mixed = [
            vec![reader, reader],
            vec![reader, writer],
            vec![reader, reader, writer],
            vec![reader, writer, writer],
        ];
        groups.extend(mixed.map(|roles| (roles, 1, HolderAction::None)));
    }
    if traits.renews {
        groups.push((vec![writer; 2], 1, HolderAction::Renew));
    }
    if traits.reenters {
        groups.push((vec![writer; 2], 1, HolderAction::Reenter));
    }
    let scenarios = groups.into_iter().flat_map(|(roles, tries, action)| {
        let (most_passes, most_deaths) = if roles.len() == 2 { (2, 1) } else { (1, 0) };
        let participants: Vec<_> =
            roles.iter().map(|role| Participant { role: *role, tries, action }).collect();
        let faults = [Fault::None].into_iter().chain(traits.faults.iter().copied());
        faults.map(move |fault| {
            // A fault alone is enough: a crash as well would only lengthen the search.
            let most_deaths = if fault == Fault::None { most_deaths } else { 0 };
            let (participants, passes) = (participants.clone(), traits.passes.to_vec());
            Scenario { participants, fault, passes, most_passes, most_deaths, most_states: MOST_STATES }
        })
    });
    scenarios.collect()
}
