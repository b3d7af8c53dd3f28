//! A held lease, as Python sees it.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold::{Error, Guard, Loss, SetGuard, UpgradableGuard, WriteGuard};
use leasehold_store::process::Own;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyDict};

use crate::completions::{Completions, queue_of};
use crate::core::{Core, Outcome, Value, done};
use crate::errors::{Failure, reason};
use crate::opened::Opened;
use crate::operation::Operation;
use crate::queue::Queue;
use crate::time::{Limit, duration};

/// What was granted. Dropping it releases it in the background.
pub(crate) enum Held {
    Plain(Guard),
    Writer(WriteGuard),
    Upgradable(UpgradableGuard),
    Set(SetGuard),
}

impl Held {
    fn guards(&self) -> &[Guard] {
        match self {
            Self::Plain(guard) => std::slice::from_ref(guard),
            Self::Writer(guard) => std::slice::from_ref(&**guard),
            Self::Upgradable(guard) => std::slice::from_ref(&**guard),
            Self::Set(guard) => guard.guards(),
        }
    }

    fn remaining(&self) -> Duration {
        self.guards().iter().map(Guard::remaining).min().unwrap_or_default()
    }

    async fn lost(&self) -> Loss {
        match self {
            Self::Set(guard) => guard.lost().await.1,
            Self::Plain(guard) => guard.lost().await,
            Self::Writer(guard) => guard.lost().await,
            Self::Upgradable(guard) => guard.lost().await,
        }
    }

    /// The loss, if the lease is lost now.
    fn loss(&self) -> Option<(Loss, Error)> {
        let lost = self.guards().iter().find(|guard| !guard.is_held())?;
        let loss = lost.lost().now_or_never()?;
        let error = lost.run(std::future::pending::<()>()).now_or_never()?.err()?;
        Some((loss, error))
    }

    fn failure(&self, error: Error) -> Failure {
        match self.loss() {
            Some((loss, _)) if error.is_lost() => Failure::Lost(format!("{error:#}"), loss),
            _ => Failure::Library(error),
        }
    }

    async fn renew(&self) -> Outcome {
        let renewed = match self {
            Self::Set(guard) => guard.renew().await,
            _ => match self.guards() {
                [guard] => guard.renew().await,
                _ => Ok(()),
            },
        };
        match renewed {
            Ok(()) => done(()),
            Err(error) => Err(self.failure(error)),
        }
    }

