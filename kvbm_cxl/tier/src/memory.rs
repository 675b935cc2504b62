// SPDX-License-Identifier: Apache-2.0
//! Host memory for layouts of workers without a GPU, and for tests: zeroed, aligned to pages, not registered with any NIXL backend.

use crate::error::{Error, Result};
use dynamo_memory::nixl::{MemType, NixlAgent, NixlDescriptor};
use dynamo_memory::{Buffer, MemoryDescriptor, StorageKind, create_buffer};
use kvbm_physical::layout::{BlockDimension, LayoutConfig, PhysicalLayout};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ptr::NonNull;

const PAGE_BYTES: usize = 4096;

/// Memory of this process.
#[derive(Debug)]
pub struct HostMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is plain memory, and this type reads and writes none of it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// So many bytes of zeros.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(len_bytes: usize) -> Result<HostMemory> {
        let refused = |kind: std::io::ErrorKind| Error::Memory { len_bytes, source: kind.into() };
        let layout = Layout::from_size_align(len_bytes, PAGE_BYTES).map_err(|_| refused(std::io::ErrorKind::InvalidInput))?;
        if len_bytes == 0 {
            return Err(refused(std::io::ErrorKind::InvalidInput));
        }
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory))?;
        Ok(HostMemory { start, layout })
    }

    fn buffer(len_bytes: usize) -> Result<Buffer> {
        Ok(create_buffer(HostMemory::new(len_bytes)?))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and its users hold this value.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl MemoryDescriptor for HostMemory {
    fn addr(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    fn size(&self) -> usize {
        self.layout.size()
    }

    fn storage_kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    // A layout cannot be made without one.
    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        Some(NixlDescriptor { addr: self.addr() as u64, size: self.size(), mem_type: MemType::Dram, device_id: 0 })
    }
}

/// How the blocks of a layout lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// One region, block after block.
    Contiguous,
    /// A region for each layer.
    LayerSeparate(BlockDimension),
}

/// A layout in host memory. NIXL's library has to be loadable, but none of its backends.
///
/// # Errors
/// As KVBM's builder of layouts, or no memory.
pub fn host_layout(agent: NixlAgent, config: &LayoutConfig, lies: Lies) -> std::result::Result<PhysicalLayout, Box<dyn std::error::Error>> {
    let builder = PhysicalLayout::builder(agent).with_config(config.clone());
    let all_bytes = config.required_bytes();
    Ok(match lies {
        Lies::Contiguous => builder.fully_contiguous().with_registered_regions(vec![HostMemory::buffer(all_bytes)?])?.build()?,
        Lies::LayerSeparate(dimension) => {
            let layers = (0..config.num_layers).map(|_| HostMemory::buffer(all_bytes / config.num_layers));
            builder.layer_separate(dimension).with_registered_regions(layers.collect::<Result<_>>()?)?.build()?
        }
    })
}
