// SPDX-License-Identifier: Apache-2.0
//! The prefix cache as Python has it.

use crate::blocks;
use crate::cold::ColdBlock;
use crate::events::Events;
use crate::failure::{Failure, Outcome, invalid};
use crate::handle::{End, OpenHandle, drop_detached, held};
use crate::layout::BlockLayout;
use crate::local::{Local, Ranges, Use};
use crate::member::Member;
use crate::metrics;
use crate::names::{Namespace, chained_keys_of, key_of, keys_of, parent_of};
use crate::pins::{PinSet, Pins};
use crate::queued::{Call, Kept, Queued, stream_of};
use crate::reservations::{Reservations, ReservedSet};
use crate::watch::Watch;
use cxl_pool::cache::{CacheConfig, Presence, Pulled, Upkeep};
use cxl_pool::copy::LocalPlace;
use cxl_pool::copy::cuda::Reach;
use cxl_pool::metrics::MissReason;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// What messages call it.
pub const WHAT: &str = "the cache";

/// The cache of this process, for as long as a call uses it. Its drop closes it in good order.
pub struct OpenCache {
    pub cache: Option<cxl_pool::Cache>,
    upkeep: Option<Upkeep>,
    pins: Mutex<Vec<Weak<PinSet>>>,
    reservations: Mutex<Vec<Weak<ReservedSet>>>,
    /// Copies that run while their callers continue, and the layouts of their memory.
    queued: Mutex<Vec<Kept>>,
    /// Addresses of the pool in this process.
    pub pool: Range<usize>,
    /// Told when it is closed.
    pub end: Arc<End>,
    /// The host, which outlives the cache.
    pub member: Arc<Member>,
}

impl OpenCache {
    /// Opens the cache.
    ///
    /// # Errors
    /// Those of [`cxl_pool::Cache::open`].
    pub fn open(member: Arc<Member>, config: CacheConfig) -> Outcome<Self> {
        let cache = cxl_pool::Cache::open(&member.host, config)?;
        let upkeep = cache.serve()?;
        let pool = member.addresses();
        Ok(OpenCache {
            cache: Some(cache),
            upkeep: Some(upkeep),
            pins: Mutex::default(),
            reservations: Mutex::default(),
            queued: Mutex::default(),
            pool,
            end: Arc::default(),
            member,
        })
    }

    /// The library's cache.
    ///
    /// # Errors
    /// Never while a call holds it.
    pub fn cache(&self) -> Outcome<&cxl_pool::Cache> {
        self.cache.as_ref().ok_or_else(|| Failure::closed(WHAT))
    }

    /// Remembers pins, so that closing can release them.
    pub fn remember<'a>(&self, sets: impl IntoIterator<Item = &'a Arc<PinSet>>) {
        let mut pins = held(&self.pins);
        pins.retain(|known| known.strong_count() > 0);
        pins.extend(sets.into_iter().map(Arc::downgrade));
    }

    /// Remembers reservations, so that closing can give them up.
    pub fn remember_reserved(&self, set: &Arc<ReservedSet>) {
        let mut reservations = held(&self.reservations);
        reservations.retain(|known| known.strong_count() > 0);
        reservations.push(Arc::downgrade(set));
    }

    /// Keeps queued copies until they end, and drops those that have.
    pub fn remember_queued(&self, kept: Kept) {
        let mut queued = held(&self.queued);
        let ended: Vec<Kept> = queued.extract_if(.., |kept| kept.has_ended()).collect();
        queued.push(kept);
        drop(queued);
        // Without the lock: what they let go of may run code of the program.
        drop_detached(ended);
    }
}

impl Drop for OpenCache {
    fn drop(&mut self) {
        held(&self.reservations).drain(..).filter_map(|set| set.upgrade()).for_each(|set| set.release());
        held(&self.pins).drain(..).filter_map(|set| set.upgrade()).for_each(|set| set.release());
        self.upkeep = None;
        let closed = self.cache.take().map_or(Ok(()), cxl_pool::Cache::close);
        self.end.tell(closed);
    }
}