    async fn release(self, limit: Option<Duration>) -> Outcome {
        let loss = self.loss();
        let released = match (self, limit) {
            (Self::Plain(guard), None) => guard.release().await,
            (Self::Plain(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Writer(guard), None) => guard.release().await,
            (Self::Writer(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Upgradable(guard), None) => guard.release().await,
            (Self::Upgradable(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Set(guard), None) => guard.release().await,
            (Self::Set(guard), Some(limit)) => {
                let guards = guard.into_guards().into_iter().map(|guard| guard.release_timeout(limit));
                futures_util::future::join_all(guards).await.into_iter().collect()
            }
        };
        match (released, loss) {
            (Ok(()), _) => done(()),
            (Err(error), loss) if error.is_lost() => {
                Err(Failure::Lost(format!("{error:#}"), loss.map_or(Loss::Gone, |(loss, _)| loss)))
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    async fn detach(self) -> Outcome {
        let guard = match self {
            Self::Plain(guard) => guard,
            Self::Writer(guard) => guard.into(),
            Self::Upgradable(_) | Self::Set(_) => return Err(Failure::unsupported(NO_DETACH)),
        };
        done(guard.detach().await?.to_string())
    }

    async fn downgrade(self) -> Result<Self, Failure> {
        match self {
            Self::Writer(guard) => Ok(Self::Plain(guard.downgrade().await?)),
            Self::Upgradable(guard) => Ok(Self::Plain(guard.downgrade().await?)),
            Self::Plain(_) | Self::Set(_) => Err(Failure::unsupported(NO_READER)),
        }
    }
}

const NO_DETACH: &str =
    "the lease of an upgradable reader, and those of several locks together, cannot be detached";
const NO_READER: &str = "only the lease of a writer or of an upgradable reader can be downgraded";
const NO_WRITER: &str =
    "only the lease of an upgradable reader can be upgraded: acquire rwlock(name).upgradable()";

const NOT_REPLACED: &str =
    "the lease was lost: it was released, because its upgrade or downgrade failed or was cancelled";

/// A lease that Python has not taken yet.
pub(crate) struct LeaseParts {
    held: Held,
    opened: Arc<Opened>,
    /// The lease in whose place it is, once Python has it.
    replaces: Option<Replaced>,
}

impl LeaseParts {
    pub(crate) fn new(held: Held, opened: Arc<Opened>) -> Self {
        Self { held, opened, replaces: None }
    }
}

/// A lease that another one is to replace. If Python gets no other one, it is lost when this is dropped, because nothing is held any more.
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

impl Value for LeaseParts {
    fn into_object(mut self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        if let Some(replaced) = self.replaces.take() {
            replaced.keep();
        }
        Ok(Lease::new(*self).into_pyobject(py)?.into_any().unbind())
    }
}

impl Value for Loss {
    fn into_object(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(reason(*self).into_pyobject(py)?.into_any().unbind())
    }
}

/// A lease, and the operations that look at it.
struct State {
    /// None once it was released or detached. Shared with the operations in `looking` only.
    held: Mutex<Option<Arc<Held>>>,
    /// The operations that have the guard as long as they run: they end when it is released.
    looking: Mutex<Vec<Weak<Core>>>,
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

    fn looking(&self) -> MutexGuard<'_, Vec<Weak<Core>>> {
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

    /// Starts an operation that looks at the lease. `ended`: its outcome if the lease is released meanwhile.
    fn look<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        look: impl FnOnce(Arc<Held>) -> F,
        ended: Outcome,
        queue: Option<&Arc<Queue>>,
    ) -> Arc<Core> {
        let Some(held) = self.held().clone() else { return Core::ended(ended, queue) };
        let core = Core::start(look(held), queue);
        if !core.is_done() {
            let mut looking = self.looking();
            looking.retain(|core| core.strong_count() > 0);
            looking.push(Arc::downgrade(&core));
        }
        core
    }

    /// The lease for a call that consumes it.
    fn take(&self) -> Option<Held> {
        let held = self.held().take()?;
        let loss = held.loss().map(|(loss, error)| {
            let _ = self.lost.set((loss, format!("{error:#}")));
            loss
        });
        let looking = std::mem::take(&mut *self.looking());
        for core in looking.iter().filter_map(Weak::upgrade) {
            // A loss that they have not seen yet is their outcome all the same.
            core.end(loss.map_or_else(|| done(()), done));
        }
        // Nothing else has it: a call that looks holds the mutex, and the operations have ended.
        Arc::try_unwrap(held).ok()
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

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Lease {
    state: Own<Arc<State>>,
}

impl Lease {
    pub(crate) fn new(parts: LeaseParts) -> Self {
        let LeaseParts { held, opened, replaces: _ } = parts;
        let tokens: Vec<_> =
            held.guards().iter().map(|guard| (guard.name().to_owned(), guard.token().get())).collect();
        let name = tokens.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",");
        let (held, looking) = (Mutex::new(Some(Arc::new(held))), Mutex::default());
        let lost = OnceLock::new();
        Self { state: Own::new(Arc::new(State { held, looking, lost, name, tokens, opened })) }
    }

    fn state(&self, py: Python<'_>) -> PyResult<&Arc<State>> {
        self.state.get().ok_or_else(|| crate::errors::forked(py))
    }

    /// Starts a call that consumes the lease.
    fn consume<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        py: Python<'_>,
        completions: Option<&Bound<'_, Completions>>,
        call: impl FnOnce(Held) -> F,
    ) -> PyResult<Operation> {
        let queue = queue_of(completions)?;
        let Some(held) = self.state(py)?.take() else {
            return Err(Failure::invalid("the lease was released or detached before").into_exception(py));
        };
        Ok(Operation::new(Core::start(call(held), queue.as_ref())))
    }

    fn check(&self, py: Python<'_>, is_able: impl FnOnce(&Held) -> bool, otherwise: &str) -> PyResult<()> {
        match self.state(py)?.with(is_able) {
            Some(false) => Err(Failure::unsupported(otherwise).into_exception(py)),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(&self.state(py)?.name)
    }

    /// Of several: that of the first lock.
    #[getter]
    fn token(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.state(py)?.tokens.first().map_or(0, |(_, token)| *token))
    }

    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.state(py)?.tokens.iter().map(|(name, token)| (name, token)).into_py_dict(py)
    }

    fn remaining(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.state(py)?.with(Held::remaining).unwrap_or_default().as_secs_f64())
    }

    fn loss(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(self.state(py)?.loss().map(|(loss, _)| reason(loss)))
    }

    fn loss_error(&self, py: Python<'_>) -> PyResult<String> {
        let state = self.state(py)?;
        let not_lost = || format!("{:?}: the lease is not lost", state.name);
        Ok(state.loss().map_or_else(not_lost, |(_, message)| message))
    }

    fn completions(&self) -> PyResult<Completions> {
        Completions::open()
    }

    #[pyo3(signature = (completions=None))]
    fn lost(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        let queue = queue_of(completions)?;
        let state = self.state(py)?;
        let lost = |held: Arc<Held>| async move { done(held.lost().await) };
        let ended = state.loss().map_or_else(|| done(()), |(loss, _)| done(loss));
        Ok(Operation::new(state.look(lost, ended, queue.as_ref())))
    }

    #[pyo3(signature = (completions=None))]
    fn renew(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        let queue = queue_of(completions)?;
        let state = self.state(py)?;
        let what = format!("{:?}: the lease was released", state.name);
        let renew = |held: Arc<Held>| async move { held.renew().await };
        Ok(Operation::new(state.look(renew, Err(Failure::Own("LeaseLost", what)), queue.as_ref())))
    }

    #[pyo3(signature = (timeout=None, completions=None))]
    fn release(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let limit = timeout.map(|limit| duration(py, limit)).transpose()?;
        let queue = queue_of(completions)?;
        let core = match self.state(py)?.take() {
            Some(held) => {
                let opened = self.state(py)?.opened.clone();
                let release = async move {
                    let released = held.release(limit).await;
                    drop(opened);
                    released
                };
                Core::start(release, queue.as_ref())
            }
            None => {
                let lost = self.state(py)?.loss().map(|(loss, message)| Failure::Lost(message, loss));
                Core::ended(lost.map_or_else(|| done(()), Err), queue.as_ref())
            }
        };
        Ok(Operation::new(core))
    }

    #[pyo3(signature = (completions=None))]
    fn detach(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        self.check(py, |held| matches!(held, Held::Plain(_) | Held::Writer(_)), NO_DETACH)?;
        let opened = self.state(py)?.opened.clone();
        self.consume(py, completions, |held| async move {
            let detached = held.detach().await;
            drop(opened);
            detached
        })
    }

    #[pyo3(signature = (completions=None))]
    fn downgrade(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        self.check(py, |held| matches!(held, Held::Writer(_) | Held::Upgradable(_)), NO_READER)?;
        let (opened, state) = (self.state(py)?.opened.clone(), Arc::downgrade(self.state(py)?));
        self.consume(py, completions, |held| {
            let replaced = Replaced(state);
            async move {
                let reader = held.downgrade().await?;
                done(LeaseParts { held: reader, opened, replaces: Some(replaced) })
            }
        })
    }

    #[pyo3(signature = (wait=None, completions=None))]
    fn upgrade(
        &self,
        py: Python<'_>,
        wait: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        self.check(py, |held| matches!(held, Held::Upgradable(_)), NO_WRITER)?;
        let limit = Limit::new(py, wait)?;
        let (opened, state) = (self.state(py)?.opened.clone(), Arc::downgrade(self.state(py)?));
        self.consume(py, completions, move |held| {
            let replaced = Replaced(state);
            async move {
                let Held::Upgradable(reader) = held else { return Err(Failure::unsupported(NO_WRITER)) };
                match reader.upgrade_timeout(limit.left()).await? {
                    Ok(writer) => {
                        done(LeaseParts { held: Held::Writer(writer), opened, replaces: Some(replaced) })
                    }
                    Err(reader) => {
                        if let Some(state) = replaced.0.upgrade() {
                            state.put_back(Held::Upgradable(reader));
                        }
                        replaced.keep();
                        done(())
                    }
                }
            }
        })
    }

    fn set_min_hold(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let min_hold = duration(py, seconds)?;
        let set = |held: &Held| held.guards().iter().try_for_each(|guard| guard.set_min_hold(min_hold));
        let done = self.state(py)?.with(set).unwrap_or(Ok(()));
        done.map_err(|error| Failure::from(error).into_exception(py))
    }

    fn abandon(&self) {
        if let Some(state) = self.state.get() {
            drop(state.take());
        }
    }
}
