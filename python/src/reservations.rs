// SPDX-License-Identifier: Apache-2.0
//! Cells that are reserved for blocks, and filled later.

use crate::blocks::{self, BATCH, RESERVED, ReservedCells, STORED};
use crate::cache::OpenCache;
use crate::failure::{Outcome, invalid};
use crate::handle::{Native, OpenHandle, drop_detached, held};
use crate::layout::BlockLayout;
use crate::local::Use;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex};

/// Reservations of one call. The cache knows them as well, so that closing gives them up.
pub struct ReservedSet {
    /// Each with the place of its block in the call.
    reserved: Native<Mutex<ReservedCells>>,
}

impl ReservedSet {
    pub fn new(reserved: ReservedCells) -> Self {
        ReservedSet { reserved: Native::new(Mutex::new(reserved)) }
    }

    /// Gives up those that were not committed.
    pub fn release(&self) {
        if let Ok(reserved) = self.reserved.get("the reservations") {
            // Under the lock, so that a thread that closes the cache meanwhile waits for the last of them: a reservation keeps it open.
            held(reserved).clear();
        }
    }

    /// Hands all of them to `work`, in batches; after an error the rest is given up.
    fn each_batch(&self, mut work: impl FnMut(ReservedCells) -> Outcome<()>) -> Outcome<()> {
        let mut reserved = held(self.reserved.get("the reservations")?);
        let mut rest = std::mem::take(&mut *reserved);
        while !rest.is_empty() {
            let behind = rest.split_off(rest.len().min(BATCH));
            work(std::mem::replace(&mut rest, behind))?;
        }
        Ok(())
    }
}

/// Blocks that every host sees coming.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Reservations {
    /// And the cache, which stays open as long as there are reservations of it.
    held: Option<(Arc<ReservedSet>, Arc<OpenHandle<OpenCache>>)>,
    answers: Vec<&'static str>,
    len_bytes: u64,
}

impl Reservations {
    /// Reservations of a cache, with the answer of each block, all of which are `len_bytes` long.
    pub fn new(set: Arc<ReservedSet>, handle: Arc<OpenHandle<OpenCache>>, answers: Vec<&'static str>, len_bytes: u64) -> Self {
        Reservations { held: Some((set, handle)), answers, len_bytes }
    }
}

impl Drop for Reservations {
    fn drop(&mut self) {
        drop_detached(self.held.take());
    }
}

#[pymethods]
impl Reservations {
    #[getter]
    fn outcomes(&self) -> Vec<&'static str> {
        self.answers.clone()
    }

    #[pyo3(signature = (layout, block_ids, *, after=None))]
    fn publish(
        &self,
        py: Python<'_>,
        layout: &BlockLayout,
        block_ids: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<&'static str>> {
        let Some((set, handle)) = &self.held else { return Ok(Vec::new()) };
        if layout.len_bytes() != self.len_bytes {
            let (given_bytes, wanted_bytes) = (layout.len_bytes(), self.len_bytes);
            return Err(invalid(format!("blocks of this layout have {given_bytes} bytes, those that were reserved {wanted_bytes}")));
        }
        let ids = layout.block_ids(block_ids, self.answers.len(), Use::Read)?;
        let (places, local) = (layout.blocks.clone(), layout.place(after)?);
        let stored = py.detach(|| -> Outcome<Vec<usize>> {
            let open = handle.hold()?;
            places.extents().check_outside(&open.pool)?;
            let mut stored = Vec::new();
            set.each_batch(|batch| {
                let committed: Vec<usize> = batch.iter().map(|&(place, _)| place).collect();
                blocks::fill_and_commit(open.cache()?, batch, local, |place| places.ranges(ids[place]))?;
                stored.extend(committed);
                Ok(())
            })?;
            Ok(stored)
        })?;
        let mut outcomes: Vec<_> = self.answers.iter().map(|&answer| if answer == RESERVED { "given_up" } else { answer }).collect();
        stored.into_iter().for_each(|place| outcomes[place] = STORED);
        Ok(outcomes)
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
        format!("Reservations({} blocks)", self.answers.len())
    }
}
