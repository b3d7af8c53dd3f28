//! A client of a store, as Python sees it.

use std::sync::Arc;

use leasehold::{Kind, LeaseId, SCHEMES, Token};
use leasehold_store::process::Own;
use pyo3::prelude::*;

use crate::completions::{Completions, queue_of};
use crate::core::{Core, Outcome, done};
use crate::errors::{self, Failure};
use crate::lease::{Held, LeaseParts};
use crate::lock::{Lock, Terms};
use crate::opened::{Opened, Settings};
use crate::operation::Operation;
use crate::testing;
use crate::time::duration;

fn kind_of(py: Python<'_>, kind: &str) -> PyResult<Kind> {
    Kind::ALL.iter().copied().find(|known| known.as_str() == kind).ok_or_else(|| {
        let known: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
        Failure::invalid(format!("{kind:?} is no kind of lock: they are {}", known.join(", ")))
            .into_exception(py)
    })
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Backend {
    opened: Own<Arc<Opened>>,
}

impl Backend {
    fn opened(&self, py: Python<'_>) -> PyResult<&Arc<Opened>> {
        self.opened.get().ok_or_else(|| errors::forked(py))
    }

    fn start<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        py: Python<'_>,
        completions: Option<&Bound<'_, Completions>>,
        call: impl FnOnce(Arc<Opened>) -> F,
    ) -> PyResult<Operation> {
        let queue = queue_of(completions)?;
        Ok(Operation::new(Core::start(call(self.opened(py)?.clone()), queue.as_ref())))
    }
}

#[pymethods]
impl Backend {
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.opened(py)?.shown())
    }

    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    fn lock(&self, py: Python<'_>, terms: Terms) -> PyResult<Lock> {
        let opened = self.opened(py)?.clone();
        Ok(Lock::new(opened, terms.check(py)?))
    }

    #[pyo3(signature = (lease, completions=None))]
    fn attach(
        &self,
        py: Python<'_>,
        lease: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        self.start(py, completions, |opened| async move { attach(opened, lease).await })
    }

    #[pyo3(signature = (kind, name, completions=None))]
    fn inspect(
        &self,
        py: Python<'_>,
        kind: &str,
        name: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let kind = kind_of(py, kind)?;
        self.start(py, completions, move |opened| async move { opened.inspect(kind, name).await })
    }

    #[pyo3(signature = (completions=None))]
    fn list(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        self.start(py, completions, |opened| async move { opened.list().await })
    }

    #[pyo3(signature = (kind, name, token=None, completions=None))]
    fn force_release(
        &self,
        py: Python<'_>,
        kind: &str,
        name: String,
        token: Option<u64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let kind = kind_of(py, kind)?;
        let known = |token| {
            Token::new(token)
                .ok_or_else(|| Failure::invalid(format!("{token} is no token")).into_exception(py))
        };
        let token = token.map(known).transpose()?;
        self.start(
            py,
            completions,
            move |opened| async move { opened.force_release(kind, name, token).await },
        )
    }

    #[pyo3(signature = (timeout=None, completions=None))]
    fn close(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let limit = timeout.map(|limit| duration(py, limit)).transpose()?;
        self.start(py, completions, move |opened| async move { opened.close(limit).await })
    }
}

async fn attach(opened: Arc<Opened>, text: String) -> Outcome {
    let id: LeaseId = text.parse()?;
    let guard = opened.client().await?.attach(&id).await?;
    done(LeaseParts::new(Held::Plain(guard), opened))
}

/// Notes the address. Nothing is sent.
#[pyfunction]
pub(crate) fn open(py: Python<'_>, url: String, settings: Settings) -> PyResult<Backend> {
    let scheme = url.split(':').next().unwrap_or_default();
    let test = testing::find(&url);
    if test.is_none() && scheme == testing::SCHEME {
        let what = format!("{url}: no leasehold.testing.TestStore of this process has this address");
        return Err(Failure::invalid(what).into_exception(py));
    }
    if test.is_none() && !SCHEMES.contains(&scheme) {
        let what = format!(
            "{scheme:?} is no scheme of a store: they are {}, http, https and unix",
            SCHEMES.join(", ")
        );
        return Err(Failure::invalid(what).into_exception(py));
    }
    if settings.token.is_some() {
        return Err(Failure::invalid("token is for servers of leasehold serve (http:, https:, unix:)")
            .into_exception(py));
    }
    Ok(Backend { opened: Own::new(Opened::new(py, url, test, settings)?) })
}
