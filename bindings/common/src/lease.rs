//! A held lease, and the calls of the languages.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use leasehold::Loss;
use leasehold_store::wakes;

use crate::call::{Call, Limit};
use crate::failure::{Failure, reason};
use crate::held::{Held, NO_DETACH, NO_READER, NO_WRITER};
use crate::log::{self, Record};
use crate::opened::Opened;
use crate::queue::Queue;

const NOT_REPLACED: &str =
    "the lease was lost: it was released, because its upgrade or downgrade failed or was cancelled";

/// What a call results in.
pub enum Answer {
    /// Also of an acquisition that was not granted within its wait.
    Nothing,
    /// JSON, or a detached lease.
    Text(String),
    /// A lease.
    Lease(Granted),
    /// Why a lease was lost.
    Loss(&'static str),
    /// Of [`records`].
    Records(Vec<Record>),
}

/// How a call ended.
pub type Outcome = Result<Answer, Failure>;
/// A call as the languages start it.
pub type Operation = Call<Answer>;

fn answer_of(loss: Option<Loss>) -> Answer {
    loss.map_or(Answer::Nothing, |loss| Answer::Loss(reason(loss)))
}

fn nothing(ended: Result<(), Failure>) -> Outcome {
    ended.map(|()| Answer::Nothing)
}

/// A lease that the language has not taken yet.
pub struct Granted {
    held: Held,
    opened: Arc<Opened>,
    /// The lease in whose place it is, once the language has it.
    replaces: Option<Replaced>,
}

impl Granted {
    pub(crate) fn new(held: Held, opened: Arc<Opened>) -> Self {
        Self { held, opened, replaces: None }
    }
}

/// A lease that another one is to replace. If the language gets no other one, it is lost when this is dropped, because nothing is held any more.
struct Replaced(Weak<State>);

impl Replaced {
    fn keep(mut self) {
        self.0 = Weak::new();
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        if let Some(state) = self.0.upgrade() {
            let _ = state.lost.set((Loss::Gone, format!("{:?}: {NOT_REPLACED}", state.name)));
        }
    }
}

/// A call that looks at a lease.
struct Looking {
    call: Weak<Operation>,
    /// It waits for the end of the lease, and does not need it to be held.
    is_watch: bool,
}

/// A lease, and the calls that look at it.
struct State {
    /// None once it was released or detached. Shared with the calls in `looking` only.
    held: Mutex<Option<Arc<Held>>>,
    /// The calls that have the guard as long as they run: they end when it is released.
    looking: Mutex<Vec<Looking>>,
    /// Why it was lost, and the message, of a lease that is not held any more.
    lost: OnceLock<(Loss, String)>,
    name: String,
    tokens: Vec<(String, u64)>,
    /// The client is closed after its last lease.
    opened: Arc<Opened>,
}

impl State {
    fn held(&self) -> MutexGuard<'_, Option<Arc<Held>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looking(&self) -> MutexGuard<'_, Vec<Looking>> {
        self.looking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, look: impl FnOnce(&Held) -> T) -> Option<T> {
        self.held().as_deref().map(look)
    }

    /// Why the lease is lost, and the message, if it is.
    fn loss(&self) -> Option<(Loss, String)> {
        match self.with(Held::loss) {
            Some(loss) => loss.map(|(loss, error)| (loss, format!("{error:#}"))),
            None => self.lost.get().cloned(),
        }
    }

    /// Starts a call that looks at the lease. `ended`: its outcome if the lease is released meanwhile.
    fn look<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        look: impl FnOnce(Arc<Held>) -> F,
        ended: Outcome,
        is_watch: bool,
        queue: Option<&Arc<Queue>>,
    ) -> Arc<Operation> {
        let Some(held) = self.held().clone() else { return Operation::ended(ended, queue) };
        let call = Operation::start(look(held), queue);
        if !call.is_done() {
            let mut looking = self.looking();
            looking.retain(|other| other.call.strong_count() > 0);
            looking.push(Looking { call: Arc::downgrade(&call), is_watch });
        }
        call
    }

