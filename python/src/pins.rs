// SPDX-License-Identifier: Apache-2.0
//! Blocks that stay until they are released.

use crate::cache::OpenCache;
use crate::handle::{Native, OpenHandle, drop_detached, held};
use cxl_pool::cache::Pinned;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Pins of one call. The cache knows it as well, so that closing releases them.
pub struct PinSet {
    pinned: Native<Mutex<Vec<Pinned>>>,
    /// How many there are, readable under the interpreter's lock: giving them back may take as long as the pool does.
    count: AtomicUsize,
}

impl PinSet {
    pub fn new(pinned: Vec<Pinned>) -> Self {
        PinSet { count: pinned.len().into(), pinned: Native::new(Mutex::new(pinned)) }
    }

    pub fn release(&self) {
        if let Ok(pinned) = self.pinned.get("the pins") {
            // Under the lock, so that a thread that closes the cache meanwhile waits for the last of them: a pin keeps the cache open.
            let mut pinned = held(pinned);
            self.count.store(0, Ordering::Relaxed);
            Pinned::release_all(pinned.drain(..));
        }
    }

    fn len(&self) -> usize {
        self.pinned.get("the pins").map_or(0, |_| self.count.load(Ordering::Relaxed))
    }
}

/// What keeps a chain of blocks from being evicted.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Pins {
    held: Option<(Arc<PinSet>, Arc<OpenHandle<OpenCache>>)>,
}

impl Pins {
    pub fn new(set: Arc<PinSet>, handle: Arc<OpenHandle<OpenCache>>) -> Self {
        Pins { held: Some((set, handle)) }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        drop_detached(self.held.take());
    }
}

#[pymethods]
impl Pins {
    fn __len__(&self) -> usize {
        self.held.as_ref().map_or(0, |(set, _)| set.len())
    }

    fn release(&self, py: Python<'_>) {
        if let Some((set, _)) = &self.held {
            py.detach(|| set.release());
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        format!("Pins({} blocks)", self.__len__())
    }
}
