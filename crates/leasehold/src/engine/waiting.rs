//! The waiting tasks of a local queue, in the order of their ticket numbers.
//!
//! Most queues have a single task, which needs no allocation here.

use std::collections::BTreeMap;
use std::task::Waker;

use super::ids::TicketNumber;

/// The waker of a task; none before its first poll, and once it was woken.
type Slot = Option<Waker>;

/// Waiting tasks by ticket number. `first` has the lowest number, and is absent only if there is no task.
#[derive(Default)]
pub(super) struct Waiting {
    first: Option<(TicketNumber, Slot)>,
    others: BTreeMap<TicketNumber, Slot>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    /// Adds a task. Numbers may come out of order, because they are drawn before the table's mutex is taken.
    pub(super) fn insert(&mut self, number: TicketNumber) {
        let behind = match &mut self.first {
            None => {
                self.first = Some((number, None));
                return;
            }
            Some((first, _)) if *first < number => (number, None),
            Some(first) => std::mem::replace(first, (number, None)),
        };
        self.others.insert(behind.0, behind.1);
    }

    pub(super) fn get_mut(&mut self, number: TicketNumber) -> Option<&mut Slot> {
        match &mut self.first {
            Some((first, slot)) if *first == number => Some(slot),
            _ => self.others.get_mut(&number),
        }
    }

    pub(super) fn first_mut(&mut self) -> Option<(TicketNumber, &mut Slot)> {
        self.first.as_mut().map(|(number, slot)| (*number, slot))
    }

    /// Removes a task. Returns its waker, which the caller must drop with the mutex free.
    pub(super) fn remove(&mut self, number: TicketNumber) -> Slot {
        if self.first.as_ref().is_some_and(|(first, _)| *first == number) {
            return std::mem::replace(&mut self.first, self.others.pop_first())?.1;
        }
        self.others.remove(&number)?
    }

    /// Removes all tasks.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (TicketNumber, Slot)> {
        self.first.take().into_iter().chain(std::mem::take(&mut self.others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_kept_in_the_order_of_their_numbers() {
        let mut waiting = Waiting::default();
        assert!(waiting.is_empty() && waiting.first_mut().is_none());
        for number in [5, 3, 9, 7] {
            waiting.insert(number.into());
        }
        assert_eq!((waiting.len(), waiting.first_mut().map(|(number, _)| number)), (4, Some(3.into())));
        *waiting.get_mut(5.into()).unwrap() = Some(Waker::noop().clone());
        waiting.remove(3.into());
        assert_eq!(
            waiting.first_mut().map(|(number, slot)| (number, slot.is_some())),
            Some((5.into(), true))
        );
        waiting.remove(9.into());
        assert!(waiting.get_mut(9.into()).is_none() && waiting.remove(9.into()).is_none());
        assert_eq!(waiting.take().map(|(number, _)| number).collect::<Vec<_>>(), [5, 7]);
        assert!(waiting.is_empty());
    }
}
