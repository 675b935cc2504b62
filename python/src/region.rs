// SPDX-License-Identifier: Apache-2.0
//! A paged KV cache in memory of the pool, whose blocks are published where they lie.

use crate::blocks;
use crate::cache::{OpenCache, WHAT};
use crate::failure::{Failure, Outcome, invalid};
use crate::handle::{Native, OpenHandle, drop_detached, held};
use crate::layout::BlockLayout;
use crate::memory::PoolMemory;
use crate::names::{Namespace, chained_keys_of, keys_of};
use cxl_pool::Error;
use cxl_pool::cache::lent::{self, Lend, Lending, Offer, Part, RegionSize};
use cxl_pool::copy::LocalPlace;
use pyo3::prelude::*;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// Longest time until references to blocks that were taken back are removed, in milliseconds. As long as one stands its block is found and
/// cannot be loaded.
const TIDY_MS: u64 = 100;

/// A region, until it ends: with the cache, or with the last object of Python's that can lend blocks of it.
pub struct Lender {
    region: RwLock<Option<lent::LentRegion>>,
    /// Wakes the thread that tidies; the thread ends when this is dropped.
    tidy: SyncSender<()>,
}

impl Lender {
    /// Makes a region of an open cache; the memory is the caller's.
    ///
    /// # Errors
    /// Those of [`lent::LentRegion::create`]; that there is no thread to be had.
    pub fn create(open: &OpenCache, size: RegionSize) -> Outcome<(Arc<Lender>, PoolMemory)> {
        let region = lent::LentRegion::create(open.cache()?, &open.member.allocator()?, size)?;
        let memory = PoolMemory::of_region(open.member.clone(), region.memory().clone())?;
        let (tidy, woken) = sync_channel(1);
        let lender = Arc::new(Lender { region: RwLock::new(Some(region)), tidy });
        let known = Arc::downgrade(&lender);
        let host = open.member.host.clone();
        let run = move || {
            host.bind_upkeep("binding the thread that tidies up lent blocks to its CPUs");
            // Held no longer: the thread may outlive the host's last user.
            drop(host);
            while woken.recv_timeout(Duration::from_millis(TIDY_MS)) != Err(RecvTimeoutError::Disconnected) {
                let Some(lender) = known.upgrade() else { return };
                // Whatever it is: the calls of this process meet it too and report it, and the next round tries again.
                let _ = lender.with(|region| Ok(region.tidy()?));
            }
        };
        let thread = std::thread::Builder::new().name("cxl-lent".into()).spawn(run);
        thread.map_err(|source| Error::Os { what: "start the thread that tidies up lent blocks".into(), source })?;
        open.remember_lender(&lender);
        Ok((lender, memory))
    }

    /// Works with the region while it is there. A thread that ends it waits.
    fn with<T>(&self, work: impl FnOnce(&lent::LentRegion) -> Outcome<T>) -> Outcome<Option<T>> {
        self.region.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(work).transpose()
    }

    /// As [`Lender::with`], for what makes no sense without it.
    fn open<T>(&self, work: impl FnOnce(&lent::LentRegion) -> Outcome<T>) -> Outcome<T> {
        self.with(work)?.ok_or_else(|| Failure::closed(WHAT))
    }

    /// Takes every block back, for good: none can be lent any more.
    ///
    /// # Errors
    /// Those of the memory; then the region is there still, and its blocks cannot be written.
    pub fn end(&self) -> Outcome<()> {
        let mut region = self.region.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &*region {
            open.take_back_all()?;
            // What is left is a miss to a reader that follows it, and is removed by others.
            let _ = open.tidy();
        }
        *region = None;
        Ok(())
    }
}

/// A region as Python has it. It ends before its memory can be given back.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct LentRegion {
    lender: Native<Arc<Lender>>,
    #[pyo3(get)]
    memory: Py<PoolMemory>,
    /// The cache, which stays open as long as there is a region of it.
    handle: Option<Arc<OpenHandle<OpenCache>>>,
}

impl LentRegion {
    /// Of a cache.
    pub fn new(lender: Arc<Lender>, memory: Py<PoolMemory>, handle: Arc<OpenHandle<OpenCache>>) -> Self {
        LentRegion { lender: Native::new(lender), memory, handle: Some(handle) }
    }

    fn lender(&self) -> Outcome<&Arc<Lender>> {
        self.lender.get("the region")
    }

    fn parts(&self) -> Outcome<(&Arc<Lender>, &Arc<OpenHandle<OpenCache>>)> {
        Ok((self.lender()?, self.handle.as_ref().ok_or_else(|| Failure::closed(WHAT))?))
    }

    /// Runs `work` on the region, with the cache held open, without the interpreter's lock.
    fn call<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&lent::LentRegion) -> Outcome<T> + Send) -> PyResult<T> {
        let (lender, handle) = self.parts()?;
        Ok(py.detach(|| {
            let open = handle.hold()?;
            let done = lender.open(work);
            drop(open);
            done
        })?)
    }

    /// As [`LentRegion::call`], also once the cache is closed; `None` then.
    fn call_late<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&lent::LentRegion) -> Outcome<T> + Send) -> PyResult<Option<T>> {
        let lender = self.lender()?;
        Ok(py.detach(|| lender.with(work))?)
    }
}

impl Drop for LentRegion {
    fn drop(&mut self) {
        let (lender, handle) = (self.lender.take(), self.handle.take());
        drop_detached((lender.map(Ending), handle));
    }
}

/// Ends the region in its drop.
struct Ending(Arc<Lender>);

