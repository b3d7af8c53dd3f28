//! What a section has of the locks of a run: which locks, and which others may be inside with it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::pauses::Ns;

/// A lock of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lock {
    /// The mutex: the only lock of a peer.
    #[default]
    Mutex,
    /// A semaphore.
    Semaphore,
    /// A read-write lock.
    ReadWrite,
    /// A reentrant mutex.
    Reentrant,
    /// An election.
    Election,
    /// One of the mutexes that are acquired together.
    Set(u8),
    /// Once-per-period work.
    OncePer,
}

impl Lock {
    /// The locks that are free or busy together are one group: who acquires a set has some of its mutexes before it has all.
    #[must_use]
    pub fn group(self) -> Self {
        match self {
            Self::Set(_) => Self::Set(0),
            lock => lock,
        }
    }

    /// Whether its waiters are served in their order. A set waits for one mutex after the other, and once-per-period work is polled.
    #[must_use]
    pub fn has_order(self) -> bool {
        !matches!(self, Self::Set(_) | Self::OncePer)
    }
}

impl fmt::Display for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mutex => f.write_str("mutex"),
            Self::Semaphore => f.write_str("semaphore"),
            Self::ReadWrite => f.write_str("read-write lock"),
            Self::Reentrant => f.write_str("reentrant mutex"),
            Self::Election => f.write_str("election"),
            Self::Set(number) => write!(f, "mutex {number} of the set"),
            Self::OncePer => f.write_str("once-per-period work"),
        }
    }
}

/// What one section has of one lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// All of it.
    #[default]
    Whole,
    /// Readers are inside together.
    Read,
    /// So many of all permits.
    Permits {
        /// Those of this section.
        weight: u32,
        /// All of the semaphore.
        of: u32,
    },
    /// The sections of this owner are inside together.
    Owner(u32),
    /// All of it, and no other start for a while.
    Start {
        /// The time from one start to the next one, at least.
        retained: Ns,
    },
}

impl Share {
    /// Whether two sections may be inside together, as far as the other ones leave room.
    #[must_use]
    pub fn admits(self, other: Self) -> bool {
        match (self, other) {
            (Self::Read, Self::Read) | (Self::Permits { .. }, Self::Permits { .. }) => true,
            (Self::Owner(one), Self::Owner(other)) => one == other,
            _ => false,
        }
    }

    /// How many permits it takes.
    #[must_use]
    pub fn weight(self) -> u32 {
        match self {
            Self::Permits { weight, .. } => weight,
            _ => 0,
        }
    }

    /// Whether an attempt for it need not wait while these are inside, if no other one waits before it. An owner's attempts in other processes
    /// wait for their re-check also if the owner is inside.
    #[must_use]
    pub fn fits(self, inside: &[Self]) -> bool {
        match self {
            Self::Read => inside.iter().all(|share| self.admits(*share)),
            Self::Permits { weight, of } => {
                inside.iter().map(|share| share.weight()).sum::<u32>() + weight <= of
            }
            Self::Whole | Self::Owner(_) | Self::Start { .. } => inside.is_empty(),
        }
    }

    /// Whether its section writes to the resource. Those that may be inside with sections of higher tokens only read.
    #[must_use]
    pub fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::Permits { .. })
    }
}

/// What an attempt asks of one lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The lock.
    pub lock: Lock,
    /// What the section has of it.
    pub share: Share,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_readers_permits_and_one_owner_are_inside_together() {
        let permits = |weight| Share::Permits { weight, of: 4 };
        let start = Share::Start { retained: 9 };
        let shares = [Share::Whole, Share::Read, permits(1), Share::Owner(1), Share::Owner(2), start];
        for one in shares {
            for other in shares {
                let together = one == other && !matches!(one, Share::Whole | Share::Start { .. });
                assert_eq!(one.admits(other), together, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn attempt_fits_beside_what_leaves_it_room() {
        let permits = |weight| Share::Permits { weight, of: 4 };
        assert!(permits(2).fits(&[permits(1), permits(1)]) && !permits(3).fits(&[permits(1), permits(1)]));
        assert!(Share::Read.fits(&[Share::Read]) && !Share::Read.fits(&[Share::Whole]));
        assert!(Share::Whole.fits(&[]) && !Share::Whole.fits(&[Share::Read]));
    }
}
