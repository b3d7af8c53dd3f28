//! A map by ids that are drawn from the session's counter.
//!
//! The client itself draws the numbers one after the other, so a multiplication is hash enough: no other program can choose
//! numbers that collide.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::{Deref, DerefMut};

/// An emptied map keeps at most this many times the room that it needs.
const MAX_SPARE: usize = 8;
/// Below this capacity a map keeps its room.
const MIN_CAPACITY: usize = 256;

/// A map from numbers of the session's counter, or from hashes. Its order is arbitrary.
pub(super) struct NumberMap<K, T>(HashMap<K, T, BuildHasherDefault<NumberHasher>>);

impl<K, T> Default for NumberMap<K, T> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<K: Copy + Eq + Hash + Ord, T> NumberMap<K, T> {
    /// Removes a value, and frees memory after many removals.
    pub(super) fn remove(&mut self, number: K) -> Option<T> {
        let removed = self.0.remove(&number);
        let capacity = self.0.capacity();
        if capacity > MIN_CAPACITY && self.0.len() < capacity / MAX_SPARE {
            self.0.shrink_to(capacity / 2);
        }
        removed
    }

    /// The numbers in ascending order, for work whose order must not vary from run to run.
    pub(super) fn sorted_numbers(&self, keep: impl Fn(&T) -> bool) -> Vec<K> {
        let kept = self.0.iter().filter(|(_, value)| keep(value));
        let mut numbers: Vec<K> = kept.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers
    }
}

impl<K, T> Deref for NumberMap<K, T> {
    type Target = HashMap<K, T, BuildHasherDefault<NumberHasher>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<K, T> DerefMut for NumberMap<K, T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// Multiplicative hashing (Knuth, *The Art of Computer Programming*, volume 3, section 6.4).
#[derive(Default)]
pub(super) struct NumberHasher(u64);

/// 2^64 divided by the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // The map uses the highest and the lowest bits.
        let product = (self.0 ^ number).wrapping_mul(FACTOR);
        self.0 = product ^ (product >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::hash::BuildHasher as _;

    use super::*;

    #[test]
    fn map_gives_its_room_back_after_a_crowd_has_left() {
        let mut map = NumberMap::default();
        for number in 0..100_000 {
            map.insert(number, number);
        }
        let crowded = map.capacity();
        for number in 5..100_000 {
            assert_eq!(map.remove(number), Some(number));
        }
        assert!(map.capacity() < crowded / 50, "{} of {crowded}", map.capacity());
        assert_eq!(map.sorted_numbers(|number| *number != 3), [0, 1, 2, 4]);
    }

    #[test]
    fn map_halves_its_room_once_less_than_an_eighth_is_used() {
        let mut map = NumberMap::default();
        let mut numbers = 0..;
        while map.capacity() <= MIN_CAPACITY {
            let number = numbers.next().unwrap();
            map.insert(number, ());
        }
        let room = map.capacity();
        let mut numbers = map.sorted_numbers(|()| true).into_iter();
        while map.len() > room / MAX_SPARE {
            map.remove(numbers.next().unwrap());
            assert_eq!(map.capacity(), room);
        }
        map.remove(numbers.next().unwrap());
        let left = map.capacity();
        assert!((room / 2..room).contains(&left), "{left} of {room}");
        // A small map keeps it.
        for number in numbers {
            map.remove(number);
        }
        assert_eq!(map.capacity(), left);
    }

    /// The map chooses a place by the lowest bits, and compares the seven highest ones first.
    #[test]
    fn hashes_of_numbers_are_spread() {
        let hash = |number| BuildHasherDefault::<NumberHasher>::default().hash_one(number);
        for shift in [0, 8, 16, 24, 32] {
            let hashes: Vec<u64> = (0..256).map(|number: u64| hash(number << shift)).collect();
            let places = hashes.iter().map(|hash| hash % 1_024).collect::<BTreeSet<_>>().len();
            let tags = hashes.iter().map(|hash| hash >> 57).collect::<BTreeSet<_>>().len();
            assert!(places > 200 && tags > 100, "numbers << {shift}: {places} places, {tags} tags");
        }
    }

    #[test]
    fn hash_of_bytes_depends_on_each_and_on_their_order() {
        let hash = |bytes: &[u8]| {
            let mut hasher = NumberHasher::default();
            hasher.write(bytes);
            hasher.finish()
        };
        let hashes = [[1, 2], [2, 1], [1, 3], [3, 2], [3, 3]].map(|bytes| hash(&bytes));
        assert_eq!(BTreeSet::from(hashes).len(), hashes.len());
    }
}
