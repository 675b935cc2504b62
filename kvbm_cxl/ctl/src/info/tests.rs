// SPDX-License-Identifier: Apache-2.0
//! Tests of `info`.
use super::*;
use cxl_pool::limits::HINT_WINDOW;
use cxl_pool::media::CellClass;

/// Fills tables of this shape with keys at random places until one finds its window full; returns how many had room, on average.
fn filled(geometry: &Geometry, runs: u64) -> u64 {
    let (lines, stripes) = (geometry.hint_lines_per_stripe(), u64::from(geometry.stripes));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % end
    };
    let mut sum = 0;
    for _ in 0..runs {
        let mut used = vec![0; (lines * stripes) as usize];
        loop {
            let (stripe, line) = (below(stripes), below(lines));
            let mut window = (0..HINT_WINDOW).map(|step| (stripe * lines + (line + step) % lines) as usize);
            let Some(room) = window.find(|&line| used[line] < HINTS_PER_LINE) else { break };
            used[room] += 1;
            sum += 1;
        }
    }
    sum / runs
}

#[test]
fn the_hint_table_holds_about_as_many_blocks_as_it_says() {
    for (chunks, runs) in [(8, 400), (64, 100), (1024, 20), (16384, 3)] {
        let mut geometry = Geometry { cells_per_chunk: 16, stripes: 16, ..Geometry::with_len(1 << 30) };
        geometry.cells[0] = CellClass { cell_bytes: 64, chunks };
        let (told, found) = (hinted_before_eviction(&geometry), filled(&geometry, runs).min(geometry.cell_count()));
        assert!(told.abs_diff(found) * 10 <= found, "{told} of {} cells, and not {found}", geometry.cell_count());
    }
}
