// SPDX-License-Identifier: Apache-2.0
//! Which blocks of a namespace come and go, of all hosts.

use crate::cache::{OpenCache, WHAT};
use crate::failure::{Failure, Outcome};
use crate::handle::{Native, OpenHandle, held};
use cxl_pool::cache::BlockKey;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Arc, Mutex, Weak};

/// What changed between two looks.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Changes(cxl_pool::cache::Changes);

fn bytes_of<'py>(py: Python<'py>, keys: &[BlockKey]) -> Vec<Bound<'py, PyBytes>> {
    keys.iter().map(|key| PyBytes::new(py, &key.0)).collect()
}

#[pymethods]
impl Changes {
    #[getter]
    fn added<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        bytes_of(py, &self.0.added)
    }

    #[getter]
    fn removed<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        bytes_of(py, &self.0.removed)
    }

    #[getter]
    fn alone<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        bytes_of(py, &self.0.alone)
    }

    fn __repr__(&self) -> String {
        format!("Changes(added={}, removed={}, alone={})", self.0.added.len(), self.0.removed.len(), self.0.alone.len())
    }
}

/// A memory of the last look at a namespace. It keeps nothing open.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Watch {
    native: Native<Mutex<cxl_pool::cache::Watch>>,
    handle: Weak<OpenHandle<OpenCache>>,
}

impl Watch {
    pub fn new(watch: cxl_pool::cache::Watch, handle: &Arc<OpenHandle<OpenCache>>) -> Self {
        Watch { native: Native::new(Mutex::new(watch)), handle: Arc::downgrade(handle) }
    }
}

#[pymethods]
impl Watch {
    fn look(&self, py: Python<'_>) -> PyResult<Changes> {
        let watch = self.native.get("the watch")?;
        let changes = py.detach(|| -> Outcome<_> {
            let open = self.handle.upgrade().ok_or_else(|| Failure::closed(WHAT))?.hold()?;
            Ok(held(watch).look(open.cache()?)?)
        });
        Ok(Changes(changes?))
    }
}
