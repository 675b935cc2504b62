// SPDX-License-Identifier: Apache-2.0
//! Memory of Python objects that payload is copied from or to: whatever has the buffer protocol, and tensors by their address.

use crate::buffer::Export;
use crate::failure::{Failure, Outcome, invalid};
use cxl_pool::copy::LocalRange;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use std::ops::Range;
use std::ptr::NonNull;

/// The use of the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Read,
    Write,
}

/// Stretches of memory, to be used without the interpreter's lock.
#[derive(Clone, Default)]
pub struct Ranges(pub Vec<LocalRange>);

// SAFETY: they are addresses and lengths; that the memory behind them may be used is promised by the holder of the objects, and holds for
// any thread.
unsafe impl Send for Ranges {}
// SAFETY: as above.
unsafe impl Sync for Ranges {}

impl Ranges {
    /// Bytes in all.
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|range| range.len_bytes as u64).sum()
    }

    /// The first bytes of it; fewer where there are not that many.
    pub fn first(&self, len_bytes: u64) -> Vec<LocalRange> {
        let mut left = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let cut = |range: &LocalRange| {
            let len_bytes = range.len_bytes.min(left);
            left -= len_bytes;
            LocalRange { len_bytes, ..*range }
        };
        self.0.iter().map(cut).collect()
    }

    /// Refuses memory of the pool itself, which payload cannot be copied from or to.
    ///
    /// # Errors
    /// [`Failure::invalid`].
    pub fn check_outside(&self, pool: &Range<usize>) -> Outcome<()> {
        let within = |range: &LocalRange| {
            let start = range.address.addr().get();
            range.len_bytes > 0 && start < pool.end && pool.start < start + range.len_bytes
        };
        if self.0.iter().any(within) {
            return Err(Failure::invalid("the memory lies in the pool itself: copy it to ordinary memory first"));
        }
        Ok(())
    }
}

/// Memory of Python objects, and what keeps it where it is.
#[derive(Default)]
pub struct Local {
    pub ranges: Ranges,
    /// Exported buffers, which neither move nor shrink while these are there.
    buffers: Vec<Export>,
}

impl Local {
    /// Memory of several blocks, one object or list of objects for each of `count` keys.
    ///
    /// # Errors
    /// `InvalidError` for another number of them, for what has no memory that can be used as asked, and for a byte that two pulls write.
    pub fn of_each(objects: &Bound<'_, PyAny>, count: usize, usage: Use) -> PyResult<Vec<Local>> {
        let locals = objects.try_iter()?.map(|object| Local::of(&object?, usage)).collect::<PyResult<Vec<Local>>>()?;
        if locals.len() != count {
            return Err(invalid(format!("{count} keys, but memory of {} blocks: give one for each key", locals.len())));
        }
        check_apart(usage, locals.iter().flat_map(|local| &local.ranges.0))?;
        Ok(locals)
    }

    /// Memory of an object, or of a list or tuple of objects, in order.
    ///
    /// # Errors
    /// `InvalidError` for what has no memory that can be used as asked.
    pub fn of(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Local> {
        let mut local = Local::default();
        if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            for part in object.try_iter()? {
                local.add(&part?, usage)?;
            }
        } else {
            local.add(object, usage)?;
        }
        Ok(local)
    }

    fn add(&mut self, object: &Bound<'_, PyAny>, usage: Use) -> PyResult<()> {
        if let Some(tensor) = Tensor::of(object)? {
            if !tensor.is_contiguous()? {
                return Err(invalid("the tensor is not contiguous: give tensor.contiguous(), or its contiguous parts in a list"));
            }
            if tensor.device_type()? != "cpu" {
                return Err(invalid("the tensor lies on a device: copy it to the host, or name its blocks in a BlockLayout"));
            }
            self.ranges.0.push(range_of(tensor.address()?, tensor.len_bytes()?)?);
            return Ok(());
        }
        let buffer = Export::of(object)?;
        if !buffer.is_contiguous() {
            return Err(invalid("the buffer is not contiguous: give a contiguous copy, or its contiguous parts in a list"));
        }
        if usage == Use::Write && buffer.is_read_only() {
            return Err(invalid(format!("{} is read-only: a pull writes to it", object.get_type().name()?)));
        }
        self.ranges.0.push(range_of(buffer.address(), buffer.len_bytes())?);
        self.buffers.push(buffer);
        Ok(())
    }
}

