// SPDX-License-Identifier: Apache-2.0
//! Where the blocks of a paged KV cache lie: in parts, one for each layer or each of its tensors, with a stride between blocks.

use crate::buffer::Export;
use crate::failure::invalid;
use crate::local::{Ranges, Tensor, Use, range_of};
use cxl_pool::copy::{After, LocalPlace, LocalRange, OnGpu};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use std::collections::HashSet;
use std::sync::Arc;

/// One part of every block.
#[derive(Clone, Copy, Debug)]
struct Part {
    address: usize,
    stride_bytes: usize,
    len_bytes: usize,
}

impl Part {
    fn end(&self, block_count: usize) -> usize {
        // Checked when the layout was made.
        self.address + (block_count - 1) * self.stride_bytes + self.len_bytes
    }
}

/// Blocks as calls without the interpreter's lock find them.
#[derive(Debug)]
pub struct Blocks {
    parts: Vec<Part>,
    block_count: usize,
}

impl Blocks {
    /// The memory of a block, whose number was checked.
    pub fn ranges(&self, block: usize) -> Vec<LocalRange> {
        let range = |part: &Part| range_of(part.address + block * part.stride_bytes, part.len_bytes).ok();
        self.parts.iter().filter_map(range).collect()
    }

    /// The memory of all of them, from the first byte of each part to the last.
    pub fn extents(&self) -> Ranges {
        let extent = |part: &Part| range_of(part.address, part.end(self.block_count) - part.address).ok();
        Ranges(self.parts.iter().filter_map(extent).collect())
    }
}

/// Memory of a paged KV cache.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct BlockLayout {
    pub blocks: Arc<Blocks>,
    #[pyo3(get)]
    block_count: usize,
    #[pyo3(get)]
    block_bytes: u64,
    #[pyo3(get)]
    device: String,
    gpu: Option<u32>,
    #[pyo3(get)]
    owner: Option<Py<PyAny>>,
    is_read_only: bool,
    _buffers: Vec<Export>,
}

impl BlockLayout {
    fn checked(parts: Vec<Part>, block_count: usize, device: String, owner: Option<Py<PyAny>>) -> PyResult<Self> {
        let gpu = gpu_of(&device)?;
        if parts.is_empty() || block_count == 0 {
            return Err(invalid("a layout has at least one part and one block"));
        }
        for part in &parts {
            if part.address == 0 || part.len_bytes == 0 {
                return Err(invalid(format!("a part of {} bytes at address {:#x} is none", part.len_bytes, part.address)));
            }
            if block_count > 1 && part.stride_bytes < part.len_bytes {
                return Err(invalid(format!("blocks of {} bytes at a stride of {} overlap", part.len_bytes, part.stride_bytes)));
            }
            let reach = (block_count - 1).checked_mul(part.stride_bytes).and_then(|reach| reach.checked_add(part.len_bytes));
            if reach.and_then(|reach| reach.checked_add(part.address)).is_none() {
                return Err(invalid(format!("{block_count} blocks at a stride of {} do not fit the address space", part.stride_bytes)));
            }
        }
        check_apart(&parts, block_count)?;
        let block_bytes = parts.iter().map(|part| part.len_bytes as u64).sum();
        let blocks = Arc::new(Blocks { parts, block_count });
        Ok(BlockLayout { blocks, block_count, block_bytes, device, gpu, owner, is_read_only: false, _buffers: Vec::new() })
    }

    pub fn len_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The GPU that the blocks lie on, where it is one.
    pub fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    /// Where the blocks lie, for copies that run after the work of a stream, or after an event: objects as torch has them.
    ///
    /// # Errors
    /// `InvalidError` for what is neither, and for blocks in the host's memory, whose use the caller has to have ended.
    pub fn place(&self, after: Option<&Bound<'_, PyAny>>) -> PyResult<LocalPlace> {
        let Some(device) = self.gpu else {
            return match after {
                None => Ok(LocalPlace::Host),
                Some(_) => Err(invalid("the blocks lie in the host's memory: no stream or event of a GPU is waited for")),
            };
        };
        let after = after.map_or(Ok(After::Nothing), after_of)?;
        Ok(LocalPlace::Gpu(OnGpu { device, after }))
    }

    /// Numbers of blocks as Python has them, one for each key.
    ///
    /// # Errors
    /// `InvalidError` for numbers that no block has, and for a pull into one block twice.
    pub fn block_ids(&self, ids: &Bound<'_, PyAny>, keys: usize, usage: Use) -> PyResult<Vec<usize>> {
        if usage == Use::Write && self.is_read_only {
            return Err(invalid("the layout is of read-only memory: a pull writes to it"));
        }
        let mut found = Vec::with_capacity(keys);
        for id in ids.try_iter()? {
            let id: i64 = id?.extract()?;
            match usize::try_from(id).ok().filter(|&id| id < self.block_count) {
                Some(id) => found.push(id),
                None => return Err(invalid(format!("block {id} does not exist: the layout has {}", self.block_count))),
            }
        }
        if found.len() != keys {
            return Err(invalid(format!("{keys} keys, but {} blocks: give one block for each key", found.len())));
        }
        let mut seen = HashSet::new();
        if usage == Use::Write
            && let Some(twice) = found.iter().find(|&&id| !seen.insert(id))
        {
            return Err(invalid(format!("block {twice} is named twice: each takes one key")));
        }
        Ok(found)
    }
}

