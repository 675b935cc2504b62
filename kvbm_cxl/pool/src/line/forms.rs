// SPDX-License-Identifier: Apache-2.0
//! The lines of the regions, whichever structure a region has.

use super::{Line, Lines};
use crate::error::Result;
use crate::media::{
    Ask, Binding, CellClaim, ChunkHead, Claim, Claimant, DeathLine, Descriptor, FenceLine, FreeAck, FreeBox, GrantLine, HintLine, Identity,
    Intent, JoinBox, KeepMap, MediaLine, PinLine, Record, Region, RequestLine, Seat, SeatClaim, Splitter, StatsLine, Summary,
};

/// Runs `$body` with `$line` standing for the structure that fills a line of `$region`.
macro_rules! with_line_of {
    ($region:expr, $line:ident => $body:expr) => {
        with_line_of!(@match $region, $line => $body;
            Seat = Seat, Grant = GrantLine, Binding = Binding, Fence = FenceLine, Death = DeathLine, JoinBox = JoinBox,
            Identity = Identity, Summary = Summary, Request = RequestLine, Intent = Intent, Record = Record, Claim = Claim,
            FreeBox = FreeBox, FreeAck = FreeAck, ChunkHead = ChunkHead, KeepMap = KeepMap, Stats = StatsLine, Descriptor = Descriptor,
            Hint = HintLine, Pin = PinLine, CellClaim = CellClaim, Ask = Ask, Splitter = Splitter, Claimant = Claimant,
            SeatClaim = SeatClaim)
    };
    (@match $region:expr, $line:ident => $body:expr; $($name:ident = $structure:ty),*) => {
        match $region {
            $(Region::$name => {
                type $line = $structure;
                // A line must not be given to a structure of another region: the compiler sees both.
                const _: () = assert!(<$structure as MediaLine>::REGION as u32 == Region::$name as u32);
                $body
            })*
        }
    };
}

pub(crate) use with_line_of;

/// Line `index` of `region` as a format writes it: nothing in it, sealed.
pub fn empty_line(lines: &Lines, region: Region, index: u64) -> Line {
    with_line_of!(region, Form => lines.seal(index, <Form as bytemuck::Zeroable>::zeroed()))
}

/// Checks 64 bytes as line `index` of `region`, whatever structure that has.
///
/// # Errors
/// [`Error::BadLine`](crate::Error::BadLine) when they do not verify.
pub fn verify_line(lines: &Lines, region: Region, index: u64, line: &Line) -> Result<()> {
    with_line_of!(region, Form => lines.open::<Form>(index, line).map(drop))
}
