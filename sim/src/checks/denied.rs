//! An attempt that is refused for good asks no more.

use leasehold::simulation::Answered;

use super::{Books, Promise};
use crate::world::{Content, World};

/// What the server says of a right that is missing.
pub(crate) const DENIED: &str = "the user lacks a right";

impl Books {
    /// A client hears these answers.
    pub(crate) fn note_denied(&mut self, content: &Content, answers: &[Answered]) {
        for (attempt, answer) in content.attempts().into_iter().zip(answers) {
            if answer.as_ref().is_err_and(|failed| failed.message == DENIED) {
                self.denied.extend(attempt);
            }
        }
    }
}

impl World {
    /// A client sends this.
    pub(crate) fn check_denied(&mut self, content: &Content) {
        for attempt in content.attempts().into_iter().flatten() {
            if self.books.denied.contains(&attempt) {
                self.broken(Promise::DenialEnds, || {
                    format!("{attempt:?} asks again after it was refused for good")
                });
            }
        }
    }
}
