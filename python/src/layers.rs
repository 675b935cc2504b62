// SPDX-License-Identifier: Apache-2.0
//! Blocks of a GPU that are published layer by layer, in the order of the caller's streams.

use crate::cache::OpenCache;
use crate::failure::{Failure, Outcome};
use crate::handle::{Native, OpenHandle, drop_detached, held};
use crate::layout::{BlockLayout, after_of};
use crate::local::Use;
use crate::queued::{Kept, Queued, on_gpu};
use cxl_pool::cache::queued;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex};

/// Blocks of one call that are not finished. The cache knows them as well, so that closing gives them up.
pub struct LayerSet {
    open: Native<Mutex<Option<OpenLayers>>>,
}

struct OpenLayers {
    layers: queued::QueuedLayers,
    /// Whose memory the parts are of.
    layouts: Vec<Py<BlockLayout>>,
}

impl LayerSet {
    /// Of cells that were just reserved.
    pub fn new(layers: queued::QueuedLayers) -> Self {
        LayerSet { open: Native::new(Mutex::new(Some(OpenLayers { layers, layouts: Vec::new() }))) }
    }

    fn take(&self) -> Outcome<Option<OpenLayers>> {
        Ok(held(self.open.get(LAYERS)?).take())
    }

    /// Gives up what is not finished; what has to be kept until the GPU has ended with it.
    pub fn release(&self) -> Option<Kept> {
        let OpenLayers { layers, layouts } = self.take().ok()??;
        Some(Kept::new(layers.give_up(), layouts))
    }
}

const LAYERS: &str = "the layers of the blocks";

/// Blocks that are published layer by layer.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct QueuedLayers {
    held: Option<(Arc<LayerSet>, Arc<OpenHandle<OpenCache>>)>,
    blocks: usize,
}

impl QueuedLayers {
    /// Of `blocks` blocks of a cache.
    pub fn new(set: Arc<LayerSet>, handle: Arc<OpenHandle<OpenCache>>, blocks: usize) -> Self {
        QueuedLayers { held: Some((set, handle)), blocks }
    }

    fn parts(&self) -> Outcome<&(Arc<LayerSet>, Arc<OpenHandle<OpenCache>>)> {
        self.held.as_ref().ok_or_else(|| Failure::closed(LAYERS))
    }
}

/// Gives up what is not finished, and keeps its memory as long as the GPU uses it.
fn release(set: &LayerSet, handle: &OpenHandle<OpenCache>) {
    let Some(kept) = set.release() else { return };
    match handle.hold() {
        Ok(open) => open.remember_queued(kept),
        // It was closed, which waits for the GPU.
        Err(_) => drop(kept),
    }
}

impl Drop for QueuedLayers {
    fn drop(&mut self) {
        if let Some((set, handle)) = &self.held {
            Python::try_attach(|py| py.detach(|| release(set, handle)));
        }
        drop_detached(self.held.take());
    }
}

#[pymethods]
impl QueuedLayers {
    #[pyo3(signature = (layout, block_ids, *, after))]
    fn queue(
        &self,
        py: Python<'_>,
        layout: &Bound<'_, BlockLayout>,
        block_ids: &Bound<'_, PyAny>,
        after: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (set, handle) = self.parts()?;
        let ids = layout.get().block_ids(block_ids, self.blocks, Use::Read)?;
        let (places, on, kept) = (layout.get().blocks.clone(), on_gpu(layout.get(), after_of(after)?)?, layout.clone().unbind());
        Ok(py.detach(|| -> Outcome<()> {
            places.extents().check_outside(&handle.hold()?.pool)?;
            let mut open = held(set.open.get(LAYERS)?);
            let layers = open.as_mut().ok_or_else(|| Failure::closed(LAYERS))?;
            layers.layouts.push(kept);
            // SAFETY: the layout is kept until the end; the rest is what the documentation of the Python function demands.
            Ok(unsafe { layers.layers.queue(on, |at| places.ranges(ids[at])) }?)
        })?)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<Queued> {
        let (set, handle) = self.parts()?;
        let (queued, layouts) = py.detach(|| -> Outcome<_> {
            let OpenLayers { layers, layouts } = set.take()?.ok_or_else(|| Failure::closed(LAYERS))?;
            if let Err(error) = layers.check_whole() {
                // The GPU may be at the parts that there are.
                handle.hold()?.remember_queued(Kept::new(layers.give_up(), layouts));
                return Err(error.into());
            }
            Ok((layers.finish()?, layouts))
        })?;
        Queued::new(py, queued, layouts, handle, true)
    }

    fn release(&self, py: Python<'_>) {
        if let Some((set, handle)) = &self.held {
            py.detach(|| release(set, handle));
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
        format!("QueuedLayers({} blocks)", self.blocks)
    }
}
