//! What the library reports, for `logging`.

use pyo3::prelude::*;

use crate::completions::{Completions, queue_of};
use crate::lease::Operation;

/// The records since the last call: a list of levels and messages. Waits until there is one.
#[pyfunction]
#[pyo3(signature = (completions=None))]
pub(crate) fn records(completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
    Ok(Operation::new(leasehold_binding::records(queue_of(completions)?.as_ref())))
}
