//! What planted bugs of bridges change in their commands on keys and in the answers.

use std::time::Duration;

use leasehold::simulation::{KeyAnswer, KeyAnswered, KeyCommand};

use crate::executor::ProcessId;
use crate::planted::Planted;
use crate::world::World;

/// The most values of one attempt.
const MOST_VALUES: u128 = 1_000;

impl World {
    /// A bridge that trusts its lock from the answer on does so for as much longer as the answer took. Instead of that the key expires
    /// earlier by this time: both overlap by the same.
    pub(crate) fn count_from_answer(&mut self, call: u64, answers: &[KeyAnswered]) {
        let Some(call) = self.bridging.calls.get(&call) else { return };
        let Some(connection) = call.connection else { return };
        if self.planted != Some(Planted::KeyTrustFromAnswer) || self.is_program(call.process) {
            return;
        }
        let took = Duration::from_micros(self.now - call.called_at);
        let server = self.connections[&connection].server;
        let keys = &mut self.servers[server].data.keys;
        for (command, answer) in call.commands.iter().zip(answers) {
            if let KeyCommand::Take(key, holder, _) | KeyCommand::Renew(key, holder, _) = command
                && matches!(answer, Ok(KeyAnswer::Okay | KeyAnswer::Number(1)))
            {
                keys.shorten(key, holder, took);
            }
        }
    }

    /// A bridge that does not give up a command to take a lock has the same value in the next one.
    pub(crate) fn with_first_values(
        &mut self,
        process: ProcessId,
        mut commands: Vec<KeyCommand>,
    ) -> Vec<KeyCommand> {
        if self.planted != Some(Planted::KeyTakeReused) || self.is_program(process) {
            return commands;
        }
        for command in &mut commands {
            let is_last = matches!(command, KeyCommand::Take(..) | KeyCommand::Renew(..));
            let (KeyCommand::Take(_, value, _)
            | KeyCommand::Renew(_, value, _)
            | KeyCommand::Release(_, value)) = command
            else {
                continue;
            };
            let Ok(number) = u128::from_str_radix(value, 16) else { continue };
            let Some((first, last)) = self.bridging.drawn.range_mut(..=number).next_back() else { continue };
            if number - first < MOST_VALUES {
                *value = format!("{first:032x}");
                *last = if is_last { number } else { *last };
            }
        }
        commands
    }

    /// The bridge does not know that.
    pub(crate) fn with_last_values(
        &self,
        process: ProcessId,
        mut answers: Vec<KeyAnswered>,
    ) -> Vec<KeyAnswered> {
        if self.planted != Some(Planted::KeyTakeReused) || self.is_program(process) {
            return answers;
        }
        for answer in &mut answers {
            if let Ok(KeyAnswer::Text(value)) = answer
                && let Ok(number) = u128::from_str_radix(value, 16)
                && let Some(last) = self.bridging.drawn.get(&number)
            {
                *value = format!("{last:032x}");
            }
        }
        answers
    }
}
