// SPDX-License-Identifier: Apache-2.0

use super::usage::Excess;
use super::*;
use crate::media::CellClass;

fn cells() -> Cells {
    let mut geometry = Geometry { cells_per_chunk: 4, stripes: 1, ..Geometry::with_len(1 << 30) };
    geometry.cells[0] = CellClass { cell_bytes: 128, chunks: 8 };
    Cells::new(&geometry, PolicyKind::Lru)
}

fn block(key: u8) -> Descriptor {
    Descriptor { key: [key; 16], namespace: [9; 16], state: Descriptor::READY, ..Descriptor::default() }
}

#[test]
fn a_cell_is_in_one_list_at_a_time() {
    let mut cells = cells();
    cells.add_chunk(2, 0);
    (8..12).for_each(|cell| cells.set_free(cell));
    let mut taken = Few::new();
    cells.take_free(0, 9, &mut taken);
    assert_eq!(taken[..], [8, 9, 10, 11]);
    assert_eq!(cells.counts(0), (0, 0, 4));
    cells.set_ready(8, block(1), None, QueueEnd::Young, 7).unwrap();
    cells.set_ready(9, block(2), Some([1; 16]), QueueEnd::Young, 7).unwrap();
    cells.quarantine(10);
    cells.set_free(11);
    assert_eq!(cells.counts(0), (1, 2, 4));
    assert_eq!(cells.share(&[9; 16]), Share { blocks: 2, cell_bytes: 256 });
    let mut candidates = Vec::new();
    cells.victims(0, 1, 8, &mut candidates);
    assert_eq!(candidates[0].cell, 8);
    assert_eq!(cells.settle(8, Verdict::Evicted), Some(block(1)));
    assert_eq!((cells.state(8), cells.ready(8), cells.counts(0)), (Some(OwnedCellState::Busy), None, (1, 1, 4)));
    cells.set_free(8);
    assert_eq!(cells.share(&[9; 16]), Share { blocks: 1, cell_bytes: 128 });
    assert!(cells.take_ready(FoundBlock::new(8, &block(1))).is_none());
    cells.quarantine(8);
    assert_eq!(cells.take_quarantined(2), [8, 10]);
    cells.quarantine(10);
    assert_eq!((cells.count_quarantined(), cells.take_quarantined(2), cells.count_quarantined()), (1, vec![10], 0));
    cells.set_bad(11);
    cells.take_free(0, 9, &mut taken);
    assert_eq!((taken.len(), cells.counts(0), cells.state(11)), (4, (0, 1, 4), Some(OwnedCellState::Bad)));
    assert!(cells.emptiest(0).is_empty() && !cells.is_all_free(2));
    // One that was there before is not taken for the one that is there now.
    let now = FoundBlock::new(9, &block(2));
    assert_eq!(cells.take_ready(FoundBlock::new(9, &Descriptor { seq: 1, ..block(2) })), None);
    assert_eq!(cells.take_ready(FoundBlock::new(9, &Descriptor { incarnation: 1, ..block(2) })), None);
    assert_eq!((cells.take_ready(now), cells.take_ready(now)), (Some(block(2)), None));
    cells.set_ready(9, block(2), None, QueueEnd::Young, 8).unwrap();
    assert_eq!(cells.remove_chunk(2), [(9, block(2))]);
    assert_eq!((cells.counts(0), cells.usage.shares().len()), ((0, 0, 0), 0));
}

#[test]
fn a_namespace_has_a_block_until_it_is_gone() {
    let mut cells = cells();
    cells.add_chunk(0, 0);
    cells.set_ready(0, block(1), None, QueueEnd::Young, 7).unwrap();
    cells.set_ready(1, block(2), None, QueueEnd::Young, 7).unwrap();
    let both = Share { blocks: 2, cell_bytes: 256 };
    let excess = |bytes, are_going, settled| Excess { bytes, are_going, settled };
    assert_eq!((cells.share(&[9; 16]), cells.usage.excess(&[9; 16], 200)), (both, excess(56, false, 0)));
    // On its way out, and back because a host has pinned it.
    assert_eq!(cells.take_ready(FoundBlock::new(0, &block(1))), Some(block(1)));
    assert_eq!((cells.share(&[9; 16]), cells.usage.excess(&[9; 16], 200)), (both, excess(56, true, 0)));
    cells.set_ready(0, block(1), None, QueueEnd::Young, 8).unwrap();
    assert_eq!((cells.share(&[9; 16]), cells.usage.excess(&[9; 16], 200)), (both, excess(56, false, 1)));
    // On its way out, and gone, whatever becomes of the cell.
    cells.take_ready(FoundBlock::new(0, &block(1)));
    cells.set_bad(0);
    assert_eq!(cells.share(&[9; 16]), Share { blocks: 1, cell_bytes: 128 });
    cells.take_ready(FoundBlock::new(1, &block(2)));
    cells.remove_chunk(0);
    assert!(cells.usage.shares().is_empty());
}

#[test]
fn a_chunk_that_ran_empty_is_passed_over() {
    let mut cells = cells();
    (0..2).for_each(|chunk| cells.add_chunk(chunk, 0));
    (0..8).for_each(|cell| cells.set_free(cell));
    let mut taken = Few::new();
    cells.take_free(0, 4, &mut taken);
    cells.take_free(0, 1, &mut taken);
    assert_eq!(taken[..], [0, 1, 2, 3, 4]);
    // One that comes back is the first again.
    cells.set_free(2);
    cells.take_free(0, 9, &mut taken);
    assert_eq!((&taken[5..], cells.counts(0)), (&[2, 5, 6, 7][..], (0, 0, 8)));
}

#[test]
fn a_draining_chunk_gives_nothing_out() {
    let mut cells = cells();
    cells.add_chunk(0, 0);
    (0..4).for_each(|cell| cells.set_free(cell));
    cells.drain(0, true);
    let mut taken = Few::new();
    cells.take_free(0, 1, &mut taken);
    assert!(taken.is_empty() && cells.is_all_free(0));
    cells.drain(0, false);
    cells.take_free(0, 1, &mut taken);
    assert_eq!(taken[..], [0]);
    assert!(!cells.is_all_free(0));
}