    /// The lease for a call that consumes it.
    fn take(&self) -> Option<Held> {
        let held = self.held().take()?;
        let loss = held.loss().map(|(loss, error)| {
            let _ = self.lost.set((loss, format!("{error:#}")));
            loss
        });
        let looking = std::mem::take(&mut *self.looking());
        for Looking { call, is_watch } in looking {
            let Some(call) = call.upgrade() else { continue };
            // A loss that a watch has not seen yet is its outcome all the same.
            call.end(if is_watch { Ok(answer_of(loss)) } else { Err(self.not_held()) });
        }
        // Nothing else has it: a call that looks holds the mutex, and the calls have ended.
        Arc::try_unwrap(held).ok()
    }

    fn not_held(&self) -> Failure {
        Failure::Own("LeaseLost", format!("{:?}: the lease was released", self.name))
    }

    fn put_back(&self, held: Held) {
        *self.held() = Some(Arc::new(held));
    }
}

impl Drop for State {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// A lease as the languages have it. Dropping it releases it in the background.
pub struct Lease {
    state: Arc<State>,
}

impl Lease {
    /// The language has the lease from now on.
    #[must_use]
    pub fn new(mut granted: Granted) -> Self {
        if let Some(replaced) = granted.replaces.take() {
            replaced.keep();
        }
        let Granted { held, opened, replaces: _ } = granted;
        let tokens: Vec<_> =
            held.guards().iter().map(|guard| (guard.name().to_owned(), guard.token().get())).collect();
        let name = tokens.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",");
        let (held, looking, lost) = (Mutex::new(Some(Arc::new(held))), Mutex::default(), OnceLock::new());
        Self { state: Arc::new(State { held, looking, lost, name, tokens, opened }) }
    }

