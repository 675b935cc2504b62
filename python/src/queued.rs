// SPDX-License-Identifier: Apache-2.0
//! Copies of GPU blocks that run while the caller continues, in the order of its streams.

use crate::blocks::STORED;
use crate::cache::{OpenCache, WHAT};
use crate::failure::{Failure, Outcome, invalid};
use crate::handle::{Native, OpenHandle, drop_detached};
use crate::layout::BlockLayout;
use cxl_pool::Error;
use cxl_pool::cache::tier::Answer;
use cxl_pool::cache::{BlockKey, Namespace, PublishRequest, queued};
use cxl_pool::copy::{After, OnGpu};
use cxl_pool::metrics::RefusalReason;
use pyo3::prelude::*;
use std::sync::Arc;

/// Queued copies with the owners of their memory: kept until the end, whatever the program keeps.
pub struct Kept {
    queued: queued::Queued,
    _layout: Py<BlockLayout>,
}

impl Kept {
    pub fn new(queued: queued::Queued, layout: Py<BlockLayout>) -> Self {
        Kept { queued, _layout: layout }
    }

    /// Whether it may go: the GPU does nothing of it any more.
    pub fn has_ended(&self) -> bool {
        self.queued.poll().is_some()
    }
}

/// A stream of a GPU: an object of torch's, or its number.
pub fn stream_of(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    if object.hasattr("cuda_stream")? {
        return object.getattr("cuda_stream")?.extract();
    }
    object.extract().map_err(|_| invalid(format!("{:?} is no stream of a GPU", object.get_type().name().map(|name| name.to_string()))))
}

/// Where the blocks of a call lie, which come after this.
fn on_gpu(layout: &BlockLayout, after: After) -> PyResult<OnGpu> {
    match layout.gpu() {
        Some(device) => Ok(OnGpu { device, after }),
        None => Err(invalid("the blocks lie in the host's memory: no stream of a GPU orders their copies")),
    }
}

pub struct Call {
    pub namespace: Namespace,
    pub layout: Py<BlockLayout>,
    pub ids: Vec<usize>,
    pub stream: u64,
    /// Longest wait for room among the bytes under way; `None` = the time of the pool's calls.
    pub wait_ms: Option<u64>,
}

impl Call {
    pub fn publish(self, py: Python<'_>, handle: &Arc<OpenHandle<OpenCache>>, wanted: &[(BlockKey, Option<BlockKey>)]) -> PyResult<Queued> {
        let Call { namespace, layout, ids, stream, wait_ms } = self;
        let (places, len_bytes, on) = (layout.get().blocks.clone(), layout.get().len_bytes(), on_gpu(layout.get(), After::Stream(stream))?);
        let request = |&(key, parent): &(BlockKey, Option<BlockKey>)| PublishRequest { namespace, key, parent, len_bytes };
        let requests: Vec<PublishRequest> = wanted.iter().map(request).collect();
        let queued = py.detach(|| -> Outcome<queued::Queued> {
            let open = handle.hold()?;
            places.extents().check_outside(&open.pool)?;
            let wait_ms = wait_ms.unwrap_or(open.member.timeout_ms());
            // SAFETY: the layout, which says whose memory it is, is kept until the end; that no other work writes to it meanwhile, and that
            // the stream is there, is what the documentation of the Python functions demands. The same below.
            Ok(unsafe { open.cache()?.queue_publish(&requests, on, wait_ms, |at| places.ranges(ids[at])) }?)
        })?;
        Queued::new(py, queued, layout, handle, true)
    }

    pub fn pull(self, py: Python<'_>, handle: &Arc<OpenHandle<OpenCache>>, keys: &[BlockKey]) -> PyResult<Queued> {
        let Call { namespace, layout, ids, stream, wait_ms } = self;
        let (places, on) = (layout.get().blocks.clone(), on_gpu(layout.get(), After::Stream(stream))?);
        let queued = py.detach(|| -> Outcome<queued::Queued> {
            let open = handle.hold()?;
            places.extents().check_outside(&open.pool)?;
            let wait_ms = wait_ms.unwrap_or(open.member.timeout_ms());
            // SAFETY: as above; no block is named twice.
            Ok(unsafe { open.cache()?.queue_pull(namespace, keys, on, wait_ms, |at, _| places.ranges(ids[at])) }?)
        })?;
        Queued::new(py, queued, layout, handle, false)
    }
}

/// The end of blocks that were queued.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Queued {
    queued: Native<queued::Queued>,
    timeout_ms: u64,
    is_publish: bool,
}

impl Queued {
    /// Of blocks in memory of this layout.
    pub fn new(
        py: Python<'_>,
        queued: queued::Queued,
        layout: Py<BlockLayout>,
        handle: &Arc<OpenHandle<OpenCache>>,
        is_publish: bool,
    ) -> PyResult<Queued> {
        let kept = Kept::new(queued.clone(), layout);
        let timeout_ms = py.detach(|| -> Outcome<u64> {
            let open = handle.hold()?;
            open.remember_queued(kept);
            Ok(open.member.timeout_ms())
        })?;
        Ok(Queued { queued: Native::new(queued), timeout_ms, is_publish })
    }

    fn queued(&self) -> Outcome<&queued::Queued> {
        self.queued.get("what was queued")
    }
}

/// The word of a block's answer, `None` for a block that was pulled.
fn word_of(answer: &Answer, is_publish: bool) -> Outcome<Option<&'static str>> {
    match answer {
        Answer::Done => Ok(is_publish.then_some(STORED)),
        Answer::Exists => Ok(Some("exists")),
        Answer::Refused(RefusalReason::Busy) => Ok(Some("busy")),
        Answer::Refused(RefusalReason::PoolFull) => Ok(Some("no_cell")),
        Answer::Refused(RefusalReason::TableFull) => Ok(Some("no_hint")),
        Answer::Refused(RefusalReason::Quota) => Ok(Some("over_quota")),
        Answer::Missed(reason) => Ok(Some(reason.text())),
        Answer::Failed(error) => Err(Failure::of(error)),
        Answer::Dropped => Err(Failure::closed(WHAT)),
        other => Err(Failure::invalid(format!("{other:?} is no answer of a queued block"))),
    }
}

#[pymethods]
impl Queued {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let queued = self.queued()?;
        Ok(py.detach(|| queued.poll().is_some()))
    }

    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<Vec<Option<&'static str>>> {
        let (queued, timeout_ms) = (self.queued()?, timeout_ms.unwrap_or(self.timeout_ms));
        match py.detach(|| queued.wait(timeout_ms)) {
            Some(answers) => Ok(answers.iter().map(|answer| word_of(answer, self.is_publish)).collect::<Outcome<_>>()?),
            None => Err(Failure::from(Error::Timeout { what: "the end of queued blocks".into(), timeout_ms }).into()),
        }
    }

    fn hold(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (queued, stream) = (self.queued()?, stream_of(stream)?);
        // SAFETY: that the stream is there is what the documentation of the Python function demands.
        Ok(py.detach(|| unsafe { queued.hold(stream) }).map_err(Failure::from)?)
    }

    fn __repr__(&self) -> String {
        let kind = if self.is_publish { "publish" } else { "pull" };
        let ended = self.queued().is_ok_and(|queued| queued.poll().is_some());
        format!("Queued({kind}, {})", if ended { "ended" } else { "under way" })
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        drop_detached(self.queued.take());
    }
}
