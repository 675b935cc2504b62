// SPDX-License-Identifier: Apache-2.0
//! Layouts in memory that the tier must not touch.

use crate::bench::*;
use cxl_tier::Outcome;
use dynamo_memory::nixl::{MemType, NixlAgent, NixlDescriptor};
use dynamo_memory::{MemoryDescriptor, StorageKind, create_buffer};
use kvbm_physical::layout::PhysicalLayout;
use std::any::Any;

#[derive(Debug)]
struct Region {
    start: usize,
    len_bytes: usize,
    kind: StorageKind,
}

impl MemoryDescriptor for Region {
    fn addr(&self) -> usize {
        self.start
    }

    fn size(&self) -> usize {
        self.len_bytes
    }

    fn storage_kind(&self) -> StorageKind {
        self.kind
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        Some(NixlDescriptor { addr: self.start as u64, size: self.len_bytes, mem_type: MemType::Dram, device_id: 0 })
    }
}

fn layout_at(start: usize, kind: StorageKind) -> PhysicalLayout {
    let config = small(4);
    let region = create_buffer(Region { start, len_bytes: config.required_bytes(), kind });
    let builder = PhysicalLayout::builder(NixlAgent::new("foreign").unwrap()).with_config(config).fully_contiguous();
    builder.with_registered_regions(vec![region]).unwrap().build().unwrap()
}

#[test]
fn gpu_memory_files_and_the_pool_itself_are_refused() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let blocks = member.blocks();
    let keys = chain(2, 1);
    assert_eq!(put(&blocks, &keys, 1), all(Outcome::Done, 2));
    let pool = member.pool.lines().memory().address(0, 4096).unwrap().as_ptr().addr();
    let size = member.pool.lines().memory().len_bytes() as usize;
    // Addresses that a processor must not follow: there would be no test after that.
    let nowhere = 1 << 62;
    for layout in [
        layout_at(nowhere, StorageKind::Device(0)),
        layout_at(nowhere, StorageKind::Disk(3)),
        layout_at(pool + size / 2, StorageKind::Pinned),
        // One byte of it.
        layout_at(pool + size - 1, StorageKind::System),
    ] {
        // SAFETY: none of the memory is to be touched.
        let (stored, got) = unsafe { (blocks.put(&chain(2, 2), &layout, &[0, 1]), blocks.get(&keys, &layout, &[0, 1])) };
        assert_eq!((stored, got), (all(Outcome::Memory, 2), all(Outcome::Memory, 2)), "{layout:?}");
    }
    member.assert_clean();
    assert_eq!(get(&blocks, &keys, 1), all(Outcome::Done, 2));
}
