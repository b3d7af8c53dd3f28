//! Locks with their terms, as Python sees them.

use std::time::Duration;

use leasehold_binding::{Lock as Prepared, Terms as Checked};
use leasehold_store::process::Own;
use pyo3::prelude::*;

use crate::completions::{Completions, queue_of};
use crate::lease::Operation;
use crate::time::{duration, limit, optional_duration};

/// `leasehold._terms.Terms`
#[derive(FromPyObject)]
pub(crate) struct Terms {
    kind: String,
    names: Vec<String>,
    ttl: Option<f64>,
    auto_renew: bool,
    min_hold: f64,
    max_hold: Option<f64>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    label: Option<String>,
    trace_id: Option<String>,
    owner: Option<String>,
    permits: u32,
    capacity: u32,
    period: f64,
    at_least_once: bool,
    global_fifo: bool,
    detachable: bool,
    bridge: Option<Vec<String>>,
}

impl Terms {
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<Checked> {
        let (ttl, max_hold) = (optional_duration(py, self.ttl)?, optional_duration(py, self.max_hold)?);
        let (min_hold, period): (Duration, _) = (duration(py, self.min_hold)?, duration(py, self.period)?);
        Ok(Checked {
            kind: self.kind,
            names: self.names,
            ttl,
            auto_renew: self.auto_renew,
            min_hold,
            max_hold,
            max_waiters: self.max_waiters,
            replicas: self.replicas,
            label: self.label,
            trace_id: self.trace_id,
            owner: self.owner,
            permits: self.permits,
            capacity: self.capacity,
            period,
            at_least_once: self.at_least_once,
            global_fifo: self.global_fifo,
            detachable: self.detachable,
            bridge: self.bridge,
        })
    }
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Lock {
    prepared: Own<Prepared>,
}

impl Lock {
    pub(crate) fn new(prepared: Prepared) -> Self {
        Self { prepared: Own::new(prepared) }
    }
}

#[pymethods]
impl Lock {
    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    #[pyo3(signature = (wait=None, completions=None))]
    fn acquire(
        &self,
        py: Python<'_>,
        wait: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let prepared = self.prepared.get().ok_or_else(|| crate::errors::forked(py))?;
        Ok(Operation::new(prepared.acquire(limit(py, wait)?, queue_of(completions)?.as_ref())))
    }
}
