// SPDX-License-Identifier: Apache-2.0
//! Memory of the pool in the hands of Python: a block of the allocator with the buffer protocol.

use crate::failure::{Failure, Outcome, invalid};
use crate::living::{Native, drop_detached};
use crate::member::Member;
use cxl_pool::cache::lent::RegionMemory;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const WHAT: &str = "the memory";

/// A block, and the membership that it keeps alive.
struct Block {
    /// Of a region whose blocks can be lent: how it is given back. Declared first: it uses the allocator, which ends with the membership.
    region: Option<Arc<RegionMemory>>,
    member: Arc<Member>,
    offset: u64,
    len_bytes: u64,
    name: Option<String>,
    /// What is not given back stays for others, under its name.
    is_freed: AtomicBool,
}

impl Block {
    fn free(&self) -> Outcome<()> {
        if self.is_freed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let freed = match &self.region {
            Some(region) => region.free().map_err(Failure::from),
            None => self.unname().and_then(|()| {
                // What a view stored and nobody flushed would be written back onto the next user's bytes.
                self.flush(0, self.len_bytes)?;
                Ok(self.member.allocator()?.free(self.offset)?)
            }),
        };
        if freed.is_err() {
            self.is_freed.store(false, Ordering::Release);
        }
        freed
    }

    /// Writes a part back and drops it from this host's caches.
    fn flush(&self, at: u64, len_bytes: u64) -> Outcome<()> {
        let memory = self.member.pool.lines().memory();
        memory.flush_range(self.offset + at, len_bytes)?;
        memory.fence_all();
        Ok(())
    }

    /// Takes the name away first: with it, others find the block, and it must stay.
    fn unname(&self) -> Outcome<()> {
        match &self.name {
            Some(name) => Ok(self.member.objects().destroy(name.as_bytes(), self.member.timeout_ms())?),
            None => Ok(()),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.name.is_none() {
            // A block that cannot be given back now stays allocated, which `cxlctl fsck` tells.
            let _ = self.free();
        }
        self.member.blocks.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Memory of the pool.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct PoolMemory {
    block: Native<Block>,
    address: usize,
    /// Buffers that somebody has of it.
    exports: AtomicUsize,
}

impl PoolMemory {
    /// Allocates a block.
    ///
    /// # Errors
    /// Those of the allocator and of the table of names.
    pub fn allocate(member: Arc<Member>, len_bytes: u64, name: Option<String>, kept: bool) -> Outcome<Self> {
        if name.is_some() && !kept {
            return Err(Failure::invalid("memory with a name is for others to find: it has to be kept"));
        }
        let allocator = member.allocator()?;
        let block = allocator.alloc(len_bytes)?;
        let publish = || -> Outcome<()> {
            if kept {
                allocator.keep(block.offset)?;
            }
            if let Some(name) = &name {
                member.objects().put(name.as_bytes(), block.offset, len_bytes, member.timeout_ms())?;
            }
            Ok(())
        };
        if let Err(error) = publish() {
            // The first error is the one to report.
            let _ = allocator.free(block.offset);
            return Err(error);
        }
        drop(allocator);
        Self::over(member, block.offset, len_bytes, name, None)
    }

    /// The memory of a region, given back with this object or by `free`, once nobody can lend a block of it.
    ///
    /// # Errors
    /// That the pool has no address here.
    pub fn of_region(member: Arc<Member>, region: Arc<RegionMemory>) -> Outcome<Self> {
        Self::over(member, region.offset(), region.len_bytes(), None, Some(region))
    }

    /// The memory that a name stands for.
    ///
    /// # Errors
    /// [`cxl_pool::Error::NotFound`].
    pub fn find(member: Arc<Member>, name: String) -> Outcome<Self> {
        let found = member.objects().get(name.as_bytes(), member.timeout_ms())?;
        Self::over(member, found.offset, found.len_bytes, Some(name), None)
    }

    fn over(member: Arc<Member>, offset: u64, len_bytes: u64, name: Option<String>, region: Option<Arc<RegionMemory>>) -> Outcome<Self> {
        let address = member.pool.lines().memory().address_for_stores(offset, len_bytes).map_or(0, |address| address.addr().get());
        member.blocks.fetch_add(1, Ordering::AcqRel);
        let block = Native::new(Block { region, member, offset, len_bytes, name, is_freed: AtomicBool::new(false) });
        if address == 0 {
            return Err(Failure::Own("DeviceError", "no_address", "the pool has no address in this process".into()));
        }
        Ok(PoolMemory { block, address, exports: AtomicUsize::new(0) })
    }

    /// Address of its first byte.
    ///
    /// # Errors
    /// [`Failure::closed`], [`Failure::forked`].
    pub fn start(&self) -> Outcome<usize> {
        self.usable().map(|_| self.address)
    }

    fn usable(&self) -> Outcome<&Block> {
        let block = self.block.get(WHAT)?;
        if block.is_freed.load(Ordering::Acquire) { Err(Failure::closed(WHAT)) } else { Ok(block) }
    }
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        drop_detached(self.block.take());
    }
}

#[pymethods]
impl PoolMemory {
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.start()?)
    }

    #[getter]
    fn offset(&self) -> PyResult<u64> {
        Ok(self.usable()?.offset)
    }

    #[getter]
    fn len_bytes(&self) -> PyResult<u64> {
        Ok(self.usable()?.len_bytes)
    }

    #[getter]
    fn name(&self) -> PyResult<Option<String>> {
        Ok(self.usable()?.name.clone())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.usable()?.len_bytes as usize)
    }

    #[pyo3(signature = (offset=0, len_bytes=None))]
    fn flush(&self, py: Python<'_>, offset: u64, len_bytes: Option<u64>) -> PyResult<()> {
        let block = self.usable()?;
        let rest = block.len_bytes.checked_sub(offset).ok_or_else(|| invalid(format!("offset {offset} lies behind the memory")))?;
        let len_bytes = len_bytes.unwrap_or(rest);
        if len_bytes > rest {
            return Err(invalid(format!("{len_bytes} bytes at offset {offset} reach behind the memory of {} bytes", block.len_bytes)));
        }
        Ok(py.detach(|| block.flush(offset, len_bytes))?)
    }

    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let block = self.block.get(WHAT)?;
        if self.exports.load(Ordering::Acquire) > 0 {
            return Err(invalid("somebody still has a buffer of the memory: drop views of it first"));
        }
        if block.region.as_ref().is_some_and(|region| Arc::strong_count(region) > 1) {
            return Err(invalid("blocks of the memory can still be lent: drop its LentRegion, or close the cache, first"));
        }
        Ok(py.detach(|| block.free())?)
    }

    /// # Safety
    /// Called by the interpreter, with a view to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let len = match this.usable() {
            Ok(block) => block.len_bytes as ffi::Py_ssize_t,
            Err(failure) => {
                // SAFETY: the interpreter's view, which has to have no object where a request fails.
                unsafe { (*view).obj = std::ptr::null_mut() };
                return Err(PyBufferError::new_err(PyErr::from(failure).value(slf.py()).to_string()));
            }
        };
        let start = std::ptr::with_exposed_provenance_mut(this.address);
        // SAFETY: the view is the interpreter's; the memory stays mapped and allocated as long as this object, which the view keeps alive.
        if unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 0, flags) } != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        this.exports.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, with a view that was filled.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }

    fn __repr__(&self) -> String {
        match self.usable() {
            Ok(Block { offset, len_bytes, name, .. }) => format!("PoolMemory({len_bytes} bytes at {offset:#x}, name={name:?})"),
            Err(_) => "PoolMemory(given back)".into(),
        }
    }
}
