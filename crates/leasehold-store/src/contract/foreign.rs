//! Commands on keys of other libraries, and word of changes of such keys.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use leasehold_core::Failure;
use tokio::sync::Notify;

use super::error::StoreError;
use crate::process::Process;
use crate::tasks::Tasks;
use crate::wakes;

/// How much later than its time a command that was given up may arrive.
pub const MAX_DELAY: Duration = Duration::from_secs(1);

/// The counter of the tokens of Redisson's fenced lock.
pub fn redisson_counter(key: &str) -> String {
    format!("redisson_lock_token:{}", redisson_tag(key))
}

/// What names beside a lock of Redisson's have of its key: they are in the same hash slot.
pub fn redisson_tag(key: &str) -> String {
    if key.contains('{') { key.to_owned() } else { format!("{{{key}}}") }
}

/// A script on the keys of a lock of another library.
pub struct ForeignScript {
    /// The Lua code.
    pub text: &'static str,
    hash: OnceLock<String>,
}

impl ForeignScript {
    /// A script with this code.
    pub const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    /// The SHA-1 of the code, by which a server knows the script.
    pub fn hash(&self) -> &str {
        self.hash.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

/// One command.
#[derive(Clone)]
pub enum ForeignCall {
    /// Its name and its arguments.
    Command(Vec<String>),
    /// Asks the server to report the next change of the keys that the next command reads. A server that can't do that leaves it out.
    Track,
    /// Runs a script.
    Script {
        /// Which one.
        script: &'static ForeignScript,
        /// Its `KEYS`.
        keys: Vec<String>,
        /// Its `ARGV`.
        arguments: Vec<String>,
    },
}

impl ForeignCall {
    /// A command of these words.
    pub fn command<const N: usize>(words: [&str; N]) -> Self {
        Self::Command(words.map(str::to_owned).into())
    }
}

/// A server's answer to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignAnswer {
    /// No value.
    Nil,
    /// The status of a command that has done what it was to do.
    Okay,
    /// A number.
    Int(i64),
    /// A string.
    Bytes(Vec<u8>),
    /// A map's keys and values in turn, too.
    List(Vec<Self>),
    /// No command of a bridge has such an answer.
    Other,
}

/// Why a command has no answer.
#[derive(Clone, Debug)]
pub enum ForeignError {
    /// No majority of the servers gave the same answer, in time.
    Undecided,
    /// The key has another type, and is therefore no lock of that library.
    OtherType(StoreError),
    /// Anything else, such as a connection that was lost.
    Failed(StoreError),
}

impl From<ForeignError> for StoreError {
    fn from(error: ForeignError) -> Self {
        match error {
            ForeignError::Undecided => {
                Self::new(Failure::Unknown, "a majority of the servers has not agreed in time")
            }
            ForeignError::OtherType(error) | ForeignError::Failed(error) => error,
        }
    }
}

/// One result per command.
pub type ForeignAnswers = Vec<Result<ForeignAnswer, ForeignError>>;

/// What has become of some commands.
pub struct ForeignOutcome {
    /// One per command.
    pub answers: ForeignAnswers,
    /// Whether every server has run them, so that none of the commands may still take effect, or has to be repeated.
    pub is_complete: bool,
}

/// The keys of other libraries' locks on a server.
pub trait ForeignKeys: Send + Sync {
    /// On the client's thread.
    fn tasks(&self) -> &Tasks;

    /// Runs a task on the client's thread.
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.tasks().spawn(task);
    }

    /// Random bytes, for the values of holders and for pauses.
    ///
    /// # Errors
    ///
    /// The system gives none.
    fn random(&self) -> Result<[u8; 16], StoreError> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| {
            let what = format!("the system gave no random numbers: {error}");
            StoreError::new(Failure::NotSent, what)
        })?;
        Ok(random)
    }

    /// Runs commands in order. May be awaited on any executor. Dropping the future does not stop them.
    fn run(&self, calls: Vec<ForeignCall>) -> BoxFuture<'static, Result<ForeignOutcome, StoreError>>;

    /// Whether the server reports changes of keys.
    fn is_tracking(&self) -> bool;

    /// Lets a task wait for changes of these keys.
    fn watch(&self, keys: &[String]) -> KeyWatch;
}

/// Numbered registrations by key.
type Watching = BTreeMap<String, Vec<(u64, Arc<Notify>)>>;

/// The tasks that wait for a change of a key.
#[derive(Default)]
pub struct Watchers {
    by_key: Mutex<Watching>,
    next: AtomicU64,
}

impl Watchers {
    fn by_key(&self) -> MutexGuard<'_, Watching> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those who watch this key.
    pub fn notify(&self, key: &str) {
        let watching = self.by_key().get(key).cloned().unwrap_or_default();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }

    /// Wakes everyone: changes may have been missed.
    pub fn notify_all(&self) {
        let watching: Vec<_> = self.by_key().values().flatten().cloned().collect();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }
}

/// A task's registration for changes of some keys. A change between two waits ends the next wait.
pub struct KeyWatch {
    watchers: Arc<Watchers>,
    keys: Vec<String>,
    number: u64,
    notify: Arc<Notify>,
    process: Process,
}

impl KeyWatch {
    /// Watches these keys until it is dropped.
    pub fn new(watchers: &Arc<Watchers>, keys: &[String]) -> Self {
        let (notify, number) = (Arc::new(Notify::new()), watchers.next.fetch_add(1, Ordering::Relaxed));
        let mut by_key = watchers.by_key();
        for key in keys {
            by_key.entry(key.clone()).or_default().push((number, notify.clone()));
        }
        drop(by_key);
        Self { watchers: watchers.clone(), keys: keys.to_vec(), number, notify, process: Process::current() }
    }

    /// Waits until one of the keys may have changed. Cancel safe.
    pub async fn changed(&self) {
        let mut notified = pin!(self.notify.notified());
        poll_fn(|context| wakes::guarded(context, |context| notified.as_mut().poll(context))).await;
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        let mut by_key = self.watchers.by_key();
        for key in &self.keys {
            if let Some(watching) = by_key.get_mut(key) {
                watching.retain(|(number, _)| *number != self.number);
                if watching.is_empty() {
                    by_key.remove(key);
                }
            }
        }
    }
}