impl Drop for Ending {
    fn drop(&mut self) {
        // If the memory fails there is nothing left to be done about it.
        let _ = self.0.end();
    }
}

/// Numbers of blocks as Python has them; whether there are such blocks is the library's to say.
fn ids_of(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let id_of = |id: Bound<'_, PyAny>| {
        let id: i64 = id.extract()?;
        u32::try_from(id).map_err(|_| invalid(format!("block {id} does not exist")))
    };
    ids.try_iter()?.map(|id| id_of(id?)).collect()
}

fn check_count(keys: usize, blocks: usize) -> PyResult<()> {
    if keys == blocks { Ok(()) } else { Err(invalid(format!("{keys} keys, but {blocks} blocks: give one block for each key"))) }
}

#[pymethods]
impl LentRegion {
    #[getter]
    fn block_count(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |region| Ok(region.blocks()))
    }

    #[getter]
    fn block_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |region| Ok(region.block_bytes()))
    }

    fn set_layout(&self, py: Python<'_>, layout: &BlockLayout) -> PyResult<()> {
        let start = self.memory.get().start()?;
        let blocks = layout.blocks.clone();
        self.call(py, |region| {
            if blocks.count() != region.blocks() as usize {
                return Err(Failure::invalid(format!("a layout of {} blocks, a region of {}", blocks.count(), region.blocks())));
            }
            let outside = || Failure::invalid("the layout is of other memory than the region's");
            let part_of = |(address, stride_bytes, len_bytes): (usize, usize, usize)| {
                let start_bytes = address.checked_sub(start).ok_or_else(outside)? as u64;
                Ok(Part { start_bytes, stride_bytes: stride_bytes as u64, len_bytes: len_bytes as u64 })
            };
            let parts = blocks.parts().map(part_of).collect::<Outcome<Vec<_>>>()?;
            Ok(region.set_parts(&parts)?)
        })
    }

    #[pyo3(signature = (ns, keys, block_ids, *, parents=None))]
    fn offer(
        slf: Bound<'_, Self>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<LentOffer> {
        let (namespace, wanted, ids) = (ns.0, chained_keys_of(keys, parents)?, ids_of(block_ids)?);
        check_count(wanted.len(), ids.len())?;
        let wish = |(block, (key, parent))| Lend { block, namespace, key, parent };
        let wishes: Vec<Lend> = ids.into_iter().zip(wanted).map(wish).collect();
        let offer = slf.get().call(slf.py(), |region| Ok(region.offer(&wishes)?))?;
        Ok(LentOffer { offer: Mutex::new(Some(offer)), region: slf.unbind() })
    }

    fn take_back(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<usize> {
        let ids = ids_of(block_ids)?;
        let taken = self.call_late(py, |region| Ok(region.take_back(&ids)?))?.unwrap_or(0);
        if taken > 0 {
            // Full: it is awake already.
            let _ = self.lender()?.tidy.try_send(());
        }
        Ok(taken)
    }

    fn pull_blocks(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Option<&'static str>>> {
        let (namespace, keys, ids) = (ns.0, keys_of(keys)?, ids_of(block_ids)?);
        // SAFETY: that no other thread uses these blocks meanwhile is what the documentation of this function demands.
        let pulled = self.call(py, |region| Ok(unsafe { region.pull(namespace, &keys, &ids) }?))?;
        Ok(blocks::reasons(&pulled))
    }

    #[pyo3(signature = (ns, keys, block_ids, *, parents=None))]
    fn publish_blocks(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<&'static str>> {
        let (namespace, wanted, ids) = (ns.0, chained_keys_of(keys, parents)?, ids_of(block_ids)?);
        check_count(wanted.len(), ids.len())?;
        let (lender, handle) = self.parts()?;
        Ok(py.detach(|| {
            let open = handle.hold()?;
            lender.open(|region| {
                let pieces = ids.iter().map(|&id| region.pieces(id)).collect::<Result<Vec<_>, _>>()?;
                let len_bytes = region.block_bytes();
                blocks::publish(&open, namespace, &wanted, |_| len_bytes, LocalPlace::Host, |at| pieces[at].clone())
            })
        })?)
    }

    fn lent(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.call_late(py, |region| Ok(region.lent()))?.unwrap_or(0))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.call(py, |region| Ok((region.blocks(), region.block_bytes(), region.memory().offset()))) {
            Ok((blocks, len_bytes, offset)) => format!("LentRegion({blocks} blocks of {len_bytes} bytes at {offset:#x})"),
            Err(_) => "LentRegion(closed)".into(),
        }
    }
}

/// Blocks that are promised not to be written until they are taken back, and are not lent yet.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct LentOffer {
    offer: Mutex<Option<Offer>>,
    region: Py<LentRegion>,
}

#[pymethods]
impl LentOffer {
    fn lend(&self, py: Python<'_>) -> PyResult<Vec<&'static str>> {
        let region = self.region.get();
        region.lender()?;
        let offer = held(&self.offer).take().ok_or_else(|| invalid("the blocks of this offer were lent before: offer them again"))?;
        let answers = region.call(py, |region| Ok(region.lend(offer)?))?;
        Ok(answers.into_iter().map(text_of).collect())
    }
}

fn text_of(lending: Lending) -> &'static str {
    match lending {
        Lending::Lent => "lent",
        Lending::Exists => "exists",
        Lending::Busy => "busy",
        Lending::NoCell => "no_cell",
        Lending::NoHint => "no_hint",
        Lending::OverQuota => "over_quota",
        Lending::TakenBack => "taken_back",
    }
}