/// The prefix cache of one process.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Cache {
    handle: Option<Arc<OpenHandle<OpenCache>>>,
}

/// What a lookup tells of a block.
#[pyclass(frozen, get_all, eq, module = "kvbm_cxl")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    cell: u64,
    len_bytes: u64,
    owner: u16,
}

#[pymethods]
impl BlockInfo {
    fn __repr__(&self) -> String {
        format!("BlockInfo(cell={}, len_bytes={}, owner={})", self.cell, self.len_bytes, self.owner)
    }
}

/// What became of a pull.
#[pyclass(frozen, get_all, eq, module = "kvbm_cxl")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PullResult {
    hit: bool,
    len_bytes: u64,
    reason: Option<&'static str>,
}

impl PullResult {
    pub fn of(pulled: &Pulled) -> Self {
        match pulled {
            Pulled::Hit { len_bytes } => PullResult { hit: true, len_bytes: *len_bytes, reason: None },
            Pulled::Miss(reason) => PullResult { hit: false, len_bytes: 0, reason: Some(reason.text()) },
        }
    }
}

#[pymethods]
impl PullResult {
    fn __bool__(&self) -> bool {
        self.hit
    }

    fn __repr__(&self) -> String {
        match self.reason {
            None => format!("PullResult(hit=True, len_bytes={})", self.len_bytes),
            Some(reason) => format!("PullResult(hit=False, reason={reason:?})"),
        }
    }
}

/// How a GPU reaches the pool.
#[pyclass(frozen, get_all, eq, module = "kvbm_cxl")]
#[derive(Clone, PartialEq, Eq)]
pub struct GpuReach {
    device: u32,
    registered_bytes: u64,
    refusal: Option<String>,
    no_kernels: Option<String>,
    dma: &'static str,
}

#[pymethods]
impl GpuReach {
    fn __repr__(&self) -> String {
        let GpuReach { device, registered_bytes, refusal, no_kernels, dma } = self;
        format!(
            "GpuReach(device={device}, registered_bytes={registered_bytes}, refusal={refusal:?}, no_kernels={no_kernels:?}, dma={dma:?})"
        )
    }
}

/// What this process's cells are.
#[pyclass(frozen, get_all, eq, module = "kvbm_cxl")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CellUsage {
    owned: u64,
    free: u64,
    ready: u64,
    quarantined: u64,
}

#[pymethods]
impl CellUsage {
    fn __repr__(&self) -> String {
        let CellUsage { owned, free, ready, quarantined } = self;
        format!("CellUsage(owned={owned}, free={free}, ready={ready}, quarantined={quarantined})")
    }
}

impl Cache {
    pub fn over(handle: Arc<OpenHandle<OpenCache>>) -> Self {
        Cache { handle: Some(handle) }
    }

    fn handle(&self) -> Outcome<&Arc<OpenHandle<OpenCache>>> {
        self.handle.as_ref().ok_or_else(|| Failure::closed(WHAT))
    }

    /// Runs `work` on the cache without the interpreter's lock.
    fn call<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&OpenCache) -> Outcome<T> + Send) -> PyResult<T> {
        let handle = self.handle()?;
        Ok(py.detach(|| work(&*handle.hold()?))?)
    }
}

/// Closes a cache and waits until the calls under way on it have ended; true when it was open.
///
/// # Errors
/// Those of [`End::wait`].
pub fn close(handle: &OpenHandle<OpenCache>) -> Outcome<bool> {
    handle.check_here()?;
    let Some(open) = handle.take() else { return Ok(false) };
    let (end, timeout_ms) = (open.end.clone(), open.member.timeout_ms());
    drop(open);
    end.wait(WHAT, timeout_ms)?;
    Ok(true)
}

impl Drop for Cache {
    fn drop(&mut self) {
        drop_detached(self.handle.take());
    }
}

