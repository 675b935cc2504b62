// SPDX-License-Identifier: Apache-2.0
//! An empty pool: every metadata line zero but for its checksum.

use cxl_pool::line::Lines;
use cxl_pool::media::*;

/// Writes every metadata line as formatting leaves it.
pub(crate) fn format(lines: &Lines) {
    for span in lines.layout().spans() {
        match span.region {
            Region::Seat => fill::<Seat>(lines, span),
            Region::Grant => fill::<GrantLine>(lines, span),
            Region::Binding => fill::<Binding>(lines, span),
            Region::Fence => fill::<FenceLine>(lines, span),
            Region::Death => fill::<DeathLine>(lines, span),
            Region::JoinBox => fill::<JoinBox>(lines, span),
            Region::Identity => fill::<Identity>(lines, span),
            Region::Summary => fill::<Summary>(lines, span),
            Region::Request => fill::<RequestLine>(lines, span),
            Region::Intent => fill::<Intent>(lines, span),
            Region::Record => fill::<Record>(lines, span),
            Region::Claim => fill::<Claim>(lines, span),
            Region::FreeBox => fill::<FreeBox>(lines, span),
            Region::FreeAck => fill::<FreeAck>(lines, span),
            Region::ChunkHead => fill::<ChunkHead>(lines, span),
            Region::KeepMap => fill::<KeepMap>(lines, span),
            Region::Stats => fill::<StatsLine>(lines, span),
            Region::Descriptor => fill::<Descriptor>(lines, span),
            Region::Hint => fill::<HintLine>(lines, span),
            Region::Pin => fill::<PinLine>(lines, span),
            Region::CellClaim => fill::<CellClaim>(lines, span),
            Region::Ask => fill::<Ask>(lines, span),
            Region::Splitter => fill::<Splitter>(lines, span),
            Region::Claimant => fill::<Claimant>(lines, span),
            Region::SeatClaim => fill::<SeatClaim>(lines, span),
        }
    }
}

fn fill<T: MediaLine>(lines: &Lines, span: &RegionSpan) {
    for index in 0..span.lines {
        let line = lines.seal(index, T::zeroed());
        lines.memory().write_line(span.offset + index * 64, &line).expect("the layout lies inside the memory");
    }
}
