//! The only source of chance: a small generator, seeded by the run.

/// `SplitMix64`: any seed is a good one.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator for a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number from `low` to `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high.saturating_sub(low) + 1)
    }

    /// An index of a sequence of this length, which is not empty.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.bits() % (length.max(1) as u64)).unwrap_or(0)
    }
}