#[pymethods]
impl Cache {
    #[pyo3(signature = (ns, key, data, *, parent=None))]
    fn publish(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        key: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<&'static str> {
        let (namespace, key, parent) = (ns.0, key_of(key)?, parent_of(parent)?);
        let local = Local::of(data, Use::Read)?;
        let ranges = &local.ranges;
        let answers = self.call(py, |open| {
            ranges.check_outside(&open.pool)?;
            blocks::publish(open, namespace, &[(key, parent)], |_| ranges.len_bytes(), LocalPlace::Host, |_| ranges.0.clone())
        })?;
        match answers.first().copied() {
            Some(done @ ("stored" | "exists" | "busy")) => Ok(done),
            Some(refused) => Err(blocks::refusal(refused).into()),
            None => Err(invalid("a block was not answered")),
        }
    }

    fn pull(&self, py: Python<'_>, ns: &Namespace, key: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<PullResult> {
        let (namespace, key) = (ns.0, key_of(key)?);
        let local = Local::of(into, Use::Write)?;
        let ranges = &local.ranges;
        let pulled = self.call(py, |open| {
            ranges.check_outside(&open.pool)?;
            blocks::pull(open, namespace, &[key], LocalPlace::Host, |_, len_bytes| ranges.first(len_bytes))
        })?;
        match pulled.first() {
            Some(Pulled::Miss(MissReason::Length)) => {
                Err(invalid(format!("the destination has {} bytes, the block more: give room for all of it", ranges.len_bytes())))
            }
            Some(pulled) => Ok(PullResult::of(pulled)),
            None => Err(invalid("a block was not answered")),
        }
    }

    fn lookup(&self, py: Python<'_>, ns: &Namespace, key: &Bound<'_, PyAny>) -> PyResult<Option<BlockInfo>> {
        let (namespace, key) = (ns.0, key_of(key)?);
        let found = self.call(py, |open| Ok(open.cache()?.lookup(namespace, key)?))?;
        Ok(found.map(|found| BlockInfo { cell: found.cell, len_bytes: found.len_bytes, owner: found.owner }))
    }

    fn lookup_chain(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        self.call(py, |open| Ok(open.cache()?.lookup_chain(namespace, &keys)?.len()))
    }

    fn has(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let found = self.call(py, |open| Ok(open.cache()?.lookup_all(namespace, &keys)?))?;
        Ok(found.iter().map(Option::is_some).collect())
    }

    fn presence(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<Vec<&'static str>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let found = self.call(py, |open| Ok(open.cache()?.presence(namespace, &keys)?))?;
        let word = |presence: &Presence| match presence {
            Presence::Absent => "absent",
            Presence::Coming => "coming",
            Presence::There => "there",
        };
        Ok(found.iter().map(word).collect())
    }

    #[pyo3(signature = (ns, len_bytes=None, *, companions=Vec::new()))]
    fn watch(&self, py: Python<'_>, ns: &Namespace, len_bytes: Option<u64>, companions: Vec<Namespace>) -> PyResult<Watch> {
        let (namespace, companions) = (ns.0, companions.iter().map(|companion| companion.0).collect::<Vec<_>>());
        let watch = self.call(py, |open| Ok(open.cache()?.watch(namespace, len_bytes, &companions)?))?;
        Ok(Watch::new(watch, self.handle()?))
    }

    fn pin_chain(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<Pins> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let set = self.call(py, |open| {
            let set = Arc::new(PinSet::new(open.cache()?.pin_chain(namespace, &keys)?));
            open.remember([&set]);
            Ok(set)
        })?;
        Ok(Pins::new(set, self.handle()?.clone()))
    }