    /// The lock's name; of several locks all, separated by commas.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The fencing token; of several locks that of the first.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.state.tokens.first().map_or(0, |(_, token)| *token)
    }

    /// By name.
    #[must_use]
    pub fn tokens(&self) -> &[(String, u64)] {
        &self.state.tokens
    }

    /// For how long the lease may be trusted. Zero once it is lost, released or detached.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.state.with(Held::remaining).unwrap_or_default()
    }

    /// Why it is lost, and a message. None while it is held, and after it was released or detached.
    #[must_use]
    pub fn loss(&self) -> Option<(&'static str, String)> {
        self.state.loss().map(|(loss, message)| (reason(loss), message))
    }

    /// Ends with the reason once the lease is lost, with nothing when it is released or detached.
    #[must_use]
    pub fn lost(&self, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        let lost = |held: Arc<Held>| async move { Ok(answer_of(Some(held.lost().await))) };
        let ended = answer_of(self.state.loss().map(|(loss, _)| loss));
        self.state.look(lost, Ok(ended), true, queue)
    }

    /// Renews it to its whole ttl now.
    #[must_use]
    pub fn renew(&self, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        let renew = |held: Arc<Held>| async move { nothing(held.renew().await) };
        self.state.look(renew, Err(self.state.not_held()), false, queue)
    }

    /// It is not held from here on. `limit`: how long the confirmation is waited for.
    #[must_use]
    pub fn release(&self, limit: Option<Duration>, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        let Some(held) = self.state.take() else {
            let lost = self.state.loss().map(|(loss, message)| Failure::Lost(message, loss));
            return Operation::ended(lost.map_or(Ok(Answer::Nothing), Err), queue);
        };
        let opened = self.state.opened.clone();
        let release = async move {
            let released = held.release(limit).await;
            drop(opened);
            nothing(released)
        };
        Operation::start(release, queue)
    }

    /// Ends with the text of the detached lease.
    ///
    /// # Errors
    /// The lease is of another kind, or is not held.
    pub fn detach(&self, queue: Option<&Arc<Queue>>) -> Result<Arc<Operation>, Failure> {
        self.check(|held| matches!(held, Held::Plain(_) | Held::Writer(_)), NO_DETACH)?;
        let opened = self.state.opened.clone();
        let detach = |held: Held| async move {
            let detached = held.detach().await;
            drop(opened);
            detached.map(Answer::Text)
        };
        self.consume(detach, queue)
    }

    /// Ends with the lease of a reader, which replaces this one.
    ///
    /// # Errors
    /// The lease is of another kind, or is not held.
    pub fn downgrade(&self, queue: Option<&Arc<Queue>>) -> Result<Arc<Operation>, Failure> {
        self.check(|held| matches!(held, Held::Writer(_) | Held::Upgradable(_)), NO_READER)?;
        let (opened, state) = (self.state.opened.clone(), Arc::downgrade(&self.state));
        let downgrade = |held: Held| {
            let replaced = Replaced(state);
            async move {
                let reader = held.downgrade().await?;
                Ok(Answer::Lease(Granted { held: reader, opened, replaces: Some(replaced) }))
            }
        };
        self.consume(downgrade, queue)
    }

    /// Ends with the lease of a writer, which replaces this one. With nothing once the limit has passed: this lease is held as before.
    ///
    /// # Errors
    /// The lease is of another kind, or is not held.
    pub fn upgrade(&self, limit: Limit, queue: Option<&Arc<Queue>>) -> Result<Arc<Operation>, Failure> {
        self.check(|held| matches!(held, Held::Upgradable(_)), NO_WRITER)?;
        let (opened, state) = (self.state.opened.clone(), Arc::downgrade(&self.state));
        let upgrade = move |held: Held| {
            let replaced = Replaced(state);
            async move {
                let Held::Upgradable(reader) = held else { return Err(Failure::unsupported(NO_WRITER)) };
                match reader.upgrade_timeout(limit.left()).await? {
                    Ok(writer) => {
                        let held = Held::Writer(writer);
                        Ok(Answer::Lease(Granted { held, opened, replaces: Some(replaced) }))
                    }
                    Err(reader) => {
                        if let Some(state) = replaced.0.upgrade() {
                            state.put_back(Held::Upgradable(reader));
                        }
                        replaced.keep();
                        Ok(Answer::Nothing)
                    }
                }
            }
        };
        self.consume(upgrade, queue)
    }

    /// The lock stays taken for at least this long after its grant. Of no effect on a lease that is not held.
    ///
    /// # Errors
    /// As the library's.
    pub fn set_min_hold(&self, min_hold: Duration) -> Result<(), Failure> {
        let set = |held: &Held| held.guards().iter().try_for_each(|guard| guard.set_min_hold(min_hold));
        Ok(self.state.with(set).unwrap_or(Ok(()))?)
    }

    /// Releases it in the background. Returns at once.
    pub fn abandon(&self) {
        drop(self.state.take());
    }

    /// Starts a call that consumes the lease.
    fn consume<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        call: impl FnOnce(Held) -> F,
        queue: Option<&Arc<Queue>>,
    ) -> Result<Arc<Operation>, Failure> {
        let held = self.state.take();
        let held = held.ok_or_else(|| Failure::invalid("the lease was released or detached before"))?;
        Ok(Operation::start(call(held), queue))
    }

    fn check(&self, is_able: impl FnOnce(&Held) -> bool, otherwise: &str) -> Result<(), Failure> {
        match self.state.with(is_able) {
            Some(false) => Err(Failure::unsupported(otherwise)),
            _ => Ok(()),
        }
    }
}

/// What the library has reported since the last call of this. Ends once there is something; only the last one that waits gets it.
pub fn records(queue: Option<&Arc<Queue>>) -> Arc<Operation> {
    Operation::start(async { Ok(Answer::Records(log::next_records().await)) }, queue)
}

/// Lets the threads of clients call the wakers of calls themselves: these neither block nor panic. A thread in between would delay each answer.
pub fn learn_wakers() {
    let learn = async {
        wakes::learn_blocking().await;
        Ok(Answer::Nothing)
    };
    drop(Operation::start(learn, None));
}
