// SPDX-License-Identifier: Apache-2.0
//! A record of requests and publishes.

use crate::failure::{Failure, Outcome};
use crate::handle::{OpenHandle, drop_detached};
use crate::names::{Namespace, keys_of};
use cxl_pool::cache::trace::{TraceConfig, TraceRecorder as Recorder};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// What messages call it.
const WHAT: &str = "the trace recorder";

/// A file of requests, in salted ids of their blocks.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct TraceRecorder {
    handle: OpenHandle<Recorder>,
    path: String,
}

impl TraceRecorder {
    fn recorder(&self) -> Outcome<Arc<Recorder>> {
        self.handle.hold()
    }
}

#[pymethods]
impl TraceRecorder {
    #[new]
    #[pyo3(signature = (directory, salt, *, block_tokens, max_bytes=1_073_741_824))]
    fn new(py: Python<'_>, directory: PathBuf, salt: String, block_tokens: u64, max_bytes: u64) -> PyResult<Self> {
        let config = TraceConfig { directory, salt, block_tokens, most_bytes: max_bytes };
        let recorder = py.detach(|| Recorder::start(&config)).map_err(Failure::from)?;
        let path = recorder.path().display().to_string();
        Ok(TraceRecorder { handle: OpenHandle::new(WHAT, recorder), path })
    }

    fn asked(&self, ns: &Namespace, keys: &Bound<'_, PyAny>, tokens: u64, found_tokens: u64) -> PyResult<()> {
        let keys = keys_of(keys)?;
        self.recorder()?.asked(ns.0, &keys, tokens, found_tokens);
        Ok(())
    }

    fn published(&self, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = keys_of(keys)?;
        self.recorder()?.published(ns.0, &keys);
        Ok(())
    }

    #[getter]
    fn counts(&self) -> PyResult<(u64, u64, u64)> {
        let counts = self.recorder()?.counts();
        Ok((counts.written, counts.dropped, counts.failed))
    }

    #[getter]
    fn last_error(&self) -> PyResult<Option<String>> {
        Ok(self.recorder()?.last_error())
    }

    #[getter]
    fn path(&self) -> &str {
        &self.path
    }

    fn close(&self) {
        drop_detached(self.handle.take());
    }
}