    fn pin_all(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Pins>>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let sets = self.call(py, |open| {
            let pinned = open.cache()?.pin_all(namespace, &keys)?.into_iter();
            let sets: Vec<_> = pinned.map(|block| block.ok().map(|block| Arc::new(PinSet::new(vec![block])))).collect();
            open.remember(sets.iter().flatten());
            Ok(sets)
        })?;
        let handle = self.handle()?;
        Ok(sets.into_iter().map(|set| set.map(|set| Pins::new(set, handle.clone()))).collect())
    }

    #[pyo3(signature = (ns, keys, data, *, parents=None))]
    fn publish_all(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<&'static str>> {
        let (namespace, wanted) = (ns.0, chained_keys_of(keys, parents)?);
        let locals = Local::of_each(data, wanted.len(), Use::Read)?;
        let ranges: Vec<&Ranges> = locals.iter().map(|local| &local.ranges).collect();
        self.call(py, |open| {
            ranges.iter().try_for_each(|ranges| ranges.check_outside(&open.pool))?;
            blocks::publish(open, namespace, &wanted, |at| ranges[at].len_bytes(), LocalPlace::Host, |at| ranges[at].0.clone())
        })
    }

    fn pull_all(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<Vec<PullResult>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let locals = Local::of_each(into, keys.len(), Use::Write)?;
        let ranges: Vec<&Ranges> = locals.iter().map(|local| &local.ranges).collect();
        let pulled = self.call(py, |open| {
            ranges.iter().try_for_each(|ranges| ranges.check_outside(&open.pool))?;
            blocks::pull(open, namespace, &keys, LocalPlace::Host, |at, len_bytes| ranges[at].first(len_bytes))
        })?;
        Ok(pulled.iter().map(PullResult::of).collect())
    }

    #[pyo3(signature = (ns, keys, layout, block_ids, *, parents=None, after=None))]
    #[allow(clippy::too_many_arguments)] // Most of them are named in Python.
    fn publish_blocks(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        layout: &BlockLayout,
        block_ids: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<&'static str>> {
        let (namespace, wanted) = (ns.0, chained_keys_of(keys, parents)?);
        let ids = layout.block_ids(block_ids, wanted.len(), Use::Read)?;
        let (places, len_bytes, local) = (layout.blocks.clone(), layout.len_bytes(), layout.place(after)?);
        self.call(py, |open| {
            places.extents().check_outside(&open.pool)?;
            blocks::publish(open, namespace, &wanted, |_| len_bytes, local, |at| places.ranges(ids[at]))
        })
    }

