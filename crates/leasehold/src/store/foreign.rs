//! Commands on keys of other libraries, and word of changes of such keys.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::sync::Notify;

use crate::wakes;

/// How much later than its time a command that was given up may arrive.
pub(crate) const MAX_DELAY: Duration = Duration::from_secs(1);

/// The error of a call to which no majority of the servers gave the same answer, in time.
pub(crate) const UNDECIDED: &str = "a majority of the servers has not agreed in time";

/// A script on the keys of a lock of another library.
pub(crate) struct ForeignScript {
    text: &'static str,
    hash: OnceLock<String>,
}

impl ForeignScript {
    pub(crate) const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    fn hash(&self) -> &str {
        self.hash.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

/// One command.
#[derive(Clone)]
pub(crate) enum ForeignCall {
    Command(Cmd),
    /// Asks the server to report the next change of the keys that the next command reads. A server that can't do that leaves it out.
    Track,
    Script {
        script: &'static ForeignScript,
        keys: Vec<String>,
        arguments: Vec<String>,
    },
}

impl ForeignCall {
    /// `with_text`: the server does not know the script yet.
    pub(super) fn encode(&self, with_text: bool) -> Cmd {
        match self {
            Self::Command(command) => command.clone(),
            Self::Track => redis::cmd("CLIENT").arg("CACHING").arg("YES").to_owned(),
            Self::Script { script, keys, arguments } => {
                let mut command = match with_text {
                    false => redis::cmd("EVALSHA").arg(script.hash()).to_owned(),
                    true => redis::cmd("EVAL").arg(script.text).to_owned(),
                };
                command.arg(keys.len()).arg(keys).arg(arguments);
                command
            }
        }
    }
}

/// One result per command.
pub(crate) type ForeignAnswers = Vec<Result<Value, RedisError>>;

/// What has become of some commands.
pub(crate) struct ForeignOutcome {
    pub(crate) answers: ForeignAnswers,
    /// Whether every server has run them, so that none of the commands may still take effect, or has to be repeated.
    pub(crate) is_complete: bool,
}

/// Numbered registrations by key.
type Watching = BTreeMap<String, Vec<(u64, Arc<Notify>)>>;

/// The tasks that wait for a change of a key.
#[derive(Default)]
pub(super) struct Watchers {
    by_key: Mutex<Watching>,
    next: AtomicU64,
}

impl Watchers {
    fn by_key(&self) -> MutexGuard<'_, Watching> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn notify(&self, key: &Value) {
        let Value::BulkString(key) = key else { return };
        let Ok(key) = std::str::from_utf8(key) else { return };
        let watching = self.by_key().get(key).cloned().unwrap_or_default();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }

    pub(super) fn notify_all(&self) {
        let watching: Vec<_> = self.by_key().values().flatten().cloned().collect();
        watching.iter().for_each(|(_, notify)| notify.notify_one());
    }
}

/// A task's registration for changes of some keys. A change between two waits ends the next wait.
pub(crate) struct KeyWatch {
    watchers: Arc<Watchers>,
    keys: Vec<String>,
    number: u64,
    notify: Arc<Notify>,
}

impl KeyWatch {
    pub(super) fn new(watchers: &Arc<Watchers>, keys: &[String]) -> Self {
        let (notify, number) = (Arc::new(Notify::new()), watchers.next.fetch_add(1, Ordering::Relaxed));
        let mut by_key = watchers.by_key();
        for key in keys {
            by_key.entry(key.clone()).or_default().push((number, notify.clone()));
        }
        drop(by_key);
        Self { watchers: watchers.clone(), keys: keys.to_vec(), number, notify }
    }

    /// Waits until one of the keys may have changed. Cancel safe.
    pub(crate) async fn changed(&self) {
        let mut notified = pin!(self.notify.notified());
        poll_fn(|context| wakes::guarded(context, |context| notified.as_mut().poll(context))).await;
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
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