/// Refuses memory that is to be written and of which two stretches have a byte in common.
fn check_apart<'a>(usage: Use, ranges: impl IntoIterator<Item = &'a LocalRange>) -> PyResult<()> {
    if usage == Use::Read {
        return Ok(());
    }
    let mut sorted: Vec<(usize, usize)> = ranges.into_iter().map(|range| (range.address.addr().get(), range.len_bytes)).collect();
    sorted.retain(|&(_, len_bytes)| len_bytes > 0);
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[1].0 - pair[0].0 < pair[0].1) {
        Some(pair) => Err(invalid(format!("the memory at {:#x} is named twice: each byte takes one block", pair[1].0))),
        None => Ok(()),
    }
}

/// A stretch of memory by address.
pub fn range_of(address: usize, len_bytes: usize) -> PyResult<LocalRange> {
    if address.checked_add(len_bytes).is_none() {
        return Err(invalid(format!("{len_bytes} bytes at address {address:#x} do not fit the address space")));
    }
    match NonNull::new(std::ptr::with_exposed_provenance_mut(address)) {
        Some(address) => Ok(LocalRange { address, len_bytes }),
        None if len_bytes == 0 => Ok(LocalRange { address: NonNull::dangling(), len_bytes: 0 }),
        None => Err(invalid(format!("{len_bytes} bytes at address 0: the tensor has no memory"))),
    }
}

/// An object with an address and a length, as torch's tensors. Torch itself is never loaded.
pub struct Tensor<'a, 'py>(&'a Bound<'py, PyAny>);

impl<'a, 'py> Tensor<'a, 'py> {
    /// The object as a tensor, if it is one.
    pub fn of(object: &'a Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        Ok((object.hasattr("data_ptr")? && object.hasattr("nbytes")?).then_some(Tensor(object)))
    }

    pub fn address(&self) -> PyResult<usize> {
        self.0.call_method0("data_ptr")?.extract()
    }

    /// Size in bytes, gaps left out.
    pub fn len_bytes(&self) -> PyResult<usize> {
        self.0.getattr("nbytes")?.extract()
    }

    pub fn is_contiguous(&self) -> PyResult<bool> {
        self.0.call_method0("is_contiguous")?.extract()
    }

    pub fn device_type(&self) -> PyResult<String> {
        self.0.getattr("device")?.getattr("type")?.extract()
    }

    /// Device as a layout names it: `cpu`, or with the number that torch has for it, `cuda:1`.
    pub fn device(&self) -> PyResult<String> {
        let kind = self.device_type()?;
        let index: Option<u32> = if kind == "cpu" { None } else { self.0.getattr("device")?.getattr("index")?.extract()? };
        Ok(index.map_or_else(|| kind.clone(), |index| format!("{kind}:{index}")))
    }

    /// Size of its first dimension, and the distance of what belongs to two neighbours in it, in bytes.
    pub fn first_dimension(&self) -> PyResult<(usize, usize)> {
        let shape: Vec<usize> = self.0.getattr("shape")?.extract()?;
        let count = *shape.first().ok_or_else(|| invalid("a tensor without dimensions has no blocks"))?;
        let stride: usize = self.0.call_method1("stride", (0,))?.extract()?;
        let item_bytes: usize = self.0.call_method0("element_size")?.extract()?;
        Ok((count, stride * item_bytes))
    }

    /// What belongs to the first place of its first dimension.
    pub fn first_part(&self) -> PyResult<Bound<'py, PyAny>> {
        self.0.get_item(0)
    }
}