/// Number of the GPU that a device's name is of; `None` for the host.
fn gpu_of(device: &str) -> PyResult<Option<u32>> {
    let number = match device {
        "cpu" => return Ok(None),
        "cuda" => Some(0),
        other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    match number {
        Some(number) => Ok(Some(number)),
        None => Err(invalid(format!("{device:?} is no device that blocks lie on: \"cpu\", \"cuda\" or \"cuda:N\""))),
    }
}

/// Refuses parts of which two have a byte in common: a pull would write it twice at a time.
fn check_apart(parts: &[Part], block_count: usize) -> PyResult<()> {
    let mut sorted: Vec<&Part> = parts.iter().collect();
    sorted.sort_by_key(|part| part.address);
    for (index, part) in sorted.iter().enumerate() {
        let end = part.end(block_count);
        for other in sorted[index + 1..].iter().take_while(|other| other.address < end) {
            // They may lie between each other only with the same stride, and then do not meet within it.
            let place = (other.address - part.address).checked_rem(part.stride_bytes).unwrap_or(0);
            let fits = place >= part.len_bytes && (place + other.len_bytes <= part.stride_bytes);
            if part.stride_bytes != other.stride_bytes || !fits {
                return Err(invalid(format!("the parts at {:#x} and {:#x} overlap", part.address, other.address)));
            }
        }
    }
    Ok(())
}

/// The work that copies follow: that of a stream, or up to an event; objects as torch has them.
///
/// # Errors
/// `InvalidError` for what is neither, and for an event that was never recorded.
fn after_of(object: &Bound<'_, PyAny>) -> PyResult<After> {
    if object.hasattr("cuda_stream")? {
        return Ok(After::Stream(object.getattr("cuda_stream")?.extract()?));
    }
    if object.hasattr("cuda_event")? {
        return match object.getattr("cuda_event")?.extract::<Option<u64>>()? {
            None | Some(0) => Err(invalid("the event was never recorded: record it after the work that the copy must follow")),
            Some(event) => Ok(After::Event(event)),
        };
    }
    Err(invalid(format!("{} is no stream and no event of a GPU", object.get_type().name()?)))
}

#[pymethods]
impl BlockLayout {
    #[new]
    #[pyo3(signature = (parts, block_count, *, owner=None, device="cpu"))]
    fn new(parts: Vec<(usize, usize, usize)>, block_count: usize, owner: Option<Py<PyAny>>, device: &str) -> PyResult<Self> {
        let part = |(address, stride_bytes, len_bytes)| Part { address, stride_bytes, len_bytes };
        Self::checked(parts.into_iter().map(part).collect(), block_count, device.into(), owner)
    }

    #[classmethod]
    fn of_tensors(_class: &Bound<'_, PyType>, tensors: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (mut parts, mut counts, mut devices, mut buffers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut is_read_only = false;
        // The tensors themselves: what they come out of may be an iterator that lets go of them, or a list that is changed later.
        let mut kept = Vec::new();
        for object in tensors.try_iter()? {
            let object = object?;
            kept.push(object.clone());
            let ((count, stride_bytes), address, len_bytes) = match Tensor::of(&object)? {
                Some(tensor) => {
                    let shape = tensor.first_dimension()?;
                    let first = if shape.0 > 0 { tensor.first_part()? } else { object.clone() };
                    let Some(first) = Tensor::of(&first)? else { return Err(invalid("a part of the tensor is no tensor")) };
                    if !first.is_contiguous()? {
                        return Err(invalid("the tensor is not contiguous within a block: put blocks first, or give several tensors"));
                    }
                    devices.push(tensor.device()?);
                    (shape, tensor.address()?, first.len_bytes()?)
                }
                None => {
                    let buffer = Export::of(&object)?;
                    let found = blocks_in(&buffer)?;
                    is_read_only |= buffer.is_read_only();
                    devices.push("cpu".into());
                    let address = buffer.address();
                    buffers.push(buffer);
                    (found.0, address, found.1)
                }
            };
            parts.push(Part { address, stride_bytes, len_bytes });
            counts.push(count);
        }
        let (Some(&count), Some(device)) = (counts.first(), devices.first()) else {
            return Err(invalid("a layout has at least one tensor"));
        };
        if counts.iter().any(|other| *other != count) || devices.iter().any(|other| other != device) {
            return Err(invalid(format!(
                "tensors of {counts:?} blocks on {devices:?}: each block has a part in every tensor, all on one device"
            )));
        }
        let kept = PyTuple::new(tensors.py(), kept)?.into_any().unbind();
        let layout = Self::checked(parts, count, device.clone(), Some(kept))?;
        Ok(BlockLayout { is_read_only, _buffers: buffers, ..layout })
    }

    fn __len__(&self) -> usize {
        self.block_count
    }

    fn __repr__(&self) -> String {
        let parts = self.blocks.parts.len();
        format!("BlockLayout({} blocks of {} bytes in {parts} parts on {})", self.block_count, self.block_bytes, self.device)
    }
}

/// Number and stride of the blocks of an array, and the length of each, in bytes.
fn blocks_in(buffer: &Export) -> PyResult<((usize, usize), usize)> {
    let (shape, strides) = (buffer.shape(), buffer.strides());
    let (Some((&count, rest)), Some((&stride, strides))) = (shape.split_first(), strides.split_first()) else {
        return Err(invalid("an array without dimensions has no blocks"));
    };
    let mut len_bytes = buffer.item_bytes();
    for (&size, &stride) in rest.iter().zip(strides).rev() {
        if size > 1 && usize::try_from(stride) != Ok(len_bytes) {
            return Err(invalid("the array is not contiguous within a block: put blocks first, or give several arrays"));
        }
        len_bytes *= size;
    }
    let stride = usize::try_from(stride).map_err(|_| invalid("the blocks of the array lie in reverse: give it the other way round"))?;
    Ok(((count, stride), len_bytes))
}
