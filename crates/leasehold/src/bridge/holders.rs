//! The values with which one attempt takes a foreign lock.
//!
//! A command that takes a lock has no tombstone, so one without an answer may still run later. The command after it therefore has another
//! value. If another program deletes the lock, and the late command takes it once more, then its value is not the one that is renewed: the
//! loss is seen. A value is sent in one command only, so one that is seen on the server can't come again, and the attempt may
//! use it, unless it was released: that release may come late as well, and would end the lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use leasehold_core::LocalTime;

use super::foreign::Foreign;

pub(super) struct Holders {
    foreign: Foreign,
    random: u128,
    state: Mutex<State>,
}

struct State {
    current: String,
    /// How many values there were before.
    used: u32,
    given_up: Vec<GivenUp>,
}

/// A value of a command without an answer, or of one that was released.
struct GivenUp {
    holder: String,
    /// The command may run until then.
    until: LocalTime,
    is_released: bool,
}

impl Holders {
    pub(super) fn new(foreign: Foreign, random: u128) -> Self {
        let current = foreign.holder(random);
        Self { foreign, random, state: Mutex::new(State { current, used: 0, given_up: Vec::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn foreign(&self) -> &Foreign {
        &self.foreign
    }

    /// The value for the next command, or that of the lock.
    pub(super) fn current(&self) -> String {
        self.state().current.clone()
    }

    /// The command with this value has no answer, and may run until then.
    pub(super) fn give_up(&self, holder: &str, now: LocalTime, until: LocalTime) {
        let mut state = self.state();
        state.given_up.retain(|known| known.until > now);
        state.given_up.push(GivenUp { holder: holder.to_owned(), until, is_released: false });
        if state.current == holder {
            state.used += 1;
            state.current = self.foreign.holder(self.random.wrapping_add(u128::from(state.used)));
        }
    }

    /// All values so far are released, because the servers have not agreed. None of them is used again.
    pub(super) fn give_up_all(&self, now: LocalTime, until: LocalTime) {
        let current = self.current();
        self.give_up(&current, now, until);
        self.state().given_up.iter_mut().for_each(|known| known.is_released = true);
    }

    /// Every server has answered the command with this value, and its release.
    pub(super) fn settle(&self, holder: &str) {
        self.state().given_up.retain(|known| known.holder != holder);
    }

    /// The values that were given up and may still take the lock.
    pub(super) fn given_up(&self) -> Vec<String> {
        self.state().given_up.iter().map(|known| known.holder.clone()).collect()
    }

    /// Those of them that the attempt may use if they have taken the lock.
    pub(super) fn adoptable(&self) -> Vec<String> {
        let state = self.state();
        let kept = state.given_up.iter().filter(|known| !known.is_released);
        kept.map(|known| known.holder.clone()).collect()
    }

    /// A command that was given up has taken the lock.
    pub(super) fn adopt(&self, holder: &str) {
        let mut state = self.state();
        state.given_up.retain(|known| known.holder != holder);
        state.current = holder.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn value_of_an_unanswered_command_is_not_used_again_unless_it_has_the_lock() {
        let holders = Holders::new(Foreign::set_nx_px("jobs"), u128::MAX);
        let (now, first) = (LocalTime::default(), holders.current());
        assert_eq!(holders.current(), first);
        let until = now + Duration::from_secs(4);
        holders.give_up(&first, now, until);
        let second = holders.current();
        assert_ne!(second, first);
        assert_eq!(holders.given_up().join(","), first);
        holders.give_up(&second, until, until + Duration::from_secs(4));
        assert_eq!(holders.given_up().join(","), second, "the first one is too old");
        holders.adopt(&second);
        assert_eq!(holders.current(), second);
        assert!(holders.given_up().is_empty());
    }

    #[test]
    fn released_value_is_not_used_again_even_if_it_has_the_lock() {
        let holders = Holders::new(Foreign::set_nx_px("jobs"), 1);
        let (now, first) = (LocalTime::default(), holders.current());
        let until = now + Duration::from_secs(4);
        holders.give_up(&first, now, until);
        assert_eq!(holders.adoptable().join(","), first);
        let second = holders.current();
        holders.give_up_all(now, until);
        assert!(holders.adoptable().is_empty());
        assert_eq!(holders.given_up(), [first.clone(), second.clone()], "late commands are still released");
        assert!(holders.current() != first && holders.current() != second);
        holders.settle(&second);
        assert_eq!(holders.given_up(), [first], "the first command may still run");
    }
}