    #[pyo3(signature = (ns, keys, layout, *, parents=None))]
    fn reserve_blocks(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        layout: &BlockLayout,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Reservations> {
        let (namespace, wanted, len_bytes) = (ns.0, chained_keys_of(keys, parents)?, layout.len_bytes());
        let (answers, set) = self.call(py, |open| {
            let (answers, reserved) = blocks::reserve(open.cache()?, namespace, &wanted, |_| len_bytes)?;
            let set = Arc::new(ReservedSet::new(reserved));
            open.remember_reserved(&set);
            Ok((answers, set))
        })?;
        Ok(Reservations::new(set, self.handle()?.clone(), answers, len_bytes))
    }

    #[pyo3(signature = (ns, keys, layout, block_ids, *, after=None))]
    fn pull_blocks(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        layout: &BlockLayout,
        block_ids: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Option<&'static str>>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        let ids = layout.block_ids(block_ids, keys.len(), Use::Write)?;
        let (places, local) = (layout.blocks.clone(), layout.place(after)?);
        let pulled = self.call(py, |open| {
            places.extents().check_outside(&open.pool)?;
            blocks::pull(open, namespace, &keys, local, |at, _| places.ranges(ids[at]))
        })?;
        Ok(blocks::reasons(&pulled))
    }

    #[pyo3(signature = (ns, keys, layout, block_ids, *, stream, parents=None, wait_ms=None))]
    #[allow(clippy::too_many_arguments)] // As above.
    fn queue_publish(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        layout: &Bound<'_, BlockLayout>,
        block_ids: &Bound<'_, PyAny>,
        stream: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        wait_ms: Option<u64>,
    ) -> PyResult<Queued> {
        let wanted = chained_keys_of(keys, parents)?;
        let ids = layout.get().block_ids(block_ids, wanted.len(), Use::Read)?;
        let call = Call { namespace: ns.0, layout: layout.clone().unbind(), ids, stream: stream_of(stream)?, wait_ms };
        call.publish(py, self.handle()?, &wanted)
    }

    #[pyo3(signature = (ns, keys, layout, block_ids, *, stream, wait_ms=None))]
    #[allow(clippy::too_many_arguments)] // As above.
    fn queue_pull(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        layout: &Bound<'_, BlockLayout>,
        block_ids: &Bound<'_, PyAny>,
        stream: &Bound<'_, PyAny>,
        wait_ms: Option<u64>,
    ) -> PyResult<Queued> {
        let keys = keys_of(keys)?;
        let ids = layout.get().block_ids(block_ids, keys.len(), Use::Write)?;
        let call = Call { namespace: ns.0, layout: layout.clone().unbind(), ids, stream: stream_of(stream)?, wait_ms };
        call.pull(py, self.handle()?, &keys)
    }

    fn open_gpu(&self, py: Python<'_>, device: u32) -> PyResult<GpuReach> {
        let reach = self.call(py, |open| Ok(open.cache()?.copy_engine().open_gpu(device)?))?;
        let Reach { registered_bytes, refusal, no_kernels, dma } = reach;
        Ok(GpuReach { device, registered_bytes, refusal, no_kernels, dma: dma.text() })
    }

    #[pyo3(signature = (timeout_ms=0))]
    fn is_settled(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<bool> {
        self.call(py, |open| Ok(open.cache()?.copy_engine().is_settled(timeout_ms)))
    }

    fn evict(&self, py: Python<'_>, ns: &Namespace, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (namespace, key) = (ns.0, key_of(key)?);
        self.call(py, |open| Ok(open.cache()?.evict(namespace, key)?))
    }

    fn evict_all(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let (namespace, keys) = (ns.0, keys_of(keys)?);
        self.call(py, |open| Ok(open.cache()?.evict_all(namespace, &keys)?))
    }

    fn clear(&self, py: Python<'_>, ns: &Namespace) -> PyResult<usize> {
        let namespace = ns.0;
        self.call(py, |open| Ok(open.cache()?.clear(Some(namespace))?))
    }

    fn clear_all(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |open| Ok(open.cache()?.clear(None)?))
    }

    fn coldest(&self, py: Python<'_>, limit: usize) -> PyResult<Vec<ColdBlock>> {
        let found = self.call(py, |open| Ok(open.cache()?.coldest(limit)))?;
        let handle = self.handle()?;
        Ok(found.into_iter().map(|block| ColdBlock::new(block, handle)).collect())
    }

    fn usage(&self, py: Python<'_>) -> PyResult<CellUsage> {
        let usage = self.call(py, |open| Ok(open.cache()?.usage()))?;
        Ok(CellUsage { owned: usage.owned, free: usage.free, ready: usage.ready, quarantined: usage.quarantined })
    }

    fn pinned(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |open| Ok(open.cache()?.pinned()))
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metrics::dict_of(py, &self.prometheus(py)?)
    }

    fn prometheus(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |open| {
            let mut text = String::new();
            open.cache()?.metrics().render(&mut text);
            Ok(text)
        })
    }

    #[pyo3(signature = (capacity=None))]
    fn subscribe(&self, py: Python<'_>, capacity: Option<usize>) -> PyResult<Events> {
        let capacity = capacity.unwrap_or(cxl_pool::cache::events::DEFAULT_QUEUED_EVENTS);
        Ok(Events::new(self.call(py, |open| Ok(open.cache()?.events().subscribe_with(capacity)))?))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.handle()?;
        py.detach(|| close(handle))?;
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}
