// SPDX-License-Identifier: Apache-2.0
//! Memory of the pool in the hands of Python: a block of the allocator with the buffer protocol.

use crate::failure::{Failure, Outcome, invalid};
use crate::handle::{Native, drop_detached};
use crate::member::Member;
use cxl_pool::Error;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const WHAT: &str = "the memory";

/// A block, and the membership that it keeps alive.
struct Block {
    member: Arc<Member>,
    offset: u64,
    len_bytes: u64,
    name: Option<String>,
    /// The name still stands for it.
    is_named: AtomicBool,
    /// It is given back, or about to be: no view of it can be made. Memory that is not freed stays for others, under its name.
    is_freed: AtomicBool,
}

impl Block {
    /// Its name, until that is taken away.
    fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.is_named.load(Ordering::Acquire))
    }

    /// Refuses views from now on; false where that is so already, and the call that did it gives the block back.
    fn begin_free(&self) -> bool {
        !self.is_freed.swap(true, Ordering::AcqRel)
    }

    /// Takes [`Block::begin_free`] back: it is still there.
    fn stays(&self) {
        self.is_freed.store(false, Ordering::Release);
    }

    /// Gives it back, after [`Block::begin_free`].
    fn free(&self) -> Outcome<()> {
        self.give_back().inspect_err(|_| self.stays())
    }

    fn give_back(&self) -> Outcome<()> {
        // Before the name goes: without it no program would find the block to try again.
        let allocator = self.member.allocator()?;
        self.unname()?;
        // What a view stored and did not flush would be written back onto the next user's bytes.
        self.flush(0, self.len_bytes)?;
        Ok(allocator.free(self.offset)?)
    }

    fn flush(&self, at: u64, len_bytes: u64) -> Outcome<()> {
        let memory = self.member.pool.lines().memory();
        memory.flush_range(self.offset + at, len_bytes)?;
        memory.fence_all();
        Ok(())
    }

    /// Takes the name away first: with it, others find the block, and it must stay. A name that stands for something else by now shows
    /// that another process gave this block back before, and that it is another's. Where it is not known whether the name went, the block
    /// is left as it is: it may have been given back by the process that took the name.
    fn unname(&self) -> Outcome<()> {
        if let Some(name) = self.name() {
            self.member.objects().destroy_at(name.as_bytes(), self.offset, self.member.timeout_ms())?;
            self.is_named.store(false, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.name().is_none() && self.begin_free() {
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
    exports: AtomicUsize,
}

impl PoolMemory {
    pub fn allocate(member: Arc<Member>, len_bytes: u64, name: Option<String>, kept: Option<bool>) -> Outcome<Self> {
        // No other process can name the rest: it ends with its process.
        let kept = kept.unwrap_or(name.is_some());
        if name.is_some() && !kept {
            return Err(Failure::invalid("memory with a name is for others to find: it has to be kept"));
        }
        let allocator = member.allocator()?;
        let block = allocator.alloc(len_bytes)?;
        let (objects, timeout_ms) = (member.objects(), member.timeout_ms());
        let publish = || -> Outcome<()> {
            if kept {
                allocator.keep(block.offset)?;
            }
            if let Some(name) = &name {
                objects.put(name.as_bytes(), block.offset, len_bytes, timeout_ms)?;
            }
            Ok(())
        };
        if let Err(error) = publish() {
            let bound = match (&error, &name) {
                // A host that is fenced meanwhile does not know whether the name was bound, and a block that is found stays.
                (Failure::Pool(Error::Fenced { .. }), Some(name)) => {
                    objects.get(name.as_bytes(), timeout_ms).map(|found| found.offset == block.offset)
                }
                _ => Ok(false),
            };
            match bound {
                Ok(true) => {}
                Ok(false) | Err(Error::NotFound(_)) => {
                    // The first error is the one to report.
                    let _ = allocator.free(block.offset);
                    return Err(error);
                }
                Err(_) => return Err(error),
            }
        }
        drop(allocator);
        Self::over(member, block.offset, len_bytes, name)
    }

    pub fn find(member: Arc<Member>, name: String) -> Outcome<Self> {
        let found = member.objects().get(name.as_bytes(), member.timeout_ms())?;
        Self::over(member, found.offset, found.len_bytes, Some(name))
    }

    fn over(member: Arc<Member>, offset: u64, len_bytes: u64, name: Option<String>) -> Outcome<Self> {
        let address = member.pool.lines().memory().address_for_stores(offset, len_bytes).map_or(0, |address| address.addr().get());
        member.blocks.fetch_add(1, Ordering::AcqRel);
        let (is_named, is_freed) = (name.is_some().into(), false.into());
        let block = Native::new(Block { member, offset, len_bytes, name, is_named, is_freed });
        if address == 0 {
            return Err(Failure::Own("DeviceError", "no_address", "the pool has no address in this process".into()));
        }
        Ok(PoolMemory { block, address, exports: AtomicUsize::new(0) })
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
        Ok(self.usable().map(|_| self.address)?)
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
        Ok(self.usable()?.name().map(String::from))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.usable()?.len_bytes as usize)
    }

    #[pyo3(signature = (offset=0, len_bytes=None))]
    fn flush(&self, py: Python<'_>, offset: u64, len_bytes: Option<u64>) -> PyResult<()> {
        let block = self.usable()?;
        let rest = block.len_bytes.checked_sub(offset).ok_or_else(|| invalid(format!("offset {offset} is beyond the memory")))?;
        let len_bytes = len_bytes.unwrap_or(rest);
        if len_bytes > rest {
            return Err(invalid(format!("{len_bytes} bytes at offset {offset} reach beyond the memory of {} bytes", block.len_bytes)));
        }
        Ok(py.detach(|| block.flush(offset, len_bytes))?)
    }

    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let block = self.block.get(WHAT)?;
        if !block.begin_free() {
            return Ok(());
        }
        // Views come and are counted under the interpreter's lock, which is held: a view that exists by now is seen, and none comes later.
        if self.exports.load(Ordering::Acquire) > 0 {
            block.stays();
            return Err(invalid("the program still has a buffer of the memory: drop views of it first"));
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
            Ok(block) => format!("PoolMemory({} bytes at {:#x}, name={:?})", block.len_bytes, block.offset, block.name()),
            Err(_) => "PoolMemory(given back)".into(),
        }
    }
}
