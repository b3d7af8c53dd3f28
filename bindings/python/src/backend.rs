//! A client of a store, as Python sees it.

use leasehold_binding::{Client, Failure, Settings as Checked};
use leasehold_store::process::Own;
use pyo3::prelude::*;

use crate::completions::{Completions, queue_of};
use crate::errors::{self, raised};
use crate::exit::exit;
use crate::lease::Operation;
use crate::lock::{Lock, Terms};
use crate::time::optional_duration;

/// `leasehold._terms.Settings`
#[derive(FromPyObject)]
pub(crate) struct Settings {
    ttl: Option<f64>,
    label: Option<String>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    connect_timeout: Option<f64>,
    token: Option<String>,
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Backend {
    client: Own<Client>,
}

impl Backend {
    fn client(&self, py: Python<'_>) -> PyResult<&Client> {
        self.client.get().ok_or_else(|| errors::forked(py))
    }
}

#[pymethods]
impl Backend {
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.client(py)?.address())
    }

    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    fn lock(&self, py: Python<'_>, terms: Terms) -> PyResult<Lock> {
        let prepared = self.client(py)?.lock(terms.check(py)?);
        prepared.map(Lock::new).map_err(|failure| raised(py, failure))
    }

    #[pyo3(signature = (lease, completions=None))]
    fn attach(
        &self,
        py: Python<'_>,
        lease: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        Ok(Operation::new(self.client(py)?.attach(lease, queue_of(completions)?.as_ref())))
    }

    #[pyo3(signature = (kind, name, completions=None))]
    fn inspect(
        &self,
        py: Python<'_>,
        kind: &str,
        name: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let started = self.client(py)?.inspect(kind, name, queue_of(completions)?.as_ref());
        started.map(Operation::new).map_err(|failure| raised(py, failure))
    }

    #[pyo3(signature = (completions=None))]
    fn list(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        Ok(Operation::new(self.client(py)?.list(queue_of(completions)?.as_ref())))
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
        let started = self.client(py)?.force_release(kind, name, token, queue_of(completions)?.as_ref());
        started.map(Operation::new).map_err(|failure| raised(py, failure))
    }

    #[pyo3(signature = (timeout=None, completions=None))]
    fn close(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let limit = optional_duration(py, timeout)?;
        Ok(Operation::new(self.client(py)?.close(limit, queue_of(completions)?.as_ref())))
    }
}

/// Notes the address. Nothing is sent.
#[pyfunction]
pub(crate) fn open(py: Python<'_>, url: String, settings: Settings) -> PyResult<Backend> {
    if settings.token.is_some() {
        let what = "token is for servers of leasehold serve (http:, https:, unix:)";
        return Err(raised(py, Failure::invalid(what)));
    }
    let checked = Checked {
        ttl: optional_duration(py, settings.ttl)?,
        label: settings.label,
        max_waiters: settings.max_waiters,
        replicas: settings.replicas,
        connect_timeout: optional_duration(py, settings.connect_timeout)?,
    };
    let client = Client::open(exit(), url, checked).map_err(|failure| raised(py, failure))?;
    Ok(Backend { client: Own::new(client) })
}
