// SPDX-License-Identifier: Apache-2.0
//! Blocks that are next to go, and the checksum of their copies.

use crate::cache::{OpenCache, PullResult, WHAT};
use crate::failure::{Failure, Outcome, invalid};
use crate::handle::OpenHandle;
use crate::local::{Local, Use};
use crate::names::Namespace;
use cxl_pool::copy::checksum_of;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Arc, Weak};

/// A block that the evictor of this process would look at soon, and its cache, which it does not keep open.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct ColdBlock {
    block: cxl_pool::cache::ColdBlock,
    handle: Weak<OpenHandle<OpenCache>>,
}

impl ColdBlock {
    pub fn new(block: cxl_pool::cache::ColdBlock, handle: &Arc<OpenHandle<OpenCache>>) -> Self {
        ColdBlock { block, handle: Arc::downgrade(handle) }
    }
}

#[pymethods]
impl ColdBlock {
    #[getter]
    fn namespace(&self) -> Namespace {
        Namespace(self.block.namespace())
    }

    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.block.key().0)
    }

    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.block.parent().map(|key| PyBytes::new(py, &key.0))
    }

    #[getter]
    fn len_bytes(&self) -> u64 {
        self.block.len_bytes()
    }

    fn copy(&self, py: Python<'_>, into: &Bound<'_, PyAny>) -> PyResult<PullResult> {
        let local = Local::of(into, Use::Write)?;
        let ranges = &local.ranges;
        let copied = py.detach(|| -> Outcome<_> {
            let open = self.handle.upgrade().ok_or_else(|| Failure::closed(WHAT))?.hold()?;
            ranges.check_outside(&open.pool)?;
            let pieces = ranges.first(self.block.len_bytes());
            // SAFETY: the memory is that of `into`, which this call holds; it lies outside of the pool, and that no other thread uses it
            // meanwhile is what the documentation demands.
            Ok(unsafe { open.cache()?.copy_cold_raw(&self.block, &pieces) }?)
        });
        Ok(PullResult::of(&copied?))
    }

    fn __repr__(&self) -> String {
        format!("ColdBlock({:?}, {} bytes)", self.block.key(), self.block.len_bytes())
    }
}

/// The checksum of memory, as the pool has it of payload.
#[pyfunction]
pub fn checksum(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u64> {
    let local = Local::of(data, Use::Read)?;
    let [range] = local.ranges.0.as_slice() else { return Err(invalid("a checksum is of one stretch of memory")) };
    let (address, len_bytes) = (range.address.addr().get(), range.len_bytes);
    Ok(py.detach(|| {
        // SAFETY: the memory is that of `data`, which this call holds; that no thread writes to it meanwhile is what the documentation
        // demands.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len_bytes) };
        checksum_of(bytes)
    }))
}
