//! The seam for the simulation of bridges: the lock of another library at the server of a simulated process. Of the libraries' locks it
//! has the one that [`Foreign::set_nx_px`](crate::bridge::Foreign::set_nx_px) describes.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Failure;
use leasehold_store::tasks::Tasks;
use leasehold_store::{
    BoxFuture, ForeignAnswer, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome, KeyWatch, StoreError,
    Watchers,
};

use super::answer::{CallFailed, Pending};
use crate::bridge::{RELEASE_VALUE, RENEW_VALUE};

/// A command on the key of a foreign lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyCommand {
    /// `SET key holder NX PX ttl`.
    Take(String, String, Duration),
    /// The script that sets the expiry of the key if it has this holder.
    Renew(String, String, Duration),
    /// The script that deletes the key if it has this holder.
    Release(String, String),
    /// `GET key`.
    Holder(String),
    /// `PTTL key`.
    TimeLeft(String),
    /// `EXISTS key`.
    Exists(String),
    /// Asks the server to report the next change of the key that the next command reads.
    Track,
}

/// A server's answer to one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyAnswer {
    /// No value.
    Nil,
    /// The status OK.
    Okay,
    /// A number.
    Number(i64),
    /// A string.
    Text(String),
}

/// An answer, or why there is none.
pub type KeyAnswered = Result<KeyAnswer, CallFailed>;

/// What the bridges of a simulated process stand on.
pub trait KeyHost: Send + Sync {
    /// Runs a task on the client's thread.
    fn spawn(&self, task: Pending<()>);

    /// Sends commands together from the client's thread, also if the future is dropped. One answer for each.
    fn run(&self, commands: Vec<KeyCommand>) -> Pending<Result<Vec<KeyAnswered>, CallFailed>>;

    /// Whether the server reports changes of keys.
    fn is_tracking(&self) -> bool;

    /// Random bytes.
    fn random(&self) -> [u8; 16];
}

/// The keys at the server of a simulated process.
pub(super) struct SimulatedKeys {
    pub(super) host: Arc<dyn KeyHost>,
    pub(super) watchers: Arc<Watchers>,
}

impl ForeignKeys for SimulatedKeys {
    fn tasks(&self) -> &Tasks {
        unreachable!("the simulation has no runtime: it spawns by itself")
    }

    fn spawn(&self, task: BoxFuture<()>) {
        self.host.spawn(task);
    }

    fn random(&self) -> Result<[u8; 16], StoreError> {
        Ok(self.host.random())
    }

    fn run(&self, calls: Vec<ForeignCall>) -> BoxFuture<Result<ForeignOutcome, StoreError>> {
        let commands: Option<Vec<_>> = calls.iter().map(command).collect();
        let Some(commands) = commands else {
            let what = "the simulation has no such command on a foreign lock";
            return Box::pin(std::future::ready(Err(StoreError::new(Failure::NotSent, what))));
        };
        let running = self.host.run(commands);
        Box::pin(async move {
            let answers = running.await.map_err(store_error)?;
            let is_complete = answers.iter().all(Result::is_ok);
            let answers = answers.into_iter().map(|answered| match answered {
                Ok(answer) => Ok(foreign_answer(answer)),
                Err(failed) => Err(ForeignError::Failed(store_error(failed))),
            });
            Ok(ForeignOutcome { answers: answers.collect(), is_complete })
        })
    }

    fn is_tracking(&self) -> bool {
        self.host.is_tracking()
    }

    fn watch(&self, keys: &[String]) -> KeyWatch {
        KeyWatch::new(&self.watchers, keys)
    }
}

fn store_error(CallFailed { failure, message }: CallFailed) -> StoreError {
    StoreError::new(failure, message)
}

fn foreign_answer(answer: KeyAnswer) -> ForeignAnswer {
    match answer {
        KeyAnswer::Nil => ForeignAnswer::Nil,
        KeyAnswer::Okay => ForeignAnswer::Okay,
        KeyAnswer::Number(number) => ForeignAnswer::Int(number),
        KeyAnswer::Text(text) => ForeignAnswer::Bytes(text.into_bytes()),
    }
}

/// The command that a call consists of; `None` if it is none of those above.
fn command(call: &ForeignCall) -> Option<KeyCommand> {
    match call {
        ForeignCall::Track => Some(KeyCommand::Track),
        ForeignCall::Command(words) => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            match *words {
                ["SET", key, holder, "NX", "PX", ttl] => {
                    Some(KeyCommand::Take(key.to_owned(), holder.to_owned(), millis(ttl)?))
                }
                ["GET", key] => Some(KeyCommand::Holder(key.to_owned())),
                ["PTTL", key] => Some(KeyCommand::TimeLeft(key.to_owned())),
                ["EXISTS", key] => Some(KeyCommand::Exists(key.to_owned())),
                _ => None,
            }
        }
        ForeignCall::Script { script, keys, arguments } => match (&**keys, &**arguments) {
            ([key], [holder, ttl]) if ptr::eq(*script, &RENEW_VALUE) => {
                Some(KeyCommand::Renew(key.clone(), holder.clone(), millis(ttl)?))
            }
            ([key], [holder]) if ptr::eq(*script, &RELEASE_VALUE) => {
                Some(KeyCommand::Release(key.clone(), holder.clone()))
            }
            _ => None,
        },
    }
}

fn millis(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}
