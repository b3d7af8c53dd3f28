//! Which locks are probably contended or shared. A script that is told so looks first where such a lock is stored; if that is wrong, it
//! costs the server one command more.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use leasehold_core::{Answer, Command, Reply, Resource};

/// A lock takes the place of another one, which is then forgotten.
const PLACES: usize = 256;

/// What the answers of a server have shown.
pub(super) struct Contended {
    /// Any has been: without, nothing is looked up.
    any: AtomicBool,
    marks: [AtomicU32; PLACES],
}

impl Default for Contended {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), marks: [const { AtomicU32::new(0) }; PLACES] }
    }
}

impl Contended {
    /// Whether this lock is probably contended or shared.
    pub(super) fn expects(&self, resource: &Resource) -> bool {
        self.any.load(Ordering::Relaxed) && {
            let (place, mark) = mark_of(resource);
            self.marks[place].load(Ordering::Relaxed) == mark
        }
    }

    /// Learns from the answer to a command.
    pub(super) fn note(&self, resource: &Resource, command: &Command, answer: &Answer) {
        let is_contended = match (command, &answer.reply) {
            (_, Reply::Queued(_) | Reply::Renewed { contended: true, .. }) => true,
            (_, Reply::Granted(grant)) if grant.is_plain => false,
            (Command::Acquire(acquire), Reply::Granted(_)) if acquire.capacity > 1 => true,
            _ => return,
        };
        if is_contended {
            self.any.store(true, Ordering::Relaxed);
        } else if !self.any.load(Ordering::Relaxed) {
            return;
        }
        let (place, mark) = mark_of(resource);
        if is_contended {
            self.marks[place].store(mark, Ordering::Relaxed);
        } else {
            let _ = self.marks[place].compare_exchange(mark, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Where the lock is marked, and by what, which is not zero. Two locks with one mark are taken for each other.
fn mark_of(resource: &Resource) -> (usize, u32) {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(resource);
    let bytes = hash.to_le_bytes();
    (usize::from(bytes[0]), u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) | 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{
        Acquire, Acquisition, ClientId, Grant, Kind, Name, Queued, StoreTime, Token, TokenRange,
    };

    use super::*;

    #[test]
    fn lock_is_contended_from_a_queued_attempt_to_a_plain_grant() {
        let contended = Contended::default();
        let resource = |name: &str| Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let attempt = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(1)));
        let answer = |reply| Answer { at: StoreTime::ZERO, reply };
        let granted = |is_plain| {
            let token = Token::new(1).unwrap();
            let tokens = TokenRange { first: token, last: token };
            answer(Reply::Granted(Grant { tokens, valid_for: Duration::ZERO, is_plain }))
        };
        let queued = answer(Reply::Queued(Queued { is_head: true, repoll_at: StoreTime::ZERO }));
        assert!(!contended.expects(&resource("a")));
        contended.note(&resource("a"), &attempt, &queued);
        assert!(contended.expects(&resource("a")) && !contended.expects(&resource("b")));
        for reply in [granted(false), answer(Reply::Busy), answer(Reply::Released)] {
            contended.note(&resource("a"), &attempt, &reply);
            assert!(contended.expects(&resource("a")));
        }
        contended.note(&resource("b"), &attempt, &granted(true));
        assert!(contended.expects(&resource("a")));
        contended.note(&resource("a"), &attempt, &granted(true));
        assert!(!contended.expects(&resource("a")));
    }
}
