//! The entries of a table, and an index of those that have a named owner: an owner's lock must not cost more for all the other leases of
//! the client.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use leasehold_core::{Acquisition, Owner, Resource};

use super::entry::Entry;
use super::ids::{EntryId, UncountedId};
use super::number_map::NumberMap;

/// The entries by their ids. An entry never changes its owner or resource.
#[derive(Default)]
pub(super) struct Entries {
    by_number: NumberMap<EntryId, Box<Entry>>,
    /// The entries of attempts that are not counted, by their own numbers: others may choose those, so the map is one that no choice slows down.
    uncounted: HashMap<UncountedId, EntryId>,
    /// The numbers of an owner's entries for a resource. None is empty.
    by_owner: HashMap<Owner, HashMap<Arc<Resource>, BTreeSet<EntryId>>>,
}

impl Entries {
    pub(super) fn insert(&mut self, number: EntryId, entry: Box<Entry>) {
        if let Some(owner) = &entry.owner {
            let resources = self.by_owner.entry(owner.clone()).or_default();
            resources.entry(entry.resource.clone()).or_default().insert(number);
        }
        if let Some(uncounted) = entry.uncounted {
            self.uncounted.insert(uncounted, number);
        }
        self.by_number.insert(number, entry);
    }

    /// The entry of this attempt, as a push names it.
    pub(super) fn of_attempt(&self, acquisition: Acquisition) -> Option<EntryId> {
        match UncountedId::of(acquisition) {
            None => Some(acquisition.into()),
            Some(uncounted) => self.uncounted.get(&uncounted).copied(),
        }
    }

    pub(super) fn remove(&mut self, number: EntryId) -> Option<Box<Entry>> {
        let entry = self.by_number.remove(number)?;
        if let Some(owner) = &entry.owner {
            self.forget(owner, &entry.resource, number);
        }
        if let Some(uncounted) = entry.uncounted
            && self.uncounted.get(&uncounted) == Some(&number)
        {
            self.uncounted.remove(&uncounted);
        }
        Some(entry)
    }

    fn forget(&mut self, owner: &Owner, resource: &Resource, number: EntryId) {
        let Some(resources) = self.by_owner.get_mut(owner) else { return };
        let Some(numbers) = resources.get_mut(resource) else { return };
        numbers.remove(&number);
        if numbers.is_empty() {
            resources.remove(resource);
        }
        if resources.is_empty() {
            self.by_owner.remove(owner);
        }
    }

    pub(super) fn get_mut(&mut self, number: &EntryId) -> Option<&mut Box<Entry>> {
        self.by_number.get_mut(number)
    }

    /// The owner's entries for this resource, in the order of their numbers.
    pub(super) fn of_owner(
        &self,
        resource: &Resource,
        owner: &Owner,
    ) -> impl Iterator<Item = (EntryId, &Entry)> {
        let numbers = self.by_owner.get(owner).and_then(|resources| resources.get(resource));
        let entry = |number: &EntryId| Some((*number, &**self.by_number.get(number)?));
        numbers.into_iter().flatten().filter_map(entry)
    }
}

impl Deref for Entries {
    type Target = NumberMap<EntryId, Box<Entry>>;

    fn deref(&self) -> &Self::Target {
        &self.by_number
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{Acquire, AcquireMachine, Acquisition, ClientId, Kind, LeaseTerms, LocalTime, Name};

    use super::super::entry::MinHold;
    use super::*;

    fn resource(name: &str) -> Arc<Resource> {
        Arc::new(Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() })
    }

    fn entry(name: &str, owner: Option<&str>) -> Box<Entry> {
        let ttl = Duration::from_secs(9);
        let command = Acquire::exclusive(Acquisition { client: ClientId::new(1), sequence: 1 }, ttl);
        let terms =
            LeaseTerms { ttl, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas: 0 };
        let machine = AcquireMachine::new(command, None, LocalTime::ZERO);
        Box::new(Entry::new(resource(name), owner.map(Owner::new), terms, MinHold::default(), machine))
    }

    fn of(entries: &Entries, name: &str, owner: &str) -> Vec<EntryId> {
        entries.of_owner(&resource(name), &Owner::new(owner)).map(|(number, _)| number).collect()
    }

    #[test]
    fn owner_has_its_own_entries_of_one_lock_and_no_others() {
        let mut entries = Entries::default();
        let all = [
            ("a", Some("this")),
            ("a", Some("other")),
            ("b", Some("this")),
            ("a", None),
            ("a", Some("this")),
        ];
        for (number, (name, owner)) in (10..).zip(all) {
            entries.insert(number.into(), entry(name, owner));
        }
        assert_eq!(of(&entries, "a", "this"), [10, 14]);
        assert_eq!(of(&entries, "b", "this"), [12]);
        assert_eq!(of(&entries, "a", "other"), [11]);
        assert!(of(&entries, "b", "other").is_empty());
        assert!(entries.remove(10.into()).is_some() && entries.remove(10.into()).is_none());
        assert_eq!(of(&entries, "a", "this"), [14]);
    }

    #[test]
    fn owner_without_entries_is_forgotten() {
        let mut entries = Entries::default();
        for (number, name) in [(1, "a"), (2, "a"), (3, "b")] {
            entries.insert(number.into(), entry(name, Some("this")));
        }
        entries.remove(1.into());
        entries.remove(3.into());
        assert_eq!(entries.by_owner[&Owner::new("this")].len(), 1);
        entries.remove(2.into());
        assert!(entries.by_owner.is_empty() && entries.is_empty());
    }
}
